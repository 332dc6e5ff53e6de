"""When a loss will have come down to where training ends (Peng et al., Optimus, EuroSys 2018, section 3.1).

The curve is `l(k) = 1 / (b0 * k + b1) + b2` with no negative parameter: for a given b2 it is linear in k after
inversion.  Training ends at a loss that its owner names, or, as in Optimus, when the loss hardly falls any more.  The
interval is that of a grouped jackknife, which the paper does not have.  No numpy here, and few points: agents compute
this in between.
"""

from collections.abc import Callable, Sequence
from math import ceil, inf, sqrt
from typing import NamedTuple

from swarmsched.errors import ConfigError

POINTS_LIMIT = 32
POINTS_LEAST = 12
GROUPS = 6
GRID = 16
REFINEMENTS = 8
GOLDEN = (sqrt(5.0) - 1.0) / 2.0
LOSS_LEAST, LOSS_MOST = 1e-9, 1e15
NEAREST = 0.005
"""Of the least loss: so far from it at least the curve is taken to end."""
STEPS_MOST = 1e15
RISING = 3.0
"""Standard errors by which the newest third of the points must rise before the curve counts as one that diverges."""
DEVIATIONS = 2.0
"""Half an interval, in standard deviations: it holds the outcome about 19 times of 20 if all goes on as it went."""

Point = tuple[float, float, int]
"""Mean step, mean loss, and of how many reports."""


class Reach(NamedTuple):
    """At which step a loss is reached; `high` is None where it may never be."""

    step: float
    low: float
    high: float | None


class _Curve(NamedTuple):
    rise: float  # b0
    start: float  # b1
    floor: float  # b2
    error: float  # sum of squares

    def step_at(self, loss: float) -> float:
        """Infinite for a loss to which it does not come down."""
        if loss <= self.floor or self.rise <= 0.0:
            return inf
        step = (1.0 / (loss - self.floor) - self.start) / self.rise
        return max(0.0, step) if step <= STEPS_MOST else inf

    def end(self, least: float, steps: float, epochs: int) -> float:
        """After so many epochs of `steps` in each of which the loss falls by no more than `least`."""
        rise = self.rise * steps
        if rise <= 0.0:
            return inf
        # The first of them begins where least * x * (x + rise) = rise, with x the inverted loss above the floor.
        value = 2.0 / (least + sqrt(least) * sqrt(least + 4.0 / rise))
        step = max(0.0, (value - self.start) / self.rise)
        return (ceil(step / steps) + epochs) * steps if step <= STEPS_MOST else inf


