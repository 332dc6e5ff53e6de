"""What counts as decided is what a majority of the named stores has on disk under one ballot."""

import pytest

from swarmsched.effects import Announce, Persist
from swarmsched.events import PeerMessageReceived
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import NodeId
from swarmsched.jobs.acceptor import ROOM, Slot
from swarmsched.jobs.message import AcceptRequest, Ballot
from swarmsched.simulator.checks.decided import DecidedRecords, is_majority
from swarmsched.wire.codec import encode_value
from tests.swarmsched.simulator.checks.testing import JOB, History


@pytest.fixture
def history():
    return History()


def decided(history):
    return history.suite.get(DecidedRecords)


def test_two_of_three_decide_and_one_does_not(history):
    first = history.record()
    history.accept(first, "a", Ballot(1, NodeId("a"), 1))
    assert decided(history).last(JOB) is None
    history.accept(first, "b", Ballot(1, NodeId("a"), 1))
    assert decided(history).last(JOB) == first
    assert decided(history).jobs == (JOB,)


def test_acceptances_under_different_ballots_do_not_add_up(history):
    first = history.record()
    history.accept(first, "a", Ballot(1, NodeId("a"), 1))
    history.accept(first, "b", Ballot(2, NodeId("b"), 1))
    assert decided(history).last(JOB) is None


def test_an_acceptance_counts_once_it_is_on_disk_and_not_when_it_was_lost(history):
    first, ballot = history.record(), Ballot(1, NodeId("a"), 1)
    history.accept(first, "a", ballot)
    data = encode_value(Slot, Slot(JOB, ballot, ballot, first))
    request = PeerMessageReceived(NodeId("a"), AcceptRequest(JOB, ballot, first, ballot))
    history.step("b", request, Persist(ROOM, JOB, data))
    history.perform("b", Announce("job.submitted", ""))
    assert decided(history).last(JOB) is None
    history.restart("b")
    history["b"].disk[ROOM] = {JOB: data}  # comes too late: that life's writes are gone
    history.perform("b", Announce("job.submitted", ""))
    assert decided(history).last(JOB) is None


def test_an_acceptance_that_was_overwritten_in_the_same_commit_still_counts(history):
    first, ballot, higher = history.record(), Ballot(1, NodeId("a"), 1), Ballot(2, NodeId("c"), 1)
    history.accept(first, "a", ballot)
    request = PeerMessageReceived(NodeId("a"), AcceptRequest(JOB, ballot, first, ballot))
    history.step("b", request, Persist(ROOM, JOB, encode_value(Slot, Slot(JOB, ballot, ballot, first))))
    promise = encode_value(Slot, Slot(JOB, higher, ballot, first))
    history.step("b", None, Persist(ROOM, JOB, promise))
    history["b"].disk[ROOM] = {JOB: promise}
    history.perform("b", Announce("job.submitted", ""))
    assert decided(history).last(JOB) == first


def test_the_same_node_with_another_store_is_another_holder(history):
    first = history.record()
    history.accept(first, "a", Ballot(1, NodeId("a"), 1))
    history["b"].storage.store_id = 77
    history.accept(first, "b", Ballot(1, NodeId("a"), 1))
    assert decided(history).last(JOB) is None


def test_a_joint_configuration_needs_a_majority_of_both():
    a, b, c, d, e = (Holder(NodeId(name), 1) for name in "abcde")
    joint = Configuration((a, d, e), (a, b, c))
    assert not is_majority(joint, dict.fromkeys((d, e)))
    assert not is_majority(joint, dict.fromkeys((a, b, c)))
    assert is_majority(joint, dict.fromkeys((a, b, d)))
    assert not is_majority(Configuration(), {})


def test_subscribers_hear_each_record_once_though_it_is_accepted_again(history):
    heard = []
    decided(history).subscribe(lambda job_id, before, after: heard.append((before, after)))
    first = history.decide(history.record())
    history.decide(first)
    second = history.decide(first.updated(reason="next"))
    assert heard == [(None, first), (first, second)]


def test_an_ancestor_counts_as_decided_and_a_fork_does_not(history):
    first = history.decide(history.record())
    third = first.updated().updated(epoch=2)
    history.decide(third)
    newest = third.version
    assert decided(history).has_decided(JOB, (1, newest - 1))
    assert decided(history).has_decided(JOB, (2, newest))
    assert not decided(history).has_decided(JOB, (1, newest))
    assert not decided(history).has_decided(JOB, (2, newest + 1))


def test_a_forced_record_is_a_new_beginning_whatever_ballots_the_lost_holders_knew_of(history):
    first = history.record()
    history.accept(first, "abc", Ballot(9, NodeId("a"), 1))
    forced = first.updated(epoch=1001, is_forced=True)
    history.accept(forced, "bc", Ballot(2, NodeId("b"), 1))
    assert decided(history).last(JOB) == forced
    after = forced.updated()
    history.accept(after, "bc", Ballot(3, NodeId("b"), 1))
    assert decided(history).last(JOB) == after


def test_after_a_forced_record_what_was_given_up_decides_nothing_any_more(history):
    first = history.decide(history.record())
    forced = history.decide(first.updated(epoch=1001, is_forced=True))
    history.decide(first.updated(reason="from the other side"))
    assert decided(history).last(JOB) == forced
