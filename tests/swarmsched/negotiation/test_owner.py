"""The owner obeys as far as its ledger allows, runs each task once, and repeats itself until it is heard."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.authority.contact import ContactLine
from swarmsched.authority.message import ContactAnswered, OwnerContact, TaskNews, TaskStanding
from swarmsched.effects import (
    Announce,
    BindRendezvous,
    ForgetTask,
    Persist,
    ReleaseRendezvous,
    SendPeer,
    SetBatch,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
)
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import (
    FoundTask,
    RankExited,
    RendezvousBound,
    RendezvousFailed,
    TaskExited,
    TasksFound,
    TaskStaged,
    TaskStageFailed,
    TaskStarted,
    TimerFired,
)
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import (
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    TaskBatch,
    TaskReport,
    TaskReportReceived,
)
from swarmsched.negotiation.owner import RELEASE_GRACE_S, REPORT_INTERVAL_S, Owner
from swarmsched.negotiation.trouble import AVOIDED_S
from swarmsched.resources import Demand, Share
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage
from tests.swarmsched.building import JOB, make_record, make_resources

ME, BOSS = NodeId("gpu1"), NodeId("gpu2")
SPEC = JobSpec(("python", "train.py"), ranks=2, demand=Demand(gpus=1))


def make_ledger():
    ledger = Ledger(ME, 1)
    ledger.offer(make_resources(2), 0.0)
    return ledger


def owner_of(ledger):
    return Owner(ME, ledger, ContactLine(ME, 1))


@pytest.fixture
def owner():
    return owner_of(make_ledger())


def hold(attempt=1, command_id=1, wants_rendezvous=True, epoch=1):
    return HoldRequest(JOB, epoch, attempt, command_id, BOSS, 2, SPEC.demand, "fifo", (1,), wants_rendezvous)


ALONE = (Share(ME, 2),)


def commit(attempt=1, command_id=2, shares=ALONE, epoch=1):
    order = TaskOrder(JOB, epoch, attempt, ME, SPEC, shares, "10.0.0.1", 29500, Configuration((Holder(ME, 1),)))
    return CommitRequest(JOB, epoch, attempt, command_id, BOSS, order)


def launch(command_id=3):
    return LaunchRequest(JOB, 1, 1, command_id, BOSS)


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def answers(effects):
    return [effect.message for effect in of(SendPeer, effects) if isinstance(effect.message, OwnerAnswer)]


def reports(effects):
    return [effect.message.status for effect in of(SendPeer, effects) if isinstance(effect.message, TaskReport)]


def held(owner):
    owner.obey(BOSS, hold(), 0.0)
    return owner.step(RendezvousBound(JOB, 1, "10.0.0.1", 29500), 0.1)


def in_contact(owner, effects, now_s):
    """Every holder that was asked lets the tasks run on."""
    contacts = [each for each in of(SendPeer, effects) if isinstance(each.message, OwnerContact)]
    answers = [(each.recipient, ContactAnswered(each.message.sequence)) for each in contacts]
    return [effect for holder, answer in answers for effect in owner.contact_answered(holder, answer, now_s)]


def launched(owner):
    held(owner)
    in_contact(owner, owner.obey(BOSS, commit(), 0.2), 0.25)
    return owner.obey(BOSS, launch(), 0.3)


def test_hold_for_rank_zero_answers_only_when_its_port_is_bound(owner):
    first = owner.obey(BOSS, hold(), 0.0)
    assert answers(first) == []
    assert of(BindRendezvous, first) == [BindRendezvous(JOB, 1)]
    (answer,) = answers(owner.step(RendezvousBound(JOB, 1, "10.0.0.1", 29501), 0.1))
    assert answer.refusal is Refusal.NONE
    assert (answer.rendezvous_host, answer.rendezvous_port) == ("10.0.0.1", 29501)


def test_hold_is_durable_before_it_is_answered(owner):
    effects = owner.obey(BOSS, hold(wants_rendezvous=False), 0.0)
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Persist) < kinds.index(SendPeer)


def test_repeated_hold_while_the_port_is_being_bound_asks_for_no_second_port(owner):
    owner.obey(BOSS, hold(), 0.0)
    assert owner.obey(BOSS, hold(), 0.05) == []


def test_new_shepherd_that_asks_while_the_port_is_being_bound_is_the_one_that_is_answered(owner):
    owner.obey(BOSS, hold(), 0.0)
    second = owner.obey("heir", replace(hold(command_id=7, epoch=2), shepherd="heir"), 0.05)
    assert answers(second) == of(BindRendezvous, second) == []
    (effect,) = of(SendPeer, owner.step(RendezvousBound(JOB, 1, "10.0.0.1", 29500), 0.1))
    assert (effect.recipient, effect.message.epoch, effect.message.command_id) == ("heir", 2, 7)
    assert effect.message.refusal is Refusal.NONE


def test_old_shepherd_that_asks_while_the_port_is_being_bound_is_refused_at_once(owner):
    owner.obey(BOSS, hold(epoch=2), 0.0)
    (answer,) = answers(owner.obey(BOSS, hold(command_id=7, epoch=1), 0.05))
    assert answer.refusal is Refusal.STALE_EPOCH
    (answer,) = answers(owner.step(RendezvousBound(JOB, 1, "10.0.0.1", 29500), 0.1))
    assert (answer.refusal, answer.epoch) == (Refusal.NONE, 2)


@pytest.mark.parametrize(("epochs", "answered"), [((1, 2), "heir"), ((2, 1), BOSS)])
def test_of_two_shepherds_for_whom_others_give_way_the_newer_is_answered(owner, epochs, answered):
    lower = replace(hold(), job_id=JobId("lower"), rank_key=(5,), wants_rendezvous=False)
    owner.obey(BOSS, lower, 0.0)
    first, second = (hold(command_id=epoch, epoch=epoch, wants_rendezvous=False) for epoch in epochs)
    assert [each.message.job_id for each in of(SendPeer, owner.obey(BOSS, first, 0.1))] == ["lower"]
    assert owner.obey("heir", replace(second, shepherd="heir"), 0.105) == []
    release = ReleaseRequest(lower.job_id, 1, 1, 9, BOSS)
    mine = [each for each in of(SendPeer, owner.obey(BOSS, release, 0.11)) if each.message.job_id == JOB]
    assert [(each.recipient, each.message.epoch) for each in mine] == [(answered, 2)]


def test_failed_bind_gives_the_gpus_back_and_says_why(owner):
    owner.obey(BOSS, hold(), 0.0)
    (answer,) = answers(owner.step(RendezvousFailed(JOB, 1, "all ports are in use"), 0.1))
    assert answer.refusal is Refusal.NO_PORT
    assert answer.free.gpus == 2
    assert "in use" in answer.detail


def test_port_bound_for_an_expired_hold_is_closed_again(owner):
    owner.obey(BOSS, hold(), 0.0)
    owner.step(TimerFired(), 10.0)
    assert owner.step(RendezvousBound(JOB, 1, "10.0.0.1", 29500), 10.1) == [ReleaseRendezvous(JOB, 1)]


def test_hold_that_is_left_of_a_job_that_has_ended_goes_with_its_port(owner):
    held(owner)
    effects = owner.forget(JOB, 1.0)
    assert of(ReleaseRendezvous, effects) == [ReleaseRendezvous(JOB, 1)]
    assert durable_entries(effects, "ledger")
    assert of(ReleaseRendezvous, owner.forget(JOB, 2.0)) == []


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_hold_that_a_later_attempt_replaces_goes_with_its_port(owner, is_bound):
    first, second = (replace(hold(attempt, attempt), ranks=1) for attempt in (1, 2))
    owner.obey(BOSS, first, 0.0)
    if is_bound:
        owner.step(RendezvousBound(JOB, 1, "10.0.0.1", 29500), 0.1)
    effects = owner.obey(BOSS, second, 0.2)
    assert of(ReleaseRendezvous, effects) == [ReleaseRendezvous(JOB, 1)]
    assert of(BindRendezvous, effects) == [BindRendezvous(JOB, 2)]


def test_commit_of_a_task_that_needs_nothing_is_staged_at_once(owner):
    held(owner)
    (answer,) = answers(owner.obey(BOSS, commit(), 0.2))
    assert answer.refusal is Refusal.NONE
    assert answer.is_staged


def test_commit_on_a_node_without_rank_zero_stages_first_and_reports(owner):
    owner.obey(BOSS, hold(wants_rendezvous=False), 0.0)
    shares = (Share(BOSS, 2), Share(ME, 2))
    effects = owner.obey(BOSS, commit(shares=shares), 0.2)
    assert len(of(StageTask, effects)) == 1
    assert not answers(effects)[0].is_staged
    (status,) = reports(owner.step(TaskStaged(JOB, 1), 0.3))
    assert status.stage is TaskStage.STAGED


def test_commit_without_a_hold_is_refused(owner):
    (answer,) = answers(owner.obey(BOSS, commit(), 0.0))
    assert answer.refusal is Refusal.EXPIRED


def test_nothing_runs_before_launch(owner):
    held(owner)
    assert of(StartTask, owner.obey(BOSS, commit(), 0.2)) == []


def test_launch_starts_once_however_often_it_arrives(owner):
    assert len(of(StartTask, launched(owner))) == 1
    assert of(StartTask, owner.obey(BOSS, launch(), 0.4)) == []
    assert of(StartTask, owner.obey(BOSS, launch(command_id=9), 0.5)) == []


def test_task_whose_gpu_has_vanished_is_not_started_on_fewer_and_fails_by_its_nodes_fault():
    owner = owner_of(ledger := make_ledger())
    held(owner)
    in_contact(owner, owner.obey(BOSS, commit(), 0.2), 0.25)
    ledger.offer(make_resources(1), 0.3)
    effects = owner.obey(BOSS, launch(), 0.4)
    assert of(StartTask, effects) == []
    (status,) = reports(effects)
    assert (status.stage, status.failure) == (TaskStage.EXITED, TaskFailure.INTERNAL)
    assert "1 of its GPUs vanished" in status.detail
    assert ledger.entries == ()


def attempt_that_fails(owner, number, now_s, failure=TaskFailure.INTERNAL, is_staged=True):
    owner.obey(BOSS, hold(number, 10 * number, wants_rendezvous=False), now_s)
    in_contact(owner, owner.obey(BOSS, commit(number, 10 * number + 1), now_s), now_s)
    key = TaskKey(JOB, number)
    if not is_staged:
        return owner.step(TaskStageFailed.about(key, failure, "no room"), now_s)
    owner.obey(BOSS, LaunchRequest(JOB, 1, number, 10 * number + 2, BOSS), now_s)
    return owner.step(TaskExited.about(key, (), failure, "out of processes"), now_s)


def test_a_node_that_fails_a_start_by_its_own_fault_takes_nothing_for_longer_each_time_and_again_after_that():
    owner = owner_of(ledger := make_ledger())
    now_s, waits = 100.0, []
    for number in (1, 2, 3):
        (told,) = of(Announce, attempt_that_fails(owner, number, now_s))
        assert (told.kind, ledger.avoided_reason) == ("node.avoided", "starts fail: out of processes")
        assert (ledger.free.gpu_count, ledger.capacity.gpu_count) == (0, 2)
        refused = answers(owner.obey(BOSS, hold(number + 10, 10 * number + 5), now_s + 0.1))
        assert [(each.refusal, each.detail) for each in refused] == [(Refusal.DRAINING, ledger.avoided_reason)]
        again_s = now_s + AVOIDED_S * 2 ** (number - 1)
        assert owner.next_deadline_s <= again_s
        owner.step(TimerFired(), again_s - 0.01)
        assert ledger.avoided_reason
        assert "node.offered" in [each.kind for each in of(Announce, owner.step(TimerFired(), again_s))]
        assert (ledger.avoided_reason, ledger.free.gpu_count) == ("", 2)
        waits.append(again_s - now_s)
        now_s = again_s
    assert waits == [AVOIDED_S, 2 * AVOIDED_S, 4 * AVOIDED_S]


def test_starts_that_fail_together_count_once_and_one_that_succeeds_ends_the_wait():
    owner = owner_of(ledger := make_ledger())
    owner.obey(BOSS, hold(1, 1, wants_rendezvous=False), 0.0)
    in_contact(owner, owner.obey(BOSS, commit(1, 2), 0.0), 0.0)
    owner.obey(BOSS, launch(), 0.0)
    trouble = owner._trouble
    for now_s in (0.1, 0.2, 0.3):
        trouble.failed(TaskFailure.INTERNAL, "out of processes", now_s)
    assert trouble.ends_s(0.3) == 0.1 + AVOIDED_S
    owner.step(TaskStarted.about(TaskKey(JOB, 1), 0.0), 0.4)
    assert ledger.avoided_reason == ""
    trouble.failed(TaskFailure.INTERNAL, "out of processes", 1.0)
    assert trouble.ends_s(1.0) == 1.0 + AVOIDED_S


@pytest.mark.parametrize("failure", [each for each in TaskFailure if each is not TaskFailure.INTERNAL])
def test_what_may_be_the_jobs_fault_keeps_nobody_from_a_node(failure):
    owner = owner_of(ledger := make_ledger())
    attempt_that_fails(owner, 1, 0.0, failure)
    assert ledger.avoided_reason == ""


def test_what_others_have_shown_to_be_the_nodes_fault_counts_once_however_often_it_is_told():
    owner = owner_of(ledger := make_ledger())
    told = ReleaseRequest(JOB, 1, 1, 7, BOSS, fault=TaskFailure.ENVIRONMENT)
    owner.obey(BOSS, told, 0.0)
    assert "the environment of" in ledger.avoided_reason
    owner.step(TimerFired(), AVOIDED_S)
    owner.obey(BOSS, told, AVOIDED_S)
    assert ledger.avoided_reason == ""


def test_nothing_is_begun_on_a_node_whose_disk_is_nearly_full(owner):
    (told,) = of(Announce, owner.disk_filled("disk nearly full: 1 MiB free", 0.0))
    (refused,) = answers(owner.obey(BOSS, hold(), 0.1))
    assert (told.kind, refused.detail) == ("node.avoided", "disk nearly full: 1 MiB free")
    owner.disk_filled("", 1.0)
    assert of(BindRendezvous, owner.obey(BOSS, hold(command_id=5), 1.1))


def test_restarted_owner_waits_for_telemetry_before_it_starts_a_task():
    before = owner_of(make_ledger())
    durable = before.obey(BOSS, hold(), 0.0) + held(before) + before.obey(BOSS, commit(), 0.2)
    (ledger := Ledger(ME, 2)).restore(durable_entries(durable, "ledger"), 0.0)
    after = restarted(durable, ledger)
    after.step(TasksFound(()), 0.0)
    launch_at = in_contact(after, after.step(TimerFired(), 0.0), 0.1) + after.obey(BOSS, launch(), 0.2)
    assert of(StartTask, launch_at) == []
    ledger.offer(make_resources(2), 1.0)
    (started,) = of(StartTask, in_contact(after, after.step(TimerFired(), 2.5), 2.6))
    assert len(started.gpus) == 2


def test_a_frozen_task_ends_once_everybody_has_heard_that_its_job_has_ended(owner):
    """Those of its holders that are left are no majority, and its shepherd is gone."""
    launched(owner)
    other = Configuration((Holder(BOSS, 1), Holder(NodeId("gpu3"), 1)))
    owner.learn(make_record(BOSS, other.holders, version=2), 1.0)
    assert owner.end_left_over(lambda job_id: 1, 2.0) == [], "its time is not over"
    assert owner.end_left_over(lambda job_id: 0, 60.0) == [], "nobody has told of an end"
    assert [(each.attempt, each.grace_s) for each in of(StopTask, owner.end_left_over(lambda job_id: 1, 60.0))] == [
        (1, 0.0)
    ]
    assert owner.end_left_over(lambda job_id: 1, 61.0) == [], "once is enough"


def test_launch_after_a_stop_starts_nothing(owner):
    held(owner)
    owner.obey(BOSS, commit(), 0.2)
    stopped = owner.obey(BOSS, StopRequest(JOB, 1, 1, 7, BOSS, 1.0), 0.25)
    assert of(StopTask, stopped) == [StopTask(JOB, 1, 1.0)]
    assert of(StartTask, owner.obey(BOSS, launch(), 0.3)) == []


def test_gpus_are_free_only_after_the_last_process(owner):
    launched(owner)
    owner.step(TaskStarted(JOB, 1, 0.0), 0.4)
    running = reports(owner.step(RankExited(JOB, 1, RankExit(0, 0)), 1.0))
    assert running[0].stage is TaskStage.STARTED
    (effect,) = of(SendPeer, owner.step(TaskExited(JOB, 1, (RankExit(0, 0), RankExit(1, 0))), 1.1))
    assert effect.message.status.stage is TaskStage.EXITED
    assert effect.message.free.gpus == 2


def test_report_is_repeated_until_acknowledged_and_then_the_task_is_forgotten(owner):
    launched(owner)
    (status,) = reports(owner.step(TaskExited(JOB, 1, (RankExit(0, 3),)), 1.0))
    again = reports(owner.step(TimerFired(), 1.0 + REPORT_INTERVAL_S))
    assert again == [status]
    done = owner.acknowledge(TaskReportReceived(JOB, 1, status.revision, status.generation))
    assert ForgetTask(JOB, 1) in done
    assert owner.tasks == ()
    assert reports(owner.step(TimerFired(), 100.0)) == []


def test_acknowledgement_of_an_older_revision_forgets_nothing(owner):
    launched(owner)
    (status,) = reports(owner.step(TaskExited(JOB, 1, ()), 1.0))
    assert owner.acknowledge(TaskReportReceived(JOB, 1, status.revision - 1, status.generation)) == []
    assert len(owner.tasks) == 1


def test_release_of_a_running_task_stops_it_and_reports_nothing(owner):
    launched(owner)
    effects = owner.obey(BOSS, ReleaseRequest(JOB, 1, 1, 8, BOSS), 1.0)
    assert len(of(StopTask, effects)) == 1
    ended = owner.step(TaskExited(JOB, 1, ()), 2.0)
    assert reports(ended) == []
    assert ForgetTask(JOB, 1) in ended


def test_hold_of_a_released_attempt_is_refused(owner):
    """The release overtook its hold."""
    owner.obey(BOSS, ReleaseRequest(JOB, 1, 1, 8, BOSS), 0.0)
    (answer,) = answers(owner.obey(BOSS, hold(), 0.1))
    assert answer.refusal is Refusal.RELEASED_ATTEMPT


def test_stop_of_an_ended_task_reports_its_result_again(owner):
    launched(owner)
    owner.step(TaskExited(JOB, 1, (RankExit(0, 5),)), 1.0)
    effects = owner.obey(BOSS, StopRequest(JOB, 1, 1, 7, BOSS, 1.0), 1.5)
    assert answers(effects)[0].refusal is Refusal.NONE
    assert reports(effects)[0].exits == (RankExit(0, 5),)


def test_stop_of_an_unknown_task_is_answered_unknown(owner):
    (answer,) = answers(owner.obey(BOSS, StopRequest(JOB, 1, 1, 7, BOSS, 1.0), 0.0))
    assert answer.refusal is Refusal.UNKNOWN


def test_repeated_signal_is_sent_to_the_ranks_once(owner):
    launched(owner)
    request = SignalRequest(JOB, 1, 1, 7, BOSS, 2)
    assert of(SignalTask, owner.obey(BOSS, request, 1.0)) == [SignalTask(JOB, 1, 2)]
    assert of(SignalTask, owner.obey(BOSS, request, 1.1)) == []


def test_command_in_anothers_name_is_a_protocol_error(owner):
    with pytest.raises(RemoteProtocolError, match="names shepherd gpu2"):
        owner.obey(NodeId("gpu3"), hold(), 0.0)


def test_lower_epoch_is_refused_and_changes_nothing(owner):
    owner.obey(BOSS, hold(epoch=5, wants_rendezvous=False), 0.0)
    (answer,) = answers(owner.obey(BOSS, commit(epoch=4), 0.1))
    assert answer.refusal is Refusal.STALE_EPOCH
    assert answer.epoch == 5


def test_new_shepherd_hears_everything_again(owner):
    launched(owner)
    new = NodeId("gpu3")
    effects = owner.obey(new, StatusRequest(JOB, 2, 1, 1, new), 1.0)
    assert of(SendPeer, effects)[-1].recipient == new
    assert reports(effects)[0].epoch == 2


def durable_entries(effects, room):
    return {effect.key: effect.value for effect in of(Persist, effects) if effect.room == room}


def found_task(owner, status):
    order = owner.order(TaskKey(JOB, 1))
    return FoundTask(status, order, tuple(f"GPU-{n}" for n in range(order.local_ranks)))


def test_restarted_owner_takes_up_its_tasks_and_does_not_start_them_twice():
    """The agent was killed while the task ran; its shim is found."""
    ledger = make_ledger()
    before = owner_of(ledger)
    durable = held(before) + before.obey(BOSS, commit(), 0.2)
    after = owner_of(ledger)
    after.restore(durable_entries(durable, "task"), 0.0)
    status = before.tasks[0]
    found = TasksFound((found_task(before, replace(status, stage=TaskStage.STARTED)),))
    assert reports(after.step(found, 0.0))[0].stage is TaskStage.STARTED
    assert of(StartTask, after.obey(BOSS, launch(), 0.1)) == []


def test_restarted_owner_starts_a_task_that_was_ordered_but_never_launched():
    ledger = make_ledger()
    before = owner_of(ledger)
    durable = held(before) + before.obey(BOSS, commit(), 0.2)
    after = owner_of(ledger)
    after.restore(durable_entries(durable, "task"), 0.0)
    after.step(TasksFound(()), 0.0)
    in_contact(after, after.step(TimerFired(), 0.0), 0.05)
    assert len(of(StartTask, after.obey(BOSS, launch(), 0.1))) == 1


def test_ranks_start_only_once_the_holders_let_them(owner):
    """A launch that was long on its way must not start what its job has given up meanwhile."""
    held(owner)
    asked = owner.obey(BOSS, commit(), 0.2)
    assert of(StartTask, owner.obey(BOSS, launch(), 0.3)) == []
    (start,) = of(StartTask, in_contact(owner, asked, 0.4))
    assert start.order.attempt == 1


OTHERS = Configuration(tuple(Holder(NodeId(name), 1) for name in ("gpu2", "gpu3", "gpu4")))


def launched_under(owner, holders, grace_s=30.0):
    """Ranks whose time runs from a contact at 0.2 s."""
    held(owner)
    request = commit()
    order = replace(request.order, configuration=holders, spec=replace(SPEC, grace_s=grace_s))
    in_contact(owner, owner.obey(BOSS, replace(request, order=order), 0.2), 0.25)
    return owner.obey(BOSS, launch(), 0.3)


def stopped_as_over(owner, asked_s, told_s):
    """What the owner does with its ranks when all holders say that their attempt is over."""
    contacts = [
        each for each in of(SendPeer, owner.step(TimerFired(), asked_s)) if isinstance(each.message, OwnerContact)
    ]
    over = TaskNews(JOB, 1, TaskStanding.OVER, 2, 9, OTHERS)
    answers = [(each.recipient, ContactAnswered(each.message.sequence, (over,))) for each in contacts]
    return [effect for holder, answer in answers for effect in owner.contact_answered(holder, answer, told_s)]


def test_ranks_whose_time_is_over_are_killed_without_grace_when_their_attempt_is_over_too(owner):
    launched_under(owner, OTHERS)
    effects = stopped_as_over(owner, 9.0, 9.1)
    assert [(stop.attempt, stop.grace_s) for stop in of(StopTask, effects)] == [(1, 0.0)]
    assert [each.kind for each in of(Announce, effects)] == ["task.killed_over"]


def test_ranks_that_may_still_run_keep_the_grace_of_a_stop_although_the_holders_are_heard_before_the_shepherd(owner):
    """Else a contact that happens to come first, or within the grace, takes the last words from them."""
    launched_under(owner, OTHERS)
    effects = stopped_as_over(owner, 2.5, 2.6)
    assert [(stop.attempt, stop.grace_s) for stop in of(StopTask, effects)] == [(1, RELEASE_GRACE_S)]
    assert of(StopTask, stopped_as_over(owner, 5.0, 5.1)) == []


@pytest.mark.parametrize(("grace_s", "told_s", "expected_s"), [(1.5, 2.6, 1.5), (30.0, 6.2, 2.0)], ids=["spec", "time"])
def test_grace_of_an_attempt_that_is_over_is_what_its_job_asks_for_within_its_time(owner, grace_s, told_s, expected_s):
    launched_under(owner, OTHERS, grace_s)
    (stop,) = of(StopTask, stopped_as_over(owner, 2.5, told_s))
    assert stop.grace_s == pytest.approx(expected_s)


def told_that_it_is_over(owner, now_s):
    asked = owner.step(TimerFired(), now_s)
    (contact,) = [each for each in of(SendPeer, asked) if isinstance(each.message, OwnerContact)]
    over = TaskNews(JOB, 1, TaskStanding.OVER, 2, 9, Configuration((Holder(ME, 1),)))
    return owner.contact_answered(ME, ContactAnswered(contact.message.sequence, (over,)), now_s + 0.1)


def test_a_result_that_its_shepherd_never_hears_is_forgotten_once_the_holders_say_that_the_job_is_over(owner):
    launched(owner)
    owner.step(TaskExited(JOB, 1, ()), 1.0)
    effects = told_that_it_is_over(owner, 3.0)
    assert of(ForgetTask, effects) == [ForgetTask(JOB, 1)]
    assert owner.tasks == ()


def test_ranks_that_were_killed_because_their_attempt_is_over_leave_nothing(owner):
    launched(owner)
    told_that_it_is_over(owner, 3.0)
    owner.step(TaskExited(JOB, 1, ()), 3.2)
    told_that_it_is_over(owner, 6.0)
    assert owner.tasks == ()


def test_a_restored_result_is_forgotten_once_the_holders_say_that_the_job_is_over():
    before = owner_of(make_ledger())
    held(before)
    durable = before.obey(BOSS, commit(shares=(Share(NodeId("gpu0"), 2), Share(ME, 2))), 0.2)
    failed = before.step(TaskStageFailed(JOB, 1, TaskFailure.SYNC, "no such file"), 1.0)
    after = restarted([*durable, *failed], make_ledger())
    assert [status.stage for status in after.tasks] == [TaskStage.EXITED]
    told_that_it_is_over(after, 3.0)
    assert after.tasks == ()


def test_live_ranks_are_told_with_which_batch_to_go_on(owner):
    launched(owner)
    told = TaskBatch(JOB, 1, 256)
    assert owner.answered(told) == [SetBatch(JOB, 1, 256)]
    assert owner.answered(replace(told, attempt=2)) == []
    owner.step(TaskExited(JOB, 1, ()), 1.0)
    assert owner.answered(told) == []


def test_task_that_nobody_ordered_is_stopped():
    owner = owner_of(make_ledger())
    launched(other := owner_of(make_ledger()))
    effects = owner.step(TasksFound((found_task(other, other.tasks[0]),)), 0.0)
    assert of(StopTask, effects) != []


def test_task_that_nobody_ordered_has_its_gpus_until_it_has_ended():
    """The database was lost, the ranks were not: their GPUs are nobody else's, and a shepherd hears of them."""
    launched(other := owner_of(make_ledger()))
    owner = owner_of(ledger := make_ledger())
    found = found_task(other, replace(other.tasks[0], stage=TaskStage.STARTED))
    owner.step(TasksFound((found,)), 0.0)
    assert ledger.free.gpu_count == make_ledger().free.gpu_count - len(found.gpus)
    for command in (commit(), launch()):
        assert answers(owner.obey(BOSS, command, 0.5))[0].refusal is Refusal.DRAINING
    asked = owner.obey(BOSS, StatusRequest(JOB, 1, 1, 7, BOSS), 1.0)
    assert answers(asked)[0].refusal is Refusal.NONE
    assert reports(asked)[0].stage is TaskStage.STARTED
    (status,) = reports(owner.step(TaskExited(JOB, 1, (RankExit(0, 0), RankExit(1, 0))), 2.0))
    assert (status.stage, status.failure) == (TaskStage.EXITED, TaskFailure.LOST)
    assert ledger.free.gpu_count == make_ledger().free.gpu_count


