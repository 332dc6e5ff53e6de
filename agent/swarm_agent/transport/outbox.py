"""Messages on their way to one peer: batched by loop turn, a few requests in flight, bounded.

All messages of a loop turn travel in one frame of a kept connection.  Each batch has a sequence number, by which
the receiver restores the order of batches that overtook one another (`swarm_agent.transport.inbox`).  Urgent messages
wait for none of these: they have a batch of their own, in flight beside the others, without a place in the order.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from swarmsched.events import Event, PeerSendFailed
from swarmsched.ids import NodeId
from swarmsched.node.protocol import URGENT_MESSAGES

MESSAGES_LIMIT = 4_000  # waiting for one peer; a further one fails at once
BATCH_MESSAGES_MAX = 500
BATCH_BYTES_MAX = 2**20  # a batch is closed once it is above; one message may be larger
IN_FLIGHT_MAX = 4
UNORDERED = 0  # the number of batches without a place in the order


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and its encoded form; the message itself is needed to report a failure."""

    message: object
    encoded: bytes

    @property
    def is_urgent(self) -> bool:
        """True for what may not wait for other messages."""
        return isinstance(self.message, URGENT_MESSAGES)


SendBatch = Callable[[NodeId, int, list[Outgoing]], Awaitable[None]]
"""Delivers a batch with its number; raises `OSError`-like or `SwarmError` when it was, or may have been, lost."""


class _Lane:
    """Messages of one urgency, the numbers of their batches, and those batches that are in flight."""

    def __init__(self, sequence: Iterator[int]) -> None:
        self.sequence = sequence
        self.waiting: deque[Outgoing] = deque()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_beginning = False  # a batch is about to be taken

    def take_batch(self) -> list[Outgoing]:
        batch: list[Outgoing] = []
        size = 0
        while self.waiting and len(batch) < BATCH_MESSAGES_MAX and size < BATCH_BYTES_MAX:
            batch.append(self.waiting.popleft())
            size += len(batch[-1].encoded)
        self.is_beginning = False
        return batch


class Outbox:
    """The queue to one peer."""

    def __init__(
        self, recipient: NodeId, send: SendBatch, post: Callable[[Event], None], failures: tuple[type[Exception], ...]
    ) -> None:
        self._recipient = recipient
        self._send = send
        self._post = post
        self._failures = failures
        self._urgent = _Lane(itertools.repeat(UNORDERED))
        self._ordered = _Lane(itertools.count(UNORDERED + 1))

    @property
    def is_idle(self) -> bool:
        """True when nothing waits and nothing is in flight."""
        return not any(lane.waiting or lane.tasks for lane in (self._urgent, self._ordered))

    def add(self, outgoing: Outgoing) -> None:
        """Queue a message; it leaves at the end of this loop turn, or is reported as failed when the queue is full."""
        lane = self._urgent if outgoing.is_urgent else self._ordered
        if len(lane.waiting) >= MESSAGES_LIMIT:
            self._fail([outgoing], f"{MESSAGES_LIMIT} messages wait already")
            return
        lane.waiting.append(outgoing)
        self._pump(lane)

    async def close(self) -> None:
        """Give up what waits or is in flight."""
        tasks = [*self._urgent.tasks, *self._ordered.tasks]
        for lane in (self._urgent, self._ordered):
            lane.waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _pump(self, lane: _Lane) -> None:
        """Begin one more batch; it is taken in the next loop turn, with all that was added till then."""
        if lane.waiting and not lane.is_beginning and len(lane.tasks) < IN_FLIGHT_MAX:
            lane.is_beginning = True
            task = asyncio.get_running_loop().create_task(self._deliver(lane))
            lane.tasks.add(task)
            task.add_done_callback(partial(self._on_done, lane))

    def _on_done(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        lane.tasks.discard(task)
        self._pump(lane)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "peer batch failed", "exception": error})

    async def _deliver(self, lane: _Lane) -> None:
        sequence, batch = next(lane.sequence), lane.take_batch()
        self._pump(lane)
        try:
            await self._send(self._recipient, sequence, batch)
        except self._failures as error:
            self._fail(batch, str(error) or type(error).__name__)

    def _fail(self, batch: list[Outgoing], error: str) -> None:
        for outgoing in batch:
            self._post(PeerSendFailed(self._recipient, outgoing.message, error))
