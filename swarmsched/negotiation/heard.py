"""What each word changes of what a shepherd knows and wishes, one function each; what is `due` then follows by itself.

`JobShepherd.step` calls the one that `HEARD` names for what it is told.
"""

from collections.abc import Callable, Mapping
from typing import Any

from swarmsched.api import COMING_BACK, EndReason, Isolation, JobState
from swarmsched.authority.message import SilenceAnswer
from swarmsched.commands import Refused
from swarmsched.effects import ReplyToClient, SendPeer
from swarmsched.events import PeerMessageReceived, PeerSendFailed, TimerFired
from swarmsched.ids import NodeId, Place, handle
from swarmsched.jobs.update import UpdateDecided, UpdateRefused, UpdateUncertain
from swarmsched.ledger.message import (
    CheckpointAnswer,
    CheckpointRequest,
    OwnerAnswer,
    PreemptAnswer,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    TaskBatch,
    TaskEstimate,
    TaskReport,
    YieldRequest,
)
from swarmsched.negotiation import changes, regrouping
from swarmsched.negotiation.attempt import AttemptPhase
from swarmsched.negotiation.changes import REASON_LENGTH, Scaled, left_by
from swarmsched.negotiation.checkpointing import is_named
from swarmsched.negotiation.due import due, follow, launch_again, leftover_settled, restart
from swarmsched.negotiation.gang import dismissal, gone, heard
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.negotiation.told import (
    AnswerWished,
    BatchWished,
    ChangeWished,
    ClaimUnwanted,
    ClaimWished,
    FilesLooked,
    FirstWritten,
    HoldersWished,
    LossDeclared,
    MakeRoom,
    NextPlaceTried,
    NodeLost,
    NodeReturned,
    NodeSilent,
    SignalAsked,
    SizeAsked,
    StartWished,
    SteppedDown,
    StopAsked,
    SuccessorWished,
    TakenUp,
    VictimsLeft,
)
from swarmsched.task import TaskFailure, TaskStage, TaskStatus

WAITING_MAX = 16  # updates behind the one under way, beyond which checkpoints have to wait at their owners
NOTHING_LEFT = (Refusal.UNKNOWN, Refusal.NOT_COMMITTED, Refusal.RELEASED_ATTEMPT)
NOTHING_KNOWN = (*NOTHING_LEFT, Refusal.EXPIRED)  # what a second machine of an owner's name says
Effects = list[ShepherdEffect]


# Start and end of life under this shepherd, and every decided record.


def _first_written(job: ShepherdState, told: FirstWritten) -> Effects:
    spec = job.decided.spec
    job.wait_since_now()
    return [job.announce("job.submitted", f"{spec.user or 'somebody'} submitted it", gpus=spec.total_gpus)]


def _taken_up(job: ShepherdState, told: TakenUp) -> Effects:
    shares = job.decided.shares
    job.wait_since_now()
    effects = [*follow(job, None), *due(job)]
    for share in shares:
        if share.node in told.lost_nodes:
            effects += _node_lost(job, NodeLost(share.node))
    return effects


def _decided(job: ShepherdState, told: UpdateDecided) -> Effects:
    return follow(job, job.take(told.record)) if job.writer.conclude(told.update_id) else []


def _uncertain(job: ShepherdState, told: UpdateUncertain) -> Effects:
    """The register could not tell whether our update is written: the same again."""
    return [*job.writer.repeat(told.update_id)]


def _refused(job: ShepherdState, told: UpdateRefused) -> Effects:
    """The register can never take our update."""
    job.writer.conclude(told.update_id)
    return []


def _stepped_down(job: ShepherdState, told: SteppedDown) -> Effects:
    remedy = "ask again: another shepherd acts for it soon"
    refusal = Refused("unavailable", "outcome unknown: this node lost its authority over the job", remedy)
    return [ReplyToClient(request_id, refusal) for request_id in job.unanswered_clients()]