def test_a_result_of_a_task_that_nobody_ordered_goes_when_its_job_is_over_although_whoever_asked_forgot_it():
    """The shepherd asked for it, lost its own disk before it acknowledged, and says nothing to reports for ever."""
    launched(other := owner_of(make_ledger()))
    owner = owner_of(make_ledger())
    owner.step(TasksFound((found_task(other, replace(other.tasks[0], stage=TaskStage.STARTED)),)), 0.0)
    owner.obey(BOSS, StatusRequest(JOB, 1, 1, 7, BOSS), 1.0)
    owner.step(TaskExited(JOB, 1, (RankExit(0, 0), RankExit(1, 0))), 2.0)
    told_that_it_is_over(owner, 4.0)
    assert owner.tasks == ()


@pytest.mark.parametrize("is_found_again", [True, False])
def test_task_that_nobody_ordered_and_that_ended_while_no_agent_ran_has_no_gpus(is_found_again):
    launched(other := owner_of(make_ledger()))
    found = found_task(other, replace(other.tasks[0], stage=TaskStage.STARTED))
    owner_of(ledger := make_ledger()).step(TasksFound((found,)), 0.0)
    assert ledger.entries != ()
    ended = found_task(other, replace(other.tasks[0], stage=TaskStage.EXITED))
    effects = owner_of(ledger).step(TasksFound((ended,) if is_found_again else ()), 5.0)
    assert of(Persist, effects) != []
    assert ledger.entries == ()


