"""Strict positional codec: frozen dataclasses to msgpack and back, derived from their type hints.

A framed message is one byte of kind and then the msgpack array of its fields in the order of declaration.  Every
value is checked against its type and bounds in both directions: what we would refuse from a peer we do not send.
Fields are never renumbered; new ones go at the end with a default.  A decoder skips trailing fields that it does not
know and gives missing trailing fields their defaults, so agents of different minor versions understand one another.
`swarmsched.wire.shapes` says which types of fields are understood.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgpack  # type: ignore[import-untyped]  # ships neither stubs nor py.typed

from swarmsched.errors import LocalProtocolError, RemoteProtocolError
from swarmsched.wire.problem import Problem
from swarmsched.wire.shapes import shape_of

HIGHEST_KIND = 255

T = TypeVar("T")


class Codec:
    """Frames messages of a closed set of kinds.  Kind numbers are 1 to 255 and are part of the protocol.

    The code for a class is made when the first message of it comes or goes: an idle agent needs a third of them.
    """

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
        try:
            return prefix + _to_msgpack(shape_of(cls).pack(message))
        except Problem as problem:
            raise LocalProtocolError(str(problem), kind=cls.__name__) from None

    def decode(self, data: bytes) -> object:
        """The message in `data`; RemoteProtocolError naming kind, field and problem for anything malformed."""
        if not data:
            raise RemoteProtocolError("the message is empty")
        cls = self._kinds.get(data[0])
        if cls is None:
            raise RemoteProtocolError(f"unknown message kind {data[0]}")
        try:
            return cast("object", shape_of(cls).unpack(_from_msgpack(data[1:])))
        except Problem as problem:
            raise RemoteProtocolError(str(problem), kind=cls.__name__) from None


def encode_value(cls: type[T], value: T) -> bytes:
    """Bytes of one dataclass whose class the reader knows (durable entries); LocalProtocolError out of bounds."""
    try:
        return _to_msgpack(_pack_exactly(cls, value))
    except Problem as problem:
        raise LocalProtocolError(str(problem), kind=cls.__name__) from None


def decode_value(cls: type[T], data: bytes) -> T:
    """Inverse of `encode_value`; RemoteProtocolError if the bytes are not such a value."""
    try:
        return cast("T", shape_of(cls).unpack(_from_msgpack(data)))
    except Problem as problem:
        raise RemoteProtocolError(str(problem), kind=cls.__name__) from None


def pack(value: object) -> list[Any]:
    """The plain list (numbers, strings, lists, dicts) of a dataclass; LocalProtocolError out of bounds."""
    try:
        return cast("list[Any]", shape_of(type(value)).pack(value))
    except Problem as problem:
        raise LocalProtocolError(str(problem), kind=type(value).__name__) from None


def unpack(cls: type[T], plain: object) -> T:
    """Inverse of `pack`; RemoteProtocolError if the list is not such a value."""
    try:
        return cast("T", shape_of(cls).unpack(plain))
    except Problem as problem:
        raise RemoteProtocolError(str(problem), kind=cls.__name__) from None


def _to_msgpack(plain: object) -> bytes:
    try:
        return cast("bytes", msgpack.packb(plain))
    except (ValueError, OverflowError) as error:  # lone surrogates, numbers beyond 64 bits
        raise Problem(f"cannot be packed: {error}") from None


def _from_msgpack(data: bytes) -> object:
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except msgpack.StackError:
        raise Problem("nested too deeply") from None
    except msgpack.ExtraData:
        raise Problem("bytes follow the end of the message") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Problem(f"not well-formed msgpack, or cut short: {error}") from None


def _pack_exactly(cls: type, value: object) -> object:
    if type(value) is not cls:
        raise Problem(f"expected {cls.__name__}, got {type(value).__name__}")
    return shape_of(cls).pack(value)
