"""Waits that last too long, and are told: others hang, are cut off, or do not do what this rank waits for.

Nothing is ended by it.  Whether a rank is given up is for plans to say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STALL_S = 30.0  # and at least so many steps
STALL_STEPS = 10.0
TURN_S = 0.25


class StallWatch:
    """`tell` is called once of each wait that stalls, and with no text when it is over."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._what, self._limit_s = "", 0.0
        self._since_s = 0.0  # 0: nothing is waited for
        self._is_told = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="swarm-stalls", daemon=True)

    @contextmanager
    def waiting(self, what: str, step_s: float) -> Iterator[None]:
        """Around a wait; `what` says for what, to whoever looks for the cause; `step_s` how long a step takes."""
        with self._lock:
            self._what, self._limit_s = what, max(STALL_S, STALL_STEPS * step_s)
            self._since_s = time.monotonic()
        if self._thread.ident is None:
            self._thread.start()
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._since_s, is_told, self._is_told = 0.0, self._is_told, False
            if is_told:
                self._tell("")

    def _run(self) -> None:
        while True:
            time.sleep(TURN_S)
            with self._lock:
                waited_s = time.monotonic() - self._since_s if self._since_s else 0.0
                if waited_s > self._limit_s and not self._is_told:
                    self._is_told = True
                    self._tell(f"has waited for {waited_s:.0f} s for {self._what}")