def test_task_that_was_launched_and_is_not_found_again_was_lost():
    """A power cut took the shim's files: to start it once more, or to wait for it, would be wrong."""
    ledger = make_ledger()
    before = owner_of(ledger)
    durable = held(before) + before.obey(BOSS, commit(), 0.2)
    in_contact(before, durable, 0.25)
    durable += before.obey(BOSS, launch(), 0.4)
    (status,) = reports(restarted(durable, ledger).step(TasksFound(()), 0.0))
    assert (status.stage, status.failure) == (TaskStage.EXITED, TaskFailure.LOST)
    assert ledger.entries == ()


def test_restarted_owner_asks_the_newest_holders_that_it_knew():
    """All that its order names may be gone by then."""
    before = owner_of(ledger := make_ledger())
    durable = held(before) + before.obey(BOSS, commit(), 0.2)
    newer = Configuration(tuple(Holder(NodeId(name), 1) for name in ("new1", "new2", "new3")))
    contact = next(each.message for each in of(SendPeer, durable) if isinstance(each.message, OwnerContact))
    news = TaskNews(JOB, 1, TaskStanding.VALID, 1, 5, newer)
    durable += before.contact_answered(ME, ContactAnswered(contact.sequence, (news,)), 0.3)
    after = restarted(durable, ledger)
    asked = of(SendPeer, after.step(TimerFired(), 0.0))
    assert {each.recipient for each in asked if isinstance(each.message, OwnerContact)} == set(newer.nodes)


