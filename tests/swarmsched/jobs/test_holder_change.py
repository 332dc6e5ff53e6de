"""Holders that change, lose their disks, keep leases, or are given up by an operator."""

import random

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.effects import Persist, SendPeer
from swarmsched.errors import LocalProtocolError
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import NodeId
from swarmsched.jobs.message import AcceptRequest, Ballot, PrepareAnswer, PrepareRequest
from swarmsched.jobs.register import Register
from swarmsched.jobs.succession import may_follow
from swarmsched.jobs.update import (
    EndConfirmed,
    ReadDecided,
    ReadRequested,
    RecordAccepted,
    Result,
    UpdateConflicted,
    UpdateDecided,
    UpdateRequested,
    UpdateUncertain,
)
from swarmsched.record import JobRecord
from tests.swarmsched.building import JOB, holders_of, make_record

A, B, C, D, E, F = (NodeId(name) for name in "abcdef")


def held_by(*nodes: NodeId, leaving: tuple[NodeId, ...] = ()) -> Configuration:
    """Every node's store is 1."""
    return Configuration(holders_of(*nodes), holders_of(*leaving))


ABC, CDE = held_by(A, B, C), held_by(C, D, E)
ABC_TO_CDE = held_by(C, D, E, leaving=(A, B, C))


def record(version: int, configuration: Configuration = ABC, epoch: int = 1, shepherd: NodeId = A) -> JobRecord:
    changes = {"version": version, "epoch": epoch, "leaving_holders": configuration.leaving}
    return make_record(shepherd, configuration.holders, **changes)


def create(configuration: Configuration = ABC, *, is_issued_here: bool = True) -> UpdateRequested:
    return UpdateRequested(1, JOB, configuration, None, record(1, configuration), is_issued_here=is_issued_here)


def update(
    value: JobRecord, asked: Configuration = ABC, *, is_forced: bool = False, takes_over: bool = False
) -> UpdateRequested:
    """Expects the version before the value's, in epoch 1."""
    expected = (1, value.version - 1)
    return UpdateRequested(value.version, JOB, asked, expected, value, is_forced=is_forced, takes_over=takes_over)


def read(asked: Configuration = ABC) -> ReadRequested:
    return ReadRequested(99, JOB, asked)


class Swarm:
    """Six nodes joined without delay; messages to nodes in `cut`, or kinds in `lost`, do not arrive."""

    def __init__(self) -> None:
        self.has_lease = False
        self.registers = {node: self.register(node) for node in (A, B, C, D, E, F)}
        self.disks: dict[NodeId, dict[str, bytes]] = {node: {} for node in self.registers}
        self.cut: set[NodeId] = set()
        self.lost: set[tuple[NodeId, type]] = set()
        self.sent: list[tuple[NodeId, object]] = []
        self.accepted: list[tuple[NodeId, JobRecord]] = []
        self.now_s = 0.0

    def register(self, node: NodeId, generation: int = 1, store: int = 1) -> Register:
        return Register(
            node,
            generation,
            store,
            random.Random(1),
            may_change_shepherd=lambda _node, _generation, _now_s: not self.has_lease,
        )

    def restart(self, node: NodeId) -> None:
        self.registers[node] = self.register(node, 2)
        self.registers[node].restore(self.disks[node])

    def wipe(self, node: NodeId) -> None:
        self.disks[node].clear()
        self.registers[node] = self.register(node, 2, store=2)

    def ask(self, node: NodeId, event: UpdateRequested | ReadRequested | TimerFired) -> list[Result | EndConfirmed]:
        results: list[Result | EndConfirmed] = []
        queue = [(node, effect) for effect in self.registers[node].step(event, self.now_s)]
        while queue:
            source, effect = queue.pop(0)
            if isinstance(effect, SendPeer):
                self.sent.append((effect.recipient, effect.message))
                if effect.recipient not in self.cut and (effect.recipient, type(effect.message)) not in self.lost:
                    received = PeerMessageReceived(source, effect.message)
                    answers = self.registers[effect.recipient].step(received, self.now_s)
                    queue += [(effect.recipient, answer) for answer in answers]
            elif isinstance(effect, Persist):
                self.disks[source][effect.key] = effect.value or b""
            elif isinstance(effect, RecordAccepted):
                self.accepted.append((source, effect.record))
            else:
                results.append(effect)
        for each in self.registers.values():
            each.validate()
        return results

    def finish(self, node: NodeId, event: UpdateRequested | ReadRequested) -> Result | EndConfirmed:
        """Ask, and let the node's own timers run until it has an answer."""
        results = self.ask(node, event)
        while all(result.update_id != event.update_id for result in results):
            self.now_s = self.registers[node].next_deadline_s
            results = self.ask(node, TimerFired())
        (answer,) = (result for result in results if result.update_id == event.update_id)
        return answer

    def sent_kinds(self) -> list[type]:
        return [type(message) for _recipient, message in self.sent]


