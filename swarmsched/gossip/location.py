"""Location entries: for every job of the last week, who holds its record, who shepherds it, and whether it has ended.

Entries are kept as bytes (some 250 B of memory each, so that 100,000 fit an agent) in buckets of the job ids' time
part, 17.5 minutes wide.  Anti-entropy compares one hash per bucket and lists only buckets that differ.
"""

import hashlib
import random
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from swarmsched.api import JobState
from swarmsched.errors import RemoteProtocolError
from swarmsched.fields import U8, U32, Amount, Job, NodeName, Value
from swarmsched.ids import CROCKFORD, JOB_ID_LENGTH, JobId, NodeId, is_job_id
from swarmsched.wire.codec import decode_value, encode_value

LOCATION_BYTES_LIMIT = 448
LOCATIONS_LIMIT = 100_000
KEEP_S = 7 * 86_400.0
REFUSE_MARGIN_S = 3_600.0
"""Entries this close to their end are not taken from peers, or two clocks' edges would pass them to and fro."""

KEY_LENGTH = 17
KEY_FIRST_BYTE_END = 4  # 26 symbols of 5 bits are 130 bits
BUCKET_SHIFT = 20 + 80  # 2^20 ms of the id's time part, above its 80 random bits
LISTING_LIMIT = 2_000
BUCKETS_PER_EXPIRY = 16
HOLDERS_LIMIT = 5

Stamp = tuple[int, int]

_STATES = tuple(JobState)
_VALUES = {symbol: value for value, symbol in enumerate(CROCKFORD)}
_HEAD = struct.Struct(">qII")
"""Birth in whole seconds of our clock, then the stamp: kept before the body so that comparing needs no decoding."""


class Location(Value):
    """Where a job's record is.  `(epoch, version)` are those of the job record; times are seconds since 1970."""

    job_id: Job
    epoch: U32
    version: U32
    shepherd: NodeName
    holders: Annotated[tuple[NodeName, ...], Meta(max_length=HOLDERS_LIMIT)]
    state: JobState
    ended_utc_s: Amount = 0.0  # 0: not ended

    @property
    def stamp(self) -> Stamp:
        """(epoch, version): larger is newer."""
        return (self.epoch, self.version)


class _Wire(Value):
    """What travels: 30 B and the names of the holders.  `key` without its first byte where that is 0, as it is."""

    key: Annotated[bytes, Meta(max_length=KEY_LENGTH)]
    epoch: U32
    version: U32
    holders: Annotated[tuple[NodeName, ...], Meta(max_length=HOLDERS_LIMIT)]
    shepherd_index: U8  # into the holders; their number when `shepherd` names it
    state_index: U8
    ended_utc_s: U32
    shepherd: Annotated[str, Meta(max_length=63)] = ""


def key_of(job_id: JobId) -> bytes:
    """The id as 17 bytes that sort like it."""
    value = 0
    for symbol in job_id:
        value = value << 5 | _VALUES[symbol]
    return value.to_bytes(KEY_LENGTH)


def job_of(key: bytes) -> JobId:
    """Inverse of `key_of`."""
    value = int.from_bytes(key)
    return JobId("".join(CROCKFORD[value >> shift & 31] for shift in range(5 * (JOB_ID_LENGTH - 1), -1, -5)))


def bucket_of(key: bytes) -> int:
    """Number of the time bucket of a job."""
    return int.from_bytes(key) >> BUCKET_SHIFT


def encode_location(location: Location) -> bytes:
    """Bytes for the wire."""
    is_holder = location.shepherd in location.holders
    index = location.holders.index(location.shepherd) if is_holder else len(location.holders)
    return encode_value(
        _Wire,
        _Wire(
            key_of(location.job_id).removeprefix(b"\0"),
            location.epoch,
            location.version,
            location.holders,
            index,
            _STATES.index(location.state),
            min(int(location.ended_utc_s), 2**32 - 1),
            "" if is_holder else location.shepherd,
        ),
    )


