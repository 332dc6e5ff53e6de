"""What is due of a job, as a table of phases beside the life cycle. A phase says what follows once when a state is
entered, what is told to owners as long as it lasts, and which changes of the record lead out of it.

All of it follows from the decided record and from what is known (`ShepherdState`), so it is the same whether this
shepherd has brought the job here or has taken it up from another.  Changes are looked for only while no update is under
way: whatever else is needed then is found again once that is decided.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarmsched.api import COMING_BACK, EndReason, JobState
from swarmsched.effects import SendPeer
from swarmsched.ids import Place
from swarmsched.ledger.message import CheckpointAnswer, LaunchRequest, ReleaseRequest, StopRequest
from swarmsched.negotiation import blame, changes, regrouping
from swarmsched.negotiation.attempt import AttemptPhase
from swarmsched.negotiation.changes import RecordChange, left_by
from swarmsched.negotiation.gang import gone
from swarmsched.negotiation.outcome import Failures
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.negotiation.world_changes import Joined
from swarmsched.policies.base import amount
from swarmsched.record import JobRecord, Leftover
from swarmsched.resources import Share, of_first, ranks_by_node, world_size
from swarmsched.task import TaskFailure, TaskStage, TaskStatus
from swarmsched.view import Allocation

STOP_RESEND_S = 2.0
GANG_STOP_GRACE_S = 10.0
UNANSWERED = (AttemptPhase.HOLDING, AttemptPhase.HELD, AttemptPhase.COMMITTING)


@dataclass(frozen=True, slots=True)
class LifePhase:
    """Of a job's life: what is due in one state.  `entered` is told the record of before; None: it was taken up."""

    entered: Callable[[ShepherdState, JobRecord | None], list[ShepherdEffect]]
    commands: tuple[Callable[[ShepherdState], list[ShepherdEffect]], ...] = ()
    changes: tuple[Callable[[ShepherdState], RecordChange | None], ...] = ()


def follow(job: ShepherdState, before: JobRecord | None) -> list[ShepherdEffect]:
    """What follows once from the record that was decided; `before` is None for one that another shepherd has left."""
    record = job.decided
    effects = _name_leftovers(job, () if before is None else before.leftovers)
    if before is None or (before.state, before.stop_reason) != (record.state, record.stop_reason):
        effects += PHASES[record.state].entered(job, before)
    if before is not None:
        effects += [*_checkpoint_saved(job, before), *_holders_changed(job, before), *_handed_over(job)]
        if (before.state, record.state) == (JobState.RUNNING, JobState.RUNNING):
            effects += regrouping.world_changed(job, before)
    return effects


def due(job: ShepherdState) -> list[ShepherdEffect]:
    """All that is due now."""
    if job.decided.shepherd != job.me:
        return []  # the job is another's
    phase = PHASES[job.decided.state]
    effects = [effect for command in phase.commands for effect in command(job)]
    formation = job.formation
    if formation is not None and formation.is_quiet and job.regrouping.is_quiet:
        formation = None  # most of the time
    if formation is not None:
        effects += regrouping.follow_workers(job, formation)
    effects += [*job.writer.go_on(job.decided), *job.answered_clients()]
    for find in phase.changes:
        if job.writer.in_flight is None and (change := find(job)) is not None:
            effects += job.write(change)
    if formation is not None:
        for find_of in regrouping.CHANGES:
            if job.writer.in_flight is None and (change := find_of(job, formation)) is not None:
                effects += job.write(change)
    return effects


# Queued.


def _back_in_queue(job: ShepherdState, before: JobRecord | None) -> list[ShepherdEffect]:
    """Its gang is over, or was given up: owners may forget what they have told."""
    record = job.decided
    effects: list[ShepherdEffect] = []
    if before is not None and record.restarts > before.restarts:
        job.pacing.restarted(record.restarts, job.now_s)
        effects.append(job.announce("job.restarted", record.reason, restarts=record.restarts, attempt=record.attempt))
    if before is not None and record.relaunches > before.relaunches:
        for node in blame.failed_nodes(record.start_faults[len(before.start_faults) :]):
            job.pacing.avoid(node, job.now_s)
        job.pacing.back_off(job.now_s)
        effects.append(job.announce("job.start_failed", record.reason, attempt=before.attempt))
    effects += [*job.gang.dismissed(), *_withdraw(job)]
    job.back_in_queue()
    return effects


def _name_leftovers(job: ShepherdState, before: Iterable[Leftover]) -> list[ShepherdEffect]:
    """Those that the record names from now on have to end, or have ended."""
    known = {*before}
    new = [each for each in job.decided.leftovers if each not in known]
    effects: list[ShepherdEffect] = [*(job.settlement.begin(new, job.decided, job.now_s) if new else ())]
    for each in new:
        if job.gang.has_exited(each.place) or each.node in job.vouched:
            effects += leftover_settled(job, each.place, each.attempt)
    return effects


