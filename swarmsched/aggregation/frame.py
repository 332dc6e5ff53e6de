"""What learners and shards say to one another: frames of a head, a JSON object of fields, and the bytes of a piece.

The head has the kind, and how many bytes of fields and of content follow; little-endian, as the content is.  A vector
goes piece by piece, each with its index `at`: of int8 the scales of the piece and then its values, else its float32.
Whoever reads knows from the index how long a piece must be, so lengths are checked before any memory is touched.
"""

import struct
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from swarmsched.aggregation.blocks import PIECE, block_count
from swarmsched.aggregation.shard import Origin, PlanNumber, ShardVersion
from swarmsched.errors import RemoteProtocolError

HEAD = struct.Struct("<BII")
FIELDS_BYTES_MAX = 262_144
HELLO_BYTES_MAX = 4_096  # of whoever has not shown the key

Count = Annotated[int, Meta(ge=0, le=2**53)]
Text = Annotated[str, Meta(max_length=200)]
Version = tuple[Annotated[int, Meta(ge=-1, le=2**53)], Count, Count, Annotated[int, Meta(ge=0, le=2**63 - 1)]]
T = TypeVar("T", bound=Struct)
Counted = Annotated[dict[Text, Count], Meta(max_length=2_048)]


class FrameKind(IntEnum):
    """Of a frame.  The first four come from learners; either side sends the last."""

    HELLO = 1
    DELTA = 2
    WEIGHTS = 3
    STATE = 4
    NEXT = 5
    WELCOME = 6
    ASK = 7
    AWAY = 8
    REFUSED = 9
    PING = 10


class FrameHello(Struct, frozen=True):
    """Which shard a learner wants, which version it holds, and that it has the key."""

    job: Text
    attempt: Count
    start: Count
    plan: tuple[Count, Count]
    learner: Text
    layout: Text
    version: Version
    key: Text
    leaves: bool = False


class FrameDelta(Struct, frozen=True):
    """A piece of a contribution."""

    plan: tuple[Count, Count]
    base: Version
    steps: Count
    samples: Count
    at: Count
    cost: Annotated[float, Meta(ge=-1, le=1e9)] = -1.0


class FrameWeights(Struct, frozen=True):
    """A piece of the weights that a learner was shown, or is to be."""

    version: Version
    counted: Counted
    at: Count
    every: Count = 0


class FrameNext(Struct, frozen=True):
    """A piece of the change to the next version."""

    base: Version
    version: Version
    counted: Counted
    at: Count
    every: Count = 0


class FrameWelcomed(Struct, frozen=True):
    """The name of what the learner holds."""

    version: Version


class FrameRefused(Struct, frozen=True):
    """Why a learner, or its contribution to a base, is refused."""

    objection: Text
    text: Annotated[str, Meta(max_length=1_000)]
    base: Version = (-1, 0, 0, 0)


class FrameNothing(Struct, frozen=True):
    """A frame that says all by its kind."""


FIELDS: dict[FrameKind, type[Struct]] = {
    FrameKind.HELLO: FrameHello,
    FrameKind.DELTA: FrameDelta,
    FrameKind.WEIGHTS: FrameWeights,
    FrameKind.STATE: FrameWeights,
    FrameKind.NEXT: FrameNext,
    FrameKind.WELCOME: FrameWelcomed,
    FrameKind.ASK: FrameNothing,
    FrameKind.AWAY: FrameRefused,
    FrameKind.REFUSED: FrameRefused,
    FrameKind.PING: FrameNothing,
}
_DECODERS = {kind: msgspec.json.Decoder(of) for kind, of in FIELDS.items()}


class FrameHead(NamedTuple):
    """What follows."""

    kind: FrameKind
    fields: int
    content: int


def head(data: bytes | bytearray | memoryview, *, is_known: bool) -> FrameHead:
    """Read a head; raises `RemoteProtocolError` for what cannot follow, of one who `is_known` or is not."""
    kind, fields, content = HEAD.unpack(data)
    most = FIELDS_BYTES_MAX if is_known else HELLO_BYTES_MAX
    if (
        kind not in FIELDS
        or fields > most
        or content > 4 * PIECE
        or (not is_known and (kind != FrameKind.HELLO or content))
    ):
        raise RemoteProtocolError(f"a head of kind {kind} with {fields} and {content} bytes is none of a learner")
    return FrameHead(FrameKind(kind), fields, content)


def read(kind: FrameKind, of: type[T], data: bytes | bytearray) -> T:
    """Read the fields of a frame; raises `RemoteProtocolError`."""
    try:
        found = _DECODERS[kind].decode(data)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"the fields of {kind.name} cannot be read: {error}") from error
    assert isinstance(found, of)
    return found


def frame(kind: FrameKind, fields: Struct | None = None, content: int = 0) -> bytes:
    """Head and fields of a frame, before that many bytes of content."""
    data = msgspec.json.encode(fields or FrameNothing())
    return HEAD.pack(kind, len(data), content) + data


def piece_count(size: int) -> int:
    """How many pieces a vector has; an empty one has one, so that it can be told."""
    return max(1, -(-size // PIECE))


def bounds(size: int, at: int) -> tuple[int, int]:
    """Where a piece begins and ends; raises `RemoteProtocolError` where there is none."""
    if at >= piece_count(size):
        raise RemoteProtocolError(f"a vector of {size} has no piece {at}")
    return at * PIECE, min((at + 1) * PIECE, size)


def content_bytes(count: int, *, is_quantised: bool) -> int:
    """How many bytes a piece of that many elements takes."""
    return 4 * block_count(count) + count if is_quantised else 4 * count


def to_wire(version: ShardVersion) -> Version:
    """A version as a frame has it."""
    return (version.number, *version.origin)


def from_wire(version: Version) -> ShardVersion:
    """The same, read."""
    return ShardVersion(version[0], Origin(*version[1:]))


def plan_number(plan: tuple[int, int]) -> PlanNumber:
    """The number of a plan, read."""
    return PlanNumber(*plan)
