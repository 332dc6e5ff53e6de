"""What a policy sees and what it answers: a read-only picture of the swarm in, decisions with reasons out.

A policy does not know that gossip exists: a job's view is its card with the time at which it was true, and whatever
grows with time is asked for a moment.  Memory and history are inputs, so that the same view gives the same plan: what a
policy wants to remember it writes into its plan, and finds in the next view.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Protocol

from msgspec import Meta, field

from swarmsched.api import JobState
from swarmsched.card import NAME_LENGTH, JobCard, RankKey
from swarmsched.estimate import Estimate, Pool
from swarmsched.fields import U32, U53, Amount, Job, Name, NodeName, Real, Text, Value
from swarmsched.ids import JobId, NodeId
from swarmsched.program import PROGRAM_LENGTH
from swarmsched.resources import Demand, Free, Share, Shares, with_beside, world_size

JOBS_LIMIT = 40_000
NODES_LIMIT = 20_000
HISTORY_LIMIT = 512
MEMORY_BYTES_LIMIT = 262_144
KINDS_LIMIT = 1_024
TABLE_BYTES_LIMIT = 16_384


class NodeView(Value):
    """One node as the planner sees it."""

    node: NodeName
    free: Free
    capacity: Free  # usable, booked or not: never less than `free`
    total_gpus: U32  # usable or not
    is_available: bool = True  # alive, not suspect, not draining, not in conflict


class ClassSpeed(Value):
    """How many times as fast a job is on GPUs of a class as on those of which its estimate tells."""

    gpu: Name
    ratio: Amount
    likely_least: Amount  # one standard deviation below


class JobView(Value):
    """One live job: its card, true at `written_s` on the asking machine's monotonic clock."""

    card: JobCard
    written_s: Real = 0.0
    avoided: Annotated[
        tuple[NodeName, ...], Meta(max_length=1_024)
    ] = ()  # its own shepherd does not place it there for now
    own: Estimate | None = None  # by its own reports, where its card's estimate has been joined with its kind's
    on_classes: Annotated[tuple[ClassSpeed, ...], Meta(max_length=64)] = ()  # none where all GPUs are of one

    @property
    def job_id(self) -> JobId:
        """Full id."""
        return self.card.job_id

    @property
    def state(self) -> JobState:
        """Life-cycle state."""
        return self.card.state

    @property
    def ranks(self) -> int:
        """World size that it asked for."""
        return self.card.ranks

    @property
    def demand(self) -> Demand:
        """What each rank needs, with what other groups of its need beside the first."""
        card = self.card  # a plan asks for it a hundred thousand times
        return with_beside(card.demand, card.groups) if card.groups else card.demand

    @property
    def shares(self) -> tuple[Share, ...]:
        """What it holds, as far as its card names it."""
        return self.card.shares

    @property
    def excluded(self) -> tuple[NodeId, ...]:
        """Where it is not placed: by its own wish, or for now."""
        return (*self.card.exclude, *self.avoided) if self.avoided else self.card.exclude

    @property
    def can_be_stopped(self) -> bool:
        """True of a job that waits, and of one that runs and goes on from a checkpoint or may begin again."""
        card = self.card
        is_free = card.has_checkpoint or card.restartable
        return self.state is JobState.QUEUED or (self.state is JobState.RUNNING and is_free)

    def lost_s(self, now_s: float) -> float:
        """Seconds of its running that a stop would lose: all of an attempt without a checkpoint."""
        return 0.0 if self.card.has_checkpoint else self.running_s(now_s)

    def attained_gpu_s(self, now_s: float) -> float:
        """GPU-seconds of service by now."""
        return self.card.attained_gpu_s + self.card.attained_rate * max(0.0, now_s - self.written_s)

    def queued_s(self, now_s: float) -> float:
        """Seconds since it last became queued; 0 while it does not wait."""
        return self.card.queued_s + max(0.0, now_s - self.written_s) if self.state is JobState.QUEUED else 0.0

    def running_s(self, now_s: float) -> float:
        """Seconds since it last started; 0 while it does not run."""
        return self.card.running_s + max(0.0, now_s - self.written_s) if self.state is JobState.RUNNING else 0.0

    def rests_s(self, now_s: float) -> float:
        """Seconds for which it is not started yet; 0 for one that may be."""
        return max(0.0, self.card.rests_s - max(0.0, now_s - self.written_s)) if self.card.rests_s else 0.0

    def kept_s(self, now_s: float) -> float:
        """Seconds since its size or hosts last changed, or since it started; 0 while it does not run."""
        aged_s = self.card.kept_s + max(0.0, now_s - self.written_s) if self.card.kept_s else float("inf")
        return min(aged_s, self.running_s(now_s))


class KindView(Value):
    """What jobs like those of a user by one name and of one program have measured; their speed on GPUs of one class.

    The table is packed, so that a planner can tell at a glance that it knows it already.
    """

    user: Annotated[str, Meta(max_length=NAME_LENGTH)]
    name: Annotated[str, Meta(max_length=NAME_LENGTH)]
    speed: Annotated[bytes, Meta(max_length=TABLE_BYTES_LIMIT)] = b""  # an `Estimate` of points alone
    length: Amount = 0.0  # steps of the first batch from begin to end; 0: unknown
    length_error: Amount = 0.0  # relative, one standard deviation
    gpu: Name = ""  # for which class it was asked
    program: Annotated[str, Meta(max_length=PROGRAM_LENGTH)] = ""


class EndedJob(Value):
    """What became of a job, wherever it was shepherded: what policies learn from."""

    card: JobCard  # as it was last, without its hosts; its attained service is final
    has_completed: bool
    ended_utc_s: Amount


