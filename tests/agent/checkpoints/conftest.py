"""Agents that run real tasks and know one another."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from swarmsched.effects import StartTask
from swarmsched.task import TaskOrder
from tests.agent.supervision.testing import Bench, Network, make_order


class Rank:
    """A running task, and a connection of a rank of it to its agent."""

    def __init__(self, bench: Bench, order: TaskOrder, env: dict[str, str]) -> None:
        self.bench, self.order, self.env = bench, order, env
        self.folder = Path(env["SWARM_CHECKPOINT_DIR"])

    async def ask(self, name: object, **more) -> dict:
        """One request on a connection of its own."""
        reader, writer = await asyncio.open_unix_connection(self.env["SWARM_TASK_SOCKET"])
        request = {"v": 1, "token": self.env["SWARM_TASK_TOKEN"], "type": "checkpoint", "name": name} | more
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            return json.loads(await reader.readline())
        finally:
            writer.close()

    def write(self, name: str, content: bytes = b"weights") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


class Swarm:
    """Benches on one network, by name."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.net = Network()

    async def node(self, name: str, **settings) -> Bench:
        bench = Bench(self._folder / name, node=name, net=self.net, **settings)
        return await self._stack.enter_async_context(bench)

    async def start(self, bench: Bench, order: TaskOrder | None = None, **spec) -> Rank:
        """A task that runs until the test ends."""
        order = order or make_order("sh", "-c", "env -0; echo; exec sleep 600", node=bench.node, **spec)
        bench.runner.perform(StartTask(order, ()))
        output = await bench.wait_for_output(order, b"\n")
        entries = output.decode().split("\0")[:-1]
        return Rank(bench, order, dict(entry.split("=", 1) for entry in entries))


@pytest.fixture
async def swarm(tmp_path: Path):
    async with AsyncExitStack() as stack:
        yield Swarm(tmp_path, stack)
