"""JSON Schemas (2020-12) of the documents in docs/http-api.md; tests hold real answers against them."""

from typing import Any

from swarmsched.api import EndReason, JobSpec, JobState, StartPhase
from swarmsched.task import TaskStage

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
SECONDS: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
VERSION: Schema = {"const": "v1"}
DIGEST: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
JOB_ID: Schema = {"type": "string", "pattern": "^[0-9a-hjkmnp-tv-z]{26}$"}


def ref(name: str) -> Schema:
    """A reference to another schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def maybe(schema: Schema) -> Schema:
    """The schema or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(schema: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": schema}


def choice(*values: str) -> Schema:
    """One of a few words."""
    return {"enum": list(values)}


def record(properties: Schema, *, optional: Schema | None = None, is_closed: bool = False) -> Schema:
    """An object whose `properties` are all there; others may be added unless it is closed (what clients send)."""
    schema = {"type": "object", "properties": {**properties, **(optional or {})}, "required": list(properties)}
    return {**schema, "additionalProperties": False} if is_closed else schema


def listing(item: str, **more: Schema) -> Schema:
    """A list document."""
    return record({"api_version": VERSION, "items": array(ref(item)), "next_cursor": maybe(TEXT), **more})


WEAKEST_KEYS = ("id", "handle", "survives_deaths", "has_majority")

AGE: Schema = {"as_of": TIME, "staleness_seconds": SECONDS}
STATE = choice(*(state.value for state in JobState))
PHASE = choice(*(phase.value for phase in StartPhase))
END_REASON = choice(*(reason.value for reason in EndReason if reason is not EndReason.NONE))
LIVE_COUNTS = record({state.value: COUNT for state in JobState if state is not JobState.ENDED})

HOLDERS: Schema = {"holders": array(TEXT), "stores": array({"type": "string", "pattern": "^[0-9a-f]{1,14}$"})}

CHECKPOINT: Schema = {
    "name": TEXT, "attempt": COUNT, "node": TEXT, "committed_at": TIME, "size_bytes": COUNT, "copies": array(TEXT),
}  # fmt: skip

JOB: Schema = {
    "api_version": VERSION, "id": JOB_ID, "handle": TEXT, "name": TEXT, "user": TEXT, "queue": TEXT,
    "priority": {"type": "integer"}, "state": STATE, "phase": PHASE, "reason": TEXT, "end_reason": maybe(END_REASON),
    "exit_code": maybe({"type": "integer"}), "signal": maybe(COUNT), "shell_exit_code": maybe(COUNT),
    "submitted_at": TIME, "started_at": maybe(TIME), "ended_at": maybe(TIME), "elapsed_seconds": maybe(SECONDS),
    "queued_seconds": maybe(SECONDS), "gpus": COUNT, "gpus_per_rank": COUNT, "ranks": COUNT, "world_size": maybe(COUNT),
    "nodes": array(record({"node": TEXT, "ranks": maybe(COUNT), "first_rank": maybe(COUNT), "is_paused": maybe(FLAG)})),
    "attempt": COUNT,
    "epoch": COUNT, "version": maybe(COUNT), "shepherd": TEXT, "holders": maybe(array(TEXT)),
    "leaving_holders": maybe(array(TEXT)), "survives_deaths": maybe(COUNT), "has_majority": maybe(FLAG),
    "is_forced": maybe(FLAG), "restarts": maybe(COUNT), "preemptions": maybe(COUNT),
    "leftovers": maybe(array(record({"node": TEXT, "attempt": COUNT}))), "checkpoint": maybe(record(CHECKPOINT)),
    "attained_gpu_seconds": SECONDS,
    "spec": maybe(ref("JobSpec")),
    "detail": maybe(TEXT), "failed_node": maybe(TEXT), "failed_rank": maybe(COUNT), "relaunches": maybe(COUNT),
    "source": choice("record", "card"), **AGE,
}  # fmt: skip

GPU: Schema = {
    "node": TEXT, "index": COUNT, "uuid": TEXT, "model": TEXT, "memory_bytes": COUNT,
    "state": choice("free", "held", "leased", "draining", "foreign", "unhealthy", "stale"), "job_id": maybe(JOB_ID),
    "health": choice("ok", "foreign", "unhealthy", "stale"), "note": TEXT, "is_simulated": FLAG,
    "utilisation_ratio": maybe(NUMBER), "memory_used_bytes": maybe(COUNT), "temperature_celsius": maybe(NUMBER),
    "power_watts": maybe(NUMBER), "processes": array(TEXT),
}  # fmt: skip

TASK: Schema = {
    "job_id": JOB_ID, "attempt": COUNT, "stage": choice(*(stage.value for stage in TaskStage)), "is_paused": FLAG,
}  # fmt: skip

MEMBER: Schema = {
    "name": TEXT, "address": TEXT, "status": choice("alive", "suspect", "failed", "left", "conflict"),
    "generation": COUNT, "incarnation": COUNT, "version": TEXT, "since_seconds": SECONDS,
}  # fmt: skip

NODE: Schema = {
    **MEMBER, "is_witness": maybe(FLAG), "is_draining": maybe(FLAG), "is_disk_stalled": maybe(FLAG),
    "drain_reason": maybe(TEXT), "zone": maybe(TEXT),
    "free_gpus": maybe(COUNT), "total_gpus": maybe(COUNT), "foreign_gpus": maybe(COUNT), "unhealthy_gpus": maybe(COUNT),
    "stale_gpus": maybe(COUNT),
    "gpu_groups": array(record({"model": TEXT, "memory_bytes": COUNT, "total": COUNT, "free": COUNT})),
    "free_cpus": maybe(COUNT), "cpu_count": maybe(COUNT), "free_memory_bytes": maybe(COUNT),
    "memory_bytes": maybe(COUNT), "cpu_utilisation_ratio": maybe(NUMBER), "gpu_utilisation_ratio": maybe(NUMBER),
    "gpus": maybe(array(ref("Gpu"))), "jobs": maybe(array(JOB_ID)), "tasks": maybe(array(ref("Task"))),
    "as_of": maybe(TIME), "staleness_seconds": maybe(SECONDS),
}  # fmt: skip

EVENT: Schema = {
    "time": TIME, "agent": TEXT, "sequence": COUNT, "kind": TEXT, "text": TEXT, "job_id": maybe(TEXT),
    "node": maybe(TEXT), "fields": {"type": "object"}, "cursor": TEXT,
}  # fmt: skip

OUTPUT: Schema = {
    "rank": COUNT, "node": TEXT, "stream": choice("stdout", "stderr", "system"), "time": maybe(TIME), "text": TEXT,
    "data": TEXT, "skipped_bytes": COUNT,
}  # fmt: skip

ENDING: Schema = {key: JOB[key] for key in ("exit_code", "signal", "end_reason", "shell_exit_code")}


def log_record() -> Schema:
    """One record of a stream of output."""
    head = {"rank": OUTPUT["rank"], "node": OUTPUT["node"], "stream": OUTPUT["stream"], "time": OUTPUT["time"]}
    return {
        "oneOf": [
            record({"type": {"const": "log"}, **head, "text": OUTPUT["text"], "cursor": TEXT}),
            record({"type": {"const": "log"}, **head, "data": OUTPUT["data"], "cursor": TEXT}),
            record({"type": {"const": "gap"}, **head, "skipped_bytes": COUNT, "cursor": TEXT}),
            record(
                {
                    "type": {"const": "state"},
                    "state": STATE,
                    "phase": PHASE,
                    "reason": TEXT,
                    "attempt": COUNT,
                    "job": ref("Job"),
                    "cursor": TEXT,
                }
            ),
            record({"type": {"const": "attempt"}, "attempt": COUNT, "text": TEXT, "cursor": TEXT}),
            record({"type": {"const": "warning"}, "text": TEXT, "node": maybe(TEXT), "cursor": TEXT}),
            record({"type": {"const": "end"}, "state": STATE, **ENDING, "job": ref("Job"), "cursor": TEXT}),
        ]
    }


def job_spec(*, is_request: bool) -> Schema:
    """The specification; types are those of its defaults."""
    example = JobSpec(command=("true",)).to_json()
    properties = {key: _type_of(value) for key, value in example.items()}
    properties["command"] = {"type": "array", "items": TEXT, "minItems": 1}
    properties["env"] = {"type": "object", "additionalProperties": TEXT}
    if not is_request:
        return record(properties)
    required = {"command": properties.pop("command")}
    return record(required, optional=properties, is_closed=True)


def _type_of(value: object) -> Schema:
    if isinstance(value, bool):
        return FLAG
    if isinstance(value, int):
        return {"type": "integer"}
    if isinstance(value, float):
        return NUMBER
    return array(TEXT) if isinstance(value, list) else TEXT


def problem() -> Schema:
    """An error answer."""
    field = record({"pointer": TEXT, "detail": TEXT, "remedy": TEXT})
    members = {
        "type": TEXT,
        "title": TEXT,
        "status": COUNT,
        "detail": TEXT,
        "instance": TEXT,
        "code": TEXT,
        "remedy": TEXT,
    }
    optional = {
        "errors": array(field), "retry_after_seconds": COUNT, "nearest": TEXT, "silent_nodes": array(TEXT),
        "matches": array({"type": "object"}),
    }  # fmt: skip
    return record(members, optional=optional)


def schemas() -> Schema:
    """All of them by name."""
    silent = {"silent_nodes": array(TEXT)}
    setting = {"policy": TEXT, "parameters": {"type": "object", "additionalProperties": NUMBER}}
    gpu_counts = ("total", "free", "leased", "foreign", "unhealthy", "stale", "away")
    needs = ("ranks", "gpus_per_rank", "gpus", "cpus_per_rank", "memory_bytes_per_rank", "gpu_memory_bytes")
    return {
        "Anything": {"type": "object"},
        "Empty": record({}, is_closed=True),
        "Problem": problem(),
        "JobSpec": job_spec(is_request=False),
        "NewJobSpec": job_spec(is_request=True),
        "Ticket": record({"api_version": VERSION, "job_id": JOB_ID, "handle": TEXT, **HOLDERS, "node": TEXT}),
        "Submission": record(
            {"spec": ref("NewJobSpec")},
            optional={"ticket": maybe(record({"job_id": JOB_ID, **HOLDERS})), "dry_run": FLAG},
            is_closed=True,
        ),
        "Cancel": record({}, optional={"grace_seconds": maybe(SECONDS), "reason": TEXT}, is_closed=True),
        "Recover": record({"force": {"const": True}}, is_closed=True),
        "Signal": record({"signal": {"type": ["integer", "string"]}}, is_closed=True),
        "Job": record(JOB),
        "SubmittedJob": record({**JOB, "was_known": FLAG, "dry_run": FLAG}),
        "PartialJob": {"type": "object", "properties": JOB, "required": ["id"]},
        "JobList": listing("PartialJob", total=COUNT, staleness_seconds=SECONDS, **silent),
        "Wait": record({"api_version": VERSION, "met": FLAG, "job": ref("Job")}),
        "Why": record(
            {
                "api_version": VERSION,
                "job_id": JOB_ID,
                "handle": TEXT,
                "state": STATE,
                "summary": TEXT,
                "policy": TEXT,
                "needs": record({**dict.fromkeys(needs, COUNT), "gpu_type": TEXT}),
                "free": record({"gpus": COUNT, "total_gpus": COUNT, "nodes": COUNT}),
                "nodes": array(record({"node": TEXT, "fits_ranks": COUNT, "obstacle": TEXT})),
                "ahead": array(record({"job_id": JOB_ID, "handle": TEXT, "name": TEXT, "user": TEXT, "reason": TEXT})),
                "position": COUNT,
                **AGE,
            }
        ),
        "LogRecord": log_record(),
        "Node": record(NODE),
        "NodeList": listing("Node", **AGE),
        "Gpu": record(GPU),
        "GpuList": listing("Gpu", **silent, **AGE),
        "Task": record(TASK),
        "Member": record(MEMBER),
        "MemberList": listing("Member", **AGE),
        "Drain": record({"draining": FLAG}, optional={"reason": TEXT}, is_closed=True),
        "Drained": record({"api_version": VERSION, "node": TEXT, "is_draining": FLAG, "drain_reason": TEXT}),
        "Forgotten": record({"api_version": VERSION, "node": TEXT, "is_forgotten": {"const": True}}),
        "Targets": array(record({"targets": array(TEXT), "labels": record({"swarm_node": TEXT})})),
        "Queue": record({"name": TEXT, "jobs": LIVE_COUNTS, "gpus": COUNT}),
        "QueueList": listing("Queue", **silent),
        "Event": record(EVENT),
        "EventList": listing("Event", **silent),
        "Setting": record({"api_version": VERSION, **setting, "version": COUNT}),
        "NewSetting": record({"policy": TEXT}, optional={"parameters": setting["parameters"]}, is_closed=True),
        "Status": record(
            {
                "api_version": VERSION,
                "node": TEXT,
                "version": TEXT,
                "policy": record({"name": TEXT, "parameters": setting["parameters"], "version": COUNT}),
                "members": record(dict.fromkeys(MEMBER["status"]["enum"], COUNT)),
                "gpus": record(dict.fromkeys(gpu_counts, COUNT)),
                "jobs": LIVE_COUNTS,
                "survival": record(
                    {
                        "jobs": {"type": "object", "additionalProperties": COUNT},
                        "without_majority": COUNT,
                        "unknown": COUNT,
                        "weakest": array(record({key: JOB[key] for key in WEAKEST_KEYS})),
                    }
                ),
                **silent,
                **AGE,
            }
        ),
        "Check": record({"name": TEXT, "status": choice("ok", "warning", "failed"), "detail": TEXT, "remedy": TEXT}),
        "Doctor": listing("Check", node=TEXT),
        "Digests": record({"digests": {**array(DIGEST), "maxItems": 10_000}}, is_closed=True),
        "Missing": record({"missing": array(DIGEST), "node": TEXT}),
        "StoredBlob": record({"sha256": DIGEST, "size_bytes": COUNT, "node": TEXT}),
        "StoredPack": record({"stored": COUNT, "known": COUNT, "size_bytes": COUNT, "node": TEXT}),
    }
