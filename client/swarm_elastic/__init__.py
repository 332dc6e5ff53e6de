"""What a training script may import: standard library and the script's own torch, nothing else.

    import swarm_elastic

    torch.save(state, os.path.join(os.environ["SWARM_CHECKPOINT_DIR"], "step-1000.pt"))
    swarm_elastic.checkpoint("step-1000.pt")
    swarm_elastic.report(step=1000, loss=0.31, total_steps=90_000)

    training = swarm_elastic.Elastic(model, optimizer, global_batch=256)  # docs/reference/elastic.md

A job that is started again finds the newest checkpoint that was committed at SWARM_RESUME_FROM.  Outside of a swarm
all of this does nothing, and says so once.

`dropped` counts checkpoints that were given up: superseded by a newer one before their turn came, or not taken while
the agent was away.  `last_result` is what became of the newest one that was answered, or None.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from swarm_elastic._commits import CheckpointRefused, CheckpointResult, checkpoint, flush
from swarm_elastic._commits import state as _state
from swarm_elastic._reports import global_batch, report

if TYPE_CHECKING:
    from swarm_elastic._ddp import DistributedDataParallel
    from swarm_elastic._elastic import Elastic
    from swarm_elastic._outer import Outer
    from swarm_elastic._seat import Left
    from swarm_elastic._served import NoSample, serve, served
    from swarm_elastic._switch import SwitchRefused

__all__ = [
    "CheckpointRefused",
    "CheckpointResult",
    "DistributedDataParallel",
    "Elastic",
    "Left",
    "NoSample",
    "Outer",
    "SwitchRefused",
    "checkpoint",
    "dropped",
    "flush",
    "global_batch",
    "last_result",
    "report",
    "serve",
    "served",
]

dropped: int
last_result: CheckpointResult | None


LAZY = {  # they import torch, or what few scripts need
    "DistributedDataParallel": "_ddp",
    "Elastic": "_elastic",
    "Left": "_seat",
    "NoSample": "_served",
    "Outer": "_outer",
    "SwitchRefused": "_switch",
    "serve": "_served",
    "served": "_served",
}


def __getattr__(name: str) -> object:
    """`dropped` and `last_result` change while a script runs."""
    if name in LAZY:
        return getattr(import_module(f"swarm_elastic.{LAZY[name]}"), name)
    if name == "dropped":
        return _state().dropped
    if name == "last_result":
        return _state().last_result
    raise AttributeError(f"module 'swarm_elastic' has no attribute {name!r}")
