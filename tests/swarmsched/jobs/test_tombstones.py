"""Jobs that are past their retention: nobody who slept through their end can have them decided anew."""

import random

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.effects import Persist, SendPeer
from swarmsched.errors import StorageError
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.holders import Configuration
from swarmsched.ids import NodeId, make_job_id
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot, EndDecided, PrepareAnswer
from swarmsched.jobs.register import UPDATE_TIMEOUT_S, Register
from swarmsched.jobs.tombstones import Tombstones
from swarmsched.jobs.update import EndConfirmed, JobOver, ReadDecided, ReadRequested, UpdateDecided, UpdateRequested
from tests.swarmsched.building import JOB, holders_of, make_record

A, B, C, D, E = (NodeId(name) for name in "abcde")
STORE = 1


def held_by(*nodes):
    return Configuration(holders_of(*nodes))


ABC = held_by(A, B, C)
OPEN = make_record(A, (A, B, C))
ENDED = replace(OPEN, version=2, state=JobState.ENDED)
TAKEN_OVER = replace(OPEN, version=2, epoch=2, shepherd=C)


class Swarm:
    """Nodes joined without delay; messages to nodes in `cut` do not arrive."""

    def __init__(self):
        self.registers = {node: self.register(node) for node in (A, B, C, D, E)}
        self.disks = {node: {"register": {}, "over": {}} for node in self.registers}
        self.cut = set()
        self.now_s = 0.0

    def register(self, node, generation=1, tombstones_max=100):
        return Register(node, generation, STORE, random.Random(1), tombstones_max=tombstones_max)

    def restart(self, node, **options):
        self.registers[node] = self.register(node, 2, **options)
        self.registers[node].restore(self.disks[node]["register"], self.disks[node]["over"])

    def write(self, node, effect):
        if effect.value is None:
            self.disks[node][effect.room].pop(effect.key)
        else:
            self.disks[node][effect.room][effect.key] = effect.value

    def ask(self, node, event):
        told = []
        queue = [(node, effect) for effect in self.registers[node].step(event, self.now_s)]
        while queue:
            source, effect = queue.pop(0)
            if isinstance(effect, SendPeer):
                if effect.recipient not in self.cut:
                    received = PeerMessageReceived(source, effect.message)
                    answers = self.registers[effect.recipient].step(received, self.now_s)
                    queue += [(effect.recipient, answer) for answer in answers]
            elif isinstance(effect, Persist):
                self.write(source, effect)
            else:
                told.append((source, effect))
        for register in self.registers.values():
            register.validate()
        return told

    def results(self, node, event):
        return [effect for source, effect in self.ask(node, event) if source == node]

    def drop(self, *nodes):
        for node in nodes:
            for effect in self.registers[node].drop(JOB):
                self.write(node, effect)


def update(value, expected):
    return UpdateRequested(value.version, JOB, ABC, expected, value)


READ = ReadRequested(9, JOB, ABC, spreads=True)


@pytest.fixture
def swarm():
    """C has slept through the end."""
    swarm = Swarm()
    swarm.ask(A, update(OPEN, None))
    swarm.cut = {C}
    swarm.ask(A, update(ENDED, OPEN.stamp))
    swarm.cut = set()
    assert swarm.registers[C].records[JOB] == OPEN
    return swarm


def test_who_slept_through_the_end_learns_from_the_others_that_the_job_is_over(swarm):
    swarm.drop(A, B)
    assert swarm.results(C, update(TAKEN_OVER, OPEN.stamp)) == [JobOver(2, JOB)]
    assert swarm.results(C, READ) == [JobOver(9, JOB)]


def test_without_tombstones_it_would_be_revived(swarm):
    for node in (A, B):
        swarm.restart(node, tombstones_max=0)
    swarm.drop(A, B)
    swarm.cut = {A}
    assert UpdateDecided(2, TAKEN_OVER) in swarm.results(C, update(TAKEN_OVER, OPEN.stamp))


def test_one_holder_that_knows_is_enough_although_another_knows_nothing(swarm):
    swarm.restart(A, tombstones_max=0)
    swarm.drop(A, B)
    swarm.cut = {A}
    assert swarm.results(C, update(TAKEN_OVER, OPEN.stamp)) == [JobOver(2, JOB)]


def test_a_reader_still_finds_the_end_where_one_holder_keeps_it(swarm):
    swarm.drop(A)
    assert ReadDecided(9, ENDED) in swarm.results(C, READ)
    assert swarm.registers[C].records[JOB] == ENDED
    assert swarm.registers[A].is_over(JOB)


def test_a_reader_that_reaches_no_majority_and_heard_that_the_job_is_over_believes_it_in_the_end(swarm):
    swarm.drop(A)
    swarm.cut = {B}
    assert swarm.results(C, READ) == []
    swarm.now_s = UPDATE_TIMEOUT_S
    assert swarm.results(C, TimerFired()) == [JobOver(9, JOB)]


def test_a_repeated_ticket_does_not_make_the_job_again(swarm):
    swarm.drop(A, B)
    for node in (A, C, D):
        assert JobOver(1, JOB) in swarm.results(node, update(OPEN, None))
    swarm.restart(A)
    assert swarm.results(A, update(OPEN, None)) == [JobOver(1, JOB)]