def decode_location(body: bytes) -> Location:
    """A checked entry; RemoteProtocolError for anything else."""
    if len(body) > LOCATION_BYTES_LIMIT:
        raise RemoteProtocolError(f"{len(body)} bytes, more than {LOCATION_BYTES_LIMIT}", kind="Location")
    wire = decode_value(_Wire, body)
    key = wire.key.rjust(KEY_LENGTH, b"\0")
    if len(wire.key) < KEY_LENGTH - 1 or key[0] >= KEY_FIRST_BYTE_END:
        raise RemoteProtocolError("not a job id", kind="Location")
    if wire.state_index >= len(_STATES) or wire.shepherd_index > len(wire.holders):
        raise RemoteProtocolError("unknown state or shepherd", kind="Location")
    named = wire.shepherd_index == len(wire.holders)
    shepherd = NodeId(wire.shepherd) if named else wire.holders[wire.shepherd_index]
    return Location(
        job_of(key),
        wire.epoch,
        wire.version,
        shepherd,
        wire.holders,
        _STATES[wire.state_index],
        float(wire.ended_utc_s),
    )


@dataclass(slots=True)
class _Bucket:
    """Entries of one stretch of submit times.  `xor` combines the hashes of all entries' bytes."""

    entries: dict[bytes, bytes]  # key -> birth and stamp (`_HEAD`), then the body
    xor: int = 0


