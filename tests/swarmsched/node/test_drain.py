"""A node that drains, in virtual time: jobs go elsewhere, what runs stays, and others know why."""

from swarmsched.api import JobState
from swarmsched.commands import Done, DrainNode, Refused
from swarmsched.events import DiskFilled
from swarmsched.gossip.record import NodeFlag
from swarmsched.ids import NodeId
from tests.swarmsched.simulator.testing import Watched

ONE, WITNESS = NodeId("n000"), NodeId("n002")


def test_jobs_go_to_other_nodes_while_one_drains_and_its_own_run_on():
    watched = Watched(3, 2, 1)
    running = [watched.submit(1, "sleep", "60", node=ONE) for _ in range(6)]
    assert watched.swarm.run_until(lambda: all(watched.state(job) is JobState.RUNNING for job in running), 20.0)
    on_one = len(watched.swarm.hosts[ONE].node.ledger.entries)
    assert on_one == 2, "each node has two GPUs"
    assert watched.swarm.ask(ONE, DrainNode(True, "new disk")) == Done()
    later = [watched.submit(1, "sleep", "1") for _ in range(8)]

    def told():
        status = watched.swarm.hosts[NodeId("n001")].node.node_record(ONE, watched.swarm.loop.now_s)
        return status is not None and status.record.drain_reason == "new disk"

    assert watched.swarm.run_until(told, 10.0), "although nothing was free on it, so that its free state is the same"
    watched.finish([*running, *later], 200.0)
    assert all(watched.swarm.record(job).attempt == 1 for job in running), "none was stopped"
    placed = {share.node for job in later for share in watched.swarm.record(job).shares}
    assert ONE not in placed
    assert watched.swarm.ask(ONE, DrainNode(is_draining=False)) == Done()
    again = [watched.submit(1, "sleep", "5") for _ in range(6)]
    assert watched.swarm.run_until(lambda: len(watched.swarm.hosts[ONE].node.ledger.entries) == 2, 20.0)
    watched.finish(again, 60.0)


def test_jobs_go_to_other_nodes_while_one_has_a_disk_that_is_nearly_full_and_its_own_run_on():
    watched = Watched(3, 2, 1)
    running = watched.submit(1, "sleep", "30", node=ONE, nodes=(ONE,))
    assert watched.swarm.run_until(lambda: watched.state(running) is JobState.RUNNING, 20.0)
    watched.swarm.hosts[ONE].post(DiskFilled("disk nearly full: 1 MiB free"))
    watched.swarm.run_for(5.0)
    status = watched.swarm.hosts[NodeId("n001")].node.node_record(ONE, watched.swarm.loop.now_s)
    assert (status.record.has(NodeFlag.AVOIDED), status.record.free_gpus) == (True, 0)
    later = [watched.submit(1, "sleep", "20") for _ in range(4)]
    assert watched.swarm.run_until(lambda: all(watched.state(job) is JobState.RUNNING for job in later), 20.0)
    waiting = watched.submit(1, "sleep", "1", node=ONE)
    watched.swarm.run_for(2.0)
    why = watched.swarm.hosts[ONE].node.why(waiting, watched.swarm.loop.now_s)
    assert "avoided: disk nearly full: 1 MiB free" in {each.node: each.reason for each in why.nodes}[ONE]
    watched.swarm.hosts[ONE].post(DiskFilled(""))
    watched.finish([running, *later, waiting], 100.0)
    ended = [watched.swarm.record(job) for job in (running, *later, waiting)]
    assert not any(record.relaunches or record.restarts for record in ended), "none was stopped"


def test_a_witness_has_nothing_to_drain():
    watched = Watched(3, 2, 2, witnesses={WITNESS})
    watched.swarm.run_for(5.0)
    reply = watched.swarm.ask(WITNESS, DrainNode(True))
    assert isinstance(reply, Refused)
    assert reply.code == "conflict"
