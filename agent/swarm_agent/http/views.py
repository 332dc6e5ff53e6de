"""The JSON documents of the API, as docs/reference/http-api.md has them: functions from the core's values to dicts."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import convert
from msgspec.structs import asdict, replace

from swarm_agent.attendance import no_majority, present
from swarm_agent.eventlog import LoggedEvent
from swarm_agent.http.exchange import Document
from swarm_agent.http.facts import AgentFacts, GpuFacts
from swarm_agent.http.when import aged, rfc3339
from swarm_agent.installed import software_version
from swarm_agent.supervision.kept_work import KeptFolder
from swarmsched import ids
from swarmsched.api import JobState
from swarmsched.documents import (
    AggregationRoomDocument,
    EventDocument,
    FreeDocument,
    GpuCountsDocument,
    GpuDocument,
    GpuGroupDocument,
    JobAheadDocument,
    JobDocument,
    LeftDocument,
    LiveCountsDocument,
    MemberCountsDocument,
    MemberDocument,
    ModelDocument,
    NeedsDocument,
    NodeDocument,
    OutlookDocument,
    PolicyDocument,
    ProgressDocument,
    QueueDocument,
    SettingDocument,
    StatusDocument,
    SurvivalDocument,
    TaskDocument,
    TrailDocument,
    VerdictDocument,
    WeakestDocument,
    WhyDocument,
)
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.record import NodeFlag, NodeRecord, NodeStatus
from swarmsched.ids import NodeId
from swarmsched.policies.explain import WhyReport, allows
from swarmsched.record import JobRecord
from swarmsched.resources import GpuHealth
from swarmsched.shards import AggregationRoom
from swarmsched.specification import QUEUES
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import PolicySetting

LIVE_STATES = tuple(state.value for state in JobState if state is not JobState.ENDED)
WEAKEST_SHOWN = 5
SUMMARY_KEYS = ("id", "handle", "name", "user", "state", "submitted_at", "shepherd")


def job_summary(job: JobDocument) -> Document:
    """The few keys by which people tell jobs apart; for lists of matches."""
    return {key: getattr(job, key) for key in SUMMARY_KEYS}


def bare_summary(job_id: ids.JobId, state: JobState, shepherd: NodeId | None = None) -> Document:
    """As `job_summary`, of a job of which little is known: by its location entry, or that it is past its retention."""
    known = {"id": job_id, "handle": ids.handle(job_id), "state": state.value, "shepherd": shepherd}
    return {key: known.get(key) for key in SUMMARY_KEYS}


def member_document(member: MemberView, status: NodeStatus | None) -> MemberDocument:
    """A member as this agent sees it; where people ask it is told by its record."""
    peer_address = ids.address_text(member.address)
    return MemberDocument(
        name=member.node_id,
        address=status.record.api_address or peer_address if status else peer_address,
        peer_address=peer_address,
        status=member.status.value,
        generation=member.generation,
        incarnation=member.incarnation,
        version=member.software_version,
        since_seconds=round(member.since_s, 3),
    )


def node_document(member: MemberView, status: NodeStatus | None, now_utc_s: float) -> NodeDocument:
    """A member with its record, as far as that has arrived; `gpus`, `jobs` and `tasks` come from the node."""
    known = asdict(member_document(member, status))
    if status is None:
        return NodeDocument(**known)
    node = status.record
    return NodeDocument(
        **known,
        gpu_groups=[
            GpuGroupDocument(model=each.model, memory_bytes=each.memory_bytes, total=each.count, free=each.free)
            for each in node.groups
        ],
        is_witness=node.has(NodeFlag.WITNESS),
        is_draining=node.has(NodeFlag.DRAINING),
        is_disk_stalled=node.has(NodeFlag.DISK_STALLED),
        is_avoided=node.has(NodeFlag.AVOIDED),
        drain_reason=node.drain_reason,
        avoided_reason=node.avoided_reason,
        zone=node.zone,
        labels=list(node.labels),
        free_gpus=node.free_gpus,
        total_gpus=node.total_gpus,
        foreign_gpus=node.foreign_gpus,
        unhealthy_gpus=node.unhealthy_gpus,
        stale_gpus=node.stale_gpus,
        free_cpus=node.cpus_free,
        cpu_count=node.cpus_total,
        free_memory_bytes=node.memory_free_bytes,
        memory_bytes=node.memory_total_bytes,
        network_mbit_per_second=node.network_mbit_s or None,
        cpu_utilisation_ratio=node.cpu_utilisation_percent / 100,
        gpu_utilisation_ratio=node.gpu_utilisation_percent / 100,
        aggregation=_room(node.aggregation),
        **aged(now_utc_s, status.age_s),
    )


def _room(room: AggregationRoom | None) -> AggregationRoomDocument | None:
    if room is None:
        return None
    return AggregationRoomDocument(
        cpus=room.core_ms / 1_000, memory_bytes=room.memory_bytes, bytes_per_second=room.link_bytes_per_s
    )


def gpu_document(gpu: GpuFacts) -> GpuDocument:
    """A GPU of this node.  One that is booked is held, leased or draining whatever its health; then health counts."""
    reading = gpu.reading
    unbooked = "free" if reading.health is GpuHealth.OK else reading.health.value
    return GpuDocument(
        node=gpu.node,
        index=reading.index,
        uuid=reading.uuid,
        model=reading.model,
        memory_bytes=reading.memory_total_bytes,
        state=unbooked if gpu.booking is None else gpu.booking,
        job_id=gpu.job_id,
        health=reading.health.value,
        note=reading.note,
        is_simulated=reading.is_simulated,
        utilisation_ratio=reading.utilisation_ratio,
        memory_used_bytes=reading.memory_used_bytes,
        temperature_celsius=reading.temperature_celsius,
        power_watts=reading.power_watts,
        processes=[str(each) for each in reading.processes],
    )


def task_document(task: TaskStatus) -> TaskDocument:
    """A task of this node."""
    is_gone = task.stage is TaskStage.EXITED or task.is_frozen
    stands_still = "stands still: it asks for no plans any more" if task.worker.is_silent else ""
    return TaskDocument(
        job_id=task.job_id,
        attempt=task.attempt,
        worker=task.part or None,
        stage=task.stage.value,
        is_paused=task.is_frozen,
        problem="" if is_gone else stands_still or task.worker.problem,
    )


def gpu_counts(every: Sequence[NodeStatus], present: Collection[NodeId]) -> GpuCountsDocument:
    """GPUs of the members that are there, by what gossip tells of them; those of the others are only counted."""
    nodes = [each.record for each in every if each.record.node_id in present]
    return GpuCountsDocument(
        total=sum(each.total_gpus for each in nodes),
        free=sum(each.free_gpus for each in nodes),
        foreign=sum(each.foreign_gpus for each in nodes),
        unhealthy=sum(each.unhealthy_gpus for each in nodes),
        stale=sum(each.stale_gpus for each in nodes),
        leased=sum(_occupied(each) for each in nodes if not each.has(NodeFlag.DRAINING)),
        draining=sum(_occupied(each) for each in nodes if each.has(NodeFlag.DRAINING)),
        away=sum(each.record.total_gpus for each in every if each.record.node_id not in present),
    )


def _occupied(node: NodeRecord) -> int:
    unusable = node.foreign_gpus + node.unhealthy_gpus + node.stale_gpus
    return max(0, node.total_gpus - node.free_gpus - unusable)


def why_document(
    record: JobRecord,
    facts: AgentFacts,
    progress: ProgressDocument | None,
    model: ModelDocument | None,
    outlook: OutlookDocument | None,
) -> WhyDocument:
    """Why a job that is here waits, or has what it has, as its policy explains it."""
    spec = record.spec
    report, there = _report(record, facts), present(facts.members())
    nodes = facts.nodes()
    allowed = {each.record.node_id for each in nodes if allows(spec, each.record.node_id)} & there
    free = gpu_counts(nodes, allowed)
    return WhyDocument(
        job_id=record.job_id,
        handle=ids.handle(record.job_id),
        state=record.state.value,
        summary=report.reason,
        policy=report.policy,
        needs=convert({**spec.to_json(), "gpus": spec.total_gpus}, NeedsDocument),
        needs_text=report.needs,
        free=FreeDocument(gpus=free.free, total_gpus=free.total, nodes=len(allowed)),
        free_text=report.free,
        nodes=[VerdictDocument(node=each.node, fits_ranks=each.ranks, obstacle=each.reason) for each in report.nodes],
        ahead=[JobAheadDocument(job_id=each.job_id, **each.to_json(), name="", user="") for each in report.ahead],
        ahead_count=report.ahead_count,
        position=report.position,
        job_reason=report.job_reason,
        sentences=list(report.sentences()),
        trail=[
            TrailDocument(at=rfc3339(each.utc_s), told=each.told, by=each.by, changes=list(each.changes))
            for each in facts.trail(record.job_id)
        ],
        **aged(time.time(), max((each.age_s for each in nodes), default=0.0)),
        progress=progress,
        model=model,
        outlook=outlook,
    )


def _report(record: JobRecord, facts: AgentFacts) -> WhyReport:
    """As the policy explains it, behind what no policy can help: its files are away, or too many of its holders."""
    report, configuration = facts.why(record.job_id), record.configuration
    attendance = facts.attendance_at(configuration)
    if record.state is JobState.QUEUED and facts.has_no_files(record.job_id):
        took = f" ({', '.join(record.spec.blob_sources)} took them)" if record.spec.blob_sources else ""
        report = replace(report, reason=f"no agent that can be reached has its files{took}")
    if record.is_ended or attendance.has_majority(configuration):
        return report
    holders = [holder.node for holder in configuration.members]
    lost = no_majority("its holders", holders, attendance.present)
    remedy = f"if those are lost for good: swarm recover {ids.handle(record.job_id)}"
    plan = "" if record.state is JobState.QUEUED else f"; {report.reason}"  # it would tell of a start that cannot be
    return replace(report, reason=f"{lost} ({remedy}){plan}")


def queue_documents(jobs: Iterable[JobDocument]) -> list[QueueDocument]:
    """Every queue with its live jobs by state and the GPUs that they hold or ask for."""
    counts = {name: Counter[str]() for name in QUEUES}
    gpus: Counter[str] = Counter()
    for job in jobs:
        if job.queue in counts and job.state in LIVE_STATES:
            counts[job.queue][job.state] += 1
            gpus[job.queue] += job.gpus
    return [QueueDocument(name=name, jobs=LiveCountsDocument(**counts[name]), gpus=gpus[name]) for name in QUEUES]


def survival(jobs: Iterable[JobDocument]) -> SurvivalDocument:
    """How many deaths of holders the live jobs survive, and which survive the fewest."""
    live = [job for job in jobs if job.state in LIVE_STATES]
    known = [job for job in live if job.survives_deaths is not None]
    known.sort(key=lambda job: (job.has_majority is not False, job.survives_deaths, job.id))
    lost = sum(job.has_majority is False for job in known)
    counts = Counter(job.survives_deaths for job in known[lost:])
    return SurvivalDocument(
        jobs={str(deaths): counts[deaths] for deaths in sorted({0, 1, *filter(None, counts)})},
        without_majority=lost,
        unknown=len(live) - len(known),
        weakest=[
            WeakestDocument(
                id=job.id,
                handle=job.handle,
                name=job.name,
                survives_deaths=job.survives_deaths,
                has_majority=job.has_majority,
            )
            for job in known[:WEAKEST_SHOWN]
        ],
    )


def status_document(
    node: NodeId, facts: AgentFacts, jobs: Sequence[JobDocument], told: Mapping[str, Any]
) -> StatusDocument:
    """The swarm in a few numbers; `jobs` are the live ones, and `told` says which of them may be missing."""
    members, nodes, (setting, version) = facts.members(), facts.nodes(), facts.setting()
    return StatusDocument(
        node=node,
        version=software_version(),
        policy=PolicyDocument(name=setting.name, **_setting_keys(setting, version)),
        members=MemberCountsDocument(**Counter(member.status.value for member in members)),
        gpus=gpu_counts(nodes, present(members)),
        jobs=LiveCountsDocument(**Counter(job.state for job in jobs)),
        survival=survival(jobs),
        **told,
        **aged(time.time(), max((each.age_s for each in nodes), default=0.0)),
    )


def setting_document(setting: PolicySetting, version: int) -> SettingDocument:
    """The swarm-wide setting."""
    return SettingDocument(policy=setting.name, **_setting_keys(setting, version))


def _setting_keys(setting: PolicySetting, version: int) -> Document:
    return {
        "parameters": dict(setting.parameters),
        "elasticity": setting.elasticity.value,
        "restartable": setting.is_restartable,
        "version": version,
    }


def left_document(folder: KeptFolder) -> LeftDocument:
    """A working folder of an attempt that is over; whoever lists those of all nodes adds the node."""
    return LeftDocument(
        attempt=folder.attempt,
        path=str(folder.path),
        size_bytes=folder.size_bytes,
        until=rfc3339(folder.until_utc_s),
    )


def event_document(agent: str, event: LoggedEvent) -> EventDocument:
    """One entry of the cluster log; the cursor is added by whoever merges."""
    return EventDocument(
        time=rfc3339(event.utc_s),
        agent=agent,
        sequence=event.sequence,
        kind=event.kind,
        text=event.text,
        job_id=event.job_id,
        node=event.node,
        fields={key: _plain(value) for key, value in event.fields.items()},
    )


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
