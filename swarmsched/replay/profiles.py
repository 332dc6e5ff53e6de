"""Measured profiles: how fast a model trains on a placement, and how much a step of a batch is worth.

The physics of the Pollux artifact (Qiao et al., OSDI 2021): step and synchronisation time are interpolated between
measurements, linearly over the local batch within a measured placement, else over (nodes, GPUs, local batch); the
gradient's statistics between batch sizes, by epoch.  Only jobs of a replay look here, never a policy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, log
from typing import NamedTuple

import numpy as np
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError

from swarmsched.estimate import SpeedPoint, configuration
from swarmsched.models.fit import fit_speed
from swarmsched.models.speed import SpeedModel, StepTime

Shape = tuple[int, ...]
"""GPUs on each node, in node order: (4, 2)."""


class Measured(NamedTuple):
    """One measured configuration; without `shape`, GPUs that fill their nodes evenly."""

    shape: Shape
    nodes: int
    gpus: int
    local_batch: int
    step_s: float
    sync_s: float
    gpu: str = ""  # class of the GPUs; empty: of any


class EpochStatistics(NamedTuple):
    """What training at one fixed batch size showed up to the end of an epoch; progress in steps of the first batch."""

    progress: float
    grad_sqr: float
    grad_var: float


@dataclass(frozen=True)
class BatchLimits:
    """What a model's owner allows: batch sizes in samples, and the epochs after which the job is done."""

    initial_batch: int
    batch_max: int
    local_batch_min: int
    local_batch_max: int
    epochs: int


