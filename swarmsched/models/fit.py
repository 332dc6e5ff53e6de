"""Fitting the speed model to what a job has measured (Qiao et al., Pollux, OSDI 2021, section 4.1).

Least squares of the logarithms of gradient and step time.  A part of the model about which nothing was measured yet is
taken at its best, so that a policy will try it: without a second rank there is no synchronisation, without a second
node the network is as fast as one machine, without a third rank no rank makes another slower.

Plans wait for fits, two or three in each while jobs report.  `scipy.optimize.least_squares` takes 1.6 ms for one of
these, four fifths of it around the few small products that `_descend` makes (docs/benchmarks.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

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

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """Parameters, and the relative standard deviation of what was measured around them."""

    model: SpeedModel
    error: float


def fit_speed(points: Sequence[SpeedPoint]) -> Fitted:
    """ValueError without a point."""
    if not points:
        raise ValueError("nothing was measured")
    data = np.array([(p.ranks, p.nodes, p.local_batch, p.step_s, max(LEAST_S, p.step_s - p.sync_s)) for p in points])
    errors = _Errors(data)
    best, squares = _descend(errors)
    if not (data[:, 1] > 1).any():
        best[4:6] = best[2:4]
    return Fitted(SpeedModel(*(float(each) for each in best)), sqrt(squares / (2 * len(data))))


class _Errors:
    """Logarithms of modelled over measured time, of all steps and then of all gradients, by those of what is free."""

    def __init__(self, data: Floats) -> None:
        self._grad_terms, self._sync_terms = np.zeros((len(data), 7)), _sync_terms(data)
        self._grad_terms[:, 0], self._grad_terms[:, 1] = 1.0, data[:, 2]
        self._measured = np.log(data[:, 3:5]).T.ravel()
        self._fixed = _begin(data)
        self.free = np.flatnonzero(_free(data))
        is_overlap = self.free == 6
        self.low = np.log(np.where(is_overlap, 1.0, LEAST_S))
        self.high = np.log(np.where(is_overlap, OVERLAP_MOST, MOST_S))

    @property
    def begin(self) -> Floats:
        """Where the search begins."""
        return np.clip(np.log(np.maximum(self._fixed[self.free], LEAST_S)), self.low, self.high)

    def model(self, logs: Floats) -> Floats:
        """All seven parameters."""
        model = self._fixed.copy()
        model[self.free] = np.exp(logs)
        return model

    def at(self, logs: Floats) -> tuple[Floats, Floats]:
        """The errors there, and their slopes: one row each."""
        model = self.model(logs)
        overlap, count = model[6], len(self._grad_terms)
        grad_s, sync_s = self._grad_terms @ model, self._sync_terms @ model
        does_sync = sync_s > 0.0
        log_grad, log_sync = np.log(grad_s), np.log(np.where(does_sync, sync_s, 1.0))
        grad_power, sync_power = np.exp(overlap * log_grad), does_sync * np.exp(overlap * log_sync)
        total = grad_power + sync_power
        log_step = np.log(total) / overlap
        of_grad, of_sync = grad_power / total / grad_s, sync_power / total / np.where(does_sync, sync_s, 1.0)
        slopes = np.empty((2 * count, 7))
        slopes[:count] = (of_grad[:, None] * self._grad_terms + of_sync[:, None] * self._sync_terms) * model
        slopes[:count, 6] = (grad_power * log_grad + sync_power * log_sync) / total - log_step
        slopes[count:] = self._grad_terms / grad_s[:, None] * model
        return np.concatenate((log_step, log_grad)) - self._measured, slopes[:, self.free]


def _descend(errors: _Errors) -> tuple[Floats, float]:
    """The model with the least squares, and these: Levenberg and Marquardt's method (1963), projected on the bounds."""
    logs = errors.begin
    found, slopes = errors.at(logs)
    squares, damping = float(found @ found), DAMPING
    for _ in range(STEPS_MOST):
        downhill, bends = -(slopes.T @ found), slopes.T @ slopes
        is_held = ((logs <= errors.low) & (downhill < 0.0)) | ((logs >= errors.high) & (downhill > 0.0))
        downhill[is_held] = 0.0
        bends[is_held], bends[:, is_held] = 0.0, 0.0
        bends[np.diag_indices_from(bends)] += damping * bends.diagonal() + DAMPING_LEAST + is_held
        stride = np.clip(np.linalg.solve(bends, downhill), -STRIDE_MOST, STRIDE_MOST)
        there = np.clip(logs + stride, errors.low, errors.high)
        tried, slopes_there = errors.at(there)
        gained = squares - float(tried @ tried)
        if gained > 0.0:
            is_enough = gained <= ENOUGH * squares
            logs, found, slopes, squares = there, tried, slopes_there, squares - gained
            damping = max(LESS * damping, DAMPING_LEAST)
        else:
            is_enough, damping = damping > DAMPING_MOST, MORE * damping
        if is_enough:
            break
    return errors.model(logs), squares


def _free(data: Floats) -> NDArray[np.bool_]:
    """Which of the seven parameters the data say anything about."""
    ranks, nodes, batches = data[:, 0], data[:, 1], data[:, 2]
    inside, outside = (ranks > 1) & (nodes < 2), nodes > 1
    many = len(set(batches)) > 1
    return np.array(
        [
            many,
            True,
            bool(inside.any()),
            bool((inside & (ranks > 2)).any()),
            bool(outside.any()),
            bool((outside & (ranks > 2)).any()),
            bool((ranks > 1).any()) and len(data) > 4,
        ]
    )


def _begin(data: Floats) -> Floats:
    """Where the search begins; also what stays of parameters that are not searched for."""
    grad_s, batches = data[:, 4], data[:, 2]
    per_sample_s = float(np.min(grad_s / batches))
    sync_s = float(np.median(data[:, 3] - grad_s)) + LEAST_S
    free = _free(data)
    constant_s = 0.5 * float(grad_s.min()) if free[0] else 0.0
    begin = [constant_s, per_sample_s, sync_s, 0.01 * sync_s, sync_s, 0.01 * sync_s, 1.5]
    return np.where(free | (np.arange(7) == 6) | (np.arange(7) == 1), begin, 0.0)


def _sync_terms(data: Floats) -> Floats:
    """By what each parameter is multiplied in the time that synchronises, for each point."""
    ranks, nodes = data[:, 0], data[:, 1]
    terms = np.zeros((len(data), 7))
    inside, outside = (ranks > 1) & (nodes < 2), (ranks > 1) & (nodes > 1)
    terms[:, 2], terms[:, 4] = inside, outside
    more = np.maximum(0.0, ranks - 2)
    terms[:, 3], terms[:, 5] = more * inside, more * outside
    return terms
