"""Which waiting job may try now: the queue's head without a plan, others by the plan's word, nobody past a conflict."""

import random
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.card import card_of
from swarmsched.checkpoint import Checkpoint
from swarmsched.effects import Announce, ComputePlan, SendPeer
from swarmsched.estimate import BatchRange, Estimate
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import ClaimRequest, HoldRequest, Refusal, TaskBatch, TaskEstimate
from swarmsched.negotiation.claiming import ANSWER_S
from swarmsched.negotiation.pacing import BACKOFF_S_MAX
from swarmsched.negotiation.placement.placement import (
    BETWEEN_PLACES_S,
    INVITED_S,
    START_DELAY_PER_RANK_S,
    START_DELAY_S,
    START_DELAY_S_MAX,
    Placement,
)
from swarmsched.negotiation.placement.planning import PLAN_AGE_S_MAX, PLAN_REFRESH_S
from swarmsched.negotiation.record_writer import WriteRecord
from swarmsched.negotiation.shepherd import Clock
from swarmsched.negotiation.window import GIVEN_UP_S, LATE_S, LIMIT_START
from swarmsched.record import Rescaling
from swarmsched.resources import Demand, Share
from swarmsched.view import Allocation, Change, Decision, Elasticity, JobView, Plan, PolicySetting
from tests.swarmsched.building import answer_to, make_node, make_record

ME, A, B = NodeId("boss"), NodeId("a"), NodeId("b")
UTC = 1_700_000_000.0


def job_id(letter):
    return JobId("01hzzzzzzzabcdefghjkmnpqr" + letter)


def start(letter, *places, batch=0):
    target = Allocation(tuple(Share(name, ranks) for name, ranks in places), batch)
    return Decision(job_id(letter), Change.START, "fits", target)


def node(name, gpus, is_available=True):
    return make_node(name, gpus, gpus, is_available=is_available)


def record_of(letter, ranks, utc_s, shepherd=ME):
    spec = JobSpec(("true",), ranks=ranks, demand=Demand(gpus=1))
    return make_record(shepherd, job_id=job_id(letter), spec=spec, submitted_utc_s=utc_s, shepherd_generation=7)


def foreign(letter, ranks, utc_s, number=0, **changes):
    card = card_of(record_of(letter, ranks, utc_s, shepherd=B))
    return JobView(replace(card, job_id=job_id(letter)[:20] + f"{number:05}" + letter, **changes))


class Cluster:
    """What the test lets everybody else be."""

    def __init__(self, nodes, jobs):
        self.there, self.jobs, self.news, self.dead = list(nodes), {}, [], set()
        self.priors, self.drained_nodes = {}, set()
        self.show(*jobs)

    def show(self, *jobs):
        self.news += [*self.jobs, *(job.job_id for job in jobs)]
        self.jobs = {job.job_id: job for job in jobs}

    def prior(self, user, name):
        return self.priors.get((user, name))

    def gpu_class(self, shares, demand):
        return ""

    def kinds(self, jobs, nodes):
        return ()

    def take_job_news(self):
        news, self.news = self.news, []
        return news

    def can_act(self, job, now_s):
        return job.card.shepherd not in self.dead

    def nodes(self):
        return self.there

    def drained(self):
        return self.drained_nodes


class Scene:
    """One agent's jobs; the test is owners, planner and all others."""

    def __init__(self, nodes=(), foreign_jobs=(), policy="fifo"):
        self.cluster = Cluster(nodes, foreign_jobs)
        self.placement = Placement(ME, self.cluster, random.Random(1))
        self.placement.set_policy(PolicySetting(policy), 0.0)
        self.now_s = 10.0
        self.plans, self.holds = [], []

    @property
    def clock(self):
        return Clock(self.now_s, UTC + self.now_s)

    def submit(self, letter, ranks, utc_s):
        self.placement.shepherds.add(record_of(letter, ranks, utc_s)).accepted(self.clock)
        self.placement.look_soon(self.now_s)

    def look(self):
        """Evaluate; the letters of the jobs that asked for holds."""
        effects = self.placement.look(self.clock)
        self.plans += [effect for effect in effects if isinstance(effect, ComputePlan)]
        holds = [e.message for e in effects if isinstance(e, SendPeer) and isinstance(e.message, HoldRequest)]
        self.holds += holds
        return [letter for letter in "abcdefg" if any(hold.job_id == job_id(letter) for hold in holds)]

    def answer_plan(self, *decisions, elapsed_s=0.01, memory=b"", advice=()):
        version = self.plans[-1].view.version
        plan = Plan(tuple(decisions), memory, version, self.placement.policy.policy_id, elapsed_s, advice=advice)
        self.placement.plan_computed(plan, self.clock)


