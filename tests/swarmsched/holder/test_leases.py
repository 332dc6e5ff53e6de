"""Who may act: a shepherd stops before any holder is free to vote for another, whatever was lost or late."""

import math
import random

import pytest

from swarmsched.authority.message import LeaseGranted, LeaseRenewal
from swarmsched.authority.timing import LEASE_RENEWAL_S, LEASE_TTL_S, patience_s
from swarmsched.holder.leases import ACTING_S, LEASES_MAX, LeaseBook, LeaseKeeper
from swarmsched.holders import Configuration
from swarmsched.ids import NodeId
from tests.swarmsched.building import holders_of

ME, A, B, C, D = (NodeId(name) for name in ("me", "a", "b", "c", "d"))
PATIENCE_S = patience_s(LEASE_TTL_S)


THREE = Configuration(holders_of(A, B, C))
WITH_ME = Configuration(holders_of(ME, A, B))


@pytest.fixture
def keeper():
    return LeaseKeeper(ME, 7)


@pytest.fixture
def book():
    return LeaseBook(started_s=0.0)


def renewed(keeper, nodes, now_s):
    """The renewals sent at that time, by holder."""
    keeper.set_holders(nodes, now_s)
    return {effect.recipient: effect.message for effect in keeper.on_timer(now_s)}


def grant(keeper, renewals, *nodes):
    for node in nodes:
        keeper.granted(node, LeaseGranted(renewals[node].sequence))


def test_new_holders_are_asked_at_once_and_then_at_every_renewal(keeper):
    assert keeper.next_deadline_s == math.inf
    assert list(renewed(keeper, [B, A], 5.0)) == [A, B]
    assert keeper.next_deadline_s == 5.0 + LEASE_RENEWAL_S
    assert keeper.on_timer(5.0 + LEASE_RENEWAL_S - 0.1) == []
    assert list(renewed(keeper, [A, B, C], 6.0)) == [C]
    assert [effect.recipient for effect in keeper.on_timer(5.0 + LEASE_RENEWAL_S)] == [A, B]


def test_a_node_does_not_ask_itself_and_counts_as_one_of_the_holders(keeper):
    renewals = renewed(keeper, [ME, A, B], 0.0)
    assert list(renewals) == [A, B]
    assert not keeper.holds(WITH_ME, 0.0)
    grant(keeper, renewals, A)
    assert keeper.holds(WITH_ME, 0.0)


def test_the_only_holder_acts_without_limit(keeper):
    assert keeper.acting_until_s(Configuration(holders_of(ME))) == math.inf


def test_a_job_without_holders_is_nobodys(keeper):
    assert not keeper.holds(Configuration(), 0.0)


def test_a_majority_lets_act_from_the_sending_of_its_oldest_renewal(keeper):
    first = renewed(keeper, [A, B, C], 10.0)
    second = {effect.recipient: effect.message for effect in keeper.on_timer(13.0)}
    grant(keeper, first, A)
    assert not keeper.holds(THREE, 13.5)
    grant(keeper, second, B)
    assert keeper.acting_until_s(THREE) == 10.0 + ACTING_S
    assert keeper.holds(THREE, 10.0 + ACTING_S - 0.01)
    assert not keeper.holds(THREE, 10.0 + ACTING_S)
    grant(keeper, second, C)
    assert keeper.acting_until_s(THREE) == 13.0 + ACTING_S


def test_a_joint_configuration_needs_a_majority_of_both_groups(keeper):
    joint = Configuration(holders_of(A, B, C), leaving=holders_of(D))
    renewals = renewed(keeper, [A, B, C, D], 0.0)
    grant(keeper, renewals, A, B, C)
    assert not keeper.holds(joint, 1.0)
    grant(keeper, renewals, D)
    assert keeper.holds(joint, 1.0)


def test_a_late_grant_counts_from_its_own_renewal_and_takes_nothing_back(keeper):
    first = renewed(keeper, [A, B], 0.0)
    second = {effect.recipient: effect.message for effect in keeper.on_timer(3.0)}
    grant(keeper, second, A, B)
    grant(keeper, first, A, B)
    assert keeper.acting_until_s(Configuration(holders_of(A, B))) == 3.0 + ACTING_S


def test_a_doubled_or_invented_grant_counts_for_nothing(keeper):
    renewals = renewed(keeper, [A], 0.0)
    only_a = Configuration(holders_of(A))
    keeper.granted(A, LeaseGranted(renewals[A].sequence + 1))
    keeper.granted(B, LeaseGranted(renewals[A].sequence))
    assert not keeper.holds(only_a, 0.0)
    grant(keeper, renewals, A)
    grant(keeper, renewals, A)
    assert keeper.acting_until_s(only_a) == ACTING_S


def test_a_grant_to_an_earlier_life_is_no_grant_to_this_one():
    old = renewed(LeaseKeeper(ME, 7), [A], 0.0)
    keeper = LeaseKeeper(ME, 8)
    renewed(keeper, [A], 100.0)
    grant(keeper, old, A)
    assert not keeper.holds(Configuration(holders_of(A)), 100.0)


def test_an_accepted_update_counts_from_its_sending(keeper):
    only_a = Configuration(holders_of(A))
    keeper.assume(A, 4.0)
    assert not keeper.holds(only_a, 4.0)  # not one of those that are asked
    keeper.set_holders([A], 4.0)
    keeper.assume(A, 4.0)
    keeper.assume(A, 2.0)
    assert keeper.acting_until_s(only_a) == 4.0 + ACTING_S


def test_a_holder_that_left_and_came_back_must_grant_anew(keeper):
    grant(keeper, renewed(keeper, [A], 0.0), A)
    keeper.set_holders([], 1.0)
    assert keeper.on_timer(100.0) == []
    keeper.set_holders([A], 2.0)
    assert not keeper.holds(Configuration(holders_of(A)), 2.0)
    assert keeper.next_deadline_s == 2.0


