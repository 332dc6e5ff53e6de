"""Shapes of the values that fields hold: checked conversions, each with its check as source code."""

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from swarmsched.fields import Range
from swarmsched.wire.problem import Problem, say, wrong
from swarmsched.wire.shape import Bind, Convert, Quick, Shape


def _if(condition: str, sound: str, otherwise: Convert) -> Quick:
    """Source of `sound` where the condition holds, and of the checked conversion elsewhere; `v` is the variable."""
    return lambda variable, bind: (
        f"({sound.format(v=variable)} if {condition.format(v=variable)} else {bind(otherwise)}({variable}))"
    )


def integer(span: Range) -> Shape:
    """Whole numbers within bounds; an IntEnum or IntFlag travels as its number."""
    low, high = span.low, span.high

    def check(value: Any) -> Any:
        if type(value) is int and low <= value <= high:
            return value
        raise wrong(value, "an integer", int, f"{low}..{high}")

    def pack_integer(value: Any) -> Any:
        is_named = type(value) is not int and isinstance(value, int) and not isinstance(value, bool)
        return check(int(value) if is_named else value)

    condition = f"type({{v}}) is int and {low} <= {{v}} <= {high}"
    return Shape(pack_integer, check, _if(condition, "{v}", pack_integer), _if(condition, "{v}", check))


def number(span: Range | None) -> Shape:
    """Finite floats within bounds; whole numbers are packed as floats."""
    low, high = (span.low, span.high) if span else (-sys.float_info.max, sys.float_info.max)

    def unpack_number(value: Any) -> Any:
        if type(value) is float and low <= value <= high:  # NaN fails the comparison
            return value
        raise wrong(value, "a finite number", float, f"{low}..{high}")

    def pack_number(value: Any) -> Any:
        if type(value) is not float and isinstance(value, int | float) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                raise Problem("is too large for a float") from None
        return unpack_number(value)

    condition = f"type({{v}}) is float and {float(low)!r} <= {{v}} <= {float(high)!r}"
    return Shape(pack_number, unpack_number, _if(condition, "{v}", pack_number), _if(condition, "{v}", unpack_number))


def boolean() -> Shape:
    """True and false, and nothing that equals them."""

    def check(value: Any) -> Any:
        if value is True or value is False:
            return value
        raise Problem(f"expected true or false, got {say(value)}")

    quick = _if("{v} is True or {v} is False", "{v}", check)
    return Shape(check, check, quick, quick)


def sized(kind: Any, limit: int) -> Shape:
    """str or bytes of at most `limit` characters or bytes."""

    def check(value: Any) -> Any:
        if type(value) is kind and len(value) <= limit:
            return value
        if type(value) is kind:
            raise Problem(f"length {len(value)} exceeds {limit}")
        raise Problem(f"expected {kind.__name__}, got {say(value)}")

    quick = _if(f"type({{v}}) is {kind.__name__} and len({{v}}) <= {limit}", "{v}", check)
    return Shape(check, check, quick, quick)


def enumeration(cls: type[Enum]) -> Shape:
    """Members by their values."""
    members = {each.value: each for each in cls}
    kinds = {type(each.value) for each in cls}

    def pack_member(value: Any) -> Any:
        if type(value) is cls:
            return value.value
        raise Problem(f"expected {cls.__name__}, got {say(value)}")

    def unpack_member(value: Any) -> Any:
        # The type is asked first since True == 1 == 1.0, and lists and dicts cannot be keys.
        if type(value) in kinds and value in members:
            return members[value]
        raise Problem(f"expected a {cls.__name__}, got {say(value)}")

    def quick_pack(variable: str, bind: Bind) -> str:
        return f"({variable}._value_ if type({variable}) is {bind(cls)} else {bind(pack_member)}({variable}))"

    def quick_unpack(variable: str, bind: Bind) -> str:
        known = bind(members)
        is_sound = f"type({variable}) in {bind(kinds)} and {variable} in {known}"
        return f"({known}[{variable}] if {is_sound} else {bind(unpack_member)}({variable}))"

    return Shape(pack_member, unpack_member, quick_pack, quick_unpack)


def optional(inner: Shape) -> Shape:
    """None, or what `inner` understands."""
    return Shape(
        lambda value: None if value is None else inner.pack(value),
        lambda value: None if value is None else inner.unpack(value),
        lambda variable, bind: f"(None if {variable} is None else {inner.pack_source(variable, bind)})",
        lambda variable, bind: f"(None if {variable} is None else {inner.unpack_source(variable, bind)})",
    )


def sequence(inner: Shape, limit: int) -> Shape:
    """Tuples of any length up to the limit, lists on the wire."""

    def convert(value: Any, kind: Any, one: Convert) -> list[Any]:
        if type(value) is not kind:
            raise Problem(f"expected a sequence, got {say(value)}")
        if len(value) > limit:
            raise Problem(f"{len(value)} items exceed {limit}")
        done: list[Any] = []
        try:
            for item in value:
                done.append(one(item))  # noqa: PERF401  # the count done names the item at fault
        except Problem as problem:
            raise problem.within(f"[{len(done)}]") from None
        return done

    def pack_sequence(value: Any) -> list[Any]:
        return convert(value, tuple, inner.pack)

    def unpack_sequence(value: Any) -> tuple[Any, ...]:
        return tuple(convert(value, list, inner.unpack))

    def quick_pack(variable: str, bind: Bind) -> str:
        items = f"[{inner.pack_source(variable + 'i', bind)} for {variable}i in {variable}]"
        return _if(f"type({{v}}) is tuple and len({{v}}) <= {limit}", items, pack_sequence)(variable, bind)

    def quick_unpack(variable: str, bind: Bind) -> str:
        items = f"tuple([{inner.unpack_source(variable + 'i', bind)} for {variable}i in {variable}])"
        return _if(f"type({{v}}) is list and len({{v}}) <= {limit}", items, unpack_sequence)(variable, bind)

    return Shape(pack_sequence, unpack_sequence, quick_pack, quick_unpack)


def fixed_tuple(inner: tuple[Shape, ...]) -> Shape:
    """Tuples with one shape for each place."""

    def convert(value: Any, kind: Any, ones: tuple[Convert, ...]) -> list[Any]:
        if type(value) is not kind or len(value) != len(ones):
            raise Problem(f"expected {len(ones)} items, got {say(value)}")
        done: list[Any] = []
        try:
            for one, item in zip(ones, value, strict=True):
                done.append(one(item))
        except Problem as problem:
            raise problem.within(f"[{len(done)}]") from None
        return done

    packers, unpackers = tuple(each.pack for each in inner), tuple(each.unpack for each in inner)
    return Shape(lambda value: convert(value, tuple, packers), lambda value: tuple(convert(value, list, unpackers)))


def mapping(key: Shape, inner: Shape, limit: int) -> Shape:
    """Mappings of at most `limit` entries, dictionaries on the wire."""

    def convert(value: Any, one_key: Convert, one: Convert) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise Problem(f"expected a mapping, got {say(value)}")
        if len(value) > limit:
            raise Problem(f"{len(value)} entries exceed {limit}")
        done: dict[Any, Any] = {}
        for name, item in value.items():
            try:
                done[one_key(name)] = one(item)
            except Problem as problem:
                raise problem.within(f"[{str(name)[:40]!r}]") from None
        return done

    return Shape(
        lambda value: convert(value, key.pack, inner.pack), lambda value: convert(value, key.unpack, inner.unpack)
    )
