"""The state plane in a virtual network: convergence, byte caps, versions, poison, cuts, joins, settings, repairs."""

import random

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import STATES, JobCard
from swarmsched.effects import Announce, Persist, SendDatagram, SendPeer
from swarmsched.errors import ConfigError
from swarmsched.estimate import Estimate, Resizable
from swarmsched.events import DatagramReceived, PeerMessageReceived, TimerFired
from swarmsched.gossip.budget import TokenBucket, byte_cap
from swarmsched.gossip.exchange import DATAGRAM_CODEC, FullStateRequest, Parcel, ParcelKind, StateDelta, StateDigest
from swarmsched.gossip.location import Location
from swarmsched.gossip.record import RECORD_BYTES_LIMIT, NodeRecord, encode_record
from swarmsched.gossip.setting import SwarmSetting, encode_setting
from swarmsched.gossip.state import PUSH_DELAY_S, MemberRef, StateConfig, StatePlane
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.registry import check_setting
from swarmsched.resources import Demand, FreeReport, Share
from swarmsched.view import PolicySetting
from swarmsched.wire.codec import encode_value
from tests.swarmsched.building import job_id
from tests.swarmsched.gossip.state_testing import GENERATION, StateNetwork, sample_record

A, B = NodeId("n000"), NodeId("n001")


def settled(count: int, seed: int, **options: float) -> StateNetwork:
    """A network whose nodes have published and been connected."""
    net = StateNetwork(count, seed, **options)  # type: ignore[arg-type]  # loss and delay only
    for node in net.nodes:
        net.publish(node, sample_record(node))
    net.connect()
    return net


def everyone_agrees(net: StateNetwork) -> bool:
    truth = {node: net.versions(node)[node] for node in net.nodes if node not in net.down}
    return all(net.versions(node) == truth for node in truth)


def a_card(job_id: JobId, shepherd: NodeId, state: JobState = JobState.QUEUED, **changes: object) -> JobCard:
    card = JobCard(
        job_id,
        1,
        0,
        shepherd,
        STATES.index(state),
        0,
        4,
        Demand(gpus=1),
        1_700_000_000.5,
        name="train",
        user="ada",
        queue="default",
    )
    return replace(card, **changes)


def a_location(job_id: JobId, version: int = 1, state: JobState = JobState.QUEUED, ended: float = 0.0) -> Location:
    return Location(job_id, 1, version, A, (A, B, NodeId("n002")), state, ended)


def record_bytes(**changes: object) -> bytes:
    values = {"flags": 0, "generation": GENERATION, "version": 1, **changes}
    return encode_value(NodeRecord, replace(sample_record(B), **values))


def deliver(net: StateNetwork, node: NodeId, *parcels: Parcel) -> None:
    payload = DATAGRAM_CODEC.encode(StateDelta(parcels=tuple(parcels)))
    net.perform(node, net.planes[node].step(DatagramReceived(("10.9.9.9", 9), payload), net.now_s))


@pytest.mark.parametrize("count", [2, 3, 30])
def test_all_nodes_learn_all_records(count: int) -> None:
    net = settled(count, seed=count)
    net.run(12.0, validate=count < 10)
    assert everyone_agrees(net)
    assert len(net.versions(A)) == count


@pytest.mark.parametrize("seed", range(3))
def test_a_change_reaches_thirty_nodes_within_eight_seconds_despite_loss(seed: int) -> None:
    net = settled(30, seed, loss_ratio=0.2)
    net.run(15.0)
    net.publish(A, sample_record(A, free=3))
    net.run(8.0)
    seen = [status.record.free_gpus for node in net.nodes for status in net.planes[node].node_records(net.now_s)]
    assert seen.count(3) == 30


def test_a_free_gpu_change_is_pushed_to_three_peers_at_once() -> None:
    net = settled(10, seed=1)
    net.run(5.0)
    effects = net.planes[A].publish_node(sample_record(A, free=1), net.now_s)
    assert len({effect.destination for effect in effects if isinstance(effect, SendDatagram)}) == 3