@pytest.fixture
def swarm() -> Swarm:
    """A job in version 1 at a, b and c."""
    swarm = Swarm()
    assert swarm.ask(A, create()) == [UpdateDecided(1, record(1))]
    swarm.sent.clear()
    swarm.accepted.clear()
    return swarm


# --- the identity of a holder


def test_a_holder_that_lost_its_disk_is_silent_under_its_old_name(swarm):
    swarm.wipe(C)
    swarm.cut = {B}
    result = swarm.finish(A, read())
    assert isinstance(result, UpdateUncertain)
    assert "silent: b, c" in result.reason
    assert swarm.registers[C].dropped_messages["wrong_store"] > 0
    assert swarm.registers[C].records == {}


def test_a_wiped_holder_comes_back_as_another_one_that_joins(swarm):
    swarm.wipe(C)
    again = Configuration((Holder(A, 1), Holder(B, 1), Holder(C, 2)), ABC.holders)
    joined = replace(again, leaving=())
    assert swarm.finish(A, update(record(2, again))) == UpdateDecided(2, record(2, again))
    assert swarm.finish(A, update(record(3, joined), again)) == UpdateDecided(3, record(3, joined))
    swarm.cut = {A}
    assert swarm.finish(C, read(joined)) == ReadDecided(99, record(3, joined))


# --- holders that change


def test_holders_change_in_two_updates_without_a_prepare(swarm):
    assert swarm.ask(A, update(record(2, ABC_TO_CDE))) == [UpdateDecided(2, record(2, ABC_TO_CDE))]
    assert swarm.ask(A, update(record(3, CDE), ABC_TO_CDE)) == [UpdateDecided(3, record(3, CDE))]
    assert PrepareRequest not in swarm.sent_kinds()
    swarm.sent.clear()
    assert swarm.ask(A, update(record(4, CDE), CDE)) == [UpdateDecided(4, record(4, CDE))]
    assert [recipient for recipient, _ in swarm.sent if recipient != A] == [C, D, E]


def test_who_knows_only_the_first_holders_finds_the_present_ones(swarm):
    swarm.ask(A, update(record(2, ABC_TO_CDE)))
    swarm.ask(A, update(record(3, CDE), ABC_TO_CDE))
    last, joint = held_by(F), held_by(F, leaving=(C, D, E))
    swarm.ask(A, update(record(4, joint), CDE))
    swarm.ask(A, update(record(5, last), joint))
    swarm.ask(F, update(record(6, last), last))
    swarm.cut = {A, E}
    assert swarm.finish(B, read()) == ReadDecided(99, record(6, last))


def test_a_joint_record_at_a_minority_is_completed_by_both_groups_or_not_at_all(swarm):
    swarm.cut = {A, C, D, E}
    assert isinstance(swarm.finish(A, update(record(2, ABC_TO_CDE))), UpdateUncertain)
    assert swarm.accepted == [(B, record(2, ABC_TO_CDE))]
    swarm.cut = {C, D, E}  # the old majority alone
    assert isinstance(swarm.finish(F, read()), UpdateUncertain)
    swarm.cut = {A, C}  # the new majority, with b
    assert isinstance(swarm.finish(F, read(ABC_TO_CDE)), UpdateUncertain)
    swarm.cut = {A, D}
    assert swarm.finish(F, read()) == ReadDecided(99, record(2, ABC_TO_CDE))
    assert {node for node, _ in swarm.accepted} >= {B, C, E}


