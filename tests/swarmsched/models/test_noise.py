"""Gradient noise of a kind of jobs, by progress and batch."""

from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmsched.models.noise import LEAST, MOST, NoiseBook


def book(power: float, *batches: int) -> NoiseBook:
    """Noise that grows with progress, and with a power of the batch."""
    found = NoiseBook()
    for progress in range(0, 10_000, 50):
        for batch in batches:
            found.observe(progress, batch, 0.01 * (1.0 + progress) * (batch / 32) ** power)
    return found


def test_nobody_has_reported() -> None:
    assert NoiseBook().noise(100.0, 32) is None
    assert NoiseBook().power == 0.0


@pytest.mark.parametrize("power", [0.0, 0.3, 0.8])
def test_the_power_and_the_growth_are_recovered_from_what_was_run(power: float) -> None:
    found = book(power, 32, 128, 512)
    assert found.power == pytest.approx(power, abs=0.02)
    for progress in (500.0, 2_000.0, 6_000.0):
        assert found.noise(progress, 1_024) == pytest.approx(0.01 * progress * 32**power, rel=0.35)


def test_one_batch_says_nothing_of_others() -> None:
    found = book(0.5, 64)
    assert found.power == 0.0
    assert found.noise(1_000.0, 4_096) == found.noise(1_000.0, 64)


def test_a_batch_that_was_only_run_late_says_nothing_false_of_the_beginning() -> None:
    found = book(0.0, 32)
    for _ in range(100):
        found.observe(9_000.0, 1_024, 90.0)
    early = found.noise(10.0, 1_024)
    assert early is not None
    assert early < 0.5


def test_what_is_less_than_the_first_and_more_than_the_last_is_as_these() -> None:
    found = NoiseBook()
    found.observe(1_000.0, 32, 5.0)
    assert found.noise(0.0, 32) == found.noise(1e9, 32) == pytest.approx(5.0)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 1e12), st.integers(1, 1 << 30), st.floats(allow_nan=False)), min_size=1, max_size=50
    ),
    st.floats(0.0, 1e12),
    st.integers(1, 1 << 30),
)
def test_whatever_is_reported_gives_a_noise_within_reason(
    reports: list[tuple[float, int, float]], progress: float, batch: int
) -> None:
    found = NoiseBook()
    for each in reports:
        found.observe(*each)
    noise = found.noise(progress, batch)
    assert noise is not None
    assert isfinite(noise)
    assert noise >= 0.0
    assert 0.0 <= found.power <= 1.0


@pytest.mark.parametrize(("told", "believed"), [(inf, MOST), (-1.0, LEAST), (0.0, LEAST)])
def test_a_gradient_without_direction_or_without_noise_is_bounded(told: float, believed: float) -> None:
    found = NoiseBook()
    found.observe(10.0, 32, told)
    assert found.noise(10.0, 32) == pytest.approx(believed)
