"""What the rest of a node asks of the register, and what it is told: compare-and-set and linearizable reads."""

from enum import Enum, auto

from swarmsched.fields import Value
from swarmsched.holders import Configuration
from swarmsched.ids import JobId
from swarmsched.record import JobRecord

Stamp = tuple[int, int]
"""(epoch, version) of a record."""


class Asker(Enum):
    """Who wants to know what becomes of a request; the answer goes to it alone."""

    SHEPHERD = auto()  # of the job
    CREATION = auto()  # for clients: a first record
    RECOVERY = auto()  # for an operator: a forced takeover
    ELECTION = auto()
    READ_REPAIR = auto()
    REPLACEMENT = auto()  # of holders that are lost


class UpdateRequested(Value):
    """Replace the record whose stamp is `expected` (None: there must be none) by `value`.

    `configuration` is that of the record to be replaced, as far as the caller knows, or of the first one.  A value with
    another configuration changes the holders.  With `takes_over` the value names another shepherd than the present
    one, and holders whose lease to the present one runs do not vote for it: if too many refuse, the answer is an
    `UpdateUncertain` ("... still has its lease") at once, so that the caller chooses when to try again.

    With `is_forced` only the holders of the value are asked: an operator has given up the others.  Nothing is compared
    then but the epoch, which must be above that of the newest record among those asked; else it conflicts.

    `is_issued_here` says of a first record that its ticket was issued by this node in this life of its process, and was
    not used before.

    A change of holders must be joint: the value keeps the present holders as its `leaving_holders`, and a later update
    takes those away.  Where the record that is found has holders that the value's may not follow, it conflicts.

    Answered by exactly one of `UpdateDecided`, `UpdateConflicted`, `UpdateUncertain` and `JobOver` with the same id.
    Repeating a request whose value is still the current one is decided again.
    """

    update_id: int
    job_id: JobId
    configuration: Configuration
    expected: Stamp | None
    value: JobRecord
    takes_over: bool = False
    is_forced: bool = False
    is_issued_here: bool = False
    asker: Asker = Asker.SHEPHERD


class ReadRequested(Value):
    """Read linearizably.  Answered by `ReadDecided`, `JobOver`, or `UpdateUncertain` when no majority answers.

    With `spreads` the record is also sent to all its holders again, and, while it is open, to whoever asks: one that
    has missed it gets it so, and one that is no holder any more learns that.
    """

    update_id: int
    job_id: JobId
    configuration: Configuration
    spreads: bool = False
    asker: Asker = Asker.SHEPHERD


class RecordAccepted(Value):
    """This node's acceptor has taken over a record; with several holders it may not be decided yet.

    `is_by_shepherd` is False for one that somebody else found and had accepted again: its shepherd may be long gone.
    """

    record: JobRecord
    is_by_shepherd: bool = True


class EndConfirmed(Value):
    """The ended record that this node's acceptor has taken over is decided."""

    job_id: JobId


Request = UpdateRequested | ReadRequested


class UpdateDecided(Value):
    """A majority of the holders has the record on disk."""

    update_id: int
    record: JobRecord


class UpdateConflicted(Value):
    """Nothing was written by this request: the current record is another one than the caller believed."""

    update_id: int
    current: JobRecord | None


class UpdateUncertain(Value):
    """Written or not, nobody here can tell; read, or repeat the same request."""

    update_id: int
    reason: str


class UpdateRefused(UpdateUncertain):
    """Never written, however often it is repeated: it cannot be stored."""


class ReadDecided(Value):
    """The current record; None when the register was never written."""

    update_id: int
    record: JobRecord | None


class JobOver(Value):
    """Some holder had the job's decided end and keeps it no more.  Whatever record is here may be dropped."""

    update_id: int
    job_id: JobId


Result = UpdateDecided | UpdateConflicted | UpdateUncertain | ReadDecided | JobOver
