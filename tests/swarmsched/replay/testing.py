"""A small made-up profile, and replays of jobs that train by it."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from swarmsched.estimate import BatchRange, Resizable
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.registry import plan_anyway
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import Knowledge, PerfectKnowledge
from swarmsched.replay.perfect import PerfectReplay, Ticks
from swarmsched.replay.physics import ProfiledPhysics, RigidPhysics
from swarmsched.replay.profiles import BatchLimits, EpochStatistics, Measured, Profile
from swarmsched.replay.results import RunLog
from swarmsched.view import PolicySetting

TRACES = Path(__file__).parents[4] / "shared" / "traces"
BATCHES = BatchRange(32, 256, 8, 64)


def traces() -> Path:
    """The recorded workloads; skips where they are missing."""
    if not TRACES.is_dir():
        pytest.skip(f"the recorded workloads are not there: {TRACES}")
    return TRACES


def made_up(name: str = "toy", sync_s: float = 0.01, speeds: Mapping[str, float] = {"": 1.0}) -> Profile:
    """1 ms a sample and 10 ms a step; two epochs of 1,000 steps; noise 1, then 9; so many times as fast by class."""
    measured = [
        Measured(
            (),
            -(-gpus // 4),
            gpus,
            batch,
            (0.01 + 0.001 * batch + sync_s * (gpus > 1)) / speed,
            sync_s * (gpus > 1) / speed,
            gpu,
        )
        for gpus in range(1, 17)
        for batch in (8, 16, 32, 64)
        for gpu, speed in speeds.items()
    ]
    measured += [
        Measured((4,) * nodes, nodes, 4 * nodes, 64, (0.074 + sync_s) / speed, sync_s / speed, gpu)
        for nodes in (1, 2, 3, 4)
        for gpu, speed in speeds.items()
    ]
    epochs = [EpochStatistics(1_000.0, 1.0, 1.0), EpochStatistics(2_000.0, 1.0, 9.0)]
    return Profile(name, BatchLimits(32, 256, 8, 64, 2), measured, {32: epochs, 256: epochs})


def rigid(number: int, submitted_s: float, gpus: int, duration_s: float) -> ReplayJob:
    """A job of known length."""
    return ReplayJob(_id(number), f"job{number}", "", submitted_s, gpus, RigidPhysics(gpus, duration_s))


def elastic(number: int, submitted_s: float, profile: Profile, most: int = 16) -> ReplayJob:
    """A job that trains by a profile."""
    physics = ProfiledPhysics(profile, BATCHES)
    return ReplayJob(_id(number), f"job{number}", "k", submitted_s, 1, physics, Resizable(1, most, BATCHES))


def replay(
    jobs: Sequence[ReplayJob],
    policy: str,
    cluster: Fleet | None = None,
    pacing: Ticks | None = None,
    knowledge: Knowledge | None = None,
    **parameters: float,
) -> RunLog:
    """To the end; rigid jobs by default on one server of two GPUs, without pauses."""
    servers = cluster or Fleet({NodeId("n001"): 2})
    known = knowledge or PerfectKnowledge(4, servers.total)
    return PerfectReplay(
        jobs,
        servers,
        partial(plan_anyway, PolicySetting(policy, parameters)),
        known,
        pacing or Ticks(0, 0),
    ).run()


def ends(observer: RunLog) -> dict[str, float]:
    """When each finished job ended, by label."""
    return {job.label: round(job.ended_s or 0.0, 3) for job in observer.finished}


def _id(number: int) -> JobId:
    return JobId(f"{number:018d}{'0' * 8}")
