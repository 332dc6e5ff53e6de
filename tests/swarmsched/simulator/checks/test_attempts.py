"""No two attempts of a job at once, wherever and however they come to run."""

import pytest

from swarmsched.effects import StartTask
from swarmsched.simulator.checks.attempts import AttemptChecker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.tasks import RankPlan, RunningTask, TaskChange
from tests.swarmsched.simulator.checks.testing import History, gang, order_of


def make_suite():
    decided = DecidedRecords()
    return Suite([decided, AttemptChecker(decided)])


@pytest.fixture
def history():
    return History(make_suite)


def task(history, name, attempt, until_s=float("inf")):
    order = order_of(history.record(attempt=attempt, shares=gang("a", "b", "c")), name)
    return RunningTask(order, (), {0: RankPlan(1.0)}, until_s)


def change(history, name, what, which):
    history.suite.task_changed(history[name].host, what, which)


def test_one_attempt_on_several_machines_is_a_gang(history):
    for name in "abc":
        change(history, name, task(history, name, 1), TaskChange.STARTED)


def test_a_second_attempt_while_the_first_runs_elsewhere_is_found(history):
    change(history, "a", task(history, "a", 1), TaskChange.STARTED)
    with pytest.raises(Violation, match="attempt 2 is started on b while there runs attempt 1 on a") as caught:
        change(history, "b", task(history, "b", 2), TaskChange.STARTED)
    assert caught.value.invariant == "attempts"


def test_a_frozen_attempt_does_not_run_until_it_is_thawed(history):
    first = task(history, "a", 1)
    change(history, "a", first, TaskChange.STARTED)
    change(history, "a", first, TaskChange.FROZEN)
    change(history, "b", task(history, "b", 2), TaskChange.STARTED)
    with pytest.raises(Violation, match="attempt 1 is thawed on a"):
        change(history, "a", first, TaskChange.THAWED)


def test_an_attempt_that_has_ended_makes_room(history):
    first = task(history, "a", 1)
    change(history, "a", first, TaskChange.STARTED)
    change(history, "a", first, TaskChange.ENDED)
    change(history, "b", task(history, "b", 2), TaskChange.STARTED)


def test_a_start_without_time_left_does_not_run(history):
    change(history, "b", task(history, "b", 2), TaskChange.STARTED)
    history.wait(10.0)
    change(history, "a", task(history, "a", 1, until_s=9.0), TaskChange.STARTED)


def test_the_full_check_finds_what_no_change_told_of(history):
    history["a"].tasks.running.append(task(history, "a", 1))
    history.suite.look()
    history["b"].tasks.running.append(task(history, "b", 2))
    with pytest.raises(Violation, match="at once"):
        history.suite.look()


def test_another_attempt_without_a_cause_is_found(history):
    first = history.decide(history.record())
    history.perform("a", StartTask(task(history, "a", 1).order, ()))
    history.perform("b", StartTask(task(history, "b", 1).order, ()))
    history.decide(first.updated(restarts=1))
    history.perform("a", StartTask(task(history, "a", 2).order, ()))
    with pytest.raises(Violation, match="without need") as caught:
        history.perform("a", StartTask(task(history, "a", 3).order, ()))
    assert caught.value.invariant == "attempts"


def test_a_forced_recovery_goes_on_with_an_attempt_that_was_left_and_begins_the_count_anew(history):
    later = history.record(attempt=2)
    history.decide(later)
    history.perform("a", StartTask(task(history, "a", 2).order, ()))
    history.decide(later.updated(epoch=later.epoch + 1_000, attempt=1, is_forced=True))
    history.perform("b", StartTask(task(history, "b", 1).order, ()))
    with pytest.raises(Violation, match="without need"):
        history.perform("b", StartTask(task(history, "b", 3).order, ()))
