"""The job record: the value of a job's register, and all that is durable about a job."""

from enum import Enum
from typing import Annotated, Self

from msgspec import Meta
from msgspec.structs import replace

from swarmsched.api import EndReason, JobSpec, JobState, StartPhase
from swarmsched.checkpoint import Checkpoint
from swarmsched.fields import I32, U16, U32, U53, Amount, Host, Job, NodeName, Part, Port, Text, Value, cleaned
from swarmsched.holders import HOLDERS_MAX, Configuration, Holders
from swarmsched.ids import Place
from swarmsched.resources import Share, Shares, gpus_of, of_first, of_others, world_size
from swarmsched.specification import GROUPS_LIMIT
from swarmsched.task import Meeting, TaskFailure
from swarmsched.world import World

SIGTERM = 15
LEFTOVERS_MOST = 4_096
START_FAULTS_MOST = 64
RESCALINGS_KEPT, RESCALING_REASON_LENGTH = 8, 120
FORCED_LEAP = 1_000
"""Of epochs and of attempts, by a forced recovery: the lost holders may have counted further."""


class PlanState(Enum):
    """How far the current attempt's placement has come (protocol, plane D)."""

    NONE = "none"
    PREPARED = "prepared"  # every owner holds; durable before any commit
    LAUNCHED = "launched"  # every owner committed; ranks may run
    ABORTED = "aborted"


class Leftover(Value):
    """A task of an earlier attempt that may still have processes: nothing new starts before it is settled.

    `origin` is that of its share: whoever else answers under the node's name knows nothing of it.
    """

    node: NodeName
    attempt: U32
    origin: U53 = 0  # not compared
    part: Part = 0

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place(self.node, self.part)

    def __eq__(self, other: object) -> bool:
        return type(other) is Leftover and (self.place, self.attempt) == (other.place, other.attempt)

    def __hash__(self) -> int:
        return hash((self.place, self.attempt))


class Rescaling(Value):
    """One change of a job's size or hosts; `ranks_after` and `pause_s` are 0 until its ranks run again."""

    utc_s: Amount  # when it was decided
    ranks_before: U16
    ranks_after: U16 = 0
    pause_s: Amount = 0.0  # from the decision until all ranks ran again
    reason: Annotated[str, Meta(max_length=RESCALING_REASON_LENGTH)] = ""
    is_forced: bool = False  # by what was lost or failed, not for anybody's gain


class StartFault(Value):
    """A start that failed for a reason that is not known to be the job's: under which number, where, and of what."""

    attempt: U32
    node: NodeName
    failure: TaskFailure


