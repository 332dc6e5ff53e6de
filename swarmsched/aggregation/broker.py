"""The broker: has the ranges that ranks of this node ask for hosted, here if there is room, else where a quote is best.

The own node is asked first; then two at random of those whose records promise room, and two more, a few times.  The
best fit is taken.  A lease lasts while it is renewed, so whatever this agent forgets, by its own death too, ends by
itself.  A host that falls silent, or that has forgotten the lease, is replaced: the successor of a shard takes its
weights from the learners.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from swarmsched.aggregation.lender import LEASE_S
from swarmsched.aggregation.message import (
    LEASES_MOST,
    AggregationHosted,
    AggregationLease,
    AggregationMove,
    AggregationQuote,
    AggregationQuoted,
    AggregationRelease,
    AggregationRenewal,
    LeaseName,
)
from swarmsched.effects import Effect, SendPeer, ShardPlaced
from swarmsched.events import ShardWanted
from swarmsched.ids import NodeId, TaskKey
from swarmsched.shards import AggregatorPlace, LeaseNumber, RangeKey, ShardLoad, ShardOrder

ANSWER_S = 2.0  # for a quote, or the word that a lease is there
RENEW_S = 5.0
ASKED_AT_ONCE = 2
ASKED_MOST = 9
NOWHERE = AggregatorPlace()
ANYBODY = (-1, NodeId(""))  # below all that a node says of itself
START_S = 15.0  # that the aggregator of another host may take

Candidates = Callable[[ShardLoad, float], Sequence[NodeId]]


@dataclass(slots=True)
class _Search:
    """For somebody who hosts a range."""

    number: LeaseNumber
    until_s: float
    asked: dict[NodeId, AggregationQuoted | None]
    above: tuple[int, NodeId]  # idle, and node: others are no better than who has it
    chosen: NodeId | None = None  # to whom the order went
    tried: list[NodeId] = field(default_factory=list)
    refusal: str = ""  # of the own node


@dataclass(slots=True)
class _Range:
    """What a task wants, who has it, and who is looked for."""

    task: TaskKey
    order: ShardOrder
    load: ShardLoad
    host: NodeId | None = None
    number: LeaseNumber = (0, 0)
    place: AggregatorPlace = NOWHERE
    heard_s: float = -math.inf
    search: _Search | None = None

    @property
    def name(self) -> LeaseName:
        """Of the lease that is there."""
        return LeaseName(self.order.key, self.number)


class Broker:
    """All ranges that tasks of one node have asked for.  Times are seconds on the node's monotonic clock."""

    def __init__(self, me: NodeId, generation: int, rng: random.Random, candidates: Candidates) -> None:
        """`candidates`: other nodes that could host such a load, by what they have told."""
        self._me, self._generation, self._rng = me, generation, rng
        self._candidates = candidates
        self._ranges: dict[RangeKey, _Range] = {}
        self._count = 0
        self._renew_s = math.inf
        self.counters = dict.fromkeys(("placed", "refused", "lost", "moved"), 0)

    # What ranks ask.

    def want(self, told: ShardWanted, now_s: float) -> list[Effect]:
        """A rank asks, or asks again."""
        task, order = told.key, told.order
        each = self._ranges.get(order.key)
        if each is None:
            each = self._ranges[order.key] = _Range(task, order, order.load)
            return self._look(each, now_s)
        if order.plan < each.order.plan or (order.plan == each.order.plan and task != each.task):
            return [_refused(task, order, "conflict", *_why_not(each, task, order))]
        is_same, each.task = order == each.order, task
        if is_same:
            return self._placed(each)
        each.order, each.load = order, replace(each.load, memory_bytes=order.load.memory_bytes)
        if each.host is None:
            return self._look(each, now_s)
        return [SendPeer(each.host, AggregationLease(each.name, order, each.load)), *self._placed(each)]

    def give_up(self, task: TaskKey, start: int | None = None) -> list[Effect]:
        """A task is over, or wants that range no more."""
        gone = [each for each in self._ranges.values() if each.task == task and start in (None, each.order.key.start)]
        effects: list[Effect] = []
        for each in gone:
            del self._ranges[each.order.key]
            effects += self._release(each.host, each.name)
            effects += self._end_search(each)
        return effects

    # What lenders answer.

    def quoted(self, sender: NodeId, told: AggregationQuoted, now_s: float) -> list[Effect]:
        """One that was asked has answered."""
        each, search = self._search_of(told.lease)
        if each is None or search is None:
            return self._release(sender, told.lease) if not told.refusal else []
        if search.chosen is not None or sender not in search.asked:
            return []
        search.asked[sender] = told
        return self._choose(each, search, now_s) if None not in search.asked.values() else []

    def hosted(self, sender: NodeId, told: AggregationHosted, now_s: float) -> list[Effect]:
        """Ranges are leased there, or are not."""
        effects: list[Effect] = []
        for shard in told.shards:
            each, search = self._search_of(shard.lease)
            former: list[Effect] = []
            if each is not None and search is not None and search.chosen == sender:
                if each.host is not None and not told.place.address:
                    search.until_s = now_s + START_S  # its aggregator starts; the former host goes on meanwhile
                    continue
                former = self._take(each, sender, search.number)
            each = self._ranges.get(shard.lease.key)
            if each is None or each.host != sender or each.name != shard.lease:
                effects += self._release(sender, shard.lease)
                continue
            each.heard_s = now_s
            each.load = shard.load if shard.load.is_measured else each.load
            if each.place != told.place:
                each.place = told.place
                effects += self._placed(each)
            effects += former
        for name in told.lost:
            effects += self._lost(sender, name, now_s)
        self._renew_s = min(self._renew_s, now_s + RENEW_S)
        return effects

    def move(self, sender: NodeId, told: AggregationMove, now_s: float) -> list[Effect]:
        """A host has too much: it goes on until another one has the range, if any has more left than it."""
        each = self._ranges.get(told.lease.key)
        if each is None or each.host != sender or each.name != told.lease or each.search is not None:
            return []
        return self._look(each, now_s, above=(told.idle, sender))

    def undelivered(self, recipient: NodeId, message: object, now_s: float) -> list[Effect]:
        """As if it had been refused; what was asked for all the same ends by itself."""
        if isinstance(message, AggregationQuote):
            return self.quoted(recipient, AggregationQuoted(message.lease, "it cannot be reached"), now_s)
        if isinstance(message, AggregationLease):
            return self._lost(recipient, message.lease, now_s)
        return []

    def gone(self, node: NodeId, now_s: float) -> list[Effect]:
        """A member is away."""
        names = [each.name for each in self._ranges.values() if each.host == node]
        return [effect for name in names for effect in self._lost(node, name, now_s)]

    def on_timer(self, now_s: float) -> list[Effect]:
        """Renew what there is; go on where somebody has not answered."""
        effects: list[Effect] = []
        for each in list(self._ranges.values()):
            if each.host is not None and each.heard_s + LEASE_S <= now_s:
                effects += self._lost(each.host, each.name, now_s)
            elif each.search is not None and each.search.until_s <= now_s:
                effects += self._answer_is_late(each, each.search, now_s)
        if now_s >= self._renew_s:
            effects += self._renew(now_s)
        return effects

    @property
    def next_deadline_s(self) -> float:
        """When an answer is late, or leases are to be renewed."""
        searches = (each.search.until_s for each in self._ranges.values() if each.search is not None)
        silent = (each.heard_s + LEASE_S for each in self._ranges.values() if each.host is not None)
        return min(self._renew_s, min(searches, default=math.inf), min(silent, default=math.inf))

    @property
    def away_count(self) -> int:
        """How many ranges are hosted by other nodes."""
        return sum(each.host not in (None, self._me) for each in self._ranges.values())

    def validate(self) -> None:
        """Every range has a host or is looked for."""
        assert all(key == each.order.key for key, each in self._ranges.items())
        assert all(each.host is not None or each.search is not None for each in self._ranges.values())

    # Looking.

    def _look(self, each: _Range, now_s: float, above: tuple[int, NodeId] = ANYBODY) -> list[Effect]:
        ended = self._end_search(each)
        self._count += 1
        each.search = _Search((self._generation, self._count), now_s, {}, above)
        if each.host != self._me:
            return [*ended, *self._ask(each, each.search, [self._me], now_s)]
        each.search.tried.append(self._me)
        return [*ended, *self._ask_others(each, each.search, now_s)]

    def _ask(self, each: _Range, search: _Search, nodes: Sequence[NodeId], now_s: float) -> list[Effect]:
        search.asked, search.until_s = dict.fromkeys(nodes), now_s + ANSWER_S
        search.tried += nodes
        quote = AggregationQuote(LeaseName(each.order.key, search.number), each.order.plan, each.load, *search.above)
        return [SendPeer(node, quote) for node in nodes]

    def _choose(self, each: _Range, search: _Search, now_s: float) -> list[Effect]:
        """The best fit of those that have offered; others keep their room no longer."""
        offers = {node: told for node, told in search.asked.items() if told is not None and not told.refusal}
        own = search.asked.get(self._me)
        search.refusal = own.refusal if own is not None else search.refusal
        if not offers:
            return self._ask_others(each, search, now_s)
        search.chosen = min(offers, key=lambda node: (offers[node].idle, node))
        search.until_s = now_s + ANSWER_S
        name = LeaseName(each.order.key, search.number)
        others = [effect for node in search.asked if node != search.chosen for effect in self._release(node, name)]
        return [*others, SendPeer(search.chosen, AggregationLease(name, each.order, each.load))]

    def _ask_others(self, each: _Range, search: _Search, now_s: float) -> list[Effect]:
        found = [node for node in self._candidates(each.load, now_s) if node not in (*search.tried, each.host)]
        if not found or len(search.tried) >= ASKED_MOST:
            return self._give_up_looking(each, search)
        self._count += 1  # whoever answers late was asked for another one
        search.number, search.chosen = (self._generation, self._count), None
        nodes = self._rng.sample(found, min(ASKED_AT_ONCE, len(found)))
        return self._ask(each, search, nodes, now_s)

    def _give_up_looking(self, each: _Range, search: _Search) -> list[Effect]:
        if each.host is not None:
            each.search = None  # it stays where it is
            return []
        del self._ranges[each.order.key]
        self.counters["refused"] += 1
        others = len(search.tried) - 1
        problem = f"size {each.order.size} is not hosted here: {search.refusal or 'no answer'}; nor by {others} others"
        remedy = "train on more nodes, of which each hosts a smaller range"
        return [_refused(each.task, each.order, "no_room", problem, remedy)]

    def _answer_is_late(self, each: _Range, search: _Search, now_s: float) -> list[Effect]:
        if search.chosen is None:
            return self._choose(each, search, now_s)
        late = self._release(search.chosen, LeaseName(each.order.key, search.number))
        return [*late, *self._ask_others(each, search, now_s)]

    def _end_search(self, each: _Range) -> list[Effect]:
        search, each.search = each.search, None
        if search is None:
            return []
        name = LeaseName(each.order.key, search.number)
        return [effect for node in search.asked for effect in self._release(node, name)]

    def _search_of(self, name: LeaseName) -> tuple[_Range | None, _Search | None]:
        each = self._ranges.get(name.key)
        search = each.search if each is not None and each.search and each.search.number == name.number else None
        return each, search

    # Leases.

    def _take(self, each: _Range, host: NodeId, number: LeaseNumber) -> list[Effect]:
        """The lease is there; that of a former host ends once learners are told."""
        former = self._release(each.host, each.name)
        self.counters["moved"] += each.host is not None
        each.host, each.number, each.search, each.place = host, number, None, NOWHERE
        self.counters["placed"] += 1
        return former

    def _lost(self, host: NodeId, name: LeaseName, now_s: float) -> list[Effect]:
        each, search = self._search_of(name)
        if each is None:
            return []
        if search is not None and search.chosen == host:
            return self._ask_others(each, search, now_s)
        if each.host != host or each.name != name:
            return []
        each.host, each.place = None, NOWHERE
        self.counters["lost"] += 1
        return [*self._release(host, name), *self._look(each, now_s)]

    def _renew(self, now_s: float) -> list[Effect]:
        by_host: dict[NodeId, list[LeaseName]] = {}
        for each in self._ranges.values():
            if each.host is not None:
                by_host.setdefault(each.host, []).append(each.name)
        self._renew_s = now_s + RENEW_S if by_host else math.inf
        return [
            SendPeer(host, AggregationRenewal(tuple(part))) for host, names in by_host.items() for part in _parts(names)
        ]

    def _release(self, host: NodeId | None, name: LeaseName) -> list[Effect]:
        return [SendPeer(host, AggregationRelease((name,)))] if host is not None else []

    def _placed(self, each: _Range) -> list[Effect]:
        if not each.place.address:
            return []
        return [ShardPlaced.about(each.task, each.order.key.start, each.place)]


def _refused(task: TaskKey, order: ShardOrder, code: str, problem: str, remedy: str) -> ShardPlaced:
    return ShardPlaced.about(task, order.key.start, NOWHERE, code, problem, remedy)


def _why_not(each: _Range, task: TaskKey, order: ShardOrder) -> tuple[str, str]:
    if task != each.task and order.plan <= each.order.plan:
        return "another rank of this job has this range hosted here", "ask for another one"
    problem = f"plan {[*order.plan]} cannot be: this range is hosted under {[*each.order.plan]}"
    return problem, "ask under the newest plan"


def _parts(names: Sequence[LeaseName]) -> Iterable[Sequence[LeaseName]]:
    return (names[start : start + LEASES_MOST] for start in range(0, len(names), LEASES_MOST))
