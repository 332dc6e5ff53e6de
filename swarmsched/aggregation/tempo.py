"""How many steps lie between two rounds, where a job leaves that to the swarm: as few as the network lets pay.

More steps apart cost loss at equal samples, and fewer cost time.  A round may take a twentieth of the time of its
steps: so training keeps 95 % of the samples that it would see alone, and what is left to gain by longer pauses is less
than what they cost (docs/research/results.md, training apart).
"""

from collections.abc import Iterable, Sequence
from statistics import median

EVERY_LEAST, EVERY_MOST = 8, 512
SHARE = 0.05
ROUNDS = 10  # between two changes: each learner's figures are those of its last round, and may be odd


def next_every(every: int, costs: Sequence[float]) -> int:
    """Twice, half or as many steps as before, by what rounds have cost, in steps; the fewest that keep the share."""
    cost = median(costs)
    if cost > SHARE * every:
        return max(every, min(EVERY_MOST, 2 * every))
    return min(every, max(EVERY_LEAST, every // 2)) if cost <= SHARE * (every // 2) else every


class Tempo:
    """Of one shard, which all learners follow: `every` is that of its present version."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._costs: list[float] = []

    def merged(self, costs: Iterable[float]) -> None:
        """A round was merged whose learners tell what their last one has cost each, in steps; below 0: not known.

        The least of them is that of the network and of merging: all others have waited for the slowest, which they
        would do at any tempo.
        """
        known = [each for each in costs if each >= 0]
        if known:
            self._costs.append(min(known))
        if len(self._costs) >= ROUNDS:
            self.every = next_every(self.every, self._costs)
            self._costs.clear()
