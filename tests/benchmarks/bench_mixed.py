"""A mixed queue of fixed and elastic jobs on a live swarm, with elasticity and without, by turns.

Three agents with two simulated GPUs each.  A worker waits for each of its samples, as if a GPU worked on it, so that a
step of a fixed batch takes half the time on twice the workers; all else, from the queue to the switch, is real.  With
elasticity off an elastic job has the least that it takes, one GPU.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.agent.testing import RunningAgent, wait_until_sync
from tests.benchmarks.loopback import settled_agents

TRAIN = Path(__file__).resolve().parents[2] / ".venv-train" / "bin" / "python"
ROUNDS = 3
DEADLINE_S = 600.0
ELASTIC, FIXED = 3, 4  # jobs
BATCH, STEPS, SAMPLE_S = 32, 100, 0.025  # 80 s on one GPU
FIXED_S, FIXED_GPUS = 20, 2
EVERY_S = 6.0  # between arrivals, by turns

WORKER = f"""
import time, torch, swarm_elastic
x = torch.zeros({BATCH * STEPS}, 1)
model = torch.nn.Linear(1, 1)
training = swarm_elastic.Elastic(model, torch.optim.SGD(model.parameters(), 0.01), global_batch={BATCH})
for (batch,) in training.batches(torch.utils.data.TensorDataset(x)):
    time.sleep({SAMPLE_S} * len(batch))
    loss = model(batch).square().mean()
    loss.backward()
    training.step(loss)
"""

Row = tuple[str, float, str]


def run(rounds: int = ROUNDS) -> Iterator[Row]:
    """(measure, median of the rounds, unit): completion times and makespans, and their ratios."""
    if not TRAIN.exists():
        print("mixed: there is no .venv-train with torch; `make test` makes it", file=sys.stderr)
        return
    found: dict[str, list[tuple[float, float]]] = {"off": [], "advise": []}
    for _ in range(rounds):
        for elasticity, figures in found.items():
            with settled_agents(3, 2) as agents:
                agents[0].call("PUT", "/v1/config", {"policy": "swarm", "parameters": {}, "elasticity": elasticity})
                figures.append(_served(agents))
    for number, measure in enumerate(("average completion time", "makespan")):
        off, on = (statistics.median(each[number] for each in found[key]) for key in ("off", "advise"))
        ratios = [a[number] / b[number] for a, b in zip(found["advise"], found["off"], strict=True)]
        yield f"mixed queue, {measure}, elasticity off", off, "s"
        yield f"mixed queue, {measure}, elastic jobs change while they train", on, "s"
        yield f"mixed queue, {measure}, with over without", statistics.median(ratios), "x"


def short() -> Iterator[Row]:
    """One round."""
    return run(1)


def _served(agents: list[RunningAgent]) -> tuple[float, float]:
    """(average completion time, makespan) of one queue."""
    begun_s, jobs = time.time(), []
    for number in range(ELASTIC + FIXED):
        agent = agents[number % len(agents)]
        if number % 2:
            wanted = {"ranks": 1, "ranks_most": 4, "elastic": True, "env": {"OMP_NUM_THREADS": "1"}}
            jobs.append(agent.submit(str(TRAIN), "-c", WORKER, gpus_per_rank=1, **wanted))
        else:
            jobs.append(agent.submit("sleep", str(FIXED_S), ranks=FIXED_GPUS, gpus_per_rank=1))
        time.sleep(EVERY_S)
    ended = [_ended(agents[0], job["id"]) for job in jobs]
    assert all(each["end_reason"] == "completed" for each in ended), ended
    spans_s = [_utc_s(each["ended_at"]) - _utc_s(each["submitted_at"]) for each in ended]
    return statistics.mean(spans_s), max(_utc_s(each["ended_at"]) for each in ended) - begun_s


def _ended(agent: RunningAgent, job_id: str) -> dict:
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{job_id}")["state"] == "ended", DEADLINE_S, f"{job_id} has ended")
    return agent.get(f"/v1/jobs/{job_id}")


def _utc_s(text: str) -> float:
    return time.mktime(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone + float(text[19:-1] or 0.0)
