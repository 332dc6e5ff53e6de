"""Whatever dies, breaks off or comes twice: no step is counted twice, none is lost, and all hold the same bits."""

from collections.abc import Mapping

import numpy as np
import pytest

from swarmsched.aggregation.blocks import Blocks, Floats
from swarmsched.aggregation.shard import FRESH, ShardVersion
from tests.swarmsched.aggregation.story import Story


class PlainHolding:
    """A learner's side as the protocol has it, in a few lines of numpy; `swarm_elastic` has the real one."""

    def __init__(self, learner: str, weights: Floats) -> None:
        self.learner, self.weights, self.version = learner, weights, ShardVersion()
        self.base, self.sent, self.is_merged, self.is_waiting = FRESH, np.zeros_like(weights), True, False

    def contribution(self, now: Floats) -> Blocks:
        self.sent = self.weights - now
        self.base, self.is_merged, self.is_waiting = self.version.number, False, True
        return Blocks(self.sent)

    def move(
        self, base: ShardVersion, version: ShardVersion, change: Blocks, counted: Mapping[str, int]
    ) -> Floats | None:
        if base != self.version:
            return None
        moved = change.piece(0, len(change))
        self.weights = self.weights + moved
        self.version = version
        if not self.is_merged and counted.get(self.learner, FRESH) >= self.base:
            self.is_merged, self.is_waiting = True, False
            return moved + self.sent
        return moved

    def replace(self, version: ShardVersion, weights: Floats, counted: Mapping[str, int]) -> Floats:
        moved = weights - self.weights
        if self.base > FRESH:
            moved += self.sent * (int(counted.get(self.learner, FRESH) >= self.base) - int(self.is_merged))
        self.weights, self.version, self.base, self.is_merged = weights, version, FRESH, True
        self.is_waiting = False
        return moved

    def give_up(self, base: ShardVersion) -> None:
        if self.is_waiting and base.number == self.base:
            self.base, self.is_merged, self.is_waiting = FRESH, True, False

    def rename(self, version: ShardVersion) -> None:
        self.version, self.is_waiting = version, False


@pytest.mark.parametrize("seed", range(150))
def test_every_step_is_counted_once_and_all_hold_the_same_bits(seed):
    story = Story(seed, PlainHolding, learners=2 + seed % 3)
    story.go(700)
    story.settle()
    assert story.closed > 3
