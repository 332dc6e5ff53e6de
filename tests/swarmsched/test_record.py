"""How much a record holds: the largest gang, and what a long life with many lost nodes leaves."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.card import CARD_BYTES_LIMIT, JobCard, card_of, decode_card, encode_card
from swarmsched.errors import ProtocolError
from swarmsched.fields import PART_MOST, RANK_MOST
from swarmsched.ids import NodeId, TaskKey
from swarmsched.ledger.booking import Booking, BookingState, StoredFence
from swarmsched.ledger.message import ReleaseRequest
from swarmsched.negotiation.changes import with_leftovers
from swarmsched.record import LEFTOVERS_MOST, JobRecord, Leftover
from swarmsched.resources import SHARES_MOST, Demand, Share
from swarmsched.task import RankExit, TaskOrder, TaskStage, TaskStatus
from swarmsched.view import Allocation
from swarmsched.wire.codec import decode_value, encode_value
from swarmsched.world import WORKERS_MAX, World, WorldMember, WorldPlan
from tests.swarmsched.building import JOB, make_record

N1 = NodeId("n" * 63)
U32_MOST, U53_MOST = 2**32 - 1, 2**53
PARTS = tuple(range(PART_MOST - SHARES_MOST + 1, PART_MOST + 1))
SHARES = tuple(Share(NodeId(f"{part % 1_000:063}"), 1, U53_MOST, part) for part in PARTS)
SPEC = JobSpec(("x",), ranks=WORKERS_MAX, demand=Demand(gpus=1), elastic=True)


def of_node(count: int, node: NodeId = N1) -> tuple[Leftover, ...]:
    return tuple(Leftover(node, U32_MOST, U53_MOST, PART_MOST - number) for number in range(count))


def largest() -> JobRecord:
    members, joining = PARTS[:WORKERS_MAX], PARTS[WORKERS_MAX:]
    return make_record(
        N1,
        spec=SPEC,
        state=JobState.RUNNING,
        shares=SHARES,
        world=World(U32_MOST, members, joining, members[:64]),
        leftovers=of_node(LEFTOVERS_MOST),
        attempt=U32_MOST,
        last_part=PART_MOST,
        rescales=U32_MOST,
        failed_rank=RANK_MOST,
    )


def test_the_largest_record_and_its_card_can_be_written_and_read():
    record = largest()
    assert decode_value(JobRecord, encode_value(JobRecord, record)) == record
    card = card_of(record)
    assert decode_value(JobCard, encode_value(JobCard, card)) == card, "planners have it whole"
    shortened, body = encode_card(card)
    assert len(body) <= CARD_BYTES_LIMIT
    assert decode_card(body) == shortened
    assert sum(share.ranks for share in shortened.shares) + shortened.hidden_ranks == SHARES_MOST


@pytest.mark.parametrize(
    "changes", [{"shares": (*SHARES, Share(N1, 1))}, {"leftovers": of_node(LEFTOVERS_MOST + 1)}, {"last_part": 2**31}]
)
def test_a_record_of_more_is_refused(changes):
    with pytest.raises(ProtocolError):
        encode_value(JobRecord, replace(largest(), **changes))


@pytest.mark.parametrize(
    "value",
    [
        TaskOrder(JOB, 1, 1, SHARES[-1].node, SPEC, SHARES, "host", 1, part=PART_MOST),
        TaskStatus(JOB, 1, 1, N1, TaskStage.EXITED, (RankExit(RANK_MOST, 1),), part=PART_MOST),
        Booking(JOB, 1, 1, N1, BookingState.LEASED, 1, (), 0, 0, 1.0, PART_MOST),
        StoredFence(1, 1, PART_MOST),
        ReleaseRequest(JOB, 1, 1, 1, N1, part=PART_MOST),
        WorldPlan(1, 1, tuple(WorldMember(part, "host:1") for part in PARTS[-WORKERS_MAX:]), PARTS[:64]),
        Allocation(SHARES),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_names_the_last_part_can_be_written_and_read(value):
    assert decode_value(type(value), encode_value(type(value), value)) == value


def test_the_key_of_the_last_part_is_read_back():
    key = TaskKey(JOB, U32_MOST, PART_MOST)
    assert TaskKey.read(str(key)) == key
    order = TaskOrder(JOB, 1, 1, SHARES[-1].node, SPEC, SHARES, "host", 1, part=PART_MOST)
    assert order.first_rank == RANK_MOST


def test_what_is_left_is_named_once_however_much_of_it_is_on_one_node():
    known = of_node(LEFTOVERS_MOST - 1)
    left = with_leftovers(replace(largest(), leftovers=known), of_node(LEFTOVERS_MOST))
    assert left == of_node(LEFTOVERS_MOST)
