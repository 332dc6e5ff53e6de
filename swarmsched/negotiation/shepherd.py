"""One job's shepherd: the only writer of its record, from acceptance to the last exit code.

Events come in, each of which changes what is known or wished (`ShepherdState`); what is `due` follows from that and
from the decided record, and is looked at after each event.  Register updates run one at a time and in order.
"""

from collections.abc import Collection

from swarmsched.api import COMING_BACK, EndReason, Isolation, JobSpec, JobState
from swarmsched.authority.message import SilenceAnswer
from swarmsched.clock import Clock
from swarmsched.commands import Refused
from swarmsched.effects import ReplyToClient, SendPeer
from swarmsched.holders import Holders
from swarmsched.ids import NodeId, Place, handle
from swarmsched.ledger.message import (
    CheckpointAnswer,
    CheckpointRequest,
    OwnerAnswer,
    OwnerCommand,
    PreemptAnswer,
    PreemptRequest,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    TaskBatch,
    TaskEstimate,
    TaskReport,
    YieldRequest,
)
from swarmsched.negotiation import changes, regrouping
from swarmsched.negotiation.attempt import AttemptPhase, Ranking
from swarmsched.negotiation.changes import REASON_LENGTH, left_by
from swarmsched.negotiation.checkpointing import is_named
from swarmsched.negotiation.claiming import Shares, Victims
from swarmsched.negotiation.due import answered_clients, due, follow, launch_again, leftover_settled, restart
from swarmsched.negotiation.gang import dismissal, gone, heard
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.record import JobRecord
from swarmsched.task import TaskFailure, TaskStage, TaskStatus
from swarmsched.view import Allocation

WAITING_MAX = 16  # updates behind the one under way, beyond which checkpoints have to wait at their owners
NOTHING_LEFT = (Refusal.UNKNOWN, Refusal.NOT_COMMITTED, Refusal.RELEASED_ATTEMPT)
NOTHING_KNOWN = (*NOTHING_LEFT, Refusal.EXPIRED)  # what a second machine of an owner's name says


