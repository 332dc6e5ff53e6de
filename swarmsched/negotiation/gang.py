"""The tasks of one attempt as their owners have told of them, and what they amount to."""

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from swarmsched.api import EndReason, JobState, StartPhase
from swarmsched.effects import SendPeer
from swarmsched.fields import Value
from swarmsched.ids import NodeId, Place
from swarmsched.ledger.message import ReleaseRequest, TaskReportReceived
from swarmsched.negotiation.outcome import Failures
from swarmsched.record import JobRecord
from swarmsched.resources import Share
from swarmsched.task import TaskFailure, TaskStage, TaskStatus
from swarmsched.world import WorkerState

DISMISSAL_COMMAND_ID = 2**32 - 2  # of a release that answers a stray report; others count from 1
STAGING = (StartPhase.SYNC, StartPhase.ENVIRONMENT)
HEAR_OWNERS_S = 0.5  # that a new shepherd waits for one of a gang's owners to say for how long it has run
INFERRED_GENERATION = 2**53  # of a status that we inferred: above all that an owner sends


class RigidGang:
    """How a gang of fixed size behaves, in answer to the questions that its shepherd has."""

    def is_ended_by(self, dead: Collection[Place], gang: "Gang", record: JobRecord) -> bool:
        """What deaths cost: the whole gang, for the others would wait in a collective for ever."""
        return any(share.place in dead for share in gang.shares)

    def failures(self, gang: "Gang", record: JobRecord) -> Failures:
        """What failed first, if anything did, of a gang that is over."""
        return gang.failures


class ElasticGang(RigidGang):
    """How a gang behaves whose members come and go while it trains."""

    def is_ended_by(self, dead: Collection[Place], gang: "Gang", record: JobRecord) -> bool:
        """When nobody is left who could give the state of the training to others, or with a part of another group."""
        if any(share.group and share.place in dead for share in gang.shares):
            return True
        places = [share.place for share in record.members]
        left = [gang.tasks.get(place) for place in places if place not in dead and not gang.has_exited(place)]
        return not any(not record.world.has_trained or may_have_trained(task) for task in left)

    def failures(self, gang: "Gang", record: JobRecord) -> Failures:
        """None where a member came to the end of the training; of those that have left nothing counts.

        What failed first in another group has ended the others, whatever became of these.
        """
        found = Failures()
        failures = gang.failures
        first = failures.rank[0] if failures.rank else failures.task.place if failures.task else None
        group = next((share.group for share in gang.shares if share.place == first), 0)
        for share in record.members:
            task = gang.tasks.get(share.place)
            if task is not None and is_clean(task):
                return Failures()
            if task is not None:
                found.see(_blamed(task, gang, f"worker {task.part}"))
        if group and first is not None:
            found = Failures()
            found.see(_blamed(gang.tasks[first], gang, f"group {record.spec.groups[group - 1].name}"))
        return found


RIGID, ELASTIC = RigidGang(), ElasticGang()


def may_have_trained(task: TaskStatus | None) -> bool:
    """A worker that has the state of the training, by its own word, or one that has not spoken (to us) yet."""
    return task is None or task.worker.state is WorkerState.UNKNOWN or task.worker.trains > 0


def _blamed(task: TaskStatus, gang: "Gang", name: str) -> TaskStatus:
    """The same of a task that ended, called by that name; as lost where that was done to it.

    That is so of one that was killed, or left alone by the others.  What the kernel killed for its memory has failed,
    and so has a worker that refuses a world.  A newcomer that was stopped with the others is nobody's loss.
    """
    is_victim = gang.is_stopping and not may_have_trained(task)
    if task.failure is not TaskFailure.NONE or is_victim or not task.exits:
        return task
    worker, where = task.worker, f"{name} on {task.node}"
    if worker.trains and worker.failed >= worker.trains and worker.state is not WorkerState.REFUSED:
        told = f"{where} lost the others, and went on in no other world"
        return replace(task, failure=TaskFailure.LOST, detail=told, exits=())
    if all(each.signal and not each.is_oom for each in task.exits):
        told = f"{where} was killed by signal {task.exits[0].signal}"
        return replace(task, failure=TaskFailure.LOST, detail=told)
    return task


def is_clean(task: TaskStatus) -> bool:
    """True where a task's ranks ended by themselves, and all went well."""
    has_ended = task.stage is TaskStage.EXITED and bool(task.exits) and task.failure is TaskFailure.NONE
    return has_ended and not any(each.exit_code or each.signal for each in task.exits)


class GangEnd(Value):
    """No process of a gang is left: since when, for how long it had run, and what the record said then of a stop."""

    at_s: float
    ran_s: float
    stop_reason: EndReason


