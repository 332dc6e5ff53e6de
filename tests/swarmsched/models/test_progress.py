"""How far and how fast: counts that grow, odd ones included, and what follows for the time that is left."""

import random
from itertools import product
from math import inf, sqrt
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmsched.estimate import Estimate, NoisePoint, SpeedPoint
from swarmsched.models.fit import fit_speed
from swarmsched.models.progress import (
    BLOCK_S,
    BLOCKS_FOR_INTERVAL,
    BLOCKS_LIMIT,
    CLOCK_S,
    FIGURES,
    GOALS,
    Pace,
    Progress,
    ScriptClock,
)
from swarmsched.models.speed import SpeedModel
from swarmsched.wire.codec import encode_value


def paced(steps, seconds, begin_s=0.0):
    """Reports of every step, at these durations."""
    pace, now_s = Pace(), begin_s
    pace.observe(0, now_s)
    for step in range(1, steps + 1):
        now_s += seconds(step)
        pace.observe(step, now_s)
    return pace


def test_an_even_pace_is_told_exactly():
    pace = paced(100, lambda _: 0.5)
    left = pace.remaining(60)
    assert left.seconds == pytest.approx(30.0)
    assert (left.low_s, left.high_s) == pytest.approx((30.0, 30.0), abs=1e-6)
    assert pace.recent_s == pytest.approx(0.5)


def test_a_pause_counts_for_what_is_left_and_not_for_the_seconds_of_a_step():
    """Each tenth step is followed by a validation of nine seconds."""
    pace = paced(200, lambda step: 10.0 if step % 10 == 0 else 1.0)
    assert pace.recent_s == 1.0
    assert pace.remaining(100).seconds == pytest.approx(190.0, rel=0.05)


def test_the_interval_holds_the_outcome_about_nineteen_times_of_twenty():
    rng, held = random.Random(7), 0
    for _ in range(400):
        pace = paced(40, lambda _: rng.lognormvariate(0.0, 0.6))
        outcome = sum(rng.lognormvariate(0.0, 0.6) for _ in range(80))
        left = pace.remaining(80)
        held += left.low_s <= outcome <= left.high_s
    assert 0.90 < held / 400 < 0.99


def test_the_interval_narrows_as_more_is_known():
    rng = random.Random(3)

    def width(steps):
        found = [paced(steps, lambda _: rng.lognormvariate(0.0, 0.5)).remaining(100) for _ in range(20)]
        return mean(each.high_s - each.low_s for each in found)

    assert width(400) < width(20) / sqrt(2)


def test_without_a_complete_block_nothing_is_told_and_without_some_no_interval():
    pace = Pace()
    pace.observe(0, 0.0)
    assert (pace.remaining(5), pace.recent_s) == (None, None)
    pace.observe(1, BLOCK_S / 2)
    assert pace.remaining(5) is None
    pace.observe(2, 1.0)
    assert (pace.remaining(5).seconds, pace.remaining(5).low_s) == (2.5, None)
    for step in range(3, 2 + BLOCKS_FOR_INTERVAL):
        pace.observe(step, float(step))
    assert pace.remaining(5).low_s is not None


def test_a_count_that_falls_begins_anew_and_one_that_stands_changes_nothing():
    pace = paced(10, lambda _: 1.0)
    assert pace.observe(10, 60.0) == "frozen"
    assert pace.remaining(10).seconds == 10.0
    assert pace.observe(4, 70.0) == "backward"
    assert pace.remaining(10) is None
    assert pace.observe(5, 73.0) == ""
    assert pace.remaining(10).seconds == 30.0


def test_a_long_training_costs_no_more_memory_than_a_short_one():
    pace = paced(100_000, lambda step: 0.3 if step < 50_000 else 0.5)
    assert len(pace._blocks) < BLOCKS_LIMIT
    assert pace.remaining(1_000).seconds == pytest.approx(400.0, rel=0.01)
    assert pace.recent_s == pytest.approx(0.5)


def test_after_long_training_a_pause_still_does_not_count_for_a_step():
    """Each tenth step is followed by a validation of 29 seconds; blocks have become long by then."""
    pace = paced(20_000, lambda step: 30.0 if step % 10 == 0 else 1.0)
    assert pace.recent_s == 1.0
    assert pace.remaining(100).seconds == pytest.approx(390.0, rel=0.01)


def test_steps_are_believed_before_epochs():
    progress = Progress()
    progress.take(0, {"epoch": 1.0, "total_epochs": 4}, 0.0)
    progress.take(0, {"epoch": 1.5}, 10.0)
    assert (progress.end.goal, progress.ratio, progress.remaining.seconds) == ("total_epochs", 0.375, 50.0)
    progress.take(0, {"step": 10, "total_steps": 100}, 10.0)
    assert (progress.end.goal, progress.ratio, progress.remaining) == ("total_steps", 0.1, None)


