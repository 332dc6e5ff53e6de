"""Invariant 8: accepted jobs and told results outlive whatever a minority of disks does."""

import pytest

from swarmsched.api import EndReason, JobState
from swarmsched.commands import JobAccepted, SubmitJob
from swarmsched.effects import Persist, ReplyToClient
from swarmsched.events import ClientCommandReceived
from swarmsched.jobs.acceptor import ROOM
from swarmsched.jobs.tombstones import ROOM as TOMBSTONES
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.durability import DurabilityChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import JOB, History


def make_suite():
    decided = DecidedRecords()
    return Suite([decided, DurabilityChecker(decided)])


@pytest.fixture
def history():
    return History(make_suite)


def acknowledge(history, record):
    history.step("a", ClientCommandReceived(1, SubmitJob(JOB, record.holders, record.spec), 0.0))
    history.perform("a", ReplyToClient(1, JobAccepted(record)))


def test_an_acknowledgement_before_a_majority_has_it_is_found(history):
    first = history.record()
    history.decide(first, ["a"])
    with pytest.raises(Violation, match="before a majority") as caught:
        acknowledge(history, first)
    assert caught.value.invariant == "8"


def test_a_minoritys_lost_disk_loses_nothing(history):
    acknowledge(history, history.decide(history.record()))
    history.wipe("b")
    history.suite.finish()


def test_a_job_that_vanished_from_the_disks_is_found(history):
    acknowledge(history, history.decide(history.record(), ["a", "b"]))
    history.wipe("b")
    history["a"].disk[ROOM].clear()
    with pytest.raises(Violation, match="was accepted") as caught:
        history.suite.finish()
    assert caught.value.invariant == "8"


def test_an_older_record_than_the_decided_one_is_a_loss_too(history):
    first = history.decide(history.record())
    acknowledge(history, first)
    history.decide(first.updated(), ["a", "b"])
    history["a"].disk[ROOM].clear()
    history["b"].disk[ROOM].clear()
    with pytest.raises(Violation, match="was accepted"):
        history.suite.finish()


def test_the_loss_of_a_majority_excuses(history):
    acknowledge(history, history.decide(history.record()))
    history.wipe("b")
    history.wipe("c")
    history["a"].disk.clear()
    history.suite.finish()
    assert JOB in history.suite.get(DurabilityChecker).excused


def test_losses_are_forgiven_when_the_holder_was_replaced(history):
    first = history.decide(history.record())
    acknowledge(history, first)
    history.wipe("b")
    history.decide(first.updated(holders=history.holders))  # b again, with its new store
    history.wipe("c")
    history["a"].disk.clear()
    history["b"].disk.clear()
    with pytest.raises(Violation, match="was accepted"):
        history.suite.finish()


def end(record, **changes):
    return record.updated(state=JobState.ENDED, end_reason=EndReason.COMPLETED, **changes)


def test_a_result_that_changes_after_the_end_is_found(history):
    ended = history.decide(end(history.decide(history.record())))
    history.decide(ended.updated(holders=history.holders[:2]))
    with pytest.raises(Violation, match="changed after its end") as caught:
        history.decide(ended.updated().updated(exit_code=1))
    assert caught.value.invariant == "8"


def test_a_result_may_be_lost_with_two_of_three_machines_once_an_operator_goes_on_without_them(history):
    first = history.decide(history.record())
    history.decide(end(first))
    history["a"].is_lost = True
    history.wipe("b")
    history.decide(first.updated(epoch=1001, is_forced=True, holders=history.holders[2:]), ["c"])
    assert list(history.suite.get(DurabilityChecker).excused) == [JOB]


def test_a_forced_record_that_undoes_a_result_while_a_majority_lives_is_found(history):
    first = history.decide(history.record())
    history.decide(end(first))
    history["a"].is_lost = True
    with pytest.raises(Violation, match="changed after its end"):
        history.decide(first.updated(epoch=1001, is_forced=True, holders=history.holders[2:]), ["c"])


def test_a_holder_that_forgets_an_open_job_is_found(history):
    history.decide(history.record())
    with pytest.raises(Violation, match="forgot"):
        history.step("b", None, Persist(ROOM, JOB, None))


def drop_everywhere(history):
    for name in "abc":
        history.step(name, None, Persist(ROOM, JOB, None))
        history[name].disk[ROOM].clear()


def test_a_holder_may_drop_an_ended_job_if_its_tombstone_stays(history):
    first = history.decide(history.record())
    acknowledge(history, first)
    history.decide(end(first))
    drop_everywhere(history)
    history["b"].disk[TOMBSTONES] = {JOB: b"0"}
    history.suite.finish()


def test_an_ended_job_that_leaves_no_trace_is_found(history):
    first = history.decide(history.record())
    acknowledge(history, first)
    history.decide(end(first))
    drop_everywhere(history)
    with pytest.raises(Violation, match="was accepted"):
        history.suite.finish()
