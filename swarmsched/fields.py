"""Values: the frozen structs that messages, records, views, events and effects are, and their bounded field types.

A value that travels or is stored has fields of these types; `swarmsched.wire.codec` reads it strictly.  Every number
has a range and every length a limit, so that a peer that sends nonsense can cost no more than one dropped message.
New fields go at the end, with a default: an older peer skips them, and a message of an older peer gets the default.
Bounds hold for what is encoded and decoded; building a value does not check them.
"""

from typing import Annotated, dataclass_transform

import msgspec
from msgspec import Meta

from swarmsched.ids import JobId, NodeId


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of immutable values, equal and hashable by their fields; `msgspec.structs.replace` makes changed copies.

    On the wire it is the array of its fields in the order of declaration.  Without garbage collection: values are made
    of parts that existed before them, so none can ever be in a circle.
    """


U8 = Annotated[int, Meta(ge=0, le=2**8 - 1)]
U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U53 = Annotated[int, Meta(ge=0, le=2**53)]
U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger ones
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
PART_MOST = 2**31 - 1
RANK_MOST = PART_MOST - 1
"""Parts of an elastic attempt are numbered from 1, and no number is given twice; as ranks they count from 0."""
Part = Annotated[int, Meta(ge=0, le=PART_MOST)]
Port = Annotated[int, Meta(ge=0, le=65535)]
SECONDS_MOST = 1e10
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MOST)]
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
Real = Annotated[float, Meta(ge=-1e18, le=1e18)]

Name = Annotated[str, Meta(max_length=63)]
Host = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=1_024)]
LONG_TEXT_LIMIT = 65_536
LongText = Annotated[str, Meta(max_length=LONG_TEXT_LIMIT)]
NodeName = Annotated[NodeId, Meta(max_length=63)]
Job = Annotated[JobId, Meta(max_length=26)]
Digest = Annotated[str, Meta(max_length=64)]


def is_text(text: str) -> bool:
    """False for what no encoding takes: Python turns bytes that are not UTF-8 into lone surrogates."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def cleaned(text: str, limit: int = 1_024) -> str:
    """Text from outside as a record or report can carry it: encodable, on one line, at most `limit` characters."""
    usable = text if is_text(text) else text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else " " if c in "\n\r\t" else ascii(c)[1:-1] for c in usable)[:limit]
