"""Who asks the register hears of the answer, with what it has asked; and an operator hears of nonsense."""

import random

import pytest
from msgspec.structs import replace

from swarmsched.clock import Clock
from swarmsched.effects import Announce
from swarmsched.events import PeerMessageReceived
from swarmsched.holder.machine import Answered
from swarmsched.holder.records import ACCUSE_AGAIN_S, Records
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.message import Ballot, EndDecided
from swarmsched.jobs.register import Register
from swarmsched.jobs.update import (
    Asker,
    ReadDecided,
    ReadRequested,
    UpdateConflicted,
    UpdateDecided,
    UpdateRefused,
    UpdateRequested,
)
from swarmsched.negotiation.record_writer import ReadRecord, WriteRecord
from tests.swarmsched.building import JOB, holders_of, make_record

ME = NodeId("me")
RECORD = make_record(ME, holders_of(ME))


def create(number, asker=Asker.SHEPHERD, record=RECORD):
    return UpdateRequested(number, JOB, record.configuration, None, record, asker=asker)


class Scene:
    def __init__(self):
        self.records = Records(ME, Register(ME, 1, RECORD.holders[0].store, random.Random(1)))

    def take(self, thing, now_s=0.0):
        kind = type(thing.message) if isinstance(thing, PeerMessageReceived) else type(thing)
        return self.records.takes[kind](thing, Clock(now_s, now_s))

    def answer(self, thing):
        (answer,) = [effect for effect in self.take(thing) if isinstance(effect, Answered)]
        return answer


@pytest.fixture
def scene():
    return Scene()


def test_an_answer_comes_with_the_request_that_it_is_for(scene):
    created, read = create(1, Asker.CREATION), ReadRequested(2, JOB, RECORD.configuration, asker=Asker.READ_REPAIR)
    assert scene.answer(WriteRecord(created)) == Answered(created, UpdateDecided(1, RECORD))
    assert scene.answer(ReadRecord(read)) == Answered(read, ReadDecided(2, RECORD))


def test_a_job_is_asked_about_until_its_asker_has_heard(scene):
    answer = scene.answer(WriteRecord(create(1, Asker.CREATION)))
    assert scene.records.asked_by([Asker.CREATION]) == {JOB}
    assert scene.records.asked_by([Asker.RECOVERY]) == set()
    scene.records.takes[UpdateDecided](answer, Clock(0.0, 0.0))
    assert scene.records.asked_by([Asker.CREATION]) == set()


def test_what_cannot_be_stored_is_refused_and_said(scene):
    update = create(1, record=replace(RECORD, reason="x" * 2_000))
    announced, answer = scene.take(WriteRecord(update))
    assert (announced.kind, type(answer.result)) == ("job.update_refused", UpdateRefused)
    assert scene.records.counters == {"updates_refused": 1}


def test_a_shepherd_whose_record_another_wrote_is_counted(scene):
    scene.take(WriteRecord(create(1)))
    answer = scene.answer(WriteRecord(create(2, record=replace(RECORD, epoch=9))))
    assert isinstance(answer.result, UpdateConflicted)
    assert scene.records.counters == {"register_conflicts": 1}


def test_nonsense_of_one_sender_is_told_once_a_minute(scene):
    nonsense = EndDecided(JobId("no job"), Ballot(), RECORD.holders[0].store)

    def told(sender, now_s):
        effects = scene.take(PeerMessageReceived(NodeId(sender), nonsense), now_s)
        return [effect.kind for effect in effects if isinstance(effect, Announce)]

    assert told("a", 0.0) == ["peer.nonsense"]
    assert told("a", ACCUSE_AGAIN_S - 1.0) == []
    assert told("b", ACCUSE_AGAIN_S - 1.0) == ["peer.nonsense"]
    assert told("a", ACCUSE_AGAIN_S) == ["peer.nonsense"]
