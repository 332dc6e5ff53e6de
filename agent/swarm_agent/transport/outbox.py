"""Messages on their way to one peer: batched by loop turn, a few requests in flight, bounded.

All messages of a loop turn travel in one frame of a kept connection.  Each batch has a sequence number, by which
the receiver restores the order of batches that overtook one another (`swarm_agent.transport.inbox`).
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from swarmsched.events import Event, PeerSendFailed
from swarmsched.ids import NodeId

MESSAGES_LIMIT = 4_000  # waiting for one peer; a further one fails at once
BATCH_MESSAGES_MAX = 500
BATCH_BYTES_MAX = 2**20  # a batch is closed once it is above; one message may be larger
IN_FLIGHT_MAX = 4


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and its encoded form; the message itself is needed to report a failure."""

    message: object
    encoded: bytes


class SendBatch(Protocol):
    """Sends one batch; raises `OSError`-like or `SwarmError` when it was, or may have been, lost."""

    def __call__(self, recipient: NodeId, sequence: int, batch: list[Outgoing]) -> Awaitable[None]:
        """Deliver or raise."""
        ...


class Outbox:
    """The queue to one peer."""

    def __init__(
        self, recipient: NodeId, send: SendBatch, post: Callable[[Event], None], failures: tuple[type[Exception], ...]
    ) -> None:
        self._recipient = recipient
        self._send = send
        self._post = post
        self._failures = failures
        self._waiting: deque[Outgoing] = deque()
        self._sequence = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_beginning = False  # a batch is about to be taken

    @property
    def is_idle(self) -> bool:
        """True when nothing waits and nothing is in flight."""
        return not self._waiting and not self._tasks

    def add(self, outgoing: Outgoing) -> None:
        """Queue a message; it leaves at the end of this loop turn, or is reported as failed when the queue is full."""
        if len(self._waiting) >= MESSAGES_LIMIT:
            self._fail([outgoing], f"{MESSAGES_LIMIT} messages wait already")
            return
        self._waiting.append(outgoing)
        self._pump()

    async def close(self) -> None:
        """Give up what waits or is in flight."""
        self._waiting.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pump(self) -> None:
        """Begin one more batch; it is taken in the next loop turn, with all that was added till then."""
        if self._waiting and not self._is_beginning and len(self._tasks) < IN_FLIGHT_MAX:
            self._is_beginning = True
            task = asyncio.get_running_loop().create_task(self._deliver())
            self._tasks.add(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pump()
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "peer batch failed", "exception": error})

    def _take_batch(self) -> list[Outgoing]:
        batch: list[Outgoing] = []
        size = 0
        while self._waiting and len(batch) < BATCH_MESSAGES_MAX and size < BATCH_BYTES_MAX:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].encoded)
        return batch

    async def _deliver(self) -> None:
        sequence, batch = next(self._sequence), self._take_batch()
        self._is_beginning = False
        self._pump()
        try:
            await self._send(self._recipient, sequence, batch)
        except self._failures as error:
            self._fail(batch, str(error) or type(error).__name__)

    def _fail(self, batch: list[Outgoing], error: str) -> None:
        for outgoing in batch:
            self._post(PeerSendFailed(self._recipient, outgoing.message, error))
