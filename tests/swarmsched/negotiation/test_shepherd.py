"""A shepherd carries one job from acceptance to its exit code, whatever owners answer, lose or repeat."""

import random
from itertools import count

import pytest

from swarmsched.api import EndReason, JobState, StartPhase
from swarmsched.authority.message import SilenceAnswer, SilenceRequest
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import JobAccepted
from swarmsched.effects import ReplyToClient
from swarmsched.errors import InvalidTransition
from swarmsched.events import PeerMessageReceived, PeerSendFailed, TimerFired
from swarmsched.ids import NodeId
from swarmsched.jobs.update import UpdateDecided, UpdateRefused, UpdateUncertain
from swarmsched.ledger.message import (
    CheckpointAnswer,
    CheckpointRequest,
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    PreemptRequest,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    TaskReportReceived,
)
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.blame import STARTS_MOST
from swarmsched.negotiation.changes import Placed
from swarmsched.negotiation.due import PHASES
from swarmsched.negotiation.heard import WAITING_MAX
from swarmsched.negotiation.record_writer import WriteRecord
from swarmsched.negotiation.settlement import ASK_AGAIN_S, GIVE_UP_S
from swarmsched.negotiation.shepherd import TRAIL_LENGTH, JobShepherd
from swarmsched.negotiation.told import (
    AnswerWished,
    MakeRoom,
    NodeReturned,
    NodeSilent,
    SignalAsked,
    StartWished,
    StopAsked,
)
from swarmsched.record import own_exit_code, shell_exit_code
from swarmsched.resources import Share
from swarmsched.task import Meeting, RankExit, TaskFailure, TaskStage
from swarmsched.view import Allocation
from tests.swarmsched.building import JOB, NOTHING_FREE, answer_to, job_id, word
from tests.swarmsched.negotiation.scene import ME, SHARES, A, B, Scene


@pytest.fixture
def scene():
    return Scene()


def test_attempts_after_a_forced_recovery_have_numbers_that_the_lost_side_cannot_have_used(scene):
    record = scene.record.updated(epoch=1_003, attempt=2, is_forced=True)
    scene.shepherd = JobShepherd(record, ME, random.Random(2), count(1))
    assert {request.attempt for _, request in scene.place()} == {1_001}


def test_gang_is_prepared_in_the_register_before_any_commit(scene):
    holds = scene.place()
    assert [node for node, _ in holds] == [A, B]
    assert [request.wants_rendezvous for _, request in holds] == [True, False]
    scene.answer(holds[:1], rendezvous_host="10.0.0.1", rendezvous_port=29500)
    assert scene.updates == []
    scene.answer(holds[1:])
    assert scene.updates[0].plan_state.value == "prepared"
    orders = [request.order for _, request in scene.take(CommitRequest)]
    assert [(order.node, order.first_rank, order.rendezvous_port) for order in orders] == [
        (A, 0, 29500),
        (B, 2, 29500),
    ]


def test_one_refusal_releases_everything_and_the_job_waits_again(scene):
    holds = scene.place()
    scene.answer(holds[:1])
    scene.answer(holds[1:], Refusal.DOES_NOT_FIT, detail="asked for 1 GPU of 0 free")
    assert [node for node, _ in scene.take(ReleaseRequest)] == [A, B]
    assert scene.record.state is JobState.QUEUED
    assert "b refused" in scene.record.reason
    assert scene.shepherd.is_waiting
    assert scene.shepherd.pacing.may_try_after_s >= scene.now_s


def test_attempts_never_share_a_number(scene):
    numbers = []
    for _ in range(3):
        holds = scene.place()
        numbers.append(holds[0][1].attempt)
        scene.answer(holds[:1], Refusal.DOES_NOT_FIT)
    assert len(set(numbers)) == 3


def test_slow_holds_are_given_up_before_they_can_expire(scene):
    holds = scene.place()
    scene.answer(holds[:1])
    scene.now_s += 4.5
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert len(scene.take(ReleaseRequest)) == 2
    assert "no answer from b" in scene.record.reason


def test_launch_waits_for_every_commit_and_all_staging(scene):
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    commits = scene.take(CommitRequest)
    scene.answer(commits[:1], is_staged=True)
    assert scene.take(LaunchRequest) == []
    scene.answer(commits[1:], is_staged=False)
    assert scene.take(LaunchRequest) == []
    scene.report(B, TaskStage.ORDERED, 1, phase="sync")
    assert scene.record.phase is StartPhase.SYNC
    scene.report(B, TaskStage.STAGED, 2)
    assert [node for node, _ in scene.take(LaunchRequest)] == [A, B]


def test_unanswered_commands_are_repeated_with_the_same_id(scene):
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    first = scene.take(CommitRequest)
    scene.now_s += 1.1
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert scene.take(CommitRequest) == first


def test_running_only_when_all_ranks_run(scene):
    scene.launch()
    scene.report(A, TaskStage.STARTED, 5)
    assert scene.record.state is JobState.STARTING
    scene.report(B, TaskStage.STARTED, 5)
    assert scene.record.state is JobState.RUNNING
    assert [a.kind for a in scene.announced][-1] == "job.started"


