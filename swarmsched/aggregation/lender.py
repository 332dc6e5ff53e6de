"""The lender: what a node gives to aggregation, and for whom.  It decides on fresh requests, by what it has measured.

Offered are a quarter of the available memory, half of the link, and the cores that no job of this node has booked.
Shards of a job that runs here are asked for by this node itself: they are refused for want of memory alone, since that
job's ranks wait while its rounds are merged.  A lease is never broken: where jobs take the cores away, or rounds come
to wait, the lender asks a shard's broker to have it hosted elsewhere, and goes on until that is done.  A lease that
nobody renews ends.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from swarmsched.aggregation.message import (
    AggregationHosted,
    AggregationLease,
    AggregationMove,
    AggregationQuote,
    AggregationQuoted,
    AggregationRelease,
    AggregationRenewal,
    HostedShard,
    LeaseName,
)
from swarmsched.aggregation.packing import LOSS_MOST, ROUNDING, Capacity, burst_s, idle, problem, wait_s
from swarmsched.effects import Announce, DropShard, Effect, HostShard, SendPeer
from swarmsched.events import AggregationRead
from swarmsched.ids import NodeId
from swarmsched.shards import AggregationRoom, RangeKey, ShardLoad, ShardOrder, ShardReading

HOLD_S = 5.0
LEASE_S = 20.0
MEMORY_SHARE = 0.25  # of what is available, what the aggregator has taken of it included
LINK_SHARE = 0.5
UNKNOWN_LINK_MBIT_S = 1_000  # where no driver tells a speed, and no operator
NEW_WEIGHT = 0.3  # of a round in the average of those before it
SHARDS_MAX = 256
SLOW_ROUNDS = 5
PAUSE_S = 60.0  # between two shards that are offered away: what one takes is known only when it is gone
WORST = -1  # ranks below all: of a node that is to be left
ROOM_STEP = AggregationRoom(100, 2**26, 2**22)  # so that what is told changes rarely


@dataclass(slots=True)
class _Lease:
    """One range here: held for a broker until its order comes, and leased from then on."""

    name: LeaseName
    broker: NodeId
    plan: tuple[int, int]
    load: ShardLoad
    ends_s: float
    order: ShardOrder | None = None
    version: int = 0
    wait_s: float = 0.0
    slow_rounds: int = 0  # in a row
    connected: int = 0
    rounds: int = 0  # that were known when it was looked at last
    cpu_s: float = 0.0
    link_bytes: int = 0
    since_s: float = field(default=math.nan)  # when the last of them was seen


class LentShard(HostedShard, kw_only=True):
    """A lease as people see it."""

    broker: NodeId
    size: int
    connected: int


class Lender:
    """Books of one node's aggregator.  Times are seconds on the node's monotonic clock."""

    def __init__(self, me: NodeId, free_cores: Callable[[], int], takes_work: Callable[[], bool]) -> None:
        """`takes_work`: false while the node drains."""
        self._me = me
        self._free_cores, self._takes_work = free_cores, takes_work
        self._offer = AggregationRead()
        self._link = 0.0
        self._leases: dict[RangeKey, _Lease] = {}
        self._offered_away_s = -math.inf
        self.counters = dict.fromkeys(("granted", "refused", "expired", "offered_away"), 0)

    # What brokers ask.

    def quote(self, sender: NodeId, asked: AggregationQuote, now_s: float) -> list[Effect]:
        """Keep the room for a while, or say why not."""
        key = asked.lease.key
        present, load = self._leases.get(key), self._expected(asked.load)
        loads, capacity = self._booked_with(key, load, sender)
        left = idle([*loads.values()], capacity)
        refusal = self._refusal(sender, asked.lease, asked.plan, loads, capacity)
        if not refusal and (left, self._me) <= (asked.above_idle, asked.above_node):
            refusal = f"{left / 10:g}% would be left idle here, no more than where it is"
        if refusal:
            self.counters["refused"] += 1
            return [SendPeer(sender, AggregationQuoted(asked.lease, refusal))]
        if present is None or present.order is None:  # a lease stays as it is until its successor's order is here
            self._leases[key] = _Lease(asked.lease, sender, asked.plan, load, now_s + HOLD_S)
        waits_s = wait_s([each for other, each in loads.items() if other != key], capacity)
        return [SendPeer(sender, AggregationQuoted(asked.lease, idle=left, wait_s=min(waits_s, 1e9)))]

    def lease(self, sender: NodeId, asked: AggregationLease, now_s: float) -> list[Effect]:
        """Host it, or host it by another plan; a hold whose time is over is judged anew."""
        key = asked.lease.key
        former = self._leases.get(key)
        present = former if former is not None and former.name == asked.lease else None
        if present is None:
            load = self._expected(asked.load)
            loads, capacity = self._booked_with(key, load, sender)
            if self._refusal(sender, asked.lease, asked.order.plan, loads, capacity):
                self.counters["refused"] += 1
                return [SendPeer(sender, AggregationHosted(self._offer.place, lost=(asked.lease,)))]
            present = _Lease(asked.lease, sender, asked.order.plan, load, now_s)
            self._leases[key] = present
        elif asked.order.plan < present.plan:
            return []  # it comes late
        self.counters["granted"] += present.order is None
        is_hosted = former is not None and former.order == asked.order
        present.order, present.plan, present.ends_s = asked.order, asked.order.plan, now_s + LEASE_S
        present.load = replace(present.load, memory_bytes=asked.order.load.memory_bytes)
        return [*([] if is_hosted else [HostShard(asked.order)]), *self._tell(sender, [present])]

    def renew(self, sender: NodeId, asked: AggregationRenewal, now_s: float) -> list[Effect]:
        """The broker still wants them."""
        known, lost = [], []
        for name in asked.leases:
            lease = self._leases.get(name.key)
            if lease is None or (lease.name, lease.broker) != (name, sender) or lease.order is None:
                lost.append(name)
            else:
                lease.ends_s = now_s + LEASE_S
                known.append(lease)
        return self._tell(sender, known, tuple(lost))

    def release(self, sender: NodeId, asked: AggregationRelease) -> list[Effect]:
        """The broker wants them no more."""
        found = [lease for name in asked.leases if (lease := self._leases.get(name.key)) and lease.name == name]
        ended = [lease for lease in found if lease.broker == sender]
        return [effect for lease in ended for effect in self._end(lease)]

    # What the driver tells.

    def read(self, told: AggregationRead, now_s: float) -> list[Effect]:
        """What this node gives, where its aggregator is, and how its shards are."""
        before, self._offer = self._offer, told
        for reading in told.shards:
            lease = self._leases.get(reading.key)
            if lease is not None:
                _measure(lease, reading, now_s)
        leased = [each for each in self._leases.values() if each.order is not None]
        effects = self._offer_away(leased, now_s)
        if told.place != before.place:
            for broker in sorted({each.broker for each in leased}):
                effects += self._tell(broker, [each for each in leased if each.broker == broker])
        return effects

    def has_link(self, mbit_s: int) -> None:
        """How fast the network is over which ranks train, each way; 0: not known."""
        self._link = LINK_SHARE * (mbit_s or UNKNOWN_LINK_MBIT_S) * 1e6 / 8

    def on_timer(self, now_s: float) -> list[Effect]:
        """End what nobody renews."""
        ended = [each for each in self._leases.values() if each.ends_s <= now_s]
        self.counters["expired"] += sum(each.order is not None for each in ended)
        return [effect for lease in ended for effect in self._end(lease)]

    @property
    def next_deadline_s(self) -> float:
        """When the first hold or lease ends."""
        return min((each.ends_s for each in self._leases.values()), default=math.inf)

    # What the outside reads.

    @property
    def room(self) -> AggregationRoom | None:
        """What is left for other nodes' jobs, roughly.  None of a node that gives nothing."""
        if not self._offered_bytes or not self._takes_work():
            return None
        loads, capacity = self._booked()
        cores = capacity.cores - sum(each.cores for each in loads.values())
        link = capacity.link - sum(each.link_bytes_per_s for each in loads.values())
        memory_bytes = self._offered_bytes - sum(each.memory_bytes for each in loads.values())
        return AggregationRoom(
            _rounded(1_000 * cores, ROOM_STEP.core_ms),
            _rounded(memory_bytes, ROOM_STEP.memory_bytes),
            _rounded(link, ROOM_STEP.link_bytes_per_s),
        )

    @property
    def shards(self) -> tuple[LentShard, ...]:
        """All that is hosted here, by range."""
        by_range = sorted(self._leases.items(), key=lambda item: (item[0].job_id, item[0].attempt, item[0].start))
        return tuple(
            LentShard(
                each.name, each.load, each.version, each.wait_s, broker=each.broker, size=each.order.size,
                connected=each.connected,
            )
            for _, each in by_range
            if each.order is not None
        )  # fmt: skip

    def validate(self) -> None:
        """Keys are those of the leases, and not more of them than is kept."""
        assert all(key == each.name.key for key, each in self._leases.items())
        assert all(each.order is None or each.order.key == key for key, each in self._leases.items())
        assert len(self._leases) <= SHARDS_MAX

    # Room.

    @property
    def _offered_bytes(self) -> int:
        return int(MEMORY_SHARE * self._offer.memory_bytes)

    def _refusal(
        self,
        sender: NodeId,
        name: LeaseName,
        plan: tuple[int, int],
        loads: Mapping[RangeKey, ShardLoad],
        capacity: Capacity,
    ) -> str:
        present, load = self._leases.get(name.key), loads[name.key]
        if present is not None and not _succeeds(present, sender, name, plan):
            return "another rank of this job has this range hosted here"
        if not self._offered_bytes:
            return "this node gives nothing to aggregation"
        if len(loads) > SHARDS_MAX:
            return f"this node hosts {SHARDS_MAX} ranges already"
        left = self._offered_bytes - sum(each.memory_bytes for key, each in loads.items() if key != name.key)
        if load.memory_bytes > left:
            return f"it takes {load.memory_bytes} bytes, and {max(0, left)} may be taken here"
        if sender == self._me:
            return ""
        if not self._takes_work():
            return "this node takes no new work"
        return problem([*loads.values()], capacity)

    def _booked(self) -> tuple[dict[RangeKey, ShardLoad], Capacity]:
        """What there is, and what this node gives to it."""
        loads = {key: lease.load for key, lease in self._leases.items()}
        return loads, self._capacity(loads)

    def _booked_with(
        self, key: RangeKey, load: ShardLoad, sender: NodeId
    ) -> tuple[dict[RangeKey, ShardLoad], Capacity]:
        """The same, were that range here as well, or with another load."""
        loads = {other: lease.load for other, lease in self._leases.items() if other != key} | {key: load}
        return loads, self._capacity(loads, also=key if sender == self._me else None)

    def _capacity(self, loads: Mapping[RangeKey, ShardLoad], also: RangeKey | None = None) -> Capacity:
        """Shards of jobs that run here take those jobs' cores."""
        own = {key for key, lease in self._leases.items() if lease.broker == self._me} | {also}
        return Capacity(self._free_cores() + sum(load.cores for key, load in loads.items() if key in own), self._link)

    def _expected(self, load: ShardLoad) -> ShardLoad:
        """What is not measured is taken to be a tenth of its period at most: who has it more often trains no faster."""
        if load.is_measured or not self._link:
            return load
        burst = burst_s(load, Capacity(math.inf, self._link))
        return replace(load, period_s=max(load.period_s, burst / LOSS_MOST))

    # Leases.

    def _tell(self, broker: NodeId, leases: Iterable[_Lease], lost: Sequence[LeaseName] = ()) -> list[Effect]:
        shards = tuple(HostedShard(each.name, each.load, each.version, each.wait_s) for each in leases)
        return [SendPeer(broker, AggregationHosted(self._offer.place, shards, tuple(lost)))] if shards or lost else []

    def _offer_away(self, leased: Sequence[_Lease], now_s: float) -> list[Effect]:
        """One shard, which takes the most, where this node has too many of them; and the next after a while."""
        loads, capacity = self._booked()
        moving, left, why = list(leased), idle([*loads.values()], capacity), ""
        if not self._takes_work():
            moving = [each for each in leased if each.broker != self._me]
            left, why = WORST, "it takes no new work"
        elif sum(each.cores for each in loads.values()) > capacity.cores + ROUNDING:
            moving = [each for each in leased if each.broker != self._me]
            why = "jobs have taken its cores"
        elif any(each.slow_rounds >= SLOW_ROUNDS for each in leased):
            why = f"rounds wait for more than {LOSS_MOST:.0%} of their periods"
        if not why or not moving or now_s < self._offered_away_s + PAUSE_S:
            return []
        self._offered_away_s = now_s
        for each in leased:
            each.slow_rounds = 0
        largest = max(moving, key=lambda each: (burst_s(each.load, capacity) / each.load.period_s, str(each.name.key)))
        self.counters["offered_away"] += 1
        key = largest.name.key
        text = f"{self._me} asks to have the range {key} hosted by another node: {why}"
        told = Announce("aggregation.crowded", text, job_id=key.job_id, node=self._me)
        return [told, SendPeer(largest.broker, AggregationMove(largest.name, left))]

    def _end(self, lease: _Lease) -> list[Effect]:
        del self._leases[lease.name.key]
        return [DropShard(lease.name.key)] if lease.order is not None else []