def plan_twice(scene, *decisions):
    """Running jobs get other sizes by two plans that agree; what was announced after the first."""
    scene.answer_plan(*decisions)
    scene.now_s += 1.1
    scene.placement.look_soon(scene.now_s)
    effects = scene.placement.look(scene.clock)
    assert [each for each in effects if isinstance(each, WriteRecord)] == []
    scene.plans += [each for each in effects if isinstance(each, ComputePlan)]
    scene.answer_plan(*decisions)
    return [each for each in effects if isinstance(each, Announce)]


def test_every_job_starts_while_all_ahead_of_it_fit():
    scene = Scene([node(A, 4)])
    scene.submit("a", 1, UTC)
    scene.submit("b", 3, UTC + 1)
    assert scene.look() == ["a", "b"]
    assert scene.plans == []


def test_under_the_default_policy_a_job_that_fits_starts_without_a_plan():
    scene = Scene([node(A, 4)], policy=SwarmSetting().policy)
    scene.submit("a", 1, UTC)
    assert scene.look() == ["a"]
    assert scene.plans == []


def test_with_which_size_a_job_starts_is_the_plans_word_and_so_is_what_is_left_to_those_behind_it():
    scene = Scene([node(A, 4)], policy="swarm")
    spec = replace(record_of("a", 1, UTC).spec, ranks_most=4)
    scene.placement.shepherds.add(replace(record_of("a", 1, UTC), spec=spec)).accepted(scene.clock)
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == []
    assert len(scene.plans) == 1
    scene.placement.set_policy(PolicySetting("swarm", {}, Elasticity.OFF), scene.now_s)
    assert scene.look() == ["a", "b"]


def test_a_policy_that_raised_is_told_of_once():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    told = []
    for fault in ("", "it raised", "it raised", "", "it raised", "it raised otherwise"):
        scene.now_s += 30.0
        scene.look()
        plan = Plan((), version=scene.plans[-1].view.version, policy_id="backfill", fault=fault)
        told += [event.text for event in scene.placement.plan_computed(plan, scene.clock)]
    once, otherwise = "it raised; backfill plans in its place", "it raised otherwise; backfill plans in its place"
    assert told == [once, once, otherwise]


def test_no_more_is_begun_than_is_answered_in_time():
    scene = Scene([node(A, 40)])
    letters = "0123456789abcdefghjkmnpqrs"
    for number, letter in enumerate(letters):
        scene.submit(letter, 1, UTC + number)
    scene.look()
    assert [hold.job_id for hold in scene.holds] == [job_id(letter) for letter in letters[: int(LIMIT_START)]]
    scene.placement.let_go(job_id("0"))
    scene.look()
    assert scene.holds[-1].job_id == job_id(letters[int(LIMIT_START)])
    scene.now_s += LATE_S + 0.1
    scene.placement.let_go(job_id("1"))
    scene.look()
    assert len(scene.holds) == LIMIT_START + 1
    assert scene.placement.look_due_s < scene.now_s + GIVEN_UP_S


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
    scene.cluster.show()
    scene.placement.look_soon(scene.now_s)
    assert scene.look() == ["b"]


def test_a_plan_lets_a_job_pass_once():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    scene.answer_plan(start("b", (A, 1)))
    assert scene.look() == ["b"]
    (hold,) = scene.holds
    scene.placement.shepherds.jobs[job_id("b")].owner_answered(answer_to(hold, A, Refusal.DOES_NOT_FIT), scene.clock)
    scene.now_s += 3.0  # past every backoff
    assert scene.look() == []


def test_an_old_plan_is_not_followed():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    scene.answer_plan(start("b", (A, 1)))
    scene.now_s += PLAN_AGE_S_MAX + 0.1
    assert scene.look() == []


def test_a_plan_is_checked_against_the_room_that_is_left():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 2, UTC + 1)
    scene.look()
    scene.answer_plan(start("b", (A, 1)))
    scene.cluster.there = [node(A, 1)]
    assert scene.look() == []


