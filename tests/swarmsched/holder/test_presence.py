"""Whose ranks count as lost: verdicts must stand for a moment, planned stops may last, and strangers are waited for."""

from types import SimpleNamespace

import pytest

from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.holder.presence import PLANNED_STOP_S, REFUTED_S, STRANGER_S, Presence
from swarmsched.ids import NodeId
from tests.swarmsched.building import make_record

ME, OTHER, THIRD = NodeId("me"), NodeId("other"), NodeId("third")


@pytest.fixture
def presence():
    return Presence(ME)


def becomes(presence, status, now_s, node=OTHER):
    view = MemberView(node, ("10.0.0.2", 7400), 1, 0, status, 0.0, b"", "", 1, 1)
    return presence.changed(view, now_s)


def test_a_verdict_counts_when_it_has_stood_for_a_moment(presence):
    assert becomes(presence, MemberStatus.FAILED, 10.0)
    assert presence.next_verdict_s(10.0) == 10.0 + REFUTED_S
    assert presence.lost(10.0 + REFUTED_S - 0.1) == frozenset()
    assert presence.lost(10.0 + REFUTED_S) == {OTHER}


def test_a_verdict_that_is_refuted_in_time_costs_nothing(presence):
    becomes(presence, MemberStatus.FAILED, 10.0)
    becomes(presence, MemberStatus.ALIVE, 10.2)
    assert presence.lost(60.0) == frozenset()
    assert presence.is_there(OTHER)


def test_who_says_goodbye_may_stay_away_for_longer(presence):
    becomes(presence, MemberStatus.LEFT, 0.0)
    assert (presence.failed, presence.lost(PLANNED_STOP_S - 1.0)) == (set(), frozenset())
    assert presence.lost(PLANNED_STOP_S) == {OTHER}


def test_a_node_of_our_jobs_that_nobody_has_told_of_is_lost_after_a_while(presence):
    jobs = [SimpleNamespace(record=make_record(ME, (ME, THIRD)))]
    presence.look_for_strangers(jobs, 5.0)
    presence.look_for_strangers(jobs, 5.0 + STRANGER_S)
    assert presence.lost(5.0 + STRANGER_S - 1.0) == frozenset()
    assert presence.lost(5.0 + STRANGER_S) == {THIRD}
    becomes(presence, MemberStatus.ALIVE, 5.0 + STRANGER_S, THIRD)
    assert presence.lost(60.0) == frozenset()


def test_holders_may_answer_while_a_majority_of_them_is_there(presence):
    record = make_record(ME, (ME, OTHER, THIRD))
    assert not presence.may_answer(record)
    becomes(presence, MemberStatus.ALIVE, 0.0)
    assert presence.may_answer(record)
    becomes(presence, MemberStatus.FAILED, 1.0)
    assert not presence.may_answer(record)
