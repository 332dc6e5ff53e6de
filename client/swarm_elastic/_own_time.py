"""What a worker's own part of a step takes, without waiting for others: how the swarm finds out who is slow."""

from __future__ import annotations

import time
from collections.abc import Callable

STEPS = 21
WINDOW_S = 10.0
"""At least: a machine that is busy for a moment, with a worker that starts, say, is not slow."""
CHANGE = 0.1
"""Relative; less is no news."""


class OwnTime:
    """The median of one window of steps after the other, as told last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._window: list[float] = []
        self._since_s = now()
        self._told_s = 0.0

    def news(self, seconds: float) -> float:
        """Of one more step; 0 where there is nothing new to tell."""
        self._window.append(seconds)
        if len(self._window) < STEPS or self._now() < self._since_s + WINDOW_S:
            return 0.0
        median_s = sorted(self._window)[len(self._window) // 2]
        self._window, self._since_s = [], self._now()
        if abs(median_s - self._told_s) <= CHANGE * self._told_s:
            return 0.0
        self._told_s = float(f"{median_s:.3g}")
        return self._told_s
