"""Elastic Tiresias: classes of attained service decide who runs, marginal gain who grows (Wu et al., EDL, 2019).

First the line of `tiresias` is dealt the sizes that were asked for.  While more than `waiting_max` jobs wait, those
that run and have left the first class shrink to their least size (compaction).  What is free then goes where it speeds
up most: a waiting job counts with the speed-up of its least size for each GPU, a running one with that of one more
(expansion); the higher class first where gains are equal.  The batch is the owner's.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from swarmsched.models.goodput import Floats, GoodputBook
from swarmsched.policies.ranked import may_move
from swarmsched.policies.resizing import (
    Sized,
    deal_and_place,
    dealt_to_one,
    elastic_of,
    gpu_of,
    measured,
    opened,
    reviewed,
    unmeasured,
)
from swarmsched.policies.tiresias import LinePlace, Tiresias
from swarmsched.resources import world_size
from swarmsched.view import ClusterView, JobView, Plan


@dataclass
class Grown(Sized):
    """A job by its place in the line, with its speed-up over one GPU by world size, from its least on."""

    place: LinePlace
    speed_up: Floats

    @property
    def why(self) -> str:
        """The job's class."""
        return self.place.told

    @property
    def asked(self) -> int:
        """The size that it asked for, if it can train with that."""
        return min(max(self.least, self.job.ranks), len(self.speed_up) - 1)

    @property
    def next_size(self) -> int:
        """The job's least size, or one more than it has."""
        return self.ranks + 1 if self.ranks else self.least

    @property
    def gain(self) -> float:
        """What it gains with its next size, for each rank; 0 where it takes no more."""
        if self.next_size >= len(self.speed_up):
            return 0.0
        before = self.speed_up[self.ranks] if self.ranks else 0.0
        return float((self.speed_up[self.next_size] - before) / (self.next_size - self.ranks))


class ElasticTiresias(Tiresias):
    """See above."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        super().__init__(parameters)
        self._waiting_max = parameters["waiting_max"]
        self._book = GoodputBook()

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """The line, compaction, expansion, hosts."""
        self._book.begin()
        view = replace(view, jobs=tuple([_as_it_runs(job) for job in view.jobs]))
        line = self._line(view, now_s)
        jobs, kept, room, free = opened(view, may_move)
        ids = {job.job_id for job in jobs}
        per_node = max((node.total_gpus for node in view.nodes), default=1) or 1
        grown = [
            self._grown(place, dealt_to_one(place.job, room, free), per_node, gpu_of(place.job, room))
            for place in line.places
            if place.job.job_id in ids
        ]
        decisions = deal_and_place(grown, partial(self._deal, grown, free), room, view)
        return reviewed(Plan((*kept, *decisions), line.memory, review_s=line.review_s), self._book)

    def _deal(self, grown: Sequence[Grown], free: int) -> None:
        _expand(grown, self._compacted(grown, _down_the_line(grown, free)))

    def _grown(self, place: LinePlace, gpus: int, per_node: int, gpu: str) -> Grown:
        job, elastic = place.job, elastic_of(place.job)
        per_rank = max(1, job.demand.gpus)
        most = max(1, elastic.ranks_least, min(elastic.ranks_most, gpus // per_rank))
        goodput = measured(job, job.card.estimate, self._book, most, max(1, per_node // per_rank), gpu)
        rate = goodput.with_batch(elastic.global_batch or elastic.batches.first) if goodput else unmeasured(job, most)
        if not rate[elastic.ranks_least :].any():  # nothing that was measured lets it train
            rate = unmeasured(job, most)
        first = int((rate > 0.0).argmax())
        speed_up = rate * (first / rate[first])
        least = max(first, elastic.ranks_least)
        return Grown(job, None, least, place, speed_up)

    def _compacted(self, grown: Sequence[Grown], free: int) -> int:
        """GPUs that are free then."""
        if sum([not each.ranks for each in grown]) > self._waiting_max:
            for each in grown:
                if each.ranks and each.place.service_class:
                    free += (each.ranks - each.least) * each.per_rank
                    each.ranks = each.least
        return free


def _as_it_runs(job: JobView) -> JobView:
    """Where no size is to be chosen, the one that it has: it may have been chosen when it started."""
    held = world_size(job.shares)
    return job if job.card.elastic or held in (0, job.ranks) else replace(job, card=replace(job.card, ranks=held))


def _down_the_line(grown: Sequence[Grown], free: int) -> int:
    """Smaller jobs past larger ones that do not fit; tells what is left."""
    free -= sum([each.reserved * each.per_rank for each in grown])
    for each in grown:
        more = (each.asked - each.reserved) * each.per_rank
        each.ranks = each.asked if more <= free else each.reserved
        free -= (each.ranks - each.reserved) * each.per_rank
    return free


def _expand(grown: Sequence[Grown], free: int) -> None:
    heap = [bid for number in range(len(grown)) if (bid := _bid(grown, number))]
    heapq.heapify(heap)
    while heap and free:
        number = heapq.heappop(heap)[-1]
        each = grown[number]
        needed = (each.next_size - each.ranks) * each.per_rank
        if needed > free:
            continue
        free -= needed
        each.ranks = each.next_size
        if bid := _bid(grown, number):
            heapq.heappush(heap, bid)


def _bid(grown: Sequence[Grown], number: int) -> tuple[float, int, int] | None:
    """Minus its gain, its class, its place in the line; None where it gains nothing."""
    each = grown[number]
    return (-each.gain, each.place.service_class, number) if each.gain > 0.0 else None