def test_an_answer_to_an_older_question_is_ignored():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    late = Plan((start("b", (A, 1)),), version=99, policy_id="backfill")
    scene.placement.plan_computed(late, scene.clock)
    assert scene.look() == []


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


def test_a_failed_plan_is_asked_for_again():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.placement.plan_failed(scene.plans[-1].view.version, scene.now_s)
    scene.now_s += 1.1
    scene.look()
    assert len(scene.plans) == 2


def test_another_policy_plans_anew_and_drops_the_old_advice():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    scene.answer_plan(start("b", (A, 1)))
    scene.placement.set_policy(PolicySetting("las"), scene.now_s)
    assert scene.placement.look_due_s <= scene.now_s
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
    assert scene.placement.shepherds.jobs[job_id("a")].unanswered_holds[0].node == B


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
    scene.placement.shepherds.jobs[job_id("a")].owner_answered(
        answer_to(hold, A, Refusal.RELEASED_ATTEMPT), scene.clock
    )
    scene.placement.look_soon(scene.now_s)  # as its node does
    for _ in range(5):  # backoffs, as long as the only node is avoided
        scene.now_s = max(scene.now_s, scene.placement.look_due_s)
        if scene.look():
            break
    assert len(scene.holds) == 2
    assert scene.now_s < 10.0 + BACKOFF_S_MAX + 0.1


def test_whoever_is_invited_need_not_wait_for_those_ahead_who_would_fit_as_well():
    scene = Scene([node(A, 1)], [foreign("a", 1, UTC)])
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == []
    scene.placement.invited(scene.now_s)
    assert scene.placement.look_due_s == scene.now_s
    assert scene.look() == ["b"]


def test_an_invitation_lets_nobody_pass_a_job_that_does_not_fit():
    scene = Scene([node(A, 1)], [foreign("a", 2, UTC)])
    scene.submit("b", 1, UTC + 1)
    scene.placement.invited(scene.now_s)
    assert scene.look() == []


def test_an_invitation_is_soon_forgotten():
    scene = Scene([node(A, 1)], [foreign("a", 1, UTC)])
    scene.submit("b", 1, UTC + 1)
    scene.placement.invited(scene.now_s)
    scene.now_s += INVITED_S
    assert scene.look() == []


def test_who_has_nothing_that_waits_ignores_an_invitation():
    scene = Scene([node(A, 1)])
    scene.look()
    scene.placement.invited(scene.now_s)
    assert scene.placement.look_due_s == float("inf")


def test_jobs_of_a_dead_shepherd_and_jobs_that_hide_where_they_may_go_stand_in_nobodys_way():
    scene = Scene([node(A, 1)], [foreign("a", 1, UTC)])
    scene.submit("b", 1, UTC + 1)
    scene.cluster.dead = {B}
    assert scene.look() == ["b"]
    scene = Scene([node(A, 1)], [foreign("a", 1, UTC, hides_constraints=True)])
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == ["b"]


def test_a_start_goes_to_the_hosts_that_the_plan_names():
    scene = Scene([node(A, 4), node(B, 4)], policy="backfill")
    scene.submit("a", 9, UTC)
    scene.submit("b", 4, UTC + 1)
    scene.look()
    scene.answer_plan(start("b", (B, 3), (A, 1)))
    assert scene.look() == ["b"]
    assert [share.ranks for share in scene.placement.shepherds.jobs[job_id("b")].unanswered_holds] == [3, 1]
    assert [hold.ranks for hold in scene.holds] == [3, 1]


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (start("b", (B, 4)), "the plan's place on b is taken"),
        (start("b", (A, 2)), "it takes 4 ranks, and the plan gives it 2"),
        (start("b", (A, 4), batch=64), "it names no batches, and the plan gives it one of 64"),
    ],
)
def test_a_start_that_cannot_be_followed_is_told_and_planned_anew(decision, reason):
    scene = Scene([node(A, 4), node(B, 3)], policy="backfill")
    scene.submit("a", 9, UTC)
    scene.submit("b", 4, UTC + 1)
    scene.look()
    scene.answer_plan(decision)
    assert scene.look() == []
    assert reason in scene.placement.shepherds.jobs[job_id("b")].record.reason
    scene.now_s += 1.1
    scene.look()
    assert len(scene.plans) == 2


