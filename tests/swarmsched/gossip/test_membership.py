"""One `Membership`: events in, effects out."""

import itertools
import math
import random

import pytest
from msgspec.structs import replace

from swarmsched.effects import Announce, Persist, SendDatagram, SendPeer
from swarmsched.errors import ConfigError
from swarmsched.events import (
    DatagramReceived,
    DatagramSendFailed,
    LoopLagged,
    PeerMessageReceived,
    TimerFired,
)
from swarmsched.gossip.dialler import DIAL_INTERVAL_S
from swarmsched.gossip.identity import JUMPS_MAX
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import (
    MEMBERSHIP_CODEC,
    MEMBERSHIP_PEER_KINDS,
    Ack,
    Gossip,
    Hello,
    MemberList,
    Ping,
    PingRequest,
    RelayAnswer,
    Standing,
    StreamPing,
    StreamPong,
    Update,
    is_membership_payload,
)
from swarmsched.ids import Address, NodeId
from swarmsched.wire.codec import Codec

ALIVE, SUSPECT, FAILED, LEFT = Standing
SOURCE: Address = ("10.0.0.9", 9)
ME = NodeId("me")
BASE = MembershipConfig(node_id=ME, address=("10.0.0.1", 1), generation=1_000, instance_id=b"m" * 16)


def claim(
    name: str, standing: Standing = ALIVE, incarnation: int = 0, generation: int = 1_000, **more: object
) -> Update:
    number = sum(name.encode())
    first = Update(
        NodeId(name), "10.0.1.1", number, generation, incarnation, standing, name.encode().ljust(16, b".")[:16]
    )
    return replace(first, **more)


class Driver:
    """Feeds one machine and reads what it says, decoded."""

    def __init__(self, *names: str, config: MembershipConfig = BASE) -> None:
        self.membership = Membership(config, random.Random(5))
        self.now_s = 100.0
        self.effects: list[object] = []
        self.timer()
        if names:
            self.hear(*(claim(name) for name in names))
            self.advance(5.0, acknowledge=True)

    def step(self, event: object) -> list[object]:
        self.effects = list(self.membership.step(event, self.now_s))  # type: ignore[arg-type]
        self.membership.validate()
        return self.effects

    def timer(self) -> list[object]:
        return self.step(TimerFired())

    def receive(self, message: object, source: Address = SOURCE) -> list[object]:
        return self.step(DatagramReceived(source, MEMBERSHIP_CODEC.encode(message)))

    def hear(self, *updates: Update) -> list[object]:
        return self.receive(Gossip(updates))

    def sent(self, kind: type) -> list[tuple[Address, object]]:
        """Packets of one class among the last effects."""
        packets = [
            (effect.destination, MEMBERSHIP_CODEC.decode(effect.payload))
            for effect in self.effects
            if isinstance(effect, SendDatagram)
        ]
        return [(where, message) for where, message in packets if isinstance(message, kind)]

    def status(self, name: str) -> MemberStatus | None:
        view = self.membership.member(NodeId(name))
        return None if view is None else view.status

    def advance(self, seconds: float, *, acknowledge: bool = False) -> list[object]:
        """Fire timers as they fall due; the effects of all of them."""
        end_s, everything = self.now_s + seconds, []
        while self.membership.next_deadline_s <= end_s:
            self.now_s = self.membership.next_deadline_s
            everything += self.timer()
            if acknowledge:
                for _, ping in self.sent(Ping):
                    self.acknowledge(ping)
        self.now_s = end_s
        self.effects = everything
        return everything

    def acknowledge(self, ping: object) -> None:
        assert isinstance(ping, Ping)
        name = claim(ping.target)
        self.step(
            DatagramReceived(
                name.address, MEMBERSHIP_CODEC.encode(Ack(ping.sequence, name.node, 1_000, 0, name.instance_id))
            )
        )

    def probe(self) -> Ping:
        """Run until a probe is sent."""
        for _ in range(100):
            self.now_s = self.membership.next_deadline_s
            self.timer()
            if pings := self.sent(Ping):
                assert isinstance(pings[0][1], Ping)
                return pings[0][1]
        raise AssertionError("no probe was sent")

    def changes(self) -> list[tuple[str, MemberStatus, MemberStatus | None]]:
        return [
            (effect.member.node_id, effect.member.status, effect.previous)
            for effect in self.effects
            if isinstance(effect, MemberChanged)
        ]


