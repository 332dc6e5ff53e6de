"""One attempt: all holds in time or none, launch only after all, and nothing that comes late moves it."""

from itertools import count

import pytest

from swarmsched.api import JobSpec
from swarmsched.ids import NodeId, Place
from swarmsched.ledger.message import HOLD_TTL_S, Refusal
from swarmsched.negotiation.attempt import DECISION_MARGIN_S, Attempt, AttemptPhase, Ranking
from swarmsched.resources import Demand, Share
from tests.swarmsched.building import answer_to, make_record

A, B = NodeId("a"), NodeId("b")
RECORD = make_record("boss", spec=JobSpec(("true",), ranks=3, demand=Demand(gpus=1)), shepherd_generation=7)


@pytest.fixture
def attempt():
    return Attempt(RECORD, 1, (Share(A, 2), Share(B, 1)), Ranking("fifo", (1,)), count(1))


def answer(attempt, effect, now_s, refusal=Refusal.NONE, **changes):
    return attempt.answered(answer_to(effect.message, effect.recipient, refusal, **changes), now_s)


def held(attempt):
    for hold in attempt.begin(0.0):
        answer(attempt, hold, 0.1)


def test_only_unanswered_holds_count_as_not_yet_visible(attempt):
    first, second = attempt.begin(0.0)
    assert [share.node for share in attempt.unanswered_holds] == [A, B]
    answer(attempt, first, 0.1)
    assert [share.node for share in attempt.unanswered_holds] == [B]
    answer(attempt, second, 0.1)
    assert attempt.unanswered_holds == ()


def test_a_decision_after_its_time_fails_although_all_said_yes(attempt):
    held(attempt)
    assert attempt.phase is AttemptPhase.HELD
    attempt.prepared(RECORD, HOLD_TTL_S - DECISION_MARGIN_S)
    assert attempt.phase is AttemptPhase.FAILED


def test_a_last_yes_that_comes_too_late_fails(attempt):
    first, second = attempt.begin(0.0)
    answer(attempt, first, 0.1)
    answer(attempt, second, HOLD_TTL_S)
    assert attempt.phase is AttemptPhase.FAILED


def test_a_second_copy_of_an_answer_changes_nothing(attempt):
    holds = attempt.begin(0.0)
    answer(attempt, holds[0], 0.1)
    answer(attempt, holds[0], 0.2, Refusal.DOES_NOT_FIT)
    assert attempt.phase is AttemptPhase.HOLDING


def test_a_report_of_staging_that_overtakes_the_answer_to_the_commit_counts(attempt):
    held(attempt)
    commits = attempt.prepared(RECORD, 0.2)
    assert attempt.staged(Place(B), 0.3) == []
    answer(attempt, commits[1], 0.4)
    launches = answer(attempt, commits[0], 0.5, is_staged=True)
    assert [launch.recipient for launch in launches] == [A, B]
    assert attempt.phase is AttemptPhase.LAUNCHING
    assert not attempt.has_launched(Place(A))
    answer(attempt, launches[0], 0.6)
    assert attempt.has_launched(Place(A))
    assert attempt.awaits(B)


def test_an_owner_that_lost_its_commitment_fails_the_attempt_only_once_it_had_committed(attempt):
    held(attempt)
    commits = attempt.prepared(RECORD, 0.2)
    attempt.lost(Place(A))
    assert attempt.phase is AttemptPhase.COMMITTING, "the commit will tell"
    for commit in commits:
        answer(attempt, commit, 0.3)
    assert attempt.phase is AttemptPhase.STAGING
    attempt.lost(Place(A))
    assert (attempt.phase, attempt.refusing_node) == (AttemptPhase.FAILED, A)


def test_abandoning_releases_every_owner_and_repeats_nothing(attempt):
    attempt.begin(0.0)
    assert [effect.recipient for effect in attempt.abandon()] == [A, B]
    assert attempt.on_timer(100.0) == []