def test_unanswered_renewals_are_not_kept(keeper):
    keeper.set_holders([A], 0.0)
    for turn in range(1_000):
        keeper.on_timer(turn * LEASE_RENEWAL_S)
    assert len(keeper._asked_s[A]) <= ACTING_S / LEASE_RENEWAL_S + 1


def test_a_broken_quorum_can_be_put_in():
    keeper = LeaseKeeper(ME, 7, quorum=lambda _count: 1)
    grant(keeper, renewed(keeper, [A, B, C], 0.0), A)
    assert keeper.holds(THREE, 1.0)


def test_a_holder_votes_for_nobody_else_while_the_lease_runs(book):
    (granted,) = book.renew(A, LeaseRenewal(5, 7), 100.0)
    assert (granted.recipient, granted.message) == (A, LeaseGranted(5))
    assert book.free_s(A, 7) == 100.0 + PATIENCE_S
    assert not book.may_change(A, 7, 100.0 + PATIENCE_S - 0.01)
    assert book.may_change(A, 7, 100.0 + PATIENCE_S)
    assert book.may_change(B, 7, 100.0)


def test_an_accepted_update_is_a_renewal(book):
    book.renew(A, LeaseRenewal(5, 7), 100.0)
    book.touch(A, 7, 105.0)
    assert book.free_s(A, 7) == 105.0 + PATIENCE_S


def test_another_life_of_a_shepherd_keeps_no_lease_of_the_present_one(book):
    book.renew(A, LeaseRenewal(5, 7), 100.0)
    book.renew(A, LeaseRenewal(6, 8), 105.0)
    assert book.may_change(A, 7, 100.0 + PATIENCE_S)
    assert not book.may_change(A, 8, 100.0 + PATIENCE_S)


def test_a_restarted_holder_waits_for_one_lease():
    book = LeaseBook(started_s=50.0)
    assert not book.may_change(A, 7, 50.0 + PATIENCE_S - 0.01)
    assert book.may_change(A, 7, 50.0 + PATIENCE_S)


def test_leases_that_are_over_are_forgotten(book):
    for index in range(1_000):
        book.touch(NodeId(f"n{index}"), 7, index * 1.0)
    assert len(book._renewed_s) <= PATIENCE_S + 1


def test_at_the_limit_the_forgotten_lease_is_still_kept():
    book = LeaseBook(started_s=0.0)
    for index in range(LEASES_MAX + 1):
        book.touch(NodeId(f"n{index}"), 7, 100.0)
    assert len(book._renewed_s) == LEASES_MAX
    assert not book.may_change(NodeId("n0"), 7, 100.0 + PATIENCE_S - 0.01)


class LeasePlay:
    """A shepherd and three holders, with clocks of any rate within 5 %, and messages lost, doubled and very late."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.rates = {node: rng.choice((0.95, 1.05, rng.uniform(0.95, 1.05))) for node in (ME, A, B, C)}
        self.loss = rng.choice((0.0, 0.2, 0.6))
        self.keeper = LeaseKeeper(ME, 7)
        self.keeper.set_holders([A, B, C], 0.0)
        self.books = {node: LeaseBook(0.0) for node in (A, B, C)}
        self.in_flight = []
        self.acted = self.became_free = 0

    def send(self, now_s, kind, node, what):
        for _ in range(self.rng.choice((1, 1, 2))):
            if self.rng.random() >= self.loss:
                self.in_flight.append(
                    (now_s + self.rng.choice((0.0, 0.1, self.rng.uniform(0.0, 9.0))), kind, node, what)
                )

    def play(self):
        """Step through true time; what arrives is handled in the order of arrival."""
        for tick in range(300):
            now_s = tick * 0.25
            my_s = now_s * self.rates[ME]
            if now_s < 40.0:
                for effect in self.keeper.on_timer(my_s):
                    self.send(now_s, "renewal", effect.recipient, effect.message)
                if self.rng.random() < 0.05:
                    self.send(now_s, "update", self.rng.choice((A, B, C)), my_s)
            if self.rng.random() < 0.01:
                node = self.rng.choice((A, B, C))
                self.books[node] = LeaseBook(now_s * self.rates[node])
            arrived = sorted((each for each in self.in_flight if each[0] <= now_s), key=lambda each: each[0])
            self.in_flight = [each for each in self.in_flight if each[0] > now_s]
            for _, kind, node, what in arrived:
                self.arrive(now_s, kind, node, what)
            self.check(now_s, my_s)

    def arrive(self, now_s, kind, node, what):
        match kind:
            case "renewal":
                for effect in self.books[node].renew(ME, what, now_s * self.rates[node]):
                    self.send(now_s, "grant", node, effect.message)
            case "update":
                self.books[node].touch(ME, 7, now_s * self.rates[node])
                self.send(now_s, "accepted", node, what)
            case "grant":
                self.keeper.granted(node, what)
            case "accepted":
                self.keeper.assume(node, what)

    def check(self, now_s, my_s):
        acts = self.keeper.holds(THREE, my_s)
        free = [node for node, book in self.books.items() if book.may_change(ME, 7, now_s * self.rates[node])]
        assert not (acts and len(free) >= 2), f"acts at {now_s} while {free} would vote for another"
        self.acted += acts
        self.became_free += len(free) >= 2


def test_a_shepherd_never_acts_while_a_majority_would_vote_for_another():
    acted = became_free = 0
    for seed in range(60):
        play = LeasePlay(seed)
        play.play()
        acted += play.acted > 0
        became_free += play.became_free > 0
    assert acted > 30
    assert became_free > 30
