"""Real nodes that keep few ended jobs: a holder that slept through a job's end must not revive it."""

import random

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.commands import CancelJob, RecoverJob, Refused, SignalJob, SubmitJob
from swarmsched.events import PeerMessageReceived
from swarmsched.ids import NodeId, make_job_id
from swarmsched.jobs.acceptor import Slot
from swarmsched.jobs.message import AcceptRequest, Ballot
from swarmsched.wire.codec import decode_value
from tests.swarmsched.simulator.testing import Watched

SEED = 11
RETAINED = 2
SHEPHERD, OTHER, SLEEPER = NodeId("n000"), NodeId("n001"), NodeId("n002")


def end_others(watched):
    """So many other jobs that the nodes which hear of them drop all that ended before."""
    for _ in range(RETAINED + 1):
        watched.finish([watched.submit(1, "true", node=SHEPHERD, nodes=(SHEPHERD,))], 60.0)


def slept_through_the_end():
    """A swarm whose third holder has an open record of a job that the other two have dropped, and the job."""
    watched = Watched(3, 2, SEED, retained_jobs=RETAINED)
    job = watched.submit(1, "sleep", "10", node=SHEPHERD, nodes=(SHEPHERD,))
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    watched.swarm.run_for(2.0)
    sleeper = watched.swarm.hosts[SLEEPER]
    assert job in sleeper.node.records()
    sleeper.cut_power()
    watched.finish([job], 60.0)
    end_others(watched)
    assert watched.swarm.run_until(lambda: all(job not in host.node.records() for host in watched.swarm.up), 60.0)
    return watched, job


def test_a_holder_that_slept_until_the_others_had_dropped_an_ended_job_does_not_revive_it():
    watched, job = slept_through_the_end()
    attempts = sum(host.tasks.start_count for host in watched.swarm.hosts.values())
    sleeper = watched.swarm.hosts[SLEEPER]
    sleeper.start()
    watched.swarm.run_for(60.0)
    assert sum(host.tasks.start_count for host in watched.swarm.hosts.values()) == attempts
    assert all(not host.node.is_shepherd(job) for host in watched.swarm.up)
    assert all(host.node.is_over(job) and job not in host.node.records() for host in watched.swarm.up)


def test_it_does_not_either_when_one_of_the_others_is_down_for_good():
    watched, job = slept_through_the_end()
    watched.swarm.hosts[OTHER].cut_power()
    sleeper = watched.swarm.hosts[SLEEPER]
    sleeper.start()
    watched.swarm.run_for(60.0)
    assert not sleeper.node.is_shepherd(job)
    assert sleeper.node.is_over(job)


def test_a_client_is_told_that_the_job_is_over_and_its_ticket_makes_no_other():
    watched, job = slept_through_the_end()
    sleeper = watched.swarm.hosts[SLEEPER]
    old = sleeper.disk["register"][job]
    holders = decode_value(Slot, old).accepted.holders
    submit = SubmitJob(job, holders, JobSpec(command=("sleep", "10")))
    for command in (submit, CancelJob(job, 0.0, ""), SignalJob(job, 2), RecoverJob(job)):
        reply = watched.swarm.ask(SHEPHERD, command)
        assert isinstance(reply, Refused)
        assert (reply.code, "past its retention" in reply.problem) == ("over", True)
    sleeper.start()
    watched.swarm.run_for(30.0)
    assert watched.swarm.ask(SLEEPER, submit).code == "over"


def test_ranks_that_were_frozen_while_their_job_ended_and_was_dropped_are_killed():
    watched = Watched(3, 2, SEED, retained_jobs=RETAINED)
    job = watched.submit(1, "sleep", "300", node=SHEPHERD, nodes=(SLEEPER,))
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    watched.swarm.network.partition([SLEEPER], [SHEPHERD, OTHER])
    watched.swarm.run_for(20.0)
    watched.swarm.ask(SHEPHERD, CancelJob(job, 0.0, ""))
    kept = [host for host in watched.swarm.up if host.node_id != SLEEPER]
    assert watched.swarm.run_until(lambda: all(host.node.record(job).is_ended for host in kept), 60.0)
    end_others(watched)
    assert watched.swarm.run_until(lambda: all(host.node.is_over(job) for host in kept), 60.0)
    watched.swarm.network.heal()
    watched.swarm.run_for(60.0)
    sleeper = watched.swarm.hosts[SLEEPER]
    assert not sleeper.tasks.running
    assert not sleeper.node.tasks()


