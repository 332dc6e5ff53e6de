"""A holder stands for shepherd when the lease is over, one after the other, and not for ever in vain."""

import random
from itertools import count

import pytest
from msgspec.structs import replace

from swarmsched.authority.timing import LEASE_TTL_S, patience_s
from swarmsched.holder.election import Election
from swarmsched.holder.leases import LeaseBook
from swarmsched.ids import JobId, NodeId
from swarmsched.negotiation.window import LIMIT_START
from tests.swarmsched.building import JOB, make_record

BOSS, FIRST, SECOND = NodeId("boss"), NodeId("first"), NodeId("second")
OVER_S = patience_s(LEASE_TTL_S) + 100.0


def record(shepherd=BOSS, version=1):
    return make_record(shepherd, (BOSS, FIRST, SECOND), version=version)


class Scene:
    def __init__(self, me=FIRST):
        self.leases = LeaseBook(0.0)
        self.leases.touch(BOSS, 1, 100.0)
        self.election = Election(me, 5, self.leases, random.Random(1))
        self.ids = count(1)

    def stands(self, now_s, held=None, acting=()):
        held = {JOB: record()} if held is None else held
        return [write.update for write in self.election.on_timer(held, acting, self.ids, now_s)]

    def stands_within(self, start_s, limit_s, **options):
        """Looks twice a second; when it stood first, from `start_s` on."""
        for step in range(int(limit_s * 2) + 1):
            if self.stands(start_s + step / 2, **options):
                return step / 2
        return None


@pytest.fixture
def scene():
    return Scene()


def test_nobody_stands_while_the_lease_runs(scene):
    assert scene.stands_within(100.0, patience_s(LEASE_TTL_S) - 0.5) is None


def test_a_holder_stands_for_the_next_epoch_soon_after_the_lease_is_over(scene):
    assert scene.stands(OVER_S) == []
    (update,) = scene.stands(OVER_S + 0.5)
    assert (update.value.epoch, update.value.shepherd, update.takes_over) == (2, FIRST, True)
    assert update.expected == (1, 1)


def test_holders_stand_one_after_the_other():
    first = Scene(FIRST).stands_within(OVER_S, 5.0)
    second = Scene(SECOND).stands_within(OVER_S, 5.0)
    assert first <= 0.5 <= second


def test_a_candidate_waits_for_the_register(scene):
    scene.stands(OVER_S)
    assert scene.stands(OVER_S + 0.5)
    assert scene.stands(OVER_S + 60.0) == []


def test_a_lost_vote_is_tried_again_later(scene):
    scene.stands(OVER_S)
    (update,) = scene.stands(OVER_S + 0.5)
    scene.election.lost(update, OVER_S + 0.6)
    assert scene.stands(OVER_S + 0.7) == []
    assert scene.stands_within(OVER_S + 1.0, 8.0) is not None


def test_a_shepherd_that_is_heard_again_is_left_alone(scene):
    scene.stands(OVER_S)
    scene.leases.touch(BOSS, 1, OVER_S + 0.1)
    assert scene.stands_within(OVER_S + 0.5, 5.0) is None


def test_a_shepherd_that_has_come_back_without_its_disk_keeps_nobody_away(scene):
    scene.leases.touch(BOSS, 2, OVER_S)
    assert scene.stands_within(OVER_S, 1.0) is not None


def test_a_job_that_names_this_node_is_taken_up_at_once_and_needs_no_vote(scene):
    (update,) = scene.stands(100.0, held={JOB: record(FIRST)})
    assert (update.value.epoch, update.takes_over) == (2, False)


def test_a_job_that_this_node_acts_for_needs_nobody(scene):
    assert scene.stands(100.0, held={JOB: record(FIRST)}, acting={JOB}) == []


def test_a_node_that_is_late_itself_stands_later():
    late = Scene(SECOND)
    late.election.lagged(3.0, OVER_S)
    assert late.election.is_late
    assert late.stands_within(OVER_S, 10.0) >= 2.0 > Scene(SECOND).stands_within(OVER_S, 10.0)


def test_a_late_node_takes_its_own_jobs_up_later_too(scene):
    assert Scene(BOSS).stands_within(OVER_S, 10.0) == 0.0
    late = Scene(BOSS)
    late.election.lagged(3.0, OVER_S)
    assert late.stands_within(OVER_S, 10.0) > 1.0


def test_no_more_is_stood_for_than_is_decided_in_time(scene):
    held = {JobId(f"{JOB[:-2]}{n:02}"): replace(record(), job_id=JobId(f"{JOB[:-2]}{n:02}")) for n in range(64)}
    stood = [update for step in range(6) for update in scene.stands(OVER_S + step / 10, held)]
    assert len(stood) == LIMIT_START
    for update in stood:
        scene.election.lost(update, OVER_S + 10.0)
    again = [update for step in range(20) for update in scene.stands(OVER_S + 20.0 + step / 10, held)]
    assert len(again) == LIMIT_START / 2


def test_jobs_that_are_tried_in_vain_keep_no_other_waiting(scene):
    held = {JobId(f"{JOB[:-2]}{n:02}"): replace(record(), job_id=JobId(f"{JOB[:-2]}{n:02}")) for n in range(64)}
    *_, last = held
    stood: dict[JobId, int] = {}
    for step in range(300):
        now_s = OVER_S + step / 2
        for update in scene.stands(now_s, held):
            stood[update.job_id] = stood.get(update.job_id, 0) + 1
            scene.election.lost(update, now_s + 4.0)  # late: fewer and fewer are tried at once
    assert min(stood.get(job_id, 0) for job_id in (last, *held)) >= 2
