"""Dealing GPUs to jobs so that the sum of what they are worth there is largest.

Saxena et al. (IBM, Effective Elastic Scaling of Deep Learning Workloads, 2020) choose sizes by a dynamic program over
devices, which is exact and too slow for thousands of them.  Here GPUs are auctioned in bundles while there are many: a
step of a job from one size to another by its gain for each GPU, the best step of all at once, as a model may be slower
on 8 GPUs than on 4.  An auction is wrong about its last lots alone; those are dealt by the program.
"""

import heapq
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from swarmsched.models.goodput import Floats

EXACT_GPUS = 64
"""So many are dealt exactly."""
LEAST_GAIN = 1e-12


class Bidder(NamedTuple):
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
    gain = (reachable - bidder.value[ranks]) / _counts(len(reachable))
    best = int(gain.argmax())
    return (-float(gain[best]) / bidder.gpus_per_rank, number, ranks + best + 1) if gain[best] > LEAST_GAIN else None


@cache
def _counts(count: int) -> Floats:
    return np.arange(1.0, count + 1)


def deal_exactly(bidders: Sequence[Bidder], ranks: list[int], gpus: int) -> None:
    """Add to the ranks of each by the dynamic program: the best sum for every number of GPUs, bidder by bidder."""
    gains = _gains(bidders, ranks, gpus)
    chosen = _promising(bidders, gains, gpus) if len(gains) > gpus else list(gains)
    widest = max([(len(gains[number]) - 1) * bidders[number].gpus_per_rank for number in chosen], default=0)
    before = np.full(widest + gpus + 1, -np.inf)  # what less than no GPUs are worth comes first
    sums = [np.zeros(gpus + 1)]
    for number in chosen:
        before[widest:] = sums[-1]
        sums.append(np.maximum.reduce(_windows(before, gains[number], bidders[number].gpus_per_rank, gpus)))
    for number, after in zip(reversed(chosen), reversed(sums[:-1]), strict=True):
        per_rank, gain = bidders[number].gpus_per_rank, gains[number]
        more = int((after[gpus::-per_rank][: len(gain)] + gain[: gpus // per_rank + 1]).argmax())
        ranks[number] += more
        gpus -= more * per_rank


def _gains(bidders: Sequence[Bidder], ranks: Sequence[int], gpus: int) -> dict[int, Floats]:
    """What more ranks add, from none, as far as there are GPUs; of those to whom any is worth its GPUs.

    Zero where it is not.
    """
    reachable = [
        each.value[had : had + gpus // each.gpus_per_rank + 1] for each, had in zip(bidders, ranks, strict=True)
    ]
    table = np.full((len(bidders), max([len(value) for value in reachable], default=0)), np.nan)
    for row, value in enumerate(reachable):
        table[row, : len(value)] = value
    gain = table - table[:, :1]
    gain = np.where(gain > LEAST_GAIN, gain, 0.0)
    return {row: gain[row, : len(reachable[row])] for row in np.flatnonzero(gain.any(axis=1)).tolist()}


def _windows(before: Floats, gain: Floats, per_rank: int, gpus: int) -> Floats:
    """Row k, column g: what g GPUs are worth when this bidder gets k more ranks of them."""
    (step,) = before.strides
    first = (len(before) - gpus - 1) * step
    rows: Floats = np.ndarray((len(gain), gpus + 1), before.dtype, before, first, (-per_rank * step, step))
    return rows + gain[:, None]


def _promising(bidders: Sequence[Bidder], gains: Mapping[int, Floats], gpus: int) -> list[int]:
    """Without those that cannot matter.  Beside a winner of s GPUs there are at most gpus - s others: among the
    gpus - s + 1 that gain most from s there is one that gets nothing, and could take the place of any that gains less.
    """
    table = np.zeros((len(gains), gpus + 1))
    for row, (number, gain) in enumerate(gains.items()):
        per_rank = bidders[number].gpus_per_rank
        table[row, : (len(gain) - 1) * per_rank + 1 : per_rank] = gain
    numbers, found = list(gains), set[int]()
    for size in np.flatnonzero(table.any(axis=0)).tolist():
        column, count = table[:, size], gpus - size + 1
        top = column.argpartition(-count)[-count:]
        found.update(top[column[top] > 0.0].tolist())
    return [numbers[row] for row in sorted(found)]
