"""What is wished and known of a change of a running gang, beside the record: its parts by their numbers.

Volatile, and of one attempt: a shepherd that takes over leaves wishes to the next plan, and hears the rest again.
"""

from collections.abc import Collection, Iterable

from swarmsched.negotiation.formation import Formation
from swarmsched.negotiation.pacing import Refusals
from swarmsched.record import JobRecord
from swarmsched.resources import Share
from swarmsched.world import WorldMember, WorldPlan

AGAIN_S = 1.0  # between looks, and between repeats of a world that was not heard, while a change is under way
STOP_AGAIN_S = 2.0
LEAVE_S = 5.0  # from the switch of all others until a worker that has not left by itself is stopped
STUCK_S = 300.0  # the same where others have not switched
JOIN_S = 600.0  # from the launch of new workers until those that are not ready are given up
PARTED_S = 2.0  # that all members have told of a world that came to nothing, until they try the next one
PARTED_SOME_S = 30.0  # the same where some have: who computes has not met it yet, and a death is told by then


class Regrouping:
    """Who is to join and to leave one attempt's gang, and what has been told to whom."""

    def __init__(self) -> None:
        self.leave: dict[int, None] = {}  # members that are to leave
        self.reason = ""  # of the change that is wished
        self.again_s = float("inf")  # when to look again
        self.refusals = Refusals()
        self._last_part = 0  # that owners were asked to hold
        self._addresses: dict[int, str] = {}  # that workers have given
        self._told: dict[int, tuple[int, float]] = {}  # the world that each was told of, and when
        self._leaving_since_s: dict[int, float] = {}
        self._stopped_s: dict[int, float] = {}  # when those were told to stop
        self._join_until_s = float("inf")  # newcomers that are not ready by then are given up
        self._spared_s: dict[int, float] = {}  # until when newcomers are not called slow
        self._parted_s = float("inf")  # since when members tell that the present world came to nothing

    @property
    def is_quiet(self) -> bool:
        """Nothing is wished, given up, or to be looked at again."""
        return not self.leave and not self.refusals.verdict and self.again_s == float("inf")

    # Wishes.

    def wish(self, leave: Iterable[int], reason: str) -> None:
        """These members are to leave, for that reason, as soon as newcomers are there."""
        self.leave, self.reason = dict.fromkeys(leave), reason

    def forget_wishes(self) -> None:
        """Nobody is to leave any more."""
        self.leave = {}

    def keep_wishes_of(self, members: Collection[int]) -> None:
        """Others than those are members no more."""
        self.leave = {part: None for part in self.leave if part in members}

    def number(self, count: int, record: JobRecord, released_part: int) -> int:
        """The first of so many numbers in a row, for parts that no owner has seen."""
        first = max(record.last_part, self._last_part, released_part) + 1
        self._last_part = first + count - 1
        return first

    # Newcomers.

    def launched(self, now_s: float) -> None:
        """All newcomers were launched."""
        self._join_until_s = now_s + JOIN_S

    def is_late(self, now_s: float) -> bool:
        """Newcomers that are not ready yet are given up."""
        return now_s >= self._join_until_s

    def spare(self, parts: Iterable[int], until_s: float) -> None:
        """New parts, which are not to be called slow before that."""
        self._spared_s |= dict.fromkeys(parts, until_s)

    def spared(self, now_s: float) -> list[int]:
        """Parts that are not to be called slow now."""
        return [part for part, until_s in self._spared_s.items() if now_s < until_s]

    # What members are told.

    def plan(self, record: JobRecord, formation: Formation) -> WorldPlan | None:
        """The record's world as workers are told of it, once all members have said where they are."""
        world, members, addresses = record.world, formation.members, self._addresses
        for share in members:
            if address := formation.workers[share.part].address:
                addresses[share.part] = address
        if not members or any(share.part not in addresses for share in members):
            return None
        told = tuple(WorldMember(share.part, addresses[share.part]) for share in members)
        nodes = len({share.node for share in members})
        return WorldPlan(world.version, record.epoch, told, world.lost, not world.has_trained, nodes)

    def uninformed(self, plan: WorldPlan, formation: Formation, now_s: float) -> list[Share]:
        """Members that are to be told of a plan now: until they say that they have heard, and those that leave as
        well."""
        found = []
        for share in (*formation.members, *formation.leaving):
            worker = formation.workers[share.part]
            version, at_s = self._told.get(share.part, (0, 0.0))
            is_repeat = version == plan.version and now_s < at_s + AGAIN_S
            if worker.address and worker.heard < plan.version and share.part not in formation.exited and not is_repeat:
                self._told[share.part] = (plan.version, now_s)
                found.append(share)
        return found

    def overdue(self, lost: Collection[int], formation: Formation, now_s: float) -> list[Share]:
        """Members that are to be stopped now: they have not left by themselves, never trained, or stand still."""
        found = []
        for share in formation.leaving:
            since_s = self._leaving_since_s.setdefault(share.part, now_s)
            patience_s = LEAVE_S if formation.is_settled else STUCK_S
            may_leave = formation.workers[share.part].trains and share.part not in lost
            due_s = since_s + patience_s if may_leave else since_s
            due_s = max(due_s, self._stopped_s.get(share.part, 0.0) + STOP_AGAIN_S)
            if now_s >= due_s and share.part not in formation.exited:
                self._stopped_s[share.part] = now_s
                found.append(share)
        return found

    # While a change is under way.

    def look_again(self, formation: Formation, now_s: float) -> None:
        """A change is looked at once in a while, whatever happens."""
        self._parted_s = min(self._parted_s, now_s) if formation.parted else float("inf")
        if not (formation.is_changing or self.leave):
            self.again_s = float("inf")
        elif now_s >= self.again_s or self.again_s == float("inf"):
            self.again_s = now_s + AGAIN_S

    def retry_s(self, *, are_all: bool) -> float:
        """When members for which the present world came to nothing may try the next one."""
        return self._parted_s + (PARTED_S if are_all else PARTED_SOME_S)
