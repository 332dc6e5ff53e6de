"""Documents of the HTTP API: the answers that agents write, and that the command, the SDK and /openapi.json read.

A struct is one JSON object, a field one key of it.  Fields without a default have been told by every agent since 0.1.0;
the others have the value that stands for a key of an older agent.  A key of a newer agent is left out by the reader.
Bounds and words are published in /openapi.json and not enforced here: a reader takes what a newer agent tells.

The module imports no other: the command reads it once an answer has come.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

API_VERSION = "v1"


def one_of(*words: str) -> Meta:
    """Text that is one of a few words."""
    return Meta(extra_json_schema={"enum": list(words)})


def value_of(enumeration: str) -> Meta:
    """Text that is a value of an enumeration of the core, by the name of its class."""
    return Meta(extra_json_schema={"x-enumeration": enumeration})


Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
Seconds = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
JobIdText = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-hjkmnp-tv-z]{26}$"})]
Version = Annotated[str, Meta(extra_json_schema={"const": API_VERSION})]


class MemberDocument(msgspec.Struct, kw_only=True):
    """A member of the swarm as the agent that answers sees it."""

    name: str
    address: str
    status: Annotated[str, value_of("MemberStatus")]
    generation: Count
    incarnation: Count
    version: str
    since_seconds: Seconds


class MemberListDocument(msgspec.Struct, kw_only=True):
    """The list of members."""

    api_version: Version = API_VERSION
    items: list[MemberDocument]
    next_cursor: str | None = None
    as_of: Time
    staleness_seconds: Seconds


class GpuDocument(msgspec.Struct, kw_only=True):
    """A GPU as its node reads it and its ledger books it."""

    node: str
    index: Count
    uuid: str
    model: str
    memory_bytes: Count
    state: Annotated[str, one_of("free", "held", "leased", "draining", "foreign", "unhealthy", "stale")]
    job_id: JobIdText | None
    health: Annotated[str, value_of("GpuHealth")]
    note: str
    is_simulated: bool
    utilisation_ratio: float | None
    memory_used_bytes: Count | None
    temperature_celsius: float | None
    power_watts: float | None
    processes: list[str]


class TaskDocument(msgspec.Struct, kw_only=True):
    """A task on its node; `worker` is its number in an elastic job, `problem` empty where all is well."""

    job_id: JobIdText
    attempt: Count
    worker: Count | None
    stage: Annotated[str, value_of("TaskStage")]
    is_paused: bool
    problem: str


class NodeDetails(msgspec.Struct, kw_only=True):
    """What a node tells other agents of itself."""

    gpus: list[GpuDocument] = []
    tasks: list[TaskDocument] = []


class GpuGroupDocument(msgspec.Struct, kw_only=True):
    """GPUs of one model and memory, as gossip counts them."""

    model: str
    memory_bytes: Count
    total: Count
    free: Count


class NodeDocument(MemberDocument, kw_only=True):
    """A member with what its node has.

    `gpus`, `jobs` and `tasks` come from the node itself, null while it does not answer; the rest is its gossiped
    record, null while that has not arrived.
    """

    gpus: list[GpuDocument] | None = None
    jobs: list[JobIdText] | None = None
    tasks: list[TaskDocument] | None = None
    gpu_groups: list[GpuGroupDocument] = []
    is_witness: bool | None = None
    is_draining: bool | None = None
    is_disk_stalled: bool | None = None
    is_avoided: bool | None = None
    drain_reason: str | None = None
    avoided_reason: str | None = None
    zone: str | None = None
    labels: list[str] | None = None
    free_gpus: Count | None = None
    total_gpus: Count | None = None
    foreign_gpus: Count | None = None
    unhealthy_gpus: Count | None = None
    stale_gpus: Count | None = None
    free_cpus: Count | None = None
    cpu_count: Count | None = None
    free_memory_bytes: Count | None = None
    memory_bytes: Count | None = None
    cpu_utilisation_ratio: float | None = None
    gpu_utilisation_ratio: float | None = None
    as_of: Time | None = None
    staleness_seconds: Seconds | None = None


class NodeListDocument(msgspec.Struct, kw_only=True):
    """The list of nodes."""

    api_version: Version = API_VERSION
    items: list[NodeDocument]
    next_cursor: str | None = None
    as_of: Time
    staleness_seconds: Seconds


class GpuListDocument(msgspec.Struct, kw_only=True):
    """The list of GPUs of the nodes that answered."""

    api_version: Version = API_VERSION
    items: list[GpuDocument]
    next_cursor: str | None = None
    silent_nodes: list[str] = []
    unasked_nodes: list[str] = []
    as_of: Time
    staleness_seconds: Seconds
