"""Moments as text: RFC 3339, in query parameters also how many seconds ago."""

import time
from datetime import UTC, datetime
from typing import Any

from swarm_agent.http.parameter import WORD_SHOWN, Parameter
from swarm_agent.http.problem import bad_parameter
from swarm_agent.http.schema import TEXT

LATEST_UTC_S = 253_402_300_799.0  # the last second that RFC 3339 can write


def rfc3339(utc_s: float) -> str:
    """Milliseconds, UTC, `Z`."""
    return datetime.fromtimestamp(utc_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def aged(now_utc_s: float, age_s: float) -> dict[str, Any]:
    """The two keys that tell how old something is."""
    return {"as_of": rfc3339(now_utc_s - age_s), "staleness_seconds": round(age_s, 3)}


def utc_of(text: str) -> float:
    """The inverse of `rfc3339`."""
    return datetime.fromisoformat(text).timestamp()


def moment_utc_s(given: str | None) -> float | None:
    """The moment in seconds since 1970 that `since` names."""
    text = (given or "").strip()
    if not text:
        return None
    utc_s = _ago(text)
    if utc_s is None:
        utc_s = _stamp(text)
    if utc_s is None or not 0 <= utc_s <= LATEST_UTC_S:
        remedy = "a time such as 2025-01-31T12:00:00Z, or a number of seconds ago"
        raise bad_parameter("since", f"{text[:WORD_SHOWN]!r} is not a moment", remedy)
    return utc_s


def _ago(text: str) -> float | None:
    try:
        return time.time() - float(text)
    except ValueError:
        return None


def _stamp(text: str) -> float | None:
    try:
        parsed = datetime.fromisoformat(text.replace(" ", "+"))  # a '+' in a query arrives as a blank
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


SINCE = Parameter("since", TEXT, "RFC 3339 time, or seconds ago.", moment_utc_s)
