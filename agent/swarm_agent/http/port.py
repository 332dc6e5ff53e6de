"""What the API asks of the agent besides its facts: `swarm_agent.agent.Agent` is an `AgentPort`."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from swarm_agent.config import AgentConfig
from swarm_agent.eventlog import EventLog
from swarm_agent.http.problem import Problem, from_refusal
from swarm_agent.planner import Foreseen
from swarm_agent.readiness import Readiness
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.supervision.kept_work import KeptFolder
from swarm_agent.supervision.logs import LogStore
from swarmsched.api import JobSpec
from swarmsched.commands import Command, Refused, Reply
from swarmsched.estimate import SpeedQuestion, SpeedTable
from swarmsched.ids import JobId, NodeId
from swarmsched.view import JobView

R = TypeVar("R")


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

    def has_files(self, spec: JobSpec) -> bool:
        """True when all files of a job whose record is here are on this node."""

    async def left_behind(self, job_id: JobId) -> list[KeptFolder]:
        """Working folders of a job's attempts that are over, on this node."""

    def on_stepped(self, callback: Callable[[], None]) -> None:
        """Call back after each turn in which the core took in something; must be cheap and must not raise."""

    async def command(self, command: Command, timeout_s: float = 10.0) -> Reply:
        """Ask the core."""

    async def tabulate(self, question: SpeedQuestion) -> SpeedTable | None:
        """A job's speed by world size, from the planner; None where it does not tell in time."""

    async def foresee(self, wanted: Collection[JobId], more: Sequence[JobView] = ()) -> Foreseen | None:
        """What is expected of jobs; None where the planner does not tell in time."""

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