class Gang:
    """One attempt's tasks by place, how long they have run, and the order to stop; a new attempt is a new gang."""

    def __init__(self, shares: Sequence[Share] = ()) -> None:
        self.shares = shares
        self.failures = Failures()
        self.has_started = self.has_ended = False  # all who must have; no process is left
        self.phase = StartPhase.LAUNCH  # how far the slowest part of the start is
        self.is_heard = False
        self.end: GangEnd | None = None
        self.tasks: dict[Place, TaskStatus] = {}  # as told last
        self.revision = 0  # of what is told
        self.running_since_s = float("inf")
        self.hears_owners_until_s = 0.0  # before that it is not given up: its service would be forgotten
        self.is_warming = False  # its ranks have begun under us, and told nothing of their training yet
        self.is_stopping = False  # one failure dooms all
        self.stop_again_s = float("inf")  # when the ranks are next told to stop
        self.stop_grace_s: float | None = None  # None: as its people have said

    # What owners tell.

    def put(self, status: TaskStatus, record: JobRecord, now_s: float) -> None:
        """The newest that is known of one task, and since when what it amounts to."""
        self.tasks[status.place] = status
        self.revision += 1
        self.failures.see(status)
        self.is_heard = True
        phases = {each.phase for each in self.tasks.values()}
        self.phase = next((each for each in STAGING if each.value in phases), StartPhase.LAUNCH)
        self.has_started = all(self._has_started(share.place) for share in self.shares)
        if status.ran_s and record.started_utc_s:
            self.hears_owners_until_s = 0.0
            self.running_since_s = min(self.running_since_s, now_s - status.ran_s)
        if self.has_started and record.state is JobState.STARTING:
            self.running_since_s = min(self.running_since_s, now_s)
        self._note_end(record, now_s)

    def has(self, record: JobRecord, now_s: float) -> list[SendPeer]:
        """The gang's parts are those of the record from now on; acknowledgements of what others have told last."""
        self.shares = record.shares
        self.revision += 1
        places = {share.place for share in record.shares}
        gone = [self.tasks.pop(place) for place in list(self.tasks) if place not in places]
        self._note_end(record, now_s)
        return [heard(status) for status in gone if status.generation < INFERRED_GENERATION]

    def _note_end(self, record: JobRecord, now_s: float) -> None:
        """Nobody of it is left, since this moment if it was not seen before."""
        self.has_ended = bool(self.shares) and not self.unfinished()
        if self.has_ended and self.end is None:
            self.end = GangEnd(now_s, now_s - self.running_since_s, record.stop_reason)

    def dismissed(self) -> list[SendPeer]:
        """Acknowledgements of all that owners have told, and not we ourselves inferred; then nobody asks any more."""
        told, self.tasks = self.tasks.values(), {}
        return [heard(status) for status in told if status.generation < INFERRED_GENERATION]

    def took_up(self, record: JobRecord, now_s: float) -> None:
        """Another shepherd has left it running: its owners tell for how long, if they do so soon."""
        if record.started_utc_s:
            self.running_since_s, self.hears_owners_until_s = now_s - record.counted_s, now_s + HEAR_OWNERS_S

    def began(self) -> None:
        """The gang's ranks have begun under us."""
        self.is_warming = True

    def trains(self) -> bool:
        """The gang's ranks have told of their training: True for the first time."""
        was_warming, self.is_warming = self.is_warming, False
        return was_warming

    # Questions.

    def has_exited(self, place: Place) -> bool:
        """No process is left there."""
        task = self.tasks.get(place)
        return task is not None and task.stage is TaskStage.EXITED

    def _has_started(self, place: Place) -> bool:
        """Its ranks run, or have run; of a start that failed, some may have an exit code, and none has run."""
        task = self.tasks.get(place)
        if task is None or task.stage is not TaskStage.EXITED:
            return task is not None and task.stage is TaskStage.STARTED
        return bool(task.exits) and task.failure in (TaskFailure.NONE, TaskFailure.LOST)

    def unfinished(self) -> list[Place]:
        """Parts that have processes, or may have."""
        return [share.place for share in self.shares if not self.has_exited(share.place)]

    def ran_s(self, now_s: float) -> float:
        """For how long it has run, or had until its end."""
        return max(0.0, self.end.ran_s if self.end else now_s - self.running_since_s)

    # The order to stop.

    def allow_grace(self, grace_s: float | None) -> None:
        """The gang's ranks get that long when they are told to stop; None: as long as its people have said."""
        self.stop_grace_s = grace_s

    def stop(self, now_s: float) -> None:
        """The gang's ranks are to be told to stop, again if they were told before."""
        self.stop_again_s = now_s

    def doom(self, grace_s: float, now_s: float) -> None:
        """One failure costs all others their lives."""
        self.is_stopping, self.stop_grace_s, self.stop_again_s = True, grace_s, now_s

    def told_to_stop(self, again_s: float) -> None:
        """The gang's ranks were told to stop, and are told again then."""
        self.stop_again_s = again_s


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
