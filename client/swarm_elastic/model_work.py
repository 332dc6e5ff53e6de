"""What a model computes and moves in a step, counted by torch: the figures of `swarm run --work`.

from swarm_elastic.model_work import describe

print(describe(model, torch.randn(32, 3, 224, 224)))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe(model: Any, example: Any, *more: Any) -> str:
    """The figures by one forward and backward pass of `model(example, *more)`, a batch of one rank (its first
    dimension). The gradients of the model are overwritten.

    Embeddings with sparse gradients move the rows that this batch touches.  What the input pipeline costs
    (`sample_bytes`, `decode_core_s`) cannot be seen from the model: add it where it matters.  ValueError where
    `example` is no batch.
    """
    from torch.utils.flop_counter import FlopCounterMode  # scripts that ask for nothing of this need no torch

    batch = len(example) if getattr(example, "ndim", 0) else 0
    if not batch:
        raise ValueError("example must be a tensor of samples, such as torch.randn(32, 3, 224, 224)")
    with FlopCounterMode(display=False) as counter:
        _sum(model(example, *more)).backward()
    parameters = [each for each in model.parameters() if each.requires_grad]
    sizes = [each.numel() * each.element_size() for each in parameters]
    moved = [_moved_bytes(each.grad) for each in parameters]
    figures = {
        "local_batch": batch,
        "sample_flops": f"{counter.get_total_flops() / batch:.4g}",
        "parameter_bytes": sum(sizes),
        "moved_bytes": sum(moved),
        "largest_bytes": max(moved, default=0),
    }
    return ",".join(f"{name}={value}" for name, value in figures.items())


def _moved_bytes(gradient: Any) -> int:
    """Of one tensor in a step; 0 where the pass has not used it."""
    if gradient is None:
        return 0
    if not gradient.is_sparse:
        return int(gradient.numel() * gradient.element_size())
    values = gradient.coalesce().values()
    return int(values.numel() * values.element_size())


def _sum(output: Any) -> Any:
    """A scalar of all that the model gives, to go back from."""
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return sum(_sum(each) for each in output)
    return output.float().sum()
