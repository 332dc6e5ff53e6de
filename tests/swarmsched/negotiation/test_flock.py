"""Which waiting job may try now: the queue's head without a plan, others by the plan's word, nobody past a conflict."""

import random

import pytest

from swarmsched.api import JobSpec, JobState
from swarmsched.effects import ComputePlan, SendPeer
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import FreeReport, HoldRequest, OwnerAnswer, Refusal
from swarmsched.negotiation.flock import (
    PLAN_AGE_S_MAX,
    PLAN_REFRESH_S,
    START_DELAY_PER_RANK_S,
    START_DELAY_S,
    START_DELAY_S_MAX,
    Flock,
    Surroundings,
)
from swarmsched.negotiation.shepherd import Clock
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, Gpu
from swarmsched.view import Action, JobView, NodeView, Plan, PlanEntry, PolicySetting

ME, A, B = NodeId("boss"), NodeId("a"), NodeId("b")
UTC = 1_700_000_000.0


def job_id(letter):
    return JobId("01hzzzzzzzabcdefghjkmnpqr" + letter)


def node(name, gpus, is_available=True):
    devices = tuple(Gpu(f"{name}-{n}", n, "H100", 2**36) for n in range(gpus))
    return NodeView(name, Free(devices, 64, 2**40), gpus, is_available, devices)


def foreign(letter, ranks, utc_s):
    return JobView(job_id(letter), JobState.QUEUED, ranks, Demand(gpus=1), utc_s)


class Scene:
    """One agent's flock; the test is owners, planner and all others."""

    def __init__(self, nodes=(), foreign_jobs=(), policy="fifo"):
        self.flock = Flock(ME, random.Random(1))
        self.flock.set_policy(PolicySetting(policy), 0.0)
        self.nodes, self.foreign_jobs = list(nodes), list(foreign_jobs)
        self.now_s = 10.0
        self.plans, self.holds = [], []

    @property
    def clock(self):
        return Clock(self.now_s, UTC + self.now_s)

    @property
    def around(self):
        return Surroundings(self.nodes, self.foreign_jobs, len(self.foreign_jobs))

    def submit(self, letter, ranks, utc_s):
        record = JobRecord(
            job_id(letter), JobSpec(("true",), ranks=ranks, demand=Demand(gpus=1)), utc_s, 1, 1, ME, 7, (ME,)
        )
        self.flock.add(record).accepted(self.clock)
        self.flock.look_soon(self.now_s)

    def look(self):
        """Evaluate; the letters of the jobs that asked for holds."""
        effects = self.flock.evaluate(self.around, self.clock)
        self.plans += [effect for effect in effects if isinstance(effect, ComputePlan)]
        holds = [e.message for e in effects if isinstance(e, SendPeer) and isinstance(e.message, HoldRequest)]
        self.holds += holds
        return [letter for letter in "abcdefg" if any(hold.job_id == job_id(letter) for hold in holds)]

    def answer_plan(self, *starts, elapsed_s=0.01):
        version = self.plans[-1].view.version
        entries = tuple(PlanEntry(job_id(letter), Action.START, (), (), "fits") for letter in starts)
        self.flock.plan_computed(Plan(version, self.flock.policy.policy_id, entries, elapsed_s), self.clock)


def test_every_job_starts_while_all_ahead_of_it_fit():
    scene = Scene([node(A, 4)])
    scene.submit("a", 1, UTC)
    scene.submit("b", 3, UTC + 1)
    assert scene.look() == ["a", "b"]
    assert scene.plans == []


def test_without_a_plan_nobody_passes_a_waiting_job():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == []
    assert len(scene.plans) == 1


def test_a_foreign_job_ahead_is_not_passed_either():
    scene = Scene([node(A, 2)], [foreign("a", 2, UTC)])
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == []
    scene.foreign_jobs = []
    assert scene.look() == ["b"]


