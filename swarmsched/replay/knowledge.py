"""What policies are told of a replay's jobs: everything (for experiments that isolate the policy), or nothing."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import Protocol

from msgspec.structs import replace

from swarmsched.estimate import Estimate, NoisePoint, SpeedPoint, StepCost
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.physics import ProfiledPhysics
from swarmsched.replay.profiles import Profile, even
from swarmsched.replay.rates import RatedPhysics

NOISE_MOST = 1e18
"""Stands for a gradient without a direction: each batch is worth its size."""


class Knowledge(Protocol):
    """Where the estimates in the cards of a replay come from."""

    def reported(self, job: ReplayJob) -> Estimate | None:
        """What its ranks tell of it while it trains, if anything, and its card carries."""

    def believed(self, job: ReplayJob, told: Estimate | None) -> Estimate | None:
        """What planners are told in place of what its card tells."""

    def counted(self, job: ReplayJob) -> float:
        """Steps of the first batch that it has made, as its card tells once it has ended."""


def with_work(estimate: Estimate | None, work: StepCost | None) -> Estimate | None:
    """With what its user says of its model, as on a card."""
    return replace(estimate or Estimate(is_prior=True), work=work) if work is not None else estimate


class NothingKnown:
    """As for jobs that do not report."""

    def reported(self, job: ReplayJob) -> Estimate | None:
        """Nothing."""
        return None

    def believed(self, job: ReplayJob, told: Estimate | None) -> Estimate | None:
        """Nothing either."""
        return told

    def counted(self, job: ReplayJob) -> float:
        """All of them."""
        return job.progress


class PerfectKnowledge:
    """Profiles and remaining work as they are.  Results that rest on it say so.

    An estimate tells one time for a size: that of the class of GPUs that the job has, or of the usual one.
    """

    def __init__(self, gpus_per_node: int, gpus: int, usual_class: str = "") -> None:
        self._gpus_per_node = gpus_per_node
        self._gpus = gpus
        self._usual_class = usual_class

    def reported(self, job: ReplayJob) -> Estimate | None:
        """How far it has come: nothing is measured."""
        return Estimate(done=job.progress)

    def believed(self, job: ReplayJob, told: Estimate | None) -> Estimate | None:
        """Exact, as no card could carry it; of a job without a profile the seconds that it has left."""
        if isinstance(job.physics, RatedPhysics) and job.elastic is not None:
            usual = job.physics if job.shares else job.physics.on([self._usual_class])
            return usual.estimate(job.progress)
        if isinstance(job.physics, RatedPhysics):
            rate = job.physics.pace(job.shape or (job.gpus,), 0, job.progress).rate
            return _in_seconds(job, (job.physics.total - job.progress) / rate if rate else 0.0)
        if not isinstance(job.physics, ProfiledPhysics):
            return _in_seconds(job, max(0.0, job.physics.total - job.progress))
        profile = job.physics.profile if job.shares else job.physics.on([self._usual_class]).profile
        return Estimate(
            points=all_points(profile, self._gpus_per_node, self._gpus),
            noise=_noise(profile, profile.epoch_at(job.progress)),
            remaining=max(0.0, profile.total_progress - job.progress),
            gpu="+".join(sorted(profile.classes)) if self._usual_class else "",
        )

    def counted(self, job: ReplayJob) -> float:
        """All of them."""
        return job.progress


def _in_seconds(job: ReplayJob, left_s: float) -> Estimate:
    """Of a job that takes one size: steps of a second."""
    return Estimate(points=(SpeedPoint(job.gpus, 1, 1, 1.0),), remaining=left_s)


@lru_cache(maxsize=256)
def all_points(profile: Profile, gpus_per_node: int, gpus: int) -> tuple[SpeedPoint, ...]:
    """Every world size on the fewest nodes, and, up to four nodes' worth of GPUs, on more; ranks dealt evenly."""
    batches = sorted({each.local_batch for each in profile.measured})
    sizes = chain(
        ((ranks, ceil(ranks / gpus_per_node)) for ranks in range(1, gpus + 1)),
        ((ranks, nodes) for ranks in range(2, 4 * gpus_per_node + 1) for nodes in range(2, min(ranks, 8) + 1)),
    )
    return tuple(chain.from_iterable(_points(profile, *size, gpus_per_node, batches) for size in sorted(set(sizes))))


def _points(profile: Profile, ranks: int, nodes: int, gpus_per_node: int, batches: list[int]) -> Iterator[SpeedPoint]:
    if ranks > nodes * gpus_per_node:
        return
    if nodes == ceil(ranks / gpus_per_node):
        shape = (gpus_per_node,) * (ranks // gpus_per_node) + ((rest,) if (rest := ranks % gpus_per_node) else ())
    else:
        shape = even(ranks, nodes)
    for local_batch in batches:
        time = profile.measured_time(shape, local_batch)
        if time:
            yield SpeedPoint(ranks, nodes, local_batch, time.step_s, time.sync_s)


@lru_cache(maxsize=4_096)
def _noise(profile: Profile, epoch: int) -> tuple[NoisePoint, ...]:
    sizes = sorted(profile.statistics)
    return tuple([NoisePoint(size, min(profile.noise(size, epoch), NOISE_MOST)) for size in sizes])