@dataclass(frozen=True, eq=False)
class Profile:
    """One model.  Where it was measured on several classes of GPUs, a step waits for the slowest of them."""

    name: str
    limits: BatchLimits
    measured: Sequence[Measured]
    statistics: Mapping[int, Sequence[EpochStatistics]]  # by batch size, one for each epoch
    _known: dict[tuple[Shape, int], StepTime | None] = field(default_factory=dict, repr=False)
    _parts: dict[frozenset[str], "Profile"] = field(default_factory=dict, repr=False)

    def on(self, gpus: Iterable[str]) -> "Profile":
        """On GPUs of these classes alone; as it is where no class was told, or none measured."""
        wanted = self.classes.intersection(gpus)
        if not wanted or wanted == self.classes:
            return self
        if wanted not in self._parts:
            measured = [each for each in self.measured if each.gpu in wanted]
            self._parts[wanted] = Profile(self.name, self.limits, measured, self.statistics)
        return self._parts[wanted]

    @cached_property
    def classes(self) -> frozenset[str]:
        """Classes of GPUs that it was measured on; the empty one stands for any."""
        return frozenset([each.gpu for each in self.measured])

    def step_time(self, shape: Shape, local_batch: int) -> StepTime:
        """Seconds of one step on a placement.

        GPUs on fewer or more nodes than were measured with as many train as on the nearest number of nodes.  Where
        nothing was measured with as many, the nearest measurement stands in, times what a fit to all of them has
        between the two.
        """
        return self._near_time(shape, local_batch) or self._guessed(shape, local_batch)

    def knows(self, shape: Shape, local_batch: int) -> bool:
        """Whether something was measured with as many GPUs: else the time of a step is a guess."""
        return self._near_time(shape, local_batch) is not None

    def _near_time(self, shape: Shape, local_batch: int) -> StepTime | None:
        found = self.measured_time(shape, local_batch)
        if found is None:
            nodes, gpus = len(shape), sum(shape)
            others = sorted(range(1, gpus + 1), key=lambda count: (abs(count - nodes), count))
            near = (self.measured_time(even(gpus, count), local_batch) for count in others)
            found = next((time for time in near if time), None)
        return found

    def _guessed(self, shape: Shape, local_batch: int) -> StepTime:
        """Of several classes the slowest, each by its own measurements."""
        parts = [self.on([gpu]) for gpu in sorted(self.classes)]
        return max(part._by_fit(sum(shape), len(shape), local_batch) for part in parts)  # noqa: SLF001  # of one each

    def _by_fit(self, gpus: int, nodes: int, local_batch: int) -> StepTime:
        def distance(one: SpeedPoint) -> float:
            pairs = ((one.ranks, gpus), (one.nodes, nodes), (one.local_batch, local_batch))
            return sum([abs(log(there / here)) for there, here in pairs])

        near = min(self._points, key=lambda one: (distance(one), configuration(one)))
        there, here = (self._fit.step_time(*where) for where in (configuration(near), (gpus, nodes, local_batch)))
        return StepTime(near.step_s * here.step_s / there.step_s, near.sync_s * here.step_s / there.step_s)

    @cached_property
    def _points(self) -> list[SpeedPoint]:
        return [SpeedPoint(each.gpus, each.nodes, each.local_batch, each.step_s, each.sync_s) for each in self.measured]

    @cached_property
    def _fit(self) -> SpeedModel:
        return fit_speed(self._points).model

    def measured_time(self, shape: Shape, local_batch: int) -> StepTime | None:
        """The same between measurements alone, on the slowest class; None outside of them."""
        key = canonical(shape), local_batch
        if key not in self._known:
            parts = [self.on([gpu]) for gpu in self.classes]
            times = [part._interpolated(*key) for part in parts]  # noqa: SLF001  # of one class each
            self._known[key] = None if None in times else max(time for time in times if time)
        return self._known[key]

    def progress_at(self, epoch: int) -> float:
        """Steps of the first batch that are done when so many epochs are."""
        return self._first[epoch - 1].progress if epoch else 0.0

    @property
    def total_progress(self) -> float:
        """Steps of the first batch until the job is done."""
        return self.progress_at(self.limits.epochs)

    def epoch_at(self, progress: float) -> int:
        """The epoch that is under way, from 0."""
        return min(bisect_right(self._ends, progress), self.limits.epochs - 1)

    def noise(self, batch: int, epoch: int) -> float:
        """Variance over squared norm of the gradient at the first batch size, as a job of this batch measures it."""
        grad_sqr, grad_var = self._statistics(batch, epoch)
        return grad_var / grad_sqr if grad_sqr else inf

    def gain(self, batch: int, epoch: int) -> float:
        """Steps of the first batch that one step of this batch is worth."""
        (grad_sqr, grad_var), scale = self._statistics(batch, epoch), batch / self.limits.initial_batch
        return (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)

    def _statistics(self, batch: int, epoch: int) -> tuple[float, float]:
        sizes = self._sizes
        above = min(max(bisect_right(sizes, batch), 1), len(sizes) - 1)
        low, high = (self.statistics[size][epoch] for size in sizes[above - 1 : above + 1])
        if batch >= sizes[-1]:
            return high.grad_sqr, high.grad_var  # as measured: beside a far larger `low` nothing would be left of it
        part = (batch - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        grad_sqr = low.grad_sqr + part * (high.grad_sqr - low.grad_sqr)
        return grad_sqr, low.grad_var + part * (high.grad_var - low.grad_var)

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted(self.statistics)

    @cached_property
    def _first(self) -> Sequence[EpochStatistics]:
        return self.statistics[self.limits.initial_batch]

    @cached_property
    def _ends(self) -> list[float]:
        return [each.progress for each in self._first]

    @cached_property
    def _by_shape(self) -> dict[Shape, list[Measured]]:
        found: dict[Shape, list[Measured]] = {}
        for each in sorted(self.measured, key=lambda one: one.local_batch):
            if each.shape:
                found.setdefault(canonical(each.shape), []).append(each)
        return found

    @cached_property
    def _between(self) -> LinearNDInterpolator | None:
        cells: dict[tuple[int, int, int], list[StepTime]] = {}
        for each in self.measured:
            cells.setdefault((each.nodes, each.gpus, each.local_batch), []).append(StepTime(each.step_s, each.sync_s))
        means = [np.mean(times, axis=0) for times in cells.values()]
        try:
            return LinearNDInterpolator(np.array(list(cells), dtype=float), np.array(means))
        except QhullError:  # too few, or all on one node: nothing lies between them
            return None

    def _interpolated(self, shape: Shape, local_batch: int) -> StepTime | None:
        within = self._by_shape.get(shape)
        if within and within[0].local_batch <= local_batch <= within[-1].local_batch:
            batches = [each.local_batch for each in within]
            return StepTime(
                float(np.interp(local_batch, batches, [each.step_s for each in within])),
                float(np.interp(local_batch, batches, [each.sync_s for each in within])),
            )
        if self._between is None:
            return None
        step_s, sync_s = self._between(len(shape), sum(shape), local_batch)
        return None if np.isnan(step_s) else StepTime(float(step_s), float(sync_s))


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaledModel(Profile):
    """A model that was measured on one class of GPUs, on others that compute so many times as fast.

    What synchronises gradients takes as long as before.
    """

    base: Profile
    speeds: Mapping[str, float]

    @classmethod
    def of(cls, base: Profile, speeds: Mapping[str, float]) -> "ScaledModel":
        """The same model on these classes."""
        return cls(base.name, base.limits, base.measured, base.statistics, base=base, speeds=speeds)

    @property
    def classes(self) -> frozenset[str]:
        """Classes whose speed is told."""
        return frozenset(self.speeds)

    def on(self, gpus: Iterable[str]) -> Profile:
        """On GPUs of these classes alone, the slowest of which all wait for."""
        wanted = self.classes.intersection(gpus)
        if not wanted or wanted == self.classes:
            return self
        if wanted not in self._parts:
            self._parts[wanted] = ScaledModel.of(self.base, {gpu: self.speeds[gpu] for gpu in wanted})
        return self._parts[wanted]

    def measured_time(self, shape: Shape, local_batch: int) -> StepTime | None:
        """By the one class."""
        found = self.base.measured_time(shape, local_batch)
        return found and self._here(found)

    def _guessed(self, shape: Shape, local_batch: int) -> StepTime:
        return self._here(self.base.step_time(shape, local_batch))

    def _here(self, time: StepTime) -> StepTime:
        return StepTime((time.step_s - time.sync_s) / min(self.speeds.values()) + time.sync_s, time.sync_s)


def slower(time: StepTime, part: float) -> StepTime:
    """A step at this part of its speed, since others use the same network: what synchronises takes the difference."""
    return StepTime(time.step_s / part, time.sync_s + time.step_s / part - time.step_s)


def even(gpus: int, nodes: int) -> Shape:
    """So many GPUs dealt to nodes in turn."""
    return tuple([gpus // nodes + (node < gpus % nodes) for node in range(nodes)])


def canonical(shape: Iterable[int]) -> Shape:
    """The smallest rotation of the shape without empty nodes: rings of these are equal."""
    filled = tuple(gpus for gpus in shape if gpus)
    return min(filled[at:] + filled[:at] for at in range(len(filled)))
