"""What the API needs of the agent: the facade it calls, and snapshots of its core.

`swarm_agent.agent.Agent` is an `AgentPort`; `swarm_agent.http.snapshot.Snapshot` has the `Facts` of one.  Tests hand in
small implementations of both.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from swarm_agent.config import AgentConfig
from swarm_agent.doctor import Diagnosis
from swarm_agent.eventlog import EventLog
from swarm_agent.http.problem import Problem, from_refusal
from swarm_agent.readiness import Readiness
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.supervision.logs import LogStore
from swarm_agent.telemetry import GpuReading
from swarmsched.commands import Command, Refused, Reply
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.record import NodeStatus
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.task import TaskStatus
from swarmsched.view import JobView, PolicySetting

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU of this very node: its last reading, and what the ledger says of it.

    `booking` is held, leased or draining, with its job, or None.
    """

    node: NodeId
    reading: GpuReading
    booking: str | None = None
    job_id: JobId | None = None


class Facts(Protocol):
    """Cheap read-only snapshots, taken between two steps of the core."""

    def members(self) -> Sequence[MemberView]:
        """Every known member, this agent included."""

    def member(self, name: NodeId) -> MemberView | None:
        """One of `members`."""

    def nodes(self) -> Sequence[NodeStatus]:
        """The node records that have arrived, this agent's included (age 0)."""

    def node(self, name: NodeId) -> NodeStatus | None:
        """One of `nodes`."""

    def records(self) -> Mapping[JobId, JobRecord]:
        """Records of jobs that this agent shepherds or holds."""

    def record(self, job_id: JobId) -> JobRecord | None:
        """One of `records`."""

    def is_over(self, job_id: JobId) -> bool:
        """True for a job that has ended and of which this agent keeps no record any more."""

    def is_shepherd(self, job_id: JobId) -> bool:
        """True when this agent acts for the job."""

    def cards(self) -> Sequence[JobView]:
        """Live jobs that other agents shepherd, by their gossiped cards; `written_s` counts from now: minus the age."""

    def places(self) -> Mapping[JobId, Location]:
        """Location entries, ended jobs included; decoded one by one, when they are looked at."""

    def setting(self) -> tuple[PolicySetting, int]:
        """The swarm-wide setting in force and its version."""

    def why(self, job_id: JobId) -> dict[str, Any]:
        """The keys of the why document that the policy supplies; the job's record is here."""

    def gpus(self) -> Sequence[GpuFacts]:
        """The GPUs of this node."""

    def tasks(self) -> Sequence[TaskStatus]:
        """The tasks of this node."""

    @property
    def store_id(self) -> int:
        """Identity of this agent's database, by which it can be a holder."""

    def telemetry(self) -> tuple[str, str]:
        """How far the GPU readings can be trusted: a word and a sentence."""

    def diagnoses(self) -> Sequence[Diagnosis]:
        """What the agent finds wrong with its own machine and its neighbours."""


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
    def logs(self) -> LogStore:
        """Output of tasks."""

    @property
    def blobs(self) -> BlobStore:
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


async def commanded(agent: AgentPort, command: Command, kind: type[R], prefix: str = "") -> R:
    """The core's reply; `Problem` where it refuses, its pointers with the prefix before them."""
    reply = await agent.command(command)
    if isinstance(reply, Refused):
        raise from_refusal(reply, prefix)
    if not isinstance(reply, kind):
        raise Problem("internal", f"the core answered {type(command).__name__} with {type(reply).__name__}")
    return reply
