"""A script around DistributedDataParallel, whose workers join, leave and die: its weights are those of one worker."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.job import Job, Template, elastic_job, until
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-ddp")]

SCRIPT = """
import itertools, json, os, time
import torch
import swarm_elastic
from swarm_elastic import DistributedDataParallel
from swarm_elastic._group import GroupLost

def tell(**line):
    print(json.dumps(line), flush=True)

def spoil(training, finish):
    sums = itertools.count(1)
    def finish_and_lose(*arguments):
        table = finish(*arguments)
        if next(sums) < 10:
            return table
        training._gradients.finish = finish
        training._gradients.clear()
        raise GroupLost("its connection was cut")
    training._gradients.finish = finish_and_lose

torch.manual_seed(0)
device = torch.device(os.environ["DEVICE"])
x = torch.randn(509, 8)
dataset = torch.utils.data.TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=50)
model = DistributedDataParallel(model, optimizer, global_batch=30, scheduler=scheduler, scaler=scaler)
if "LOSES" in os.environ:
    spoil(model.elastic, model.elastic._gradients.finish)
for epoch in range(24):
    for inputs, targets in model.elastic.batches(dataset):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        tell(step=model.elastic.step_number, version=model.elastic.version, loss=loss.item())
        time.sleep(float(os.environ.get("PAUSE_S", "0.02")))
weights = torch.cat([each.detach().flatten() for each in model.parameters()])
tell(done=model.elastic.step_number, rate=optimizer.param_groups[0]["lr"], weights=weights.tolist())
"""


@pytest.fixture(scope="module")
def make_job(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Callable:
    return lambda **env: elastic_job(tmp_path_factory.mktemp("job"), template, SCRIPT, **env)


def ended(job: Job, name: str) -> dict:
    assert job[name].ended() == 0, job.problems()
    return job[name].lines[-1]


@pytest.fixture(scope="module")
def alone(make_job: Callable) -> dict:
    with make_job(PAUSE_S="0") as job:
        job.start("only")
        job.publish("only")
        return ended(job, "only")


def test_its_weights_and_rates_are_those_of_a_job_that_never_changed(make_job: Callable, alone: dict) -> None:
    """Through joins, a death that takes a step from one of two others, a death in the midst and a leave."""
    with make_job() as job:
        job.start("a", "b", "c")
        job.switch("a", past=5)
        job.switch("a", "b", "c", past=5)
        job["c"].signal(signal.SIGKILL)
        job.switch("a", "b", past=5)
        job.start("d", LOSES="1")
        job.switch("a", "d", past=5)
        until(lambda: "plan 4 lost a member" in job.standings["d"].problem, job.problems)
        job.switch("a", "d", past=5)
        job.start("e")
        job.switch("d", "e", past=5)
        found = [ended(job, name) for name in ("d", "e")]
        assert [job[name].ended() for name in ("a", "b")] == [0, 0]
    for each in found:
        assert (each["done"], each["rate"]) == (alone["done"], pytest.approx(alone["rate"]))
        assert each["weights"] == pytest.approx(alone["weights"], rel=1e-3, abs=1e-3)


def test_passes_without_sum_and_mistakes(tmp_path: Path, template: Template) -> None:
    text = """
import json, warnings
import torch
from swarm_elastic import DistributedDataParallel
def make(**options):
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    return DistributedDataParallel(plain, optimizer, global_batch=4, scheduler=schedule, **options), optimizer, schedule
def raised(what):
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
x = torch.arange(8.0).reshape(2, 4) / 8
model, optimizer, schedule = make()
with model.no_sync():
    (model(x[:1]).sum() / 2).backward()
(model(x[1:]).sum() / 2).backward()
parted = model.module.weight.grad.tolist()
looked = model(x).mean()
optimizer.step()
with warnings.catch_warnings(record=True) as warned:
    schedule.step()
first = model.elastic.step_number
model.elastic.finish()
whole, _, _ = make()
whole(x).mean().backward()
def twice():
    model(x).mean().backward()
    loss = model.module(x).mean()
    loss.backward()
print(json.dumps({
    "same": parted == whole.module.weight.grad.tolist(), "steps": [first, model.elastic.step_number],
    "keys": sorted(model.state_dict()), "twice": raised(twice),
    "early": raised(whole.elastic.finish), "moved": model(x).mean().item() < looked.item(),
    "micro": raised(lambda: make(micro_batch=2)), "warned": [str(each.message) for each in warned],
}))
"""
    with elastic_job(tmp_path, template, text, SWARM_TASK_SOCKET="", SWARM_WORKER="") as job:
        job.start("alone")
        found = ended(job, "alone")
    early = (
        "optimizer.step() was not called with the gradients that backward has summed; call it before the next "
        "batch, and use no_sync() for passes that only add up"
    )
    micro = "micro_batch is for Elastic.step; clip between backward and step, and pass under no_sync()"
    assert found == {
        "same": True,
        "steps": [0, 1],
        "keys": ["module.bias", "module.weight"],
        "twice": "RuntimeError: backward came twice in one step; use no_sync() for all passes but the last",
        "early": f"RuntimeError: {early}",
        "moved": True,
        "micro": f"ValueError: {micro}",
        "warned": [],
    }
