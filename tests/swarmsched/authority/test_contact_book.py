"""The holder's side: what a record says of a task, and how long the task has surely heard no yes from here."""

import pytest

from swarmsched.api import Isolation, JobSpec, JobState
from swarmsched.authority import contact_book
from swarmsched.authority.contact_book import REMEMBERED_S, ContactBook
from swarmsched.authority.message import ContactAnswered, ContactedTask, OwnerContact, SilenceRequest, TaskStanding
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.record import Leftover
from swarmsched.resources import Share
from tests.swarmsched.building import JOB, holders_of, make_record

OWNER, PEER, BOSS = NodeId("owner"), NodeId("peer"), NodeId("boss")
ME, A, B, C = holders_of("me", "a", "b", OWNER)
RUNNING = make_record(
    BOSS,
    ("me", "a", "b"),
    epoch=2,
    version=5,
    state=JobState.RUNNING,
    attempt=3,
    shares=(Share(OWNER, 1), Share(PEER, 1)),
)
QUEUED = RUNNING.updated(state=JobState.QUEUED, shares=(), leftovers=(Leftover(OWNER, 3),))
VALID, OVER, UNKNOWN = TaskStanding.VALID, TaskStanding.OVER, TaskStanding.UNKNOWN


@pytest.fixture
def book():
    return ContactBook(started_s=0.0)


def ask(book, record, *, stamp=(2, 5), attempt=3, owner=OWNER, me=ME, now_s=100.0):
    """The answer to a contact with one task."""
    records = {} if record is None else {JOB: record}
    contact = OwnerContact(9, (ContactedTask(JOB, attempt, *stamp),))
    answered = book.contacted(owner, contact, records, me, now_s)
    assert answered.sequence == 9
    return answered


def standing(book, record, **arguments):
    answered = ask(book, record, **arguments)
    return answered.news[0].standing if answered.news else VALID


def silence(book, record, *, stamp=(2, 6), attempt=3, owner=OWNER, me=ME, now_s=200.0):
    records = {} if record is None else {JOB: record}
    answer = book.silence(SilenceRequest(JOB, attempt, owner, *stamp), records, me, now_s)
    assert (answer.job_id, answer.attempt, answer.owner, answer.epoch, answer.version) == (JOB, attempt, owner, *stamp)
    return answer


def test_a_task_of_the_records_attempt_may_run_on(book):
    assert ask(book, RUNNING) == ContactAnswered(9)


def test_the_owner_is_told_of_a_newer_records_holders(book):
    (news,) = ask(book, RUNNING.updated(leaving_holders=(C,))).news
    assert (news.standing, news.epoch, news.version) == (VALID, 2, 6)
    assert news.configuration == Configuration((ME, A, B), (C,))


@pytest.mark.parametrize(
    "record",
    [
        RUNNING.updated(state=JobState.ENDED),
        RUNNING.updated(attempt=4),
        RUNNING.updated(leftovers=(Leftover(OWNER, 3),)),
        RUNNING.updated(shares=()),
        RUNNING.updated(shares=(Share(PEER, 1),)),
        QUEUED,
    ],
)
def test_a_task_that_its_record_gave_up_is_over(book, record):
    assert standing(book, record) is OVER


def test_parts_of_an_elastic_gang_are_over_once_all_of_them_there_are_left_over(book):
    """While it stops, its parts on a lost node are both in the gang and left over: a job had never ended."""
    parts = tuple(Share(OWNER, 1, part=part) for part in (1, 2))
    left = tuple(Leftover(OWNER, 3, part=part) for part in (1, 2))
    stopping = RUNNING.updated(state=JobState.STOPPING, shares=parts, leftovers=left)
    assert standing(book, stopping) is OVER
    assert silence(book, stopping).has_record
    assert standing(book, RUNNING.updated(shares=parts, leftovers=left[:1])) is VALID, "another part runs on there"


def test_anothers_leftover_and_an_earlier_one_of_ours_do_not_end_the_task(book):
    record = RUNNING.updated(leftovers=(Leftover(PEER, 3), Leftover(OWNER, 2)))
    assert standing(book, record) is VALID


@pytest.mark.parametrize(
    ("record", "me"),
    [
        (None, ME),
        (RUNNING.updated(holders=(A, B)), ME),
        (RUNNING, Holder(ME.node, 2)),
        (RUNNING.updated(attempt=2), ME),
    ],
    ids=["no record", "no holder", "another store", "an attempt still to come"],
)
def test_a_holder_without_a_say_lets_nothing_run_and_ends_nothing(book, record, me):
    assert standing(book, record, me=me) is UNKNOWN
    assert not silence(book, record, me=me).has_record


def test_a_leaving_holder_still_speaks(book):
    assert standing(book, RUNNING.updated(holders=(A, B), leaving_holders=(ME, A))) is VALID


@pytest.mark.parametrize("record", [QUEUED, RUNNING.updated(attempt=2), RUNNING.updated(state=JobState.ENDED)])
def test_a_record_older_than_the_owners_ends_nothing(book, record):
    assert standing(book, record, stamp=(3, 1)) is UNKNOWN


