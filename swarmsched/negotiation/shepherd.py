"""One job's shepherd: the only writer of its record, from acceptance to the last exit code.

The record in the register is the truth; everything else here is volatile and can be rebuilt from it and from what
the owners answer (`resume`).  Register updates run one at a time and in order; whatever must not happen before an
update is durable is its continuation.  State changes go through the life cycle's table.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from swarmsched.api import EndReason, JobState, StartPhase
from swarmsched.effects import Announce, SendPeer
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.lifecycle import JobEvent, next_state
from swarmsched.ledger.message import (
    OwnerAnswer,
    OwnerCommand,
    Refusal,
    ReleaseRequest,
    TaskReport,
    TaskReportReceived,
)
from swarmsched.negotiation.attempt import Attempt, AttemptPhase, Ranking
from swarmsched.negotiation.inquiry import Commands, Inquiry
from swarmsched.negotiation.outcome import Failures, has_failed
from swarmsched.negotiation.record_writer import Change, Continuation, RecordWriter, ShepherdEffect
from swarmsched.record import JobRecord, PlanState
from swarmsched.resources import Share
from swarmsched.task import TaskFailure, TaskStage, TaskStatus

STOP_RESEND_S = 2.0
BACKOFF_S = 0.05
BACKOFF_S_MAX = 2.0
RELAUNCHES_MAX = 3
GANG_STOP_GRACE_S = 10.0
AVOID_NODE_S = 60.0
ATTEMPTS_SKIPPED_MAX = 1_024
DISMISSAL_COMMAND_ID = 2**32 - 2  # of a release that answers a stray report; others count from 1
INFERRED_GENERATION = 2**53  # of a status that we inferred: above all that an owner sends

NOTHING_LEFT = (Refusal.UNKNOWN, Refusal.NOT_COMMITTED, Refusal.RELEASED_ATTEMPT)


@dataclass(frozen=True, slots=True)
class Clock:
    """Both times of one moment: monotonic for decisions, UTC for the record."""

    now_s: float
    utc_s: float


class JobShepherd:
    """Acts for one job under one epoch."""

    def __init__(self, record: JobRecord, me: NodeId, rng: random.Random, update_ids: Iterator[int]) -> None:
        self._writer = RecordWriter(record, update_ids)
        self._me = me
        self._rng = rng
        self._commands = Commands(me, record.epoch)
        self._inquiry = Inquiry()
        self._attempt: Attempt | None = None
        self._phase = record.phase
        self._reason = record.reason
        self._tasks: dict[NodeId, TaskStatus] = {}
        self._stop_grace_s = record.spec.grace_s
        self._stop_resend_s = float("inf")
        self._is_gang_stopping = False
        self._failures = Failures()
        self._failed_attempts = 0  # since the last success, for the backoff
        self._last_attempt = record.attempt  # numbers are never used twice
        self._skipped_attempts = 0
        self._silent: dict[NodeId, None] = {}  # nodes of ours that are believed failed
        self.queued_since_s = 0.0  # when it last became queued
        self.running_since_s = float("inf")
        self.may_try_after_s = 0.0
        self.avoided: dict[NodeId, float] = {}  # node -> until when
        self._utc_offset_s = 0.0
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
        """Queued, with no attempt and no write under way: may be placed."""
        return self._record.state is JobState.QUEUED and self._attempt is None and not self.is_writing

    @property
    def is_writing(self) -> bool:
        """A register update is under way or waits its turn."""
        return self._writer.is_busy

    @property
    def unanswered_holds(self) -> tuple[Share, ...]:
        """What this job asked for and nobody's free counts show yet."""
        return self._attempt.unanswered_holds if self._attempt else ()

    @property
    def is_placing(self) -> bool:
        """Placement has begun and is not decided."""
        return self._attempt is not None

    @property
    def next_deadline_s(self) -> float:
        """Earliest of: attempt timers, repeats of stops and questions, the job's time limit."""
        attempt_s = self._attempt.next_deadline_s if self._attempt else float("inf")
        return min(attempt_s, self._stop_resend_s, self._inquiry.next_deadline_s, self._time_limit_deadline_s())

    # Start of life.

    def accepted(self, clock: Clock) -> list[ShepherdEffect]:
        """The first record is durable."""
        self._see(clock)
        self.queued_since_s = clock.now_s
        return [
            Announce(
                "job.submitted",
                f"{self._record.spec.user or 'somebody'} submitted it",
                self.job_id,
                self._me,
                {"gpus": self._record.spec.total_gpus},
            )
        ]

    def resume(self, generation: int, clock: Clock) -> list[ShepherdEffect]:
        """This agent is back: retake the job under a new epoch, then find out what became of its attempt."""
        self._see(clock)
        self.queued_since_s = clock.now_s
        self._commands = Commands(self._me, self._record.epoch + 1)
        return self._write(
            lambda record: {
                "epoch": record.epoch + 1,
                "shepherd": self._me,
                "shepherd_generation": generation,
            },
            self._reconcile,
        )

    def _reconcile(self, now_s: float) -> list[ShepherdEffect]:
        record = self._record
        if record.state is JobState.QUEUED or not record.shares:
            return []
        if record.state is JobState.STARTING and record.plan_state is PlanState.PREPARED:
            # The commits ask as well.  An answer "unknown" that a commit overtook must not be taken for a loss.
            self._attempt = self._new_attempt(record.attempt, record.shares, Ranking("", ()))
            return [*self._attempt.prepared(record, now_s)]
        if record.started_utc_s:
            self.running_since_s = now_s - max(0.0, self._utc_s(now_s) - record.started_utc_s)
        if record.state is JobState.STOPPING:
            self._stop_resend_s = now_s
        return [*self._ask_status([share.node for share in record.shares], now_s)]

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
        if not self._has_share(node) or (self._attempt is not None and self._attempt.awaits(node)):
            return []
        return [*self._ask_status([node], clock.now_s)]

    def _has_share(self, node: NodeId) -> bool:
        return not self._record.is_ended and any(share.node == node for share in self._record.shares)

    # Placement.

    def place(self, shares: tuple[Share, ...], ranking: Ranking, clock: Clock) -> list[ShepherdEffect]:
        """Try these nodes; the caller has checked `is_waiting`."""
        self._see(clock)
        number = max(self._last_attempt, self._record.attempt) + 1 + self._skipped_attempts
        self._attempt = self._new_attempt(number, shares, ranking)
        return [*self._attempt.begin(clock.now_s)]

    def explain(self, reason: str) -> None:
        """Why it waits, for people; volatile."""
        if self._record.state is JobState.QUEUED:
            self._reason = reason[:1024]

    def _new_attempt(self, number: int, shares: tuple[Share, ...], ranking: Ranking) -> Attempt:
        self._tasks, self._failures, self._last_attempt = {}, Failures(), number
        return Attempt(self._record, number, shares, ranking, self._commands.ids)

    def owner_answered(self, answer: OwnerAnswer, clock: Clock) -> list[ShepherdEffect]:
        """An owner's answer to a command of this job."""
        self._see(clock)
        attempt = self._attempt
        is_status = self._inquiry.answered(answer)
        if attempt is not None and attempt.number == answer.attempt:
            if is_status and answer.refusal in NOTHING_LEFT:
                attempt.lost(answer.owner)
            return [*attempt.answered(answer, clock.now_s), *self._after_attempt_moved(clock.now_s)]
        is_current = answer.attempt == self._record.attempt and not self._record.is_ended
        if not is_current or answer.refusal not in NOTHING_LEFT or self._record.state is JobState.QUEUED:
            return []
        return self._owner_has_nothing(answer, clock.now_s)

    def _owner_has_nothing(self, answer: OwnerAnswer, now_s: float) -> list[ShepherdEffect]:
        """A stop or status request met no task: it never began there, or every trace of it is lost."""
        was_stopped = self._record.stop_reason is not EndReason.NONE or self._is_gang_stopping
        gone = TaskStatus(
            self.job_id,
            answer.epoch,
            answer.attempt,
            answer.owner,
            TaskStage.EXITED,
            failure=TaskFailure.NONE if was_stopped else TaskFailure.LOST,
            detail="" if was_stopped else f"{answer.owner} knows nothing of the task any more",
            generation=INFERRED_GENERATION,
        )
        known = self._tasks.get(answer.owner)
        if known is not None and known.stage is TaskStage.EXITED:
            return []
        return [self._commands.release(answer.owner, self._record, answer.attempt), *self._task_changed(gone, now_s)]

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
        match attempt.phase:
            case AttemptPhase.HELD if not self.is_writing:
                return self._write_prepared(attempt)
            case AttemptPhase.STAGING:
                self._phase = self._staging_phase()
                return []
            case AttemptPhase.LAUNCHING:
                self._phase = StartPhase.LAUNCH
                return []
            case AttemptPhase.LAUNCHED:
                self._attempt = None
                self._failed_attempts = self._skipped_attempts = 0
                return []
            case AttemptPhase.FAILED:
                return self._attempt_failed(attempt, now_s)
            case _:
                return []

    def _write_prepared(self, attempt: Attempt) -> list[ShepherdEffect]:
        host, port = attempt.rendezvous
        self._phase, self._reason = StartPhase.PLACE, ""
        changes: dict[str, object] = {
            "phase": StartPhase.PLACE,
            "reason": "",
            "attempt": attempt.number,
            "plan_state": PlanState.PREPARED,
            "shares": attempt.shares,
            "rendezvous_host": host,
            "rendezvous_port": port,
        }
        return self._write(
            lambda record: _moved(record, JobEvent.PLACED) | changes if record.state is JobState.QUEUED else None,
            lambda then_s: self._prepared(attempt, then_s),
        )

    def _prepared(self, attempt: Attempt, now_s: float) -> list[ShepherdEffect]:
        if self._attempt is not attempt:
            return []
        where = ", ".join(f"{share.node} ({share.ranks})" for share in attempt.shares)
        placed = Announce("job.placed", f"placed on {where}", self.job_id, self._me, {"attempt": attempt.number})
        return [placed, *attempt.prepared(self._record, now_s), *self._after_attempt_moved(now_s)]

    def _attempt_failed(self, attempt: Attempt, now_s: float) -> list[ShepherdEffect]:
        """Release everything and try again later; nothing has run."""
        self._forget_attempt()
        self._failed_attempts += 1
        if attempt.refusal is Refusal.RELEASED_ATTEMPT:
            # An earlier life went further than our record says: leap ahead of its numbers instead of counting up.
            self._skipped_attempts = min(ATTEMPTS_SKIPPED_MAX, 2 * self._skipped_attempts + 1)
        self._back_off(now_s)
        if attempt.refusing_node is not None:
            self.avoided[attempt.refusing_node] = now_s + BACKOFF_S_MAX
        round_lost = Announce(
            "negotiation.round",
            attempt.problem,
            self.job_id,
            self._me,
            {"result": "aborted"},
        )
        effects: list[ShepherdEffect] = [*attempt.abandon(), round_lost]
        if self._record.state is JobState.QUEUED:
            self._reason = attempt.problem[:1024]
            return effects
        return [*effects, *self._requeue(attempt.problem, now_s)]

    def _forget_attempt(self) -> None:
        self._attempt, self._is_gang_stopping, self._stop_resend_s = None, False, float("inf")
        self._inquiry.forget()

    def _requeue(self, reason: str, now_s: float, **changes: object) -> list[ShepherdEffect]:
        self._phase, self._reason = StartPhase.NONE, reason[:1024]
        self.queued_since_s, self.running_since_s = now_s, float("inf")
        aborted: dict[str, object] = {
            "phase": StartPhase.NONE,
            "reason": reason[:1024],
            "plan_state": PlanState.ABORTED,
            "shares": (),
        }

        def requeue(record: JobRecord) -> dict[str, object] | None:
            is_starting = record.state is JobState.STARTING  # one that is being stopped meanwhile goes on being stopped
            return _moved(record, JobEvent.START_ABORTED) | aborted | changes if is_starting else None

        return self._write(requeue, lambda _now_s: [])

    def _back_off(self, now_s: float) -> None:
        longest = min(BACKOFF_S_MAX, BACKOFF_S * 2 ** min(self._failed_attempts, 10))
        self.may_try_after_s = now_s + self._rng.uniform(0.0, longest)

    # Running.

    def task_reported(self, report: TaskReport, clock: Clock) -> list[ShepherdEffect]:
        """A task changed.  Old revisions are acknowledged again and change nothing."""
        self._see(clock)
        status = report.status
        if not self._wants(status.attempt):
            return [*dismissal(self._record, self._me, status)]
        known = self._tasks.get(status.node)
        if known is not None and known.news > status.news:
            return [] if status.stage is TaskStage.EXITED else [heard(status)]
        effects: list[ShepherdEffect] = [] if status.stage is TaskStage.EXITED else [heard(status)]
        if known is None or known.news < status.news:
            effects += self._task_changed(status, clock.now_s)
        return [*effects, *self._launch_again(status)]

    def _launch_again(self, status: TaskStatus) -> list[SendPeer]:
        """The launch was acknowledged and yet the task stands there: its owner restarted, or it was staged anew."""
        is_wanted = self._record.state is JobState.STARTING and not self._is_gang_stopping and not self.is_writing
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

    def _task_changed(self, status: TaskStatus, now_s: float) -> list[ShepherdEffect]:
        self._tasks[status.node] = status
        self._failures.see(status)
        effects: list[ShepherdEffect] = []
        if self._attempt is not None and status.stage is not TaskStage.EXITED:
            if status.stage is not TaskStage.ORDERED:
                effects += self._attempt.staged(status.node, now_s)
            effects += self._after_attempt_moved(now_s)
        if self._record.state is JobState.STARTING:
            self._phase = self._staging_phase()
            effects += self._start_when_all_run(now_s)
        effects += self._stop_gang_when_one_failed(status, now_s)
        if self._all_exited():
            effects += self._gang_ended(now_s)
        return effects

    def _staging_phase(self) -> StartPhase:
        phases = {status.phase for status in self._tasks.values()}
        for phase in (StartPhase.SYNC, StartPhase.ENVIRONMENT):
            if phase.value in phases:
                return phase
        return StartPhase.LAUNCH

    def _start_when_all_run(self, now_s: float) -> list[ShepherdEffect]:
        statuses = [self._tasks.get(share.node) for share in self._record.shares]
        if not all(status is not None and _has_started(status) for status in statuses):
            return []
        self._phase = StartPhase.NONE
        self._attempt = None  # an answer to a launch that is still missing says nothing new
        self._failed_attempts = self._skipped_attempts = 0
        self.running_since_s = now_s
        utc_s = self._utc_s(now_s)
        first_utc_s = self._record.first_started_utc_s or utc_s
        changes: dict[str, object] = {
            "phase": StartPhase.NONE,
            "plan_state": PlanState.LAUNCHED,
            "started_utc_s": utc_s,
            "first_started_utc_s": first_utc_s,
        }
        started = Announce(
            "job.started",
            "its only rank runs" if self._record.spec.ranks == 1 else f"all {self._record.spec.ranks} ranks run",
            self.job_id,
            self._me,
            {
                "queue_wait_s": max(0.0, first_utc_s - self._record.submitted_utc_s),
                "start_s": max(0.0, now_s - self.queued_since_s),
            },
        )

        def run(record: JobRecord) -> dict[str, object] | None:
            is_starting = record.state is JobState.STARTING
            return _moved(record, JobEvent.STARTED) | changes if is_starting else None

        return self._write(run, lambda _now_s: [started])

    def _stop_gang_when_one_failed(self, status: TaskStatus, now_s: float) -> list[ShepherdEffect]:
        """One failed rank dooms the gang: the others would wait in a collective for ever."""
        if not has_failed(status) or self._is_gang_stopping or self._record.stop_reason is not EndReason.NONE:
            return []
        self._is_gang_stopping = True
        self._stop_grace_s = min(self._record.spec.grace_s, GANG_STOP_GRACE_S)
        return self._send_stops(now_s)

    def _all_exited(self) -> bool:
        shares = self._attempt.shares if self._attempt else self._record.shares
        statuses = [self._tasks.get(share.node) for share in shares]
        return bool(shares) and all(s is not None and s.stage is TaskStage.EXITED for s in statuses)

    def _gang_ended(self, now_s: float) -> list[ShepherdEffect]:
        """All processes are gone: another attempt where the job is not to blame, otherwise the end."""
        self._stop_resend_s = float("inf")
        failure = self._failures.task
        blameless = failure is not None and failure.failure in (TaskFailure.PORT_TAKEN, TaskFailure.UNREACHABLE)
        may_relaunch = self._record.relaunches < RELAUNCHES_MAX and self._record.stop_reason is EndReason.NONE
        if failure is not None and blameless and may_relaunch and self._record.state is JobState.STARTING:
            return self._relaunch(failure, now_s)
        return self._finish(now_s)

    def _relaunch(self, failure: TaskStatus, now_s: float) -> list[ShepherdEffect]:
        self._forget_attempt()
        statuses, self._tasks = dict(self._tasks), {}
        if failure.failure is TaskFailure.UNREACHABLE:
            self.avoided[failure.node] = now_s + AVOID_NODE_S
        self._back_off(now_s)
        heard = _all_heard(statuses.values())
        reason = f"trying again: {failure.detail}"
        return [*self._requeue(reason, now_s, relaunches=self._record.relaunches + 1), *heard]

    # Stopping.

    def cancel(self, grace_s: float | None, reason: str, clock: Clock) -> list[ShepherdEffect]:
        """Stop on a user's wish; harmless when repeated, a shorter grace shortens the wait."""
        self._see(clock)
        if self._record.is_ended:
            return []
        self._stop_grace_s = self._record.spec.grace_s if grace_s is None else grace_s
        return self._stop(EndReason.CANCELLED, reason or "cancelled", clock.now_s)

    def signal(self, signal: int, clock: Clock) -> list[ShepherdEffect]:
        """Send a signal to every rank."""
        self._see(clock)
        record = self._record
        return [self._commands.signal(share.node, record, signal) for share in record.shares]

    def _stop(self, why: EndReason, reason: str, now_s: float) -> list[ShepherdEffect]:
        if self._record.stop_reason is not EndReason.NONE:
            return self._send_stops(now_s)
        self._reason = reason[:1024]
        wish: dict[str, object] = {"stop_reason": why, "reason": reason[:1024], "detail": reason[:1024]}

        def stop(record: JobRecord) -> dict[str, object] | None:
            if record.is_ended or record.stop_reason is not EndReason.NONE:
                return None
            if record.state is JobState.QUEUED:
                return self._final(record, JobEvent.STOP_REQUESTED, why, now_s) | wish
            return _moved(record, JobEvent.STOP_REQUESTED) | wish

        return self._write(stop, self._stop_decided)

    def _stop_decided(self, now_s: float) -> list[ShepherdEffect]:
        """The wish is durable.  A queued job has ended by it; a placed one has processes to stop first."""
        if self._record.is_ended:
            abandoned = self._attempt.abandon() if self._attempt else []
            self._attempt = None
            return [*abandoned, *self._ended(now_s)]
        self._attempt = None  # late answers to commits and launches no longer matter
        return self._send_stops(now_s)

    def _send_stops(self, now_s: float) -> list[ShepherdEffect]:
        self._stop_resend_s = now_s + STOP_RESEND_S
        record = self._record
        attempt = self._current_attempt
        running = [
            share.node
            for share in (self._attempt.shares if self._attempt else record.shares)
            if (status := self._tasks.get(share.node)) is None or status.stage is not TaskStage.EXITED
        ]
        return [self._commands.stop(node, record, attempt, self._stop_grace_s) for node in running]

    def on_timer(self, clock: Clock) -> list[ShepherdEffect]:
        """Attempt timers, repeats of stop orders, and the time limit."""
        self._see(clock)
        effects: list[ShepherdEffect] = []
        if self._attempt is not None and clock.now_s >= self._attempt.next_deadline_s:
            effects += [*self._attempt.on_timer(clock.now_s), *self._after_attempt_moved(clock.now_s)]
        effects += self._inquiry.on_timer(clock.now_s)
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
        def end(record: JobRecord) -> dict[str, object] | None:
            has_gang = record.state in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
            return self._final(record, JobEvent.EXITED, record.stop_reason, now_s) if has_gang else None

        self._attempt = None
        return self._write(end, self._ended)

    def _final(self, record: JobRecord, event: JobEvent, stop_reason: EndReason, now_s: float) -> dict[str, object]:
        utc_s = self._utc_s(now_s)
        return (
            _moved(record, event)
            | self._failures.outcome(stop_reason)
            | {
                "phase": StartPhase.NONE,
                "ended_utc_s": utc_s,
                "attained_gpu_s": record.attained_gpu_s + _served_gpu_s(record, utc_s),
            }
        )

    def _ended(self, now_s: float) -> list[ShepherdEffect]:
        record = self._record
        self._reason = record.reason
        heard = _all_heard(self._tasks.values())
        self._tasks = {}
        ended = Announce(
            "job.ended",
            record.detail or record.end_reason.value,
            self.job_id,
            self._me,
            {"end_reason": record.end_reason.value, "exit_code": record.exit_code, "signal": record.signal},
        )
        return [*heard, ended]

    # Register updates.

    def _write(self, change: Change, then: Continuation) -> list[ShepherdEffect]:
        return self._writer.write(change, then)

    def written(self, update_id: int, record: JobRecord, clock: Clock) -> list[ShepherdEffect]:
        """The register has decided our update: run its continuation, then the next write."""
        self._see(clock)
        effects = self._writer.written(update_id, record, clock.now_s)
        if effects is None:
            return []
        if self._attempt is not None and self._attempt.phase is AttemptPhase.HELD:
            effects += self._after_attempt_moved(clock.now_s)
        return effects

    def rewrite(self, update_id: int, clock: Clock) -> list[ShepherdEffect]:
        """The register could not tell whether our update is written: the same again."""
        self._see(clock)
        return self._writer.repeat(update_id)

    # Small things.

    def _see(self, clock: Clock) -> None:
        self._utc_offset_s = clock.utc_s - clock.now_s

    def _utc_s(self, now_s: float) -> float:
        return now_s + self._utc_offset_s