def test_a_plan_lets_a_job_pass_once():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    scene.answer_plan("b")
    assert scene.look() == ["b"]
    (hold,) = scene.holds
    refused = OwnerAnswer(
        hold.job_id, 1, hold.attempt, hold.command_id, A, Refusal.DOES_NOT_FIT, FreeReport(1, 1, 0, 0, 0)
    )
    scene.flock.jobs[job_id("b")].owner_answered(refused, scene.clock)
    scene.now_s += 3.0  # past every backoff
    assert scene.look() == []


def test_an_old_plan_is_not_followed():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    scene.answer_plan("b")
    scene.now_s += PLAN_AGE_S_MAX + 0.1
    assert scene.look() == []


def test_a_plan_is_checked_against_the_room_that_is_left():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 2, UTC + 1)
    scene.look()
    scene.answer_plan("b")
    scene.nodes = [node(A, 1)]
    assert scene.look() == []


def test_an_answer_to_an_older_question_is_ignored():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    entries = (PlanEntry(job_id("b"), Action.START, (), (), ""),)
    scene.flock.plan_computed(Plan(99, scene.flock.policy.policy_id, entries), scene.clock)
    assert scene.look() == []


@pytest.mark.parametrize(("elapsed_s", "interval_s"), [(0.01, 1.0), (0.5, 10.0)])
def test_plans_are_asked_for_once_in_a_second_or_in_twenty_times_their_cost(elapsed_s, interval_s):
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.look()
    assert len(scene.plans) == 1, "one is under way"
    scene.answer_plan(elapsed_s=elapsed_s)
    scene.now_s += 0.95 * interval_s
    scene.flock.look_soon(scene.now_s)
    scene.look()
    assert len(scene.plans) == 1
    scene.now_s += 0.1 * interval_s
    scene.flock.look_soon(scene.now_s)
    scene.look()
    assert len(scene.plans) == 2


def test_without_news_a_plan_is_renewed_seldom_and_never_stands_still():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.answer_plan()
    for _ in range(20):
        scene.now_s = scene.flock.evaluation_due_s
        scene.look()
        if len(scene.plans) == 2:
            break
        assert scene.flock.evaluation_due_s > scene.now_s, "it would be looked at for ever in one step"
    assert scene.now_s == pytest.approx(10.0 + PLAN_REFRESH_S)


def test_a_failed_plan_is_asked_for_again():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.flock.plan_failed(scene.plans[-1].view.version, scene.now_s)
    scene.now_s += 1.1
    scene.look()
    assert len(scene.plans) == 2


def test_another_policy_plans_anew_and_drops_the_old_advice():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    scene.answer_plan("b")
    scene.flock.set_policy(PolicySetting("las"), scene.now_s)
    assert scene.flock.evaluation_due_s <= scene.now_s
    assert scene.look() == []
    scene.now_s += 1.1
    scene.look()
    assert scene.plans[-1].setting == PolicySetting("las")


def test_holds_that_are_not_answered_yet_are_not_given_twice():
    scene = Scene([node(A, 2)])
    scene.submit("a", 2, UTC)
    assert scene.look() == ["a"]
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == []


def test_a_node_that_is_not_available_gets_nothing():
    scene = Scene([node(A, 4, is_available=False), node(B, 1)])
    scene.submit("a", 1, UTC)
    scene.look()
    assert [hold.shepherd for hold in scene.holds] == [ME]
    assert scene.flock.jobs[job_id("a")].unanswered_holds[0].node == B


def test_the_start_delay_grows_with_the_foreign_jobs_ahead():

    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC + 100)
    scene.look()
    scene.answer_plan()
    scene.look()

    def after(count):
        scene.foreign_jobs = [foreign("b", 1, UTC)] * count
        scene.flock._evaluate_s = float("inf")
        scene.flock.capacity_released(scene.around, scene.clock)
        return scene.flock.evaluation_due_s - scene.now_s

    assert after(0) == pytest.approx(0.0)
    assert after(1) == pytest.approx(START_DELAY_S + START_DELAY_PER_RANK_S)
    assert after(20) == pytest.approx(START_DELAY_S + 20 * START_DELAY_PER_RANK_S)
    assert after(5_000) == pytest.approx(START_DELAY_S_MAX)
