"""The policy `swarm` where nothing is known of who waits: they start as under backfill, the rest is dealt by gain."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmsched.api import JobState
from swarmsched.estimate import BatchRange, Estimate, Resizable, SpeedPoint
from swarmsched.ids import NodeId
from swarmsched.policies.registry import compute_plan
from swarmsched.resources import Demand, Share
from swarmsched.view import Change, ClusterView, Decision, Elasticity, JobView, PolicySetting
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, job
from tests.swarmsched.policies.test_resizing import views

A, B = NodeId("n0"), NodeId("n1")
ONE_GPU = Demand(gpus=1)
MEASURED = Estimate(
    points=tuple(SpeedPoint(ranks, 1, 64 // ranks, 1.0 / ranks) for ranks in (1, 2, 4)), remaining=10_000.0
)
SIZES = Resizable(1, 4, BatchRange(64, 64, 1, 64), 64)
PATIENCE = 16.0


def decided(view: ClusterView, policy: str = "swarm") -> dict[str, Decision]:
    plan = compute_plan(PolicySetting(policy, {}, Elasticity.ON), view, NOW_S)
    return {each.job_id: each for each in plan.decisions}


def held(number: int, *shares: Share, **more: Any) -> JobView:
    """An elastic job that runs there and has reported."""
    more = {"elastic": SIZES, "estimate": MEASURED, "running_s": 600.0, **more}
    return job(number, JobState.RUNNING, 1, ONE_GPU, shares=shares, **more)


def free(view: ClusterView, **more: Any) -> ClusterView:
    """With cards that say so of all jobs."""
    return msgspec.structs.replace(
        view,
        jobs=tuple(
            [msgspec.structs.replace(each, card=msgspec.structs.replace(each.card, **more)) for each in view.jobs]
        ),
    )


@settings(max_examples=200, deadline=None)
@given(view=views(), is_fixed=st.booleans())
def test_no_job_is_stopped_that_has_no_checkpoint_and_may_not_begin_again(view: ClusterView, is_fixed: bool) -> None:
    """Where some take several sizes, and where none does."""
    fixed = free(view, elastic=None, restartable=False, has_checkpoint=False)
    mixed = [
        one if is_fixed or number % 2 else other
        for number, (one, other) in enumerate(zip(fixed.jobs, view.jobs, strict=True))
    ]
    plan = decided(msgspec.structs.replace(view, jobs=tuple(mixed)))
    stays = [each for each in mixed if each.shares and each.card.elastic is None]
    assert {plan[each.job_id].change for each in stays} <= {Change.KEEP}


@settings(max_examples=100, deadline=None)
@given(view=views(), elasticity=st.sampled_from([Elasticity.OFF, Elasticity.ADVISE]))
def test_who_has_a_checkpoint_is_stopped_under_elasticity_on_alone(view: ClusterView, elasticity: Elasticity) -> None:
    saved = free(view, elastic=None, has_checkpoint=True, restartable=False, running_s=1e5)
    decisions = compute_plan(PolicySetting("swarm", {}, elasticity), saved, NOW_S).decisions
    assert not [each for each in decisions if each.change is Change.STOP]


def test_agents_of_a_swarm_whose_jobs_have_one_size_never_import_numpy() -> None:
    """Their planners would be thrice as large, and start a second later."""
    view = ClusterView(1, (make_node(A, 2),), (job(1, JobState.QUEUED, 2, ONE_GPU),))
    code = (
        "import sys, msgspec\n"
        "from swarmsched.policies.registry import compute_plan\n"
        "from swarmsched.view import ClusterView, PolicySetting\n"
        "view = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ClusterView)\n"
        "print(compute_plan(PolicySetting('swarm'), view, 0.0).decisions[0].change.value, 'numpy' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.msgpack.encode(view), capture_output=True, check=True
    )
    assert done.stdout.split() == [b"start", b"False"]


def test_whoever_waits_and_is_not_known_gets_its_place_from_a_job_that_may_shrink() -> None:
    view = ClusterView(1, (make_node(A, 0),), (held(1, Share(A, 4)), job(2, JobState.QUEUED, 2, ONE_GPU)))
    plan = decided(view)
    assert (plan[job_id(1)].change, plan[job_id(1)].target.ranks) == (Change.SHRINK, 2)
    assert plan[job_id(1)].taker == job_id(2)
    assert plan[job_id(2)].target.shares == (Share(A, 2),)
    assert plan[job_id(2)].reason == "others are to make room for it; fits on n0 (2)"


def test_a_job_that_may_shrink_is_stopped_for_one_that_is_not_known_where_it_has_clearly_more_left() -> None:
    for left_s, change in ((100_000.0, Change.STOP), (1_000.0, Change.KEEP)):
        long = held(1, Share(A, 4), estimate=msgspec.structs.replace(MEASURED, remaining=left_s))
        plan = decided(ClusterView(1, (make_node(A, 0),), (long, job(2, JobState.QUEUED, 4, ONE_GPU))))
        assert plan[job_id(1)].change is change


def test_where_its_hosts_would_leave_no_place_a_job_shrinks_to_its_least() -> None:
    nodes = (make_node(A, 1, 2), make_node(B, 1, 2))
    pair = job(2, JobState.QUEUED, 1, Demand(gpus=2))
    plan = decided(ClusterView(1, nodes, (held(1, Share(A, 1), Share(B, 1)), pair)))
    assert (plan[job_id(1)].change, plan[job_id(1)].target.shares) == (Change.SHRINK, (Share(A, 1),))
    assert plan[job_id(2)].target.shares == (Share(B, 1),)


def test_of_jobs_that_are_known_the_higher_priority_is_dealt_gpus_first() -> None:
    short, urgent = (msgspec.structs.replace(MEASURED, remaining=left) for left in (100.0, 9_000.0))
    jobs = (
        job(1, JobState.QUEUED, 1, ONE_GPU, elastic=SIZES, estimate=short),
        job(2, JobState.QUEUED, 1, ONE_GPU, elastic=SIZES, estimate=urgent, priority=1),
    )
    plan = decided(ClusterView(1, (make_node(A, 1),), jobs))
    assert [plan[job_id(number)].change for number in (1, 2)] == [Change.WAIT, Change.START]


def test_a_job_that_may_have_no_checkpoint_keeps_its_least_whoever_waits() -> None:
    live = msgspec.structs.replace(SIZES, ranks_least=2, is_live=True)
    short = msgspec.structs.replace(MEASURED, remaining=10.0)
    urgent = [job(number, JobState.QUEUED, 1, ONE_GPU, estimate=short, priority=1) for number in range(2, 6)]
    plan = decided(ClusterView(1, (make_node(A, 0),), (held(1, Share(A, 4), elastic=live), *urgent)))
    assert (plan[job_id(1)].change, plan[job_id(1)].target.shares) == (Change.SHRINK, (Share(A, 2),))


@pytest.mark.parametrize("waiting", [0, 2])
def test_no_job_is_stopped_that_another_may_grow(waiting: int) -> None:
    """All four GPUs are worth most to the second, and none to those that wait; with one the first cannot train."""
    points = tuple(SpeedPoint(ranks, 1, 64 // ranks, 1.0 / ranks) for ranks in (2, 4))
    sizes = Resizable(1, 4, BatchRange(64, 64, 1, 32), 64)
    long = held(1, Share(A, 3), elastic=sizes, estimate=Estimate(points=points, remaining=1e6))
    wide = [job(number, JobState.QUEUED, 4, ONE_GPU, estimate=takes(1e7)) for number in range(3, 3 + waiting)]
    plan = decided(ClusterView(1, (make_node(A, 0, 4),), (long, held(2, Share(A, 1)), *wide)))
    changes = [(plan[job_id(number)].change, plan[job_id(number)].target.ranks) for number in range(1, 3 + waiting)]
    assert changes == [(Change.SHRINK, 2), (Change.GROW, 2), *[(Change.WAIT, 0)] * waiting]


def test_of_jobs_of_the_same_length_the_first_comes_first_and_who_runs_is_not_stopped() -> None:
    queue = tuple(job(number, JobState.QUEUED, 1, ONE_GPU, elastic=SIZES, estimate=MEASURED) for number in range(2, 12))
    plan = decided(ClusterView(1, (make_node(A, 1),), queue))
    assert [number for number in range(2, 12) if plan[job_id(number)].change is Change.START] == [2]
    for number in (1, 12):
        begun = held(number, Share(A, 1), running_s=1.0)
        plan = decided(ClusterView(1, (make_node(A, 0, 1),), (begun, *queue)))
        assert plan[job_id(number)].change is Change.KEEP


def test_of_jobs_that_wait_the_shorter_comes_first_though_it_ends_soon_after_the_pause_of_its_start() -> None:
    jobs = [
        job(number, JobState.QUEUED, 1, ONE_GPU, estimate=takes(seconds)) for number, seconds in ((1, 1e3), (2, 10.0))
    ]
    plan = decided(ClusterView(1, (make_node(A, 1),), tuple(jobs)))
    assert [plan[job_id(number)].change for number in (1, 2)] == [Change.WAIT, Change.START]


def test_who_has_waited_many_times_as_long_as_it_takes_passes_those_with_less_left_and_nobody_does_for_less() -> None:
    """Else jobs that are shorter, and come again and again, would keep it from the GPU for ever."""
    short = msgspec.structs.replace(MEASURED, remaining=5_000.0)
    shorter = job(2, JobState.QUEUED, 1, ONE_GPU, elastic=SIZES, estimate=short)
    for times, first in ((1.0, 2), (PATIENCE, 2), (4 * PATIENCE, 1)):
        longer = job(1, JobState.QUEUED, 1, ONE_GPU, elastic=SIZES, estimate=MEASURED, queued_s=times * 10_030.0)
        plan = decided(ClusterView(1, (make_node(A, 1),), (longer, shorter)))
        assert [number for number in (1, 2) if plan[job_id(number)].change is Change.START] == [first]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)])
def test_a_short_job_of_one_gpu_does_not_wait_behind_the_pause_of_one_on_all(sizes: tuple[int, int]) -> None:
    """Whether it takes a single size or might have taken two; however many GPUs the other has."""
    for nodes in (2, 16):
        names = [NodeId(f"n{number:02}") for number in range(nodes)]
        points = tuple(SpeedPoint(ranks, -(-ranks // 4), 4_096 // ranks, 4.0 / ranks) for ranks in (1, 2, 4, 8, 64))
        shares = tuple([Share(name, 4) for name in names])
        wide = Resizable(1, 64, BatchRange(4_096, 4_096, 1, 4_096), 4_096)
        long = held(
            1, *shares, elastic=wide, estimate=Estimate(points=points, remaining=1e6, is_partial=True), pause_s=30.0
        )
        short = job(2, JobState.QUEUED, 1, ONE_GPU, elastic=Resizable(*sizes, SIZES.batches), estimate=takes(60.0))
        plan = decided(ClusterView(1, tuple([make_node(name, 0, 4) for name in names]), (long, short)))
        assert plan[job_id(1)].change is Change.SHRINK
        assert plan[job_id(2)].target.ranks


def takes(seconds: float) -> Estimate:
    return Estimate(points=(SpeedPoint(1, 1, 64, 1.0),), remaining=seconds)


@pytest.mark.parametrize("is_live", [False, True])
def test_for_a_wide_job_that_has_waited_for_too_long_nobody_starts_who_would_delay_it(is_live: bool) -> None:
    """Those that run can't be stopped for it, and small ones would take each GPU as it comes free."""
    sizes = Resizable(1, 1, BatchRange(64, 64, 1, 64), 64, is_live=True) if is_live else None
    stays = held(1, Share(A, 1), elastic=sizes, estimate=takes(100.0), running_s=40.0)
    for waited_s, short, first in ((1_200.0, 99.0, [2, 3]), (1_400.0, 99.0, [2]), (1_400.0, 101.0, [])):
        wide = job(4, JobState.QUEUED, 4, ONE_GPU, estimate=takes(50.0), queued_s=waited_s)
        behind = [
            job(number, JobState.QUEUED, 1, ONE_GPU, estimate=takes(seconds))
            for number, seconds in ((2, short), (3, 102.0))
        ]
        plan = decided(ClusterView(1, (make_node(A, 3, 4),), (stays, wide, *behind)))
        assert [number for number in (2, 3) if plan[job_id(number)].change is Change.START] == first
        assert plan[job_id(1)].change is Change.KEEP
        assert plan[job_id(4)].change is Change.WAIT


