"""The script of the elastic jobs in these tests; its environment says what it does, its log what it did."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import swarm_elastic
from swarm_elastic import _elastic, _handover, _own_time, _stall
from swarm_elastic._group import GroupLost

SAMPLES, BATCH, FEATURES = 256, 30, 16
send_tensors = _handover.send_tensors
DEVICE = torch.device(os.environ["DEVICE"])
STOP = Path("stop")
"""Holds the step at which all end."""


def number(name, default=0):
    return int(os.environ.get(name, default))


def tell(**line):
    print(json.dumps(line), flush=True)


def die(*_):
    time.sleep(2)
    os._exit(9)


def lack_memory(*_, **__):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def send_late(*arguments):
    time.sleep(2)
    send_tensors(*arguments)


def spoil(training, finish):
    """A sum that succeeds with the others in the step LOSES and is lost here, or ends this rank."""

    def finish_or_not(*arguments):
        table = finish(*arguments)
        if training.step_number != number("LOSES"):
            return table
        if number("ENDS"):
            os._exit(9)
        training._gradients.finish = finish
        training._gradients.clear()
        raise GroupLost("its connection was cut")

    training._gradients.finish = finish_or_not


def hold(training):
    """Do not go on with the step HOLD before all can switch after it, and the test says so."""
    while training.step_number == number("HOLD", -1) and not Path("go").exists():
        tell(ahead=training._seat.offer()[0])
        time.sleep(0.05)


class Sided(torch.nn.Module):
    """A part of it is for some samples only, and gets no gradient from steps or ranks without one; another is idle."""

    def __init__(self, main):
        super().__init__()
        self.main, self.side, self.idle = main, torch.nn.Linear(FEATURES, 1), torch.nn.Linear(FEATURES, 1)

    def forward(self, x):
        y, chosen = self.main(x), x[:, 0] > 1.8
        if chosen.any():
            y = y.masked_scatter(chosen[:, None], y[chosen] + self.side(x[chosen]))
        return y


def layers():
    width = number("WIDTH", 32)
    between = [torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.1)] if number("BUFFERS") else [torch.nn.Tanh()]
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, width), *between, torch.nn.Linear(width, 1))


def digest(model, optimizer, scheduler):
    """Of all that a newcomer is given."""
    held = hashlib.sha256()
    for value in [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]:
        held.update(value.cpu().numpy().tobytes())
    held.update(repr((scheduler.state_dict(), optimizer.param_groups[0]["lr"])).encode())
    held.update(torch.get_rng_state().numpy().tobytes())
    return held.hexdigest()


def mine(training, first):
    """This rank's samples of the step; the whole does not depend on the world size."""
    batch = training.global_batch
    chosen = [at % SAMPLES for at in range(first, first + batch)]
    share = batch // training.world_size + (training.rank < batch % training.world_size)
    begin = sum(batch // training.world_size + (r < batch % training.world_size) for r in range(training.rank))
    return chosen[begin : begin + share]


def passes(chosen):
    size = number("MICRO", len(chosen))
    return [chosen[at : at + size] for at in range(0, len(chosen), size)]


def main():
    if number("RAISES"):
        raise RuntimeError("raises before it is ready")
    if number("DIES"):  # while it is given the state of the others, of which it has a part
        _handover.receive_tensors = die
    if number("POOR"):
        _handover.TrainingState.places = lack_memory
    _stall.STALL_S = number("STALL_S", 30)
    _elastic.TIMEOUT_LEAST_S = 1.0
    _own_time.WINDOW_S = 0.2
    if number("LATE"):
        _handover.send_tensors = send_late
    torch.manual_seed(number("SEED", 7))
    model = (Sided(layers()) if number("SIDED") else layers()).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=number("DECAY") / 100)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    scaler = (
        torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=number("GROWTH", 2_000))
        if number("SCALER")
        else None
    )
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    x, y = x.to(DEVICE), x[:, :2].sum(1, keepdim=True).to(DEVICE)
    training = swarm_elastic.Elastic(
        model,
        optimizer,
        global_batch=BATCH,
        scheduler=scheduler,
        scaler=scaler,
        lr_rule=os.environ.get("LR_RULE", "fixed"),
        clip_norm=1.0 if number("CLIP") else None,
        timeout_s=number("TIMEOUT_S", 1_800),
    )
    if "LOSES" in os.environ:
        spoil(training, training._gradients.finish)
    version = 0
    while not STOP.exists() or training.step_number < int(STOP.read_text()):
        step, worked = training.step_number, training.version
        if worked != version:
            version = worked
            tell(switched=version, step=step, digest=digest(model, optimizer, scheduler))
        hold(training)
        *earlier, last = passes(mine(training, training.samples))
        for each in (*earlier, last):
            training.expect(len(each), is_last=each is last)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bool(number("BF16"))):
                loss = torch.nn.functional.mse_loss(model(x[each]), y[each])
            (scaler.scale(loss) if scaler else loss).backward()
            is_done = training.step(loss)
        time.sleep(number("PAUSE_MS", 3) / 1e3)
        if is_done:
            noise, rate = training.grad_noise, optimizer.param_groups[0]["lr"]
            who = {"rank": training.rank, "world": training.world_size, "version": worked}
            tell(step=step, loss=training.loss, noise=noise, rate=rate, batch=training.global_batch, **who)
        if number("CHECKPOINT") and training.step_number == number("CHECKPOINT"):
            training.checkpoint("all")
    training.finish()
    tell(done=True, digest=digest(model, optimizer, scheduler))


if __name__ == "__main__":
    try:
        main()
    except swarm_elastic.Left as left:
        tell(left=True)
        sys.exit(left.code)
    except RuntimeError:
        time.sleep(number("LINGERS"))  # as with a debugger
        raise
