"""Elastic jobs on real agents: they grow, shrink, move and lose workers and agents while they train."""

import json
import os
import re
import signal
from pathlib import Path

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
    """One elastic job, as the agents that live show it."""

    def __init__(self, agents, venv, epochs, **spec):
        self.agents = agents
        python, script = str(venv / "bin" / "python"), TRAIN.replace("EPOCHS", str(epochs))
        wanted = {"ranks": 2, "gpus_per_rank": 1, "elastic": True, "env": {"OMP_NUM_THREADS": "1"}, **spec}
        self.id = agents[0].submit(python, "-c", script, **wanted)["id"]

    @property
    def agent(self):
        return next(agent for agent in self.agents if agent.process.poll() is None)

    @property
    def now(self):
        return self.agent.get(f"/v1/jobs/{self.id}")

    @property
    def output(self):
        return self.agent.output({"id": self.id})

    @property
    def size(self):
        """How many train, by the last line."""
        return next((int(size) for size in reversed(re.findall(r"world (\d+)", self.output))), 0)

    def until(self, is_so, what):
        try:
            wait_until_sync(is_so, 90, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.now)}\n{self.output[-2_000:]}") from error

    def trains_with(self, ranks):
        self.until(lambda: self.size == ranks, f"{ranks} ranks train")

    def ended(self):
        self.until(lambda: self.now["state"] == "ended", "it has ended")
        return self.now

    @property
    def workers(self):
        """Process ids by the numbers of their parts, as far as their environments can be read."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                pairs = [pair.split("=", 1) for pair in path.read_text(errors="replace").split("\0") if "=" in pair]
            except OSError:  # it has ended
                continue
            env = dict(pairs)
            if env.get("SWARM_JOB_ID") == self.id and "SWARM_WORKER" in env:
                found[int(env["SWARM_WORKER"])] = int(path.parent.name)
        return found


def test_a_job_grows_and_shrinks_as_it_is_told_to_in_one_attempt(fresh_swarm, train_venv):
    job = Job(fresh_swarm, train_venv, epochs=40)
    job.trains_with(2)
    for ranks in (4, 1):
        fresh_swarm[1].call("POST", f"/v1/jobs/{job.id}/scale", {"ranks": ranks})
        job.trains_with(ranks)
    done = job.ended()
    assert (done["end_reason"], done["exit_code"], done["attempt"], done["restarts"]) == ("completed", 0, 1, 0)
    assert "done 640 loss" in job.output
    changes = [(each["ranks_before"], each["ranks_after"]) for each in done["rescalings"]]
    assert changes == [(2, 4), (4, 1)], json.dumps(done["rescalings"])
    pauses_s = [each["pause_seconds"] or 0.0 for each in done["rescalings"]]
    assert 0.0 < pauses_s[0] < 5.0
    assert pauses_s[1] < 5.0, "whoever is left alone has next to none"


def test_a_job_that_has_all_gpus_gives_some_to_the_next_in_line(fresh_swarm, train_venv):
    job = Job(fresh_swarm, train_venv, epochs=60, ranks=1, ranks_most=6)
    job.trains_with(6)
    other = fresh_swarm[2].submit("true", ranks=3, gpus_per_rank=1)
    assert fresh_swarm[2].ended(other)["end_reason"] == "completed"
    done = job.ended()
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    assert [each["ranks_before"] for each in done["rescalings"]][:1] == [6]
    assert "makes room for" in done["rescalings"][0]["reason"]


def test_a_job_survives_a_killed_worker_and_the_agent_that_shepherds_it(fresh_swarm, train_venv):
    job = Job(fresh_swarm, train_venv, epochs=60, ranks=3)
    job.trains_with(3)
    os.kill(job.workers[1], signal.SIGKILL)
    job.until(lambda: [each["ranks_before"] for each in job.now["rescalings"]] == [3, 2], "another one came for it")
    job.trains_with(3)
    next(agent for agent in fresh_swarm if agent.name == job.now["shepherd"]).kill()
    done = job.ended()
    assert (done["end_reason"], done["attempt"], done["restarts"]) == ("completed", 1, 0)
    assert "worker 1 on" in done["rescalings"][0]["reason"]


def test_a_drained_node_is_left_while_the_job_trains(fresh_swarm, train_venv):
    job = Job(fresh_swarm, train_venv, epochs=60, ranks=2)
    job.trains_with(2)
    home = {node["node"] for node in job.now["nodes"]}
    node = min(home)
    fresh_swarm[0].call("PUT", f"/v1/nodes/{node}/drain", {"draining": True, "reason": "new disks"})
    job.until(lambda: node not in {each["node"] for each in job.now["nodes"]}, f"nothing of it is left on {node}")
    done = job.ended()
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    assert done["rescalings"][0]["reason"] == f"drained: {node}"