def test_a_holder_that_lags_behind_lets_the_task_run_on_and_says_under_which_holders(book):
    (news,) = ask(book, RUNNING, stamp=(2, 8)).news
    assert (news.standing, news.version, news.configuration) == (VALID, 5, RUNNING.configuration)


def test_silence_counts_from_the_last_yes(book):
    book.accepted(RUNNING, 10.0)
    ask(book, RUNNING, now_s=100.0)
    ask(book, QUEUED, now_s=150.0)
    answer = silence(book, QUEUED, now_s=160.0)
    assert (answer.has_record, answer.silent_s) == (True, 60.0)


def test_yes_to_another_attempt_or_owner_is_not_this_tasks(book):
    book.accepted(RUNNING, 10.0)
    ask(book, RUNNING, now_s=100.0, owner=PEER)
    assert silence(book, QUEUED, now_s=160.0).silent_s == 150.0


def test_a_restarted_holder_counts_silence_from_its_start_and_keeps_refusing():
    book = ContactBook(started_s=190.0)
    book.accepted(QUEUED, 190.0)
    assert standing(book, QUEUED, now_s=191.0) is OVER
    answer = silence(book, QUEUED, now_s=200.0)
    assert (answer.has_record, answer.silent_s) == (True, 10.0)


@pytest.mark.parametrize(
    ("record", "stamp"),
    [(None, (2, 6)), (RUNNING, (2, 5)), (RUNNING.updated(), (2, 6)), (QUEUED, (2, 7)), (QUEUED, (3, 1))],
    ids=["none", "valid", "newer but valid", "older version", "older epoch"],
)
def test_silence_without_a_record_that_ends_the_task_is_said_to_be_none(book, record, stamp):
    assert not silence(book, record, stamp=stamp).has_record


def test_a_later_record_that_ends_the_task_as_well_is_good_enough(book):
    assert silence(book, QUEUED.updated(epoch=3), stamp=(2, 6)).has_record


@pytest.mark.parametrize("changed", [{"holders": (ME, A, C)}, {"leaving_holders": (C,)}])
def test_silence_begins_anew_with_another_configuration_for_those_who_stay_too(book, changed):
    book.accepted(RUNNING, 10.0)
    book.accepted(RUNNING.updated(**changed), 150.0)
    assert silence(book, QUEUED.updated(**changed), now_s=160.0).silent_s == 10.0


def test_a_record_with_the_same_configuration_does_not_begin_silence_anew(book):
    book.accepted(RUNNING, 10.0)
    book.accepted(QUEUED, 150.0)
    assert silence(book, QUEUED, now_s=160.0).silent_s == 150.0


def test_a_record_first_seen_with_the_question_begins_silence_there(book):
    assert silence(book, QUEUED, now_s=160.0).silent_s == 0.0
    assert silence(book, QUEUED, now_s=170.0).silent_s == 10.0


@pytest.mark.parametrize(
    "changed",
    [
        {"spec": JobSpec(("true",), on_isolation=Isolation.CONTINUE)},
        {"holders": (ME, C)},
        {"leaving_holders": (C,)},
    ],
)
def test_ranks_that_run_without_contact_are_never_called_silent(book, changed):
    assert not silence(book, QUEUED.updated(**changed)).has_record


def test_one_holder_that_is_not_the_owner_may_call_it_silent(book):
    assert silence(book, QUEUED.updated(holders=(ME,))).has_record


def test_what_is_forgotten_counts_from_the_latest_that_it_could_be(book):
    book.accepted(RUNNING, 0.0)
    ask(book, RUNNING, now_s=100.0)
    ask(book, RUNNING, owner=PEER, now_s=100.0 + REMEMBERED_S)
    assert len(book._valid_s) == 1
    assert silence(book, QUEUED, now_s=100.0 + REMEMBERED_S).silent_s == REMEMBERED_S


def test_at_the_limit_the_oldest_yes_is_forgotten_and_still_counts(book, monkeypatch):
    monkeypatch.setattr(contact_book, "REMEMBERED_MAX", 3)
    for turn in range(5):
        record = RUNNING.updated(shares=(Share(NodeId(f"n{turn}"), 1),))
        ask(book, record, owner=NodeId(f"n{turn}"), now_s=100.0 + turn)
    assert len(book._valid_s) == 3
    assert silence(book, QUEUED, owner=NodeId("n0"), now_s=110.0).silent_s <= 9.0
    for turn in range(5):
        book.accepted(RUNNING.updated(job_id=JobId(f"01hzzzzzzzabcdefghjkmnpqr{turn}")), 120.0)
    assert len(book._since_s) == 3


def test_a_dropped_record_is_seen_anew(book):
    book.accepted(QUEUED, 10.0)
    book.dropped(JOB)
    book.dropped(JOB)
    assert silence(book, QUEUED, now_s=160.0).silent_s == 0.0
