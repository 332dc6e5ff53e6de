"""How much a node may send: a token bucket whose rate follows the size of the swarm."""

import itertools
import math

BYTE_CAPS = ((30, 5_000.0), (100, 12_000.0), (1_000, 40_000.0), (3_000, 120_000.0), (10_000, 200_000.0))
"""(members, bytes per second) of the state plane; straight lines between them on logarithmic axes."""


def byte_cap(members: int) -> float:
    """Most bytes per second that the state plane of one node sends."""
    if members <= BYTE_CAPS[0][0]:
        return BYTE_CAPS[0][1]
    for (low, low_cap), (high, high_cap) in itertools.pairwise(BYTE_CAPS):
        if members <= high:
            part = math.log(members / low) / math.log(high / low)
            return float(low_cap * (high_cap / low_cap) ** part)
    return BYTE_CAPS[-1][1]


class TokenBucket:
    """Bytes that may be sent now.  Starts full; holds at most `burst_s` seconds' worth."""

    def __init__(self, rate: float, burst_s: float) -> None:
        self._rate = rate
        self._burst_s = burst_s
        self._tokens = rate * burst_s
        self._filled_s = -math.inf

    def set_rate(self, rate: float, now_s: float) -> None:
        """Another rate from now on."""
        self._fill(now_s)
        self._rate = rate
        self._tokens = min(self._tokens, rate * self._burst_s)

    def available(self, now_s: float) -> float:
        """Bytes that may be sent at once."""
        self._fill(now_s)
        return self._tokens

    def take(self, count: float, now_s: float) -> bool:
        """Spend that many bytes, or none of them if there are too few."""
        self._fill(now_s)
        if count > self._tokens:
            return False
        self._tokens -= count
        return True

    def _fill(self, now_s: float) -> None:
        if now_s > self._filled_s:
            if math.isfinite(self._filled_s):
                self._tokens = min(self._rate * self._burst_s, self._tokens + self._rate * (now_s - self._filled_s))
            self._filled_s = now_s