def test_of_a_job_that_is_too_large_for_the_swarm_nothing_is_kept_from_others() -> None:
    wide = job(4, JobState.QUEUED, 5, ONE_GPU, estimate=takes(50.0), queued_s=1e6)
    plan = decided(ClusterView(1, (make_node(A, 4),), (wide, job(2, JobState.QUEUED, 1, ONE_GPU, estimate=takes(9.0)))))
    assert plan[job_id(2)].change is Change.START


def test_where_gpus_for_one_that_has_waited_for_too_long_lie_apart_those_in_its_way_make_it_a_place() -> None:
    """The one elsewhere, the one that may not be stopped and the more urgent one stay as they are."""
    one = msgspec.structs.replace(SIZES, ranks_most=1)
    live = msgspec.structs.replace(SIZES, ranks_least=2, ranks_most=2, is_live=True)
    jobs = (
        held(1, Share(A, 1), elastic=one, priority=1),
        held(2, Share(A, 2), elastic=live),
        held(3, Share(B, 1), elastic=one, priority=1),
        held(4, Share(B, 1), elastic=one),
        job(5, JobState.QUEUED, 1, Demand(gpus=2), estimate=takes(50.0), queued_s=1e4),
        job(6, JobState.QUEUED, 1, Demand(gpus=9), estimate=takes(50.0), queued_s=1e5),
    )
    plan = decided(ClusterView(1, (make_node(A, 1, 4), make_node(B, 1, 3)), jobs))
    stopped = [number for number in range(1, 7) if plan[job_id(number)].change is Change.STOP]
    assert stopped == [4]
    assert plan[job_id(4)].taker == job_id(5)
    assert (plan[job_id(5)].change, plan[job_id(5)].target.shares) == (Change.WAIT, (Share(B, 1),))


