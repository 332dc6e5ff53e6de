"""The experiment of Tiresias' testbed, 480 jobs on 60 GPUs, and what elasticity adds to it; here with fewer jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
import pytest

from swarmsched.estimate import BatchRange, Estimate, Resizable, SpeedPoint
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.registry import compute_plan, kind_of
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import NothingKnown
from swarmsched.replay.perfect import PerfectReplay, Ticks
from swarmsched.replay.physics import TruePace
from swarmsched.replay.profiles import Shape
from swarmsched.view import PolicySetting

GPUS = 60
BATCHES = BatchRange(64, 64, 1, 64)
SHORT_S, LONG_S = (120.0, 800.0), (800.0, 7_200.0)
BINS = {((1,), SHORT_S): 0.635, ((1,), LONG_S): 0.125, ((2, 4, 8, 16), SHORT_S): 0.165, ((2, 4, 8, 16), LONG_S): 0.075}
"""GPUs and seconds of the four sorts of jobs, each drawn evenly; and their shares of all."""


def speed_up(gpus: int) -> float:
    return gpus / (1.0 + 0.05 * (gpus - 1))


@dataclass(frozen=True)
class Sublinear:
    """Progress in seconds on one GPU, wherever the others are."""

    total: float

    def pace(self, shape: Shape, batch: int, progress: float) -> TruePace:
        """By the number of GPUs alone."""
        return TruePace(speed_up(sum(shape)), self.total)

    def on(self, classes: object) -> "Sublinear":
        """All classes are alike."""
        return self

    def alone_s(self, cluster: Fleet) -> float:
        """On one GPU."""
        return self.total


class Measurements(NothingKnown):
    """The speed-up of each size, and the seconds that are left on the GPUs that were asked for."""

    points = tuple(
        [SpeedPoint(gpus, 1, local, 1.0 / speed_up(gpus)) for gpus in range(1, GPUS + 1) for local in (1, 64)]
    )

    def believed(self, job: ReplayJob, told: Estimate | None) -> Estimate:
        """Yardsticks alone look at what is left."""
        left_s = (job.physics.total - job.progress) / speed_up(job.gpus)
        return Estimate(points=self.points, remaining=max(1e-6, left_s))


def jobs(count: int, load: float, seed: int, is_resizable: bool) -> list[ReplayJob]:
    """Poisson arrivals that ask for `load` times what the GPUs can do; elastic ones from half to twice their size."""
    rng = Random(seed)
    asked_gpu_s = sum(share * float(np.mean(gpus)) * sum(seconds) / 2 for (gpus, seconds), share in BINS.items())
    gap_s, now_s, found = asked_gpu_s / (load * GPUS), 0.0, []
    for number in range(count):
        sizes, seconds = rng.choices(list(BINS), weights=list(BINS.values()))[0]
        gpus, run_s = rng.choice(sizes), rng.uniform(*seconds)
        elastic = Resizable(max(1, gpus // 2), 2 * gpus, BATCHES) if is_resizable else None
        physics = Sublinear(run_s * speed_up(gpus))
        found.append(ReplayJob(JobId(f"{number:026d}"), f"job{number}", "", now_s, gpus, physics, elastic))
        now_s += rng.expovariate(1.0 / gap_s)
    return found


def times(policy: str, parameters: Mapping[str, float], count: int, load: float, seed: int) -> tuple[float, float]:
    """Mean and median completion time in seconds; each change costs 15 s, and where GPUs are makes no difference."""
    setting = PolicySetting(policy, parameters)
    work, cluster = jobs(count, load, seed, kind_of(setting).resizes), Fleet({NodeId("all"): GPUS})
    plan = partial(compute_plan, setting)
    observer = PerfectReplay(work, cluster, plan, Measurements(), Ticks(0.0, 15.0)).run()
    assert len(observer.finished) == count
    assert not observer.policy_errors, observer.first_policy_error
    taken = [(job.ended_s or 0.0) - job.submitted_s for job in observer.finished]
    return float(np.mean(taken)), float(np.median(taken))


ONE_SEED = (3,)
FOUR_SEEDS = pytest.param((1, 2, 3, 4), marks=pytest.mark.acceptance)


def usual(policy: str, load: float, seeds: Sequence[int], **parameters: float) -> tuple[float, float]:
    """Medians of some seeds."""
    found = [times(policy, parameters, 240, load, seed) for seed in seeds]
    return float(np.median([mean for mean, _ in found])), float(np.median([median for _, median in found]))


@pytest.mark.parametrize("seeds", [ONE_SEED, FOUR_SEEDS])
def test_attained_service_is_far_better_than_fifo_and_near_to_what_knows_all(seeds: Sequence[int]) -> None:
    """At 1.2 times what the GPUs can do: over 2 times on average and 5 times in the median."""
    (fifo_s, fifo_median_s), (tiresias_s, median_s), (known_s, _) = (
        usual(policy, 1.2, seeds) for policy in ("fifo", "tiresias", "srsf")
    )
    assert fifo_s > 2.0 * tiresias_s
    assert fifo_median_s > 5.0 * median_s
    assert tiresias_s < 1.3 * known_s


@pytest.mark.parametrize("seeds", [ONE_SEED, FOUR_SEEDS])
@pytest.mark.parametrize(("load", "at_most"), [(0.9, 0.85), pytest.param(1.2, 0.95, marks=pytest.mark.acceptance)])
def test_elasticity_helps_more_where_gpus_are_free_now_and_then(
    load: float, at_most: float, seeds: Sequence[int]
) -> None:
    assert usual("elastic-tiresias", load, seeds)[0] < at_most * usual("tiresias", load, seeds)[0]
