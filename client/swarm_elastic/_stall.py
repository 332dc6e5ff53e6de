"""Waits that last too long, and are told: others hang, are cut off, or do not do what this rank waits for.

Nothing is ended by it.  Whether a rank is given up is for plans to say: once the waits of the others have timed out.
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
    """`tell` is called of each wait that stalls, again when it times out, and with no text when it is over.

    It gets what is waited for, and whether that has timed out.
    """

    def __init__(self, tell: Callable[[str, bool], None], timeout_s: float) -> None:
        self._tell, self._timeout_s = tell, timeout_s
        self._what, self._limits_s = "", (0.0, 0.0)  # until it stalls, and times out
        self._since_s = 0.0  # 0: nothing is waited for
        self._told = 0  # how many of the two
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="swarm-stalls", daemon=True)

    @contextmanager
    def waiting(self, what: str, step_s: float) -> Iterator[None]:
        """Around a wait; `what` says for what, to whoever looks for the cause; `step_s` how long a step takes."""
        with self._lock:
            stalls_s = max(STALL_S, STALL_STEPS * step_s)
            self._what, self._limits_s = what, (stalls_s, max(self._timeout_s, 2.0 * stalls_s))
            self._since_s = time.monotonic()
        if self._thread.ident is None:
            self._thread.start()
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._since_s, told, self._told = 0.0, self._told, 0
            if told:
                self._tell("", False)

    def _run(self) -> None:
        while True:
            time.sleep(TURN_S)
            with self._lock:
                waited_s = time.monotonic() - self._since_s if self._since_s else 0.0
                reached = sum(waited_s > limit_s for limit_s in self._limits_s)
                if reached > self._told:
                    self._told = reached
                    self._tell(f"has waited for {waited_s:.0f} s for {self._what}", reached > 1)