class JobRecord(Value):
    """One job.  `(epoch, version)` grows with every update; only the shepherd of `epoch` writes.

    Times are seconds since 1970 and serve display and submit order only.
    """

    job_id: Job
    spec: JobSpec
    submitted_utc_s: Amount
    epoch: U32
    version: U32
    shepherd: NodeName
    shepherd_generation: U53  # 0: it was named by another, and has not acted yet
    holders: Holders
    state: JobState = JobState.QUEUED
    phase: StartPhase = StartPhase.NONE
    reason: Text = ""  # why it is in this state, for people
    attempt: U32 = 0
    plan_state: PlanState = PlanState.NONE
    shares: Shares = ()
    rendezvous_host: Host = ""
    rendezvous_port: Port = 0
    started_utc_s: Amount = 0.0  # ranks of the current attempt began to run
    ended_utc_s: Amount = 0.0
    attained_gpu_s: Amount = 0.0  # of finished attempts; a running one adds GPUs x elapsed
    stop_reason: EndReason = EndReason.NONE  # set once the job is being stopped on purpose
    exit_code: I32 = 0
    signal: U16 = 0
    end_reason: EndReason = EndReason.NONE
    detail: Text = ""  # what failed where, for people
    failed_node: Annotated[str, Meta(max_length=63)] = ""
    failed_rank: I32 = -1
    is_forced: bool = False  # an operator overrode a lost quorum
    first_started_utc_s: Amount = 0.0
    relaunches: U32 = 0  # of the current job for reasons that are not its own
    leaving_holders: Holders = ()  # while holders change: a majority of these must agree as well
    leftovers: Annotated[tuple[Leftover, ...], Meta(max_length=LEFTOVERS_MOST)] = ()
    restarts: U32 = 0  # attempts whose ranks had run and were lost with a node
    preemptions: U32 = 0
    checkpoint: Checkpoint | None = None  # what the next attempt resumes from
    rescales: U32 = 0  # attempts that were ended for another size or other hosts
    global_batch: U32 = 0  # that the ranks are told to train with; 0: they have chosen themselves
    scalings: U32 = 0  # how often people have changed its sizes
    rescalings: Annotated[tuple[Rescaling, ...], Meta(max_length=RESCALINGS_KEPT)] = ()  # the last ones, oldest first
    world: World = World()  # frozen; of an elastic attempt, from its start on
    last_part: Part = 0  # the highest number that a part of this attempt was given
    counted_s: Amount = 0.0  # of this attempt, for which `attained_gpu_s` has its service already
    start_faults: Annotated[tuple[StartFault, ...], Meta(max_length=START_FAULTS_MOST)] = ()  # since its ranks ran last
    paused_s: Amount = 0.0  # all changes of its size or hosts together, but for forced ones
    meetings: Annotated[tuple[Meeting, ...], Meta(max_length=GROUPS_LIMIT)] = ()  # of groups beside the first
    secret: Annotated[str, Meta(max_length=32)] = ""  # that ranks of this attempt's groups show one another

    @property
    def stamp(self) -> tuple[int, int]:
        """(epoch, version): larger is newer."""
        return (self.epoch, self.version)

    @property
    def configuration(self) -> Configuration:
        """Who holds this record."""
        return Configuration(self.holders, self.leaving_holders)

    @property
    def gpus(self) -> int:
        """What it holds; what it wants at least while it holds nothing."""
        return gpus_of(self.shares, self.spec.needs) if self.shares else self.spec.total_gpus

    @property
    def members(self) -> tuple[Share, ...]:
        """Parts of an elastic attempt that train, in rank order; none before its start."""
        shares = {share.part: share for share in self.shares}
        return tuple(shares[part] for part in self.world.members if part in shares)

    @property
    def training(self) -> tuple[Share, ...]:
        """Parts that train, or are to as soon as all have started: of a gang of fixed size all of the first group."""
        return self.members or of_first(self.shares)

    @property
    def nearest_size(self) -> int:
        """Of the world sizes that it is to have, that which is nearest to the one that it has."""
        least, most = self.spec.ranks, max(self.spec.ranks, self.spec.ranks_most)
        return min(max(least, world_size(self.training)), most)

    @property
    def is_misfit(self) -> bool:
        """True for a live job with ranks that are more or fewer than it is to have."""
        return bool(self.shares) and not self.is_ended and self.nearest_size != world_size(self.training)

    @property
    def serving_gpus(self) -> int:
        """GPUs of the parts that train: what is held for newcomers, and by those that leave, serves nobody."""
        return gpus_of((*self.training, *of_others(self.shares)), self.spec.needs)

    @property
    def leaving(self) -> tuple[Share, ...]:
        """Parts of an elastic attempt that train no more, or never did, and may have processes."""
        world = self.world
        wanted = (*world.members, *world.joining)
        return tuple(each for each in of_first(self.shares) if each.part not in wanted) if world.version else ()

    @property
    def joining(self) -> tuple[Share, ...]:
        """Parts of an elastic attempt that are started beside those that train."""
        return tuple(share for share in self.shares if share.part in self.world.joining)

    @property
    def has_own_checkpoint(self) -> bool:
        """True when its present attempt has committed one: little would be lost if it ended now."""
        return self.checkpoint is not None and self.checkpoint.attempt == self.attempt

    @property
    def pause_s(self) -> float:
        """What a change of its size has cost it, in the upper median of the last ones; 0 where none was measured."""
        pauses_s = sorted(each.pause_s for each in self.rescalings if each.ranks_after)
        return pauses_s[len(pauses_s) // 2] if pauses_s else 0.0

    @property
    def changed_utc_s(self) -> float:
        """When the last change of its size or hosts was decided that nothing forced; 0: there was none."""
        return next((each.utc_s for each in reversed(self.rescalings) if not each.is_forced), 0.0)

    @property
    def attempts_in_doubt(self) -> int:
        """Up to this number, attempts may have begun of which nothing is known since a forced recovery."""
        return self.epoch // FORCED_LEAP * FORCED_LEAP if self.is_forced else 0

    @property
    def is_ended(self) -> bool:
        """True once nothing about the job changes any more."""
        return self.state is JobState.ENDED

    def updated(self, **changes: object) -> Self:
        """A copy with changes and the next version; texts from outside are made fit for a record.

        The lowest versions are set apart for first records, one for each holder: those whom a ticket is given to at
        once make records that differ, and a stamp must not name two.
        """
        changes |= {name: cleaned(str(changes[name])) for name in ("reason", "detail") if name in changes}
        return replace(self, **{"version": max(self.version, HOLDERS_MAX) + 1, **changes})


def own_exit_code(record: JobRecord) -> int | None:
    """The code that an ended job's ranks gave; None where something else ended it: a signal, a limit, a lost node."""
    is_stopped = record.end_reason is EndReason.CANCELLED and not record.exit_code
    is_cut_short = record.end_reason in (EndReason.TIMEOUT, EndReason.NODE_LOST)
    return None if record.signal or is_stopped or is_cut_short else record.exit_code


def shell_exit_code(record: JobRecord) -> int:
    """The code that `swarm run` returns for an ended job (user-visible contract, docs/reference/cli.md)."""
    if record.end_reason is EndReason.TIMEOUT:
        return 124
    if record.end_reason is EndReason.NODE_LOST:
        return 125
    if record.signal:
        return 128 + record.signal
    if record.end_reason is EndReason.CANCELLED and not record.exit_code:
        return 128 + SIGTERM  # ranks that obeyed with 0, or never ran, are no success
    return record.exit_code
