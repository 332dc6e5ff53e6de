"""Readers of single configuration values: text from a file, the environment or an option in, a checked value out.

Each reader accepts the type that TOML gives as well as text, and raises `ValueError` with a sentence that says what
would be accepted; `swarm_agent.config` adds key and place.
"""

import re
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from swarmsched.gossip.record import ZONE_LENGTH
from swarmsched.ids import Address, is_node_name
from swarmsched.resources import LABEL_FORM, is_label

SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
T = TypeVar("T")
_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)(?:i?B)?")
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


def text(value: object) -> str:
    """Plain text without control characters, at most 1,024 of them."""
    if not isinstance(value, str) or len(value) > 1_024 or any(ord(c) < 32 for c in value):
        raise ValueError(f"{value!r} is not a line of text")
    return value


def node_name(value: object) -> str:
    """A name that a node may carry."""
    name = text(value)
    if not is_node_name(name):
        raise ValueError(
            f"{name!r} is not usable; 1 to 63 letters, digits, '-', '_' or '.', no dot or dash at the ends"
        )
    return name


def zone(value: object) -> str:
    """The name of a failure zone; empty text for none."""
    name = text(value)
    if name and (not is_node_name(name) or len(name) > ZONE_LENGTH):
        raise ValueError(f"{name!r} is not usable; 1 to {ZONE_LENGTH} letters, digits, '-', '_' or '.', such as rack-7")
    return name


def label(value: object) -> str:
    """A label of a node, `NAME` or `NAME=VALUE`."""
    found = text(value).strip()
    if not is_label(found):
        raise ValueError(f"{found!r} is not a label; {LABEL_FORM}")
    return found


def address(value: object) -> Address:
    """`HOST:PORT` or `[IPV6]:PORT`; the host may be a name, which is resolved when the agent starts."""
    host, colon, port = text(value).strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isdecimal() or not 1 <= int(port) <= 65_535 or not _is_host(bare, host):
        raise ValueError(f"{value!r} is not an address; write HOST:PORT or [IPV6]:PORT with a port from 1 to 65535")
    return (bare, int(port))


def host(value: object) -> str:
    """An IP address or host name without a port."""
    name = text(value).strip()
    if name and not _is_host(name, f"[{name}]"):
        raise ValueError(f"{value!r} is not a host; write an IP address or a host name, without a port")
    return name


def _is_host(bare: str, written: str) -> bool:
    try:
        version = ip_address(bare).version
    except ValueError:
        return _HOST_NAME.fullmatch(bare) is not None and not bare.replace(".", "").isdecimal()
    return version == 4 or written.startswith("[")


def path(value: object) -> Path:
    """An absolute path; a relative one would depend on where the agent was started."""
    found = Path(text(value)).expanduser()
    if not found.is_absolute():
        raise ValueError(f"{value!r} is not an absolute path")
    return found


def optional_path(value: object) -> Path | None:
    """An absolute path, or empty text for none."""
    return None if value in ("", None) else path(value)


def seconds(low: float, high: float) -> Callable[[object], float]:
    """A reader of a number of seconds within bounds."""

    def read(value: object) -> float:
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            raise ValueError(f"{value!r} is not a number of seconds from {low:g} to {high:g}")
        return number

    return read


def whole(low: int, high: int) -> Callable[[object], int]:
    """A reader of a whole number within bounds."""

    def read(value: object) -> int:
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
        return number

    return read


def size(low: int, high: int) -> Callable[[object], int]:
    """A reader of bytes: a number, or text such as `512MiB` or `80G` (powers of 1,024)."""

    def read(value: object) -> int:
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        number = int(match[1]) * SIZE_UNITS[match[2]] if match else value
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ValueError(f"{value!r} is not a size from {low} to {high} bytes; write bytes or for example 512MiB")
        return number

    return read


def choice(*choices: str) -> Callable[[object], str]:
    """A reader of one word out of a few."""

    def read(value: object) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is none of: {', '.join(choices)}")
        return str(value)

    return read


def flag(value: object) -> bool:
    """true or false, also as the words that environment variables carry."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def several(item: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    """A reader of a list, or of text separated by commas."""

    def read(value: object) -> tuple[T, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError(f"{value!r} is not a list")
        return tuple(item(part) for part in value)

    return read


def port_range(value: object) -> tuple[int, int]:
    """`FIRST-LAST`, both included."""
    match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text(value))
    if match is None or not 1_024 <= int(match[1]) <= int(match[2]) <= 65_535:
        raise ValueError(f"{value!r} is not a range of ports; write FIRST-LAST with ports from 1024 to 65535")
    return (int(match[1]), int(match[2]))
