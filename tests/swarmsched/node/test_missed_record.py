"""Real nodes of which some missed, or lost for ever, what was decided of a job."""

from swarmsched.api import JobState
from swarmsched.commands import SetSwarmSetting
from swarmsched.ids import NodeId
from swarmsched.view import PolicySetting
from tests.swarmsched.simulator.testing import Watched

SHEPHERD = NodeId("n000")


def test_a_holder_that_was_away_has_the_record_by_the_time_that_another_is_lost():
    watched = Watched(3, 1, 11)
    away, other = watched.swarm.hosts[NodeId("n002")], watched.swarm.hosts[NodeId("n001")]
    watched.swarm.network.partition([away.node_id], [SHEPHERD, other.node_id])
    job = watched.submit(1, "sleep", "300", node=SHEPHERD, nodes=(SHEPHERD,))
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    record = watched.swarm.record(job)
    assert away.node_id in {holder.node for holder in record.holders}
    assert away.node.record(job) is None
    watched.swarm.network.heal()
    assert watched.swarm.run_until(lambda: away.node.record(job) == watched.swarm.record(job), 20.0)


def test_a_waiting_job_that_its_shepherds_disk_took_along_stands_in_nobodys_way():
    """Its card is still gossiped, and under `fifo` nobody passes it."""
    watched = Watched(5, 1, 11)
    swarm = watched.swarm
    last = NodeId("n004")
    running = watched.submit(1, "sleep", "600", node=last, nodes=(last,))
    assert swarm.run_until(lambda: watched.state(running) is JobState.RUNNING, 10.0)
    swarm.ask(last, SetSwarmSetting(PolicySetting("fifo")))
    lost = watched.submit(5, "sleep", "10", node=SHEPHERD)
    swarm.run_for(3.0)
    holders = [swarm.hosts[holder.node] for holder in swarm.record(lost).holders if holder.node != last]
    waiting = watched.submit(1, "sleep", "10", node=last)
    swarm.run_for(5.0)
    assert watched.state(waiting) is JobState.QUEUED
    for host in holders:
        host.wipe()
    swarm.run_for(1.0)
    for host in holders:
        host.start()
    assert swarm.run_until(lambda: watched.state(waiting) is not JobState.QUEUED, 60.0)