def leftover_settled(job: ShepherdState, place: Place, attempt: int) -> list[ShepherdEffect]:
    """One is settled: a stopping gang counts it as ended."""
    record = job.decided
    job.settlement.ended(place, attempt)
    if record.state is JobState.STOPPING and attempt == record.attempt:
        job.put(gone(record, attempt, place, TaskFailure.NONE))
    return [job.commands.to(place, ReleaseRequest, record, attempt)]  # against a launch that is still on its way


def _settled(job: ShepherdState) -> RecordChange | None:
    return changes.Settled() if job.decided.leftovers and not job.settlement.open else None


# A change of the gang, from nothing to all of it or by newcomers: the record agrees to what the attempt holds, and the
# owners commit, stage and launch.


def _named(job: ShepherdState) -> RecordChange | None:
    """All owners hold."""
    attempt = job.attempt
    if attempt is None or attempt.phase is not AttemptPhase.HELD:
        return None
    if job.decided.state is JobState.RUNNING:
        return Joined(attempt.shares, job.ran_s)
    target = Allocation(attempt.shares, job.global_batch)
    return changes.Placed(attempt.number, target, attempt.meetings, job.secret)


def _starts(job: ShepherdState, before: JobRecord | None) -> list[ShepherdEffect]:
    """The owners are to commit.

    Of an attempt that another shepherd has left nobody knows how far it came.  The commits ask as well: an answer
    "unknown" that a commit overtook must not be taken for a loss.
    """
    record = job.decided
    if before is None:
        return [*job.resume(record.shares).prepared(record, job.now_s)]
    if job.attempt is None or job.attempt.phase is AttemptPhase.FAILED:  # while the register was silent
        return []
    where = ", ".join(f"{node} ({ranks})" for node, ranks in ranks_by_node(record.shares).items())
    return [job.announce("job.placed", f"placed on {where}", attempt=record.attempt), *job.commit()]


def _follow_attempt(job: ShepherdState) -> list[ShepherdEffect]:
    """Once it has come through, or has failed before the record named it."""
    attempt, is_running = job.attempt, job.decided.state is JobState.RUNNING
    if attempt is None:
        return []
    if attempt.phase not in UNANSWERED:
        job.window.ended(job.job_id, job.now_s)
    if attempt.phase is AttemptPhase.LAUNCHED:
        job.drop_attempt()
        job.pacing.succeeded()
        if is_running:
            job.regrouping.launched(job.now_s)
        return [] if is_running else [*job.claim.used(attempt.shares, job.decided)]
    return _withdraw(job) if not job.is_named and not job.is_writing else []


def _withdraw(job: ShepherdState) -> list[ShepherdEffect]:
    """An attempt that has failed before anything of it can have run is forgotten, and its owners as well forget it."""
    attempt = job.attempt
    if attempt is None or attempt.phase is not AttemptPhase.FAILED or attempt.may_have_run:
        return []
    job.drop_attempt()
    job.regrouping.forget_wishes()
    job.explain(attempt.problem)
    job.pacing.failed(attempt.refusal, attempt.refusing_node, job.now_s, was_alone=len(attempt.shares) == 1)
    return [*attempt.abandon(), job.announce("negotiation.round", attempt.problem, result="aborted")]


def _comes_to_nothing(job: ShepherdState) -> RecordChange | None:
    """What the record names has failed; where ranks of it may have run, what is left of them has to end first."""
    attempt = job.attempt
    if attempt is None or attempt.phase is not AttemptPhase.FAILED:
        return None
    if not attempt.may_have_run:
        return changes.StartAborted(attempt.problem)
    if job.may_restart:
        return _given_up(job, attempt.problem, attempt.shares)
    return changes.StopWished(EndReason.NODE_LOST, attempt.problem, job.utc_s)


def launch_again(job: ShepherdState, status: TaskStatus) -> list[SendPeer]:
    """The launch was acknowledged and yet the task stands there: its owner restarted, or it was staged anew."""
    record = job.decided
    is_starting = record.state is JobState.STARTING or status.part in record.world.joining
    is_wanted = is_starting and not job.gang.is_stopping and not job.is_writing
    is_early = job.attempt is not None and not job.attempt.has_launched(status.place)
    if status.stage is not TaskStage.STAGED or not is_wanted or is_early:
        return []
    return [job.commands.to(status.place, LaunchRequest, record, record.attempt)]


def _started(job: ShepherdState) -> RecordChange | None:
    return changes.Started(job.utc_s) if job.gang.has_started else None


# Running.


