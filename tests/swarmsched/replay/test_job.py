"""A replayed job advances by its profile, waits after each change, and ends at the exact moment."""

import pytest

from swarmsched.api import JobState
from swarmsched.ids import NodeId
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.job import Terms, interfere
from swarmsched.replay.learning import LearnedKnowledge
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.physics import ProfiledPhysics
from swarmsched.resources import Share
from tests.swarmsched.replay.testing import BATCHES, elastic, made_up, replay, rigid

HERE, TWO = (Share(NodeId("n001"), 1),), (Share(NodeId("n001"), 2),)


def test_a_rigid_job_runs_its_time_on_the_gpus_that_it_asked_for_and_not_at_all_on_others() -> None:
    job = rigid(1, 0.0, 2, 10.0)
    job.allocate(HERE, 0, 0.0, 0.0)
    job.advance(0.0, 5.0)
    assert (job.progress, job.ends_in_s()) == (0.0, float("inf"))
    job.allocate(TWO, 0, 5.0, 0.0)
    assert job.ends_in_s() == pytest.approx(10.0)
    job.advance(5.0, 100.0)
    assert job.ended_s == pytest.approx(15.0)
    assert job.attained_gpu_s == pytest.approx(1 * 5.0 + 2 * 10.0)


def test_an_epoch_changes_the_pace_and_the_end_is_foretold() -> None:
    """Batch 64 is worth 4/3 steps of 32 at noise 1, and 1.8 at noise 9; a step on one GPU takes 74 ms."""
    job = elastic(1, 0.0, made_up())
    job.allocate(HERE, 64, 0.0, 30.0)
    foretold_s = job.ends_in_s()
    assert foretold_s == pytest.approx(30.0 + 1_000 * 0.074 / (4 / 3) + 1_000 * 0.074 / (20 / 11))
    job.advance(0.0, 1_000.0)
    assert job.ended_s == pytest.approx(foretold_s)


def test_advancing_in_small_steps_comes_to_the_same() -> None:
    whole, parts = elastic(1, 0.0, made_up()), elastic(2, 0.0, made_up())
    for job in (whole, parts):
        job.allocate(TWO, 128, 0.0, 7.0)
    whole.advance(0.0, 60.0)
    for number in range(600):
        parts.advance(number * 0.1, (number + 1) * 0.1)
    assert parts.progress == pytest.approx(whole.progress)
    assert parts.attained_gpu_s == pytest.approx(whole.attained_gpu_s)


def test_changes_are_counted_by_what_they_cost() -> None:
    job = elastic(1, 0.0, made_up())
    job.allocate(HERE, 32, 5.0, 30.0)
    assert (job.rescales, job.pause_s, job.first_started_s) == (0, 30.0, 5.0)
    job.advance(5.0, 50.0)
    job.allocate(HERE, 64, 50.0, 30.0)
    assert (job.rescales, job.pause_s, job.batch) == (0, 0.0, 64), "another batch alone stops nothing"
    job.allocate((Share(NodeId("n002"), 1),), 64, 50.0, 30.0)
    assert (job.rescales, job.migrations, job.pause_s) == (1, 1, 30.0)
    assert job.changed_s == 50.0, "a new attempt begins, as in a swarm"
    job.allocate((), 0, 60.0, 30.0)
    assert (job.preemptions, job.state, job.changed_s) == (1, JobState.QUEUED, 60.0)
    assert job.ends_in_s() == float("inf")


def test_a_job_ends_where_what_is_left_of_it_takes_less_than_the_clock_can_show() -> None:
    """A late moment is known to a nanosecond alone: without a tick the replay came back to it for ever."""
    jobs = [rigid(number, 5e6 + 0.013 * number, 1, 0.01 + 0.0071 * number) for number in range(40)]
    observer = replay(jobs, "fifo", pacing=Ticks(0.0, 0.0, plans_most=1_000))
    assert len(observer.finished) == 40
    assert sum(observer.times_s) >= sum(job.physics.total for job in jobs) - 1e-6


def test_two_jobs_on_several_nodes_that_share_one_slow_each_other_and_no_others() -> None:
    one, two, three = NodeId("n001"), NodeId("n002"), NodeId("n003")
    jobs = [elastic(number, 0.0, made_up()) for number in range(4)]
    for job, nodes in zip(jobs, ((one, two), (two, three), (one,), (three,)), strict=True):
        job.allocate([Share(node, 1) for node in nodes], 32, 0.0, 0.0)
    before = [job.ends_in_s() for job in jobs]
    assert interfere(jobs, 0.25, Fleet.even(3, 2)) == jobs[:2]
    assert [job.ends_in_s() for job in jobs] == pytest.approx([before[0] / 0.75, before[1] / 0.75, *before[2:]])
    told = LearnedKnowledge(0, declares=True, spread=0.0)
    reported, alone = (told.reported(jobs[0]), told.reported(jobs[2]))
    assert reported
    assert alone
    (point,), exact = reported.points, made_up().step_time((1, 1), 16)
    assert point.step_s == pytest.approx(exact.step_s / 0.75)
    assert point.step_s - point.sync_s == pytest.approx(exact.step_s - exact.sync_s), "the gradient takes no longer"
    jobs[1].allocate((), 0, 1.0, 0.0)
    assert interfere(jobs, 0.25, Fleet.even(3, 2)) == jobs[:2], "neither has a neighbour any more"
    assert jobs[0].ends_in_s() == pytest.approx(before[0])


