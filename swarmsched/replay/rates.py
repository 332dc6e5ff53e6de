"""Tables of steps a second by model, batch and number of GPUs, as many publications have them. Nothing is known of
the parts of a step or of the gradient, so a job keeps the batch that it asked for.

A table whose batches are global ones (`global_batch_size`) says how fast a job would be on other numbers of GPUs; where
they are those of one GPU, another number would be another training, and the job keeps its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple, Self

from swarmsched.errors import ConfigError
from swarmsched.estimate import BatchRange, Estimate, SpeedPoint
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.physics import TruePace
from swarmsched.replay.profiles import Shape
from swarmsched.replay.table import Row, rows
from swarmsched.replay.workload import TraceJob

SPEEDS = ("iterations_per_s", "steps_per_s")
BATCHES = ("global_batch_size", "batch_size")
SPEED_LEAST = 1e-9
GPUS_MOST = 65_535
"""That a job can have."""
TOGETHER = {"": True, "1": True, "true": True, "0": False, "false": False}


class Where(NamedTuple):
    """What a speed was measured on; `is_together`: on as few servers as possible."""

    gpu: str  # class; empty: of any
    is_together: bool
    gpus: int


@dataclass(frozen=True, eq=False)
class Rates:
    """Steps a second of one model with one batch; of one that was measured together alone it is the same apart."""

    batch: int
    is_global: bool
    measured: Mapping[Where, float]
    _known: dict[tuple[int, bool, frozenset[str]], float] = field(default_factory=dict, repr=False)

    @cached_property
    def classes(self) -> frozenset[str]:
        """Classes of GPUs that it was measured on."""
        return frozenset(each.gpu for each in self.measured)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of GPUs that it was measured on, ascending."""
        return tuple(sorted({each.gpus for each in self.measured}))

    def on(self, speeds: Mapping[str, float]) -> "Rates":
        """Measured on one class of GPUs: on others as well, that are so many times as fast."""
        if len(self.classes) > 1 or not speeds:
            return self
        others = {
            each._replace(gpu=gpu): rate * times
            for each, rate in self.measured.items()
            for gpu, times in speeds.items()
        }
        own = {each: rate for each, rate in self.measured.items() if each.gpu}
        return Rates(self.batch, self.is_global, {**others, **own})

    def rate(self, gpus: int, classes: frozenset[str], *, is_together: bool = True) -> float:
        """On so many GPUs, of the slowest of these classes (none: of all); 0 where it does not fit.

        Steps between two measured numbers take what lies between theirs, and beyond the largest as long as there.
        """
        key = gpus, is_together, classes & self.classes or self.classes
        if key not in self._known:
            self._known[key] = min(self._on(gpu, gpus, is_together=is_together) for gpu in key[2])
        return self._known[key]

    def _on(self, gpu: str, gpus: int, *, is_together: bool) -> float:
        found = {each.gpus: rate for each, rate in self.measured.items() if each[:2] == (gpu, is_together)}
        found = found or {each.gpus: rate for each, rate in self.measured.items() if each.gpu == gpu}
        low = max([size for size in found if size <= gpus], default=0)
        high = min([size for size in found if size >= gpus], default=low)
        if low == high or not low or not found[low] or not found[high]:
            return found[low] if low == high else 0.0
        part = (gpus - low) / (high - low)
        return 1.0 / ((1.0 - part) / found[low] + part / found[high])


