"""What the rest of a node asks of the register, and what it is told: compare-and-set and linearizable reads."""

from dataclasses import dataclass

from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord

Stamp = tuple[int, int]
"""(epoch, version) of a record."""


@dataclass(frozen=True, slots=True)
class UpdateRequested:
    """Replace the record whose stamp is `expected` (None: there must be none) by `value`.

    `holders` are the nodes that keep this job's register.  Answered by exactly one of `UpdateDecided`,
    `UpdateConflicted` and `UpdateUncertain` with the same id.  Repeating a request whose value is still the current
    one is decided again.
    """

    update_id: int
    job_id: JobId
    holders: tuple[NodeId, ...]
    expected: Stamp | None
    value: JobRecord


@dataclass(frozen=True, slots=True)
class ReadRequested:
    """Read linearizably.  Answered by `ReadDecided`, or `UpdateUncertain` when no majority answers."""

    update_id: int
    job_id: JobId
    holders: tuple[NodeId, ...]


Request = UpdateRequested | ReadRequested


@dataclass(frozen=True, slots=True)
class UpdateDecided:
    """A majority of the holders has the record on disk."""

    update_id: int
    record: JobRecord


@dataclass(frozen=True, slots=True)
class UpdateConflicted:
    """Nothing was written by this request: the current record is another one than the caller believed."""

    update_id: int
    current: JobRecord | None


@dataclass(frozen=True, slots=True)
class UpdateUncertain:
    """Written or not, nobody here can tell; read, or repeat the same request."""

    update_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadDecided:
    """The current record; None when the register was never written."""

    update_id: int
    record: JobRecord | None


Result = UpdateDecided | UpdateConflicted | UpdateUncertain | ReadDecided