def _runs(job: ShepherdState, before: JobRecord | None) -> list[ShepherdEffect]:
    record = job.decided
    job.drop_attempt()  # an answer to a launch that is still missing says nothing new
    if before is None:
        newcomers = job.resume(record.joining).prepared(record, job.now_s) if record.joining else []
        return [*_ask_owners(job), *newcomers]
    job.pacing.succeeded()
    job.gang.began()
    ranks = ranks_by_node(record.shares).total()
    text = "its only rank runs" if ranks == 1 else f"all {ranks} ranks run"
    waited_s = max(0.0, record.first_started_utc_s - record.submitted_utc_s)
    started_s = max(0.0, job.gang.running_since_s - job.queued_since_s)
    effects: list[ShepherdEffect] = [job.announce("job.started", text, queue_wait_s=waited_s, start_s=started_s)]
    effects += [
        job.commands.to(Place(fault.node), ReleaseRequest, record, fault.attempt, fault=fault.failure)
        for fault in blame.proven(before, record)
    ]
    if record.rescalings != before.rescalings:
        last = record.rescalings[-1]
        text = (
            f"went on with {amount(last.ranks_after, 'rank')} instead of {last.ranks_before} after {last.pause_s:.1f} s"
        )
        effects.append(job.announce("job.resumed", text, pause_s=last.pause_s))
    return [*effects, *job.claim.used(record.shares, record)]


def _ask_owners(job: ShepherdState) -> list[ShepherdEffect]:
    """Nothing is known of a gang that another shepherd has left; its owners tell for how long it has run."""
    job.gang.took_up(job.decided, job.now_s)
    return [*job.ask_status([share.place for share in job.decided.shares])]


def _first_group_has_ended(job: ShepherdState) -> RecordChange | None:
    """The other groups serve the first one: what still runs of them is told to stop."""
    record, gang = job.decided, job.gang
    if not record.spec.groups or gang.is_stopping or not gang.unfinished():
        return None
    failures = job.conduct.failures(gang, record)
    has_failed = failures.rank is not None or failures.task is not None
    if has_failed or not all(gang.has_exited(share.place) for share in of_first(record.shares)):
        return None
    return changes.StopWished(EndReason.COMPLETED, f"group {record.spec.group} has ended", job.utc_s)


def _past_limit(job: ShepherdState) -> RecordChange | None:
    if job.now_s < job.time_limit_at_s:
        return None
    reason = f"time limit of {job.decided.spec.time_limit_s:g} s reached"
    return changes.StopWished(EndReason.TIMEOUT, reason, job.utc_s)


def _rescale(job: ShepherdState) -> list[ShepherdEffect]:
    """End the attempt once its next place is kept, unless the job has to end or to make room meanwhile."""
    record, wish = job.decided, job.rescale_to
    if wish is None or (job.claim.is_open and not job.claim.is_kept):
        return []
    if not job.claim.is_kept:
        job.stay()
        return []
    if record.state is not JobState.RUNNING or job.is_writing:
        job.stay()
        return [*job.claim.withdraw(record)]
    job.leave_for_kept_place()
    before, (target, reason) = world_size(record.shares), wish
    text = f"from {before} to {target.ranks} ranks; {reason}"
    return [job.announce("job.rescaled", text, ranks_before=before, ranks_after=target.ranks)]


# Stopping, by a wish or because a part has failed.


def _stops(job: ShepherdState, before: JobRecord | None) -> list[ShepherdEffect]:
    """The wish is durable: the ranks are told, and late answers to commits and launches no longer matter."""
    job.let_members_be()
    job.gang.stop(job.now_s)
    return _ask_owners(job) if before is None else []


def _doom(job: ShepherdState) -> list[ShepherdEffect]:
    """One failed rank costs others their lives: they are told to stop.  So does the end of a training not theirs."""
    failures, is_stopping = job.gang.failures, job.gang.is_stopping or job.decided.stop_reason is not EndReason.NONE
    failed = [failures.rank[0]] if failures.rank else [failures.task.place] if failures.task else []
    formation = job.formation
    is_over = formation is not None and formation.is_over
    is_ended = job.conduct.is_ended_by(failed, job.gang, job.decided) if failed else is_over
    if not is_stopping and is_ended:
        job.gang.doom(min(job.decided.spec.grace_s, GANG_STOP_GRACE_S), job.now_s)
    return []


def _stop_ranks(job: ShepherdState) -> list[ShepherdEffect]:
    record, gang = job.decided, job.gang
    if job.now_s < gang.stop_again_s:
        return []
    unfinished, grace_s = gang.unfinished(), record.spec.grace_s if gang.stop_grace_s is None else gang.stop_grace_s
    gang.told_to_stop(job.now_s + STOP_RESEND_S if unfinished else float("inf"))
    return [job.commands.to(place, StopRequest, record, record.attempt, grace_s) for place in unfinished]


# The end of a gang, and of the job.


