"""Strict positional codec: frozen dataclasses to msgpack and back, derived from their type hints.

A framed message is one byte of kind and then the msgpack array of its fields in the order of declaration.  Every
value is checked against its type and bounds in both directions: what we would refuse from a peer we do not send.
Fields are never renumbered; new ones go at the end with a default.  A decoder skips trailing fields that it does not
know and gives missing trailing fields their defaults, so agents of different minor versions understand one another.

Understood types: int, float, str, bytes, bool, Enum (by value), NewType, T | None, tuple[T, ...], fixed tuples,
Mapping[str, T], nested dataclasses, and Annotated forms of these with `Range` and `MaxLength`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import MemberDescriptorType, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]  # ships neither stubs nor py.typed

from swarmsched.errors import LocalProtocolError, RemoteProtocolError, SwarmError
from swarmsched.fields import MaxLength, Range

UNBOUNDED_LENGTH = 65_536
"""Limit of a str, bytes, tuple or mapping whose type names none."""

UNBOUNDED_INTEGER = Range(-(2**63), 2**64 - 1)
"""What msgpack can hold; the range of an int whose type names none."""

HIGHEST_KIND = 255

T = TypeVar("T")
Convert = Callable[[Any], Any]


class Codec:
    """Frames messages of a closed set of kinds.  Kind numbers are 1 to 255 and are part of the protocol."""

    def __init__(self, kinds: Mapping[int, type]) -> None:
        for kind, cls in kinds.items():
            if not 1 <= kind <= HIGHEST_KIND:
                raise LocalProtocolError(f"kind number {kind} of {cls.__name__} is outside 1..{HIGHEST_KIND}")
        self._kinds = dict(kinds)
        self._decoders = {kind: (cls.__name__, _shape(cls).unpack) for kind, cls in kinds.items()}
        self._encoders = {cls: (bytes([kind]), _shape(cls).pack) for kind, cls in kinds.items()}
        if len(self._encoders) != len(self._decoders):
            raise LocalProtocolError("a class has two kind numbers")

    @property
    def kinds(self) -> Mapping[int, type]:
        """Kind numbers and their classes."""
        return self._kinds

    def encode(self, message: object) -> bytes:
        """Bytes of a message; LocalProtocolError if its class is not registered or a value is out of bounds."""
        cls = type(message)
        encoder = self._encoders.get(cls)
        if encoder is None:
            raise LocalProtocolError("this class has no kind number here", kind=cls.__name__)
        prefix, pack_message = encoder
        try:
            return prefix + _to_msgpack(pack_message(message))
        except _Problem as problem:
            raise LocalProtocolError(str(problem), kind=cls.__name__) from None

    def decode(self, data: bytes) -> object:
        """The message in `data`; RemoteProtocolError naming kind, field and problem for anything malformed."""
        if not data:
            raise RemoteProtocolError("the message is empty")
        decoder = self._decoders.get(data[0])
        if decoder is None:
            raise RemoteProtocolError(f"unknown message kind {data[0]}")
        name, unpack_message = decoder
        try:
            return unpack_message(_from_msgpack(data[1:]))
        except _Problem as problem:
            raise RemoteProtocolError(str(problem), kind=name) from None


def encode_value(cls: type[T], value: T) -> bytes:
    """Bytes of one dataclass whose class the reader knows (durable entries); LocalProtocolError out of bounds."""
    try:
        return _to_msgpack(_pack_exactly(cls, value))
    except _Problem as problem:
        raise LocalProtocolError(str(problem), kind=cls.__name__) from None


def decode_value(cls: type[T], data: bytes) -> T:
    """Inverse of `encode_value`; RemoteProtocolError if the bytes are not such a value."""
    try:
        return cast("T", _shape(cls).unpack(_from_msgpack(data)))
    except _Problem as problem:
        raise RemoteProtocolError(str(problem), kind=cls.__name__) from None


def pack(value: object) -> list[Any]:
    """The plain list (numbers, strings, lists, dicts) of a dataclass; LocalProtocolError out of bounds."""
    try:
        return cast("list[Any]", _shape(type(value)).pack(value))
    except _Problem as problem:
        raise LocalProtocolError(str(problem), kind=type(value).__name__) from None


def unpack(cls: type[T], plain: object) -> T:
    """Inverse of `pack`; RemoteProtocolError if the list is not such a value."""
    try:
        return cast("T", _shape(cls).unpack(plain))
    except _Problem as problem:
        raise RemoteProtocolError(str(problem), kind=cls.__name__) from None


class _Problem(Exception):
    """What is wrong with a value; the path to it grows on the way up."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path = ""

    def within(self, step: str) -> "_Problem":
        """The same problem seen from one level further out."""
        self.path = f"{step}{'' if not self.path or self.path.startswith('[') else '.'}{self.path}"
        return self

    def __str__(self) -> str:
        return f"{self.path}: {self.args[0]}" if self.path else str(self.args[0])


