"""What others may read of a node, for HTTP, metrics and tests: valid until the next step, and nothing is changed."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from swarmsched.aggregation.broker import Broker
from swarmsched.aggregation.lender import Lender
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.estimate import SpeedQuestion
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.record import NodeFlag, NodeRecord, NodeStatus
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.gossip.state import StatePlane
from swarmsched.holder.holding import Holding
from swarmsched.holder.records import Records
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.ledger.ledger import Ledger
from swarmsched.negotiation.placement.asked import waits_for
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.shepherd import TrailStep
from swarmsched.node.aggregation import AggregationDesk
from swarmsched.node.config import NodeConfig
from swarmsched.node.resources import Resources
from swarmsched.policies.explain import WhyReport, explain, size_reason, speed_question
from swarmsched.program import program_of
from swarmsched.record import JobRecord
from swarmsched.task import TaskStatus
from swarmsched.view import ClusterView, JobView


def _note(record: NodeRecord) -> str:
    return "draining" if record.has(NodeFlag.DRAINING) else f"avoided: {record.avoided_reason}"


class Snapshot:
    """A node as those see it who do not drive it."""

    _config: NodeConfig
    _utc_offset_s: float
    _is_awake: bool
    _membership: Membership
    _state: StatePlane
    _resources: Resources
    _records: Records
    _cluster: Cluster
    _placement: Placement
    _holding: Holding
    _aggregation: AggregationDesk

    @property
    def node_id(self) -> NodeId:
        """This node's name."""
        return self._config.node_id

    @property
    def generation(self) -> int:
        """This life's generation, as peers see it."""
        return self._resources.ledger.report().generation

    @property
    def is_awake(self) -> bool:
        """True once resources were read and tasks of an earlier life were found: commands are taken."""
        return self._is_awake

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts for the metrics: updates of records that met another one or could not be stored, and cards that
        could not be written. How many ended jobs and kinds are remembered is told as well."""
        told = self._state.counters
        return {
            **self._records.counters,
            **{name: told.get(name, 0) for name in ("cards_refused", "ended_jobs", "kinds")},
        }

    # Members and nodes.

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

    def tasks(self) -> Sequence[TaskStatus]:
        """Tasks on this node."""
        return self._resources.owner.tasks

    @property
    def ledger(self) -> Ledger:
        """Read only: who holds which GPU here."""
        return self._resources.ledger

    @property
    def lender(self) -> Lender:
        """Read only: what this node gives to aggregation, and for whom."""
        return self._aggregation.lender

    @property
    def broker(self) -> Broker:
        """Read only: where the ranges are hosted that ranks of this node have asked for."""
        return self._aggregation.broker

    # Jobs.

    def records(self) -> Mapping[JobId, JobRecord]:
        """Jobs that this node shepherds or holds, ended ones as long as they are kept."""
        return self._holding.known

    def record(self, job_id: JobId) -> JobRecord | None:
        """One of `records`."""
        return self._holding.record(job_id)

    def is_over(self, job_id: JobId) -> bool:
        """True for a job that has ended and of which this node keeps no record any more."""
        return self._records.register.is_over(job_id)

    def is_shepherd(self, job_id: JobId) -> bool:
        """True while this node acts for the job."""
        return job_id in self._placement.shepherds.jobs

    def foreign_jobs(self) -> Sequence[JobView]:
        """Live jobs that others shepherd, by their gossiped cards."""
        return [job for job in self._state.jobs.values() if job.card.shepherd != self._config.node_id]

    def locations(self) -> Mapping[JobId, Location]:
        """Where every known job of the last days is kept."""
        return self._state.locations

    @property
    def register_drops(self) -> Mapping[str, int]:
        """Register messages of peers that got no answer, by reason."""
        return self._records.register.dropped_messages

    # Policies, and what they say of jobs.

    @property
    def setting(self) -> SwarmSetting:
        """The swarm-wide setting in force."""
        return self._state.setting

    @property
    def policy_id(self) -> str:
        """The policy in canonical form."""
        return self._placement.policy.policy_id

    def cluster_view(self, now_s: float) -> ClusterView:
        """What a policy would see now."""
        return self._placement.policy.cluster_view(Clock(now_s, now_s + self._utc_offset_s))

    def why(self, job_id: JobId, now_s: float) -> WhyReport | None:
        """Why a job that is known here waits, or has what it has."""
        record = self.record(job_id)
        if record is None:
            return None
        away = (each for each in self.members(now_s) if not each.is_available)
        records = (status.record for status in self.node_records(now_s))
        notes = {each.node_id: _note(each) for each in records if each.has(NodeFlag.DRAINING) or each.avoided_reason}
        notes |= {each.node_id: f"{each.status.value}, {each.since_s:.0f} s ago" for each in away}
        setting, told = self._placement.policy.setting, self._placement.plans.told
        return explain(record, self.cluster_view(now_s), setting, now_s, node_notes=notes, told=told)

    def trail(self, job_id: JobId) -> Sequence[TrailStep]:
        """What the shepherd of a job was told last, and which changes it wished; nothing of a job that another has."""
        job = self._placement.shepherds.jobs.get(job_id)
        return job.trail if job is not None else ()

    def speed_question(self, job_id: JobId) -> SpeedQuestion | None:
        """What to ask the planner for the model of a job's speed; None of one size, and where nothing was measured."""
        job, heard = self._placement.shepherds.jobs.get(job_id), self._state.jobs.get(job_id)
        record = self.record(job_id)
        estimate = job.estimate if job is not None else heard.card.estimate if heard is not None else None
        if estimate is None or not estimate.points or record is None or not record.spec.is_resizable:
            return None
        program = program_of(record.spec.command, record.spec.tree, record.spec.workdir)
        kind = self._cluster.kind(record.spec.user, record.spec.name, estimate.gpu, program)
        return replace(speed_question(record, estimate, self._cluster.nodes(), kind), pool=self._cluster.pool)

    def size_reason(self, record: JobRecord) -> str:
        """Why a job that takes several sizes, or is to have another one, has this one; empty for others."""
        if record.is_misfit:
            return waits_for(record)
        if not record.spec.is_resizable or not record.shares:
            return ""
        return size_reason(record, self._placement.policy.setting, self._placement.plans.told.get(record.job_id))
