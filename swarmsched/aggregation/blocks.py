"""Vectors on their way: int8 in blocks of 1,024 with one float32 scale each, or plain float32.

A vector is worked on in pieces that fit a processor's cache: whole tensors in one call cost eight times the time.  The
same two operations, a multiplication and an addition in float32, turn what was sent into weights at the shard and at
every learner, so all of them hold the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 1_024
PIECE = 256 * BLOCK
LARGEST = 127

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A vector: `values` int8 with a scale for each block, or float32 with none."""

    values: NDArray[np.int8] | Floats
    scales: Floats | None = None

    @classmethod
    def quantised(cls, vector: Floats) -> "Blocks":
        """The nearest int8 multiples of the scale of each block, whose largest element becomes 127."""
        blocks = empty(len(vector), is_quantised=True)
        for start, stop in pieces(len(vector)):
            blocks.put(start, vector[start:stop])
        return blocks

    def __len__(self) -> int:
        return len(self.values)

    def piece(self, start: int, stop: int) -> Floats:
        """The elements of a piece as float32, in a new array; `start` is the beginning of a block."""
        values = self.values[start:stop].astype(np.float32)
        if self.scales is not None:
            first, whole = start // BLOCK, len(values) // BLOCK * BLOCK
            last = first + whole // BLOCK
            values[:whole].reshape(-1, BLOCK)[:] *= self.scales[first:last, None]
            if whole < len(values):
                values[whole:] *= self.scales[last]
        return values

    def put(self, start: int, vector: Floats) -> None:
        """Write a piece, which begins with a block; quantised where this is."""
        stop = start + len(vector)
        if self.scales is None:
            self.values[start:stop] = vector
            return
        first, last = start // BLOCK, block_count(stop)
        padded = vector if len(vector) % BLOCK == 0 else np.pad(vector, (0, -len(vector) % BLOCK))
        rows = padded.reshape(-1, BLOCK)
        scales = np.abs(rows).max(axis=1) / np.float32(LARGEST)
        self.scales[first:last] = scales
        divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
        self.values[start:stop] = (
            np.rint(rows / divisors).clip(-LARGEST, LARGEST).astype(np.int8).ravel()[: len(vector)]
        )

    def norm(self) -> float:
        """The Euclidean norm; not finite where any element is not."""
        squares = 0.0
        for start, stop in pieces(len(self)):
            piece = self.piece(start, stop)
            squares += float(np.dot(piece.astype(np.float64), piece))
        return float(np.sqrt(squares))


def empty(size: int, *, is_quantised: bool) -> Blocks:
    """Room for a vector of that size."""
    if not is_quantised:
        return Blocks(np.zeros(size, np.float32))
    return Blocks(np.zeros(size, np.int8), np.zeros(block_count(size), np.float32))


def block_count(size: int) -> int:
    """How many blocks hold a vector of that size; the last one may be shorter."""
    return -(-size // BLOCK)


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """The bounds of the pieces of a vector."""
    for start in range(0, size, PIECE):
        yield start, min(start + PIECE, size)
