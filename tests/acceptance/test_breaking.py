"""Agents are killed, restarted and stopped under load and under training."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.acceptance, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-train"


def statuses(agent):
    return {each["name"]: each["status"] for each in agent.get("/v1/members")["items"]}


@pytest.fixture
def swarm():
    with start_agents(3) as agents:
        healthy = {agent.name: "alive" for agent in agents}
        for agent in agents:
            wait_until_sync(lambda agent=agent: statuses(agent) == healthy, 20)
        wait_until_sync(lambda: agents[0].get("/v1/status")["gpus"]["total"] == 6, 20)
        yield agents


def test_hundred_jobs_are_done_while_an_idle_agent_is_killed(swarm, stopwatch):
    with stopwatch("100 jobs submitted at two agents, the third killed after 30; all completed"):
        jobs = []
        for index in range(100):
            if index == 30:
                swarm[2].kill()
            jobs.append(swarm[index % 2].submit("true", ranks=1, gpus_per_rank=1, nodes=["n1", "n2"]))
        assert {swarm[0].ended(job, 120)["end_reason"] for job in jobs} == {"completed"}
    wait_until_sync(lambda: statuses(swarm[0])["n3"] == "failed", 20)


@pytest.mark.torch
def test_agents_restart_under_a_running_training_job(swarm, stopwatch, tmp_path):
    """Each agent that runs ranks is killed and started again while they train; the job never notices."""
    if not (VENV / "bin" / "torchrun").exists():
        pytest.skip(f"there is no {VENV} with torch; `make acceptance` makes it")
    shutil.copy(ROOT / "docs" / "examples" / "train_digits.py", tmp_path)
    tmp_path.chmod(0o755)
    command = ("python", "train_digits.py", "--epochs", "120")
    spec = {"ranks": 4, "gpus_per_rank": 1, "venv": str(VENV), "workdir": str(tmp_path)}
    with stopwatch("training of 120 epochs on 4 ranks"):
        job = swarm[0].submit(*command, **spec)
        wait_until_sync(lambda: "epoch  2" in swarm[0].output(job), 120, "it trains")
        nodes = {each["node"] for each in swarm[0].get(f"/v1/jobs/{job['id']}")["nodes"]}
        assert len(nodes) >= 2
        for agent in swarm:
            if agent.name in nodes:
                agent.kill()
                agent.restart()
        assert swarm[0].get(f"/v1/jobs/{job['id']}")["state"] in ("running", "starting"), "killed too late to matter"
        done = swarm[0].ended(job, 240)
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    text = swarm[1].output(job)
    assert len(re.findall(r"^epoch ", text, re.MULTILINE)) == 120
    assert float(re.search(r"test accuracy ([0-9.]+)", text).group(1)) >= 0.95


def test_agent_that_stands_still_for_thirty_seconds_keeps_a_job_that_may_run_on_without_it(swarm, stopwatch):
    sleeper, other = swarm[2], swarm[0]
    words = "echo begun; sleep 36; echo awake"
    job = sleeper.submit("sh", "-c", words, nodes=["n3"], on_isolation="continue")
    wait_until_sync(lambda: "begun" in sleeper.output(job), 10)
    os.kill(sleeper.process.pid, signal.SIGSTOP)
    try:
        with stopwatch("SIGSTOP: seen as failed"):
            wait_until_sync(lambda: statuses(other)["n3"] == "failed", 28)
        time.sleep(30)  # the length of the pause is what is tested
    finally:
        os.kill(sleeper.process.pid, signal.SIGCONT)
    with stopwatch("SIGCONT: alive for all again"):
        for agent in swarm:
            wait_until_sync(lambda agent=agent: set(statuses(agent).values()) == {"alive"}, 20)
    done = sleeper.ended(job, 60)
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    assert other.output(job) == "begun\nawake\n"
