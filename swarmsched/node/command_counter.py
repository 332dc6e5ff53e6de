"""Where clients' commands are taken: each goes to the machine that it concerns and is answered exactly once."""

from collections.abc import Iterable

from msgspec.structs import replace

from swarmsched.card import card_of
from swarmsched.commands import (
    CancelJob,
    Command,
    CommitCheckpoint,
    CreateTicket,
    Done,
    DrainNode,
    ForgetMember,
    JobAccepted,
    RecoverJob,
    Refused,
    Reply,
    SetSwarmSetting,
    SettingStored,
    SignalJob,
    SubmitJob,
)
from swarmsched.effects import ReplyToClient
from swarmsched.errors import ConfigError, FieldProblem
from swarmsched.gossip.dissemination import MembershipEffect
from swarmsched.gossip.member import MemberStatus
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.state import StatePlane
from swarmsched.ids import NodeId
from swarmsched.jobs.register import Register
from swarmsched.negotiation.checkpointing import CheckpointDesk
from swarmsched.negotiation.owner import Owner
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd import Clock
from swarmsched.node.cluster import Cluster
from swarmsched.node.config import NodeConfig
from swarmsched.node.recovery import Recovery
from swarmsched.node.submission import Submission, with_reason
from swarmsched.policies.explain import explain
from swarmsched.record import JobRecord
from swarmsched.view import JobView

SETTLE_S = 5.0  # after the start, until the swarm's totals are trusted

LIVE = (MemberStatus.ALIVE, MemberStatus.SUSPECT, MemberStatus.CONFLICT)
CommandEffect = ShepherdEffect | MembershipEffect


class CommandCounter:
    """Open once the node is awake."""

    def __init__(
        self,
        submission: Submission,
        membership: Membership,
        state: StatePlane,
        cluster: Cluster,
        placement: Placement,
        owner: Owner,
        register: Register,
        checkpoints: CheckpointDesk,
        recovery: Recovery,
        config: NodeConfig,
    ) -> None:
        self._owner = owner
        self._register = register
        self._checkpoints = checkpoints
        self._recovery = recovery
        self._own = config.own
        self._submission = submission
        self._membership = membership
        self._state = state
        self._cluster = cluster
        self._placement = placement
        self._has_seeds = bool(config.seeds)
        self._open_since_s = 0.0

    def open(self, now_s: float) -> None:
        """The node is awake from now on."""
        self._open_since_s = now_s

    def obey(self, request_id: int, command: Command, known: JobRecord | None, clock: Clock) -> Iterable[CommandEffect]:
        """`known` is the record of the job that the command names, if there is one here."""
        match command:
            case CreateTicket():
                return [ReplyToClient(request_id, self._ticket(clock))]
            case SubmitJob():
                return self._submit(request_id, command, known, clock)
            case CancelJob():
                return self._submission.cancel(request_id, command, known, clock)
            case SignalJob():
                return self._submission.signal(request_id, command, known, clock)
            case SetSwarmSetting():
                return self._change_setting(request_id, command, clock)
            case ForgetMember(node=node):
                return self._forget_member(request_id, node, clock)
            case DrainNode():
                return self._drain(request_id, command)
            case CommitCheckpoint(job_id=job_id, attempt=attempt):
                shepherd = self._owner.shepherd_of(job_id, attempt)
                return self._checkpoints.wish(request_id, command, shepherd, clock.now_s)
            case RecoverJob():
                held = self._register.records.get(command.job_id)
                return self._recovery.begin(request_id, command, held, self._cluster.candidates(clock.now_s), clock)

    def _ticket(self, clock: Clock) -> Reply:
        own = replace(self._own, total_gpus=len(self._cluster.own_resources.gpus))
        return self._submission.ticket(own, self._cluster.candidates(clock.now_s), clock)

    def _submit(
        self, request_id: int, command: SubmitJob, known: JobRecord | None, clock: Clock
    ) -> Iterable[CommandEffect]:
        capacities = self._cluster.capacities(clock.now_s) if self._knows_totals(clock.now_s) else None
        effects = self._submission.submit(request_id, command, known, capacities, clock)
        if not command.is_dry_run:
            return effects
        return [self._with_forecast(effect, clock) for effect in effects]

    def _knows_totals(self, now_s: float) -> bool:
        """False just after the start, when a request that is possible may look impossible."""
        has_settled = not self._has_seeds or now_s >= self._open_since_s + SETTLE_S
        return has_settled and self._cluster.is_complete(now_s)

    def _with_forecast(self, effect: CommandEffect, clock: Clock) -> CommandEffect:
        if not isinstance(effect, ReplyToClient) or not isinstance(effect.reply, JobAccepted):
            return effect
        reason = self._forecast(effect.reply, clock)
        return ReplyToClient(effect.request_id, with_reason(effect.reply, reason))

    def _forecast(self, reply: JobAccepted, clock: Clock) -> str:
        view = self._placement.cluster_view(clock)
        record = reply.record  # nobody shepherds it, so nobody else shows it
        view = replace(view, jobs=(*view.jobs, JobView(card_of(record), clock.now_s)))
        report = explain(record, view, self._placement.setting, clock.now_s, told=self._placement.told)
        return report.forecast()

    def _change_setting(self, request_id: int, command: SetSwarmSetting, clock: Clock) -> Iterable[CommandEffect]:
        try:
            effects = self._state.propose_setting(command.setting, clock.now_s)
        except ConfigError as error:
            problem = FieldProblem("/" + error.key.replace(".", "/"), error.problem, error.remedy)
            return [ReplyToClient(request_id, Refused("invalid", str(error), error.remedy, (problem,)))]
        setting = self._state.setting
        return [*effects, ReplyToClient(request_id, SettingStored(setting.policy_setting, setting.version))]

    def _drain(self, request_id: int, command: DrainNode) -> Iterable[CommandEffect]:
        if self._own.is_witness:
            problem = f"{self._own.holder.node} is a witness: it runs no jobs that it could refuse"
            return [ReplyToClient(request_id, Refused("conflict", problem, "stop its agent, if the machine must go"))]
        return [*self._owner.drain(command.reason if command.is_draining else None), ReplyToClient(request_id, Done())]

    def _forget_member(self, request_id: int, node: NodeId, clock: Clock) -> Iterable[CommandEffect]:
        member = self._membership.member(node)
        if member is None:
            return [ReplyToClient(request_id, Refused("not_found", f"no member is called {node}", "swarm nodes"))]
        if member.status in LIVE:
            problem = f"{node} is {member.status.value}; forgetting is for members that are gone for good"
            return [ReplyToClient(request_id, Refused("conflict", problem, "stop its agent first"))]
        return [*self._membership.forget(node, clock.now_s), ReplyToClient(request_id, Done())]
