"""Strict positional codec: `fields.Value` structs to msgpack and back, by msgspec.

A framed message is one byte of kind and then the msgpack array of its fields in the order of declaration.  Every
value is checked against its type and bounds in both directions: what we would refuse from a peer we do not send.
Fields are never renumbered; new ones go at the end with a default.  A decoder skips trailing fields that it does not
know and gives missing trailing fields their defaults, so agents of different minor versions understand one another.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from msgspec import ValidationError
from msgspec.inspect import DictType, NoneType, StructType, TupleType, Type, UnionType, VarTupleType, type_info
from msgspec.msgpack import Decoder, Encoder

from swarmsched.errors import LocalProtocolError, RemoteProtocolError

HIGHEST_KIND = 255

T = TypeVar("T")

_encode: Callable[[object], bytes] = Encoder().encode
_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]")
_TOO_SHORT = re.compile(r"^Expected `array` of at least length \d+, got (\d+)")


class Codec:
    """Frames messages of a closed set of kinds.  Kind numbers are 1 to 255 and are part of the protocol."""

    def __init__(self, kinds: Mapping[int, type]) -> None:
        for kind, cls in kinds.items():
            if not 1 <= kind <= HIGHEST_KIND:
                raise LocalProtocolError(f"kind number {kind} of {cls.__name__} is outside 1..{HIGHEST_KIND}")
        self._kinds = dict(kinds)
        self._prefixes = {cls: bytes([kind]) for kind, cls in kinds.items()}
        if len(self._prefixes) != len(self._kinds):
            raise LocalProtocolError("a class has two kind numbers")

    @property
    def kinds(self) -> Mapping[int, type]:
        """Kind numbers and their classes."""
        return self._kinds

    def encode(self, message: object) -> bytes:
        """Bytes of a message; LocalProtocolError if its class is not registered or a value is out of bounds."""
        cls = type(message)
        prefix = self._prefixes.get(cls)
        if prefix is None:
            raise LocalProtocolError("this class has no kind number here", kind=cls.__name__)
        return prefix + encode_value(cls, message)

    def decode(self, data: bytes) -> object:
        """The message in `data`; RemoteProtocolError naming kind, field and problem for anything malformed."""
        if not data:
            raise RemoteProtocolError("the message is empty")
        cls = self._kinds.get(data[0])
        if cls is None:
            raise RemoteProtocolError(f"unknown message kind {data[0]}")
        return cast("object", decode_value(cls, data[1:]))


def encode_value(cls: type[T], value: T) -> bytes:
    """Bytes of one value whose class the reader knows; LocalProtocolError out of bounds, as its reader would find."""
    if type(value) is not cls:
        raise LocalProtocolError(f"expected {cls.__name__}, got {type(value).__name__}", kind=cls.__name__)
    try:
        data = _encode(value)
        _decoder(cls)(data)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(_problem(cls, error), kind=cls.__name__) from None
    return data


def decode_value(cls: type[T], data: bytes) -> T:
    """Inverse of `encode_value`; RemoteProtocolError if the bytes are not such a value."""
    try:
        return cast("T", _decoder(cls)(data))
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(_problem(cls, error), kind=cls.__name__) from None


# At most one entry per declared class, made when the first value of it comes or goes.
_decoder: Callable[[type], Callable[[bytes], Any]] = cache(lambda cls: Decoder(cls).decode)


_layout: Callable[[type], Type] = cache(type_info)  # takes 2 ms, and a peer may be wrong often

# --- errors: msgspec counts places, people want names


def _problem(cls: type, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, ValidationError):
        return _named(cls, str(error))
    if "trailing characters" in str(error):
        return "bytes follow the end of the message"
    return f"not well-formed msgpack, or cut short: {error}"


def _named(cls: type, text: str) -> str:
    """`Expected ... - at $[9][0]` with the names of fields in the place of their numbers."""
    found = _PATH.search(text)
    problem, steps = (text[: found.start()], _STEP.findall(found[1])) if found else (text, [])
    path, place = "", _layout(cls)
    for step in steps:
        name, place = _part(place, step)
        path += name
    place = _present(place)
    too_short = _TOO_SHORT.match(problem)
    if too_short and isinstance(place, StructType):
        problem = f"field {place.fields[int(too_short[1])].name} is missing"
    return f"{path.removeprefix('.')}: {problem}" if path else problem


def _part(place: Type, step: str) -> tuple[str, Type]:
    """How to write a step into this type, and the type that it leads to."""
    match _present(place):
        case StructType(fields=fields):
            return f".{fields[int(step)].name}", fields[int(step)].type
        case TupleType(item_types=types):
            return f"[{step}]", types[int(step)]
        case VarTupleType(item_type=inner) | DictType(value_type=inner):
            return f"[{step}]", inner
    return f"[{step}]", place


def _present(place: Type) -> Type:
    """The other one of an optional type."""
    options = place.types if isinstance(place, UnionType) else (place,)
    return next(each for each in options if not isinstance(each, NoneType))
