"""The machines' own checks are asked in turn."""

import pytest

from swarmsched.simulator.checks.machines import TIMERS_MOST, MachineChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import History


def test_a_machine_that_contradicts_itself_is_found_at_the_next_check():
    history = History(lambda: Suite([MachineChecker(interval=3)]))
    history["b"].node.fault = "a GPU is booked twice"
    history.step("a")
    history.step("b")
    with pytest.raises(Violation, match="b: a GPU is booked twice") as caught:
        history.step("b")
    assert caught.value.invariant == "machines"


def test_a_sound_machine_goes_on():
    history = History(lambda: Suite([MachineChecker(interval=1)]))
    history.step("a")
    history.step("b")


def test_a_machine_that_is_always_due_is_found_within_a_second():
    history = History(lambda: Suite([MachineChecker()]))
    for _ in range(TIMERS_MOST // 2):
        history.step("a")
        history.step("b")
        history.wait(0.001)
    history.wait(1.0)
    for _ in range(TIMERS_MOST):
        history.step("a")
    with pytest.raises(Violation, match="a was due 501 times within a virtual second") as caught:
        history.step("a")
    assert caught.value.invariant == "spins"
