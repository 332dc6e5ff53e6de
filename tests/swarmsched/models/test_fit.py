"""The fit of the speed model: its slopes are those of the model itself, and its squares as small as a library's."""

import random

import numpy as np
import pytest
from scipy.optimize import least_squares

from swarmsched.estimate import SpeedPoint
from swarmsched.models.fit import CONSTANT, Prior, _Errors, _free, fit_speed, fit_speeds, tried
from swarmsched.models.speed import SpeedModel

TRUTH = SpeedModel(0.02, 0.001, 0.03, 0.004, 0.05, 0.006, 1.7)
SIZES = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (16, 4)]


def measured(local_batch: int) -> list[SpeedPoint]:
    return [SpeedPoint(*size, local_batch, *TRUTH.step_time(*size, local_batch)) for size in SIZES]


def errors_of(points: list[SpeedPoint], prior: Prior | None = None) -> _Errors:
    data = np.array([[(p.ranks, p.nodes, p.local_batch, p.step_s, p.step_s - p.sync_s) for p in points]])
    return _Errors(data, _free(data)[0], prior)


BELIEF = Prior((-1.0, 0.0, 0.5, -2.0, 1.0, -3.0, 0.4), (0.1, 0.0, 0.1, 0.05, 0.2, 0.1, 0.3))


@pytest.mark.parametrize("prior", [None, BELIEF], ids=["measured", "with-a-prior"])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_slopes_are_those_of_small_steps(scale: float, prior: Prior | None) -> None:
    errors = errors_of([*measured(8), *measured(16)], prior)
    assert list(errors.free) == list(range(7))
    logs = np.log(np.array([TRUTH]) * np.array([scale] * 6 + [1.0]))
    steps = np.eye(7) * 1e-6
    expected = np.array([(errors.at(logs + step)[0][0] - errors.at(logs - step)[0][0]) / 2e-6 for step in steps])
    assert errors.at(logs)[1][0] == pytest.approx(expected, abs=1e-7)


def test_its_squares_are_as_small_as_those_that_a_library_finds() -> None:
    """Both may end in a hollow beside the deepest: neither more often than the other."""
    rng, worse, better = random.Random(1), 0, 0
    for _ in range(60):
        points = noisy(rng)
        errors = errors_of(points)
        theirs = least_squares(
            lambda logs, errors=errors: errors.at(logs[None])[0][0],
            errors.begin[0],
            jac=lambda logs, errors=errors: errors.at(logs[None])[1][0].T,
            bounds=(errors.low[0] - 1e-9, errors.high[0] + 1e-9),
        )
        ours = fit_speed(points).error ** 2 * 2 * len(points)
        worse += ours > 1.02 * 2.0 * theirs.cost + 1e-9
        better += 1.02 * ours < 2.0 * theirs.cost - 1e-9
    assert worse <= 3
    assert worse <= better + 2


def test_fits_made_together_are_to_the_last_bit_those_made_one_by_one() -> None:
    """Replays of a workload would else depend on who happened to report at the same time."""
    rng = random.Random(2)
    sets = [noisy(rng) for _ in range(80)]
    sets += [points[: rng.randrange(1, 5)] for points in sets]
    together = fit_speeds(sets)
    assert together == [fit_speed(points) for points in sets]
    assert fit_speeds(sets, BELIEF) == [fit_speeds([points], BELIEF)[0] for points in sets]
    assert len({each.model for each in together}) > 100


def noisy(rng: random.Random) -> list[SpeedPoint]:
    """Of a made-up model, on sizes and batches that came as they came."""
    inside = (10 ** rng.uniform(-3.0, -0.5), 10 ** rng.uniform(-4.0, -2.0))
    outside = (10 ** rng.uniform(-3.0, 0.0), 10 ** rng.uniform(-4.0, -1.5))
    truth = SpeedModel(rng.uniform(0.0, 0.05), 10 ** rng.uniform(-4.0, -2.0), *inside, *outside, rng.uniform(1.0, 5.0))
    found = {}
    for _ in range(rng.choice([1, 2, 4, 8, 16, 80])):
        ranks, local_batch = rng.choice([1, 2, 3, 4, 8, 12, 24, 32]), rng.choice([16, 25, 40, 64, 100])
        nodes = rng.choice([-(-ranks // 8), min(ranks, -(-ranks // 4))])
        time, factor = truth.step_time(ranks, nodes, local_batch), rng.lognormvariate(0.0, 0.03)
        found[ranks, nodes, local_batch] = (time.step_s * factor, time.sync_s * factor)
    return [SpeedPoint(*where, *times) for where, times in found.items()]


def test_what_was_measured_without_noise_is_predicted_elsewhere() -> None:
    fitted = fit_speed([*measured(8), *measured(64)])
    assert fitted.error < 1e-3
    for size in ((3, 1), (6, 2), (32, 8)):
        assert fitted.model.step_time(*size, 32).step_s == pytest.approx(TRUTH.step_time(*size, 32).step_s, rel=0.02)


def test_a_batch_is_chosen_by_half_a_constant_while_one_alone_was_measured() -> None:
    """What was measured is predicted as before; two batches tell by themselves."""
    points = measured(16)
    model = fit_speed(points).model
    hopeful = tried(model, points)
    for each in SIZES:
        assert hopeful.step_time(*each, 16) == pytest.approx(model.step_time(*each, 16))
    assert hopeful.step_time(1, 1, 32).step_s == pytest.approx((2.0 - CONSTANT) * model.step_time(1, 1, 16).step_s)
    both = [*points, *measured(32)]
    assert tried(fit_speed(both).model, both) == fit_speed(both).model
