"""Invariant 9: an owner that said yes to a hold does not withdraw it before its deadline, by the owner's own clock.

Unless its own shepherd releases it (or yields, which is a release), asks for a later attempt, or commits it; or the
job ends in the register.  A restart gives the hold its full time again, and never less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarmsched.effects import Effect, Persist, SendPeer
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.jobs.acceptor import ROOM as REGISTER_ROOM
from swarmsched.jobs.acceptor import Slot
from swarmsched.ledger.booking import ROOM, BookingState
from swarmsched.ledger.message import CommitRequest, HoldRequest, OwnerAnswer, Refusal, ReleaseRequest
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.ledger_view import changed_bookings
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.wire.codec import decode_value

CLOCK_SLACK_S = 1e-6  # rounding
SLOWEST_RATIO = 0.9  # of virtual time to an owner's: clocks may be 5 % apart from it
COMMANDS_KEPT = 1_000  # of each owner


@dataclass(slots=True)
class _Yes:
    """One hold that was granted."""

    ttl_s: float
    deadline_s: float  # by the owner's clock
    surely_until_s: float  # virtual time, however fast the owner's clock runs


class HoldChecker(Checker):
    """Every hold that was told, until it is committed, released or over."""

    EVENTS = (HoldRequest, ReleaseRequest, CommitRequest)
    EFFECTS = (ROOM,)
    PERFORMED = (OwnerAnswer,)

    def __init__(self, decided: DecidedRecords, books: BookingChecker) -> None:
        self.kept_count = 0  # holds that came to an end as they should
        self._decided = decided
        self._books = books
        self._asked: dict[NodeId, dict[TaskKey, _Yes]] = {}  # perhaps not told yet
        self._told: dict[NodeId, dict[TaskKey, _Yes]] = {}
        self._seen: dict[NodeId, dict[tuple[JobId, int, int, int], None]] = {}  # commands: a copy renews nothing

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Note what was held, and who may have ended what is gone."""
        told = self._told.setdefault(host.node_id, {})
        message = event.message if isinstance(event, PeerMessageReceived) else None
        if isinstance(message, HoldRequest):
            self._note_hold(host, message, effects)
        if not told:
            return
        for key, _ in changed_bookings(effects):
            if key not in told:
                continue
            entry = self._books.entry(host, key)
            if entry is not None and entry.state is BookingState.HELD:
                continue
            left_s = told.pop(key).deadline_s - host.now_s
            if entry is None and left_s > CLOCK_SLACK_S and not self._may_end(key, message, effects):
                cause = type(message if message is not None else event).__name__
                raise Violation(9, f"{host.node_id} withdrew its yes to {key} {left_s:.3f} s too early, on {cause}")
            self.kept_count += 1

    def performed(self, host: Host, effect: Effect) -> None:
        """A yes leaves."""
        assert isinstance(effect, SendPeer)
        answer = effect.message
        if not isinstance(answer, OwnerAnswer) or answer.refusal is not Refusal.NONE:
            return
        key = answer.key
        yes = self._asked.get(host.node_id, {}).pop(key, None)
        entry = self._books.entry(host, key)
        if yes is not None and entry is not None and entry.state is BookingState.HELD:
            self._told.setdefault(host.node_id, {})[key] = yes

    def agent_started(self, host: Host) -> None:
        """A hold that was told must have been on the disk; its time begins anew, on a clock that may be another."""
        self._asked.pop(host.node_id, None)
        self._seen.pop(host.node_id, None)
        told = self._told.get(host.node_id, {})
        for key, yes in list(told.items()):
            entry = self._books.entry(host, key)
            if entry is None and host.loop.now_s < yes.surely_until_s:
                raise Violation(9, f"{host.node_id} has lost its yes to {key} by a restart")
            if entry is None or entry.state is not BookingState.HELD:
                del told[key]
            else:
                yes.deadline_s = host.now_s + yes.ttl_s

    def disk_wiped(self, host: Host) -> None:
        """The owner has lost its memory; this is no withdrawal."""
        for book in (self._asked, self._told, self._seen):
            book.pop(host.node_id, None)

    def _note_hold(self, host: Host, request: HoldRequest, effects: Sequence[Effect]) -> None:
        """Its time runs from now on, also where the owner makes room for it first."""
        command = (request.job_id, request.epoch, request.attempt, request.command_id)
        seen = self._seen.setdefault(host.node_id, {})
        key = request.key
        if command in seen or _is_refused(request, effects):
            return
        seen[command] = None
        if len(seen) > COMMANDS_KEPT:
            del seen[next(iter(seen))]
        surely_until_s = host.loop.now_s + request.ttl_s * SLOWEST_RATIO
        yes = _Yes(request.ttl_s, host.now_s + request.ttl_s, surely_until_s)
        self._asked.setdefault(host.node_id, {})[key] = yes

    def _may_end(self, key: TaskKey, message: object, effects: Sequence[Effect]) -> bool:
        if isinstance(message, ReleaseRequest):
            return message.job_id == key.job_id and message.key >= key
        if isinstance(message, HoldRequest):
            return message.job_id == key.job_id and message.attempt > key.attempt
        return self._has_ended(key.job_id, effects)

    def _has_ended(self, job_id: JobId, effects: Sequence[Effect]) -> bool:
        """Decided as ended, or about to be by the very same step of its only holder."""
        record = self._decided.last(job_id)
        for effect in effects:
            if isinstance(effect, Persist) and (effect.room, effect.key) == (REGISTER_ROOM, job_id) and effect.value:
                record = decode_value(Slot, effect.value).accepted or record
        return record is not None and record.is_ended


def _is_refused(request: HoldRequest, effects: Sequence[Effect]) -> bool:
    answers = [effect.message for effect in effects if isinstance(effect, SendPeer)]
    return any(
        isinstance(answer, OwnerAnswer)
        and answer.command_id == request.command_id
        and answer.refusal is not Refusal.NONE
        for answer in answers
    )
