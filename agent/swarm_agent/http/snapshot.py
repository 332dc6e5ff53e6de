"""The core's snapshots and the telemetry of this node, as the facts that the API is made of."""

from collections.abc import Iterator, Mapping
from typing import Any

from swarm_agent.agent import Agent
from swarm_agent.doctor import Diagnosis, examine
from swarm_agent.http.attendance import PRESENT
from swarm_agent.http.port import GpuFacts, GpuGroupFacts, Member, NodeFacts, Place, TaskFacts
from swarm_agent.http.views import gpu_counts
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.record import NodeFlag, NodeStatus
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.explain import WhyReport
from swarmsched.record import JobRecord
from swarmsched.resources import Gpu
from swarmsched.view import JobView, PolicySetting


class Snapshot:
    """`Facts` of a real agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def members(self) -> tuple[Member, ...]:
        """Every known member."""
        return tuple(_member(view) for view in self._agent.node.members(self._agent.now_s()))

    def member(self, name: NodeId) -> Member | None:
        """One of them."""
        view = self._agent.node.member(name, self._agent.now_s())
        return _member(view) if view is not None else None

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Newest known record of each node."""
        return tuple(_node_facts(status) for status in self._agent.node.node_records(self._agent.now_s()))

    def node(self, name: NodeId) -> NodeFacts | None:
        """The record of one node."""
        status = self._agent.node.node_record(name, self._agent.now_s())
        return _node_facts(status) if status is not None else None

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

    def cards(self) -> tuple[JobView, ...]:
        """Cards of jobs shepherded elsewhere."""
        now_s = self._agent.now_s()
        return tuple(JobView(job.card, job.written_s - now_s) for job in self._agent.node.foreign_jobs())

    def places(self) -> Mapping[JobId, Place]:
        """Location entries; decoded one by one, when they are looked at."""
        return _Places(self._agent.node.locations())

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

    def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs of this node with what the ledger and NVML say of each."""
        booked = {
            uuid: (entry.state.value, entry.job_id) for entry in self._agent.node.ledger.entries for uuid in entry.gpus
        }
        return tuple(
            GpuFacts(
                gpu=Gpu(
                    reading.uuid,
                    reading.index,
                    reading.model,
                    reading.memory_total_bytes,
                    reading.health,
                    reading.is_simulated,
                    reading.note,
                ),
                booking=booked[reading.uuid][0] if reading.uuid in booked else None,
                job_id=booked[reading.uuid][1] if reading.uuid in booked else None,
                utilisation_ratio=reading.utilisation_ratio,
                memory_used_bytes=reading.memory_used_bytes,
                temperature_celsius=reading.temperature_celsius,
                power_watts=reading.power_watts,
                processes=tuple(str(process) for process in reading.processes),
            )
            for reading in self._agent.telemetry.snapshot.gpus
        )

    def tasks(self) -> tuple[TaskFacts, ...]:
        """The tasks of this node."""
        tasks = self._agent.node.tasks()
        return tuple(TaskFacts(each.job_id, each.attempt, each.stage.value, each.is_frozen) for each in tasks)

    @property
    def store_id(self) -> int:
        """Identity of this agent's database."""
        return self._agent.store_id

    def telemetry(self) -> tuple[str, str]:
        """How far the readings can be trusted."""
        snapshot = self._agent.telemetry.snapshot
        return snapshot.state.value, snapshot.sentence

    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """Every check of the agent's doctor."""
        return examine(self._agent)

    def _free(self) -> dict[str, int]:
        present = frozenset(each.name for each in self.members() if each.status in PRESENT)
        nodes = [each for each in self.nodes() if each.name in present]
        counts = gpu_counts(nodes, present)
        return {"gpus": counts["free"], "total_gpus": counts["total"], "nodes": len(nodes)}


class _Places(Mapping[JobId, Place]):
    def __init__(self, locations: Mapping[JobId, Location]) -> None:
        self._locations = locations

    def __getitem__(self, job_id: JobId) -> Place:
        location = self._locations[job_id]
        return Place(location.shepherd, location.holders, location.state)

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)


def _member(view: MemberView) -> Member:
    return Member(
        name=view.node_id,
        address=view.address,
        status=view.status.value,
        generation=view.generation,
        incarnation=view.incarnation,
        version=view.software_version,
        since_s=view.since_s,
    )


def _node_facts(status: NodeStatus) -> NodeFacts:
    record = status.record
    return NodeFacts(
        name=record.node_id,
        age_s=status.age_s,
        groups=tuple(GpuGroupFacts(each.model, each.memory_bytes, each.count, each.free) for each in record.groups),
        free_cpus=record.cpus_free,
        cpu_count=record.cpus_total,
        free_memory_bytes=record.memory_free_bytes,
        memory_bytes=record.memory_total_bytes,
        is_draining=record.has(NodeFlag.DRAINING),
        drain_reason=record.drain_reason,
        is_disk_stalled=record.has(NodeFlag.DISK_STALLED),
        cpu_utilisation_ratio=record.cpu_utilisation_percent / 100,
        gpu_utilisation_ratio=record.gpu_utilisation_percent / 100,
        unhealthy_gpus=record.unhealthy_gpus,
        foreign_gpus=record.foreign_gpus,
        stale_gpus=record.stale_gpus,
        is_witness=record.has(NodeFlag.WITNESS),
        zone=record.zone,
        store_id=record.store_id,
    )


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
