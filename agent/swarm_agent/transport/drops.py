"""Refused messages: counted by reason, and said once per source and minute, so that a flood fills no log."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from swarmsched.errors import RemoteProtocolError

REPEAT_S = 60.0
SOURCES_LIMIT = 1_000

# The sentence of the refusing layer is for people; metrics need a short closed set of labels.
_REASONS = (
    ("wire major", "foreign_version"),
    ("cluster key(s)", "wrong_key"),
    ("seen before", "replayed"),
    ("not encrypted", "not_encrypted"),
    ("no cluster key", "no_key"),
    ("magic", "foreign"),
    ("exceeds", "oversized"),
)

DROP_REASONS = (*(reason for _, reason in _REASONS), "malformed")

log = logging.getLogger("swarm.transport")


def reason_of(error: RemoteProtocolError) -> str:
    """A label for counters; `malformed` for whatever has no label of its own."""
    return next((reason for words, reason in _REASONS if words in str(error)), "malformed")


class DropLog:
    """Counts refused messages of one channel and logs the first of each reason and source."""

    def __init__(self, channel: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # when last said, drops since
        self.counters: Counter[str] = Counter()

    def record(self, error: RemoteProtocolError, source: str) -> str:
        """Count one refusal and return its reason; `source` is a host, since ports of attackers vary."""
        reason = reason_of(error)
        self.counters[reason] += 1
        now_s = self._clock()
        said_s, unsaid = self._said.get((reason, source), (float("-inf"), 0))
        if now_s - said_s < REPEAT_S:
            self._said[reason, source] = (said_s, unsaid + 1)
            return reason
        if len(self._said) >= SOURCES_LIMIT:
            self._said.clear()
        self._said[reason, source] = (now_s, 0)
        more = f" (and {unsaid} more since)" if unsaid else ""
        log.info("%s dropped reason=%s source=%s: %s%s", self._channel, reason, source, error, more)
        return reason
