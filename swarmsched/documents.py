"""Documents of the HTTP API: the answers that agents write, and that the command, the SDK and /openapi.json read.

A struct is one JSON object, a field one key of it.  Fields without a default have been told by every agent since 0.1.0;
the others have the value that stands for a key of an older agent.  A key of a newer agent is left out by the reader.
Bounds and words are published in /openapi.json and not enforced here: a reader takes what a newer agent tells.

The module imports no other: the command reads it once an answer has come.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

API_VERSION = "v1"
HOLDERS_MOST = 5
"""As `holders.HOLDERS_MAX`, which a test holds it to."""


def one_of(*words: str) -> Meta:
    """Text that is one of a few words."""
    return Meta(extra_json_schema={"enum": list(words)})


def value_of(enumeration: str) -> Meta:
    """Text that is a value of an enumeration of the core, by the name of its class."""
    return Meta(extra_json_schema={"x-enumeration": enumeration})


Number = int | float
Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
Seconds = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
JobIdText = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-hjkmnp-tv-z]{26}$"})]
Digest = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]{64}$"})]
StoreId = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]{1,14}$"})]
Version = Annotated[str, Meta(extra_json_schema={"const": API_VERSION})]


class MemberDocument(msgspec.Struct, kw_only=True):
    """A member of the swarm as the agent that answers sees it.

    `address` is where people ask it, `peer_address` where other agents dial it, mostly the same.
    """

    name: str
    address: str
    peer_address: str = ""
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
    utilisation_ratio: Number | None
    memory_used_bytes: Count | None
    temperature_celsius: Number | None
    power_watts: Number | None
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


class AggregationRoomDocument(msgspec.Struct, kw_only=True):
    """What a node has left for the aggregation of other nodes' jobs."""

    cpus: Number
    memory_bytes: Count
    bytes_per_second: Count


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
    network_mbit_per_second: Count | None = None
    cpu_utilisation_ratio: Number | None = None
    gpu_utilisation_ratio: Number | None = None
    as_of: Time | None = None
    staleness_seconds: Seconds | None = None
    aggregation: AggregationRoomDocument | None = None


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


class EventDocument(msgspec.Struct, kw_only=True):
    """An event as one agent logged it; `cursor` is where a list or a stream goes on behind it."""

    time: Time
    agent: str
    sequence: Count
    kind: str
    text: str
    job_id: str | None
    node: str | None
    fields: dict[str, Any]
    cursor: str = ""


class EventListDocument(msgspec.Struct, kw_only=True):
    """The list of events, oldest first."""

    api_version: Version = API_VERSION
    items: list[EventDocument]
    next_cursor: str | None
    silent_nodes: list[str] = []
    unasked_nodes: list[str] = []


class NodeEvents(msgspec.Struct, kw_only=True):
    """What an agent tells others of its log: events, and the (time, sequence) of its last one."""

    items: list[EventDocument] = []
    last: tuple[str, int] = ("", 0)


class LiveCountsDocument(msgspec.Struct, kw_only=True):
    """The number of live jobs in each state."""

    queued: Count = 0
    starting: Count = 0
    running: Count = 0
    stopping: Count = 0


class QueueDocument(msgspec.Struct, kw_only=True):
    """A queue with its live jobs and the GPUs that they hold or ask for."""

    name: str
    jobs: LiveCountsDocument
    gpus: Count


class QueueListDocument(msgspec.Struct, kw_only=True):
    """The list of queues."""

    api_version: Version = API_VERSION
    items: list[QueueDocument]
    next_cursor: str | None = None
    silent_nodes: list[str] = []
    unasked_nodes: list[str] = []


class SettingDocument(msgspec.Struct, kw_only=True):
    """The swarm-wide setting and its version."""

    api_version: Version = API_VERSION
    policy: str
    parameters: dict[str, float]
    elasticity: Annotated[str, value_of("Elasticity")]
    restartable: bool = False
    version: Count


class PolicyDocument(msgspec.Struct, kw_only=True):
    """The swarm-wide setting in the status of the swarm."""

    name: str
    parameters: dict[str, float]
    elasticity: Annotated[str, value_of("Elasticity")]
    restartable: bool = False
    version: Count


class MemberCountsDocument(msgspec.Struct, kw_only=True):
    """The number of members in each status."""

    alive: Count = 0
    suspect: Count = 0
    failed: Count = 0
    left: Count = 0
    conflict: Count = 0


class GpuCountsDocument(msgspec.Struct, kw_only=True):
    """The number of GPUs of members that are there, by what gossip tells; `away` counts those of the others.

    `leased` are those that are neither free nor out of use.  A node that drains tells none to be free, so that nobody
    else knows which of its GPUs are leased: they are `draining`.
    """

    total: Count
    free: Count
    foreign: Count
    unhealthy: Count
    stale: Count
    leased: Count
    draining: Count
    away: Count