@pytest.mark.parametrize(
    ("before", "after", "is_pushed"),
    [
        ((JobState.QUEUED, 0, None), (JobState.STARTING, 4, None), True),
        ((JobState.RUNNING, 4, Resizable(1, 8)), (JobState.STOPPING, 4, Resizable(1, 8)), True),
        ((JobState.RUNNING, 4, Resizable(1, 8)), (JobState.RUNNING, 2, None), True),
        ((JobState.RUNNING, 4, Resizable(1, 8)), (JobState.RUNNING, 4, Resizable(1, 8, global_batch=64)), False),
        ((JobState.RUNNING, 4, None), (JobState.STOPPING, 4, None), False),
    ],
)
def test_what_a_job_holds_is_pushed_where_others_plan_with_it(
    before: tuple[JobState, int, Resizable | None], after: tuple[JobState, int, Resizable | None], *, is_pushed: bool
) -> None:
    """Else they find its GPUs taken, cannot tell by whom, and shrink their jobs for it once more."""
    net = settled(10, seed=1)

    def card(state: JobState, ranks: int, elastic: Resizable | None) -> JobCard:
        return a_card(job_id(1), A, state, shares=(Share(A, ranks),) if ranks else (), elastic=elastic)

    net.perform(A, net.planes[A].publish_card(card(*before), net.now_s))
    net.run(20.0)
    pushing = net.planes[A].publish_card(card(*after), net.now_s)
    pushed = {effect.destination for effect in pushing if isinstance(effect, SendDatagram)}
    net.now_s += PUSH_DELAY_S
    effects = net.planes[A].step(TimerFired(), net.now_s)
    pushed |= {effect.destination for effect in effects if isinstance(effect, SendDatagram)}
    assert (len(pushed) >= 3) == is_pushed


def test_an_idle_node_sends_a_tenth_of_the_cap() -> None:
    net = settled(30, seed=2)
    net.run(20.0)
    net.sent_bytes.clear()
    net.run(60.0)
    assert max(net.sent_bytes.values()) / 60 <= 500


def test_no_node_sends_more_than_the_cap_when_everything_changes() -> None:
    net = settled(30, seed=3)
    net.run(5.0)
    for second in range(20):
        for index, node in enumerate(net.nodes):
            net.publish(node, sample_record(node, free=(second + index) % 9))
            card = a_card(job_id(index), node, JobState.QUEUED, reason=f"reason {second}", priority=second)
            net.perform(node, net.planes[node].publish_card(card, net.now_s))
        before = net.sent_bytes.copy()
        net.run(1.0)
        # A bucket may hold one second's worth, so one second may show two; the average may not.
        assert max((net.sent_bytes - before).values()) <= 2 * 5_000
        assert max(net.sent_bytes.values()) / (second + 6) <= 5_000


def test_caps_follow_the_size_of_the_swarm() -> None:
    assert [byte_cap(n) for n in (3, 30, 100, 1_000, 20_000)] == [5_000, 5_000, 12_000, 40_000, 200_000]
    assert 12_000 < byte_cap(300) < 40_000


def test_a_token_bucket_never_gives_more_than_rate_and_burst() -> None:
    bucket = TokenBucket(100.0, burst_s=1.0)
    assert bucket.take(100, 0.0)
    assert not bucket.take(1, 0.0)
    assert bucket.take(50, 0.5)
    assert not bucket.take(101, 100.0)


def test_versions_never_fall_at_any_viewer_under_loss_and_restarts() -> None:
    net = settled(6, seed=4, loss_ratio=0.3, delay_s=0.8)
    seen: dict[tuple[NodeId, NodeId], tuple[int, int]] = {}
    for second in range(60):
        if second == 30:
            net.add(B, seed=99, generation=GENERATION + 5)
            net.connect()
        net.publish(B, sample_record(B, free=second % 8))
        net.run(1.0, validate=True)
        for viewer in net.nodes:
            for node, stamp in net.versions(viewer).items():
                if viewer != B:
                    assert stamp >= seen.get((viewer, node), (0, 0))
                seen[viewer, node] = stamp
    assert net.versions(A)[B][0] == GENERATION + 5


