"""Quotes and leases among some nodes in virtual time: what is given, to whom, and for how long."""

import heapq
import random
from collections.abc import Sequence
from itertools import count

import pytest
from msgspec.structs import replace

from swarmsched.aggregation.broker import Broker
from swarmsched.aggregation.lender import HOLD_S, LEASE_S, MEMORY_SHARE, Lender
from swarmsched.aggregation.message import (
    AggregationHosted,
    AggregationLease,
    AggregationMove,
    AggregationQuote,
    AggregationQuoted,
    AggregationRelease,
    AggregationRenewal,
    LeaseName,
)
from swarmsched.effects import DropShard, Effect, HostShard, SendPeer, ShardPlaced
from swarmsched.events import AggregationRead, ShardWanted
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.shards import AggregatorPlace, RangeKey, ShardLoad, ShardOrder, ShardReading

MIB = 2**20
N0, N1, N2, N3, N9 = (NodeId(f"n{number}") for number in (0, 1, 2, 3, 9))
TASK = TaskKey(JobId("j1"), 1)


def order(start: int = 0, size: int = MIB, plan: tuple[int, int] = (1, 1), job: str = "j1") -> ShardOrder:
    """16 bytes for each element."""
    key = RangeKey(JobId(job), 1, start)
    return ShardOrder(key, size, "layout", "secret", 1.0, 0.0, True, plan, ("0", "1"), 0)