def _ended(job: ShepherdState) -> RecordChange | None:
    """All processes are gone: another attempt where the job is not to blame, otherwise the end."""
    record, end = job.decided, job.gang.end
    is_complete = record.stop_reason is EndReason.COMPLETED  # others than the first group were stopped for it
    failures = Failures() if is_complete else job.conduct.failures(job.gang, record)
    failure = failures.task
    if end is None:
        return None
    comes_back = record.stop_reason in COMING_BACK
    if comes_back and end.stop_reason in COMING_BACK:
        left = tuple(each for each in record.leftovers if each in job.settlement.open)
        return changes.MadeRoom(f"{record.stop_reason.value}: {record.reason}", job.served_gpu_s, left)
    if failure is not None and failure.failure is TaskFailure.LOST and job.may_restart:
        return _given_up(job, failure.detail, ())
    outlived = ""
    if failure is not None and record.state is JobState.STARTING:
        found = blame.faults(job.gang, record.attempt)
        has_elsewhere = job.has_elsewhere(failure, found)
        if blame.is_tried_again(record, failure, found, has_elsewhere=has_elsewhere):
            what = "another node is tried" if has_elsewhere else "trying again"
            return changes.StartAborted(f"{what}: {failure.detail}", blame.kept(record, found))
        outlived = blame.obituary(record, failure)
    # A gang that ended by itself before its stop was durable need not come back.
    is_own = comes_back or is_complete
    outcome = failures.outcome(EndReason.NONE if is_own else record.stop_reason, record.spec.rank_name)
    if outlived and "detail" in outcome:
        outcome["detail"] = outlived
    return changes.Ended(outcome, end.at_s + job.utc_offset_s, job.served_gpu_s)


def restart(job: ShepherdState, why: str, shares: Iterable[Share]) -> list[ShepherdEffect]:
    """Give up the attempt as a whole and queue the job again; nothing starts before what is left there is settled."""
    change = _given_up(job, why, shares)
    job.end_attempt()
    return [*job.write(change)]


def _given_up(job: ShepherdState, why: str, shares: Iterable[Share]) -> RecordChange:
    record = job.decided
    reason = f"restarting ({record.restarts + 1} of {record.spec.max_restarts}): {why}"[: changes.REASON_LENGTH]
    return changes.GivenUp(reason, left_by(shares, record.attempt), job.served_gpu_s)


def _over(job: ShepherdState, _before: JobRecord | None) -> list[ShepherdEffect]:
    record, why = job.decided, job.decided.end_reason.value
    abandoned = job.attempt.abandon() if job.attempt is not None else []
    job.end_attempt()
    job.settlement.forget()
    told = [*job.gang.dismissed(), *job.claim.withdraw(record)]
    ended = job.announce(
        "job.ended", record.detail or why, end_reason=why, exit_code=record.exit_code, signal=record.signal
    )
    return [*abandoned, *told, ended]


# In whatever state.


def _checkpoint_saved(job: ShepherdState, before: JobRecord) -> list[ShepherdEffect]:
    saved = job.decided.checkpoint
    if saved is None or saved == before.checkpoint:
        return []
    text = f"checkpoint {saved.name} of attempt {saved.attempt}"
    told = CheckpointAnswer(job.job_id, saved.attempt, saved.sequence, job.decided.epoch, is_committed=True)
    return [job.announce("job.checkpointed", text, bytes=saved.size_bytes), SendPeer(saved.node, told)]


def _holders_changed(job: ShepherdState, before: JobRecord) -> list[ShepherdEffect]:
    """Both old and new must agree until the second update has ended the exchange."""
    record = job.decided
    if record.leaving_holders and not before.leaving_holders:
        job.writer.wish(changes.HoldersExchanged(record.holders, ()))
    if record.leaving_holders or not before.leaving_holders:
        return []
    return [job.announce("holder.replaced", f"held by {', '.join(holder.node for holder in record.holders)}")]


def _handed_over(job: ShepherdState) -> list[ShepherdEffect]:
    successor = job.decided.shepherd
    return [job.announce("job.handed_over", f"{successor} shepherds it from now on")] if successor != job.me else []


PHASES: Mapping[JobState, LifePhase] = {
    JobState.QUEUED: LifePhase(_back_in_queue, (_rescale, _follow_attempt), (_named, _settled)),
    JobState.STARTING: LifePhase(
        _starts, (_rescale, _follow_attempt, _doom, _stop_ranks), (_comes_to_nothing, _started, _ended)
    ),
    JobState.RUNNING: LifePhase(
        _runs,
        (_rescale, _follow_attempt, _doom, _stop_ranks),
        (_ended, _first_group_has_ended, _past_limit, _named, _settled),
    ),
    JobState.STOPPING: LifePhase(_stops, (_rescale, _stop_ranks), (_ended,)),
    JobState.ENDED: LifePhase(_over),
}