def test_utilisation_within_the_deadband_makes_no_version() -> None:
    net = settled(2, seed=5)
    net.run(12.0)
    version = net.versions(A)[A]
    net.publish(A, sample_record(A, utilisation_percent=9))
    net.run(1.0)
    assert net.versions(A)[A] == version
    net.publish(A, sample_record(A, utilisation_percent=40))
    net.run(1.0)
    assert net.versions(A)[A][1] == version[1] + 1
    net.publish(A, sample_record(A, utilisation_percent=80))
    net.run(8.0)
    assert net.versions(A)[A][1] == version[1] + 1
    net.run(3.0)
    assert net.versions(A)[A][1] == version[1] + 2


def test_free_gpus_make_at_most_one_version_a_second_and_one_every_thirty() -> None:
    net = settled(2, seed=6)
    net.run(2.0)
    first = net.versions(A)[A][1]
    for step in range(40):
        net.publish(A, sample_record(A, free=step % 8))
        net.run(0.1)
    assert 3 <= net.versions(A)[A][1] - first <= 5
    net.run(5.0)
    quiet = net.versions(A)[A][1]
    net.run(90.0)
    assert net.versions(A)[A][1] - quiet == 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1" * 40,
        record_bytes()[:-4],
        record_bytes() + b"\x00",
        record_bytes(cpus_free=1_000),
        encode_value(NodeRecord, NodeRecord(B, GENERATION, 1, zone="x" * 16)) + b"junk",
        b"\x00" * (RECORD_BYTES_LIMIT + 1),
    ],
)
def test_a_poisoned_record_costs_nothing_but_itself(body: bytes) -> None:
    net = settled(3, seed=7)
    net.run(5.0)
    before = net.versions(A)
    good = encode_value(NodeRecord, NodeRecord(NodeId("new"), GENERATION, 1))
    deliver(net, A, Parcel(ParcelKind.NODE, 0, body), Parcel(ParcelKind.NODE, 0, good))
    assert net.versions(A) == {**before, NodeId("new"): (GENERATION, 1)}
    assert net.planes[A].counters["poisoned"] == 1
    net.planes[A].validate()


def test_a_quarantined_version_is_not_asked_for_again_but_a_newer_one_is() -> None:
    net = settled(2, seed=8)
    plane = net.planes[A]
    bad = replace(sample_record(NodeId("x"), free=8, count=2), flags=0, generation=GENERATION)
    deliver(net, A, Parcel(ParcelKind.NODE, 0, encode_value(NodeRecord, replace(bad, version=4))))
    assert plane.counters["quarantined"] == 1
    good = replace(bad, version=5, groups=())
    deliver(net, A, Parcel(ParcelKind.NODE, 0, encode_value(NodeRecord, good)))
    assert net.versions(A)[NodeId("x")] == (GENERATION, 5)
    assert plane.counters["quarantined"] == 0


def test_a_version_far_ahead_and_a_generation_of_the_future_are_refused() -> None:
    net = settled(3, seed=9)
    net.run(5.0)
    before = net.versions(A)
    ahead = record_bytes(version=before[B][1] + 2**20 + 1)
    future = record_bytes(generation=GENERATION + 10 * 86_400)
    deliver(net, A, Parcel(ParcelKind.NODE, 0, ahead), Parcel(ParcelKind.NODE, 0, future))
    assert net.versions(A) == before
    assert net.planes[A].counters["refused_generations"] == 1
    assert net.planes[A].counters["refused_records"] == 1


