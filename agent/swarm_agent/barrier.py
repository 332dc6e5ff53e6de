"""The durable barrier: effects leave in order, and none before what was persisted ahead of it is on disk.

Effects wait in one queue.  When its head is a `Persist`, everything queued so far becomes a group: all its entries go
to disk in one transaction on the writer thread while the loop goes on collecting the next group (group commit); then
the rest of the group is performed in order.  What promises nothing durable does not come here (`Urgency`).

A disk that refuses stalls the queue: the same transaction is tried again every second, nothing leaves meanwhile and
nothing is lost.
"""

import asyncio
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from swarmsched.effects import Effect, Persist

RETRY_S = 1.0
STALLED_S = 30.0  # that a commit may take before the disk counts as one that refuses; a slow one is no reason to change
DISK_ERRORS = (OSError, sqlite3.Error)


class DurableStore(Protocol):
    """Where entries are made durable."""

    def commit(self, entries: Sequence[Persist]) -> None:
        """Write all entries in one transaction and return once they are on disk; blocking, one caller at a time."""


class Marker:
    """A place in the queue that is reached once everything ahead of it was performed."""

    def __init__(self) -> None:
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Barrier:
    """Orders effects behind their persistence.  All methods belong to the event loop."""

    def __init__(
        self, store: DurableStore, perform: Callable[[Effect], None], on_health: Callable[[str], None]
    ) -> None:
        self._store = store
        self._perform = perform
        self._on_health = on_health  # given the disk's complaint, or empty text when it works again
        self._queue: deque[Effect | Marker] = deque()
        self._group: list[Effect | Marker] = []  # being committed; performed before anything of the queue
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swarm-disk")
        self._is_committing = False
        self._is_closed = False
        self._writer_ended = False
        self._retry: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self.complaint = ""  # why the disk refuses, empty while it does not
        self.commit_elapsed_s = 0.0  # of the last commit
        self._observe_commit: Callable[[float], None] = lambda elapsed_s: None
        self._began_s = math.inf  # of the commit under way

    def tell_commits(self, observe: Callable[[float], None]) -> None:
        """`observe` hears from now on how long each commit takes."""
        self._observe_commit = observe

    @property
    def backlog(self) -> int:
        """Effects that wait, those being committed included."""
        return len(self._queue) + len(self._group)

    @property
    def waited_s(self) -> float:
        """For how long the commit under way has lasted; 0 without one."""
        return max(0.0, time.monotonic() - self._began_s)

    def add(self, effect: Effect | Marker) -> None:
        """Queue an effect; call `flush` after the last one of a loop turn."""
        self._queue.append(effect)

    def flush(self) -> None:
        """Perform what needs no commit and start the next commit unless one runs."""
        while self._queue and not self._is_committing:
            if isinstance(self._queue[0], Persist):
                self._group, self._queue = list(self._queue), deque()
                self._is_committing, self._began_s = True, time.monotonic()
                self._commit()
            else:
                self._release(self._queue.popleft())

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Wait until the queue is empty, then end the writer; false when entries had to be left behind."""
        if self._is_closed:
            return not self.backlog
        self._is_closed = True
        marker = Marker()
        self.add(marker)
        self.flush()
        await asyncio.wait([marker.reached], timeout=timeout_s)
        if self._retry is not None:
            self._retry.cancel()
        self._writer_ended = True
        self._writer.shutdown(wait=marker.reached.done(), cancel_futures=True)
        return marker.reached.done()

    def _commit(self) -> None:
        self._retry = None
        entries = [effect for effect in self._group if isinstance(effect, Persist)]
        loop = asyncio.get_running_loop()
        if not self.complaint:
            self._watchdog = loop.call_later(STALLED_S, self._complain, f"a write takes longer than {STALLED_S:g} s")
        loop.run_in_executor(self._writer, self._write, entries).add_done_callback(self._on_committed)

    def _write(self, entries: Sequence[Persist]) -> float:
        started_s = time.monotonic()
        self._store.commit(entries)
        return time.monotonic() - started_s

    def _on_committed(self, done: asyncio.Future[float]) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if done.cancelled() or self._writer_ended:
            return
        error = done.exception()
        if error is not None:
            if not isinstance(error, DISK_ERRORS):
                # Not the disk's fault, but to go on would break the promise that the group makes: stall and say so.
                asyncio.get_running_loop().call_exception_handler({"message": "commit failed", "exception": error})
            self._complain(f"{type(error).__name__}: {error}")
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._commit)
            return
        self._complain("")
        self.commit_elapsed_s, self._began_s = done.result(), math.inf
        self._observe_commit(self.commit_elapsed_s)
        group, self._group = self._group, []
        self._is_committing = False
        for effect in group:
            if not isinstance(effect, Persist):
                self._release(effect)
        self.flush()

    def _complain(self, complaint: str) -> None:
        if complaint != self.complaint:
            self.complaint = complaint
            self._on_health(complaint)

    def _release(self, effect: Effect | Marker) -> None:
        if isinstance(effect, Marker):
            if not effect.reached.done():
                effect.reached.set_result(None)
        else:
            self._perform(effect)
