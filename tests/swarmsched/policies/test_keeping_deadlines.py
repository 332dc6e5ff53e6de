"""The default policy keeps deadlines that can be kept, at the price of nobody's priority."""

from typing import Any

import pytest

from swarmsched.api import JobState
from swarmsched.estimate import BatchRange, Estimate, Resizable, SpeedPoint
from swarmsched.ids import NodeId
from swarmsched.policies.registry import compute_plan
from swarmsched.resources import Demand, Share
from swarmsched.view import Change, ClusterView, Decision, JobView, PolicySetting
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, job

A = NodeId("a")
ONE_GPU = Demand(gpus=1)
UTC_S = 1_700_010_000.0


def declared(seconds: float) -> Estimate:
    return Estimate(points=(SpeedPoint(1, 1, 64, 1.0),), remaining=seconds)


def waits(number: int, seconds: float, **more: Any) -> JobView:
    return job(number, JobState.QUEUED, 1, ONE_GPU, estimate=declared(seconds), **more)


def decided(free: int, *jobs: JobView, total: int = 4) -> dict[str, Decision]:
    view = ClusterView(1, (make_node(A, free, total),), jobs, utc_s=UTC_S)
    return {each.job_id: each for each in compute_plan(PolicySetting(), view, NOW_S).decisions}


@pytest.mark.parametrize(
    ("within_s", "first"),
    [
        (100_000.0, 1),  # there is time for the shorter one
        (1_700.0, 2),
        (1_050.0, 2),
        (500.0, 1),  # it is late whatever happens: nobody is kept waiting for it
    ],
)
def test_a_longer_job_goes_first_if_it_must_to_end_by_its_deadline(within_s: float, first: int) -> None:
    plan = decided(1, waits(1, 300.0), waits(2, 1_000.0, deadline_utc_s=UTC_S + within_s))
    assert [number for number in (1, 2) if plan[job_id(number)].change is Change.START] == [first]


def test_of_a_job_that_tells_nothing_a_deadline_presses_by_what_such_jobs_take() -> None:
    def first(within_s: float) -> list[int]:
        due = job(2, JobState.QUEUED, 1, ONE_GPU, time_limit_s=10_000.0, deadline_utc_s=UTC_S + within_s)
        plan = decided(1, job(1, JobState.QUEUED, 1, ONE_GPU, time_limit_s=300.0), due)
        return [number for number in (1, 2) if plan[job_id(number)].change is Change.START]

    assert [first(1e6), first(6_000.0), first(60.0)] == [[1], [2], [1]]


def test_a_deadline_is_worth_less_than_a_priority() -> None:
    urgent, important = waits(1, 1_000.0, deadline_utc_s=UTC_S + 1_100.0), waits(2, 5_000.0, priority=1)
    plan = decided(1, urgent, important)
    assert plan[job_id(2)].change is Change.START


SIZES = Resizable(1, 4, BatchRange(64, 64, 1, 64), 64, is_live=True)


def elastic(number: int, held: int, remaining: float, **more: Any) -> JobView:
    points = tuple(SpeedPoint(ranks, 1, 64 // ranks, 1.0 / ranks) for ranks in (1, 2, 4))
    estimate = Estimate(points=points, remaining=remaining, is_partial=True)
    shares = (Share(A, held),)
    known = {"shares": shares, "running_s": 900.0, "elastic": SIZES, "estimate": estimate, "pause_s": 1.0}
    return job(number, JobState.RUNNING, 1, ONE_GPU, **{**known, **more})


def ranks_of(plan: dict[str, Decision], one: JobView) -> int:
    return plan[one.job_id].target.ranks or sum(share.ranks for share in one.shares)


@pytest.mark.parametrize(("within_s", "least"), [(2_100.0, 2), (1_050.0, 4)])
def test_a_job_of_several_sizes_has_the_fewest_ranks_that_meet_its_deadline(within_s: float, least: int) -> None:
    """The other one has little left, and would have nearly all."""
    due, other = elastic(1, 1, 4_000.0, deadline_utc_s=UTC_S + within_s), elastic(2, 1, 300.0)
    plan = decided(3, due, other, total=5)
    assert ranks_of(plan, due) >= least, plan
    lax = elastic(1, 1, 4_000.0, deadline_utc_s=UTC_S + 1e6)
    assert ranks_of(decided(3, lax, other, total=5), lax) < 4


def test_who_cannot_be_in_time_with_all_gpus_is_served_as_if_it_had_no_deadline() -> None:
    hopeless, other = elastic(1, 1, 4_000.0, deadline_utc_s=UTC_S + 10.0), elastic(2, 1, 300.0)
    without = elastic(1, 1, 4_000.0)
    assert ranks_of(decided(3, hopeless, other, total=5), hopeless) == ranks_of(
        decided(3, without, other, total=5), without
    )
