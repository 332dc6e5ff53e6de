"""Each rare path is counted when it is walked."""

import pytest

from swarmsched.api import JobState
from swarmsched.authority.message import ContactAnswered, TaskNews, TaskStanding
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CommitCheckpoint, JobAccepted, Refused, SubmitJob
from swarmsched.effects import Announce, ReplyToClient, SendPeer, StopTask
from swarmsched.events import ClientCommandReceived, PeerMessageReceived
from swarmsched.holders import Holder
from swarmsched.ids import NodeId
from swarmsched.jobs.message import Ballot, PrepareRequest
from swarmsched.ledger.message import CheckpointAnswer
from swarmsched.record import Leftover, PlanState
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.sometimes import NAMES, Sometimes
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.tasks import RankPlan, RunningTask, TaskChange
from tests.swarmsched.simulator.checks.testing import JOB, History, gang, order_of


def make_suite():
    decided = DecidedRecords()
    return Suite([decided, Sometimes(decided)])


@pytest.fixture
def history():
    return History(make_suite)


def seen(history):
    return {name: count for name, count in history.suite.get(Sometimes).counts.items() if count}


def test_every_name_has_a_count_from_the_beginning(history):
    assert history.suite.get(Sometimes).counts == dict.fromkeys(NAMES, 0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"epoch": 2, "shepherd": "b"}, "shepherd taken over"),
        ({"restarts": 1}, "gang restarted after node loss"),
        ({"preemptions": 1}, "gang preempted"),
        ({"relaunches": 1}, "gang relaunched"),
        ({"checkpoint": Checkpoint("step-1", 1, NodeId("b"))}, "checkpoint committed"),
        ({"epoch": 1001, "is_forced": True}, "recover forced"),
    ],
)
def test_what_a_decided_record_shows(history, changes, name):
    first = history.decide(history.record())
    history.decide(first.updated(**changes))
    assert seen(history) == {name: 1}


def test_a_holder_that_was_replaced(history):
    first = history.decide(history.record())
    new = (*history.holders[:2], Holder(NodeId("c"), 9))
    joint = first.updated(holders=new, leaving_holders=first.holders)
    history.decide(joint)
    history.decide(joint.updated(leaving_holders=()), ["a", "b"])
    assert seen(history) == {"joint configuration seen": 1, "holder replaced": 1}


def test_an_attempt_that_another_shepherd_brought_to_its_end(history):
    first = history.decide(history.record())
    prepared = history.decide(first.updated(attempt=1, plan_state=PlanState.PREPARED, shares=gang("b")))
    taken = history.decide(prepared.updated(epoch=2, shepherd="b"))
    history.decide(taken.updated(plan_state=PlanState.LAUNCHED))
    assert seen(history) == {"shepherd taken over": 1, "prepared recovered by another shepherd": 1}


def test_a_leftover_that_was_settled(history):
    first = history.decide(history.record())
    left = history.decide(first.updated(leftovers=(Leftover(NodeId("b"), 1),)))
    settled = history.decide(left.updated(leftovers=()))
    again = history.decide(settled.updated(leftovers=(Leftover(NodeId("b"), 2),)))
    history.decide(again.updated(leftovers=(), state=JobState.ENDED))
    assert seen(history) == {"leftover settled": 1}


def test_tasks_that_freeze_and_go_on(history):
    task = RunningTask(order_of(history.record(attempt=1, shares=gang("b")), "b"), (), {0: RankPlan(1.0)})
    for change in (TaskChange.STARTED, TaskChange.FROZEN, TaskChange.THAWED, TaskChange.ENDED):
        history.suite.task_changed(history["b"].host, task, change)
    assert seen(history) == {"task frozen": 1, "task thawed": 1}


def test_a_task_that_is_stopped_because_a_holder_says_that_it_is_over(history):
    news = ContactAnswered(1, (TaskNews(JOB, 1, TaskStanding.OVER),))
    history.step("b", PeerMessageReceived(NodeId("a"), news), StopTask(JOB, 2, 5.0))
    assert seen(history) == {}
    history.step("b", PeerMessageReceived(NodeId("a"), news), StopTask(JOB, 1, 5.0))
    assert seen(history) == {"task killed because its attempt was over": 1}


@pytest.mark.parametrize(
    ("announcement", "name"),
    [
        (Announce("member.changed", "", fields={"status": "conflict"}), "conflict name seen"),
        (Announce("hold.expired", ""), "hold expired"),
        (Announce("job.yielded", ""), "yield happened"),
        (Announce("claim.used", ""), "claim used"),
    ],
)
def test_what_is_announced(history, announcement, name):
    history.perform("a", announcement)
    assert seen(history) == {name: 1}


def test_a_member_that_is_merely_alive_is_no_conflict(history):
    history.perform("a", Announce("member.changed", "", fields={"status": "alive"}))
    assert seen(history) == {}


def submit(history, name, request_id, reply):
    record = history.record()
    history.step(name, ClientCommandReceived(request_id, SubmitJob(JOB, record.holders, record.spec), 0.0))
    history.perform(name, ReplyToClient(request_id, reply))


def test_a_submit_that_is_known_elsewhere(history):
    record = history.decide(history.record())
    submit(history, "a", 1, JobAccepted(record))
    submit(history, "a", 2, JobAccepted(record, was_known=True))
    assert seen(history) == {}
    submit(history, "b", 3, JobAccepted(record, was_known=True))
    assert seen(history) == {"submit repeated at another holder found known": 1}


def test_checkpoints_that_do_not_count(history):
    history.perform("a", SendPeer(NodeId("b"), CheckpointAnswer(JOB, 1, 1, 2, is_committed=False)))
    history.step("b", ClientCommandReceived(-1, CommitCheckpoint(JOB, 1, Checkpoint("x", 1, NodeId("b"))), 0.0))
    history.perform("b", ReplyToClient(-1, Refused("conflict", "a newer attempt runs")))
    assert seen(history) == {"checkpoint refused as stale": 2}


def test_a_store_that_is_asked_for_and_gone(history):
    history.step("b", PeerMessageReceived(NodeId("a"), PrepareRequest(JOB, Ballot(1, NodeId("a"), 1), store=2)))
    assert seen(history) == {}
    history.step("b", PeerMessageReceived(NodeId("a"), PrepareRequest(JOB, Ballot(1, NodeId("a"), 1), store=99)))
    assert seen(history) == {"store refused": 1}