def test_what_a_plan_wants_of_running_jobs_and_cannot_have_is_said_once():
    scene = Scene([node(A, 4)])
    scene.submit("a", 9, UTC)
    scene.look()
    grow = Decision(job_id("a"), Change.GROW, "pays", Allocation((Share(A, 8),)))
    plan_twice(scene, grow)
    told = [effect for _ in range(2) for effect in scene.placement.look(scene.clock) if isinstance(effect, Announce)]
    assert [effect.text for effect in told] == ["grow ignored: it is queued"]


def running_elastic(scene, *, saved=True):
    """A job of 2 to 6 ranks, and batches of 64 to 256, that runs on two GPUs of `a`; its present attempt has a
    checkpoint, or none."""
    record = record_of("a", 2, UTC)
    checkpoint = Checkpoint("step-1", attempt=1 if saved else 0, node=A)
    running = {"state": JobState.RUNNING, "attempt": 1, "shares": (Share(A, 2),), "started_utc_s": UTC + 1}
    spec = replace(record.spec, ranks_most=6, batches=BatchRange(64, 256, 1, 64))
    job = scene.placement.shepherds.add(replace(record, spec=spec, checkpoint=checkpoint, **running))
    job.take_up((), scene.clock)
    scene.submit("b", 9, UTC + 1)  # so that somebody waits, and plans are asked for
    scene.look()
    return job


def change(kind, *shares, taker="", batch=0):
    target = Allocation(tuple(Share(*share) for share in shares), batch)
    return Decision(job_id("a"), kind, "pays", target, taker=taker)


def test_a_running_job_goes_on_with_the_planned_batch_and_its_ranks_are_told_when_they_report():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    scene.answer_plan(change(Change.REBATCH, (A, 2), batch=128))
    (update,) = [each.update for each in scene.placement.look(scene.clock) if isinstance(each, WriteRecord)]
    assert (update.value.state, update.value.global_batch) == (JobState.RUNNING, 128)
    assert job.written(update.update_id, update.value, scene.clock) == []
    told = TaskEstimate(job.job_id, 1, Estimate(done=5.0), 64)
    answered = [SendPeer(A, TaskBatch(job.job_id, 1, 128))]
    assert scene.placement.estimated(job, A, told, scene.clock) == answered
    assert scene.placement.estimated(job, A, replace(told, global_batch=128), scene.clock) == []
    assert scene.placement.estimated(job, A, replace(told, attempt=0), scene.clock) == []  # of ranks that are gone
    assert scene.placement.shepherds.view_of(job, scene.clock).card.elastic.global_batch == 128
    assert job.estimate.warmup_s == 0.0, "who has taken it up did not see it begin"


def test_until_it_is_known_when_ranks_train_the_pause_until_they_run_is_not_taken_for_all_of_it():
    change = Rescaling(UTC, 2, ranks_after=4, pause_s=0.5)
    record = replace(record_of("a", 2, UTC), rescalings=(change,))
    assert card_of(record).pause_s == card_of(record, estimate=Estimate(done=5.0)).pause_s == 0.0
    assert card_of(record, estimate=Estimate(done=5.0, warmup_s=20.0)).pause_s == 20.5


@pytest.mark.parametrize(
    "decision",
    [
        change(Change.GROW, (A, 2), (B, 4)),
        change(Change.SHRINK, (A, 2), (B, 1), taker=job_id("b")),
        change(Change.MOVE, (B, 2), taker=job_id("b")),
    ],
)
def test_a_running_job_is_rescaled_as_planned(decision):
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    plan_twice(scene, decision)
    claims = claims_of(scene)
    assert {claim.owner: claim.message.ranks for claim in claims} == {
        share.node: share.ranks for share in decision.target.shares
    }
    assert all(claim.message.must_be_free for claim in claims)
    assert not job.is_writing  # it runs until all keep its place
    for claim in claims:
        effects = job.owner_answered(answer_to(claim.message, claim.owner), scene.clock)
    (update,) = [effect.update for effect in effects if isinstance(effect, WriteRecord)]
    assert (update.value.state, update.value.stop_reason) == (JobState.STOPPING, EndReason.RESCALED)
    assert job.take_next_place() == decision.target
    assert scene.placement.look(scene.clock) == []  # once


