"""Questions between agents that are not the core's business: forwarded requests, output, files.

`POST /peer/v1/query/KIND` has one answer, `POST /peer/v1/stream/KIND` a stream of them.  Both are sealed like
messages.  An answer is a mapping {"ok": payload} or {"error": [code, sentence]}; a stream is a concatenation of such
mappings, with an empty one every `HEARTBEAT_S` while there is nothing to say.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

import aiohttp
import msgpack  # ships neither stubs nor py.typed
from aiohttp import web
from yarl import URL

from swarm_agent.transport import envelope
from swarm_agent.transport.peer import CONNECT_TIMEOUT_S, PeerChannel
from swarmsched.errors import AgentUnreachable, LocalProtocolError, RemoteProtocolError, SwarmError, UnknownJob
from swarmsched.ids import NodeId
from swarmsched.wire.sealing import BODY_FRAME_BYTES, Sealer

QUERY_TIMEOUT_S = 10.0
HANDLER_TIMEOUT_S = 60.0
HEARTBEAT_S = 15.0
STREAM_SILENCE_S = 40.0  # without even a heartbeat the peer counts as gone
ITEM_BYTES_MAX = 32 * 2**20

Payload = dict[str, Any]
QueryHandler = Callable[[NodeId, Payload], Awaitable[Payload]]
StreamHandler = Callable[[NodeId, Payload], AsyncIterator[Payload]]
H = TypeVar("H")

log = logging.getLogger("swarm.transport")


class PeerRpc:
    """Asks and answers; a question to this node itself goes straight to its handler."""

    def __init__(self, node_id: NodeId, sealer: Sealer, channel: PeerChannel) -> None:
        self._node_id = node_id
        self._sealer = sealer
        self._channel = channel
        self._query_handlers: dict[str, QueryHandler] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}

    def add_routes(self, app: web.Application) -> None:
        """Serve both kinds of question; the body's seal is its authentication."""
        app.router.add_post(f"{envelope.PREFIX}/query/{{kind}}", self._serve_query)
        app.router.add_post(f"{envelope.PREFIX}/stream/{{kind}}", self._serve_stream)

    def on_query(self, kind: str, handler: QueryHandler) -> None:
        """Answer questions of this kind; registering a kind twice is a mistake of ours."""
        _register(self._query_handlers, kind, handler)

    def on_stream(self, kind: str, handler: StreamHandler) -> None:
        """Answer stream questions of this kind."""
        _register(self._stream_handlers, kind, handler)

    async def query(self, node_id: NodeId, kind: str, payload: Payload, timeout_s: float = QUERY_TIMEOUT_S) -> Payload:
        """One answer.

        Raises `AgentUnreachable` when there was none in time, `UnknownJob` or `RemoteProtocolError` for a refusal.
        """
        if node_id == self._node_id:
            return await self._known(self._query_handlers, kind)(node_id, payload)
        path = f"{envelope.PREFIX}/query/{kind}"
        url = self._channel.url_of(node_id, path)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s), self._answered(url, path, node_id, payload, timeout) as asked:
                response, context = asked
                sealed = await envelope.read_bounded(response.content, envelope.ANSWER_BYTES_MAX, node_id)
                _check_status(response.status, sealed, node_id)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AgentUnreachable([str(node_id)], _cause(error)) from error
        opened = self._sealer.open_body("POST", path, sealed, context, node_id)
        return _result(envelope.unpack(opened.payload, node_id), node_id) or {}

    @asynccontextmanager
    async def _answered(
        self, url: URL, path: str, node_id: NodeId, payload: Payload, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes]]:
        """The response and what ties it to the question; asked once more when the peer has begun another life."""
        for is_again in (False, True):
            body = self._channel.seal(path, node_id, payload)
            async with self._channel.session.post(
                url, data=body, headers=envelope.HEADERS, timeout=timeout
            ) as response:
                if is_again or response.status != envelope.RESTARTED:
                    yield response, envelope.context_of(body)
                    return
                life = await envelope.read_bounded(response.content, BODY_FRAME_BYTES, node_id)
                self._channel.met(node_id, life.decode("ascii", "replace"))

    async def query_stream(self, node_id: NodeId, kind: str, payload: Payload) -> AsyncIterator[Payload]:
        """Answers as they come; raises as `query` does, also in the middle.  Close the iterator to end it."""
        if node_id == self._node_id:
            async for item in self._known(self._stream_handlers, kind)(node_id, payload):
                yield item
            return
        path = f"{envelope.PREFIX}/stream/{kind}"
        url = self._channel.url_of(node_id, path)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=STREAM_SILENCE_S)
        try:
            async with self._answered(url, path, node_id, payload, timeout) as (response, context):
                if response.status != 200:
                    text = await envelope.read_bounded(response.content, BODY_FRAME_BYTES, node_id)
                    _check_status(response.status, text, node_id)
                async for item in self._items(response, path, context, node_id):
                    yield item
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AgentUnreachable([str(node_id)], _cause(error)) from error

    def _known(self, handlers: dict[str, H], kind: str) -> H:
        handler = handlers.get(kind)
        if handler is None:
            raise RemoteProtocolError(f"questions of kind {kind!r} are not answered here", peer=self._node_id)
        return handler

    async def _items(
        self, response: aiohttp.ClientResponse, path: str, context: bytes, node_id: NodeId
    ) -> AsyncIterator[Payload]:
        reader = self._sealer.body_reader("POST", path, context, node_id)
        unpacker = msgpack.Unpacker(raw=False, strict_map_key=True, max_buffer_size=ITEM_BYTES_MAX)
        async for data in response.content.iter_any():
            for piece in reader.feed(data):
                try:
                    unpacker.feed(piece)
                    items = list(unpacker)
                except (ValueError, msgpack.UnpackException) as error:
                    raise RemoteProtocolError(f"a stream that is not msgpack: {error}", peer=node_id) from error
                for item in items:
                    if (result := _result(item, node_id)) is not None:
                        yield result
        reader.finish()

    async def _serve_query(self, request: web.Request) -> web.Response:
        kind = request.match_info["kind"]
        opened = await self._open(request)
        answer: Payload
        try:
            async with asyncio.timeout(HANDLER_TIMEOUT_S):
                payload = dict(envelope.as_mapping(opened.content, opened.sender))
                answer = {"ok": await self._known(self._query_handlers, kind)(opened.sender, payload)}
        except Exception as error:  # noqa: BLE001  # a fault of one handler is told to the asker, whatever it is
            answer = _error_of(error, kind)
        body = self._sealer.seal_body("POST", request.path, envelope.pack(answer), opened.context)
        return web.Response(body=body, content_type=envelope.CONTENT_TYPE)

    async def _serve_stream(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        opened = await self._open(request)
        response = web.StreamResponse(headers=envelope.HEADERS)
        await response.prepare(request)
        writer = self._sealer.body_writer("POST", request.path, opened.context)
        await response.write(writer.head)
        last = b""
        try:
            payload = dict(envelope.as_mapping(opened.content, opened.sender))
            items = self._known(self._stream_handlers, kind)(opened.sender, payload)
            async with aclosing(_with_heartbeats(items)) as answers:
                async for answer in answers:
                    plain = envelope.pack(answer)
                    for at in range(0, len(plain), BODY_FRAME_BYTES):
                        await response.write(writer.frame(plain[at : at + BODY_FRAME_BYTES]))
        except ConnectionError:
            return response  # the asker closed its iterator
        except Exception as error:  # noqa: BLE001  # as for queries
            last = envelope.pack(_error_of(error, kind))
        with suppress(ConnectionError):  # the asker closed its iterator just as the last answer left
            await response.write(writer.frame(last, is_last=True))
            await response.write_eof()
        return response

    async def _open(self, request: web.Request) -> envelope.Request:
        try:
            return await envelope.read_request(request, self._sealer, self._node_id)
        except RemoteProtocolError as error:
            self._channel.drops.record(error, request.remote or "")
            raise web.HTTPBadRequest(text=str(error)) from error


async def _with_heartbeats(items: AsyncIterator[Payload]) -> AsyncGenerator[Payload, None]:
    """Wrap each item, and give an empty mapping whenever there was none for `HEARTBEAT_S`; closes `items`."""
    pending: asyncio.Task[Payload] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(items))
            done, _ = await asyncio.wait([pending], timeout=HEARTBEAT_S)
            if not done:
                yield {}
                continue
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield {"ok": item}
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.wait([pending])
        if hasattr(items, "aclose"):
            await items.aclose()


