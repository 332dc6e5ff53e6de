"""One node of the swarm: membership, gossiped state, register, ledger and shepherds behind one `step`.

The node only routes.  Each event goes to the machine that it concerns; what machines tell one another (a register
update wanted, a member that changed, a setting adopted) is settled within the same step, in order, so that a durable
write always stands before what depends on it.  Whatever is left goes to the driver.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from swarmsched.api import JobState
from swarmsched.authority.message import ContactAnswered, SilenceAnswer
from swarmsched.commands import CancelJob, RecoverJob, Refused, SignalJob, SubmitJob
from swarmsched.effects import Announce, Effect, ReplyToClient, SendPeer
from swarmsched.errors import LocalProtocolError, RemoteProtocolError
from swarmsched.estimate import SpeedQuestion
from swarmsched.events import (
    ClientCommandReceived,
    DatagramReceived,
    DatagramSendFailed,
    DiskChanged,
    Event,
    LoopLagged,
    PeerMessageReceived,
    PeerSendFailed,
    PlanComputed,
    PlanFailed,
    ResourcesRead,
    TasksFound,
    TimerFired,
    WorkLagged,
)
from swarmsched.fields import cleaned
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberChanged, MemberStatus, MemberView
from swarmsched.gossip.message import is_membership_payload
from swarmsched.gossip.record import NodeFlag, NodeStatus
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.gossip.state import MemberRef
from swarmsched.ids import Address, JobId, NodeId, origin_of
from swarmsched.jobs.message import RegisterMessage
from swarmsched.jobs.register import Register
from swarmsched.jobs.update import (
    EndConfirmed,
    JobOver,
    ReadDecided,
    RecordAccepted,
    UpdateConflicted,
    UpdateDecided,
    UpdateRequested,
    UpdateUncertain,
)
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import (
    CheckpointAnswer,
    CheckpointRequest,
    ClaimRequest,
    Opening,
    OwnerAnswer,
    OwnerCommand,
    PreemptAnswer,
    PreemptRequest,
    TaskBatch,
    TaskEstimate,
    TaskReport,
    TaskReportReceived,
    YieldRequest,
)
from swarmsched.negotiation.checkpointing import CheckpointDesk
from swarmsched.negotiation.gang import dismissal, heard
from swarmsched.negotiation.owner import Owner
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.record_writer import ReadRecord, WriteRecord
from swarmsched.negotiation.shepherd import Clock, JobShepherd
from swarmsched.negotiation.shepherd_state import ShepherdParts
from swarmsched.node.cluster import Cluster
from swarmsched.node.command_counter import CommandCounter
from swarmsched.node.config import NodeConfig, Restored
from swarmsched.node.custody import CUSTODY_MESSAGES, Custody
from swarmsched.node.ended_jobs import EndedJobs
from swarmsched.node.parts import PRODUCTION, Parts
from swarmsched.node.planes import (
    MEMBERSHIP_PEER_MESSAGES,
    STATE_PEER_MESSAGES,
    make_membership,
    make_state_plane,
)
from swarmsched.node.publication import Publication
from swarmsched.node.recovery import Recovery
from swarmsched.node.submission import Submission, past_retention
from swarmsched.policies.explain import WhyReport, explain, size_reason, speed_question
from swarmsched.record import JobRecord
from swarmsched.resources import Free
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import ClusterView, JobView

Internal = (
    WriteRecord
    | ReadRecord
    | MemberChanged
    | UpdateDecided
    | UpdateConflicted
    | UpdateUncertain
    | ReadDecided
    | JobOver
    | RecordAccepted
    | EndConfirmed
)
NodeEffect = Effect | Internal
ACCUSE_AGAIN_S = 60.0
ACCUSED_MAX = 1_000  # senders of nonsense remembered; names are claims, so they must not fill the memory


class Node:
    """Everything that decides on one server; drive it with `step`."""

    def __init__(self, config: NodeConfig, restored: Restored, rng: random.Random, parts: Parts = PRODUCTION) -> None:
        me = config.node_id
        self._config = config
        self._utc_offset_s = config.utc_offset_s
        self._membership = make_membership(config, _fork(rng), parts.make_membership)
        self._state = make_state_plane(config, restored, _fork(rng))
        self._ledger = parts.make_ledger(me, config.generation, origin_of(config.address))
        self._ledger.restore(restored.room("ledger"), config.started_s)
        self._line = parts.make_contact_line(me, config.generation, parts.quorum)
        self._owner = Owner(me, self._ledger, self._line)
        self._owner.restore(restored.room("task"), config.started_s)
        self._lease_book = parts.make_lease_book(config.started_s)
        self._register = Register(
            me,
            config.generation,
            config.store_id,
            _fork(rng),
            quorum=parts.quorum,
            may_change_shepherd=self._lease_book.may_change,
            tombstones_max=parts.tombstones_max,
        )
        self._register.restore(restored.room("register"), restored.room("over"))
        self._cluster = Cluster(me, self._membership, self._state, self._ledger, is_witness=config.is_witness)
        shepherd_parts = ShepherdParts(parts.make_attempt, parts.may_commit, parts.quorum)
        self._placement = Placement(me, self._cluster, _fork(rng), shepherd_parts)
        self._submission = Submission(config.own, config.generation, self._placement, _fork(rng))
        self._publication = Publication(me, self._state, self._ledger, self._placement, config)
        self._custody = Custody(
            config.own,
            config.generation,
            parts.quorum,
            self._register,
            self._placement,
            self._lease_book,
            parts.make_contact_book(config.started_s, parts.quorum),
            self._cluster.candidates,
            self._cluster.stalled,
            lambda: {**self._submission.creating(), **self._recovery.under_way},
            self.locations,
            _fork(rng),
            started_s=config.started_s,
        )
        self._checkpoints = CheckpointDesk(me, config.generation)
        self._recovery = Recovery(config.own, config.generation, self._placement)
        self._counter = CommandCounter(
            self._submission,
            self._membership,
            self._state,
            self._cluster,
            self._placement,
            self._owner,
            self._register,
            self._checkpoints,
            self._recovery,
            config,
        )
        self._ended_jobs = EndedJobs(
            config.own.holder,
            self._register,
            self._placement,
            self._custody,
            self._publication,
            _fork(rng),
            retained_jobs=config.retained_jobs,
            started_s=config.started_s,
        )
        self._touched: dict[JobId, None] = {}
        self._is_mere_gossip = False  # this step has moved no timer but those of the gossip planes
        self._work_deadline_s: float | None = None  # cache of all others
        self._seen_ledger_version = -1
        self._seen_free = Free()
        self._seen_opening_count = 0
        self._generation = config.generation  # that peers see; membership may raise it
        self._seen_setting = self._state.setting
        self._placement.set_policy(self._seen_setting.policy_setting, config.started_s)
        self._has_read = self._has_looked = False  # resources, and tasks of an earlier life
        self._is_awake = False  # both, and our jobs taken up again
        self._accused_s: dict[NodeId, float] = {}  # when senders of nonsense were last announced
        self.counters: Counter[str] = Counter()

    # The one entry point.

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Take in one event; returns what the driver must do, in order."""
        clock = Clock(now_s, now_s + self._utc_offset_s)
        self._is_mere_gossip = type(event) is DatagramReceived
        effects = self._settle(self._route(event, clock), clock)
        while self._needs_follow_up(now_s):
            self._is_mere_gossip = False
            effects += self._settle(self._follow_up(clock), clock)
        if not self._is_mere_gossip:
            self._work_deadline_s = None
        return effects

    @property
    def next_deadline_s(self) -> float:
        """When `TimerFired` is due."""
        if self._work_deadline_s is None:
            self._work_deadline_s = self._earliest_work_s()
        return min(self._membership.next_deadline_s, self._state.next_deadline_s, self._work_deadline_s)

    def _earliest_work_s(self) -> float:
        """Whatever is due that is not gossip: asked of every job and task here, so not after every datagram."""
        return min(
            self._owner.next_deadline_s,
            self._register.next_deadline_s,
            self._placement.next_deadline_s,
            self._custody.next_deadline_s if self._is_awake else float("inf"),
            self._checkpoints.next_deadline_s,
        )

    def _route(self, event: Event, clock: Clock) -> Iterable[NodeEffect]:
        now_s = clock.now_s
        match event:
            case DatagramReceived():
                return self._on_datagram(event, clock)
            case PeerMessageReceived():
                return self._route_peer(event, clock)
            case TimerFired():
                return self._on_timer(clock)
            case DatagramSendFailed() | LoopLagged() | WorkLagged():
                return self._on_trouble(event, now_s)
            case PeerSendFailed():
                return self._on_undelivered(event, clock)
            case DiskChanged():
                return self._on_disk(event, clock)
            case ClientCommandReceived():
                return self._on_command(event, now_s)
            case ResourcesRead():
                return self._on_resources(event, clock)
            case PlanComputed() | PlanFailed():
                return self._on_plan(event, clock)
            case TasksFound():
                return self._on_tasks_found(event, clock)
            case _:
                return self._owner.step(event, now_s)

    def _route_peer(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        message = event.message
        if isinstance(message, OwnerCommand):
            return self._owner.obey(event.sender, message, clock.now_s)
        if isinstance(message, OwnerAnswer | TaskReport | Opening):
            return self._on_owner_said(event.sender, message, clock)
        if isinstance(message, TaskReportReceived | TaskBatch):
            return self._owner.answered(message)
        if isinstance(message, CUSTODY_MESSAGES):
            return self._custody.receive(event.sender, message, clock)
        if isinstance(message, ContactAnswered):
            return self._owner.contact_answered(event.sender, message, clock.now_s)
        if isinstance(message, SilenceAnswer | CheckpointRequest | TaskEstimate):
            return self._on_shepherd_asked(event.sender, message, clock)
        if isinstance(message, PreemptRequest | PreemptAnswer | YieldRequest):
            return self._on_making_room(message, clock)
        if isinstance(message, CheckpointAnswer):
            return self._checkpoints.answered(message)
        if isinstance(message, RegisterMessage):
            return self._on_register_message(event, clock)
        if isinstance(message, MEMBERSHIP_PEER_MESSAGES):
            return self._membership.step(event, clock.now_s)
        if isinstance(message, STATE_PEER_MESSAGES):
            return self._on_state(event, clock)
        raise RemoteProtocolError("no machine takes it", kind=type(message).__name__, peer=event.sender)

    def _on_register_message(self, event: PeerMessageReceived, clock: Clock) -> Sequence[NodeEffect]:
        """What makes no sense gets no answer, but an operator should hear who says such things."""
        count = self.register_drops.get("nonsense", 0)
        effects = self._register.step(event, clock.now_s)
        if self.register_drops.get("nonsense", 0) == count or not self._is_news_of(event.sender, clock.now_s):
            return effects
        kind = type(event.message).__name__
        text = f"{event.sender} sent a message about a record that makes no sense; it was dropped"
        return [Announce("peer.nonsense", text, node=event.sender, fields={"kind": kind}), *effects]

    def _is_news_of(self, sender: NodeId, now_s: float) -> bool:
        """Once a minute for each sender."""
        if now_s < self._accused_s.get(sender, float("-inf")) + ACCUSE_AGAIN_S:
            return False
        if len(self._accused_s) >= ACCUSED_MAX:
            self._accused_s.clear()
        self._accused_s[sender] = now_s
        return True

    def _on_trouble(self, event: DatagramSendFailed | LoopLagged | WorkLagged, now_s: float) -> Iterable[NodeEffect]:
        """The kernel refuses to send, or this node is late."""
        if isinstance(event, WorkLagged):
            self._custody.succession.lagged(event.lag_s, now_s)
            return []
        return self._membership.step(event, now_s)

    def _on_datagram(self, event: DatagramReceived, clock: Clock) -> Iterable[NodeEffect]:
        if is_membership_payload(event.payload):
            return self._membership.step(event, clock.now_s)
        return self._on_state(event, clock)

    def _on_state(self, event: DatagramReceived | PeerMessageReceived, clock: Clock) -> list[Effect]:
        """Gossip on nodes and jobs; where it tells of room for what waits here, the queue is looked at."""
        effects = self._state.step(event, clock.now_s)
        if self._ledger.claims:
            self._ledger.drop_claims(self._is_succeeded)
        if self._state.opening_count != self._seen_opening_count:
            self._seen_opening_count = self._state.opening_count
            if self._placement.may_change_jobs or self._placement.waiting_count:
                self._is_mere_gossip = False
                self._placement.capacity_released(clock)
        if self._state.has_job_news and self._has_free:
            self._is_mere_gossip = False
            self._placement.others_wait(clock.now_s)
        if self._state.has_job_news and self._placement.may_change_jobs and self._placement.make_room_for_others(clock):
            self._is_mere_gossip = False
        return effects

    def _is_succeeded(self, claim: ClaimRequest) -> bool:
        """Its job has ended, or has another shepherd, who does not know of it."""
        location = self._state.locations.get(claim.job_id)
        return location is not None and (location.state is JobState.ENDED or location.epoch > claim.epoch)

    def _on_owner_said(
        self, sender: NodeId, message: OwnerAnswer | TaskReport | Opening, clock: Clock
    ) -> list[NodeEffect]:
        """An owner answered, reported or has something free: its free counts repair our view first."""
        if sender != self._config.node_id:
            self._state.repair(sender, message.free, clock.now_s)
        if isinstance(message, Opening):
            self._placement.invited(clock.now_s)
            return []
        job_id = message.job_id if isinstance(message, OwnerAnswer) else message.status.job_id
        shepherd = self._placement.jobs.get(job_id)
        if shepherd is None:
            return self._answer_stray(message)
        self._touched[job_id] = None
        self._placement.look_soon(clock.now_s)
        if isinstance(message, OwnerAnswer):
            return [*shepherd.owner_answered(message, clock)]
        return [*shepherd.task_reported(message, clock)]

    def _on_shepherd_asked(
        self, sender: NodeId, message: SilenceAnswer | CheckpointRequest | TaskEstimate, clock: Clock
    ) -> list[NodeEffect]:
        shepherd = self._placement.jobs.get(message.job_id)
        if shepherd is None:
            return []  # asked again at whoever acts by then
        self._touched[message.job_id] = None
        if isinstance(message, SilenceAnswer):
            return [*shepherd.silence_told(sender, message, clock)]
        if isinstance(message, TaskEstimate):
            return [*self._placement.estimated(shepherd, sender, message, clock)]
        if message.owner != sender:
            raise RemoteProtocolError(f"names owner {message.owner}", kind="CheckpointRequest", peer=sender)
        return [*shepherd.commit_checkpoint(message, clock)]

    def _on_making_room(self, message: PreemptRequest | PreemptAnswer | YieldRequest, clock: Clock) -> list[NodeEffect]:
        """One shepherd to another: whose job stops for whose; and an owner to the shepherd whose hold is in the way."""
        job_id = JobId(message.taker if isinstance(message, PreemptAnswer) else message.job_id)
        shepherd = self._placement.jobs.get(job_id)
        if shepherd is None:
            return []  # asked again, or given up in time
        self._touched[job_id] = None
        match message:
            case PreemptRequest():
                refusal = self._placement.refuses_to_make_room(message, clock)
                return [*shepherd.preempt(message, refusal, clock)]
            case PreemptAnswer():
                return [*shepherd.victim_answered(message, clock)]
            case YieldRequest():
                return [*shepherd.asked_to_yield(message, clock)]

    def _answer_stray(self, message: OwnerAnswer | TaskReport) -> list[NodeEffect]:
        """A report on a job that has ended here: it was lost news to the owner, so say again that it is heard.

        Of any other job, and of one whose record is lost here, the owner hears from whoever acts, or from the holders.
        """
        if isinstance(message, OwnerAnswer):
            return []
        status = message.status
        record = self._register.records.get(status.job_id)
        if self._register.is_over(status.job_id) and status.stage is TaskStage.EXITED:
            return [heard(status)]  # of ranks that still run it hears by its contacts
        if record is None or not record.is_ended or self._ended_jobs.is_in_doubt(record):
            return []
        return [*dismissal(record, self._config.node_id, status)]

    def _on_undelivered(self, event: PeerSendFailed, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if isinstance(event.message, MEMBERSHIP_PEER_MESSAGES):
            effects += self._membership.step(event, clock.now_s)
        if isinstance(event.message, OwnerCommand):
            shepherd = self._placement.jobs.get(event.message.job_id)
            if shepherd is not None:
                self._touched[event.message.job_id] = None
                effects += shepherd.undeliverable(event.recipient, event.message, event.error, clock)
        return effects

    def _on_timer(self, clock: Clock) -> Iterable[NodeEffect]:
        event, now_s = TimerFired(), clock.now_s
        effects: list[NodeEffect] = []
        if now_s >= self._membership.next_deadline_s:
            effects += self._membership.step(event, now_s)
        if now_s >= self._state.next_deadline_s:
            effects += self._state.step(event, now_s)
        if self._work_deadline_s is not None and now_s < self._work_deadline_s:
            self._is_mere_gossip = True
            return effects
        for machine in (self._owner, self._register):
            if now_s >= machine.next_deadline_s:
                effects += machine.step(event, now_s)
        if now_s >= self._checkpoints.next_deadline_s:
            effects += self._checkpoints.on_timer(self._owner.shepherd_of, now_s)
        for shepherd in self._placement.due(now_s):
            self._touched[shepherd.job_id] = None
            effects += shepherd.on_timer(clock)
        if self._is_awake:
            effects += self._invite(clock)
        if self._is_awake and now_s >= self._custody.next_deadline_s:
            effects += [*self._ended_jobs.look_after(clock), *self._custody.on_timer(clock)]
            effects += self._owner.end_left_over(self._ended_epoch, now_s)
        return effects

    def _ended_epoch(self, job_id: JobId) -> int:
        location = self._state.locations.get(job_id)
        return location.epoch if location is not None and location.state is JobState.ENDED else 0

    def _on_resources(self, event: ResourcesRead, clock: Clock) -> list[NodeEffect]:
        self._publication.telemetry(event)
        self._cluster.own_resources = event.resources
        self._ledger.offer(event.resources, clock.now_s)
        self._has_read = True
        return [*self._publication.tell_node(clock), *self._wake_up(clock)]

    def _on_plan(self, event: PlanComputed | PlanFailed, clock: Clock) -> list[NodeEffect]:
        if isinstance(event, PlanFailed):
            self._placement.plan_failed(event.version, clock.now_s)
            return []
        told = self._placement.plan_computed(event.plan, clock)
        self._touched |= dict.fromkeys(self._placement.jobs)
        return [*told]

    def _on_disk(self, event: DiskChanged, clock: Clock) -> list[Effect]:
        is_stalled = not event.is_writing
        self._publication.is_disk_stalled = self._cluster.is_disk_stalled = is_stalled
        self._custody.is_disk_stalled = is_stalled
        return [*self._publication.tell_node(clock)]

    def _on_tasks_found(self, event: TasksFound, clock: Clock) -> list[NodeEffect]:
        self._has_looked = True
        return [*self._owner.step(event, clock.now_s), *self._wake_up(clock)]

    def _wake_up(self, clock: Clock) -> list[NodeEffect]:
        """Once, when this node knows what it has and what runs on it: take its jobs up again."""
        if self._is_awake or not (self._has_read and self._has_looked):
            return []
        self._is_awake = True
        self._counter.open(clock.now_s)
        records = list(self._register.records.values())
        effects: list[NodeEffect] = [*self._publication.tell_restored(records, clock)]
        self._placement.look_soon(clock.now_s)
        for record in records:
            effects += self._owner.learn(record, clock.now_s)
        return [*effects, *self._custody.on_timer(clock)]

    def _on_command(self, event: ClientCommandReceived, now_s: float) -> Iterable[NodeEffect]:
        self._utc_offset_s = event.now_utc_s - now_s
        clock = Clock(now_s, event.now_utc_s)
        if not self._is_awake:
            problem = "this agent is still starting: its resources are not read yet"
            return [ReplyToClient(event.request_id, Refused("not_ready", problem, "try again in a second"))]
        command = event.command
        known = None
        effects: list[NodeEffect] = []
        if isinstance(command, SubmitJob | CancelJob | SignalJob | RecoverJob):
            effects += self._custody.check_authority(command.job_id, clock)
            self._touched[command.job_id] = None
            known = self.record(command.job_id)
            if self._register.is_over(command.job_id):
                return [*effects, ReplyToClient(event.request_id, past_retention(command.job_id))]
        if isinstance(command, CancelJob | SignalJob) and known is not None and self._ended_jobs.is_in_doubt(known):
            problem = f"whether {command.job_id} has ended is not decided yet"
            return [*effects, ReplyToClient(event.request_id, Refused("unavailable", problem, "ask again soon"))]
        return [*effects, *self._counter.obey(event.request_id, command, known, clock)]

    # Settling what machines tell one another.

    def _settle(self, effects: Iterable[NodeEffect], clock: Clock) -> list[Effect]:
        work = deque(effects)
        done: list[Effect] = []
        self._is_mere_gossip = self._is_mere_gossip and not any(isinstance(effect, Internal) for effect in work)
        while work:
            effect = work.popleft()
            if isinstance(effect, Internal):
                work.extendleft(reversed(self._react(effect, clock)))
            else:
                done.append(effect)
        return done

    def _react(self, effect: Internal, clock: Clock) -> Sequence[NodeEffect]:
        """What one machine told the others."""
        match effect:
            case WriteRecord(update=update):
                return self._write(update, clock)
            case MemberChanged():
                return self._on_member(effect, clock)
            case ReadRecord(read=read):
                return self._register.step(read, clock.now_s)
            case RecordAccepted():
                return self._on_accepted(effect, clock)
            case EndConfirmed(job_id=job_id):
                return self._ended_jobs.confirmed(job_id)
            case JobOver():
                return self._on_over(effect, clock)
            case _:
                return self._on_register(effect, clock)

    def _write(self, update: UpdateRequested, clock: Clock) -> Sequence[NodeEffect]:
        """One that cannot be encoded is left out, so that those behind it are not held up for ever."""
        try:
            return self._register.step(update, clock.now_s)
        except LocalProtocolError as error:
            self.counters["updates_refused"] += 1
            text = f"an update of its record cannot be stored and was left out: {cleaned(str(error))}"
            told = Announce("job.update_refused", text, update.job_id, self._config.node_id)
            shepherd = self._placement.jobs.get(update.job_id)
            effects = shepherd.refused(update.update_id, clock) if shepherd is not None else None
            if effects is None:
                return [told, *self._tell_of(UpdateUncertain(update.update_id, str(error)), clock)]
            self._touched[update.job_id] = None
            return [told, *effects]

    def _on_register(
        self, result: UpdateDecided | UpdateConflicted | UpdateUncertain | ReadDecided, clock: Clock
    ) -> Sequence[NodeEffect]:
        if isinstance(result, UpdateDecided):
            self._custody.confirmed(result.record, clock)
        if isinstance(result, ReadDecided):
            return [*self._ended_jobs.read(result.record, clock), *self._tell_of(result, clock)]
        return self._tell_of(result, clock)

    def _tell_of(
        self, result: UpdateDecided | UpdateConflicted | UpdateUncertain | ReadDecided, clock: Clock
    ) -> Sequence[NodeEffect]:
        """Whoever asked of it."""
        if self._custody.concerns(result.update_id):
            if isinstance(result, UpdateDecided):
                self._touched[result.record.job_id] = None
            return self._custody.decided(result, clock)
        if isinstance(result, ReadDecided):
            return []
        if self._submission.concerns(result.update_id):
            self._touched |= dict.fromkeys(self._submission.job_of(result.update_id))
            return self._submission.created(result, clock)
        if self._recovery.concerns(result.update_id):
            return self._on_recovered(result, clock)
        if isinstance(result, UpdateDecided):
            shepherd = self._placement.jobs.get(result.record.job_id)
            if shepherd is None:
                return []
            self._touched[result.record.job_id] = None
            effects = shepherd.written(result.update_id, result.record, clock)
            if shepherd.is_waiting:
                self._placement.look_soon(clock.now_s)
            return effects
        if isinstance(result, UpdateUncertain):
            return [
                effect
                for shepherd in self._placement.jobs.values()
                for effect in shepherd.rewrite(result.update_id, clock)
            ]
        return self._lost_authority(result, clock)

    def _on_recovered(
        self, result: UpdateDecided | UpdateConflicted | UpdateUncertain, clock: Clock
    ) -> Sequence[NodeEffect]:
        replies = self._recovery.told(result)
        if not isinstance(result, UpdateDecided):
            return replies
        self._touched[result.record.job_id] = None
        if result.record.shepherd != self._config.node_id:
            return replies
        return [*self._custody.take_up(result.record, clock), *replies]

    def _on_accepted(self, accepted: RecordAccepted, clock: Clock) -> Sequence[NodeEffect]:
        """A record came into our store, by our own hand or by another's."""
        record = accepted.record
        self._custody.accepted(record, clock.now_s, is_by_shepherd=accepted.is_by_shepherd)
        effects: list[NodeEffect] = [*self._owner.learn(record, clock.now_s)]
        shepherd = self._placement.jobs.get(record.job_id)
        if shepherd is not None and record.shepherd != self._config.node_id and record.epoch > shepherd.record.epoch:
            effects += self._placement.step_down(shepherd, f"epoch {record.epoch} is {record.shepherd}'s")
        return [*effects, *self._ended_jobs.accepted(record, clock)]

    def _on_over(self, result: JobOver, clock: Clock) -> list[NodeEffect]:
        """A holder had the job's decided end and keeps it no more: whatever is here of the job is old."""
        job_id = result.job_id
        effects: list[NodeEffect] = []
        if job_id in self._register.open_records:
            text = "it ended while this node knew it open; others have dropped its record, and so does this one"
            effects.append(Announce("job.over", text, job_id, self._config.node_id))
        effects += self._ended_jobs.bury(job_id)
        if (shepherd := self._placement.jobs.get(job_id)) is not None:
            effects += self._let_go_of_over(job_id, shepherd, clock)
        if self._custody.concerns(result.update_id):
            self._custody.over(result.update_id, clock)
        elif self._submission.concerns(result.update_id):
            effects += self._submission.over(result.update_id)
        elif self._recovery.concerns(result.update_id):
            effects += self._recovery.over(result.update_id)
        return effects

    def _let_go_of_over(self, job_id: JobId, shepherd: JobShepherd, clock: Clock) -> list[NodeEffect]:
        self._placement.let_go(job_id)
        self._placement.look_soon(clock.now_s)
        asked = [effect for effect in shepherd.farewell() if isinstance(effect, ReplyToClient)]
        replies = [ReplyToClient(effect.request_id, past_retention(job_id)) for effect in asked]
        text = "the job has ended, and its record is past its retention"
        stepped_down = Announce("job.stepped_down", text, job_id, self._config.node_id)
        return [
            *replies,
            stepped_down,
            *self._publication.withdraw(job_id, clock),
            *self._owner.forget(job_id, clock.now_s),
        ]

    def _lost_authority(self, result: UpdateConflicted, clock: Clock) -> Sequence[NodeEffect]:
        """Somebody else wrote the record: our epoch is over, so we let go of the job and touch nothing of it."""
        self.counters["register_conflicts"] += 1
        current = result.current
        shepherd = self._placement.jobs.get(current.job_id) if current is not None else None
        if current is None or shepherd is None:
            return []
        return self._placement.step_down(shepherd, f"epoch {current.epoch} is {current.shepherd}'s")

    def _on_member(self, change: MemberChanged, clock: Clock) -> Sequence[NodeEffect]:
        member = change.member
        self._placement.look_soon(clock.now_s)
        if member.node_id == self._config.node_id:
            is_in_conflict = member.status is MemberStatus.CONFLICT
            self._owner.is_in_conflict = self._publication.is_in_conflict = is_in_conflict
        elif member.status in (MemberStatus.ALIVE, MemberStatus.SUSPECT):
            self._state.put_peer(MemberRef(member.node_id, member.address, member.generation))
        else:
            self._state.drop_peer(member.node_id)
        self._custody.member_changed(member, clock.now_s)
        self._cluster.member_changed(member, clock.now_s)
        effects: list[NodeEffect] = []
        if member.status is MemberStatus.FAILED:
            for job_id, shepherd in self._placement.jobs.items():
                if shepherd.note_silent_node(member.node_id):
                    self._touched[job_id] = None
        if member.status is MemberStatus.ALIVE:
            effects += self._on_returned(member.node_id, clock)
        text = f"{member.node_id} is {member.status.value}"
        fields = {"status": member.status.value, "address": "{}:{}".format(*member.address)}
        return [Announce("member.changed", text, node=member.node_id, fields=fields), *effects]

    def _on_returned(self, node: NodeId, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        for job_id, shepherd in self._placement.jobs.items():
            if questions := shepherd.note_returned_node(node, clock):
                self._touched[job_id] = None
                effects += questions
        return effects

    # Following up on what a step has changed.

    def _needs_follow_up(self, now_s: float) -> bool:
        return (
            bool(self._touched)
            or self._has_jumped
            or self._state.setting is not self._seen_setting
            or self._ledger.version != self._seen_ledger_version
            or (self._is_awake and self._placement.look_due_s <= now_s)
        )

    def _follow_up(self, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if self._has_jumped:
            effects += self._generation_jumped(clock)
        if self._state.setting is not self._seen_setting:
            effects += self._setting_changed(clock)
        if self._ledger.version != self._seen_ledger_version:
            effects += self._ledger_changed(clock)
        if self._is_awake and self._placement.look_due_s <= clock.now_s:
            effects += self._placement.look(clock)
            self._touched |= dict.fromkeys(self._placement.placing)
        return [*effects, *self._invite(clock), *self._tell_touched(clock)]

    @property
    def _has_jumped(self) -> bool:
        """Peers knew a newer life of this node.  Two machines of one name must not outbid one another, though."""
        return self._membership.generation > self._generation and not self._publication.is_in_conflict

    def _generation_jumped(self, clock: Clock) -> list[NodeEffect]:
        """What is told under the old generation would lose against what the newer life has left with peers."""
        self._generation = self._membership.generation
        self._ledger.set_generation(self._generation)
        self._state.set_generation(self._generation)
        self._owner.generation_changed(clock.now_s)
        return [*self._publication.tell_node(clock)]

    def _setting_changed(self, clock: Clock) -> list[NodeEffect]:
        self._seen_setting = setting = self._state.setting
        self._placement.set_policy(setting.policy_setting, clock.now_s)
        text = f"policy {setting.policy}, version {setting.version}, set on {setting.node_id or 'no node'}"
        return [Announce("setting.changed", text, node=self._config.node_id)]

    def _ledger_changed(self, clock: Clock) -> list[NodeEffect]:
        self._seen_ledger_version = self._ledger.version
        before, self._seen_free = self._seen_free, self._ledger.free
        has_more = self._seen_free.gpu_count > before.gpu_count or self._seen_free.cpus > before.cpus
        if has_more and (self._placement.may_change_jobs or self._placement.waiting_count):
            self._placement.capacity_released(clock)
        if has_more:
            self._placement.has_freed(clock.now_s)
        return [*self._publication.tell_node(clock)]

    @property
    def _has_free(self) -> bool:
        return bool(self._seen_free.gpus or self._seen_free.cpus)

    def _invite(self, clock: Clock) -> list[NodeEffect]:
        """Tell those who are first in line of what is free here."""
        shepherds = self._placement.invitations(self._ledger.free, clock)
        return [SendPeer(shepherd, Opening(self._ledger.report())) for shepherd in shepherds]

    def _tell_touched(self, clock: Clock) -> list[NodeEffect]:
        touched, self._touched = self._touched, {}
        effects: list[NodeEffect] = []
        for job_id in touched:
            shepherd = self._placement.jobs.get(job_id)
            if shepherd is None:
                continue
            if shepherd.record.shepherd != self._config.node_id:
                self._placement.let_go(job_id)
                effects += shepherd.farewell()
            elif shepherd.record.is_ended and not shepherd.is_writing:
                effects += self._job_ended(shepherd.record, clock)
            else:
                effects += self._publication.tell_job(shepherd, clock)
        return effects

    def _job_ended(self, record: JobRecord, clock: Clock) -> list[NodeEffect]:
        self._placement.let_go(record.job_id)
        self._placement.look_soon(clock.now_s)
        effects: list[NodeEffect] = [*self._ended_jobs.tell(record, clock)]
        effects += [*self._owner.forget(record.job_id, clock.now_s), *self._ended_jobs.decided(record.job_id)]
        return [*effects, *self._publication.tell_node(clock)]

    # Snapshots for the HTTP layer; valid until the next step.

    @property
    def node_id(self) -> NodeId:
        """This node's name."""
        return self._config.node_id

    @property
    def generation(self) -> int:
        """This life's generation, as peers see it."""
        return self._generation

    @property
    def is_awake(self) -> bool:
        """True once resources were read and tasks of an earlier life were found: commands are taken."""
        return self._is_awake

    def members(self, now_s: float) -> Sequence[MemberView]:
        """Everybody that membership knows, this node included."""
        return self._membership.members(now_s)

    def member(self, node_id: NodeId, now_s: float) -> MemberView | None:
        """One of `members`, or None for a name that membership does not know."""
        return self._membership.member(node_id, now_s)

    def address_of(self, node_id: NodeId) -> Address | None:
        """Where a member lives, or None for a name that membership does not know; cheap."""
        return self._membership.address_of(node_id)

    def node_records(self, now_s: float) -> Sequence[NodeStatus]:
        """Newest known record of every node, this one included."""
        return self._state.node_records(now_s)

    def node_record(self, node_id: NodeId, now_s: float) -> NodeStatus | None:
        """One of `node_records`, or None for a node of which none has arrived."""
        return self._state.node_record(node_id, now_s)

    def records(self) -> Mapping[JobId, JobRecord]:
        """Jobs that this node shepherds or holds, ended ones as long as they are kept."""
        live = {job_id: shepherd.record for job_id, shepherd in self._placement.jobs.items()}
        held = {job_id: record for job_id, record in self._register.records.items() if self._may_tell(record)}
        return {**held, **live}

    def record(self, job_id: JobId) -> JobRecord | None:
        """One of `records`."""
        shepherd = self._placement.jobs.get(job_id)
        if shepherd is not None:
            return shepherd.record
        held = self._register.records.get(job_id)
        return held if held is not None and self._may_tell(held) else None

    def _may_tell(self, record: JobRecord) -> bool:
        """What a former holder has kept, for those who look for the present ones, is no news of the job."""
        return record.is_ended or record.job_id in self._register.open_records

    def is_over(self, job_id: JobId) -> bool:
        """True for a job that has ended and of which this node keeps no record any more."""
        return self._register.is_over(job_id)

    def is_shepherd(self, job_id: JobId) -> bool:
        """True while this node acts for the job."""
        return job_id in self._placement.jobs

    def foreign_jobs(self) -> Sequence[JobView]:
        """Live jobs that others shepherd, by their gossiped cards."""
        return [job for job in self._state.jobs.values() if job.card.shepherd != self._config.node_id]

    def locations(self) -> Mapping[JobId, Location]:
        """Where every known job of the last days is kept."""
        return self._state.locations

    @property
    def register_drops(self) -> Mapping[str, int]:
        """Register messages of peers that got no answer, by reason."""
        return self._register.dropped_messages

    @property
    def setting(self) -> SwarmSetting:
        """The swarm-wide setting in force."""
        return self._state.setting

    @property
    def policy_id(self) -> str:
        """The policy in canonical form."""
        return self._placement.policy_id

    def cluster_view(self, now_s: float) -> ClusterView:
        """What a policy would see now."""
        clock = Clock(now_s, now_s + self._utc_offset_s)
        return self._placement.cluster_view(clock)

    def why(self, job_id: JobId, now_s: float) -> WhyReport | None:
        """Why a job that is known here waits, or has what it has."""
        record = self.record(job_id)
        if record is None:
            return None
        away = (each for each in self.members(now_s) if not each.is_available)
        records = (status.record for status in self.node_records(now_s))
        notes = {each.node_id: "draining" for each in records if each.has(NodeFlag.DRAINING)}
        notes |= {each.node_id: f"{each.status.value}, {each.since_s:.0f} s ago" for each in away}
        told = self._placement.told
        return explain(record, self.cluster_view(now_s), self._placement.setting, now_s, node_notes=notes, told=told)

    def speed_question(self, job_id: JobId) -> SpeedQuestion | None:
        """What to ask the planner for the model of a job's speed; None of one size, and where nothing was measured."""
        job, heard, record = self._placement.jobs.get(job_id), self._state.jobs.get(job_id), self.record(job_id)
        estimate = job.estimate if job is not None else heard.card.estimate if heard is not None else None
        if estimate is None or not estimate.points or record is None or not record.spec.is_elastic:
            return None
        return speed_question(
            record,
            estimate,
            self._cluster.nodes(),
            self._cluster.kind(record.spec.user, record.spec.name, estimate.gpu),
        )

    def size_reason(self, record: JobRecord) -> str:
        """Why a job that takes several sizes has this one; empty for others."""
        if not record.spec.is_elastic or not record.shares:
            return ""
        return size_reason(record, self._placement.setting, self._placement.told.get(record.job_id))

    def tasks(self) -> Sequence[TaskStatus]:
        """Tasks on this node."""
        return self._owner.tasks

    @property
    def ledger(self) -> Ledger:
        """Read only: who holds which GPU here."""
        return self._ledger

    def validate(self) -> None:
        """Every machine's invariants, for tests and the simulator."""
        planes = (self._membership, self._state, self._ledger, self._register, self._owner)
        duties = (self._submission, self._checkpoints, self._custody, self._recovery, self._ended_jobs)
        for machine in (*planes, self._placement, *duties):
            machine.validate()
        assert not self._touched, "a step is over, and news of a job are not told"


def _fork(rng: random.Random) -> random.Random:
    """A generator of its own for each machine, so that a draw more in one does not change the others."""
    return random.Random(rng.getrandbits(64))
