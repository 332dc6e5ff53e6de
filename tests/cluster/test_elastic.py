"""Elastic jobs on real agents: they grow, shrink, move and lose workers and agents while they train."""

import json
import os
import re
import signal

import pytest

from tests.agent.testing import wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.torch, pytest.mark.xdist_group("torch")]

TRAIN = """
import time, torch, swarm_elastic
torch.manual_seed(1)
x = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
training = swarm_elastic.Elastic(model, torch.optim.SGD(model.parameters(), 0.05), global_batch=32)
for a, b in training.batches(data, epochs=EPOCHS):
    loss = torch.nn.functional.mse_loss(model(a), b)
    loss.backward()
    training.step(loss)
    time.sleep(0.02)
    if training.step_number % 16 == 0:
        print(f"step {training.step_number} world {training.world_size} {training.workers}", flush=True)
print(f"done {training.step_number} loss {training.loss:.3g}", flush=True)
"""


class Job:
    """One elastic job, as its agents show it."""

    def __init__(self, agents, venv, epochs, **spec):
        self.agents = agents
        python, script = str(venv / "bin" / "python"), TRAIN.replace("EPOCHS", str(epochs))
        wanted = {"ranks": 2, "gpus_per_rank": 1, "elastic": True, "env": {"OMP_NUM_THREADS": "1"}, **spec}
        self.id = agents[0].submit(python, "-c", script, **wanted)["id"]

    def now(self):
        agent = next(agent for agent in self.agents if agent.process.poll() is None)
        return agent.get(f"/v1/jobs/{self.id}")

    def output(self):
        agent = next(agent for agent in self.agents if agent.process.poll() is None)
        return agent.output({"id": self.id})

    def worlds(self):
        """Of the last lines: how many train."""
        return [int(size) for size in re.findall(r"world (\d+)", self.output())]

    def trains_with(self, ranks, timeout_s=60):
        def is_so():
            return ranks in self.worlds()[-1:] and self.now()["rescalings"][-1:] != []

        wait_until_sync(is_so, timeout_s, what=lambda: f"{ranks} train: {self.now()} {self.output()[-2000:]}")

    def ended(self):
        wait_until_sync(lambda: self.now()["state"] == "ended", 120, what=lambda: self.output()[-2000:])
        return self.now()


def scaled(agents, job, ranks):
    return agents[1].call("POST", f"/v1/jobs/{job.id}/scale", {"ranks": ranks})


def test_a_job_grows_shrinks_and_ends_in_one_attempt(fresh_swarm, train_venv):
    job = Job(fresh_swarm, train_venv, epochs=40)
    wait_until_sync(lambda: 2 in job.worlds()[-1:], 60, what=lambda: job.now())
    scaled(fresh_swarm, job, 4)
    job.trains_with(4)
    scaled(fresh_swarm, job, 1)
    job.trains_with(1)
    done = job.ended()
    assert (done["end_reason"], done["exit_code"], done["attempt"], done["restarts"]) == ("completed", 0, 1, 0)
    assert "done 640 loss" in job.output()
    changes = [(each["ranks_before"], each["ranks_after"]) for each in done["rescalings"]]
    assert changes == [(2, 4), (4, 1)], json.dumps(done["rescalings"])
    assert all(0.0 <= each["pause_seconds"] < 5.0 for each in done["rescalings"])


def test_a_job_survives_a_killed_worker_and_a_killed_agent(fresh_swarm, train_venv):
    job = Job(fresh_swarm, train_venv, epochs=60, ranks=3)
    wait_until_sync(lambda: 3 in job.worlds()[-1:], 60, what=lambda: job.now())
    victim = next(pid for pid in workers_of(job.id) if env_of(pid)["SWARM_WORKER"] == "1")
    os.kill(victim, signal.SIGKILL)
    wait_until_sync(lambda: job.now()["rescalings"], 60, what=lambda: f"{job.now()} {job.output()}")
    wait_until_sync(lambda: len(job.now()["rescalings"]) >= 2, 90, what=lambda: f"{job.now()} {job.output()}")
    job.trains_with(3)
    shepherd = next(agent for agent in fresh_swarm if agent.name == job.now()["shepherd"])
    shepherd.kill()
    done = job.ended()
    assert (done["end_reason"], done["attempt"]) == ("completed", 1), job.output()


def env_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = file.read().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def workers_of(job_id):
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                env = env_of(name)
            except OSError:
                continue
            if env.get("SWARM_JOB_ID") == job_id and "SWARM_WORKER" in env:
                found.append(int(name))
    return found