class WeakestDocument(msgspec.Struct, kw_only=True):
    """A job that survives few deaths of holders."""

    id: JobIdText
    handle: str
    name: str | None
    survives_deaths: Count | None
    has_majority: bool | None


class SurvivalDocument(msgspec.Struct, kw_only=True):
    """The number of live jobs by the deaths of holders that they survive."""

    jobs: dict[str, Count]
    without_majority: Count
    unknown: Count
    weakest: list[WeakestDocument]


class WorstJobDocument(msgspec.Struct, kw_only=True):
    """The job that is served worst."""

    id: JobIdText
    handle: str


class FairnessDocument(msgspec.Struct, kw_only=True):
    """How fairly jobs are served: time to the end over that alone on an equal share of the GPUs."""

    rho_median: Number
    rho_worst: Number
    worst_job: WorstJobDocument
    jobs: Count


class StatusDocument(msgspec.Struct, kw_only=True):
    """The swarm in a few numbers."""

    api_version: Version = API_VERSION
    node: str
    version: str
    policy: PolicyDocument
    members: MemberCountsDocument
    gpus: GpuCountsDocument
    jobs: LiveCountsDocument
    survival: SurvivalDocument
    fairness: FairnessDocument | None = None
    between_shepherds: Count = 0
    silent_nodes: list[str] = []
    unasked_nodes: list[str] = []
    as_of: Time
    staleness_seconds: Seconds


class CheckDocument(msgspec.Struct, kw_only=True):
    """A check of an agent's own state."""

    name: str
    status: Annotated[str, one_of("ok", "warning", "failed")]
    detail: str
    remedy: str


class DoctorDocument(msgspec.Struct, kw_only=True):
    """The list of an agent's checks."""

    api_version: Version = API_VERSION
    items: list[CheckDocument]
    next_cursor: str | None = None
    node: str


class LeftDocument(msgspec.Struct, kw_only=True):
    """A working folder of an attempt that is over, on its node until `until` at the latest."""

    node: str = ""
    attempt: Count
    path: str
    size_bytes: Count
    until: Time


class LeftListDocument(msgspec.Struct, kw_only=True):
    """The list of a job's working folders."""

    api_version: Version = API_VERSION
    items: list[LeftDocument]
    next_cursor: str | None = None
    silent_nodes: list[str] = []
    unasked_nodes: list[str] = []


class NodeFolders(msgspec.Struct, kw_only=True):
    """What an agent tells others of a job's working folders on its node."""

    items: list[LeftDocument] = []


class TicketDocument(msgspec.Struct, kw_only=True):
    """A job id and who is to hold its record, each with the database that it keeps."""

    api_version: Version = API_VERSION
    job_id: JobIdText
    holders: Annotated[list[str], Meta(extra_json_schema={"maxItems": HOLDERS_MOST})]
    stores: Annotated[list[StoreId], Meta(extra_json_schema={"maxItems": HOLDERS_MOST})]
    handle: str
    node: str


class DrainedDocument(msgspec.Struct, kw_only=True):
    """A node that was told to drain, or to work again."""

    api_version: Version = API_VERSION
    node: str
    is_draining: bool
    drain_reason: str


class ForgottenDocument(msgspec.Struct, kw_only=True):
    """A member that is dialled no more."""

    api_version: Version = API_VERSION
    node: str
    is_forgotten: Annotated[bool, Meta(extra_json_schema={"const": True})] = True


class TargetLabelsDocument(msgspec.Struct, kw_only=True):
    """The labels that Prometheus gives to a member's metrics."""

    swarm_node: str


class TargetDocument(msgspec.Struct, kw_only=True):
    """A member as a target of Prometheus."""

    targets: list[str]
    labels: TargetLabelsDocument


class MissingDocument(msgspec.Struct, kw_only=True):
    """The digests of files that an agent does not have."""

    missing: list[Digest]
    node: str


class StoredBlobDocument(msgspec.Struct, kw_only=True):
    """A file that an agent has."""

    sha256: Digest
    size_bytes: Count
    node: str


class StoredPackDocument(msgspec.Struct, kw_only=True):
    """How many files of a pack an agent has stored, and how many it had."""

    stored: Count
    known: Count
    size_bytes: Count
    node: str


class JobNodeDocument(msgspec.Struct, kw_only=True):
    """Ranks of a job, or of one group of it, on one node.

    `first_rank` counts in the group; it is null where ranks change, and `is_paused` where nobody says.
    """

    node: str
    ranks: Count | None
    first_rank: Count | None
    is_paused: bool | None = None
    group: str | None = None