def test_completed_job_has_code_zero_and_its_gpu_seconds(scene):
    scene.run()
    scene.now_s += 100.0
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0), RankExit(1, 0)])
    assert scene.record.state is JobState.RUNNING
    scene.report(B, TaskStage.EXITED, 6, [RankExit(2, 0)])
    assert (scene.record.state, scene.record.end_reason) == (JobState.ENDED, EndReason.COMPLETED)
    assert scene.record.attained_gpu_s == pytest.approx(300.0)
    assert shell_exit_code(scene.record) == 0
    assert {node for node, _ in scene.take(TaskReportReceived)} == {A, B}


def test_result_is_acknowledged_only_after_it_is_in_the_register(scene):
    """The owner forgets the exit codes on the acknowledgement."""
    scene.run()
    scene.take(TaskReportReceived)
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0), RankExit(1, 0)])
    assert scene.take(TaskReportReceived) == []


def test_first_failing_rank_stops_the_gang_and_gives_the_code(scene):
    scene.run()
    scene.report(B, TaskStage.STARTED, 6, [RankExit(2, 3)])
    assert {node for node, _ in scene.take(StopRequest)} == {A, B}
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 15), RankExit(1, 0, 15)])
    scene.report(B, TaskStage.EXITED, 7, [RankExit(2, 3)])
    assert scene.record.end_reason is EndReason.FAILED
    assert (scene.record.failed_node, scene.record.failed_rank, shell_exit_code(scene.record)) == (B, 2, 3)


def test_rank_killed_by_a_signal_gives_128_plus_its_number(scene):
    scene.run()
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 9), RankExit(1, 0, 15)])
    scene.report(B, TaskStage.EXITED, 6, [RankExit(2, 0, 15)])
    assert (shell_exit_code(scene.record), own_exit_code(scene.record)) == (137, None)


def test_short_job_that_ends_before_all_reported_started_completes(scene):
    scene.launch()
    scene.report(A, TaskStage.EXITED, 5, [RankExit(0, 0), RankExit(1, 0)])
    scene.report(B, TaskStage.EXITED, 5, [RankExit(2, 0)])
    assert scene.record.end_reason is EndReason.COMPLETED


def test_cancelling_a_queued_job_ends_it_at_once(scene):
    scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))
    assert (scene.record.state, scene.record.end_reason) == (JobState.ENDED, EndReason.CANCELLED)
    assert shell_exit_code(scene.record) == 143


def wish(name, sequence, attempt=1):
    return CheckpointRequest(JOB, attempt, sequence, A, Checkpoint(name, attempt, A, sequence=sequence))


def test_checkpoints_wait_at_their_owners_while_no_majority_answers(scene):
    """Each is asked again until it is answered: the queue must not grow with the time that the holders are silent."""
    scene.run()
    writes = [effect for n in range(100) for effect in scene.shepherd.step(word(wish(f"s-{n}", n)), scene.clock)]
    for write in writes:
        written = scene.shepherd.step(UpdateDecided(write.update.update_id, write.update.value), scene.clock)
        writes += [effect for effect in written if isinstance(effect, WriteRecord)]
    assert len(writes) == 1 + WAITING_MAX


def test_a_client_is_told_only_what_the_update_under_way_has_made_of_the_record(scene):
    """Another node may find that update decided before this one hears of it, and tell its own clients."""
    scene.run()
    (write,) = scene.shepherd.step(word(wish("step-1", 1)), scene.clock)
    assert scene.shepherd.step(AnswerWished(5, was_known=True), scene.clock) == []
    effects = scene.shepherd.step(UpdateDecided(write.update.update_id, write.update.value), scene.clock)
    (reply,) = [effect for effect in effects if isinstance(effect, ReplyToClient)]
    assert reply == ReplyToClient(5, JobAccepted(scene.record, was_known=True))
    assert scene.record.version == write.update.value.version
    assert scene.shepherd.step(AnswerWished(6), scene.clock) == [ReplyToClient(6, JobAccepted(scene.record))]


def test_a_second_cancel_is_answered_after_the_update_under_way(scene):
    scene.run()
    scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))
    (write,) = scene.shepherd.step(word(wish("step-1", 1)), scene.clock)
    again = scene.shepherd.step(StopAsked(2, None, ""), scene.clock)
    assert not any(isinstance(effect, ReplyToClient) for effect in again)
    effects = scene.shepherd.step(UpdateDecided(write.update.update_id, write.update.value), scene.clock)
    assert [effect.request_id for effect in effects if isinstance(effect, ReplyToClient)] == [2]


def test_an_older_checkpoint_that_comes_late_does_not_replace_a_newer_one(scene):
    scene.run()
    scene.do(scene.shepherd.step(word(wish("step-2", 2)), scene.clock))
    scene.take(CheckpointAnswer)
    scene.do(scene.shepherd.step(word(wish("step-1", 1)), scene.clock))
    assert scene.record.checkpoint.name == "step-2"
    ((_, answer),) = scene.take(CheckpointAnswer)
    assert (answer.is_committed, answer.detail) == (False, "a newer checkpoint of this attempt is committed already")


def test_cancelling_while_holding_releases_the_holds(scene):
    scene.place()
    scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))
    assert len(scene.take(ReleaseRequest)) == 2
    assert scene.record.end_reason is EndReason.CANCELLED


