"""Invariant 9: a yes stands until its deadline."""

import pytest

from swarmsched.api import JobState
from swarmsched.effects import Persist
from swarmsched.events import PeerMessageReceived
from swarmsched.ids import NodeId
from swarmsched.jobs.acceptor import ROOM, Slot
from swarmsched.jobs.message import Ballot
from swarmsched.ledger.booking import BookingState
from swarmsched.ledger.message import HoldRequest, Refusal, ReleaseRequest
from swarmsched.resources import Demand
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.holds import HoldChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.wire.codec import encode_value
from tests.swarmsched.simulator.checks.testing import JOB, History, written


def make_suite():
    decided, books = DecidedRecords(), BookingChecker()
    return Suite([decided, books, HoldChecker(decided, books)])


@pytest.fixture
def history():
    history = History(make_suite)
    hold(history, 1)
    return history


def request(attempt, command_id=1):
    return HoldRequest(JOB, 1, attempt, command_id, NodeId("a"), 1, Demand(gpus=1), "fifo", (1,), False, ttl_s=5.0)


def hold(history, attempt, command_id=1):
    history.book("b", JOB, attempt, BookingState.HELD)
    history.obey("b", request(attempt, command_id), written(JOB, attempt))


def withdraw(history, event=None, *more):
    history.unbook("b", JOB, 1)
    history.step("b", event, *more, written(JOB, 1, is_there=False))


def obey_release(history, attempt):
    release = ReleaseRequest(JOB, 1, attempt, 2, NodeId("a"))
    history.unbook("b", JOB, 1)
    history.obey("b", release, written(JOB, 1, is_there=False))


def test_a_yes_that_is_withdrawn_early_is_found(history):
    history.wait(4.9)
    with pytest.raises(Violation, match="too early, on TimerFired") as caught:
        withdraw(history)
    assert caught.value.invariant == "9"


def test_a_yes_ends_at_its_deadline(history):
    history.wait(5.0)
    withdraw(history)
    assert history.suite.get(HoldChecker).kept_count == 1


def test_its_own_release_ends_it_and_that_of_a_later_attempt(history):
    obey_release(history, 1)
    hold(history, 1, command_id=5)
    obey_release(history, 3)


def test_the_release_of_an_earlier_attempt_does_not(history):
    history.book("b", JOB, 2, BookingState.HELD, first=1)
    history.obey("b", request(2), written(JOB, 2))
    release = ReleaseRequest(JOB, 1, 1, 3, NodeId("a"))
    history.unbook("b", JOB, 2)
    with pytest.raises(Violation, match="on ReleaseRequest"):
        history.obey("b", release, written(JOB, 2, is_there=False))


def test_a_hold_for_a_later_attempt_replaces_it(history):
    history.unbook("b", JOB, 1)
    history.book("b", JOB, 2, BookingState.HELD)
    history.obey("b", request(2), written(JOB, 1, is_there=False), written(JOB, 2))


def test_a_commit_turns_it_into_a_lease(history):
    history.book("b", JOB, 1, BookingState.LEASED)
    history.step("b", None, written(JOB, 1))
    withdraw(history)


def test_another_command_renews_it_and_a_copy_does_not(history):
    history.wait(3.0)
    hold(history, 1, command_id=2)
    history.wait(1.9)
    hold(history, 1, command_id=2)
    history.wait(3.0)
    with pytest.raises(Violation, match=r"0\.100 s too early"):
        withdraw(history)


def test_the_time_of_a_hold_runs_while_the_owner_makes_room_for_it():
    history = History(make_suite)
    history.step("b", PeerMessageReceived(NodeId("a"), request(1)))
    history.wait(0.5)
    hold(history, 1)
    history.wait(4.5)
    withdraw(history)
    assert history.suite.get(HoldChecker).kept_count == 1


def test_the_time_of_a_hold_that_was_refused_first_runs_from_its_repetition():
    history = History(make_suite)
    history.obey("b", request(1), refusal=Refusal.DOES_NOT_FIT)
    history.wait(1.0)
    hold(history, 1)
    history.wait(4.5)
    with pytest.raises(Violation, match=r"0\.500 s too early"):
        withdraw(history)


def test_a_hold_that_a_restart_forgets_is_found(history):
    history.unbook("b", JOB, 1)
    with pytest.raises(Violation, match="lost its yes"):
        history.restart("b")


def test_a_restart_gives_it_its_full_time_again(history):
    history.wait(4.0)
    history.restart("b")
    history.wait(4.0)
    with pytest.raises(Violation, match=r"1\.000 s too early"):
        withdraw(history)


def test_a_lost_disk_withdraws_nothing(history):
    history.unbook("b", JOB, 1)
    history.wipe("b")


def test_a_yes_that_was_not_told_binds_nobody():
    history = History(make_suite)
    history.book("b", JOB, 1, BookingState.HELD)
    history.step("b", None, written(JOB, 1))
    withdraw(history)


def test_the_end_of_the_job_ends_it_even_in_the_step_that_decides_it(history):
    first = history.decide(history.record())
    ended = first.updated(state=JobState.ENDED)
    slot = Slot(JOB, Ballot(9, NodeId("b"), 1), Ballot(9, NodeId("b"), 1), ended)
    withdraw(history, None, Persist(ROOM, JOB, encode_value(Slot, slot)))
    hold(history, 1, command_id=7)
    history.decide(ended)
    withdraw(history)
