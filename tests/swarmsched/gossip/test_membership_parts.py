"""The small machines under `Membership`: health, suspicion, rumours, probe order, identity, roster."""

import random
from copy import copy

import pytest
from msgspec.structs import replace

from swarmsched.effects import SendDatagram
from swarmsched.gossip.dissemination import RUMOUR_INTERVAL_S, RUMOUR_PEERS, Dissemination
from swarmsched.gossip.health import LocalHealth
from swarmsched.gossip.identity import JUMPS_MAX, PEACE_S, Identity, Reaction
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import MEMBERSHIP_CODEC, Gossip, Standing, Update
from swarmsched.gossip.prober import ProbeOrder
from swarmsched.gossip.roster import Roster
from swarmsched.gossip.rumour import RUMOURS_PER_PACKET, RumourQueue, rumour_sends
from swarmsched.gossip.suspicion import Suspicion, confirmations_wanted, suspicion_min_s
from swarmsched.ids import NodeId

ALIVE, SUSPECT, FAILED, LEFT = Standing
OWN = Update(NodeId("me"), "10.0.0.1", 1, 100, 0, ALIVE, b"m" * 16)
FOREIGN = b"f" * 16


def claim(number: int, standing: Standing = ALIVE, incarnation: int = 0) -> Update:
    return Update(NodeId(f"n{number}"), "10.0.0.2", number, 100, incarnation, standing, bytes([number % 256]) * 16)


def test_missed_answers_alone_never_silence_a_node() -> None:
    health = LocalHealth()
    for _ in range(50):
        health.probe_missed()
    assert health.may_accuse
    assert health.score == 3


def test_lag_silences_a_node_until_time_without_lag_has_passed() -> None:
    health = LocalHealth()
    health.lagged(0.1, 0.0)
    assert health.score == 0
    health.lagged(60.0, 0.0)
    assert health.score == 8
    assert not health.may_accuse
    for second in range(1, 26):
        health.pass_time(float(second))
    assert health.score == 3
    assert health.may_accuse


def test_answered_probes_restore_health() -> None:
    health = LocalHealth()
    health.probe_missed()
    health.probe_acknowledged()
    health.probe_acknowledged()
    assert (health.score, health.multiplier) == (0, 1)


@pytest.mark.parametrize(("members", "expected_s"), [(1, 3.0), (2, 3.0), (10, 3.0), (30, 4.43), (1_000, 9.0)])
def test_the_suspicion_minimum_grows_with_the_logarithm_of_the_swarm(members: int, expected_s: float) -> None:
    assert suspicion_min_s(members) == pytest.approx(expected_s, abs=0.01)


def test_small_swarms_wait_for_no_confirmation() -> None:
    assert [confirmations_wanted(members) for members in (2, 3, 4, 30)] == [0, 0, 2, 2]
    assert Suspicion("a", 2, 10.0).deadline_s == 13.0


def test_each_accuser_shortens_a_suspicion_until_enough_agree() -> None:
    suspicion = Suspicion("a", 10, 0.0)
    deadlines = [suspicion.deadline_s]
    for accuser in ("b", "c", "d"):
        suspicion.confirm(accuser)
        deadlines.append(suspicion.deadline_s)
    assert deadlines[0] == 18.0
    assert 3.0 < deadlines[1] < 18.0
    assert deadlines[2:] == [pytest.approx(3.0), pytest.approx(3.0)]


def test_rumours_are_sent_at_least_eight_times() -> None:
    assert [rumour_sends(members) for members in (1, 2, 30, 99, 100, 1_000, 10_000)] == [8, 8, 8, 8, 12, 16, 20]


def test_a_rumour_is_sent_so_often_and_then_forgotten_and_new_news_replaces_old() -> None:
    queue = RumourQueue()
    queue.put(claim(1))
    queue.put(claim(1, SUSPECT))
    assert [queue.take(1_000, 8) for _ in range(9)] == [(claim(1, SUSPECT),)] * 8 + [()]
    assert not queue


def test_the_least_sent_rumours_go_first_and_packets_stay_within_their_room() -> None:
    queue = RumourQueue()
    for number in range(100):
        queue.put(claim(number))
    sent = [update for _ in range(8) for update in queue.take(900, 8)]
    assert len({update.node for update in sent}) == 100
    taken = queue.take(900, 100)
    assert len(MEMBERSHIP_CODEC.encode(Gossip(taken))) <= 900 + 8
    assert len(queue.take(10**6, 100)) == RUMOURS_PER_PACKET


