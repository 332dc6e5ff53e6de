"""What an owner's ledger keeps about one attempt of a job, and about a job as a whole, in memory and on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from swarmsched.effects import Persist
from swarmsched.errors import ProtocolError, StorageError
from swarmsched.fields import U16, U32, U53, Job, MaxLength, NodeName, Seconds
from swarmsched.ids import JobId
from swarmsched.ledger.message import OwnerAnswer
from swarmsched.wire.codec import decode_value, encode_value

ROOM = "ledger"
SCHEMA_KEY = "schema"
SCHEMA_VERSION = b"1"
DRAINING_KEY = "draining"
BOOKING_PREFIX = "booking/"
FENCE_PREFIX = "fence/"

GpuUuid = Annotated[str, MaxLength(96)]
BookingKey = tuple[JobId, int]
"""(job id, attempt)."""


class BookingState(Enum):
    """A booking's place between "maybe" and "gone"."""

    HELD = "held"  # until its deadline, unless committed
    LEASED = "leased"  # until released or ended
    DRAINING = "draining"  # released, but processes may be left: ends with `Ledger.end`


@dataclass(frozen=True, slots=True)
class Booking:
    """Resources of this node that one attempt of a job has; the durable form."""

    job_id: Job
    epoch: U32
    attempt: U32
    shepherd: NodeName
    state: BookingState
    ranks: U16
    gpus: Annotated[tuple[GpuUuid, ...], MaxLength(64)]
    cpus: U32
    memory_bytes: U53
    ttl_s: Seconds  # of the hold; restarts in full when the owner restarts

    @property
    def key(self) -> BookingKey:
        """(job id, attempt)."""
        return (self.job_id, self.attempt)

    def persisted(self) -> Persist:
        """The write that makes this booking durable."""
        return Persist(ROOM, booking_entry(self.key), encode_value(Booking, self))


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A booking as the outside sees it; `deadline_s` (owner's clock) is infinite once leased."""

    job_id: JobId
    epoch: int
    attempt: int
    shepherd: str
    state: BookingState
    ranks: int
    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ExpiredHold:
    """A hold whose deadline passed without a commit; its resources are free again."""

    job_id: JobId
    epoch: int
    attempt: int
    shepherd: str


@dataclass(frozen=True, slots=True)
class StoredFence:
    """The durable part of `Fence`."""

    epoch: U32
    released_attempt: U32


@dataclass(slots=True)
class Fence:
    """What must outlive a job's bookings so that late commands cannot harm.

    `epoch`: the highest accepted; never falls.  `released_attempt`: holds with an attempt up to it are refused; never
    falls.  `idle_since_s`: when the job last had a booking here, None while it has one.  `answers`: by (epoch,
    attempt, command id), the last few, oldest first.
    """

    epoch: int
    released_attempt: int = 0
    idle_since_s: float | None = None
    answers: dict[tuple[int, int, int], OwnerAnswer] = field(default_factory=dict)

    def persisted(self, job_id: JobId) -> Persist:
        """The write that makes this fence durable."""
        stored = StoredFence(self.epoch, self.released_attempt)
        return Persist(ROOM, fence_entry(job_id), encode_value(StoredFence, stored))


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """Everything read back from disk."""

    bookings: tuple[Booking, ...]
    fences: Mapping[JobId, StoredFence]
    is_draining: bool


def booking_entry(key: BookingKey) -> str:
    """Storage key of a booking."""
    return f"{BOOKING_PREFIX}{key[0]}/{key[1]}"


def fence_entry(job_id: JobId) -> str:
    """Storage key of a fence."""
    return f"{FENCE_PREFIX}{job_id}"


def read_entries(entries: Mapping[str, bytes]) -> StoredLedger:
    """Decode the room's entries.

    Raises `StorageError` for another schema version, an unreadable entry, or two bookings of one GPU; nothing was
    changed on disk.
    """
    schema = entries.get(SCHEMA_KEY)
    if entries and schema != SCHEMA_VERSION:
        found = "none" if schema is None else repr(schema[:16].decode(errors="replace"))
        remedy = f"run the version of swarm-agent that wrote it; this one reads version {SCHEMA_VERSION.decode()}"
        raise StorageError(f"{ROOM}/{SCHEMA_KEY}", f"unknown schema version {found}", remedy)
    bookings: list[Booking] = []
    fences: dict[JobId, StoredFence] = {}
    for key in sorted(entries):
        try:
            if key.startswith(BOOKING_PREFIX):
                bookings.append(decode_value(Booking, entries[key]))
            elif key.startswith(FENCE_PREFIX):
                fences[JobId(key.removeprefix(FENCE_PREFIX))] = decode_value(StoredFence, entries[key])
        except ProtocolError as error:
            raise StorageError(f"{ROOM}/{key}", f"unreadable entry: {error}", "") from error
    _refuse_double_booking(bookings)
    return StoredLedger(tuple(bookings), fences, DRAINING_KEY in entries)


def _refuse_double_booking(bookings: list[Booking]) -> None:
    seen: dict[str, Booking] = {}
    for booking in bookings:
        for uuid in booking.gpus:
            other = seen.setdefault(uuid, booking)
            if other is not booking:
                problem = f"GPU {uuid} is booked for {other.key} and for {booking.key}"
                raise StorageError(f"{ROOM}/{booking_entry(booking.key)}", problem, "")