def test_cancelling_a_running_job_stops_every_owner_with_its_grace(scene):
    scene.run()
    scene.sent = []
    scene.do(scene.shepherd.step(StopAsked(1, 3.0, "wrong data"), scene.clock))
    assert scene.record.state is JobState.STOPPING
    assert [request.grace_s for _, request in scene.take(StopRequest)] == [3.0, 3.0]
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 15), RankExit(1, 0, 15)])
    scene.report(B, TaskStage.EXITED, 6, [RankExit(2, 0, 15)])
    assert (scene.record.end_reason, shell_exit_code(scene.record)) == (EndReason.CANCELLED, 143)
    assert (scene.record.detail, scene.record.failed_rank) == ("wrong data", -1)


def test_a_cancelled_job_whose_ranks_end_with_zero_is_no_success():
    """As scripts do that save a checkpoint on SIGTERM; a code of their own stands."""
    for code, expected in ((0, (143, None)), (7, (7, 7))):
        scene = Scene()
        scene.run()
        scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))
        scene.report(A, TaskStage.EXITED, 6, [RankExit(0, code), RankExit(1, 0)])
        scene.report(B, TaskStage.EXITED, 6, [RankExit(2, 0)])
        assert scene.record.end_reason is EndReason.CANCELLED
        assert (shell_exit_code(scene.record), own_exit_code(scene.record)) == expected


def test_a_gang_that_ends_before_its_preemption_is_durable_has_completed(scene):
    scene.run()
    scene.is_register_silent = True
    request = PreemptRequest(JOB, 7, job_id(1), B, "fifo", (0,), is_decided=True)
    scene.do(scene.shepherd.step(MakeRoom(request, ""), scene.clock))
    for node, ranks in ((A, (0, 1)), (B, (2,))):
        scene.report(node, TaskStage.EXITED, 9, [RankExit(rank, 0) for rank in ranks])
    scene.decide()
    assert (scene.record.state, scene.record.end_reason) == (JobState.ENDED, EndReason.COMPLETED)
    assert shell_exit_code(scene.record) == 0


def test_stop_is_repeated_until_the_owner_has_stopped(scene):
    scene.run()
    scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 15)])
    scene.sent = []
    scene.now_s += 2.1
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert [node for node, _ in scene.take(StopRequest)] == [B]


def test_cancelling_between_prepared_and_launch_starts_nothing(scene):
    """An owner that never saw the commit answers the stop with `unknown`; its hold is released."""
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))
    stops = scene.take(StopRequest)
    scene.answer(stops, Refusal.UNKNOWN)
    assert {node for node, _ in scene.take(ReleaseRequest)} == {A, B}
    assert scene.record.end_reason is EndReason.CANCELLED


def test_time_limit_ends_the_job_with_124():
    scene = Scene(time_limit_s=60.0)
    scene.run()
    scene.now_s += 59.0
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert scene.record.state is JobState.RUNNING
    scene.now_s += 1.1
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert scene.record.state is JobState.STOPPING
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 15)])
    scene.report(B, TaskStage.EXITED, 6, [])
    assert (scene.record.end_reason, shell_exit_code(scene.record)) == (EndReason.TIMEOUT, 124)
    assert own_exit_code(scene.record) is None


def test_late_report_of_an_attempt_that_is_given_up_stops_nothing_of_the_next_one(scene):
    scene.launch()
    signalled = [RankExit(2, 0, 15)]
    scene.report(B, TaskStage.EXITED, 5, exits=signalled)
    scene.is_register_silent = True
    scene.report(A, TaskStage.EXITED, 5, failure=TaskFailure.PORT_TAKEN, detail="port 29500 was taken")
    scene.report(B, TaskStage.STARTED, 4, exits=signalled)
    scene.decide()
    scene.now_s += 60.0
    scene.launch()
    scene.now_s += 60.0
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert scene.take(StopRequest) == []


def test_lost_rendezvous_port_is_tried_again_and_not_counted_as_a_failure(scene):
    scene.launch()
    scene.report(A, TaskStage.EXITED, 5, failure=TaskFailure.PORT_TAKEN, detail="port 29500 was taken")
    scene.report(B, TaskStage.EXITED, 5)
    assert scene.record.state is JobState.QUEUED
    assert scene.record.relaunches == 1
    assert scene.shepherd.is_waiting


def test_job_that_never_finds_a_port_fails_in_the_end(scene):
    for _ in range(STARTS_MOST):
        assert not scene.record.is_ended
        scene.launch()
        scene.report(A, TaskStage.EXITED, 5, failure=TaskFailure.PORT_TAKEN, detail="port 29500 was taken")
        scene.report(B, TaskStage.EXITED, 5)
    assert scene.record.end_reason is EndReason.FAILED
    assert "port 29500" in scene.record.detail


def test_a_node_that_cannot_start_its_part_is_avoided_and_the_job_tried_again(scene):
    scene.launch()
    why = "b could not start the task: Resource temporarily unavailable"
    scene.report(B, TaskStage.EXITED, 5, failure=TaskFailure.INTERNAL, detail=why)
    scene.report(A, TaskStage.EXITED, 5, [RankExit(0, 0, 15)])
    assert (scene.record.state, scene.record.relaunches) == (JobState.QUEUED, 1)
    assert list(scene.shepherd.pacing.avoided) == [B]
    assert why in scene.record.reason


def fail_to_stage(scene, node, failure, detail="", others=SHARES):
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    scene.answer(scene.take(CommitRequest), is_staged=False)
    scene.report(node, TaskStage.EXITED, 3, failure=failure, detail=detail)
    for share in others:
        if share.node != node:
            scene.report(share.node, TaskStage.EXITED, 3)


