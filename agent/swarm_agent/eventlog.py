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
KINDS = {
    "aggregation.crowded": "A node has too many shards: it asks to have one hosted by another one.",
    "api.changed": "Somebody changed over HTTP what was there; `by`, `method`, `path` and `status` say who, and what.",
    "claim.failed": "A place that was kept for a waiting job is given up: it cannot be had, or is not wanted any more.",
    "claim.made": "A shepherd has owners keep a place for a job that does not fit yet, and may have others make room.",
    "claim.used": "A job takes the place that was kept for it.",
    "hold.expired": "An owner's tentative booking ran out before its shepherd decided.",
    "holder.replaced": "A job's record has other holders, in the place of lost ones.",
    "job.card_refused": "A job's card cannot be written, so others go on with its last one; said once of a job.",
    "job.checkpointed": "A checkpoint of a job counts: its record names it.",
    "job.ended": "A job has ended; `end_reason`, `exit_code` and `signal` say how.",
    "job.handed_over": "A shepherd gives a job to another one, which acts for it from now on.",
    "job.over": "A holder that knew a job as open hears that it has ended, and drops its record.",
    "job.placed": "All owners hold their part of a job, and it is being staged there.",
    "job.preempted": "A running job is stopped for another one, and goes back into the queue.",
    "job.rebatched": "The ranks of a running job go on with another global batch.",
    "job.regrouped": "The workers of an elastic job go on as another membership.",
    "job.rescaled": "A running job is to have another number of ranks; the text says why.",
    "job.restarted": "A job is queued again after a node was lost with its ranks.",
    "job.resumed": "All ranks of a job run again after a change of its size or place; `pause_s` is what that cost.",
    "job.scaled": "Somebody gave a job another range of ranks.",
    "job.start_failed": "A node could not start its ranks of a job, and the job is queued again.",
    "job.started": "All ranks of a job run; `queue_wait_s` and `start_s` say after how long.",
    "job.stepped_down": "A shepherd acts for a job no more, because another one does or the job is long over.",
    "job.submitted": "A job was accepted.",
    "job.taken_over": "A holder acts for a job from now on, in the place of a shepherd that died.",
    "job.update_refused": "A change of a job's record cannot be stored and was left out.",
    "job.yielded": "A job that was being placed gave way on one node to a job that ranks higher.",
    "member.changed": "The state of a member is another one: alive, suspect, failed, left or in conflict.",
    "member.refused": "A node's claim about itself is refused, mostly because a clock is wrong.",
    "model.checked": "The first report from a size that a plan chose was held against the model's prediction.",
    "negotiation.round": "A round of holds came to nothing; the text says why.",
    "node.avoided": "A node takes no new work, because its disk is nearly full or starts fail there.",
    "node.draining": "A node takes no new work because somebody drained it, or takes some again.",
    "node.offered": "A node that was avoided takes new work again.",
    "peer.nonsense": "A peer's message about a job's record contradicts itself; said once a minute of each sender.",
    "plan.advised": "A plan would change a running job, and `elasticity` does not let it.",
    "plan.fell_back": "A policy raised an error or made a plan that cannot be followed: `backfill` planned instead.",
    "plan.ignored": "A decision of a plan was not carried out; the text says why.",
    "setting.changed": "The swarm-wide setting is another one: policy, parameters, elasticity or restartable.",
    "setting.refused": "This agent cannot use the swarm-wide setting, mostly for want of the package with its policy.",
    "task.frozen": "The ranks of a task are frozen, because no majority of the job's holders answers.",
    "task.killed_over": "The ranks of a task are killed, because their job has gone on elsewhere or is over.",
    "task.orphaned": "An agent found a task that nobody ordered, and stops it.",
    "task.thawed": "The ranks of a frozen task go on, because the job's holders answer again.",
}
"""All that is announced, by the core and by the API, and what each kind says."""


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