def test_who_is_in_the_way_keeps_what_it_has_elsewhere() -> None:
    spread = held(1, Share(B, 2), Share(A, 2))
    only = job(2, JobState.QUEUED, 1, ONE_GPU, estimate=takes(50.0), queued_s=1e7, nodes=(A,))
    plan = decided(ClusterView(1, (make_node(A, 0, 2), make_node(B, 0, 2)), (spread, only)))
    assert (plan[job_id(1)].change, plan[job_id(1)].target.shares) == (Change.SHRINK, (Share(B, 2),))
    assert plan[job_id(2)].target.shares == (Share(A, 1),)


def test_one_of_higher_priority_gets_the_gpus_that_it_can_use_from_those_below_and_no_more_than_that() -> None:
    """GPUs are dealt by number: those that it is dealt are where it may not go."""
    for priority, change in ((0, Change.KEEP), (5, Change.SHRINK)):
        choosy = job(3, JobState.QUEUED, 1, ONE_GPU, estimate=takes(5e4), priority=priority, nodes=(A,))
        nodes = (make_node(A, 0, 4), make_node(B, 0, 4))
        plan = decided(ClusterView(1, nodes, (held(1, Share(A, 4)), held(2, Share(B, 4)), choosy)))
        assert plan[job_id(1)].change is change
    assert plan[job_id(1)].target.shares == (Share(A, 3),)
    assert plan[job_id(1)].taker == job_id(3)
    assert plan[job_id(3)].target.shares == (Share(A, 1),)


