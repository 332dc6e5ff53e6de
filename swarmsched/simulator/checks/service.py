"""Invariant 10: the attained service of a job never falls, and no GPU-second is counted twice.

The books of this checker are kept in virtual time: an attempt's GPUs times the span from its first start to the
decision that it is over.  What a job is said to have had never exceeds the sum over its attempts.
"""

from dataclasses import dataclass

from swarmsched.ids import JobId
from swarmsched.ledger.message import HOLD_TTL_S
from swarmsched.record import JobRecord
from swarmsched.resources import gpus_of, of_first
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_new_beginning
from swarmsched.simulator.checks.gangs import is_over
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.simulator.loop import EventLoop
from swarmsched.simulator.tasks import RunningTask, TaskChange

FASTEST_RATIO = 1.06  # clocks may run 5 % fast
SLACK_S = 1.0  # of each attempt, for rounding and reports under way
ROUNDING_GPU_S = 1e-3


@dataclass(slots=True)
class _Span:
    """One attempt, in virtual time; `over_s` None while the register has not given it up."""

    gpus: int
    since_s: float
    over_s: float | None = None


class ServiceChecker(Checker):
    """Compares each job's attained service with what its attempts can have used."""

    def __init__(self, decided: DecidedRecords) -> None:
        self._spans: dict[JobId, dict[tuple[int, int], _Span]] = {}  # by attempt, and by part where it is elastic
        self._loop: EventLoop | None = None
        self._decided = decided
        decided.subscribe(self._decided_next)

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """The first start of an attempt opens its span, whichever group it is of: all run from then on."""
        self._loop, order = host.loop, task.order
        record = self._decided.last(order.job_id)
        if change is not TaskChange.STARTED or order.is_worker:
            return
        gpus = order.world_size * order.spec.demand.gpus
        if not order.is_of_first_group and record is not None:
            gpus = gpus_of(of_first(record.shares), record.spec.needs)
        self._spans.setdefault(order.job_id, {}).setdefault((order.attempt, 0), _Span(gpus, host.loop.now_s))

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        if before is not None and after.attained_gpu_s < before.attained_gpu_s and not after.is_forced:
            raise Violation(
                10, f"the service of {job_id} fell from {before.attained_gpu_s:.3f} to {after.attained_gpu_s:.3f} GPU-s"
            )
        now_s = 0.0 if self._loop is None else self._loop.now_s
        spans = self._spans.setdefault(job_id, {})
        for share in after.shares:
            if share.part:  # its GPU is held for it before it is named, for as long as a hold may last
                gpus = gpus_of([share], after.spec.needs)
                spans.setdefault((after.attempt, share.part), _Span(gpus, now_s - HOLD_TTL_S))
        is_forced = is_new_beginning(before, after)
        for (attempt, _), span in spans.items():
            if is_forced and not is_over(after, attempt):
                span.over_s = None  # that it was over, only the lost holders knew
            if span.over_s is None and is_over(after, attempt):
                span.over_s = now_s
        if before is not None and after.attained_gpu_s == before.attained_gpu_s:
            return
        most = sum(_most_gpu_s(span, now_s) for span in spans.values())
        if after.attained_gpu_s > most + ROUNDING_GPU_S:
            raise Violation(
                10, f"{job_id} is said to have had {after.attained_gpu_s:.3f} GPU-s of at most {most:.3f}: {spans}"
            )


def _most_gpu_s(span: _Span, now_s: float) -> float:
    until_s = now_s if span.over_s is None else span.over_s
    return span.gpus * ((until_s - span.since_s) * FASTEST_RATIO + SLACK_S)
