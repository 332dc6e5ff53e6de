"""What changes make of a record, whatever the clocks say."""

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import card_of, encode_card
from swarmsched.ids import NodeId
from swarmsched.negotiation.changes import HandedOver, Started
from swarmsched.record import Rescaling
from swarmsched.resources import Share
from tests.swarmsched.building import make_record

A = NodeId("a")


def test_the_pause_of_a_job_whose_wall_clock_was_put_forward_fits_into_its_card():
    begun = Rescaling(1.7e9, 1)
    record = make_record(A, state=JobState.STARTING, shares=(Share(A, 2),), rescalings=(begun,))
    record = replace(record, spec=replace(record.spec, elastic=True))
    fields = Started(2.5e11).of(record)
    assert fields is not None
    record = record.updated(**fields)
    assert record.rescalings[-1].ranks_after == 2
    card, _ = encode_card(card_of(record))
    assert card.pause_s == record.pause_s > 0.0


def test_a_hand_over_names_no_life_of_its_successor():
    """Beside its name, the giver's generation would keep the lease of a dead life alive where both began at once."""
    given = HandedOver(NodeId("b")).of(make_record(A, shepherd_generation=7))
    assert given == {"epoch": 2, "shepherd": "b", "shepherd_generation": 0}
