"""A replayed job advances by its profile, waits after each change, and ends at the exact moment."""

import pytest

from swarmsched.api import JobState
from swarmsched.ids import NodeId
from swarmsched.replay.perfect import Pacing
from swarmsched.resources import Share
from tests.swarmsched.replay.testing import elastic, made_up, replay, rigid

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
    observer = replay(jobs, "fifo", pacing=Pacing(0.0, 0.0, plans_most=1_000))
    assert len(observer.finished) == 40
    assert sum(observer.times_s) >= sum(job.physics.total for job in jobs) - 1e-6