def _rounded(amount: float, step: int) -> int:
    return max(0, int(amount // step) * step)


def _succeeds(present: _Lease, broker: NodeId, name: LeaseName, plan: tuple[int, int]) -> bool:
    """Whether a broker may have another lease in the place of this: of one broker the later, of several that of the
    newer plan."""
    if broker == present.broker:
        return name.number >= present.name.number
    return plan > present.plan


def _measure(lease: _Lease, reading: ShardReading, now_s: float) -> None:
    """What the rounds since the last look have taken on average, weighed against those before them."""
    lease.version, lease.connected = max(0, reading.version), reading.connected
    count = reading.rounds - lease.rounds
    if count < 0:  # another life of the aggregator
        lease.cpu_s, lease.link_bytes, lease.since_s = 0.0, 0, math.nan
        count = reading.rounds
    elif not count:
        return
    if count and now_s > lease.since_s:
        measured = ShardLoad(
            max(0.0, reading.cpu_s - lease.cpu_s) / count,
            max(0.0, float(reading.link_bytes - lease.link_bytes)) / count,
            (now_s - lease.since_s) / count,
            lease.load.memory_bytes,
            is_measured=True,
        )
        lease.load = _blended(lease.load, measured) if lease.load.is_measured else measured
        lease.wait_s = reading.wait_s
        is_slow = reading.wait_s > LOSS_MOST * lease.load.period_s
        lease.slow_rounds = lease.slow_rounds + count if is_slow else 0
    lease.rounds, lease.cpu_s, lease.link_bytes = reading.rounds, reading.cpu_s, reading.link_bytes
    lease.since_s = now_s


def _blended(before: ShardLoad, new: ShardLoad) -> ShardLoad:
    def mean(one: float, other: float) -> float:
        return (1 - NEW_WEIGHT) * one + NEW_WEIGHT * other

    return replace(
        new,
        cpu_s=mean(before.cpu_s, new.cpu_s),
        link_bytes=mean(before.link_bytes, new.link_bytes),
        period_s=mean(before.period_s, new.period_s),
    )
