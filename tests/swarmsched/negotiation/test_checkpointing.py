"""Checkpoints: the owner's desk passes wishes on until they are answered; only the present attempt may commit."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CheckpointCommitted, CommitCheckpoint, Refused
from swarmsched.effects import ReplyToClient, SendPeer
from swarmsched.ids import NodeId
from swarmsched.ledger.message import CheckpointAnswer, CheckpointRequest
from swarmsched.negotiation.checkpointing import (
    GIVE_UP_S,
    OVERTAKEN,
    SEND_AGAIN_S,
    CheckpointDesk,
    as_named,
    is_named,
    is_of_present_attempt,
    why_stale,
)
from swarmsched.resources import Share
from swarmsched.world import World
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


def asks(checkpoint=SAVED, part=0, **changes):
    asked = replace(checkpoint, **changes)
    return CheckpointRequest(JOB, 2, asked.sequence, asked.node, asked, part)


def why(present, request, **changes):
    record = make_record(BOSS, state=JobState.RUNNING, attempt=2, checkpoint=present, **changes)
    return why_stale(record, request)


@pytest.mark.parametrize(
    ("asked", "is_late"),
    [
        (asks(sequence=6), True),
        (asks(sequence=7), False),
        (asks(sequence=8), False),
        (asks(sequence=6, node=NEXT), False),
    ],
)
def test_in_a_gang_of_fixed_size_a_checkpoint_is_overtaken_by_a_newer_one_of_the_same_writer(asked, is_late):
    assert why(replace(SAVED, sequence=7), asked) == (OVERTAKEN if is_late else "")
    assert not why(None, asked)
    assert not why(replace(SAVED, sequence=7, attempt=1), asked)


def test_commits_of_a_later_life_are_newer():
    (before,) = wish(CheckpointDesk(ME, 6))
    (after,) = wish(CheckpointDesk(ME, 7))
    assert why(after.message.checkpoint, before.message)


def gang(*parts, **world):
    """An elastic attempt whose part N runs on node `nN`."""
    shares = tuple(Share(NodeId(f"n{part}"), 1, part=part) for part in parts)
    return {"shares": shares, "world": World(**world)}


def of_part(part, world, sequence):
    return asks(node=NodeId(f"n{part}"), world=world, sequence=sequence, part=part)


def test_a_worker_that_is_lost_has_nothing_named_whatever_was_named_before():
    changed = gang(1, 2, version=2, members=(2,), lost=(1,))
    for present in (None, of_part(1, 1, 20).checkpoint, of_part(2, 2, 3).checkpoint):
        assert why(present, of_part(1, 1, 40), **changed) == "worker 1 trains no more"
        assert not why(present, of_part(2, 2, 4), **changed)


def test_the_last_checkpoint_of_a_worker_that_leaves_counts_until_somebody_has_gone_further():
    changed = gang(1, 2, version=2, members=(2,))
    late = of_part(1, 1, 40)
    assert not why(None, late, **changed)
    assert not why(of_part(1, 1, 20).checkpoint, late, **changed)
    assert why(of_part(1, 1, 41).checkpoint, late, **changed) == OVERTAKEN
    assert why(of_part(2, 2, 3).checkpoint, late, **changed) == "worker 1 trains no more"
    assert why(None, of_part(1, 0, 40), **changed) == "worker 1 trains no more"
    gone = gang(2, version=2, members=(2,))
    assert why(None, late, **gone) == "worker 1 trains no more"


def test_of_workers_that_all_train_the_one_in_a_later_world_is_newer_whatever_their_nodes_count():
    both = gang(1, 2, version=3, members=(1, 2))
    present = of_part(2, 3, 5).checkpoint
    assert why(present, of_part(1, 2, 99), **both) == OVERTAKEN
    assert not why(present, of_part(1, 3, 1), **both)
    assert not why(of_part(1, 2, 99).checkpoint, of_part(2, 3, 5), **both)
    assert why(present, of_part(1, 4, 99), **both) == "it names world 4; the newest one is 3"


def test_a_newcomer_commits_nothing_before_it_trains():
    joins = gang(1, 2, version=1, members=(1,), joining=(2,))
    assert why(None, of_part(2, 1, 5), **joins) == "worker 2 does not train yet"


def test_older_agents_name_neither_part_nor_world_and_what_they_save_lets_nothing_older_in():
    changed = gang(1, 2, version=2, members=(2,), lost=(1,))
    assert why(None, asks(node=NodeId("n1")), **changed) == "no worker on n1 trains any more"
    present = of_part(1, 1, 40).checkpoint
    asked = asks(node=NodeId("n2"), sequence=9)
    assert not why(present, asked, **changed)
    record = make_record(BOSS, state=JobState.RUNNING, attempt=2, checkpoint=of_part(2, 2, 8).checkpoint, **changed)
    assert as_named(record, asked) == replace(asked.checkpoint, world=2)


def test_what_is_named_already_is_known_by_its_node_and_number():
    named = of_part(1, 1, 40)
    record = make_record(BOSS, state=JobState.RUNNING, attempt=2, checkpoint=replace(named.checkpoint, world=2))
    assert is_named(record, named)
    assert not is_named(record, of_part(1, 1, 41))
    assert not is_named(record, of_part(2, 1, 40))


def test_parts_of_one_attempt_wait_for_their_own_commits(desk):
    """A former member beside the new first one must not take its turn."""
    desk.wish(11, CommitCheckpoint(JOB, 2, SAVED, part=3), BOSS, 0.0)
    (sent,) = desk.wish(12, CommitCheckpoint(JOB, 2, replace(SAVED, name="step-4"), part=1), BOSS, 0.1)
    assert sent.message.part == 1
    desk.validate()
    assert len(desk.on_timer(lambda _attempt: BOSS, 0.1 + SEND_AGAIN_S)) == 2


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
