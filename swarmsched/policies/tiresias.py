"""Tiresias-L, discretised two-dimensional attained service, whole (Gu et al., NSDI 2019, section 3).

Beyond the order of `las`: classes are left by service alone, a starving job is promoted and its counters begin anew
(they are kept in the plan's memory), whoever is not among the first is preempted at once, and the plan tells when the
next job changes its class.  Within a class running jobs come first, each by its first start, then by submission.

With a quantum there is a class for each quantum of service: the order before it was discretised, for comparison.  Then
whoever has had as much as others is not favoured because it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmsched.api import JobState
from swarmsched.fields import Amount, Job, Value
from swarmsched.policies.attained_service import THRESHOLDS
from swarmsched.policies.base import inverse_priority, is_waiting
from swarmsched.policies.ranked import dealt
from swarmsched.view import JOBS_LIMIT, ClusterView, EndedJob, JobView, Plan


class _Promoted(Value):
    """A job's service when it was promoted: what counts is what it has had since."""

    job_id: Job
    attained_gpu_s: Amount


_MEMORY = msgspec.msgpack.Decoder(Annotated[tuple[_Promoted, ...], Meta(max_length=JOBS_LIMIT)])


@dataclass(frozen=True)
class LinePlace:
    """A job's place in the line: the service that counts, and the class that follows from it, from 0."""

    job: JobView
    service_class: int
    counted_gpu_s: float

    @property
    def told(self) -> str:
        """For people."""
        return f"class {self.service_class + 1} with {self.counted_gpu_s:.0f} GPU-seconds"


@dataclass(frozen=True)
class ServiceLine:
    """All jobs, the first to run first; what is to be remembered, and when time alone changes the line (0: never)."""

    places: Sequence[LinePlace]
    memory: bytes
    review_s: float


class Tiresias:
    """See above."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._thresholds = sorted(parameters[name] for name in THRESHOLDS if parameters[name] > 0)
        self._promote_knob = parameters["promote_knob"]
        self._quantum_gpu_s = parameters["quantum_gpu_s"]

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Deal the GPUs down the classes."""
        line = self._line(view, now_s)
        decisions = dealt(view, [(each.job, each.told) for each in line.places])
        return Plan(decisions, line.memory, review_s=line.review_s)

    def _line(self, view: ClusterView, now_s: float) -> "ServiceLine":
        merit = self._merit(view.history)
        since = {each.job_id: each.attained_gpu_s for each in _MEMORY.decode(view.memory)} if view.memory else {}
        counted = {job.job_id: self._counted(job, since, now_s) for job in view.jobs}
        ranked = sorted(view.jobs, key=lambda job: self._rank(job, counted[job.job_id], merit))
        places = [LinePlace(job, self._service_class(counted[job.job_id]), counted[job.job_id]) for job in ranked]
        kept = tuple([_Promoted(job.job_id, since[job.job_id]) for job in view.jobs if job.job_id in since])
        review_s = min((self._changes_in_s(job, counted[job.job_id], now_s) for job in view.jobs), default=inf)
        return ServiceLine(places, msgspec.msgpack.encode(kept), 0.0 if review_s == inf else max(0.001, review_s))

    def _counted(self, job: JobView, since: dict[str, float], now_s: float) -> float:
        """GPU-seconds since its last promotion, which may be now."""
        attained_gpu_s = job.attained_gpu_s(now_s)
        counted = attained_gpu_s - since.get(job.job_id, 0.0)
        if is_waiting(job) and self._service_class(counted) and job.queued_s(now_s) >= self._limit_s(job, counted):
            since[job.job_id] = attained_gpu_s
            return 0.0
        return counted

    def _limit_s(self, job: JobView, counted_gpu_s: float) -> float:
        """Seconds of waiting that promote it (STARVELIMIT)."""
        ran_s = counted_gpu_s / max(1, job.ranks * job.demand.gpus)
        return self._promote_knob * ran_s if self._promote_knob else inf

    def _service_class(self, counted_gpu_s: float) -> int:
        if self._quantum_gpu_s:
            return int(counted_gpu_s // self._quantum_gpu_s)
        return sum([counted_gpu_s >= threshold for threshold in self._thresholds])

    def _bound_gpu_s(self, counted_gpu_s: float) -> float:
        """Service at which such a job leaves its class; infinite in the last."""
        if self._quantum_gpu_s:
            return (self._service_class(counted_gpu_s) + 1) * self._quantum_gpu_s
        return next((threshold for threshold in self._thresholds if threshold > counted_gpu_s), inf)

    def _merit(self, history: Sequence[EndedJob]) -> Callable[[float], float]:
        """What orders jobs of one class by their service, the largest first."""
        return lambda counted_gpu_s: 0.0

    def _rank(
        self, job: JobView, counted_gpu_s: float, merit: Callable[[float], float]
    ) -> tuple[int, int, float, bool, float, float, str]:
        started_utc_s = job.card.first_started_utc_s or inf
        return (
            inverse_priority(job),
            self._service_class(counted_gpu_s),
            -merit(counted_gpu_s),
            not self._quantum_gpu_s and job.state is not JobState.RUNNING,
            started_utc_s,
            job.card.submitted_utc_s,
            job.job_id,
        )

    def _changes_in_s(self, job: JobView, counted_gpu_s: float, now_s: float) -> float:
        """Seconds until it leaves its class by running, or comes back to the first by waiting."""
        gpus = max(1, job.ranks * job.demand.gpus)
        if job.state is JobState.RUNNING:
            return (self._bound_gpu_s(counted_gpu_s) - counted_gpu_s) / (job.card.attained_rate or gpus)
        if not is_waiting(job) or not self._service_class(counted_gpu_s):
            return inf
        return self._limit_s(job, counted_gpu_s) - job.queued_s(now_s)