def test_a_forged_record_under_our_name_is_outbid() -> None:
    net = settled(3, seed=10)
    net.run(5.0)
    forged = encode_value(NodeRecord, replace(sample_record(A, free=0), flags=0, generation=GENERATION, version=500))
    deliver(net, B, Parcel(ParcelKind.NODE, 0, forged))
    net.run(20.0, validate=True)
    assert net.versions(B)[A] > (GENERATION, 500)
    assert [s.record.free_gpus for s in net.planes[B].node_records(net.now_s) if s.record.node_id == A] == [8]


def test_a_forged_version_at_the_end_of_numbers_does_not_stop_the_owner() -> None:
    net = settled(2, seed=10)
    net.run(5.0)
    deliver(net, A, Parcel(ParcelKind.NODE, 0, record_bytes(node_id=A, version=2**53)))
    net.publish(A, sample_record(A, free=0))
    net.run(5.0, validate=True)
    assert net.versions(B)[A] == net.versions(A)[A] < (GENERATION, 100)


@pytest.mark.parametrize("payload", [b"", b"\x20", b"\x21\x90\x90", b"\x20" + b"\xff" * 400, b"\x01hello", b"\x3f"])
def test_malformed_and_foreign_datagrams_change_nothing(payload: bytes) -> None:
    net = settled(2, seed=12)
    net.run(5.0)
    before = net.versions(A)
    assert net.planes[A].step(DatagramReceived(("10.9.9.9", 9), payload), net.now_s) == []
    assert net.versions(A) == before


def test_random_bytes_never_raise() -> None:
    net = settled(2, seed=13)
    net.run(2.0)
    rng = random.Random(1)
    valid = DATAGRAM_CODEC.encode(StateDigest(1, "x", nodes=b"\x06\x00" + b"abcdef\x00\x01"))
    for _ in range(2_000):
        garbled = bytearray(valid)
        for _ in range(rng.randrange(1, 6)):
            garbled[rng.randrange(1, len(garbled))] = rng.randrange(256)
        net.planes[A].step(DatagramReceived(("10.9.9.9", 9), bytes(garbled)), net.now_s)
        net.planes[A].step(PeerMessageReceived(B, StateDelta(want_nodes=rng.randbytes(30))), net.now_s)
    net.planes[A].validate()


def test_a_cut_answer_says_so_and_what_was_cut_arrives_later() -> None:
    net = StateNetwork(2, seed=14)
    for index in range(80):
        name = NodeId(f"guest{index:03}")
        body = encode_record(replace(sample_record(name), generation=GENERATION, version=1, flags=0))
        deliver(net, A, Parcel(ParcelKind.NODE, 0, body))
    digest = DATAGRAM_CODEC.encode(StateDigest(0, ""))
    effects = net.planes[A].step(DatagramReceived(net.address(B), digest), net.now_s)
    deltas = [DATAGRAM_CODEC.decode(effect.payload) for effect in effects if isinstance(effect, SendDatagram)]
    assert all(isinstance(effect, SendDatagram) and len(effect.payload) <= 1_200 for effect in effects)
    assert [delta.is_cut for delta in deltas if isinstance(delta, StateDelta)] == [False] * (len(deltas) - 1) + [True]
    net.connect()
    net.run(6.0)
    assert len(net.versions(B)) == 80


def test_a_joining_node_fetches_everything_over_one_stream() -> None:
    net = settled(30, seed=15)
    for number in range(200):
        net.perform(A, net.planes[A].set_location(a_location(job_id(number)), net.now_s))
    net.run(130.0)
    new = NodeId("zz")
    net.add(new, seed=77)
    net.connect()
    net.run(0.5)
    assert net.planes[new].is_synchronised
    assert len(net.versions(new)) == 30
    assert len(net.planes[new].locations) == len(net.planes[A].locations) == 200


@pytest.mark.parametrize("round_s", [0.0, 61.0, float("nan")])
def test_a_round_has_a_length_that_can_be_used(round_s: float) -> None:
    with pytest.raises(ConfigError, match="round_s"):
        StateConfig(A, GENERATION, round_s=round_s)


