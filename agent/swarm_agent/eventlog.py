"""The agent's memory of what happened: a ring of announcements that clients can read and follow.

The log is this agent's alone and lives in memory; a client that wants the swarm's asks several agents.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmsched.effects import Announce
from swarmsched.ids import JobId, NodeId

EVENTS_KEPT = 2_000
KINDS = (
    "claim.failed",
    "claim.made",
    "claim.used",
    "hold.expired",
    "holder.replaced",
    "job.card_refused",
    "job.checkpointed",
    "job.ended",
    "job.handed_over",
    "job.over",
    "job.placed",
    "job.preempted",
    "job.rebatched",
    "job.regrouped",
    "job.rescaled",
    "job.restarted",
    "job.resumed",
    "job.scaled",
    "job.start_failed",
    "job.started",
    "job.stepped_down",
    "job.submitted",
    "job.taken_over",
    "job.update_refused",
    "job.yielded",
    "member.changed",
    "member.refused",
    "model.checked",
    "negotiation.round",
    "node.avoided",
    "node.draining",
    "node.offered",
    "peer.nonsense",
    "plan.advised",
    "plan.fell_back",
    "plan.ignored",
    "setting.changed",
    "task.frozen",
    "task.killed_over",
    "task.orphaned",
    "task.thawed",
)
"""All that the core announces."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An announcement with its place in this agent's log; `sequence` starts at 1 with each start of the agent."""

    sequence: int
    utc_s: float
    kind: str
    text: str
    job_id: JobId | None = None
    node: NodeId | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


class EventLog:
    """Keeps the newest `EVENTS_KEPT` events; older ones are forgotten."""

    def __init__(self, limit: int = EVENTS_KEPT) -> None:
        self._events: deque[LoggedEvent] = deque(maxlen=limit)
        self._last_sequence = 0
        self._arrival: asyncio.Future[None] | None = None  # done at the next event; made only when someone waits

    def append(self, announce: Announce, utc_s: float) -> LoggedEvent:
        """Record an announcement and wake all followers."""
        self._last_sequence += 1
        event = LoggedEvent(
            self._last_sequence, utc_s, announce.kind, announce.text, announce.job_id, announce.node, announce.fields
        )
        self._events.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        self._arrival = None
        return event

    def since(self, sequence: int = 0) -> tuple[LoggedEvent, ...]:
        """All kept events with a higher sequence, oldest first."""
        return tuple(event for event in self._events if event.sequence > sequence)

    async def follow(self, after: int = 0) -> AsyncIterator[LoggedEvent]:
        """Kept events after `after`, then new ones for ever.

        A follower slower than the log misses what was forgotten meanwhile; the gap shows in the sequence.
        """
        while True:
            fresh = self.since(after)
            for event in fresh:
                after = event.sequence
                yield event
            if not fresh:
                await self._next_arrival()

    async def _next_arrival(self) -> None:
        if self._arrival is None:
            self._arrival = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._arrival)
