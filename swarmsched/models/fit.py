"""Fitting the speed model to what a job has measured (Qiao et al., Pollux, OSDI 2021, section 4.1).

Least squares of the logarithms of gradient and step time.  A part of the model about which nothing was measured yet is
taken at its best, so that a policy will try it: without a second rank there is no synchronisation, without a second
node the network is as fast as one machine, without a third rank no rank makes another slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from swarmsched.estimate import SpeedPoint
from swarmsched.models.speed import SpeedModel

LEAST_S = 1e-6
MOST_S = 1e4
OVERLAP_MOST = 10.0
STEPS_MOST = 60
"""Evaluations of one fit: enough for seven parameters, and some milliseconds."""

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
    free = _free(data)
    begin = _begin(data)

    def residuals(logs: Floats) -> Floats:
        model = _with(begin, free, np.exp(logs))
        grad_s = model[0] + model[1] * data[:, 2]
        return np.concatenate((np.log(_steps(model, data, grad_s) / data[:, 3]), np.log(grad_s / data[:, 4])))

    def slopes(logs: Floats) -> Floats:
        return _slopes(_with(begin, free, np.exp(logs)), data)[:, free]

    low = np.log(np.where(np.arange(7) == 6, 1.0, LEAST_S))[free]
    high = np.log(np.where(np.arange(7) == 6, OVERLAP_MOST, MOST_S))[free]
    first = np.clip(np.log(np.maximum(begin[free], LEAST_S)), low + 1e-6, high - 1e-6)
    found = least_squares(residuals, first, jac=slopes, bounds=(low, high), max_nfev=STEPS_MOST)
    best = _with(begin, free, np.exp(found.x))
    if not (data[:, 1] > 1).any():
        best[4:6] = best[2:4]
    error = sqrt(float(np.mean(found.fun**2)))
    return Fitted(SpeedModel(*(float(each) for each in best)), error)


def _free(data: Floats) -> Floats:
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


def _with(begin: Floats, free: Floats, values: Floats) -> Floats:
    model = begin.copy()
    model[free] = values
    return model


def _steps(model: Floats, data: Floats, grad_s: Floats) -> Floats:
    overlap = model[6]
    return np.asarray((grad_s**overlap + (_sync_terms(data) @ model) ** overlap) ** (1.0 / overlap))


def _sync_terms(data: Floats) -> Floats:
    """By what each parameter is multiplied in the time that synchronises, for each point."""
    ranks, nodes = data[:, 0], data[:, 1]
    terms = np.zeros((len(data), 7))
    inside, outside = (ranks > 1) & (nodes < 2), (ranks > 1) & (nodes > 1)
    terms[:, 2], terms[:, 4] = inside, outside
    more = np.maximum(0.0, ranks - 2)
    terms[:, 3], terms[:, 5] = more * inside, more * outside
    return terms


def _slopes(model: Floats, data: Floats) -> Floats:
    """Of the logarithms of step and gradient time by those of the seven parameters: one row each, all steps first."""
    grad_terms = np.zeros((len(data), 7))
    grad_terms[:, 0], grad_terms[:, 1] = 1.0, data[:, 2]
    sync_terms, overlap = _sync_terms(data), model[6]
    grad_s, sync_s = grad_terms @ model, sync_terms @ model
    powers = np.stack((grad_s**overlap, sync_s**overlap))
    total = powers.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(powers > 0.0, powers / total / np.stack((grad_s, sync_s)), 0.0)
        entropy = np.where(powers > 0.0, powers / total * np.log(powers), 0.0).sum(axis=0)
    of_steps = (shares[0, :, None] * grad_terms + shares[1, :, None] * sync_terms) * model
    of_steps[:, 6] = (entropy - np.log(total)) / overlap
    return np.concatenate((of_steps, grad_terms / grad_s[:, None] * model))
