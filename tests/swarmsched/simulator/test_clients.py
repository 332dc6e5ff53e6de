"""Simulated users want of a swarm what people would."""

from swarmsched.api import EndReason, JobSpec
from swarmsched.ids import NodeId
from swarmsched.resources import Demand
from swarmsched.simulator.clients import UserJob, Users
from swarmsched.simulator.workload import Work
from tests.swarmsched.simulator.testing import Watched


def test_a_user_asks_again_for_a_cancel_that_was_lost_with_most_holders():
    """The one that is left slept through it, so what an operator goes on with is the job as it was before."""
    watched = Watched(3, 1, seed=1)
    swarm, clients = watched.swarm, Users(watched.swarm)
    clients.submit(0, UserJob(JobSpec(("sleep", "600"), ranks=1, demand=Demand(gpus=1)), NodeId("n000")))
    assert swarm.run_until(lambda: clients.submissions[0].is_accepted, 10.0)
    ticket = clients.submissions[0].ticket
    deciding, left = [swarm.hosts[each.node] for each in ticket.holders[:2]], swarm.hosts[ticket.holders[2].node]
    left.cut_power()
    swarm.run_for(10.0)
    clients.schedule([Work(swarm.loop.now_s, "cancel", {"job": 0, "grace_s": 0.0})])
    assert swarm.run_until(lambda: swarm.record(ticket.job_id).is_ended, 20.0)
    for host in deciding:
        host.cut_power()
        host.wipe()
    for host in (left, *deciding):
        host.start()
    assert swarm.run_until(swarm.is_converged, 30.0)
    assert not swarm.record(ticket.job_id).is_ended
    clients.schedule([Work(swarm.loop.now_s, "recover", {})])
    assert swarm.run_until(lambda: swarm.record(ticket.job_id).is_ended, 30.0)
    record = swarm.record(ticket.job_id)
    assert record.is_forced
    assert record.end_reason is EndReason.CANCELLED
