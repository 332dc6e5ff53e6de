"""JSON Schema of the specification of a job: limits are those of the types that store it, and of its reader.

A few numbers are refused below what is documented here, where the reader alone knows the limit (64 GPUs a rank).
"""

from typing import get_type_hints

import msgspec

from swarm_agent.http.schema import FLAG, NUMBER, TEXT, Schema, array, between, choice, maybe, record
from swarmsched.api import (
    BATCH_KEYS,
    BATCH_LIMIT,
    PRIORITY_LIMIT,
    QUEUES,
    RANKS_LIMIT,
    RESTARTS_LIMIT,
    WORK_COUNTS,
    WORK_LIMITS,
    WORK_NEEDED,
    Isolation,
    JobSpec,
)
from swarmsched.estimate import GPU_BATCHES_MOST
from swarmsched.resources import Demand

DEMAND_FIELDS = {
    "gpus_per_rank": "gpus",
    "cpus_per_rank": "cpus",
    "memory_bytes_per_rank": "memory_bytes",
    "gpu_type": "gpu_type",
    "gpu_memory_bytes": "gpu_memory_bytes",
}
FIGURES = {
    name: between("integer" if name in WORK_COUNTS else "number", int(name in WORK_NEEDED), most)
    for name, most in WORK_LIMITS.items()
}
ASKED_WORK = record(
    {name: FIGURES[name] for name in WORK_NEEDED},
    optional={name: schema for name, schema in FIGURES.items() if name not in WORK_NEEDED},
    is_closed=True,
)
RENAMED = {
    "time_limit_seconds": "time_limit_s",
    "grace_seconds": "grace_s",
    "deadline_utc_seconds": "deadline_utc_s",
    "tree_bytes": "held_bytes",
}
NARROWER: dict[str, Schema] = {
    "queue": choice(*QUEUES),
    "priority": between("integer", -PRIORITY_LIMIT, PRIORITY_LIMIT),
    "ranks": between("integer", 1, RANKS_LIMIT),
    "ranks_most": between("integer", 0, RANKS_LIMIT),
    **dict.fromkeys(BATCH_KEYS, between("integer", 0, BATCH_LIMIT)),
    "local_batch_most_by_gpu": {
        "type": "object",
        "additionalProperties": between("integer", 1, BATCH_LIMIT),
        "maxProperties": GPU_BATCHES_MOST,
    },
    "work": maybe(ASKED_WORK),
    "max_restarts": between("integer", 0, RESTARTS_LIMIT),
    "on_isolation": choice(*(each.value for each in Isolation)),
}
"""What the reader takes of types that could store more."""


def asked_spec() -> Schema:
    """What a client sends."""
    keys = JobSpec(command=("true",)).to_json()
    stored = {**get_type_hints(JobSpec, include_extras=True), **get_type_hints(Demand, include_extras=True)}
    properties = {
        key: NARROWER.get(key) or msgspec.json.schema(stored[{**DEMAND_FIELDS, **RENAMED}.get(key, key)])
        for key in keys
    }
    required = {"command": {**properties.pop("command"), "minItems": 1}}
    return record(required, optional=properties, is_closed=True)


def shown_spec() -> Schema:
    """What answers have; types are those of the defaults."""
    properties = {key: _type_of(value) for key, value in JobSpec(command=("true",)).to_json().items()}
    work = maybe(record(dict.fromkeys(WORK_LIMITS, NUMBER)))
    objects = {"env": TEXT, "local_batch_most_by_gpu": {"type": "integer"}}
    told = {key: {"type": "object", "additionalProperties": value} for key, value in objects.items()}
    return record({**properties, "work": work, **told})


def _type_of(value: object) -> Schema:
    if isinstance(value, bool):
        return FLAG
    if isinstance(value, int):
        return {"type": "integer"}
    if isinstance(value, float):
        return NUMBER
    return array(TEXT) if isinstance(value, list) else TEXT