class LossCurve:
    """Losses by step, in at most `POINTS_LIMIT` means of neighbours.

    The oldest tenth is left out: late points tell more of the end, and Optimus gives them far more weight too.
    A loss outside of its two neighbours' range counts as the nearer of them (Optimus: as their mean, which beside an
    outlier would be half of it), so the newest one waits for its second neighbour.
    """

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._open: Point = (0.0, 0.0, 0)
        self._size = 1  # reports in a point
        self._last: list[tuple[float, float]] = []  # two reports
        self._largest = 0.0
        self._known: tuple[tuple[float, ...], Reach | None] | None = None  # the last answer, while no point was added

    def observe(self, step: float, loss: float) -> None:
        """One report; steps never fall.  After a loss that diverged beyond all numbers all begins anew."""
        if not abs(loss) <= LOSS_MOST:
            LossCurve.__init__(self)
            return
        self._last.append((step, loss))
        if len(self._last) < 3:
            if len(self._last) == 1:
                self._add(step, loss)
            return
        self._add(self._last[1][0], middle([one for _, one in self._last]))
        del self._last[0]

    def _add(self, step: float, loss: float) -> None:
        self._largest = max(self._largest, loss)
        at, mean, count = self._open
        weight = 1.0 / (count + 1)
        self._open = (at + weight * (step - at), mean + weight * (loss - mean), count + 1)
        if count + 1 < self._size:
            return
        self._points.append(self._open)
        self._open, self._known = (0.0, 0.0, 0), None
        if len(self._points) >= POINTS_LIMIT:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(first, second) for first, second in pairs]
            self._size *= 2

    def reach(self, loss: float) -> Reach | None:
        """None while too little is known, or when the curve does not come down to it."""
        return self._answer((loss,), lambda curve: curve.step_at(loss))

    def converges(self, threshold: float, epoch_steps: float, epochs: int) -> Reach | None:
        """After so many epochs in a row in which the loss falls by at most `threshold` of the largest loss so far.

        Never before the newest point; None while too little is known, or when the loss does not fall.  ConfigError
        names what cannot be.
        """
        for name, value, most in (
            ("threshold", threshold, 1.0),
            ("epoch_steps", epoch_steps, STEPS_MOST),
            ("epochs", epochs, STEPS_MOST),
        ):
            if not LOSS_LEAST <= value <= most:
                raise ConfigError(name, f"{value} is out of range", f"from {LOSS_LEAST:g} to {most:g}")
        found = self._answer(
            (threshold, epoch_steps, epochs), lambda curve: curve.end(threshold * self._largest, epoch_steps, epochs)
        )
        return found and found._replace(step=max(found.step, self._points[-1][0]))

    def _answer(self, question: tuple[float, ...], end: Callable[[_Curve], float]) -> Reach | None:
        if self._known is None or self._known[0] != question:
            self._known = (question, self._extrapolated(end))
        return self._known[1]

    def _extrapolated(self, end: Callable[[_Curve], float]) -> Reach | None:
        points = self._points[len(self._points) // 10 :]
        if len(points) < POINTS_LEAST or min(point[1] for point in points) < LOSS_LEAST:
            return None
        if points[0][0] >= points[-1][0] or _is_rising(points[-(len(points) // 3) :]):
            return None
        step = end(_fit(points))
        if step == inf:
            return None
        groups = [[point for at, point in enumerate(points) if at % GROUPS != group] for group in range(GROUPS)]
        found = [end(_fit(kept)) for kept in groups]
        if inf in found:
            return Reach(step, points[-1][0], None)
        mean = sum(found) / GROUPS
        deviation = sqrt((GROUPS - 1) / GROUPS * sum((each - mean) ** 2 for each in found))
        return Reach(step, max(points[-1][0], step - DEVIATIONS * deviation), step + DEVIATIONS * deviation)


def middle(values: Sequence[float]) -> float:
    """Median of some values, without the modules that `statistics` brings: each agent keeps this room in memory."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0


def _mean(first: Point, second: Point) -> Point:
    count = first[2] + second[2]
    part = second[2] / count
    return (first[0] + part * (second[0] - first[0]), first[1] + part * (second[1] - first[1]), count)


def _is_rising(points: Sequence[Point]) -> bool:
    """By the slope of a straight line, and its standard error."""
    steps, losses = [point[0] for point in points], [point[1] for point in points]
    at, mean = sum(steps) / len(steps), sum(losses) / len(losses)
    spread = sum((step - at) ** 2 for step in steps)
    if spread <= 0.0:
        return False
    slope = sum((step - at) * (loss - mean) for step, loss in zip(steps, losses, strict=True)) / spread
    squares = sum((loss - mean - slope * (step - at)) ** 2 for step, loss in zip(steps, losses, strict=True))
    return slope > RISING * sqrt(squares / (len(points) - 2) / spread)


def _fit(points: Sequence[Point]) -> _Curve:
    """The best floor on a grid that is denser near the least loss, then between its neighbours there."""
    least = min(point[1] for point in points)
    grid = [least * (1.0 - NEAREST ** (1.0 - at / (GRID - 1))) for at in range(GRID)]
    curves = [_with_floor(points, floor) for floor in grid]
    best = min(range(GRID), key=lambda at: curves[at].error)
    low, high = grid[min(GRID - 1, best + 1)], grid[max(0, best - 1)]
    for _ in range(REFINEMENTS):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if _with_floor(points, left).error < _with_floor(points, right).error:
            high = right
        else:
            low = left
    return min(curves[best], _with_floor(points, (low + high) / 2.0), key=lambda curve: curve.error)


def _with_floor(points: Sequence[Point], floor: float) -> _Curve:
    """Least squares of the inverted losses, each weighted so that its error counts as that of its loss."""
    weights = [count * (loss - floor) ** 4 for _, loss, count in points]
    whole = sum(weights)
    mean_step = sum(weight * point[0] for weight, point in zip(weights, points, strict=True)) / whole
    mean_value = sum(weight / (point[1] - floor) for weight, point in zip(weights, points, strict=True)) / whole
    spread = cross = 0.0
    for weight, (step, loss, _) in zip(weights, points, strict=True):
        spread += weight * (step - mean_step) ** 2
        cross += weight * (step - mean_step) * (1.0 / (loss - floor) - mean_value)
    rise = max(0.0, cross / spread) if spread > 0.0 else 0.0
    start = mean_value - rise * mean_step
    if start < 0.0:  # then through the origin
        squares = sum(weight * point[0] ** 2 for weight, point in zip(weights, points, strict=True))
        products = sum(weight * point[0] / (point[1] - floor) for weight, point in zip(weights, points, strict=True))
        rise, start = products / squares, 0.0
    error = 0.0
    for step, loss, count in points:
        value = rise * step + start
        off = loss - floor - 1.0 / value if value > 0.0 else inf
        error += count * off * off
    return _Curve(rise, start, floor, error)
