"""A machine's clocks: a monotonic one of its own rate and origin, and a wall clock that may be set to anything.

Virtual time is the truth that only the simulator and its checkers see.  Nodes are given what their own machine shows.
"""

import math

from swarmsched.simulator.loop import EventLoop

START_UTC_S = 1_700_000_000.0


class HostClock:
    """Shows `origin + rate * elapsed`; the rate may change, the shown time never falls while the machine is on."""

    def __init__(self, loop: EventLoop, origin_s: float = 0.0, rate: float = 1.0) -> None:
        self._loop = loop
        self._shown_s = origin_s  # at _since_s of virtual time
        self._since_s = loop.now_s
        self.rate = rate
        self.wall_error_s = 0.0  # of the wall clock against true time

    @property
    def now_s(self) -> float:
        """What this machine's monotonic clock shows."""
        return self._shown_s + self.rate * (self._loop.now_s - self._since_s)

    @property
    def utc_s(self) -> float:
        """What this machine's wall clock shows."""
        return START_UTC_S + self._loop.now_s + self.wall_error_s

    def when(self, shown_s: float) -> float:
        """The virtual time at which the clock will show that, if its rate stays; infinite for infinity."""
        if math.isinf(shown_s):
            return shown_s
        return self._since_s + (shown_s - self._shown_s) / self.rate

    def set_rate(self, rate: float) -> None:
        """Run faster or slower from now on."""
        self._shown_s, self._since_s, self.rate = self.now_s, self._loop.now_s, rate

    def boot(self, origin_s: float = 0.0) -> None:
        """The machine was switched off and on: its monotonic clock begins anew."""
        self._shown_s, self._since_s = origin_s, self._loop.now_s