def _on_timer(job: ShepherdState, told: TimerFired) -> Effects:
    """Attempt timers, repeats of questions and orders; the time limit is one of the things that are due."""
    record, now_s = job.decided, job.now_s
    effects: Effects = []
    if job.attempt is not None and now_s >= job.attempt.next_deadline_s:
        effects += job.attempt.on_timer(now_s)
    effects += [*job.inquiry.on_timer(now_s), *job.suspicions.on_timer(record, now_s)]
    return [*effects, *job.settlement.on_timer(record, now_s), *job.claim.on_timer(record, now_s)]


def _files_looked(job: ShepherdState, told: FilesLooked) -> Effects:
    """A start without its files would fail, and starts that fail are counted: it rests, and others pass it."""
    job.pacing.files_looked(job.now_s, is_away=told.is_away)
    return []


# Placement.


def _start(job: ShepherdState, wish: StartWished) -> Effects:
    """The caller has checked `is_waiting`."""
    spec, shares = job.decided.spec, wish.shares
    if spec.elastic:
        shares = regrouping.as_parts(shares, 1 + spec.first_number(0))  # above those of other groups, as their ranks
    return [*job.begin(shares, wish.ranking, wish.global_batch).begin(job.now_s)]


def _change(job: ShepherdState, wish: ChangeWished) -> Effects:
    """The caller has checked that it may."""
    if job.decided.spec.elastic:
        return regrouping.change(job, wish)
    job.go_to(wish.target, wish.reason)
    return [*job.claim.keep(job.decided, wish.target.shares, wish.ranking, job.now_s)]


def _next_place_tried(job: ShepherdState, told: NextPlaceTried) -> Effects:
    job.stay()
    return []


def _rebatch(job: ShepherdState, wish: BatchWished) -> Effects:
    before = job.decided.global_batch
    job.writer.wish(changes.Rebatched(wish.global_batch))
    return [job.announce("job.rebatched", wish.reason, batch_before=before, batch_after=wish.global_batch)]


def _claim(job: ShepherdState, wish: ClaimWished) -> Effects:
    """The caller has checked `is_waiting`."""
    wanted = (wish.shares, wish.victims, wish.ranking, wish.starts_within_s)
    return [*job.claim.make(job.decided, *wanted, job.now_s)]


def _victims_left(job: ShepherdState, told: VictimsLeft) -> Effects:
    job.claim.cleared(job.now_s)
    return []


def _claim_unwanted(job: ShepherdState, told: ClaimUnwanted) -> Effects:
    if not job.claim.is_open:
        return []
    return [*(job.claim.give_up(job.decided, told.why) if told.why else job.claim.withdraw(job.decided))]


def _victim_answered(job: ShepherdState, event: PeerMessageReceived) -> Effects:
    """The shepherd of a job that should make room for this one."""
    answer: PreemptAnswer = event.message
    return [*job.claim.victim_answered(answer, job.decided, job.now_s)]


def _asked_to_yield(job: ShepherdState, event: PeerMessageReceived) -> Effects:
    """A hold of ours stands in the way of a job that ranks higher: give way while nothing is decided."""
    request: YieldRequest = event.message
    attempt = job.attempt
    if attempt is None or attempt.number != request.attempt or attempt.phase is not AttemptPhase.HOLDING:
        return []
    attempt.fail(request.owner, text := f"gave way to {handle(request.wanted_by)} on {request.owner}")
    return [job.announce("job.yielded", text, taker=request.wanted_by)]


# What owners tell.


def _owner_answered(job: ShepherdState, event: PeerMessageReceived) -> Effects:
    """An owner's answer to a command of this job."""
    answer: OwnerAnswer = event.message
    if answer.refusal in NOTHING_KNOWN and _is_namesake(job, answer.owner, answer.attempt, answer.origin):
        return []  # what was asked stays open, and is asked again
    job.pacing.note_released(answer.released_attempt, answer.released_part)
    is_status = job.inquiry.answered(answer)
    effects: Effects = [*job.claim.owner_answered(answer, job.decided, job.now_s)]
    return effects or _answered(job, answer, is_status=is_status)


