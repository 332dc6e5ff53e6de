"""What the API tells of: snapshots of the core, of the ledger and of this node's telemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm_agent.agent import Agent
from swarm_agent.attendance import Attendance, attendance_by
from swarm_agent.doctor import Diagnosis, examine
from swarm_agent.planner import Foreseen
from swarm_agent.task.reports import Reported
from swarm_agent.telemetry.reading import GpuReading
from swarmsched.estimate import SpeedQuestion
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.record import NodeStatus
from swarmsched.holders import Configuration
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.negotiation.shepherd import TrailStep
from swarmsched.policies.explain import WhyReport
from swarmsched.record import JobRecord
from swarmsched.task import TaskStatus
from swarmsched.view import JobView, PolicySetting


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU of this very node: its last reading, and what the ledger says of it.

    `booking` is held, leased or draining, with its job, or None.
    """

    node: NodeId
    reading: GpuReading
    booking: str | None = None
    job_id: JobId | None = None


class AgentFacts:
    """Cheap read-only snapshots of an agent, taken between two steps of its core.  Tests override them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.store_id = agent.store_id  # identity of its database, by which it can be a holder

    def members(self) -> Sequence[MemberView]:
        """Every known member, this agent included."""
        return self._agent.node.members(self._agent.now_s())

    def member(self, name: NodeId) -> MemberView | None:
        """One of `members`."""
        return self._agent.node.member(name, self._agent.now_s())

    def attendance(self) -> Attendance:
        """Everybody as this agent sees them now."""
        return attendance_by(self.members(), self.nodes())

    def attendance_at(self, configuration: Configuration) -> Attendance:
        """One job's holders alone: in a large swarm to look at everybody takes longer than the rest of an answer."""
        names = {holder.node for holder in configuration.members}
        members, nodes = [self.member(name) for name in names], [self.node(name) for name in names]
        there = [each for each in members if each is not None]
        return attendance_by(there, [each for each in nodes if each is not None])

    def named(self, name: str) -> NodeId:
        """The member that is meant: names are compared without case where one alone fits, but not exactly."""
        names = [member.node_id for member in self.members()]
        alike = [each for each in names if each.casefold() == name.casefold()]
        return alike[0] if len(alike) == 1 else NodeId(name)

    def nodes(self) -> Sequence[NodeStatus]:
        """The node records that have arrived, this agent's included (age 0)."""
        return self._agent.node.node_records(self._agent.now_s())

    def node(self, name: NodeId) -> NodeStatus | None:
        """One of `nodes`."""
        return self._agent.node.node_record(name, self._agent.now_s())

    def records(self) -> Mapping[JobId, JobRecord]:
        """Records of jobs that this agent shepherds or holds."""
        return self._agent.node.records()

    def record(self, job_id: JobId) -> JobRecord | None:
        """One of `records`."""
        return self._agent.node.record(job_id)

    def is_over(self, job_id: JobId) -> bool:
        """True for a job that has ended and of which this agent keeps no record any more."""
        return self._agent.node.is_over(job_id)

    def is_shepherd(self, job_id: JobId) -> bool:
        """True when this agent acts for the job."""
        return self._agent.node.is_shepherd(job_id)

    def has_last_word(self, job_id: JobId) -> bool:
        """True when nobody knows more of the job than this agent: it acts for it, or has the record of its end."""
        record = self.record(job_id)
        return record is not None and (record.is_ended or self.is_shepherd(job_id))

    def cards(self) -> Sequence[JobView]:
        """Live jobs that other agents shepherd, by their gossiped cards; `written_s` counts from now: minus the age."""
        now_s = self._agent.now_s()
        return [JobView(job.card, job.written_s - now_s) for job in self._agent.node.foreign_jobs()]

    def places(self) -> Mapping[JobId, Location]:
        """Location entries, ended jobs included; decoded one by one, when they are looked at."""
        return self._agent.node.locations()

    def setting(self) -> tuple[PolicySetting, int]:
        """The swarm-wide setting in force and its version."""
        setting = self._agent.node.setting
        return setting.policy_setting, setting.version

    def why(self, job_id: JobId) -> WhyReport:
        """The policy's explanation of a job whose record is here."""
        report = self._agent.node.why(job_id, self._agent.now_s())
        assert report is not None, "asked for a job that is here"
        return report

    def has_no_files(self, job_id: JobId) -> bool:
        """True for a live job with a record here whose files no agent has that can be reached."""
        return self._agent.files.is_away(job_id)

    def trail(self, job_id: JobId) -> Sequence[TrailStep]:
        """What the shepherd of a job that this agent acts for was told last; nothing of any other job."""
        return self._agent.node.trail(job_id)

    def speed_question(self, job_id: JobId) -> SpeedQuestion | None:
        """What the planner is to tell of a job that takes several sizes and has reported; None of others."""
        return self._agent.node.speed_question(job_id)

    def foreseen(self) -> Foreseen:
        """What is expected of jobs by the last plan here; some seconds old, and empty where nobody waits."""
        return self._agent.planner.foreseen

    def size_reason(self, record: JobRecord) -> str:
        """Why such a job has the size that it has; empty for others."""
        return self._agent.node.size_reason(record)

    def gpus(self) -> Sequence[GpuFacts]:
        """The GPUs of this node with what the ledger and NVML say of each."""
        node, entries = self._agent.node.node_id, self._agent.node.ledger.entries
        booked = {uuid: (entry.state.value, entry.job_id) for entry in entries for uuid in entry.gpus}
        readings = self._agent.telemetry.snapshot.gpus
        return [GpuFacts(node, reading, *booked.get(reading.uuid, (None, None))) for reading in readings]

    def tasks(self) -> Sequence[TaskStatus]:
        """The tasks of this node."""
        return self._agent.node.tasks()

    def reported(self) -> Mapping[TaskKey, Reported]:
        """What the tasks of this node told of their training."""
        return self._agent.tasks.reports.tasks

    def telemetry(self) -> tuple[str, str]:
        """How far the GPU readings can be trusted: a word and a sentence."""
        snapshot = self._agent.telemetry.snapshot
        return snapshot.state.value, snapshot.sentence

    def diagnoses(self) -> Sequence[Diagnosis]:
        """What the agent finds wrong with its own machine and its neighbours."""
        return examine(self._agent)
