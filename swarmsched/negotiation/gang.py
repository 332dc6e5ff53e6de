"""The tasks of one attempt as their owners have told of them, and what they amount to."""

from collections.abc import Collection, Sequence

from swarmsched.api import EndReason, StartPhase
from swarmsched.effects import SendPeer
from swarmsched.fields import Value
from swarmsched.ids import NodeId, Place
from swarmsched.ledger.message import ReleaseRequest, TaskReportReceived
from swarmsched.negotiation.outcome import Failures
from swarmsched.record import JobRecord
from swarmsched.resources import Share
from swarmsched.task import TaskFailure, TaskStage, TaskStatus

DISMISSAL_COMMAND_ID = 2**32 - 2  # of a release that answers a stray report; others count from 1
STAGING = (StartPhase.SYNC, StartPhase.ENVIRONMENT)
INFERRED_GENERATION = 2**53  # of a status that we inferred: above all that an owner sends


class Rigid:
    """How a gang of fixed size behaves, in answer to the three questions that its shepherd has."""

    def ended_by_deaths(self, dead: Collection[Place], shares: Sequence[Share]) -> Sequence[Share]:
        """What one death costs: all of it, for the others would wait in a collective for ever."""
        return shares if any(share.place in dead for share in shares) else ()

    def must_start(self, shares: Sequence[Share]) -> Sequence[Share]:
        """Who must have started before the job runs: everybody."""
        return shares

    def served_gpu_s(self, record: JobRecord, ran_s: float) -> float:
        """What is served: GPU-seconds of the attempt that now ends (Tiresias' attained service, W x t).

        `ran_s` is a duration on a monotonic clock: a wall clock that jumps must not add or take service.
        """
        return record.gpus * ran_s if record.started_utc_s and record.shares else 0.0


RIGID = Rigid()


class GangEnd(Value):
    """No process of a gang is left: since when, for how long it had run, and what the record said then of a stop."""

    at_s: float
    ran_s: float
    stop_reason: EndReason


class Gang:
    """One attempt's tasks by place; a new attempt is a new gang.  `is_stopping` once one failure dooms all."""

    def __init__(self, shares: Sequence[Share] = (), conduct: Rigid = RIGID) -> None:
        self.shares = shares
        self.failures = Failures()
        self.has_started = self.has_ended = False  # all who must have; no process is left
        self.phase = StartPhase.LAUNCH  # how far the slowest part of the start is
        self.is_heard = self.is_stopping = False
        self.end: GangEnd | None = None
        self._conduct = conduct
        self.tasks: dict[Place, TaskStatus] = {}  # as told last

    def put(self, status: TaskStatus) -> None:
        """The newest that is known of one task."""
        self.tasks[status.place] = status
        self.failures.see(status)
        self.is_heard = True
        phases = {each.phase for each in self.tasks.values()}
        self.phase = next((each for each in STAGING if each.value in phases), StartPhase.LAUNCH)
        self.has_started = all(self._has_started(share.place) for share in self._conduct.must_start(self.shares))
        self.has_ended = bool(self.shares) and not self.unfinished()

    def has_exited(self, place: Place) -> bool:
        """No process is left there."""
        task = self.tasks.get(place)
        return task is not None and task.stage is TaskStage.EXITED

    def _has_started(self, place: Place) -> bool:
        """Its ranks run, or have run."""
        task = self.tasks.get(place)
        return task is not None and (task.stage is TaskStage.STARTED or (self.has_exited(place) and bool(task.exits)))

    def unfinished(self) -> list[Place]:
        """Parts that have processes, or may have."""
        return [share.place for share in self.shares if not self.has_exited(share.place)]

    def dismissed(self) -> list[SendPeer]:
        """Acknowledgements of all that owners have told, and not we ourselves inferred; then nobody asks any more."""
        told, self.tasks = self.tasks.values(), {}
        return [heard(status) for status in told if status.generation < INFERRED_GENERATION]


def gone(record: JobRecord, attempt: int, place: Place, failure: TaskFailure, detail: str = "") -> TaskStatus:
    """What a shepherd infers of a task of which nothing is left."""
    task, told = (record.job_id, record.epoch, attempt, place.node), (failure, detail)
    return TaskStatus(*task, TaskStage.EXITED, (), *told, generation=INFERRED_GENERATION, part=place.part)


def heard(status: TaskStatus) -> SendPeer:
    """The acknowledgement of a report; of an exit only once its result is in the register, or wanted by nobody."""
    received = TaskReportReceived.about(status.key, status.revision, status.generation)
    return SendPeer(status.node, received)


def dismissal(record: JobRecord, me: NodeId, status: TaskStatus) -> list[SendPeer]:
    """A report of an attempt that is over: heard, and released in case the first release was lost."""
    if status.stage is TaskStage.EXITED:
        return [heard(status)]
    numbers = (record.job_id, record.epoch, status.attempt, DISMISSAL_COMMAND_ID)
    release = ReleaseRequest(*numbers, me, part=status.part)
    return [heard(status), SendPeer(status.node, release)]
