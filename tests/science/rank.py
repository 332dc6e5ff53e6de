"""A rank of the trainings behind the table of Dike's choice: it trains what it is told on its standard input.

Started by `tests.science.dike` with the interpreter that has torch, once on each host: `python -m tests.science.rank
CGROUP`.  Each line is a JSON object; answers are the seconds of a step.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swarm_elastic.model_work import describe
from tests.science.outer import Transformer, cnn

LETTERS = 64


def perceptron() -> nn.Module:
    """Nearly all of it is parameters."""
    return nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 16))


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (lambda: Transformer(LETTERS, 64), lambda: torch.randint(LETTERS, (16, 32))),
    "cnn": (cnn, lambda: torch.randn(256, 1, 12, 12)),
    "perceptron": (perceptron, lambda: torch.randn(32, 256)),
    "tiny": (tiny, lambda: torch.randn(64, 16)),
}
"""And a batch of one rank."""


def measured(told: dict[str, Any], group: Path) -> float:
    """Seconds of a step of data parallel training, of so many that they take about the seconds that are wanted."""
    make, batch = MODELS[told["model"]]
    size = told["size"]
    address, port = told["store"]
    store = dist.TCPStore(address, port, size, is_master=told["rank"] == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=told["rank"], world_size=size, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def steps(count: int) -> float:
        dist.barrier()
        began_s = time.monotonic()
        for _ in range(count):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        return (time.monotonic() - began_s) / count

    steps(2)
    (group / "cgroup.procs").write_text("0")  # what steps need is set up: now it has its part of a core
    step_s = steps(2)
    if told["rank"] == 0:
        store.set("count", str(max(5, int(told["seconds"] / step_s))))
    return steps(int(store.get("count")))


def works() -> dict[str, str]:
    """What a step of each model computes and moves, as torch counts it."""
    return {name: describe(make(), batch()) for name, (make, batch) in MODELS.items()}


def answer(words: Callable[[], Any]) -> None:
    """In a child: how a group of processes ends is nobody's concern then."""
    child = os.fork()
    if child == 0:
        print(json.dumps(words()), flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def main(group: str) -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    answer(works)
    for line in sys.stdin:
        answer(partial(measured, json.loads(line), Path(group)))


if __name__ == "__main__":
    main(sys.argv[1])
