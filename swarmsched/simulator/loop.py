"""Virtual time: a heap of callbacks.  Ties are broken by a sequence number, so that a seed gives one history."""

import heapq
from collections.abc import Callable, Iterator
from typing import Any

CALLBACKS_MOST = 1_000_000

Callback = Callable[[], None]


class Spins(RuntimeError):
    """So much happens in so little virtual time that it would never pass."""


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
    """Runs callbacks in order of time; `now_s` stands still while one runs.

    `callbacks_most` within one virtual second are believed; with more it raises `Spins`, wherever it is driven from.
    """

    def __init__(self, callbacks_most: int = CALLBACKS_MOST) -> None:
        self.now_s = 0.0  # virtual seconds since the start; only the loop sets it
        self._callbacks_most = self._callbacks_left = callbacks_most
        self._second_ends_s = 1.0
        self._sequence = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def post_at(self, when_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Call it with these arguments at that time; at once, after what is due now, if it has passed."""
        self._sequence += 1
        now_s = self.now_s
        heapq.heappush(self._heap, (max(now_s, when_s), self._sequence, callback, arguments))

    def post_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Call it with these arguments after a delay."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_s + max(0.0, delay_s), self._sequence, callback, arguments))

    def call_at(self, when_s: float, callback: Callback) -> Timer:
        """As `post_at`, but it can be cancelled."""
        timer = Timer(callback)
        self.post_at(when_s, timer.run)
        return timer

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """As `post_later`, but it can be cancelled."""
        return self.call_at(self.now_s + delay_s, callback)

    def run_until(self, predicate: Callable[[], bool], limit_s: float) -> bool:
        """Run until the predicate holds (asked after each callback) or `limit_s` more seconds have passed.

        True when it held.  Time stands at the limit otherwise.
        """
        end_s = self.now_s + limit_s
        if predicate():
            return True
        for callback, arguments in self._due(end_s):
            callback(*arguments)
            if predicate():
                return True
        self.now_s = end_s
        return False

    def run_for(self, duration_s: float) -> None:
        """Let so much time pass."""
        end_s = self.now_s + duration_s
        for callback, arguments in self._due(end_s):
            callback(*arguments)
        self.now_s = end_s

    def _due(self, end_s: float) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
        """What is to be called until then, each at its time."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end_s:
            self.now_s, _, callback, arguments = pop(heap)
            if self.now_s >= self._second_ends_s:
                self._second_ends_s, self._callbacks_left = self.now_s + 1.0, self._callbacks_most
            if not self._callbacks_left:
                name = getattr(callback, "__qualname__", str(callback))
                raise Spins(f"{self._callbacks_most:,} callbacks within a virtual second; the next is {name}")
            self._callbacks_left -= 1
            yield callback, arguments
