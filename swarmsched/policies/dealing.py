"""Dealing GPUs to jobs so that the sum of what they are worth there is largest.

Saxena et al. (IBM, Effective Elastic Scaling of Deep Learning Workloads, 2020) choose sizes by a dynamic program over
devices, which is exact and too slow for thousands of them.  Here GPUs are auctioned in bundles while there are many: a
step of a job from one size to another by its gain for each GPU, the best step of all at once, as a model may be slower
on 8 GPUs than on 4.  An auction is wrong about its last lots alone; those are dealt by the program.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmsched.models.goodput import Floats

EXACT_GPUS = 64
"""So many are dealt exactly."""
LEAST_GAIN = 1e-12


@dataclass(frozen=True)
class Bidder:
    """What each world size is worth, from none; and the GPUs of one rank."""

    value: Floats
    gpus_per_rank: int


def deal(bidders: Sequence[Bidder], gpus: int, least: Sequence[int] = ()) -> list[int]:
    """The world size of each, together at most `gpus`; at least `least`, which must be there."""
    ranks = list(least) or [0] * len(bidders)
    left = gpus - sum([had * each.gpus_per_rank for had, each in zip(ranks, bidders, strict=True)])
    if left > EXACT_GPUS:
        left = auction(bidders, ranks, left, EXACT_GPUS)
    deal_exactly(bidders, ranks, max(0, left))
    return ranks


def auction(bidders: Sequence[Bidder], ranks: list[int], gpus: int, kept: int = 0) -> int:
    """Add to the ranks of each in bundles, until no more than about `kept` GPUs are left; tells how many."""
    heap = [bid for number, each in enumerate(bidders) if (bid := _bid(each, ranks[number], gpus, number))]
    heapq.heapify(heap)
    while heap and gpus > kept:
        _, number, wanted = heapq.heappop(heap)
        needed = (wanted - ranks[number]) * bidders[number].gpus_per_rank
        if needed <= gpus:
            ranks[number] = wanted
            gpus -= needed
        again = _bid(bidders[number], ranks[number], gpus, number)
        if again:
            heapq.heappush(heap, again)
    return gpus


def _bid(bidder: Bidder, ranks: int, gpus: int, number: int) -> tuple[float, int, int] | None:
    """Minus the gain for each GPU of the job's best next step, and to which size it goes."""
    reachable = bidder.value[ranks + 1 : ranks + gpus // bidder.gpus_per_rank + 1]
    if not len(reachable):
        return None
    gain = (reachable - bidder.value[ranks]) / np.arange(1, len(reachable) + 1)
    best = int(gain.argmax())
    return (-float(gain[best]) / bidder.gpus_per_rank, number, ranks + best + 1) if gain[best] > LEAST_GAIN else None


def deal_exactly(bidders: Sequence[Bidder], ranks: list[int], gpus: int) -> None:
    """Add to the ranks of each by the dynamic program: the best sum for every number of GPUs, bidder by bidder."""
    best = np.zeros(gpus + 1)
    chosen: list[tuple[int, Floats]] = []
    for number, bidder in enumerate(bidders):
        gain = bidder.value[ranks[number] :][: gpus // bidder.gpus_per_rank + 1] - bidder.value[ranks[number]]
        if len(gain) < 2 or gain.max() <= LEAST_GAIN:
            continue
        width = (len(gain) - 1) * bidder.gpus_per_rank
        before = np.concatenate((np.full(width, -np.inf), best))
        # Row g, column k: what g GPUs are worth when this bidder gets k more ranks of them.
        rows = np.lib.stride_tricks.sliding_window_view(before, width + 1)[:, :: -bidder.gpus_per_rank] + gain
        steps = rows.argmax(axis=1)
        best = rows[np.arange(gpus + 1), steps]
        chosen.append((number, steps))
    for number, steps in reversed(chosen):
        ranks[number] += int(steps[gpus])
        gpus -= int(steps[gpus]) * bidders[number].gpus_per_rank