def test_failed_environment_ends_the_job_with_its_output_where_no_other_node_could_take_it(scene):
    scene.others_could_take_it = False
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    scene.answer(scene.take(CommitRequest), is_staged=False)
    scene.report(B, TaskStage.EXITED, 3, failure=TaskFailure.ENVIRONMENT, detail="pip: no such package")
    assert [node for node, _ in scene.take(StopRequest)] == [A]
    scene.report(A, TaskStage.EXITED, 3)
    assert (scene.record.end_reason, shell_exit_code(scene.record)) == (EndReason.FAILED, 125)
    assert "no such package" in scene.record.detail


@pytest.mark.parametrize("failure", [TaskFailure.ENVIRONMENT, TaskFailure.SYNC])
def test_what_one_node_cannot_have_another_is_asked_for_and_what_fails_alike_there_is_the_jobs(scene, failure):
    fail_to_stage(scene, A, failure, "a: it is not to be had")
    assert (scene.record.state, scene.record.relaunches, scene.record.restarts) == (JobState.QUEUED, 1, 0)
    assert scene.record.reason == "another node is tried: a: it is not to be had"
    assert scene.shepherd.barred == (A,)
    assert "job.start_failed" in [told.kind for told in scene.announced]
    fail_to_stage(scene, B, failure, "b: it is not to be had")
    assert (scene.record.end_reason, shell_exit_code(scene.record)) == (EndReason.FAILED, 125)
    assert scene.record.detail == "could not be started in 2 tries, on a, b; the last: b: it is not to be had"


def test_what_two_nodes_of_one_gang_cannot_have_alike_is_the_jobs(scene):
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    scene.answer(scene.take(CommitRequest), is_staged=False)
    for node in (A, B):
        scene.report(node, TaskStage.EXITED, 3, failure=TaskFailure.ENVIRONMENT, detail="pip: no such package")
    assert scene.record.end_reason is EndReason.FAILED


def test_another_failure_on_a_second_node_says_nothing_of_the_job(scene):
    fail_to_stage(scene, A, TaskFailure.ENVIRONMENT)
    fail_to_stage(scene, B, TaskFailure.SYNC)
    assert scene.record.state is JobState.QUEUED
    assert scene.shepherd.barred == (A, B)


def test_nodes_that_failed_it_are_taken_again_where_no_other_could_take_the_job(scene):
    fail_to_stage(scene, A, TaskFailure.INTERNAL)
    scene.others_could_take_it = False
    assert scene.shepherd.barred == ()


def test_a_node_that_failed_it_is_taken_again_while_others_are_unwell_and_the_job_does_not_end_by_that(scene):
    scene.others_are_well = False
    for number in range(STARTS_MOST):
        assert (scene.record.state, scene.record.relaunches, scene.shepherd.barred) == (JobState.QUEUED, number, ())
        fail_to_stage(scene, A, TaskFailure.SYNC, "it is not to be had")
    assert scene.record.detail == "could not be started in 5 tries, on a; the last: it is not to be had"


def test_a_node_that_failed_it_otherwise_counts_among_those_that_could_take_it(scene):
    fail_to_stage(scene, A, TaskFailure.INTERNAL)
    scene.needed = {A}
    fail_to_stage(scene, B, TaskFailure.SYNC)
    assert (scene.record.state, scene.shepherd.barred) == (JobState.QUEUED, (B,))


def test_a_nodes_fault_ends_a_job_only_after_several_tries_and_names_the_nodes(scene):
    for number in range(STARTS_MOST):
        assert (scene.record.is_ended, scene.record.relaunches) == (False, number)
        fail_to_stage(scene, (A, B)[number % 2], TaskFailure.INTERNAL, "no process to be had")
    assert (scene.record.end_reason, shell_exit_code(scene.record)) == (EndReason.FAILED, 125)
    assert scene.record.detail == "could not be started in 5 tries, on a, b; the last: no process to be had"


def test_tries_are_counted_anew_once_its_ranks_have_run_and_a_later_shepherd_knows_of_them(scene):
    fail_to_stage(scene, A, TaskFailure.INTERNAL)
    assert scene.succeed().barred == (A,)
    scene.run()
    assert (scene.record.start_faults, scene.record.relaunches) == ((), 1)


@pytest.mark.parametrize(
    ("command", "failure", "is_tried_again"),
    [
        ("pyhton", TaskFailure.NOT_FOUND, False),
        ("./train.py", TaskFailure.NOT_EXECUTABLE, False),
        ("/opt/conda/bin/python", TaskFailure.NOT_FOUND, True),
        ("/opt/conda/bin/python", TaskFailure.NOT_EXECUTABLE, True),
    ],
)
def test_a_program_that_is_missing_is_the_jobs_unless_its_path_is_one_of_nodes(command, failure, is_tried_again):
    scene = Scene(command=(command,))
    scene.launch()
    scene.report(B, TaskStage.EXITED, 5, [RankExit(2, 127)], failure=failure, detail="it is not there")
    scene.report(A, TaskStage.EXITED, 5, [RankExit(0, 0, 15)])
    assert scene.record.is_ended is not is_tried_again


