"""Tools for tests and benchmarks of supervision: a runner with real shims, and peers that are in memory."""

import asyncio
import os
import random
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest.mock import patch

from swarm_agent.config import AgentConfig
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.fetch import StreamHandler
from swarm_agent.supervision.forkserver import ForkServer
from swarm_agent.supervision.logs import LogConfig, LogStore
from swarm_agent.supervision.runner import TaskRunner
from swarm_agent.task.account import JobAccounts
from swarmsched.api import JobSpec
from swarmsched.commands import CheckpointCommitted, Command, CommitCheckpoint, Reply
from swarmsched.errors import SwarmError
from swarmsched.events import AggregationRead, Event, TaskExited
from swarmsched.ids import JobId, NodeId, TaskKey, make_job_id
from swarmsched.resources import Gpu, Share
from swarmsched.task import TaskOrder, TaskStatus

E = TypeVar("E")
UNIT = Path(__file__).parents[3] / "ansible/roles/swarm_agent/templates/swarm-agent.service.j2"
DEADLINE_S = 40.0  # less than what a rank sleeps that has to be ended


class Network:
    """Agents that reach one another by a call."""

    def __init__(self) -> None:
        self.agents: dict[NodeId, LoneAgent] = {}


class LoneAgent:
    """The part of an agent that supervision sees, for one node."""

    def __init__(
        self, node_id: NodeId, data_dir: Path, logs: LogConfig | None = None, net: Network | None = None
    ) -> None:
        self.node_id = node_id
        self.logs = LogStore(logs or LogConfig(directory=data_dir / "logs"))
        self.blobs = BlobStore(data_dir / "blobs")
        self.blobs.load()
        self._net = net or Network()
        self._net.agents[node_id] = self
        self._handlers: dict[str, StreamHandler] = {}
        self.commands: list[Command] = []
        self.answer: Callable[[Command], Reply] = _commit
        self.ended: dict[JobId, float] = {}

    async def command(self, command: Command, timeout_s: float = DEADLINE_S) -> Reply:
        """What the core would be asked; `answer` tells what it says."""
        self.commands.append(command)
        return self.answer(command)

    def live_peers(self) -> list[NodeId]:
        """The other agents of the network."""
        return [node_id for node_id in self._net.agents if node_id != self.node_id]

    def ended_utc_s(self, job_id: JobId) -> float | None:
        """As set in `ended`."""
        return self.ended.get(job_id)

    def on_stream(self, kind: str, handler: StreamHandler) -> None:
        """Answer questions of this kind."""
        self._handlers[kind] = handler

    async def query_stream(self, node_id: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask another agent of the network."""
        if node_id not in self._net.agents:
            raise SwarmError(f"{node_id} does not answer")
        async for answer in self._net.agents[node_id]._handlers[kind](self.node_id, payload):
            yield answer


class ConfinedServer(ForkServer):
    """A fork server that, of root's powers, has no more than the role's unit leaves the agent."""

    def __init__(self, python: str, program: Path) -> None:
        super().__init__(python, program)
        setpriv = shutil.which("setpriv")
        if os.geteuid() == 0 and setpriv:
            (powers,) = re.findall("^CapabilityBoundingSet=(.*)$", UNIT.read_text(), re.MULTILINE)
            kept = ",".join(["-all", *(f"+{each.removeprefix('CAP_').lower()}" for each in powers.split())])
            self.command[:0] = [setpriv, "--no-new-privs", "--bounding-set", kept, "--"]


class Bench:
    """A runner on a folder, and the events it posted so far."""

    def __init__(
        self,
        data_dir: Path,
        *,
        node: str = "n1",
        logs: LogConfig | None = None,
        net: Network | None = None,
        accounts: JobAccounts | None = None,
        **settings: Any,
    ) -> None:
        self.node = NodeId(node)
        self.agent = LoneAgent(self.node, data_dir, logs, net)
        self.config = AgentConfig(name=self.node, data_dir=data_dir, **{"limit_tasks": False, **settings})
        self.runner = TaskRunner(self.config, self.config.fabric_host, self._post, self.agent, accounts)
        self.events: list[Event] = []
        self.found: tuple[TaskStatus, ...] = ()
        self._news = asyncio.Event()
        self.on_event: Callable[[Event], None] = lambda _: None

    async def __aenter__(self) -> Self:
        with patch("swarm_agent.supervision.runner.ForkServer", ConfinedServer):
            self.found = tuple(each.status for each in await self.runner.start())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what still runs, so that no test leaves a process behind."""
        pids = self.runner.processes()
        await self.runner.stop()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _post(self, event: Event) -> None:
        if isinstance(event, AggregationRead):
            return  # of no task, and at any time
        self.events.append(event)
        self.on_event(event)
        self._news.set()

    async def wait_for(self, kind: type[E], key: TaskKey | None = None, count: int = 1) -> E:
        """The `count`-th event of this kind (and task), once it is there."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self._news.clear()
                found = [event for event in self.events if isinstance(event, kind) and _concerns(event, key)]
                if len(found) >= count:
                    return found[count - 1]
                await self._news.wait()

    async def finish(self, order: TaskOrder) -> TaskExited:
        """Wait until the task has exited."""
        return await self.wait_for(TaskExited, order.key)

    async def wait_for_output(self, order: TaskOrder, text: bytes, rank: int = 0) -> bytes:
        """Follow the log until `text` is in it; what came so far."""
        seen = b""
        async with asyncio.timeout(DEADLINE_S):
            async for record in self.agent.logs.follow(order.job_id, order.attempt, rank):
                seen += record.data
                if text in seen:
                    return seen
        raise AssertionError(f"{text!r} did not come before the end of the log: {seen!r}")

    def output(self, order: TaskOrder, rank: int = 0) -> bytes:
        """Everything in a rank's log now."""
        pieces: list[bytes] = []
        cursor = ""
        while True:
            records, cursor = self.agent.logs.read(order.job_id, order.attempt, rank, cursor)
            if not records:
                return b"".join(pieces)
            pieces += [record.data for record in records]


def _commit(command: Command) -> Reply:
    """The core's answer when nothing is wrong."""
    assert isinstance(command, CommitCheckpoint)
    return CheckpointCommitted(command.checkpoint, epoch=1)


def make_order(
    *command: str,
    node: str = "n1",
    shares: tuple[Share, ...] | None = None,
    attempt: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    **spec: Any,
) -> TaskOrder:
    """An order for a fresh job; `spec` are fields of `JobSpec`."""
    placed = shares or (Share(NodeId(node), spec.get("ranks", 1)),)
    return TaskOrder(
        job_id=make_job_id(0.0, random.Random()),
        epoch=1,
        attempt=attempt,
        node=NodeId(node),
        spec=JobSpec(command=command, **spec),
        shares=placed,
        rendezvous_host=host,
        rendezvous_port=port,
    )


def make_gpu(index: int, *, is_simulated: bool = False) -> Gpu:
    """A device with a recognisable UUID."""
    return Gpu(f"GPU-{index:04d}", index, "Test-80G", 80 * 2**30, is_simulated=is_simulated)


def _concerns(event: object, key: TaskKey | None) -> bool:
    return key is None or getattr(event, "key", None) == key
