"""Quantities as people write them: durations, sizes, counts; and as tables show them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
DIGITS_MOST = 30  # of a quantity
_BYTES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def duration(text: str) -> float:
    """Seconds of `90`, `30s`, `10m`, `1h30m`, `2d`, `MM:SS`, `HH:MM:SS`, `D-HH[:MM[:SS]]`."""
    problem = "must be a duration such as 30s, 10m, 2h, 1h30m or HH:MM:SS"
    text = text.strip().lower()
    if ":" in text or "-" in text:
        return clock(text, problem)
    total_s, number = 0.0, ""
    for character in text:
        if character.isdigit() or character == ".":
            number += character
        elif character in _SECONDS and _is_number(number):
            total_s += float(number) * _SECONDS[character]
            number = ""
        else:
            raise ValueError(problem)
    if number:
        if not _is_number(number):
            raise ValueError(problem)
        total_s += float(number)
    elif not text:
        raise ValueError(problem)
    return total_s


def clock(text: str, problem: str = "must be MM:SS, HH:MM:SS or D-HH:MM:SS") -> float:
    """Seconds of `MM:SS`, `HH:MM:SS`, and behind days of `D-HH`, `D-HH:MM` or `D-HH:MM:SS`."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not 2 - bool(dash) <= len(parts) <= 3 or not all(
        _is_digits(part) for part in (*parts, *([days] if dash else []))
    ):
        raise ValueError(problem)
    total = 0
    for part in (*parts, *["0"] * (3 - len(parts) if dash else 0)):  # behind days the first is hours
        total = total * 60 + int(part)
    return float(total + 86_400 * int(days or 0))


def deadline(text: str, now_utc_s: float | None = None) -> float:
    """Seconds since 1970 of `2h` from now, the next `17:30`, or an ISO time; without a zone it is this machine's."""
    from datetime import datetime, timedelta  # only where a deadline is given

    now = datetime.fromtimestamp(time.time() if now_utc_s is None else now_utc_s)
    text = text.strip()
    try:
        if text[-1:].lower() in _SECONDS:
            at = now + timedelta(seconds=duration(text))
        elif _is_digits(text.replace(":", "")) and ":" in text:
            hour, minute, second = (int(part) for part in (text if text.count(":") > 1 else f"{text}:00").split(":"))
            at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            at += timedelta(days=at <= now)
        else:
            at = datetime.fromisoformat(text if "-" in text else "")
        late_s = now.timestamp() - at.timestamp()
    except (ValueError, OverflowError):
        example = "2h from now, 17:30 or 2026-01-31T17:30+01:00"
        raise ValueError(f"must be a time from now, of the day, or in ISO form: {example}") from None
    if late_s >= 0:
        raise ValueError(f"is {show_duration(late_s)} in the past")
    return at.timestamp()


def _is_number(text: str) -> bool:
    return len(text) <= DIGITS_MOST and text.count(".") <= 1 and _is_digits(text.replace(".", ""))


def _is_digits(text: str) -> bool:
    """Python takes those of all scripts, and no more than 4,300 of them."""
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MOST


def size(text: str) -> int:
    """Bytes of `512M`, `16G`, `16Gi`, `16GiB`, `1.5T` or a plain number; units are powers of 1024."""
    upper = text.strip().upper().removesuffix("B")
    upper = upper.removesuffix("I") if upper[-2:-1] in _BYTES else upper
    number = upper.rstrip("KMGT")
    unit = upper[len(number) :]
    if not _is_number(number) or unit not in _BYTES:
        raise ValueError("must be a size such as 512M, 16G or 1T")
    return int(float(number) * _BYTES[unit])


def number(text: str) -> float:
    """A finite number as programs write it: `3`, `-0.5`, `1e-3`; neither NaN nor `1_0`."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("must be a finite number such as 3, 0.5 or 1e-3")
    return int(text) if text.lstrip("+-").isdecimal() else value


def whole(low: int, high: int) -> Callable[[str], int]:
    """A reader for whole numbers in a range."""

    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if not _is_digits(digits) or not low <= int(text) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return read


def show_duration(seconds: float | None) -> str:
    """`45s`, `3:07`, `2:15:00` or `3d 04:00`; `-` for none."""
    if seconds is None:
        return "-"
    total = int(seconds)
    if total < 60:
        return f"{total}s"
    hours, rest = divmod(total, 3_600)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{rest // 60:02}"
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def show_wait(seconds: float | None) -> str:
    """As `show_duration`, with tenths below ten seconds, where they say something."""
    return f"{seconds:.1f}s" if seconds is not None and seconds < 10 else show_duration(seconds)


def show_bytes(amount: float | None) -> str:
    """`1.5 GiB`; `-` for none."""
    if amount is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1_024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1_024
    return f"{amount:.1f} TiB"


def show_count(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_few(names: Sequence[str]) -> str:
    """Names, shortened behind three: `a,b,c+2`; `-` for none."""
    return ",".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "") or "-"


def show_ratio(ratio: float | None) -> str:
    """`37%`; `-` for none."""
    return "-" if ratio is None else f"{ratio * 100:.0f}%"


def show_time(text: object, *, has_fraction: bool = False) -> str:
    """A time of the API, which is UTC, in the zone of this machine: 2026-01-31T12:04:00+01:00, or Z."""
    whole, point, fraction = str(text or "-").rstrip("Z").partition(".")
    try:
        shown, offset = _local(whole)
    except ValueError:
        return str(text or "-")
    return f"{shown}{point}{fraction}{offset}" if has_fraction else shown + offset


def show_moment(utc_s: float) -> str:
    """Seconds since 1970 as `show_time` shows them."""
    return show_time(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(utc_s)))


def moment(text: str) -> float:
    """Seconds since 1970 of a time of the API, which is UTC."""
    from calendar import timegm  # only where times are reckoned with

    whole, _, fraction = text.rstrip("Z").partition(".")
    return timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")


def _local(whole: str) -> tuple[str, str]:
    from calendar import timegm  # only where times are shown

    day, _, clock = whole.partition("T")
    year, month, date = (int(part) for part in day.split("-"))
    hour, minute, second = (int(part) for part in clock.split(":"))
    at = time.localtime(timegm((year, month, date, hour, minute, second)))
    minutes = abs(at.tm_gmtoff) // 60
    offset = f"{'-' if at.tm_gmtoff < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}" if minutes else "Z"
    return time.strftime("%Y-%m-%dT%H:%M:%S", at), offset
