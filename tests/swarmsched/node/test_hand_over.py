"""Everything submitted at one node: its jobs come to be shepherded by several, and none is lost on the way."""

from collections import Counter

import pytest

from swarmsched.api import EndReason, JobSpec
from swarmsched.commands import CreateTicket, JobAccepted, SubmitJob, TicketIssued
from swarmsched.holder.choice import HAND_OVER_RATIO, HAND_OVER_SLACK
from swarmsched.ids import NodeId
from swarmsched.resources import Demand
from swarmsched.simulator.network import NetworkFaults
from swarmsched.simulator.swarm import SimulatedSwarm, simulated_resources
from tests.swarmsched.simulator.testing import Watched

SEEDS = (0, pytest.param(1, marks=pytest.mark.acceptance))
BUSY = NodeId("n000")
JOBS = 60
RUN_S = 10.0


def shepherds(swarm, jobs):
    """How many of these jobs each node acts for now, by name."""
    acting = Counter(host.node_id for host in swarm.up for job in jobs if host.node.is_shepherd(job))
    return {node: acting[node] for node in swarm.hosts}


def is_spread(swarm, jobs):
    """Each live job is acted for, and the busy node has no more than it may keep."""
    counts = shepherds(swarm, jobs)
    mean = sum(counts.values()) / len(counts)
    return sum(counts.values()) == len(jobs) and counts[BUSY] <= HAND_OVER_RATIO * mean + HAND_OVER_SLACK


def submit_all_at_one(watched):
    """Without taking the ticket's hint where to go: what a client does that knows one agent only."""
    return [watched.submit(1, "sleep", str(RUN_S), node=BUSY) for _ in range(JOBS)]


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_submitted_at_one_node_are_shepherded_by_several_and_none_is_lost(seed):
    watched = Watched(5, 1, seed)
    jobs = submit_all_at_one(watched)
    assert shepherds(watched.swarm, jobs)[BUSY] > JOBS / 2
    assert watched.swarm.run_until(lambda: is_spread(watched.swarm, jobs), 30.0), shepherds(watched.swarm, jobs)
    assert sum(count > 0 for count in shepherds(watched.swarm, jobs).values()) >= 4
    watched.finish(jobs, 2 * JOBS * RUN_S)
    records = [watched.swarm.record(job) for job in jobs]
    assert {record.end_reason for record in records} == {EndReason.COMPLETED}
    assert sum(host.tasks.start_count for host in watched.swarm.up) == JOBS, "each ran once"
    assert len({record.shepherd for record in records if record.epoch > 1} - {BUSY}) >= 3
    watched.assert_settled()


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_are_handed_over_through_a_bad_network_and_the_giver_s_death(seed):
    """Messages are lost and come twice, and the node that hands over dies in the middle of it."""
    watched = Watched(5, 1, seed, NetworkFaults(loss_ratio=0.1, duplicate_ratio=0.1))
    jobs = submit_all_at_one(watched)
    assert watched.swarm.run_until(lambda: shepherds(watched.swarm, jobs)[BUSY] < JOBS - 8, 30.0)
    watched.swarm.hosts[BUSY].cut_power()
    watched.finish(jobs, 2 * JOBS * RUN_S)
    records = [watched.swarm.record(job) for job in jobs]
    assert {record.end_reason for record in records} == {EndReason.COMPLETED}
    assert sum(record.restarts for record in records) <= 1, "one GPU was lost"
    watched.assert_settled()


def submit_as_the_ticket_says(swarm, node):
    """As the HTTP API does: a ticket here, the submission at its first holder."""
    ticket = swarm.ask(node, CreateTicket())
    spec = JobSpec(command=("sleep", "1"), ranks=1, demand=Demand(gpus=1))
    first = ticket.holders[0].node
    assert isinstance(swarm.ask(first, SubmitJob(ticket.job_id, ticket.holders, spec)), JobAccepted)
    return ticket


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_without_gpus_passes_its_submissions_on_and_holds_them(seed):
    swarm = SimulatedSwarm(4, 2, seed)
    swarm.hosts[BUSY].resources = simulated_resources(BUSY, 0)
    swarm.start()
    assert swarm.run_until(swarm.is_converged, 30.0)
    swarm.run_for(5.0)
    tickets = [submit_as_the_ticket_says(swarm, BUSY) for _ in range(20)]
    jobs = [ticket.job_id for ticket in tickets]
    firsts = {ticket.holders[0].node for ticket in tickets}
    assert BUSY not in firsts
    assert len(firsts) >= 2
    assert all(BUSY in {holder.node for holder in ticket.holders} for ticket in tickets)
    assert shepherds(swarm, jobs)[BUSY] == 0
    assert swarm.run_until(lambda: all(swarm.record(job).is_ended for job in jobs), 120.0)
    assert {swarm.record(job).end_reason for job in jobs} == {EndReason.COMPLETED}


def first_holder(swarm):
    """Where a job that is submitted to the busy node would go."""
    ticket = swarm.ask(BUSY, CreateTicket())
    assert isinstance(ticket, TicketIssued)
    return ticket.holders[0].node


def test_a_node_without_gpus_keeps_its_submissions_where_nobody_has_any():
    swarm = SimulatedSwarm(3, 0, 7)
    swarm.start()
    assert swarm.run_until(swarm.is_converged, 30.0)
    swarm.run_for(5.0)
    assert first_holder(swarm) == BUSY


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_with_far_more_than_its_share_passes_new_submissions_on(seed):
    watched = Watched(5, 1, seed)
    submit_all_at_one(watched)
    assert first_holder(watched.swarm) != BUSY
