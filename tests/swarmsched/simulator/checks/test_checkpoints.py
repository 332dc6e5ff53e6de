"""Invariant 6: the latest checkpoint is the register's, and an attempt that was succeeded commits none."""

import pytest

from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CheckpointCommitted, CommitCheckpoint
from swarmsched.effects import ReplyToClient, SendPeer, StartTask
from swarmsched.events import ClientCommandReceived, PeerMessageReceived
from swarmsched.ids import NodeId
from swarmsched.ledger.message import CheckpointAnswer, CheckpointRequest
from swarmsched.record import PlanState
from swarmsched.simulator.checks.checkpoints import CheckpointChecker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import JOB, History, gang, order_of


def make_suite():
    decided = DecidedRecords()
    return Suite([decided, CheckpointChecker(decided)])


@pytest.fixture
def history():
    return History(make_suite)


def prepare(history, record, attempt):
    return history.decide(record.updated(attempt=attempt, plan_state=PlanState.PREPARED, shares=gang("b")))


def saved(attempt, name="step-1"):
    return Checkpoint(name, attempt, NodeId("b"))


def test_the_present_attempt_commits_and_the_next_resumes_from_it(history):
    first = prepare(history, history.decide(history.record()), 1)
    second = prepare(history, history.decide(first.updated(checkpoint=saved(1))), 2)
    history.perform("b", StartTask(order_of(second, "b"), ()))
    assert history.suite.get(CheckpointChecker).committed_count == 1


def test_a_commit_of_an_attempt_that_was_succeeded_is_found(history):
    first = prepare(history, history.decide(history.record()), 1)
    second = prepare(history, first, 2)
    with pytest.raises(Violation, match="2 is prepared already") as caught:
        history.decide(second.updated(checkpoint=saved(1)))
    assert caught.value.invariant == "6"


def test_the_earlier_attempts_checkpoint_may_stay(history):
    first = prepare(history, history.decide(history.record()), 1)
    second = prepare(history, history.decide(first.updated(checkpoint=saved(1))), 2)
    third = history.decide(second.updated(reason="runs"))
    history.decide(third.updated(checkpoint=saved(2)))


def test_an_attempt_that_resumes_from_something_else_is_found(history):
    first = prepare(history, history.decide(history.record()), 1)
    second = prepare(history, history.decide(first.updated(checkpoint=saved(1))), 2)
    renamed = second.updated(checkpoint=saved(1, "latest"))
    with pytest.raises(Violation, match="resumes from") as caught:
        history.perform("b", StartTask(order_of(renamed, "b"), ()))
    assert caught.value.invariant == "6"


@pytest.mark.parametrize("is_decided", [True, False])
def test_an_owner_is_told_of_a_commit_only_when_it_is_decided(history, is_decided):
    first = prepare(history, history.decide(history.record()), 1)
    request = CheckpointRequest(JOB, 1, 7, NodeId("b"), saved(1))
    history.step("a", PeerMessageReceived(NodeId("b"), request))
    history.decide(first.updated(checkpoint=saved(1)), "abc" if is_decided else "a")
    answer = SendPeer(NodeId("b"), CheckpointAnswer(JOB, 1, 7, 1, is_committed=True))
    if is_decided:
        history.perform("a", answer)
    else:
        with pytest.raises(Violation, match="no decided record") as caught:
            history.perform("a", answer)
        assert caught.value.invariant == "6"


def test_a_rank_that_is_told_of_a_commit_that_nobody_decided_is_found(history):
    history.decide(history.record())
    history.step("b", ClientCommandReceived(-1, CommitCheckpoint(JOB, 1, saved(1)), 0.0))
    with pytest.raises(Violation, match="no decided record"):
        history.perform("b", ReplyToClient(-1, CheckpointCommitted(saved(1), 1)))


def wishes(history, *names, node="b"):
    for number, name in enumerate(names):
        history.step(node, ClientCommandReceived(-1 - number, CommitCheckpoint(JOB, 1, saved(1, name)), 0.0))


def test_an_older_checkpoint_that_replaces_a_newer_one_is_found(history):
    first = prepare(history, history.decide(history.record()), 1)
    wishes(history, "step-1", "step-2")
    second = history.decide(first.updated(checkpoint=saved(1, "step-2")))
    with pytest.raises(Violation, match="step-1 of attempt 1 replaces the newer step-2") as caught:
        history.decide(second.updated(checkpoint=saved(1, "step-1")))
    assert caught.value.invariant == "6"


def test_a_newer_checkpoint_replaces_an_older_one_and_ranks_on_other_machines_have_no_order(history):
    first = prepare(history, history.decide(history.record()), 1)
    wishes(history, "step-1", "step-2")
    wishes(history, "other-1", node="a")
    second = history.decide(first.updated(checkpoint=saved(1, "step-1")))
    third = history.decide(second.updated(checkpoint=saved(1, "step-2")))
    history.decide(third.updated(checkpoint=Checkpoint("other-1", 1, NodeId("a"))))


def test_a_step_that_falls_within_an_attempt_is_found_whoever_wrote_it(history):
    first = prepare(history, history.decide(history.record()), 1)
    second = history.decide(first.updated(checkpoint=saved(1, "step-9")))
    with pytest.raises(Violation, match="step-4 of attempt 1 replaces the newer step-9") as caught:
        history.decide(second.updated(checkpoint=Checkpoint("step-4", 1, NodeId("a"))))
    assert caught.value.invariant == "6"


def test_what_an_operator_forces_may_be_older(history):
    first = prepare(history, history.decide(history.record()), 1)
    wishes(history, "step-1", "step-2")
    second = history.decide(first.updated(checkpoint=saved(1, "step-2")))
    forced = history.decide(second.updated(checkpoint=saved(1, "step-1"), epoch=second.epoch + 1000, is_forced=True))
    history.decide(forced.updated(checkpoint=saved(1, "step-3")))


def test_an_operator_may_force_an_attempt_that_one_holder_had_accepted_and_it_resumes_from_its_own_checkpoint(history):
    first = prepare(history, history.decide(history.record()), 1)
    second = history.decide(first.updated(checkpoint=saved(1)))
    prepared = second.updated(attempt=2, shares=gang("b"), epoch=second.epoch + 1000, is_forced=True)
    forced = history.decide(prepared)
    history.perform("b", StartTask(order_of(forced, "b"), ()))
    with pytest.raises(Violation, match="resumes from"):
        history.perform("b", StartTask(order_of(forced.updated(checkpoint=None), "b"), ()))


def test_an_operator_may_force_an_attempt_from_before_its_first_checkpoint(history):
    first = history.decide(prepare(history, history.decide(history.record()), 1).updated(checkpoint=saved(1)))
    second = history.decide(first.updated(attempt=2, shares=gang("b"), plan_state=PlanState.PREPARED))
    newest = history.decide(second.updated(checkpoint=saved(2)))
    left = newest.updated(checkpoint=saved(1), epoch=newest.epoch + 1000, is_forced=True)
    forced = history.decide(left)
    history.perform("b", StartTask(order_of(forced, "b"), ()))
