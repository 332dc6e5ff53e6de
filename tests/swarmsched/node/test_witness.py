"""Two nodes and a witness in virtual time: one death costs no job, and the witness only holds and votes."""

import pytest

from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.commands import CreateTicket, JobAccepted, RecoverJob, Refused, SubmitJob, TicketIssued
from swarmsched.gossip import state
from swarmsched.holders import Holder
from swarmsched.ids import NodeId
from swarmsched.resources import Demand, NodeResources
from swarmsched.simulator.swarm import SimulatedSwarm
from tests.swarmsched.simulator.testing import Watched

ABLE, OTHER, WITNESS = NodeId("n000"), NodeId("n001"), NodeId("n002")
SEEDS = range(3)


def swarm_with_witness(seed):
    watched = Watched(3, 2, seed, witnesses={WITNESS})
    watched.swarm.run_for(5.0)  # it has no GPUs by which others would show that its record has reached them
    return watched


def assert_only_holds(watched, jobs):
    """The witness has never started, booked or shepherded anything."""
    host = watched.swarm.hosts[WITNESS]
    assert host.tasks.start_count == 0
    assert not host.node.ledger.entries
    assert not host.node.tasks()
    assert not [job for job in jobs if host.node.is_shepherd(job)]


def run_until(watched, jobs, predicate, limit_s):
    """As `SimulatedSwarm.run_until`, while the witness keeps to its part at every look."""

    def is_reached():
        assert_only_holds(watched, jobs)
        return predicate()

    return watched.swarm.run_until(is_reached, limit_s)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("lost", "left"), [(ABLE, OTHER), (OTHER, ABLE)])