def _moved(record: JobRecord, event: JobEvent) -> dict[str, object]:
    return {"state": next_state(record.state, event, f"job {record.job_id}")}


def _served_gpu_s(record: JobRecord, utc_s: float) -> float:
    """GPU-seconds of the attempt that now ends (Tiresias' attained service, W x t)."""
    if not record.started_utc_s or not record.shares:
        return 0.0
    return record.spec.total_gpus * max(0.0, utc_s - record.started_utc_s)


def dismissal(record: JobRecord, me: NodeId, status: TaskStatus) -> list[SendPeer]:
    """A report of an attempt that is over: heard, and released in case the first release was lost."""
    if status.stage is TaskStage.EXITED:
        return [heard(status)]
    release = ReleaseRequest(record.job_id, record.epoch, status.attempt, DISMISSAL_COMMAND_ID, me)
    return [heard(status), SendPeer(status.node, release)]


def heard(status: TaskStatus) -> SendPeer:
    """The acknowledgement of a report; of an exit only once its result is in the register, or wanted by nobody."""
    received = TaskReportReceived(status.job_id, status.attempt, status.revision, status.generation)
    return SendPeer(status.node, received)


def _all_heard(statuses: Iterable[TaskStatus]) -> list[ShepherdEffect]:
    return [heard(status) for status in statuses if status.generation < INFERRED_GENERATION]


def _has_started(status: TaskStatus) -> bool:
    return status.stage is TaskStage.STARTED or (status.stage is TaskStage.EXITED and bool(status.exits))
