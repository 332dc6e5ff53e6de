"""Losses that come down along a known curve, with noise: when they reach a target, and how sure that is."""

import random
from itertools import pairwise
from math import inf, nan
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from swarmsched.errors import ConfigError
from swarmsched.models.convergence import POINTS_LEAST, POINTS_LIMIT, LossCurve, _with_floor

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


THRESHOLD, EPOCHS, REPORTS = 0.001, 3, 20  # of the rule; reports in each epoch of one step
SLOWING = [(0.21, 1.07, 0.07), (0.05, 0.5, 0.3)]


def end_of(curve):
    """The first epoch after as many as the rule wants, by counting."""
    losses = [1 / (curve[0] * epoch + curve[1]) + curve[2] for epoch in range(1_000)]
    falls = [before - after <= THRESHOLD * losses[0] for before, after in pairwise(losses)]
    return falls.index(True) + EPOCHS


def converging(curve, part, noise, seed, outliers=0.0):
    rng, known = random.Random(seed), LossCurve()
    for number in range(int(end_of(curve) * part * REPORTS)):
        loss = 1 / (curve[0] * number / REPORTS + curve[1]) + curve[2]
        spike = 50.0 if rng.random() < outliers else 1.0
        known.observe(number / REPORTS, loss * rng.lognormvariate(0.0, noise) * spike)
    return known.converges(THRESHOLD, 1.0, EPOCHS)


@pytest.mark.parametrize("curve", SLOWING, ids=str)
@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_the_end_by_the_threshold_is_told_the_better_the_more_was_seen(curve, outliers):
    """As in the paper's figure; a hundredth of the losses is fifty times too large."""
    end, errors = end_of(curve), []
    for part in (0.1, 0.2, 0.4, 0.8):
        found = [converging(curve, part, 0.03, seed, outliers) for seed in range(20)]
        errors.append(median(abs(each.step - end) / end for each in found if each))
    assert errors[0] < 0.15
    assert errors[1] < 0.06
    assert max(errors[2:]) < 0.04
    assert errors[3] < errors[0]


def test_its_interval_holds_the_end_more_than_four_times_of_five():
    found = [converging(curve, part, 0.03, n) for curve in SLOWING for part in (0.1, 0.2, 0.4) for n in range(10)]
    held = [each.low <= end_of(SLOWING[at // 30]) <= (each.high or inf) for at, each in enumerate(found)]
    assert sum(held) > 0.8 * len(held)


@pytest.mark.parametrize(
    "loss",
    [
        lambda step: 0.7,
        lambda step: 0.1 + 0.01 * step,
        lambda step: 1 / (step + 1) + (max(0, step - 200) / 100) ** 2,
        lambda step: nan,
        lambda step: 1 / (step + 1) if step < 390 else inf,
    ],
    ids=["constant", "rising", "diverging", "no number", "diverged"],
)
def test_a_loss_that_does_not_fall_has_no_known_end(loss):
    known = LossCurve()
    for step in range(400):
        known.observe(step, loss(step))
    assert known.converges(0.01, 10.0, 3) is None
    assert known.reach(0.001) is None


def test_steps_that_do_not_grow_and_one_report_tell_no_end():
    known = LossCurve()
    known.observe(5, 1.0)
    assert known.converges(0.01, 10.0, 3) is None
    for number in range(100):
        known.observe(5, 1 / (number + 1))
    assert known.converges(0.01, 10.0, 3) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e15), st.floats()), max_size=80),
    st.floats(1e-9, 1.0),
    st.floats(1e-9, 1e15),
    st.integers(1, 100),
)
def test_no_losses_make_an_end_that_is_behind(told, threshold, epoch_steps, epochs):
    known = LossCurve()
    for step, loss in sorted(told, key=lambda one: one[0]):
        known.observe(step, loss)
    found = known.converges(threshold, epoch_steps, epochs)
    assert found is None or known._points[-1][0] <= found.step < inf


@pytest.mark.parametrize(
    ("rule", "named"), [((nan, 1.0, 3), "threshold"), ((0.01, 0.0, 3), "epoch_steps"), ((0.01, 1.0, 0), "epochs")]
)
def test_a_rule_that_cannot_be_is_named(rule, named):
    with pytest.raises(ConfigError, match=named):
        LossCurve().converges(*rule)


def test_for_each_floor_the_curve_is_that_of_non_negative_least_squares():
    """As the paper fits it, by an independent solver."""
    rng = random.Random(1)
    for start in (0.5, 0.0):
        points = [(float(k), (1 / (0.2 * k + start) + 0.3) * rng.lognormvariate(0, 0.3), 1) for k in range(1, 20)]
        curve = _with_floor(points, 0.1)
        weights = np.array([(loss - 0.1) ** 2 for _, loss, _ in points])
        rows = np.array([(step, 1.0) for step, _, _ in points]) * weights[:, None]
        (rise, first), _ = nnls(
            rows, [weight / (loss - 0.1) for weight, (_, loss, _) in zip(weights, points, strict=True)]
        )
        assert (curve.rise, curve.start) == pytest.approx((rise, first), abs=1e-9)