def test_a_liar_counts_all_of_its_steps_wrong_by_one_factor() -> None:
    """They seem as much faster, it seems to have come as much further, and what was declared is as it is."""
    job = elastic(1, 0.0, made_up())
    job.allocate(TWO, 32, 0.0, 0.0)
    job.advance(0.0, 10.0)
    lying = LearnedKnowledge(3, declares=True, spread=0.0, lies=0.5)
    exact, told = (known.reported(job) for known in (LearnedKnowledge(3, declares=True, spread=0.0), lying))
    assert exact
    assert told
    factor = told.done / exact.done
    assert abs(factor - 1.0) > 0.05
    assert lying.counted(job) == told.done
    assert told.points[0].step_s == pytest.approx(exact.points[0].step_s / factor)
    assert told.done + told.remaining == pytest.approx(exact.done + exact.remaining)
    job.allocate(HERE, 32, 10.0, 0.0)
    again = lying.reported(job)
    assert again
    assert again.points[0].step_s == pytest.approx(made_up().step_time((1,), 32).step_s / factor)


def test_a_job_that_fails_ends_there_and_one_with_a_time_limit_when_an_attempt_has_run_for_so_long() -> None:
    failing, limited = rigid(1, 0.0, 2, 100.0), rigid(2, 0.0, 2, 100.0)
    failing.terms, limited.terms = Terms(failure=0.25), Terms(time_limit_s=50.0)
    for job in (failing, limited):
        job.allocate(TWO, 0, 0.0, 10.0)
    assert (failing.ends_in_s(), limited.ends_in_s()) == pytest.approx((35.0, 50.0))
    limited.advance(0.0, 40.0)
    limited.allocate((), 0, 40.0, 10.0)
    limited.allocate(TWO, 0, 60.0, 10.0)
    assert limited.ends_in_s() == pytest.approx(50.0), "a limit counts from the start of an attempt"
    for job, ended_s in ((failing, 35.0), (limited, 110.0)):
        job.advance(60.0 if job is limited else 0.0, 200.0)
        assert (job.ended_s, job.has_failed) == (pytest.approx(ended_s), True)


def test_above_its_first_batch_one_gpu_takes_two_micro_steps_where_that_is_the_rule() -> None:
    """A micro-step of 32 samples takes 42 ms, of 64 it takes 74."""
    plain, split_alone = elastic(1, 0.0, made_up()).physics, ProfiledPhysics(made_up(), BATCHES, is_split_alone=True)
    assert plain.pace((1,), 64, 0.0).rate / split_alone.pace((1,), 64, 0.0).rate == pytest.approx(84 / 74)
    for shape, batch in (((1,), 32), ((2,), 64), ((1,), 256)):
        assert plain.pace(shape, batch, 0.0) == split_alone.pace(shape, batch, 0.0)


def test_alone_on_an_equal_share_a_job_that_needs_more_has_a_part_of_the_time() -> None:
    cluster = Fleet.even(2, 4)
    wide = rigid(1, 0.0, 4, 100.0)
    assert [wide.share_s(cluster, gpus) for gpus in (8.0, 4.0, 1.0)] == pytest.approx([100.0, 100.0, 400.0])
    free = elastic(2, 0.0, made_up(), most=4)
    times = [free.share_s(cluster, gpus) for gpus in (0.5, 1.0, 1.5, 2.0, 4.0, 8.0)]
    assert times[0] == pytest.approx(2 * times[1])
    assert times[2] == pytest.approx(2.0 / (1.0 / times[1] + 1.0 / times[3]))
    assert times[1] > times[3] > times[4] == times[5]


def test_an_equal_share_of_two_classes_is_a_part_of_each() -> None:
    models = {NodeId("n001"): "old", NodeId("n002"): "new"}
    cluster, profile = Fleet(dict.fromkeys(models, 4), models), made_up(speeds={"old": 1.0, "new": 3.0})
    old, new = (Fleet({node: 4}, {node: model}) for node, model in models.items())
    job = elastic(1, 0.0, profile, most=1)
    assert 2.0 / job.share_s(cluster, 1.0) == pytest.approx(1.0 / job.share_s(old, 1.0) + 1.0 / job.share_s(new, 1.0))
