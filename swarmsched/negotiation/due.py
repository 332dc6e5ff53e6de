"""What is due of a job, as a table of its states: what becomes due when one is entered, and what as long as it lasts.

Everything follows from the decided record and from what is known (`ShepherdState`), so it is the same whether this
shepherd has brought the job here or has taken it up from another.  A rule looks, and gives what is due now: commands to
owners at once, and at most one change of the record, while none is under way.  Where a change is needed and another is
under way, the rule finds the need again once that is decided.
"""

from collections.abc import Callable, Iterable, Mapping

from swarmsched.api import COMING_BACK, EndReason, JobState
from swarmsched.commands import JobAccepted
from swarmsched.effects import ReplyToClient, SendPeer
from swarmsched.fields import cleaned
from swarmsched.ids import NodeId
from swarmsched.ledger.message import CheckpointAnswer
from swarmsched.negotiation.attempt import Attempt, AttemptPhase, Ranking
from swarmsched.negotiation.changes import (
    REASON_LENGTH,
    Ended,
    GivenUp,
    HoldersExchanged,
    MadeRoom,
    Placed,
    RecordChange,
    Settled,
    StartAborted,
    Started,
)
from swarmsched.negotiation.gang import Gang, GangEnd, gone
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.record import JobRecord, Leftover
from swarmsched.resources import Share, world_size
from swarmsched.task import TaskFailure
from swarmsched.view import Allocation

STOP_RESEND_S = 2.0
GANG_STOP_GRACE_S = 10.0
HEAR_OWNERS_S = 0.5  # that a new shepherd waits for one of a gang's owners to say for how long it has run
RELAUNCHES_MAX = 3
UNANSWERED = (AttemptPhase.HOLDING, AttemptPhase.HELD, AttemptPhase.COMMITTING)
NODE_FAILURES = (TaskFailure.UNREACHABLE, TaskFailure.INTERNAL)  # another node may do better
BLAMELESS = (TaskFailure.PORT_TAKEN, *NODE_FAILURES)

Entered = Callable[[ShepherdState, JobRecord | None, float], list[ShepherdEffect]]
Rule = Callable[[ShepherdState, float], list[ShepherdEffect]]


def decided(job: ShepherdState, before: JobRecord | None, now_s: float) -> list[ShepherdEffect]:
    """What follows once from a record that was decided; `before` is None for one that another shepherd has left."""
    record = job.writer.record
    effects = _name_leftovers(job, () if before is None else before.leftovers, now_s)
    if before is None or (before.state, before.stop_reason) != (record.state, record.stop_reason):
        effects += ENTERED[record.state](job, before, now_s)
    if before is not None:
        effects += [*_checkpoint_saved(job, before), *_holders_changed(job, before), *_handed_over(job)]
    return effects


