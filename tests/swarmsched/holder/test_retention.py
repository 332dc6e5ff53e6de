"""Ends that perhaps nobody tells of: each is due when its shepherd has had its time, until it is settled."""

import random
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from swarmsched.api import EndReason, JobState
from swarmsched.authority.contact_book import ContactBook
from swarmsched.events import PeerMessageReceived
from swarmsched.holder.read_repair import ReadRepair
from swarmsched.holder.retention import RECENT_S, WAIT_S, WAIT_S_MAX, Retention, UntoldEnds
from swarmsched.holders import Holder, majority
from swarmsched.ids import NodeId
from swarmsched.jobs.message import AcceptRequest, Ballot
from swarmsched.jobs.register import Register
from tests.swarmsched.building import job_id, make_record

JOBS = [job_id(number) for number in range(4)]
JOB = JOBS[0]
OPEN = make_record("a", "ab", job_id=JOB)


def end_of(job, ended_utc_s):
    return replace(OPEN, job_id=job, state=JobState.ENDED, end_reason=EndReason.COMPLETED, ended_utc_s=ended_utc_s)


def due(ends, now_s):
    return list(ends.due(now_s))


@pytest.fixture
def ends():
    return UntoldEnds(random.Random(1))


def test_the_shepherd_has_some_time_to_tell(ends):
    ends.accepted(JOB, 100.0)
    assert due(ends, 100.0 + WAIT_S - 0.1) == []
    assert due(ends, 100.0 + WAIT_S_MAX) == [JOB]


def test_an_end_that_is_accepted_again_waits_no_longer(ends):
    ends.accepted(JOB, 100.0)
    ends.accepted(JOB, 100.0 + WAIT_S)
    assert due(ends, 100.0 + WAIT_S_MAX) == [JOB]


def test_what_stays_unsettled_comes_again_and_what_is_settled_does_not(ends):
    ends.accepted(JOB, 0.0)
    assert due(ends, WAIT_S_MAX) == [JOB]
    assert due(ends, WAIT_S_MAX + 1.0) == []
    assert due(ends, 2 * WAIT_S_MAX) == [JOB]
    ends.settled(JOB)
    assert due(ends, 4 * WAIT_S_MAX) == []


def test_who_takes_only_some_finds_the_others_due_still(ends):
    for job in JOBS:
        ends.accepted(job, 0.0)
    assert list(islice(ends.due(WAIT_S_MAX), 2)) == JOBS[:2]
    assert due(ends, WAIT_S_MAX) == JOBS[2:]


def test_the_last_ends_of_an_earlier_life_are_due_at_once_and_the_newest_first(ends):
    newest_s = 10_000.0
    records = [
        end_of(JOBS[0], newest_s - RECENT_S - 1.0),
        end_of(JOBS[1], newest_s - RECENT_S),
        end_of(JOBS[2], newest_s),
        replace(OPEN, job_id=JOBS[3]),
    ]
    ends.restore(records, 5.0)
    assert due(ends, 5.0) == [JOBS[2], JOBS[1]]


def test_an_end_that_its_shepherd_had_decided_by_others_alone_is_brought_to_it_before_it_is_kept():
    """Its own vote was promised to somebody who wanted to take the job over; what it has is the record before."""
    me = Holder(NodeId("a"), 1)
    register, repair = Register(me.node, 1, me.store, random.Random(1)), ReadRepair()
    nobody: Any = SimpleNamespace(jobs={})
    retention = Retention(me, register, nobody, repair, ContactBook(0.0, majority), random.Random(1), 10, 0.0)
    accept = AcceptRequest(JOB, Ballot(2, me.node, 1), OPEN, Ballot(3, me.node, 1), me.store)
    register.step(PeerMessageReceived(me.node, accept), 0.0)
    assert register.records[JOB] == OPEN
    assert retention.closed(JOB) == []
    retention.validate()
    assert [each.read.job_id for each in repair.on_timer(register.records, count(1), 1.0)] == [JOB]
