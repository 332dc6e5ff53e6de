"""What policies see of jobs, and what they are given back."""

from msgspec.structs import replace

from swarmsched.card import card_of
from swarmsched.estimate import Estimate
from swarmsched.ledger.message import Refusal
from swarmsched.negotiation.pacing import AVOID_NODE_S
from swarmsched.negotiation.placement.planning import PLAN_REFRESH_S
from swarmsched.record import Rescaling, StartFault
from swarmsched.task import TaskFailure
from swarmsched.view import EndedJob, PolicySetting
from tests.swarmsched.negotiation.placement.scene import UTC, A, B, Scene, foreign, job_id, node, record_of


def test_until_it_is_known_when_ranks_train_the_pause_until_they_run_is_not_taken_for_all_of_it():
    change = Rescaling(UTC, 2, ranks_after=4, pause_s=0.5)
    record = replace(record_of("a", 2, UTC), rescalings=(change,))
    assert card_of(record).pause_s == card_of(record, estimate=Estimate(done=5.0)).pause_s == 0.0
    assert card_of(record, estimate=Estimate(done=5.0, warmup_s=20.0)).pause_s == 20.5


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


def test_a_job_that_has_ended_anywhere_is_history_for_the_next_plan():
    scene = Scene([node(A, 2)])
    scene.submit("a", 3, UTC)
    scene.cluster.history = (EndedJob(foreign("b", 1, UTC).card, True, UTC + 9),)
    assert scene.placement.policy.cluster_view(scene.clock).history == scene.cluster.history


def test_others_are_told_where_a_job_is_not_placed_for_long_and_not_what_it_avoids_for_a_moment():
    """They would let it go first there, and nobody would."""
    scene = Scene([node(A, 2), node(B, 2), node("c", 2)])
    scene.submit("a", 1, UTC)
    job = scene.placement.shepherds.jobs[job_id("a")]
    job.decided = replace(job.decided, spec=replace(job.decided.spec, exclude=("c",)))
    job.pacing.avoid(A, scene.now_s)
    job.pacing.failed(Refusal.CLAIMED, B, scene.now_s)
    view = scene.placement.shepherds.view_of(job, scene.clock)
    assert set(view.excluded) == {A, B, "c"}
    assert scene.placement.policy.card(job, scene.clock).exclude == ("c", A)
    scene.now_s += AVOID_NODE_S
    assert scene.placement.policy.card(job, scene.clock).exclude == ("c",)
    job.decided = replace(job.decided, start_faults=(StartFault(1, B, TaskFailure.ENVIRONMENT),))
    assert scene.placement.policy.card(job, scene.clock).exclude == ("c", B)


def test_others_are_told_for_how_long_a_job_rests_that_broke_again_and_again():
    scene = Scene([node(A, 2)])
    scene.submit("a", 1, UTC)
    job = scene.placement.shepherds.jobs[job_id("a")]
    job.pacing.back_off(scene.now_s)
    assert scene.placement.policy.card(job, scene.clock).rests_s == 0
    job.pacing.restarted(6, scene.now_s)
    told = []
    for waited_s in (0.0, 10.5, 5.0, 1.0):
        scene.now_s += waited_s
        told.append(scene.placement.policy.card(job, scene.clock).rests_s)
    assert told == [16, 6, 0, 0]  # for a moment it would not be worth a card


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
