"""Waiting for another agent only as long as membership does not know it to be gone.

A connection to a machine that lost its power, or to a stopped process, stays silent for a long time before it breaks;
membership knows after seconds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from swarm_agent.http.stream import closing, ticking
from swarmsched.errors import AgentUnreachable
from swarmsched.ids import NodeId

LOOK_S = 1.0  # between two looks; also what a node that is known to be gone is given to answer all the same

T = TypeVar("T")


async def answer_of(node: NodeId, is_gone: Callable[[NodeId], bool], question: Coroutine[Any, Any, T]) -> T:
    """The answer, or `TimeoutError` once the node is gone: whether it did what it was asked is then unknown."""
    asking = asyncio.create_task(question)
    try:
        while not asking.done():
            await asyncio.wait({asking}, timeout=LOOK_S)
            if not asking.done() and is_gone(node):
                raise TimeoutError(f"{node} is gone")
        return asking.result()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)  # so that nothing is left that nobody looked at


async def items_of(node: NodeId, is_gone: Callable[[NodeId], bool], items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The items; raises `AgentUnreachable` once none comes and the node is gone."""
    async with closing(ticking(items, LOOK_S)) as ticks:
        async for item in ticks:
            if item is not None:
                yield item
            elif is_gone(node):
                raise AgentUnreachable([str(node)], "the node is gone")
