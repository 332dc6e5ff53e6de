"""No GPU idles beside a queue that fits it: short jobs of many shepherds, and GPUs that come free in a full swarm."""

import pytest

from swarmsched.api import JobSpec, JobState
from swarmsched.commands import CancelJob, CreateTicket, SubmitJob
from swarmsched.effects import ComputePlan
from swarmsched.ids import NodeId
from swarmsched.resources import Demand
from swarmsched.simulator.swarm import SimulatedSwarm

ONE_GPU = Demand(gpus=1)


def settled(nodes, gpus, seed):
    swarm = SimulatedSwarm(nodes, gpus, seed)
    swarm.start(0.5)
    assert swarm.run_until(swarm.is_converged, 60.0)
    swarm.run_for(10.0)
    return swarm


def submit(swarm, number, duration_s):
    ticket = swarm.ask(NodeId(f"n{number * 7 % len(swarm.hosts):03}"), CreateTicket())
    spec = JobSpec(("sleep", str(duration_s)), ranks=1, demand=ONE_GPU)
    swarm.begin(ticket.holders[0].node, SubmitJob(ticket.job_id, ticket.holders, spec))
    return ticket.job_id


def busy_gpus(swarm, gpus):
    return sum(gpus - host.node.ledger.free.gpu_count for host in swarm.up)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.acceptance)])
def test_short_jobs_of_many_shepherds_keep_the_gpus_busy(seed):
    """Five rounds of 5 s on 24 GPUs; a start takes some 0.3 s itself."""
    swarm = settled(12, 2, seed)
    begun_s = swarm.loop.now_s
    for number in range(120):
        submit(swarm, number, 5.0)
    assert swarm.run_until(lambda: not any(host.node._placement.shepherds.jobs for host in swarm.up), 60.0)
    assert swarm.loop.now_s - begun_s <= 1.25 * 25.0


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.acceptance)])
def test_gpus_that_come_free_in_a_full_swarm_are_taken_within_a_second_and_few_plan_for_it(seed):
    swarm = settled(16, 1, seed)
    jobs = [submit(swarm, number, 500.0) for number in range(80)]
    assert swarm.run_until(lambda: busy_gpus(swarm, 1) == 16, 30.0)
    swarm.run_for(30.0)
    plans = []
    for host in swarm.up:

        def compute(effect, compute=host._compute_plan):
            plans.append(effect)
            compute(effect)

        host._compute_plan = compute
    running = [job for job in jobs if swarm.record(job).state is JobState.RUNNING]
    begun_s, took_s = swarm.loop.now_s, []
    for job in running[:5]:
        stopped_s = swarm.loop.now_s
        swarm.ask(swarm.record(job).shepherd, CancelJob(job))
        assert swarm.run_until(lambda job=job: swarm.record(job).is_ended and busy_gpus(swarm, 1) == 16, 20.0)
        took_s.append(swarm.loop.now_s - stopped_s)
        swarm.run_for(3.0)
    assert sorted(took_s)[2] <= 1.0, took_s
    assert all(isinstance(effect, ComputePlan) for effect in plans)
    assert len(plans) <= 0.25 * 16 * (swarm.loop.now_s - begun_s), "that is a plan in four seconds of each agent"