class Sent(NamedTuple):
    """A claim, and who is asked."""

    owner: NodeId
    message: ClaimRequest


def claims_of(scene):
    effects = [effect for effect in scene.placement.look(scene.clock) if isinstance(effect, SendPeer)]
    return [Sent(each.recipient, each.message) for each in effects if isinstance(each.message, ClaimRequest)]


def test_a_job_whose_next_place_is_not_kept_runs_on():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    plan_twice(scene, change(Change.GROW, (A, 2), (B, 4)))
    first, second = claims_of(scene)
    assert job.owner_answered(answer_to(first.message, first.owner), scene.clock) == []
    refused = answer_to(second.message, second.owner, Refusal.DOES_NOT_FIT, detail="1 of 4 GPUs")
    effects = job.owner_answered(refused, scene.clock)
    assert [effect.text for effect in effects if isinstance(effect, Announce)] == ["b keeps nothing: 1 of 4 GPUs"]
    sent = [effect.message for effect in effects if isinstance(effect, SendPeer)]
    assert [message.ranks for message in sent if isinstance(message, ClaimRequest)] == [0, 0]
    assert not job.claim.is_open
    assert not job.is_writing
    assert job.take_next_place() == Allocation()


def test_the_next_place_of_a_job_that_has_to_end_meanwhile_is_given_up():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    plan_twice(scene, change(Change.GROW, (A, 2), (B, 4)))
    first, second = claims_of(scene)
    assert [type(effect) for effect in job.cancel(1, 0.0, "cancelled", scene.clock)] == [WriteRecord]
    assert job.owner_answered(answer_to(first.message, first.owner), scene.clock) == []
    effects = job.owner_answered(answer_to(second.message, second.owner), scene.clock)
    sent = [effect.message for effect in effects if isinstance(effect, SendPeer)]
    assert [message.ranks for message in sent if isinstance(message, ClaimRequest)] == [0, 0]
    assert not job.claim.is_open
    assert job.take_next_place() == Allocation()


def test_a_job_that_nobody_answers_runs_on():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    plan_twice(scene, change(Change.GROW, (A, 2), (B, 4)))
    assert len(claims_of(scene)) == 2
    scene.now_s += ANSWER_S
    effects = job.on_timer(scene.clock)
    assert "the place did not come free in time" in [each.text for each in effects if isinstance(each, Announce)]
    assert not job.claim.is_open
    assert not job.is_writing


def test_what_one_plan_alone_wants_of_a_running_job_is_asked_once_more():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    for wanted in (Change.GROW, Change.KEEP, Change.GROW, Change.SHRINK):
        scene.answer_plan(change(wanted, (A, 2), (B, 2), taker=job_id("b")))
        scene.look()
        assert not job.is_writing
        scene.now_s += 1.1
        asked = len(scene.plans)
        scene.placement.look_soon(scene.now_s)
        scene.look()
        assert len(scene.plans) == asked + 1


@pytest.mark.parametrize(
    ("decision", "saved", "problem"),
    [
        (change(Change.GROW, (A, 2), (B, 4)), False, "its present attempt has no checkpoint"),
        (change(Change.GROW, (A, 2), (B, 5)), True, "it takes 2 to 6 ranks, and the plan gives it 7"),
        (change(Change.GROW, (A, 6)), True, "the plan's place on a is taken"),
        (change(Change.MOVE, (A, 2), taker=job_id("b")), True, "it has just that"),
        (change(Change.MOVE, (B, 2)), True, "GPUs are given up to a named job only"),
        (change(Change.MOVE, (B, 2), taker=job_id("f")), True, "GPUs are given up to a named job only"),
        (change(Change.GROW, (B, 4), batch=512), True, "it takes global batches of 64 to 256"),
        (change(Change.REBATCH, (A, 2), batch=32), True, "and the plan gives it one of 32"),
        (change(Change.REBATCH, (A, 1), (B, 1), batch=128), True, "its hosts are other ones"),
    ],
)
def test_a_running_job_is_not_rescaled_where_that_cannot_be(decision, saved, problem):
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene, saved=saved)
    told = plan_twice(scene, decision)
    told += [effect for _ in range(2) for effect in scene.placement.look(scene.clock) if isinstance(effect, Announce)]
    assert len(told) == 1
    assert problem in told[0].text
    assert not job.is_writing


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
    scene.placement.shepherds.add(replace(record_of("a", 1, UTC), spec=spec)).accepted(scene.clock)
    scene.look()
    scene.answer_plan(start("a", (A, 1)))
    scene.now_s += 2.0
    assert scene.look() == ["a"]
    scene.placement.look_soon(scene.now_s)
    scene.look()
    assert len(scene.plans) == 1
    assert scene.placement.look_due_s == pytest.approx(scene.now_s + BETWEEN_PLACES_S)
    scene.placement.validate()