def test_a_program_that_has_run_elsewhere_is_not_the_jobs_fault_where_it_is_missing(scene):
    record = scene.record.updated(first_started_utc_s=1.0)
    scene.shepherd = JobShepherd(record, ME, random.Random(2), count(1))
    scene.launch()
    scene.report(A, TaskStage.EXITED, 5, [RankExit(0, 127)], failure=TaskFailure.NOT_FOUND, detail="no python")
    scene.report(B, TaskStage.EXITED, 5, [RankExit(2, 0, 15)])
    assert (scene.record.state, scene.record.relaunches) == (JobState.QUEUED, 1)


def test_a_node_that_could_not_build_what_others_could_is_told_so():
    scene = Scene(requirements="0" * 64)
    fail_to_stage(scene, A, TaskFailure.ENVIRONMENT, others=SHARES)
    first = scene.record.attempt
    elsewhere = (Share(NodeId("c"), 3),)
    scene.do(scene.shepherd.step(StartWished(elsewhere, Ranking("fifo", (1,))), scene.clock))
    scene.answer(scene.take(HoldRequest), rendezvous_host="h", rendezvous_port=1)
    scene.answer(scene.take(CommitRequest), is_staged=True)
    scene.answer(scene.take(LaunchRequest))
    scene.report(NodeId("c"), TaskStage.STARTED, 5)
    ((node, told),) = scene.take(ReleaseRequest)
    assert (node, told.attempt, told.fault) == (A, first, TaskFailure.ENVIRONMENT)


def test_lost_task_ends_the_job_as_node_lost_when_it_may_not_be_restarted():
    scene = Scene(max_restarts=0)
    scene.run()
    scene.report(A, TaskStage.EXITED, 6, failure=TaskFailure.LOST, detail="the shim is gone")
    scene.report(B, TaskStage.EXITED, 6, [RankExit(2, 0, 15)])
    assert scene.record.end_reason in (EndReason.NODE_LOST, EndReason.FAILED)


def test_a_job_that_may_not_be_restarted_does_not_say_that_it_was():
    scene = Scene(max_restarts=0)
    scene.run()
    scene.lose(B)
    assert (scene.record.state, scene.record.detail) == (JobState.STOPPING, "b was lost, and max_restarts is 0")


def test_a_gang_is_not_given_up_before_another_attempt_could_start(scene):
    scene.run()
    scene.lose(B, silent_s=GIVE_UP_S - 1.0)
    assert scene.record.state is JobState.RUNNING
    assert scene.shepherd.next_deadline_s == pytest.approx(scene.now_s + ASK_AGAIN_S)
    scene.now_s += ASK_AGAIN_S
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert scene.take(SilenceRequest), "its holders are asked again"
    scene.lose(B, silent_s=GIVE_UP_S)
    assert scene.record.state is JobState.RUNNING, "a belief that stands asks nobody anew"
    scene.now_s += ASK_AGAIN_S
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    scene.lose(B, silent_s=GIVE_UP_S)
    assert (scene.record.state, scene.record.restarts) == (JobState.QUEUED, 1)


def test_a_node_that_is_back_is_suspected_no_more(scene):
    scene.run()
    scene.lose(B, silent_s=6.0)
    scene.do(scene.shepherd.step(NodeReturned(B), scene.clock))
    epoch, version = scene.record.stamp
    late = SilenceAnswer(JOB, scene.record.attempt, B, epoch, version, has_record=False, silent_s=GIVE_UP_S)
    scene.do(scene.shepherd.step(PeerMessageReceived(ME, late), scene.clock))
    assert scene.record.state is JobState.RUNNING


def test_a_belief_that_is_not_told_again_ends(scene):
    scene.run()
    scene.lose(B, silent_s=0.0)
    for _ in range(10):
        scene.now_s += ASK_AGAIN_S
        scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    scene.sent = []
    scene.now_s += ASK_AGAIN_S
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert not scene.take(SilenceRequest)


@pytest.mark.parametrize("stage", list(TaskStage))
def test_older_revision_of_a_report_changes_nothing(scene, stage):
    """One from before the start would else tell that the owner has lost its ranks."""
    scene.run()
    before, scene.sent = scene.record, []
    scene.report(A, stage, 4, [RankExit(0, 1)] if stage is TaskStage.EXITED else ())
    assert scene.record is before
    assert [type(message) for _, message in scene.sent] in ([TaskReportReceived], [])


def test_report_of_an_earlier_attempt_is_acknowledged_and_ignored(scene):
    scene.run()
    scene.sent = []
    scene.report(A, TaskStage.EXITED, 9, [RankExit(0, 1)], attempt=0)
    assert scene.record.state is JobState.RUNNING
    assert len(scene.take(TaskReportReceived)) == 1


def test_lease_of_an_aborted_attempt_is_released_when_it_reports(scene):
    """The first release was lost."""
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    scene.answer(scene.take(CommitRequest)[:1], Refusal.EXPIRED)
    assert scene.record.state is JobState.QUEUED
    scene.sent = []
    scene.report(B, TaskStage.STAGED, 1, attempt=1)
    assert [node for node, _ in scene.take(ReleaseRequest)] == [B]


def test_returned_shepherd_takes_a_new_epoch_and_asks_the_owners(scene):
    scene.run()
    again = scene.succeed()
    assert (again.record.epoch, again.record.shepherd_generation) == (2, 8)
    assert [node for node, _ in scene.take(StatusRequest)] == [A, B]
    scene.report(A, TaskStage.EXITED, 9, [RankExit(0, 0), RankExit(1, 0)])
    scene.report(B, TaskStage.EXITED, 9, [RankExit(2, 0)])
    assert again.record.end_reason is EndReason.COMPLETED


