"""Worker threads for work of which jobs say how much there is: who fills them keeps nobody else waiting."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Threads:
    """So many threads, by a name; as `asyncio.to_thread` otherwise."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    async def run(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """What it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *arguments))

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