@pytest.mark.parametrize(("failed", "share"), [(1, 1 / 30), (15, 0.5)])
def test_those_that_failed_lately_take_their_share_of_rumours_and_no_more(failed: int, share: float) -> None:
    roster = Roster(random.Random(1))
    for number in range(30):
        standing = FAILED if number < failed else ALIVE
        roster.put(replace(claim(number, standing), port=1_000 + number), 0.0)
    config = MembershipConfig(node_id=OWN.node, address=OWN.address, generation=1, instance_id=OWN.instance_id)
    outbox = Dissemination(config, Identity(OWN), roster, random.Random(2))
    ports: list[int] = []
    for round_number in range(400):
        now_s = round_number * RUMOUR_INTERVAL_S / 4  # all within the time of telling the dead
        outbox.next_rumour_s = now_s
        outbox.put_rumour(claim(29, incarnation=round_number), now_s)
        outbox.spread(now_s)
        ports += [effect.destination[1] for effect in outbox.drain() if isinstance(effect, SendDatagram)]
    to_failed = sum(port < 1_000 + failed for port in ports)
    assert len(ports) == 400 * RUMOUR_PEERS
    assert to_failed / len(ports) == pytest.approx(share, abs=0.03)


def test_every_name_is_probed_once_a_round_in_another_order_each_time() -> None:
    names = [NodeId(f"n{number}") for number in range(20)]
    order = ProbeOrder(random.Random(3))
    rounds = []
    for _ in range(3):
        order.restart(names)
        rounds.append([order.pop() for _ in range(21)])
    assert all(sorted(filter(None, each)) == sorted(names) and each[-1] is None for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3


def heard(*claims: Update) -> tuple[Identity, list[Reaction]]:
    identity = Identity(OWN)
    return identity, [identity.hear(each, 0.0) for each in claims]


def test_identity_refutes_only_accusations_of_its_present_incarnation() -> None:
    identity, reactions = heard(
        OWN,
        replace(OWN, standing=SUSPECT),
        replace(OWN, standing=SUSPECT),
        replace(OWN, standing=FAILED, incarnation=7),
        replace(OWN, generation=99, standing=FAILED),
    )
    assert reactions == [
        Reaction.NOTHING,
        Reaction.REFUTED,
        Reaction.CORRECT,
        Reaction.REFUTED,
        Reaction.CORRECT,
    ]
    assert identity.update.incarnation == 8


def test_a_stale_generation_of_another_peer_after_a_jump_is_no_conflict() -> None:
    identity, reactions = heard(
        replace(OWN, generation=150, instance_id=FOREIGN),
        replace(OWN, generation=200, instance_id=FOREIGN),
    )
    assert reactions == [Reaction.JUMPED, Reaction.JUMPED]
    assert identity.update.generation == 201
    assert not identity.update.is_conflict


def test_two_identities_that_hear_one_another_end_in_conflict_and_stay_there() -> None:
    one, other = Identity(OWN), Identity(replace(OWN, generation=103, instance_id=FOREIGN))
    for _ in range(10):
        one.hear(other.update, 0.0)
        other.hear(one.update, 0.0)
    assert one.update.is_conflict
    assert other.update.is_conflict
    assert one.update.generation == other.update.generation
    settled = (one.update, other.update)
    one.hear(other.update, 0.0)
    other.hear(one.update, 0.0)
    assert (one.update, other.update) == settled


def test_equal_generations_of_two_instances_end_in_conflict_too() -> None:
    one, other = Identity(OWN), Identity(replace(OWN, instance_id=FOREIGN))
    for _ in range(10):
        one.hear(other.update, 0.0)
        other.hear(one.update, 0.0)
    assert one.update.is_conflict
    assert other.update.is_conflict


def test_a_hoax_of_ever_newer_generations_ends_in_conflict_and_not_in_a_race() -> None:
    identity = Identity(OWN)
    for step in range(JUMPS_MAX + 1):
        identity.hear(replace(OWN, generation=1_000 * (step + 1), instance_id=FOREIGN), 0.0)
    assert identity.update.is_conflict


def test_the_hash_depends_on_what_is_known_and_not_on_the_order_of_learning() -> None:
    claims = [claim(number) for number in range(10)]
    rosters = []
    for seed in (1, 2):
        roster = Roster(random.Random(seed))
        order = [*claims, replace(claims[3], standing=FAILED, age_s=seed * 10)]
        random.Random(seed).shuffle(order)
        order.sort(key=lambda update: update.standing.value)
        for update in order:
            roster.put(update, 100.0)
            roster.validate()
        rosters.append(roster)
    assert rosters[0].hash == rosters[1].hash != 0
    rosters[0].remove(claims[0].node)
    rosters[0].validate()
    assert rosters[0].hash != rosters[1].hash


def test_a_verdict_that_is_said_to_be_ages_old_can_still_be_told_on() -> None:
    """An insider's claim of 2^32 - 1 seconds must not make every list of members one that cannot be encoded."""
    roster = Roster(random.Random(1))
    member = roster.put(replace(claim(1), standing=FAILED, age_s=2**32 - 1), 0.0)
    told = Gossip((roster.claim(member, 1e6),))
    assert MEMBERSHIP_CODEC.decode(MEMBERSHIP_CODEC.encode(told)) == told


def test_the_dead_are_not_drawn_as_peers_and_are_told_with_their_age() -> None:
    roster = Roster(random.Random(1))
    for number in range(5):
        roster.put(claim(number), 0.0)
    dead = roster.put(claim(2, FAILED), 50.0)
    assert NodeId("n2") not in roster.sample(10)
    assert roster.sample(10, excluding=[NodeId("n0"), NodeId("n1")]) != []
    assert set(roster.sample(10, excluding=[NodeId("n0"), NodeId("n1")])) == {"n3", "n4"}
    assert roster.claim(dead, 62.0).age_s == 12


def test_an_address_belongs_to_the_member_that_claimed_it_last() -> None:
    roster = Roster(random.Random(1))
    roster.put(claim(1), 0.0)
    roster.put(replace(claim(2), host="10.0.0.2", port=1), 0.0)
    roster.put(replace(claim(1, incarnation=1), port=77), 0.0)
    roster.validate()
    at_old, at_new = roster.at(("10.0.0.2", 1)), roster.at(("10.0.0.2", 77))
    assert at_old is not None
    assert at_new is not None
    assert (at_old.update.node, at_new.update.node) == ("n2", "n1")


@pytest.mark.parametrize("generation", [OWN.generation, 300])
def test_a_restart_leaves_a_conflict_behind_unless_the_other_holder_lives(generation: int) -> None:
    restarted = Identity(OWN)
    other = replace(OWN, generation=generation, instance_id=FOREIGN, is_conflict=True)
    assert restarted.hear(other, 0.0) is Reaction.JUMPED
    assert (restarted.update.generation, restarted.update.is_conflict) == (generation + 1, False)
    alive = Identity(other)
    for _ in range(JUMPS_MAX + 1):
        alive.hear(restarted.update, 0.0)
        restarted.hear(alive.update, 0.0)
    assert (restarted.update.is_conflict, alive.update.is_conflict) == (True, True)
    assert restarted.update.generation == alive.update.generation


def test_what_a_holder_that_is_gone_left_behind_at_each_generation_is_no_conflict() -> None:
    identity, reactions = heard(
        replace(OWN, generation=200, incarnation=2, instance_id=FOREIGN, is_conflict=True),
        replace(OWN, generation=201, incarnation=1, instance_id=FOREIGN, is_conflict=True),
        replace(OWN, generation=203, instance_id=FOREIGN),
        replace(OWN, generation=201, incarnation=1, instance_id=FOREIGN, is_conflict=True),
    )
    assert reactions == [Reaction.JUMPED, Reaction.JUMPED, Reaction.JUMPED, Reaction.CORRECT]
    assert (identity.update.generation, identity.update.is_conflict) == (204, False)


@pytest.mark.parametrize("standing", [ALIVE, SUSPECT])
def test_a_conflict_that_is_said_of_this_very_process_is_contested_too(standing: Standing) -> None:
    identity, reactions = heard(replace(OWN, incarnation=2, standing=standing, is_conflict=True))
    assert reactions == [Reaction.JUMPED]
    assert (identity.update.generation, identity.update.is_conflict) == (OWN.generation + 1, False)


def test_a_claimant_that_has_heard_of_this_process_lives_and_another_may_not() -> None:
    claim = replace(OWN, generation=200, instance_id=FOREIGN)
    alive, gone = Identity(OWN), Identity(OWN)
    assert alive.hear(claim, 0.0, is_answer=True) is Reaction.CONFLICT
    assert gone.hear(claim, 0.0) is Reaction.JUMPED
    assert (alive.update.generation, alive.update.is_conflict) == (200, True)
    assert (gone.update.generation, gone.update.is_conflict) == (201, False)


def test_old_quarrels_over_a_name_are_no_reason_for_a_conflict() -> None:
    identity = Identity(OWN)
    for step in range(JUMPS_MAX):
        identity.hear(replace(OWN, generation=200 + 2 * step, instance_id=FOREIGN), 10.0)
    late = replace(OWN, generation=300, instance_id=FOREIGN)
    assert copy(identity).hear(late, 10.0 + PEACE_S) is Reaction.CONFLICT
    assert identity.hear(late, 10.1 + PEACE_S) is Reaction.JUMPED


def test_who_enters_a_conflict_keeps_the_incarnation_that_it_had_reached() -> None:
    identity = Identity(OWN)
    for step in range(JUMPS_MAX):
        identity.hear(replace(OWN, generation=200 + 2 * step, instance_id=FOREIGN), 0.0)
    own = identity.update
    identity.hear(replace(own, standing=SUSPECT, incarnation=6), 0.0)
    identity.hear(replace(own, incarnation=1, instance_id=FOREIGN, is_conflict=True), 0.0)
    assert (identity.update.incarnation, identity.update.is_conflict) == (8, True)