def test_jobs_of_a_dead_node_go_on_at_the_other_and_the_witness_acts_for_none(seed, lost, left):
    """Four jobs fill both nodes, four more wait; then one of the two loses its power for ever."""
    watched = swarm_with_witness(seed)
    jobs = [watched.submit(1, "sleep", "30", node=(ABLE, OTHER)[number % 2]) for number in range(8)]
    states = {JobState.RUNNING: 4, JobState.QUEUED: 4}

    def is_full():
        found = [watched.state(job) for job in jobs]
        return all(found.count(state) == count for state, count in states.items())

    assert run_until(watched, jobs, is_full, 20.0)
    assert all(len(watched.swarm.record(job).holders) == 3 for job in jobs)
    watched.swarm.hosts[lost].cut_power()

    def all_at_the_other():
        return all(watched.swarm.hosts[left].node.is_shepherd(job) for job in jobs)

    assert run_until(watched, jobs, all_at_the_other, 30.0)
    assert run_until(watched, jobs, lambda: all(watched.swarm.record(job).is_ended for job in jobs), 600.0)
    records = [watched.swarm.record(job) for job in jobs]
    assert {record.end_reason for record in records} == {EndReason.COMPLETED}
    assert sorted(record.restarts for record in records) == [0] * 6 + [1] * 2
    assert {record.shepherd for record in records} == {left}
    watched.assert_settled()
    assert_only_holds(watched, jobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_survivor_and_the_witness_accept_new_jobs(seed):
    watched = swarm_with_witness(seed)
    watched.swarm.hosts[OTHER].cut_power()
    assert watched.swarm.run_until(watched.swarm.is_converged, 30.0)
    job = watched.submit(2, "sleep", "5", node=ABLE)
    assert {holder.node for holder in watched.swarm.record(job).holders} == {ABLE, WITNESS}
    watched.finish([job], 60.0)
    assert watched.swarm.record(job).end_reason is EndReason.COMPLETED
    assert_only_holds(watched, [job])


def test_a_witness_whose_two_nodes_are_dead_keeps_what_it_holds_for_their_return():
    watched = swarm_with_witness(7)
    jobs = [watched.submit(1, "sleep", "20", node=node) for node in (ABLE, OTHER)]
    assert watched.swarm.run_until(lambda: all(watched.state(job) is JobState.RUNNING for job in jobs), 10.0)
    for node in (ABLE, OTHER):
        watched.swarm.hosts[node].cut_power()
    assert not run_until(watched, jobs, lambda: False, 120.0)
    assert isinstance(watched.swarm.ask(WITNESS, CreateTicket()), Refused)
    watched.swarm.hosts[ABLE].start()
    assert run_until(watched, jobs, lambda: all(watched.swarm.record(job).is_ended for job in jobs), 180.0)
    assert {watched.swarm.record(job).end_reason for job in jobs} == {EndReason.COMPLETED}
    assert_only_holds(watched, jobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_brought_to_the_witness_is_meant_for_another(seed):
    """Its ticket names an able node first: that is where the witness's HTTP API takes the job."""
    watched = swarm_with_witness(seed)
    ticket = watched.swarm.ask(WITNESS, CreateTicket())
    assert WITNESS in {holder.node for holder in ticket.holders}
    shepherd = ticket.holders[0].node
    assert shepherd in (ABLE, OTHER)
    spec = JobSpec(command=("sleep", "5"), ranks=2, demand=Demand(gpus=1))
    assert isinstance(watched.swarm.ask(shepherd, SubmitJob(ticket.job_id, ticket.holders, spec)), JobAccepted)
    watched.finish([ticket.job_id], 60.0)
    assert watched.swarm.record(ticket.job_id).shepherd == shepherd
    assert_only_holds(watched, [ticket.job_id])


def test_a_node_to_which_jobs_mean_nothing_does_not_keep_the_news_of_all_that_ever_ran(monkeypatch):
    start = SimulatedSwarm.start

    def starts_bare(swarm):
        swarm.hosts[WITNESS].resources = NodeResources((), 0, 0)  # as a witness's agent tells
        return start(swarm)

    monkeypatch.setattr(SimulatedSwarm, "start", starts_bare)
    monkeypatch.setattr(state, "JOB_NEWS_KEPT", 4)
    watched = swarm_with_witness(5)
    for _ in range(3):
        watched.finish([watched.submit(1, "sleep", "30", node=ABLE) for _ in range(6)], 300.0)
        watched.swarm.run_for(70.0)
    assert len(watched.swarm.hosts[WITNESS].node._cluster.take_job_news()) <= 6 + 4


def test_what_a_witness_has_is_no_capacity():
    """Each of the two has 16 cores; the machine of the witness has 8."""
    watched = swarm_with_witness(7)
    watched.swarm.run_for(10.0)  # until totals count
    for node in watched.nodes:
        ticket = watched.swarm.ask(ABLE if node == WITNESS else node, CreateTicket())
        for demand, ranks, allowed in [(Demand(cpus=8), 5, ()), (Demand(), 1, (WITNESS,))]:
            spec = JobSpec(command=("true",), ranks=ranks, demand=demand, nodes=allowed)
            reply = watched.swarm.ask(ticket.holders[0].node, SubmitJob(ticket.job_id, ticket.holders, spec))
            assert isinstance(reply, Refused), reply
            assert reply.code == "impossible"


def test_a_witness_refuses_to_act_for_a_job_that_is_submitted_at_it_all_the_same():
    watched = swarm_with_witness(7)
    ticket = watched.swarm.ask(WITNESS, CreateTicket())
    reply = watched.swarm.ask(WITNESS, SubmitJob(ticket.job_id, ticket.holders, JobSpec(command=("true",))))
    assert isinstance(reply, Refused), reply
    assert reply.code == "unavailable"
    assert_only_holds(watched, [ticket.job_id])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_witness_with_the_only_record_that_is_left_passes_it_on_to_the_holder_that_missed_it(seed):
    watched = swarm_with_witness(seed)
    ticket = watched.swarm.ask(ABLE, CreateTicket())
    assert {holder.node for holder in ticket.holders} == {ABLE, OTHER, WITNESS}
    watched.swarm.hosts[OTHER].crash()
    spec = JobSpec(command=("sleep", "5"), ranks=2, demand=Demand(gpus=1))
    assert isinstance(watched.swarm.ask(ABLE, SubmitJob(ticket.job_id, ticket.holders, spec)), JobAccepted)
    watched.swarm.hosts[ABLE].cut_power()
    watched.swarm.hosts[OTHER].start()
    assert run_until(watched, [ticket.job_id], lambda: watched.swarm.record(ticket.job_id).is_ended, 120.0)
    record = watched.swarm.record(ticket.job_id)
    assert (record.shepherd, record.end_reason) == (OTHER, EndReason.COMPLETED)


def test_a_job_whose_only_able_holder_is_gone_is_recovered_at_its_witnesses():
    """Such holders were chosen by an earlier version; a majority of them lives, and none of it can act."""
    watched = Watched(4, 2, 7, witnesses={WITNESS, NodeId("n003")})
    watched.swarm.run_for(5.0)
    ticket = watched.swarm.ask(ABLE, CreateTicket())
    assert isinstance(ticket, TicketIssued)
    stores = {host.node_id: Holder(host.node_id, host.storage.store_id) for host in watched.swarm.up}
    holders = (stores[ABLE], stores[WITNESS], stores[NodeId("n003")])
    spec = JobSpec(command=("sleep", "40"), nodes=(ABLE, OTHER), demand=Demand(gpus=1))
    assert isinstance(watched.swarm.ask(ABLE, SubmitJob(ticket.job_id, holders, spec)), JobAccepted)
    watched.swarm.hosts[ABLE].cut_power()
    watched.swarm.run_for(60.0)
    assert isinstance(watched.swarm.ask(WITNESS, RecoverJob(ticket.job_id)), JobAccepted)
    watched.finish([ticket.job_id], 120.0)
    record = watched.swarm.record(ticket.job_id)
    assert (record.shepherd, record.end_reason) == (OTHER, EndReason.COMPLETED)
    assert_only_holds(watched, [ticket.job_id])
