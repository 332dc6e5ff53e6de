"""JSON Schemas of the documents in docs/reference/http-api.md, by name; tests hold real answers against them.

Those of jobs, members, nodes, GPUs and tasks come from the tables that the documents are made from.
"""

from typing import Any

import msgspec

from swarm_agent.http import keys
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
from swarmsched.gossip.member import MemberStatus
from swarmsched.holders import HOLDERS_MAX
from swarmsched.resources import GpuHealth
from swarmsched.specification import NODES_LIMIT, RANKS_LIMIT
from swarmsched.task import TaskStage
from swarmsched.view import Elasticity

SUFFIX = "Document"
"""Of the structs' names; a schema has the name without it."""
ANSWERS = tuple(each for name, each in vars(documents).items() if name.endswith(SUFFIX))
WORDS = {each.__name__: [value.value for value in each] for each in (Elasticity, GpuHealth, MemberStatus, TaskStage)}


HOLDERS: Schema = {
    "holders": array(TEXT, HOLDERS_MAX),
    "stores": array({"type": "string", "pattern": "^[0-9a-f]{1,14}$"}, HOLDERS_MAX),
}
REASON, GRACE = at_most(REASON_LIMIT), between("number", 0, GRACE_LIMIT_S)
RANKS = between("integer", 1, RANKS_LIMIT)
NODE_NAMES = {"type": "array", "items": at_most(63), "maxItems": NODES_LIMIT}
SIGNAL_NUMBER = between("integer", 1, SIGNAL_NUMBER_LIMIT)
ELASTICITY = choice(*(each.value for each in Elasticity))

AGE, STATE = keys.AGE, keys.STATE
JOB = {**keys.properties(keys.JOB), **AGE}

ENDING: Schema = {key: JOB[key] for key in ("exit_code", "signal", "end_reason", "shell_exit_code")}


def listing(item: str, **more: Schema) -> Schema:
    """A list document."""
    return record({"api_version": VERSION, "items": array(ref(item)), "next_cursor": maybe(TEXT), **more})


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
        told["$ref"] = told["$ref"].removesuffix(SUFFIX)
    if "description" in told:
        told["description"] = " ".join(told["description"].split())
    if words := told.pop("x-enumeration", ""):
        told["enum"] = WORDS[words]
    return told


def log_record() -> Schema:
    """One record of a stream of output."""

    def kind(name: str, **members: Schema) -> Schema:
        return record({"type": {"const": name}, **members, "cursor": TEXT})

    stream = choice("stdout", "stderr", "system")
    output = {"rank": COUNT, "node": TEXT, "stream": stream, "time": maybe(TIME)}
    state = {"state": STATE, "phase": keys.PHASE, "reason": TEXT, "attempt": COUNT, "job": ref("Job")}
    return {
        "oneOf": [
            kind("log", **output, text=TEXT),
            kind("log", **output, data=TEXT),
            kind("gap", **output, skipped_bytes=COUNT, text=TEXT),
            kind("state", **state),
            kind("attempt", attempt=COUNT, text=TEXT),
            kind("warning", text=TEXT, node=maybe(TEXT), is_missing=FLAG),
            kind("end", state=STATE, **ENDING, job=ref("Job")),
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
    silent = {"silent_nodes": array(TEXT), "unasked_nodes": array(TEXT)}
    parameters = {"type": "object", "additionalProperties": NUMBER}
    changeable = {"parameters": parameters, "elasticity": ELASTICITY, "restartable": FLAG}
    why = {
        "api_version": VERSION, "job_id": JOB_ID, "handle": TEXT, "state": STATE, "summary": TEXT, "policy": TEXT,
        "needs": record(keys.NEEDS), "needs_text": TEXT,
        "free": record({"gpus": COUNT, "total_gpus": COUNT, "nodes": COUNT}), "free_text": TEXT,
        "nodes": array(record({"node": TEXT, "fits_ranks": COUNT, "obstacle": TEXT})),
        "ahead": array(record({"job_id": JOB_ID, "handle": TEXT, "name": TEXT, "user": TEXT, "reason": TEXT})),
        "ahead_count": COUNT, "position": COUNT, "job_reason": TEXT, "sentences": array(TEXT),
        "trail": array(record({"at": TIME, "told": TEXT, "by": TEXT, "changes": array(TEXT)})),
        "progress": JOB["progress"], "model": JOB["model"], "outlook": JOB["outlook"], **AGE,
    }  # fmt: skip
    return {
        **answer_schemas(),
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
        "Job": record(JOB),
        "SubmittedJob": record({**JOB, "was_known": FLAG, "dry_run": FLAG, "swarm_gpus": COUNT}),
        "PartialJob": {"type": "object", "properties": JOB, "required": ["id"]},
        "JobList": listing("PartialJob", total=COUNT, staleness_seconds=SECONDS, **silent),
        "Wait": record({"api_version": VERSION, "met": FLAG, "job": ref("Job")}),
        "Why": record(why),
        "LogRecord": log_record(),
        "Drain": record({"draining": FLAG}, optional={"reason": REASON}, is_closed=True),
        "Targets": array(ref("Target")),
        "NewSetting": record({"policy": {**TEXT, "minLength": 1}}, optional=changeable, is_closed=True),
        "Digests": record({"digests": array(DIGEST, DIGESTS_LIMIT)}, is_closed=True),
    }
