"""How jobs of a replay advance: what only the replay knows, and no policy sees."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from swarmsched.estimate import BatchRange
from swarmsched.models.batch import split
from swarmsched.replay.profiles import Profile, Shape


class Pace(NamedTuple):
    """Progress a second, and the progress at which that changes."""

    rate: float
    until: float


class Physics(Protocol):
    """One job's truth.  Progress begins at 0."""

    @property
    def total(self) -> float:
        """Progress at its end."""

    def pace(self, shape: Shape, batch: int, progress: float) -> Pace:
        """How fast it advances on so many GPUs of each node with a global batch (0: its own)."""


@dataclass(frozen=True)
class RigidPhysics:
    """A job of known run time on the GPUs that it asked for, wherever they are; on others it does not run."""

    gpus: int
    total: float  # seconds

    def pace(self, shape: Shape, batch: int, progress: float) -> Pace:
        """A second a second."""
        return Pace(1.0 if sum(shape) == self.gpus else 0.0, self.total)


@dataclass(frozen=True)
class ProfiledPhysics:
    """A job that trains as measured; progress in steps of the first batch."""

    profile: Profile
    batches: BatchRange

    @property
    def total(self) -> float:
        """Steps until its last epoch has ended."""
        return self.profile.total_progress

    def pace(self, shape: Shape, batch: int, progress: float) -> Pace:
        """Constant within an epoch."""
        dealt = split(batch or self.batches.first, sum(shape), self.batches)
        if dealt is None:
            return Pace(0.0, inf)
        epoch = self.profile.epoch_at(progress)
        step_s = self.profile.step_time(shape, dealt.local_batch).with_micro_steps(dealt.micro_steps)
        gain = self.profile.gain(dealt.batch(sum(shape)), epoch)
        return Pace(gain / step_s, self.profile.progress_at(epoch + 1))
