"""A job whose shipped files nobody has who can be reached, in virtual time: it is not tried, and nothing is used up."""

from swarmsched.api import JobState
from swarmsched.events import FilesAway
from swarmsched.ids import NodeId
from tests.swarmsched.simulator.testing import Watched

N0, N1 = NodeId("n000"), NodeId("n001")


def tell(watched, seconds, *jobs):
    """Its shepherd's agent looks again and again."""
    for _ in range(seconds // 10):
        watched.swarm.hosts[N0].post(FilesAway(jobs))
        watched.swarm.run_for(10.0)


def test_a_job_waits_for_its_files_while_others_pass_it_and_starts_as_soon_as_they_are_back():
    watched = Watched(1, 2, 3)
    first = watched.submit(2, "sleep", "40", node=N0)
    assert watched.swarm.run_until(lambda: watched.state(first) is JobState.RUNNING, 10.0)
    waits = watched.submit(2, "sleep", "1", node=N0)
    tell(watched, 60, waits)
    assert (watched.state(first), watched.state(waits)) == (JobState.ENDED, JobState.QUEUED)
    passes = watched.submit(1, "sleep", "1", node=N0)
    tell(watched, 300, waits)
    assert (watched.state(passes), watched.state(waits)) == (JobState.ENDED, JobState.QUEUED)
    record = watched.swarm.record(waits)
    assert (record.attempt, record.relaunches, record.start_faults) == (0, 0, ())
    watched.swarm.hosts[N0].post(FilesAway())
    assert watched.swarm.run_until(lambda: watched.state(waits) is JobState.RUNNING, 2.0)


def test_nobody_who_tells_it_any_more_keeps_a_job_from_its_start():
    watched = Watched(1, 2, 3)
    first = watched.submit(2, "sleep", "5", node=N0)
    assert watched.swarm.run_until(lambda: watched.state(first) is JobState.RUNNING, 10.0)
    waits = watched.submit(2, "sleep", "1", node=N0)
    watched.swarm.hosts[N0].post(FilesAway((waits,)))
    watched.swarm.run_for(20.0)
    assert watched.state(waits) is JobState.QUEUED
    assert watched.swarm.run_until(lambda: watched.state(waits) is JobState.ENDED, 25.0)


def test_whoever_takes_a_job_up_knows_that_its_files_are_away():
    watched = Watched(3, 2, 3)
    full = [watched.submit(2, "sleep", "15", node=N0, nodes=(node,)) for node in watched.swarm.hosts]
    assert watched.swarm.run_until(lambda: all(watched.state(job) is JobState.RUNNING for job in full), 10.0)
    waits = watched.submit(2, "sleep", "1", node=N0)
    watched.swarm.run_for(2.0)
    before = watched.swarm.record(waits).shepherd
    for node, host in watched.swarm.hosts.items():
        if node != before:
            host.post(FilesAway((waits,)))
    watched.swarm.hosts[before].crash()
    assert watched.swarm.run_until(lambda: watched.swarm.record(waits).shepherd != before, 60.0)
    watched.swarm.run_for(9.0)
    assert any(watched.state(job) is JobState.ENDED for job in full), "there is room"
    assert watched.state(waits) is JobState.QUEUED


def test_a_job_that_runs_is_left_alone():
    watched = Watched(1, 2, 3)
    runs = watched.submit(2, "sleep", "60", node=N0)
    assert watched.swarm.run_until(lambda: watched.state(runs) is JobState.RUNNING, 10.0)
    tell(watched, 90, runs)
    assert (watched.state(runs), watched.swarm.record(runs).attempt) == (JobState.ENDED, 1)
