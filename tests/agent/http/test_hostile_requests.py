"""Requests that no client of ours sends, as bytes on a socket: none is a fault of the agent's, whatever is in it."""

import asyncio
import logging
import os
import random
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, web, web_urldispatcher
from aiohttp.test_utils import TestClient, TestServer

from swarm_agent.http.server import build_api
from swarm_agent.transport import arrivals
from swarm_agent.transport.peer import PeerChannel
from swarm_agent.transport.rpc import PeerRpc
from swarmsched.ids import NodeId
from swarmsched.wire.sealing import INSTANCE_ID_BYTES, Keyring, Sealer
from tests.agent.http.testing import TOKEN, a_record, job_id

JOB = job_id(1)
METHODS = [*b"GET HEAD POST PUT DELETE PATCH OPTIONS TRACE CONNECT get \x8f".split(), b"G T"]
NASTY = [b"", b" ", b"\t", b"\x01", b"\x8f", b"\xff\xfe", b"\xc3\xa9", b"\xed\xa0\x80", b"x" * 5_000, b"9" * 40]
NASTY += rb'-1 0.0 1e999 NaN % %ff %00 %zz ..%2f.. {x} " [::1 http://[ a,b;c=d @last'.split()
NASTY += b"100-continue 100-\x8f chunked gzip websocket bytes=0-1 application/json;charset=\x8f".split()
NAMES = (
    b"Accept Accept-Encoding Authorization Connection Content-Encoding Content-Length Content-Type Cookie Expect Host"
    b" Idempotency-Key If-Match If-None-Match Last-Event-ID Origin Range Sec-Fetch-Mode Sec-Fetch-Site"
    b" Sec-WebSocket-Key Sec-WebSocket-Extensions Sec-WebSocket-Version TE Trailer Transfer-Encoding Upgrade"
    b" X-Request-Id X-Swarm-Lossless X-Swarm-Seal X-\x8f"
).split()
BODIES = [
    *rb'{ {} [] {"spec":{"command":["\ud800"]}} {"ranks":1e400}'.split(),
    b"",
    b"\xff\xfe",
    b"5\r\nhello\r\n0\r\n\r\n",
]
AT_ONCE = 20


@pytest.fixture
async def front(swarm, monkeypatch):
    """The whole HTTP side of an agent, with the routes of its peers, as the first of its process."""
    monkeypatch.setattr(web_urldispatcher, "_default_expect_handler", None)
    agent = swarm.add("n1")
    agent.put(a_record(JOB, "n1"))
    app = build_api(agent, agent, (TOKEN,), lambda _: (b"", "text/plain")).make_app()
    app[arrivals.ARRIVALS] = arrivals.Arrivals()
    sealer = Sealer(
        keyring=Keyring(os.urandom(32)), label="s", instance_id=os.urandom(INSTANCE_ID_BYTES), purpose="body"
    )
    nobody: Any = None  # no batch of messages comes that far
    channel = PeerChannel(NodeId("n1"), sealer, nobody, nobody, lambda _: None)
    channel.add_routes(app)
    PeerRpc(NodeId("n1"), sealer, channel).add_routes(app)
    server = TestServer(app)
    async with TestClient(server):
        yield server


def request_of(rng, routes):
    """Some method, a path of ours or another with nasty parts, headers with nasty values, and a body."""
    method, pattern = rng.choice(routes)
    name = method.encode()
    if rng.random() < 0.3:
        name = rng.choice(METHODS)
    path = "/".join(
        rng.choice(NASTY).decode("latin-1") if "{" in part and rng.random() < 0.5 else JOB if "{" in part else part
        for part in pattern.split("/")
    ).encode("latin-1")
    if rng.random() < 0.3:
        path = rng.choice(
            [path + b"?" + rng.choice(NASTY) + b"=" + rng.choice(NASTY), b"*", b"/" + rng.choice(NASTY), b"//h/"]
        )
    headers = [(b"Host", b"127.0.0.1")] if rng.random() < 0.9 else []
    headers += [(b"Authorization", b"Bearer " + TOKEN.encode())] if rng.random() < 0.7 else []
    headers += [(rng.choice(NAMES), rng.choice(NASTY)) for _ in range(rng.randrange(1, 4))]
    body = rng.choice(BODIES)
    headers += [(b"Content-Length", b"%d" % len(body))] if rng.random() < 0.8 else []
    head = b"\r\n".join(b"%b: %b" % each for each in headers)
    return b"%b %b HTTP/1.%d\r\n%b\r\n\r\n%b" % (name, path, rng.random() < 0.9, head, body)


async def status_of(port, request):
    """The first status that is no 1xx; 0 where the agent closes without a word or waits for more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(1.0):
            while (words := (await reader.readline()).split()) and words[1].startswith(b"1"):
                await reader.readline()
            return int(words[1]) if words else 0
    except (TimeoutError, ConnectionError):
        return 0
    finally:
        writer.close()


async def hurl(front, count, seed):
    rng, statuses = random.Random(seed), {}
    routes = [(route.method, route.resource.canonical) for route in front.app.router.routes()]
    for _ in range(0, count, AT_ONCE):
        requests = [request_of(rng, routes) for _ in range(AT_ONCE)]
        for request, status in zip(
            requests, await asyncio.gather(*(status_of(front.port, each) for each in requests)), strict=True
        ):
            statuses.setdefault(status, []).append(request)
    return statuses


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.acceptance] if seed else []) for seed in range(8)]
)
async def test_no_request_is_a_fault_of_ours(front, caplog, seed):
    caplog.set_level(logging.ERROR)
    statuses = await hurl(front, 3_000 if seed else 600, seed)
    assert {status: sent[:3] for status, sent in statuses.items() if status >= 500} == {}
    faults = [record for record in caplog.records if "HttpProcessingError" not in str(record.exc_info)]
    assert [record for record in faults if record.name.startswith("swarm")] == []
    assert len(statuses) > 5, "the answers differ"


@pytest.mark.parametrize("path", ["/livez", "/v1/jobs", "/nowhere", "/peer/v1/messages"])
async def test_what_a_request_may_not_expect_is_refused_in_words_that_can_be_sent(front, caplog, path):
    for value in (b"\x8f", b"100-continu\xe9", b"x" * 1_000, b"200-ok"):
        request = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: %b\r\n\r\n" % (path.encode(), value)
        assert await status_of(front.port, request) == 417
    head = b"%b HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n\r\n"
    assert await status_of(front.port, head % b"GET /livez") == 200
    assert not caplog.records


async def test_a_connection_that_ends_before_its_answer_begins_is_no_fault(front, caplog):
    """The state in which the server has not yet heard of it: its transport is still there."""

    async def leave(_: web.Request) -> web.Response:
        raise ClientConnectionResetError("Cannot write to closing transport")

    for resource in front.app.router.resources():
        for route in resource:
            route._handler = leave
    for request in (b"GET /livez HTTP/1.1", b"GET /peer/v1/messages HTTP/1.1", b"POST /peer/v1/stream/x HTTP/1.1"):
        await status_of(front.port, request + b"\r\nHost: 127.0.0.1\r\n\r\n")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
