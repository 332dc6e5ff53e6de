"""What a plan wants is done once, as told, or not at all: starts, other sizes and places for running jobs, batches."""

import itertools
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from swarmsched.api import EndReason, JobState
from swarmsched.card import STATES
from swarmsched.effects import Announce, ComputePlan, SendPeer
from swarmsched.estimate import BatchRange, Estimate, NoisePoint, SpeedPoint
from swarmsched.events import TimerFired
from swarmsched.ids import NodeId
from swarmsched.jobs.update import UpdateDecided
from swarmsched.ledger.message import ClaimRequest, PreemptAnswer, PreemptRequest, Refusal, TaskBatch, TaskEstimate
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.changes import Placed, Rebatched
from swarmsched.negotiation.claiming import ANSWER_S, CLEARED_S, ORDER_TTL_S, PATIENCE_BEYOND_GRACE_S
from swarmsched.negotiation.placement.planning import PLAN_AGE_S_MAX
from swarmsched.negotiation.record_writer import WriteRecord
from swarmsched.negotiation.told import NextPlaceTried, StartWished, StopAsked
from swarmsched.record import Leftover
from swarmsched.resources import Share
from swarmsched.task import Meeting
from swarmsched.view import Allocation, Change, Decision, Plan
from tests.swarmsched.building import answer_to, word
from tests.swarmsched.negotiation.placement.scene import (
    UTC,
    A,
    B,
    Scene,
    change,
    foreign,
    job_id,
    node,
    planned_past,
    record_of,
    running_elastic,
    start,
)


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


def test_a_plan_lets_a_job_pass_once():
    scene = planned_past()
    assert scene.look() == ["b"]
    (hold,) = scene.holds
    refused = answer_to(hold, A, Refusal.DOES_NOT_FIT)
    scene.placement.shepherds.jobs[job_id("b")].step(word(refused), scene.clock)
    scene.now_s += 3.0  # past every backoff
    assert scene.look() == []


def test_an_old_plan_is_not_followed():
    scene = planned_past()
    scene.now_s += PLAN_AGE_S_MAX + 0.1
    assert scene.look() == []


def test_a_plan_is_checked_against_the_room_that_is_left():
    scene = planned_past(ranks=2)
    scene.cluster.there = [node(A, 1)]
    assert scene.look() == []


def test_several_starts_of_one_plan_are_checked_against_what_is_left_by_those_before():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 2, UTC + 1)
    scene.submit("c", 1, UTC + 2)
    scene.look()
    scene.answer_plan(start("b", (A, 2)), start("c", (A, 1)))
    assert scene.look() == ["b"]
    assert "the place on a is taken" in scene.placement.shepherds.jobs[job_id("c")].record.reason


def test_a_job_that_has_just_started_as_the_first_in_line_is_not_started_by_the_plan_as_well():
    scene = planned_past()
    scene.cluster.there = [node(A, 6)]
    assert scene.look() == ["a", "b"]
    assert [hold.job_id for hold in scene.holds] == [job_id("a"), job_id("b")]


@pytest.mark.parametrize("how", ["placed", "leftover"])
def test_a_plan_starts_no_job_that_is_being_placed_or_may_have_processes_elsewhere(how):
    scene = planned_past()
    job = scene.placement.shepherds.jobs[job_id("b")]
    if how == "placed":
        job.step(StartWished((Share(A, 1),), Ranking("backfill", (0,))), scene.clock)
    else:
        job.decided = replace(job.decided, leftovers=(Leftover(B, 1),))
    asked_before = len(job.unanswered_holds)
    assert scene.look() == []
    assert len(job.unanswered_holds) == asked_before


def test_an_answer_to_an_older_question_is_ignored():
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", 1, UTC + 1)
    scene.look()
    late = Plan((start("b", (A, 1)),), version=99, policy_id="backfill")
    scene.placement.plan_computed(late, scene.clock)
    assert scene.look() == []


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
        (start("b", (B, 4)), "the place on b is taken"),
        (start("b", (A, 2)), "it takes 4 ranks, and is to have 2"),
        (start("b", (A, 4), batch=64), "it names no batches, and is to have one of 64"),
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


