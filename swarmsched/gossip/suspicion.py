"""A suspicion: a verdict on its way, the faster the more members reach it independently (Lifeguard, 2018)."""

import math
from collections.abc import Set as AbstractSet

from swarmsched.gossip.message import Standing, Update
from swarmsched.ids import NodeId

CONFIRMATIONS_WANTED = 2
SUSPICION_FACTOR = 3.0
SUSPICION_MAX_FACTOR = 6.0
LEAST_MEMBERS_FOR_CONFIRMATION = 4


def suspicion_min_s(member_count: int) -> float:
    """Seconds from suspicion to failure when enough members agree: 3 x max(1, log10 N)."""
    return SUSPICION_FACTOR * max(1.0, math.log10(max(member_count, 1)))


def confirmations_wanted(member_count: int) -> int:
    """Independent accusers, beyond the first, that end the suspicion at its minimum; 0 if so few members exist."""
    return CONFIRMATIONS_WANTED if member_count >= LEAST_MEMBERS_FOR_CONFIRMATION else 0


class Suspicion:
    """One member's suspicion at one node.

    The deadline starts at 6 x the minimum and falls with the logarithm of the accusers.  `generation` and
    `incarnation` are those accused: a refutation makes the whole object obsolete.
    """

    __slots__ = ("_accusers", "_max_s", "_min_s", "_started_s", "_wanted", "deadline_s")

    def __init__(self, accuser: str, member_count: int, started_s: float) -> None:
        self._min_s = suspicion_min_s(member_count)
        self._max_s = self._min_s * SUSPICION_MAX_FACTOR
        self._wanted = confirmations_wanted(member_count)
        self._started_s = started_s
        self._accusers = {accuser: None}  # bounded by `_wanted` + 1
        self.deadline_s = self._deadline()

    def confirm(self, accuser: str) -> bool:
        """True if this accuser is new and still counts; the deadline may have moved nearer."""
        if not accuser or accuser in self._accusers or len(self._accusers) > self._wanted:
            return False
        self._accusers[accuser] = None
        self.deadline_s = self._deadline()
        return True

    def postpone(self, lag_s: float) -> None:
        """This node itself stood still: the accused had no chance to be heard meanwhile."""
        self._started_s += lag_s
        self.deadline_s += lag_s

    def _deadline(self) -> float:
        if self._wanted == 0:
            return self._started_s + self._min_s
        agreement = math.log(len(self._accusers)) / math.log(self._wanted + 1)
        return self._started_s + self._max_s - agreement * (self._max_s - self._min_s)


class SuspicionTable:
    """All members that are accused at one node."""

    def __init__(self) -> None:
        self._by_node: dict[NodeId, Suspicion] = {}

    @property
    def accused(self) -> AbstractSet[NodeId]:
        """The names of all that are accused."""
        return self._by_node.keys()

    @property
    def earliest_deadline_s(self) -> float:
        """When the first of them is due; infinity if none ever is."""
        return min((each.deadline_s for each in self._by_node.values()), default=math.inf)

    def due(self, now_s: float) -> list[NodeId]:
        """Whose time is over."""
        return [node for node, suspicion in self._by_node.items() if suspicion.deadline_s <= now_s]

    def track(self, update: Update, member_count: int, now_s: float) -> None:
        """A refutation, a verdict or a newer accusation replaces the suspicion before it."""
        self._by_node.pop(update.node, None)
        if update.standing is Standing.SUSPECT:
            self._by_node[update.node] = Suspicion(update.accuser, member_count, now_s)

    def confirm(self, update: Update) -> bool:
        """See `Suspicion.confirm`."""
        return self._by_node[update.node].confirm(update.accuser)

    def postpone(self, lag_s: float) -> None:
        """See `Suspicion.postpone`."""
        for suspicion in self._by_node.values():
            suspicion.postpone(lag_s)
