"""Virtual time: a heap of callbacks.  Ties are broken by a sequence number, so that a seed gives one history."""

import heapq
from collections.abc import Callable

Callback = Callable[[], None]


class Timer:
    """A scheduled callback; `cancel` makes it do nothing."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        """Harmless when it has run or was cancelled."""
        self._callback = None

    def run(self) -> None:
        """Call it, once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class EventLoop:
    """Runs callbacks in order of time; `now_s` stands still while one runs."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, Timer]] = []

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def call_at(self, when_s: float, callback: Callback) -> Timer:
        """Run at that time; at once, after what is due now, if it has passed."""
        timer = Timer(callback)
        self._sequence += 1
        heapq.heappush(self._heap, (max(when_s, self._now_s), self._sequence, timer))
        return timer

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Run after a delay."""
        return self.call_at(self._now_s + delay_s, callback)

    def run_until(self, predicate: Callable[[], bool], limit_s: float) -> bool:
        """Run until the predicate holds (asked after each callback) or `limit_s` more seconds have passed.

        True when it held.  Time stands at the limit otherwise.
        """
        end_s = self._now_s + limit_s
        if predicate():
            return True
        while self._heap and self._heap[0][0] <= end_s:
            self._now_s, _, timer = heapq.heappop(self._heap)
            timer.run()
            if predicate():
                return True
        self._now_s = end_s
        return False

    def run_for(self, duration_s: float) -> None:
        """Let so much time pass."""
        self.run_until(lambda: False, duration_s)
