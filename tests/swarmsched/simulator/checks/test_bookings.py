"""Invariant 1: what is booked is there, and is booked once."""

import pytest
from msgspec.structs import force_setattr

from swarmsched.effects import StartTask
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.booking import BookingState
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.tasks import RankPlan, RunningTask
from tests.swarmsched.simulator.checks.testing import JOB, History, fence_dropped, gang, gpus_of, order_of, written

OTHER = JobId(JOB[:-1] + "q")


@pytest.fixture
def history():
    return History(lambda: Suite([BookingChecker()]))


def start(history, gpus=1):
    record = history.record(attempt=1, shares=gang("b"))
    return StartTask(order_of(record, "b"), gpus_of(NodeId("b"), gpus))


def test_a_gpu_that_is_booked_twice_is_found(history):
    history.book("b", JOB, 1, BookingState.LEASED)
    history.step("b", None, written(JOB, 1))
    history.book("b", OTHER, 1, BookingState.HELD)
    with pytest.raises(Violation, match="is booked for") as caught:
        history.step("b", None, written(OTHER, 1))
    assert caught.value.invariant == "1"


def test_a_gpu_may_change_hands_within_one_step(history):
    history.book("b", JOB, 1, BookingState.HELD)
    history.step("b", None, written(JOB, 1))
    history.unbook("b", JOB, 1)
    history.book("b", OTHER, 1, BookingState.HELD)
    history.step("b", None, written(OTHER, 1), written(JOB, 1, is_there=False))
    assert history.suite.get(BookingChecker).busiest_count == 1


def test_a_gpu_that_the_node_never_had_is_found(history):
    entry = history.book("b", JOB, 1, BookingState.HELD)
    force_setattr(entry, "gpus", ("elsewhere",))
    with pytest.raises(Violation, match="never had"):
        history.step("b", None, written(JOB, 1))


def test_more_cores_than_there_are_are_found(history):
    entry = history.book("b", JOB, 1, BookingState.HELD)
    force_setattr(entry, "cpus", 9)
    with pytest.raises(Violation, match="9 cores"):
        history.step("b", None, written(JOB, 1))


def test_bookings_that_were_never_written_are_found_by_the_full_check(history):
    history.step("b", None, fence_dropped(JOB))
    history.suite.look()
    history.book("b", JOB, 1, BookingState.HELD)
    with pytest.raises(Violation, match="without a write"):
        history.suite.look()


def test_a_start_needs_a_lease_on_those_gpus(history):
    history.book("b", JOB, 1, BookingState.HELD)
    history.step("b", None, written(JOB, 1))
    with pytest.raises(Violation, match="starts"):
        history.perform("b", start(history))
    history.book("b", JOB, 1, BookingState.LEASED)
    history.step("b", None, written(JOB, 1))
    history.perform("b", start(history))
    with pytest.raises(Violation, match="starts"):
        history.perform("b", start(history, gpus=2))


def test_a_start_that_waited_for_the_disk_may_find_its_lease_released(history):
    history.book("b", JOB, 1, BookingState.LEASED)
    history.step("b", None, written(JOB, 1), start(history))
    history.book("b", JOB, 1, BookingState.DRAINING)
    history.step("b", None, written(JOB, 1))
    history.perform("b", start(history))
    history.unbook("b", JOB, 1)
    history.step("b", None, written(JOB, 1, is_there=False))
    with pytest.raises(Violation, match="starts"):
        history.perform("b", start(history))


def test_a_start_that_is_ordered_after_the_release_is_found(history):
    history.book("b", JOB, 1, BookingState.DRAINING)
    with pytest.raises(Violation, match="starts"):
        history.step("b", None, written(JOB, 1), start(history))


def test_a_start_where_processes_of_another_are_left_is_found(history):
    history.book("b", JOB, 1, BookingState.LEASED)
    history.step("b", None, written(JOB, 1))
    other = order_of(history.record(attempt=7, shares=gang("b")), "b")
    history["b"].tasks.running.append(RunningTask(other, ("b-0",), {0: RankPlan(1.0)}))
    with pytest.raises(Violation, match="on GPUs of"):
        history.perform("b", start(history))


def test_a_restart_reads_the_books_anew(history):
    history.book("b", JOB, 1, BookingState.HELD)
    history.step("b", None, written(JOB, 1))
    history.unbook("b", JOB, 1)  # its write never reached the disk, say: the new life knows what the disk knew
    history.book("b", OTHER, 1, BookingState.HELD)
    history.restart("b")
    history.suite.look()


def test_a_restart_that_finds_other_bookings_than_its_disk_has_is_found(history):
    history.book("b", JOB, 1, BookingState.LEASED)
    history.step("b", None, written(JOB, 1))
    history["b"].disk["ledger"] = {}
    with pytest.raises(Violation, match="restored"):
        history.restart("b")


def test_a_lease_that_is_written_as_a_hold_is_found_by_the_full_check(history):
    history.book("b", JOB, 1, BookingState.HELD)
    history.step("b", None, written(JOB, 1))
    history.book("b", JOB, 1, BookingState.LEASED)
    with pytest.raises(Violation, match="without a write"):
        history.suite.look()
