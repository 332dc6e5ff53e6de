"""Records, cards, locations, listings: sizes, limits, conversions."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.card import CARD_BYTES_LIMIT, JobCard, card_of, decode_card, encode_card
from swarmsched.errors import RemoteProtocolError
from swarmsched.estimate import BatchRange, Estimate, GpuBatch, Resizable, SpeedPoint
from swarmsched.gossip.card_desk import CardDesk
from swarmsched.gossip.exchange import pack_buckets, pack_listing, unpack_buckets, unpack_listing
from swarmsched.gossip.location import (
    KEEP_S,
    Location,
    LocationStore,
    decode_location,
    encode_location,
    job_of,
    key_of,
)
from swarmsched.gossip.publisher import RecordPublisher
from swarmsched.gossip.record import (
    RECORD_BYTES_LIMIT,
    GpuGroup,
    NodeRecord,
    decode_record,
    encode_record,
    groups_of,
    node_view,
)
from swarmsched.gossip.replica import Entry, fair_order
from swarmsched.ids import NodeId
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, Gpu, NodeResources, Share, counted, less, ranks_that_fit
from swarmsched.shards import AggregationRoom
from swarmsched.view import JobView
from tests.swarmsched.building import job_id, make_record
from tests.swarmsched.gossip.state_testing import GENERATION, StateNetwork, sample_record

A, B = NodeId("gpu01"), NodeId("gpu02")


def a_record(state: JobState = JobState.RUNNING, shares: int = 2, **changes: object) -> JobRecord:
    spec = JobSpec(
        command=("python", "train.py"),
        name="resnet50-imagenet",
        user="ada",
        ranks=4 * shares,
        demand=Demand(gpus=1, cpus=4),
    )
    record = make_record(
        A,
        (A, B),
        job_id=job_id(1),
        spec=spec,
        submitted_utc_s=1_700_000_000.5,
        epoch=3,
        version=9,
        shepherd_generation=GENERATION,
        state=state,
        shares=tuple(Share(NodeId(f"gpu{n:02}"), 4) for n in range(shares)),
        attained_gpu_s=50.0,
    )
    return replace(record, **changes)


def test_a_record_of_eight_gpus_stays_within_its_target() -> None:
    body = encode_record(replace(sample_record(A), generation=GENERATION, version=70_000, flags=9))
    assert len(body) <= 150
    assert decode_record(body).free_gpus == 8


def test_the_largest_record_is_cut_to_the_hard_limit() -> None:
    groups = tuple(GpuGroup(f"{n}" * 63, 8, 8, 2**40) for n in range(8))
    record = NodeRecord(
        NodeId("n" * 63),
        2**53,
        2**53,
        groups,
        software_version="v" * 24,
    )
    assert len(encode_record(record)) <= RECORD_BYTES_LIMIT


def test_counts_of_a_remote_node_fit_like_its_devices() -> None:
    gpus = tuple(Gpu(f"u{n}", n, "A100" if n < 2 else "T4", 2**34) for n in range(6))
    free = Free(counted(gpus[1:5]), 16, 2**36)
    record = NodeRecord(
        A,
        groups=groups_of(NodeResources(gpus, 32, 2**38), free),
        cpus_free=16,
        cpus_total=32,
        memory_free_bytes=2**36,
        memory_total_bytes=2**38,
        network_mbit_s=25_000,
    )
    assert decode_record(encode_record(record)) == record
    view = node_view(record, is_available=True)
    assert view.capacity.network_mbit_s == 25_000
    for demand in (Demand(gpus=1), Demand(gpus=1, gpu_type="a100"), Demand(gpus=2, gpu_type="T4"), Demand(cpus=3)):
        assert ranks_that_fit(view.free, demand) == ranks_that_fit(free, demand)
    assert (view.total_gpus, view.capacity.gpu_count, view.free.gpu_count) == (6, 6, 4)


@pytest.mark.parametrize(("unusable", "capacity"), [(0, 6), (1, 5), (2, 4), (6, 4)])
def test_what_cannot_be_used_is_no_capacity_but_what_is_free_is(unusable: int, capacity: int) -> None:
    groups = (GpuGroup("A100", 2, 1, 2**36), GpuGroup("T4", 4, 3, 2**34))
    view = node_view(NodeRecord(A, groups=groups, stale_gpus=unusable), is_available=True)
    assert (view.total_gpus, view.capacity.gpu_count, view.free.gpu_count) == (6, capacity, 4)
    assert not less(view.free.gpus, view.capacity.gpus)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpus_free": 97},
        {"memory_free_bytes": 2**41},
        {"groups": (GpuGroup("x", 2, 3, 1),)},
        {"groups": (GpuGroup("x", 65, 0, 1),)},
    ],
)
def test_an_impossible_record_fails_its_check(changes: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        replace(sample_record(A), **changes).check()


def test_a_typical_card_stays_near_its_target_and_reads_back_as_the_job() -> None:
    card, body = encode_card(card_of(a_record(), running_s=10.0, rank_key=(1_000, 0, 5), policy_id="las"))
    assert len(body) <= 214
    assert decode_card(body) == card
    view = JobView(card, written_s=100.0)
    assert view.attained_gpu_s(105.0) == 50.0 + 8 * 15.0
    assert view.running_s(105.0) == 15.0
    assert view.queued_s(105.0) == 0.0
    assert view.shares == (Share(NodeId("gpu00"), 4), Share(NodeId("gpu01"), 4))


def test_a_card_names_sixty_nodes_and_counts_the_ranks_that_it_hides_beyond() -> None:
    whole, _ = encode_card(card_of(a_record(shares=60)))
    assert (len(whole.shares), whole.hidden_ranks) == (60, 0)
    record = a_record(shares=200)
    card, body = encode_card(card_of(replace(record, reason="r" * 200)))
    assert len(body) <= CARD_BYTES_LIMIT
    assert sum(share.ranks for share in card.shares) + card.hidden_ranks == 800
    assert card.hidden_ranks


def test_a_card_gives_up_measured_points_before_it_hides_ranks_and_keeps_what_was_fitted() -> None:
    few = tuple(SpeedPoint(ranks, 1, 32, 0.25, 0.05) for ranks in range(1, 5))
    fitted = Estimate(speed=(0.1, 0.002, 0.01, 0.0, 0.05, 0.001, 1.5), remaining=1e5, remaining_error=0.125)
    elastic = Resizable(1, 16, BatchRange(128, 4_096, 32, 1_024), 512)
    told = replace(card_of(a_record()), elastic=elastic, estimate=replace(fitted, points=few))
    assert decode_card(encode_card(told)[1]) == told
    many, body = encode_card(replace(told, estimate=replace(fitted, points=few * 20)))
    assert len(body) <= CARD_BYTES_LIMIT
    assert (many.estimate, many.elastic, many.hidden_ranks) == (fitted, elastic, 0)


def test_constraints_that_do_not_fit_are_marked_and_never_cut_in_part() -> None:
    names = tuple(NodeId(f"{n:03}{'e' * 50}") for n in range(30))
    spec = replace(a_record().spec, nodes=names)
    card, _ = encode_card(card_of(replace(a_record(JobState.QUEUED), spec=spec)))
    assert (card.nodes, card.hides_constraints) == ((), True)
    few, _ = encode_card(card_of(replace(a_record(JobState.QUEUED), spec=replace(spec, nodes=names[:8]))))
    assert (few.nodes, few.hides_constraints) == (names[:8], False)


def test_the_longest_names_still_make_a_card_within_the_limit_that_asks_for_the_same() -> None:
    long = NodeId("n" * 63)
    spec = JobSpec(
        ("x",),
        name="名" * 63,
        user="ü" * 63,
        ranks=1,
        demand=Demand(8, 8, 2**50, "名" * 63, 2**40),
        nodes=(long,) * 5,
        exclude=(long,) * 5,
    )
    record = replace(a_record(), spec=spec, shepherd=long, shares=(Share(long, 1),) * 3)
    card, body = encode_card(card_of(record, rank_key=(2**53,) * 4, policy_id="p" * 63))
    assert len(body) <= CARD_BYTES_LIMIT
    assert card.demand == spec.demand


def test_a_location_with_short_names_takes_forty_eight_bytes() -> None:
    location = Location(job_id(1), 1, 12, A, (A, B, NodeId("gpu03")), JobState.ENDED, 1_700_000_000.0)
    assert len(encode_location(location)) <= 48
    assert decode_location(encode_location(location)) == location
    stranger = replace(location, shepherd=NodeId("else"))
    assert decode_location(encode_location(stranger)) == stranger


@given(st.integers(0, 2**130 - 1))
def test_job_keys_sort_and_read_back_like_ids(value: int) -> None:
    key = value.to_bytes(17)
    assert key_of(job_of(key)) == key


def test_a_location_never_falls_back_and_an_old_one_expires() -> None:
    store = LocationStore()
    new = Location(job_id(1), 2, 1, A, (A,), JobState.RUNNING)
    old = replace(new, epoch=1, version=99)

    def offer(location: Location, age_s: float, now_s: float) -> bool:
        return store.offer(location, encode_location(location), age_s=age_s, now_s=now_s, round_number=0)

    assert offer(new, 0.0, 100.0)
    assert not offer(old, 0.0, 100.0)
    assert store[job_id(1)].epoch == 2
    assert not offer(replace(new, job_id=job_id(2)), KEEP_S, 100.0)
    assert store.expire(100.0 + KEEP_S + 2.0) == 1
    store.validate()
    assert len(store) == 0


def test_at_the_limit_the_oldest_location_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmsched.gossip.location.LOCATIONS_LIMIT", 10)
    store = LocationStore()
    for number in range(5, 20):
        location = Location(job_id(number), 1, 1, A, (A,), JobState.QUEUED)
        store.offer(location, encode_location(location), age_s=0.0, now_s=0.0, round_number=0)
    old = Location(job_id(1), 1, 1, A, (A,), JobState.QUEUED)
    assert not store.offer(old, encode_location(old), age_s=0.0, now_s=0.0, round_number=0)
    assert list(store) == [job_id(number) for number in range(10, 20)]
    store.validate()


listings = st.dictionaries(st.binary(min_size=6, max_size=6), st.tuples(st.integers(0, 2**52), st.integers(0, 2**53)))


@given(listings)
def test_listings_read_back(listing: dict[bytes, tuple[int, int]]) -> None:
    assert unpack_listing(pack_listing(listing.items()), 6) == listing


@pytest.mark.parametrize("read", [lambda data: unpack_listing(data, 6), unpack_buckets])
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_listing_or_a_protocol_error(read: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(read(data), dict)


def test_bucket_hashes_read_back_even_when_two_are_alike() -> None:
    hashes = {1_600_000: 7, 1_600_001: 7, 1_600_099: 2**32 - 1}
    assert unpack_buckets(pack_buckets(hashes)) == hashes


def test_a_busy_origin_does_not_push_out_the_rest() -> None:
    def entry(origin: str, number: int) -> Entry[None]:
        return Entry(f"{origin}{number}", b"", origin, (1, 1), None, b"", 0.0, 0)

    entries = [entry("busy", number) for number in range(50)] + [entry("calm", 0), entry("quiet", 0)]
    assert {each.origin for each in fair_order(entries)[:3]} == {"busy", "calm", "quiet"}
    assert len(fair_order(entries)) == 52


def test_queued_cards_far_back_in_the_order_wait_until_they_move_up() -> None:
    desk = CardDesk()
    card = JobCard(job_id(1), 1, 0, A, 0, 0, 1, Demand(gpus=1), 1.0)
    desk.set_card(card, 0.0)
    assert desk.due(2.0, lambda _: True) == []
    assert desk.next_deadline_s == 7.0
    assert [each.counter for each in desk.due(7.0, lambda _: False)] == [1]


def test_a_capped_owner_lengthens_its_interval_and_recovers() -> None:
    publisher = RecordPublisher(GENERATION)
    publisher.set_draft(sample_record(A, free=1))
    assert publisher.due(100.0) is not None
    for _ in range(2):
        publisher.adapt(30, is_capped=True)
    publisher.set_draft(sample_record(A, free=2))
    assert publisher.next_deadline_s == 104.0
    for _ in range(20):
        publisher.adapt(30, is_capped=False)
    assert publisher.next_deadline_s == 101.0
    for _ in range(20):
        publisher.adapt(30, is_capped=True)
    assert publisher.next_deadline_s == 108.0


def test_room_for_shards_is_told_when_it_has_doubled_or_halved_and_else_with_the_next_record() -> None:
    publisher = RecordPublisher(GENERATION)
    room = AggregationRoom(4_000, 2**34, 2**26)
    publisher.set_draft(replace(sample_record(A), aggregation=room))
    assert publisher.due(100.0) is not None
    for changes in ({"memory_bytes": 2**33}, {"core_ms": 8_000}, {"link_bytes_per_s": 2**25}):
        publisher.set_draft(replace(sample_record(A), aggregation=replace(room, **changes)))
        assert publisher.next_deadline_s == 130.0
    for now in (replace(room, memory_bytes=2**33 - 2**26), replace(room, core_ms=0), None):
        publisher.set_draft(replace(sample_record(A), aggregation=now))
        assert publisher.next_deadline_s == 110.0


def test_a_large_swarm_renews_once_a_minute() -> None:
    publisher = RecordPublisher(GENERATION)
    publisher.set_draft(sample_record(A))
    assert publisher.due(0.0) is not None
    assert publisher.next_deadline_s == 30.0
    publisher.adapt(5_000, is_capped=False)
    assert publisher.next_deadline_s == 60.0


def test_a_swarm_without_gpus_spreads_the_first_queued_cards_only() -> None:
    net = StateNetwork(1, seed=1)
    node = NodeId("n000")

    def publish(numbers: range) -> None:
        for number in numbers:
            card = JobCard(job_id(number), 1, 0, node, 0, 0, 1, Demand(gpus=1), 1.0, rank_key=(number,))
            net.perform(node, net.planes[node].publish_card(card, net.now_s))

    publish(range(64))
    net.run(3.0)
    publish(range(64, 80))
    net.run(20.0)
    assert [status.card.rank_key for status in net.planes[node].jobs.values()] == [(n,) for n in range(64)]
    net.perform(node, net.planes[node].withdraw_card(job_id(0), net.now_s))
    net.run(10.0)
    assert len(net.planes[node].jobs.values()) > 63


def test_a_card_without_room_for_limits_by_class_tells_the_least_and_no_agent_places_it_where_its_batch_fits_not() -> (
    None
):
    limits = tuple([GpuBatch(f"{'x' * 60}{n}", 32 + n) for n in range(8)])
    batches = BatchRange(128, 4_096, 40, 64, limits)
    demand = Demand(1, refused_gpus=batches.refused_gpus)
    spec = replace(a_record().spec, ranks_most=8, batches=batches, demand=demand)
    card, body = encode_card(card_of(replace(a_record(JobState.QUEUED), spec=spec)))
    assert len(body) <= CARD_BYTES_LIMIT
    assert decode_card(body) == card
    assert card.elastic is not None
    assert (card.elastic.batches.local_most, card.elastic.batches.by_gpu) == (64, ())
    assert card.demand == demand or card.hides_constraints
    wide = replace(batches, by_gpu=tuple([GpuBatch(f"{'名' * 62}{n}", 32) for n in range(8)]))
    long = replace(spec, batches=wide, demand=replace(demand, refused_gpus=wide.refused_gpus))
    card, body = encode_card(card_of(replace(a_record(JobState.QUEUED), spec=long)))
    assert len(body) <= CARD_BYTES_LIMIT
    assert (card.demand.refused_gpus, card.hides_constraints) == ((), True)
