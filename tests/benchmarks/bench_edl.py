"""The experiments of EDL (Wu et al., "Elastic deep learning in multi-tenant GPU clusters") on a live swarm.

Three agents with two simulated GPUs each.  A worker waits for each of its samples, as if a GPU worked on it, so that a
step of a fixed batch takes half the time on twice the workers; all else is real.  A stop is the time from the last step
before a change to the first one after it that nobody had done before, less what that step takes.  Beside it stands the
same job as an ordinary script that is restarted from its checkpoints, with one every ten steps.
"""

import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.agent.testing import RunningAgent, wait_until_sync
from tests.benchmarks.loopback import settled_agents

TRAIN = Path(__file__).resolve().parents[2] / ".venv-train" / "bin" / "python"
BATCH, SAMPLE_S = 12, 0.02
SIZES = (1, 2, 4, 3, 6, 3)  # one more, twice, one less, twice, half
STEPS_BETWEEN = 25
WINDOW_S = 30.0
SLOWNESS = 4
DEADLINE_S = 120.0

TELL = 'print(time.time(), STEP, WORLD, os.environ["SWARM_NODE"], os.environ["SWARM_ATTEMPT"], flush=True)'
ELASTIC = f"""
import os, time, torch, swarm_elastic
slow = {SLOWNESS} if os.environ["SWARM_WORKER"] == os.environ.get("SLOW_WORKER") else 1
data = torch.utils.data.TensorDataset(torch.zeros({BATCH} * 100_000, 1))
model = torch.nn.Linear(1, 1)
training = swarm_elastic.Elastic(model, torch.optim.SGD(model.parameters(), 0.01), global_batch={BATCH})
for (batch,) in training.batches(data):
    time.sleep({SAMPLE_S} * len(batch) * slow)
    loss = model(batch).square().mean()
    loss.backward()
    training.step(loss)
    {TELL.replace("STEP", "training.step_number").replace("WORLD", "training.world_size")}
"""
RESTARTED = f"""
import os, time, torch, swarm_elastic
import torch.distributed as dist
dist.init_process_group("gloo")
world, folder, step = dist.get_world_size(), os.environ.get("SWARM_RESUME_FROM"), 0
model = torch.nn.Linear(1, 1)
if folder:
    step = torch.load(folder + "/state")["step"]
while True:
    time.sleep({SAMPLE_S} * {BATCH} / world)
    model(torch.zeros({BATCH}, 1)).square().mean().backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
    step += 1
    {TELL.replace("STEP", "step").replace("WORLD", "world")}
    if step % 10 == 0 and dist.get_rank() == 0:
        os.makedirs(os.environ["SWARM_CHECKPOINT_DIR"] + f"/{{step}}", exist_ok=True)
        torch.save({{"step": step}}, os.environ["SWARM_CHECKPOINT_DIR"] + f"/{{step}}/state")
        swarm_elastic.checkpoint(str(step))
"""

Row = tuple[str, float, str]


class Step(NamedTuple):
    utc_s: float
    number: int
    world: int
    node: str
    attempt: str


class Job:
    """One job of a swarm and the steps that it did, each once, when the first rank was through with it."""

    def __init__(self, agents: list[RunningAgent], script: str, env: dict[str, str] | None = None, **spec: Any) -> None:
        self.agents = agents
        self._told: set[Step] = set()
        wanted = {"ranks": 1, "gpus_per_rank": 1, "env": {"OMP_NUM_THREADS": "1", **(env or {})}, **spec}
        self.id = agents[0].submit(str(TRAIN), "-c", script, **wanted)["id"]
        self.until(lambda: len(self.steps) > STEPS_BETWEEN, "it trains")

    @property
    def lines(self) -> list[Step]:
        found = [line.split() for line in self.agents[0].output({"id": self.id}).splitlines()]
        self._told.update(Step(float(at), int(number), int(world), *where) for at, number, world, *where in found)
        return sorted(self._told)  # with those of earlier attempts, which are not told again

    @property
    def steps(self) -> list[Step]:
        done = list[Step]()
        for line in self.lines:
            if not done or line.number > done[-1].number:
                done.append(line)
        return done

    def change(self, what: str, document: dict[str, object], is_so: Callable[[Step], bool]) -> float:
        """Ask for a change; seconds until the first step after it."""
        asked_utc_s = time.time()
        self.agents[0].call("POST", f"/v1/jobs/{self.id}/{what}", document)
        self.until(lambda: is_so(self.steps[-1]), f"{what} {document}")
        first = next(step for step in self.steps if step.utc_s > asked_utc_s and is_so(step))
        count = len(self.steps)
        self.until(lambda: len(self.steps) > count + STEPS_BETWEEN, "it goes on")
        return first.utc_s - asked_utc_s

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        wait_until_sync(is_so, DEADLINE_S, what)

    def cancel(self) -> None:
        self.agents[0].call("POST", f"/v1/jobs/{self.id}/cancel", {"grace_seconds": 0})
        self.until(lambda: self.agents[0].get(f"/v1/jobs/{self.id}")["state"] == "ended", "it has ended")


