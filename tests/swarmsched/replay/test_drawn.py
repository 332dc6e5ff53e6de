"""Policies on drawn workloads: what holds without any recording, so that it is looked at everywhere.

Rigid ones against an event simulator of a few lines, which shares nothing with ours; the others among themselves.
"""

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any, NamedTuple

import pytest

from swarmsched.ids import NodeId
from swarmsched.policies.registry import POLICIES
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.generate import FAMILIES, LENGTHS, Wanted
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.setup import MANNERS, Replay, prepared
from swarmsched.replay.workload import TraceJob
from swarmsched.view import PolicySetting
from tests.swarmsched.replay.test_generate import drawn, read

GPUS = 24


class Kind(NamedTuple):
    """How an event simulator orders jobs that counts GPUs and places none."""

    preempts: bool = False
    is_strict: bool = False  # nobody passes the first that does not fit
    weighs_gpus: bool = False


def completion_s(jobs: Sequence[TraceJob], kind: Kind) -> dict[str, float]:
    """Seconds from submission to end, by the order of arrival or by what is left, whatever fits first."""
    left, running, ended, now_s = {job.job_id: job.duration_s for job in jobs}, set[str](), dict[str, float](), 0.0
    while left:
        here = [job for job in jobs if job.submitted_s <= now_s and job.job_id in left]
        free, keeps = GPUS, set() if kind.preempts else running
        queue = sorted(here, key=lambda job: job.job_id not in keeps)
        if kind.preempts:
            queue.sort(key=lambda job: left[job.job_id] * (job.gpus if kind.weighs_gpus else 1))
        running = set()
        for job in queue:
            if job.gpus <= free:
                running, free = running | {job.job_id}, free - job.gpus
            elif kind.is_strict:
                break
        coming_s = min([job.submitted_s for job in jobs if job.submitted_s > now_s], default=inf)
        step_s = min([coming_s - now_s, *[left[name] for name in running]])
        now_s += step_s
        for job in here:
            if job.job_id in running:
                left[job.job_id] -= step_s
                if left[job.job_id] < 1e-6:
                    del left[job.job_id]
                    ended[job.job_id] = now_s - job.submitted_s
    return ended


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("fifo", Kind(is_strict=True)),
        ("backfill", Kind()),
        ("srtf", Kind(preempts=True)),
        ("srsf", Kind(preempts=True, weighs_gpus=True)),
    ],
)
def test_rigid_baselines_reproduce_an_independent_simulator_of_drawn_jobs(policy: str, kind: Kind, seed: int) -> None:
    jobs = drawn(Wanted(seed, 60, 4.0, nodes=1, gpus_per_node=GPUS, rigid=1.0, sweeps=0.0, wishes=0.0, deadlines=0.0))
    parameters = {"reserves": 0.0} if policy == "backfill" else {}
    settings = Replay(PolicySetting(policy, parameters), Fleet({NodeId("all"): GPUS}), pacing=Ticks(0.0, 0.0))
    told = {job.label: (job.ended_s or 0.0) - job.submitted_s for job in prepared(jobs, {}, settings).run().finished}
    wanted = completion_s(jobs, kind)
    assert sum(wanted[job.job_id] > job.duration_s + 1.0 for job in jobs) > len(jobs) / 10, "few have to wait"
    assert told == pytest.approx(wanted, abs=0.1)


known = cache(read)


def summary(wanted: Wanted, policy: str, **settings: Any) -> dict[str, Any]:
    jobs, profiles, cluster = known(wanted)
    return prepared(jobs, profiles, Replay(PolicySetting(policy), cluster, **settings)).run().summary()


def test_the_default_policy_beats_the_others_where_everything_is_known() -> None:
    wanted = Wanted(2, 24, rigid=0.0, wishes=0.0, nodes=4)
    rare = Ticks(tick_s=300.0)
    averages = {name: summary(wanted, name, pacing=rare)["avg_jct_s"] for name in ("swarm", "tiresias", "optimus")}
    assert averages["swarm"] < 0.8 * min(averages["tiresias"], averages["optimus"]), averages


@pytest.mark.parametrize("manner", ["", *[name for name in MANNERS if name != "rigid"]])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_all_jobs_however_users_submit_them(policy: str, manner: str) -> None:
    """Two classes of GPUs, interference, costs by model, failures, limits, deadlines: nothing makes a policy raise."""
    wanted = Wanted(4, 8, 2.0, nodes=4, gpus_per_node=2, classes=2, deadlines=0.5)
    costs = {f"{family.name}-{length}": family.restart_s for family in FAMILIES for length in LENGTHS}
    told = summary(wanted, policy, manner=manner, pacing=Ticks(tick_s=300.0, interference=0.25), restart_costs=costs)
    assert (told["finished"], told["policy_errors"], told["unfinished"]) == (8, 0, [])
