"""What one node runs for one attempt of a job: the order to start it and the facts that come back.

A *task* is a job's part on one node: one shim, one or more ranks.  Its key is a `TaskKey`.
"""

from enum import Enum
from typing import Annotated, Self

from msgspec import Meta

from swarmsched.api import JobSpec
from swarmsched.checkpoint import Checkpoint
from swarmsched.fields import I32, U16, U32, U53, Amount, Host, Job, Name, NodeName, Part, Port, Text, Value
from swarmsched.holders import Configuration
from swarmsched.ids import AttemptKey, Place, TaskKey
from swarmsched.resources import SHARES_MOST, Shares
from swarmsched.specification import GROUPS_LIMIT
from swarmsched.world import Worker

RENDEZVOUS_PORTS_PER_GPU = 20


class OfAttempt(Value):
    """What is about one attempt of a job, and begins with its key."""

    job_id: Job
    attempt: U32

    @property
    def of_attempt(self) -> AttemptKey:
        """Of the attempt."""
        return AttemptKey(self.job_id, self.attempt)


class OfPart(Value, kw_only=True):
    """What is about a part of a gang: its number is the last field, for older peers know none."""

    part: Part = 0


class OfTask(OfPart):
    """What is about one task, and begins with its key."""

    job_id: Job
    attempt: U32

    @property
    def key(self) -> TaskKey:
        """Of the task."""
        return TaskKey(self.job_id, self.attempt, self.part)

    @classmethod
    def about(cls, key: TaskKey, *rest: object, **more: object) -> Self:
        """The same of a key, with the fields that follow it."""
        return cls(key.job_id, key.attempt, *rest, part=key.part, **more)


class Meeting(Value):
    """Where the ranks of one group meet: a port on the node of its first rank."""

    host: Host = ""
    port: Port = 0


class GroupPlace(Value):
    """One group of a job, as the ranks of all of its groups are told of it."""

    name: Name
    ranks: U16
    nodes: Annotated[tuple[NodeName, ...], Meta(max_length=SHARES_MOST)]
    meeting: Meeting = Meeting()  # frozen; none of workers of an elastic job, which meet by themselves


class TaskOrder(Value):
    """Everything an owner needs to run its part of a gang.

    `shares` lists the whole gang in rank order, of several groups the one that this order is of, and `spec` is that
    group's own; `node` is the one that this order is for.  Ranks are numbered through the shares: the first share has
    ranks 0 to ranks-1, and so on.
    """

    job_id: Job
    epoch: U32
    attempt: U32
    node: NodeName
    spec: JobSpec
    shares: Shares
    rendezvous_host: Host
    rendezvous_port: Port
    configuration: Configuration = Configuration()  # frozen; whose word the ranks run on
    version: U32 = 0  # of the record that this was made from
    checkpoint: Checkpoint | None = None  # to resume from
    global_batch: U32 = 0  # as in the record
    part: Part = 0
    first_number: U32 = 0  # of this group's first rank among all ranks of the attempt
    groups: Annotated[tuple[GroupPlace, ...], Meta(max_length=GROUPS_LIMIT + 1)] = ()  # all of them, where several
    secret: Annotated[str, Meta(max_length=32)] = ""  # that their ranks show one another

    @property
    def is_worker(self) -> bool:
        """True of a part of an elastic gang, which has one rank, and a number in place of it."""
        return self.part > 0 and self.is_of_first_group

    @property
    def is_of_first_group(self) -> bool:
        """True for ranks of the group that trains; the others serve it."""
        return not self.groups or self.groups[0].name == self.spec.group

    @property
    def key(self) -> TaskKey:
        """Of the task that it starts."""
        return TaskKey(self.job_id, self.attempt, self.part)

    @property
    def world_size(self) -> int:
        """Ranks that train together."""
        return sum([share.ranks for share in self.shares])

    @property
    def node_rank(self) -> int:
        """Position of this part in the gang."""
        return [share.place for share in self.shares].index(Place(self.node, self.part))

    @property
    def rank_in_group(self) -> int:
        """Rank of this part's first process among those of its group."""
        return sum([share.ranks for share in self.shares[: self.node_rank]])

    @property
    def first_rank(self) -> int:
        """Number of this part's first process among all ranks; an elastic one, whose rank changes, keeps its own."""
        return self.part - 1 if self.is_worker else self.first_number + self.rank_in_group

    @property
    def local_ranks(self) -> int:
        """Ranks on this node."""
        return self.shares[self.node_rank].ranks

    @property
    def needs_staging(self) -> bool:
        """True when files, an environment or a checkpoint must reach the node, or rank 0 be probed from there."""
        is_apart = self.node_rank > 0 and not self.is_worker
        return bool(self.spec.tree or self.spec.requirements or self.checkpoint) or is_apart


class RankExit(Value):
    """How one rank ended: `exit_code` 0 to 255, or `signal` above 0 when a signal killed it (exit_code then 0)."""

    rank: U32
    exit_code: I32
    signal: U16 = 0
    is_oom: bool = False


class TaskFailure(Enum):
    """Why a task could not be started, as far as it changes what the shepherd does next."""

    NONE = ""
    SYNC = "sync"  # the working directory could not be brought or unpacked
    ENVIRONMENT = "environment"  # building the requirements failed
    UNREACHABLE = "unreachable"  # not to be had here: rank 0's rendezvous port, those who have files, room for them
    PORT_TAKEN = "port_taken"  # the rendezvous port was lost between bind and exec
    NOT_FOUND = "not_found"  # command does not exist (127)
    NOT_EXECUTABLE = "not_executable"  # command may not be executed (126)
    INTERNAL = "internal"  # this node could not start it, whatever it is: no process, descriptor or disk to be had
    LOST = "lost"  # the shim is gone and left no exit record (power cut, kill -9 of the shim)


class TaskStage(Enum):
    """How far a task has come on its owner."""

    ORDERED = "ordered"
    STAGED = "staged"
    LAUNCHED = "launched"  # the shim was asked to start
    STARTED = "started"  # ranks are running
    EXITED = "exited"  # all ranks and their descendants are gone


class TaskStatus(Value):
    """A task as its owner knows it; sent to the shepherd whenever it changed, until acknowledged."""

    job_id: Job
    epoch: U32
    attempt: U32
    node: NodeName
    stage: TaskStage
    exits: Annotated[tuple[RankExit, ...], Meta(max_length=4_096)] = ()
    failure: TaskFailure = TaskFailure.NONE
    detail: Text = ""
    phase: Annotated[str, Meta(max_length=16)] = ""  # StartPhase value while staging
    revision: U32 = 0  # grows with each change in one life of the owner's agent
    generation: U53 = 0  # that life: after a restart revisions begin anew
    is_frozen: bool = False  # its node has lost contact with the job's holders
    ran_s: Amount = 0.0  # since its ranks were started, by its owner's monotonic clock; 0: they were not, or not known
    part: Part = 0
    worker: Worker = Worker()  # frozen; of an elastic part
    is_ailing: bool = False  # a GPU of its has failed

    @property
    def key(self) -> TaskKey:
        """Of the task that it tells of."""
        return TaskKey(self.job_id, self.attempt, self.part)

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place(self.node, self.part)

    @property
    def news(self) -> tuple[int, int]:
        """(generation, revision): larger is newer."""
        return (self.generation, self.revision)
