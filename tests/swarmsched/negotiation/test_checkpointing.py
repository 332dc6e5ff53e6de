"""Checkpoints: the owner's desk passes wishes on until they are answered; only the present attempt may commit."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CheckpointCommitted, CommitCheckpoint, Refused
from swarmsched.effects import ReplyToClient, SendPeer
from swarmsched.ids import NodeId
from swarmsched.ledger.message import CheckpointAnswer
from swarmsched.negotiation.checkpointing import (
    GIVE_UP_S,
    SEND_AGAIN_S,
    CheckpointDesk,
    is_of_present_attempt,
    is_overtaken,
)
from tests.swarmsched.building import JOB, make_record

ME, BOSS, NEXT = NodeId("me"), NodeId("boss"), NodeId("next")
SAVED = Checkpoint("step-7", 2, ME)


@pytest.fixture
def desk():
    return CheckpointDesk(ME, 7)


def wish(desk, shepherd=BOSS):
    return desk.wish(11, CommitCheckpoint(JOB, 2, SAVED), shepherd, 0.0)


def answer(effects, **changes):
    (sent,) = effects
    fields = {"is_committed": True, "epoch": 4, **changes}
    return CheckpointAnswer(JOB, sent.message.attempt, sent.message.command_id, **fields)


def reply(effects):
    (effect,) = effects
    assert isinstance(effect, ReplyToClient)
    assert effect.request_id == 11
    return effect.reply


def test_a_commit_is_passed_on_and_its_answer_passed_back(desk):
    sent = wish(desk)
    ((to, saved),) = [(each.recipient, each.message.checkpoint) for each in sent]
    assert (to, replace(saved, sequence=0)) == (BOSS, SAVED)
    assert reply(desk.answered(answer(sent))) == CheckpointCommitted(saved, 4)
    assert desk.answered(answer(sent)) == []


def test_an_answer_to_an_earlier_life_commits_nothing(desk):
    late = answer(wish(CheckpointDesk(ME, 6)))
    wish(desk)
    assert desk.answered(late) == []


def test_a_stale_attempt_is_told_why(desk):
    refused = reply(desk.answered(answer(wish(desk), is_committed=False, detail="attempt 2 was given up")))
    assert (refused.code, refused.problem) == ("conflict", "attempt 2 was given up")


def test_a_silent_shepherd_is_asked_again_and_then_its_successor(desk):
    wish(desk)
    (again,) = desk.on_timer(lambda _attempt: NEXT, SEND_AGAIN_S)
    assert isinstance(again, SendPeer)
    assert again.recipient == NEXT


def test_a_newer_commit_ends_the_repeats_of_an_older_one_that_would_come_too_late(desk):
    wish(desk)
    newer = replace(SAVED, name="step-8")
    gave_up, sent = desk.wish(12, CommitCheckpoint(JOB, 2, newer), BOSS, 0.5)
    assert (gave_up.request_id, gave_up.reply.code) == (11, "unavailable")
    assert [each.message for each in desk.on_timer(lambda _attempt: BOSS, 0.5 + SEND_AGAIN_S)] == [sent.message]


@pytest.mark.parametrize(
    ("asked", "is_late"),
    [
        (replace(SAVED, sequence=6), True),
        (replace(SAVED, sequence=7), False),
        (replace(SAVED, sequence=8), False),
        (replace(SAVED, sequence=6, attempt=3), False),
        (replace(SAVED, sequence=6, node=NEXT), False),
    ],
)
def test_a_checkpoint_is_overtaken_by_a_newer_one_of_the_same_writer(asked, is_late):
    assert is_overtaken(replace(SAVED, sequence=7), asked) is is_late
    assert not is_overtaken(None, asked)


def test_commits_of_a_later_life_are_newer():
    (before,) = wish(CheckpointDesk(ME, 6))
    (after,) = wish(CheckpointDesk(ME, 7))
    assert is_overtaken(after.message.checkpoint, before.message.checkpoint)


def test_a_commit_that_nobody_answers_is_given_up_with_an_open_outcome(desk):
    wish(desk)
    assert reply(desk.on_timer(lambda _attempt: BOSS, GIVE_UP_S)).code == "unavailable"
    assert desk.next_deadline_s == float("inf")


def test_a_task_that_is_not_here_commits_nothing(desk):
    assert isinstance(reply(wish(desk, shepherd=None)), Refused)


@pytest.mark.parametrize(
    ("state", "attempt", "is_allowed"),
    [
        (JobState.RUNNING, 2, True),
        (JobState.STOPPING, 2, True),
        (JobState.RUNNING, 1, False),
        (JobState.QUEUED, 2, False),
        (JobState.ENDED, 2, False),
    ],
)
def test_only_ranks_of_the_present_attempt_may_commit(state, attempt, is_allowed):
    record = make_record(BOSS, state=state, attempt=2)
    assert (is_of_present_attempt(record, attempt) == "") is is_allowed
