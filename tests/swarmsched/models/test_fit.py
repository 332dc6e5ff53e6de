"""The fit of the speed model: its slopes are those of the model itself."""

import numpy as np
import pytest

from swarmsched.estimate import SpeedPoint
from swarmsched.models.fit import _slopes, _steps, fit_speed
from swarmsched.models.speed import SpeedModel

TRUTH = SpeedModel(0.02, 0.001, 0.03, 0.004, 0.05, 0.006, 1.7)
SIZES = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (16, 4)]


def measured(local_batch: int) -> list[SpeedPoint]:
    return [SpeedPoint(*size, local_batch, *TRUTH.step_time(*size, local_batch)) for size in SIZES]


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_slopes_are_those_of_small_steps(scale: float) -> None:
    data = np.array([(p.ranks, p.nodes, p.local_batch, p.step_s, p.step_s - p.sync_s) for p in measured(8)])
    logs = np.log(np.array(TRUTH) * np.array([scale] * 6 + [1.0]))

    def times(at: np.ndarray) -> np.ndarray:
        model = np.exp(at)
        grad_s = model[0] + model[1] * data[:, 2]
        return np.log(np.concatenate((_steps(model, data, grad_s), grad_s)))

    steps = np.eye(7) * 1e-6
    expected = np.array([(times(logs + step) - times(logs - step)) / 2e-6 for step in steps]).T
    assert _slopes(np.exp(logs), data) == pytest.approx(expected, abs=1e-7)


def test_what_was_measured_without_noise_is_predicted_elsewhere() -> None:
    fitted = fit_speed([*measured(8), *measured(64)])
    assert fitted.error < 1e-3
    for size in ((3, 1), (6, 2), (32, 8)):
        assert fitted.model.step_time(*size, 32).step_s == pytest.approx(TRUTH.step_time(*size, 32).step_s, rel=0.02)
