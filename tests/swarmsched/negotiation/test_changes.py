"""What changes make of a record, whatever the clocks say."""

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import card_of, encode_card
from swarmsched.ids import NodeId
from swarmsched.negotiation.changes import HandedOver, Started
from swarmsched.negotiation.world_changes import Regrouped, WorldTrains
from swarmsched.record import RESCALINGS_KEPT, Rescaling
from swarmsched.resources import Share
from swarmsched.world import World
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
    assert record.paused_s == record.rescalings[-1].pause_s
    card, _ = encode_card(card_of(record))
    assert card.pause_s == record.pause_s > 0.0


def test_pauses_add_up_beyond_the_changes_that_are_kept():
    spec = replace(make_record(A).spec, elastic=True)
    record = make_record(A, state=JobState.RUNNING, spec=spec, shares=(Share(A, 1, part=1),), world=World(1, (1,)))
    for number in range(RESCALINGS_KEPT + 3):
        record = replace(record, rescalings=(*record.rescalings, Rescaling(float(number), 1))[-RESCALINGS_KEPT:])
        record = record.updated(**(WorldTrains(record.world.version, 0.5).of(record) or {}))
        record = record.updated(**(WorldTrains(record.world.version, 0.5).of(record) or {}))
    assert (record.paused_s, len(record.rescalings)) == (0.5 * (RESCALINGS_KEPT + 3), RESCALINGS_KEPT)


def test_what_a_failure_forced_is_no_change_for_a_gain_and_its_pause_does_not_count():
    spec = replace(make_record(A).spec, elastic=True)
    shares = tuple(Share(A, 1, part=part) for part in (1, 2, 3))
    record = make_record(A, state=JobState.RUNNING, spec=spec, shares=shares, world=World(1, (1, 2, 3)))
    for utc_s, leaves, gone in ((100.0, (2,), ()), (400.0, (), (3,))):
        record = record.updated(**(Regrouped((), leaves, gone, (), "why", utc_s, 9.0).of(record) or {}))
        record = record.updated(**(WorldTrains(record.world.version, 8.0).of(record) or {}))
    assert [each.is_forced for each in record.rescalings] == [False, True]
    told = [card_of(record, utc_s=utc_s) for utc_s in (430.0, 50.0)]
    assert [(card.kept_s, card.paused_s) for card in told] == [(330, 8), (1, 8)]
    assert card_of(make_record(A), utc_s=430.0).kept_s == 0


def test_a_hand_over_names_no_life_of_its_successor():
    """Beside its name, the giver's generation would keep the lease of a dead life alive where both began at once."""
    given = HandedOver(NodeId("b")).of(make_record(A, shepherd_generation=7))
    assert given == {"epoch": 2, "shepherd": "b", "shepherd_generation": 0}
