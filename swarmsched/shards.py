"""Shards as the scheduler knows them: what ranks ask to have hosted, what that costs a node, and how it goes."""

from typing import Annotated

from msgspec import Meta

from swarmsched.fields import U16, U32, U53, Amount, Host, Job, Real, Value
from swarmsched.ids import AttemptKey

LEARNERS_MAX = 1_024
WORD_MOST = 200
Word = Annotated[str, Meta(max_length=WORD_MOST)]
FIXED_BYTES = 14  # of an element: weights, momentum, what quantising lost, the change; and 1 for each learner

LeaseNumber = tuple[U53, U32]
"""Generation of the broker's agent and its count: a later lease of one broker has the larger number."""

# What is booked until a shard is measured.
LEARNER_CPU_S = 2e-9  # for each element and learner in a round: kernels, and TLS both ways
PERIOD_S = 30.0


class RangeKey(Value):
    """A range of the parameters that one attempt of a job trains."""

    job_id: Job
    attempt: U32
    start: U53

    @property
    def attempt_key(self) -> AttemptKey:
        """Whose parameters they are."""
        return AttemptKey(self.job_id, self.attempt)

    def __str__(self) -> str:
        """As people see it: JOB/ATTEMPT, and where the range begins."""
        return f"{self.job_id}/{self.attempt}@{self.start}"


class ShardOrder(Value):
    """All that a host must know of a shard.  A later order of the same range has a newer plan, or says the same."""

    key: RangeKey
    size: U53
    layout: Word
    secret: Word
    rate: Real
    momentum: Real
    is_quantised: bool
    plan: tuple[U53, U53]
    learners: Annotated[tuple[Word, ...], Meta(max_length=LEARNERS_MAX)]
    quorum: U16
    every: U53 = 0  # steps between rounds to begin with, of the shard that decides that for all

    @property
    def load(self) -> "ShardLoad":
        """What is booked for it while nothing is measured."""
        elements = self.size * len(self.learners)  # of a round, both ways
        link_bytes = float(elements * (2 if self.is_quantised else 8))
        memory_bytes = self.size * (FIXED_BYTES + len(self.learners))
        return ShardLoad(elements * LEARNER_CPU_S, link_bytes, PERIOD_S, memory_bytes)


class ShardLoad(Value):
    """What a shard takes of its host: memory always, the rest in a burst each `period_s`."""

    cpu_s: Amount
    link_bytes: Amount  # both ways
    period_s: Amount
    memory_bytes: U53 = 0
    is_measured: bool = False

    @property
    def cores(self) -> float:
        """On average."""
        return self.cpu_s / self.period_s

    @property
    def link_bytes_per_s(self) -> float:
        """On average."""
        return self.link_bytes / self.period_s


class ShardReading(Value):
    """How an aggregator says that a shard is.  Counts are totals of its life there."""

    key: RangeKey
    version: int = 0
    rounds: int = 0
    cpu_s: float = 0.0
    link_bytes: int = 0
    wait_s: float = 0.0  # for which the last round has waited for others of this host, once it could be closed
    connected: int = 0


class AggregationRoom(Value):
    """What a node has left to give to the aggregation of other nodes' jobs."""

    core_ms: U32  # of each second
    memory_bytes: U53
    link_bytes_per_s: U53


class AggregatorPlace(Value):
    """Where learners find the aggregator of a node; the empty address while there is none."""

    address: Host = ""
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
