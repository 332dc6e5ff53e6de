"""How long a learner waits for a round: as long as rounds usually take, and never so long that others can stop it."""

from __future__ import annotations

from collections import deque
from statistics import median

STEPS = 1.5  # that a round which never comes may cost, beside what one usually takes
LIMIT_S = 30.0
REMEMBERED = 15
COST_MOST = 1e9  # as shards have it


class Patience:
    """Of one learner, by its own steps and by the answers that came, be it after it had gone on without them."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._answers: deque[float] = deque(maxlen=REMEMBERED)

    def stepped(self, seconds: float) -> None:
        """A step has taken that long, without merging."""
        self._steps.append(seconds)

    def answered(self, seconds: float) -> None:
        """A round was complete so long after it was due; one that came to nothing says nothing of others."""
        self._answers.append(max(0.0, seconds))

    def cost(self, seconds: float) -> float:
        """So long, in steps; below 0 where that is not known."""
        return min(COST_MOST, max(0.0, seconds) / self.step_s) if seconds >= 0 and self.step_s else -1.0

    @property
    def step_s(self) -> float:
        """What a step usually takes; 0 before the first."""
        return median(self._steps) if self._steps else 0.0

    def limit_s(self, every: int) -> float:
        """However long others take, a round of so many steps costs no more than this; what comes later is merged then.

        Answers are usually late by what the network and the slowest of a quorum take.  One that is late by half of a
        round missed its own, and came with the next: it says nothing of how long a round takes.
        """
        round_s = every * self.step_s
        in_time = [each for each in self._answers if each <= round_s / 2]
        usual_s = median(in_time) if in_time else 0.0
        return min(usual_s + STEPS * self.step_s, round_s, LIMIT_S)
