"""How jobs of a replay advance: what only the replay knows, and no policy sees."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple, Protocol, Self

from swarmsched.estimate import BatchRange
from swarmsched.models.batch import Split, candidates, split
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.profiles import Profile, Shape

BATCHES = 24
"""Global batch sizes that are tried for the best one."""


class TruePace(NamedTuple):
    """Progress a second, and the progress at which that changes."""

    rate: float
    until: float


class Physics(Protocol):
    """One job's truth.  Progress begins at 0."""

    @property
    def total(self) -> float:
        """Progress at its end."""

    def pace(self, shape: Shape, batch: int, progress: float) -> TruePace:
        """How fast it advances on so many GPUs of each node with a global batch (0: its own)."""

    def on(self, gpus: Iterable[str]) -> Self:
        """The same job on GPUs of these classes; none: wherever it may run."""

    def alone_s(self, cluster: Fleet) -> float:
        """The job's best possible completion time: alone on the idle cluster, and every change free."""


@dataclass(frozen=True)
class RigidPhysics:
    """A job of known run time on the GPUs that it asked for, wherever they are; on others it does not run."""

    gpus: int
    total: float  # seconds

    def pace(self, shape: Shape, batch: int, progress: float) -> TruePace:
        """A second a second."""
        return TruePace(1.0 if sum(shape) == self.gpus else 0.0, self.total)

    def on(self, gpus: Iterable[str]) -> Self:
        """The job itself: its time is the same on all classes."""
        return self

    def alone_s(self, cluster: Fleet) -> float:
        """The job's run time."""
        return self.total


@dataclass(frozen=True)
class ProfiledPhysics:
    """A job that trains as measured; progress in steps of the first batch."""

    profile: Profile  # on the GPUs that it has
    batches: BatchRange  # on the GPUs that it has
    ranks_most: int = 256
    whole: Profile | None = None  # on all GPUs, where `profile` is a part of it
    is_split_alone: bool = False  # above its first batch one GPU takes two micro-steps, as in Pollux' simulator
    allowed: BatchRange | None = None  # on all GPUs, where `batches` is a part of it

    @property
    def total(self) -> float:
        """Steps until its last epoch has ended."""
        return self.profile.total_progress

    def pace(self, shape: Shape, batch: int, progress: float) -> TruePace:
        """Constant within an epoch."""
        dealt = self.dealt(batch, sum(shape))
        if dealt is None:
            return TruePace(0.0, inf)
        epoch = self.profile.epoch_at(progress)
        step_s = self.profile.step_time(shape, dealt.local_batch).with_micro_steps(dealt.micro_steps)
        gain = self.profile.gain(dealt.batch(sum(shape)), epoch)
        return TruePace(gain / step_s, self.profile.progress_at(epoch + 1))

    def dealt(self, batch: int, ranks: int) -> Split | None:
        """How a global batch (0: the first) is dealt to its ranks."""
        return _dealt(batch or self.batches.first, ranks, self.batches, is_split_alone=self.is_split_alone)

    def knows(self, shape: Shape, batch: int) -> bool:
        """Whether steps of so many ranks were measured."""
        dealt = self.dealt(batch, sum(shape))
        return dealt is None or self.profile.knows(shape, dealt.local_batch)

    def on(self, gpus: Iterable[str]) -> Self:
        """As measured there; a step waits for the slowest class."""
        whole, allowed, names = self.whole or self.profile, self.allowed or self.batches, sorted(gpus)
        part, batches = whole.on(names), allowed.on("+".join(names))
        if part is self.profile and batches == self.batches:
            return self
        return replace(self, profile=part, whole=whole, batches=batches, allowed=allowed)

    def alone_s(self, cluster: Fleet) -> float:
        """Each epoch on the GPUs and with the batch that suit it best, on as few nodes as hold them."""
        packings = cluster.packings(self.ranks_most)
        return _alone_s(self.whole or self.profile, self.allowed or self.batches, packings, self.is_split_alone)


def _dealt(batch: int, ranks: int, allowed: BatchRange, *, is_split_alone: bool) -> Split | None:
    dealt = split(batch, ranks, allowed)
    if dealt is None or not is_split_alone or ranks > 1 or dealt.micro_steps > 1 or dealt.local_batch <= allowed.first:
        return dealt
    half = ceil(dealt.local_batch / 2)
    return Split(half, 2) if half >= allowed.local_least else dealt


@lru_cache(maxsize=4_096)
def _alone_s(
    profile: Profile,
    batches: BatchRange,
    packings: tuple[tuple[str, Shape], ...],
    is_split_alone: bool,  # a key of the cache
) -> float:
    fastest: dict[int, float] = {}  # seconds of a step by global batch
    for gpu, shape in packings:
        allowed = batches.on(gpu)
        for wanted in candidates(batches, BATCHES):
            dealt = _dealt(wanted, sum(shape), allowed, is_split_alone=is_split_alone)
            if dealt is not None:
                step_s = profile.on([gpu]).step_time(shape, dealt.local_batch).with_micro_steps(dealt.micro_steps)
                size = dealt.batch(sum(shape))
                fastest[size] = min(step_s, fastest.get(size, inf))
    total_s = 0.0
    for epoch in range(profile.limits.epochs):
        steps = profile.progress_at(epoch + 1) - profile.progress_at(epoch)
        total_s += steps * min([step_s / profile.gain(size, epoch) for size, step_s in fastest.items()], default=inf)
    return total_s