def test_the_old_holders_are_left_only_from_a_decided_record(swarm):
    """The joint record lies at b alone.  Completing it needs the old majority first; else a and c, who know nothing
    of it, could go on alone."""
    swarm.cut = {A, C, D, E}
    swarm.finish(A, update(record(2, ABC_TO_CDE)))
    swarm.cut = {A}
    swarm.lost = {(C, AcceptRequest)}
    swarm.sent.clear()
    assert isinstance(swarm.finish(F, update(record(3, CDE), ABC_TO_CDE)), UpdateUncertain)
    proposed = [message.value for _, message in swarm.sent if isinstance(message, AcceptRequest)]
    assert {value.version for value in proposed} == {2}
    swarm.lost = set()
    assert swarm.finish(F, update(record(3, CDE), ABC_TO_CDE)) == UpdateDecided(3, record(3, CDE))


def test_the_end_of_an_exchange_needs_the_present_holders_alone(swarm):
    swarm.ask(A, update(record(2, ABC_TO_CDE)))
    swarm.cut = {B, C}  # the majority of those who leave
    assert swarm.finish(A, update(record(3, CDE), ABC_TO_CDE)) == UpdateDecided(3, record(3, CDE))
    assert swarm.finish(A, update(record(4, CDE), CDE)) == UpdateDecided(4, record(4, CDE))


def test_who_finds_the_end_of_an_exchange_asks_no_leaving_holder_any_more(swarm):
    swarm.ask(A, update(record(2, ABC_TO_CDE)))
    swarm.lost = {(node, AcceptRequest) for node in (A, B, C, E)}
    assert isinstance(swarm.finish(A, update(record(3, CDE), ABC_TO_CDE)), UpdateUncertain)
    swarm.lost = set()
    swarm.cut = {A, B, C}
    assert swarm.finish(F, read(ABC_TO_CDE)) == ReadDecided(99, record(3, CDE))
    assert {swarm.registers[node].records[JOB].version for node in (D, E)} == {3}


def test_a_record_that_only_a_former_holder_has_accepted_is_found_and_completed(swarm):
    """a took the new record, none of c, d, e did: who asks a must bring it to them instead of asking in circles."""
    swarm.ask(A, update(record(2, ABC_TO_CDE)))
    swarm.lost = {(node, AcceptRequest) for node in (B, C, D, E)}
    assert isinstance(swarm.finish(A, update(record(3, CDE), ABC_TO_CDE)), UpdateUncertain)
    assert swarm.registers[A].records[JOB] == record(3, CDE)
    swarm.lost = set()
    assert swarm.finish(F, read()) == ReadDecided(99, record(3, CDE))
    assert {swarm.registers[node].records[JOB].version for node in (C, D, E)} == {3}


def test_a_change_that_is_not_joint_is_our_own_bug(swarm):
    with pytest.raises(LocalProtocolError, match="leaving_holders"):
        swarm.ask(A, update(record(2, CDE)))
    with pytest.raises(LocalProtocolError, match="leaving_holders"):
        swarm.ask(A, update(record(2, held_by(C, D, E, leaving=(A, B)))))
    with pytest.raises(LocalProtocolError, match="1 to 5"):
        swarm.ask(A, update(record(2, held_by(leaving=(A, B, C)))))
    with pytest.raises(LocalProtocolError, match="1 to 5"):
        swarm.ask(A, update(record(2, held_by(D, D, leaving=(A, B, C)))))
    with pytest.raises(LocalProtocolError, match="first record"):
        swarm.ask(A, UpdateRequested(1, JOB, ABC, None, record(1, CDE)))


