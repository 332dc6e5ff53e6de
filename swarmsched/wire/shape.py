"""What the codec makes of a type: two conversions, and source code of the same for values that are sound."""

from collections.abc import Callable
from typing import Any, NamedTuple

Convert = Callable[[Any], Any]

Bind = Callable[[object], str]
"""Makes an object known to generated code and gives the name that it has there."""

Quick = Callable[[str, Bind], str]
"""From the name of a variable to an expression of its converted value; the expression raises Problem if it can't."""


class Shape(NamedTuple):
    """How a type goes to plain values (`pack`) and comes back (`unpack`); both raise Problem and say where."""

    pack: Convert
    unpack: Convert
    quick_pack: Quick | None = None
    quick_unpack: Quick | None = None

    def pack_source(self, variable: str, bind: Bind) -> str:
        """An expression that packs this variable."""
        return self.quick_pack(variable, bind) if self.quick_pack else f"{bind(self.pack)}({variable})"

    def unpack_source(self, variable: str, bind: Bind) -> str:
        """An expression that unpacks this variable."""
        return self.quick_unpack(variable, bind) if self.quick_unpack else f"{bind(self.unpack)}({variable})"


class Namespace:
    """The objects that generated code knows."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def bind(self, known: object) -> str:
        """The name of this object in the code."""
        name = f"k{len(self.names)}"
        self.names[name] = known
        return name

    def function(self, name: str, lines: list[str]) -> Convert:
        """A function of one argument, of the lines of its body.  The lines come from declarations, never from data."""
        source = "\n".join([f"def {name}(value):", *(f"    {line}" for line in lines)])
        exec(compile(source, f"<codec: {name}>", "exec"), self.names)  # noqa: S102  # as dataclasses itself does
        made: Convert = self.names[name]
        return made
