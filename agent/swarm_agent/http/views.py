"""The JSON documents of the API: pure functions from facts to dicts, described in docs/http-api.md."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from swarm_agent.eventlog import LoggedEvent
from swarm_agent.http.attendance import PRESENT, Attendance, attendance_at
from swarm_agent.http.port import Facts, GpuFacts, Member, NodeFacts, Place, TaskFacts
from swarmsched import ids
from swarmsched.api import API_VERSION, QUEUES, EndReason, JobSpec, JobState
from swarmsched.checkpoint import Checkpoint
from swarmsched.ids import NodeId
from swarmsched.record import JobRecord, own_exit_code, shell_exit_code
from swarmsched.resources import GpuHealth, world_size
from swarmsched.view import JobView, PolicySetting

SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIALS")
MASK = "***"
LIVE_STATES = tuple(state.value for state in JobState if state is not JobState.ENDED)
WEAKEST_SHOWN = 5
MEMBER_STATUSES = ("alive", "suspect", "failed", "left", "conflict")
UNKNOWN_OF_CARD = [
    "end_reason",
    "exit_code",
    "signal",
    "shell_exit_code",
    "started_at",
    "ended_at",
    "elapsed_seconds",
    "queued_seconds",
    "world_size",
    "version",
    "holders",
    "leaving_holders",
    "survives_deaths",
    "has_majority",
    "is_forced",
    "restarts",
    "preemptions",
    "leftovers",
    "checkpoint",
    "spec",
    "detail",
    "failed_node",
    "failed_rank",
    "relaunches",
]
UNKNOWN_OF_NODE = [
    "is_witness",
    "is_draining",
    "drain_reason",
    "is_disk_stalled",
    "zone",
    "free_gpus",
    "total_gpus",
    "foreign_gpus",
    "unhealthy_gpus",
    "stale_gpus",
    "free_cpus",
    "cpu_count",
    "free_memory_bytes",
    "memory_bytes",
    "cpu_utilisation_ratio",
    "gpu_utilisation_ratio",
    "as_of",
    "staleness_seconds",
]

Document = dict[str, Any]


def rfc3339(utc_s: float) -> str:
    """Milliseconds, UTC, `Z`."""
    return datetime.fromtimestamp(utc_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_or_none(utc_s: float) -> str | None:
    """0 stands for "not yet" in records."""
    return rfc3339(utc_s) if utc_s else None


def listing(items: Sequence[Document], **more: object) -> Document:
    """A list document."""
    return {"api_version": API_VERSION, "items": list(items), "next_cursor": None, **more}


def aged(now_utc_s: float, age_s: float) -> Document:
    """The two keys that tell how old something is."""
    return {"as_of": rfc3339(now_utc_s - age_s), "staleness_seconds": round(age_s, 3)}


def job_document(record: JobRecord, now_utc_s: float, attendance: Attendance) -> Document:
    """A job by its record; `attendance` tells which of its holders are there."""
    is_ended, spec = record.is_ended, record.spec
    return {
        "api_version": API_VERSION,
        "id": record.job_id,
        "handle": ids.handle(record.job_id),
        "name": spec.name,
        "user": spec.user,
        "queue": spec.queue,
        "priority": spec.priority,
        "state": record.state.value,
        "phase": record.phase.value,
        "reason": record.reason,
        "end_reason": record.end_reason.value if is_ended and record.end_reason is not EndReason.NONE else None,
        "exit_code": own_exit_code(record) if is_ended else None,
        "signal": record.signal or None if is_ended else None,
        "shell_exit_code": shell_exit_code(record) if is_ended else None,
        "submitted_at": rfc3339(record.submitted_utc_s),
        "started_at": time_or_none(record.started_utc_s),
        "ended_at": time_or_none(record.ended_utc_s),
        "elapsed_seconds": _elapsed_s(record, now_utc_s),
        "queued_seconds": _queued_s(record, now_utc_s),
        "gpus": spec.total_gpus,
        "gpus_per_rank": spec.demand.gpus,
        "ranks": spec.ranks,
        "world_size": world_size(record.shares),
        "nodes": _share_documents(record),
        "attempt": record.attempt,
        "epoch": record.epoch,
        "version": record.version,
        "shepherd": record.shepherd,
        "holders": [holder.node for holder in record.holders],
        "leaving_holders": [holder.node for holder in record.leaving_holders],
        "survives_deaths": attendance.survives_deaths(record.configuration),
        "has_majority": attendance.has_majority(record.configuration),
        "is_forced": record.is_forced,
        "restarts": record.restarts,
        "preemptions": record.preemptions,
        "leftovers": [{"node": each.node, "attempt": each.attempt} for each in record.leftovers],
        "checkpoint": checkpoint_document(record.checkpoint) if record.checkpoint else None,
        "attained_gpu_seconds": round(_attained_gpu_s(record, now_utc_s), 3),
        "spec": spec_document(spec),
        "detail": record.detail,
        "failed_node": record.failed_node or None,
        "failed_rank": record.failed_rank if record.failed_rank >= 0 else None,
        "relaunches": record.relaunches,
        "source": "record",
        **aged(now_utc_s, 0.0),
    }


def job_document_now(record: JobRecord, facts: Facts) -> Document:
    """A job as it is at this moment, for whoever asks about this one alone."""
    return job_document(record, time.time(), attendance_at(facts, record.configuration))


def card_document(job: JobView, now_utc_s: float) -> Document:
    """A job of which only the card is known; keys that gossip does not carry are null."""
    card = job.card
    return {
        "api_version": API_VERSION,
        "id": card.job_id,
        "handle": ids.handle(card.job_id),
        "name": card.name,
        "user": card.user,
        "queue": card.queue,
        "priority": card.priority,
        "state": card.state.value,
        "phase": card.phase.value,
        "reason": card.reason,
        "attempt": card.attempt,
        "submitted_at": rfc3339(card.submitted_utc_s),
        "gpus": card.ranks * card.demand.gpus,
        "gpus_per_rank": card.demand.gpus,
        "ranks": card.ranks,
        "nodes": [{"node": share.node, "ranks": None, "first_rank": None, "is_paused": None} for share in card.shares],
        "epoch": card.epoch,
        "shepherd": card.shepherd,
        "attained_gpu_seconds": round(job.attained_gpu_s(0.0), 3),
        **dict.fromkeys(UNKNOWN_OF_CARD),
        "source": "card",
        **aged(now_utc_s, -job.written_s),
    }


def checkpoint_document(checkpoint: Checkpoint) -> Document:
    """What the next attempt resumes from; `copies` lists who keeps a packed copy, none in a shared folder."""
    return {
        "name": checkpoint.name,
        "attempt": checkpoint.attempt,
        "node": checkpoint.node,
        "committed_at": rfc3339(checkpoint.committed_utc_s),
        "size_bytes": checkpoint.size_bytes,
        "copies": list(checkpoint.copies),
    }


def spec_document(spec: JobSpec) -> Document:
    """The specification with the values of secret variables masked."""
    document = spec.to_json()
    document["env"] = {name: MASK if _is_secret(name) else value for name, value in spec.env.items()}
    return document


def job_summary(document: Mapping[str, Any]) -> Document:
    """The few keys by which people tell jobs apart; for lists of matches."""
    return {key: document.get(key) for key in ("id", "handle", "name", "user", "state", "submitted_at", "shepherd")}


def member_document(member: Member) -> Document:
    """A member."""
    return {
        "name": member.name,
        "address": address_text(member.address),
        "status": member.status,
        "generation": member.generation,
        "incarnation": member.incarnation,
        "version": member.version,
        "since_seconds": round(member.since_s, 3),
    }


def node_document(member: Member, facts: NodeFacts | None, now_utc_s: float) -> Document:
    """A member with its record; nulls when that has not arrived.  `gpus`, `jobs` and `tasks` come from the node."""
    document = {**member_document(member), "gpus": None, "jobs": None, "tasks": None}
    if facts is None:
        return {**document, "gpu_groups": [], **dict.fromkeys(UNKNOWN_OF_NODE)}
    return {
        **document,
        "is_witness": facts.is_witness,
        "is_draining": facts.is_draining,
        "drain_reason": facts.drain_reason,
        "zone": facts.zone,
        "is_disk_stalled": facts.is_disk_stalled,
        "free_gpus": facts.free_gpus,
        "total_gpus": facts.total_gpus,
        "foreign_gpus": facts.foreign_gpus,
        "unhealthy_gpus": facts.unhealthy_gpus,
        "stale_gpus": facts.stale_gpus,
        "gpu_groups": [
            {"model": each.model, "memory_bytes": each.memory_bytes, "total": each.total, "free": each.free}
            for each in facts.groups
        ],
        "free_cpus": facts.free_cpus,
        "cpu_count": facts.cpu_count,
        "free_memory_bytes": facts.free_memory_bytes,
        "memory_bytes": facts.memory_bytes,
        "cpu_utilisation_ratio": facts.cpu_utilisation_ratio,
        "gpu_utilisation_ratio": facts.gpu_utilisation_ratio,
        **aged(now_utc_s, facts.age_s),
    }


def gpu_document(node: NodeId, facts: GpuFacts) -> Document:
    """One GPU of this very node."""
    gpu = facts.gpu
    return {
        "node": node,
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.model,
        "memory_bytes": gpu.memory_bytes,
        "state": gpu_state(facts),
        "job_id": facts.job_id,
        "health": gpu.health.value,
        "note": gpu.note,
        "is_simulated": gpu.is_simulated,
        "utilisation_ratio": facts.utilisation_ratio,
        "memory_used_bytes": facts.memory_used_bytes,
        "temperature_celsius": facts.temperature_celsius,
        "power_watts": facts.power_watts,
        "processes": list(facts.processes),
    }


def task_document(facts: TaskFacts) -> Document:
    """A job's part on this very node."""
    return {
        "job_id": facts.job_id,
        "attempt": facts.attempt,
        "stage": facts.stage,
        "is_paused": facts.is_paused,
    }