class ClusterView(Value):
    """The whole swarm at one moment.  `version` lets the asker recognise the answer to its question."""

    version: U53
    nodes: Annotated[tuple[NodeView, ...], Meta(max_length=NODES_LIMIT)]
    jobs: Annotated[tuple[JobView, ...], Meta(max_length=JOBS_LIMIT)]
    history: Annotated[tuple[EndedJob, ...], Meta(max_length=HISTORY_LIMIT)] = ()  # oldest first
    memory: Annotated[bytes, Meta(max_length=MEMORY_BYTES_LIMIT)] = b""  # of the last plan of the same policy
    kinds: Annotated[tuple[KindView, ...], Meta(max_length=KINDS_LIMIT)] = ()  # of jobs that take several sizes
    utc_s: Amount = 0.0  # when it was seen, since 1970: what deadlines count from; 0: not told
    pool: Pool = ()  # where there are such jobs


class Change(Enum):
    """What a plan wants of one job."""

    START = "start"  # from nothing to the target
    GROW = "grow"
    SHRINK = "shrink"
    MOVE = "move"
    REBATCH = "rebatch"  # the same hosts with another batch
    STOP = "stop"  # give its place to `taker`
    KEEP = "keep"
    WAIT = "wait"  # with a target: that place is to be kept for it


class Allocation(Value):
    """What a job gets: hosts with the ranks on each, in rank order, and its global batch size (0: its own)."""

    shares: Shares = ()
    global_batch: U32 = 0

    @property
    def ranks(self) -> int:
        """World size."""
        return world_size(self.shares)


class Decision(Value):
    """A plan's line on one job: followed as told, or, where its own preconditions no longer hold, not at all.

    `gain_s` and `cost_s` are what the swarm's jobs gain and this one loses by it, in seconds of completion time.
    """

    job_id: Job
    change: Change
    reason: Text  # a sentence for people
    target: Allocation = Allocation()
    taker: Annotated[str, Meta(max_length=26)] = ""  # the job for which this one gives something up
    rank_key: Annotated[tuple[U53, ...], Meta(max_length=4)] = ()  # its place in the order, for owners that must choose
    gain_s: Real = 0.0
    cost_s: Real = 0.0
    step_s: Amount = 0.0  # which the model predicts for the target; 0: it does not


class Plan(Value):
    """Decisions in the order in which they are to be taken.  Advice on an old view.

    A policy gives decisions and memory; `policies.registry.compute_plan` fills in the rest.
    """

    decisions: Annotated[tuple[Decision, ...], Meta(max_length=JOBS_LIMIT)]
    memory: Annotated[bytes, Meta(max_length=MEMORY_BYTES_LIMIT)] = b""  # handed back with the policy's next view
    version: U53 = 0  # of the view
    policy_id: Name = ""
    elapsed_s: Amount = 0.0  # how long planning took
    review_s: Amount = 0.0  # after so long time alone changes the plan; 0: it does not
    advice: Annotated[tuple[Decision, ...], Meta(max_length=JOBS_LIMIT)] = ()  # on running jobs: told, not followed
    fault: Text = ""  # of the policy, in whose place another one made this plan
    oddity: Text = ""  # jobs whose cards the policy could not read, and what became of it


class Span(Value):
    """Seconds from the moment of a view: as expected, and between what; `high_s` None: nobody knows an upper end."""

    expected_s: Amount
    low_s: Amount
    high_s: Amount | None = None


class Outlook(Value):
    """What is expected of one live job, if nobody else comes: when it starts and ends. `alone_s` is how long it would
    take alone on an equal share of the swarm's GPUs. `problem` says why no start is known of a job that waits."""

    job_id: Job
    start: Span | None = None  # None of one that runs
    end: Span | None = None
    alone_s: Amount = 0.0  # 0: not known
    problem: Text = ""
    ranks_least: U32 = 0  # with so many it ends by its deadline, as expected; 0: it has none, or cannot

    def rho(self, age_s: float) -> float:
        """Finish-time fairness (Themis, NSDI 2020) of a job that was submitted so long before. It is the time to its
        end from then on, over that alone on an equal share; 0 where nobody knows."""
        return (age_s + self.end.expected_s) / self.alone_s if self.end and self.alone_s else 0.0


class Policy(Protocol):
    """A scheduling policy: pure and deterministic; lives in the planner's process."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """A decision with a reason for every live job."""


class Order(Protocol):
    """What agents know of a policy that ranks each job by itself: enough for the start that needs no plan."""

    @property
    def is_timeless(self) -> bool:
        """True when a job's key changes with its card alone, never with time."""

    def rank_key(self, job: JobView, now_s: float) -> RankKey:
        """The job's place in the order; cheap enough to call for each job at each event."""

    def refuses_to_make_room(self, victim: JobView, taker_key: RankKey, now_s: float) -> str:
        """Why a running job need not stop for one with that key; empty when it must."""


class Elasticity(Enum):
    """How far plans may change the world sizes that jobs declared to take."""

    OFF = "off"  # each job runs with its least
    ADVISE = "advise"  # sizes are chosen at starts and while jobs train; what others would gain is told, and not done
    ON = "on"  # those that cannot change while they train are ended for it, and go on from their checkpoints


class PolicySetting(Value):
    """Which policy the swarm uses: a name, its parameters and how far it may go; swarm-wide and versioned."""

    name: str = "swarm"
    parameters: Mapping[str, float] = field(default_factory=dict)
    elasticity: Elasticity = Elasticity.ON
    is_restartable: bool = False  # what a job is that does not say whether it may be stopped and begun again
