"""One node of the swarm: membership, gossiped state, register, ledger and shepherds behind one `step`.

The node only routes.  Each event goes to the machine that it concerns; what machines tell one another (a register
update wanted, a member that changed, a setting adopted) is settled within the same step, in order, so that a durable
write always stands before what depends on it.  Whatever is left goes to the driver.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from swarmsched.commands import CancelJob, Refused, SignalJob, SubmitJob
from swarmsched.effects import Announce, Effect, ReplyToClient
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import (
    ClientCommandReceived,
    DatagramReceived,
    DatagramSendFailed,
    Event,
    LoopLagged,
    PeerMessageReceived,
    PeerSendFailed,
    PlanComputed,
    PlanFailed,
    RankExited,
    RendezvousBound,
    RendezvousFailed,
    ResourcesRead,
    TaskExited,
    TaskPhaseChanged,
    TasksFound,
    TaskStaged,
    TaskStageFailed,
    TaskStarted,
    TimerFired,
)
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberChanged, MemberStatus, MemberView
from swarmsched.gossip.membership import is_membership_payload
from swarmsched.gossip.record import NodeStatus
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.jobs.register import (
    ReadDecided,
    Register,
    UpdateConflicted,
    UpdateDecided,
    UpdateUncertain,
)
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import OwnerAnswer, TaskReport, TaskReportReceived
from swarmsched.negotiation.flock import Flock
from swarmsched.negotiation.owner import Owner
from swarmsched.negotiation.record_writer import WriteRecord
from swarmsched.negotiation.shepherd import Clock, dismissal, heard
from swarmsched.node.command_counter import CommandCounter
from swarmsched.node.config import NodeConfig, Restored
from swarmsched.node.planes import (
    MEMBERSHIP_PEER_MESSAGES,
    STATE_PEER_MESSAGES,
    make_membership,
    make_state_plane,
    peers_of,
)
from swarmsched.node.protocol import OWNER_COMMANDS, REGISTER_MESSAGES
from swarmsched.node.publication import Publication
from swarmsched.node.submission import Submission
from swarmsched.node.surroundings import Landscape
from swarmsched.policies.explain import WhyReport, explain
from swarmsched.record import JobRecord
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import ClusterView

Internal = WriteRecord | MemberChanged | UpdateDecided | UpdateConflicted | UpdateUncertain | ReadDecided
NodeEffect = Effect | Internal
INTERNAL = (WriteRecord, MemberChanged, UpdateDecided, UpdateConflicted, UpdateUncertain, ReadDecided)


class Node:
    """Everything that decides on one server; drive it with `step`."""

    def __init__(self, config: NodeConfig, restored: Restored, rng: random.Random) -> None:
        me = config.node_id
        self._config = config
        self._utc_offset_s = config.utc_offset_s
        self._membership = make_membership(config, _fork(rng))
        self._state = make_state_plane(config, restored, _fork(rng))
        self._ledger = Ledger(me, config.generation)
        self._ledger.restore(restored.room("ledger"), 0.0)
        self._owner = Owner(me, self._ledger)
        self._owner.restore(restored.room("task"), 0.0)
        self._register = Register(me, config.generation, _fork(rng))
        self._register.restore(restored.room("register"))
        self._flock = Flock(me, _fork(rng))
        self._submission = Submission(me, config.generation, self._flock, _fork(rng))
        self._publication = Publication(me, self._state, self._ledger, self._flock, config.software_version)
        self._landscape = Landscape(me, self._membership, self._state, self._ledger)
        self._counter = CommandCounter(
            self._submission, self._membership, self._state, self._landscape, self._flock, bool(config.seeds)
        )
        self._ended: deque[JobId] = deque(
            sorted((job_id for job_id, record in self._register.records.items() if record.is_ended), key=self._ended_at)
        )
        self._alive_at: dict[NodeId, Address] = {}  # where each member was first alive since it last failed or left
        self._touched: dict[JobId, None] = {}
        self._seen_ledger_version = -1
        self._seen_free_gpus = 0
        self._seen_opening_count = 0
        self._generation = config.generation  # that peers see; membership may raise it
        self._seen_setting = self._state.setting
        self._flock.set_policy(self._seen_setting.policy_setting, 0.0)
        self._has_read = self._has_looked = False  # resources, and tasks of an earlier life
        self._is_awake = False  # both, and our jobs taken up again
        self.counters: Counter[str] = Counter()

    # The one entry point.

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Take in one event; returns what the driver must do, in order."""
        clock = Clock(now_s, now_s + self._utc_offset_s)
        effects = self._settle(self._route(event, clock), clock)
        while self._needs_follow_up(now_s):
            effects += self._settle(self._follow_up(clock), clock)
        return effects

    @property
    def next_deadline_s(self) -> float:
        """When `TimerFired` is due."""
        return min(
            self._membership.next_deadline_s,
            self._state.next_deadline_s,
            self._owner.next_deadline_s,
            self._register.next_deadline_s,
            self._flock.next_deadline_s,
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
            case DatagramSendFailed() | LoopLagged():
                return self._membership.step(event, now_s)
            case PeerSendFailed():
                return self._on_undelivered(event, clock)
            case ClientCommandReceived():
                return self._on_command(event, now_s)
            case ResourcesRead():
                return self._on_resources(event, clock)
            case PlanComputed(plan=plan):
                self._flock.plan_computed(plan, clock)
                return self._touch_all()
            case PlanFailed(version=version):
                self._flock.plan_failed(version, now_s)
                return []
            case TasksFound():
                return self._on_tasks_found(event, clock)
            case (
                RendezvousBound()
                | RendezvousFailed()
                | TaskPhaseChanged()
                | TaskStaged()
                | TaskStageFailed()
                | TaskStarted()
                | RankExited()
                | TaskExited()
            ):
                return self._owner.step(event, now_s)

    def _route_peer(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        message = event.message
        if isinstance(message, OWNER_COMMANDS):
            return self._owner.obey(event.sender, message, clock.now_s)
        if isinstance(message, OwnerAnswer | TaskReport):
            return self._on_owner_said(event.sender, message, clock)
        if isinstance(message, TaskReportReceived):
            return self._owner.acknowledge(message)
        if isinstance(message, REGISTER_MESSAGES):
            return self._register.step(event, clock.now_s)
        if isinstance(message, MEMBERSHIP_PEER_MESSAGES):
            return self._membership.step(event, clock.now_s)
        if isinstance(message, STATE_PEER_MESSAGES):
            return self._on_state(event, clock)
        raise RemoteProtocolError("no machine takes it", kind=type(message).__name__, peer=event.sender)

    def _on_datagram(self, event: DatagramReceived, clock: Clock) -> Iterable[NodeEffect]:
        if is_membership_payload(event.payload):
            return self._membership.step(event, clock.now_s)
        return self._on_state(event, clock)

    def _on_state(self, event: DatagramReceived | PeerMessageReceived, clock: Clock) -> list[Effect]:
        """Gossip on nodes and jobs; where it tells of room for what waits here, the queue is looked at."""
        effects = self._state.step(event, clock.now_s)
        if self._state.opening_count != self._seen_opening_count:
            self._seen_opening_count = self._state.opening_count
            if self._flock.waiting_count:
                self._flock.capacity_released(self._landscape.around(clock.now_s), clock)
        return effects

    def _on_owner_said(self, sender: NodeId, message: OwnerAnswer | TaskReport, clock: Clock) -> list[NodeEffect]:
        """An owner answered or reported: its free counts repair our view first."""
        if sender != self._config.node_id:
            self._state.repair(sender, message.free, clock.now_s)
        job_id = message.job_id if isinstance(message, OwnerAnswer) else message.status.job_id
        shepherd = self._flock.jobs.get(job_id)
        if shepherd is None:
            return self._answer_stray(message)
        self._touched[job_id] = None
        self._flock.look_soon(clock.now_s)
        if isinstance(message, OwnerAnswer):
            return [*shepherd.owner_answered(message, clock)]
        return [*shepherd.task_reported(message, clock)]

    def _answer_stray(self, message: OwnerAnswer | TaskReport) -> list[NodeEffect]:
        """A report on a job that has ended here: it was lost news to the owner, so say again that it is heard."""
        if isinstance(message, OwnerAnswer):
            return []
        status = message.status
        record = self._register.records.get(status.job_id)
        if record is None and status.stage is TaskStage.EXITED:
            return [heard(status)]  # its record is past its retention, or lost: nobody will ever ask for the result
        if record is None or not record.is_ended:
            return []
        return [*dismissal(record, self._config.node_id, status)]

    def _on_undelivered(self, event: PeerSendFailed, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if isinstance(event.message, MEMBERSHIP_PEER_MESSAGES):
            effects += self._membership.step(event, clock.now_s)
        if isinstance(event.message, OWNER_COMMANDS):
            shepherd = self._flock.jobs.get(event.message.job_id)
            if shepherd is not None:
                self._touched[event.message.job_id] = None
                effects += shepherd.undeliverable(event.recipient, event.message, event.error, clock)
        return effects

    def _on_timer(self, clock: Clock) -> Iterable[NodeEffect]:
        event, now_s = TimerFired(), clock.now_s
        effects: list[NodeEffect] = []
        for machine in (self._membership, self._state, self._owner, self._register):
            if now_s >= machine.next_deadline_s:
                effects += machine.step(event, now_s)
        for job_id, shepherd in self._flock.jobs.items():
            if now_s >= shepherd.next_deadline_s:
                self._touched[job_id] = None
                effects += shepherd.on_timer(clock)
        return effects

    def _on_resources(self, event: ResourcesRead, clock: Clock) -> list[NodeEffect]:
        self._publication.telemetry(event)
        self._landscape.own_resources = event.resources
        self._ledger.offer(event.resources, clock.now_s)
        self._has_read = True
        return [*self._publication.tell_node(clock), *self._wake_up(clock)]

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
        for record in records:
            if not record.is_ended and record.shepherd == self._config.node_id:
                effects += self._flock.add(record).resume(self._config.generation, clock)
                self._touched[record.job_id] = None
        self._flock.look_soon(clock.now_s)
        return effects

    def _on_command(self, event: ClientCommandReceived, now_s: float) -> Iterable[NodeEffect]:
        self._utc_offset_s = event.now_utc_s - now_s
        clock = Clock(now_s, event.now_utc_s)
        if not self._is_awake:
            problem = "this agent is still starting: its resources are not read yet"
            return [ReplyToClient(event.request_id, Refused("not_ready", problem, "try again in a second"))]
        command = event.command
        known = None
        if isinstance(command, SubmitJob | CancelJob | SignalJob):
            self._touched[command.job_id] = None
            known = self.record(command.job_id)
        return self._counter.obey(event.request_id, command, known, clock)

    # Settling what machines tell one another.

    def _settle(self, effects: Iterable[NodeEffect], clock: Clock) -> list[Effect]:
        work = deque(effects)
        done: list[Effect] = []
        while work:
            effect = work.popleft()
            if isinstance(effect, INTERNAL):
                work.extendleft(reversed(self._react(effect, clock)))
            else:
                done.append(effect)
        return done

    def _react(self, effect: Internal, clock: Clock) -> Sequence[NodeEffect]:
        """What one machine told the others."""
        match effect:
            case WriteRecord(update=update):
                return self._register.step(update, clock.now_s)
            case MemberChanged():
                return self._on_member(effect, clock)
            case ReadDecided():
                return []
            case _:
                return self._on_register(effect, clock)

    def _on_register(
        self, result: UpdateDecided | UpdateConflicted | UpdateUncertain, clock: Clock
    ) -> Sequence[NodeEffect]:
        if self._submission.concerns(result.update_id):
            return self._submission.created(result, clock)
        if isinstance(result, UpdateDecided):
            shepherd = self._flock.jobs.get(result.record.job_id)
            if shepherd is None:
                return []
            self._touched[result.record.job_id] = None
            return shepherd.written(result.update_id, result.record, clock)
        if isinstance(result, UpdateUncertain):
            effects: list[NodeEffect] = []
            for shepherd in self._flock.jobs.values():
                effects += shepherd.rewrite(result.update_id, clock)
            return effects
        return self._lost_authority(result, clock)

    def _lost_authority(self, result: UpdateConflicted, clock: Clock) -> Sequence[NodeEffect]:
        """Somebody else wrote the record: our epoch is over, so we let go of the job and touch nothing of it."""
        self.counters["register_conflicts"] += 1
        current = result.current
        if current is None or current.shepherd == self._config.node_id:
            return []
        self._flock.let_go(current.job_id)
        return [Announce("job.taken_over", f"epoch {current.epoch} is {current.shepherd}'s", current.job_id)]

    def _on_member(self, change: MemberChanged, clock: Clock) -> Sequence[NodeEffect]:
        member = change.member
        self._state.set_peers(peers_of(self._membership, clock.now_s))
        self._flock.look_soon(clock.now_s)
        if member.node_id == self._config.node_id:
            is_in_conflict = member.status is MemberStatus.CONFLICT
            self._owner.is_in_conflict = self._publication.is_in_conflict = is_in_conflict
        if member.status is MemberStatus.FAILED:
            for job_id, shepherd in self._flock.jobs.items():
                if shepherd.note_silent_node(member.node_id):
                    self._touched[job_id] = None
        effects = self._on_returned(member.node_id, clock) if self._has_come_back(member) else []
        text = f"{member.node_id} is {member.status.value}"
        fields = {"status": member.status.value, "address": "{}:{}".format(*member.address)}
        return [Announce("member.changed", text, node=member.node_id, fields=fields), *effects]

    def _has_come_back(self, member: MemberView) -> bool:
        """False for one that answers from two addresses: what a second agent of that name does not know is not lost.

        It takes seconds until such a conflict is certain.  An owner that moved in earnest reports by itself.
        """
        if member.status is not MemberStatus.ALIVE:
            if member.status in (MemberStatus.FAILED, MemberStatus.LEFT):
                self._alive_at.pop(member.node_id, None)
            return False
        return self._alive_at.setdefault(member.node_id, member.address) == member.address

    def _on_returned(self, node: NodeId, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        for job_id, shepherd in self._flock.jobs.items():
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
            or (self._is_awake and self._flock.evaluation_due_s <= now_s)
        )

    def _follow_up(self, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if self._has_jumped:
            effects += self._generation_jumped(clock)
        if self._state.setting is not self._seen_setting:
            effects += self._setting_changed(clock)
        if self._ledger.version != self._seen_ledger_version:
            effects += self._ledger_changed(clock)
        if self._is_awake and self._flock.evaluation_due_s <= clock.now_s:
            effects += self._flock.evaluate(self._landscape.around(clock.now_s), clock)
            self._touched |= dict.fromkeys(self._flock.placing)
        return [*effects, *self._tell_touched(clock)]

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
        self._flock.set_policy(setting.policy_setting, clock.now_s)
        text = f"policy {setting.policy}, version {setting.version}, set on {setting.node_id or 'no node'}"
        return [Announce("setting.changed", text, node=self._config.node_id)]

    def _ledger_changed(self, clock: Clock) -> list[NodeEffect]:
        self._seen_ledger_version = self._ledger.version
        free = len(self._ledger.free(clock.now_s).gpus)
        has_more, self._seen_free_gpus = free > self._seen_free_gpus, free
        if has_more and self._flock.waiting_count:
            self._flock.capacity_released(self._landscape.around(clock.now_s), clock)
        return [*self._publication.tell_node(clock)]

    def _touch_all(self) -> list[NodeEffect]:
        self._touched |= dict.fromkeys(self._flock.jobs)
        return []

    def _tell_touched(self, clock: Clock) -> list[NodeEffect]:
        touched, self._touched = self._touched, {}
        effects: list[NodeEffect] = []
        for job_id in touched:
            shepherd = self._flock.jobs.get(job_id)
            if shepherd is None:
                continue
            if shepherd.record.is_ended and not shepherd.is_writing:
                effects += self._job_ended(shepherd.record, clock)
            else:
                effects += self._publication.tell_job(shepherd, clock)
        return effects

    def _job_ended(self, record: JobRecord, clock: Clock) -> list[NodeEffect]:
        self._flock.let_go(record.job_id)
        self._flock.look_soon(clock.now_s)
        self._ended.append(record.job_id)
        effects: list[NodeEffect] = [*self._publication.tell_ended(record, clock)]
        _, durable = self._ledger.forget(record.job_id, clock.now_s)
        effects += durable
        while len(self._ended) > self._config.retained_jobs:
            effects += self._register.drop(self._ended.popleft())
        return [*effects, *self._publication.tell_node(clock)]

    def _ended_at(self, job_id: JobId) -> float:
        return self._register.records[job_id].ended_utc_s

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

    def node_records(self, now_s: float) -> Sequence[NodeStatus]:
        """Newest known record of every node, this one included."""
        return self._state.node_records(now_s)

    def records(self) -> Mapping[JobId, JobRecord]:
        """Jobs that this node shepherds or holds, ended ones as long as they are kept."""
        live = {job_id: shepherd.record for job_id, shepherd in self._flock.jobs.items()}
        return {**self._register.records, **live}

    def record(self, job_id: JobId) -> JobRecord | None:
        """One of `records`."""
        shepherd = self._flock.jobs.get(job_id)
        return shepherd.record if shepherd else self._register.records.get(job_id)

    def is_shepherd(self, job_id: JobId) -> bool:
        """True while this node acts for the job."""
        return job_id in self._flock.jobs

    def job_cards(self, now_s: float) -> Sequence[object]:
        """Gossiped cards (`CardStatus`) of live jobs that others shepherd."""
        return [status for status in self._state.cards(now_s) if status.card.shepherd != self._config.node_id]

    def locations(self) -> Mapping[JobId, Location]:
        """Where every known job of the last days is kept."""
        return self._state.locations

    @property
    def setting(self) -> SwarmSetting:
        """The swarm-wide setting in force."""
        return self._state.setting

    @property
    def policy_id(self) -> str:
        """The policy in canonical form."""
        return self._flock.policy.policy_id

    def cluster_view(self, now_s: float) -> ClusterView:
        """What a policy would see now."""
        clock = Clock(now_s, now_s + self._utc_offset_s)
        return self._flock.cluster_view(self._landscape.around(now_s), clock)

    def why(self, job_id: JobId, now_s: float) -> WhyReport | None:
        """Why a job that is known here waits, or has what it has."""
        record = self.record(job_id)
        if record is None:
            return None
        return explain(record, self.cluster_view(now_s), self._flock.policy, now_s)

    def tasks(self) -> Sequence[TaskStatus]:
        """Tasks on this node."""
        return self._owner.tasks

    @property
    def ledger(self) -> Ledger:
        """Read only: who holds which GPU here."""
        return self._ledger

    def validate(self) -> None:
        """Every machine's invariants, for tests and the simulator."""
        for machine in (self._membership, self._state, self._ledger, self._register):
            machine.validate()


def _fork(rng: random.Random) -> random.Random:
    """A generator of its own for each machine, so that a draw more in one does not change the others."""
    return random.Random(rng.getrandbits(64))