def test_a_batch_that_was_only_measured_is_not_one_to_train_with():
    """The plan tells what it predicts for; the script says nothing of batches, and keeps its own."""
    record = record_of("a", 2, UTC)
    ranged = replace(record, spec=replace(record.spec, batches=BatchRange(32, 128, 1, 64)))
    place, other = Placed(1, Allocation((Share(A, 2),), 63), (Meeting(),)), Rebatched(65)
    for job, begins_with, goes_on in ((record, 0, None), (ranged, 63, {"global_batch": 65})):
        assert (place.of(job) or {})["global_batch"] == begins_with
        assert other.of(replace(job, state=JobState.RUNNING, global_batch=begins_with)) == goes_on


def test_a_running_job_goes_on_with_the_planned_batch_and_its_ranks_are_told_when_they_report():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    scene.answer_plan(change(Change.REBATCH, (A, 2), batch=128))
    (update,) = [each.update for each in scene.placement.look(scene.clock) if isinstance(each, WriteRecord)]
    assert (update.value.state, update.value.global_batch) == (JobState.RUNNING, 128)
    assert job.step(UpdateDecided(update.update_id, update.value), scene.clock) == []
    told = TaskEstimate(job.job_id, 1, Estimate(done=5.0), 64)
    answered = [SendPeer(A, TaskBatch(job.job_id, 1, 128))]
    assert scene.placement.estimated(job, A, told, scene.clock) == answered
    assert scene.placement.estimated(job, A, replace(told, global_batch=128), scene.clock) == []
    assert scene.placement.estimated(job, A, replace(told, attempt=0), scene.clock) == []  # of ranks that are gone
    assert scene.placement.shepherds.view_of(job, scene.clock).card.elastic.global_batch == 128
    assert job.estimate.warmup_s == 0.0, "who has taken it up did not see it begin"


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
        effects = job.step(word(answer_to(claim.message, claim.owner)), scene.clock)
    (update,) = [effect.update for effect in effects if isinstance(effect, WriteRecord)]
    assert (update.value.state, update.value.stop_reason) == (JobState.STOPPING, EndReason.RESCALED)
    assert job.next_place == decision.target
    job.step(NextPlaceTried(), scene.clock)
    assert job.next_place == Allocation(), "a place that was tried once is not kept for it any more"
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
    assert job.step(word(answer_to(first.message, first.owner)), scene.clock) == []
    refused = answer_to(second.message, second.owner, Refusal.DOES_NOT_FIT, detail="1 of 4 GPUs")
    effects = job.step(word(refused), scene.clock)
    assert [effect.text for effect in effects if isinstance(effect, Announce)] == ["b keeps nothing: 1 of 4 GPUs"]
    sent = [effect.message for effect in effects if isinstance(effect, SendPeer)]
    assert [message.ranks for message in sent if isinstance(message, ClaimRequest)] == [0, 0]
    assert not job.claim.is_open
    assert not job.is_writing
    assert job.next_place == Allocation()


def test_the_next_place_of_a_job_that_has_to_end_meanwhile_is_given_up():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    plan_twice(scene, change(Change.GROW, (A, 2), (B, 4)))
    first, second = claims_of(scene)
    assert [type(effect) for effect in job.step(StopAsked(1, 0.0, "cancelled"), scene.clock)] == [WriteRecord]
    assert job.step(word(answer_to(first.message, first.owner)), scene.clock) == []
    effects = job.step(word(answer_to(second.message, second.owner)), scene.clock)
    sent = [effect.message for effect in effects if isinstance(effect, SendPeer)]
    assert [message.ranks for message in sent if isinstance(message, ClaimRequest)] == [0, 0]
    assert not job.claim.is_open
    assert job.next_place == Allocation()


def test_a_job_that_nobody_answers_runs_on():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    plan_twice(scene, change(Change.GROW, (A, 2), (B, 4)))
    assert len(claims_of(scene)) == 2
    scene.now_s += ANSWER_S
    effects = job.step(TimerFired(), scene.clock)
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
        (change(Change.GROW, (A, 2), (B, 5)), True, "it takes 2 to 6 ranks, and is to have 7"),
        (change(Change.GROW, (A, 6)), True, "the place on a is taken"),
        (change(Change.MOVE, (A, 2), taker=job_id("b")), True, "it has just that"),
        (change(Change.MOVE, (B, 2)), True, "GPUs are given up to a named job only"),
        (change(Change.MOVE, (B, 2), taker=job_id("f")), True, "GPUs are given up to a named job only"),
        (change(Change.GROW, (B, 4), batch=512), True, "it takes global batches of 64 to 256"),
        (change(Change.REBATCH, (A, 2), batch=32), True, "and is to have one of 32"),
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


