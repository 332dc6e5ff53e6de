"""Two halves of a swarm meet again with fresh verdicts about one another: jobs that were well stay as they are."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.commands import CreateTicket, JobAccepted, SubmitJob
from swarmsched.events import DatagramReceived
from swarmsched.gossip.member import MemberStatus
from swarmsched.gossip.message import MEMBERSHIP_CODEC, Gossip, Standing
from swarmsched.resources import Demand
from tests.swarmsched.simulator.testing import Watched


def submit_within(watched, half):
    """A job whose ranks and most of whose holders are on these nodes."""
    for _ in range(100):
        ticket = watched.swarm.ask(half[0], CreateTicket())
        if sum(holder.node in half for holder in ticket.holders) >= 2:
            spec = JobSpec(("sleep", "300"), ranks=2, demand=Demand(gpus=1), nodes=tuple(half))
            accepted = watched.swarm.ask(half[0], SubmitJob(ticket.job_id, ticket.holders, spec))
            assert isinstance(accepted, JobAccepted)
            return ticket.job_id
    raise AssertionError(f"no ticket names two of {half}")


def verdict_of(teller, name):
    """A packet in which this machine accuses another and declares it failed."""
    claim = teller.node._membership._roster.get(name).update
    accused, failed = (replace(claim, standing=standing) for standing in (Standing.SUSPECT, Standing.FAILED))
    return MEMBERSHIP_CODEC.encode(Gossip((accused, failed)))


def status_of(watched, name, seer):
    return next(member.status for member in seer.node.members(watched.swarm.loop.now_s) if member.node_id == name)


def test_an_owner_that_others_believe_dead_and_that_refutes_it_keeps_its_ranks():
    watched = Watched(5, 2, 1)
    half = watched.nodes[:3]
    job = submit_within(watched, half)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    shepherd = watched.swarm.hosts[watched.swarm.record(job).shepherd]
    owner = next(share.node for share in watched.swarm.record(job).shares if share.node != shepherd.node_id)
    teller = watched.swarm.hosts[watched.nodes[4]]
    shepherd.receive(DatagramReceived(teller.address, verdict_of(teller, owner)))
    assert watched.swarm.loop.run_until(lambda: status_of(watched, owner, shepherd) is MemberStatus.FAILED, 0.1)
    watched.swarm.run_for(5.0)
    assert status_of(watched, owner, shepherd) is MemberStatus.ALIVE
    assert watched.state(job) is JobState.RUNNING
    assert watched.swarm.record(job).attempt == 1


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_verdict_of_the_other_half_that_is_refuted_at_once_costs_no_job_its_attempt(seed):
    """The split heals in the moment in which the smaller half has declared the last of the larger one failed."""
    watched = Watched(5, 2, seed)
    larger, smaller = watched.nodes[:3], watched.nodes[3:]
    jobs = [submit_within(watched, half) for half in (larger, smaller)]
    assert watched.swarm.run_until(lambda: all(watched.state(job) is JobState.RUNNING for job in jobs), 10.0)
    watched.swarm.network.partition(larger, smaller)
    assert watched.swarm.run_until(lambda: watched.swarm.alive_seen_by(smaller[0]) == smaller, 40.0)
    assert [watched.swarm.record(job).attempt for job in jobs] == [1, 1]
    watched.swarm.network.heal()
    watched.swarm.run_for(20.0)
    assert watched.swarm.is_converged()
    assert [watched.swarm.record(job).attempt for job in jobs] == [1, 1]
