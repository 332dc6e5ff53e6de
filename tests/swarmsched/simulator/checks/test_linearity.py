"""Invariant 4: the register goes forward, and no client is told of less than another was."""

import pytest
from msgspec.structs import replace

from swarmsched.commands import CancelJob, JobAccepted, SubmitJob
from swarmsched.effects import ReplyToClient
from swarmsched.events import ClientCommandReceived, LoopLagged
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import JOB, History


@pytest.fixture
def history():
    return History()


def ask(history, name, request_id, command=None):
    history.step(name, ClientCommandReceived(request_id, command or CancelJob(JOB), 0.0))


def tell(history, name, request_id, record):
    history.perform(name, ReplyToClient(request_id, JobAccepted(record)))


def test_a_fork_of_the_register_is_found(history):
    first = history.decide(history.record())
    history.decide(first.updated(reason="one"))
    with pytest.raises(Violation, match="went from") as caught:
        history.decide(first.updated(reason="another"))
    assert caught.value.invariant == "4"


def test_a_register_that_goes_back_is_found(history):
    first = history.decide(history.record())
    history.decide(first.updated(epoch=2, shepherd="b"))
    with pytest.raises(Violation, match="went from"):
        history.decide(first.updated(reason="of the old epoch").updated().updated())


def test_a_changed_specification_is_found(history):
    first = history.decide(history.record())
    with pytest.raises(Violation, match="submitted_utc_s"):
        history.decide(first.updated(submitted_utc_s=5.0))


def test_a_client_that_is_told_what_is_not_decided_is_found(history):
    first = history.decide(history.record())
    ask(history, "a", 1)
    with pytest.raises(Violation, match="newest decided") as caught:
        tell(history, "a", 1, first.updated(reason="hoped for"))
    assert caught.value.invariant == "4"


def test_a_client_that_is_told_less_than_another_was_before_it_asked_is_found(history):
    first = history.decide(history.record())
    second = history.decide(first.updated())
    ask(history, "a", 1)
    tell(history, "a", 1, second)
    history.wait(1.0)
    ask(history, "b", 2)
    with pytest.raises(Violation, match="before it asked") as caught:
        tell(history, "b", 2, first)
    assert caught.value.invariant == "4"


def test_a_client_that_asked_before_may_be_told_the_older_state(history):
    first = history.decide(history.record())
    second = history.decide(first.updated())
    ask(history, "b", 2)
    history.wait(1.0)
    ask(history, "a", 1)
    tell(history, "a", 1, second)
    tell(history, "b", 2, first)


def test_a_request_that_waited_at_a_paused_agent_may_have_been_made_at_any_time_of_the_pause(history):
    first = history.decide(history.record())
    second = history.decide(first.updated())
    history.wait(10.0)
    ask(history, "a", 1)
    tell(history, "a", 1, second)
    history.wait(10.0)
    history.step("b", LoopLagged(15.0))
    ask(history, "b", 2)
    tell(history, "b", 2, first)


def test_a_dry_run_may_show_what_was_never_decided(history):
    record = history.record()
    ask(history, "a", 1, SubmitJob(JOB, record.holders, record.spec, is_dry_run=True))
    tell(history, "a", 1, record)


def test_a_forced_recovery_may_take_versions_again(history):
    first = history.decide(history.record())
    history.decide(first.updated(reason="known to the lost holders alone"))
    history.decide(first.updated(epoch=1001, is_forced=True))


def test_only_a_forced_recovery_may_find_the_record_of_the_same_ticket_at_another_holder(history):
    first = history.decide(history.record())
    forced = history.decide(first.updated(epoch=1001, submitted_utc_s=3.0, is_forced=True))
    with pytest.raises(Violation, match="submitted_utc_s"):
        history.decide(forced.updated(submitted_utc_s=4.0))


def test_a_forced_recovery_may_not_change_the_specification(history):
    first = history.decide(history.record())
    changed = replace(first.spec, command=("false",))
    with pytest.raises(Violation, match="spec of"):
        history.decide(first.updated(epoch=1001, spec=changed, is_forced=True))
