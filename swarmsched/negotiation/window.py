"""How much of one kind an agent has under way at once: as much as is answered in time. It is found as TCP finds its
window (Jacobson and Karels 1988: additive increase, multiplicative decrease).

Agents, disks and networks that fall behind answer late, and whatever is tried again because of that makes them later
still.  Jobs without GPUs have no other limit: every one of them fits at any time.  So an agent begins less while what
it has begun is answered late.  An hour of such trouble leaves nothing behind: the window opens as answers are timely.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

LATE_S = 1.0  # a start waits for three disks some four times over: even slow ones need half of that
GIVEN_UP_S = 5.0  # then it counts no more: what hangs on a node that is gone must not hold up all others
LIMIT_MIN, LIMIT_START, LIMIT_MAX = 2.0, 16.0, 256.0

K = TypeVar("K", bound=Hashable)


class Window(Generic[K]):
    """What is under way, by key, and how much may be."""

    def __init__(self) -> None:
        self.limit = LIMIT_START
        self._begun_s: dict[K, float] = {}  # the oldest first
        self._halved_s = float("-inf")  # what had begun before says nothing of the window as it is since then

    def is_full(self, now_s: float) -> bool:
        """True while nothing more should be begun.  What is late counts as late before it is answered."""
        while self._begun_s:
            key, begun_s = next(iter(self._begun_s.items()))
            self._note(begun_s, now_s)
            if now_s < begun_s + GIVEN_UP_S:
                break
            del self._begun_s[key]
        return len(self._begun_s) >= int(self.limit)

    @property
    def opens_s(self) -> float:
        """When `is_full` may turn false although nothing is answered; infinite with nothing under way."""
        return next(iter(self._begun_s.values()), float("inf")) + GIVEN_UP_S

    def begun(self, key: K, now_s: float) -> None:
        """One more is under way, whether or not there was room."""
        self._begun_s.pop(key, None)
        self._begun_s[key] = now_s

    def ended(self, key: K, now_s: float) -> None:
        """One is answered, whatever the answer; what is not under way changes nothing."""
        was_full = len(self._begun_s) >= int(self.limit)
        begun_s = self._begun_s.pop(key, None)
        if begun_s is None or self._note(begun_s, now_s):
            return
        if was_full:  # an agent with little to do learns nothing of how much it could do
            self.limit = min(LIMIT_MAX, self.limit + 1.0 / self.limit)

    def forget(self, key: K) -> None:
        """Nobody waits for its answer any more."""
        self._begun_s.pop(key, None)

    def _note(self, begun_s: float, now_s: float) -> bool:
        """True when it is late; the window is halved once for all that was under way then."""
        if now_s <= begun_s + LATE_S:
            return False
        if begun_s >= self._halved_s:
            self.limit, self._halved_s = max(LIMIT_MIN, self.limit / 2.0), now_s
        return True
