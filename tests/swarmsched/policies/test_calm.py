"""Which running jobs the policy `swarm` leaves as they are."""

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.policies.calm import AHEAD, CHEAP_S, JUST_S, PAUSE_BUDGET, SILENT_PAUSES
from swarmsched.policies.registry import compute_plan, plan_anyway
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.knowledge import PerfectKnowledge
from swarmsched.replay.perfect import PerfectReplay, Ticks
from swarmsched.resources import Share, world_size
from swarmsched.view import Change, ClusterView, Decision, JobView, Plan, PolicySetting
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, job
from tests.swarmsched.policies.test_resizing import views
from tests.swarmsched.policies.test_swarm import MEASURED, ONE_GPU, A, decided, held
from tests.swarmsched.replay.testing import elastic, made_up

PAUSE_S = 30.0
HOUR_S = 3_600.0
KEEPS = (Change.KEEP, Change.REBATCH)


def lived(number: int, *shares: Share, **more: Any) -> JobView:
    """A job that started an hour ago, and has been as it is for half of it."""
    first_utc_s = NOW_S - HOUR_S
    return held(number, *shares, **{"running_s": HOUR_S, "first_started_utc_s": first_utc_s, "kept_s": 1_800, **more})


def plan_of(*jobs: JobView, free: int = 0) -> dict[str, Decision]:
    return decided(replace(ClusterView(1, (make_node(A, free, 4),), jobs), utc_s=NOW_S))


def asks(number: int = 9, **more: Any) -> JobView:
    short = replace(MEASURED, remaining=100.0)
    return job(number, JobState.QUEUED, 1, ONE_GPU, estimate=short, pause_s=1.0, **more)


@pytest.mark.parametrize(
    ("kept_s", "priority", "change"), [(60, 0, None), (61, 0, Change.SHRINK), (5, 1, Change.SHRINK)]
)
def test_a_job_that_has_just_changed_gives_nothing_up_but_to_a_higher_priority(
    kept_s: int, priority: int, change: Change | None
) -> None:
    plan = plan_of(lived(1, Share(A, 4), kept_s=kept_s, pause_s=1.0), asks(8), asks(priority=priority))
    assert plan[job_id(1)].change in ((change,) if change else KEEPS)


@pytest.mark.parametrize(
    ("pause_s", "queued_s", "gives"), [(CHEAP_S, 10, True), (2 * CHEAP_S, 10, False), (CHEAP_S, 20, False)]
)
def test_a_job_to_which_a_change_costs_nothing_makes_room_for_one_that_has_come_since(
    pause_s: float, queued_s: int, gives: bool
) -> None:
    late = [asks(number, queued_s=queued_s) for number in (8, 9)]
    plan = plan_of(lived(1, Share(A, 4), kept_s=20, pause_s=pause_s), *late)
    assert (plan[job_id(1)].change is Change.SHRINK) is gives
    assert any(plan[each.job_id].target.ranks for each in late) is gives


def test_whoever_has_just_changed_is_left_alone_where_a_newcomer_finds_another_place() -> None:
    view = (lived(1, Share(A, 3), kept_s=20, pause_s=0.01), asks(queued_s=5))
    plan = plan_of(*view, free=1)
    assert plan[job_id(1)].change in KEEPS
    assert plan[job_id(9)].change is Change.START


def test_whoever_waits_for_a_job_that_has_just_changed_is_planned_again_once_it_may() -> None:
    view = ClusterView(1, (make_node(A, 0, 4),), (lived(1, Share(A, 4), kept_s=20), asks()), utc_s=NOW_S)
    assert compute_plan(PolicySetting("swarm"), view, NOW_S).review_s == JUST_S - 20.0 + 1.0


def test_a_job_that_has_only_started_gives_room_at_once() -> None:
    plan = plan_of(held(1, Share(A, 4), running_s=5.0, pause_s=1.0), asks(8), asks())
    assert plan[job_id(1)].change is Change.SHRINK


@pytest.mark.parametrize(
    ("more", "grows"),
    [
        ({}, True),
        ({"kept_s": 360}, False),  # a tenth of its time
        ({"kept_s": 361}, True),
        ({"paused_s": 270}, True),  # a twentieth of it, and three pauses ahead; with this one it is four
        ({"paused_s": 271}, False),
        ({"paused_s": 271, "pause_s": 60.0}, True),
        ({"estimate": None, "kept_s": 0, "running_s": SILENT_PAUSES * PAUSE_S}, False),
        ({"estimate": None, "kept_s": 0, "running_s": SILENT_PAUSES * PAUSE_S + 1.0}, True),
        ({"kept_s": 5, "pause_s": CHEAP_S}, True),
        ({"kept_s": 300, "pause_s": CHEAP_S}, True),
        ({"kept_s": 5, "pause_s": 1.1 * CHEAP_S}, False),
        ({"kept_s": 5, "pause_s": CHEAP_S, "paused_s": 182}, False),
        ({"kept_s": 2, "pause_s": CHEAP_S, "estimate": None}, False),
    ],
)
def test_who_grows_has_been_as_it_is_for_long_and_has_pauses_left(more: dict[str, Any], grows: bool) -> None:
    plan = plan_of(lived(1, Share(A, 1), **more), free=3)
    assert (plan[job_id(1)].change is Change.GROW) is grows


