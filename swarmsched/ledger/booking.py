"""What an owner's ledger keeps about one attempt of a job, and about a job as a whole, in memory and on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from msgspec import Meta

from swarmsched.effects import Persist
from swarmsched.errors import ProtocolError, StorageError
from swarmsched.fields import U16, U32, U53, Job, NodeName, Part, Seconds, Value
from swarmsched.ids import JobId, TaskKey
from swarmsched.ledger.message import OwnerAnswer
from swarmsched.wire.codec import decode_value, encode_value

ROOM = "ledger"
SCHEMA_KEY = "schema"
SCHEMA_VERSION = b"1"
DRAINING_KEY = "draining"
BOOKING_PREFIX = "booking/"
FENCE_PREFIX = "fence/"

GpuUuid = Annotated[str, Meta(max_length=96)]


class BookingState(Enum):
    """A booking's place between "maybe" and "gone"."""

    HELD = "held"  # until its deadline, unless committed
    LEASED = "leased"  # until released or ended
    DRAINING = "draining"  # released, but processes may be left: ends with `Ledger.end`


class Booking(Value):
    """Resources of this node that one attempt of a job has; the durable form."""

    job_id: Job
    epoch: U32
    attempt: U32
    shepherd: NodeName
    state: BookingState
    ranks: U16
    gpus: Annotated[tuple[GpuUuid, ...], Meta(max_length=64)]
    cpus: U32
    memory_bytes: U53
    ttl_s: Seconds  # of the hold; restarts in full when the owner restarts
    part: Part = 0

    @property
    def key(self) -> TaskKey:
        """Of the task that it is for."""
        return TaskKey(self.job_id, self.attempt, self.part)

    def persisted(self) -> Persist:
        """The write that makes this booking durable."""
        return Persist(ROOM, booking_entry(self.key), encode_value(Booking, self))


class LedgerEntry(Value):
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
    part: int = 0

    @property
    def key(self) -> TaskKey:
        """Of the booking."""
        return TaskKey(self.job_id, self.attempt, self.part)


class StoredFence(Value):
    """The durable part of `Fence`."""

    epoch: U32
    released_attempt: U32
    released_part: Part = 0

    def persisted(self, job_id: JobId) -> Persist:
        """The write that makes this fence durable."""
        return Persist(ROOM, fence_entry(job_id), encode_value(StoredFence, self))


@dataclass(slots=True)
class Fence:
    """What must outlive a job's bookings so that late commands cannot harm.

    `epoch`: the highest accepted; never falls.  `released`: (attempt, part), up to which holds are refused; never
    falls.  `idle_since_s`: when the job last had a booking here, None while it has one.  `answers`: by (epoch,
    attempt, command id), the last few, oldest first.
    """

    epoch: int
    released: tuple[int, int] = (0, 0)
    idle_since_s: float | None = None
    answers: dict[tuple[int, int, int], OwnerAnswer] = field(default_factory=dict)


class StoredLedger(Value):
    """Everything read back from disk."""

    bookings: tuple[Booking, ...]
    fences: Mapping[JobId, StoredFence]
    drain_reason: str | None  # None: it takes work


def booking_entry(key: TaskKey) -> str:
    """Storage key of a booking."""
    return f"{BOOKING_PREFIX}{key}"


def fence_entry(job_id: JobId) -> str:
    """Storage key of a fence."""
    return f"{FENCE_PREFIX}{job_id}"


def read_entries(entries: Mapping[str, bytes]) -> StoredLedger:
    """Decode the room's entries.

    Raises `StorageError` for another schema version, an unreadable entry, or two bookings of one GPU; nothing was
    changed on disk.  Where the schema's own entry is missing, entries that can all be read are of this one.
    """
    schema = entries.get(SCHEMA_KEY, SCHEMA_VERSION)
    if schema != SCHEMA_VERSION:
        found = repr(schema[:16].decode(errors="replace"))
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
    reason = entries.get(DRAINING_KEY)
    return StoredLedger(tuple(bookings), fences, None if reason is None else reason.decode(errors="replace"))


def _refuse_double_booking(bookings: list[Booking]) -> None:
    seen: dict[str, Booking] = {}
    for booking in bookings:
        for uuid in booking.gpus:
            other = seen.setdefault(uuid, booking)
            if other is not booking:
                problem = f"GPU {uuid} is booked for {other.key} and for {booking.key}"
                raise StorageError(f"{ROOM}/{booking_entry(booking.key)}", problem, "")