def test_a_change_from_holders_that_the_record_does_not_have_conflicts(swarm):
    """With a prepared ballot, and without one."""
    value = record(2, held_by(F, leaving=(C, D, E)))
    assert swarm.finish(A, update(value, CDE)) == UpdateConflicted(2, record(1))
    assert swarm.finish(B, update(value, CDE)) == UpdateConflicted(2, record(1))


def test_every_successor_keeps_the_present_holders_as_a_group():
    present = held_by(A, B, leaving=(C,))
    assert may_follow(present, present)
    assert may_follow(held_by(A, B), present)
    assert may_follow(held_by(D, leaving=(A, B)), present)
    assert may_follow(held_by(C, leaving=(A, B)), present)
    assert not may_follow(held_by(C), present)
    assert not may_follow(held_by(A, B, leaving=(D,)), present)
    assert not may_follow(held_by(A, D), present)


def test_a_spreading_read_brings_the_record_to_a_holder_that_missed_it(swarm):
    swarm.cut = {C}
    swarm.ask(A, update(record(2)))
    swarm.cut = set()
    assert swarm.registers[C].records[JOB] == record(1)
    assert swarm.finish(A, replace(read(), spreads=True)) == ReadDecided(99, record(2))
    assert swarm.registers[C].records[JOB] == record(2)


def test_who_was_down_while_it_was_replaced_learns_by_such_a_read_that_it_holds_nothing(swarm):
    swarm.cut = {A}
    swarm.finish(B, update(record(2, ABC_TO_CDE)))
    swarm.finish(B, update(record(3, CDE), ABC_TO_CDE))
    swarm.cut = set()
    register = swarm.registers[A]
    assert register.is_holder(JOB)
    assert swarm.finish(A, read()) == ReadDecided(99, record(3, CDE))
    assert register.is_holder(JOB), "by one that spreads alone: whoever asks for others keeps nothing"
    assert swarm.finish(A, replace(read(), spreads=True)) == ReadDecided(99, record(3, CDE))
    assert register.records[JOB] == record(3, CDE)
    assert not register.is_holder(JOB)
    assert JOB not in register.open_records
    register.validate()
    swarm.ask(C, update(record(4, CDE), CDE))
    swarm.ask(C, update(replace(record(5, CDE), state=JobState.ENDED), CDE))
    swarm.ask(A, replace(read(CDE), spreads=True))
    assert register.records[JOB] == record(3, CDE), "who keeps no more than that it is over needs no end"


# --- votes


def test_a_running_lease_refuses_a_new_shepherd_at_once_and_writes_nothing(swarm):
    swarm.has_lease = True
    before = {node: dict(disk) for node, disk in swarm.disks.items()}
    (result,) = swarm.ask(B, update(record(2, shepherd=B), takes_over=True))
    assert result == UpdateUncertain(2, "a still has its lease")
    assert swarm.disks == before
    swarm.has_lease = False
    assert swarm.ask(B, update(record(2, shepherd=B), takes_over=True)) == [UpdateDecided(2, record(2, shepherd=B))]


def test_a_candidate_that_hears_one_refusal_and_silence_is_told_before_the_time_out(swarm):
    swarm.has_lease = True
    swarm.cut = {A, C}
    result = swarm.finish(B, update(record(2, shepherd=B), takes_over=True))
    assert result == UpdateUncertain(2, "a still has its lease")
    assert swarm.now_s < 1.0


def test_a_lease_stands_in_nobodys_way_but_a_new_shepherds(swarm):
    swarm.has_lease = True
    assert swarm.finish(B, update(record(2))) == UpdateDecided(2, record(2))
    assert swarm.finish(B, read()) == ReadDecided(99, record(2))
    assert swarm.finish(A, update(record(3), takes_over=True)) == UpdateDecided(3, record(3))


def test_a_change_of_shepherd_asks_for_votes_even_with_a_prepared_ballot(swarm):
    assert swarm.finish(B, read()) == ReadDecided(99, record(1))
    swarm.sent.clear()
    swarm.finish(B, update(record(2, shepherd=B), takes_over=True))
    prepares = [message for _, message in swarm.sent if isinstance(message, PrepareRequest)]
    assert len(prepares) == 3
    assert all(each.takes_over for each in prepares)


