"""Invariant 10: attained service never falls and counts nothing twice."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.ids import NodeId
from swarmsched.record import PlanState
from swarmsched.resources import Share
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.service import ServiceChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.tasks import RankPlan, RunningTask, TaskChange
from tests.swarmsched.simulator.checks.testing import JOB, History, order_of

TWO = (Share(NodeId("b"), 2),)


def make_suite():
    decided = DecidedRecords()
    return Suite([decided, ServiceChecker(decided)])


@pytest.fixture
def history():
    """Attempt 1 has run on two GPUs for 10 s."""
    history = History(make_suite)
    run(history, 1)
    history.wait(10.0)
    return history


def run(history, attempt):
    record = history.decide(
        history.record(
            version=2 * attempt,
            attempt=attempt,
            plan_state=PlanState.LAUNCHED,
            state=JobState.RUNNING,
            shares=TWO,
        )
    )
    task = RunningTask(order_of(record, "b"), (), {0: RankPlan(1.0)})
    history.suite.task_changed(history["b"].host, task, TaskChange.STARTED)


def give_up(history, attained_gpu_s, attempt=1):
    return history.decide(
        history.record(
            version=2 * attempt + 1, attempt=attempt, plan_state=PlanState.ABORTED, attained_gpu_s=attained_gpu_s
        )
    )


def test_what_the_gpus_were_there_for_counts(history):
    give_up(history, 20.0)


def test_an_attempt_that_only_the_lost_holders_had_given_up_goes_on(history):
    running = history.suite.get(DecidedRecords).last(JOB)
    give_up(history, 20.0)
    history.wait(30.0)
    forced = history.decide(replace(running, epoch=1001, is_forced=True))
    history.decide(forced.updated(plan_state=PlanState.ABORTED, attained_gpu_s=80.0))


def test_more_than_the_gpus_were_there_for_is_found(history):
    with pytest.raises(Violation, match="of at most") as caught:
        give_up(history, 40.0)
    assert caught.value.invariant == "10"


def test_an_attempt_that_is_counted_twice_is_found(history):
    over = give_up(history, 20.0)
    with pytest.raises(Violation, match="of at most"):
        history.decide(over.updated(attained_gpu_s=40.0))


def test_time_after_the_end_of_an_attempt_counts_for_nobody(history):
    over = give_up(history, 0.0)
    history.wait(1_000.0)
    with pytest.raises(Violation, match="of at most"):
        history.decide(over.updated(attained_gpu_s=500.0))


def test_service_that_falls_is_found(history):
    over = give_up(history, 20.0)
    with pytest.raises(Violation, match="fell from") as caught:
        history.decide(over.updated(attained_gpu_s=19.0))
    assert caught.value.invariant == "10"


def test_the_next_attempt_adds_its_own(history):
    give_up(history, 20.0)
    history.wait(100.0)
    history.decide(history.record(version=4, attempt=1, plan_state=PlanState.ABORTED, attained_gpu_s=20.0))
    history.decide(history.record(version=5, attempt=2, plan_state=PlanState.LAUNCHED, shares=TWO, attained_gpu_s=20.0))
    record = history.record(attempt=2, shares=TWO)
    task = RunningTask(order_of(record, "b"), (), {0: RankPlan(1.0)})
    history.suite.task_changed(history["b"].host, task, TaskChange.STARTED)
    history.wait(5.0)
    history.decide(history.record(version=6, attempt=2, plan_state=PlanState.ABORTED, attained_gpu_s=30.0))
