"""When the queue is looked at, and when a plan is asked for."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.ids import Place
from swarmsched.ledger.message import Refusal
from swarmsched.negotiation.pacing import BACKOFF_S_MAX
from swarmsched.negotiation.placement.placement import (
    BETWEEN_PLACES_S,
    START_DELAY_PER_RANK_S,
    START_DELAY_S,
    START_DELAY_S_MAX,
)
from swarmsched.negotiation.placement.planning import PLAN_REFRESH_S
from swarmsched.negotiation.told import FirstWritten, TakenUp
from swarmsched.resources import Demand, Share
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import PolicySetting
from swarmsched.world import Worker, WorkerState, World
from tests.swarmsched.building import answer_to, word
from tests.swarmsched.negotiation.placement.scene import (
    UTC,
    A,
    B,
    Scene,
    foreign,
    job_id,
    node,
    planned_past,
    record_of,
    running_elastic,
    start,
)


@pytest.mark.parametrize(("elapsed_s", "interval_s"), [(0.01, 1.0), (0.25, 5.0), (3.5, 10.0)])
def test_plans_are_asked_for_once_in_a_second_or_in_twenty_times_their_cost_up_to_ten_seconds(elapsed_s, interval_s):
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.look()
    assert len(scene.plans) == 1, "one is under way"
    scene.answer_plan(elapsed_s=elapsed_s)
    scene.now_s += 0.95 * interval_s
    scene.placement.look_soon(scene.now_s)
    scene.look()
    assert len(scene.plans) == 1
    scene.now_s += 0.1 * interval_s
    scene.placement.look_soon(scene.now_s)
    scene.look()
    assert len(scene.plans) == 2


def test_without_news_a_plan_is_renewed_seldom_and_never_stands_still():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.answer_plan()
    for _ in range(20):
        scene.now_s = scene.placement.look_due_s
        scene.look()
        if len(scene.plans) == 2:
            break
        assert scene.placement.look_due_s > scene.now_s, "it would be looked at for ever in one step"
    assert scene.now_s == pytest.approx(10.0 + PLAN_REFRESH_S)


def test_where_time_alone_changes_a_plan_the_next_is_made_when_it_does():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.answer_plan(review_s=7.0)
    scene.look()
    while len(scene.plans) == 1:
        assert scene.placement.look_due_s > scene.now_s, "it would be looked at for ever in one step"
        scene.now_s = scene.placement.look_due_s
        scene.look()
    assert scene.now_s == pytest.approx(17.0)


def test_a_failed_plan_is_asked_for_again():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.placement.plan_failed(scene.plans[-1].view.version, scene.now_s)
    scene.now_s += 1.1
    scene.look()
    assert len(scene.plans) == 2


def test_another_policy_plans_anew_and_drops_the_old_advice():
    scene = planned_past()
    scene.placement.set_policy(PolicySetting("las"), scene.now_s)
    assert scene.placement.look_due_s <= scene.now_s
    assert scene.look() == []
    scene.now_s += 1.1
    scene.look()
    assert scene.plans[-1].setting == PolicySetting("las")


def test_the_start_delay_grows_with_the_foreign_jobs_ahead():

    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC + 100)
    scene.look()
    scene.answer_plan()
    scene.look()

    def after(count):
        scene.cluster.show(*(foreign("b", 1, UTC, number) for number in range(count)))
        scene.placement._look_s = float("inf")
        scene.placement.capacity_released(scene.clock)
        return scene.placement.look_due_s - scene.now_s

    assert after(0) == pytest.approx(0.0)
    assert after(1) == pytest.approx(START_DELAY_S + START_DELAY_PER_RANK_S)
    assert after(20) == pytest.approx(START_DELAY_S + 20 * START_DELAY_PER_RANK_S)
    assert after(5_000) == pytest.approx(START_DELAY_S_MAX)


def test_a_refused_job_looks_again_as_soon_as_the_node_that_refused_it_is_asked_again():
    scene = Scene([node(A, 1)])
    scene.submit("a", 1, UTC)
    scene.look()
    hold = scene.holds[-1]
    refused = answer_to(hold, A, Refusal.CLAIMED)
    scene.placement.shepherds.jobs[job_id("a")].step(word(refused), scene.clock)
    scene.placement.look_soon(scene.now_s)  # as its node does
    for _ in range(5):  # backoffs, as long as the only node is avoided
        scene.now_s = max(scene.now_s, scene.placement.look_due_s)
        if scene.look():
            break
    assert len(scene.holds) == 2
    assert scene.now_s < 10.0 + BACKOFF_S_MAX + 0.1


def test_who_has_nothing_that_waits_ignores_an_invitation():
    scene = Scene([node(A, 1)])
    scene.look()
    scene.placement.invited(scene.now_s)
    assert scene.placement.look_due_s == float("inf")


def test_a_plan_is_asked_for_when_somebody_comes_to_wait_for_whom_a_job_of_ours_could_make_room():
    scene = Scene([node(A, 2), node(B, 4)], policy="swarm")
    running_elastic(scene)
    scene.answer_plan()
    scene.now_s += 2.0
    assert not scene.placement.make_room_for_others(scene.clock)  # nobody new
    scene.look()
    assert len(scene.plans) == 1
    scene.cluster.show(foreign("c", 1, UTC + 2))
    assert scene.placement.make_room_for_others(scene.clock)
    assert scene.placement.look_due_s <= scene.now_s
    scene.look()
    assert job_id("c")[-1] in {job.job_id[-1] for job in scene.plans[-1].view.jobs}
    assert len(scene.plans) == 2


def test_no_plan_is_made_of_a_job_that_is_between_two_places():
    scene = Scene([node(A, 2), node(B, 4)], policy="swarm")
    spec = replace(record_of("a", 1, UTC).spec, ranks_most=4)
    scene.placement.shepherds.add(replace(record_of("a", 1, UTC), spec=spec)).step(FirstWritten(), scene.clock)
    scene.look()
    scene.answer_plan(start("a", (A, 1)))
    scene.now_s += 2.0
    assert scene.look() == ["a"]
    scene.placement.look_soon(scene.now_s)
    scene.look()
    assert len(scene.plans) == 1
    assert scene.placement.look_due_s == pytest.approx(scene.now_s + BETWEEN_PLACES_S)
    scene.placement.validate()


def told_slow(scene, job, version, parts, slow):
    """It trains with these parts, one of which takes three times as long as the others."""
    shares = tuple(Share(name, 1, part=part) for part, name in parts.items())
    world = World(version, tuple(parts), has_trained=True)
    job.decided = replace(job.decided, shares=shares, world=world, last_part=max(parts))
    job.gang.has(job.decided, scene.now_s)
    for part, name in parts.items():
        worker = Worker(WorkerState.TRAINING, f"10.0.0.{part}:7", version, version, busy_s=3.0 if part == slow else 1.0)
        job.put(TaskStatus(job.job_id, 1, 1, name, TaskStage.STARTED, revision=version, part=part, worker=worker))
    scene.placement.look_soon(scene.now_s)


def trains_on_a(*nodes):
    """Three workers of an elastic job on one node."""
    scene = Scene(nodes)
    spec = JobSpec(("true",), ranks=3, demand=Demand(gpus=1), elastic=True)
    shares = tuple(Share(A, 1, part=part) for part in (1, 2, 3))
    running = {"state": JobState.RUNNING, "attempt": 1, "shares": shares, "started_utc_s": UTC + 1}
    record = replace(record_of("a", 3, UTC), spec=spec, world=World(1, (1, 2, 3), has_trained=True), last_part=3)
    job = scene.placement.shepherds.add(replace(record, **running))
    job.step(TakenUp(()), scene.clock)
    return scene, job


def test_a_worker_on_a_gpu_that_failed_goes_to_another_one_of_the_same_node():
    """The job has as many workers on each node as before, and yet one of them has to leave."""
    scene, job = trains_on_a(node(A, 1, 4))
    told_slow(scene, job, 1, {1: A, 2: A, 3: A}, slow=0)
    ailing = job.gang.tasks[Place(A, 3)]
    job.put(replace(ailing, is_ailing=True, revision=2))
    scene.placement.look_soon(scene.now_s)
    scene.look()
    assert [(hold.part, job.regrouping.leave) for hold in scene.holds] == [(4, {3: None})]


def test_whoever_comes_for_a_slow_worker_is_not_replaced_for_ten_minutes():
    scene, job = trains_on_a(node(A, 0, 2), node(B, 4))
    told_slow(scene, job, 1, {1: A, 2: A, 3: A}, slow=3)
    scene.look()
    assert [hold.part for hold in scene.holds] == [4]
    job.drop_attempt()
    job.regrouping.forget_wishes()
    told_slow(scene, job, 2, {1: A, 2: A, 4: B}, slow=4)
    scene.cluster.there = [node(A, 2), node(B, 3)]
    scene.now_s += 599.0
    scene.look()
    assert [hold.part for hold in scene.holds] == [4]
    scene.now_s += 2.0
    scene.placement.look_soon(scene.now_s)
    scene.look()
    assert [hold.part for hold in scene.holds] == [4, 5]
