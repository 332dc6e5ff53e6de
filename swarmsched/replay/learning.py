"""What an agent would learn of a replay's jobs: from noisy reports of the configurations that they really ran.

A job reports at each look while it trains.  Step times and gradient noise are off by a factor drawn from a lognormal
distribution; progress is what the script counts.  Jobs of one kind share what they measured, as the swarm's table of
kinds does; with `declares` users say for how many epochs they train, else a job's length is that of the finished jobs
of its kind.  Until one has finished, whoever has come furthest has as much left as it has done, as heavy tails go
(Tiresias, NSDI 2019), and the others are as long: a kind of which nobody ever ended is not one of short jobs.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from math import ceil, log2
from typing import NamedTuple

from msgspec.structs import replace

from swarmsched.estimate import BatchRange, Configuration, Estimate, NoisePoint
from swarmsched.ids import JobId
from swarmsched.models.batch import split
from swarmsched.models.fit import SpeedBook
from swarmsched.models.noise import NoiseBook
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import NOISE_MOST
from swarmsched.replay.physics import ProfiledPhysics

SMOOTHING = 0.7
"""Weight of the newest report of the gradient noise, which grows by orders of magnitude while a job trains."""
LENGTHS = 32
"""Finished jobs of a kind that are remembered."""


@dataclass
class _Kind:
    """What jobs of one kind have measured, and how long they were."""

    speed: SpeedBook = field(default_factory=SpeedBook)
    noise: NoiseBook = field(default_factory=NoiseBook)
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTHS))
    furthest: float = 0.0  # progress that any of them has made


class _Measured(NamedTuple):
    """By one report."""

    configuration: Configuration
    step_s: float
    sync_s: float
    batch: int
    noise: float


@dataclass
class _Own:
    """What one job has reported itself: the noise of its gradient, smoothed, and with which batch."""

    noise: float
    batch: int
    speed: SpeedBook = field(default_factory=SpeedBook)

    def smooth(self, measured: _Measured) -> None:
        """The newest report of the noise counts most."""
        self.noise, self.batch = self.noise * (measured.noise / self.noise) ** SMOOTHING, measured.batch

    def note(self, measured: _Measured) -> None:
        """The same, and how fast it is there."""
        self.smooth(measured)
        self.speed.observe(*measured.configuration, measured.step_s, measured.sync_s)


class LearnedKnowledge:
    """Estimates as cards would carry them."""

    def __init__(self, seed: int, *, declares: bool, spread: float = 0.05) -> None:
        """`spread`: standard deviation of the logarithm of what is reported."""
        self._rng = random.Random(seed)
        self._declares = declares
        self._spread = spread
        self._kinds: dict[str, _Kind] = {}
        self._own: dict[JobId, _Own] = {}

    def estimate(self, job: ReplayJob, now_s: float) -> Estimate | None:
        """From this job's report, if it trains, and all before it."""
        physics = job.physics
        if not isinstance(physics, ProfiledPhysics):
            return None
        kind = self._kinds.setdefault(job.kind, _Kind())
        if job.shares and not job.pause_s:
            self._report(job, physics, kind)
        if job.ended_s is not None:
            kind.lengths.append(job.progress)
        kind.furthest = max(kind.furthest, job.progress)
        return self._believed(job, physics, kind)

    def reported(self, job: ReplayJob) -> Estimate:
        """The mean of what it has measured where it is, as its agent would send it; what others measured, agents know
        by their cards."""
        physics = job.physics
        measured = self._measured(job, physics) if isinstance(physics, ProfiledPhysics) else None
        if measured is None:
            return Estimate(done=job.progress)
        own = self._own.setdefault(job.job_id, _Own(measured.noise, measured.batch))
        own.note(measured)
        return Estimate(
            points=(own.speed.point(*measured.configuration),),
            noise=(NoisePoint(own.batch, own.noise),),
            remaining=self._declared(job),
            done=job.progress,
            is_partial=True,
        )

    def believed(self, job: ReplayJob, told: Estimate | None) -> Estimate | None:
        """Until it has reported itself, users alone know how long it trains."""
        declared = self._declared(job)
        if not declared or (told is not None and not told.is_prior and told.points):
            return told
        return replace(told or Estimate(is_prior=True), remaining=declared)

    def _declared(self, job: ReplayJob) -> float:
        return max(0.0, job.physics.total - job.progress) if self._declares else 0.0

    def _report(self, job: ReplayJob, physics: ProfiledPhysics, kind: _Kind) -> None:
        measured = self._measured(job, physics)
        if measured is None:
            return
        kind.speed.observe(*measured.configuration, measured.step_s, measured.sync_s)
        self._own.setdefault(job.job_id, _Own(measured.noise, measured.batch)).smooth(measured)
        kind.noise.observe(job.progress, measured.batch, measured.noise)

    def _measured(self, job: ReplayJob, physics: ProfiledPhysics) -> _Measured | None:
        """None for a batch that its ranks cannot be dealt."""
        dealt = split(job.batch or physics.batches.first, job.ranks, physics.batches)
        if dealt is None:
            return None
        time = physics.profile.step_time(job.shape, dealt.local_batch)
        factor = self._rng.lognormvariate(0.0, self._spread)
        batch = dealt.batch(job.ranks)
        exact = physics.profile.noise(batch, physics.profile.epoch_at(job.progress))
        noise = min(NOISE_MOST, exact * self._rng.lognormvariate(0.0, self._spread))
        place = (job.ranks, len(job.shape), dealt.local_batch)
        return _Measured(place, time.step_s * factor, time.sync_s * factor, batch, noise)

    def _believed(self, job: ReplayJob, physics: ProfiledPhysics, kind: _Kind) -> Estimate:
        fitted, own = kind.speed.fitted, self._own.get(job.job_id)
        return Estimate(
            speed=tuple(fitted.model) if fitted else (),
            speed_error=fitted.error if fitted else 0.0,
            points=kind.speed.points,
            noise=_noise(job.progress, physics.batches, kind.noise, own),
            remaining=max(0.0, self._length(physics, kind) - job.progress),
            is_prior=own is None,
            done=job.progress,
        )

    def _length(self, physics: ProfiledPhysics, kind: _Kind) -> float:
        """Steps of the first batch from begin to end; 0: no job of the kind has trained yet."""
        if self._declares:
            return physics.total
        return sum(kind.lengths) / len(kind.lengths) if kind.lengths else 2.0 * kind.furthest


def _noise(progress: float, allowed: BatchRange, kind: NoiseBook, own: _Own | None) -> tuple[NoisePoint, ...]:
    """By octaves of the batch: its own where it has reported, carried to other batches as its kind does."""
    batch = own.batch if own else allowed.first
    noise = own.noise if own else kind.noise(progress, batch)
    if noise is None:
        return ()
    octaves = range(ceil(log2(allowed.most / allowed.first)) + 1)
    batches = [min(allowed.first << octave, allowed.most) for octave in octaves]
    return tuple([NoisePoint(one, min(NOISE_MOST, noise * (one / batch) ** kind.power)) for one in batches])
