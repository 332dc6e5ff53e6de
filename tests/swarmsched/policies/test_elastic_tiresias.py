"""Elastic Tiresias: jobs grow into what is free and pays, and shrink while many wait."""

from typing import Any

import pytest

from swarmsched.api import JobState
from swarmsched.estimate import Estimate, Resizable
from swarmsched.ids import NodeId
from swarmsched.policies.registry import compute_plan
from swarmsched.resources import Share
from swarmsched.view import Change, ClusterView, Elasticity, JobView, Plan, PolicySetting
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, ONE, job, waiting
from tests.swarmsched.policies.test_resizing import BATCHES, POINTS

FIRST, SECOND = 10.0, 4_000.0
"""GPU-seconds of jobs in the first and in the second class."""


def elastic(number: int, held: int, attained_gpu_s: float, **changes: Any) -> JobView:
    """Asks for 2 of 1 to 8 ranks, and runs on node n1 with so many."""
    shares = (Share(NodeId("n1"), held),) if held else ()
    more = {"elastic": Resizable(1, 8, BATCHES, 256), "estimate": Estimate(points=POINTS), "first_started_utc_s": 1.0}
    more |= {"shares": shares, "attained_gpu_s": attained_gpu_s, **changes}
    return job(number, JobState.RUNNING if held else JobState.QUEUED, 2, ONE, **more)


def plan_of(free: int, *jobs: JobView, **parameters: float) -> Plan:
    view = ClusterView(1, (make_node("n1", free),), jobs)
    return compute_plan(PolicySetting("elastic-tiresias", parameters, Elasticity.ON), view, NOW_S)


def sizes(plan: Plan) -> dict[str, tuple[Change, int]]:
    return {decision.job_id: (decision.change, decision.target.ranks) for decision in plan.decisions}


def test_a_running_job_grows_into_what_is_free() -> None:
    assert sizes(plan_of(2, elastic(1, 2, FIRST))) == {job_id(1): (Change.GROW, 4)}


def test_a_job_of_which_nothing_was_measured_grows_as_well_where_nobody_waits() -> None:
    assert sizes(plan_of(2, elastic(1, 2, FIRST, estimate=None))) == {job_id(1): (Change.GROW, 4)}


@pytest.mark.parametrize(
    ("elasticity", "running", "waits", "advised"),
    [
        (Elasticity.ON, (Change.GROW, 4), (Change.START, 4), []),
        (Elasticity.ADVISE, (Change.KEEP, 0), (Change.START, 4), [(Change.GROW, 4)]),
        (Elasticity.OFF, (Change.KEEP, 0), (Change.START, 2), []),
    ],
)
def test_sizes_are_changed_as_far_as_the_setting_goes(elasticity, running, waits, advised) -> None:
    setting = PolicySetting("elastic-tiresias", {}, elasticity)
    runs, starts = ((make_node("n1", free),) for free in (2, 4))
    plan = compute_plan(setting, ClusterView(1, runs, (elastic(1, 2, FIRST),)), NOW_S)
    assert sizes(plan) == {job_id(1): running}
    assert [(each.change, each.target.ranks) for each in plan.advice] == advised
    plan = compute_plan(setting, ClusterView(1, starts, (elastic(1, 0, 0.0, estimate=None),)), NOW_S)
    assert (sizes(plan), plan.advice) == ({job_id(1): waits}, ())


@pytest.mark.parametrize("elasticity", [Elasticity.ADVISE, Elasticity.OFF])
def test_where_its_size_may_not_change_a_job_keeps_the_one_it_has_and_nobody_grows_into_that(elasticity) -> None:
    """It asked for 2 ranks and was started with 4; the other one could have four if it shrank."""
    larger, other = elastic(1, 4, FIRST), elastic(2, 2, FIRST, elastic=Resizable(1, 8, BATCHES, 256, is_live=True))
    view = ClusterView(1, (make_node("n1", 0, 6),), (larger, other))
    plan = compute_plan(PolicySetting("elastic-tiresias", {}, elasticity), view, NOW_S)
    assert sizes(plan) == {job_id(1): (Change.KEEP, 0), job_id(2): (Change.KEEP, 0)}


def test_a_waiting_job_counts_more_than_growth() -> None:
    plan = plan_of(2, elastic(1, 2, FIRST), elastic(2, 0, 0.0))
    assert sizes(plan) == {job_id(1): (Change.KEEP, 0), job_id(2): (Change.START, 2)}


def test_no_job_is_stopped_that_one_of_a_higher_class_may_grow() -> None:
    plan = plan_of(0, elastic(1, 1, FIRST), elastic(2, 1, SECOND))
    assert sizes(plan) == {job_id(1): (Change.KEEP, 0), job_id(2): (Change.KEEP, 0)}


def test_jobs_beyond_the_first_class_shrink_to_their_least_while_many_wait() -> None:
    old = elastic(1, 2, SECOND)
    rigid = [waiting(number, 1, attained_gpu_s=2.0 * SECOND, first_started_utc_s=2.0) for number in range(2, 7)]
    crowded = sizes(plan_of(2, old, *rigid, waiting_max=2.0))
    assert crowded[job_id(1)] == (Change.SHRINK, 1)
    changes = [change for change, _ in crowded.values()]
    assert (changes.count(Change.START), changes.count(Change.WAIT)) == (2, 3)
    assert sizes(plan_of(2, old, *rigid))[job_id(1)] == (Change.KEEP, 0)


def test_a_job_of_the_first_class_does_not_shrink() -> None:
    rigid = [waiting(number, 3) for number in range(2, 7)]
    assert sizes(plan_of(2, elastic(1, 2, FIRST), *rigid, waiting_max=2.0))[job_id(1)] == (Change.GROW, 4)


def test_who_has_had_least_takes_the_place_of_who_has_had_more() -> None:
    plan = plan_of(0, elastic(1, 4, SECOND), waiting(2, 4))
    assert sizes(plan) == {job_id(1): (Change.STOP, 0), job_id(2): (Change.WAIT, 4)}
    assert {decision.taker for decision in plan.decisions} == {"", job_id(2)}