def test_a_record_is_not_dropped_before_its_end_is_known_to_be_decided():
    watched = Watched(3, 2, SEED, retained_jobs=RETAINED)
    host = watched.swarm.hosts[OTHER]
    jobs = [watched.submit(1, "true", node=SHEPHERD) for _ in range(RETAINED)]
    watched.finish(jobs, 60.0)
    assert watched.swarm.run_until(lambda: set(jobs) <= set(host.node.records()), 10.0)
    host.crash()  # whatever it has heard of decisions is forgotten
    host.start()
    watched.swarm.network.partition([OTHER], [SHEPHERD, SLEEPER])
    watched.swarm.run_for(5.0)
    value = replace(host.node.records()[jobs[0]], job_id=make_job_id(5.0, random.Random(5)))
    ballot = Ballot(9, SHEPHERD, value.shepherd_generation)
    accept = AcceptRequest(value.job_id, ballot, value, ballot, host.storage.store_id)
    host.receive(PeerMessageReceived(SHEPHERD, accept))
    watched.swarm.run_for(20.0)
    assert {*jobs, value.job_id} <= set(host.node.records())
    watched.swarm.network.heal()
    assert watched.swarm.run_until(lambda: len(host.node.records()) <= RETAINED, 60.0)


def test_a_former_holder_drops_its_copy_once_the_job_has_ended():
    """It is no holder any more, so nobody tells it of the end: it would keep what it has for ever."""
    watched = Watched(6, 4, SEED, retained_jobs=RETAINED)
    jobs = [watched.submit(1, "sleep", "45", node=node) for node in (*watched.nodes, *watched.nodes)]
    assert watched.swarm.run_until(lambda: any(former_copies(host) for host in watched.swarm.up), 60.0)
    watched.swarm.run_for(60.0)
    assert all(not host.node.is_shepherd(job) for host in watched.swarm.up for job in jobs)
    assert watched.swarm.run_until(lambda: not any(former_copies(host) for host in watched.swarm.up), 120.0)


@pytest.mark.parametrize("seed", [1, 5])
def test_a_holder_that_was_down_while_it_was_replaced_stands_for_nothing_and_keeps_nothing(seed):
    """By its old record it would hold: without leases it would stand for shepherd of each such job all the time."""
    watched = Watched(6, 4, seed)
    jobs = [watched.submit(1, "sleep", "200", node=node) for node in (*watched.nodes, *watched.nodes)]
    assert watched.swarm.run_until(lambda: all(watched.state(job) is JobState.RUNNING for job in jobs), 20.0)
    host = watched.swarm.hosts[SHEPHERD]
    host.cut_power()
    watched.swarm.run_for(100.0)
    host.bring_up()
    assert watched.swarm.run_until(lambda: any(takes_itself_for_a_holder(host, watched, job) for job in jobs), 5.0)
    watched.swarm.run_for(30.0)
    assert not any(takes_itself_for_a_holder(host, watched, job) for job in jobs)
    before = [dict(each.disk["register"]) for each in watched.swarm.up]
    watched.swarm.run_for(20.0)
    assert [dict(each.disk["register"]) for each in watched.swarm.up] == before, "nobody votes"
    watched.finish(jobs, 300.0)
    assert watched.swarm.run_until(lambda: not former_copies(host), 60.0)
    assert all(record.is_ended for record in host.node.records().values())


def takes_itself_for_a_holder(host, watched, job):
    held, decided = host.node.record(job), watched.swarm.record(job)
    return (
        held is not None
        and host.node_id in held.configuration.nodes
        and host.node_id not in decided.configuration.nodes
    )


def former_copies(host):
    slots = [decode_value(Slot, data) for key, data in host.disk["register"].items() if key != "schema"]
    records = [slot.accepted for slot in slots if slot.accepted is not None]
    return [each for each in records if not each.is_ended and host.node_id not in each.configuration.nodes]
