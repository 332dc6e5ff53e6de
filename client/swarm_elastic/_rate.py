"""What another global batch means for the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from swarm_elastic._arguments import shown

RULES = {"fixed": 0.0, "linear": 1.0, "sqrt": 0.5}
"""The rate grows with this power of the batch."""

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""Of a group of parameters; OneCycleLR and SWALR keep theirs there."""

OWN_RATES: dict[str, tuple[str, ...]] = {
    "ChainedScheduler": (),
    "ConstantLR": (),
    "CosineAnnealingLR": ("eta_min",),
    "CosineAnnealingWarmRestarts": ("eta_min",),
    "CyclicLR": ("max_lrs",),
    "ExponentialLR": (),
    "LambdaLR": (),
    "LinearLR": (),
    "MultiStepLR": (),
    "MultiplicativeLR": (),
    "OneCycleLR": (),
    "PolynomialLR": (),
    "ReduceLROnPlateau": ("min_lrs", "default_min_lr", "eps"),
    "SequentialLR": (),
    "StepLR": (),
    "SWALR": (),
}
"""What torch's own schedules keep of rates, beside what all of them do."""


def exponent(rule: str) -> float:
    """Raises ValueError for a rule that there is not."""
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"lr_rule must be one of {', '.join(sorted(RULES))}, not {shown(rule)}")
    return RULES[rule]


def horizon(scheduler: Any) -> tuple[int, str]:
    """After how many of its steps a schedule of torch has come to its end, or to a thousandth, and what says so.

    Nothing and no text where that is not known.
    """
    kind = _kind(scheduler) if scheduler is not None else ""
    held = getattr(scheduler, "__dict__", {})
    name = f"scheduler {kind}"
    if kind in ("StepLR", "CosineAnnealingLR"):
        told = "step_size" if kind == "StepLR" else "T_max"
        return held[told], f"{name}, with {told} {held[told]},"
    if kind == "MultiStepLR" and held["milestones"]:
        return max(held["milestones"]), f"{name}, with milestones up to {max(held['milestones'])},"
    if kind == "ExponentialLR" and 0 < held["gamma"] < 1:
        return math.ceil(math.log(1e-3) / math.log(held["gamma"])), f"{name}, with gamma {held['gamma']},"
    return 0, ""


def scale_rates(optimizer: torch.optim.Optimizer, scheduler: Any, factor: float) -> list[str]:
    """Multiply all rates, and those that the schedule begins from and goes to, so that it goes on in proportion.

    Returns the schedules of which it is not known whether they do, by their classes.
    """
    for group in optimizer.param_groups:
        for name in GROUP_RATES:
            if group.get(name) is not None:
                group[name] = group[name] * factor
    unknown: set[str] = set()
    for schedule in _all(scheduler):
        kind = _kind(schedule)
        if kind not in OWN_RATES:
            unknown.add(type(schedule).__name__)
        held = getattr(schedule, "__dict__", {})
        for name in ("base_lrs", "_last_lr", *OWN_RATES.get(kind, ())):
            if held.get(name) is not None:
                held[name] = _scaled(held[name], factor)
    return sorted(unknown)


def _all(scheduler: Any) -> Iterator[Any]:
    """With those that it is made of."""
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", ()):
            yield from _all(inner)


def _kind(schedule: Any) -> str:
    """The class of torch by which it reckons; nothing where that is somebody else's."""
    reckons = next((each for each in type(schedule).__mro__ if {"get_lr", "step"} & vars(each).keys()), object)
    return reckons.__name__ if reckons.__module__ in ("torch.optim.lr_scheduler", "torch.optim.swa_utils") else ""


def _scaled(value: Any, factor: float) -> Any:
    return [each * factor for each in value] if isinstance(value, (list, tuple)) else value * factor