def test_the_only_holder_too_keeps_its_lease():
    swarm = Swarm()
    alone = held_by(B)
    first = record(1, alone)
    swarm.ask(B, UpdateRequested(1, JOB, alone, None, first))
    swarm.has_lease = True
    value = record(2, alone, shepherd=B)
    assert swarm.ask(B, update(value, alone, takes_over=True)) == [UpdateUncertain(2, "a still has its lease")]
    swarm.has_lease = False
    assert swarm.ask(B, update(value, alone, takes_over=True)) == [UpdateDecided(2, value)]


# --- force


def test_a_forced_update_asks_the_new_holders_alone(swarm):
    swarm.cut = {A, B}
    value = record(2, held_by(C, F), epoch=1_001, shepherd=F)
    assert swarm.finish(F, update(value, is_forced=True)) == UpdateDecided(2, value)
    assert {recipient for recipient, message in swarm.sent if not isinstance(message, PrepareAnswer)} <= {C, F}
    assert swarm.finish(C, read(held_by(C, F))) == ReadDecided(99, value)


def test_a_forced_update_needs_no_record_at_all(swarm):
    swarm.cut = {A, B, C}
    value = record(2, held_by(D), epoch=1_001, shepherd=D)
    assert swarm.finish(D, update(value, is_forced=True)) == UpdateDecided(2, value)


def test_a_forced_update_below_the_epoch_that_is_found_conflicts(swarm):
    swarm.cut = {A, B}
    forced = record(2, held_by(C, F), epoch=1_001)
    swarm.finish(F, update(forced, is_forced=True))
    late = replace(forced, reason="another operator")
    assert swarm.finish(C, update(late, is_forced=True)) == UpdateConflicted(2, forced)
    assert swarm.finish(F, update(forced, is_forced=True)) == UpdateDecided(2, forced)


def test_a_forced_update_does_not_wait_behind_those_that_ask_the_lost_holders(swarm):
    swarm.cut = {A, B}
    waiting = [read(), replace(read(), update_id=100)]
    assert [swarm.ask(C, each) for each in waiting] == [[], []]
    value = record(2, held_by(C, F), epoch=1_001, shepherd=C)
    results = swarm.ask(C, update(value, is_forced=True))
    assert {result.update_id for result in results if isinstance(result, UpdateUncertain)} == {99, 100}
    assert results[-1] == UpdateDecided(2, value)


def test_who_asked_the_lost_holders_during_a_forced_update_does_not_keep_others_waiting(swarm):
    swarm.cut = {A, B, F}
    value = record(2, held_by(C, F), epoch=1_001, shepherd=C)
    assert swarm.ask(C, update(value, is_forced=True)) == []
    assert swarm.ask(C, read()) == []
    swarm.cut = {A, B}
    swarm.now_s = swarm.registers[C].next_deadline_s
    decided, told = swarm.ask(C, TimerFired())
    assert decided == UpdateDecided(2, value)
    assert isinstance(told, UpdateUncertain)


def test_force_ends_a_joint_phase_whose_old_holders_are_lost(swarm):
    """The shepherd itself forces it: the ballot that it has prepared at both groups is of no use."""
    assert swarm.finish(C, update(record(2, ABC_TO_CDE))) == UpdateDecided(2, record(2, ABC_TO_CDE))
    swarm.cut = {A, B}
    value = record(3, CDE, epoch=1_001)
    assert swarm.finish(C, update(value, ABC_TO_CDE, is_forced=True)) == UpdateDecided(3, value)
    assert swarm.finish(D, read(CDE)) == ReadDecided(99, value)


# --- the first record


def test_the_first_holder_creates_a_job_in_one_round_trip_and_asks_while_it_writes():
    swarm = Swarm()
    effects = swarm.registers[A].step(create(), 0.0)
    assert [(type(effect), effect.recipient) for effect in effects] == [(SendPeer, A), (SendPeer, B), (SendPeer, C)]
    assert [effect.message.ballot for effect in effects] == [Ballot(1, A, 1)] * 3
    swarm = Swarm()
    assert swarm.ask(A, create()) == [UpdateDecided(1, record(1))]
    assert PrepareRequest not in swarm.sent_kinds()


