"""How a global batch is dealt to ranks: local batch times ranks times accumulated micro-steps."""

from math import ceil
from typing import NamedTuple

from swarmsched.estimate import BatchRange


class Split(NamedTuple):
    """Samples of one rank in one micro-step, and micro-steps in one step; times the ranks they are the batch."""

    local_batch: int
    micro_steps: int

    def batch(self, ranks: int) -> int:
        """Samples in one step."""
        return self.local_batch * self.micro_steps * ranks


def split(batch: int, ranks: int, allowed: BatchRange) -> Split | None:
    """The fewest micro-steps that fit into the ranks' memory, or None where the local batch would be too small.

    Rounded up to whole samples, but never over `allowed.most`.
    """
    micro_steps = max(1, ceil(batch / (ranks * allowed.local_most) - 1e-9))
    local_batch = min(ceil(batch / (ranks * micro_steps) - 1e-9), allowed.most // (ranks * micro_steps))
    if not max(1, allowed.local_least) <= local_batch <= allowed.local_most:
        return None
    return Split(local_batch, micro_steps)


def candidates(allowed: BatchRange, count: int) -> list[int]:
    """Global batch sizes from the first to the largest, spaced geometrically, each once."""
    if allowed.most <= allowed.first or count < 2:
        return [allowed.first]
    ratio = allowed.most / allowed.first
    return sorted({round(allowed.first * ratio ** (at / (count - 1))) for at in range(count)})
