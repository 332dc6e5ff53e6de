"""A node that drains, in virtual time: jobs go elsewhere, what runs stays, and others know why."""

from swarmsched.api import JobState
from swarmsched.commands import Done, DrainNode, Refused
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


def test_a_witness_has_nothing_to_drain():
    watched = Watched(3, 2, 2, witnesses={WITNESS})
    watched.swarm.run_for(5.0)
    reply = watched.swarm.ask(WITNESS, DrainNode(True))
    assert isinstance(reply, Refused)
    assert reply.code == "conflict"
