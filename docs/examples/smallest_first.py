"""A policy of one's own: jobs that ask for the fewest GPUs go first, and wait for nobody.

swarm simulate replay jobs.csv --policy docs/examples/smallest_first.py,backfill
"""

from collections.abc import Mapping

from swarmsched.policies.base import ParameterSpec, PolicyKind, amount
from swarmsched.policies.ranked import dealt
from swarmsched.view import ClusterView, JobView, Plan

KIND = PolicyKind(
    "smallest-first",
    "jobs that ask for the fewest GPUs first",
    (ParameterSpec("patience_s", "seconds of waiting that count as one GPU less; 0: none do", 0.0, 0.0, 1e9),),
    "smallest_first:SmallestFirst",
)


class SmallestFirst:
    """`plan` is asked with what is known of all jobs and nodes, and decides on each job."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._patience_s = parameters["patience_s"]

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """`dealt` starts jobs down a ranking while they fit, and stops who ranks too low."""
        ranked = sorted(view.jobs, key=lambda job: (self._size(job, now_s), job.card.submitted_utc_s, job.job_id))
        return Plan(dealt(view, [(job, f"asks for {amount(_gpus(job), 'GPU')}") for job in ranked]))

    def _size(self, job: JobView, now_s: float) -> float:
        waited = job.queued_s(now_s) / self._patience_s if self._patience_s else 0.0
        return _gpus(job) - waited


def _gpus(job: JobView) -> int:
    return job.ranks * job.demand.gpus
