"""The outer weights that a learner was shown, and what it has contributed: the learner's side of a shard's rounds.

`shown - now` is a contribution, where `now` are the learner's own weights.  Each change that comes moves both alike, so
what was trained meanwhile is kept.  A contribution that is in the change is taken off `now` as well: the outer weights
have it.  One that is not stays in `shown - now`, and goes out with the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

BLOCK = 1_024
PIECE = 256 * BLOCK
LARGEST = 127
FRESH = -1


class Version(NamedTuple):
    """As the shard names one content of its weights: `origin` is an epoch, the number of a plan, and a time."""

    number: int = FRESH
    origin: tuple[int, int, int] = (0, 0, 0)


class Packed(NamedTuple):
    """A vector as it is sent: int8 with a float32 scale for each block of 1,024, or float32 without scales."""

    values: torch.Tensor
    scales: torch.Tensor | None


class Shown:
    """Of one shard, on the host.  `weights` is taken over; what is returned is to be added to the learner's own."""

    def __init__(self, learner: str, weights: torch.Tensor, *, is_quantised: bool = True) -> None:
        self.version = Version()
        self._learner = learner
        self.weights = weights
        self.is_quantised = is_quantised
        self._sent = torch.empty(0)  # the last contribution
        self._base = FRESH  # to which version it was made
        self._is_merged = True  # it is in `weights`
        self.is_waiting = False  # a contribution is under way

    def contribution(self, now: torch.Tensor) -> Packed:
        """Make one: the learner's own weights have come so far."""
        self.take(now)
        return self.packed()

    def take(self, now: torch.Tensor) -> None:
        """The learner's own weights have come so far; what is to be sent of it is `packed`, then or later."""
        if len(self._sent) != len(now):
            self._sent = torch.empty_like(self.weights)
        torch.sub(self.weights, now, out=self._sent)
        self._base, self._is_merged, self.is_waiting = self.version.number, False, True

    def packed(self) -> Packed:
        """The last contribution, as it is sent."""
        return quantised(self._sent) if self.is_quantised else Packed(self._sent, None)

    def move(self, base: Version, version: Version, change: Packed, counted: Mapping[str, int]) -> torch.Tensor | None:
        """The next version; None where it does not follow on this one, and the weights are to be asked for."""
        if base != self.version:
            return None
        moved = torch.empty_like(self.weights)
        is_counted = not self._is_merged and counted.get(self._learner, FRESH) >= self._base
        for start, stop in pieces(len(moved)):
            piece = unpacked(change, start, stop)
            self.weights[start:stop] += piece
            moved[start:stop] = piece + self._sent[start:stop] if is_counted else piece
        self.version = version
        self._is_merged = self._is_merged or is_counted
        self.is_waiting = self.is_waiting and not is_counted
        return moved

    def replace(self, version: Version, weights: torch.Tensor, counted: Mapping[str, int]) -> torch.Tensor:
        """The weights of another version in full, of the same line or of another one.

        What of this learner is in them is told by `counted`.  A contribution that was merged into a line that has ended
        comes back, to go out again.
        """
        moved = weights - self.weights
        is_counted = counted.get(self._learner, FRESH) >= self._base
        if self._base > FRESH and is_counted is not self._is_merged:
            moved.add_(self._sent, alpha=1 if is_counted else -1)
        self.weights.copy_(weights)
        self.version, self._base, self._is_merged, self.is_waiting = version, FRESH, True, False
        return moved

    def give_up(self, base: Version) -> None:
        """The contribution to this base was refused: it stays in what goes out next."""
        if self.is_waiting and base.number == self._base:
            self._base, self._is_merged, self.is_waiting = FRESH, True, False

    def rename(self, version: Version) -> None:
        """The shard has these very weights, under that name, and nothing of this learner waits there.

        What was sent may be in a version that others hold.
        """
        self.version, self.is_waiting = version, False


def quantised(vector: torch.Tensor) -> Packed:
    """The nearest int8 multiples of the scale of each block, whose largest element becomes 127."""
    values = torch.empty(len(vector), dtype=torch.int8)
    scales = torch.empty(-(-len(vector) // BLOCK))
    for start, stop in pieces(len(vector)):
        rows = vector[start:stop]
        if len(rows) % BLOCK:
            rows = torch.nn.functional.pad(rows, (0, -len(rows) % BLOCK))
        rows = rows.view(-1, BLOCK)
        found = rows.abs().amax(dim=1) / LARGEST
        scales[start // BLOCK : start // BLOCK + len(rows)] = found
        divisors = torch.where(found > 0, found, torch.ones(())).unsqueeze(1)
        whole = (rows / divisors).round_().clamp_(-LARGEST, LARGEST)
        values[start:stop] = whole.flatten()[: stop - start].to(torch.int8)
    return Packed(values, scales)


def unpacked(packed: Packed, start: int, stop: int) -> torch.Tensor:
    """A piece of it: the shard's own operations, for the same bits."""
    values = packed.values[start:stop].to(torch.float32)
    if packed.scales is None:
        return values
    scales = packed.scales[start // BLOCK : -(-stop // BLOCK)]
    return values.mul_(scales.repeat_interleave(BLOCK)[: len(values)])


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """The bounds of pieces that fit a processor's cache: whole tensors in one call take eight times as long."""
    for start in range(0, size, PIECE):
        yield start, min(start + PIECE, size)
