"""How long a job waits before it is placed again, and which number its next attempt has."""

import random

import pytest
from msgspec.structs import replace

from swarmsched.ids import NodeId
from swarmsched.ledger.message import Refusal
from swarmsched.negotiation.pacing import (
    ATTEMPTS_SKIPPED_MAX,
    AVOID_NODE_S,
    AVOID_NODE_S_MAX,
    BACKOFF_ALONE_S,
    BACKOFF_S,
    BACKOFF_S_MAX,
    RESTART_DELAY_S,
    RESTART_DELAY_S_MAX,
    SETBACKS_FORGOTTEN_S,
    STARVING_ATTEMPTS,
    Pacing,
)
from tests.swarmsched.building import make_record

A, B = NodeId("a"), NodeId("b")
RECORD = make_record(A, attempt=3)


class Longest(random.Random):
    """Draws the largest number that may come."""

    def uniform(self, a, b):
        return b


@pytest.fixture
def pacing():
    return Pacing(RECORD, Longest())


def fail(pacing, times, refusal=Refusal.DOES_NOT_FIT):
    for _ in range(times):
        pacing.failed(refusal, None, 0.0)


def test_the_backoff_doubles_up_to_a_limit_and_begins_anew_after_a_success(pacing):
    waits = []
    for _ in range(12):
        fail(pacing, 1)
        waits.append(pacing.may_try_after_s)
    assert waits[:3] == [2 * BACKOFF_S, 4 * BACKOFF_S, 8 * BACKOFF_S]
    assert waits[-1] == BACKOFF_S_MAX
    pacing.succeeded()
    fail(pacing, 1)
    assert pacing.may_try_after_s == 2 * BACKOFF_S


def test_numbers_are_never_used_twice(pacing):
    assert pacing.next_number(RECORD) == 4
    pacing.last_attempt = 4
    assert pacing.next_number(RECORD) == 5
    assert pacing.next_number(replace(RECORD, attempt=8)) == 9
    assert pacing.next_number(replace(RECORD, epoch=1_002, is_forced=True)) == 1_001


def test_numbers_leap_ahead_of_those_that_an_earlier_life_has_used(pacing):
    numbers = []
    for _ in range(3):
        fail(pacing, 1, Refusal.RELEASED_ATTEMPT)
        numbers.append(pacing.next_number(RECORD))
    assert numbers == [5, 7, 11]
    fail(pacing, 20, Refusal.RELEASED_ATTEMPT)
    assert pacing.next_number(RECORD) == 4 + ATTEMPTS_SKIPPED_MAX


def test_the_number_that_an_owner_tells_is_passed_at_once_and_the_job_is_not_to_blame(pacing):
    pacing.released = (131, 0)
    fail(pacing, STARVING_ATTEMPTS, Refusal.RELEASED_ATTEMPT)
    assert pacing.next_number(RECORD) == 132
    assert pacing.may_try_after_s == BACKOFF_ALONE_S
    assert not pacing.has_failed_often
    pacing.last_attempt = 132
    fail(pacing, 1, Refusal.RELEASED_ATTEMPT)  # by an owner of a version that does not tell
    assert pacing.next_number(RECORD) == 134


@pytest.mark.parametrize("refusal", Refusal)
def test_a_node_is_avoided_unless_its_answer_said_what_to_ask_for(pacing, refusal):
    pacing.failed(refusal, A, 100.0)
    assert (A in pacing.avoided) == (refusal not in (Refusal.DOES_NOT_FIT, Refusal.RELEASED_ATTEMPT))


def test_nodes_that_refused_or_were_out_of_reach_are_avoided_for_a_while(pacing):
    pacing.failed(Refusal.CLAIMED, A, 100.0)
    pacing.avoid(B, 100.0)
    assert pacing.avoided == {A: 100.0 + BACKOFF_S_MAX, B: 100.0 + AVOID_NODE_S}


def test_a_node_that_fails_a_job_again_and_again_is_avoided_for_longer_until_that_is_long_ago(pacing):
    now_s, waits = 100.0, []
    for _ in range(4):
        pacing.avoid(B, now_s)
        waits.append(pacing.avoided[B] - now_s)
        now_s = pacing.avoided[B]
    assert waits == [AVOID_NODE_S, 2 * AVOID_NODE_S, AVOID_NODE_S_MAX, AVOID_NODE_S_MAX]
    pacing.avoid(B, now_s + SETBACKS_FORGOTTEN_S + 1.0)
    assert pacing.avoided[B] == now_s + SETBACKS_FORGOTTEN_S + 1.0 + AVOID_NODE_S


def test_a_node_that_told_what_it_has_left_is_taken_at_its_word_again_at_once(pacing):
    pacing.failed(Refusal.DOES_NOT_FIT, A, 100.0)
    assert pacing.avoided == {}


def test_a_job_that_asks_one_owner_alone_comes_back_soon_however_often_there_was_no_room(pacing):
    for _ in range(20):
        pacing.failed(Refusal.DOES_NOT_FIT, A, 100.0, was_alone=True)
        assert pacing.may_try_after_s <= 100.0 + BACKOFF_ALONE_S
    assert not pacing.has_failed_often
    for _ in range(STARVING_ATTEMPTS):
        pacing.failed(Refusal.DOES_NOT_FIT, A, 100.0)
    assert pacing.has_failed_often


def test_restarts_wait_longer_each_time_but_the_first(pacing):
    waits = []
    for restarts in (1, 2, 3, 4, 50):
        pacing.restarted(restarts, 100.0)
        waits.append(pacing.may_try_after_s - 100.0)
    assert waits == [0.0, RESTART_DELAY_S, 2 * RESTART_DELAY_S, 4 * RESTART_DELAY_S, RESTART_DELAY_S_MAX]


def test_a_job_that_found_no_place_again_and_again_is_known_as_such(pacing):
    fail(pacing, STARVING_ATTEMPTS - 1)
    assert not pacing.has_failed_often
    fail(pacing, 1)
    assert pacing.has_failed_often
