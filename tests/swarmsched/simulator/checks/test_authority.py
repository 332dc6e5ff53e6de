"""Invariant 3: one shepherd for each epoch, and only it commands under it."""

import pytest

from swarmsched.effects import SendPeer
from swarmsched.ids import NodeId
from swarmsched.ledger.message import ReleaseRequest, StopRequest
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import JOB, History


@pytest.fixture
def history():
    return History()


def command(history, sender, epoch):
    history.perform(sender, SendPeer(NodeId("c"), StopRequest(JOB, epoch, 1, 1, NodeId(sender), 1.0)))


def test_two_winners_of_one_epoch_are_found(history):
    first = history.decide(history.record())
    history.decide(first.updated(epoch=2, shepherd="b"))
    with pytest.raises(Violation, match="was won by") as caught:
        history.decide(first.updated().updated(epoch=2, shepherd="c"))
    assert caught.value.invariant == "3"


def test_a_change_of_shepherd_without_a_new_epoch_is_found(history):
    first = history.decide(history.record())
    with pytest.raises(Violation) as caught:
        history.decide(first.updated(shepherd="b"))
    assert caught.value.invariant == "3"


def test_a_later_life_of_the_shepherd_is_another_one(history):
    first = history.decide(history.record())
    with pytest.raises(Violation, match="was won by"):
        history.decide(first.updated(shepherd_generation=2))


def test_commands_of_the_winner_are_welcome(history):
    first = history.decide(history.record())
    command(history, "a", 1)
    history.decide(first.updated(epoch=2, shepherd="b"))
    command(history, "b", 2)
    command(history, "a", 1)  # it has not heard yet; owners refuse it


def test_a_command_under_an_epoch_that_nobody_has_won_is_found(history):
    history.decide(history.record())
    with pytest.raises(Violation, match="nobody has won") as caught:
        command(history, "a", 2)
    assert caught.value.invariant == "3"


def test_a_command_under_anothers_epoch_is_found(history):
    history.decide(history.record())
    with pytest.raises(Violation, match="a has won"):
        command(history, "b", 1)


def test_a_minoritys_word_wins_no_epoch(history):
    first = history.decide(history.record())
    history.decide(first.updated(epoch=2, shepherd="b"), ["b"])
    with pytest.raises(Violation, match="nobody has won"):
        command(history, "b", 2)


def test_whoever_has_an_ended_record_may_dismiss_what_is_left(history):
    history.decide(history.record())
    history.perform("b", SendPeer(NodeId("c"), ReleaseRequest(JOB, 1, 1, 2**32 - 2, NodeId("b"))))
