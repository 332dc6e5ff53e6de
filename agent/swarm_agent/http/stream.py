"""Records on their way to a client: as Server-Sent Events or as JSON lines, and iterators that are surely closed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from swarm_agent.http.exchange import NDJSON_TYPE, SSE_TYPE, Call, HttpReply, encode
from swarm_agent.http.parameter import flag, header

HEARTBEAT_S = 5.0  # a client that hears nothing for some of them goes on at another agent
SSE_HEARTBEAT = b": heartbeat\n\n"
NDJSON_HEARTBEAT = b"\n"
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

FOLLOW = flag("follow", "Stream what is to come as well.")
LAST_EVENT = header("Last-Event-ID", "As cursor; sent by browsers that reconnect.")
LOSSLESS = header("X-Swarm-Lossless", "1: ranks that are too far ahead wait for this reader; with follow.")

T = TypeVar("T")
Record = dict[str, Any]


@asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncGenerator[AsyncIterator[T], None]:
    """Close an iterator however its consumer leaves, so that the peer's end of a stream ends at once."""
    try:
        yield iterator
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()


async def ticking(iterator: AsyncIterator[T], period_s: float) -> AsyncIterator[T | None]:
    """The items, and None whenever none came for so long."""
    waiting: asyncio.Task[tuple[T] | None] | None = None
    async with closing(iterator) as items:
        try:
            while True:
                waiting = waiting or asyncio.create_task(_next(items))
                await asyncio.wait({waiting}, timeout=period_s)
                if not waiting.done():
                    yield None
                    continue
                found, waiting = waiting.result(), None
                if found is None:
                    return
                yield found[0]
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


async def _next(items: AsyncIterator[T]) -> tuple[T] | None:
    async for item in items:
        return (item,)
    return None


def wants_events(call: Call) -> bool:
    """True when the client asked for Server-Sent Events."""
    return SSE_TYPE in call.headers.get("accept", "")


def resume_cursor(call: Call) -> str:
    """Where the client wants to go on; what a reconnecting browser sends wins over the address it was given."""
    return call.headers.get("last-event-id") or call.query.get("cursor", "")


def stream_answer(call: Call, records: AsyncIterator[Record]) -> HttpReply:
    """Send each record as soon as it comes."""
    if wants_events(call):
        return HttpReply(200, _as_events(records), SSE_TYPE, STREAM_HEADERS, SSE_HEARTBEAT)
    return HttpReply(200, _as_lines(records), NDJSON_TYPE, STREAM_HEADERS, NDJSON_HEARTBEAT)


async def _as_events(records: AsyncIterator[Record]) -> AsyncIterator[bytes]:
    async with closing(records):
        async for record in records:
            # JSON has no line breaks and a cursor no control characters: neither can forge a field.
            head = f"event: {record['type']}\nid: {record['cursor']}\n".encode()
            yield head + b"data: " + encode(record) + b"\n\n"


async def _as_lines(records: AsyncIterator[Record]) -> AsyncIterator[bytes]:
    async with closing(records):
        async for record in records:
            yield encode(record) + b"\n"
