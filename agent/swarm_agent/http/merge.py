"""Several streams into one, in the order of arrival, with back pressure all the way to the sources."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from swarm_agent.http.stream import closing

T = TypeVar("T")
QUEUE_LIMIT = 16  # items waiting for the client; the sources are not read further while it is full


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items of all sources as they come; ends when all have ended, raises what one of them raises."""
    queue: asyncio.Queue[T] = asyncio.Queue(QUEUE_LIMIT)
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    ended: asyncio.Future[list[None]] = asyncio.gather(*pumps)
    getting: asyncio.Task[T] | None = None
    try:
        while True:
            getting = getting or asyncio.create_task(queue.get())
            awaited: set[asyncio.Future[Any]] = {getting, ended}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                yield getting.result()
                getting = None
                continue
            await ended  # raises what a source raised
            getting.cancel()  # or it would take an item from under the loop below
            await asyncio.wait({getting})
            if not getting.cancelled():
                yield getting.result()
            while not queue.empty():
                yield queue.get_nowait()
            return
    finally:
        tasks = [*pumps, *([getting] if getting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, ended, return_exceptions=True)


async def _pump(source: AsyncIterator[T], queue: asyncio.Queue[T]) -> None:
    async with closing(source) as items:
        async for item in items:
            await queue.put(item)
