"""Shortest remaining time first, and shortest remaining service (time x GPUs) first, both preemptive.

Yardsticks: optimal on one machine, and close to it on many, but only as good as what is known of the jobs.  A job's
remaining time is its estimate, else what is left of its time limit; one of which neither is known comes last.
"""

from collections.abc import Mapping
from math import inf

from swarmsched.policies.base import inverse_priority, seconds_left
from swarmsched.policies.ranked import dealt
from swarmsched.view import ClusterView, JobView, Plan


class ShortestRemaining:
    """`counts_gpus`: by service instead of time."""

    counts_gpus = False

    def __init__(self, parameters: Mapping[str, float]) -> None:
        """It takes none."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Priority first, then whoever has least left."""
        ranked = []
        for job in view.jobs:
            left_s = remaining_s(job, now_s)
            rank = left_s * (job.ranks * max(1, job.demand.gpus) if self.counts_gpus else 1)
            ranked.append((inverse_priority(job), rank, job.card.submitted_utc_s, job.job_id, job, left_s))
        ranked.sort(key=lambda each: each[:4])
        return Plan(dealt(view, [(job, _left(left_s)) for *_, job, left_s in ranked]))


class ShortestRemainingService(ShortestRemaining):
    """By remaining time x GPUs."""

    counts_gpus = True


def remaining_s(job: JobView, now_s: float) -> float:
    """Seconds that it has left at the size that it asked for; infinite where nobody knows."""
    if left_s := seconds_left(job):
        return left_s
    if not job.card.time_limit_s:
        return inf
    gpus = max(1, job.ranks * job.demand.gpus)
    return max(0.0, job.card.time_limit_s - job.attained_gpu_s(now_s) / gpus)


def _left(left_s: float) -> str:
    return "nobody knows how long it takes" if left_s == inf else f"{left_s:.0f} s left"
