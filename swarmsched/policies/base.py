"""What all policies share: the parts of a rank key, the order of a queue, and the sentences that say why.

A policy is described by a `PolicyKind`: its name, what it is for, its parameters with bounds, and how to build it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmsched.api import PRIORITY_LIMIT, JobState
from swarmsched.ids import handle
from swarmsched.resources import Demand
from swarmsched.view import Action, JobView, PlanEntry, Policy, RankKey

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
    """A policy that the swarm may be set to.  `build` gets every parameter, defaults filled in, within bounds."""

    name: str
    meaning: str
    parameters: tuple[ParameterSpec, ...]
    build: Callable[[Mapping[str, float]], Policy]


def inverse_priority(job: JobView) -> int:
    """Smaller for more urgent jobs, never negative."""
    return PRIORITY_LIMIT - max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, job.priority))


def milliseconds(time_utc_s: float) -> int:
    """A submit time as a part of a rank key; never negative."""
    return max(0, int(time_utc_s * 1000))


def submit_rank_key(job: JobView) -> RankKey:
    """Priority, then submit time: the key of `fifo` and `backfill`."""
    return (inverse_priority(job), milliseconds(job.submitted_utc_s))


def in_rank_order(jobs: Iterable[JobView], rank_key: Callable[[JobView], RankKey]) -> list[tuple[RankKey, JobView]]:
    """All live jobs with their keys, the first to run first; the job id breaks ties."""
    keyed = [(rank_key(job), job) for job in jobs if job.state is not JobState.ENDED]
    keyed.sort(key=lambda pair: (pair[0], pair[1].job_id))
    return keyed


def is_waiting(job: JobView) -> bool:
    """True for a job that wants to be placed."""
    return job.state is JobState.QUEUED


def keep(job: JobView, rank_key: RankKey) -> PlanEntry:
    """The entry of a job that has its resources."""
    where = ", ".join(share.node for share in job.shares[:NAMED_JOBS_LIMIT])
    return PlanEntry(job.job_id, Action.KEEP, rank_key, f"{job.state.value} on {where}" if where else job.state.value)


def amount(count: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def need(demand: Demand, ranks: int) -> str:
    """What a gang asks for, in words: `4 GPUs of type A100`, `2 ranks with 4 CPUs each`."""
    parts = []
    if demand.gpus:
        kind = f" of type {demand.gpu_type}" if demand.gpu_type else ""
        least = f" with {_gib(demand.gpu_memory_bytes)} each" if demand.gpu_memory_bytes else ""
        parts.append(f"{amount(ranks * demand.gpus, 'GPU')}{kind}{least}")
        if ranks > 1 and demand.gpus > 1:
            parts.append(f"{demand.gpus} together per rank")
    if demand.cpus:
        parts.append(amount(ranks * demand.cpus, "CPU"))
    if demand.memory_bytes:
        parts.append(f"{_gib(ranks * demand.memory_bytes)} of memory")
    return ", ".join(parts) or "no counted resources"


def ahead_sentence(ahead: Sequence[JobView]) -> str:
    """`2 jobs ahead (a1b2c3d4, e5f6g7h8)`, or an empty string."""
    if not ahead:
        return ""
    names = ", ".join(handle(job.job_id) for job in ahead[:NAMED_JOBS_LIMIT])
    more = ", ..." if len(ahead) > NAMED_JOBS_LIMIT else ""
    return f"{amount(len(ahead), 'job')} ahead ({names}{more})"


def joined(*clauses: str) -> str:
    """The clauses that say something, separated by semicolons."""
    return "; ".join(clause for clause in clauses if clause)


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.4g} GiB"
