"""A script as people write them, by the features that STORY names; it tells what it did, and holds where it is told to.

`hold-N` in its folder names where all members wait: `["step", n]` before they sum step n, `["tail", e]` behind the
batches of epoch e, `["end", e]` behind all that is done once an epoch.  They go on when `go-N` is there.  At such a
place, or behind the sum of step n, `["did", n]`, `saves` has a
checkpoint taken; `dies` is the step behind which all end.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import swarm_elastic
from swarm_elastic._group import GroupLost

STORY = json.loads(os.environ["STORY"])
WORKER = os.environ.get("SWARM_WORKER", "")
SAMPLES, BATCH, EPOCHS = STORY["samples"], 12, STORY["epochs"]


def tell(**line):
    print(json.dumps(line), flush=True)


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8) * (index + 1.0))
        return index, x, x.sum(0, keepdim=True)


class Count:
    """Of a script's own."""

    def __init__(self):
        self.steps = self.epochs = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Noted(torch.nn.Linear):
    """Holds something that is neither weight nor buffer."""

    noted = 0

    def get_extra_state(self):
        return {"noted": self.noted}

    def set_extra_state(self, state):
        self.noted = state["noted"]


torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), Noted(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
parts: dict[str, Any] = {"count": Count()}
options = {}
kind, per = STORY["schedule"].split()
if kind == "plateau":
    parts["schedule"] = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.8, patience=0 if per == "epoch" else 2, threshold=0.3
    )
elif kind != "none":
    gamma = 0.6 if per == "epoch" else 0.97
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    if kind == "given":
        options = {"scheduler": schedule, "scheduler_per": per}
    else:
        parts["schedule"] = schedule
if STORY["ema"]:
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    parts["ema"] = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
training = swarm_elastic.Elastic(
    model, optimizer, global_batch=BATCH, parts=parts, clip_norm=0.5 if STORY["clip"] else None,
    micro_batch=STORY["micro"], **options,
)  # fmt: skip
sums = training._gradients.finish


def finish_or_lose(*arguments):
    """A sum that the others have is lost here, once."""
    table = sums(*arguments)
    spoilt = Path(f"spoil-{WORKER}")
    if WORKER and spoilt.exists():
        spoilt.unlink()
        training._gradients.clear()
        raise GroupLost("its connection was cut")
    return table


training._gradients.finish = finish_or_lose
held = set()


def hold(*place):
    if STORY["saves"] == list(place):
        training.checkpoint("saved")
    for path in Path().glob("hold-*"):
        number = path.name.partition("-")[2]
        if number not in held and json.loads(path.read_text()) == list(place):
            held.add(number)
            while not Path(f"go-{number}").exists():
                tell(held=int(number), ahead=training._seat.offer()[0])
                time.sleep(0.01)


def done_per(what):
    """What a script does behind a step, or behind an epoch."""
    if per == what and kind == "plateau":
        parts["schedule"].step(training.loss)
    elif per == what and kind == "own":
        parts["schedule"].step()
    if STORY["ema"] == what:
        parts["ema"].update_parameters(model)
    setattr(parts["count"], f"{what}s", getattr(parts["count"], f"{what}s") + 1)
    if what == "step":
        model[2].noted += 1


def train(epochs):
    for epoch in epochs:
        losses, indices = [], []
        calls = {"one": EPOCHS}.get(STORY["form"], 1)
        batches = training.batches(Points(), epochs=calls)
        for index, x, y in batches:
            if batches.is_last or not indices:
                hold("step", training.step_number)
            indices += index[: batches.count].tolist()
            at = {"version": training.version, "round": training.rounds, "epoch": training.epoch}
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            if batches.is_last:
                tell(offered=indices, **at)
            is_done = training.step(loss)
            if batches.is_last:
                indices = []
            if is_done:
                hold("did", training.step_number)
            if is_done or (STORY["careless"] and batches.is_last):
                done_per("step")
            if is_done:
                tell(done=True, step=training.step_number, loss=training.loss, **at)
                if training.step_number == STORY["dies"] and "SWARM_RESUME_FROM" not in os.environ:
                    os._exit(3)
                losses.append(training.loss)
                if training.step_number == STORY["stop"]:
                    training.finish()
                    return
            time.sleep(float(os.environ.get("PAUSE_S", "0.002")))
        if STORY["form"] != "one":
            hold("tail", epoch)
            done_per("epoch")
            tell(epoch_done=epoch)
            hold("end", epoch)


train({"epochs": lambda: training.epochs(EPOCHS), "range": lambda: range(EPOCHS), "one": lambda: [0]}[STORY["form"]]())
ema = parts["ema"].state_dict() if STORY["ema"] else {}
tell(
    end=training.step_number,
    weights={name: each.flatten().tolist() for name, each in model.state_dict().items() if torch.is_tensor(each)},
    ema={name: each.flatten().tolist() for name, each in ema.items() if torch.is_tensor(each)},
    rate=optimizer.param_groups[0]["lr"],
    schedule={k: v for k, v in parts["schedule"].state_dict().items() if isinstance(v, (int, float))}
    if "schedule" in parts
    else {},
    count=parts["count"].state_dict(),
    noted=model[2].noted,
)
