"""Which shape a type has: the codec's reading of type hints.

Understood types: int, float, str, bytes, bool, Enum (by value), NewType, T | None, tuple[T, ...], fixed tuples,
Mapping[str, T], nested dataclasses, and Annotated forms of these with `Range` and `MaxLength`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

from swarmsched.fields import MaxLength, Range
from swarmsched.wire import values
from swarmsched.wire.rows import row
from swarmsched.wire.shape import Shape

UNBOUNDED_LENGTH = 65_536
"""Limit of a str, bytes, tuple or mapping whose type names none."""

UNBOUNDED_INTEGER = Range(-(2**63), 2**64 - 1)
"""What msgpack can hold; the range of an int whose type names none."""


def _compile_dataclass(cls: type) -> Shape:
    """Compile a dataclass once; TypeError if a field's type is not understood (a bug in the declaration)."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    declared = fields(cls)
    for each in declared:
        if not each.init or each.kw_only:
            raise TypeError(f"{cls.__name__}.{each.name} must be a positional init field")
    return row(cls, declared, tuple(_compile(hints[each.name], f"{cls.__name__}.{each.name}") for each in declared))


shape_of: Callable[[type], Shape] = cache(_compile_dataclass)  # at most one entry per declared class


def _compile(hint: Any, where: str) -> Shape:
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
        return values.integer(span or UNBOUNDED_INTEGER)
    if hint is float:
        return values.number(span)
    if hint is bool:
        return values.boolean()
    if hint is str or hint is bytes:
        return values.sized(hint, limit)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return values.enumeration(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return shape_of(hint)
    raise TypeError(f"{where}: the codec does not understand {hint!r}")


def _compile_generic(hint: Any, origin: Any, limit: int, where: str) -> Shape:
    arguments = get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return values.sequence(_compile(arguments[0], where), limit)
    if origin is tuple:
        return values.fixed_tuple(tuple(_compile(each, where) for each in arguments))
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        return values.optional(_compile(next(each for each in arguments if each is not NoneType), where))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return values.mapping(_compile(arguments[0], where), _compile(arguments[1], where), limit)
    raise TypeError(f"{where}: the codec does not understand {hint!r}")
