"""People and agents have doors of their own where the configuration says so; without a word of it one serves both."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swarm_agent.agent import Agent
from swarm_agent.security import generate_key
from swarm_agent.startup import running_agent
from swarm_client.sdk import SwarmClient
from swarmsched.errors import ConfigError
from swarmsched.ids import address_text
from tests.agent.testing import agent_config, free_port, wait_until

PEER_PATH = "/peer/v1/query/jobs"


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts whole agents in this process, on loopback, with one key."""
    for secret in ("key", "token"):
        (tmp_path / secret).touch(0o600)
        (tmp_path / secret).write_text(generate_key())
    async with AsyncExitStack() as stack:

        async def start_one(name: str, **settings: Any) -> Agent:
            secrets = {"cluster_key_file": tmp_path / "key", "token_file": tmp_path / "token"}
            config = agent_config(tmp_path, name, **{**secrets, **settings})
            return await stack.enter_async_context(running_agent(config))

        yield start_one


@pytest.fixture
async def http(tmp_path: Path, start: Any) -> AsyncIterator[aiohttp.ClientSession]:
    token = (tmp_path / "token").read_text().strip()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        yield session


async def asked(http: aiohttp.ClientSession, method: str, address: tuple[str, int], path: str) -> tuple[int, Any]:
    async with http.request(method, f"http://{address_text(address)}{path}") as response:
        text = await response.text()
        return response.status, json.loads(text) if "json" in response.content_type else text


async def test_each_door_serves_whom_it_is_for(start: Any, http: aiohttp.ClientSession) -> None:
    people = ("127.0.0.1", free_port())
    agent = await start("a", people_listen=people)
    assert (await asked(http, "GET", people, "/v1/status"))[0] == 200
    assert (await asked(http, "GET", people, "/livez"))[0] == 200
    for path in ("/v1/status", "/livez", "/metrics", "/", "/nowhere"):
        status, problem = await asked(http, "GET", agent.config.listen, path)
        assert (status, problem["code"]) == (421, "wrong_door")
        assert f"is at {address_text(people)}" in problem["detail"]
    assert (await asked(http, "POST", agent.config.listen, PEER_PATH))[0] == 400, "it lacks the seal"
    status, problem = await asked(http, "POST", people, PEER_PATH)
    assert (status, problem["code"]) == (404, "not_found")
    async with http.get(f"http://{address_text(people)}/peer/v1/messages") as response:
        assert response.status == 404


async def test_without_a_door_of_their_own_people_ask_where_agents_do(start: Any, http: aiohttp.ClientSession) -> None:
    agent = await start("a")
    assert (await asked(http, "GET", agent.config.listen, "/v1/status"))[0] == 200
    assert (await asked(http, "POST", agent.config.listen, PEER_PATH))[0] == 400
    _, members = await asked(http, "GET", agent.config.listen, "/v1/members")
    own = address_text(agent.config.listen)
    assert [(each["address"], each["peer_address"]) for each in members["items"]] == [(own, own)]


async def test_members_are_told_with_the_door_that_people_use_and_clients_go_on_there(
    start: Any, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    people = ("127.0.0.1", free_port())
    first = await start("a")
    second = await start("b", people_listen=people, seeds=(first.config.listen,))
    expected = {
        "a": (address_text(first.config.listen), address_text(first.config.listen)),
        "b": (address_text(people), address_text(second.config.listen)),
    }

    async def told(path: str) -> Any:
        return (await asked(http, "GET", first.config.listen, path))[1]

    async def members() -> dict[str, tuple[str, str]]:
        return {each["name"]: (each["address"], each["peer_address"]) for each in (await told("/v1/members"))["items"]}

    await wait_until(first.readiness.is_ready)
    while await members() != expected:
        pass
    targets = await told("/v1/members/prometheus")
    assert {each["labels"]["swarm_node"]: each["targets"] for each in targets} == {
        name: [address] for name, (address, _) in expected.items()
    }
    async with SwarmClient([address_text(first.config.listen)], token_file=tmp_path / "token") as swarm:
        await swarm._learn()
        assert people in swarm._addresses
        assert second.config.listen not in swarm._addresses
    status, job = await asked(http, "GET", people, "/v1/nodes/a")
    assert (status, job["gpus"] is not None) == (200, True), "agents ask each other through the door of agents"


async def test_a_unix_socket_is_a_door_of_people(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # by an earlier life
    agent = await start("a", people_socket=path)
    assert path.stat().st_mode & 0o777 == 0o666
    token = agent.secrets.tokens[0]
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
        async with session.get("http://localhost/v1/status") as response:
            assert response.status == 401
        async with session.get("http://localhost/v1/status", headers={"Authorization": f"Bearer {token}"}) as response:
            assert response.status == 200
        async with session.post(f"http://localhost{PEER_PATH}") as response:
            assert response.status == 401
    with pytest.raises(ConfigError, match="another agent listens there"):
        await start("b", people_socket=path)


async def test_a_unix_socket_is_gone_with_its_agent(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    async with running_agent(agent_config(tmp_path, people_socket=path)):
        assert path.is_socket()
    assert not path.exists()


async def test_a_door_that_is_taken_is_refused_by_its_setting(start: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError) as refusal:
            await start("a", people_listen=taken.getsockname())
    assert refusal.value.key == "people_listen"
    assert "or set another people_listen" in refusal.value.remedy