def due(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """All that is due now."""
    if job.writer.is_closed:
        return []
    effects = [*job.writer.go_on(), *answered_clients(job)]
    for rule in DUE[job.writer.record.state]:
        effects += rule(job, now_s)
    return effects


def answered_clients(job: ShepherdState) -> list[ShepherdEffect]:
    """Those for whom all is decided that was wished before they asked."""
    ready = [request_id for request_id, (awaited, _) in job.asking.items() if awaited <= job.writer.done_count]
    return [
        ReplyToClient(request_id, JobAccepted(job.record, was_known=job.asking.pop(request_id)[1]))
        for request_id in ready
    ]


# Queued.


def _back_in_queue(job: ShepherdState, before: JobRecord | None, now_s: float) -> list[ShepherdEffect]:
    """Its gang is over, or was given up: owners may forget what they have told."""
    record, told = job.writer.record, job.gang.dismissed()
    effects: list[ShepherdEffect] = []
    if before is not None and record.restarts > before.restarts:
        job.pacing.restarted(record.restarts, now_s)
        effects.append(job.announce("job.restarted", record.reason, restarts=record.restarts, attempt=record.attempt))
    if before is not None and record.relaunches > before.relaunches:
        failure = job.gang.failures.task
        if failure is not None and failure.failure in NODE_FAILURES:
            job.pacing.avoid(failure.node, now_s)
        job.pacing.back_off(now_s)
    job.end_attempt()
    job.gang, job.vouched, job.reason = Gang(), {}, record.reason
    job.queued_since_s, job.running_since_s = now_s, float("inf")
    return [*effects, *told]


def _name_leftovers(job: ShepherdState, known: Iterable[Leftover], now_s: float) -> list[ShepherdEffect]:
    """Those that the record names from now on have to end, or have ended."""
    record = job.writer.record
    new = [each for each in record.leftovers if each not in known]
    if not new:
        return []
    effects: list[ShepherdEffect] = [*job.settlement.begin(new, record, now_s)]
    for each in new:
        if job.gang.has_exited(each.node) or each.node in job.vouched:
            job.settlement.ended(each.node, each.attempt)
            effects += leftover_settled(job, each.node, each.attempt)
    return effects


def leftover_settled(job: ShepherdState, node: NodeId, attempt: int) -> list[ShepherdEffect]:
    """One is settled: a stopping gang counts it as ended."""
    record = job.writer.record
    if record.state is JobState.STOPPING and attempt == record.attempt:
        job.gang.put(gone(record, attempt, node, TaskFailure.NONE))
    return [job.commands.release(node, record, attempt)]  # against a launch that is still on its way


def _settle(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """Once nothing is left, it may be placed."""
    del now_s
    is_settled = job.writer.record.leftovers and not job.settlement.open and not job.writer.is_busy
    return [*job.write(Settled())] if is_settled else []


# Starting: the attempt holds, the record agrees, and the owners commit, stage and launch.


def _follow_attempt(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    attempt = job.attempt
    if attempt is None:
        return []
    if attempt.phase not in UNANSWERED:
        job.window.ended(job.job_id, now_s)
    match attempt.phase:
        case AttemptPhase.HELD if not job.writer.is_busy:
            target = Allocation(attempt.shares, job.global_batch)
            return [*job.write(Placed(attempt.number, target, attempt.rendezvous))]
        case AttemptPhase.LAUNCHED:
            job.attempt = None
            job.pacing.succeeded()
            return [*job.claim.used(attempt.shares, job.writer.record)]
        case AttemptPhase.FAILED:
            return _attempt_failed(job, attempt, now_s)
        case _:
            return []


def _agreed(job: ShepherdState, before: JobRecord | None, now_s: float) -> list[ShepherdEffect]:
    """The record names the gang: its owners are to commit.

    Of an attempt that another shepherd has left nobody knows how far it came.  The commits ask as well: an answer
    "unknown" that a commit overtook must not be taken for a loss.
    """
    record = job.writer.record
    if job.withdrawn is not None:  # given up while the register was silent, and its holds with it
        return []
    effects: list[ShepherdEffect] = []
    if before is not None:
        where = ", ".join(f"{share.node} ({share.ranks})" for share in record.shares)
        effects.append(job.announce("job.placed", f"placed on {where}", attempt=record.attempt))
    if job.attempt is None:
        job.begin_attempt(record.attempt, record.shares, Ranking("", ())).may_have_run = True
    assert job.attempt is not None
    return [*effects, *job.attempt.prepared(record, now_s)]


def _attempt_failed(job: ShepherdState, attempt: Attempt, now_s: float) -> list[ShepherdEffect]:
    """Try again later: after a release where nothing has run, else after the end of whatever has."""
    if job.writer.record.state is JobState.STARTING and attempt.may_have_run:
        return _give_up_started(job, attempt, now_s)
    job.end_attempt()
    job.withdrawn = attempt
    job.pacing.failed(attempt.refusal, attempt.refusing_node, now_s, was_alone=len(attempt.shares) == 1)
    job.reason = cleaned(attempt.problem)
    return [*attempt.abandon(), job.announce("negotiation.round", attempt.problem, result="aborted")]


def _give_up_started(job: ShepherdState, attempt: Attempt, now_s: float) -> list[ShepherdEffect]:
    if job.writer.is_busy:
        return []
    job.attempt = None
    if job.may_restart:
        return restart(job, attempt.problem, attempt.shares, now_s)
    job.wish_stop(EndReason.NODE_LOST, attempt.problem)
    return [*job.writer.go_on()]


def _abort(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """An attempt that was given up is in the record all the same."""
    del now_s
    attempt = job.withdrawn
    if attempt is None or attempt.number != job.writer.record.attempt or job.writer.is_busy:
        return []
    return [*job.write(StartAborted(attempt.problem))]


def _start(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """Once all run who must, the job does."""
    record = job.writer.record
    if not job.gang.have_all_started(job.conduct.must_start(record.shares)):
        return []
    job.running_since_s = min(job.running_since_s, now_s)
    if job.writer.is_busy:
        return []
    job.attempt = None  # an answer to a launch that is still missing says nothing new
    job.pacing.succeeded()
    return [*job.write(Started(job.utc_s)), *job.claim.used(record.shares, record)]


# Running.


def _runs(job: ShepherdState, before: JobRecord | None, now_s: float) -> list[ShepherdEffect]:
    record = job.writer.record
    if before is None:
        return _ask_owners(job, now_s)
    ranks = world_size(record.shares)
    return [
        job.announce(
            "job.started",
            "its only rank runs" if ranks == 1 else f"all {ranks} ranks run",
            queue_wait_s=max(0.0, record.first_started_utc_s - record.submitted_utc_s),
            start_s=max(0.0, job.running_since_s - job.queued_since_s),
        )
    ]


def _ask_owners(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """Nothing is known of a gang that another shepherd has left; its owners tell for how long it has run."""
    record = job.writer.record
    if record.started_utc_s:
        job.running_since_s, job.hears_owners_until_s = now_s, now_s + HEAR_OWNERS_S
    return [*job.inquiry.ask([job.commands.status(share.node, record) for share in record.shares], now_s)]


def _end_at_limit(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    if now_s < job.time_limit_at_s:
        return []
    job.wish_stop(EndReason.TIMEOUT, f"time limit of {job.writer.record.spec.time_limit_s:g} s reached")
    return [*job.writer.go_on()]


def _rescale(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """End the attempt once its next place is kept.

    Nothing comes of it if the place is not to be had, or the job has to end or to make room meanwhile.
    """
    del now_s
    if job.rescale_to is None or (job.claim.is_open and not job.claim.is_kept):
        return []
    (target, reason), job.rescale_to = job.rescale_to, None
    record = job.writer.record
    if not job.claim.is_kept:
        return []
    if record.state is not JobState.RUNNING or job.writer.is_busy:
        return [*job.claim.withdraw(record)]
    job.next_place, job.stop_grace_s = target, record.spec.grace_s
    before = world_size(record.shares)
    text = f"from {before} to {target.ranks} ranks; {reason}"
    job.wish_stop(EndReason.RESCALED, reason)
    rescaled = job.announce("job.rescaled", text, ranks_before=before, ranks_after=target.ranks)
    return [rescaled, *job.writer.go_on()]


# Stopping, by a wish or because a part has failed.


def _stops(job: ShepherdState, before: JobRecord | None, now_s: float) -> list[ShepherdEffect]:
    """The wish is durable: the ranks are told, and late answers to commits and launches no longer matter."""
    job.attempt, job.stop_again_s = None, now_s
    return _ask_owners(job, now_s) if before is None else []


def _doom(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """One failed rank costs the gang others, which are told to stop."""
    is_stopping = job.gang.is_stopping or job.writer.record.stop_reason is not EndReason.NONE
    if job.gang.failures.are_any and not is_stopping:
        job.gang.is_stopping = True
        job.stop_grace_s = min(job.writer.record.spec.grace_s, GANG_STOP_GRACE_S)
        job.stop_again_s = now_s
    return []


def _stop_ranks(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    if now_s < job.stop_again_s:
        return []
    job.stop_again_s = now_s + STOP_RESEND_S
    record, attempt = job.writer.record, job.attempt_number
    unfinished = job.gang.unfinished(job.shares)
    return [job.commands.stop(node, record, attempt, job.stop_grace_s) for node in unfinished]


# The end of a gang, and of the job.


def _end(job: ShepherdState, now_s: float) -> list[ShepherdEffect]:
    """All processes are gone: another attempt where the job is not to blame, otherwise the end."""
    if not job.gang.have_all_exited(job.shares):
        return []
    job.attempt, job.stop_again_s = None, float("inf")
    if job.gang.end is None:
        ran_s = max(0.0, now_s - job.running_since_s)
        job.gang.end = GangEnd(now_s, ran_s, job.writer.record.stop_reason)
    return [] if job.writer.is_busy else [*job.write(_outcome(job, job.gang.end))]


def _outcome(job: ShepherdState, end: GangEnd) -> RecordChange:
    record, failure = job.writer.record, job.gang.failures.task
    served_gpu_s = job.conduct.served_gpu_s(record, end.ran_s)
    comes_back = record.stop_reason in COMING_BACK
    if comes_back and end.stop_reason in COMING_BACK:
        return MadeRoom(f"{record.stop_reason.value}: {record.reason}", served_gpu_s)
    if failure is not None and failure.failure is TaskFailure.LOST and job.may_restart:
        return _given_up(job, failure.detail, (), served_gpu_s)
    is_wanted = record.state is JobState.STARTING and record.relaunches < RELAUNCHES_MAX
    if failure is not None and failure.failure in BLAMELESS and is_wanted:
        return StartAborted(f"trying again: {failure.detail}", relaunches=1)
    # A gang that ended by itself before its stop was durable need not come back.
    stop_reason = EndReason.NONE if comes_back else record.stop_reason
    return Ended(job.gang.failures.outcome(stop_reason), end.at_s + job.utc_offset_s, served_gpu_s)


def restart(job: ShepherdState, why: str, shares: Iterable[Share], now_s: float) -> list[ShepherdEffect]:
    """Give up the attempt as a whole and queue the job again; nothing starts before what is left there is settled."""
    served_gpu_s = job.conduct.served_gpu_s(job.writer.record, max(0.0, now_s - job.running_since_s))
    job.end_attempt()
    return [*job.write(_given_up(job, why, left_by(shares, job.writer.record.attempt), served_gpu_s))]


def _given_up(job: ShepherdState, why: str, left: tuple[Leftover, ...], served_gpu_s: float) -> GivenUp:
    record = job.writer.record
    reason = f"restarting ({record.restarts + 1} of {record.spec.max_restarts}): {why}"[:REASON_LENGTH]
    return GivenUp(reason, left, served_gpu_s)


def left_by(shares: Iterable[Share], attempt: int) -> tuple[Leftover, ...]:
    """What an attempt may leave there."""
    return tuple(Leftover(share.node, attempt, share.origin) for share in shares)


def _ended(job: ShepherdState, before: JobRecord | None, now_s: float) -> list[ShepherdEffect]:
    del before, now_s
    record, why = job.writer.record, job.writer.record.end_reason.value
    abandoned = job.attempt.abandon() if job.attempt is not None else []
    job.end_attempt()
    job.settlement.forget()
    told = [*job.gang.dismissed(), *job.claim.withdraw(record)]
    ended = job.announce(
        "job.ended", record.detail or why, end_reason=why, exit_code=record.exit_code, signal=record.signal
    )
    return [*abandoned, *told, ended]


# Whatever its state.


def _checkpoint_saved(job: ShepherdState, before: JobRecord) -> list[ShepherdEffect]:
    saved = job.writer.record.checkpoint
    if saved is None or saved == before.checkpoint:
        return []
    text = f"checkpoint {saved.name} of attempt {saved.attempt}"
    told = CheckpointAnswer(job.job_id, saved.attempt, saved.sequence, job.writer.record.epoch, is_committed=True)
    return [job.announce("job.checkpointed", text, bytes=saved.size_bytes), SendPeer(saved.node, told)]


def _holders_changed(job: ShepherdState, before: JobRecord) -> list[ShepherdEffect]:
    """Both old and new must agree until the second update has ended the exchange."""
    record = job.writer.record
    if record.leaving_holders and not before.leaving_holders:
        job.writer.wish(HoldersExchanged(record.holders, ()))
    if record.leaving_holders or not before.leaving_holders:
        return []
    return [job.announce("holder.replaced", f"held by {', '.join(holder.node for holder in record.holders)}")]


def _handed_over(job: ShepherdState) -> list[ShepherdEffect]:
    successor = job.writer.record.shepherd
    if successor == job.me:
        return []
    job.writer.close()
    return [job.announce("job.handed_over", f"{successor} shepherds it from now on")]


ENTERED: Mapping[JobState, Entered] = {
    JobState.QUEUED: _back_in_queue,
    JobState.STARTING: _agreed,
    JobState.RUNNING: _runs,
    JobState.STOPPING: _stops,
    JobState.ENDED: _ended,
}
DUE: Mapping[JobState, tuple[Rule, ...]] = {
    JobState.QUEUED: (_rescale, _follow_attempt, _settle),
    JobState.STARTING: (_rescale, _follow_attempt, _abort, _start, _doom, _end, _stop_ranks),
    JobState.RUNNING: (_rescale, _doom, _end, _stop_ranks, _end_at_limit),
    JobState.STOPPING: (_rescale, _end, _stop_ranks),
    JobState.ENDED: (),
}
