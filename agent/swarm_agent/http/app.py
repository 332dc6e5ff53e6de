"""The aiohttp side: requests in, through the guard to the handlers, answers and streams out."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from enum import Enum
from http import HTTPStatus
from typing import cast

from aiohttp import ClientConnectionResetError, HttpVersion11, web, web_response, web_urldispatcher
from aiohttp.typedefs import Middleware
from multidict import CIMultiDict

from swarm_agent import metrics
from swarm_agent.http.exchange import JSON_TYPE, Call, HttpReply, limited, no_stream
from swarm_agent.http.guard import Guard
from swarm_agent.http.principal import NOBODY, Principal
from swarm_agent.http.problem import CONTENT_TYPE, Problem
from swarm_agent.http.routes import Route, match
from swarm_agent.http.stream import HEARTBEAT_S, closing, ticking
from swarm_agent.transport.arrivals import vouch
from swarmsched.effects import Announce
from swarmsched.ids import NodeId

JSON_BYTES_LIMIT = 2**20
PEER_BYTES_LIMIT = 2**26  # aiohttp's own ceiling; peers' bodies have stricter limits where they are opened
STREAMS_LIMIT = 256
SLOW_CLIENT_S = 300.0  # a client that takes nothing for so long is let go; it can go on with its cursor
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PEER_PREFIX = "/peer/"

CURRENT_ID: ContextVar[str] = ContextVar("swarm_request_id", default="")
"""The id of the request that the current task handles."""

CURRENT_PRINCIPAL: ContextVar[Principal] = ContextVar("swarm_principal", default=NOBODY)
"""Who it is from."""

Next = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("swarm.http")


class Door(Enum):
    """Whom a listener serves."""

    BOTH = "both"
    PEOPLE = "people"
    PEERS = "peers"


class Server:
    """Serves a table of routes."""

    def __init__(
        self,
        node: NodeId,
        guard: Guard,
        routes: tuple[Route, ...],
        note: Callable[[Announce], object] = lambda _: None,
        api_address: str = "",
    ) -> None:
        """`note` takes what is to be remembered of who has changed what; people ask at `api_address`."""
        self._node, self._guard, self._note, self._api_address = node, guard, note, api_address
        heads = {("HEAD", route.path): route for route in routes if route.method == "GET" and not route.is_streamed}
        self._routes = {**heads, **{(route.method, route.path): route for route in routes}}
        self._streams: set[asyncio.Task[object]] = set()

    def make_app(self, door: Door = Door.BOTH) -> web.Application:
        """The application behind a door; the routes of peers are to be added to one that serves them."""
        # Before there are routes; handlers of their own would not reach paths that there are not.
        web_urldispatcher._default_expect_handler = _meet_expectation  # type: ignore[assignment]  # noqa: SLF001
        app = web.Application(middlewares=[self._middleware(door)], client_max_size=PEER_BYTES_LIMIT)
        for (method, _), route in self._routes.items() if door is not Door.PEERS else ():
            app.router.add_route(method, route.pattern, self._handler(route))
        app.on_shutdown.append(self._end_streams)
        # Not the versions of Python and aiohttp; a signal of the app would not reach aiohttp's own refusals.
        web_response.SERVER_SOFTWARE = "swarm-agent"  # type: ignore[attr-defined]  # read at each answer
        return app

    async def dispatch(self, call: Call) -> HttpReply:
        """Run a forwarded request; problems become answers, so that the asking agent passes them on as they are."""
        found = match(self._routes.values(), call.method, call.path)
        try:
            if found is None:
                raise Problem("not_found", f"there is no {call.method} {call.path[:200]}")
            route, params = found
            route.check_right(call.principal)
            return await route.handler(replace(call, params=params))
        except Problem as problem:
            return HttpReply(problem.status, problem.encode(call.request_id), CONTENT_TYPE, problem.all_headers())

    def _middleware(self, door: Door) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Next) -> web.StreamResponse:
            if request.path.startswith(PEER_PREFIX) and door is not Door.PEOPLE:
                try:
                    return await self._peer(request, handler)
                except (Problem, ConnectionError) as error:
                    return self._problem(_fault(request, error), "")
            started_s = time.monotonic()
            request_id = _request_id(request)
            CURRENT_ID.set(request_id)
            CURRENT_PRINCIPAL.set(NOBODY)  # a kept connection has one task for all its requests
            response: web.StreamResponse
            try:
                if door is Door.PEERS:
                    raise self._elsewhere(request)
                self._check(request)
                response = await handler(request)
            except web.HTTPException as error:
                response = self._problem(_translated(request, error), request_id)
            except Exception as error:  # noqa: BLE001  # a fault in a handler costs its request; the log has the story
                response = self._problem(_fault(request, error), request_id)
            metrics.OBSERVED.observe_http(
                request.method, _pattern(request), response.status, time.monotonic() - started_s
            )
            return response

        return guarded

    def _elsewhere(self, request: web.Request) -> Problem:
        detail = f"agents alone speak here; the API of {self._node} is at {self._api_address}"
        return Problem("wrong_door", detail, f"ask {self._api_address}: swarm login {self._api_address}")

    async def _peer(self, request: web.Request, handler: Next) -> web.StreamResponse:
        """The seal of the body is the authentication; a browser has no business there, not even to hold a socket."""
        if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
            raise Problem("cross_origin", "only agents speak here, and this is a browser")
        _check_encoding(request)
        return await handler(request)

    def _check(self, request: web.Request) -> None:
        route = self._routes.get((request.method, _pattern(request)))
        transport = request.transport
        local = transport.get_extra_info("sockname") if transport is not None else None
        self._guard.check_host(request.headers.get("Host", ""), str(local[0]) if isinstance(local, tuple) else "")
        is_page = request.path == "/" and request.headers.get("Sec-Fetch-Mode") == "navigate"
        self._guard.check_origin(request.headers, is_page=is_page)
        if route is None or route.right is not None:
            principal = self._guard.principal_of(request.headers.get("Authorization", ""))
            CURRENT_PRINCIPAL.set(principal)
            vouch(request)
            if route is not None:
                route.check_right(principal)
        _check_encoding(request)

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            call = await _call_from(request, route)
            answer = await route.handler(call)
            if route.is_audited and answer.status < HTTPStatus.BAD_REQUEST:  # another agent's refusal changed nothing
                self._audit(call, answer.status)
            headers = self._headers(CURRENT_ID.get(), answer)
            if isinstance(answer.body, bytes):
                return web.Response(status=answer.status, body=answer.body, headers=headers)
            return await self._stream(request, answer, headers)

        return handle

    def _audit(self, call: Call, status: int) -> None:
        """Who has changed what; by the agent that was asked, whoever carried it out."""
        fields = {"by": call.principal.name, "method": call.method, "path": call.path, "status": status}
        text = f"{call.principal.name or 'somebody'}: {call.method} {call.path}, answered {status}"
        self._note(Announce("api.changed", text, node=NodeId(self._node), fields=fields))

    def _headers(self, request_id: str, answer: HttpReply) -> CIMultiDict[str]:
        headers = CIMultiDict({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
        headers.update({"X-Swarm-Node": self._node, "X-Request-Id": request_id, "Content-Type": answer.content_type})
        headers.update(answer.headers)
        return headers

    def _problem(self, problem: Problem, request_id: str) -> web.Response:
        body = problem.encode(request_id)
        headers = self._headers(request_id, HttpReply(problem.status, body, CONTENT_TYPE, problem.all_headers()))
        return web.Response(status=problem.status, body=body, headers=headers)

    async def _stream(self, request: web.Request, answer: HttpReply, headers: CIMultiDict[str]) -> web.StreamResponse:
        body = cast("AsyncIterator[bytes]", answer.body)
        if len(self._streams) >= STREAMS_LIMIT:
            async with closing(body):
                raise Problem("too_many_streams", f"{STREAMS_LIMIT} streams are open at {self._node}", retry_after_s=5)
        response = web.StreamResponse(status=answer.status, headers=headers)
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._streams.add(task)
        try:
            await response.prepare(request)
            async with closing(ticking(body, HEARTBEAT_S)) as chunks:
                async for chunk in chunks:
                    async with asyncio.timeout(SLOW_CLIENT_S):
                        await response.write(answer.heartbeat if chunk is None else chunk)
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            log.debug("stream ended: the client went away or took nothing request_id=%s", CURRENT_ID.get())
        except Problem as problem:
            # The head has been sent: all that is left is to end without the closing record.
            log.info("stream cut short request_id=%s problem=%s", CURRENT_ID.get(), problem)
        finally:
            self._streams.discard(task)
        return response

    async def _end_streams(self, _: web.Application) -> None:
        """When the agent stops, followers are let go at once; they go on at another agent."""
        for task in list(self._streams):
            task.cancel()


async def _call_from(request: web.Request, route: Route) -> Call:
    return Call(
        method=request.method,
        path=request.path,
        params=dict(request.match_info),
        query=route.read_query(request.query.items()),
        headers={name.lower(): _utf8(value) for name, value in request.headers.items()},
        body=await _json_body(request) if route.body else b"",
        request_id=CURRENT_ID.get(),
        stream=request.content.iter_any() if route.stream_type else no_stream(),
        principal=CURRENT_PRINCIPAL.get(),
    )


def _utf8(value: str) -> str:
    """A header as text that can travel: aiohttp keeps its other bytes as lone surrogates."""
    return value if value.isascii() else value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def _json_body(request: web.Request) -> bytes:
    """At most 1 MiB; refused by its declared length before anything is read."""
    if (request.content_length or 0) > JSON_BYTES_LIMIT:
        raise Problem("too_large", f"the body has {request.content_length} bytes, more than {JSON_BYTES_LIMIT}")
    body = b"".join([chunk async for chunk in limited(request.content.iter_any(), JSON_BYTES_LIMIT)])
    if body and request.content_type not in (JSON_TYPE, "application/octet-stream"):
        # aiohttp says octet-stream when there is no Content-Type; a form from a browser always names one.
        raise Problem("unsupported_media_type", f"the body is {request.content_type}", f"send {JSON_TYPE}")
    return body


def _check_encoding(request: web.Request) -> None:
    """Bodies come as they are: a megabyte may unpack to a thousand, in the loop, whoever sends it."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        detail, remedy = f"the body is packed ({encoding[:40]!r})", "send it as it is, without Content-Encoding"
        raise Problem("unsupported_media_type", detail, remedy)