def test_of_those_in_the_way_the_one_that_started_last_goes_whenever_its_card_was_written() -> None:
    one = msgspec.structs.replace(SIZES, ranks_most=1)
    jobs = [held(number, Share(A, 1), elastic=one, running_s=100.0) for number in (1, 2)]
    jobs[0] = msgspec.structs.replace(jobs[0], written_s=NOW_S - 36_000.0)
    waits = job(3, JobState.QUEUED, 1, ONE_GPU, estimate=takes(50.0), queued_s=1e5, nodes=(A,))
    elsewhere = held(4, Share(B, 1), elastic=one, estimate=takes(1e7))
    plan = decided(ClusterView(1, (make_node(A, 0, 2), make_node(B, 0, 1)), (*jobs, elsewhere, waits)))
    assert [plan[job_id(number)].change for number in (1, 2)] == [Change.KEEP, Change.STOP]


def test_who_makes_room_for_one_that_is_not_known_is_on_its_nodes() -> None:
    far = [held(number, Share(NodeId(f"n{number}"), 4)) for number in range(2, 6)]
    nodes = [make_node(f"n{number}", 0, 4) for number in range(6)]
    spread = held(1, Share(NodeId("n1"), 2), Share(A, 2))
    only = job(9, JobState.QUEUED, 1, ONE_GPU, nodes=(A,))
    plan = decided(ClusterView(1, tuple(nodes), (spread, *far, only)))
    changed = {number: plan[job_id(number)].target.shares for number in range(1, 6) if plan[job_id(number)].taker}
    assert changed == {1: (Share(NodeId("n1"), 2), Share(A, 1))}
    assert plan[job_id(9)].target.shares == (Share(A, 1),)


