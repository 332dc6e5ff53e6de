"""Names for annotations, which are never evaluated: to import `typing` costs a tenth of what `swarm ps` may take."""

__all__ = ["Any", "BinaryIO", "NoReturn", "Self", "TextIO"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, NoReturn, Self, TextIO
else:
    Any = BinaryIO = NoReturn = Self = TextIO = object