def _register(handlers: dict[str, H], kind: str, handler: H) -> None:
    if kind in handlers:
        raise LocalProtocolError("has a handler already", kind=kind)
    handlers[kind] = handler


def _error_of(error: Exception, kind: str) -> Payload:
    match error:
        case UnknownJob():
            return {"error": [error.code, error.job_id]}
        case SwarmError():
            return {"error": [error.code, str(error)]}
        case TimeoutError():
            return {"error": ["timeout", f"the answer took longer than {HANDLER_TIMEOUT_S:g} s"]}
        case _:
            log.error("peer question failed kind=%s", kind, exc_info=error)
            return {"error": ["internal", f"{type(error).__name__}: {error}"[:1_000]]}


def _result(answer: object, node_id: NodeId) -> Payload | None:
    """The payload of an answer, None for a heartbeat; raises what the answer says went wrong."""
    match answer:
        case {"ok": dict(payload)}:
            return payload
        case {"error": [UnknownJob.code, str(job_id)]}:
            raise UnknownJob(job_id)
        case {"error": ["timeout" | AgentUnreachable.code, str(problem)]}:
            raise AgentUnreachable([str(node_id)], problem)
        case {"error": [str(code), str(problem)]}:
            raise RemoteProtocolError(problem, kind=code, peer=node_id)
        case dict() if not answer:
            return None
        case _:
            raise RemoteProtocolError("an answer is neither ok nor error", peer=node_id)


def _check_status(status: int, body: bytes, node_id: NodeId) -> None:
    if status != 200:
        raise RemoteProtocolError(f"HTTP {status}: {body[:200].decode(errors='replace')}", peer=node_id)


def _cause(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
