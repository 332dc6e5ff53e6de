"""Agents of the last released version are replaced by today's one by one: no job notices, and both work together."""

import os
import time

import pytest

from tests.agent.testing import start_agents, wait_until_sync
from tests.cluster.conftest import converge
from tests.cluster.elastic_job import ElasticJob
from tests.testbed.released import install_released, why_not_released

pytestmark = [pytest.mark.cluster, pytest.mark.torch, pytest.mark.acceptance]

RANK = """
import os, pathlib, time
print("pid", os.getpid(), flush=True)
while not pathlib.Path(os.environ["HURRY"]).exists():
    time.sleep(0.1)
"""


@pytest.fixture
def released(tmp_path):
    """Three agents of the released version, with four simulated GPUs each."""
    if reason := why_not_released():
        pytest.skip(reason)
    with start_agents(3, gpus=4, packages=install_released(tmp_path)) as agents:
        converge(agents)
        yield agents


def is_living(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Rigid:
    """A gang of fixed size whose ranks tell their process ids and wait."""

    def __init__(self, agents, hurry, venv, **spec):
        self.agents, self.ranks = agents, spec["ranks"]
        python = str(venv / "bin/python")
        self.id = agents[0].submit(python, "-c", RANK, env={"HURRY": str(hurry)}, **spec)["id"]
        wait_until_sync(lambda: len(self.pids) == self.ranks, what="all ranks run")

    @property
    def pids(self):
        return sorted(int(line.split()[1]) for line in self.agents[0].output({"id": self.id}).splitlines())

    @property
    def now(self):
        return [agent.get(f"/v1/jobs/{self.id}") for agent in self.agents]


def check_that_both_work_together(agents):
    """Jobs go from every agent to every other one, also as one gang over all of them, and all tell the same of them."""
    jobs = [
        giver.submit("true", name=f"{giver.name}-{taker.name}", nodes=[taker.name])
        for giver in agents
        for taker in agents
    ]
    jobs.append(agents[-1].submit("true", ranks=3, cpus_per_rank=1, per_node=True))
    for job in jobs:
        ended = agents[0].ended(job)
        assert (ended["end_reason"], ended["exit_code"], ended["attempt"]) == ("completed", 0, 1), ended
    for agent in agents:
        assert {agent.get(f"/v1/jobs/{job['id']}")["state"] for job in jobs} == {"ended"}


def test_an_upgrade_from_the_released_version_and_back_leaves_jobs_untouched(released, train_venv, tmp_path):
    agents, hurry = released, tmp_path / "hurry"
    rigid = [Rigid(agents, hurry, train_venv, ranks=1, nodes=[agent.name]) for agent in agents]
    rigid.append(Rigid(agents, hurry, train_venv, ranks=6, gpus_per_rank=1, nodes=["n2", "n3"]))
    elastic = ElasticJob(agents, train_venv, epochs=100_000, nodes=["n1"])
    elastic.trains_with(2)
    pids, workers = [job.pids for job in rigid], dict(elastic.workers)

    def check_that_nothing_was_noticed():
        found = [job.pids for job in rigid]
        assert found == pids, "\n".join(f"{agent.name}: {agent.log_file.read_text()[-4_000:]}" for agent in agents)
        assert all(is_living(pid) for group in pids for pid in group)
        for documents in ([document for job in rigid for document in job.now], [elastic.now]):
            told = {(each["state"], each["attempt"], each["restarts"]) for each in documents}
            assert told == {("running", 1, 0)}, documents
        assert workers.items() <= elastic.workers.items(), f"{elastic.now}\n{elastic.output[-3_000:]}"
        step = elastic.now["progress"]["step"] or 0  # an agent knows none before its workers' next report
        wait_until_sync(lambda: (elastic.now["progress"]["step"] or 0) > step, what="the elastic job trains on")

    def replace(agent, packages):
        agent.stop()
        agent.packages = packages
        agent.restart()
        converge(agents)

    old = agents[0].packages
    for agent in agents:
        replace(agent, None)
        check_that_both_work_together(agents)
        check_that_nothing_was_noticed()

    agents[1].call("POST", f"/v1/jobs/{elastic.id}/scale", {"ranks": 3})
    elastic.trains_with(3)  # the newcomer has today's swarm_elastic, the others the released one
    time.sleep(1.0)
    check_that_nothing_was_noticed()

    rigid.append(Rigid(agents, hurry, train_venv, ranks=1, nodes=["n1"]))
    pids.append(rigid[-1].pids)
    replace(agents[0], old)
    check_that_both_work_together(agents)
    check_that_nothing_was_noticed()

    logs = "".join(agent.log_file.read_text() for agent in agents)
    assert "Traceback" not in logs
    assert "is no task order" not in logs
    hurry.touch()
    for job in rigid:
        ended = agents[0].ended({"id": job.id})
        assert (ended["end_reason"], ended["attempt"], ended["restarts"]) == ("completed", 1, 0), ended
    elastic.agent.call("POST", f"/v1/jobs/{elastic.id}/cancel", {})
