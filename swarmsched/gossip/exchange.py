"""What two state planes say to one another: digests, differences and pages of a full state.

A digest lists (id, stamp) of entries; an answer carries the entries that are newer, verbatim as their owners wrote
them, and what it wants in return.  All messages travel as datagrams if they are small, over the peer channel if not.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from msgspec import Meta

from swarmsched.errors import RemoteProtocolError
from swarmsched.fields import U8, U32, U53, Value
from swarmsched.wire.codec import Codec

Stamp = tuple[int, int]

ID_LENGTH = 6
DIGEST_ENTRIES_LIMIT = 30_000
STREAM_BYTES_LIMIT = 524_288
PARCELS_LIMIT = 8_192

_Listing = Annotated[bytes, Meta(max_length=STREAM_BYTES_LIMIT)]


class ParcelKind:
    """What a parcel holds; a kind that this version does not know is skipped."""

    NODE = 1
    CARD = 2
    LOCATION = 3
    SETTING = 4
    ENDED = 5  # the last card of a job that has ended, after others have forgotten it


class Parcel(Value):
    """One entry as its owner wrote it.  `age_ds`: tenths of a second since then."""

    kind: U8
    age_ds: U32
    body: Annotated[bytes, Meta(max_length=2_048)]


class StateDigest(Value):
    """What the sender has: changes of its window, or everything (`is_full`).  Answered by `StateDelta`.

    `buckets` lists the hashes of the location entries, in full digests only.
    """

    setting_version: U53
    setting_node: Annotated[str, Meta(max_length=63)]
    nodes: _Listing = b""
    cards: _Listing = b""
    locations: _Listing = b""
    buckets: _Listing = b""
    is_full: bool = False
    history: U53 = 0  # digest of the ended jobs that the sender knows, in full digests only; 0: not told


class LocationRange(Value):
    """All location entries that the sender has between two job keys, inclusive."""

    low: Annotated[bytes, Meta(max_length=17)]
    high: Annotated[bytes, Meta(max_length=17)]
    listing: _Listing


class StateDelta(Value):
    """Newer entries, and what the sender wants (ids with the stamps that it has).  `is_cut`: more is left to send."""

    parcels: Annotated[tuple[Parcel, ...], Meta(max_length=PARCELS_LIMIT)] = ()
    want_nodes: _Listing = b""
    want_cards: _Listing = b""
    want_locations: _Listing = b""
    wants_setting: bool = False
    is_cut: bool = False
    ranges: Annotated[tuple[LocationRange, ...], Meta(max_length=8)] = ()


class FullStateRequest(Value):
    """A joining node asks for everything, page by page.  `stage` 0 nodes, 1 cards, 2 locations; `after` a key."""

    stage: U8 = 0
    after: Annotated[bytes, Meta(max_length=64)] = b""
    history: U53 = 0  # digest of the ended jobs that the sender knows; 0: it does not keep them


class FullStateAnswer(Value):
    """One page.  Ask again with `stage` and `after` unless `is_last`; an empty page means: in a second.

    A page of stage 3 are ended jobs: it comes beside the others, to those who have told that they know other ones.
    """

    parcels: Annotated[tuple[Parcel, ...], Meta(max_length=PARCELS_LIMIT)]
    stage: U8
    after: Annotated[bytes, Meta(max_length=64)]
    is_last: bool


STATE_MESSAGES: Mapping[int, type] = {
    32: StateDigest,
    33: StateDelta,
    34: FullStateRequest,
    35: FullStateAnswer,
}
"""Kind numbers in datagrams (the first two) and, if the node likes, on the peer channel."""

STATE_KINDS = range(32, 64)
"""First bytes of datagrams that belong to the state plane."""

DATAGRAM_CODEC = Codec({kind: STATE_MESSAGES[kind] for kind in (32, 33)})


def short_id(key: str) -> bytes:
    """48 bits of a hash: what digests list instead of names and job ids."""
    return hashlib.blake2b(key.encode(), digest_size=ID_LENGTH).digest()


def pack_listing(entries: Iterable[tuple[bytes, Stamp]]) -> bytes:
    """Ids of one length with their stamps, the first number as an offset from the least of all."""
    listed = list(entries)
    if not listed:
        return b""
    base = min(stamp[0] for _, stamp in listed)
    packed = bytearray([len(listed[0][0])])
    _put(packed, base)
    for identity, (first, second) in listed:
        packed += identity
        _put(packed, first - base)
        _put(packed, second)
    return bytes(packed)


def unpack_listing(data: bytes, id_length: int) -> dict[bytes, Stamp]:
    """Inverse of `pack_listing`; RemoteProtocolError for anything else."""
    if not data:
        return {}
    if data[0] != id_length:
        raise RemoteProtocolError(f"ids of {data[0]} bytes instead of {id_length}", kind="listing")
    result: dict[bytes, Stamp] = {}
    for identity, first, second in _listed(data, id_length):
        if first > 2**53 or second > 2**53 or len(result) >= DIGEST_ENTRIES_LIMIT:
            raise RemoteProtocolError("number or length out of range", kind="listing")
        result[identity] = (first, second)
    return result


def pack_buckets(hashes: Mapping[int, int]) -> bytes:
    """Bucket numbers and their hashes."""
    return pack_listing((value.to_bytes(4), (number, 0)) for number, value in sorted(hashes.items()))


def unpack_buckets(data: bytes) -> dict[int, int]:
    """Inverse of `pack_buckets`; RemoteProtocolError for anything else."""
    if not data:
        return {}
    if data[0] != 4:
        raise RemoteProtocolError("hashes are not of 4 bytes", kind="listing")
    result: dict[int, int] = {}
    for value, number, _ in _listed(data, 4):
        if number > 2**40 or len(result) >= DIGEST_ENTRIES_LIMIT:
            raise RemoteProtocolError("number or length out of range", kind="listing")
        result[number] = int.from_bytes(value)
    return result


def _listed(data: bytes, id_length: int) -> Iterator[tuple[bytes, int, int]]:
    base, position = _get(data, 1)
    while position < len(data):
        identity = data[position : position + id_length]
        offset, position = _get(data, position + id_length)
        second, position = _get(data, position)
        yield identity, base + offset, second


def _put(packed: bytearray, value: int) -> None:
    while value > 127:
        packed.append(value & 127 | 128)
        value >>= 7
    packed.append(value)


def _get(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 63:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise RemoteProtocolError("ends inside a number", kind="listing")
