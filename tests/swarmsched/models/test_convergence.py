"""Losses that come down along a known curve, with noise: when they reach a target, and how sure that is."""

import random
from math import inf
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmsched.models.convergence import POINTS_LEAST, POINTS_LIMIT, LossCurve

CURVES = [(0.0105, 1.07, 0.07), (0.0105, 0.5, 0.3), (0.005, 0.2, 1.5), (0.02, 0.14, 0.0)]
END = 2_000


def seen(curve, part, noise, seed, reports=400):
    """What is predicted of the loss at step `END`, from so much of the way to it."""
    rise, start, floor = curve
    rng, known = random.Random(seed), LossCurve()
    for number in range(1, reports + 1):
        step = END * part * number / reports
        known.observe(step, (1 / (rise * step + start) + floor) * rng.lognormvariate(0.0, noise))
    return known.reach(1 / (rise * END + start) + floor)


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_without_noise_a_fifth_of_the_way_tells_the_rest(curve):
    assert seen(curve, 0.2, 0.0, 0).step == pytest.approx(END, rel=0.05)


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_the_nearer_the_end_the_surer(curve):
    early, late = ([seen(curve, part, 0.03, seed) for seed in range(20)] for part in (0.1, 0.7))
    assert median(abs(each.step - END) for each in late if each) < 0.05 * END
    widths = [median((each.high or inf) - each.low for each in found if each) for found in (early, late)]
    assert widths[1] < widths[0]


def test_the_interval_holds_the_end_about_nine_times_of_ten():
    """A jackknife of a curve that is extrapolated says too little rather than too much."""
    found = [seen(curve, part, 0.03, seed) for curve in CURVES for part in (0.2, 0.4) for seed in range(12)]
    held = [each.low <= END <= (each.high or inf) for each in found if each]
    assert len(held) > 0.95 * len(found)
    assert 0.8 < sum(held) / len(held) < 1.0


def test_a_loss_below_the_floor_is_never_reached_and_too_few_points_tell_nothing():
    known = LossCurve()
    for step in range(400):
        known.observe(step, 1 / (0.1 * step + 1) + 0.5)
    assert known.reach(0.45) is None
    assert known.reach(0.55).step == pytest.approx(190, rel=0.1)
    few = LossCurve()
    for step in range(POINTS_LEAST - 1):
        few.observe(step, 1 / (step + 1))
    assert few.reach(0.01) is None


def test_memory_is_bounded_and_losses_that_are_not_positive_tell_nothing():
    known = LossCurve()
    for step in range(50_000):
        known.observe(step, 1 / (0.001 * step + 1))
    assert len(known._points) <= POINTS_LIMIT
    assert known.reach(0.01).step == pytest.approx(99_000, rel=0.05)
    for step in range(50_000, 60_000):
        known.observe(step, -1.0)
    assert known.reach(0.01) is None


losses = st.one_of(st.floats(-1e15, 1e15), st.sampled_from([5e-324, 1e-9, 1e-8, 1.0, 1e15]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e15), losses), max_size=80), losses)
def test_no_losses_do_harm(told, target):
    known = LossCurve()
    for step, loss in sorted(told):
        known.observe(step, loss)
    reach = known.reach(target)
    assert reach is None or (0 <= reach.step < inf and (reach.high is None or reach.step <= reach.high < inf))
