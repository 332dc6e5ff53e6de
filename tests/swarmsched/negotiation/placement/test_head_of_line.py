"""Jobs start without a plan as long as all ahead of them fit; nobody passes a job that waits."""

from msgspec.structs import replace

from swarmsched.gossip.setting import SwarmSetting
from swarmsched.ledger.message import ClaimRequest, HoldRequest
from swarmsched.negotiation.placement.placement import INVITED_S
from swarmsched.negotiation.shepherd_state import STARVING_S
from swarmsched.negotiation.told import FirstWritten
from swarmsched.negotiation.window import GIVEN_UP_S, LATE_S, LIMIT_START
from swarmsched.view import Change, Decision, Elasticity, PolicySetting
from tests.swarmsched.building import answer_to, word
from tests.swarmsched.negotiation.placement.scene import ME, UTC, A, B, Scene, foreign, job_id, node, record_of


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
    scene.placement.shepherds.add(replace(record_of("a", 1, UTC), spec=spec)).step(FirstWritten(), scene.clock)
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == []
    assert len(scene.plans) == 1
    scene.placement.set_policy(PolicySetting("swarm", {}, Elasticity.OFF), scene.now_s)
    assert scene.look() == ["a", "b"]


class Line:
    """One GPU, which another job has; a job of 1 to 4 ranks has waited for a minute and is first in line."""

    def __init__(self, policy):
        self.scene = Scene([node(A, 0, 1)])
        self.use(policy)
        spec = replace(record_of("a", 1, UTC).spec, ranks_most=4)
        self.job = self.scene.placement.shepherds.add(replace(record_of("a", 1, UTC), spec=spec))
        self.job.step(FirstWritten(), self.scene.clock)
        self.scene.now_s += STARVING_S
        self.claims = self.looked()

    def use(self, policy):
        self.scene.placement.set_policy(PolicySetting(policy), self.scene.now_s)

    def looked(self):
        """What its agent asks owners to keep for it: ranks, 0 for no more."""
        effects = self.scene.placement.look(self.scene.clock)
        self.holds = [each.message for each in effects if type(getattr(each, "message", None)) is HoldRequest]
        return [each.message for each in effects if type(getattr(each, "message", None)) is ClaimRequest]

    def kept(self):
        """Its owner keeps it."""
        (claim,) = self.claims
        self.job.step(word(answer_to(claim, A)), self.scene.clock)
        return self


def test_nothing_is_kept_for_a_job_of_several_sizes_where_running_ones_make_room_for_it_as_plans_say():
    """It waits while others make more of what there is; a GPU that is kept for it would be nobody's until it starts."""
    assert Line("swarm").claims == []
    assert [claim.ranks for claim in Line("backfill").claims] == [1]


def test_what_was_kept_for_it_is_given_back_when_they_begin_to_make_room():
    line = Line("backfill").kept()
    assert line.job.claim.stands_in_line
    line.use("swarm")
    assert [claim.ranks for claim in line.looked()] == [0]
    assert not line.job.claim.is_open


def test_where_they_do_not_it_starts_as_soon_as_what_is_kept_for_it_is_free_whatever_plans_make_of_it():
    line = Line("backfill").kept()
    line.looked()
    assert line.holds == []
    line.scene.cluster.there = [node(A, 1, 1)]
    line.looked()
    assert [(hold.job_id, hold.ranks) for hold in line.holds] == [(job_id("a"), 1)]


def test_under_the_default_policy_a_place_is_kept_for_whom_its_plan_lets_gpus_stay_idle_and_for_nobody_else():
    """Who has waited for how long, and what that may cost all others, its plan weighs."""
    scene = Scene([node(A, 1, 2)], policy="swarm")
    scene.submit("a", 2, UTC)
    scene.now_s += STARVING_S
    for rank_key, kept in (((), 0), ((0, 0, 1, 2), 1)):
        scene.placement.look_soon(scene.now_s)
        scene.look()
        scene.answer_plan(Decision(job_id("a"), Change.WAIT, "it does not fit", rank_key=rank_key))
        effects = scene.placement.look(scene.clock)
        claims = [each for each in effects if type(getattr(each, "message", None)) is ClaimRequest]
        assert len(claims) == kept
        scene.now_s += 30.0


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


def test_a_job_of_another_agent_that_rests_is_passed():
    """It broke again and again, and is not started for a while: what is free is nobody's until then."""
    scene = Scene([node(A, 2)], [foreign("a", 2, UTC, rests_s=30)])
    scene.submit("b", 2, UTC + 1)
    assert scene.look() == ["b"]
    behind = Scene([node(A, 2)], [foreign("a", 2, UTC, rests_s=30)])
    behind.now_s += 30.0
    behind.submit("b", 2, UTC + 1)
    assert behind.look() == []


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


def test_jobs_of_a_dead_shepherd_and_jobs_that_hide_where_they_may_go_stand_in_nobodys_way():
    scene = Scene([node(A, 1)], [foreign("a", 1, UTC)])
    scene.submit("b", 1, UTC + 1)
    scene.cluster.dead = {B}
    assert scene.look() == ["b"]
    scene = Scene([node(A, 1)], [foreign("a", 1, UTC, hides_constraints=True)])
    scene.submit("b", 1, UTC + 1)
    assert scene.look() == ["b"]


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
