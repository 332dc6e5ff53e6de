"""Two agents without cores, served on loopback by the real application, and a client for each."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from swarm_agent.http.server import build_api
from swarm_agent.task.shim import LogWriter
from swarmsched.ids import AttemptKey, JobId
from tests.agent.http.testing import OLD_TOKEN, TOKEN, AgentWithoutCore, SwarmInOneProcess

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Desk:
    """An agent and the way to talk to it."""

    agent: AgentWithoutCore
    client: Any

    async def ask(self, method: str, path: str, **more: Any) -> ClientResponse:
        """A request with the token."""
        headers = {**HEADERS, **more.pop("headers", {})}
        return await self.client.request(method, path, headers=headers, **more)

    async def get(self, path: str, status: int = 200, **more: Any) -> Any:
        """The document of a GET."""
        response = await self.ask("GET", path, **more)
        assert response.status == status, await response.text()
        return await response.json(content_type=None)

    async def post(self, path: str, body: object = None, status: int = 200, **more: Any) -> Any:
        """The document of a POST."""
        response = await self.ask("POST", path, json=body, **more)
        assert response.status == status, await response.text()
        return await response.json(content_type=None)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failovers of tests take milliseconds."""
    monkeypatch.setattr("swarm_agent.http.jobs.FAILOVER_S", 1.0)
    monkeypatch.setattr("swarm_agent.http.jobs.FAILOVER_PAUSE_S", 0.02)
    monkeypatch.setattr("swarm_agent.http.reach.LOOK_S", 0.05)


@pytest.fixture
def swarm(tmp_path: Path) -> SwarmInOneProcess:
    return SwarmInOneProcess(tmp_path)


@pytest.fixture
async def desks(swarm: SwarmInOneProcess) -> AsyncIterator[dict[str, Desk]]:
    found: dict[str, Desk] = {}
    page = b"# HELP swarm_node_up 1.\n# TYPE swarm_node_up gauge\nswarm_node_up 1.0\n"
    for name in ("n1", "n2", "n3"):
        agent = swarm.add(name)
        app = build_api(agent, agent, (OLD_TOKEN, TOKEN), lambda accept: (page, "text/plain; version=0.0.4")).make_app()
        client = TestClient(TestServer(app))
        await client.start_server()
        found[name] = Desk(agent, client)
    yield found
    for desk in found.values():
        await desk.client.close()


@pytest.fixture
def n1(desks: dict[str, Desk]) -> Desk:
    return desks["n1"]


@pytest.fixture
def n2(desks: dict[str, Desk]) -> Desk:
    return desks["n2"]


@pytest.fixture
def n3(desks: dict[str, Desk]) -> Desk:
    return desks["n3"]


@dataclass
class Output:
    """Writes what a rank would."""

    agent: AgentWithoutCore

    def write(
        self, job_id: JobId, rank: int, data: bytes, *, kind: bytes = b"o", attempt: int = 1, at: float = 1.7e9
    ) -> None:
        folder = self.agent.logs.config.directory / job_id / str(attempt) / str(rank)
        writer = LogWriter(str(folder), 2**20, 2**16)
        writer.write(kind, data, at)
        writer.close()
        self.agent.logs.wake(AttemptKey(job_id, attempt))


@pytest.fixture
def output() -> type[Output]:
    return Output
