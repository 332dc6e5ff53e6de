"""Invariant 5: a gang runs all or nothing.

No rank of an attempt starts before the register has decided PREPARED for it and every owner of the gang has told its
commit, and none starts once the register has decided that the attempt is over.  One exception is the protocol's own:
where the record names a leftover, its owner may not have heard yet, and nothing new starts before that is settled.
"""

from collections.abc import Sequence

from swarmsched.effects import Effect, SendPeer, StartTask
from swarmsched.events import Event
from swarmsched.ids import AttemptKey, NodeId, Place, TaskKey
from swarmsched.ledger.booking import ROOM, BookingState
from swarmsched.ledger.message import OwnerAnswer, Refusal
from swarmsched.record import JobRecord, Leftover, PlanState
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.ledger_view import changed_bookings
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.task import TaskOrder


class GangChecker(Checker):
    """Which owners have committed to which attempt."""

    EFFECTS = (ROOM,)
    PERFORMED = (OwnerAnswer, StartTask)

    def __init__(self, decided: DecidedRecords, books: BookingChecker) -> None:
        self.started_count = 0  # tasks
        self.widest_gang = 0  # most nodes in one gang
        self._decided = decided
        self._books = books
        self._leased: dict[NodeId, dict[TaskKey, int]] = {}  # ranks of leases that may not be durable
        # Ranks of those that were told, by attempt; it stays when a lease ends.
        self._committed: dict[AttemptKey, dict[Place, int]] = {}

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Note new leases."""
        for key, entry in changed_bookings(effects):
            if entry is not None and entry.state is BookingState.LEASED:
                self._leased.setdefault(host.node_id, {})[key] = entry.ranks

    def performed(self, host: Host, effect: Effect) -> None:
        """A yes makes a lease a commit; a start needs the commits of all."""
        if isinstance(effect, SendPeer):
            self._answered(host, effect.message)
        elif isinstance(effect, StartTask):
            self._starts(host, effect)

    def agent_started(self, host: Host) -> None:
        """Leases that were not durable are gone, all others are commits."""
        self._leased.pop(host.node_id, None)
        for entry in self._books.entries(host):
            if entry.state is BookingState.LEASED:
                self._commit(host, entry.key, entry.ranks)

    def _answered(self, host: Host, answer: object) -> None:
        if not isinstance(answer, OwnerAnswer) or answer.refusal is not Refusal.NONE:
            return
        key = answer.key
        ranks = self._leased.get(host.node_id, {}).pop(key, None)
        if ranks is not None:
            self._commit(host, key, ranks)

    def _commit(self, host: Host, key: TaskKey, ranks: int) -> None:
        self._committed.setdefault(key.of_attempt, {})[Place(host.node_id, key.part)] = ranks

    def _starts(self, host: Host, effect: StartTask) -> None:
        order = effect.order
        self._decided.settle(host)
        record = self._decided.last(order.job_id)
        committed = self._committed.get(order.key.of_attempt, {})
        wanted = wanted_by(order, record)
        # A part that joins an elastic gang is ordered with those that were there before it, and may be gone by now.
        is_one_of_several = order.is_worker or bool(order.groups)
        is_complete = committed.items() >= wanted.items() if is_one_of_several else committed == wanted
        if not is_complete:
            raise Violation(
                5, f"{order.job_id}/{order.attempt} starts on {host.node_id} with commits {committed} of {wanted}"
            )
        if len(effect.gpus) != order.local_ranks * order.spec.demand.gpus:
            raise Violation(5, f"{order.job_id}/{order.attempt} starts on {host.node_id} with {len(effect.gpus)} GPUs")
        if record is None or record.attempt < order.attempt:
            raise Violation(5, f"{order.job_id}/{order.attempt} starts on {host.node_id}, and was never prepared")
        is_left = Leftover(host.node_id, order.attempt, part=order.part) in record.leftovers
        if is_over(record, order.attempt) and not is_left and effect.until_s > host.now_s:
            raise Violation(
                5,
                f"{order.job_id}/{order.attempt} starts on {host.node_id} after it was over: {record.state.value}, "
                f"attempt {record.attempt} {record.plan_state.value}, left are {record.leftovers}",
            )
        self.started_count += 1
        self.widest_gang = max(self.widest_gang, len(wanted))


def wanted_by(order: TaskOrder, record: JobRecord | None) -> dict[Place, int]:
    """Ranks of the parts without which this one may not start.

    Others of an elastic gang count until the record has them no more: a newcomer whose node was lost before it
    committed need not come for the next one to start, although the order of that one names it.
    """
    shares = order.shares
    if order.groups and record is not None and record.attempt == order.attempt and not record.world.version:
        shares = record.shares
    if order.is_worker and record is not None and record.attempt == order.attempt and record.world.version:
        there = {share.place for share in (*record.members, *record.joining)}
        shares = tuple(share for share in shares if share.place in there or share.part == order.part)
    return {share.place: share.ranks for share in shares}


def is_over(record: JobRecord, attempt: int) -> bool:
    """True when the register says that this attempt runs no more."""
    is_present = record.attempt == attempt and record.plan_state in (PlanState.PREPARED, PlanState.LAUNCHED)
    return record.is_ended or not is_present
