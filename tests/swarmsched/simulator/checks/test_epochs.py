"""Invariant 2: a told epoch stays, and lower ones change nothing."""

import pytest

from swarmsched.effects import Persist, SendPeer, SignalTask
from swarmsched.events import PeerMessageReceived
from swarmsched.ids import NodeId
from swarmsched.ledger.booking import BookingState
from swarmsched.ledger.message import Refusal, ReleaseRequest, SignalRequest
from swarmsched.simulator.checks.epochs import EpochChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import JOB, History, fence_dropped, written


@pytest.fixture
def history():
    history = History(lambda: Suite([EpochChecker()]))
    history["b"].node.ledger.epochs[JOB] = 5
    history.obey("b", release(5, 1))
    return history


def release(epoch, command_id):
    return ReleaseRequest(JOB, epoch, 1, command_id, NodeId("a"))


def test_a_lower_command_that_is_refused_is_as_it_should_be(history):
    history.obey("b", release(4, 2), refusal=Refusal.STALE_EPOCH)
    assert history.suite.get(EpochChecker).refused_count == 1


def test_a_lower_command_that_is_obeyed_is_found(history):
    with pytest.raises(Violation, match="obeys a lower one") as caught:
        history.obey("b", release(4, 2))
    assert caught.value.invariant == "2"


@pytest.mark.parametrize(
    "effect",
    [written(JOB, 1), Persist("task", f"{JOB}/1", b""), SignalTask(JOB, 1, 15)],
    ids=["booking", "task", "signal"],
)
def test_a_lower_command_that_changes_something_is_found(history, effect):
    command = SignalRequest(JOB, 4, 1, 2, NodeId("a"), 15)
    with pytest.raises(Violation, match="with a lower one"):
        history.obey("b", command, effect, refusal=Refusal.STALE_EPOCH)


def test_a_lower_command_of_another_owner_is_none_of_its_business(history):
    history.obey("c", release(4, 2))


def test_an_epoch_that_falls_is_found_at_the_next_command(history):
    history["b"].node.ledger.epochs[JOB] = 3
    with pytest.raises(Violation, match="fell from 5 to 3"):
        history.step("b", PeerMessageReceived(NodeId("a"), release(5, 2)))


def test_an_epoch_that_a_restart_forgets_is_found(history):
    history["b"].node.ledger.epochs.clear()
    with pytest.raises(Violation, match="fell from 5 to 0"):
        history.restart("b")


def test_an_epoch_that_was_told_to_nobody_may_be_forgotten(history):
    history["b"].node.ledger.epochs[JOB] = 6
    history.step("b", PeerMessageReceived(NodeId("a"), release(6, 2)), SendPeer(NodeId("a"), "not performed"))
    history["b"].node.ledger.epochs[JOB] = 5
    history.restart("b")
    history.suite.look()


def test_a_lost_disk_may_forget(history):
    history["b"].node.ledger.epochs.clear()
    history.wipe("b")
    history.obey("b", release(4, 2))


def test_a_fence_may_be_dropped_when_nothing_is_booked(history):
    history["b"].node.ledger.epochs.clear()
    history.step("b", None, fence_dropped(JOB))
    history.obey("b", release(4, 2))


def test_a_fence_that_is_dropped_under_a_booking_is_found(history):
    history.book("b", JOB, 1, BookingState.LEASED, epoch=5)
    with pytest.raises(Violation, match="forgot the epoch"):
        history.step("b", None, fence_dropped(JOB))
