"""Goodput: progress a second of a job on k ranks with its best batch (Qiao et al., Pollux, OSDI 2021, section 3).

Step times are measured points, linear between local batches, where there are any for that many ranks and nodes, and the
fitted speed model elsewhere.  They change seldom and are kept; the worth of a batch changes with each report.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swarmsched.estimate import BatchRange, Estimate, NoisePoint, SpeedPoint
from swarmsched.models.batch import Split, candidates, split
from swarmsched.models.fit import fit_speeds, tried
from swarmsched.models.speed import LEAST_S, SpeedModel, StepTime, usable

BATCHES = 24
"""Global batch sizes that are looked at."""
KEPT = 8_192
"""Tables of step times that are remembered at most: with fewer than there are jobs each plan would make all of them
anew."""
ROUNDS_KEPT = 8
"""A table is forgotten once that many times as many were asked for as are remembered: its job has measured more, or has
ended, and one of 256 ranks takes 50 kB."""
HASHED_POINTS = 16
NEW_MOST = 512
"""Jobs of which step times are made in one plan: each takes some 3 ms of one core, and there may be thousands."""
ROWS_OF_ONE = 256
"""World sizes; a job with more counts as several."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StepTimes:
    """Seconds of a step by configuration: measured where known, else predicted, else infinite."""

    def __init__(self, speed: Sequence[float], points: Sequence[SpeedPoint]) -> None:
        self._model = SpeedModel(*speed) if speed else None
        self._measured: dict[tuple[int, int], tuple[list[int], list[SpeedPoint]]] = {}
        self._nodes: dict[int, set[int]] = {}
        for point in sorted(points, key=lambda one: one.local_batch):
            self._nodes.setdefault(point.ranks, set()).add(point.nodes)
            batches, times = self._measured.setdefault((point.ranks, point.nodes), ([], []))
            batches.append(point.local_batch)
            times.append(point)

    def row(self, ranks: int, nodes: int, dealt: Iterable[Split | None]) -> list[float]:
        """Seconds of one step for each batch that was dealt to these ranks; infinite for those that could not be."""
        return [self.step_s(ranks, nodes, *each) if each else inf for each in dealt]

    def rows(self, nodes: Sequence[int], allowed: BatchRange) -> Floats:
        """The same for 1, 2, ... ranks on so many nodes each, and all candidates for the batch."""
        if self._model is None:
            return np.array(
                [self.row(ranks, there, _dealt(allowed, ranks)) for ranks, there in enumerate(nodes, start=1)]
            )
        dealt = _layout(allowed, len(nodes))
        step_s, sync_s = self._model.step_times(nodes, dealt.local_batch)
        for row, there in enumerate(nodes):
            batches, times = self._measured.get((row + 1, there), ((), ()))
            if batches:
                at = dealt.local_batch[row]
                is_between = (at >= batches[0]) & (at <= batches[-1])
                step_s[row, is_between] = np.interp(at[is_between], batches, [time.step_s for time in times])
                sync_s[row, is_between] = np.interp(at[is_between], batches, [time.sync_s for time in times])
        whole_s = np.maximum(LEAST_S, step_s + dealt.more_micro_steps * (step_s - sync_s))
        return np.where(dealt.is_possible, whole_s, inf)

    def step_s(self, ranks: int, nodes: int, local_batch: int, micro_steps: int) -> float:
        """Seconds of one step; infinite where nothing is known."""
        time = (
            self._between(ranks, nodes, local_batch)
            or self._predicted(ranks, nodes, local_batch)
            or self._nearby(ranks, nodes, local_batch)
        )
        return max(LEAST_S, time.with_micro_steps(micro_steps)) if time else inf

    def _nearby(self, ranks: int, nodes: int, local_batch: int) -> StepTime | None:
        """As measured with as many ranks on the nearest number of nodes."""
        for other in sorted(self._nodes.get(ranks, ()), key=lambda count: (abs(count - nodes), count)):
            time = self._between(ranks, other, local_batch)
            if time:
                return time
        return None

    def _between(self, ranks: int, nodes: int, local_batch: int) -> StepTime | None:
        batches, times = self._measured.get((ranks, nodes), ((), ()))
        at = bisect_left(batches, local_batch)
        if at == len(batches):
            return None
        above = times[at]
        if above.local_batch == local_batch:
            return StepTime(above.step_s, above.sync_s)
        if not at:
            return None
        below = times[at - 1]
        part = (local_batch - below.local_batch) / (above.local_batch - below.local_batch)
        return StepTime(
            below.step_s + part * (above.step_s - below.step_s), below.sync_s + part * (above.sync_s - below.sync_s)
        )

    def _predicted(self, ranks: int, nodes: int, local_batch: int) -> StepTime | None:
        return self._model.step_time(ranks, nodes, local_batch) if self._model else None