def test_a_join_is_repeated_until_a_peer_answers() -> None:
    plane = StatePlane(StateConfig(NodeId("new"), GENERATION), random.Random(1), check_setting)
    plane.put_peer(MemberRef(A, ("10.0.0.1", 1)))
    asked = 0
    now_s = 0.0
    while now_s < 10.0:
        effects = plane.step(TimerFired(), now_s)
        asked += sum(isinstance(e, SendPeer) and isinstance(e.message, FullStateRequest) for e in effects)
        now_s = max(now_s + 0.01, plane.next_deadline_s)
    assert 3 <= asked <= 5
    assert not plane.is_synchronised


def test_short_jobs_cause_no_card() -> None:
    net = settled(3, seed=16)
    net.run(3.0)
    for number in range(5):
        net.perform(A, net.planes[A].publish_card(a_card(job_id(number), A), net.now_s))
        net.run(0.5)
        net.perform(A, net.planes[A].publish_card(a_card(job_id(number), A, JobState.RUNNING), net.now_s))
        net.run(8.0)
        net.perform(A, net.planes[A].withdraw_card(job_id(number), net.now_s))
    assert not net.planes[A].jobs


def test_a_card_spreads_extrapolates_and_vanishes_at_close() -> None:
    net = settled(5, seed=17)
    net.run(3.0)
    running = a_card(
        job_id(1),
        A,
        JobState.RUNNING,
        attained_gpu_s=100.0,
        attained_rate=4,
        shares=(Share(A, 2), Share(B, 2)),
        running_s=20.0,
    )
    net.perform(A, net.planes[A].publish_card(running, net.now_s))
    net.run(30.0)
    for node in net.nodes:
        (status,) = net.planes[node].jobs.values()
        assert status.attained_gpu_s(net.now_s) == pytest.approx(100.0 + 4 * 30.0, abs=4.0)
    net.perform(A, net.planes[A].withdraw_card(job_id(1), net.now_s))
    net.run(8.0)
    assert all(not net.planes[node].jobs for node in net.nodes)
    net.run(200.0)
    assert all(net.planes[node].counters["cards"] == 0 for node in net.nodes)


def test_a_card_that_cannot_be_written_is_left_out_and_told_once() -> None:
    net = settled(3, seed=1)
    for number in (1, 2):
        net.perform(A, net.planes[A].publish_card(a_card(job_id(number), A), net.now_s))
    net.run(5.0)
    fit = net.planes[B].jobs[job_id(1)].card
    for priority in (2**31, 2**31 + 1, 2**31 + 2):
        for number, given in ((1, priority), (2, priority % 8)):
            net.perform(A, net.planes[A].publish_card(a_card(job_id(number), A, priority=given), net.now_s))
        net.run(5.0)
        assert net.planes[B].jobs[job_id(2)].card.priority == priority % 8
    assert net.planes[B].jobs[job_id(1)].card == fit

    told = [effect for _, effect in net.effects if isinstance(effect, Announce)]
    assert [(each.kind, each.job_id, each.node) for each in told] == [("job.card_refused", job_id(1), A)]
    assert "priority: Expected" in told[0].text
    assert net.planes[A].counters["cards_refused"] == 3
    net.perform(A, net.planes[A].withdraw_card(job_id(1), net.now_s))
    net.planes[A].validate()


def test_time_alone_renews_a_card_once_a_minute() -> None:
    net = settled(2, seed=18)
    for _ in range(125):
        net.perform(A, net.planes[A].publish_card(a_card(job_id(1), A), net.now_s))
        net.run(1.0)
    (status,) = net.planes[A].jobs.values()
    assert status.card.counter == 3


