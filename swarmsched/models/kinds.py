"""What planners believe of a job: what its card tells, with all that jobs of its kind have measured beside it.

A card holds a handful of points; what those of its kind measured together makes a model of its speed, and says how long
it is likely to take where nobody declared it.  Where its own step takes another time than theirs, it is of its kind by
name alone, and only its card counts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from msgspec.structs import replace

from swarmsched.estimate import (
    Estimate,
    Pool,
    SpeedPoint,
    are_at_odds,
    configuration,
    contradicts,
    step_times,
)
from swarmsched.models.classes import ClassSpeeds
from swarmsched.resources import GpuCount, most_frequent
from swarmsched.view import ClassSpeed, ClusterView, JobView, KindView, NodeView
from swarmsched.wire.codec import decode_value

KEPT = 2_048
COUNT_MOST = 2**16 - 1
NOTHING = Estimate()

_Asked = tuple[str, str, str, str]
"""User, name, class of GPUs and program."""


class GpuClasses:
    """On GPUs of which class the speed of a job is to be known."""

    def __init__(self, nodes: Iterable[NodeView]) -> None:
        counts: Counter[tuple[str, int]] = Counter()
        for node in nodes:
            for each in node.capacity.gpus:
                counts[each.model, each.memory_bytes] += each.count
        self._gpus = [GpuCount(*kind, min(count, COUNT_MOST)) for kind, count in counts.items()]

    def of(self, job: JobView) -> str:
        """The class of GPUs on which a job has measured, or else the most frequent ones that suit it."""
        estimate = job.card.estimate
        return (estimate.gpu if estimate else "") or most_frequent(self._gpus, job.demand)

    def kinds(self, jobs: Iterable[JobView]) -> dict[_Asked, None]:
        """Of the jobs, each once; and then of the same on GPUs of the other classes."""
        own = dict.fromkeys([self.asked(job) for job in jobs])
        others = [(user, name, gpu, program) for user, name, _, program in own for gpu in self.names]
        return own | dict.fromkeys(others if len(self.names) > 1 else [])

    @property
    def names(self) -> list[str]:
        """All classes."""
        return sorted({each.model for each in self._gpus})

    def asked(self, job: JobView) -> _Asked:
        """Of what kind a job is."""
        return (job.card.user, job.card.name, self.of(job), job.card.program)


class Speeds:
    """Measured points of a kind: the same object for the same bytes, so that what was computed of it serves again."""

    def __init__(self, packed: bytes) -> None:
        estimate = decode_value(Estimate, packed) if packed else NOTHING
        self.points, self.gpu = estimate.points, estimate.gpu  # of the class on which they were measured
        self.known = step_times(self.points)


def informed(view: ClusterView) -> ClusterView:
    """The view in which each job's estimate tells all that is known of it."""
    classes = GpuClasses(view.nodes)
    if not view.kinds and not view.pool and len(classes.names) < 2:
        return view
    kinds = {(each.user, each.name, each.gpu, each.program): each for each in view.kinds}
    jobs = [_informed(job, kinds.get(classes.asked(job))) for job in view.jobs]
    if len(classes.names) > 1:
        speeds = ClassSpeeds([(_kind_of(each), _speeds(each.speed)) for each in view.kinds])
        jobs = [_on_classes(job, classes, speeds) for job in jobs]
    return replace(view, jobs=tuple(_scaled(jobs, view.pool) if view.pool else jobs), kinds=(), pool=())


def _kind_of(each: KindView) -> tuple[str, ...]:
    return (each.user, each.name, each.program)


def _on_classes(job: JobView, classes: GpuClasses, speeds: ClassSpeeds) -> JobView:
    """How much faster it is on GPUs of each class than on those of which its estimate tells."""
    if job.on_classes or not job.demand.gpus:
        return job
    kind, known = (job.card.user, job.card.name, job.card.program), classes.of(job)
    return replace(
        job, on_classes=tuple([ClassSpeed(name, *speeds.ratio(kind, known, name)) for name in classes.names])
    )


def _scaled(jobs: Sequence[JobView], pool: Pool) -> list[JobView]:
    """What those that take several sizes have not measured, as all kinds go; as the better ones while none waits."""
    from swarmsched.models.scaling import HOPEFUL, LIKELY, scaled  # noqa: PLC0415  # planners alone know numpy

    part = HOPEFUL if all(job.shares for job in jobs) else LIKELY
    estimates = [job.card.estimate if job.card.elastic and job.card.estimate else NOTHING for job in jobs]
    return [
        job
        if estimate is before
        else replace(job, card=replace(job.card, estimate=estimate), own=job.own or job.card.estimate)
        for job, before, estimate in zip(jobs, estimates, scaled(estimates, pool, part), strict=True)
    ]


def _informed(job: JobView, kind: KindView | None) -> JobView:
    card = job.card
    if kind is None or card.elastic is None:
        return job
    estimate = believed(card.estimate or Estimate(is_prior=True), kind)
    if estimate is card.estimate:
        return job
    return replace(job, card=replace(card, estimate=estimate), own=card.estimate or Estimate(is_prior=True))


def believed(own: Estimate, kind: KindView) -> Estimate:
    """The job's estimate; its own alone where it belies the kind's."""
    speeds = _speeds(kind.speed)
    if not own.is_prior and any(_is_belied(speeds, each) for each in own.points):
        return own
    remaining, error = own.remaining, own.remaining_error
    if not remaining and kind.length > own.done:
        remaining = kind.length - own.done
        error = kind.length_error * kind.length / remaining
    is_measured = bool(own.speed) or not speeds.points
    return replace(
        own,
        points=own.points if is_measured else speeds.points,
        is_partial=own.is_partial if is_measured else True,
        remaining=remaining,
        remaining_error=error,
    )


def _is_belied(speeds: Speeds, point: SpeedPoint) -> bool:
    """Whether the kind's times cannot be the job's; a kind does not take in what it finds odd, as of other batches."""
    if configuration(point) in speeds.known:
        return contradicts(speeds.known, point)
    return any(are_at_odds(point, each) for each in speeds.points)


@lru_cache(maxsize=KEPT)
def _speeds(packed: bytes) -> Speeds:
    return Speeds(packed)
