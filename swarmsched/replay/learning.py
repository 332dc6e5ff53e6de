"""What ranks report of a replay's jobs: noisy measurements of the configurations that they really run.

Step times and gradient noise are off by a factor drawn from a lognormal distribution; progress is what the script
counts.  Whatever planners make of it, from one job to the next of its kind, is the swarm's own doing
(`gossip.kinds`, `models.kinds`).
"""

import random
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple

from msgspec.structs import replace

from swarmsched.estimate import Configuration, Estimate, NoisePoint, SpeedPoint
from swarmsched.ids import JobId
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import NOISE_MOST
from swarmsched.replay.physics import ProfiledPhysics
from swarmsched.replay.profiles import slower
from swarmsched.replay.rates import RatedPhysics

SMOOTHING = 0.7
"""Weight of the newest report of the gradient noise, which grows by orders of magnitude while a job trains."""
REPORTS = 50
"""On which a mean looks back."""


class _Measured(NamedTuple):
    """By one report."""

    configuration: Configuration
    step_s: float
    sync_s: float
    batch: int
    noise: float


@dataclass
class _Mean:
    """Of the logarithm of a step, since reports are off by a factor, and of the part of it that synchronises."""

    step: float = 0.0
    sync: float = 0.0
    count: int = 0

    def add(self, measured: _Measured) -> None:
        """One report more."""
        self.count = min(self.count + 1, REPORTS)
        self.step += (log(measured.step_s) - self.step) / self.count
        self.sync += (measured.sync_s / measured.step_s - self.sync) / self.count


@dataclass
class _Own:
    """What one job has reported: how fast it is where it has been, and the noise of its gradient, smoothed."""

    noise: float
    steps: dict[tuple[Configuration, float], _Mean] = field(default_factory=dict)

    def point(self, measured: _Measured, slowed: float) -> SpeedPoint:
        """With one report more, of steps at this part of its speed: what is told is of lately."""
        if measured.noise:
            self.noise *= (measured.noise / self.noise) ** SMOOTHING
        mean = self.steps.setdefault((measured.configuration, slowed), _Mean())
        mean.add(measured)
        return SpeedPoint(*measured.configuration, exp(mean.step), mean.sync * exp(mean.step))


class LearnedKnowledge:
    """With `declares` users say for how many epochs they train."""

    def __init__(self, seed: int, *, declares: bool, spread: float = 0.05, lies: float = 0.0) -> None:
        """`spread`: standard deviation of the logarithm of what is reported; `lies`: that of a factor by which each job
        always counts its steps wrong: they seem as much faster, and what its user declared as much nearer."""
        self._rng = random.Random(seed)
        self._declares = declares
        self._spread = spread
        self._seed, self._lies = seed, lies
        self._own: dict[JobId, _Own] = {}

    def reported(self, job: ReplayJob) -> Estimate | None:
        """The mean of what it has measured where it is, as its agent would send it."""
        measured = self._measured(job)
        if measured is None:
            return Estimate(done=self.counted(job))
        own = self._own.setdefault(job.job_id, _Own(measured.noise))
        return Estimate(
            points=(own.point(measured, job.slowed),),
            noise=(NoisePoint(measured.batch, own.noise),) if own.noise else (),
            remaining=self._declared(job),
            done=self.counted(job),
            is_partial=True,
        )

    def believed(self, job: ReplayJob, told: Estimate | None) -> Estimate | None:
        """Until it has reported itself, users alone know how long it trains."""
        declared = self._declared(job)
        if not declared or (told is not None and not told.is_prior and told.points):
            return told
        return replace(told or Estimate(is_prior=True), remaining=declared)

    def counted(self, job: ReplayJob) -> float:
        """By its script, right or wrong."""
        return job.progress * self._miscount(job)

    def _declared(self, job: ReplayJob) -> float:
        return max(0.0, job.physics.total - self.counted(job)) if self._declares else 0.0

    def _measured(self, job: ReplayJob) -> _Measured | None:
        """None for a job without a profile, and with a batch that its ranks cannot be dealt."""
        physics = job.physics
        if isinstance(physics, RatedPhysics) and job.elastic is not None:
            return self._rated(job, physics)
        if not isinstance(physics, ProfiledPhysics):
            return None
        dealt = physics.dealt(job.batch, job.ranks)
        if dealt is None:
            return None
        time = slower(physics.profile.step_time(job.shape, dealt.local_batch), job.slowed)
        factor = self._rng.lognormvariate(0.0, self._spread) / self._miscount(job)
        batch = dealt.batch(job.ranks)
        exact = physics.profile.noise(batch, physics.profile.epoch_at(job.progress))
        noise = min(NOISE_MOST, exact * self._rng.lognormvariate(0.0, self._spread))
        place = (job.ranks, len(job.shape), dealt.local_batch)
        return _Measured(place, time.step_s * factor, time.sync_s * factor, batch, noise)

    def _miscount(self, job: ReplayJob) -> float:
        """Steps that it counts for each that it makes."""
        return random.Random(f"{self._seed} {job.job_id}").lognormvariate(0.0, self._lies) if self._lies else 1.0

    def _rated(self, job: ReplayJob, physics: RatedPhysics) -> _Measured | None:
        """Nothing is known of the gradient, nor of the parts of a step; nothing at all where it makes none."""
        rate = physics.rate(job.shape)
        if not rate:
            return None
        step_s = 1.0 / (rate * job.slowed) * self._rng.lognormvariate(0.0, self._spread) / self._miscount(job)
        place = (job.ranks, len(job.shape), max(1, -(-physics.batches.first // job.ranks)))
        return _Measured(place, step_s, 0.0, physics.batches.first, 0.0)
