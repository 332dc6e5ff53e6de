"""The agent's log: one line per event on stderr, as key=value text or as JSON.

Under systemd each line starts with the priority that the journal understands and leaves the time to it.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
FIELDS = "fields"
"""Key of `extra=` under which a log call hands over a mapping of further key=value pairs."""
MINUTE_S = 60.0
TRACEBACKS_MOST = 3  # of one place in the code and minute
COMPLAINTS_MOST = 100


def set_up_logging(log_format: str, log_level: str, node: str) -> None:
    """Send all loggers to stderr in the given format ("text" or "json"), from the given level upward."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(node) if log_format == "json" else TextLines("JOURNAL_STREAM" in os.environ))
    handler.addFilter(Repeats().are_bearable)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    logging.getLogger("asyncio").setLevel(max(root.level, logging.WARNING))
    logging.getLogger("aiohttp.server").addFilter(_is_not_a_strangers_fault)
    logging.captureWarnings(True)


def _is_not_a_strangers_fault(record: logging.LogRecord) -> bool:
    """False for requests that are no HTTP: thousands a second would make the journal drop the agent's own lines."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not kind.__module__.startswith("aiohttp.")


class Repeats:
    """Limits warnings and errors that one place in the code repeats: they would push all others out of the journal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()
        self._told: Counter[tuple[object, ...]] = Counter()

    def are_bearable(self, record: logging.LogRecord) -> bool:
        """False for what has been told often enough in this minute; the last one that is told says so."""
        if record.levelno < logging.WARNING:
            return True
        if self._clock() >= self._since_s + MINUTE_S:
            self._since_s = self._clock()
            self._told.clear()
        kind = record.exc_info[0] if record.exc_info else None
        place, most = (record.pathname, record.lineno, kind), TRACEBACKS_MOST if kind else COMPLAINTS_MOST
        self._told[place] += 1
        if self._told[place] == most:
            left_out = f"{record.getMessage()} (further ones like it are left out for up to a minute)"
            record.msg, record.args = left_out, ()
        return self._told[place] <= most


class TextLines(logging.Formatter):
    """`TIME LEVEL LOGGER MESSAGE key=value ...`; a traceback follows on lines of its own."""

    def __init__(self, is_journal: bool) -> None:
        super().__init__()
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback if there is one."""
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in getattr(record, FIELDS, {}).items())
        line = f"{record.levelname} {record.name} {record.getMessage()}{pairs}".replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if self._is_journal:
            return f"<{_PRIORITIES.get(record.levelno, 6)}>{line}"
        return f"{_utc(record.created)} {line}"


class JsonLines(logging.Formatter):
    """One JSON object a line, traceback included."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        document: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= {key: value for key, value in getattr(record, FIELDS, {}).items() if key not in document}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def _utc(created_s: float) -> str:
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in '"=' for c in text) else text
