"""Events: facts that a driver tells the core.  All are past tense; the core never asks for them synchronously."""

from typing import Any

from swarmsched.commands import Command
from swarmsched.estimate import Estimate
from swarmsched.fields import Job, Value
from swarmsched.ids import Address, NodeId
from swarmsched.resources import NodeResources
from swarmsched.shards import AggregatorPlace, ShardOrder, ShardReading
from swarmsched.task import OfAttempt, OfTask, RankExit, TaskFailure, TaskOrder, TaskStatus
from swarmsched.view import Plan
from swarmsched.world import Worker


class TimerFired(Value):
    """The deadline that the machine had reported is reached (or passed, or is obsolete)."""


class DatagramReceived(Value):
    """A gossip packet that the transport has opened and authenticated."""

    source: Address
    payload: bytes


class DatagramSendFailed(Value):
    """The kernel refused to send (EPERM, ENETUNREACH, ENOBUFS...): counts as a failed probe."""

    destination: Address
    error: str


class PeerMessageReceived(Value):
    """A decoded, authenticated message of the peer channel.  May be late, doubled or reordered."""

    sender: NodeId
    message: Any


class PeerSendFailed(Value):
    """A peer message was certainly not, or possibly not, delivered."""

    recipient: NodeId
    message: Any
    error: str


class LoopLagged(Value):
    """The event loop was late by this much; lowers our trust in our own accusations."""

    lag_s: float


class WorkLagged(Value):
    """Events waited that long for their turn, or effects for the disk: whatever we begin now will be late as well."""

    lag_s: float


class ResourcesRead(Value):
    """Telemetry: what this node has and how it is.  Load figures are averages over 30 s."""

    resources: NodeResources
    gpu_utilisation_ratio: float = 0.0
    gpu_memory_used_bytes: int = 0
    cpu_utilisation_ratio: float = 0.0


class ClientCommandReceived(Value):
    """A client asks; answered by exactly one `ReplyToClient` with the same id."""

    request_id: int
    command: Command
    now_utc_s: float


class PlanComputed(Value):
    """The planner's answer."""

    plan: Plan


class PlanFailed(Value):
    """The planner raised or was killed; the core plans again at the next change."""

    version: int
    error: str


class RendezvousBound(OfTask):
    """The port is bound and listening until the task starts or `ReleaseRendezvous`."""

    host: str
    port: int


class RendezvousFailed(OfTask):
    """No port of the range could be bound."""

    error: str


class TaskPhaseChanged(OfTask):
    """Staging moved on: a `StartPhase` value."""

    phase: str


class TaskStaged(OfTask):
    """Files, environment and reach of rank 0 are in order."""


class TaskStageFailed(OfTask):
    """Staging failed; nothing runs."""

    failure: TaskFailure
    detail: str


class TaskStarted(OfTask):
    """All ranks of the task were exec'ed."""

    now_utc_s: float


class TaskFreezeChanged(OfTask):
    """The shim froze the task's ranks because their time was over, or let them go on."""

    is_frozen: bool


class WorkerTold(OfTask):
    """The worker of an elastic part has said something new of itself."""

    worker: Worker


class RankExited(OfTask):
    """One rank ended; others may still run."""

    exit: RankExit


class TaskExited(OfTask):
    """No process of the task is left.  `failure` tells why it never started, if so."""

    exits: tuple[RankExit, ...]
    failure: TaskFailure = TaskFailure.NONE
    detail: str = ""


class DiskChanged(Value):
    """This node's disk takes no writes any more, or does again."""

    is_writing: bool


class DiskFilled(Value):
    """This node's disk has come to be nearly full, in words for people, or has room again."""

    shortage: str = ""


class FilesAway(Value):
    """Live jobs with records on this node whose shipped files no agent that can be reached has; told again and again.

    A job that is named no more can be started again.
    """

    jobs: tuple[Job, ...] = ()


class FoundTask(Value):
    """A task on this node's disk, with the order that it was started by and the UUIDs of the GPUs that it was given."""

    status: TaskStatus
    order: TaskOrder
    gpus: tuple[str, ...]


class TasksFound(Value):
    """At start-up: every task whose shim or exit record was found on this node's disk."""

    tasks: tuple[FoundTask, ...]


TaskFact = (
    TaskPhaseChanged
    | TaskStaged
    | TaskStageFailed
    | TaskStarted
    | TaskFreezeChanged
    | WorkerTold
    | RankExited
    | TaskExited
)
"""What the runner tells of one task."""


class TaskEstimated(OfAttempt):
    """What the ranks of a task have reported of their training so far, as a card would tell it."""

    estimate: Estimate
    global_batch: int = 0  # with which they train; 0: they have not told


class ShardWanted(OfTask):
    """A rank asks to have a range of its job's parameters hosted until its task is over, here or elsewhere."""

    order: ShardOrder


class ShardGivenUp(OfTask):
    """A rank wants the range that begins there hosted no more."""

    start: int


class AggregationRead(Value):
    """What aggregation may be given here, where the aggregator of this node is, and how its shards are.

    `memory_bytes` is what is available, and what the aggregator has taken of it; 0 of a node that gives nothing.
    """

    place: AggregatorPlace = AggregatorPlace()
    memory_bytes: int = 0
    shards: tuple[ShardReading, ...] = ()


TaskEvent = RendezvousBound | RendezvousFailed | TaskFact | TasksFound | TaskEstimated

Event = (
    TimerFired
    | DatagramReceived
    | DatagramSendFailed
    | PeerMessageReceived
    | PeerSendFailed
    | LoopLagged
    | WorkLagged
    | DiskChanged
    | DiskFilled
    | FilesAway
    | ResourcesRead
    | ClientCommandReceived
    | PlanComputed
    | PlanFailed
    | TaskEvent
    | ShardWanted
    | ShardGivenUp
    | AggregationRead
)