def test_a_lone_node_without_seeds_has_nothing_to_do() -> None:
    driver = Driver()
    assert driver.effects == []
    assert driver.membership.next_deadline_s == float("inf")
    assert driver.membership.alive() == [ME]


def test_joining_greets_every_seed_at_once_and_again_each_second_until_one_answers() -> None:
    config = replace(BASE, seeds=(("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)))
    driver = Driver(config=config)
    assert {where for where, _ in driver.sent(Hello)} == {("10.0.0.2", 2), ("10.0.0.3", 3)}  # not its own address
    assert driver.membership.next_deadline_s == driver.now_s + 1.0
    driver.now_s += 1.0
    driver.timer()
    assert len(driver.sent(Hello)) == 2


def test_a_probe_is_answered_only_under_its_own_name() -> None:
    driver = Driver("a")
    driver.receive(Ping(77, ME, NodeId("a")))
    ((where, ack),) = driver.sent(Ack)
    assert (where, ack) == (SOURCE, Ack(77, ME, 1_000, 0, b"m" * 16))
    assert driver.receive(Ping(78, NodeId("former-tenant"), NodeId("a"))) == []


def test_an_unknown_prober_is_asked_who_it_is() -> None:
    driver = Driver("a")
    driver.receive(Ping(1, ME, NodeId("stranger")))
    ((where, hello),) = driver.sent(Hello)
    assert where == SOURCE
    assert isinstance(hello, Hello)
    assert hello.wants_answer


def test_equal_hashes_need_no_list_and_different_ones_bring_it() -> None:
    driver = Driver("a")
    driver.receive(Hello(claim("a"), driver.membership.membership_hash, wants_answer=False))
    assert driver.effects == []
    driver.receive(Hello(claim("a"), driver.membership.membership_hash ^ 1, wants_answer=False))
    ((_, members),) = driver.sent(MemberList)
    assert isinstance(members, MemberList)
    assert {update.node for update in members.updates} == {"me", "a"}
    assert members.wants_answer


def test_a_list_that_exceeds_a_packet_goes_over_the_peer_channel_in_parts() -> None:
    driver = Driver()
    for start in range(0, 1_200, 10):
        driver.hear(*(claim(f"n{number}") for number in range(start, start + 10)))
    driver.receive(Hello(claim("n0"), 1, wants_answer=False))
    parts = [effect for effect in driver.effects if isinstance(effect, SendPeer)]
    assert [part.recipient for part in parts] == ["n0"] * 3
    messages = [part.message for part in parts]
    assert [len(message.updates) for message in messages if isinstance(message, MemberList)] == [500, 500, 201]
    assert [message.wants_answer for message in messages if isinstance(message, MemberList)] == [False, False, True]
    codec = Codec(MEMBERSHIP_PEER_KINDS)
    assert codec.decode(codec.encode(messages[0])) == messages[0]


def test_a_silent_member_is_asked_for_through_helpers_and_the_stream_then_suspected() -> None:
    driver = Driver("a", "b", "c", "d", "e")
    ping = driver.probe()
    driver.advance(0.5)
    requests = driver.sent(PingRequest)
    assert len(requests) == 3
    assert {message.target for _, message in requests} == {ping.target}  # type: ignore[attr-defined]
    assert SendPeer(ping.target, StreamPing(ping.sequence, ping.target)) in driver.effects
    driver.advance(0.501)
    assert driver.status(ping.target) is MemberStatus.SUSPECT
    assert (ping.target, MemberStatus.SUSPECT, MemberStatus.ALIVE) in driver.changes()
    assert ping.target not in driver.membership.alive()


def test_a_late_or_foreign_or_doubled_acknowledgement_changes_nothing() -> None:
    driver = Driver("a", "b", "c")
    ping = driver.probe()
    other = next(name for name in "abc" if name != ping.target)
    driver.receive(Ack(ping.sequence, NodeId(other), 1_000, 0, claim(other).instance_id))
    assert ping.sequence in driver.membership._prober._probes
    driver.acknowledge(ping)
    assert ping.sequence not in driver.membership._prober._probes
    driver.acknowledge(ping)
    assert driver.effects == []


def test_a_helper_that_reached_it_keeps_it_alive_and_marks_the_path() -> None:
    driver = Driver("a", "b", "c")
    ping = driver.probe()
    driver.advance(0.5)
    helper = next(name for name in "abc" if name != ping.target)
    driver.receive(RelayAnswer(ping.sequence, NodeId(helper), ping.target, is_reached=True))
    assert ping.sequence not in driver.membership._prober._probes
    view = driver.membership.member(ping.target)
    assert view is not None
    assert (view.status, view.indirect_only, view.degraded_udp) == (MemberStatus.ALIVE, True, False)


def test_a_stream_answer_keeps_it_alive_and_marks_its_udp_as_degraded() -> None:
    driver = Driver("a", "b")
    ping = driver.probe()
    driver.advance(0.5)
    driver.step(PeerMessageReceived(ping.target, StreamPong(ping.sequence, ping.target, 1_000, 0)))
    assert ping.sequence not in driver.membership._prober._probes
    view = driver.membership.member(ping.target)
    assert view is not None
    assert (view.status, view.degraded_udp) == (MemberStatus.ALIVE, True)


def test_a_stream_ping_is_answered_under_the_own_name_only() -> None:
    driver = Driver("a")
    driver.step(PeerMessageReceived(NodeId("a"), StreamPing(9, ME)))
    assert driver.effects == [SendPeer(NodeId("a"), StreamPong(9, ME, 1_000, 0))]
    assert driver.step(PeerMessageReceived(NodeId("a"), StreamPing(9, NodeId("other")))) == []


def test_a_helper_probes_and_reports_yes_or_no_in_time() -> None:
    driver = Driver("a", "b", "c")
    request = PingRequest(7, NodeId("c"), "10.0.1.1", 99, NodeId("a"), 500)
    driver.receive(request)
    ((where, ping),) = driver.sent(Ping)
    assert where == ("10.0.1.1", 99)
    assert isinstance(ping, Ping)
    driver.receive(Ack(ping.sequence, NodeId("c"), 1_000, 0, claim("c").instance_id))
    assert (SOURCE, RelayAnswer(7, ME, NodeId("c"), is_reached=True)) in driver.sent(RelayAnswer)
    driver.receive(request)
    driver.advance(0.41, acknowledge=False)
    assert (SOURCE, RelayAnswer(7, ME, NodeId("c"), is_reached=False)) in driver.sent(RelayAnswer)


def test_a_refused_send_begins_the_indirect_probe_at_once_and_lowers_health() -> None:
    driver = Driver("a", "b", "c", "d")
    before = driver.membership._health.score
    target = claim("b")
    driver.step(DatagramSendFailed(target.address, "EPERM"))
    assert len(driver.sent(PingRequest)) == 3
    assert any(isinstance(effect, SendPeer) and effect.recipient == "b" for effect in driver.effects)
    assert driver.membership._health.score == before + 1
    driver.advance(2.5)
    assert driver.status("b") is MemberStatus.SUSPECT


def test_two_independent_accusers_shorten_the_suspicion_to_its_minimum() -> None:
    driver = Driver("a", "b", "c", "d", "e")
    for accuser in ("a", "b", "c"):
        driver.hear(claim("e", SUSPECT, accuser=accuser))
    assert driver.membership._suspicions._by_node[NodeId("e")].deadline_s == pytest.approx(driver.now_s + 3.0)
    driver.advance(3.001, acknowledge=True)
    assert driver.status("e") is MemberStatus.FAILED


def test_the_same_accuser_twice_confirms_nothing() -> None:
    driver = Driver("a", "b", "c", "d", "e")
    driver.hear(claim("e", SUSPECT, accuser="a"))
    deadline_s = driver.membership._suspicions._by_node[NodeId("e")].deadline_s
    driver.hear(claim("e", SUSPECT, accuser="a"))
    assert (
        driver.membership._suspicions._by_node[NodeId("e")].deadline_s
        == deadline_s
        == pytest.approx(driver.now_s + 18.0)
    )


def test_a_stale_suspicion_does_not_undo_a_refutation() -> None:
    driver = Driver("a", "b")
    driver.hear(claim("b", ALIVE, incarnation=1))
    assert driver.hear(claim("b", SUSPECT, incarnation=0, accuser="a")) == []
    assert driver.status("b") is MemberStatus.ALIVE


def test_a_higher_generation_overrides_every_verdict_without_refutation() -> None:
    driver = Driver("a", "b")
    driver.hear(claim("b", FAILED))
    driver.hear(claim("b", ALIVE, generation=1_001, host="10.9.9.9"))
    assert driver.status("b") is MemberStatus.ALIVE
    assert driver.membership.address_of(NodeId("b")) == ("10.9.9.9", claim("b").port)
    assert driver.hear(claim("b", FAILED, incarnation=50)) == []


def test_an_accusation_of_oneself_is_refuted_at_once_to_the_accuser() -> None:
    driver = Driver("a", "b")
    own = replace(claim("me"), instance_id=b"m" * 16, standing=SUSPECT)
    driver.hear(own)
    assert driver.membership.incarnation == 1
    answers = [update for _, gossip in driver.sent(Gossip) for update in gossip.updates]  # type: ignore[attr-defined]
    assert (ME, ALIVE, 1) in {(update.node, update.standing, update.incarnation) for update in answers}
    driver.hear(own)
    assert driver.membership.incarnation == 1  # the same accusation again needs no new incarnation


def test_a_newer_generation_of_oneself_is_jumped_over_stored_and_told() -> None:
    driver = Driver("a", "b")
    driver.hear(replace(claim("me", generation=1_500), instance_id=b"former process.."))
    assert driver.membership.generation == 1_501
    assert Persist("meta", "generation", b"1501") in driver.effects
    assert driver.status("me") is MemberStatus.ALIVE


def test_another_process_that_answers_every_jump_is_a_conflict() -> None:
    driver = Driver("a", "b")
    for _ in range(JUMPS_MAX + 1):
        assert driver.status("me") is MemberStatus.ALIVE
        answer = claim("me", generation=driver.membership.generation + 1)
        driver.hear(replace(answer, instance_id=b"the other holder"))
    assert driver.changes() == [("me", MemberStatus.CONFLICT, MemberStatus.ALIVE)]
    assert driver.membership.alive() == ["a", "b"]
    generation = driver.membership.generation
    driver.hear(replace(answer, incarnation=9, instance_id=b"the other holder", is_conflict=True))
    assert (driver.membership.generation, driver.membership.incarnation) == (generation, 9)


def test_another_holder_of_the_name_is_greeted_where_it_says_that_it_is() -> None:
    driver = Driver("a", "b")
    other = replace(claim("me", generation=1_500), host="10.9.9.9", instance_id=b"the other holder")
    driver.hear(other)
    ((where, hello),) = driver.sent(Hello)
    assert where == other.address
    assert isinstance(hello, Hello)
    assert (hello.sender.node, hello.sender.generation) == (ME, 1_501)
    assert hello.updates == (other,)  # by which it sees that it is meant


def test_another_holder_of_the_name_with_an_older_claim_is_greeted_once() -> None:
    driver = Driver("a", "b")
    other = replace(claim("me", generation=1), host="10.9.9.9", instance_id=b"the other holder")
    driver.hear(other, other)
    assert [where for where, _ in driver.sent(Hello)] == [other.address]


def test_a_greeted_holder_that_answers_is_a_conflict_at_once() -> None:
    driver = Driver("a", "b")
    other = replace(claim("me", generation=1_500), host="10.9.9.9", instance_id=b"the other holder")
    driver.hear(other)
    ((_, hello),) = driver.sent(Hello)
    assert isinstance(hello, Hello)
    answer = replace(other, generation=1_502)
    driver.receive(Hello(answer, 0, wants_answer=False, updates=(hello.sender,)), other.address)
    assert driver.changes() == [("me", MemberStatus.CONFLICT, MemberStatus.ALIVE)]
    (where, conflict), *_ = reversed(driver.sent(Hello))
    assert isinstance(conflict, Hello)
    assert (where, conflict.sender.generation, conflict.sender.is_conflict) == (other.address, 1_502, True)


def test_what_another_holder_of_the_name_has_sent_before_it_heard_of_this_process_may_come_late() -> None:
    """It had answered the process before this one, and was stopped; then this one was started."""
    driver = Driver("a", "b")
    other = replace(claim("me", generation=1_500), host="10.9.9.9", instance_id=b"the other holder")
    former = replace(claim("me", generation=1_501), instance_id=b"former process..")
    driver.hear(other)
    for generation in (1_502, 1_503):
        late = Hello(replace(other, generation=generation), 0, wants_answer=False, updates=(former,))
        driver.receive(late, other.address)
    assert driver.changes() == []
    assert driver.membership.generation == 1_504


def test_a_former_process_at_the_own_address_is_not_greeted() -> None:
    driver = Driver("a", "b")
    driver.hear(replace(claim("me", generation=1_500), host="10.0.0.1", port=1, instance_id=b"former process.."))
    assert driver.membership.generation == 1_501
    assert driver.sent(Hello) == []


def test_a_conflict_of_another_member_is_published_and_ends_with_a_newer_generation() -> None:
    driver = Driver("a", "b")
    driver.hear(claim("b", incarnation=1, is_conflict=True))
    assert driver.status("b") is MemberStatus.CONFLICT
    driver.hear(claim("b", generation=1_001))
    assert driver.status("b") is MemberStatus.ALIVE


def test_who_knows_of_a_conflict_is_not_told_of_the_other_holder_again_and_again() -> None:
    driver = Driver("a", "b")
    driver.hear(claim("b", incarnation=1, is_conflict=True))
    other = replace(claim("b", incarnation=1, is_conflict=True), instance_id=b"the other holder")
    driver.hear(other)
    assert driver.sent(Gossip) == []
    driver.hear(replace(other, is_conflict=False))
    assert len(driver.sent(Gossip)) == 1


def test_of_two_lives_with_the_same_claim_one_is_known_everywhere_and_it_hears_of_the_other() -> None:
    first, second = (replace(claim("b"), instance_id=each * 16) for each in (b"1", b"2"))
    driver = Driver("a")
    driver.hear(first)
    driver.hear(second)
    assert (second.address, Gossip((first,))) in driver.sent(Gossip)
    driver.hear(first)
    assert (SOURCE, Gossip((second,))) in driver.sent(Gossip)


def test_two_that_correct_one_another_come_to_an_end_whatever_they_know() -> None:
    claims = [
        replace(claim("b", standing, incarnation, is_conflict=is_conflict), instance_id=instance * 16)
        for standing in (ALIVE, SUSPECT, FAILED)
        for incarnation in (0, 1)
        for is_conflict in (False, True)
        for instance in (b"1", b"2")
    ]
    for one, other in itertools.product(claims, repeat=2):
        pair = {SOURCE: Driver(), ("10.0.0.8", 8): Driver()}
        (here, first), (there, second) = pair.items()
        first.hear(one)
        second.hear(other)
        told: list[object] = [Gossip((one,))]
        source, target = here, there
        for _ in range(8):
            for each in told:
                pair[target].receive(each, source)
            told = [gossip for where, gossip in pair[target].sent(Gossip) if where == source and told]
            source, target = target, source
        assert not told, f"one knows {one}, the other {other}"


def test_old_news_of_a_sender_about_a_dead_or_newer_member_is_corrected_directly() -> None:
    driver = Driver("a", "b")
    driver.hear(claim("b", ALIVE, generation=1_003))
    driver.hear(claim("b", ALIVE, generation=1_000))
    ((where, gossip),) = driver.sent(Gossip)
    assert where == SOURCE
    assert gossip == Gossip((claim("b", ALIVE, generation=1_003),))


def test_an_accusation_of_an_unknown_member_is_kept_as_a_tombstone_and_passed_on() -> None:
    driver = Driver("a", "b")
    driver.hear(claim("ghost", FAILED, age_s=50))
    view = driver.membership.member(NodeId("ghost"))
    assert view is not None
    assert (view.status, view.since_s) == (MemberStatus.FAILED, 50.0)
    driver.advance(0.3, acknowledge=True)
    spread = [update.node for _, gossip in driver.sent(Gossip) for update in gossip.updates]  # type: ignore[attr-defined]
    assert "ghost" in spread


def test_the_long_dead_are_not_learnt_again_and_expire_at_the_same_age_everywhere() -> None:
    driver = Driver("a", "b")
    driver.hear(claim("ghost", FAILED, age_s=86_400))
    assert driver.membership.member(NodeId("ghost")) is None
    driver.hear(claim("ghost", FAILED, age_s=86_390))
    driver.advance(20.0, acknowledge=True)
    assert driver.membership.member(NodeId("ghost")) is None


def test_a_failed_verdict_in_a_list_is_only_an_accusation_of_whom_we_see_alive() -> None:
    driver = Driver("a", "b", "c", "d")
    driver.receive(MemberList(NodeId("a"), (claim("b", FAILED),), wants_answer=False))
    assert driver.status("b") is MemberStatus.SUSPECT
    told = [(where, gossip) for where, gossip in driver.sent(Gossip) if where == claim("b").address]
    assert told  # so that it can refute at once
    driver.hear(claim("b", FAILED))
    assert driver.status("b") is MemberStatus.FAILED  # a rumour of the verdict itself stands


@pytest.mark.parametrize(
    ("poison", "problem"),
    [
        (claim("b", generation=1_000 + 86_400 + 1_000), "generation"),
        (claim("b", incarnation=2**20 + 1), "incarnation"),
        (claim("new", generation=2**53), "generation"),
        (claim("bad name!"), "name"),
    ],
)
def test_poisoned_claims_are_refused_announced_once_and_change_nothing(poison: Update, problem: str) -> None:
    driver = Driver("a", "b")
    before = driver.membership.membership_hash
    driver.hear(poison)
    (announced,) = driver.effects
    assert isinstance(announced, Announce)
    assert announced.fields == {"problem": problem}
    assert driver.hear(poison) == []
    assert driver.membership.membership_hash == before
    assert driver.membership.counters["refused_claims"] == 2


def test_a_generation_of_the_present_is_accepted_however_long_this_node_runs() -> None:
    driver = Driver("a", "b")
    driver.now_s += 400 * 86_400.0
    driver.timer()
    driver.hear(claim("b", generation=1_000 + 400 * 86_400))
    view = driver.membership.member(NodeId("b"))
    assert view is not None
    assert view.generation == 1_000 + 400 * 86_400


def test_a_node_with_a_reset_clock_believes_the_first_peer_it_meets() -> None:
    driver = Driver()
    driver.hear(claim("a", generation=1_700_000_000), claim("b", generation=1_700_000_300))
    assert driver.membership.alive() == ["a", "b", "me"]


def test_malformed_packets_are_counted_and_change_nothing() -> None:
    driver = Driver("a")
    before = driver.membership.membership_hash
    rng = random.Random(11)
    for _ in range(300):
        driver.step(DatagramReceived(SOURCE, bytes([rng.randint(1, 31)]) + rng.randbytes(rng.randint(0, 60))))
    assert driver.membership.counters["malformed"] == 300
    assert driver.membership.membership_hash == before


def test_a_slow_node_asks_but_does_not_accuse() -> None:
    driver = Driver("a", "b", "c", "d")
    driver.step(LoopLagged(5.0))
    assert driver.membership._health.score >= 4
    ping = driver.probe()
    driver.advance(0.51 * (driver.membership._health.score + 1))
    assert driver.membership._prober._probes or driver.sent(PingRequest)
    for _ in range(6):
        driver.step(LoopLagged(5.0))
        driver.advance(2.0)
    assert driver.status(ping.target) is MemberStatus.ALIVE
    assert driver.membership.counters["accusations_withheld"] >= 1


def test_a_node_that_stood_still_gives_its_suspects_that_time_again() -> None:
    driver = Driver("a", "b", "c", "d")
    for accuser in ("a", "b", "c"):
        driver.hear(claim("d", SUSPECT, accuser=accuser))
    driver.now_s += 20.0
    driver.timer()
    assert driver.status("d") is MemberStatus.SUSPECT
    driver.hear(claim("d", ALIVE, incarnation=1))
    driver.advance(10.0, acknowledge=True)
    assert driver.status("d") is MemberStatus.ALIVE


def test_the_dead_are_dialled_for_ever_and_slower_after_an_hour() -> None:
    driver = Driver("a")
    driver.hear(claim("gone", FAILED))

    def dials(seconds: float) -> int:
        count, end_s = 0, driver.now_s + seconds
        while driver.now_s < end_s:
            driver.advance(1.0, acknowledge=True)
            count += sum(1 for where, _ in driver.sent(Hello) if where == claim("gone").address)
        return count

    assert 11 <= dials(60.0) <= 13
    driver.advance(3_700.0, acknowledge=True)
    assert 4 <= dials(300.0) <= 6


def test_the_dead_are_dialled_in_turn() -> None:
    driver = Driver("a")
    names = ("gone", "lost", "out")
    driver.hear(*(claim(name, FAILED) for name in names))
    addresses = {claim(name).address for name in names}
    for _ in range(4):
        driver.advance(3 * DIAL_INTERVAL_S, acknowledge=True)
        dialled = [where for where, _ in driver.sent(Hello) if where in addresses]
        assert sorted(dialled) == sorted(addresses)


def test_forgetting_needs_a_dead_member_and_ends_the_dialling() -> None:
    driver = Driver("a", "b")
    with pytest.raises(ConfigError, match="b is alive"):
        driver.membership.forget(NodeId("b"), driver.now_s)
    with pytest.raises(ConfigError, match="nobody is not a member"):
        driver.membership.forget(NodeId("nobody"), driver.now_s)
    driver.hear(claim("b", FAILED))
    driver.membership.forget(NodeId("b"), driver.now_s)
    assert driver.status("b") is MemberStatus.LEFT
    driver.advance(60.0, acknowledge=True)
    assert not [where for where, hello in driver.sent(Hello) if where == claim("b").address]
    driver.hear(claim("b", ALIVE, incarnation=1))
    assert driver.status("b") is MemberStatus.ALIVE  # it was only out of sight


def test_leaving_tells_peers_at_once_and_is_not_refuted_or_probed() -> None:
    driver = Driver("a", "b", "c")
    effects = driver.membership.leave(driver.now_s)
    packets = [MEMBERSHIP_CODEC.decode(effect.payload) for effect in effects if isinstance(effect, SendDatagram)]
    told = [update.standing for packet in packets if isinstance(packet, Gossip) for update in packet.updates]
    assert told.count(LEFT) >= 3
    driver.hear(replace(claim("me", LEFT), instance_id=b"m" * 16))
    assert driver.membership.incarnation == 0
    driver.receive(Ping(1, ME, NodeId("a")))
    assert driver.sent(Ack) == []


def test_its_own_address_among_the_seeds_under_another_name_is_dropped() -> None:
    driver = Driver(config=replace(BASE, seeds=(("192.168.0.1", 1),)))
    ((where, hello),) = driver.sent(Hello)
    driver.receive(hello, source=where)
    driver.advance(30.0)
    assert driver.effects == []


def test_members_are_bounded() -> None:
    driver = Driver()
    membership = driver.membership
    claims = [claim(f"n{number}") for number in range(20_001)]
    for start in range(0, len(claims), 500):
        message = MemberList(NodeId("n0"), tuple(claims[start : start + 500]), wants_answer=False)
        membership.step(PeerMessageReceived(NodeId("n0"), message), driver.now_s)
    assert len(membership.members(driver.now_s)) == 20_001  # 20,000 others and itself
    assert membership.counters["refused_claims"] == 1


def test_payloads_are_routed_by_their_first_byte() -> None:
    assert is_membership_payload(MEMBERSHIP_CODEC.encode(Gossip(())))
    assert not is_membership_payload(b"\x20rest")
    assert not is_membership_payload(b"\x00")
    assert not is_membership_payload(b"")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("node_id", "no spaces allowed"),
        ("instance_id", b"short"),
        ("generation", 0),
        ("packet_ceiling_bytes", 9_000),
        ("probe_period_s", 0.1),
        ("probe_period_s", math.nan),
    ],
)
def test_an_unusable_parameter_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(BASE, **{key: value})
    assert caught.value.key == key
