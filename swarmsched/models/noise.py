"""Gradient noise of jobs of one kind: how it grows with training, and with the batch (McCandlish et al., 2018).

Noise is the variance over the squared norm of the gradient, told for the first batch size.  It grows by orders of
magnitude while a job trains, so it is remembered by progress, in octaves; and it is not quite the same with every
batch, so a power of the batch is fitted over all octaves at once.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import exp, log, log2

LEAST, MOST = 1e-6, 1e6
"""Beyond these one batch is worth no more than another, or its size: logarithms of what is measured need bounds."""
WEIGHT_MOST = 32.0
"""Reports of one octave of progress and one of the batch that count: more say nothing new."""
EVIDENCE = 1.0
"""Squared octaves of batch sizes that must be seen before half of the fitted power is believed."""
POWER_MOST = 1.0


@dataclass
class _Cell:
    """Running means of logarithms."""

    batch: float = 0.0
    noise: float = 0.0
    weight: float = 0.0

    def add(self, batch: float, noise: float) -> None:
        self.weight = min(self.weight + 1.0, WEIGHT_MOST)
        self.batch += (batch - self.batch) / self.weight
        self.noise += (noise - self.noise) / self.weight


@dataclass
class NoiseBook:
    """What jobs of one kind have reported."""

    _cells: dict[int, dict[int, _Cell]] = field(default_factory=dict)  # by octaves of progress and batch
    _octaves: list[int] = field(default_factory=list)  # of progress, ascending
    _power: float | None = 0.0  # None: to be fitted anew

    def observe(self, progress: float, batch: int, noise: float) -> None:
        """One report: noise by a gradient of a global batch, at so many steps of the first batch."""
        octave = int(log2(1.0 + progress))
        if octave not in self._cells:
            insort(self._octaves, octave)
        cell = self._cells.setdefault(octave, {}).setdefault(batch.bit_length(), _Cell())
        cell.add(log(batch), log(min(max(noise, LEAST), MOST)))
        self._power = None

    @property
    def power(self) -> float:
        """By which power of the batch the noise grows; 0 while only one batch was ever seen."""
        if self._power is None:
            self._power = self._fitted()
        return self._power

    def noise(self, progress: float, batch: int) -> float | None:
        """As the kind's jobs had it when they had come as far; None where nobody reported."""
        if not self._octaves:
            return None
        at = log2(1.0 + progress) - 0.5  # an octave's mean stands at its middle
        above = min(bisect_left(self._octaves, at), len(self._octaves) - 1)
        high, low = self._octaves[above], self._octaves[max(above - 1, 0)]
        part = min(max((at - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        level = self._level(low) + part * (self._level(high) - self._level(low))
        return exp(level + self.power * log(batch))

    def _level(self, octave: int) -> float:
        """Mean logarithm in an octave of progress, without the part that the batch explains."""
        cells = self._cells[octave].values()
        return sum([one.weight * (one.noise - self.power * one.batch) for one in cells]) / sum(
            [one.weight for one in cells]
        )

    def _fitted(self) -> float:
        """Least squares within each octave of progress, drawn to 0 by what is too little evidence."""
        products, squares = 0.0, EVIDENCE
        for cells in self._cells.values():
            total = sum([one.weight for one in cells.values()])
            batch = sum([one.weight * one.batch for one in cells.values()]) / total
            products += sum([one.weight * (one.batch - batch) * one.noise for one in cells.values()])
            squares += sum([one.weight * (one.batch - batch) ** 2 for one in cells.values()])
        return min(max(products / squares, 0.0), POWER_MOST)
