"""Rates that follow the global batch, by each schedule of torch: they keep their ratio to a run without changes."""

import json
from pathlib import Path

import pytest

from tests.elastic.job import Template
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-rate")]

KINDS = {
    "none": "None",
    "lambda": "LambdaLR(o, lambda step: 1 / (1 + step))",
    "multiplicative": "MultiplicativeLR(o, lambda step: 0.9)",
    "step": "StepLR(o, 3)",
    "multi-step": "MultiStepLR(o, [2, 7])",
    "constant": "ConstantLR(o, 0.5, 8)",
    "linear": "LinearLR(o, 0.1, 1.0, 9)",
    "exponential": "ExponentialLR(o, 0.9)",
    "polynomial": "PolynomialLR(o, 30, 2.0)",
    "cosine": "CosineAnnealingLR(o, 9, 0.01)",
    "restarts": "CosineAnnealingWarmRestarts(o, 4, 2, 0.01)",
    "one-cycle": "OneCycleLR(o, 0.1, total_steps=40)",
    "three-phase": "OneCycleLR(o, [0.1, 0.2], total_steps=40, three_phase=True, anneal_strategy='linear')",
    "cyclic": "CyclicLR(o, 0.01, 0.1, step_size_up=5)",
    "cyclic-exp": "CyclicLR(o, 0.01, 0.1, step_size_up=3, mode='exp_range', gamma=0.9)",
    "plateau": "ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=0.01, eps=0.004)",
    "swa": "SWALR(o, 0.05, anneal_epochs=9)",
    "chained": "ChainedScheduler([LinearLR(o, 0.1, 1.0, 6), CosineAnnealingLR(o, 20, 0.01)], o)",
    "sequential": "SequentialLR(o, [LinearLR(o, 0.1, 1.0, 5), CosineAnnealingLR(o, 9, 0.01), ConstantLR(o)], [5, 12])",
    "into-one-cycle": "SequentialLR(o, [LinearLR(o, 0.1, 1.0, 5), OneCycleLR(o, 0.1, total_steps=40)], [5])",
    "nested": "SequentialLR(o, [SequentialLR(o, [StepLR(o, 2), StepLR(o, 1)], [5]), LambdaLR(o, lambda _: 1.0)], [9])",
    "subclass": "Mine(o, total_steps=40)",
}

SCRIPT = """
import copy
import torch
from torch.optim.lr_scheduler import *
from torch.optim.swa_utils import SWALR
from swarm_elastic._rate import OWN_RATES, scale_rates
class Mine(OneCycleLR):
    def __init__(self, optimizer, total_steps):
        super().__init__(optimizer, 0.1, total_steps=total_steps)
def make(text, rate):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    o = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 3 * rate}], lr=rate)
    return o, eval(text)
def rates(text, is_tensor, factors, join_at=-1):
    # Of 35 steps; the factors come after some of them, and a newcomer goes on with the state after another.
    rate = torch.tensor(0.1, dtype=torch.float64) if is_tensor else 0.1
    (optimizer, schedule), found = make(text, rate), []
    for step in range(35):
        optimizer.step()
        if schedule:
            schedule.step(*[1.0] * isinstance(schedule, ReduceLROnPlateau))
        if step in factors:
            assert scale_rates(optimizer, schedule, factors[step]) == []
        if step == join_at:
            states = copy.deepcopy([each.state_dict() for each in (optimizer, schedule) if each])
            optimizer, schedule = make(text, rate)
            for each, state in zip((optimizer, schedule), states):
                each.load_state_dict(state)
        told = schedule.get_last_lr() if schedule else [group["lr"] for group in optimizer.param_groups]
        found.append([[float(group["lr"]) for group in optimizer.param_groups], [float(each) for each in told]])
    return found
found = {
    name: [[rates(text, is_tensor, {}), rates(text, is_tensor, {3: 3.0, 11: 0.1}, 7)] for is_tensor in (False, True)]
    for name, text in json.loads(KINDS).items()
}
classes = [each for each in vars(torch.optim.lr_scheduler).values() if isinstance(each, type)]
kinds = {each.__name__ for each in classes if issubclass(each, LRScheduler)} - {"LRScheduler", "_LRScheduler"}
print(json.dumps([found, sorted(kinds - set(OWN_RATES))]))
"""


@pytest.fixture(scope="module")
def found(template: Template, tmp_path_factory: pytest.TempPathFactory) -> list:
    text = f"KINDS = {json.dumps(KINDS)!r}\n{SCRIPT}"
    code, out, err = template.finish(tmp_path_factory.mktemp("rates"), text)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("kind", KINDS)
def test_all_later_rates_keep_their_ratio_also_those_of_a_newcomer(found: list, kind: str) -> None:
    """Rates that are numbers, and rates that are tensors; what the schedule tells of the last ones, too."""
    for plain, changed in found[0][kind]:
        for step, (before, after) in enumerate(zip(plain, changed, strict=True)):
            factor = 1.0 if step < 3 else 3.0 if step < 11 else 0.3
            for rates, scaled in zip(before, after, strict=True):
                assert scaled == pytest.approx([rate * factor for rate in rates], rel=1e-6, abs=1e-15), step


def test_all_schedules_of_torch_are_known(found: list) -> None:
    assert found[1] == []


def test_a_schedule_that_nobody_knows_is_told_once_and_success_is_not_claimed(
    template: Template, tmp_path: Path
) -> None:
    """On torch's base, with a bound of its own; by the fixed rule there is nothing to tell."""
    text = """
import torch
from swarm_elastic import _reports
class Warm(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [max(0.05, rate / (1 + self.last_epoch)) for rate in self.base_lrs]
for rule in ("fixed", "linear"):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [Warm(optimizer), Warm(optimizer)], [50])
    training = swarm_elastic.Elastic(model, optimizer, global_batch=4, scheduler=schedule, lr_rule=rule)
    for x, in training.batches(torch.utils.data.TensorDataset(torch.ones(80, 4))):
        _reports._reporter().told_batch = {1: 8, 3: 16}.get(training.step_number, training.global_batch)
        training.step(model(x).mean().backward())
"""
    _, _, err = template.finish(tmp_path, text)
    lines = [line for line in err.splitlines() if "learning rates" in line]
    told = [f"swarm_elastic: global batch {change} after step" for change in ("4 -> 8", "8 -> 16")]
    fixed, linear = "learning rates x 1 (fixed)", "learning rates x 2 (linear), until the next step of Warm"
    assert lines == [
        f"{told[0]} 2: {fixed}",
        f"{told[1]} 4: {fixed}",
        f"{told[0]} 2: {linear}",
        f"{told[1]} 4: {linear}",
    ]
    assert err.count("lr_rule 'linear' leaves what Warm may keep of rates beside base_lrs; scale") == 1
    assert "lr_rule 'fixed'" not in err