def test_a_job_that_changes_at_no_cost_takes_nothing_while_somebody_waits_nor_gives_while_nobody_does() -> None:
    cheap = {"kept_s": 20, "pause_s": 0.01}
    plan = plan_of(lived(1, Share(A, 1), **cheap), job(9, JobState.QUEUED, 4, ONE_GPU, queued_s=100.0), free=3)
    assert plan[job_id(1)].change in KEEPS
    long = replace(MEASURED, remaining=1e6)
    short = lived(2, Share(A, 1), estimate=replace(MEASURED, remaining=300.0), pause_s=0.01)
    assert plan_of(lived(1, Share(A, 3), estimate=long, **cheap), short)[job_id(1)].change in KEEPS
    assert plan_of(lived(1, Share(A, 3), estimate=long, pause_s=0.01), short)[job_id(1)].change is Change.SHRINK


def test_a_job_that_stays_gives_up_gpus_to_one_that_waits_and_to_no_growth() -> None:
    spent = lived(1, Share(A, 3), paused_s=3_000, estimate=replace(MEASURED, remaining=1e6))
    short = lived(2, Share(A, 1), estimate=replace(MEASURED, remaining=300.0))
    assert plan_of(spent, short)[job_id(1)].change in KEEPS
    assert plan_of(replace(spent, card=replace(spent.card, paused_s=0)), short)[job_id(1)].change is Change.SHRINK
    assert plan_of(spent, short, asks())[job_id(1)].change is Change.SHRINK


def test_nobody_shrinks_or_grows_for_jobs_of_which_nothing_was_measured() -> None:
    """By the guess that more ranks bring their root, the two would share the GPUs evenly."""
    silent = [lived(number, Share(A, ranks), estimate=None) for number, ranks in ((1, 3), (2, 1))]
    assert {each.change for each in plan_of(*silent).values()} <= {*KEEPS}
    grown = [each for each in plan_of(silent[1], asks(), asks(8), free=1).values() if each.change is Change.GROW]
    assert not grown


@settings(max_examples=200, deadline=None)
@given(view=views(), kept_s=st.integers(1, int(JUST_S)), paused_s=st.sampled_from([0, 100_000]))
def test_no_job_changes_within_a_minute_of_its_last_change(view: ClusterView, kept_s: int, paused_s: int) -> None:
    changed = [
        replace(
            each,
            card=replace(each.card, kept_s=kept_s, paused_s=paused_s, priority=0, running_s=900.0 * bool(each.shares)),
        )
        for each in view.jobs
    ]
    plan = decided(replace(view, jobs=tuple(changed)))
    is_elastic = {each.job_id for each in changed if each.shares and each.card.elastic}
    assert {each.change for each in plan.values() if each.job_id in is_elastic} <= {*KEEPS}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pause_s", [1.0, 30.0])
def test_in_a_replay_nobody_is_changed_twice_in_a_minute_or_grown_beyond_the_budget(seed: int, pause_s: float) -> None:
    rng, now_s = Random(seed), 0.0
    jobs, profile = [], made_up()
    for number in range(25):
        now_s += rng.expovariate(1 / 20.0)
        jobs.append(elastic(number, now_s, profile, most=rng.choice([2, 8, 16])))
    setting, seen = PolicySetting("swarm", {"pause_s": pause_s}), [0]

    def planned(view: ClusterView, at_s: float) -> Plan:
        plan = plan_anyway(setting, view, at_s)
        seen[0] += sum([1 for _ in broken(view, plan, at_s, pause_s)])
        return plan

    cluster = Fleet.even(2, 4)
    replayed = PerfectReplay(jobs, cluster, planned, PerfectKnowledge(4, cluster.total), Ticks(0.0, pause_s)).run()
    figures = replayed.summary()
    assert (figures["finished"], figures["policy_errors"], seen[0], figures["reversed_decisions"]) == (25, 0, 0, 0)
    assert figures["rescales"] > 2


def broken(view: ClusterView, plan: Plan, now_s: float, pause_s: float) -> Iterable[Decision]:
    """Decisions that change a job within a minute, or grow one whose pauses are more than its budget."""
    by_id = {each.job_id: each for each in view.jobs}
    for decision in plan.decisions:
        card = by_id[decision.job_id].card
        if not card.shares or decision.change in (*KEEPS, Change.STOP):
            continue
        if card.kept_s and card.kept_s <= JUST_S:
            yield decision
        budget_s = PAUSE_BUDGET * (view.utc_s - card.first_started_utc_s) + AHEAD * pause_s
        if decision.target.ranks > world_size(card.shares) and card.paused_s + pause_s > budget_s + 1.0:
            yield decision