def falling(steps, noise=0.0, target=0.2, seed=5):
    """A loss of 1 at first, 0.5 at step 100, 0.2 at step 400; a second a step."""
    rng, progress = random.Random(seed), Progress()
    for step in range(steps + 1):
        loss = rng.lognormvariate(0.0, noise) / (0.01 * step + 1)
        progress.take(0, {"step": step, "loss": loss, "target_loss": target}, float(step))
    return progress


def test_the_curve_of_losses_tells_the_end_where_only_a_target_was_declared():
    progress = falling(200, noise=0.02)
    assert (progress.end.goal, progress.ratio) == ("target_loss", pytest.approx(0.5, abs=0.05))
    left = progress.remaining
    assert left.low_s <= 200 <= left.high_s
    assert left.seconds == pytest.approx(200, rel=0.1)
    estimate = progress.estimate(1, 1)
    assert estimate.remaining == pytest.approx(left.seconds, rel=0.01)
    assert 0.001 < estimate.remaining_error < 0.2


def test_a_target_that_is_reached_has_nothing_left_and_one_that_is_not_in_sight_no_end():
    assert falling(200, target=0.4).remaining.seconds == 0.0
    assert falling(5).end is None
    flat = Progress()
    for step in range(100):
        flat.take(0, {"step": step, "loss": 1.0 + 0.01 * (-1) ** step, "target_loss": 0.5}, float(step))
    assert (flat.end, flat.remaining, flat.estimate(1, 1).remaining) == (None, None, 0.0)


def test_what_a_higher_rank_says_of_the_loss_does_not_bend_the_curve():
    quiet, loud = falling(200), falling(200)
    for step in range(200, 230):
        loud.take(7, {"step": step, "loss": 50.0}, float(step))
    assert loud.end == quiet.end


def test_a_curve_begins_anew_when_training_does():
    progress = falling(200)
    progress.take(0, {"step": 3, "loss": 0.97}, 300.0)
    assert progress.end is None


def test_what_has_gone_past_its_declared_end_has_nothing_left():
    progress = Progress()
    progress.take(0, {"step": 120, "total_steps": 100}, 0.0)
    assert (progress.ratio, progress.remaining.seconds) == (1.0, 0.0)


def test_of_each_figure_the_lowest_rank_that_tells_it_counts():
    """The last stage of a pipeline alone knows the loss."""
    progress = Progress()
    progress.take(3, {"step": 9, "loss": 0.5}, 0.0)
    progress.take(0, {"step": 10}, 1.0)
    progress.take(3, {"step": 11, "loss": 0.25}, 2.0)
    progress.take(0, {"step": 12}, 3.0)
    assert (progress.figures, progress.rank) == ({"step": 12, "loss": 0.25}, 0)
    assert progress.step_s == 1.0


def test_speed_is_that_of_the_last_blocks():
    progress = Progress()
    for second in range(20):
        progress.take(0, {"step": 2 * second, "samples": 256 * second}, float(second))
    assert (progress.step_s, progress.samples_per_s) == (0.5, 256.0)


def trained(steps=40, batch=256, step_s=0.5, **figures):
    progress = Progress()
    for step in range(steps + 1):
        progress.take(0, {"step": step, "samples": step * batch, **figures}, step * step_s)
    return progress


def test_what_planners_are_told_is_what_was_measured():
    estimate = trained(total_steps=100, grad_noise=8.5).estimate(4, 2)
    points, noise = (SpeedPoint(4, 2, 64, 0.5),), (NoisePoint(256, 8.5),)
    assert estimate == Estimate(points=points, noise=noise, remaining=60.0, done=40.0, is_partial=True)
    assert trained(total_epochs=4, epoch=1).estimate(4, 2).remaining == 120.0


def test_what_nobody_has_told_planners_are_not_told():
    assert Progress().estimate(4, 2) == Estimate()
    progress = Progress()
    progress.take(0, {"loss": 0.5, "grad_noise": 3.0, "total_steps": 9}, 0.0)
    assert progress.estimate(4, 2) == Estimate()
    assert trained(batch=2**40).estimate(4, 2).points == ()
    assert trained(batch=1).estimate(4, 2).points == ()  # fewer samples than ranks: not the batch of one step


def test_live_points_fit_as_those_of_replays_do():
    """Reports of one model on several sizes, as the planner would gather them from cards."""
    truth, points = SpeedModel(0.02, 0.001, 0.05, 0.005, 0.1, 0.01, 1.0), []
    for ranks, nodes, local_batch in product((1, 2, 4), (1, 2), (32, 64, 128)):
        if nodes <= ranks:
            step_s = truth.step_time(ranks, nodes, local_batch).step_s
            (point,) = trained(60, local_batch * ranks, step_s).estimate(ranks, nodes).points
            assert (point.ranks, point.nodes, point.local_batch) == (ranks, nodes, local_batch)
            points.append(point)
    assert [(each.ranks, each.step_s) for each in points if each.local_batch == 64 and each.nodes == 1] == [
        (ranks, pytest.approx(truth.step_time(ranks, 1, 64).step_s)) for ranks in (1, 2, 4)
    ]
    predicted = fit_speed(points).model.step_time(2, 1, 96).step_s
    assert predicted == pytest.approx(truth.step_time(2, 1, 96).step_s, rel=0.2)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.7, 1.5, 10.0])
