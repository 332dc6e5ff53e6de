"""What a worker's own part of a step takes, without waiting for others: how the swarm finds out who is slow."""

from __future__ import annotations

from collections import deque

STEPS = 21
CHANGE = 0.1
"""Relative; less is no news."""


class OwnTime:
    """The median of the last steps, as told last."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=STEPS)
        self._told_s = 0.0

    def news(self, seconds: float) -> float:
        """Of one more step; 0 where there is nothing new to tell."""
        self._last_s.append(seconds)
        median_s = sorted(self._last_s)[len(self._last_s) // 2]
        if len(self._last_s) < STEPS or abs(median_s - self._told_s) <= CHANGE * self._told_s:
            return 0.0
        self._told_s = float(f"{median_s:.3g}")
        return self._told_s