def test_acknowledgement_of_an_earlier_life_forgets_nothing(owner):
    """Revisions begin anew after a restart; a late acknowledgement must not hit a younger revision."""
    launched(owner)
    (status,) = reports(owner.step(TaskExited(JOB, 1, ()), 1.0))
    assert owner.acknowledge(TaskReportReceived(JOB, 1, status.revision, status.generation - 1)) == []
    assert len(owner.tasks) == 1


def test_restarted_owner_reports_an_end_to_its_shepherd_even_when_the_lease_is_gone():
    """The agent died after the lease had ended and before the report was heard."""
    before = owner_of(make_ledger())
    durable = held(before) + before.obey(BOSS, commit(), 0.2)
    after = owner_of(make_ledger())
    after.restore(durable_entries(durable, "task"), 0.0)
    exited = replace(before.tasks[0], stage=TaskStage.EXITED, exits=(RankExit(0, 4),))
    effects = after.step(TasksFound((found_task(before, exited),)), 0.0)
    assert [effect.recipient for effect in of(SendPeer, effects)] == [BOSS]
    assert reports(effects)[0].exits == (RankExit(0, 4),)


def test_exit_codes_outlive_two_restarts_although_another_shepherd_asked_after_the_end():
    """Its name was written with the task, whose end then looked as if it stood in our own books: exit code 0."""
    before = owner_of(ledger := make_ledger())
    begun = held(before)
    asked = before.obey(BOSS, commit(), 0.2)
    durable = [*begun, *asked, *in_contact(before, asked, 0.25), *before.obey(BOSS, launch(), 0.3)]
    failed = (RankExit(0, 3),)
    durable += before.step(TaskExited(JOB, 1, failed), 1.0)
    durable += before.obey(NodeId("gpu9"), StatusRequest(JOB, 2, 1, 1, NodeId("gpu9")), 2.0)
    found = found_task(before, before.tasks[0])
    for _ in range(2):
        after = restarted(durable, ledger)
        durable += after.step(TasksFound((found,)), 0.0)
        assert after.tasks[0].exits == failed