@dataclass(frozen=True)
class RatedPhysics:
    """A job of so many steps; it runs on the numbers of GPUs from `least` to `most` alone."""

    rates: Rates
    total: float  # steps
    least: int
    most: int
    gpus_per_node: int  # of the largest server
    classes: frozenset[str] = frozenset()  # of the GPUs that it has; none: of any

    def pace(self, shape: Shape, batch: int, progress: float) -> TruePace:
        """Constant to the end."""
        return TruePace(self.rate(shape) if self.least <= sum(shape) <= self.most else 0.0, self.total)

    def rate(self, shape: Shape) -> float:
        """Steps a second on so many GPUs of each server."""
        is_together = len(shape) <= ceil(sum(shape) / self.gpus_per_node)
        return self.rates.rate(sum(shape), self.classes, is_together=is_together)

    def on(self, gpus: Iterable[str]) -> Self:
        """As measured there."""
        return replace(self, classes=frozenset(gpus))

    def alone_s(self, cluster: Fleet) -> float:
        """On the GPUs that suit it best."""
        packings = {(gpu, sum(shape)) for gpu, shape in cluster.packings(self.most) if sum(shape) >= self.least}
        speed = max([self.rates.rate(gpus, frozenset([gpu])) for gpu, gpus in packings], default=0.0)
        return self.total / speed if speed else inf

    @property
    def batches(self) -> BatchRange:
        """The global batch stays; 0 where it is not known."""
        batch = self.rates.batch if self.rates.is_global else self.rates.batch * self.most
        return BatchRange(batch, batch, 1, batch) if batch else BatchRange()

    def estimate(self, progress: float) -> Estimate:
        """As it is, on as few servers as possible and each GPU on one of its own."""
        points = [point for ranks in self.rates.sizes for point in self._points(ranks)]
        return Estimate(points=tuple(points), remaining=max(0.0, self.total - progress))

    def _points(self, ranks: int) -> Iterator[SpeedPoint]:
        if not self.least <= ranks <= self.most:
            return
        whole, rest = divmod(ranks, self.gpus_per_node)
        packed, spread = (self.gpus_per_node,) * whole + (rest,) * bool(rest), (1,) * ranks
        for shape in dict.fromkeys((packed, spread)):
            if rate := self.rate(shape):
                yield SpeedPoint(ranks, len(shape), max(1, -(-self.batches.first // ranks)), 1.0 / rate)


Table = Mapping[str, Mapping[int, Rates]]
"""Rates by model and batch."""


def read_rates(name: str, lines: Iterable[str]) -> Table:
    """A table `model, num_gpus`, a column of speeds and one of batches; `gpu` and `consolidated` may be there.

    ConfigError names file, row and column of what cannot be used.
    """
    table = rows(name, lines, ("model", "num_gpus"))
    if not table:
        raise ConfigError(name, "has no speeds", "one row a measurement below the header")
    speed, batch = _column(name, table, SPEEDS), _column(name, table, BATCHES)
    found: dict[str, dict[int, dict[Where, float]]] = {}
    for row in table:
        where = Where(row.text("gpu"), _is_together(row), row.count("num_gpus", 1, GPUS_MOST))
        by_batch = found.setdefault(row.name("model"), {}).setdefault(row.count(batch), {})
        if where in by_batch:
            problem = f"{row['num_gpus']!r} is there twice with model {row['model']!r} and {batch} {row[batch]!r}"
            raise row.error("num_gpus", problem, "one row for each number of GPUs")
        by_batch[where] = _speed(row, speed)
    is_global = batch == BATCHES[0]
    return {
        model: {batch: Rates(batch, is_global, measured) for batch, measured in by_batch.items()}
        for model, by_batch in found.items()
    }


def _is_together(row: Row) -> bool:
    word = row.text("consolidated").lower()
    if word not in TOGETHER:
        raise row.error("consolidated", f"{word[:60]!r} cannot be used", "1: on as few servers as possible; 0: not")
    return TOGETHER[word]


def _speed(row: Row, column: str) -> float:
    """0 where the model does not fit."""
    speed = row.amount(column)
    if 0.0 < speed < SPEED_LEAST:
        raise row.error(column, f"{row[column]!r} is too little", f"at least {SPEED_LEAST:g}, or 0: it does not fit")
    return speed


def _column(name: str, table: list[Row], wanted: tuple[str, ...]) -> str:
    there = table[0]
    column = next((each for each in wanted if each in there), "")
    if not column:
        raise ConfigError(
            name, f"has no column {wanted[0]!r}", f"one of {', '.join(wanted)}; there: {', '.join(there)}"
        )
    return column


def rated(job: TraceJob, by_batch: Mapping[int, Rates], gpus_per_node: int) -> RatedPhysics:
    """The physics of a job; ConfigError names its batch where it was not measured."""
    rates = by_batch.get(job.batch)
    if rates is None:
        there = ", ".join(map(str, sorted(by_batch)))
        problem = f"{job.batch} was not measured with model {job.model!r}"
        raise ConfigError(f"{job.place}, batch_size", problem, f"one of {there}")
    least, most = (rates.sizes[0], rates.sizes[-1]) if rates.is_global else (job.gpus, job.gpus)
    return RatedPhysics(rates, job.steps, least, most, gpus_per_node)