@pytest.mark.parametrize(("size", "told"), [(6, []), (7, ["it takes 2 to 6 ranks, and is to have 7"])])
def test_a_place_that_others_are_about_to_leave_is_waited_for_in_silence(size, told):
    scene = Scene([node(A, 2), node(B, 4)])
    running_elastic(scene)
    leaves = Decision(job_id("f"), Change.SHRINK, "pays", Allocation((Share(A, 1),)), taker=job_id("a"))
    effects = plan_twice(scene, change(Change.GROW, (A, size)), leaves)
    effects += [each for each in scene.placement.look(scene.clock) if isinstance(each, Announce)]
    assert [each.text.removeprefix("grow ignored: ") for each in effects] == told


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


def test_whoever_refuses_to_make_room_is_asked_again_by_the_next_plan_alone():
    """It may not have heard of the job yet: until then each answer would only make the next question."""
    scene = Scene([node(A, 0), node(B, 0)], policy="las")
    running_elastic(scene)
    decisions = [change(Change.STOP, taker=job_id("b")), waits_for("b", (B, 9))]
    claims = []
    for _ in range(2):
        scene.answer_plan(*decisions)
        for _ in range(5):
            effects = scene.placement.look(scene.clock)
            claims += [each.message for each in sent(effects, ClaimRequest) if each.message.ranks]
            scene.plans += [each for each in effects if isinstance(each, ComputePlan)]
            refuse_to_make_room(scene, claims[-1])
            scene.now_s += 0.1
        scene.now_s += 1.0
        scene.placement.look_soon(scene.now_s)
        scene.look()
    assert len(claims) == 2
    scene.placement.validate()


class Ordered:
    """A job of two ranks for which another one was told to make room; where the plan starts those, nobody has said."""

    def __init__(self):
        self.victim = victim = foreign("f", 2, UTC, shares=(Share(A, 2),), state_index=STATES.index(JobState.RUNNING))
        self.scene = Scene([node(A, 0, 2)], [victim], policy="tiresias")
        self.scene.submit("b", 2, UTC)
        self.scene.look()
        stops = Decision(victim.job_id, Change.STOP, "makes room", taker=job_id("b"))
        self.scene.answer_plan(waits_for("b", (A, 2)), stops)
        self.job = self.scene.placement.shepherds.jobs[job_id("b")]
        (claim,) = claims_of(self.scene)
        (question,) = sent(self.job.step(word(answer_to(claim.message, A)), self.scene.clock), PreemptRequest)
        granted = PreemptAnswer(victim.job_id, question.message.command_id, job_id("b"), is_granted=True)
        (order,) = sent(self.job.step(word(granted), self.scene.clock), PreemptRequest)
        assert order.message.is_decided

    def asks(self):
        """The next plan is asked for."""
        self.scene.now_s += 1.1
        self.scene.placement.look_soon(self.scene.now_s)
        self.scene.look()

    def clear(self):
        self.scene.cluster.there = [node(A, 2, 2)]

    def waits(self, reason="others come first"):
        """The plan starts others; what owners are asked to keep for the job from now on."""
        self.scene.answer_plan(Decision(job_id("b"), Change.WAIT, reason))
        return [sent.message.ranks for sent in claims_of(self.scene)]


def test_a_place_that_is_free_is_given_up_where_the_plan_lets_others_go_first():
    """They would be refused there, since it is kept, and the job would wait for its turn: nobody would have it."""
    ordered = Ordered()
    ordered.clear()
    ordered.asks()
    assert ordered.waits() == [0]
    assert not ordered.job.claim.is_open


def test_a_place_is_kept_while_others_leave_it_and_until_a_plan_has_seen_it_free():
    ordered = Ordered()
    ordered.asks()
    ordered.clear()
    assert ordered.waits() == []  # it was asked before, and says nothing
    assert ordered.job.claim.is_open
    ordered.asks()
    ordered.scene.answer_plan(start("b", (A, 2)))
    assert ordered.scene.look() == ["b"]
    assert ordered.job.claim.is_open