class _Shape(NamedTuple):
    """How a type goes to plain values (`pack`) and comes back (`unpack`)."""

    pack: Convert
    unpack: Convert


def _to_msgpack(plain: object) -> bytes:
    try:
        return cast("bytes", msgpack.packb(plain))
    except (ValueError, OverflowError) as error:  # lone surrogates, numbers beyond 64 bits
        raise _Problem(f"cannot be packed: {error}") from None


def _from_msgpack(data: bytes) -> object:
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except msgpack.StackError:
        raise _Problem("nested too deeply") from None
    except msgpack.ExtraData:
        raise _Problem("bytes follow the end of the message") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _Problem(f"not well-formed msgpack, or cut short: {error}") from None


def _pack_exactly(cls: type, value: object) -> object:
    if type(value) is not cls:
        raise _Problem(f"expected {cls.__name__}, got {type(value).__name__}")
    return _shape(cls).pack(value)


def _compile_dataclass(cls: type) -> _Shape:
    """Compile a dataclass once; TypeError if a field's type is not understood (a bug in the declaration)."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    declared = fields(cls)
    for each in declared:
        if not each.init or each.kw_only:
            raise TypeError(f"{cls.__name__}.{each.name} must be a positional init field")
    names = tuple(each.name for each in declared)
    shapes = [_compile(hints[name], f"{cls.__name__}.{name}") for name in names]
    required = sum(1 for each in declared if each.default is MISSING and each.default_factory is MISSING)
    return _Shape(
        _dataclass_packer(cls, names, tuple(shape.pack for shape in shapes)),
        _dataclass_unpacker(cls, names, tuple(shape.unpack for shape in shapes), required),
    )


_shape: Callable[[type], _Shape] = cache(_compile_dataclass)  # at most one entry per declared class


def _dataclass_packer(cls: type, names: tuple[str, ...], packers: tuple[Convert, ...]) -> Convert:
    read: Convert = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, n) for n in names)

    def pack_fields(value: Any) -> list[Any]:
        if type(value) is not cls:
            raise _Problem(f"expected {cls.__name__}, got {type(value).__name__}")
        items = read(value)
        try:
            return [pack_field(item) for pack_field, item in zip(packers, items, strict=True)]
        except _Problem:
            raise _locate(names, packers, items) from None

    return pack_fields


def _dataclass_unpacker(cls: type, names: tuple[str, ...], unpackers: tuple[Convert, ...], required: int) -> Convert:
    build = _builder(cls, names)

    def unpack_fields(plain: Any) -> Any:
        if type(plain) is not list:
            raise _Problem(f"expected the fields of {cls.__name__}, got {_say(plain)}")
        if len(plain) < required:
            raise _Problem(f"field {names[len(plain)]} is missing")
        try:
            # Not strict: fields of a newer peer are skipped, those that an older one lacks take their defaults.
            values = [unpack_field(item) for unpack_field, item in zip(unpackers, plain, strict=False)]
        except _Problem:
            raise _locate(names, unpackers, plain) from None
        return build(values)

    return unpack_fields


def _locate(names: tuple[str, ...], converts: tuple[Convert, ...], items: Any) -> _Problem:
    """The problem again, with the name of its field: only failures pay for the name."""
    for name, convert, item in zip(names, converts, items, strict=False):
        try:
            convert(item)
        except _Problem as problem:
            return problem.within(name)
    raise AssertionError("a conversion failed once and not again")


def _builder(cls: type, names: tuple[str, ...]) -> Convert:
    """How to make an object of its values: the quick way if the class has slots and no rules of its own.

    The generated `__init__` of a frozen dataclass looks every attribute up twice; filling the slots directly takes
    a third of the time, and decoding is mostly this.
    """
    if hasattr(cls, "__post_init__"):
        return lambda values: _checked(cls, values)
    if not all(isinstance(cls.__dict__.get(name), MemberDescriptorType) for name in names):
        return lambda values: cls(*values)
    setters = tuple(cls.__dict__[name].__set__ for name in names)
    count = len(names)
    new = cast("Convert", cls.__new__)

    def build(values: list[Any]) -> Any:
        if len(values) < count:
            return cls(*values)
        made = new(cls)
        for set_field, value in zip(setters, values, strict=True):
            set_field(made, value)
        return made

    return build


def _checked(cls: type, values: list[Any]) -> Any:
    try:
        return cls(*values)
    except (ValueError, TypeError, SwarmError) as error:  # the dataclass' own rules, in its __post_init__
        raise _Problem(f"not a valid {cls.__name__}: {error}") from None


def _compile(hint: Any, where: str) -> _Shape:
    """The shape of any understood type."""
    bounds: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            hint, *extra = get_args(hint)
            bounds = (*extra, *bounds)  # the outermost bound comes last and wins
        elif isinstance(hint, NewType):
            hint = hint.__supertype__
        else:
            break
    limit = next((each.limit for each in reversed(bounds) if isinstance(each, MaxLength)), UNBOUNDED_LENGTH)
    span = next((each for each in reversed(bounds) if isinstance(each, Range)), None)
    origin = get_origin(hint)
    if origin is not None:
        return _compile_generic(hint, origin, limit, where)
    if hint is int:
        return _integer(span or UNBOUNDED_INTEGER)
    if hint is float:
        return _number(span)
    if hint is bool:
        return _boolean()
    if hint is str or hint is bytes:
        return _sized(hint, limit)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enumeration(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _shape(hint)
    raise TypeError(f"{where}: the codec does not understand {hint!r}")


def _compile_generic(hint: Any, origin: Any, limit: int, where: str) -> _Shape:
    arguments = get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_compile(arguments[0], where), limit)
    if origin is tuple:
        return _fixed_tuple(tuple(_compile(each, where) for each in arguments))
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        return _optional(_compile(next(each for each in arguments if each is not NoneType), where))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_compile(arguments[0], where), _compile(arguments[1], where), limit)
    raise TypeError(f"{where}: the codec does not understand {hint!r}")


def _integer(span: Range) -> _Shape:
    low, high = span.low, span.high

    def check(value: Any) -> Any:
        if type(value) is int and low <= value <= high:
            return value
        raise _wrong(value, "an integer", int, f"{low}..{high}")

    def pack_integer(value: Any) -> Any:
        is_named = type(value) is not int and isinstance(value, int) and not isinstance(value, bool)
        return check(int(value) if is_named else value)  # an IntEnum or IntFlag travels as its number

    return _Shape(pack_integer, check)


def _number(span: Range | None) -> _Shape:
    low, high = (span.low, span.high) if span else (-math.inf, math.inf)

    def unpack_number(value: Any) -> Any:
        # NaN fails the comparison; infinities pass it only where no range is declared.
        if type(value) is float and low <= value <= high and (span is not None or math.isfinite(value)):
            return value
        raise _wrong(value, "a finite number", float, f"{low}..{high}")

    def pack_number(value: Any) -> Any:
        if type(value) is not float and isinstance(value, int | float) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                raise _Problem("is too large for a float") from None
        return unpack_number(value)

    return _Shape(pack_number, unpack_number)


def _boolean() -> _Shape:
    def check(value: Any) -> Any:
        if value is True or value is False:
            return value
        raise _Problem(f"expected true or false, got {_say(value)}")

    return _Shape(check, check)


def _sized(kind: Any, limit: int) -> _Shape:
    def check(value: Any) -> Any:
        if type(value) is kind and len(value) <= limit:
            return value
        if type(value) is kind:
            raise _Problem(f"length {len(value)} exceeds {limit}")
        raise _Problem(f"expected {kind.__name__}, got {_say(value)}")

    return _Shape(check, check)


def _enumeration(cls: type[Enum]) -> _Shape:
    members = {(type(each.value), each.value): each for each in cls}
    values = {each: each.value for each in cls}

    def pack_member(value: Any) -> Any:
        if type(value) is cls:
            return values[value]
        raise _Problem(f"expected {cls.__name__}, got {_say(value)}")

    def unpack_member(value: Any) -> Any:
        # The type is part of the key since True == 1 == 1.0; lists and dicts cannot be keys.
        if type(value) is str or type(value) is int:
            member = members.get((type(value), value))
            if member is not None:
                return member
        raise _Problem(f"expected a {cls.__name__}, got {_say(value)}")

    return _Shape(pack_member, unpack_member)


def _optional(inner: _Shape) -> _Shape:
    pack_inner, unpack_inner = inner
    return _Shape(
        lambda value: None if value is None else pack_inner(value),
        lambda value: None if value is None else unpack_inner(value),
    )


def _sequence(inner: _Shape, limit: int) -> _Shape:
    def convert(value: Any, kind: Any, one: Convert) -> list[Any]:
        if type(value) is not kind:
            raise _Problem(f"expected a sequence, got {_say(value)}")
        if len(value) > limit:
            raise _Problem(f"{len(value)} items exceed {limit}")
        done: list[Any] = []
        try:
            for item in value:
                done.append(one(item))  # noqa: PERF401  # the count done names the item at fault
        except _Problem as problem:
            raise problem.within(f"[{len(done)}]") from None
        return done

    pack_inner, unpack_inner = inner
    return _Shape(
        lambda value: convert(value, tuple, pack_inner), lambda value: tuple(convert(value, list, unpack_inner))
    )


def _fixed_tuple(inner: tuple[_Shape, ...]) -> _Shape:
    def convert(value: Any, kind: Any, ones: tuple[Convert, ...]) -> list[Any]:
        if type(value) is not kind or len(value) != len(ones):
            raise _Problem(f"expected {len(ones)} items, got {_say(value)}")
        done: list[Any] = []
        try:
            for one, item in zip(ones, value, strict=True):
                done.append(one(item))
        except _Problem as problem:
            raise problem.within(f"[{len(done)}]") from None
        return done

    packers, unpackers = tuple(each.pack for each in inner), tuple(each.unpack for each in inner)
    return _Shape(lambda value: convert(value, tuple, packers), lambda value: tuple(convert(value, list, unpackers)))


def _mapping(key: _Shape, inner: _Shape, limit: int) -> _Shape:
    def convert(value: Any, one_key: Convert, one: Convert) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _Problem(f"expected a mapping, got {_say(value)}")
        if len(value) > limit:
            raise _Problem(f"{len(value)} entries exceed {limit}")
        done: dict[Any, Any] = {}
        for name, item in value.items():
            try:
                done[one_key(name)] = one(item)
            except _Problem as problem:
                raise problem.within(f"[{str(name)[:40]!r}]") from None
        return done

    return _Shape(
        lambda value: convert(value, key.pack, inner.pack), lambda value: convert(value, key.unpack, inner.unpack)
    )


def _wrong(value: Any, expected: str, kind: type, span: str) -> _Problem:
    if type(value) is kind:
        return _Problem(f"{_say(value)} is not within {span}")
    return _Problem(f"expected {expected}, got {_say(value)}")


def _say(value: Any) -> str:
    """A short picture of an arbitrary value: never its whole text."""
    if isinstance(value, bool | int | float) or value is None:
        return str(value)[:40]
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, bytes | list | tuple | dict):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__