def test_shepherd_that_died_after_prepared_repeats_the_commits(scene):
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    again = scene.succeed()
    commits = scene.take(CommitRequest)
    assert [(request.epoch, request.attempt) for _, request in commits] == [(2, 1), (2, 1)]
    scene.answer(commits, Refusal.EXPIRED)
    assert again.record.state is JobState.QUEUED
    assert {left.node for left in again.record.leftovers} == {A, B}, "the earlier shepherd may have launched it"
    assert not again.is_waiting


def test_signal_reaches_every_owner(scene):
    scene.run()
    scene.sent = []
    scene.do(scene.shepherd.step(SignalAsked(7, 2), scene.clock))
    assert [(node, request.signal) for node, request in scene.take(SignalRequest)] == [(A, 2), (B, 2)]


def test_stop_of_a_failed_attempt_does_not_hit_the_next_one(scene):
    """The gang was being stopped when a commit was refused; the job is placed again."""
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    commits = scene.take(CommitRequest)
    scene.report(B, TaskStage.EXITED, 3, failure=TaskFailure.UNREACHABLE, detail="no route")
    scene.answer(commits[:1], Refusal.EXPIRED)
    assert scene.record.state is JobState.QUEUED
    scene.place()
    scene.now_s += 3.0
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert scene.take(StopRequest) == []


def test_owner_that_has_nothing_left_does_not_hide_why_the_gang_was_stopped(scene):
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    scene.take(CommitRequest)
    scene.report(B, TaskStage.EXITED, 3, failure=TaskFailure.UNREACHABLE, detail="no route")
    scene.answer(scene.take(StopRequest), Refusal.RELEASED_ATTEMPT)
    scene.do(scene.shepherd.step(word(OwnerAnswer(JOB, 1, 1, 99, A, Refusal.UNKNOWN, NOTHING_FREE)), scene.clock))
    assert scene.record.end_reason is not EndReason.NODE_LOST


def test_late_failure_to_deliver_says_nothing_about_a_newer_attempt(scene):
    first = scene.place()
    scene.answer(first[:1], Refusal.DOES_NOT_FIT)
    second = scene.place()
    scene.do(scene.shepherd.step(PeerSendFailed(B, first[1][1], "timed out"), scene.clock))
    assert scene.shepherd.attempt
    scene.do(scene.shepherd.step(PeerSendFailed(B, second[1][1], "timed out"), scene.clock))
    assert not scene.shepherd.attempt


def test_task_that_stands_staged_after_the_launch_is_launched_again(scene):
    """Its owner had acknowledged the launch, and restarted before it could act on it."""
    scene.launch()
    scene.sent = []
    scene.report(B, TaskStage.STAGED, 7)
    assert [node for node, _ in scene.take(LaunchRequest)] == [B]
    scene.report(B, TaskStage.STAGED, 7)
    assert [node for node, _ in scene.take(LaunchRequest)] == [B]


def test_task_that_stands_before_its_start_while_its_gang_runs_was_lost(scene):
    """Its owner came back with a disk that knows the order and nothing of the ranks."""
    scene.run()
    scene.sent = []
    scene.report(B, TaskStage.STAGED, 7)
    assert [node for node, _ in scene.take(ReleaseRequest)] == [B]
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 15), RankExit(1, 0, 15)])
    assert (scene.record.state, scene.record.restarts) == (JobState.QUEUED, 1)


def test_unanswered_status_request_is_repeated(scene):
    scene.run()
    again = scene.succeed()
    asked = scene.take(StatusRequest)
    scene.answer(asked[:1])
    scene.now_s = again.next_deadline_s
    scene.do(again.step(TimerFired(), scene.clock))
    assert scene.take(StatusRequest) == asked[1:]


def test_node_that_comes_back_without_the_task_ends_the_job_as_lost_when_it_may_not_be_restarted():
    scene = Scene(max_restarts=0)
    scene.run()
    scene.do(scene.shepherd.step(NodeSilent(B), scene.clock))
    assert "b does not answer" in scene.record.reason
    scene.sent = []
    scene.do(scene.shepherd.step(NodeReturned(B), scene.clock))
    assert scene.record.reason == ""
    scene.answer(scene.take(StatusRequest), Refusal.UNKNOWN)
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 15), RankExit(1, 0, 15)])
    assert scene.record.failed_node in (A, B)
    assert scene.record.end_reason is not EndReason.COMPLETED


def test_only_who_granted_the_hold_can_say_that_nothing_is_left(scene):
    scene.answer(scene.place(), rendezvous_host="10.0.0.1", rendezvous_port=29500, origin=1)
    scene.answer(scene.take(CommitRequest), is_staged=True, origin=1)
    scene.answer(scene.take(LaunchRequest), origin=1)
    scene.report(A, TaskStage.STARTED, 5)
    scene.report(B, TaskStage.STARTED, 5)
    scene.do(scene.shepherd.step(NodeReturned(B), scene.clock))
    asked = scene.take(StatusRequest)
    scene.answer(asked, Refusal.UNKNOWN, origin=2)
    assert scene.record.state is JobState.RUNNING
    scene.now_s = scene.shepherd.next_deadline_s
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert scene.take(StatusRequest) == asked, "it is asked again"
    later_s = scene.now_s + 10.0
    assert scene.shepherd.namesakes.standing(scene.now_s, 10.0) == []
    assert scene.shepherd.namesakes.standing(later_s, 10.0) == [B]
    scene.report(B, TaskStage.STARTED, 5)
    assert scene.shepherd.namesakes.standing(later_s, 10.0) == []
    scene.answer(asked, Refusal.UNKNOWN, origin=1)
    assert [node for node, _ in scene.take(StopRequest)] == [A], "what is left of the gang"


