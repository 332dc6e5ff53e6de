"""What another global batch means for the learning rate."""

from __future__ import annotations

from typing import Any

import torch

RULES = {"fixed": 0.0, "linear": 1.0, "sqrt": 0.5}
"""The rate grows with this power of the batch."""


def exponent(rule: str) -> float:
    """Raises ValueError for a rule that there is not."""
    if rule not in RULES:
        raise ValueError(f"lr_rule must be one of {', '.join(sorted(RULES))}, not {rule!r}")
    return RULES[rule]


def scale_rates(optimizer: torch.optim.Optimizer, scheduler: Any, factor: float) -> None:
    """Multiply all rates, and those that the schedule begins from, so that it goes on in proportion."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
