"""What the API needs of the agent: the facade it calls, and facts about the swarm as plain values.

`swarm_agent.agent.Agent` is an `AgentPort`; `swarm_agent.http.snapshot.Snapshot` turns the core's snapshots into
`Facts`.  Tests hand in small implementations of both.
"""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swarm_agent.config import AgentConfig
from swarm_agent.eventlog import EventLog
from swarm_agent.readiness import Readiness
from swarm_agent.supervision.logs import LogRecord
from swarmsched.api import JobState
from swarmsched.commands import Command, Reply
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.resources import Gpu
from swarmsched.view import JobView, PolicySetting


@dataclass(frozen=True, slots=True)
class Member:
    """One member as this agent believes it to be.  `since_s` is how long it has had this status."""

    name: NodeId
    address: Address
    status: str  # alive, suspect, failed, left or conflict
    generation: int
    incarnation: int
    version: str
    since_s: float


@dataclass(frozen=True, slots=True)
class GpuGroupFacts:
    """Devices of one kind on a node."""

    model: str
    memory_bytes: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node's gossiped record, `age_s` seconds old.  It counts GPUs and does not name them."""

    name: NodeId
    age_s: float
    groups: tuple[GpuGroupFacts, ...]
    free_cpus: int
    cpu_count: int
    free_memory_bytes: int
    memory_bytes: int
    is_draining: bool = False
    drain_reason: str = ""
    is_disk_stalled: bool = False
    cpu_utilisation_ratio: float | None = None
    gpu_utilisation_ratio: float | None = None
    unhealthy_gpus: int = 0
    foreign_gpus: int = 0
    stale_gpus: int = 0
    is_witness: bool = False
    zone: str = ""  # of nodes that may fail together; empty: not told
    store_id: int = 0  # identity of its database; 0: not told

    @property
    def total_gpus(self) -> int:
        """All devices, usable or not."""
        return sum(group.total for group in self.groups)

    @property
    def free_gpus(self) -> int:
        """Devices that could be given now."""
        return sum(group.free for group in self.groups)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU of this very node: the device, its last reading, and what the ledger says of it.

    `booking` is held, leased or draining, with its job, or None.  Readings that NVML does
    not give are None.
    """

    gpu: Gpu
    booking: str | None = None
    job_id: JobId | None = None
    age_s: float | None = None
    utilisation_ratio: float | None = None
    memory_used_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[str, ...] = ()  # a sentence for each


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """A job's part on this very node.  Paused: frozen, because this node has lost contact with the job's holders."""

    job_id: JobId
    attempt: int
    stage: str  # ordered, staged, launched, started or exited
    is_paused: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job's record can be found."""

    shepherd: NodeId
    holders: tuple[NodeId, ...]
    state: JobState


class Finding(Protocol):
    """One check of `swarm_agent.doctor`: `status` is ok, warning or failed."""

    @property
    def name(self) -> str:
        """What was looked at."""

    @property
    def status(self) -> str:
        """ok, warning or failed."""

    @property
    def detail(self) -> str:
        """What was seen."""

    @property
    def remedy(self) -> str:
        """What to do; empty when nothing is wrong."""


