"""Invariant 5: nobody starts before all have committed, nor once it is over."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.effects import StartTask
from swarmsched.ids import NodeId
from swarmsched.ledger.booking import BookingState
from swarmsched.ledger.message import CommitRequest
from swarmsched.record import Leftover, PlanState
from swarmsched.resources import Share
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.gangs import GangChecker, wanted_by
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.world import World
from tests.swarmsched.simulator.checks.testing import JOB, History, gang, gpus_of, order_of, written


def make_suite():
    decided, books = DecidedRecords(), BookingChecker()
    return Suite([decided, books, GangChecker(decided, books)])


@pytest.fixture
def history():
    return History(make_suite)


@pytest.fixture
def prepared(history):
    first = history.decide(history.record())
    return history.decide(first.updated(attempt=1, plan_state=PlanState.PREPARED, shares=gang("b", "c")))


def commit(history, prepared, name):
    history.book(name, JOB, 1, BookingState.LEASED)
    history.obey(name, CommitRequest(JOB, 1, 1, 1, NodeId("a"), order_of(prepared, name)), written(JOB, 1))


def start(history, prepared, name, until_s=float("inf"), gpus=1):
    history.perform(name, StartTask(order_of(prepared, name), gpus_of(name, gpus), until_s))


def test_a_gang_that_has_committed_as_a_whole_starts(history, prepared):
    commit(history, prepared, "b")
    commit(history, prepared, "c")
    start(history, prepared, "b")
    start(history, prepared, "c")
    gangs = history.suite.get(GangChecker)
    assert (gangs.started_count, gangs.widest_gang) == (2, 2)


def test_a_start_before_the_last_commit_is_found(history, prepared):
    commit(history, prepared, "b")
    with pytest.raises(Violation, match="with commits") as caught:
        start(history, prepared, "b")
    assert caught.value.invariant == "5"


def test_a_commit_that_was_not_told_is_none(history, prepared):
    commit(history, prepared, "b")
    history.book("c", JOB, 1, BookingState.LEASED)
    history.step("c", None, written(JOB, 1))
    with pytest.raises(Violation, match="with commits"):
        start(history, prepared, "b")


def test_a_lease_that_survived_a_restart_is_a_commit(history, prepared):
    commit(history, prepared, "b")
    history.book("c", JOB, 1, BookingState.LEASED)
    history.restart("c")
    start(history, prepared, "b")


def test_a_start_of_what_was_never_prepared_is_found(history):
    first = history.decide(history.record())
    prepared = first.updated(attempt=1, plan_state=PlanState.PREPARED, shares=gang("b"))
    history.decide(prepared, ["a"])
    commit(history, prepared, "b")
    with pytest.raises(Violation, match="never prepared"):
        start(history, prepared, "b")


def test_a_start_with_fewer_gpus_than_asked_for_is_found(history, prepared):
    commit(history, prepared, "b")
    commit(history, prepared, "c")
    with pytest.raises(Violation, match="with 0 GPUs"):
        start(history, prepared, "b", gpus=0)


def give_up(history, prepared, **changes):
    over = {"state": JobState.QUEUED, "plan_state": PlanState.ABORTED, "shares": ()}
    return history.decide(prepared.updated(**{**over, **changes}))


def test_a_start_after_the_attempt_is_over_is_found(history, prepared):
    commit(history, prepared, "b")
    commit(history, prepared, "c")
    give_up(history, prepared)
    with pytest.raises(Violation, match="after it was over") as caught:
        start(history, prepared, "b")
    assert caught.value.invariant == "5"


def test_a_leftover_may_start_until_it_is_settled_and_no_longer(history, prepared):
    commit(history, prepared, "b")
    commit(history, prepared, "c")
    over = give_up(history, prepared, leftovers=(Leftover(NodeId("b"), 1),))
    start(history, prepared, "b")
    with pytest.raises(Violation, match="after it was over"):
        start(history, prepared, "c")
    history.decide(over.updated(leftovers=()))
    with pytest.raises(Violation, match="after it was over"):
        start(history, prepared, "b")


def test_a_start_whose_time_is_over_runs_nothing(history, prepared):
    commit(history, prepared, "b")
    commit(history, prepared, "c")
    give_up(history, prepared)
    history.wait(5.0)
    start(history, prepared, "b", until_s=4.0)


def test_a_newcomer_waits_for_those_that_are_to_come_with_it_until_the_record_has_them_no_more(history, prepared):
    shares = tuple(Share(NodeId(name), 1, part=part) for part, name in enumerate("abc", 1))
    world = World(1, (1,), (2, 3))
    record = replace(prepared, state=JobState.RUNNING, shares=shares, world=world)
    newcomer = replace(order_of(record, "b"), part=2)
    parts = {share.part: share.place for share in shares}
    assert wanted_by(newcomer, record).keys() == {parts[1], parts[2], parts[3]}
    lost = replace(record, shares=shares[:2], world=replace(world, joining=(2,)))
    assert wanted_by(newcomer, lost).keys() == {parts[1], parts[2]}
    given_up = replace(record, world=replace(world, joining=()))
    assert wanted_by(newcomer, given_up).keys() == {parts[1], parts[2]}
    next_attempt = replace(lost, attempt=record.attempt + 1)
    assert wanted_by(newcomer, next_attempt) == wanted_by(newcomer, None) == dict.fromkeys(parts.values(), 1)
