"""Faults of the core, over all its lives in one process: how many, what brought them about, when to start again.

A handler that raises may have changed memory without a write, and what is told from then on may be unknown to the next
life.  So the core ends at the first unexpected exception, and the agent starts again from its disk; shims and ranks
go on meanwhile.  What raised comes again as a rule: peers repeat, shims are found again.  Events like it, about the
same job or from the same sender, are therefore refused for a while, as if they were lost on the way: a fault costs
one job here, never the agent.  What has no such mark (a timer, telemetry) is met by longer and longer pauses.
"""

import time
from collections import Counter
from collections.abc import Callable

from swarmsched.events import ClientCommandReceived, DatagramReceived, Event, PeerMessageReceived

REFUSED_S = 600.0
MARKS_MAX = 1_000
CALM_S = 600.0  # without a fault: the next one is the first again
PAUSE_S_MAX = 60.0

Mark = tuple[object, ...]


class Faults:
    """Counts of `steps` (core ended) and `effects` (one effect failed), and the marks of events not to be tried."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused_until_s: dict[Mark, float] = {}
        self._recent = 0  # faults without `CALM_S` between them
        self._last_s = float("-inf")
        self.counts: Counter[str] = Counter(steps=0, effects=0, refused_events=0)
        self.last = ""  # event and exception of the last fault of the core

    def note(self, event: Event | None, error: Exception) -> None:
        """The core raised at this event; None: between two events."""
        now_s = self._clock()
        self.counts["steps"] += 1
        self._recent = 1 if now_s > self._last_s + CALM_S else self._recent + 1
        self._last_s = now_s
        self.last = f"{type(event).__name__ if event else 'no event'}: {type(error).__name__}: {error}"
        if event is not None and (mark := _mark(event)):
            if len(self._refused_until_s) >= MARKS_MAX:
                self._refused_until_s.clear()
            self._refused_until_s[mark] = now_s + REFUSED_S

    def refuses(self, event: Event) -> bool:
        """True for an event like one that brought the core down lately."""
        if not self._refused_until_s:
            return False
        mark = _mark(event)
        if mark is None or self._clock() >= self._refused_until_s.get(mark, 0.0):
            return False
        self.counts["refused_events"] += 1
        return True

    @property
    def pause_s(self) -> float:
        """How long to wait before the core is started again: not at all after the first fault, then 1 s, 2 s, 4 s."""
        return min(PAUSE_S_MAX, 2.0 ** min(self._recent - 2, 6)) if self._recent > 1 else 0.0


def _mark(event: Event) -> Mark | None:
    """What events have in common that would raise alike."""
    if isinstance(event, DatagramReceived):
        return (DatagramReceived, event.payload)
    subject: object = event
    if isinstance(event, PeerMessageReceived):
        subject = event.message
    elif isinstance(event, ClientCommandReceived):
        subject = event.command
    job_id = getattr(getattr(subject, "status", subject), "job_id", None)
    if job_id is not None:
        return (type(event), type(subject), job_id)
    return (type(subject), event.sender) if isinstance(event, PeerMessageReceived) else None
