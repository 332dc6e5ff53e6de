"""The tasks of one attempt as their owners have told of them, and what they amount to."""

from collections.abc import Iterable, Sequence

from swarmsched.api import StartPhase
from swarmsched.effects import SendPeer
from swarmsched.ids import NodeId
from swarmsched.ledger.message import ReleaseRequest, TaskReportReceived
from swarmsched.negotiation.outcome import Failures
from swarmsched.record import JobRecord
from swarmsched.resources import Share
from swarmsched.task import TaskStage, TaskStatus

DISMISSAL_COMMAND_ID = 2**32 - 2  # of a release that answers a stray report; others count from 1
INFERRED_GENERATION = 2**53  # of a status that we inferred: above all that an owner sends


class Gang:
    """One attempt's tasks by node; a new attempt is a new gang.  `is_stopping` once one failure dooms all."""

    def __init__(self) -> None:
        self.failures = Failures()
        self.is_stopping = False
        self._tasks: dict[NodeId, TaskStatus] = {}

    def put(self, status: TaskStatus) -> None:
        """The newest that is known of one task."""
        self._tasks[status.node] = status
        self.failures.see(status)

    def task(self, node: NodeId) -> TaskStatus | None:
        """What that node has told last."""
        return self._tasks.get(node)

    @property
    def phase(self) -> StartPhase:
        """How far the slowest part of the start is."""
        phases = {status.phase for status in self._tasks.values()}
        for phase in (StartPhase.SYNC, StartPhase.ENVIRONMENT):
            if phase.value in phases:
                return phase
        return StartPhase.LAUNCH

    def have_all_started(self, shares: Sequence[Share]) -> bool:
        """Every task's ranks run, or have run."""
        tasks = [self._tasks.get(share.node) for share in shares]
        return all(task is not None and _has_started(task) for task in tasks)

    def have_all_exited(self, shares: Sequence[Share]) -> bool:
        """No process of any of them is left."""
        return bool(shares) and all(self.has_exited(share.node) for share in shares)

    def has_exited(self, node: NodeId) -> bool:
        """No process is left there."""
        task = self._tasks.get(node)
        return task is not None and task.stage is TaskStage.EXITED

    def unfinished(self, shares: Iterable[Share]) -> list[NodeId]:
        """Nodes that have processes, or may have."""
        return [share.node for share in shares if not self.has_exited(share.node)]

    def dismissed(self) -> list[SendPeer]:
        """Acknowledgements of all that was told; the gang is of no interest any more."""
        told, self._tasks = all_heard(self._tasks.values()), {}
        return told


def _has_started(status: TaskStatus) -> bool:
    return status.stage is TaskStage.STARTED or (status.stage is TaskStage.EXITED and bool(status.exits))


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