def test_a_job_that_waits_no_longer_opens_the_line_and_one_that_reports_does_not() -> None:
    net = settled(2, seed=19)
    net.run(2.0)
    told = [
        (JobState.QUEUED, 0),
        (JobState.STARTING, 1),
        (JobState.RUNNING, 1),
        (JobState.RUNNING, 1),
        (JobState.QUEUED, 1),
        (JobState.RUNNING, 2),
        (JobState.ENDED, 3),
    ]
    before = net.planes[A].opening_count
    for counter, (state, openings) in enumerate(told, start=1):
        card = a_card(job_id(1), B, state, counter=counter, estimate=Estimate(done=10.0 * counter))
        deliver(net, A, Parcel(ParcelKind.CARD, 0, encode_value(JobCard, card)))
        assert net.planes[A].opening_count - before == openings


def test_a_lower_epoch_loses_whatever_its_counter() -> None:
    net = settled(2, seed=19)
    net.run(2.0)
    new = a_card(job_id(1), B, epoch=2, counter=1)
    old = a_card(job_id(1), A, epoch=1, counter=1_000)
    for card in (new, old):
        deliver(net, A, Parcel(ParcelKind.CARD, 0, encode_value(JobCard, card)))
    assert [status.card.epoch for status in net.planes[A].jobs.values()] == [2]


def test_the_card_of_an_ended_job_is_not_taken_back() -> None:
    net = settled(2, seed=20)
    net.run(2.0)
    ended = a_location(job_id(1), 9, JobState.ENDED, 1_700_000_100.0)
    net.perform(A, net.planes[A].set_location(ended, net.now_s))
    deliver(net, A, Parcel(ParcelKind.CARD, 0, encode_value(JobCard, a_card(job_id(1), B, counter=1))))
    assert not net.planes[A].jobs


def test_cards_of_a_shepherd_that_fell_silent_expire() -> None:
    net = settled(3, seed=21)
    net.perform(A, net.planes[A].publish_card(a_card(job_id(1), A), net.now_s))
    net.run(10.0)
    assert len(net.planes[B].jobs.values()) == 1
    net.down.add(A)
    net.connect()
    net.run(250.0, validate=True)
    assert not net.planes[B].jobs


def test_records_of_the_departed_expire_and_do_not_come_back_without_news() -> None:
    net = settled(3, seed=22)
    net.run(5.0)
    stored = net.planes[A].node_record(B, net.now_s)
    assert stored is not None
    net.down.add(B)
    net.connect()
    net.now_s += 90_000.0
    net.connect()
    net.perform(A, net.planes[A].step(TimerFired(), net.now_s))
    assert B not in net.versions(A)
    body = encode_record(stored.record)
    deliver(net, A, Parcel(ParcelKind.NODE, 0, body))
    assert B not in net.versions(A)
    newer = encode_record(replace(stored.record, version=stored.record.version + 1))
    deliver(net, A, Parcel(ParcelKind.NODE, 0, newer))
    assert B in net.versions(A)


def test_locations_reach_all_and_old_ones_are_healed_by_bucket_hashes() -> None:
    net = settled(4, seed=23)
    net.run(5.0)
    for other in (B, NodeId("n002"), NodeId("n003")):
        net.cut |= {(A, other), (other, A)}
    for number in range(300):
        net.perform(A, net.planes[A].set_location(a_location(job_id(number * 30)), net.now_s))
    net.run(30.0)
    assert len(net.planes[B].locations) == 0
    net.cut.clear()
    net.connect()
    net.run(240.0)
    assert [len(net.planes[node].locations) for node in net.nodes] == [300] * 4
    assert net.planes[B].locations[job_id(30)] == a_location(job_id(30))


def test_a_new_location_is_pushed_to_three_peers_within_a_fifth_of_a_second() -> None:
    net = settled(10, seed=24)
    net.run(5.0)
    net.perform(A, net.planes[A].set_location(a_location(job_id(1)), net.now_s))
    net.run(0.25)
    assert sum(job_id(1) in net.planes[node].locations for node in net.nodes) >= 4


