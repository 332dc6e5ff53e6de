"""A task may stand still while its owner or its holders cannot be heard, and for a few seconds more."""

import pytest
from msgspec.structs import replace

from swarmsched.record import PlanState
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.freezes import ACTING_S, FROZEN_S, FreezeChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.tasks import RankPlan, RunningTask, TaskChange
from tests.swarmsched.simulator.checks.testing import History, gang, order_of

LONG_S = FROZEN_S + 3.0


def make_suite():
    decided = DecidedRecords()
    return Suite([decided, FreezeChecker(decided)])


@pytest.fixture
def history():
    return History(make_suite)


def freeze(history):
    record = history.decide(history.record(attempt=1, plan_state=PlanState.LAUNCHED, shares=gang("a")))
    for name in "abc":
        history[name].node.held = record
    task = RunningTask(order_of(record, "a"), (), {0: RankPlan(1.0)})
    history.suite.task_changed(history["a"].host, task, TaskChange.FROZEN)
    return task


def test_a_task_that_stays_frozen_while_all_answer_is_found(history):
    freeze(history)
    with pytest.raises(Violation, match="is frozen on a for") as caught:
        history.wait(LONG_S)
    assert caught.value.invariant == "frozen"


@pytest.mark.parametrize("is_old", [False, True], ids=["no record", "an old record"])
def test_holders_without_the_record_are_given_the_time_that_a_new_shepherd_takes(history, is_old):
    """Of those with an old one some would let the ranks go on that others end."""
    freeze(history)
    for name in "bc":
        node = history[name].node
        node.held = replace(node.held, version=node.held.version - 1) if is_old else None
    history.wait(ACTING_S + FROZEN_S - 1.0)
    with pytest.raises(Violation):
        history.wait(3.0)


def test_so_are_those_of_whom_one_alone_has_accepted_that_it_is_over(history):
    freeze(history)
    history["b"].is_up = False
    running = history["c"].node.held
    history["c"].node.held = replace(running, version=running.version + 1, plan_state=PlanState.ABORTED)
    history.wait(ACTING_S + FROZEN_S - 1.0)
    with pytest.raises(Violation):
        history.wait(3.0)


def test_a_majority_that_agrees_need_not_wait_for_him(history):
    freeze(history)
    running = history["c"].node.held
    history["c"].node.held = replace(running, version=running.version + 1, plan_state=PlanState.ABORTED)
    with pytest.raises(Violation):
        history.wait(LONG_S)


def test_one_of_three_holders_may_be_down(history):
    freeze(history)
    history["c"].is_up = False
    with pytest.raises(Violation):
        history.wait(LONG_S)


@pytest.mark.parametrize("change", [TaskChange.THAWED, TaskChange.ENDED])
def test_a_task_that_goes_on_or_ends_in_time_is_right(history, change):
    task = freeze(history)
    history.wait(FROZEN_S - 1.0)
    history.suite.task_changed(history["a"].host, task, change)
    history.wait(LONG_S)


def stop_two(history):
    for name in "bc":
        history[name].is_up = False


def wipe_two(history):
    for name in "bc":
        history[name].storage.store_id = 9


@pytest.mark.parametrize(
    "hinder",
    [
        lambda history: setattr(history["a"], "is_paused", True),
        lambda history: setattr(history["a"], "is_connected", False),
        lambda history: setattr(history["a"].storage, "fsync_median_s", 1.0),
        stop_two,
        wipe_two,
        lambda history: history.suite.name_shared(history["a"].node_id),
    ],
    ids=["owner paused", "cut off", "slow disk", "two holders down", "two disks lost", "shared name"],
)
def test_a_task_that_nobody_may_let_go_on_stays_frozen(history, hinder):
    freeze(history)
    hinder(history)
    history.wait(LONG_S)


def test_what_was_hindered_for_a_moment_has_its_time_anew(history):
    freeze(history)
    history.wait(FROZEN_S - 2.0)
    history["a"].is_paused = True
    history.wait(1.0)
    history["a"].is_paused = False
    history.wait(FROZEN_S - 1.0)
    with pytest.raises(Violation):
        history.wait(3.0)
