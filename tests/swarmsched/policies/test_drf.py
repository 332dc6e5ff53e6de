"""Dominant resource fairness: the example of the paper, who goes first, and that nobody who holds nothing starves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.ids import JobId
from swarmsched.policies.registry import compute_plan
from swarmsched.resources import Demand, Free
from swarmsched.view import Change, ClusterView, PolicySetting
from tests.swarmsched.policies.test_policies import (
    NOW_S,
    build,
    held_jobs,
    job_views,
    make_node,
    plan_of,
    running,
    waiting,
)
from tests.swarmsched.replay.testing import ends, replay, rigid

DRF = PolicySetting("drf")
GIB = 2**30


def test_the_papers_example_gives_three_tasks_to_one_user_and_two_to_the_other() -> None:
    """9 cores and 18 GiB; tasks of 1 core and 4 GiB against 3 cores and 1 GiB: 2/3 of the dominant resource each."""
    free = Free((), 9, 18 * GIB)
    nodes = [replace(make_node("n1", 0, 0), free=free, capacity=free)]
    small, large = Demand(cpus=1, memory_bytes=4 * GIB), Demand(cpus=3, memory_bytes=GIB)
    jobs = [waiting(number, 1, small, user="a") for number in range(10)]
    jobs += [waiting(10 + number, 1, large, user="b") for number in range(10)]
    plan = plan_of(DRF, nodes, jobs)
    users = {job.job_id: job.card.user for job in jobs}
    begun = [users[each.job_id] for each in plan.decisions if each.change is Change.START]
    assert sorted(begun) == ["a", "a", "a", "b", "b"]


def test_what_a_user_runs_already_counts_and_hidden_ranks_with_it() -> None:
    holder = running(1, [("n1", 1)], user="a", hidden_ranks=2)
    jobs = [holder, waiting(2, 1, user="a"), waiting(3, 1, user="b"), waiting(4, 1, user="b"), waiting(5, 1, user="b")]
    plan = plan_of(DRF, [make_node("n1", 3)], jobs)
    assert [each.job_id for each in plan.decisions if each.change is Change.START] == [
        jobs[number].job_id for number in (2, 3, 4)
    ]
    assert "b has a dominant share of 0%" in plan.decisions[1].reason


def test_a_job_that_the_swarm_could_never_hold_steps_aside() -> None:
    jobs = [waiting(1, 9, user="a"), waiting(2, 2, user="b")]
    plan = plan_of(DRF, [make_node("n1", 4)], jobs)
    assert [each.change for each in plan.decisions] == [Change.WAIT, Change.START]


def test_nobody_passes_a_job_that_fits_once_others_have_ended() -> None:
    plan = plan_of(DRF, [make_node("n1", 2)], [waiting(1, 4, user="a"), waiting(2, 1, user="b")])
    assert [each.change for each in plan.decisions] == [Change.WAIT, Change.WAIT]


def test_a_large_job_of_a_user_who_holds_nothing_starts_in_a_stream_of_small_ones() -> None:
    """Two small ones run when it comes; it starts when they have ended, though others wait all the time."""
    jobs = [rigid(number, 5.0 * number, 1, 10.0) for number in range(40)]
    for each in jobs:
        each.user = "many"
    large = rigid(99, 12.0, 2, 3.0)
    large.user = "one"
    assert ends(replay([*jobs, large], "drf"))["job99"] == pytest.approx(20.0 + 3.0, abs=5.0)


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.lists(st.tuples(st.just(0), st.booleans(), st.just("A100"), st.integers(0, 8)), min_size=1, max_size=4),
    jobs=job_views,
    held=held_jobs,
    users=st.lists(st.sampled_from("abc"), min_size=12, max_size=12),
)
def test_each_start_is_of_a_user_with_the_least_dominant_share(
    nodes: list[tuple[int, bool, str, int]],
    jobs: list[tuple[int, Demand, float, int]],
    held: list[tuple[int, int, float]],
    users: list[str],
) -> None:
    view = build(nodes, jobs, held)
    named = [
        replace(job, card=replace(job.card, user=user))
        for job, user in zip(view.jobs, users[: len(view.jobs)], strict=True)
    ]
    view = ClusterView(1, view.nodes, tuple(named))
    by_id = {job.job_id: job for job in named}
    queues: dict[str, set[str]] = {user: set() for user in "abc"}
    used = {user: [0, 0, 0] for user in "abc"}
    capacity = [node.capacity for node in view.nodes if node.is_available]
    total = [
        sum(each.gpu_count for each in capacity),
        sum(each.cpus for each in capacity),
        sum(each.memory_bytes for each in capacity),
    ]

    def book(job_id: JobId) -> None:
        job = by_id[job_id]
        for at, each in enumerate((job.demand.gpus, job.demand.cpus, job.demand.memory_bytes)):
            used[job.card.user][at] += job.ranks * each

    def share(user: str) -> float:
        return max((mine / all_ for mine, all_ in zip(used[user], total, strict=True) if all_), default=0.0)

    decisions = compute_plan(DRF, view, NOW_S).decisions
    for each in decisions:
        if each.change is Change.KEEP:
            book(each.job_id)
        else:
            queues[by_id[each.job_id].card.user].add(each.job_id)
    for each in decisions:
        user = by_id[each.job_id].card.user
        if each.change is Change.START:
            assert share(user) <= min(share(other) for other, queue in queues.items() if queue)
            book(each.job_id)
        queues[user].discard(each.job_id)
