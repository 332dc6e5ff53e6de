"""Events: facts that a driver tells the core.  All are past tense; the core never asks for them synchronously."""

from dataclasses import dataclass

from swarmsched.commands import Command
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.resources import NodeResources
from swarmsched.task import RankExit, TaskFailure, TaskStatus
from swarmsched.view import Plan


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The deadline that the machine had reported is reached (or passed, or is obsolete)."""


@dataclass(frozen=True, slots=True)
class DatagramReceived:
    """A gossip packet that the transport has opened and authenticated."""

    source: Address
    payload: bytes


@dataclass(frozen=True, slots=True)
class DatagramSendFailed:
    """The kernel refused to send (EPERM, ENETUNREACH, ENOBUFS...): counts as a failed probe."""

    destination: Address
    error: str


@dataclass(frozen=True, slots=True)
class PeerMessageReceived:
    """A decoded, authenticated message of the peer channel.  May be late, doubled or reordered."""

    sender: NodeId
    message: object


@dataclass(frozen=True, slots=True)
class PeerSendFailed:
    """A peer message was certainly not, or possibly not, delivered."""

    recipient: NodeId
    message: object
    error: str


@dataclass(frozen=True, slots=True)
class LoopLagged:
    """The event loop was late by this much; lowers our trust in our own accusations."""

    lag_s: float


@dataclass(frozen=True, slots=True)
class ResourcesRead:
    """Telemetry: what this node has and how it is.  Load figures are averages over 30 s."""

    resources: NodeResources
    gpu_utilisation_ratio: float = 0.0
    gpu_memory_used_bytes: int = 0
    cpu_utilisation_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientCommandReceived:
    """A client asks; answered by exactly one `ReplyToClient` with the same id."""

    request_id: int
    command: Command
    now_utc_s: float


@dataclass(frozen=True, slots=True)
class PlanComputed:
    """The planner's answer."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """The planner raised or was killed; the core plans again at the next change."""

    version: int
    error: str


@dataclass(frozen=True, slots=True)
class RendezvousBound:
    """The port is bound and listening until the task starts or `ReleaseRendezvous`."""

    job_id: JobId
    attempt: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RendezvousFailed:
    """No port of the range could be bound."""

    job_id: JobId
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class TaskPhaseChanged:
    """Staging moved on: a `StartPhase` value."""

    job_id: JobId
    attempt: int
    phase: str


@dataclass(frozen=True, slots=True)
class TaskStaged:
    """Files, environment and reach of rank 0 are in order."""

    job_id: JobId
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskStageFailed:
    """Staging failed; nothing runs."""

    job_id: JobId
    attempt: int
    failure: TaskFailure
    detail: str


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """All ranks of the task were exec'ed."""

    job_id: JobId
    attempt: int
    now_utc_s: float


@dataclass(frozen=True, slots=True)
class TaskFreezeChanged:
    """The shim froze the task's ranks because their time was over, or let them go on."""

    job_id: JobId
    attempt: int
    is_frozen: bool


@dataclass(frozen=True, slots=True)
class RankExited:
    """One rank ended; others may still run."""

    job_id: JobId
    attempt: int
    exit: RankExit


@dataclass(frozen=True, slots=True)
class TaskExited:
    """No process of the task is left.  `failure` tells why it never started, if so."""

    job_id: JobId
    attempt: int
    exits: tuple[RankExit, ...]
    failure: TaskFailure = TaskFailure.NONE
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TasksFound:
    """At start-up: every task whose shim or exit record was found on this node's disk."""

    tasks: tuple[TaskStatus, ...]


Event = (
    TimerFired
    | DatagramReceived
    | DatagramSendFailed
    | PeerMessageReceived
    | PeerSendFailed
    | LoopLagged
    | ResourcesRead
    | ClientCommandReceived
    | PlanComputed
    | PlanFailed
    | RendezvousBound
    | RendezvousFailed
    | TaskPhaseChanged
    | TaskStaged
    | TaskStageFailed
    | TaskStarted
    | TaskFreezeChanged
    | RankExited
    | TaskExited
    | TasksFound
)