def test_a_leftover_is_settled_by_who_granted_its_hold_and_by_no_other_machine_of_that_name(scene):
    scene.answer(scene.place(), rendezvous_host="10.0.0.1", rendezvous_port=29500, origin=1)
    scene.answer(scene.take(CommitRequest), is_staged=True, origin=1)
    scene.answer(scene.take(LaunchRequest), origin=1)
    scene.lose(B)
    orders = scene.take(StopRequest)
    scene.answer(orders, Refusal.UNKNOWN, origin=2)
    assert len(scene.record.leftovers) == 2
    scene.succeed()
    scene.answer(scene.take(StopRequest), Refusal.UNKNOWN, origin=1)
    assert scene.record.leftovers == ()


def test_victims_that_are_told_before_the_cause_do_not_become_it(scene):
    """After a restart of the shepherd the owners report in any order."""
    scene.run()
    scene.report(A, TaskStage.EXITED, 6, [RankExit(0, 0, 15), RankExit(1, 0, 15)])
    scene.report(B, TaskStage.EXITED, 6, [RankExit(2, 3)])
    assert (scene.record.failed_node, scene.record.exit_code) == (B, 3)


def test_attempts_of_an_earlier_life_are_leapt_over(scene):
    """They were released at the owners and never prepared, so the record does not know how many there were."""
    numbers = []
    for _ in range(6):
        holds = scene.place()
        numbers.append(holds[0][1].attempt)
        scene.answer(holds[:1], Refusal.RELEASED_ATTEMPT)
    assert numbers[-1] > 30


def test_the_next_attempt_is_above_all_that_owners_say_they_have_released(scene):
    holds = scene.place()
    for hold, released in zip(holds, (131, 143), strict=True):  # the first ends the attempt, the second comes late
        scene.answer([hold], Refusal.RELEASED_ATTEMPT, released_attempt=released)
    assert [request.attempt for _, request in scene.place()] == [144, 144]


def test_an_attempt_that_was_given_up_while_it_was_written_down_is_withdrawn(scene):
    holds = scene.place()
    scene.answer(holds[:1], rendezvous_host="10.0.0.1", rendezvous_port=29500)
    (node, request), *_ = holds[1:]
    effects = scene.shepherd.step(word(answer_to(request, node)), scene.clock)
    (prepared,) = [effect.update for effect in effects if isinstance(effect, WriteRecord)]
    scene.now_s += 5.0
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert not scene.shepherd.is_waiting, "nobody knows yet whether the record names it"
    scene.do(scene.shepherd.step(UpdateDecided(prepared.update_id, prepared.value), scene.clock))
    assert scene.record.state is JobState.QUEUED
    assert [type(message) for _, message in scene.sent[-2:]] == [ReleaseRequest] * 2
    assert scene.take(CommitRequest) == []
    assert scene.shepherd.is_waiting


def test_update_of_unknown_outcome_is_repeated_unchanged(scene):
    effects = scene.shepherd.step(StopAsked(1, None, ""), scene.clock)
    (write,) = [effect for effect in effects if isinstance(effect, WriteRecord)]
    scene.now_s += 20.0
    assert scene.shepherd.step(UpdateUncertain(write.update.update_id, ""), scene.clock) == [write]


def test_a_late_answer_to_an_earlier_life_moves_nothing(scene):
    """Command ids of two lives must not meet: a refusal of the old epoch would abort the new one's gang."""
    scene.answer(scene.place(), rendezvous_host="h", rendezvous_port=1)
    old = scene.take(CommitRequest)
    again = scene.succeed()
    assert not {request.command_id for _, request in old} & {r.command_id for _, r in scene.take(CommitRequest)}
    scene.answer(old, Refusal.STALE_EPOCH)
    assert again.record.state is JobState.STARTING


def test_a_second_machines_refusal_of_a_commit_does_not_give_up_a_gang_that_stages(scene):
    scene.answer(scene.place(), rendezvous_host="10.0.0.1", rendezvous_port=29500, origin=1)
    scene.answer(scene.take(CommitRequest), origin=1)
    scene.succeed()
    scene.answer(scene.take(CommitRequest)[1:], Refusal.EXPIRED, origin=2)
    assert scene.record.state is JobState.STARTING


def exits(scene, revision, code=0):
    scene.report(A, TaskStage.EXITED, revision, [RankExit(0, code), RankExit(1, 0)])
    scene.report(B, TaskStage.EXITED, revision, [RankExit(2, 0)])


def outcome(record):
    return record.state, record.end_reason, record.exit_code, record.restarts, record.relaunches, record.leftovers


def starts(scene):
    scene.launch()


def runs(scene):
    scene.run()


def makes_room(scene):
    scene.run()
    request = PreemptRequest(JOB, 7, job_id(1), B, "fifo", (0,), is_decided=True)
    scene.do(scene.shepherd.step(MakeRoom(request, ""), scene.clock))


def is_cancelled(scene):
    scene.run()
    scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))