class Market:
    """Nodes with a broker and a lender each.  What they send takes 10 ms; those that are away stand still."""

    def __init__(self, rooms: Sequence[int], seed: int = 1, cores: int = 8, loss: float = 0.0) -> None:
        """`rooms`: MiB that each gives."""
        self.now_s = 0.0
        self.chance, self.loss = random.Random(seed), loss
        self.names = [NodeId(f"n{number}") for number in range(len(rooms))]
        self.rooms = dict(zip(self.names, rooms, strict=True))
        self.lenders = {name: Lender(name, lambda: cores, lambda: True) for name in self.names}
        self.brokers = {name: self.broker(name, 1) for name in self.names}
        self.hosted: dict[NodeId, dict[RangeKey, ShardOrder]] = {name: {} for name in self.names}
        self.places: dict[tuple[TaskKey, int], ShardPlaced] = {}
        self.away: set[NodeId] = set()
        self.queue: list[tuple[float, int, NodeId, NodeId, object]] = []
        self.numbers = count()
        self.sent: dict[type, int] = {}
        for name in self.names:
            self.lenders[name].has_link(0)
            self.read(name)

    def broker(self, name: NodeId, generation: int) -> Broker:
        """One that knows nothing."""
        others = [each for each in self.names if each != name]
        return Broker(name, generation, random.Random(str(name)), lambda load, now_s: others)

    def read(self, name: NodeId, *shards: ShardReading) -> None:
        place = AggregatorPlace(f"{name}:1", "print")
        told = AggregationRead(place, int(self.rooms[name] * MIB / MEMORY_SHARE), shards)
        self.perform(name, self.lenders[name].read(told, self.now_s))

    def want(self, name: NodeId, wanted: ShardOrder, task: TaskKey = TASK) -> None:
        self.perform(name, self.brokers[name].want(ShardWanted.about(task, wanted), self.now_s))

    def perform(self, name: NodeId, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendPeer(recipient, message):
                    self.sent[type(message)] = self.sent.get(type(message), 0) + 1
                    if self.chance.random() >= self.loss or recipient == name:
                        heapq.heappush(self.queue, (self.now_s + 0.01, next(self.numbers), recipient, name, message))
                case HostShard(wanted):
                    self.hosted[name][wanted.key] = wanted
                case DropShard(key):
                    del self.hosted[name][key]
                case ShardPlaced():
                    self.places[effect.key, effect.start] = effect
        booked = sum(each.load.memory_bytes for each in self.hosted[name].values())
        assert booked <= self.rooms[name] * MIB
        self.lenders[name].validate()
        self.brokers[name].validate()

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            due = {
                name: min(self.lenders[name].next_deadline_s, self.brokers[name].next_deadline_s) for name in self.names
            }
            next_s = min([*(s for name, s in due.items() if name not in self.away), until_s])
            if self.queue and self.queue[0][0] <= next_s:
                self.now_s, _, recipient, sender, message = heapq.heappop(self.queue)
                if not self.away & {recipient, sender}:
                    self.deliver(recipient, sender, message)
                continue
            self.now_s = max(self.now_s, next_s)
            for name in self.names:
                if name not in self.away and due[name] <= self.now_s:
                    self.perform(name, self.lenders[name].on_timer(self.now_s))
                    self.perform(name, self.brokers[name].on_timer(self.now_s))

    def deliver(self, to: NodeId, sender: NodeId, message: object) -> None:
        lender, broker = self.lenders[to], self.brokers[to]
        match message:
            case AggregationQuote():
                effects = lender.quote(sender, message, self.now_s)
            case AggregationLease():
                effects = lender.lease(sender, message, self.now_s)
            case AggregationRenewal():
                effects = lender.renew(sender, message, self.now_s)
            case AggregationRelease():
                effects = lender.release(sender, message)
            case AggregationMove():
                effects = broker.move(sender, message, self.now_s)
            case AggregationQuoted():
                effects = broker.quoted(sender, message, self.now_s)
            case _:
                assert isinstance(message, AggregationHosted)
                effects = broker.hosted(sender, message, self.now_s)
        self.perform(to, effects)

    def hosts(self, key: RangeKey) -> list[NodeId]:
        return [name for name in self.names if key in self.hosted[name]]


def test_the_own_node_hosts_what_it_has_room_for_and_nobody_else_is_asked():
    market = Market([100, 100, 100])
    market.want(N0, order())
    market.run(60)
    assert market.hosts(order().key) == [N0]
    assert market.places[TASK, 0].place.address == "n0:1"
    assert market.sent[AggregationQuote] == 1
    assert market.lenders[N0].counters == {"granted": 1, "refused": 0, "expired": 0, "offered_away": 0}


def test_without_room_two_others_are_asked_and_the_fullest_that_suffices_hosts_it():
    market = Market([0, 100, 100])
    busy = replace(order(job="other").load, cpu_s=2.0)
    taken = LeaseName(order(job="other").key, (1, 1))
    market.perform(N2, market.lenders[N2].lease(N9, AggregationLease(taken, order(job="other"), busy), 0.0))
    market.away.add(N9)
    market.want(N0, order())
    market.run(10)
    assert market.hosts(order().key) == [N2]
    assert market.places[TASK, 0].place.address == "n2:1"
    assert market.sent[AggregationQuote] == 3
    assert market.lenders[N1].next_deadline_s > 1e9, "what was kept there is free again"


def test_where_nobody_has_room_the_rank_hears_why_and_nothing_is_kept():
    market = Market([10, 3, 0, 8])
    market.want(N0, order())
    market.run(30)
    told = market.places[TASK, 0]
    assert told.code == "no_room"
    assert told.problem.startswith(f"size {MIB} is not hosted here: it takes {16 * MIB} bytes, and {10 * MIB} may be")
    assert "nor by 3 others" in told.problem
    assert not any(market.hosted.values())
    assert all(lender.next_deadline_s > 1e9 for lender in market.lenders.values())
    market.rooms[N3] = 100
    market.read(N3)
    market.want(N0, order())
    market.run(40)
    assert market.hosts(order().key) == [N3]


def test_a_lease_ends_when_its_broker_is_silent_and_when_its_task_is_over():
    market = Market([0, 100])
    market.want(N0, order())
    market.run(5 * LEASE_S)
    assert market.hosts(order().key) == [N1], "it is renewed"
    market.away.add(N0)
    market.run(6 * LEASE_S + 1)
    assert market.hosts(order().key) == []
    assert market.lenders[N1].counters["expired"] == 1
    market.away.clear()
    market.run(7 * LEASE_S + 5)
    assert market.hosts(order().key) == [N1], "the task still wants it"
    market.perform(N0, market.brokers[N0].give_up(TASK))
    market.run(7 * LEASE_S + 6)
    assert market.hosts(order().key) == []


def test_a_host_that_falls_silent_or_has_forgotten_is_replaced():
    market = Market([0, 100, 100])
    market.want(N0, order())
    market.run(5)
    first = market.hosts(order().key)[0]
    market.away.add(first)
    market.run(10 + LEASE_S + 10)
    second = NodeId(market.places[TASK, 0].place.address.removesuffix(":1"))
    assert {first, second} == {N1, N2}
    market.lenders[second] = Lender(second, lambda: 8, lambda: True)  # its agent has started again
    market.lenders[second].has_link(0)
    market.hosted[second].clear()
    market.read(second)
    market.away.clear()
    market.run(60)
    (third,) = market.hosts(order().key)
    assert market.places[TASK, 0].place.address == f"{third}:1"


def test_a_hold_that_no_order_follows_is_over_soon():
    market = Market([100, 100])
    held = AggregationQuote(LeaseName(order().key, (1, 1)), (1, 1), replace(order().load, memory_bytes=90 * MIB))
    market.perform(N1, market.lenders[N1].quote(N0, held, 0.0))
    assert market.lenders[N1].room.memory_bytes == 0
    market.run(HOLD_S)
    assert market.lenders[N1].room.memory_bytes == 64 * MIB


def test_an_agent_that_starts_again_gives_later_numbers_and_what_it_had_forgotten_ends():
    market = Market([0, 100, 100])
    market.want(N0, order())
    market.run(5)
    market.brokers[N0] = market.broker(N0, 2)
    market.want(N0, order())
    market.run(5 + LEASE_S + 5)
    assert len(market.hosts(order().key)) == 1
    assert market.places[TASK, 0].place.address == f"{market.hosts(order().key)[0]}:1"


def test_a_newer_plan_goes_to_whoever_hosts_it_and_an_older_one_is_refused():
    market = Market([0, 100])
    market.want(N0, order(plan=(1, 2)))
    market.run(5)
    market.want(N0, order(plan=(1, 3)))
    market.run(10)
    assert market.hosted[N1][order().key].plan == (1, 3)
    market.want(N0, order(plan=(1, 1)))
    assert "plan [1, 1] cannot be" in market.places[TASK, 0].problem
    late = AggregationLease(market.lenders[N1].shards[0].lease, order(plan=(1, 2)), order().load)
    market.perform(N1, market.lenders[N1].lease(N0, late, market.now_s))
    assert market.hosted[N1][order().key].plan == (1, 3)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_lost_nothing_is_given_twice_and_in_the_end_each_range_has_one_host(seed):
    """`perform` asserts that no node gives more than it offers."""
    chance = random.Random(seed)
    market = Market([chance.choice([0, 16, 40, 80]) for _ in range(6)] + [400], seed, loss=0.2)
    tasks = {}
    for number in range(12):
        task, wanted = TaskKey(JobId(f"j{number}"), 1), order(size=chance.randint(1, 2) * MIB // 2, job=f"j{number}")
        tasks[task] = (chance.choice(market.names), wanted)
    for at in range(1, 60):
        for task, (name, wanted) in tasks.items():
            if at % 5 == 1 and name not in market.away and chance.random() < 0.9:
                market.want(name, wanted, task)
        if at % 7 == 0:
            market.away = {chance.choice(market.names)} if at < 40 else set()
        market.run(at * 2.0)
    market.loss, market.away = 0.0, set()
    for step in range(10):
        for task, (name, wanted) in tasks.items():
            market.want(name, wanted, task)
        market.run(120 + (step + 1) * 10)
    for task, (name, wanted) in tasks.items():
        hosts = market.hosts(wanted.key)
        assert len(hosts) == 1, (task, hosts)
        market.want(name, wanted, task)
        assert market.places[task, 0].place.address == f"{hosts[0]}:1"


def test_what_the_aggregator_has_taken_is_not_counted_twice():
    """A quarter of 400 MiB are given; once the aggregator has taken 32, 368 are available."""
    lender = Market([100]).lenders[N0]
    name = LeaseName(order(size=2 * MIB).key, (1, 1))
    lender.lease(N0, AggregationLease(name, order(size=2 * MIB), order(size=2 * MIB).load), 0.0)
    lender.read(AggregationRead(AggregatorPlace("n0:1"), (368 + 32) * MIB), 1.0)
    more = LeaseName(order(start=1).key, (1, 2))
    room = (100 - 32) * MIB // 16
    fits, too_large = order(start=1, size=room), order(start=1, size=room + 1)
    quotes = [AggregationQuote(more, (1, 1), each.load) for each in (too_large, fits)]
    answers = [lender.quote(N0, each, 1.0)[0].message.refusal for each in quotes]
    assert answers[0].startswith("it takes")
    assert answers[1] == ""


def test_jobs_of_other_nodes_get_the_cores_and_the_link_that_are_idle_and_the_own_ones_need_none():
    lender = Lender(N0, lambda: 0, lambda: True)
    lender.has_link(8)  # half of it: 500 kB/s
    lender.read(AggregationRead(AggregatorPlace("n0:1"), 400 * MIB), 0.0)
    small = replace(order(size=1_000).load, link_bytes=1e3)
    quote = AggregationQuote(LeaseName(order().key, (1, 1)), (1, 1), small)
    assert "cores" in lender.quote(N1, quote, 0.0)[0].message.refusal
    assert lender.quote(N0, quote, 0.0)[0].message.refusal == ""
    idle = Lender(N0, lambda: 1, lambda: True)
    idle.has_link(8)
    idle.read(AggregationRead(AggregatorPlace("n0:1"), 400 * MIB), 0.0)
    wide = replace(small, link_bytes=16e6, is_measured=True)
    refused = AggregationQuote(LeaseName(order().key, (1, 1)), (1, 1), wide)
    assert "link" in idle.quote(N1, refused, 0.0)[0].message.refusal
    expected = replace(refused, load=replace(wide, is_measured=False))
    assert idle.quote(N1, expected, 0.0)[0].message.refusal == "", "its rounds cannot be 30 s apart"
    more = AggregationQuote(LeaseName(order(1).key, (1, 2)), (1, 1), small)
    assert "would wait" in idle.quote(N1, more, 0.0)[0].message.refusal


def test_what_a_shard_takes_is_measured_round_by_round():
    market = Market([100])
    market.want(N0, order())
    market.run(1)
    for at_s, rounds in ((5, 1), (10, 2), (15, 3), (40, 8)):
        market.now_s = at_s
        market.read(N0, ShardReading(order().key, rounds, rounds, 0.5 * rounds, 1_000 * rounds, 0.25, 2))
    told = market.lenders[N0].shards[0]
    assert told.load == ShardLoad(0.5, 1_000.0, 5.0, 16 * MIB, is_measured=True)
    assert (told.version, told.wait_s, told.connected, told.broker, told.size) == (8, 0.25, 2, N0, MIB)
    market.read(N0, ShardReading(order().key, 1, 1, 0.1, 1, 0.0, 0))
    assert market.lenders[N0].shards[0].load == told.load, "another life of the aggregator counts from nothing"


def slow(market: Market, name: NodeId, wanted: ShardOrder, rounds: Sequence[int], wait_s: float = 3.0) -> None:
    """A reading each 5 s, after so many rounds, of which the last has waited that long."""
    for count_ in rounds:
        market.read(name, ShardReading(wanted.key, count_, count_, 0.5 * count_, 1_000 * count_, wait_s, 2))
        market.run(market.now_s + 5)


def test_where_rounds_wait_the_largest_shard_goes_to_who_has_more_left_and_serves_until_that_has_it():
    market = Market([0, 100, 100])
    big, small = order(size=2 * MIB), order(start=1)
    market.want(N0, big)
    market.run(5)
    first = market.hosts(big.key)[0]
    others = [name for name in (N1, N2) if name != first]
    market.away.update(others)  # so that the second comes to the same
    market.want(N0, small)
    market.run(15)
    market.away.clear()
    assert market.hosts(small.key) == [first]
    slow(market, first, big, range(1, 8))
    assert market.lenders[first].counters["offered_away"] == 1
    assert market.hosts(big.key) == others
    assert market.places[TASK, 0].place.address == f"{others[0]}:1"
    assert market.hosts(small.key) == [first]
    slow(market, first, small, range(8, 18))
    assert market.lenders[first].counters["offered_away"] == 1, "a pause shows what the first has brought"


def test_rounds_that_wait_now_and_then_or_for_a_moment_move_nothing():
    market = Market([0, 100, 100])
    market.want(N0, order())
    market.run(5)
    host = market.hosts(order().key)[0]
    slow(market, host, order(), range(1, 20), wait_s=0.3)
    for count_ in range(20, 40, 4):
        slow(market, host, order(), range(count_, count_ + 3))
        slow(market, host, order(), [count_ + 3], wait_s=0.0)
    assert market.lenders[host].counters["offered_away"] == 0


def test_a_shard_stays_where_it_is_when_nobody_is_better_and_two_nodes_do_not_pass_it_to_and_fro():
    market = Market([0, 100, 100])
    market.want(N0, order())
    market.run(5)
    for name in (N1, N2):
        taken = LeaseName(order(job="other").key, (1, 1))
        market.away.add(NodeId("n9"))
        loads = replace(order(job="other").load, cpu_s=2.0)
        market.perform(
            name, market.lenders[name].lease(NodeId("n9"), AggregationLease(taken, order(job="other"), loads), 5.0)
        )
    seen = []
    for start in range(1, 60, 12):
        slow(market, market.hosts(order().key)[0], order(), range(start, start + 12))
        seen += market.hosts(order().key)
    assert len(seen) == 5
    assert len(set(seen[1:])) == 1, seen


def test_a_node_that_drains_has_strangers_move_and_keeps_its_own():
    market = Market([100, 100, 100])
    works = {"yes": True}
    market.lenders[N1] = Lender(N1, lambda: 8, lambda: works["yes"])
    market.lenders[N1].has_link(0)
    market.read(N1)
    market.rooms[N0] = 0
    market.read(N0)
    market.away.add(N2)
    other = TaskKey(JobId("j2"), 1)
    market.want(N0, order())
    market.want(N1, order(job="j2"), other)
    market.run(10)
    assert (market.hosts(order().key), market.hosts(order(job="j2").key)) == ([N1], [N1])
    market.away.clear()
    works["yes"] = False
    market.read(N1)
    market.run(15)
    assert (market.hosts(order().key), market.hosts(order(job="j2").key)) == ([N2], [N1])


def test_a_host_whose_aggregator_starts_slowly_gets_a_moved_shard_only_when_it_is_there():
    market = Market([0, 100, 100])
    market.want(N0, order())
    market.run(5)
    first = market.hosts(order().key)[0]
    (second,) = {N1, N2} - {first}
    given = int(100 * MIB / MEMORY_SHARE)
    market.perform(second, market.lenders[second].read(AggregationRead(memory_bytes=given), 5.0))
    slow(market, first, order(), range(1, 7), wait_s=3.0)
    assert sorted(market.hosts(order().key)) == [N1, N2]
    assert market.places[TASK, 0].place.address == f"{first}:1"
    market.read(second)
    market.run(market.now_s + 1)
    assert market.hosts(order().key) == [second]
    assert market.places[TASK, 0].place.address == f"{second}:1"
