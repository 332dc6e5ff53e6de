"""The default policy keeps jobs from taking much longer than alone on an equal share of the GPUs."""

from typing import Any

import pytest

from swarmsched.api import JobState
from swarmsched.estimate import BatchRange, Estimate, Resizable, SpeedPoint
from swarmsched.ids import NodeId
from swarmsched.policies.registry import compute_plan
from swarmsched.resources import Demand, Share
from swarmsched.view import Change, ClusterView, JobView, Plan, PolicySetting
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, job

A = NodeId("a")
ONE_GPU = Demand(gpus=1)
UTC_S = 1_700_010_000.0
SIZES = Resizable(1, 4, BatchRange(64, 64, 1, 64), 64, is_live=True)


def came(number: int, state: JobState, age_s: float, ranks: int = 1, **more: Any) -> JobView:
    return job(number, state, ranks, ONE_GPU, submitted_utc_s=UTC_S - age_s, **more)


def planned(free: int, *jobs: JobView, **parameters: float) -> Plan:
    view = ClusterView(1, (make_node(A, free, 4),), jobs, utc_s=UTC_S)
    return compute_plan(PolicySetting("swarm", parameters), view, NOW_S)


def declared(seconds: float, done: float = 0.0) -> Estimate:
    return Estimate(points=(SpeedPoint(1, 1, 64, 1.0),), remaining=seconds, done=done)


@pytest.mark.parametrize(
    ("age_s", "parameters", "first"),
    [(900.0, {}, 1), (1_200.0, {}, 2), (1_200.0, {"rho_most": 0.0}, 1), (1_200.0, {"rho_most": 3.0}, 1)],
)
def test_who_is_to_take_twice_as_long_as_alone_on_its_share_goes_before_those_with_less_left(
    age_s: float, parameters: dict[str, float], first: int
) -> None:
    """It takes 1,000 s and its pause; two jobs have two GPUs each."""
    plan = planned(
        1,
        came(1, JobState.QUEUED, 0.0, estimate=declared(100.0)),
        came(2, JobState.QUEUED, age_s, estimate=declared(1_000.0)),
        **parameters,
    )
    started = [each for each in plan.decisions if each.change is Change.START]
    assert [each.job_id for each in started] == [job_id(first)]
    said = "is to take 2.2 times as long as alone on an equal share of the GPUs"
    assert (said in started[0].reason) == (first == 2)


@pytest.mark.parametrize("age_s", [9_000.0, 90_000.0])
def test_gpus_never_stay_idle_for_long_for_a_wide_job_that_was_to_have_been_done(age_s: float) -> None:
    """It needs all four GPUs, and one is taken for 9,000 s more."""
    wide = came(1, JobState.QUEUED, age_s, ranks=4, estimate=declared(1_000.0))
    runs = came(3, JobState.RUNNING, 9_000.0, shares=(Share(A, 1),), running_s=9_000.0, estimate=declared(9_000.0))
    plan = planned(3, wide, came(2, JobState.QUEUED, 0.0, estimate=declared(100.0)), runs)
    assert [each.job_id for each in plan.decisions if each.change is Change.START] == [job_id(2)]


def test_a_plan_is_made_again_when_the_time_has_come() -> None:
    plan = planned(0, came(2, JobState.QUEUED, 900.0, estimate=declared(1_000.0)))
    assert plan.review_s == pytest.approx(2.0 * 1_030.0 - 1_030.0 - 900.0)


def test_a_running_job_that_is_to_take_twice_as_long_as_alone_has_more_of_the_gpus() -> None:
    """Two of the same length, of which one has waited for long; what is known of others does not matter."""
    points = tuple(SpeedPoint(ranks, 1, 64 // ranks, ranks**-0.7) for ranks in (1, 2, 4))

    def ranks(age_s: float, **parameters: float) -> int:
        estimate = Estimate(points=points, remaining=3_000.0, done=600.0, is_partial=True)
        known: dict[str, Any] = {"running_s": 900.0, "elastic": SIZES, "estimate": estimate, "pause_s": 1.0}
        jobs = [
            came(number, JobState.RUNNING, age, shares=(Share(A, 2),), **known)
            for number, age in ((1, 900.0), (2, age_s))
        ]
        made = planned(0, *jobs, **parameters).decisions
        return next(each.target.ranks for each in made if each.job_id == job_id(2)) or 2

    assert [ranks(900.0), ranks(9_000.0), ranks(9_000.0, rho_most=0.0)] == [2, 3, 2]
