"""Seconds of a step under data parallelism with all-reduce (Qiao et al., Pollux, OSDI 2021, equations 8 to 11).

`T_grad = a_c + b_c * local_batch`; `T_sync` is 0 for one rank, `a_n + b_n * (ranks - 2)` on one node and
`a_r + b_r * (ranks - 2)` on several; a step takes `(T_grad ** g + T_sync ** g) ** (1 / g)`, since the two overlap in
part, and each accumulated micro-step before it `T_grad`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from swarmsched.estimate import Estimate, SpeedPoint

Floats = NDArray[np.float64]

LEAST_S, MOST_S = 1e-9, 1e9
"""Of a step and of each parameter: with what cards may hold beyond these nobody can compute."""
OVERLAP_MOST = 10.0


def usable(estimate: Estimate) -> Estimate:
    """The estimate within the bounds of the models: a card is another's word, down to the last number that fits in."""
    speed: tuple[float, ...] = ()
    if len(estimate.speed) == len(SpeedModel._fields):
        *seconds, overlap = estimate.speed
        speed = (*[min(each, MOST_S) for each in seconds], min(max(1.0, overlap), OVERLAP_MOST))
    points = estimate.points
    if not all(LEAST_S <= each.step_s <= MOST_S and each.sync_s <= each.step_s for each in points):
        points = tuple([_usable(each) for each in points])
    if points is estimate.points and speed == estimate.speed:
        return estimate
    return replace(estimate, points=points, speed=speed)


def _usable(point: SpeedPoint) -> SpeedPoint:
    step_s = min(max(LEAST_S, point.step_s), MOST_S)
    return replace(point, step_s=step_s, sync_s=min(point.sync_s, step_s))


class StepTime(NamedTuple):
    """Seconds of one step without accumulation, and the part of it that synchronises gradients."""

    step_s: float
    sync_s: float

    def with_micro_steps(self, count: int) -> float:
        """Seconds of a step of so many micro-steps: all but the last synchronise nothing."""
        return self.step_s + (count - 1) * (self.step_s - self.sync_s)


class SpeedModel(NamedTuple):
    """The seven parameters, in seconds but for the last."""

    grad_s: float
    grad_per_sample_s: float
    node_sync_s: float
    node_sync_per_rank_s: float
    swarm_sync_s: float
    swarm_sync_per_rank_s: float
    overlap: float  # 1: none, 10: the longer hides the shorter

    def step_time(self, ranks: int, nodes: int, local_batch: float) -> StepTime:
        """Prediction for one configuration."""
        grad_s = self.grad_s + self.grad_per_sample_s * local_batch
        sync_s = self._sync_s(ranks, nodes)
        step_s = (grad_s**self.overlap + sync_s**self.overlap) ** (1.0 / self.overlap)
        return StepTime(step_s, step_s - grad_s)

    def step_times(self, nodes: Sequence[int], local_batch: Floats) -> tuple[Floats, Floats]:
        """The two parts of `step_time` for 1, 2, ... ranks (rows) on so many nodes each, and any local batches."""
        grad_s = self.grad_s + self.grad_per_sample_s * local_batch
        sync_s = np.array([[self._sync_s(ranks, there)] for ranks, there in enumerate(nodes, start=1)])
        step_s = (grad_s**self.overlap + sync_s**self.overlap) ** (1.0 / self.overlap)
        return step_s, step_s - grad_s

    def _sync_s(self, ranks: int, nodes: int) -> float:
        if ranks < 2:
            return 0.0
        if nodes < 2:
            return self.node_sync_s + self.node_sync_per_rank_s * (ranks - 2)
        return self.swarm_sync_s + self.swarm_sync_per_rank_s * (ranks - 2)