class LocationStore(Mapping[JobId, Location]):
    """All entries known here.  Invariant: an entry's stamp never falls; the bucket hashes match the entries."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._count = 0
        self._expired_up_to = -1  # the bucket that was last looked through for old entries
        self._recent: dict[bytes, int] = {}  # key -> round of its last change, oldest change first

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[JobId]:
        for number in sorted(self._buckets):
            yield from (job_of(key) for key in sorted(self._buckets[number].entries))

    def __getitem__(self, job_id: JobId) -> Location:
        body = self.body(key_of(job_id)) if is_job_id(job_id) else None
        if body is None:
            raise KeyError(job_id)
        return decode_location(body)

    @property
    def bucket_hashes(self) -> dict[int, int]:
        """32 bits per bucket that has entries."""
        return {number: bucket.xor for number, bucket in self._buckets.items()}

    def body(self, key: bytes) -> bytes | None:
        """The bytes of one entry as its shepherd wrote them."""
        stored = self._stored(key)
        return None if stored is None else stored[_HEAD.size :]

    def stamp(self, key: bytes) -> Stamp | None:
        """The stamp of one entry, or None."""
        stored = self._stored(key)
        if stored is None:
            return None
        _, epoch, version = _HEAD.unpack_from(stored)
        return (epoch, version)

    def age_s(self, key: bytes, now_s: float) -> float:
        """Seconds since the shepherd wrote the entry; 0 for an unknown one."""
        stored = self._stored(key)
        return max(0.0, now_s - _HEAD.unpack_from(stored)[0]) if stored else 0.0

    def offer(self, location: Location, body: bytes, *, age_s: float, now_s: float, round_number: int) -> bool:
        """Keep the entry if it is newer than what is known and young enough; True if it was kept."""
        key = key_of(location.job_id)
        known = self.stamp(key)
        if known is not None and known >= location.stamp:
            return False
        if age_s > KEEP_S - REFUSE_MARGIN_S or not self._make_space(key, known is None):
            return False
        self._drop(key)
        bucket = self._buckets.setdefault(bucket_of(key), _Bucket({}))
        bucket.entries[key] = _HEAD.pack(int(now_s - age_s), *location.stamp) + body
        bucket.xor ^= _hash(body)
        self._count += 1
        self._recent[key] = round_number
        return True

    def expire(self, now_s: float) -> int:
        """Drop what is older than a week, in the next few buckets of a rotation; returns how many."""
        limit = int(now_s - KEEP_S)
        numbers = sorted(self._buckets)
        start = bisect_right(numbers, self._expired_up_to)
        turn = numbers[start : start + BUCKETS_PER_EXPIRY] or numbers[:BUCKETS_PER_EXPIRY]
        if not turn:
            return 0
        self._expired_up_to = turn[-1]
        old = [
            key
            for number in turn
            for key, stored in self._buckets[number].entries.items()
            if _HEAD.unpack_from(stored)[0] < limit
        ]
        for key in old:
            self._drop(key)
        return len(old)

    def recent(self, since_round: int, limit: int) -> list[bytes]:
        """Keys changed in or after a round, newest change first."""
        for key in [key for key, changed in self._recent.items() if changed < since_round]:
            del self._recent[key]
        return [key for _, key in zip(range(limit), reversed(self._recent), strict=False)]

    def listing(self, number: int, rng: random.Random) -> tuple[bytes, bytes, dict[bytes, Stamp]]:
        """(lowest key, highest key, stamps) of one bucket, or of a random stretch of one that is too long."""
        low = (number << BUCKET_SHIFT).to_bytes(KEY_LENGTH)
        high = ((number + 1 << BUCKET_SHIFT) - 1).to_bytes(KEY_LENGTH)
        bucket = self._buckets.get(number)
        keys = sorted(bucket.entries) if bucket else []
        if len(keys) > LISTING_LIMIT:
            start = rng.randrange(len(keys) - LISTING_LIMIT + 1)
            keys = keys[start : start + LISTING_LIMIT]
            low, high = keys[0], keys[-1]
        return low, high, {key: self._stamp_known(key) for key in keys}

    def keys_between(self, low: bytes, high: bytes) -> list[bytes]:
        """Keys of one bucket's stretch, in order."""
        bucket = self._buckets.get(bucket_of(low))
        return sorted(key for key in bucket.entries if low <= key <= high) if bucket else []

    def page(self, before: bytes, limit: int) -> Sequence[bytes]:
        """The next `limit` keys below `before` (all, if empty), newest jobs first."""
        result: list[bytes] = []
        for number in sorted(self._buckets, reverse=True):
            if before and number > bucket_of(before):
                continue
            keys = sorted((key for key in self._buckets[number].entries if not before or key < before), reverse=True)
            result += keys[: limit - len(result)]
            if len(result) >= limit:
                break
        return result

    def validate(self) -> None:
        """Re-derive count and hashes from the entries."""
        assert self._count == sum(len(bucket.entries) for bucket in self._buckets.values())
        for number, bucket in self._buckets.items():
            xor = 0
            for key, stored in bucket.entries.items():
                location = decode_location(stored[_HEAD.size :])
                assert key_of(location.job_id) == key
                assert self.stamp(key) == location.stamp
                assert bucket_of(key) == number
                xor ^= _hash(stored[_HEAD.size :])
            assert bucket.xor == xor
            assert bucket.entries

    def _stored(self, key: bytes) -> bytes | None:
        bucket = self._buckets.get(bucket_of(key))
        return bucket.entries.get(key) if bucket else None

    def _stamp_known(self, key: bytes) -> Stamp:
        stamp = self.stamp(key)
        assert stamp is not None
        return stamp

    def _make_space(self, key: bytes, is_new: bool) -> bool:
        """At the limit the oldest job makes room for a newer one; an even older one is refused."""
        if not is_new or self._count < LOCATIONS_LIMIT:
            return True
        oldest = min(self._buckets[min(self._buckets)].entries)
        if key < oldest:
            return False
        self._drop(oldest)
        return True

    def _drop(self, key: bytes) -> None:
        number = bucket_of(key)
        bucket = self._buckets.get(number)
        stored = bucket.entries.pop(key, None) if bucket else None
        self._recent.pop(key, None)
        if bucket is None or stored is None:
            return
        bucket.xor ^= _hash(stored[_HEAD.size :])
        self._count -= 1
        if not bucket.entries:
            del self._buckets[number]


def _hash(body: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(body, digest_size=4).digest())