def test_a_ticket_of_an_earlier_life_prepares_and_finds_what_the_own_disk_has_lost():
    """The others had accepted, and the process ended before its own write did."""
    swarm = Swarm()
    swarm.cut = {A}
    swarm.ask(A, create())
    assert swarm.registers[A].records == {}
    swarm.cut = set()
    swarm.restart(A)
    swarm.sent.clear()
    other = replace(record(1), reason="the same ticket once more")
    result = swarm.finish(A, UpdateRequested(1, JOB, ABC, None, other))
    assert result == UpdateConflicted(1, record(1))
    assert swarm.sent_kinds()[0] is PrepareRequest


def test_a_ticket_that_was_used_prepares():
    swarm = Swarm()
    swarm.cut = {B, C}
    swarm.ask(A, create())
    swarm.cut = set()
    swarm.now_s = 60.0
    swarm.registers[A].step(TimerFired(), swarm.now_s)
    swarm.sent.clear()
    assert swarm.finish(A, create()) == UpdateDecided(1, record(1))
    assert swarm.sent_kinds()[0] is PrepareRequest


def test_a_job_that_another_node_has_issued_is_prepared():
    swarm = Swarm()
    assert swarm.finish(A, create(is_issued_here=False)) == UpdateDecided(1, record(1))
    assert swarm.sent_kinds()[0] is PrepareRequest


@pytest.mark.parametrize("asker", [B, F])
def test_whoever_is_not_the_first_holder_prepares(asker):
    swarm = Swarm()
    assert swarm.finish(asker, create()) == UpdateDecided(1, record(1))
    assert min(message.ballot.counter for _, message in swarm.sent if isinstance(message, PrepareRequest)) == 2


def test_a_first_holder_with_another_store_than_the_tickets_prepares():
    swarm = Swarm()
    swarm.wipe(A)
    assert swarm.finish(A, create()) == UpdateDecided(1, record(1))
    assert swarm.sent_kinds()[0] is PrepareRequest
    assert swarm.registers[A].records == {}


def test_two_who_create_one_job_at_once_get_one_record():
    swarm = Swarm()
    swarm.cut = {B, C}
    assert swarm.ask(A, create()) == []
    swarm.cut = {A}
    other = replace(record(1), reason="another agent's")
    assert swarm.finish(B, UpdateRequested(2, JOB, ABC, None, other)) == UpdateDecided(2, other)
    swarm.cut = set()
    assert swarm.finish(A, read()) == ReadDecided(99, other)
    assert swarm.finish(C, read()) == ReadDecided(99, other)


# --- what a holder tells its own node


def test_a_holder_tells_of_every_record_that_it_takes_over(swarm):
    swarm.ask(A, update(record(2)))
    assert sorted(node for node, value in swarm.accepted if value == record(2)) == [A, B, C]


def test_open_records_are_those_that_have_not_ended_and_name_this_holder(swarm):
    assert [node for node, each in swarm.registers.items() if JOB in each.open_records] == [A, B, C]
    swarm.ask(A, update(record(2, ABC_TO_CDE)))
    assert [node for node, each in swarm.registers.items() if JOB in each.open_records] == [A, B, C, D, E]
    swarm.ask(A, update(record(3, CDE), ABC_TO_CDE))
    assert [node for node, each in swarm.registers.items() if JOB in each.open_records] == [C, D, E]
    assert [node for node, each in swarm.registers.items() if each.is_holder(JOB)] == [C, D, E]
    swarm.restart(D)
    assert swarm.registers[D].open_records == {JOB: record(3, CDE)}
    swarm.ask(A, update(replace(record(4, CDE), state=JobState.ENDED), CDE))
    assert not any(each.open_records for each in swarm.registers.values())
    assert [node for node, each in swarm.registers.items() if each.is_holder(JOB)] == [C, D, E]
