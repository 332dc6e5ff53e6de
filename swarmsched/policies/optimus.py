"""Optimus: GPUs go one by one to the job whose remaining time falls most by one more (Peng et al., EuroSys 2018, 4.1).

Every job gets its least size first, whoever came first before the others; then the largest gain, in seconds of
remaining time, takes the next GPU, until none gains or none is free.  Gains of jobs whose estimate is uncertain are
damped.  The batch is the owner's.  Placement (section 4.2): whoever keeps its size keeps its hosts; the others, the
smallest first, take the freest servers, evenly where several are needed.  A job without an estimate stays at its least
size.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarmsched.ids import NodeId
from swarmsched.models.goodput import Floats, GoodputBook
from swarmsched.policies.base import amount, keep, wait
from swarmsched.policies.placement import permitted, start_or_claim, with_other_groups
from swarmsched.policies.reason import shortage
from swarmsched.policies.resizing import (
    dealt_to_one,
    elastic_of,
    gpu_of,
    measured,
    named,
    opened,
    ranks_looked_at,
    reviewed,
)
from swarmsched.policies.room import Room, may_resize
from swarmsched.resources import Share, world_size
from swarmsched.view import Allocation, Change, ClusterView, Decision, JobView, Plan


@dataclass
class _Sized:
    """A job, its remaining seconds by world size, and the size that it gets."""

    job: JobView
    least: int
    left_s: Floats
    damping: float
    ranks: int = 0

    @property
    def per_rank(self) -> int:
        return max(1, self.job.demand.gpus)

    @property
    def held(self) -> int:
        return world_size(self.job.shares)

    @property
    def is_kept(self) -> bool:
        """True when it keeps its size, and so its hosts."""
        return 0 < self.ranks == self.held

    @property
    def gain_s(self) -> float:
        """What one more rank saves, for each of its GPUs."""
        if self.ranks + 1 >= len(self.left_s):
            return 0.0
        return float(self.damping * (self.left_s[self.ranks] - self.left_s[self.ranks + 1]) / self.per_rank)


class Optimus:
    """See above."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._damping = parameters["damping"]
        self._book = GoodputBook()

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Sizes, then hosts."""
        self._book.begin()
        jobs, others, room, free = opened(view, may_resize)
        per_node = max((node.total_gpus for node in view.nodes), default=1) or 1
        sized = [self._sized(job, dealt_to_one(job, room, free), per_node, gpu_of(job, room)) for job in jobs]
        _deal(sized, free)
        return reviewed(Plan((*others, *_placed(sized, room, Room(view.nodes)))), self._book)

    def _sized(self, job: JobView, gpus: int, per_node: int, gpu: str) -> _Sized:
        per_rank = max(1, job.demand.gpus)
        elastic, estimate = elastic_of(job), job.card.estimate
        most = ranks_looked_at(job, gpus)
        goodput = measured(job, estimate, self._book, most, max(1, per_node // per_rank), gpu)
        if estimate is None or goodput is None or not estimate.remaining:
            return _Sized(job, elastic.ranks_least, np.zeros(elastic.ranks_least + 1), 1.0)
        rate = goodput.with_batch(elastic.global_batch or elastic.batches.first)
        least = max(elastic.ranks_least, int((rate > 0.0).argmax()))
        damping = self._damping if estimate.remaining_error > UNCERTAIN else 1.0
        return _Sized(job, least, estimate.remaining / np.maximum(rate, TINY), damping)


UNCERTAIN = 0.2
"""Relative error of the remaining work above which a job counts as one in its beginning."""
TINY = 1e-12


def _deal(sized: Sequence[_Sized], free: int) -> None:
    for each in sorted(sized, key=lambda one: (one.job.card.submitted_utc_s, one.job.job_id)):
        if each.least * each.per_rank <= free:
            each.ranks = each.least
            free -= each.least * each.per_rank
    heap = [(-each.gain_s, number) for number, each in enumerate(sized) if each.ranks and each.gain_s > 0.0]
    heapq.heapify(heap)
    while heap and free:
        _, number = heapq.heappop(heap)
        each = sized[number]
        if each.per_rank > free:
            continue
        each.ranks += 1
        free -= each.per_rank
        if each.gain_s > 0.0:
            heapq.heappush(heap, (-each.gain_s, number))


def _placed(sized: Sequence[_Sized], room: Room, now: Room) -> list[Decision]:
    """Those that give something up come first, and each finds a place in what those before it leave: shepherds who
    follow them by themselves must not wait for one another."""
    for each in sized:
        room.take(each.job.shares, each.job.demand)
    kept = [keep(each.job, ()) for each in sized if each.is_kept]
    others = [each for each in sized if not each.is_kept]
    others.sort(key=lambda one: (one.ranks >= one.held, one.ranks * one.per_rank, one.job.job_id))
    return named([*kept, *[_decision(each, room, now) for each in others]])


def _decision(each: _Sized, room: Room, now: Room) -> Decision:
    job, held = each.job, each.held
    room.release(job.shares, job.demand)
    shares = with_other_groups(room, job, lambda: _freest(each, room))
    if not shares:
        if held:
            return Decision(job.job_id, Change.STOP, "its GPUs shorten other jobs more")
        return wait(job, (), shortage(job, room))
    room.take(shares, job.demand)
    if shares == job.shares:
        return keep(job, ())
    ranks = world_size(shares)
    left = f": {each.left_s[ranks]:.0f} s left" if each.left_s[ranks] else ""
    reason = f"{amount(ranks, 'rank')}{left}"
    if not held:
        return start_or_claim(job, Allocation(shares), now, reason)
    return Decision(job.job_id, Change.GROW if ranks > held else Change.SHRINK, reason, Allocation(shares))


def _freest(each: _Sized, room: Room) -> tuple[Share, ...]:
    """The fewest servers that hold it, the freest first, each with as many ranks as the others if they have room."""
    job = each.job
    permitted_there = permitted(room.fits(job.demand), job.card.nodes, job.excluded)
    groups = [permitted_there] if job.card.mixed_gpus else list(room.apart(permitted_there, job.demand).values())
    alike = max(groups, key=lambda group: min(sum(group.values()), each.ranks), default={})
    allowed = sorted(alike.items(), key=lambda item: (-item[1], item[0]))
    for count in range(1, len(allowed) + 1):
        chosen = allowed[:count]
        if sum(held for _, held in chosen) >= each.ranks:
            return _even(chosen, each.ranks)
    return _even(allowed, min(each.ranks, sum(held for _, held in allowed))) if _holds_least(each, allowed) else ()


def _holds_least(each: _Sized, allowed: Iterable[tuple[NodeId, int]]) -> bool:
    return 0 < each.least <= sum(held for _, held in allowed)


def _even(chosen: Sequence[tuple[NodeId, int]], ranks: int) -> tuple[Share, ...]:
    """Dealt in turn, so that no server has more than another that has room for as many."""
    dealt = dict.fromkeys([node for node, _ in chosen], 0)
    while ranks:
        for node, held in chosen:
            if ranks and dealt[node] < held:
                dealt[node] += 1
                ranks -= 1
    return tuple([Share(node, count) for node, count in dealt.items() if count])
