"""What a shepherd says to an owner's report: heard, and what becomes of a task that nobody wants any more."""

from collections.abc import Iterable

from swarmsched.effects import SendPeer
from swarmsched.ids import NodeId
from swarmsched.ledger.message import ReleaseRequest, TaskReportReceived
from swarmsched.record import JobRecord
from swarmsched.task import TaskStage, TaskStatus

DISMISSAL_COMMAND_ID = 2**32 - 2  # of a release that answers a stray report; others count from 1
INFERRED_GENERATION = 2**53  # of a status that we inferred: above all that an owner sends


def heard(status: TaskStatus) -> SendPeer:
    """The acknowledgement of a report; of an exit only once its result is in the register, or wanted by nobody."""
    received = TaskReportReceived(status.job_id, status.attempt, status.revision, status.generation)
    return SendPeer(status.node, received)


def all_heard(statuses: Iterable[TaskStatus]) -> list[SendPeer]:
    """Acknowledgements of all that an owner has told, and not we ourselves inferred."""
    return [heard(status) for status in statuses if status.generation < INFERRED_GENERATION]


def dismissal(record: JobRecord, me: NodeId, status: TaskStatus) -> list[SendPeer]:
    """A report of an attempt that is over: heard, and released in case the first release was lost."""
    if status.stage is TaskStage.EXITED:
        return [heard(status)]
    release = ReleaseRequest(record.job_id, record.epoch, status.attempt, DISMISSAL_COMMAND_ID, me)
    return [heard(status), SendPeer(status.node, release)]
