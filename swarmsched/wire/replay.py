"""Replay protection: which message counters of one sending process were already seen (as in RFC 4303, 3.4.3)."""

REPLAY_WINDOW = 1_024
"""How far behind the highest counter a late message may be; older ones are refused unseen."""


class ReplayWindow:
    """Accepts each counter of one sender once.  Reordering within the window is normal.

    `_seen` has bit i set when counter `_highest - i` was accepted; it never holds more than the window.
    """

    __slots__ = ("_highest", "_mask", "_seen", "_width")

    def __init__(self, width: int = REPLAY_WINDOW) -> None:
        self._width = width
        self._mask = (1 << width) - 1
        self._highest = -1
        self._seen = 0

    def accept(self, counter: int) -> bool:
        """True, and remembered, the first time; False for a repetition or one older than the window.

        Call it only for an authenticated message: a forged counter would close the window to honest ones.
        """
        ahead = counter - self._highest
        if ahead > 0:
            self._seen = ((self._seen << ahead) & self._mask) | 1 if ahead < self._width else 1
            self._highest = counter
            return True
        if -ahead >= self._width:
            return False
        bit = 1 << -ahead
        if self._seen & bit:
            return False
        self._seen |= bit
        return True