class Facts(Protocol):
    """Cheap read-only snapshots, taken between two steps of the core."""

    def members(self) -> tuple[Member, ...]:
        """Every known member, this agent included."""

    def member(self, name: NodeId) -> Member | None:
        """One of `members`."""

    def nodes(self) -> tuple[NodeFacts, ...]:
        """The node records that have arrived, this agent's included (age 0)."""

    def node(self, name: NodeId) -> NodeFacts | None:
        """One of `nodes`."""

    def records(self) -> Mapping[JobId, JobRecord]:
        """Records of jobs that this agent shepherds or holds."""

    def record(self, job_id: JobId) -> JobRecord | None:
        """One of `records`."""

    def is_over(self, job_id: JobId) -> bool:
        """True for a job that has ended and of which this agent keeps no record any more."""

    def is_shepherd(self, job_id: JobId) -> bool:
        """True when this agent acts for the job."""

    def cards(self) -> tuple[JobView, ...]:
        """Live jobs that other agents shepherd, by their gossiped cards; `written_s` counts from now: minus the age."""

    def places(self) -> Mapping[JobId, Place]:
        """Location entries, ended jobs included."""

    def setting(self) -> tuple[PolicySetting, int]:
        """The swarm-wide setting in force and its version."""

    def why(self, job_id: JobId) -> dict[str, Any]:
        """The keys of the why document that the policy supplies; the job's record is here."""

    def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs of this node."""

    def tasks(self) -> tuple[TaskFacts, ...]:
        """The tasks of this node."""

    @property
    def store_id(self) -> int:
        """Identity of this agent's database, by which it can be a holder."""

    def telemetry(self) -> tuple[str, str]:
        """How far the GPU readings can be trusted: a word and a sentence."""

    def diagnoses(self) -> Sequence[Finding]:
        """What the agent finds wrong with its own machine and its neighbours."""


class Logs(Protocol):
    """The output of tasks on this node; `swarm_agent.supervision.logs.LogStore`."""

    def attempts(self, job_id: JobId) -> tuple[int, ...]:
        """Attempts that have logs here."""

    def ranks(self, job_id: JobId, attempt: int) -> tuple[int, ...]:
        """Ranks of the attempt that have a log here."""

    def read(
        self, job_id: JobId, attempt: int, rank: int, cursor: str = "", limit_bytes: int = 2**20
    ) -> tuple[tuple[LogRecord, ...], str]:
        """Records after the cursor and the next cursor."""

    def follow(self, job_id: JobId, attempt: int, rank: int, cursor: str = "") -> AsyncIterator[LogRecord]:
        """Records after the cursor, then new ones; ends once the task has exited and all was read."""

    def tail(self, job_id: JobId, attempt: int, rank: int, lines: int) -> tuple[tuple[LogRecord, ...], str]:
        """Where the last lines begin: what the record that they begin in has of them, and the cursor after it."""

    def since(self, job_id: JobId, attempt: int, rank: int, utc_s: float) -> str:
        """Cursor of the first record at or after a time."""


class Blobs(Protocol):
    """Files by content; `swarm_agent.staging.blobs.BlobStore`."""

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Those that are not here."""

    async def put(self, digest: str, chunks: AsyncIterable[bytes]) -> int:
        """Store a stream whose SHA-256 is `digest`."""

    async def put_all(self, contents: Mapping[str, bytes]) -> None:
        """Store small blobs by digest."""

    def size_bytes(self, digest: str) -> int | None:
        """Size of a blob, or None when it is not here."""


class AgentPort(Protocol):
    """The facade of the agent."""

    @property
    def config(self) -> AgentConfig:
        """The agent's settings."""

    @property
    def events(self) -> EventLog:
        """This agent's part of the cluster log."""

    @property
    def readiness(self) -> Readiness:
        """The checks behind /readyz."""

    @property
    def logs(self) -> Logs:
        """Output of tasks."""

    @property
    def blobs(self) -> Blobs:
        """Files by content."""

    def on_stepped(self, callback: Callable[[], None]) -> None:
        """Call back after each turn in which the core took in something; must be cheap and must not raise."""

    async def command(self, command: Command, timeout_s: float = 10.0) -> Reply:
        """Ask the core."""

    async def query(
        self, node_id: NodeId, kind: str, payload: dict[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Ask a peer; `AgentUnreachable` or `RemoteProtocolError`."""

    def on_query(self, kind: str, handler: Callable[[NodeId, dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        """Answer such queries."""

    def query_stream(self, node_id: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask a peer for a stream."""

    def on_stream(self, kind: str, handler: Callable[[NodeId, dict[str, Any]], AsyncIterator[dict[str, Any]]]) -> None:
        """Answer such stream queries."""