def _answered(job: ShepherdState, answer: OwnerAnswer, *, is_status: bool) -> Effects:
    record, attempt, has_nothing = job.decided, job.attempt, answer.refusal in NOTHING_LEFT
    if has_nothing and job.settlement.ended(answer.place, answer.attempt):
        return leftover_settled(job, answer.place, answer.attempt)
    if attempt is not None and attempt.number == answer.attempt and attempt.has(answer.place):
        if is_status and has_nothing:
            attempt.lost(answer.place)
        return [*attempt.answered(answer, job.now_s)]
    is_current = answer.attempt == record.attempt and bool(record.shares) and not record.is_ended
    return _owner_has_nothing(job, answer.place) if has_nothing and is_current else []


def _undeliverable(job: ShepherdState, event: PeerSendFailed) -> Effects:
    """A command could not be delivered."""
    if job.attempt is None:
        return []
    return [*job.attempt.undeliverable(event.recipient, event.message, event.error)]


def _task_reported(job: ShepherdState, event: PeerMessageReceived) -> Effects:
    """A task changed.  Old revisions are acknowledged again and change nothing."""
    report: TaskReport = event.message
    status = report.status
    has_exited = status.stage is TaskStage.EXITED
    is_lost = has_exited and status.failure is TaskFailure.LOST
    if is_lost and _is_namesake(job, status.node, status.attempt, report.origin):
        return []  # a copy of the owner's disk, or the owner itself, moved: time, and silence, tell
    job.namesakes.met(status.node)
    if has_exited and job.settlement.ended(status.place, status.attempt):
        return [heard(status), *leftover_settled(job, status.place, status.attempt)]
    if not _wants(job, status.attempt, status.place):
        return [*dismissal(job.decided, job.me, status)]
    return [*([] if has_exited else [heard(status)]), *_told(job, status)]


def _told(job: ShepherdState, status: TaskStatus) -> Effects:
    known = job.gang.tasks.get(status.place)
    if known is not None and known.news > status.news:
        return []
    effects: Effects = []
    if known is None or known.news < status.news:
        effects += job.put(status)
    is_joining = status.part in job.decided.world.joining
    is_running = job.decided.state is JobState.RUNNING and not job.is_writing and not is_joining
    is_of_epoch = status.epoch >= job.decided.epoch  # else its owner may have told it before the start
    if status.stage in (TaskStage.ORDERED, TaskStage.STAGED) and is_running and is_of_epoch:
        return [*effects, *_owner_has_nothing(job, status.place)]
    return [*effects, *launch_again(job, status)]


def _is_namesake(job: ShepherdState, node: NodeId, attempt: int, origin: int) -> bool:
    """What this node tells itself is its own word, wherever it lives now."""
    return node != job.me and job.namesakes.is_one(node, attempt, origin, job.decided, job.now_s)


def _wants(job: ShepherdState, attempt: int, place: Place) -> bool:
    """True for the attempt that is being placed or runs; an aborted one, or a part, is not wanted any more."""
    record = job.decided
    if job.attempt is not None and (job.attempt.has(place) or not record.spec.elastic):
        return attempt == job.attempt.number
    if place.part and place.part not in [share.part for share in record.shares]:
        return False
    return attempt == record.attempt and bool(record.shares) and not record.is_ended


def _owner_has_nothing(job: ShepherdState, place: Place) -> Effects:
    """A stop or status request met no task, or one that stands before its start although the gang runs: it never
    began there, or every trace of it is lost."""
    if job.gang.has_exited(place):
        return []
    record = job.decided
    if record.stop_reason is not EndReason.NONE or job.gang.is_stopping:
        status = gone(record, record.attempt, place, TaskFailure.NONE)
    else:
        text = f"{place.node} knows nothing of the task any more"
        status = gone(record, record.attempt, place, TaskFailure.LOST, text)
    return [job.commands.to(place, ReleaseRequest, record, record.attempt), *job.put(status)]


