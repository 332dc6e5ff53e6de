"""A gang changes while it trains, and agents, machines, workers or the network fail in the middle of it."""

import os
import signal

import pytest

from tests.agent.testing import wait_until_sync
from tests.chaos.checker import Checker
from tests.cluster.elastic_job import STEPS, ElasticJob

pytestmark = [pytest.mark.root, pytest.mark.chaos, pytest.mark.torch]

rarely = pytest.mark.acceptance


class Change:
    """A job that trains on two of n2 to n5, and n1, which shepherds it and has nothing of it."""

    def __init__(self, swarm, venv):
        self.swarm = swarm
        agents = [machine.agent for machine in swarm]
        self.job = ElasticJob(agents, venv, nodes=["n2", "n3", "n4", "n5"])
        swarm.note(self.job.id)
        self.job.trains_with(2)
        assert self.job.now["shepherd"] == "n1"

    def scale(self, ranks):
        status, told = self.swarm["n5"].agent.call("POST", f"/v1/jobs/{self.job.id}/scale", {"ranks": ranks})
        assert status == 202, told

    def joining(self):
        """Nodes of newcomers that do not train yet, once there are any."""

        def found():
            return [each["node"] for each in self.job.now["world"]["workers"] if each["state"] == "joining"]

        wait_until_sync(found, 20, "others join it")
        return found()

    def completed(self):
        """All steps were taken once by one attempt, whatever happened to it."""
        done = self.job.ended()
        assert (done["end_reason"], done["attempt"], done["restarts"]) == ("completed", 1, 0)
        assert f"done {STEPS} loss" in self.job.output
        return done


@pytest.fixture
def change(build_swarm, train_venv):
    return Change(build_swarm(5), train_venv)


@rarely
def test_the_shepherd_is_killed_while_newcomers_start(change):
    with Checker(change.swarm) as checker:
        change.scale(4)
        change.joining()
        change.swarm["n1"].kill_agent()
        change.job.trains_with(4)
        assert change.job.now["shepherd"] != "n1"
        change.completed()
        checker.verify()


@rarely
def test_a_machine_loses_its_power_while_its_newcomer_starts(change):
    with Checker(change.swarm) as checker:
        change.scale(3)
        (node,) = change.joining()
        change.swarm[node].cut_power()
        change.job.trains_with(3)
        assert node not in {each["node"] for each in change.job.now["nodes"]}
        change.completed()
        checker.verify()


def test_a_worker_dies_while_another_one_comes(change):
    with Checker(change.swarm) as checker:
        first = change.job.workers[1]
        change.scale(3)
        change.joining()
        os.kill(first, signal.SIGKILL)
        change.job.trains_with(3)
        done = change.completed()
        assert any("worker 1 on" in each["reason"] for each in done["rescalings"])
        checker.verify()


@rarely
def test_an_owner_is_killed_while_its_worker_leaves(change):
    with Checker(change.swarm) as checker:
        change.scale(4)
        change.job.trains_with(4)
        last = max(change.job.now["world"]["workers"], key=lambda each: each["worker"])["node"]
        change.scale(2)
        change.swarm[last].kill_agent()
        change.job.trains_with(2)
        change.swarm[last].start_agent()
        change.job.until(lambda: change.swarm[last].agent.get(f"/v1/nodes/{last}")["free_gpus"] == 1, "its GPU is free")
        change.completed()
        checker.verify()


@rarely
def test_a_member_is_cut_off_while_another_one_comes(change):
    with Checker(change.swarm) as checker:
        node = change.job.now["nodes"][0]["node"]
        change.scale(3)
        change.joining()
        change.swarm.isolate(node)
        change.job.until(lambda: node not in {each["node"] for each in change.job.now["nodes"]}, f"{node} is left")
        change.job.trains_with(3)
        change.swarm.network.heal()
        change.completed()
        change.job.until(lambda: not change.job.workers, f"no process of it is left on {node}")
        checker.verify()
