"""The learner's side of a shard, in torch, against shards: no step is counted twice or lost, and all bits are alike."""

from pathlib import Path

from tests.elastic.testing import PACKAGE, ROOT, TRAIN, Script, needs

pytestmark = needs(TRAIN)

TEXT = """
import numpy as np, torch
from swarm_elastic._shown import BLOCK, PIECE, Packed, Shown, Version, quantised, unpacked
from swarmsched.aggregation.blocks import Blocks
from swarmsched.aggregation.shard import Origin, ShardVersion
from tests.swarmsched.aggregation.story import Story

class Holding:
    def __init__(self, learner, weights):
        self.shown = Shown(learner, torch.from_numpy(weights.copy()), is_quantised=False)
    @property
    def version(self):
        return ShardVersion(self.shown.version.number, Origin(*self.shown.version.origin))
    @property
    def weights(self):
        return self.shown.weights.numpy()
    @property
    def is_waiting(self):
        return self.shown.is_waiting
    def contribution(self, now):
        return Blocks(self.shown.contribution(torch.from_numpy(now)).values.numpy().copy())
    def move(self, base, version, change, counted):
        change = Packed(torch.from_numpy(change.values), None)
        moved = self.shown.move(Version(*base), Version(*version), change, counted)
        return None if moved is None else moved.numpy()
    def replace(self, version, weights, counted):
        return self.shown.replace(Version(*version), torch.from_numpy(weights), counted).numpy()
    def give_up(self, base):
        self.shown.give_up(Version(*base))
    def rename(self, version):
        self.shown.rename(Version(*version))

torch.set_num_threads(1)
closed = 0
for seed in range(40):
    story = Story(seed, Holding, learners=2 + seed % 3)
    story.go(700)
    story.settle()
    closed += story.closed
for size in (1, BLOCK, BLOCK + 1, PIECE + BLOCK + 7):
    vector = torch.linspace(-3, 5, size)
    ours = quantised(vector)
    theirs = Blocks.quantised(vector.numpy())
    assert np.array_equal(ours.values.numpy(), theirs.values) and np.array_equal(ours.scales.numpy(), theirs.scales)
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        assert np.array_equal(unpacked(ours, start, stop).numpy(), theirs.piece(start, stop))
print(closed)
"""


def test_what_learners_hold_is_the_truth_of_their_shards_through_all_that_may_happen(tmp_path: Path) -> None:
    paths = f"{PACKAGE.parent}:{ROOT}"
    code, out, err = Script(tmp_path, TEXT, python=str(TRAIN), PYTHONPATH=paths).finish()
    assert code == 0, err
    assert int(out) > 200
