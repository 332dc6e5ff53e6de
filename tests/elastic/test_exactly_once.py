"""Whole jobs over a dataset, of processes that join, leave and are killed: each sample counts once in each epoch."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.elastic.job import Job, Template, elastic_job, until
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-exactly_once")]

SAMPLES, EPOCHS = 2_003, 3
SCRIPT = f"""
import json, os, time
import torch
import swarm_elastic

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, index):
        return index, torch.full((3,), index / {SAMPLES})

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        points = Points()
        return (points[index] for index in range(len(points)))

def tell(**line):
    print(json.dumps(line), flush=True)

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
training = swarm_elastic.Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), global_batch=17, micro_batch=6)
options = {{"mode": "on_demand"}} if os.environ["KIND"] == "on_demand" else {{}}
dataset = Stream() if os.environ["KIND"] == "iterable" else Points()
calls = {EPOCHS} if os.environ["KIND"] == "calls" else 1
indices = []

def batches_of_calls():
    global batches
    for call in range(calls):
        batches = training.batches(dataset, epochs={EPOCHS} // calls, **options)
        yield from batches

for index, x in batches_of_calls():
    at = {{"version": training.version, "round": training.rounds}}
    indices += index[: batches.count].tolist()
    if batches.is_last:
        tell(offered=indices, epoch=training.epoch, **at)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    training.step(loss)
    if batches.is_last:
        indices = []
        if training.rounds > at["round"]:
            tell(done=True, **at)
        time.sleep(0.008)
    if os.environ.get("BREAKS") and training.step_number == 20:
        break
training.finish()
tell(end=True)
"""


def lines(job: Job, kind: str) -> list[dict]:
    return [line for worker in job.workers.values() for line in worker.lines if kind in line]


def counted(job: Job) -> Counter[tuple[int, int]]:
    """Epoch and index of all that the weights were trained on.

    A step that was done by some, all of whom died, was done again by a later plan: that is the one that counts.
    """
    version_of: dict[int, int] = {}
    for line in lines(job, "done"):
        version_of[line["round"]] = max(line["version"], version_of.get(line["round"], 0))
    used: Counter[tuple[int, int]] = Counter()
    for line in lines(job, "offered"):
        if version_of.get(line["round"]) == line["version"]:
            used.update((line["epoch"], index) for index in line["offered"])
    return used


def steps(job: Job, name: str, version: int) -> int:
    return sum("done" in line and line["version"] == version for line in job[name].lines)


def go_on(job: Job, *names: str, lost: tuple[str, ...] = ()) -> None:
    """Members change, and train some steps."""
    version = job.publish(*names, lost=lost)
    until(lambda: all(steps(job, name, version) >= 12 for name in names), job.problems)


AT_NIGHT = [pytest.param(kind, marks=pytest.mark.acceptance) for kind in ("on_demand", "iterable")]


@pytest.mark.parametrize("kind", ["reproducible", "calls", *AT_NIGHT])  # all kinds, in one process: test_data.py
def test_each_sample_is_counted_once_in_each_epoch(kind: str, tmp_path: Path, template: Template) -> None:
    with elastic_job(tmp_path, template, SCRIPT, KIND=kind) as job:
        job.start("a", "b", "c", "d", "e")
        go_on(job, "a", "b")
        go_on(job, "a", "b", "c")
        job["b"].signal(signal.SIGKILL)
        go_on(job, "a", "c", lost=("b",))
        go_on(job, "a", "c", "d")
        job["a"].signal(signal.SIGKILL)
        go_on(job, "c", "d", "e", lost=("a",))
        go_on(job, "d", "e")
        codes = [job[name].ended() for name in ("c", "d", "e")]
        used, ends = counted(job), len(lines(job, "end"))
        assert (codes, ends) == ([0, 0, 0], 2), job.problems()
    assert used == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)})


def test_a_rank_that_breaks_out_of_its_loop_before_the_others_is_named_to_all(
    tmp_path: Path, template: Template
) -> None:
    with elastic_job(tmp_path, template, SCRIPT, KIND="reproducible") as job:
        job.start("a")
        job.start("b", BREAKS="1")
        job.publish("a", "b")
        assert [job[name].ended() for name in ("a", "b")] == [1, 1]
        for name in ("a", "b"):
            assert (
                "ranks [1] have ended their training before step 21, and others train on" in job[name].err.read_text()
            )
