"""The kept connection between two agents, against a real server on a real port that answers as the test says."""

import asyncio
import gc
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from swarm_agent.transport import link as link_module
from swarm_agent.transport.link import ANSWER, NUMBER, Link
from tests.agent.testing import free_port, wait_until


class Serving:
    """Answers each frame with its own body once `may_answer` is set; counts connections."""

    def __init__(self) -> None:
        self.url = URL.build(scheme="http", host="127.0.0.1", port=free_port(), path="/")
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.connections: list[web.WebSocketResponse] = []
        self.heard: list[bytes] = []
        self.garbage = b""
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/", self._on_link)
        app.on_shutdown.append(self._hang_up)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.url.port).start()
        self._session = aiohttp.ClientSession()

    async def stop(self) -> None:
        assert self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    async def dial(self, url: URL) -> aiohttp.ClientWebSocketResponse:
        assert self._session is not None
        return await self._session.ws_connect(url)

    async def hang_up(self) -> None:
        for connection in self.connections:
            await connection.close()

    async def _hang_up(self, _app: web.Application) -> None:
        await self.hang_up()

    async def _on_link(self, request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        self.connections.append(connection)
        async for message in connection:
            (number,) = NUMBER.unpack_from(message.data)
            self.heard.append(message.data[NUMBER.size :])
            await self.may_answer.wait()
            await connection.send_bytes(self.garbage or ANSWER.pack(number, 200) + message.data[NUMBER.size :])
        return connection


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    serving = Serving()
    await serving.start()
    yield serving
    await serving.stop()


async def test_many_questions_share_one_connection_and_get_their_own_answers(serving: Serving) -> None:
    link = Link(serving.url, serving.dial)
    answers = await asyncio.gather(*(link.ask(partial(b"%d".__mod__, index)) for index in range(50)))
    assert answers == [(200, b"%d" % index) for index in range(50)]
    assert len(serving.connections) == 1
    await link.close()


async def test_a_connection_that_is_lost_fails_what_waits_at_once_and_takes_no_more(serving: Serving) -> None:
    link = Link(serving.url, serving.dial)
    serving.may_answer.clear()
    waiting = asyncio.create_task(link.ask(lambda: b"late"))
    await wait_until(lambda: bool(serving.heard))
    await serving.hang_up()
    with pytest.raises(aiohttp.ClientConnectionError, match="lost"):
        await waiting
    await wait_until(lambda: not link.is_usable)
    serving.may_answer.set()


async def test_a_connection_that_cannot_be_made_says_why(serving: Serving) -> None:
    link = Link(serving.url.with_port(free_port()), serving.dial)
    with pytest.raises(aiohttp.ClientConnectorError):
        await link.ask(lambda: b"anybody?")
    assert not link.is_usable


async def test_no_answer_in_time_is_told_and_ends_the_connection(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "ANSWER_TIMEOUT_S", 0.2)
    link = Link(serving.url, serving.dial)
    serving.may_answer.clear()
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        await link.ask(lambda: b"hello?")
    assert not link.is_usable
    serving.may_answer.set()
    await wait_until(lambda: serving.connections[0].closed)


async def test_a_question_that_waits_for_long_makes_the_next_one_take_another_connection(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "STUCK_S", 0.05)
    link = Link(serving.url, serving.dial)
    serving.may_answer.clear()
    waiting = asyncio.create_task(link.ask(lambda: b"slow"))
    await wait_until(lambda: not link.is_usable)
    link.retire()
    serving.may_answer.set()
    assert await waiting == (200, b"slow"), "what it was asked before is still answered"
    await wait_until(lambda: serving.connections[0].closed)


async def test_an_idle_connection_is_not_used_again(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(serving.url, serving.dial)
    assert await link.ask(lambda: b"one") == (200, b"one")
    assert link.is_usable
    monkeypatch.setattr(link_module, "IDLE_S", 0.0)
    assert not link.is_usable
    link.retire()
    await wait_until(lambda: serving.connections[0].closed)


@pytest.mark.parametrize("garbage", [b"", b"short"])
async def test_an_answer_that_makes_no_sense_ends_the_connection(serving: Serving, garbage: bytes) -> None:
    serving.garbage = garbage or ANSWER.pack(0, 200)[:-1]
    link = Link(serving.url, serving.dial)
    with pytest.raises(aiohttp.ClientConnectionError, match="lost"):
        await link.ask(lambda: b"what?")
    assert not link.is_usable


async def test_an_answer_to_no_question_is_ignored(serving: Serving) -> None:
    serving.garbage = ANSWER.pack(99, 200) + b"not for you"
    link = Link(serving.url, serving.dial)
    waiting = asyncio.create_task(link.ask(lambda: b"mine"))
    await wait_until(lambda: bool(serving.heard))
    serving.garbage = b""
    assert await link.ask(lambda: b"second") == (200, b"second")
    assert not waiting.done()
    await link.close()
    with pytest.raises(aiohttp.ClientConnectionError):
        await waiting


async def test_a_connection_that_cannot_be_made_leaves_no_complaint(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(serving.url.with_port(free_port()), serving.dial)
    results = await asyncio.gather(link.ask(lambda: b"one"), link.ask(lambda: b"two"), return_exceptions=True)
    assert [type(each) for each in results] == [aiohttp.ClientConnectorError] * 2
    del link, results
    gc.collect()
    await asyncio.sleep(0)
    assert caplog.records == []