@dataclass
class StepTable:
    """Seconds of a step by world size (row, from 0) and global batch (column), each on the fewest nodes."""

    times: StepTimes
    allowed: BatchRange
    ranks_most: int
    ranks_per_node: int
    batches: Ints = field(init=False)
    packed: Floats = field(init=False)
    _spread: dict[tuple[int, int], Floats] = field(default_factory=dict)
    _columns: dict[int, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batches = np.array(candidates(self.allowed, BATCHES))
        self.packed = np.full((self.ranks_most + 1, len(self.batches)), inf)
        self.packed[1:] = self.times.rows(
            [self._fewest(ranks) for ranks in range(1, self.ranks_most + 1)], self.allowed
        )

    def _fewest(self, ranks: int) -> int:
        return ceil(ranks / self.ranks_per_node)

    def on(self, ranks: int, nodes: int) -> Floats:
        """Seconds by global batch on so many nodes; infinite where a batch cannot be dealt to the ranks."""
        if nodes == self._fewest(ranks) and ranks <= self.ranks_most:  # one may hold more than others are to have
            return np.asarray(self.packed[ranks])
        known = self._spread.get((ranks, nodes))
        if known is None:
            row = self.times.row(ranks, nodes, _dealt(self.allowed, ranks))
            known = self._spread[ranks, nodes] = np.array(row)
        return known

    def of_batch(self, batch: int) -> Floats:
        """Seconds by world size with this global batch, on the fewest nodes; infinite for no ranks."""
        known = self._columns.get(batch)
        if known is None:
            sizes = range(1, self.ranks_most + 1)
            rows = [self.times.row(ranks, self._fewest(ranks), [split(batch, ranks, self.allowed)]) for ranks in sizes]
            known = self._columns[batch] = np.array([inf, *chain.from_iterable(rows)])
        return known


class _Layout(NamedTuple):
    """How each candidate batch (column) is dealt to 1, 2, ... ranks (row)."""

    local_batch: Floats
    more_micro_steps: Floats  # after the first
    is_possible: NDArray[np.bool_]


@lru_cache(maxsize=256)
def _layout(allowed: BatchRange, ranks_most: int) -> _Layout:
    rows = [_dealt(allowed, ranks) for ranks in range(1, ranks_most + 1)]
    filled = [[each or Split(1, 1) for each in row] for row in rows]
    local = np.array([[float(each.local_batch) for each in row] for row in filled])
    more = np.array([[each.micro_steps - 1.0 for each in row] for row in filled])
    return _Layout(local, more, np.array([[each is not None for each in row] for row in rows]))


@lru_cache(maxsize=16_384)
def _dealt(allowed: BatchRange, ranks: int) -> tuple[Split | None, ...]:
    """How each candidate batch is dealt to so many ranks: the same for every fit."""
    return tuple([split(batch, ranks, allowed) for batch in candidates(allowed, BATCHES)])


class Goodput:
    """What a job makes of GPUs now.  `rate`: progress a second by world size, 0 where it cannot run; read only.

    With `own`, what the job itself has reported makes of them, batches are that one's choice.
    """

    def __init__(self, table: StepTable, noise: Sequence[NoisePoint], own: "Goodput | None" = None) -> None:
        self.noise, self.own = noise, own
        self._table = table
        self.gains: Floats = own.gains if own else gains(table.batches, table.allowed.first, noise)
        rates = self.packed
        self.rate: Floats = rates[np.arange(len(rates)), _best(rates, own.packed if own else rates)]
        self._columns: dict[tuple[int, int], int] = {}

    @property
    def packed(self) -> Floats:
        """Progress a second by world size and batch, each on the fewest nodes."""
        return np.asarray(self.gains / self._table.packed)

    def by_batch(self, ranks: int, nodes: int) -> Floats:
        """Progress a second by batch on so many nodes."""
        return np.asarray(self.gains / self._table.on(ranks, nodes))

    def with_batch(self, batch: int) -> Floats:
        """Progress a second by world size with a global batch that may not be changed."""
        gain = float(gains(np.array([batch]), self._table.allowed.first, self.noise)[0])
        return gain / self._table.of_batch(batch)

    @property
    def ranks_most(self) -> int:
        """The largest world size that was looked at."""
        return len(self.rate) - 1

    def batch(self, ranks: int, nodes: int) -> int:
        """The global batch that makes most of so many ranks there."""
        return int(self._table.batches[self._column(ranks, nodes)])

    def step_s(self, ranks: int, nodes: int) -> float:
        """Seconds of a step with that batch; 0 where nothing is known."""
        seconds = float(self._table.on(ranks, nodes)[self._column(ranks, nodes)])
        return seconds if seconds < inf else 0.0

    def on(self, ranks: int, nodes: int) -> float:
        """Progress a second on so many nodes."""
        return float(self.by_batch(ranks, nodes)[self._column(ranks, nodes)])

    def gain(self, ranks: int, nodes: int, batch: int) -> float:
        """How much more progress the best batch makes than this one, as a ratio; infinite for one of which nothing is
        known."""
        if self.own:
            return self.own.gain(ranks, nodes, batch)
        (found,) = np.nonzero(self._table.batches == batch)
        now = float(self.by_batch(ranks, nodes)[found[0]]) if len(found) else 0.0
        return self.on(ranks, nodes) / now if now else inf

    def _column(self, ranks: int, nodes: int) -> int:
        column = self._columns.get((ranks, nodes))
        if column is None:
            rates = self.by_batch(ranks, nodes)
            column = int(_best(rates, self.own.by_batch(ranks, nodes) if self.own else rates))
            self._columns[ranks, nodes] = column
        return column


def _best(rates: Floats, own: Floats) -> Ints:
    """Columns by the job's own rates; where it cannot tell, the smallest batch with which it can run."""
    return np.asarray(np.where(own.max(axis=-1) > 0.0, own.argmax(axis=-1), (rates > 0.0).argmax(axis=-1)))


def gains(batches: Ints, first: int, noise: Sequence[NoisePoint]) -> Floats:
    """Steps of the first batch that a step of each batch is worth. With s = batch / first that is (n + 1) / (n / s +
    1).

    Without a measured noise a batch larger than the first is taken to be worth no more than the first: what nobody has
    measured may not be bet on.
    """
    if not noise or not first:
        return np.ones(len(batches))
    ratio = np.interp(batches, [point.batch for point in noise], [point.noise for point in noise])
    scale = batches / first
    return (ratio + 1.0) / (ratio / scale + 1.0)


class Question(NamedTuple):
    """Of which job the goodput is asked, and for how many ranks, so many of them on a node."""

    estimate: Estimate
    allowed: BatchRange
    ranks_most: int
    ranks_per_node: int
    own: Estimate | None = None  # that chooses batches, where it is another
    tries: bool = False  # it chooses a batch alone: `fit.tried`

    @property
    def chooser(self) -> "Question | None":
        """A question whose answer chooses the batches; None where that is the answer to this one."""
        own = self.own or self.estimate
        if self.tries or self.allowed.first >= self.allowed.most or not (self.own or _is_fitted(own)):
            return None
        return self._replace(estimate=own, own=None, tries=True)


_Key = tuple[object, ...]


@dataclass
class _Kept:
    """`points`: so that nothing else can have their address."""

    points: Sequence[SpeedPoint]
    table: StepTable
    goodput: Goodput
    asked: int = 0  # questions by when it was the answer to one


class GoodputBook:
    """Goodput of estimates, kept from plan to plan: step times change seldom, the noise with each report."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()  # the one asked for last comes last
        self._asked = self._made = 0
        self.is_behind = False  # some were left for the next plan

    def begin(self) -> None:
        """A plan begins."""
        self._made, self.is_behind = 0, False

    def goodputs(self, questions: Sequence[Question]) -> list[Goodput | None]:
        """Each job's rates for 1 to its `ranks_most` ranks. Many take less time than one after another where some are
        new, and those that are too many of these for one plan get None."""
        asked = [*questions, *[chooser for each in questions if (chooser := each.chooser)]]
        new = {key: each for each in asked if (key := _key(each)) not in self._kept}
        made: dict[_Key, Question] = {}
        for key, each in new.items():
            self._made += 1 + each.ranks_most // (ROWS_OF_ONE + 1)
            if self._made > NEW_MOST:
                self.is_behind = True
                break
            made[key] = each
        for (key, each), table in zip(made.items(), _tables(list(made.values())), strict=True):
            self._kept[key] = _Kept(each.estimate.points, table, Goodput(table, each.estimate.noise))
        self._asked += len(asked)
        answers = [self._answer(each) for each in questions]
        self._forget()
        return answers

    def _answer(self, question: Question) -> Goodput | None:
        chooser = question.chooser
        own = self._answer(chooser) if chooser else None
        key, noise = _key(question), question.estimate.noise
        kept = self._kept.get(key)
        if kept is None or (chooser and own is None):
            return None
        kept.asked = self._asked
        self._kept.move_to_end(key)
        if kept.goodput.noise != noise or kept.goodput.own is not own:
            kept.goodput = Goodput(kept.table, noise, own)
        return kept.goodput

    def _forget(self) -> None:
        """Those that nobody asks for any more."""
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            if len(self._kept) <= KEPT and self._asked - oldest.asked <= ROUNDS_KEPT * len(self._kept):
                return
            del self._kept[key]


def _key(question: Question) -> _Key:
    estimate, *rest = question[:4]
    # Thousands of points are shared by jobs and plans, and too long to hash each time.
    points = estimate.points if len(estimate.points) <= HASHED_POINTS else id(estimate.points)
    return (points, estimate.speed, estimate.is_partial, question.tries, *rest)


def _tables(questions: Sequence[Question]) -> list[StepTable]:
    estimates = [usable(each.estimate) for each in questions]
    fitted = iter(fit_speeds([each.points for each in estimates if _is_fitted(each)]))
    tables = []
    for each, estimate in zip(questions, estimates, strict=True):
        speed: Sequence[float] = estimate.speed
        if _is_fitted(estimate):
            model = next(fitted).model
            speed = tried(model, estimate.points) if each.tries else model
        times = StepTimes(speed, estimate.points)
        tables.append(StepTable(times, each.allowed, each.ranks_most, each.ranks_per_node))
    return tables


def _is_fitted(estimate: Estimate) -> bool:
    return estimate.is_partial and bool(estimate.points) and not estimate.speed
