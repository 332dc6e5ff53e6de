"""Whoever doubts its record asks until a majority has answered, and not more often than it must."""

from itertools import count

import pytest

from swarmsched.holder.machine import Answered
from swarmsched.holder.read_repair import AT_ONCE_MAX, TRY_AGAIN_S, ReadRepair
from swarmsched.jobs.update import ReadDecided, UpdateUncertain
from tests.swarmsched.building import job_id, make_record

JOBS = [job_id(number) for number in range(AT_ONCE_MAX + 1)]
HELD = {job: make_record("a", "abc", job_id=job) for job in JOBS}


class Scene:
    def __init__(self):
        self.read_repair = ReadRepair()
        self.ids = count(1)

    def reads(self, now_s, held=HELD):
        return [effect.read for effect in self.read_repair.on_timer(held, self.ids, now_s)]


@pytest.fixture
def scene():
    return Scene()


def test_a_suspected_record_is_read_and_sent_to_all_its_holders_again(scene):
    scene.read_repair.suspect(JOBS[0])
    (read,) = scene.reads(0.0)
    assert (read.job_id, read.configuration.holders, read.spreads) == (JOBS[0], HELD[JOBS[0]].holders, True)
    assert scene.reads(TRY_AGAIN_S) == []


def test_a_read_without_a_majority_is_tried_again(scene):
    scene.read_repair.suspect(JOBS[0])
    (read,) = scene.reads(0.0)
    scene.read_repair.answered(Answered(read, UpdateUncertain(read.update_id, "no majority")))
    assert scene.reads(TRY_AGAIN_S - 1.0) == []
    (again,) = scene.reads(TRY_AGAIN_S)
    assert again.job_id == JOBS[0]


def test_an_answered_read_ends_the_doubt_although_others_raised_it_meanwhile(scene):
    scene.read_repair.suspect(JOBS[0])
    (read,) = scene.reads(0.0)
    scene.read_repair.suspect(JOBS[0])
    scene.read_repair.answered(Answered(read, ReadDecided(read.update_id, HELD[JOBS[0]])))
    assert scene.reads(TRY_AGAIN_S) == []


def test_few_are_read_at_once_and_the_others_afterwards(scene):
    for job in JOBS:
        scene.read_repair.suspect(job)
    first = scene.reads(0.0)
    assert len(first) == AT_ONCE_MAX
    assert scene.reads(1.0) == []
    scene.read_repair.answered(Answered(first[0], UpdateUncertain(first[0].update_id, "no majority")))
    assert [read.job_id for read in scene.reads(1.0)] == JOBS[AT_ONCE_MAX:]


def test_a_job_that_is_not_held_any_more_is_not_asked_about(scene):
    scene.read_repair.suspect(JOBS[0])
    assert scene.reads(0.0, held={}) == []
    assert scene.reads(TRY_AGAIN_S) == []
