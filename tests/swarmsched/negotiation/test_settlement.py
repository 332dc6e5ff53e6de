"""What an earlier attempt left behind is settled by its owner's word, or by the silence of a majority."""

import pytest

from swarmsched.api import Isolation, JobSpec
from swarmsched.authority.message import SilenceAnswer, SilenceRequest
from swarmsched.authority.timing import FREEZE_AFTER_S, patience_s
from swarmsched.ids import NodeId, Place
from swarmsched.ledger.message import StopRequest
from swarmsched.negotiation.inquiry import Commands
from swarmsched.negotiation.settlement import LEFTOVER_GRACE_S, Settlement
from swarmsched.record import Leftover
from tests.swarmsched.building import JOB, make_record

A, B, C, OWNER = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("owner")
LEFT = Leftover(OWNER, 3)
SILENT_S = patience_s(FREEZE_AFTER_S)


def record(version=7, **spec):
    return make_record(A, (A, B, C), spec=JobSpec(("true",), **spec), epoch=2, version=version, leftovers=(LEFT,))


@pytest.fixture
def settlement():
    return Settlement(Commands(A, 2))


def silent(silent_s=SILENT_S, has_record=True, version=7, attempt=3):
    return SilenceAnswer(JOB, attempt, OWNER, 2, version, has_record, silent_s)


def test_the_owner_is_ordered_to_stop_and_all_holders_are_asked(settlement):
    sent = settlement.begin([LEFT], record(grace_s=60.0), 0.0)
    stops = [(each.recipient, each.message.grace_s) for each in sent if isinstance(each.message, StopRequest)]
    assert stops == [(OWNER, LEFTOVER_GRACE_S)]
    assert [each.recipient for each in sent if isinstance(each.message, SilenceRequest)] == [A, B, C]


def test_the_owners_word_settles_it(settlement):
    settlement.begin([LEFT], record(), 0.0)
    assert settlement.ended(Place(OWNER), 3)
    assert not settlement.open
    assert not settlement.ended(Place(OWNER), 3)


def test_what_the_record_names_no_more_is_settled(settlement):
    """A preempted gang may end while its record is still being told that one of its nodes does not answer."""
    settlement.begin([LEFT], record(), 0.0)
    settlement.keep([LEFT])
    assert list(settlement.open) == [LEFT]
    settlement.keep([])
    assert not settlement.open
    assert settlement.next_deadline_s == float("inf")


def test_the_silence_of_a_majority_settles_it(settlement):
    settlement.begin([LEFT], record(), 0.0)
    assert not settlement.silence_told(A, silent(), record())
    assert not settlement.silence_told(A, silent(), record())
    assert settlement.silence_told(C, silent(), record())
    assert not settlement.open


@pytest.mark.parametrize(
    "answer", [silent(SILENT_S - 0.1), silent(has_record=False), silent(version=6), silent(attempt=2)]
)
def test_what_proves_no_silence_settles_nothing(settlement, answer):
    settlement.begin([LEFT], record(), 0.0)
    for holder in (A, B, C):
        assert not settlement.silence_told(holder, answer, record())
    assert list(settlement.open) == [LEFT]


def test_a_node_that_is_no_holder_has_no_say(settlement):
    settlement.begin([LEFT], record(), 0.0)
    for stranger in (OWNER, NodeId("x"), NodeId("y")):
        assert not settlement.silence_told(stranger, silent(), record())


def test_ranks_that_are_never_frozen_are_settled_by_their_owner_alone(settlement):
    sent = settlement.begin([LEFT], record(on_isolation=Isolation.CONTINUE), 0.0)
    assert not [each for each in sent if isinstance(each.message, SilenceRequest)]


def test_questions_are_repeated_until_all_is_settled(settlement):
    settlement.begin([LEFT], record(), 0.0)
    again_s = settlement.next_deadline_s
    assert {type(each.message) for each in settlement.on_timer(record(), again_s)} == {SilenceRequest}
    settlement.ended(Place(OWNER), 3)
    assert settlement.next_deadline_s == float("inf")
    assert settlement.on_timer(record(), again_s + 60.0) == []