def restarted(durable, ledger):
    after = owner_of(ledger)
    after.restore(durable_entries(durable, "task"), 0.0)
    return after


def test_restored_order_without_a_lease_or_a_process_is_reported_as_lost():
    """Its shepherd still waits for it; silence would keep the gang for ever."""
    before = owner_of(make_ledger())
    durable = held(before) + before.obey(BOSS, commit(), 0.2)
    (status,) = reports(restarted(durable, make_ledger()).step(TasksFound(()), 0.0))
    assert (status.stage, status.failure) == (TaskStage.EXITED, TaskFailure.LOST)


def test_failed_staging_is_still_told_after_a_restart():
    """No shim has left a record of it, and the first report was lost."""
    ledger = make_ledger()
    before = owner_of(ledger)
    durable = before.obey(BOSS, hold(wants_rendezvous=False), 0.0)
    durable += before.obey(BOSS, commit(shares=(Share(BOSS, 2), Share(ME, 2))), 0.2)
    durable += before.step(TaskStageFailed(JOB, 1, TaskFailure.ENVIRONMENT, "pip said no"), 0.3)
    after = restarted(durable, ledger)
    after.step(TasksFound(()), 0.0)
    (status,) = reports(after.step(TimerFired(), 0.1))
    assert (status.failure, status.detail) == (TaskFailure.ENVIRONMENT, "pip said no")


