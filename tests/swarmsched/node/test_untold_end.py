"""Real nodes that hold an end of which nobody tells: they find out what was decided, and tell the others."""

import pytest
from msgspec.structs import replace

from swarmsched.api import EndReason, JobState
from swarmsched.events import PeerMessageReceived
from swarmsched.holder.retention import WAIT_S_MAX
from swarmsched.ids import NodeId
from swarmsched.jobs.message import AcceptRequest, Ballot
from swarmsched.simulator.checks.decided import DecidedRecords
from tests.swarmsched.simulator.testing import Watched

SEED = 11
SHEPHERD = NodeId("n000")


def holders_of(watched, job):
    """The machines that hold the job's record, and those that do not; without its shepherd."""
    record = watched.swarm.record(job)
    held = {holder.node for holder in record.holders}
    others = [host for host in watched.swarm.hosts.values() if host.node_id != SHEPHERD]
    return [host for host in others if host.node_id in held], [host for host in others if host.node_id not in held]


def locations(hosts, job):
    return {host.node.locations()[job].state for host in hosts}


def test_everybody_hears_of_an_end_whose_shepherd_died_before_it_could_tell():
    watched = Watched(5, 1, SEED)
    job = watched.submit(1, "sleep", "10", node=SHEPHERD, nodes=(SHEPHERD,))
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    watched.swarm.run_for(5.0)
    holders, strangers = holders_of(watched, job)
    assert strangers
    watched.swarm.network.partition([SHEPHERD], [host.node_id for host in strangers])
    assert watched.swarm.run_until(lambda: any(host.node.record(job).is_ended for host in holders), 60.0)
    watched.swarm.hosts[SHEPHERD].cut_power()
    assert JobState.ENDED not in locations(strangers, job)
    told = watched.swarm.run_until(lambda: locations(strangers, job) == {JobState.ENDED}, WAIT_S_MAX + 15.0)
    assert told


@pytest.mark.parametrize("restarts", [False, True])
def test_an_end_that_holders_accepted_under_different_ballots_is_decided(restarts):
    watched = Watched(3, 1, SEED)
    decided = watched.checks.get(DecidedRecords)
    watched.submit(3, "sleep", "300", node=SHEPHERD)
    job = watched.submit(1, "sleep", "1", node=SHEPHERD)
    watched.swarm.run_for(5.0)
    shepherd = watched.swarm.hosts[SHEPHERD]
    present = shepherd.node.record(job)
    assert present.state is JobState.QUEUED
    shepherd.cut_power()
    end = replace(
        present.updated(state=JobState.ENDED, end_reason=EndReason.CANCELLED, stop_reason=EndReason.CANCELLED),
        ended_utc_s=present.submitted_utc_s + 5.0,
    )
    hosts = holders_of(watched, job)[0]
    for counter, host in enumerate(hosts, start=50):
        ballot = Ballot(counter, SHEPHERD, present.shepherd_generation)
        accept = AcceptRequest(job, ballot, end, ballot, host.storage.store_id)
        host.receive(PeerMessageReceived(SHEPHERD, accept))
    watched.swarm.run_for(1.0)
    assert not decided.last(job).is_ended
    for host in hosts if restarts else []:
        host.crash()
        host.start()
    assert watched.swarm.run_until(lambda: decided.last(job).is_ended, WAIT_S_MAX + 15.0)
