"""Fitting the speed model to what a job has measured (Qiao et al., Pollux, OSDI 2021, section 4.1).

Least squares of the logarithms of gradient and step time.  A part of the model about which nothing was measured yet is
taken at its best, so that a policy will try it: without a second rank there is no synchronisation, without a second
node the network is as fast as one machine, without a third rank no rank makes another slower.

Plans wait for fits, two or three in each while jobs report.  `scipy.optimize.least_squares` takes 1.6 ms for one of
these, four fifths of it around the few small products that `_descend` makes (docs/research/benchmarks.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmsched.estimate import SpeedPoint
from swarmsched.models.speed import SpeedModel

LEAST_S = 1e-6
MOST_S = 1e4
OVERLAP_MOST = 10.0
STEPS_MOST = 60
"""Of one fit; the median takes some ten."""
ENOUGH = 1e-6
"""Part of the squares by which a step must make them less for another one to follow."""
DAMPING, DAMPING_LEAST, DAMPING_MOST = 1e-2, 1e-9, 1e7
LESS, MORE = 0.2, 5.0
STRIDE_MOST = 3.0
"""Of a logarithm in one step: a model of points that say little of it must not be thrown across its bounds."""

CONSTANT = 0.5
"""Part of a gradient's time that is taken to be the same for any local batch while one alone was measured."""
ALWAYS = np.array([False, True, False, False, False, False, True])
"""Parameters that no model is without."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """Parameters, and the relative standard deviation of what was measured around them."""

    model: SpeedModel
    error: float


@dataclass(frozen=True)
class Prior:
    """Beliefs about the seven parameters without a measurement. They are logarithms, of seconds as parts of the time
    that a gradient takes, and how much each counts beside a measurement; 0 of those of which nothing is believed."""

    means: tuple[float, ...]
    weights: tuple[float, ...]

    def logs(self, data: Floats) -> Floats:
        """Logarithms of the parameters of each job; of no use where the weight is 0."""
        grad_s, ones = np.median(data[:, :, 4], axis=1), np.ones(len(data))
        scales = np.stack([grad_s, *[grad_s] * 5, ones], axis=1)
        return np.asarray(np.log(scales) + np.array(self.means))

    @property
    def is_believed(self) -> NDArray[np.bool_]:
        """Of which parameters."""
        return np.array(self.weights) > 0.0


def fit_speed(points: Sequence[SpeedPoint]) -> Fitted:
    """ValueError without a point."""
    return fit_speeds([points])[0]


def tried(model: SpeedModel, points: Sequence[SpeedPoint]) -> SpeedModel:
    """A model for the choice of a batch takes half of a gradient to be as long with any, where one alone was measured.

    `fit_speeds` takes more ranks at their best, and so a larger batch at its worst, as long for each sample: nobody
    would try one.  With this half, as in AdaptDL, a job does, at little cost, and two tell which part is constant.
    """
    local_batch = points[0].local_batch
    if any(each.local_batch != local_batch for each in points):
        return model
    grad_s = model.grad_s + model.grad_per_sample_s * local_batch
    constant_s = CONSTANT * grad_s
    return model._replace(grad_s=constant_s, grad_per_sample_s=(grad_s - constant_s) / local_batch)


def informed_by(points: Sequence[SpeedPoint]) -> list[bool]:
    """About which of the seven parameters these points say anything."""
    return [bool(each) for each in _free(np.array([[_row(point) for point in points]]))[0]]


def fit_speeds(measured: Sequence[Sequence[SpeedPoint]], prior: Prior | None = None) -> list[Fitted]:
    """One for each, the same to the last bit as if it were fitted alone; ValueError where one has no point.

    With a prior, what is believed of each parameter is one more measurement of it.

    Those with as many points that tell of the same parameters are searched for together: an array has as many
    operations in it whether it holds one of them or a thousand.
    """
    if not all(measured):
        raise ValueError("nothing was measured")
    alike: dict[int, list[int]] = {}
    for number, points in enumerate(measured):
        alike.setdefault(len(points), []).append(number)
    found: dict[int, Fitted] = {}
    for numbers in alike.values():
        data = np.array([[_row(point) for point in measured[number]] for number in numbers])
        free, by_free = _free(data), dict[bytes, list[int]]()
        if prior is not None:
            free |= prior.is_believed
        for row, each in enumerate(free):
            by_free.setdefault(each.tobytes(), []).append(row)
        for rows in by_free.values():
            fitted = _fitted(data[rows], free[rows[0]], prior)
            found.update({numbers[row]: each for row, each in zip(rows, fitted, strict=True)})
    return [found[number] for number in range(len(measured))]


def _row(point: SpeedPoint) -> tuple[float, ...]:
    return (point.ranks, point.nodes, point.local_batch, point.step_s, max(LEAST_S, point.step_s - point.sync_s))


def _fitted(data: Floats, free: NDArray[np.bool_], prior: Prior | None) -> list[Fitted]:
    best, squares = _descend(_Errors(data, free, prior))
    if not free[4]:
        is_inside = ~(data[:, :, 1] > 1).any(axis=1)
        best[is_inside, 4:6] = best[is_inside, 2:4]
    errors = np.sqrt(squares / (2 * data.shape[1]))
    return [Fitted(SpeedModel(*model), error) for model, error in zip(best.tolist(), errors.tolist(), strict=True)]


class _Errors:
    """Logarithms of modelled over measured time, of all steps, all gradients and what is believed, by those of what is
    free.

    Of jobs (the first dimension of all arrays) with as many points, about which these say the same parameters.
    """

    def __init__(self, data: Floats, free: NDArray[np.bool_], prior: Prior | None = None) -> None:
        self._grad_terms, self._sync_terms = np.zeros((*data.shape[:2], 7)), _sync_terms(data)
        self._grad_terms[:, :, 0], self._grad_terms[:, :, 1] = 1.0, data[:, :, 2]
        self._measured = np.log(np.concatenate((data[:, :, 3], data[:, :, 4]), axis=1))
        self._fixed = _begin(data, free)
        self._is_alone = data[:, :, 0] < 2  # and synchronises nothing
        self.free = np.flatnonzero(free)
        self._of_grad = np.ascontiguousarray(self._grad_terms[:, :, self.free].transpose(0, 2, 1))
        self._of_sync = np.ascontiguousarray(self._sync_terms[:, :, self.free].transpose(0, 2, 1))
        self._believed = np.flatnonzero(prior.is_believed[self.free]) if prior else np.zeros(0, int)
        self._weights, self._means = np.zeros(0), np.zeros((len(data), 0))
        if prior is not None:
            logs, those = prior.logs(data), self.free[self._believed]
            self._weights, self._means = np.array(prior.weights)[those], logs[:, those]
            self._fixed = np.where(prior.is_believed & ~_free(data), np.exp(logs), self._fixed)
        is_overlap = self.free == 6
        self._has_overlap = bool(is_overlap.any())
        each = (len(data), 1)
        self.low = np.tile(np.log(np.where(is_overlap, 1.0, LEAST_S)), each)
        self.high = np.tile(np.log(np.where(is_overlap, OVERLAP_MOST, MOST_S)), each)

    @property
    def begin(self) -> Floats:
        """Where the search begins."""
        return np.clip(np.log(np.maximum(self._fixed[:, self.free], LEAST_S)), self.low, self.high)

    def keep(self, jobs: NDArray[np.bool_]) -> None:
        """Forget the others."""
        self._grad_terms, self._sync_terms = self._grad_terms[jobs], self._sync_terms[jobs]
        self._of_grad, self._of_sync = self._of_grad[jobs], self._of_sync[jobs]
        self._measured, self._fixed, self._is_alone = self._measured[jobs], self._fixed[jobs], self._is_alone[jobs]
        self.low, self.high, self._means = self.low[jobs], self.high[jobs], self._means[jobs]

    def model(self, logs: Floats) -> Floats:
        """All seven parameters."""
        model = self._fixed.copy()
        model[:, self.free] = np.exp(logs)
        return model

    def at(self, logs: Floats) -> tuple[Floats, Floats]:
        """The errors there, and their slopes: a row for each of what is free."""
        searched, model = np.exp(logs), self._fixed.copy()
        model[:, self.free] = searched
        overlap, count, searched = model[:, 6:], self._grad_terms.shape[1], searched[:, :, None]
        both_s = np.empty((2, len(model), count))
        np.matmul(self._grad_terms, model[:, :, None], out=both_s[0, :, :, None])
        np.matmul(self._sync_terms, model[:, :, None], out=both_s[1, :, :, None])
        both_s[1][self._is_alone] = 1.0
        logs_s = np.log(both_s)
        powers = np.exp(overlap * logs_s)
        powers[1][self._is_alone] = 0.0
        total = powers[0] + powers[1]
        log_step = np.log(total) / overlap
        of_grad, of_sync = powers / total / both_s
        slopes = np.zeros((len(model), len(self.free), 2 * count + len(self._believed)))
        slopes[:, :, :count] = (of_grad[:, None] * self._of_grad + of_sync[:, None] * self._of_sync) * searched
        if self._has_overlap:
            slopes[:, -1, :count] = (powers[0] * logs_s[0] + powers[1] * logs_s[1]) / total - log_step
        slopes[:, :, count : 2 * count] = self._of_grad / both_s[0][:, None] * searched
        found = np.concatenate((log_step, logs_s[0]), axis=1) - self._measured
        if not len(self._believed):
            return found, slopes
        slopes[:, self._believed, 2 * count + np.arange(len(self._believed))] = self._weights
        return np.concatenate((found, (logs[:, self._believed] - self._means) * self._weights), axis=1), slopes


def _descend(errors: _Errors) -> tuple[Floats, Floats]:
    """The models with the least squares, and these: Levenberg and Marquardt's method (1963), projected on the bounds.

    Each job ends by itself, and is not looked at any more.
    """
    logs = errors.begin
    found, slopes = errors.at(logs)
    squares, damping = _squares(found), np.full(len(logs), DAMPING)
    models, least, going = errors.model(logs), squares.copy(), np.arange(len(logs))
    for _ in range(STEPS_MOST):
        there = np.minimum(np.maximum(logs + _stride(errors, logs, found, slopes, damping), errors.low), errors.high)
        tried, slopes_there = errors.at(there)
        gained = squares - _squares(tried)
        is_less = gained > 0.0
        is_enough = np.where(is_less, gained <= ENOUGH * squares, damping > DAMPING_MOST)
        damping = np.where(is_less, np.maximum(LESS * damping, DAMPING_LEAST), MORE * damping)
        less_count = np.count_nonzero(is_less)
        if less_count == len(logs):
            logs, found, slopes, squares = there, tried, slopes_there, squares - gained
        elif less_count:
            logs[is_less], found[is_less], slopes[is_less] = there[is_less], tried[is_less], slopes_there[is_less]
            squares[is_less] -= gained[is_less]
        if np.count_nonzero(is_enough):
            models[going], least[going] = errors.model(logs), squares
            stays = ~is_enough
            going = going[stays]
            if not len(going):
                return models, least
            errors.keep(stays)
            logs, found, slopes = logs[stays], found[stays], slopes[stays]
            squares, damping = squares[stays], damping[stays]
    models[going], least[going] = errors.model(logs), squares
    return models, least


def _stride(errors: _Errors, logs: Floats, found: Floats, slopes: Floats, damping: Floats) -> Floats:
    """From there to where the squares are taken to be least."""
    downhill, bends = -(slopes @ found[:, :, None]), slopes @ slopes.transpose(0, 2, 1)
    is_held = ((logs <= errors.low) & (downhill[:, :, 0] < 0.0)) | ((logs >= errors.high) & (downhill[:, :, 0] > 0.0))
    if np.count_nonzero(is_held):
        downhill[is_held] = 0.0
        bends[is_held], bends.transpose(0, 2, 1)[is_held] = 0.0, 0.0
    diagonal = bends.reshape(len(bends), -1)[:, :: bends.shape[1] + 1]
    diagonal += damping[:, None] * diagonal + DAMPING_LEAST + is_held
    stride = np.linalg.solve(bends, downhill)[:, :, 0]
    return np.asarray(np.minimum(np.maximum(stride, -STRIDE_MOST), STRIDE_MOST))


def _squares(found: Floats) -> Floats:
    return np.asarray((found[:, None, :] @ found[:, :, None])[:, 0, 0])


def _free(data: Floats) -> NDArray[np.bool_]:
    """Which of the seven parameters the data of each job say anything about."""
    ranks, nodes, batches = data[:, :, 0], data[:, :, 1], data[:, :, 2]
    are_many, outside = ranks > 1, nodes > 1
    inside, more = are_many & ~outside, ranks > 2
    said = np.array([batches != batches[:, :1], ranks > 0, inside, inside & more, outside, outside & more, are_many])
    free = np.asarray(said.any(axis=2).T)
    free[:, 1] = True
    free[:, 6] &= data.shape[1] > 4
    return free


def _begin(data: Floats, free: NDArray[np.bool_]) -> Floats:
    """Where the search begins; also what stays of parameters that are not searched for."""
    grad_s, batches = data[:, :, 4], data[:, :, 2]
    middle, over_s = data.shape[1] // 2, np.sort(data[:, :, 3] - grad_s, axis=1)
    sync_s = (over_s[:, -1 - middle] + over_s[:, middle]) / 2.0 + LEAST_S
    constant_s = 0.5 * grad_s.min(axis=1)
    begin = [constant_s, (grad_s / batches).min(axis=1), sync_s, 0.01 * sync_s, sync_s, 0.01 * sync_s]
    return np.where(free | ALWAYS, np.stack([*begin, np.full(len(data), 1.5)], axis=1), 0.0)


def _sync_terms(data: Floats) -> Floats:
    """By what each parameter is multiplied in the time that synchronises, for each point."""
    ranks, nodes = data[:, :, 0], data[:, :, 1]
    terms = np.zeros((*data.shape[:2], 7))
    inside, outside = (ranks > 1) & (nodes < 2), (ranks > 1) & (nodes > 1)
    terms[:, :, 2], terms[:, :, 4] = inside, outside
    more = np.maximum(0.0, ranks - 2)
    terms[:, :, 3], terms[:, :, 5] = more * inside, more * outside
    return terms