def test_commit_and_launch_of_an_ended_task_are_answered_yes_so_that_its_result_is_heard(owner):
    """A shepherd that restarted repeats them; a refusal would make it run the job again."""
    launched(owner)
    owner.step(TaskExited(JOB, 1, (RankExit(0, 0), RankExit(1, 0))), 1.0)
    (answer,) = answers(owner.obey(BOSS, commit(epoch=2, command_id=1), 2.0))
    assert (answer.refusal, answer.is_staged) == (Refusal.NONE, True)
    assert reports(owner.step(TimerFired(), 2.0))[0].stage is TaskStage.EXITED
    again = owner.obey(BOSS, LaunchRequest(JOB, 2, 1, 2, BOSS), 2.1)
    assert answers(again)[0].refusal is Refusal.NONE
    assert of(StartTask, again) == []


def test_released_task_is_stopped_again_after_a_restart():
    ledger = make_ledger()
    before = owner_of(ledger)
    durable = held(before) + before.obey(BOSS, commit(), 0.2)
    before.obey(BOSS, launch(), 0.3)
    before.obey(BOSS, ReleaseRequest(JOB, 1, 1, 8, BOSS), 1.0)
    after = restarted(durable, ledger)
    found = found_task(before, replace(before.tasks[0], stage=TaskStage.STARTED))
    effects = after.step(TasksFound((found,)), 0.0)
    assert len(of(StopTask, effects)) == 1
    assert ForgetTask(JOB, 1) in after.step(TaskExited(JOB, 1, ()), 1.0)


def test_task_that_nobody_ordered_is_forgotten_once_it_has_exited(owner):
    launched(other := owner_of(make_ledger()))
    assert of(ForgetTask, owner.step(TasksFound((found_task(other, other.tasks[0]),)), 0.0)) == []
    assert ForgetTask(JOB, 1) in owner.step(TaskExited(JOB, 1, ()), 1.0)
    assert owner.tasks == ()


def test_late_copy_of_a_hold_binds_no_second_port_for_a_running_task(owner):
    launched(owner)
    assert of(BindRendezvous, owner.obey(BOSS, hold(), 1.0)) == []


def test_lease_that_is_never_launched_is_told_again_so_that_its_shepherd_can_release_it(owner):
    held(owner)
    owner.obey(BOSS, commit(), 0.2)
    assert reports(owner.step(TimerFired(), 10.0)) == []
    (status,) = reports(owner.step(TimerFired(), 15.3))
    assert status.stage is TaskStage.STAGED