def _estimated(job: ShepherdState, event: PeerMessageReceived) -> Effects:
    """Its ranks have told how they train; what earlier attempts measured with other sizes stands."""
    told: TaskEstimate = event.message
    record, sender = job.decided, event.sender
    is_former = bool(record.world.version) and not any(share.node == sender for share in record.members)
    if told.attempt != record.attempt or record.state is not JobState.RUNNING or is_former:
        return []
    job.learn(told.estimate)
    if told.global_batch in (0, record.global_batch) or not record.global_batch:
        return []
    return [SendPeer(sender, TaskBatch(record.job_id, record.attempt, record.global_batch))]


def _checkpoint_asked(job: ShepherdState, event: PeerMessageReceived) -> Effects:
    """Have the next attempt resume from it, if its own is the present one when its turn comes."""
    request: CheckpointRequest = event.message
    record, saved = job.decided, changes.CheckpointSaved(request, job.parts.may_commit)
    is_committed = is_named(record, request)
    refusal = "" if is_committed else saved.refusal(record)
    if refusal or is_committed:
        numbers = (request.attempt, request.command_id, record.epoch)
        told = CheckpointAnswer(request.job_id, *numbers, is_committed, refusal[:REASON_LENGTH])
        return [SendPeer(request.owner, told)]
    # With no majority that answers, or a change that waits for them to be over, they are asked again.
    has_failed = job.attempt is not None and job.attempt.phase is AttemptPhase.FAILED
    leaves_start = record.state is JobState.STARTING and (job.gang.has_started or has_failed)
    if len(job.writer.waiting) < WAITING_MAX and not leaves_start:
        job.writer.wish(saved)
    return []


# Nodes that are silent, lost, or back.


def _node_silent(job: ShepherdState, told: NodeSilent) -> Effects:
    """If it has ranks of this job, people are told; they may well run on."""
    if job.has_share(told.node):
        job.silent[told.node] = None
    return []


def _node_returned(job: ShepherdState, told: NodeReturned) -> Effects:
    """Asked is what it still has of this job."""
    node = told.node
    job.silent.pop(node, None)
    job.suspicions.clear(node)
    job.namesakes.met(node)
    asked = job.attempt if job.attempt is not None and job.attempt.awaits(node) else None
    places = [share.place for share in job.shares_on(node) if asked is None or not asked.has(share.place)]
    return [*job.ask_status(places)] if places and not job.decided.is_ended else []


def _node_lost(job: ShepherdState, told: NodeLost) -> Effects:
    """If it has ranks of this job, what goes with them is given up.

    Safety does not rest on that belief: what is left there is settled before anything new starts.  A gang that goes
    as a whole is given up only once that can gain something: its holders must have been silent first.
    """
    record, node = job.decided, told.node
    _node_silent(job, NodeSilent(node))
    if not job.has_share(node) or job.is_writing or job.now_s < job.gang.hears_owners_until_s:
        return []  # told again soon
    is_stopping = record.state is JobState.STOPPING
    if record.spec.on_isolation is Isolation.CONTINUE and not is_stopping:
        return []  # its ranks run on: only their owner, or an operator, can say that they do not
    lost = job.shares_on(node)
    if not job.conduct.is_ended_by([share.place for share in lost], job.gang, record):
        return regrouping.lost_node(job, node)
    if not is_stopping and not job.suspicions.is_confirmed(node, record):
        return [*job.suspicions.suspect(node, record, job.now_s)]
    if job.may_restart:
        return restart(job, f"{node} was lost", record.shares)
    if not is_stopping:
        why = f"{node} was lost, and {job.why_no_restart}"
        job.wish_stop(EndReason.NODE_LOST, why, job.gang.stop_grace_s)
    job.writer.wish(changes.Unreachable(left_by(lost, record.attempt)))
    return []


def _silence_told(job: ShepherdState, event: PeerMessageReceived) -> Effects:
    """A holder says for how long an attempt, or a leftover, has heard nothing that lets it run."""
    answer: SilenceAnswer = event.message
    record = job.decided
    job.suspicions.silence_told(event.sender, answer, record, job.now_s)
    if job.suspicions.is_confirmed(answer.owner, record):
        return _node_lost(job, NodeLost(answer.owner))
    settled = job.settlement.silence_told(event.sender, answer, record)
    return [effect for each in settled for effect in leftover_settled(job, each.place, each.attempt)]