def test_what_is_only_advised_is_said_once_and_not_done():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    told = []
    for reason in ("pays", "still pays"):
        grow = replace(change(Change.GROW, (A, 2), (B, 4)), reason=reason)
        scene.now_s += 30.0
        scene.look()
        scene.answer_plan(advice=(grow,))
        told += [effect for effect in scene.placement.look(scene.clock) if isinstance(effect, Announce)]
    text = "would grow to 6 ranks with elasticity=on: pays"
    assert [(each.kind, each.text) for each in told] == [("plan.advised", text)]
    assert not job.is_writing


def test_nobody_is_stopped_for_a_job_that_the_plan_gives_no_place():
    scene = Scene([node(A, 0), node(B, 0)], policy="las")
    running_elastic(scene)
    waits = Decision(job_id("b"), Change.WAIT, "needs more")
    scene.answer_plan(change(Change.STOP, taker=job_id("b")), waits)
    assert [each for each in scene.look() if isinstance(each, SendPeer)] == []
    scene.placement.validate()


def test_a_plan_is_given_back_its_memory_until_the_policy_changes():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.look()
    scene.answer_plan(memory=b"remember")
    scene.now_s += PLAN_REFRESH_S
    scene.look()
    assert scene.plans[-1].view.memory == b"remember"
    scene.placement.set_policy(PolicySetting("las"), scene.now_s)
    scene.now_s += 1.1
    scene.look()
    assert scene.plans[-1].view.memory == b""


def test_a_job_that_has_ended_is_history_for_the_next_plan():
    scene = Scene([node(A, 2)])
    scene.submit("b", 1, UTC)
    scene.submit("a", 3, UTC)
    scene.placement.policy.cluster_view(scene.clock)
    shepherd = scene.placement.shepherds.jobs[job_id("b")]
    ended = replace(shepherd.record, state=JobState.ENDED, end_reason=EndReason.COMPLETED, ended_utc_s=UTC + 9)
    shepherd.decided = ended
    scene.placement.let_go(job_id("b"))
    (past,) = scene.placement.policy.cluster_view(scene.clock).history
    assert (past.card.job_id, past.has_completed, past.ended_utc_s) == (job_id("b"), True, UTC + 9)


def test_nobody_plans_for_a_job_that_fits_nowhere_or_is_far_from_the_head():
    """A hundred others stand before it; a plan could start any of them, and moves nothing here."""
    others = [foreign("a", 1, UTC, number) for number in range(100)]
    scene = Scene([node(A, 2)], [*others, foreign("c", 9, UTC - 1)], policy="backfill")
    scene.submit("b", 1, UTC + 1)
    scene.look()
    scene.answer_plan()
    for _ in range(8):
        scene.now_s += 2.0
        scene.placement.look_soon(scene.now_s)
        scene.look()
    assert len(scene.plans) == 1
    scene.cluster.show(foreign("c", 9, UTC - 1))
    scene.placement.look_soon(scene.now_s)
    scene.look()
    assert len(scene.plans) == 2


def test_a_view_of_a_job_is_made_once_for_each_news():
    scene = Scene([node(A, 2)], [foreign("a", 9, UTC)])
    scene.submit("b", 9, UTC + 1)
    first = scene.placement.policy.cluster_view(scene.clock)
    scene.now_s += 5.0
    second = scene.placement.policy.cluster_view(scene.clock)
    assert all(before is after for before, after in zip(first.jobs, second.jobs, strict=True))
    scene.placement.shepherds.jobs[job_id("b")].explain("something new")
    third = scene.placement.policy.cluster_view(scene.clock)
    assert third.jobs[0] is not second.jobs[0]
    assert third.jobs[0].queued_s(scene.now_s) == second.jobs[0].queued_s(scene.now_s) == 5.0