async def _meet_expectation(request: web.Request) -> web.Response | None:
    """What a header `Expect` asks for, before anything else is looked at; aiohttp's own answer repeats any bytes."""
    expected = request.headers.get("Expect", "")
    if request.version < HttpVersion11:
        return None
    if expected.lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
        return None
    problem = Problem("unknown_expectation", f"the request expects {expected[:40]!a}")
    return web.Response(status=problem.status, body=problem.encode(""), content_type=CONTENT_TYPE)


def _fault(request: web.Request, error: Exception) -> Problem:
    """What is answered where a handler raised: the agent's fault unless nobody is there to be answered."""
    if isinstance(error, Problem):
        return error
    request_id = CURRENT_ID.get()
    is_gone = request.transport is None or request.transport.is_closing()
    if isinstance(error, ClientConnectionResetError) or (isinstance(error, ConnectionError) and is_gone):
        log.debug("request ended: the client went away request_id=%s path=%s", request_id, request.path[:200])
        return Problem("bad_request", "the connection ended before the body did")
    log.error("request failed request_id=%s path=%s", request_id, request.path[:200], exc_info=error)
    detail = f"the agent failed to answer this request; its log has the story of request {request_id}"
    return Problem("internal", detail)


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def _pattern(request: web.Request) -> str:
    """The route's path with its names; one word for all unknown paths, so that metrics stay small."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _translated(request: web.Request, error: web.HTTPException) -> Problem:
    """aiohttp's own refusals."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        detail = f"{request.path[:200]} takes {allowed}, not {request.method}"
        return Problem("method_not_allowed", detail, headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return Problem("not_found", f"there is no {request.path[:200]}")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Problem("too_large", "the body is too large")
    return Problem("bad_request", error.reason or "the request is not well formed")