class GroupDocument(msgspec.Struct, kw_only=True):
    """A group of a job that has several; `world_size` are the ranks that it has now, `needs` says what they need."""

    name: str
    command: list[str]
    ranks: Count
    ranks_most: Count
    gpus_per_rank: Count
    needs: str
    world_size: Count
    nodes: list[str]


class WorkerDocument(msgspec.Struct, kw_only=True):
    """A worker of an elastic job; `problem` is empty where all is well, null where nobody says."""

    worker: Count
    node: str
    state: Annotated[str, one_of("training", "joining", "leaving")]
    problem: str | None = None


class WorldDocument(msgspec.Struct, kw_only=True):
    """The membership of an elastic job.

    Version 0: its attempt is being started.  Of numbers up to `last_worker` those that are not there have left.
    """

    version: Count
    workers: list[WorkerDocument]
    lost: list[Count]
    last_worker: Count


class RescalingDocument(msgspec.Struct, kw_only=True):
    """One change of size or hosts; `ranks_after` and `pause_seconds` are null until its ranks run again."""

    decided_at: Time
    ranks_before: Count
    ranks_after: Count | None
    pause_seconds: Seconds | None
    reason: str


class LeftoverDocument(msgspec.Struct, kw_only=True):
    """A node on which ranks of an attempt may still run that was given up."""

    node: str
    attempt: Count


class CheckpointDocument(msgspec.Struct, kw_only=True):
    """What the next attempt resumes from; `copies` lists who keeps a packed copy, none in a shared folder."""

    name: str
    attempt: Count
    node: str
    committed_at: Time
    size_bytes: Count
    copies: list[str]


class LearnerDocument(msgspec.Struct, kw_only=True):
    """A rank of a job whose ranks train apart.

    `rounds` are those that it merged, `version` is that of the outer weights that it was shown (the least of all
    shards), `wait_ratio` the part of its time for which it waits for rounds.
    """

    rank: Count
    rounds: Count
    version: Count
    wait_ratio: Number


class ProgressDocument(msgspec.Struct, kw_only=True):
    """How far an attempt has come.

    All is null but `attempt` and `source` where nothing was reported and there is no time limit.
    """

    attempt: Count
    ratio: Number | None = None
    remaining_seconds: Seconds | None = None
    remaining_seconds_low: Seconds | None = None
    remaining_seconds_high: Seconds | None = None
    source: Annotated[str, one_of("steps", "epochs", "loss", "time_limit", "unknown")] = "unknown"
    rank: Count | None = None
    step: Number | None = None
    samples: Number | None = None
    epoch: Number | None = None
    total_steps: Number | None = None
    total_epochs: Number | None = None
    target_loss: Number | None = None
    loss: Number | None = None
    grad_noise: Number | None = None
    global_batch: Number | None = None
    data_wait: Number | None = None
    step_seconds: Seconds | None = None
    samples_per_second: Number | None = None
    reported_at: Time | None = None
    oddities: dict[str, Count] | None = None
    problem: str | None = None
    learners: list[LearnerDocument] | None = None


class NodeReport(ProgressDocument, kw_only=True, omit_defaults=True):
    """What an agent tells others of what a task told it, without what it did not tell."""

    job_id: JobIdText


class SpeedDocument(msgspec.Struct, kw_only=True):
    """The speed of a job in one size."""

    ranks: Count
    nodes: Count
    step_seconds: Seconds
    samples_per_second: Number
    source: Annotated[str, one_of("measured", "fitted")]
    is_current: bool


class ModelDocument(msgspec.Struct, kw_only=True):
    """What the swarm believes of a job that takes several sizes; the noise is of the largest batch measured."""

    global_batch: Count
    speed: list[SpeedDocument]
    speed_error_ratio: Number
    grad_noise: Number | None
    remaining_steps: Number | None
    remaining_error_ratio: Number | None
    warmup_seconds: Seconds | None
    is_prior: bool


class OutlookDocument(msgspec.Struct, kw_only=True):
    """What is expected of a job: start, end, whether that is by its deadline, and whether it is served fairly."""

    starts_at: Time | None
    starts_at_earliest: Time | None
    starts_at_latest: Time | None
    ends_at: Time | None
    ends_at_earliest: Time | None
    ends_at_latest: Time | None
    deadline: Annotated[str, value_of("Prospect")] | None
    ranks_least: Count | None
    rho: Number | None
    problem: str