def run() -> Iterator[Row]:
    """(measure, value, unit), one run of each experiment; some five minutes."""
    if not TRAIN.exists():
        print("edl: there is no .venv-train with torch; `make test` makes it", file=sys.stderr)
        return
    with settled_agents(3, 2) as agents:
        agents[0].call("PUT", "/v1/config", {"policy": "swarm", "parameters": {}, "elasticity": "off"})
        stops: dict[str, list[float]] = {}
        for label, script, is_elastic in (("stop-free", ELASTIC, True), ("stop-resume", RESTARTED, False)):
            stops[label] = yield from _scaled(agents, label, script, elastic=is_elastic)
            yield from _moved(agents, label, script, elastic=is_elastic)
        ratio = statistics.median(stops["stop-free"]) / statistics.median(stops["stop-resume"])
        yield "stop-free over stop-resume, medians of the five (<= 0.1)", ratio, "x"
        yield from _straggler(agents)
        yield from _idle(agents)


def _scaled(agents: list[RunningAgent], label: str, script: str, **spec: Any) -> Generator[Row, None, list[float]]:
    job = Job(agents, script, **spec)
    stops_s = []
    for before, after in pairwise(SIZES):
        answered_s = job.change("scale", {"ranks": after}, partial(_has_size, after))
        stops_s.append(_stops_s(job.steps)[-1])
        yield f"{label}, {before} to {after} workers: stop", stops_s[-1], "s"
        yield f"{label}, {before} to {after} workers: request to first step", answered_s, "s"
    done = [(step.number, step.attempt) for step in job.lines]
    yield f"{label}: samples done again", BATCH * (len({*done}) - len({number for number, _ in done})), ""
    job.cancel()
    return stops_s


def _has_size(world: int, step: Step) -> bool:
    return step.world == world


def _is_past(job: Job, utc_s: float) -> bool:
    return job.steps[-1].utc_s > utc_s


def _stops_s(steps: list[Step]) -> list[float]:
    """What each change of the world cost."""
    pairs = [(before, after) for before, after in pairwise(steps) if before.world != after.world]
    return [after.utc_s - before.utc_s - SAMPLE_S * BATCH / after.world for before, after in pairs]


def _moved(agents: list[RunningAgent], label: str, script: str, **spec: Any) -> Iterator[Row]:
    job = Job(agents, script, **spec)
    home = job.steps[-1].node
    job.change("migrate", {"avoid": [home]}, lambda step: step.node != home and step.world == 1)
    steps = job.steps
    last = max(index for index, step in enumerate(steps) if step.node == home and step.world == 1)
    first = next(index for index, step in enumerate(steps) if step.node != home and step.world == 1 and index > last)
    between = steps[last : first + 1]
    nominal_s = sum(SAMPLE_S * BATCH / step.world for step in between[1:])
    yield f"{label}, a job of one worker moves: stop", between[-1].utc_s - between[0].utc_s - nominal_s, "s"
    job.cancel()


def _straggler(agents: list[RunningAgent]) -> Iterator[Row]:
    job = Job(agents, ELASTIC, {"SLOW_WORKER": "2"}, ranks=3, elastic=True)
    job.until(lambda: bool(agents[0].get(f"/v1/jobs/{job.id}")["rescalings"]), "the straggler is replaced")
    steps_at = len(job.steps)
    job.until(lambda: len(job.steps) > steps_at + 2 * STEPS_BETWEEN, "it goes on")
    spans_s = [after.utc_s - before.utc_s for before, after in pairwise(job.steps)]
    yield "straggler: a step before it is replaced", statistics.median(spans_s[:STEPS_BETWEEN]), "s"
    yield "straggler: a step after", statistics.median(spans_s[-STEPS_BETWEEN:]), "s"
    job.cancel()


def _idle(agents: list[RunningAgent]) -> Iterator[Row]:
    samples = {}
    for elasticity in ("off", "advise"):
        agents[0].call("PUT", "/v1/config", {"policy": "swarm", "parameters": {}, "elasticity": elasticity})
        job = Job(agents, ELASTIC, ranks=1, ranks_most=6, elastic=True)
        begun = job.steps[0]
        until_utc_s = begun.utc_s + WINDOW_S
        job.until(partial(_is_past, job, until_utc_s), "the window is over")
        samples[elasticity] = BATCH * sum(step.utc_s <= until_utc_s for step in job.steps)
        if elasticity != "off":
            asked_s = time.monotonic()
            other = agents[1].submit("true", ranks=4, gpus_per_rank=1)
            assert agents[1].ended(other)["end_reason"] == "completed"
            yield "idle GPUs: a job of four GPUs comes, until it has run", time.monotonic() - asked_s, "s"
        job.cancel()
    yield f"idle GPUs: samples in {WINDOW_S:g} s on one GPU", samples["off"], ""
    yield f"idle GPUs: samples in {WINDOW_S:g} s with what is idle", samples["advise"], ""
    yield "idle GPUs: with over without", samples["advise"] / samples["off"], "x"
