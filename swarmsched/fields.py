"""Bounded field types for wire messages.

A message is a frozen, slotted dataclass whose fields carry these types; `swarmsched.wire.codec` derives a strict
decoder from them.  Every number has a range and every length a limit, so that a peer that sends nonsense can cost
no more than one dropped message.  New fields go at the end, with a default: an older peer skips them, and a message
of an older peer gets the default.
"""

from dataclasses import dataclass
from typing import Annotated

from swarmsched.ids import JobId, NodeId


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MaxLength:
    """Most characters (str), bytes (bytes) or items (tuple, mapping)."""

    limit: int


U8 = Annotated[int, Range(0, 2**8 - 1)]
U16 = Annotated[int, Range(0, 2**16 - 1)]
U32 = Annotated[int, Range(0, 2**32 - 1)]
U53 = Annotated[int, Range(0, 2**53)]
U64 = Annotated[int, Range(0, 2**64 - 1)]
I32 = Annotated[int, Range(-(2**31), 2**31 - 1)]
Port = Annotated[int, Range(0, 65535)]
Seconds = Annotated[float, Range(0.0, 1e10)]
Ratio = Annotated[float, Range(0.0, 1.0)]
Amount = Annotated[float, Range(0.0, 1e18)]
Real = Annotated[float, Range(-1e18, 1e18)]

Name = Annotated[str, MaxLength(63)]
Host = Annotated[str, MaxLength(255)]
Text = Annotated[str, MaxLength(1_024)]
LongText = Annotated[str, MaxLength(65_536)]
NodeName = Annotated[NodeId, MaxLength(63)]
Job = Annotated[JobId, MaxLength(26)]
Digest = Annotated[str, MaxLength(64)]
