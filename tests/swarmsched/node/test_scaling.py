"""Real nodes in virtual time: people ask for other sizes and other hosts of jobs that are there."""

import pytest

from swarmsched.api import EndReason, JobState
from swarmsched.commands import JobAccepted, MigrateJob, Refused, ScaleJob
from swarmsched.resources import ranks_by_node
from swarmsched.simulator.workload import behave
from tests.swarmsched.node.test_rescaling import N0, N1, events, ranks
from tests.swarmsched.simulator.testing import Watched

SAVES, SAVES_NOTHING = "1.0", "0"


@pytest.fixture
def watched():
    """Three machines of two GPUs; ranks commit a checkpoint each second if they are told to."""
    return Watched(3, 2, 5, behaviour=behave)


def running(watched, gpus, *, saves=SAVES, seconds="60", **spec):
    job = watched.submit(gpus, "train", seconds, saves, **spec)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 20.0)
    watched.swarm.run_for(2.5)
    return job


def ask(watched, command):
    return watched.swarm.ask(watched.swarm.record(command.job_id).shepherd, command)


def has(watched, job, count):
    return watched.state(job) is JobState.RUNNING and ranks(watched, job) == count


def test_a_running_job_gets_the_size_that_is_asked_for_and_goes_on_from_its_checkpoint(watched):
    job = running(watched, 2)
    accepted = ask(watched, ScaleJob(job, 4))
    assert isinstance(accepted, JobAccepted)
    assert accepted.record.spec.size_range == "4"
    assert watched.swarm.run_until(lambda: has(watched, job, 4), 20.0)
    assert isinstance(ask(watched, ScaleJob(job, 1, 3)), Refused), "this attempt has saved nothing yet"
    watched.swarm.run_for(2.5)
    ask(watched, ScaleJob(job, 1, 3))
    assert watched.swarm.run_until(lambda: has(watched, job, 3), 20.0), "the nearest of the range"
    watched.finish([job], 120.0)
    record = watched.swarm.record(job)
    assert (record.end_reason, record.rescales, record.restarts) == (EndReason.COMPLETED, 2, 0)
    assert [(each.ranks_before, each.ranks_after) for each in record.rescalings] == [(2, 4), (4, 3)]
    assert all(0.0 < each.pause_s < 10.0 for each in record.rescalings)
    assert record.checkpoint.name >= "step-4"
    assert [event.fields["pause_s"] for event in events(watched, "job.resumed")] == [
        each.pause_s for each in record.rescalings
    ]


def test_a_job_that_is_to_grow_waits_for_room_and_takes_it_when_it_comes(watched):
    other = running(watched, 3)
    job = running(watched, 2)
    ask(watched, ScaleJob(job, 4))
    watched.swarm.run_for(8.0)
    assert has(watched, job, 2)
    shepherd = watched.swarm.hosts[watched.swarm.record(job).shepherd].node
    assert shepherd.size_reason(watched.swarm.record(job)) == "is to have 4: waits for room on free GPUs"
    shepherd = watched.swarm.record(job).shepherd
    watched.swarm.hosts[shepherd].crash()
    assert watched.swarm.run_until(lambda: watched.swarm.record(job).shepherd != shepherd, 60.0)
    watched.swarm.hosts[shepherd].start()
    watched.finish([other], 200.0)
    assert watched.swarm.run_until(lambda: has(watched, job, 4), 60.0), "also by a shepherd that was not asked"


def test_a_waiting_job_begins_with_the_size_that_was_asked_for_last(watched):
    other = running(watched, 5, seconds="10")
    job = watched.submit(4, "train", "20", SAVES)
    watched.swarm.run_for(2.0)
    assert watched.state(job) is JobState.QUEUED
    ask(watched, ScaleJob(job, 1))
    assert watched.swarm.run_until(lambda: has(watched, job, 1), 10.0), "and there is room for it at once"
    watched.finish([other, job], 90.0)
    assert watched.swarm.record(job).rescalings == ()


def test_what_would_cost_a_job_its_work_or_cannot_be_is_refused_and_changes_nothing(watched):
    job = running(watched, 2, saves=SAVES_NOTHING)
    watched.swarm.run_for(5.0)
    before = watched.swarm.record(job)
    refused = ask(watched, ScaleJob(job, 4))
    assert (refused.code, "no checkpoint" in refused.problem) == ("conflict", True)
    assert ask(watched, ScaleJob(job, 4, 3)).fields[0].pointer == "/ranks_most"
    assert ask(watched, ScaleJob(job, 0)).fields[0].pointer == "/ranks"
    assert ask(watched, ScaleJob(job, 7)).code == "impossible"
    assert "no checkpoint" in ask(watched, MigrateJob(job)).problem
    assert watched.swarm.record(job).spec == before.spec
    watched.finish([job], 90.0)
    assert "ended" in watched.swarm.ask(before.shepherd, ScaleJob(job, 4)).problem
    assert "ended" in watched.swarm.ask(before.shepherd, MigrateJob(job)).problem


def test_a_range_that_the_present_size_is_in_stops_nothing(watched):
    job = running(watched, 2, saves=SAVES_NOTHING)
    assert isinstance(ask(watched, ScaleJob(job, 1, 2)), JobAccepted)
    watched.finish([job], 90.0)
    assert watched.swarm.record(job).rescales == 0


def test_a_job_is_moved_where_it_is_told_to_and_away_from_where_it_is_not_wanted(watched):
    job = running(watched, 2)
    (home,) = ranks_by_node(watched.swarm.record(job).shares)
    target = N1 if home == N0 else N0
    assert isinstance(ask(watched, MigrateJob(job, nodes=(target,))), JobAccepted)

    def is_there(node):
        return has(watched, job, 2) and set(ranks_by_node(watched.swarm.record(job).shares)) == {node}

    assert watched.swarm.run_until(lambda: is_there(target), 20.0)
    watched.swarm.run_for(2.5)
    assert isinstance(ask(watched, MigrateJob(job, nodes=(target,))), JobAccepted), "it is there"
    assert isinstance(ask(watched, MigrateJob(job, avoid=(target,))), JobAccepted)
    assert watched.swarm.run_until(lambda: has(watched, job, 2) and not is_there(target), 20.0)
    watched.finish([job], 120.0)
    record = watched.swarm.record(job)
    assert (record.end_reason, record.rescales) == (EndReason.COMPLETED, 2)


def test_a_move_to_where_there_is_no_room_is_refused_at_once(watched):
    others = [running(watched, 2, nodes=(node,)) for node in (N0, N1)]
    job = running(watched, 2)
    refused = ask(watched, MigrateJob(job, nodes=(N0, N1)))
    assert refused.code == "conflict"
    assert refused.problem == "there is no room on n000, n001 for its 2 ranks at this moment"
    watched.finish([*others, job], 200.0)
    assert watched.swarm.record(job).rescales == 0