def test_a_place_from_which_others_were_told_to_go_is_kept_for_seconds_and_renewed_in_time():
    """Whoever dies, or is cut off, cannot give it back."""
    ordered = Ordered()
    made_s = [ordered.scene.now_s]
    while ordered.job.claim.is_open:
        ordered.scene.now_s = ordered.job.claim.next_deadline_s
        claims = [each.message for each in sent(ordered.job.step(TimerFired(), ordered.scene.clock), ClaimRequest)]
        made_s += [ordered.scene.now_s for each in claims if each.ranks]
        assert all(each.ttl_s == ORDER_TTL_S for each in claims if each.ranks)
    assert len(made_s) > PATIENCE_BEYOND_GRACE_S / ORDER_TTL_S
    assert max(after - before for before, after in itertools.pairwise(made_s)) + 2 * ANSWER_S < ORDER_TTL_S


def test_what_is_not_free_some_seconds_after_all_have_left_that_were_told_to_is_waited_for_no_more():
    """A part of the place is another job's by now: the rest would be nobody's for as long as a stop may take."""
    ordered = Ordered()
    ordered.asks()
    waits_s = ordered.job.claim._give_up_s - ordered.scene.now_s
    assert waits_s > CLEARED_S + 10.0
    ordered.scene.cluster.there = [node(A, 1, 2)]
    ordered.scene.cluster.show(replace(ordered.victim, card=replace(ordered.victim.card, state_index=0, shares=())))
    for _ in range(3):
        ordered.asks()
    ordered.scene.now_s += CLEARED_S - 1.0
    ended = [each.text for each in ordered.job.step(TimerFired(), ordered.scene.clock) if isinstance(each, Announce)]
    assert ended == ["the place did not come free in time"]


def test_nothing_is_kept_for_a_job_that_rests_so_that_no_plan_speaks_of_it():
    ordered = Ordered()
    ordered.clear()
    ordered.job.pacing.restarted(5, ordered.scene.now_s)
    ordered.asks()
    ordered.scene.answer_plan()
    assert [sent.message.ranks for sent in claims_of(ordered.scene)] == [0]


def waits_for(letter, *shares):
    return Decision(job_id(letter), Change.WAIT, "others make room", Allocation(tuple(Share(*each) for each in shares)))


def sent(effects, kind):
    return [each for each in effects if isinstance(each, SendPeer) and isinstance(each.message, kind)]


def refuse_to_make_room(scene, claim):
    """The owner keeps the place, and the victim's shepherd says no."""
    job = scene.placement.shepherds.jobs[job_id("b")]
    for question in sent(job.step(word(answer_to(claim, B)), scene.clock), PreemptRequest):
        victim, number = question.message.job_id, question.message.command_id
        answer = PreemptAnswer(victim, number, job_id("b"), is_granted=False, detail="no plan here gives its place")
        told = [each for each in job.step(word(answer), scene.clock) if isinstance(each, Announce)]
        assert [each.kind for each in told] == ["claim.failed"]


def test_reports_make_plans_where_they_tell_more_than_that_the_job_goes_on():
    scene = Scene([node(A, 2), node(B, 4)])
    job = running_elastic(scene)
    first = Estimate(points=(SpeedPoint(2, 1, 32, 0.5),), noise=(NoisePoint(64, 100.0),), remaining=900.0, done=100.0)
    told = [
        (first, 1),
        (replace(first, remaining=500.0, done=500.0, noise=(NoisePoint(64, 108.0),)), 0),
        (replace(first, noise=(NoisePoint(64, 120.0),)), 1),
        (replace(first, points=(SpeedPoint(2, 1, 32, 0.6),)), 1),
    ]
    for estimate, plans in told:
        scene.answer_plan()
        scene.now_s += 1.1
        scene.look()
        asked = len(scene.plans)
        scene.placement.estimated(job, A, TaskEstimate(job.job_id, 1, estimate, 64), scene.clock)
        scene.look()
        assert (len(scene.plans) - asked, job.estimate.done) == (plans, estimate.done)
