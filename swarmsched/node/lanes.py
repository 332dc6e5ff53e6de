"""The order in which a driver hands over events: what keeps authority and membership alive passes everything else.

Leases, contacts and probes are few, small, and worth nothing once they are late.  Behind a queue of seconds they would
cost jobs their shepherds, and the elections that follow would make the queue longer.  All else stays in its order.
"""

from collections import deque
from typing import Generic, TypeVar

from swarmsched.events import DatagramReceived, DatagramSendFailed, PeerMessageReceived
from swarmsched.node.protocol import URGENT_MESSAGES

LAG_REPORTED_S = 1.0
REPORT_INTERVAL_S = 1.0

T = TypeVar("T")


def is_urgent(event: object) -> bool:
    """True for what passes all that waits."""
    if isinstance(event, PeerMessageReceived):
        return isinstance(event.message, URGENT_MESSAGES)
    return isinstance(event, DatagramReceived | DatagramSendFailed)


class Lanes(Generic[T]):
    """What waits for its turn, each with the time at which it came."""

    def __init__(self) -> None:
        self._urgent: deque[tuple[float, T]] = deque()
        self._waiting: deque[tuple[float, T]] = deque()
        self._reported_s = float("-inf")

    def __len__(self) -> int:
        return len(self._urgent) + len(self._waiting)

    def put(self, item: T, now_s: float) -> None:
        """Add one."""
        (self._urgent if is_urgent(item) else self._waiting).append((now_s, item))

    def take(self) -> T:
        """The next one; IndexError when nothing waits."""
        return (self._urgent or self._waiting).popleft()[1]

    def waited_s(self, now_s: float) -> float:
        """For how long the one that stands longest has waited; 0 when none does."""
        return now_s - self._waiting[0][0] if self._waiting else 0.0

    def news_of_lag_s(self, now_s: float, disk_s: float = 0.0) -> float:
        """What is worth a `WorkLagged`, once a second, else 0.  `disk_s`: since when effects wait for the disk."""
        lag_s = max(self.waited_s(now_s), disk_s)
        if lag_s < LAG_REPORTED_S or now_s < self._reported_s + REPORT_INTERVAL_S:
            return 0.0
        self._reported_s = now_s
        return lag_s

    def clear(self) -> None:
        """Forget all."""
        self._urgent.clear()
        self._waiting.clear()