def is_given_up(scene):
    scene.run()
    scene.lose(B)


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("live", [starts, runs, makes_room, is_cancelled, is_given_up], ids=lambda live: live.__name__)
def test_a_successor_that_hears_the_same_decides_the_same(live, code):
    stays, changes = Scene(), Scene()
    for scene in (stays, changes):
        live(scene)
    changes.succeed()
    for scene in (stays, changes):
        exits(scene, 9, code)
    assert outcome(stays.record) == outcome(changes.record)
    assert stays.record.state in (JobState.QUEUED, JobState.ENDED)


def test_phases_are_those_of_the_life_cycle():
    assert list(PHASES) == list(JobState)


def test_what_becomes_due_while_an_update_is_under_way_is_written_after_it(scene):
    scene.run()
    scene.is_register_silent = True
    scene.do(scene.shepherd.step(word(wish("step-1", 1)), scene.clock))
    exits(scene, 6)
    assert len(scene.undecided) == 1
    scene.now_s += 60.0  # the holders were silent; that is no service
    scene.decide()
    assert (scene.record.state, scene.record.end_reason) == (JobState.ENDED, EndReason.COMPLETED)
    assert scene.record.checkpoint.name == "step-1"
    assert scene.record.attained_gpu_s == 0.0


def test_a_job_that_ends_before_the_record_says_that_it_runs_has_had_its_service(scene):
    scene.launch()
    scene.is_register_silent = True
    scene.report(A, TaskStage.STARTED, 5)
    scene.report(B, TaskStage.STARTED, 5)
    scene.now_s += 10.0
    exits(scene, 6)
    scene.now_s += 60.0
    scene.decide()
    assert (scene.record.end_reason, scene.record.attained_gpu_s) == (EndReason.COMPLETED, 30.0)


def test_checkpoints_that_never_cease_do_not_keep_a_start_out_of_the_record(scene):
    scene.launch()
    scene.report(A, TaskStage.STARTED, 5)
    scene.is_register_silent = True
    scene.do(scene.shepherd.step(word(wish("step-1", 1)), scene.clock))
    scene.do(scene.shepherd.step(word(wish("step-2", 2)), scene.clock))
    scene.report(B, TaskStage.STARTED, 5)
    for number in range(3, 10):
        if scene.record.state is JobState.RUNNING:
            break
        update = scene.undecided.pop(0)
        scene.do(scene.shepherd.step(word(wish(f"step-{number}", number)), scene.clock))
        scene.do(scene.shepherd.step(UpdateDecided(update.update_id, update.value), scene.clock))
    assert (scene.record.state, scene.record.checkpoint.name) == (JobState.RUNNING, "step-2")


def test_a_change_that_the_register_refused_is_wanted_again_at_the_next_event(scene):
    scene.run()
    scene.is_register_silent = True
    exits(scene, 6)
    (refused,) = scene.undecided
    assert scene.shepherd.step(UpdateRefused(refused.update_id, ""), scene.clock) == []
    scene.undecided.clear()
    scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    scene.decide()
    assert scene.record.end_reason is EndReason.COMPLETED


def test_exits_of_an_attempt_that_is_tried_again_are_acknowledged_once_that_is_durable(scene):
    scene.launch()
    scene.is_register_silent = True
    scene.take(TaskReportReceived)
    scene.report(A, TaskStage.EXITED, 5, failure=TaskFailure.PORT_TAKEN, detail="port 29500 was taken")
    scene.report(B, TaskStage.EXITED, 5)
    assert scene.take(TaskReportReceived) == []
    scene.decide()
    assert {node for node, _ in scene.take(TaskReportReceived)} == {A, B}


def test_a_job_that_is_cancelled_in_the_queue_has_no_code_of_an_earlier_attempt(scene):
    scene.launch()
    scene.report(A, TaskStage.EXITED, 5, failure=TaskFailure.PORT_TAKEN, detail="port 29500 was taken")
    scene.report(B, TaskStage.EXITED, 5)
    scene.do(scene.shepherd.step(StopAsked(1, None, ""), scene.clock))
    assert (scene.record.end_reason, shell_exit_code(scene.record)) == (EndReason.CANCELLED, 143)


def test_a_shepherd_remembers_what_it_was_told_and_which_changes_it_wished_then(scene):
    scene.run()
    told = [(each.told, each.changes) for each in scene.shepherd.trail]
    assert told[0] == ("FirstWritten", ())
    assert [changes for _, changes in told if changes] == [("Placed",), ("Started",)]
    for _ in range(100):
        scene.do(scene.shepherd.step(TimerFired(), scene.clock))
    assert len(scene.shepherd.trail) == len(told), "of what comes all the time nothing is kept"
    for _ in range(100):
        scene.do(scene.shepherd.step(NodeReturned(B), scene.clock))
    assert [each.by for each in scene.shepherd.trail] == [B] * TRAIL_LENGTH


def test_a_change_that_no_life_cycle_has_is_told_with_what_led_to_it(scene):
    scene.run()
    scene.shepherd.writer.wish(Placed(9, Allocation(SHARES), (Meeting(),)))
    with pytest.raises(InvalidTransition, match="no transition from running on placed") as caught:
        scene.shepherd.step(NodeReturned(B), scene.clock)
    (note,) = caught.value.__notes__
    assert note.splitlines()[-1].endswith(" NodeReturned by b -> Placed")
    assert " TaskReport by somebody -> Started" in note
