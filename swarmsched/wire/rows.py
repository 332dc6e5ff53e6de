"""Dataclasses to lists of their fields and back.

Sound values pass through code that is generated once for each class and checks all fields in a few lines: encoding
and decoding are most of what an idle agent does.  Anything else goes field by field, to find out what is wrong.
"""

from dataclasses import MISSING, Field
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any, cast

from swarmsched.errors import SwarmError
from swarmsched.wire.problem import Problem, say
from swarmsched.wire.shape import Convert, Namespace, Shape


def row(cls: type, declared: tuple[Field[Any], ...], shapes: tuple[Shape, ...]) -> Shape:
    """The shape of a dataclass with these fields."""
    names = tuple(each.name for each in declared)
    required = sum(1 for each in declared if each.default is MISSING and each.default_factory is MISSING)
    pack_slowly = _packer(cls, names, tuple(shape.pack for shape in shapes))
    unpack_slowly = _unpacker(cls, names, tuple(shape.unpack for shape in shapes), required)
    return Shape(_quick_packer(cls, names, shapes, pack_slowly), _quick_unpacker(cls, names, shapes, unpack_slowly))


def _quick_packer(cls: type, names: tuple[str, ...], shapes: tuple[Shape, ...], slowly: Convert) -> Convert:
    space = Namespace()
    variables = [f"f{number}" for number in range(len(names))]
    packed = [shape.pack_source(name, space.bind) for name, shape in zip(variables, shapes, strict=True)]
    return space.function(
        f"pack_{cls.__name__}",
        [
            f"if type(value) is {space.bind(cls)}:",
            "    try:",
            *(f"        {variable} = value.{name}" for variable, name in zip(variables, names, strict=True)),
            f"        return [{', '.join(packed)}]",
            f"    except {space.bind(Problem)}:",
            "        pass",
            f"return {space.bind(slowly)}(value)",
        ],
    )


def _quick_unpacker(cls: type, names: tuple[str, ...], shapes: tuple[Shape, ...], slowly: Convert) -> Convert:
    if not _is_plain(cls, names):
        return slowly
    space = Namespace()
    variables = [f"f{number}" for number in range(len(names))]
    unpacked = [shape.unpack_source(name, space.bind) for name, shape in zip(variables, shapes, strict=True)]
    setters = [space.bind(cls.__dict__[name].__set__) for name in names]
    return space.function(
        f"unpack_{cls.__name__}",
        [
            f"if type(value) is list and len(value) == {len(names)}:",
            "    try:",
            f"        [{', '.join(variables)}] = value",
            f"        made = {space.bind(cls.__new__)}({space.bind(cls)})",
            *(f"        {set_field}(made, {source})" for set_field, source in zip(setters, unpacked, strict=True)),
            "        return made",
            f"    except {space.bind(Problem)}:",
            "        pass",
            f"return {space.bind(slowly)}(value)",
        ],
    )


def _is_plain(cls: type, names: tuple[str, ...]) -> bool:
    """True if the slots may be filled directly: there are some, and the class has no rules of its own.

    The generated `__init__` of a frozen dataclass looks every attribute up twice, which takes three times as long.
    """
    has_slots = all(isinstance(cls.__dict__.get(name), MemberDescriptorType) for name in names)
    return has_slots and not hasattr(cls, "__post_init__")


# --- field by field


def _packer(cls: type, names: tuple[str, ...], packers: tuple[Convert, ...]) -> Convert:
    read: Convert = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, n) for n in names)

    def pack_fields(value: Any) -> list[Any]:
        if type(value) is not cls:
            raise Problem(f"expected {cls.__name__}, got {type(value).__name__}")
        return _each(names, packers, read(value))

    return pack_fields


def _unpacker(cls: type, names: tuple[str, ...], unpackers: tuple[Convert, ...], required: int) -> Convert:
    def unpack_fields(plain: Any) -> Any:
        if type(plain) is not list:
            raise Problem(f"expected the fields of {cls.__name__}, got {say(plain)}")
        if len(plain) < required:
            raise Problem(f"field {names[len(plain)]} is missing")
        values = _each(names, unpackers, plain)
        try:
            return cls(*values)
        except (ValueError, TypeError, SwarmError) as error:  # the dataclass' own rules, in its __post_init__
            raise Problem(f"not a valid {cls.__name__}: {error}") from None

    return unpack_fields


def _each(names: tuple[str, ...], converts: tuple[Convert, ...], items: Any) -> list[Any]:
    """All of them.  Fields of a newer peer are skipped; those that an older one lacks take their defaults."""
    done: list[Any] = []
    try:
        for convert, item in zip(converts, cast("list[Any]", items), strict=False):
            done.append(convert(item))  # the count done names the field at fault
    except Problem as problem:
        raise problem.within(names[len(done)]) from None
    return done