def test_what_others_leave_goes_by_priority_and_not_by_name() -> None:
    live = Resizable(1, 1, BatchRange(64, 64, 1, 64), 64, is_live=True)
    stay = [held(1, Share(A, 1), elastic=live, priority=3), held(2, Share(B, 1), elastic=live, priority=3)]
    apart = job(3, JobState.QUEUED, 1, Demand(gpus=2), estimate=takes(1e3), priority=2)
    for first, last in ((4, 5), (5, 4)):
        want: dict[str, Any] = {"ranks": 2, "demand": ONE_GPU, "estimate": takes(1e3)}
        rest = [job(number, JobState.QUEUED, priority=at, **want) for number, at in ((first, 1), (last, -1))]
        plan = decided(ClusterView(1, (make_node(A, 1, 2), make_node(B, 1, 2)), (*stay, apart, *rest)))
        assert [plan[job_id(number)].change for number in (first, last)] == [Change.START, Change.WAIT]


def test_a_job_that_would_take_for_ever_does_not_hinder_the_others() -> None:
    stays = held(1, Share(A, 1), elastic=None, running_s=40.0, estimate=takes(100.0))
    wide = job(2, JobState.QUEUED, 2, ONE_GPU, estimate=takes(50.0), queued_s=1e4)
    endless = job(3, JobState.QUEUED, 1, ONE_GPU, estimate=takes(1e15))
    view = ClusterView(1, (make_node(A, 1, 2),), (stays, wide, endless))
    assert not compute_plan(PolicySetting("swarm"), view, NOW_S).fault
    just = held(1, Share(A, 1), running_s=0.0)
    plan = compute_plan(PolicySetting("swarm", {"pause_s": 0.0}), ClusterView(1, (make_node(A, 0, 1),), (just,)), NOW_S)
    assert [each.change for each in plan.decisions] == [Change.KEEP]


def test_what_is_left_of_a_job_is_told_in_time_whatever_its_steps_take() -> None:
    quick, slow = (Estimate(points=(SpeedPoint(1, 1, 32, step_s),), remaining=1_000.0) for step_s in (0.1, 10.0))
    many = msgspec.structs.replace(quick, remaining=50_000.0)
    jobs = (job(1, JobState.QUEUED, 1, ONE_GPU, estimate=slow), job(2, JobState.QUEUED, 1, ONE_GPU, estimate=many))
    for policy in ("swarm", "srtf", "srsf"):
        plan = decided(ClusterView(1, (make_node(A, 1),), jobs), policy)
        assert [plan[job_id(number)].change for number in (1, 2)] == [Change.WAIT, Change.START]


def test_a_job_of_very_many_ranks_is_looked_at_as_it_is() -> None:
    wide = Resizable(1, 512, BatchRange(4_096, 4_096, 1, 4_096), 4_096)
    points = tuple(SpeedPoint(ranks, 75, 4_096 // ranks, 100.0 / ranks) for ranks in (256, 300))
    nodes = tuple(make_node(f"m{at:02}", 0) for at in range(75))
    shares = tuple(Share(node.node, 4) for node in nodes)
    large = held(1, *shares, elastic=wide, estimate=Estimate(points=points, remaining=1e6))
    plan = decided(ClusterView(1, (*nodes, make_node(A, 1)), (large, job(2, JobState.QUEUED, 1, ONE_GPU))))
    assert [plan[job_id(number)].change for number in (1, 2)] == [Change.KEEP, Change.START]


def test_reasons_say_what_more_ranks_bring_and_when_there_are_no_more_to_take() -> None:
    def reason(free: int, ranks: int) -> str:
        return decided(ClusterView(1, (make_node(A, free),), (held(1, Share(A, ranks)),)))[job_id(1)].reason

    assert reason(2, 2) == "4 ranks make it 100% faster, by its model; 2500 s left on an equal share"
    assert reason(0, 4) == "it takes no more; 2500 s left on an equal share"
    assert reason(0, 2) == "there are no more GPUs for it; 5000 s left on an equal share"


def test_what_more_ranks_bring_is_a_guess_until_a_second_size_was_measured() -> None:
    once = Estimate(points=MEASURED.points[:1], remaining=10_000.0, is_partial=True)
    reason = decided(ClusterView(1, (make_node(A, 1, 2),), (held(1, Share(A, 1), estimate=once),)))[job_id(1)].reason
    assert "faster, which is a guess: one size was measured so far; " in reason
