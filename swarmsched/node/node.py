"""One node of the swarm: membership, gossiped state, register, ledger and shepherds behind one `step`.

The node only routes.  Each event goes to the machine that it concerns; what machines tell one another (a register
update wanted, a member that changed, a setting adopted) is settled within the same step, in order, so that a durable
write always stands before what depends on it.  Whatever is left goes to the driver.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from swarmsched.commands import (
    CancelJob,
    Command,
    CreateTicket,
    Done,
    ForgetMember,
    JobAccepted,
    Refused,
    SetSwarmSetting,
    SettingStored,
    SignalJob,
    SubmitJob,
)
from swarmsched.effects import Announce, Effect, ReplyToClient
from swarmsched.errors import ConfigError, FieldProblem, RemoteProtocolError
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
from swarmsched.ids import JobId, NodeId
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
from swarmsched.negotiation.shepherd import Clock, dismissal
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
from swarmsched.node.submission import Submission, with_reason
from swarmsched.node.surroundings import Landscape
from swarmsched.policies.explain import WhyReport, explain
from swarmsched.record import JobRecord
from swarmsched.task import TaskStatus
from swarmsched.view import ClusterView, PolicySetting

SETTLE_S = 5.0  # after the start, until the swarm's totals are trusted

Internal = WriteRecord | MemberChanged | UpdateDecided | UpdateConflicted | UpdateUncertain | ReadDecided
NodeEffect = Effect | Internal


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
        self._ended: deque[JobId] = deque(
            sorted((job_id for job_id, record in self._register.records.items() if record.is_ended), key=self._ended_at)
        )
        self._touched: dict[JobId, None] = {}
        self._seen_ledger_version = -1
        self._seen_free_gpus = 0
        self._seen_setting = self._state.setting
        self._flock.set_policy(self._seen_setting.policy_setting, 0.0)
        self._has_read = self._has_looked = False  # resources, and tasks of an earlier life
        self._awake_since_s = 0.0
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
            case DatagramReceived(payload=payload):
                plane = self._membership if is_membership_payload(payload) else self._state
                return plane.step(event, now_s)
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
            return self._state.step(event, clock.now_s)
        raise RemoteProtocolError("no machine takes it", kind=type(message).__name__, peer=event.sender)

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
        self._is_awake, self._awake_since_s = True, clock.now_s
        effects: list[NodeEffect] = []
        for record in list(self._register.records.values()):
            if not record.is_ended and record.shepherd == self._config.node_id:
                effects += self._flock.add(record).resume(self._config.generation, clock)
                self._touched[record.job_id] = None
        self._flock.look_soon(clock.now_s)
        return effects

    # Commands.

    def _on_command(self, event: ClientCommandReceived, now_s: float) -> Iterable[NodeEffect]:
        self._utc_offset_s = event.now_utc_s - now_s
        clock = Clock(now_s, event.now_utc_s)
        if not self._is_awake:
            problem = "this agent is still starting: its resources are not read yet"
            return [ReplyToClient(event.request_id, Refused("not_ready", problem, "try again in a second"))]
        return self._obey(event.request_id, event.command, clock)

    def _obey(self, request_id: int, command: Command, clock: Clock) -> Iterable[NodeEffect]:
        match command:
            case CreateTicket():
                return [ReplyToClient(request_id, self._submission.ticket(command, clock))]
            case SubmitJob():
                return self._submit(request_id, command, clock)
            case CancelJob():
                self._touched[command.job_id] = None
                return self._submission.cancel(request_id, command, self.record(command.job_id), clock)
            case SignalJob():
                return self._submission.signal(request_id, command, self.record(command.job_id), clock)
            case SetSwarmSetting():
                return self._change_setting(request_id, command, clock)
            case ForgetMember(node=node):
                return self._forget_member(request_id, node, clock)

    def _submit(self, request_id: int, command: SubmitJob, clock: Clock) -> Iterable[NodeEffect]:
        self._touched[command.job_id] = None
        known = self.record(command.job_id)
        capacities = self._landscape.capacities(clock.now_s) if self._knows_totals(clock.now_s) else None
        effects = self._submission.submit(request_id, command, known, capacities, clock)
        if not command.is_dry_run:
            return effects
        return [self._with_forecast(effect, clock) for effect in effects]

    def _knows_totals(self, now_s: float) -> bool:
        """False just after the start, when a request that is possible may look impossible."""
        has_settled = not self._config.seeds or now_s >= self._awake_since_s + SETTLE_S
        return has_settled and self._landscape.is_complete(now_s)

    def _with_forecast(self, effect: NodeEffect, clock: Clock) -> NodeEffect:
        if not isinstance(effect, ReplyToClient) or not isinstance(effect.reply, JobAccepted):
            return effect
        reason = self._forecast(effect.reply, clock)
        return ReplyToClient(effect.request_id, with_reason(effect.reply, reason))

    def _forecast(self, reply: JobAccepted, clock: Clock) -> str:
        report = explain(reply.record, self.cluster_view(clock.now_s), self._flock.policy, clock.now_s)
        return " ".join(report.sentences())

    def _change_setting(self, request_id: int, command: SetSwarmSetting, clock: Clock) -> Iterable[NodeEffect]:
        try:
            effects = self._state.propose_setting(PolicySetting(command.policy, command.parameters), clock.now_s)
        except ConfigError as error:
            problem = FieldProblem("/" + error.key.replace(".", "/"), error.problem, error.remedy)
            return [ReplyToClient(request_id, Refused("invalid", str(error), error.remedy, (problem,)))]
        setting = self._state.setting
        return [*effects, ReplyToClient(request_id, SettingStored(setting.policy, setting.parameters, setting.version))]

    def _forget_member(self, request_id: int, node: NodeId, clock: Clock) -> Iterable[NodeEffect]:
        member = self._membership.member(node)
        if member is None:
            return [ReplyToClient(request_id, Refused("not_found", f"no member is called {node}", "swarm nodes"))]
        if member.status is MemberStatus.ALIVE:
            problem = f"{node} is alive; forgetting is for members that are gone for good"
            return [ReplyToClient(request_id, Refused("conflict", problem, "stop its agent first"))]
        return [*self._membership.forget(node, clock.now_s), ReplyToClient(request_id, Done())]

    # Settling what machines tell one another.

    def _settle(self, effects: Iterable[NodeEffect], clock: Clock) -> list[Effect]:
        work = deque(effects)
        done: list[Effect] = []
        while work:
            effect = work.popleft()
            match effect:
                case WriteRecord(update=update):
                    more: Sequence[NodeEffect] = self._register.step(update, clock.now_s)
                case UpdateDecided() | UpdateConflicted() | UpdateUncertain():
                    more = self._on_register(effect, clock)
                case MemberChanged():
                    more = self._on_member(effect, clock)
                case ReadDecided():
                    more = []
                case _:
                    done.append(effect)
                    continue
            work.extendleft(reversed(more))
        return done

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
        if member.status is MemberStatus.FAILED:
            for job_id, shepherd in self._flock.jobs.items():
                if shepherd.note_silent_node(member.node_id):
                    self._touched[job_id] = None
        effects = self._on_returned(member.node_id, clock) if member.status is MemberStatus.ALIVE else []
        text = f"{member.node_id} is {member.status.value}"
        fields = {"status": member.status.value, "address": "{}:{}".format(*member.address)}
        return [Announce("member.changed", text, node=member.node_id, fields=fields), *effects]

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
            or self._state.setting is not self._seen_setting
            or self._ledger.version != self._seen_ledger_version
            or (self._is_awake and self._flock.evaluation_due_s <= now_s)
        )

    def _follow_up(self, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if self._state.setting is not self._seen_setting:
            effects += self._setting_changed(clock)
        if self._ledger.version != self._seen_ledger_version:
            effects += self._ledger_changed(clock)
        if self._is_awake and self._flock.evaluation_due_s <= clock.now_s:
            effects += self._flock.evaluate(self._landscape.around(clock.now_s), clock)
            self._touched |= dict.fromkeys(self._flock.placing)
        return [*effects, *self._tell_touched(clock)]

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
            self._flock.capacity_released(self._landscape.around(clock.now_s), clock.now_s)
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
        """This life's generation."""
        return self._config.generation

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