def _loss_declared(job: ShepherdState, told: LossDeclared) -> Effects:
    silent = [node for node in job.silent if job.has_share(node)]
    if silent and job.may_restart and not job.is_writing:
        job.vouch(silent)
        return restart(job, f"an operator declared {', '.join(silent)} lost", job.decided.shares)
    left = list(job.settlement.open)
    return [effect for each in left for effect in leftover_settled(job, each.place, each.attempt)]


# What others wish.


def _make_room(job: ShepherdState, wish: MakeRoom) -> Effects:
    """Another job wants this one's place."""
    record, request, refusal = job.decided, wish.request, wish.refusal
    is_stopping = record.stop_reason in COMING_BACK
    if not refusal and not is_stopping and (record.state is not JobState.RUNNING or job.is_writing):
        refusal = f"it is {record.state.value}"
    told = PreemptAnswer(job.job_id, request.command_id, request.taker, not refusal, refusal[:REASON_LENGTH])
    answer = SendPeer(request.shepherd, told)
    if refusal or is_stopping or not request.is_decided:
        return [answer]
    job.wish_stop(EndReason.PREEMPTED, reason := f"makes room for {handle(request.taker)}")
    return [answer, job.announce("job.preempted", reason, taker=request.taker)]


def _resize(job: ShepherdState, wish: SizeAsked) -> Effects:
    job.writer.wish(Scaled(wish.spec))
    job.wish_answer(wish.request_id)
    return [
        job.announce("job.scaled", f"is to have {wish.spec.size_range} ranks instead of {job.decided.spec.size_range}")
    ]


def _stop(job: ShepherdState, wish: StopAsked) -> Effects:
    if not job.decided.is_ended:
        job.wish_stop(EndReason.CANCELLED, wish.reason or "cancelled", wish.grace_s)
    job.wish_answer(wish.request_id)
    return []


def _answer(job: ShepherdState, wish: AnswerWished) -> Effects:
    job.wish_answer(wish.request_id, was_known=wish.was_known)
    return []


def _signal(job: ShepherdState, wish: SignalAsked) -> Effects:
    record, number = job.decided, wish.signal
    job.wish_answer(wish.request_id)
    return [job.commands.to(each.place, SignalRequest, record, record.attempt, number) for each in record.shares]


def _exchange_holders(job: ShepherdState, wish: HoldersWished) -> Effects:
    job.writer.wish(changes.HoldersExchanged(wish.holders, wish.leaving))
    return []


def _hand_over(job: ShepherdState, wish: SuccessorWished) -> Effects:
    job.writer.wish(changes.HandedOver(wish.successor))
    return []


HEARD: Mapping[type, Callable[[ShepherdState, Any], Effects]] = {
    FirstWritten: _first_written,
    TakenUp: _taken_up,
    SteppedDown: _stepped_down,
    UpdateDecided: _decided,
    UpdateUncertain: _uncertain,
    UpdateRefused: _refused,
    TimerFired: _on_timer,
    FilesLooked: _files_looked,
    StartWished: _start,
    ChangeWished: _change,
    NextPlaceTried: _next_place_tried,
    BatchWished: _rebatch,
    ClaimWished: _claim,
    VictimsLeft: _victims_left,
    ClaimUnwanted: _claim_unwanted,
    PreemptAnswer: _victim_answered,
    YieldRequest: _asked_to_yield,
    OwnerAnswer: _owner_answered,
    PeerSendFailed: _undeliverable,
    TaskReport: _task_reported,
    TaskEstimate: _estimated,
    CheckpointRequest: _checkpoint_asked,
    NodeSilent: _node_silent,
    NodeReturned: _node_returned,
    NodeLost: _node_lost,
    SilenceAnswer: _silence_told,
    LossDeclared: _loss_declared,
    MakeRoom: _make_room,
    StopAsked: _stop,
    SizeAsked: _resize,
    SignalAsked: _signal,
    AnswerWished: _answer,
    HoldersWished: _exchange_holders,
    SuccessorWished: _hand_over,
}