class JobDocument(msgspec.Struct, kw_only=True):
    """A job by its record, or by the card that gossip has of it; then what cards do not tell is null."""

    api_version: Version = API_VERSION
    id: JobIdText
    handle: str
    name: str
    user: str
    queue: str
    priority: int
    state: Annotated[str, value_of("JobState")]
    phase: Annotated[str, value_of("StartPhase")]
    reason: str
    end_reason: Annotated[str, value_of("EndReason")] | None
    exit_code: int | None
    signal: Count | None
    shell_exit_code: Count | None
    submitted_at: Time
    started_at: Time | None
    ended_at: Time | None
    elapsed_seconds: Seconds | None
    queued_seconds: Seconds | None
    gpus: Count
    gpus_per_rank: Count
    ranks: Count
    ranks_most: Count | None
    world_size: Count | None
    nodes: list[JobNodeDocument]
    groups: list[GroupDocument] | None = None
    world: WorldDocument | None
    attempt: Count
    epoch: Count
    version: Count | None
    shepherd: str
    holders: list[str] | None
    leaving_holders: list[str] | None
    survives_deaths: Count | None
    has_majority: bool | None
    is_forced: bool | None
    restarts: Count | None
    preemptions: Count | None
    rescales: Count | None
    rescalings: list[RescalingDocument] | None
    paused_seconds: Seconds | None = None
    paused_ratio: Number | None = None
    pause_budget_ratio: Number | None = None
    leftovers: list[LeftoverDocument] | None
    checkpoint: CheckpointDocument | None
    progress: ProgressDocument | None
    model: ModelDocument | None = None
    size_reason: str | None = None
    outlook: OutlookDocument | None = None
    files_on: list[str] | None = None
    attained_gpu_seconds: Seconds
    spec: Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "JobSpec"})] | None
    detail: str | None
    failed_node: str | None
    failed_rank: Count | None
    failed_group: str | None = None
    relaunches: Count | None
    source: Annotated[str, one_of("record", "card")]
    as_of: Time
    staleness_seconds: Seconds


class SubmittedJobDocument(JobDocument, kw_only=True):
    """A job that was submitted, or would be (`dry_run`); `swarm_gpus` counts the GPUs of the swarm."""

    was_known: bool
    dry_run: bool
    swarm_gpus: Count = 0


class NodeJobs(msgspec.Struct, kw_only=True):
    """What an agent tells others of jobs: at most a page of them, with the keys that were asked for.

    `others` names all other matches by the tails of their ids.
    """

    items: list[dict[str, Any]] = []
    others: str = ""
    is_cut: bool = False
    reports: list[NodeReport] = []
    tasks: list[TaskDocument] = []


class NodePart(msgspec.Struct, kw_only=True):
    """What an agent tells others of a job on its node."""

    tasks: list[TaskDocument] = []
    reports: list[NodeReport] = []
    has_files: bool = False


class WaitDocument(msgspec.Struct, kw_only=True):
    """A job, and whether it came to what was waited for."""

    api_version: Version = API_VERSION
    met: bool
    job: JobDocument


class NeedsDocument(msgspec.Struct, kw_only=True):
    """What a job asks for."""

    ranks: Count
    ranks_most: Count
    gpus_per_rank: Count
    gpus: Count
    cpus_per_rank: Count
    memory_bytes_per_rank: Count
    gpu_memory_bytes: Count
    gpu_type: str
    require: list[str] = []


class FreeDocument(msgspec.Struct, kw_only=True):
    """What is free on the nodes that a job may use."""

    gpus: Count
    total_gpus: Count
    nodes: Count


class VerdictDocument(msgspec.Struct, kw_only=True):
    """A node: how many ranks of a job fit there now, and what stands against more."""

    node: str
    fits_ranks: Count
    obstacle: str


class JobAheadDocument(msgspec.Struct, kw_only=True):
    """A waiting job that the policy places before another."""

    job_id: JobIdText
    id: JobIdText
    handle: str
    ranks: Count
    gpus: Count
    reason: str
    name: str
    user: str


class TrailDocument(msgspec.Struct, kw_only=True):
    """What a job's shepherd was told, by whom, and the changes of the record that followed."""

    at: Time
    told: str
    by: str
    changes: list[str]


class WhyDocument(msgspec.Struct, kw_only=True):
    """Why a job waits, or has what it has."""

    api_version: Version = API_VERSION
    job_id: JobIdText
    handle: str
    state: Annotated[str, value_of("JobState")]
    summary: str
    policy: str
    needs: NeedsDocument
    needs_text: str
    free: FreeDocument
    free_text: str
    nodes: list[VerdictDocument]
    ahead: list[JobAheadDocument]
    ahead_count: Count
    position: Count
    job_reason: str
    sentences: list[str]
    trail: list[TrailDocument] = []
    as_of: Time
    staleness_seconds: Seconds
    progress: ProgressDocument | None
    model: ModelDocument | None
    outlook: OutlookDocument | None = None