def gpu_state(facts: GpuFacts) -> str:
    """A booked GPU is held, leased or draining whatever its health; then health counts, then it is free."""
    if facts.booking is not None:
        return facts.booking
    return "free" if facts.gpu.health is GpuHealth.OK else facts.gpu.health.value


def gpu_counts(every: Sequence[NodeFacts], present: Collection[NodeId]) -> dict[str, int]:
    """GPUs of the members that are there, by what gossip tells of them; those of the others are only counted.

    `leased` are those that are neither free nor out of use.
    """
    nodes = [each for each in every if each.name in present]
    counts = {
        "total": sum(each.total_gpus for each in nodes),
        "free": sum(each.free_gpus for each in nodes),
        "foreign": sum(each.foreign_gpus for each in nodes),
        "unhealthy": sum(each.unhealthy_gpus for each in nodes),
        "stale": sum(each.stale_gpus for each in nodes),
    }
    leased = max(0, 2 * counts["total"] - sum(counts.values()))
    return {**counts, "leased": leased, "away": sum(each.total_gpus for each in every if each.name not in present)}


def queue_documents(jobs: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Every queue with its live jobs by state and the GPUs that they hold or ask for."""
    counts = {name: Counter[str]() for name in QUEUES}
    gpus: Counter[str] = Counter()
    for job in jobs:
        if job["queue"] in counts and job["state"] in LIVE_STATES:
            counts[job["queue"]][job["state"]] += 1
            gpus[job["queue"]] += job["gpus"] or 0
    return [
        {"name": name, "jobs": {state: counts[name][state] for state in LIVE_STATES}, "gpus": gpus[name]}
        for name in QUEUES
    ]


def survival(jobs: Iterable[Mapping[str, Any]]) -> Document:
    """How many deaths of holders the live jobs survive, and which survive the fewest."""
    live = [job for job in jobs if job["state"] in LIVE_STATES]
    known = [job for job in live if job.get("survives_deaths") is not None]
    known.sort(key=lambda job: (job.get("has_majority") is not False, job["survives_deaths"], job["id"]))
    lost = sum(job.get("has_majority") is False for job in known)
    counts = Counter(job["survives_deaths"] for job in known[lost:])
    keys = ("id", "handle", "name", "survives_deaths", "has_majority")
    return {
        "jobs": {str(deaths): counts[deaths] for deaths in sorted({0, 1, *counts})},
        "without_majority": lost,
        "unknown": len(live) - len(known),
        "weakest": [{key: job.get(key) for key in keys} for job in known[:WEAKEST_SHOWN]],
    }


def status_document(
    node: NodeId,
    version: str,
    setting: Document,
    members: Sequence[Member],
    nodes: Sequence[NodeFacts],
    jobs: Sequence[Mapping[str, Any]],
    silent: Sequence[NodeId],
    now_utc_s: float,
) -> Document:
    """The swarm in a few numbers."""
    statuses = Counter(member.status for member in members)
    job_states = Counter(job["state"] for job in jobs)
    return {
        "api_version": API_VERSION,
        "node": node,
        "version": version,
        "policy": setting,
        "members": {status: statuses[status] for status in MEMBER_STATUSES},
        "gpus": gpu_counts(nodes, frozenset(each.name for each in members if each.status in PRESENT)),
        "jobs": {state: job_states[state] for state in LIVE_STATES},
        "survival": survival(jobs),
        "silent_nodes": list(silent),
        **aged(now_utc_s, max((facts.age_s for facts in nodes), default=0.0)),
    }


def setting_document(setting: PolicySetting, version: int) -> Document:
    """The swarm-wide setting."""
    return {
        "api_version": API_VERSION,
        "policy": setting.name,
        "parameters": dict(setting.parameters),
        "version": version,
    }


def event_document(agent: str, event: LoggedEvent) -> Document:
    """One entry of the cluster log; the cursor is added by whoever merges."""
    return {
        "time": rfc3339(event.utc_s),
        "agent": agent,
        "sequence": event.sequence,
        "kind": event.kind,
        "text": event.text,
        "job_id": event.job_id,
        "node": event.node,
        "fields": {key: _plain(value) for key, value in event.fields.items()},
    }


def over_summary(job_id: ids.JobId) -> Document:
    """What is left of a job that is past its retention."""
    return {
        "id": job_id,
        "handle": ids.handle(job_id),
        "name": None,
        "user": None,
        "state": JobState.ENDED.value,
        "submitted_at": None,
        "shepherd": None,
    }


def place_summary(job_id: ids.JobId, place: Place) -> Document:
    """What a location entry says of a job."""
    return {
        "id": job_id,
        "handle": ids.handle(job_id),
        "name": None,
        "user": None,
        "state": place.state.value,
        "submitted_at": None,
        "shepherd": place.shepherd,
    }


def address_text(address: ids.Address) -> str:
    """`HOST:PORT`, IPv6 in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _share_documents(record: JobRecord) -> list[Document]:
    first, documents = 0, []
    for share in record.shares:
        documents.append({"node": share.node, "ranks": share.ranks, "first_rank": first, "is_paused": None})
        first += share.ranks
    return documents


def _elapsed_s(record: JobRecord, now_utc_s: float) -> float:
    """Running time of the current attempt; wall clocks may jump, so never below 0."""
    if not record.started_utc_s:
        return 0.0
    return round(max(0.0, (record.ended_utc_s or now_utc_s) - record.started_utc_s), 3)


def _queued_s(record: JobRecord, now_utc_s: float) -> float:
    until_utc_s = record.first_started_utc_s or record.started_utc_s or record.ended_utc_s or now_utc_s
    return round(max(0.0, until_utc_s - record.submitted_utc_s), 3)


def _attained_gpu_s(record: JobRecord, now_utc_s: float) -> float:
    """Finished attempts plus the running one."""
    is_running = record.state in (JobState.RUNNING, JobState.STOPPING) and record.started_utc_s
    return record.attained_gpu_s + (record.spec.total_gpus * _elapsed_s(record, now_utc_s) if is_running else 0.0)


def _is_secret(name: str) -> bool:
    return name.upper().endswith(SECRET_ENDINGS)


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
