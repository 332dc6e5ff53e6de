"""Dominant resource fairness: who has least of what it has most of goes next (Ghodsi et al., NSDI 2011, section 4.1).

A user's dominant share is the largest of its shares of all GPUs, cores and memory.  Progressive filling: of the user
with the least one the next job starts, by priority and submission, until a job does not fit; as in the paper nobody
passes it, so that who holds nothing is never starved by smaller jobs of others.  A job that would not fit into the
empty swarm either (its nodes are down) steps aside.  Running jobs are kept.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from operator import add

from swarmsched.policies.base import SubmitOrder, ahead_sentence, in_rank_order, is_waiting, joined, keep, start, wait
from swarmsched.policies.placement import place_in
from swarmsched.policies.reason import shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.resources import Share, world_size
from swarmsched.view import ClusterView, Decision, JobView, Plan

Amounts = tuple[int, ...]
"""GPUs, cores, bytes of memory."""


class DominantResourceFairness:
    """See above."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        """It takes none."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Fill what is free; behind a job that does not fit the order is told, and nothing starts."""
        jobs = [job for _, job in in_rank_order(view.jobs, SubmitOrder({}), now_s)]
        filling = _Filling(view, jobs)
        decisions = [keep(job, ()) for job in jobs if not is_waiting(job)]
        while filling.has_more:
            decisions.append(filling.next())
        return Plan(tuple(decisions))


class _Filling:
    """Users by their dominant shares, each with its queue of jobs; equal ones by their first job."""

    def __init__(self, view: ClusterView, jobs: Sequence[JobView]) -> None:
        self._room = Room(view.nodes)
        self._empty = self._room.emptied()
        self._total = _total(view)
        self._used: dict[str, Amounts] = defaultdict(lambda: (0, 0, 0))
        self._queues: dict[str, deque[tuple[int, JobView]]] = defaultdict(deque)
        self._ahead: list[JobView] = []
        self._is_blocked = False
        for number, job in enumerate(jobs):
            if is_waiting(job):
                self._queues[job.card.user].append((number, job))
            else:
                self._count(job, world_size(job.shares) + job.card.hidden_ranks or job.ranks)
        self._heap = [self._entry(user) for user in self._queues]
        heapq.heapify(self._heap)

    @property
    def has_more(self) -> bool:
        """True while anybody waits."""
        return bool(self._heap)

    def next(self) -> Decision:
        """On the next job of the user with the least dominant share."""
        share, _, user = heapq.heappop(self._heap)
        _, job = self._queues[user].popleft()
        why = f"{user or 'nobody by name'} has a dominant share of {share:.0%}"
        decision = self._decide(job, None if self._is_blocked else place_in(self._room, job), why)
        if self._queues[user]:
            heapq.heappush(self._heap, self._entry(user))
        return decision

    def _decide(self, job: JobView, shares: tuple[Share, ...] | None, why: str) -> Decision:
        if shares:
            self._room.take(shares, job.demand)
            self._count(job, job.ranks)
            return start(job, (), shares, joined(start_reason(job, shares), why))
        reason = joined(shortage(job, self._room), why, ahead_sentence(self._ahead))
        self._ahead.append(job)
        if place_in(self._empty, job):
            self._is_blocked = True
            self._count(job, job.ranks)  # those behind it are told their turn as if it had had its own
        return wait(job, (), reason)

    def _entry(self, user: str) -> tuple[float, int, str]:
        shares = [used / total for used, total in zip(self._used[user], self._total, strict=True) if total]
        return (max(shares, default=0.0), self._queues[user][0][0], user)

    def _count(self, job: JobView, ranks: int) -> None:
        for count, demand in ((ranks, job.demand), *[(each.ranks, each.demand) for each in job.card.groups]):
            more = (count * demand.gpus, count * demand.cpus, count * demand.memory_bytes)
            self._used[job.card.user] = tuple(map(add, self._used[job.card.user], more))


def _total(view: ClusterView) -> Amounts:
    capacities = [node.capacity for node in view.nodes if node.is_available]
    return (
        sum([each.gpu_count for each in capacities]),
        sum([each.cpus for each in capacities]),
        sum([each.memory_bytes for each in capacities]),
    )