def test_late_messages_bring_no_record_back(swarm):
    swarm.drop(B)
    ballot = Ballot(2**20, A, 1)
    late = AcceptRequest(JOB, ballot, OPEN, ballot, STORE)
    effects = swarm.registers[B].step(PeerMessageReceived(A, late), 0.0)
    assert effects == [SendPeer(A, AcceptAnswer(JOB, ballot, False, Ballot(), STORE, is_over=True))]


def test_a_restarted_holder_still_knows_what_is_over(swarm):
    swarm.drop(A, B)
    for node in (A, B):
        swarm.restart(node)
    assert swarm.results(C, update(TAKEN_OVER, OPEN.stamp)) == [JobOver(2, JOB)]


def test_a_holder_that_died_between_tombstone_and_deletion_has_dropped_the_record(swarm):
    swarm.write(A, swarm.registers[A].drop(JOB)[0])
    swarm.restart(A)
    assert swarm.registers[A].records == {}
    assert swarm.registers[A].is_over(JOB)
    swarm.registers[A].validate()


def test_who_knows_only_former_holders_is_led_to_the_tombstones_of_the_present_ones():
    swarm = Swarm()
    swarm.ask(A, update(OPEN, None))
    swarm.cut = {C}  # it keeps the first record
    ade = held_by(A, D, E)
    joint = replace(OPEN, version=2, holders=ade.holders, leaving_holders=ABC.holders)
    alone = replace(joint, version=3, leaving_holders=())
    ended = replace(alone, version=4, state=JobState.ENDED)
    for before, value, asked in ((OPEN, joint, ABC), (joint, alone, joint.configuration), (alone, ended, ade)):
        told = swarm.results(A, UpdateRequested(1, JOB, asked, before.stamp, value))
        assert told[-1] == UpdateDecided(1, value)
    assert swarm.registers[B].records[JOB].holders == ade.holders  # and it never hears of the end
    swarm.drop(A, D, E)
    swarm.cut = {A}
    told = swarm.results(C, READ)
    while not told and swarm.now_s < UPDATE_TIMEOUT_S - 1.0:  # B has promised higher ballots
        swarm.now_s += 0.5
        told = swarm.results(C, TimerFired())
    assert told == [JobOver(9, JOB)]


def test_another_jobs_tombstone_is_in_nobodys_way(swarm):
    swarm.drop(A, B)
    other = make_job_id(1.0, random.Random(8))
    record = replace(OPEN, job_id=other)
    assert UpdateDecided(1, record) in swarm.results(A, UpdateRequested(1, other, ABC, None, record))


def test_the_other_holders_hear_that_an_end_is_decided():
    swarm = Swarm()
    assert not [told for _, told in swarm.ask(A, update(OPEN, None)) if isinstance(told, EndConfirmed)]
    told = swarm.ask(A, update(ENDED, OPEN.stamp))
    assert [(node, each) for node, each in told if isinstance(each, EndConfirmed)] == [
        (B, EndConfirmed(JOB)),
        (C, EndConfirmed(JOB)),
    ]


def test_the_word_of_another_ballot_confirms_nothing(swarm):
    swarm.cut = {A, C}
    later = replace(ENDED, epoch=3, version=3)
    swarm.ask(A, update(later, ENDED.stamp))  # B has accepted an end that may never be decided
    old = EndDecided(JOB, Ballot(2, A, 1), STORE)
    assert swarm.registers[B].records[JOB] == later
    assert swarm.registers[B].step(PeerMessageReceived(A, old), 0.0) == []
    open_there = EndDecided(JOB, Ballot(1, A, 1), STORE)
    assert swarm.registers[C].step(PeerMessageReceived(A, open_there), 0.0) == []


def test_an_answer_that_is_over_and_promises_makes_no_sense():
    register = Swarm().registers[A]
    ballot = Ballot(2, A, 1)
    for answer in (
        PrepareAnswer(JOB, ballot, True, ballot, Ballot(), None, STORE, is_over=True),
        AcceptAnswer(JOB, ballot, True, ballot, STORE, is_over=True),
    ):
        register.step(PeerMessageReceived(B, answer), 0.0)
    assert register.dropped_messages == {"nonsense": 2}


def jobs(count):
    return [make_job_id(float(number), random.Random(number)) for number in range(count)]


def test_the_oldest_are_forgotten_first_also_after_a_restart():
    first, second, third, fourth = jobs(4)
    tombstones, disk = Tombstones(2), {}

    def add(tombstones, job_id):
        for write in tombstones.add(job_id):
            if write.value is None:
                del disk[write.key]
            else:
                disk[write.key] = write.value

    for job_id in (third, first, third, second):  # not the order of their ids
        add(tombstones, job_id)
    assert list(disk) == [first, second]
    again = Tombstones(2)
    again.restore(disk)
    add(again, fourth)
    assert [job_id in again for job_id in (first, second, third, fourth)] == [False, True, False, True]
    assert len(again) == len(disk) == 2


@pytest.mark.parametrize(("key", "value"), [("nonsense", b"1"), (JOB, b"x"), (JOB, b"")])
def test_an_unreadable_tombstone_is_refused_by_name(key, value):
    with pytest.raises(StorageError, match=f"over/{key}"):
        Tombstones(2).restore({key: value})
