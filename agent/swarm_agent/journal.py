"""The agent's log: one line per event on stderr, as key=value text or as JSON.

Under systemd each line starts with the priority that the journal understands and leaves the time to it.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
FIELDS = "fields"
"""Key of `extra=` under which a log call hands over a mapping of further key=value pairs."""


def set_up_logging(log_format: str, log_level: str, node: str) -> None:
    """Send all loggers to stderr in the given format ("text" or "json"), from the given level upward."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(node) if log_format == "json" else TextLines("JOURNAL_STREAM" in os.environ))
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
