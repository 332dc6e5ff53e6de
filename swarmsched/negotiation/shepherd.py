"""One job's shepherd: the only writer of its record, from acceptance to the last exit code.

The record in the register is the truth; everything else here is volatile and can be rebuilt from it and from what
the owners answer (`resume`).  Register updates run one at a time and in order; whatever must not happen before an
update is durable is its continuation.  State changes go through the life cycle's table.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from swarmsched.api import COMING_BACK, EndReason, Isolation, JobState, StartPhase
from swarmsched.authority.message import SilenceAnswer
from swarmsched.commands import JobAccepted, Refused
from swarmsched.effects import Announce, ReplyToClient, SendPeer
from swarmsched.estimate import Estimate, merged
from swarmsched.fields import Value, cleaned
from swarmsched.holders import Holders, Quorum, majority
from swarmsched.ids import JobId, NodeId, handle
from swarmsched.jobs.lifecycle import JobEvent
from swarmsched.ledger.message import (
    CheckpointAnswer,
    CheckpointRequest,
    OwnerAnswer,
    OwnerCommand,
    PreemptAnswer,
    PreemptRequest,
    Refusal,
    TaskBatch,
    TaskEstimate,
    TaskReport,
    YieldRequest,
)
from swarmsched.negotiation import changes
from swarmsched.negotiation.attempt import Attempt, AttemptPhase, Ranking
from swarmsched.negotiation.changes import REASON_LENGTH, Change
from swarmsched.negotiation.checkpointing import CommitRule, is_of_present_attempt, is_overtaken
from swarmsched.negotiation.claiming import Claiming
from swarmsched.negotiation.gang import INFERRED_GENERATION, Gang, dismissal, heard
from swarmsched.negotiation.inquiry import Commands, Inquiry
from swarmsched.negotiation.namesakes import Namesakes
from swarmsched.negotiation.outcome import has_failed
from swarmsched.negotiation.pacing import Pacing
from swarmsched.negotiation.record_writer import Continuation, RecordWriter, ShepherdEffect
from swarmsched.negotiation.settlement import Settlement
from swarmsched.negotiation.window import Window
from swarmsched.record import JobRecord, Leftover, PlanState
from swarmsched.resources import Share, world_size
from swarmsched.task import TaskFailure, TaskStage, TaskStatus
from swarmsched.view import Allocation

STOP_RESEND_S = 2.0
UNANSWERED = (AttemptPhase.HOLDING, AttemptPhase.HELD, AttemptPhase.COMMITTING)
RELAUNCHES_MAX = 3
NODE_FAILURES = (TaskFailure.UNREACHABLE, TaskFailure.INTERNAL)  # another node may do better
GANG_STOP_GRACE_S = 10.0

STARVING_S = 60.0
WAITING_MAX = 16  # updates behind the one under way, beyond which checkpoints have to wait at their owners
HEAR_OWNERS_S = 0.5  # that a new shepherd waits for one of a gang's owners to say for how long it has run

NOTHING_LEFT = (Refusal.UNKNOWN, Refusal.NOT_COMMITTED, Refusal.RELEASED_ATTEMPT)
NOTHING_KNOWN = (*NOTHING_LEFT, Refusal.EXPIRED)  # what a second machine of an owner's name says


def _nothing(_now_s: float) -> list[ShepherdEffect]:
    return []


def _left_by(shares: tuple[Share, ...], attempt: int) -> tuple[Leftover, ...]:
    return tuple(Leftover(share.node, attempt, share.origin) for share in shares)


class Clock(Value):
    """Both times of one moment: monotonic for decisions, UTC for the record."""

    now_s: float
    utc_s: float


@dataclass(frozen=True, slots=True)
class ShepherdParts:
    """What the simulator replaces to see that its checkers notice."""

    make_attempt: type[Attempt] = Attempt
    may_commit: CommitRule = is_of_present_attempt
    quorum: Quorum = majority


PRODUCTION = ShepherdParts()


class JobShepherd:
    """Acts for one job under one epoch."""

    def __init__(
        self,
        record: JobRecord,
        me: NodeId,
        rng: random.Random,
        update_ids: Iterator[int],
        parts: ShepherdParts = PRODUCTION,
        stirred: Callable[[JobId], None] = lambda job_id: None,
        window: Window[JobId] | None = None,
    ) -> None:
        """`stirred` is told whenever `next_deadline_s` may become another one, and the `window` of the agent's attempts
        of each of this job's."""
        self._writer = RecordWriter(record, update_ids)
        self._me = me
        self._commands = Commands(me, record.epoch)
        self._inquiry = Inquiry()
        self._settlement = Settlement(self._commands, parts.quorum)
        self._namesakes = Namesakes()
        self._parts = parts
        self._stirred = stirred
        self._window = Window() if window is None else window
        self._attempt: Attempt | None = None
        self._claim = Claiming(me, self._commands)
        self._pacing = Pacing(record, rng)
        self._phase = record.phase
        self._reason = record.reason
        self._gang = Gang()
        self._stop_grace_s = record.spec.grace_s
        self._stop_resend_s = float("inf")
        self._silent: dict[NodeId, None] = {}  # nodes of ours that are believed failed
        self.queued_since_s = 0.0  # when it last became queued
        self.running_since_s = float("inf")
        self._hears_owners_until_s = 0.0  # before that the gang is not given up: its service would be forgotten
        self._now_s = self._utc_offset_s = 0.0
        self.estimate: Estimate | None = None  # of how it trains; volatile, and told by its card
        self._next_place = Allocation()  # volatile: whoever takes over leaves it to the next plan
        self._rescale: tuple[Allocation, str] | None = None  # and why: once its place is kept
        self._global_batch = 0  # that the attempt was planned with; 0: as before
        self._asking: dict[int, bool] = {}  # clients who wait for what is decided, and whether they name a known job
        self._shown = self._shown_of = record  # as others saw it last, and what it was made of

    @property
    def _record(self) -> JobRecord:
        return self._writer.record

    # What others look at.

    @property
    def job_id(self) -> JobId:
        """Full id."""
        return self._record.job_id

    @property
    def record(self) -> JobRecord:
        """The decided record with the volatile phase and reason laid over it."""
        decided = self._record
        if decided.is_ended:
            return decided
        reason = self._reason
        if decided.leftovers and decided.state is JobState.QUEUED:
            nodes = ", ".join(sorted({leftover.node for leftover in decided.leftovers}))
            reason = f"{reason}; waiting until what is left on {nodes} has surely stopped"[:REASON_LENGTH]
        if self._silent:
            silent = [share.node for share in decided.shares if share.node in self._silent]
            if silent:
                reason = f"{', '.join(silent)} does not answer any more; its ranks may still run"
        # Read for every job at each look at the queue, and rarely another one: a copy each time would cost most of it.
        if self._shown_of is not decided or self._shown.phase is not self._phase or self._shown.reason != reason:
            self._shown_of, self._shown = decided, replace(decided, phase=self._phase, reason=reason)
        return self._shown

    @property
    def is_queued(self) -> bool:
        """The decided state, without the rest of the record."""
        return self._record.state is JobState.QUEUED

    @property
    def is_waiting(self) -> bool:
        """Queued, with no attempt, no write under way and nothing left of an earlier attempt: may be placed."""
        is_free = self._record.state is JobState.QUEUED and self._attempt is None and not self.is_writing
        return is_free and not self._record.leftovers

    @property
    def is_writing(self) -> bool:
        """A register update is under way or waits its turn."""
        return self._writer.is_busy

    @property
    def is_calm(self) -> bool:
        """Nothing is under way that a change of holders or of the shepherd would disturb."""
        return not self.is_writing and self._attempt is None and not self._record.is_ended

    @property
    def unanswered_holds(self) -> tuple[Share, ...]:
        """What this job asked for and nobody's free counts show yet."""
        return self._attempt.unanswered_holds if self._attempt else ()

    @property
    def is_placing(self) -> bool:
        """Placement has begun and is not decided."""
        return self._attempt is not None

    @property
    def may_try_after_s(self) -> float:
        """Before that it is not placed again."""
        return self._pacing.may_try_after_s

    @property
    def avoided(self) -> Mapping[NodeId, float]:
        """Nodes where it is not placed, and until when."""
        return self._pacing.avoided

    @property
    def next_deadline_s(self) -> float:
        """Earliest of: attempt timers, repeats of stops and questions, the job's time limit."""
        attempt_s = self._attempt.next_deadline_s if self._attempt else float("inf")
        return min(
            attempt_s,
            self._stop_resend_s,
            self._inquiry.next_deadline_s,
            self._settlement.next_deadline_s,
            self._claim.next_deadline_s,
            self._time_limit_deadline_s(),
        )

    # Start of life.

    def accepted(self, clock: Clock) -> list[ShepherdEffect]:
        """The first record is durable."""
        self._see(clock)
        self.queued_since_s = clock.now_s
        spec = self._record.spec
        return [self._announce("job.submitted", f"{spec.user or 'somebody'} submitted it", gpus=spec.total_gpus)]

    def take_up(self, lost_nodes: Collection[NodeId], clock: Clock) -> list[ShepherdEffect]:
        """The register has made us its shepherd: find out what became of its attempt, and go on from there."""
        self._see(clock)
        self.queued_since_s = clock.now_s
        effects = self._reconcile(clock.now_s)
        for share in self._record.shares:
            if share.node in lost_nodes:
                effects += self.note_lost_node(share.node, clock)
        return effects

    def _reconcile(self, now_s: float) -> list[ShepherdEffect]:
        record = self._record
        effects: list[ShepherdEffect] = [*self._settlement.begin(record.leftovers, record, now_s)]
        if record.state is JobState.QUEUED or not record.shares:
            return effects
        if record.state is JobState.STARTING and record.plan_state is PlanState.PREPARED:
            # The commits ask as well.  An answer "unknown" that a commit overtook must not be taken for a loss.
            self._attempt = self._new_attempt(record.attempt, record.shares, Ranking("", ()))
            self._attempt.may_have_run = True
            return [*effects, *self._attempt.prepared(record, now_s)]
        if record.started_utc_s:
            self.running_since_s = now_s  # until its owners tell for how long it has run
            self._hears_owners_until_s = now_s + HEAR_OWNERS_S
        if record.state is JobState.STOPPING:
            self._stop_resend_s = now_s
        return [*effects, *self._ask_status([share.node for share in record.shares], now_s)]

    def _ask_status(self, nodes: list[NodeId], now_s: float) -> list[SendPeer]:
        return self._inquiry.ask([self._commands.status(node, self._record) for node in nodes], now_s)

    def note_silent_node(self, node: NodeId) -> bool:
        """A node is believed failed: if it has ranks of this job, say so; they may well run on."""
        if not self._has_share(node) or node in self._silent:
            return False
        self._silent[node] = None
        return True

    def note_returned_node(self, node: NodeId, clock: Clock) -> list[ShepherdEffect]:
        """A node is back, perhaps without its memory: ask what it still has of this job."""
        self._see(clock)
        self._silent.pop(node, None)
        self._namesakes.met(node)
        if not self._has_share(node) or (self._attempt is not None and self._attempt.awaits(node)):
            return []
        return [*self._ask_status([node], clock.now_s)]

    def _has_share(self, node: NodeId) -> bool:
        return not self._record.is_ended and any(share.node == node for share in self._record.shares)

    # Placement.

    def place(
        self, shares: tuple[Share, ...], ranking: Ranking, clock: Clock, global_batch: int = 0
    ) -> list[ShepherdEffect]:
        """Try these nodes, with that batch (0: the one of before); the caller has checked `is_waiting`."""
        self._see(clock)
        self._namesakes.forget()  # what was said of leftovers says nothing of what begins now
        self._silent.clear()
        self._global_batch = global_batch
        self._attempt = self._new_attempt(self._pacing.next_number(self._record), shares, ranking)
        return [*self._attempt.begin(clock.now_s)]

    def explain(self, reason: str) -> None:
        """Why it waits, for people; volatile."""
        if self._record.state is JobState.QUEUED:
            self._reason = cleaned(reason)

    def _new_attempt(self, number: int, shares: tuple[Share, ...], ranking: Ranking) -> Attempt:
        self._gang, self._stop_resend_s = Gang(), float("inf")  # a late report may have had the last one stopped again
        self._pacing.begun(number)
        self._window.begun(self.job_id, self._now_s)
        return self._parts.make_attempt(self._record, number, shares, ranking, self._commands.ids)

    def owner_answered(self, answer: OwnerAnswer, clock: Clock) -> list[ShepherdEffect]:
        """An owner's answer to a command of this job."""
        self._see(clock)
        if answer.refusal in NOTHING_KNOWN and self._is_namesake(answer.owner, answer.attempt, answer.origin):
            return []  # what was asked stays open, and is asked again
        attempt = self._attempt
        is_status = self._inquiry.answered(answer)
        claimed = self._claim.owner_answered(answer, self._record, clock.now_s)
        if rescaled := [*claimed, *self._begin_rescale(clock.now_s)]:
            return rescaled
        if answer.refusal in NOTHING_LEFT and self._settlement.ended(answer.owner, answer.attempt):
            return self._leftover_settled(answer.owner, answer.attempt, clock.now_s)
        if attempt is not None and attempt.number == answer.attempt:
            if is_status and answer.refusal in NOTHING_LEFT:
                attempt.lost(answer.owner)
            return [*attempt.answered(answer, clock.now_s), *self._after_attempt_moved(clock.now_s)]
        is_current = answer.attempt == self._record.attempt and not self._record.is_ended
        if not is_current or answer.refusal not in NOTHING_LEFT or self._record.state is JobState.QUEUED:
            return []
        return self._owner_has_nothing(answer.owner, clock.now_s)

    def _is_namesake(self, node: NodeId, attempt: int, origin: int) -> bool:
        """What this node tells itself is its own word, wherever it lives now."""
        return node != self._me and self._namesakes.is_one(node, attempt, origin, self._record, self._now_s)

    def _owner_has_nothing(self, owner: NodeId, now_s: float) -> list[ShepherdEffect]:
        """A stop or status request met no task, or one that stands before its start although the gang runs: it never
        began there, or every trace of it is lost."""
        was_stopped = self._record.stop_reason is not EndReason.NONE or self._gang.is_stopping
        gone = TaskStatus(
            self.job_id,
            self._record.epoch,
            self._record.attempt,
            owner,
            TaskStage.EXITED,
            failure=TaskFailure.NONE if was_stopped else TaskFailure.LOST,
            detail="" if was_stopped else f"{owner} knows nothing of the task any more",
            generation=INFERRED_GENERATION,
        )
        if self._gang.has_exited(owner):
            return []
        return [self._commands.release(owner, self._record, gone.attempt), *self._task_changed(gone, now_s)]

    def undeliverable(self, node: NodeId, command: OwnerCommand, error: str, clock: Clock) -> list[ShepherdEffect]:
        """A command could not be delivered."""
        self._see(clock)
        if self._attempt is None:
            return []
        return [*self._attempt.undeliverable(node, command, error), *self._after_attempt_moved(clock.now_s)]

    def _after_attempt_moved(self, now_s: float) -> list[ShepherdEffect]:
        attempt = self._attempt
        if attempt is None:
            return []
        if attempt.phase not in UNANSWERED:
            self._window.ended(self.job_id, now_s)
        match attempt.phase:
            case AttemptPhase.HELD if not self.is_writing:
                return self._write_prepared(attempt)
            case AttemptPhase.STAGING:
                self._phase = self._gang.phase
                return []
            case AttemptPhase.LAUNCHING:
                self._phase = StartPhase.LAUNCH
                return []
            case AttemptPhase.LAUNCHED:
                self._attempt = None
                self._pacing.succeeded()
                return [*self._claim.used(attempt.shares, self._record)]
            case AttemptPhase.FAILED:
                return self._attempt_failed(attempt, now_s)
            case _:
                return []

    def _write_prepared(self, attempt: Attempt) -> list[ShepherdEffect]:
        self._phase, self._reason = StartPhase.PLACE, ""
        return self._write(
            changes.prepared(attempt.number, Allocation(attempt.shares, self._global_batch), attempt.rendezvous),
            lambda then_s: self._prepared(attempt, then_s),
        )

    def _prepared(self, attempt: Attempt, now_s: float) -> list[ShepherdEffect]:
        if self._attempt is not attempt:  # given up while the register was silent, and its holds with it
            return self._requeue(attempt.problem, now_s)
        where = ", ".join(f"{share.node} ({share.ranks})" for share in attempt.shares)
        placed = self._announce("job.placed", f"placed on {where}", attempt=attempt.number)
        return [placed, *attempt.prepared(self._record, now_s), *self._after_attempt_moved(now_s)]

    def _attempt_failed(self, attempt: Attempt, now_s: float) -> list[ShepherdEffect]:
        """Try again later: after a release where nothing has run, else after the end of whatever has."""
        if self._record.state is JobState.STARTING and attempt.may_have_run:
            return self._give_up_started(attempt, now_s)
        self._forget_attempt()
        was_alone = len(attempt.shares) == 1
        self._pacing.failed(attempt.refusal, attempt.refusing_node, now_s, was_alone=was_alone)
        round_lost = self._announce("negotiation.round", attempt.problem, result="aborted")
        effects: list[ShepherdEffect] = [*attempt.abandon(), round_lost]
        if self._record.state is JobState.QUEUED:
            self._reason = cleaned(attempt.problem)
            return effects
        return [*effects, *self._requeue(attempt.problem, now_s)]

    def _give_up_started(self, attempt: Attempt, now_s: float) -> list[ShepherdEffect]:
        self._attempt = None
        left = _left_by(attempt.shares, attempt.number)
        if self._may_restart:
            return self._restart(attempt.problem, left, now_s)
        return self._stop(EndReason.NODE_LOST, attempt.problem, now_s)

    def _forget_attempt(self) -> None:
        self._attempt, self._gang.is_stopping, self._stop_resend_s = None, False, float("inf")
        self._inquiry.forget()
        self._namesakes.forget()

    def _requeue(self, reason: str, now_s: float, *, relaunches: int = 0) -> list[ShepherdEffect]:
        self._back_in_queue(cleaned(reason), now_s)
        return self._write(changes.aborted(reason, relaunches=relaunches), _nothing)

    def _back_in_queue(self, reason: str, now_s: float) -> None:
        self._phase, self._reason = StartPhase.NONE, reason
        self.queued_since_s, self.running_since_s = now_s, float("inf")

    # Running.

    def task_reported(self, report: TaskReport, clock: Clock) -> list[ShepherdEffect]:
        """A task changed.  Old revisions are acknowledged again and change nothing."""
        self._see(clock)
        status = report.status
        is_lost = status.stage is TaskStage.EXITED and status.failure is TaskFailure.LOST
        if is_lost and self._is_namesake(status.node, status.attempt, report.origin):
            return []  # a copy of the owner's disk, or the owner itself, moved: time, and silence, tell
        self._namesakes.met(status.node)
        if status.stage is TaskStage.EXITED and self._settlement.ended(status.node, status.attempt):
            return [heard(status), *self._leftover_settled(status.node, status.attempt, clock.now_s)]
        if not self._wants(status.attempt):
            return [*dismissal(self._record, self._me, status)]
        known = self._gang.task(status.node)
        if known is not None and known.news > status.news:
            return [] if status.stage is TaskStage.EXITED else [heard(status)]
        effects: list[ShepherdEffect] = [] if status.stage is TaskStage.EXITED else [heard(status)]
        if known is None or known.news < status.news:
            effects += self._task_changed(status, clock.now_s)
        if status.stage in (TaskStage.ORDERED, TaskStage.STAGED) and self._had_started(status):
            return [*effects, *self._owner_has_nothing(status.node, clock.now_s)]
        return [*effects, *self._launch_again(status)]

    def _had_started(self, status: TaskStatus) -> bool:
        """The record says so, and the report was not made before this epoch."""
        is_of_epoch = status.epoch >= self._record.epoch
        return self._record.state is JobState.RUNNING and is_of_epoch and not self.is_writing

    def _launch_again(self, status: TaskStatus) -> list[SendPeer]:
        """The launch was acknowledged and yet the task stands there: its owner restarted, or it was staged anew."""
        is_wanted = self._record.state is JobState.STARTING and not self._gang.is_stopping and not self.is_writing
        if status.stage is not TaskStage.STAGED or not is_wanted:
            return []
        if self._attempt is not None and not self._attempt.has_launched(status.node):
            return []
        return [self._commands.launch(status.node, self._record)]

    def _wants(self, attempt: int) -> bool:
        """True for the attempt that is being placed or runs; an aborted one is not wanted any more."""
        has_tasks = self._attempt is not None or bool(self._record.shares)
        return attempt == self._current_attempt and has_tasks and not self._record.is_ended

    @property
    def _current_attempt(self) -> int:
        return self._attempt.number if self._attempt else self._record.attempt

    @property
    def _current_shares(self) -> tuple[Share, ...]:
        return self._attempt.shares if self._attempt else self._record.shares

    def _task_changed(self, status: TaskStatus, now_s: float) -> list[ShepherdEffect]:
        self._gang.put(status)
        if status.ran_s and self._record.started_utc_s:
            self._hears_owners_until_s = 0.0
            self.running_since_s = min(self.running_since_s, now_s - status.ran_s)
        effects: list[ShepherdEffect] = []
        if self._attempt is not None and status.stage is not TaskStage.EXITED:
            if status.stage is not TaskStage.ORDERED:
                effects += self._attempt.staged(status.node, now_s)
            effects += self._after_attempt_moved(now_s)
        if self._record.state is JobState.STARTING:
            self._phase = self._gang.phase
            effects += self._start_when_all_run(now_s)
        effects += self._stop_gang_when_one_failed(status, now_s)
        if self._all_exited():
            effects += self._gang_ended(now_s)
        return effects

    def _start_when_all_run(self, now_s: float) -> list[ShepherdEffect]:
        if not self._gang.have_all_started(self._record.shares):
            return []
        self._phase = StartPhase.NONE
        self._attempt = None  # an answer to a launch that is still missing says nothing new
        self._pacing.succeeded()
        self.running_since_s = now_s
        utc_s = self._utc_s(now_s)
        first_utc_s = self._record.first_started_utc_s or utc_s
        started = self._announce(
            "job.started",
            "its only rank runs" if (ranks := world_size(self._record.shares)) == 1 else f"all {ranks} ranks run",
            queue_wait_s=max(0.0, first_utc_s - self._record.submitted_utc_s),
            start_s=max(0.0, now_s - self.queued_since_s),
        )
        write = self._write(changes.started(utc_s), lambda _now_s: [started])
        return [*write, *self._claim.used(self._record.shares, self._record)]

    def _stop_gang_when_one_failed(self, status: TaskStatus, now_s: float) -> list[ShepherdEffect]:
        """One failed rank dooms the gang: the others would wait in a collective for ever."""
        if not has_failed(status) or self._gang.is_stopping or self._record.stop_reason is not EndReason.NONE:
            return []
        self._gang.is_stopping = True
        self._stop_grace_s = min(self._record.spec.grace_s, GANG_STOP_GRACE_S)
        return self._send_stops(now_s)

    def _all_exited(self) -> bool:
        return self._gang.have_all_exited(self._current_shares)

    def _gang_ended(self, now_s: float) -> list[ShepherdEffect]:
        """All processes are gone: another attempt where the job is not to blame, otherwise the end."""
        self._stop_resend_s = float("inf")
        failure = self._gang.failures.task
        if self._record.stop_reason in COMING_BACK:
            return self._requeue_stopped(now_s)
        if failure is not None and failure.failure is TaskFailure.LOST and self._may_restart:
            return self._restart(failure.detail, (), now_s)
        blameless = failure is not None and failure.failure in (TaskFailure.PORT_TAKEN, *NODE_FAILURES)
        may_relaunch = self._record.relaunches < RELAUNCHES_MAX and self._record.stop_reason is EndReason.NONE
        if failure is not None and blameless and may_relaunch and self._record.state is JobState.STARTING:
            return self._relaunch(failure, now_s)
        return self._finish(now_s)

    def _requeue_stopped(self, now_s: float) -> list[ShepherdEffect]:
        self._forget_attempt()
        told, ran_s = self._gang.dismissed(), self._ran_s(now_s)
        reason = f"{self._record.stop_reason.value}: {self._record.reason}"
        self._back_in_queue(cleaned(reason), now_s)
        # Somebody may have ordered it to end for good meanwhile; then it ends.
        return self._write(changes.made_room(reason, ran_s), lambda _now_s: [*told], self._finish)

    def _relaunch(self, failure: TaskStatus, now_s: float) -> list[ShepherdEffect]:
        self._forget_attempt()
        if failure.failure in NODE_FAILURES:
            self._pacing.avoid(failure.node, now_s)
        self._pacing.back_off(now_s)
        told = self._gang.dismissed()
        return [*self._requeue(f"trying again: {failure.detail}", now_s, relaunches=1), *told]

    # Losing a node.

    @property
    def _may_restart(self) -> bool:
        has_run = self._record.state in (JobState.STARTING, JobState.RUNNING)
        is_wanted = self._record.stop_reason is EndReason.NONE
        return has_run and is_wanted and self._record.restarts < self._record.spec.max_restarts

    def note_lost_node(self, node: NodeId, clock: Clock) -> list[ShepherdEffect]:
        """A node is believed to be gone for good: if it has ranks of this job, give up the whole gang.

        Safety does not rest on that belief: what is left there is settled before anything new starts.
        """
        self._see(clock)
        self.note_silent_node(node)
        if not self._has_share(node) or self.is_writing or clock.now_s < self._hears_owners_until_s:
            return []  # told again soon
        if self._runs_in_isolation and self._record.state is not JobState.STOPPING:
            return []  # its ranks run on: only their owner, or an operator, can say that they do not
        left = _left_by(self._record.shares, self._record.attempt)
        if self._may_restart:
            return self._restart(f"{node} was lost", left, clock.now_s)
        if self._record.state is not JobState.STOPPING:
            why = f"{node} was lost, and it was restarted {self._record.restarts} times already"
            effects = self._stop(EndReason.NODE_LOST, why, clock.now_s)
        else:
            effects = []
        return [*effects, *self._give_up(tuple(each for each in left if each.node == node), clock.now_s)]

    def only_namesakes_answered(self, now_s: float, for_s: float) -> list[NodeId]:
        """Nodes under whose names none but other machines have answered for so long."""
        return self._namesakes.standing(now_s, for_s)

    def hangs_on(self, node: NodeId) -> bool:
        """Its start or its end waits for that node's word."""
        is_starting = self._attempt is not None and self._attempt.awaits(node)
        return is_starting or self._record.state is JobState.STOPPING

    @property
    def _runs_in_isolation(self) -> bool:
        return self._record.spec.on_isolation is Isolation.CONTINUE

    @property
    def waits_for_lost(self) -> bool:
        """Something of it may be left on nodes that do not answer."""
        return bool(self._settlement.open) or any(self._has_share(node) for node in self._silent)

    def _give_up(self, left: tuple[Leftover, ...], now_s: float) -> list[ShepherdEffect]:
        """A gang that is being stopped ends without waiting for those."""
        return self._write(
            changes.unreachable(left), lambda then_s: [*self._settlement.begin(left, self._record, then_s)]
        )

    def _restart(
        self, why: str, left: tuple[Leftover, ...], now_s: float, *, vouched: Collection[NodeId] = ()
    ) -> list[ShepherdEffect]:
        """Give up the attempt as a whole and queue the job again; nothing starts before `left` is settled."""
        self._forget_attempt()
        exited = [each for each in left if self._gang.has_exited(each.node) or each.node in vouched]
        told, ran_s = self._gang.dismissed(), self._ran_s(now_s)
        restarts = self._record.restarts + 1
        self._pacing.restarted(restarts, now_s)
        reason = f"restarting ({restarts} of {self._record.spec.max_restarts}): {why}"[:REASON_LENGTH]
        self._back_in_queue(reason, now_s)
        restarted = self._announce("job.restarted", reason, restarts=restarts, attempt=self._record.attempt)

        def settle(then_s: float) -> list[ShepherdEffect]:
            begun = self._settlement.begin(left, self._record, then_s)
            settled: list[ShepherdEffect] = []
            for each in exited:
                self._settlement.ended(each.node, each.attempt)
                settled += self._leftover_settled(each.node, each.attempt, then_s)
            return [restarted, *begun, *told, *settled]

        return self._write(changes.given_up(reason, left, ran_s), settle)

    def silence_told(self, sender: NodeId, answer: SilenceAnswer, clock: Clock) -> list[ShepherdEffect]:
        """A holder says for how long a leftover has heard nothing that lets it run."""
        self._see(clock)
        if not self._settlement.silence_told(sender, answer, self._record):
            return []
        return self._leftover_settled(answer.owner, answer.attempt, clock.now_s)

    def declare_lost(self, clock: Clock) -> list[ShepherdEffect]:
        """An operator vouches for it that nothing is left on the nodes that do not answer."""
        self._see(clock)
        silent = [node for node in self._silent if self._has_share(node)]
        if silent and self._may_restart and not self.is_writing:
            left = _left_by(self._record.shares, self._record.attempt)
            why = f"an operator declared {', '.join(silent)} lost"
            return self._restart(why, left, clock.now_s, vouched=silent)
        effects: list[ShepherdEffect] = []
        for leftover in self._settlement.open:
            self._settlement.ended(leftover.node, leftover.attempt)
            effects += self._leftover_settled(leftover.node, leftover.attempt, clock.now_s)
        return effects

    def _leftover_settled(self, node: NodeId, attempt: int, now_s: float) -> list[ShepherdEffect]:
        """One is settled: a stopping gang counts it as ended; a queued job may start when it was the last."""
        record = self._record
        fence = self._commands.release(node, record, attempt)  # against a launch that is still on its way
        if record.state is JobState.STOPPING and attempt == record.attempt:
            gone = TaskStatus(
                self.job_id, record.epoch, attempt, node, TaskStage.EXITED, generation=INFERRED_GENERATION
            )
            return [fence, *self._task_changed(gone, now_s)]
        if self._settlement.open:
            return [fence]
        return [fence, *self._write(changes.settled, _nothing)]

    # Making room.

    def is_starving(self, now_s: float) -> bool:
        """It has waited or tried for so long that its place must be kept for it."""
        waited_s = now_s - self.queued_since_s
        return self.is_waiting and (waited_s >= STARVING_S or self._pacing.has_failed_often)

    @property
    def is_claiming(self) -> bool:
        """A place is being kept for it."""
        return self._claim.is_open

    def claim(
        self,
        shares: tuple[Share, ...],
        victims: Mapping[JobId, NodeId],
        ranking: Ranking,
        starts_within_s: float,
        clock: Clock,
    ) -> list[ShepherdEffect]:
        """Have these places kept, and have the victims make room for it; the caller has checked `is_waiting`."""
        self._see(clock)
        return [*self._claim.make(self._record, shares, victims, ranking, starts_within_s, clock.now_s)]

    def victim_answered(self, answer: PreemptAnswer, clock: Clock) -> list[ShepherdEffect]:
        """The shepherd of a job that should make room for this one."""
        self._see(clock)
        return [*self._claim.victim_answered(answer, self._record, clock.now_s)]

    def preempt(self, request: PreemptRequest, refusal: str, clock: Clock) -> list[ShepherdEffect]:
        """Another job wants this one's place; `refusal` is the policy's reason why not, by this node's own figures."""
        self._see(clock)
        record = self._record
        is_stopping = record.stop_reason in COMING_BACK
        if not refusal and not is_stopping and (record.state is not JobState.RUNNING or self.is_writing):
            refusal = f"it is {record.state.value}"
        told = PreemptAnswer(self.job_id, request.command_id, request.taker, not refusal, refusal[:REASON_LENGTH])
        answer = SendPeer(request.shepherd, told)
        if refusal or is_stopping or not request.is_decided:
            return [answer]
        self._stop_grace_s = record.spec.grace_s
        reason = f"makes room for {handle(request.taker)}"
        preempted = self._announce("job.preempted", reason, taker=request.taker)
        return [answer, preempted, *self._stop(EndReason.PREEMPTED, reason, clock.now_s)]

    def rescale(self, target: Allocation, reason: str, ranking: Ranking, clock: Clock) -> list[ShepherdEffect]:
        """End the attempt and begin the next one there, once its owners keep that place for it; the caller has checked
        that it runs and has committed a checkpoint."""
        self._see(clock)
        self._rescale = (target, reason)
        return [*self._claim.keep(self._record, target.shares, ranking, clock.now_s)]

    def _begin_rescale(self, now_s: float) -> list[ShepherdEffect]:
        """Nothing comes of it if the place is not to be had, or the job has to end or to make room meanwhile."""
        if self._claim.is_open and not self._claim.is_kept:
            return []
        wanted, self._rescale = self._rescale, None
        if wanted is None or not self._claim.is_kept:
            return []
        if self._record.state is not JobState.RUNNING or self.is_writing:
            return [*self._claim.withdraw(self._record)]
        self._next_place, reason = wanted
        self._stop_grace_s = self._record.spec.grace_s
        sizes = {"ranks_before": world_size(self._record.shares), "ranks_after": self._next_place.ranks}
        text = f"from {sizes['ranks_before']} to {sizes['ranks_after']} ranks; {reason}"
        return [self._announce("job.rescaled", text, **sizes), *self._stop(EndReason.RESCALED, reason, now_s)]

    def rebatch(self, global_batch: int, reason: str, clock: Clock) -> list[ShepherdEffect]:
        """Its ranks go on with another batch; they are told in answer to what they report."""
        self._see(clock)
        batches = {"batch_before": self._record.global_batch, "batch_after": global_batch}
        rebatched = self._announce("job.rebatched", reason, **batches)
        return [rebatched, *self._write(changes.rebatched(global_batch), _nothing)]

    def estimated(self, sender: NodeId, told: TaskEstimate, clock: Clock) -> list[ShepherdEffect]:
        """Its ranks have told how they train; what earlier attempts measured with other sizes stands."""
        record = self._record
        if told.attempt != record.attempt or record.state is not JobState.RUNNING:
            return []
        self._see(clock)
        self.estimate = merged(self.estimate, told.estimate)
        if told.global_batch in (0, record.global_batch) or not record.global_batch:
            return []
        return [SendPeer(sender, TaskBatch(record.job_id, record.attempt, record.global_batch))]

    def take_next_place(self) -> Allocation:
        """Where it was to go on when its attempt was ended for that; told once."""
        place, self._next_place = self._next_place, Allocation()
        return place

    def asked_to_yield(self, request: YieldRequest, clock: Clock) -> list[ShepherdEffect]:
        """A hold of ours stands in the way of a job that ranks higher: give way while nothing is decided."""
        self._see(clock)
        attempt = self._attempt
        if attempt is None or attempt.number != request.attempt or attempt.phase is not AttemptPhase.HOLDING:
            return []
        text = f"gave way to {handle(request.wanted_by)} on {request.owner}"
        attempt.give_way(request.owner, text)
        yielded = self._announce("job.yielded", text, taker=request.wanted_by)
        return [yielded, *self._after_attempt_moved(clock.now_s)]

    # Checkpoints.

    def commit_checkpoint(self, request: CheckpointRequest, clock: Clock) -> list[ShepherdEffect]:
        """Make it the one that the next attempt resumes from, if its attempt is the present one when its turn
        comes."""
        self._see(clock)

        def answer(problem: str) -> SendPeer:
            epoch, detail = self._record.epoch, problem[:REASON_LENGTH]
            told = CheckpointAnswer(request.job_id, request.attempt, request.command_id, epoch, not problem, detail)
            return SendPeer(request.owner, told)

        def commit(record: JobRecord) -> dict[str, object] | None:
            is_new = record.checkpoint != request.checkpoint
            return {"checkpoint": request.checkpoint} if is_new and not self._refuses(record, request) else None

        refusal = self._refuses(self._record, request)
        if not refusal and self._writer.waiting_count >= WAITING_MAX:
            return []  # no majority answers: it is asked again
        if refusal or self._record.checkpoint == request.checkpoint:
            return [answer(refusal)]
        text = f"checkpoint {request.checkpoint.name} of attempt {request.attempt}"
        saved = self._announce("job.checkpointed", text, bytes=request.checkpoint.size_bytes)
        return self._write(commit, lambda _now_s: [saved, answer("")])

    def _refuses(self, record: JobRecord, request: CheckpointRequest) -> str:
        if is_overtaken(record.checkpoint, request.checkpoint):
            return "a newer checkpoint of this attempt is committed already"
        return self._parts.may_commit(record, request.attempt)

    # Stopping.

    def cancel(self, request_id: int, grace_s: float | None, reason: str, clock: Clock) -> list[ShepherdEffect]:
        """Stop on a user's wish, and answer once that is durable; a shorter grace shortens the wait."""
        self._see(clock)
        if self._record.is_ended:
            return self.tell(request_id, clock)
        self._stop_grace_s = self._record.spec.grace_s if grace_s is None else grace_s
        effects = self._stop(EndReason.CANCELLED, reason or "cancelled", clock.now_s)
        return [*effects, *self.tell(request_id, clock)]

    def tell(self, request_id: int, clock: Clock, *, was_known: bool = False) -> list[ShepherdEffect]:
        """Answer a client with the record, after the updates under way: others may have told of their outcome already,
        and nobody may be told of an older one then."""
        self._see(clock)
        self._asking[request_id] = was_known
        return self._write(lambda record: None, _nothing, self._answer_clients)

    def _answer_clients(self, _now_s: float) -> list[ShepherdEffect]:
        asking, self._asking = self._asking, {}
        return [
            ReplyToClient(request_id, JobAccepted(self.record, was_known=was_known))
            for request_id, was_known in asking.items()
        ]

    def change_holders(self, holders: Holders, leaving: Holders, clock: Clock) -> list[ShepherdEffect]:
        """Exchange the holders: both old and new must agree until the second update has ended the exchange."""
        self._see(clock)
        names = ", ".join(holder.node for holder in holders)
        changed = self._announce("holder.replaced", f"held by {names}")

        def end(_now_s: float) -> list[ShepherdEffect]:
            return self._write(lambda record: {"leaving_holders": ()}, lambda _then_s: [changed])

        if not leaving:
            return end(clock.now_s)
        return self._write(lambda record: {"holders": holders, "leaving_holders": leaving}, end)

    def hand_over(self, successor: NodeId, clock: Clock) -> list[ShepherdEffect]:
        """Make another holder the shepherd; it acts as soon as it sees the record."""
        self._see(clock)

        def leave(_now_s: float) -> list[ShepherdEffect]:
            self._writer.close()
            return [self._announce("job.handed_over", f"{successor} shepherds it from now on")]

        return self._write(changes.handed_over(successor), leave)

    def farewell(self) -> list[ShepherdEffect]:
        """This node does not act for the job any more: nobody here will answer those who wait."""
        asking, self._asking = self._asking, {}
        remedy = "ask again: another shepherd acts for it soon"
        refusal = Refused("unavailable", "outcome unknown: this node lost its authority over the job", remedy)
        return [ReplyToClient(request_id, refusal) for request_id in asking]

    def signal(self, signal: int, clock: Clock) -> list[ShepherdEffect]:
        """Send a signal to every rank."""
        self._see(clock)
        record = self._record
        return [self._commands.signal(share.node, record, signal) for share in record.shares]

    def _stop(self, why: EndReason, reason: str, now_s: float) -> list[ShepherdEffect]:
        if self._record.stop_reason not in (EndReason.NONE, *COMING_BACK):
            return self._send_stops(now_s)
        self._reason = cleaned(reason)
        end = changes.ended(JobEvent.STOP_REQUESTED, self._gang.failures, why, self._utc_s(now_s), 0.0)
        return self._write(changes.stopped(why, self._reason, end), self._stop_decided, self._answer_clients)

    def _stop_decided(self, now_s: float) -> list[ShepherdEffect]:
        """The wish is durable.  A queued job has ended by it; a placed one has processes to stop first."""
        if self._record.is_ended:
            abandoned = self._attempt.abandon() if self._attempt else []
            self._attempt = None
            return [*self._answer_clients(now_s), *abandoned, *self._ended(now_s)]
        self._attempt = None  # late answers to commits and launches no longer matter
        return [*self._answer_clients(now_s), *self._send_stops(now_s)]

    def _send_stops(self, now_s: float) -> list[ShepherdEffect]:
        self._stop_resend_s = now_s + STOP_RESEND_S
        record = self._record
        attempt = self._current_attempt
        running = self._gang.unfinished(self._current_shares)
        return [self._commands.stop(node, record, attempt, self._stop_grace_s) for node in running]

    def on_timer(self, clock: Clock) -> list[ShepherdEffect]:
        """Attempt timers, repeats of stop orders, and the time limit."""
        self._see(clock)
        effects: list[ShepherdEffect] = []
        if self._attempt is not None and clock.now_s >= self._attempt.next_deadline_s:
            effects += [*self._attempt.on_timer(clock.now_s), *self._after_attempt_moved(clock.now_s)]
        effects += self._inquiry.on_timer(clock.now_s)
        effects += self._settlement.on_timer(self._record, clock.now_s)
        effects += [*self._claim.on_timer(self._record, clock.now_s), *self._begin_rescale(clock.now_s)]
        if clock.now_s >= self._stop_resend_s:
            effects += self._send_stops(clock.now_s)
        if clock.now_s >= self._time_limit_deadline_s():
            limit_s = self._record.spec.time_limit_s
            effects += self._stop(EndReason.TIMEOUT, f"time limit of {limit_s:g} s reached", clock.now_s)
        return effects

    def _time_limit_deadline_s(self) -> float:
        has_limit = self._record.spec.time_limit_s > 0 and self._record.stop_reason is EndReason.NONE
        is_running = self._record.state is JobState.RUNNING and not self.is_writing
        return self.running_since_s + self._record.spec.time_limit_s if has_limit and is_running else float("inf")

    # The end.

    def _finish(self, now_s: float) -> list[ShepherdEffect]:
        self._attempt = None

        def end(record: JobRecord) -> dict[str, object] | None:
            has_gang = record.state in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
            # A gang that ended by itself before its stop was durable need not come back.
            is_obsolete = record.stop_reason in COMING_BACK
            stop_reason = EndReason.NONE if is_obsolete else record.stop_reason
            failures, utc_s = self._gang.failures, self._utc_s(now_s)
            change = changes.ended(JobEvent.EXITED, failures, stop_reason, utc_s, self._ran_s(now_s))
            return change(record) if has_gang else None

        return self._write(end, self._ended)

    def _ended(self, now_s: float) -> list[ShepherdEffect]:
        record = self._record
        self._reason = record.reason
        self._settlement.forget()
        told = [*self._gang.dismissed(), *self._claim.withdraw(self._record)]
        why = record.end_reason.value
        ended = self._announce(
            "job.ended", record.detail or why, end_reason=why, exit_code=record.exit_code, signal=record.signal
        )
        return [*told, ended]

    # Register updates.

    def _write(self, change: Change, then: Continuation, otherwise: Continuation = _nothing) -> list[ShepherdEffect]:
        return self._writer.write(change, then, otherwise, self._now_s)

    def written(self, update_id: int, record: JobRecord, clock: Clock) -> list[ShepherdEffect]:
        """The register has decided our update: run its continuation, then the next write."""
        self._see(clock)
        effects = self._writer.written(update_id, record, clock.now_s)
        if effects is None:
            return []
        self._settlement.keep(self._record.leftovers)
        if self._attempt is not None and self._attempt.phase is AttemptPhase.HELD:
            effects += self._after_attempt_moved(clock.now_s)
        return effects

    def rewrite(self, update_id: int, clock: Clock) -> list[ShepherdEffect]:
        """The register could not tell whether our update is written: the same again."""
        self._see(clock)
        return self._writer.repeat(update_id)

    def refused(self, update_id: int, clock: Clock) -> list[ShepherdEffect] | None:
        """The register can never take our update; None for one that is not ours."""
        self._see(clock)
        return self._writer.refused(update_id, clock.now_s)

    # Small things.

    def validate(self) -> None:
        """Re-derive what binds attempt, claim, updates and what is left over to the record."""
        self._writer.validate()
        self._claim.validate()
        record, attempt = self._record, self._attempt
        if attempt is not None:
            attempt.validate()
            assert record.state in (JobState.QUEUED, JobState.STARTING, JobState.STOPPING), record.state
            assert attempt.phase not in (AttemptPhase.LAUNCHED, AttemptPhase.FAILED), attempt.phase
            assert attempt.number >= record.attempt, "an older attempt goes on"
        assert set(self._settlement.open) <= set(record.leftovers), "what is settled is not left over"
        is_running = record.state is JobState.RUNNING and not self.is_writing
        assert not is_running or self.running_since_s < float("inf"), "it runs since never"
        assert record.state in (JobState.QUEUED, JobState.ENDED) or record.shares, "a gang without nodes"

    def _see(self, clock: Clock) -> None:
        self._now_s, self._utc_offset_s = clock.now_s, clock.utc_s - clock.now_s
        self._stirred(self.job_id)

    def _announce(self, kind: str, text: str, **fields: str | float) -> Announce:
        return Announce(kind, text, self.job_id, self._me, fields)

    def _ran_s(self, now_s: float) -> float:
        """For how long the gang has run; 0 while it does not."""
        return max(0.0, now_s - self.running_since_s)

    def _utc_s(self, now_s: float) -> float:
        return now_s + self._utc_offset_s
