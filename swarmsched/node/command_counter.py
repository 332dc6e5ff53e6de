"""Where clients' commands are taken: each goes to the machine that it concerns and is answered exactly once."""

from collections.abc import Iterable

from swarmsched.commands import (
    CancelJob,
    Command,
    CommitCheckpoint,
    CreateTicket,
    Done,
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
from swarmsched.gossip.member import MemberStatus
from swarmsched.gossip.membership import Membership, MembershipEffect
from swarmsched.gossip.state import StatePlane
from swarmsched.holders import Holder
from swarmsched.ids import NodeId
from swarmsched.jobs.register import Register
from swarmsched.negotiation.checkpointing import CheckpointDesk
from swarmsched.negotiation.flock import Flock
from swarmsched.negotiation.holding import Candidate
from swarmsched.negotiation.owner import Owner
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd import Clock
from swarmsched.node.config import NodeConfig
from swarmsched.node.recovery import Recovery
from swarmsched.node.submission import Submission, with_reason
from swarmsched.node.surroundings import Landscape
from swarmsched.policies.explain import explain
from swarmsched.record import JobRecord
from swarmsched.view import PolicySetting

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
        landscape: Landscape,
        flock: Flock,
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
        self._me = Holder(config.node_id, config.store_id)
        self._is_witness = config.is_witness
        self._submission = submission
        self._membership = membership
        self._state = state
        self._landscape = landscape
        self._flock = flock
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
            case CommitCheckpoint(job_id=job_id, attempt=attempt):
                shepherd = self._owner.shepherd_of(job_id, attempt)
                return self._checkpoints.wish(request_id, command, shepherd, clock.now_s)
            case RecoverJob():
                held = self._register.records.get(command.job_id)
                return self._recovery.begin(request_id, command, held, self._landscape.candidates(clock.now_s), clock)

    def _ticket(self, clock: Clock) -> Reply:
        own = Candidate(self._me, total_gpus=len(self._landscape.own_resources.gpus), is_witness=self._is_witness)
        return self._submission.ticket(own, self._landscape.candidates(clock.now_s), clock)

    def _submit(
        self, request_id: int, command: SubmitJob, known: JobRecord | None, clock: Clock
    ) -> Iterable[CommandEffect]:
        capacities = self._landscape.capacities(clock.now_s) if self._knows_totals(clock.now_s) else None
        effects = self._submission.submit(request_id, command, known, capacities, clock)
        if not command.is_dry_run:
            return effects
        return [self._with_forecast(effect, clock) for effect in effects]

    def _knows_totals(self, now_s: float) -> bool:
        """False just after the start, when a request that is possible may look impossible."""
        has_settled = not self._has_seeds or now_s >= self._open_since_s + SETTLE_S
        return has_settled and self._landscape.is_complete(now_s)

    def _with_forecast(self, effect: CommandEffect, clock: Clock) -> CommandEffect:
        if not isinstance(effect, ReplyToClient) or not isinstance(effect.reply, JobAccepted):
            return effect
        reason = self._forecast(effect.reply, clock)
        return ReplyToClient(effect.request_id, with_reason(effect.reply, reason))

    def _forecast(self, reply: JobAccepted, clock: Clock) -> str:
        view = self._flock.cluster_view(self._landscape.around(clock.now_s), clock)
        report = explain(reply.record, view, self._flock.policy, clock.now_s)
        return " ".join(report.sentences())

    def _change_setting(self, request_id: int, command: SetSwarmSetting, clock: Clock) -> Iterable[CommandEffect]:
        try:
            effects = self._state.propose_setting(PolicySetting(command.policy, command.parameters), clock.now_s)
        except ConfigError as error:
            problem = FieldProblem("/" + error.key.replace(".", "/"), error.problem, error.remedy)
            return [ReplyToClient(request_id, Refused("invalid", str(error), error.remedy, (problem,)))]
        setting = self._state.setting
        return [*effects, ReplyToClient(request_id, SettingStored(setting.policy, setting.parameters, setting.version))]

    def _forget_member(self, request_id: int, node: NodeId, clock: Clock) -> Iterable[CommandEffect]:
        member = self._membership.member(node)
        if member is None:
            return [ReplyToClient(request_id, Refused("not_found", f"no member is called {node}", "swarm nodes"))]
        if member.status in LIVE:
            problem = f"{node} is {member.status.value}; forgetting is for members that are gone for good"
            return [ReplyToClient(request_id, Refused("conflict", problem, "stop its agent first"))]
        return [*self._membership.forget(node, clock.now_s), ReplyToClient(request_id, Done())]
