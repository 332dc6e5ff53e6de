"""The core's snapshots and the telemetry of this node, as the facts that the API is made of."""

from collections.abc import Mapping, Sequence
from typing import Any

from swarm_agent.agent import Agent
from swarm_agent.doctor import Diagnosis, examine
from swarm_agent.http.attendance import present
from swarm_agent.http.port import GpuFacts
from swarm_agent.http.views import gpu_counts
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.record import NodeStatus
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.explain import WhyReport
from swarmsched.record import JobRecord
from swarmsched.task import TaskStatus
from swarmsched.view import JobView, PolicySetting


class Snapshot:
    """`Facts` of a real agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def members(self) -> Sequence[MemberView]:
        """Every known member."""
        return self._agent.node.members(self._agent.now_s())

    def member(self, name: NodeId) -> MemberView | None:
        """One of them."""
        return self._agent.node.member(name, self._agent.now_s())

    def nodes(self) -> Sequence[NodeStatus]:
        """Newest known record of each node."""
        return self._agent.node.node_records(self._agent.now_s())

    def node(self, name: NodeId) -> NodeStatus | None:
        """The record of one node."""
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

    def cards(self) -> Sequence[JobView]:
        """Cards of jobs shepherded elsewhere."""
        now_s = self._agent.now_s()
        return [JobView(job.card, job.written_s - now_s) for job in self._agent.node.foreign_jobs()]

    def places(self) -> Mapping[JobId, Location]:
        """Location entries; decoded one by one, when they are looked at."""
        return self._agent.node.locations()

    def setting(self) -> tuple[PolicySetting, int]:
        """The swarm-wide setting in force."""
        setting = self._agent.node.setting
        return setting.policy_setting, setting.version

    def why(self, job_id: JobId) -> dict[str, Any]:
        """The policy's explanation."""
        report, record = self._agent.node.why(job_id, self._agent.now_s()), self.record(job_id)
        assert report is not None, "asked for a job that is here"
        assert record is not None, "as above"
        return {**_explanation(report, record), "free": self._free()}

    def gpus(self) -> Sequence[GpuFacts]:
        """The GPUs of this node with what the ledger and NVML say of each."""
        node, entries = self._agent.node.node_id, self._agent.node.ledger.entries
        booked = {uuid: (entry.state.value, entry.job_id) for entry in entries for uuid in entry.gpus}
        readings = self._agent.telemetry.snapshot.gpus
        return [GpuFacts(node, reading, *booked.get(reading.uuid, (None, None))) for reading in readings]

    def tasks(self) -> Sequence[TaskStatus]:
        """The tasks of this node."""
        return self._agent.node.tasks()

    @property
    def store_id(self) -> int:
        """Identity of this agent's database."""
        return self._agent.store_id

    def telemetry(self) -> tuple[str, str]:
        """How far the readings can be trusted."""
        snapshot = self._agent.telemetry.snapshot
        return snapshot.state.value, snapshot.sentence

    def diagnoses(self) -> Sequence[Diagnosis]:
        """Every check of the agent's doctor."""
        return examine(self._agent)

    def _free(self) -> dict[str, int]:
        there = present(self.members())
        nodes = [each for each in self.nodes() if each.record.node_id in there]
        counts = gpu_counts(nodes, there)
        return {"gpus": counts["free"], "total_gpus": counts["total"], "nodes": len(nodes)}


def _explanation(report: WhyReport, record: JobRecord) -> dict[str, Any]:
    spec, demand = record.spec, record.spec.demand
    return {
        "summary": report.reason,
        "policy": report.policy,
        "needs": {
            "ranks": spec.ranks,
            "gpus_per_rank": demand.gpus,
            "gpus": spec.total_gpus,
            "cpus_per_rank": demand.cpus,
            "memory_bytes_per_rank": demand.memory_bytes,
            "gpu_type": demand.gpu_type,
            "gpu_memory_bytes": demand.gpu_memory_bytes,
        },
        "needs_text": report.needs,
        "free_text": report.free,
        "nodes": [{"node": each.node, "fits_ranks": each.ranks, "obstacle": each.reason} for each in report.nodes],
        "ahead": [{"job_id": each.job_id, **each.to_json(), "name": "", "user": ""} for each in report.ahead],
        "ahead_count": report.ahead_count,
        "position": report.position,
        "job_reason": report.job_reason,
        "sentences": list(report.sentences()),
    }
