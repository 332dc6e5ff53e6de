"""Gradient noise scale: how much the gradients of ranks differ, against how much they have in common.

A gradient of n samples has the expected squared norm |G|^2 + S / n, where S is the variance of one sample's gradient.
The ranks' own gradients and their mean are two sizes of n, which gives both (McCandlish et al., 2018, appendix A.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_elastic._words import Words

EVERY_STEPS = 10
KEEP = 0.9  # weight of what was measured before


class NoiseScale:
    """Measured now and then, and smoothed."""

    def __init__(self, first_batch: int) -> None:
        self._first_batch = first_batch
        self._variance = self._squared = 0.0  # of one sample; of the true gradient

    @property
    def value(self) -> float | None:
        """Variance over squared norm of a gradient of the first batch size; None before it was measured."""
        return self._variance / self._first_batch / self._squared if min(self._variance, self._squared) > 0 else None

    def measure(self, words: Sequence[Words], squared_norm: float) -> None:
        """By the squared norms of the ranks' own gradients, in their words, and that of their mean."""
        told = [each for each in words if each.samples and each.norm]
        if len(told) < 2 or not all(map(isfinite, [squared_norm, *[each.norm for each in told]])):
            return
        inverse = sum(1 / each.samples for each in told) / len(told)
        total = sum(each.samples for each in told)
        own = sum(each.norm for each in told) / len(told)
        variance = (own - squared_norm) / (inverse - 1 / total)
        self._variance = KEEP * self._variance + (1 - KEEP) * variance
        self._squared = KEEP * self._squared + (1 - KEEP) * (squared_norm - variance / total)

    def state_dict(self) -> dict[str, Any]:
        """For newcomers and checkpoints."""
        return {"first_batch": self._first_batch, "variance": self._variance, "squared": self._squared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._first_batch, self._variance, self._squared = state["first_batch"], state["variance"], state["squared"]