def test_a_setting_is_adopted_everywhere_persisted_and_the_highest_wins() -> None:
    net = StateNetwork(5, seed=25, check_setting=check_setting)
    net.connect()
    net.run(3.0)
    net.perform(A, net.planes[A].propose_setting(PolicySetting("las", {"promote_knob": 4.0}), net.now_s))
    net.perform(B, net.planes[B].propose_setting(PolicySetting("backfill"), net.now_s))
    net.run(10.0)
    assert {(net.planes[node].setting.policy, net.planes[node].setting.stamp) for node in net.nodes} == {
        ("backfill", (1, B))
    }
    assert {node for node, effect in net.effects if isinstance(effect, Persist)} == set(net.nodes)
    stored = [effect.value for node, effect in net.effects if node == A and isinstance(effect, Persist)][-1]
    restarted = net.add(A, seed=5)
    assert stored is not None
    restarted.restore_setting(stored)
    assert restarted.setting.stamp == (1, B)


def test_an_unusable_setting_changes_nothing_here_or_elsewhere() -> None:
    net = StateNetwork(2, seed=26, check_setting=check_setting)
    net.connect()
    with pytest.raises(ConfigError, match="did you mean 'backfill'"):
        net.planes[A].propose_setting(PolicySetting("backfil"), net.now_s)
    foreign = encode_setting(SwarmSetting(7, "x", "las", {"promote_knob": -5.0}))
    for _ in range(2):  # as each round of gossip brings it again
        deliver(net, A, Parcel(ParcelKind.SETTING, 0, foreign))
    assert net.planes[A].setting.stamp == (0, "")
    assert net.planes[A].counters["poisoned"] == 2
    told = [effect.text for _, effect in net.effects if isinstance(effect, Announce)]
    assert [text.partition(": ")[0] for text in told] == ["version 7, set on x"]


def test_an_owners_answer_repairs_the_view_until_a_newer_record_comes() -> None:
    net = settled(3, seed=27)
    net.run(5.0)
    plane = net.planes[A]
    plane.repair(B, FreeReport(GENERATION, 103, 1, cpus=96, memory_bytes=2**40), net.now_s)
    plane.repair(B, FreeReport(GENERATION, 102, 7, cpus=96, memory_bytes=2**40), net.now_s)

    def free() -> tuple[int, bool]:
        status = plane.node_record(B, net.now_s)
        assert status is not None
        return status.record.free_gpus, status.is_repaired

    assert free() == (1, True)
    for ahead, expected in ((1, (1, True)), (2, (1, True)), (3, (8, False))):
        body = record_bytes(version=50 + ahead, ledger_version=100 + ahead)
        deliver(net, A, Parcel(ParcelKind.NODE, 0, body))
        assert free() == expected


def test_a_partition_heals_to_equal_state() -> None:
    net = settled(8, seed=28)
    net.run(10.0)
    left, right = net.nodes[:4], net.nodes[4:]
    net.cut = {(a, b) for a in left for b in right} | {(b, a) for a in left for b in right}
    net.connect()
    for node in net.nodes:
        net.publish(node, sample_record(node, free=2))
    net.run(40.0)
    assert not everyone_agrees(net)
    net.cut.clear()
    net.connect()
    net.run(35.0)
    net.run(20.0)
    assert everyone_agrees(net)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = settled(10, seed=29, loss_ratio=0.1), settled(10, seed=29, loss_ratio=0.1)
    first.run(30.0)
    second.run(30.0)
    assert first.sent_bytes == second.sent_bytes
    assert [dict(p.counters) for p in first.planes.values()] == [dict(p.counters) for p in second.planes.values()]


def test_a_node_alone_says_nothing_and_keeps_its_own_record() -> None:
    net = StateNetwork(1, seed=30)
    net.publish(A, sample_record(A))
    net.connect()
    net.run(120.0, validate=True)
    assert net.sent_bytes[A] == 0
    assert net.versions(A)[A][0] == GENERATION
