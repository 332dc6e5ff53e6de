"""An elastic job for tests of live swarms, and how far it is."""

import json
import re
import tempfile
import uuid
from pathlib import Path

from tests.agent.testing import wait_until_sync

TRAIN = """
import os, time, torch, swarm_elastic
torch.manual_seed(1)
x = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
training = swarm_elastic.Elastic(model, optimizer, global_batch=32, timeout_s=60)
for a, b in training.batches(data, epochs=EPOCHS):
    loss = torch.nn.functional.mse_loss(model(a), b)
    loss.backward()
    training.step(loss)
    if not os.path.exists(os.environ["HURRY"]):
        if os.environ["SWARM_WORKER"] == os.environ.get("HANGING_WORKER") and training.step_number == 24:
            time.sleep(1e6)
        time.sleep(0.6 if os.environ["SWARM_WORKER"] == os.environ.get("SLOW_WORKER") else 0.12)
    if training.step_number % 4 == 0:
        print(f"step {training.step_number} world {training.world_size} {training.workers}", flush=True)
print(f"done {training.step_number} loss {training.loss:.3g}", flush=True)
"""


APART = """
import os, time, torch, swarm_elastic
torch.manual_seed(int(os.environ["SWARM_WORKER"]))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
with swarm_elastic.Outer(model, optimizer, every=4) as outer:
    while not os.path.exists(os.environ["HURRY"]):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        time.sleep(0.05)
        if outer.step_number % 4 == 0:
            print(f"step {outer.step_number} world {outer.learners}", flush=True)
print(f"done with {[round(each, 6) for each in model.weight.flatten().tolist()]}", flush=True)
"""


EPOCHS = 40
STEPS = EPOCHS * 16  # 512 samples, 32 at a time


class ElasticJob:
    """One elastic job, as the agents that live show it.  It takes its time until the test waits for its end."""

    def __init__(self, agents, venv, env=(), epochs=EPOCHS, text=TRAIN, **spec):
        self.agents = agents
        self._hurry = Path(tempfile.gettempdir(), f"swarm-hurry-{uuid.uuid4().hex}")
        python, script = str(venv / "bin" / "python"), text.replace("EPOCHS", str(epochs))
        variables = {"OMP_NUM_THREADS": "1", "HURRY": str(self._hurry), **dict(env)}
        wanted = {"ranks": 2, "gpus_per_rank": 1, "elastic": True, "env": variables, **spec}
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
        self._hurry.touch()
        try:
            self.until(lambda: self.now["state"] == "ended", "it has ended")
        finally:
            self._hurry.unlink()
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