def test_a_clock_that_runs_at_another_rate_is_not_gone_by(rate):
    """A step a second by the agent's clock."""
    progress = Progress()
    found = [progress.take(0, {"step": step}, step * rate, float(step)) for step in range(60)]
    assert progress.step_s == 1.0
    assert found[-1] == ["clock"]
    assert found[: int(CLOCK_S)] == [[]] * int(CLOCK_S)


def test_reports_that_come_late_at_times_are_of_a_good_clock():
    """An agent that stood still for half a minute, and one that hears each report up to a second late."""
    for late_s in (lambda step: 30.0 * (step in (20, 21)), lambda step: step % 7 / 7):
        progress = Progress()
        told = [progress.take(0, {"step": step}, float(step), step + late_s(step)) for step in range(60)]
        assert not any(told)
        assert progress.step_s == 1.0


def test_a_clock_that_jumps_once_goes_on_and_one_that_jumps_again_and_again_does_not():
    once, often = ScriptClock(), ScriptClock()
    for second in range(0, 120, 5):
        once.time_s(second - 40.0 * (second > 30), second)
        often.time_s(second * 0.2 + 30.0 * (second // 55), second)
    assert (once.is_wrong, often.is_wrong) == (False, True)


@pytest.mark.parametrize(
    ("figures", "problem"),
    [
        ({"step": 100, "total_steps": 100, "epoch": 3.0, "total_epochs": 3}, ""),
        ({"step": 120, "total_steps": 100}, "step 120 is beyond total_steps 100"),
        ({"epoch": 4, "total_epochs": 3}, "epoch 4 is beyond total_epochs 3"),
        (
            {"step": 50, "total_steps": 100, "epoch": 1, "total_epochs": 20},
            "step 50 of 100 and epoch 1 of 20",
        ),
        ({"step": 0, "total_steps": 100, "epoch": 0.5, "total_epochs": 20}, ""),
    ],
)
def test_figures_that_contradict_one_another_are_told(figures, problem):
    progress = Progress()
    assert progress.take(0, figures, 0.0) == ["contradiction"] * bool(problem)
    assert progress.contradiction == problem


def test_a_batch_that_is_not_the_samples_of_a_step_is_told():
    """Samples of one rank of four, and a global batch of 256."""
    progress = trained(batch=64, global_batch=256)
    assert progress.contradiction == "a step has 64 samples, and global_batch is 256"
    assert trained(batch=256, global_batch=256).contradiction == ""


def test_of_another_batch_all_is_measured_anew():
    progress = trained(batch=256, global_batch=256)
    for step in (41, 42):
        progress.take(0, {"step": step, "samples": 40 * 256 + (step - 40) * 512, "global_batch": 512}, step * 0.9)
    assert (progress.step_s, progress.contradiction) == (pytest.approx(0.9), "")


def test_an_end_that_goes_away_from_whoever_goes_towards_it_is_not_believed():
    """One step is left, always; and another job has its end put off once, and goes on towards it."""
    liar, late = Progress(), Progress()
    for step in range(100):
        told = liar.take(0, {"step": step, "total_steps": step + 1}, float(step))
        late.take(0, {"step": step, "total_steps": 60 if step < 30 else 110}, float(step))
    assert (told, liar.end, liar.estimate(1, 1).remaining) == (["contradiction"], None, 0.0)
    assert liar.contradiction == "total_steps was 1 at step 0, and is 100 at step 99"
    assert (late.end.at, late.contradiction) == (110, "")
    liar.take(0, {"step": 3, "total_steps": 50}, 100.0)
    assert liar.end.at == 50


odd = st.sampled_from([5e-324, 1e-300, 1e-9, 0.1, 1, 2, 1e15])
values = st.one_of(st.integers(0, 10**15), st.floats(0, 1e15), odd)
reports = st.tuples(st.integers(0, 3), st.dictionaries(st.sampled_from(FIGURES), values), st.floats(-1e9, 1e9))


@settings(max_examples=60, deadline=None)
@given(st.lists(reports, max_size=30))
def test_no_order_of_reports_does_harm(told):
    progress = Progress()
    for heard_s, (rank, figures, at_s) in enumerate(told):
        odd = progress.take(rank, figures, at_s, 60.0 * heard_s if rank else None)
        assert set(odd) <= {"backward", "clock", "contradiction", "frozen"}
        assert ("contradiction" in odd) == bool(progress.contradiction)
        for rate in (progress.step_s, progress.samples_per_s):
            assert rate is None or 0 < rate < inf
        if all(progress.figures.get(name, 1) for name in GOALS) and (left := progress.remaining):
            assert 0 <= left.seconds < inf
            assert (left.low_s or 0.0) <= left.seconds
            assert left.high_s is None or left.seconds <= left.high_s
            encode_value(Estimate, progress.estimate(4, 2))
