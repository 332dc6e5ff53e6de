"""What all policies share: the parts of a rank key, the order of a queue, and the sentences that say why.

A policy is described by a `PolicyKind`: its name, what it is for, its parameters with bounds, and where it is found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from swarmsched.api import JobState
from swarmsched.card import RankKey
from swarmsched.estimate import batches_of
from swarmsched.ids import handle
from swarmsched.resources import Demand, Share, needs_beside
from swarmsched.specification import PRIORITY_LIMIT
from swarmsched.view import Allocation, Change, Decision, JobView, Order

NAMED_JOBS_LIMIT = 3
"""Handles that a reason names before it says how many more there are."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One number that a policy takes: what it means, its default and its inclusive bounds."""

    name: str
    meaning: str
    default: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy that the swarm may be set to: names only, so that knowing of it imports nothing.

    `policy` and `order` are dotted paths, `module:Class`; each class is built with every parameter, defaults filled in,
    within bounds.  A policy without an order starts nothing that its plan does not start.
    """

    name: str
    meaning: str
    parameters: tuple[ParameterSpec, ...]
    policy: str
    order: str = ""
    plans_when_idle: bool = False  # also while nothing waits: it changes what runs
    resizes: bool = False  # it chooses world sizes
    rebatches: bool = False  # it chooses batch sizes
    spares_rigid: bool = False  # it changes jobs of several sizes alone, its order is for starts, others are backfilled


def inverse_priority(job: JobView) -> int:
    """Smaller for more urgent jobs, never negative."""
    return PRIORITY_LIMIT - max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, job.card.priority))


MILLISECONDS_MOST = 2**53  # that a rank key carries


def milliseconds(time_s: float) -> int:
    """A time as a part of a rank key; never negative."""
    return max(0, int(min(time_s * 1000, MILLISECONDS_MOST)))


class SubmitOrder:
    """Priority, then submit time in milliseconds: the order of `fifo` and `backfill`, which stop nothing for others."""

    is_timeless = True

    def __init__(self, parameters: Mapping[str, float]) -> None:
        """It takes none."""

    def rank_key(self, job: JobView, now_s: float) -> RankKey:
        """Smaller runs earlier."""
        return (inverse_priority(job), milliseconds(job.card.submitted_utc_s))

    def refuses_to_make_room(self, victim: JobView, taker_key: RankKey, now_s: float) -> str:
        """Running jobs are never stopped for others."""
        return "the policy here does not preempt"


STOPPED_MS = 2**51
"""Later than anything was ever submitted."""


class YieldingOrder(SubmitOrder):
    """The order of submission, where whoever has been stopped for others comes last. Else it would take back what it
    has just given up."""

    def rank_key(self, job: JobView, now_s: float) -> RankKey:
        """Smaller runs earlier."""
        return (inverse_priority(job), milliseconds(job.card.submitted_utc_s) + STOPPED_MS * bool(job.card.preemptions))


def in_rank_order(jobs: Iterable[JobView], order: Order, now_s: float) -> list[tuple[RankKey, JobView]]:
    """All live jobs with their keys, the first to run first; the job id breaks ties."""
    keyed = [(order.rank_key(job, now_s), job.job_id, job) for job in jobs if job.state is not JobState.ENDED]
    keyed.sort(key=itemgetter(0, 1))
    return [(key, job) for key, _, job in keyed]


def is_waiting(job: JobView) -> bool:
    """True for a job that wants to be placed."""
    return job.state is JobState.QUEUED


def is_known(job: JobView) -> bool:
    """True when it was told how much is left of it, and how fast it goes."""
    estimate = job.card.estimate
    return estimate is not None and estimate.remaining > 0.0 and bool(estimate.points or estimate.speed)


def seconds_left(job: JobView) -> float:
    """At the size that it asked for, by what was measured nearest to it; 0 where nobody knows."""
    estimate = job.card.estimate
    if estimate is None or not estimate.points:
        return 0.0
    nearest = min(estimate.points, key=lambda each: (abs(each.ranks - job.ranks), each.nodes))
    first = job.card.elastic.batches.first if job.card.elastic else 0
    batch_ratio = (first or batches_of(estimate).first) / (nearest.ranks * nearest.local_batch)
    return estimate.remaining * batch_ratio * nearest.step_s


def keep(job: JobView, rank_key: RankKey) -> Decision:
    """The decision on a job that has its resources and keeps them."""
    where = ", ".join(share.node for share in job.shares[:NAMED_JOBS_LIMIT])
    reason = f"{job.state.value} on {where}" if where else job.state.value
    return Decision(job.job_id, Change.KEEP, reason, rank_key=rank_key)


def start(job: JobView, rank_key: RankKey, shares: tuple[Share, ...], reason: str) -> Decision:
    """The decision to start a waiting job there."""
    return Decision(job.job_id, Change.START, reason, Allocation(shares), rank_key=rank_key)


def wait(job: JobView, rank_key: RankKey, reason: str) -> Decision:
    """The decision to let a job wait."""
    return Decision(job.job_id, Change.WAIT, reason, rank_key=rank_key)


GIVING = (Change.STOP, Change.SHRINK, Change.MOVE)
"""What gives up GPUs to others."""


def is_claim(decision: Decision) -> bool:
    """True of a job that waits and has a place, which is kept for it until others have left."""
    return decision.change is Change.WAIT and bool(decision.target.shares)


def taker_of(decisions: Iterable[Decision]) -> str:
    """For whom others make room: who waits for a place, or grows, before who starts on what is free."""
    told = list(decisions)
    claims = [each.job_id for each in told if is_claim(each)]
    begun = [each.job_id for change in (Change.GROW, Change.START) for each in told if each.change is change]
    return next(iter([*claims, *begun]), "")


def amount(count: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def need(demand: Demand, ranks: int) -> str:
    """What a gang asks for, in words: `4 GPUs of type A100`, `2 ranks with 4 CPUs each`; of several groups in turn."""
    beside = [need(each.demand, each.ranks) for each in needs_beside(demand)]
    parts = []
    if demand.gpus:
        kind = f" of type {demand.gpu_type}" if demand.gpu_type else ""
        least = f" with {_gib(demand.gpu_memory_bytes)} each" if demand.gpu_memory_bytes else ""
        other = f" other than {', '.join(demand.refused_gpus)}" if demand.refused_gpus else ""
        parts.append(f"{amount(ranks * demand.gpus, 'GPU')}{kind}{other}{least}")
        if ranks > 1 and demand.gpus > 1:
            parts.append(f"{demand.gpus} together per rank")
    if demand.cpus:
        parts.append(amount(ranks * demand.cpus, "CPU"))
    if demand.memory_bytes:
        parts.append(f"{_gib(ranks * demand.memory_bytes)} of memory")
    where = f" on nodes with {', '.join(demand.labels)}" if demand.labels else ""
    return " and, in another group, ".join([(", ".join(parts) or "no GPU") + where, *beside])


def ahead_sentence(ahead: Sequence[JobView]) -> str:
    """`2 jobs ahead (a1b2c3d4, e5f6g7h8)`, or an empty string."""
    if not ahead:
        return ""
    names = ", ".join(handle(job.job_id) for job in ahead[:NAMED_JOBS_LIMIT])
    more = ", ..." if len(ahead) > NAMED_JOBS_LIMIT else ""
    return f"{amount(len(ahead), 'job')} ahead ({names}{more})"


def joined(*clauses: str) -> str:
    """The clauses that say something, separated by semicolons."""
    return "; ".join([clause for clause in clauses if clause])


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.4g} GiB"