class JobShepherd(ShepherdState):
    """Acts for one job under one epoch."""

    def _see(self, clock: Clock) -> JobRecord:
        self.now_s, self.utc_offset_s = clock.now_s, clock.utc_s - clock.now_s
        self.stirred(self.job_id)
        return self.decided

    # Start of life, and every decided record.

    def accepted(self, clock: Clock) -> list[ShepherdEffect]:
        """The first record is durable."""
        spec = self._see(clock).spec
        self.queued_since_s = clock.now_s
        return [self.announce("job.submitted", f"{spec.user or 'somebody'} submitted it", gpus=spec.total_gpus)]

    def take_up(self, lost_nodes: Collection[NodeId], clock: Clock) -> list[ShepherdEffect]:
        """The register has made us its shepherd: go on from whatever its record says."""
        shares, self.queued_since_s = self._see(clock).shares, clock.now_s
        effects = [*follow(self, None), *due(self)]
        for share in shares:
            if share.node in lost_nodes:
                effects += self.note_lost_node(share.node, clock)
        return effects

    def written(self, update_id: int, record: JobRecord, clock: Clock) -> list[ShepherdEffect]:
        """The register has decided our update."""
        self._see(clock)
        if not self.writer.conclude(update_id):
            return []
        before, self.decided = self.decided, record
        self.settlement.keep(record.leftovers)
        return [*follow(self, before), *due(self)]

    def rewrite(self, update_id: int, clock: Clock) -> list[ShepherdEffect]:
        """The register could not tell whether our update is written: the same again."""
        self._see(clock)
        return [*self.writer.repeat(update_id)]

    def refused(self, update_id: int, clock: Clock) -> list[ShepherdEffect] | None:
        """The register can never take our update; None for one that is not ours.  If it is due still, the next event
        finds that: at once it would be refused again."""
        self._see(clock)
        if not self.writer.conclude(update_id):
            return None
        return [*self.writer.go_on(self.decided), *answered_clients(self)]

    def on_timer(self, clock: Clock) -> list[ShepherdEffect]:
        """Attempt timers, repeats of questions and orders, and the time limit."""
        record = self._see(clock)
        effects: list[ShepherdEffect] = []
        if self.attempt is not None and self.now_s >= self.attempt.next_deadline_s:
            effects += self.attempt.on_timer(self.now_s)
        effects += [*self.inquiry.on_timer(self.now_s), *self.suspicions.on_timer(record, self.now_s)]
        effects += [*self.settlement.on_timer(record, self.now_s), *self.claim.on_timer(record, self.now_s)]
        return [*effects, *due(self)]

    # Placement.

    def place(self, shares: Shares, ranking: Ranking, clock: Clock, global_batch: int = 0) -> list[ShepherdEffect]:
        """Try these nodes, with that batch (0: the one of before); the caller has checked `is_waiting`."""
        self._see(clock)
        self.namesakes.forget()  # what was said of leftovers says nothing of what begins now
        self.silent.clear()
        self.global_batch = global_batch
        shares = regrouping.as_parts(shares) if self.decided.spec.elastic else shares
        attempt = self.begin_attempt(self.pacing.next_number(self.decided), shares, ranking)
        return [*attempt.begin(self.now_s)]

    def claim_place(
        self, shares: Shares, victims: Victims, ranking: Ranking, starts_within_s: float, clock: Clock
    ) -> list[ShepherdEffect]:
        """Have these places kept, and have the victims make room for it; the caller has checked `is_waiting`."""
        self._see(clock)
        return [*self.claim.make(self.decided, shares, victims, ranking, starts_within_s, self.now_s)]

    def victims_left(self, clock: Clock) -> None:
        """Nobody has anything any more that was to make room for it."""
        self._see(clock)
        self.claim.cleared(clock.now_s)

    def give_up_place(self, why: str, clock: Clock) -> list[ShepherdEffect]:
        """Keep no place any more, if any is kept."""
        self._see(clock)
        return [*self.claim.give_up(self.decided, why)] if self.claim.is_open else []

    def victim_answered(self, answer: PreemptAnswer, clock: Clock) -> list[ShepherdEffect]:
        """The shepherd of a job that should make room for this one."""
        self._see(clock)
        return [*self.claim.victim_answered(answer, self.decided, self.now_s)]

    def asked_to_yield(self, request: YieldRequest, clock: Clock) -> list[ShepherdEffect]:
        """A hold of ours stands in the way of a job that ranks higher: give way while nothing is decided."""
        self._see(clock)
        attempt = self.attempt
        if attempt is None or attempt.number != request.attempt or attempt.phase is not AttemptPhase.HOLDING:
            return []
        attempt.fail(request.owner, text := f"gave way to {handle(request.wanted_by)} on {request.owner}")
        return [self.announce("job.yielded", text, taker=request.wanted_by), *due(self)]

    # What owners tell.

    def owner_answered(self, answer: OwnerAnswer, clock: Clock) -> list[ShepherdEffect]:
        """An owner's answer to a command of this job."""
        self._see(clock)
        if answer.refusal in NOTHING_KNOWN and self._is_namesake(answer.owner, answer.attempt, answer.origin):
            return []  # what was asked stays open, and is asked again
        self.pacing.released = max(self.pacing.released, (answer.released_attempt, answer.released_part))
        is_status = self.inquiry.answered(answer)
        effects: list[ShepherdEffect] = [*self.claim.owner_answered(answer, self.decided, self.now_s)]
        if not effects:
            effects += self._answered(answer, is_status=is_status)
        return [*effects, *due(self)]

    def _answered(self, answer: OwnerAnswer, *, is_status: bool) -> list[ShepherdEffect]:
        record, attempt, has_nothing = self.decided, self.attempt, answer.refusal in NOTHING_LEFT
        if has_nothing and self.settlement.ended(answer.place, answer.attempt):
            return leftover_settled(self, answer.place, answer.attempt)
        if attempt is not None and attempt.number == answer.attempt and attempt.has(answer.place):
            if is_status and has_nothing:
                attempt.lost(answer.place)
            return [*attempt.answered(answer, self.now_s)]
        is_current = answer.attempt == record.attempt and bool(record.shares) and not record.is_ended
        return self._owner_has_nothing(answer.place) if has_nothing and is_current else []

    def undeliverable(self, node: NodeId, command: OwnerCommand, error: str, clock: Clock) -> list[ShepherdEffect]:
        """A command could not be delivered."""
        self._see(clock)
        if self.attempt is None:
            return []
        return [*self.attempt.undeliverable(node, command, error), *due(self)]

    def task_reported(self, report: TaskReport, clock: Clock) -> list[ShepherdEffect]:
        """A task changed.  Old revisions are acknowledged again and change nothing."""
        self._see(clock)
        status = report.status
        has_exited = status.stage is TaskStage.EXITED
        is_lost = has_exited and status.failure is TaskFailure.LOST
        if is_lost and self._is_namesake(status.node, status.attempt, report.origin):
            return []  # a copy of the owner's disk, or the owner itself, moved: time, and silence, tell
        self.namesakes.met(status.node)
        effects: list[ShepherdEffect]
        if has_exited and self.settlement.ended(status.place, status.attempt):
            effects = [heard(status), *leftover_settled(self, status.place, status.attempt)]
        elif not self._wants(status.attempt, status.place):
            effects = [*dismissal(self.decided, self.me, status)]
        else:
            effects = [*([] if has_exited else [heard(status)]), *self._told(status)]
        return [*effects, *due(self)]

    def _told(self, status: TaskStatus) -> list[ShepherdEffect]:
        known = self.gang.tasks.get(status.place)
        if known is not None and known.news > status.news:
            return []
        effects: list[ShepherdEffect] = []
        if known is None or known.news < status.news:
            effects += self.put(status)
        is_joining = status.part in self.decided.world.joining
        is_running = self.decided.state is JobState.RUNNING and not self.is_writing and not is_joining
        is_of_epoch = status.epoch >= self.decided.epoch  # else its owner may have told it before the start
        if status.stage in (TaskStage.ORDERED, TaskStage.STAGED) and is_running and is_of_epoch:
            return [*effects, *self._owner_has_nothing(status.place)]
        return [*effects, *launch_again(self, status)]

    def _is_namesake(self, node: NodeId, attempt: int, origin: int) -> bool:
        """What this node tells itself is its own word, wherever it lives now."""
        return node != self.me and self.namesakes.is_one(node, attempt, origin, self.decided, self.now_s)

    def _wants(self, attempt: int, place: Place) -> bool:
        """True for the attempt that is being placed or runs; an aborted one, or a part, is not wanted any more."""
        if self.attempt is not None and (self.attempt.has(place) or not self.decided.spec.elastic):
            return attempt == self.attempt.number
        if place.part and place.part not in [share.part for share in self.decided.shares]:
            return False
        return attempt == self.decided.attempt and bool(self.decided.shares) and not self.decided.is_ended

    def _owner_has_nothing(self, place: Place) -> list[ShepherdEffect]:
        """A stop or status request met no task, or one that stands before its start although the gang runs: it never
        began there, or every trace of it is lost."""
        if self.gang.has_exited(place):
            return []
        record = self.decided
        if record.stop_reason is not EndReason.NONE or self.gang.is_stopping:
            status = gone(record, record.attempt, place, TaskFailure.NONE)
        else:
            text = f"{place.node} knows nothing of the task any more"
            status = gone(record, record.attempt, place, TaskFailure.LOST, text)
        return [self.commands.to(place, ReleaseRequest, record, record.attempt), *self.put(status)]

    def estimated(self, sender: NodeId, told: TaskEstimate, clock: Clock) -> list[ShepherdEffect]:
        """Its ranks have told how they train; what earlier attempts measured with other sizes stands."""
        record = self.decided
        is_former = bool(record.world.version) and not any(share.node == sender for share in record.members)
        if told.attempt != record.attempt or record.state is not JobState.RUNNING or is_former:
            return []
        self._see(clock)
        self.learn(told.estimate)
        if told.global_batch in (0, record.global_batch) or not record.global_batch:
            return []
        return [SendPeer(sender, TaskBatch(record.job_id, record.attempt, record.global_batch))]

    def commit_checkpoint(self, request: CheckpointRequest, clock: Clock) -> list[ShepherdEffect]:
        """Have the next attempt resume from it, if its own is the present one when its turn comes."""
        record = self._see(clock)
        saved = changes.CheckpointSaved(request, self.parts.may_commit)
        is_committed = is_named(record, request)
        refusal = "" if is_committed else saved.refusal(record)
        if refusal or is_committed:
            numbers = (request.attempt, request.command_id, record.epoch)
            told = CheckpointAnswer(request.job_id, *numbers, is_committed, refusal[:REASON_LENGTH])
            return [SendPeer(request.owner, told)]
        # With no majority that answers, or a change that waits for them to be over, they are asked again.
        has_failed = self.attempt is not None and self.attempt.phase is AttemptPhase.FAILED
        leaves_start = record.state is JobState.STARTING and (self.gang.has_started or has_failed)
        if len(self.writer.waiting) < WAITING_MAX and not leaves_start:
            self.writer.wish(saved)
        return due(self)

    # Nodes that are silent, lost, or back.

    def note_silent_node(self, node: NodeId) -> bool:
        """A node is believed failed: if it has ranks of this job, say so; they may well run on."""
        if not self.has_share(node) or node in self.silent:
            return False
        self.silent[node] = None
        return True

    def note_returned_node(self, node: NodeId, clock: Clock) -> list[ShepherdEffect]:
        """A node is back, perhaps without its memory: ask what it still has of this job."""
        self.silent.pop(node, None)
        self.suspicions.clear(node)
        self.namesakes.met(node)
        asked = self.attempt if self.attempt is not None and self.attempt.awaits(node) else None
        places = [share.place for share in self.shares_on(node) if asked is None or not asked.has(share.place)]
        if not places or self.decided.is_ended:
            return []
        self._see(clock)
        return [*self.ask_status(places)]

    def note_lost_node(self, node: NodeId, clock: Clock) -> list[ShepherdEffect]:
        """A node is believed to be gone for good: if it has ranks of this job, give up what goes with them.

        Safety does not rest on that belief: what is left there is settled before anything new starts.  A gang that goes
        as a whole is given up only once that can gain something: its holders must have been silent first.
        """
        record = self._see(clock)
        self.note_silent_node(node)
        if not self.has_share(node) or self.is_writing or self.now_s < self.hears_owners_until_s:
            return []  # told again soon
        is_stopping = record.state is JobState.STOPPING
        if record.spec.on_isolation is Isolation.CONTINUE and not is_stopping:
            return []  # its ranks run on: only their owner, or an operator, can say that they do not
        lost = self.shares_on(node)
        if not self.conduct.is_ended_by([share.place for share in lost], self.gang, record):
            return regrouping.lost_node(self, node)
        if not is_stopping and not self.suspicions.is_confirmed(node, record):
            return [*self.suspicions.suspect(node, record, self.now_s)]
        if self.may_restart:
            return restart(self, f"{node} was lost", record.shares)
        if not is_stopping:
            self.wish_stop(EndReason.NODE_LOST, f"{node} was lost, and {self.why_no_restart}")
        self.writer.wish(changes.Unreachable(left_by(lost, record.attempt)))
        return due(self)

    def silence_told(self, sender: NodeId, answer: SilenceAnswer, clock: Clock) -> list[ShepherdEffect]:
        """A holder says for how long an attempt, or a leftover, has heard nothing that lets it run."""
        record = self._see(clock)
        self.suspicions.silence_told(sender, answer, record, self.now_s)
        if self.suspicions.is_confirmed(answer.owner, record):
            return self.note_lost_node(answer.owner, clock)
        settled = self.settlement.silence_told(sender, answer, self.decided)
        effects = [effect for each in settled for effect in leftover_settled(self, each.place, each.attempt)]
        return [*effects, *due(self)] if settled else []

    def declare_lost(self, clock: Clock) -> list[ShepherdEffect]:
        """An operator vouches for it that nothing is left on the nodes that do not answer."""
        record = self._see(clock)
        silent = [node for node in self.silent if self.has_share(node)]
        if silent and self.may_restart and not self.is_writing:
            self.vouched = dict.fromkeys(silent)
            return restart(self, f"an operator declared {', '.join(silent)} lost", record.shares)
        left = list(self.settlement.open)
        return [*(effect for each in left for effect in leftover_settled(self, each.place, each.attempt)), *due(self)]

    # What others wish.

    def preempt(self, request: PreemptRequest, refusal: str, clock: Clock) -> list[ShepherdEffect]:
        """Another job wants this one's place; `refusal` is the policy's reason why not, by this node's own figures."""
        record = self._see(clock)
        is_stopping = record.stop_reason in COMING_BACK
        if not refusal and not is_stopping and (record.state is not JobState.RUNNING or self.is_writing):
            refusal = f"it is {record.state.value}"
        told = PreemptAnswer(self.job_id, request.command_id, request.taker, not refusal, refusal[:REASON_LENGTH])
        answer = SendPeer(request.shepherd, told)
        if refusal or is_stopping or not request.is_decided:
            return [answer]
        self.stop_grace_s = record.spec.grace_s
        self.wish_stop(EndReason.PREEMPTED, reason := f"makes room for {handle(request.taker)}")
        return [answer, self.announce("job.preempted", reason, taker=request.taker), *due(self)]

    def rescale(
        self, target: Allocation, reason: str, ranking: Ranking, clock: Clock, leave: Collection[int] = ()
    ) -> list[ShepherdEffect]:
        """Go on there: while it trains, those of `leave` first of all, or by another attempt, once that place is kept.

        The caller has checked that it may.
        """
        self._see(clock)
        if self.decided.spec.elastic:
            return [*regrouping.begin(self, target, reason, ranking, leave), *due(self)]
        self.rescale_to = (target, reason)
        return [*self.claim.keep(self.decided, target.shares, ranking, self.now_s)]

    def take_next_place(self) -> Allocation:
        """Where it was to go on when its attempt was ended for that; told once."""
        place, self.next_place = self.next_place, Allocation()
        return place

    def scale(self, request_id: int, spec: JobSpec, clock: Clock) -> list[ShepherdEffect]:
        """It is to have other numbers of ranks; the caller has checked that it may."""
        self._see(clock)
        return [self.wish_size(spec), *self.tell(request_id, clock)]

    def rebatch(self, global_batch: int, reason: str, clock: Clock) -> list[ShepherdEffect]:
        """Its ranks go on with another batch; they are told in answer to what they report."""
        self._see(clock)
        before = self.decided.global_batch
        self.writer.wish(changes.Rebatched(global_batch))
        return [self.announce("job.rebatched", reason, batch_before=before, batch_after=global_batch), *due(self)]

    def cancel(self, request_id: int, grace_s: float | None, reason: str, clock: Clock) -> list[ShepherdEffect]:
        """Stop on a user's wish, and answer once that is durable; a shorter grace shortens the wait."""
        self._see(clock)
        if not self.decided.is_ended:
            self.stop_grace_s = self.decided.spec.grace_s if grace_s is None else grace_s
            self.wish_stop(EndReason.CANCELLED, reason or "cancelled")
        return self.tell(request_id, clock)

    def tell(self, request_id: int, clock: Clock, *, was_known: bool = False) -> list[ShepherdEffect]:
        """Answer a client with the record, after the updates under way: others may have told of their outcome already,
        and nobody may be told of an older one then."""
        self._see(clock)
        self.asking[request_id] = (self.writer.wished_count, was_known)
        return due(self)

    def farewell(self) -> list[ShepherdEffect]:
        """This node does not act for the job any more: nobody here will answer those who wait."""
        asking, self.asking = self.asking, {}
        remedy = "ask again: another shepherd acts for it soon"
        refusal = Refused("unavailable", "outcome unknown: this node lost its authority over the job", remedy)
        return [ReplyToClient(request_id, refusal) for request_id in asking]

    def signal(self, signal: int, clock: Clock) -> list[ShepherdEffect]:
        """Send a signal to every rank."""
        record = self._see(clock)
        return [self.commands.to(share.place, SignalRequest, record, record.attempt, signal) for share in record.shares]

    def change_holders(self, holders: Holders, leaving: Holders, clock: Clock) -> list[ShepherdEffect]:
        """Exchange the holders, in two updates."""
        self._see(clock)
        self.writer.wish(changes.HoldersExchanged(holders, leaving))
        return due(self)

    def hand_over(self, successor: NodeId, clock: Clock) -> list[ShepherdEffect]:
        """Make another holder the shepherd; it acts as soon as it sees the record."""
        self._see(clock)
        self.writer.wish(changes.HandedOver(successor))
        return due(self)
