"""JSON Schemas of the documents in docs/reference/http-api.md, by name; tests hold real answers against them.

Those of jobs, members, nodes, GPUs and tasks come from the tables that the documents are made from.
"""

from typing import Any

import msgspec

from swarm_agent.http.blobs import DIGESTS_LIMIT
from swarm_agent.http.jobs import GRACE_LIMIT_S, REASON_LIMIT, SIGNAL_NUMBER_LIMIT
from swarm_agent.http.schema import (
    COUNT,
    DIGEST,
    FLAG,
    JOB_ID,
    NUMBER,
    REFERENCE,
    SECONDS,
    TEXT,
    TIME,
    VERSION,
    Schema,
    array,
    at_most,
    between,
    choice,
    maybe,
    record,
    ref,
)
from swarm_agent.http.spec_schema import asked_spec, shown_spec
from swarmsched import documents
from swarmsched.api import END_REASONS, JobState, StartPhase
from swarmsched.gossip.member import MemberStatus
from swarmsched.holders import HOLDERS_MAX
from swarmsched.models.deadlines import Prospect
from swarmsched.resources import GpuHealth
from swarmsched.specification import NODES_LIMIT, RANKS_LIMIT
from swarmsched.task import TaskStage
from swarmsched.view import Elasticity

SUFFIX = "Document"
"""Of the structs' names; a schema has the name without it."""
ANSWERS = tuple(each for name, each in vars(documents).items() if name.endswith(SUFFIX))
ENUMERATIONS = (Elasticity, GpuHealth, JobState, MemberStatus, Prospect, StartPhase, TaskStage)
WORDS = {each.__name__: [value.value for value in each] for each in ENUMERATIONS} | {"EndReason": [*END_REASONS]}


HOLDERS: Schema = {
    "holders": array(TEXT, HOLDERS_MAX),
    "stores": array({"type": "string", "pattern": "^[0-9a-f]{1,14}$"}, HOLDERS_MAX),
}
REASON, GRACE = at_most(REASON_LIMIT), between("number", 0, GRACE_LIMIT_S)
RANKS = between("integer", 1, RANKS_LIMIT)
NODE_NAMES = {"type": "array", "items": at_most(63), "maxItems": NODES_LIMIT}
SIGNAL_NUMBER = between("integer", 1, SIGNAL_NUMBER_LIMIT)
ELASTICITY = choice(*(each.value for each in Elasticity))


def answer_schemas() -> Schema:
    """Schemas of the structs that answers are made of: all keys are there."""
    _, found = msgspec.json.schema_components(ANSWERS, ref_template=f"{REFERENCE}{{name}}")
    return {name.removesuffix(SUFFIX): _published(schema) for name, schema in found.items()}


def _published(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_published(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: _published(value) for key, value in schema.items() if key not in ("title", "default", "properties")}
    if "properties" in schema:
        told["properties"] = {key: _published(value) for key, value in schema["properties"].items()}
        told["required"] = list(told["properties"])
    if "$ref" in told:
        return ref(told["$ref"].removeprefix(REFERENCE).removesuffix(SUFFIX))
    if "description" in told:
        told["description"] = " ".join(told["description"].split())
    if {"type": "number"} in told.get("anyOf", ()):
        told["anyOf"] = [each for each in told["anyOf"] if each != {"type": "integer"}]
    if told.get("anyOf") == [{"type": "number"}]:
        return {"type": "number"}
    if words := told.pop("x-enumeration", ""):
        told["enum"] = WORDS[words]
    return told


def log_record(job: Schema) -> Schema:
    """One record of a stream of output."""

    def kind(name: str, **members: Schema) -> Schema:
        return record({"type": {"const": name}, **members, "cursor": TEXT})

    stream = choice("stdout", "stderr", "system")
    output = {"rank": COUNT, "group": maybe(TEXT), "node": TEXT, "stream": stream, "time": maybe(TIME)}
    state = {key: job[key] for key in ("state", "phase", "reason", "attempt")}
    ending = {key: job[key] for key in ("state", "exit_code", "signal", "end_reason", "shell_exit_code")}
    return {
        "oneOf": [
            kind("log", **output, text=TEXT),
            kind("log", **output, data=TEXT),
            kind("gap", **output, skipped_bytes=COUNT, text=TEXT),
            kind("state", **state, job=ref("Job")),
            kind("attempt", attempt=COUNT, text=TEXT),
            kind("warning", text=TEXT, node=maybe(TEXT), is_missing=FLAG),
            kind("end", **ending, job=ref("Job")),
        ]
    }


def problem() -> Schema:
    """An error answer."""
    field = record({"pointer": TEXT, "detail": TEXT, "remedy": TEXT})
    members = dict.fromkeys(("type", "title", "detail", "instance", "code", "remedy"), TEXT)
    optional = {
        "errors": array(field), "retry_after_seconds": COUNT, "nearest": TEXT, "silent_nodes": array(TEXT),
        "unasked_nodes": array(TEXT), "matches": array({"type": "object"}),
    }  # fmt: skip
    return record({**members, "status": COUNT}, optional=optional)


def schemas() -> Schema:
    """All of them by name."""
    answers, silent = answer_schemas(), dict.fromkeys(("silent_nodes", "unasked_nodes"), array(TEXT))
    pages = {"api_version": VERSION, "next_cursor": maybe(TEXT), "total": COUNT, "staleness_seconds": SECONDS}
    job_list = record({**pages, **silent, "items": array(ref("PartialJob"))})
    parameters = {"type": "object", "additionalProperties": NUMBER}
    changeable = {"parameters": parameters, "elasticity": ELASTICITY, "restartable": FLAG}
    return {
        **answers,
        "PartialJob": {**answers["Job"], "required": ["id"]},
        "JobList": job_list,
        "LogRecord": log_record(answers["Job"]["properties"]),
        "Anything": {"type": "object"},
        "Empty": record({}, is_closed=True),
        "Problem": problem(),
        "JobSpec": shown_spec(),
        "NewJobSpec": asked_spec(),
        "Submission": record(
            {"spec": ref("NewJobSpec")},
            optional={"ticket": maybe(record({"job_id": JOB_ID, **HOLDERS})), "dry_run": FLAG},
            is_closed=True,
        ),
        "Cancel": record({}, optional={"grace_seconds": maybe(GRACE), "reason": REASON}, is_closed=True),
        "Recover": record({"force": {"const": True}}, is_closed=True),
        "Scale": record({"ranks": RANKS}, optional={"ranks_most": {**RANKS, "minimum": 0}}, is_closed=True),
        "Migrate": record({}, optional={"nodes": NODE_NAMES, "avoid": NODE_NAMES}, is_closed=True),
        "Signal": record({"signal": {"anyOf": [SIGNAL_NUMBER, TEXT]}}, is_closed=True),
        "Drain": record({"draining": FLAG}, optional={"reason": REASON}, is_closed=True),
        "Targets": array(ref("Target")),
        "NewSetting": record({"policy": {**TEXT, "minLength": 1}}, optional=changeable, is_closed=True),
        "Digests": record({"digests": array(DIGEST, DIGESTS_LIMIT)}, is_closed=True),
    }
