"""The agent: one node's core, its ports to the world, and the facade that HTTP, supervision and telemetry are given."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from swarm_agent.config import AgentConfig
from swarm_agent.driver import Driver
from swarm_agent.eventlog import EventLog
from swarm_agent.readiness import Readiness
from swarm_agent.security import Secrets
from swarmsched.commands import Command, Refused, Reply
from swarmsched.events import ClientCommandReceived, Event
from swarmsched.ids import Address, NodeId

if TYPE_CHECKING:
    from swarm_agent.staging.blobs import BlobStore
    from swarm_agent.supervision.logs import LogStore
    from swarm_agent.supervision.runner import TaskRunner
    from swarm_agent.telemetry import Telemetry
    from swarmsched.node import Node

COMMAND_TIMEOUT_S = 10.0
COMMANDS_LIMIT = 10_000  # waiting for their reply; beyond it new ones are refused

QueryHandler = Callable[[NodeId, dict[str, Any]], Awaitable[dict[str, Any]]]
StreamHandler = Callable[[NodeId, dict[str, Any]], AsyncIterator[dict[str, Any]]]

log = logging.getLogger("swarm.agent")


class Agent:
    """What the rooms of the agent share.  Everything here belongs to the event loop's thread."""

    config: AgentConfig
    node: "Node"
    events: EventLog
    tasks: "TaskRunner"
    logs: "LogStore"
    blobs: "BlobStore"
    telemetry: "Telemetry"
    readiness: Readiness
    driver: Driver
    secrets: Secrets
    started_utc_s: float

    def __init__(self, config: AgentConfig, secrets: Secrets) -> None:
        self.config = config
        self.secrets = secrets
        self.events = EventLog()
        self.readiness = Readiness()
        self.counters: Counter[str] = Counter()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._last_request_id = 0

    def now_s(self) -> float:
        """The monotonic clock that the core runs on; hand it to the node's snapshots."""
        return time.monotonic()

    def post(self, event: Event) -> None:
        """Hand an event to the core; only from the loop's thread."""
        self.driver.post(event)

    async def command(self, command: Command, timeout_s: float = COMMAND_TIMEOUT_S) -> Reply:
        """Ask the core; `Refused` with not_ready before anything happened, with unavailable when the outcome is open."""
        complaint = self.driver.barrier.complaint
        if complaint:
            return Refused(
                "not_ready", f"this agent's disk refuses to write: {complaint}", "free space, or ask another"
            )
        if len(self._replies) >= COMMANDS_LIMIT:
            return Refused("not_ready", f"{COMMANDS_LIMIT} commands wait already", "try again, or ask another agent")
        self._last_request_id += 1
        request_id = self._last_request_id
        reply = self._replies[request_id] = asyncio.get_running_loop().create_future()
        self.post(ClientCommandReceived(request_id, command, time.time()))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s; the outcome is unknown"
            return Refused("unavailable", problem, "repeat with the same ticket: it creates the job once")
        finally:
            del self._replies[request_id]

    def address_of(self, node_id: NodeId) -> Address | None:
        """Where a member listens, or None for a name that is not known."""
        raise NotImplementedError

    async def query(
        self, node_id: NodeId, kind: str, payload: dict[str, Any], timeout_s: float = COMMAND_TIMEOUT_S
    ) -> dict[str, Any]:
        """Ask a peer's handler of this kind.

        Raises `AgentUnreachable` when it cannot be reached in time, `RemoteProtocolError` when it does not understand
        or its handler failed.
        """
        raise NotImplementedError

    def on_query(self, kind: str, handler: QueryHandler) -> None:
        """Answer queries of this kind; one handler a kind."""
        raise NotImplementedError

    def query_stream(self, node_id: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask a peer for a stream of answers; close the iterator to end it.  Raises as `query` does."""
        raise NotImplementedError

    def on_stream(self, kind: str, handler: StreamHandler) -> None:
        """Answer stream queries of this kind; one handler a kind."""
        raise NotImplementedError
