import random

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.effects import Persist, SendPeer
from swarmsched.errors import LocalProtocolError, StorageError
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import JobId, NodeId, make_job_id
from swarmsched.jobs import acceptor
from swarmsched.jobs.acceptor import Acceptor, Slot
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot, PrepareAnswer, PrepareRequest
from swarmsched.jobs.proposer import COUNTER_MAX
from swarmsched.jobs.register import UPDATE_TIMEOUT_S, Register
from swarmsched.jobs.tombstones import TOMBSTONES_MAX
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
from swarmsched.wire.codec import encode_value
from tests.swarmsched.building import JOB, make_record

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
SPEC = JobSpec(command=("true",))


STORES = {A: 101, B: 102, C: 103}


def held_by(*nodes: NodeId) -> Configuration:
    return Configuration(tuple(Holder(node, STORES[node]) for node in nodes))


def record(version: int, reason: str = "", shepherd: NodeId = A, holders: tuple[NodeId, ...] = (A,)) -> JobRecord:
    return replace(make_record(shepherd, held_by(*holders).holders, version=version), reason=reason)


def make_register(node: NodeId = A, generation: int = 1) -> Register:
    return Register(node, generation, STORES[node], random.Random(1))


def update(version: int, holders: tuple[NodeId, ...] = (A,), update_id: int = 1, reason: str = "") -> UpdateRequested:
    expected = (1, version - 1) if version > 1 else None
    return UpdateRequested(update_id, JOB, held_by(*holders), expected, record(version, reason, holders=holders))


def read(update_id: int, *holders: NodeId) -> ReadRequested:
    return ReadRequested(update_id, JOB, held_by(*holders))


def make_acceptor() -> Acceptor:
    return Acceptor(Holder(A, STORES[A]), lambda _shepherd, _generation, _now_s: True, TOMBSTONES_MAX)


class Wire:
    """Registers joined without delay or loss; counts messages."""

    def __init__(self, nodes: tuple[NodeId, ...]) -> None:
        self.registers = {node: make_register(node) for node in nodes}
        self.cut: set[NodeId] = set()
        self.messages: list[object] = []

    def ask(
        self, node: NodeId, event: UpdateRequested | ReadRequested | TimerFired, now_s: float = 0.0
    ) -> list[Result | EndConfirmed]:
        results: list[Result | EndConfirmed] = []
        queue = [(node, node, effect) for effect in self.registers[node].step(event, now_s)]
        while queue:
            _, source, effect = queue.pop(0)
            if isinstance(effect, SendPeer):
                self.messages.append(effect.message)
                if effect.recipient not in self.cut:
                    received = PeerMessageReceived(source, effect.message)
                    answers = self.registers[effect.recipient].step(received, now_s)
                    queue += [(source, effect.recipient, answer) for answer in answers]
            elif not isinstance(effect, Persist | RecordAccepted):
                results.append(effect)
        for each in self.registers.values():
            each.validate()
        return results

    def ask_again_and_again(self, node: NodeId, event: UpdateRequested | ReadRequested) -> list[Result | EndConfirmed]:
        """Ask and let the node's own timers run until it has an answer."""
        results = self.ask(node, event)
        while not results:
            deadline_s = self.registers[node].next_deadline_s
            assert deadline_s < 10.0
            results = self.ask(node, TimerFired(), deadline_s)
        return results


# --- one holder


def test_the_only_holder_decides_within_the_step_with_one_write():
    register = make_register()
    effects = register.step(update(1), 0.0)
    assert [type(effect) for effect in effects] == [RecordAccepted, Persist, Persist, UpdateDecided]
    assert [(effect.room, effect.key) for effect in effects[1:3]] == [("register", "schema"), ("register", JOB)]
    assert (effects[0], effects[3]) == (RecordAccepted(record(1)), UpdateDecided(1, record(1)))
    again = register.step(update(2), 0.0)
    assert [type(effect) for effect in again] == [RecordAccepted, Persist, UpdateDecided]


def test_an_update_that_expects_another_stamp_conflicts_and_writes_nothing():
    register = make_register()
    register.step(update(1), 0.0)
    assert register.step(update(3, update_id=2), 0.0) == [UpdateConflicted(2, record(1))]
    assert register.records == {JOB: record(1)}


def test_creating_a_job_that_exists_conflicts_unless_it_is_the_same_record():
    register = make_register()
    register.step(update(1, reason="mine"), 0.0)
    assert register.step(update(1, update_id=2, reason="other"), 0.0) == [
        UpdateConflicted(2, record(1, "mine")),
    ]
    assert register.step(update(1, update_id=3, reason="mine"), 0.0) == [UpdateDecided(3, record(1, "mine"))]


def test_a_read_of_an_unknown_job_is_absent():
    assert make_register().step(read(5, A), 0.0) == [ReadDecided(5, None)]


def test_a_restart_keeps_what_was_persisted():
    register = make_register()
    disk: dict[str, bytes] = {}
    for version in (1, 2, 3):
        for effect in register.step(update(version), 0.0):
            if isinstance(effect, Persist) and effect.value is not None:
                disk[effect.key] = effect.value
    again = make_register(generation=2)
    again.restore(disk)
    again.validate()
    assert again.step(read(1, A), 0.0) == [ReadDecided(1, record(3))]
    assert again.drop(JOB) == [Persist("over", JOB, b"0"), Persist("register", JOB, None)]
    assert again.records == {}


def test_an_unreadable_entry_is_refused_by_name():
    for data in (b"\x93\x01\x02", encode_value(Slot, Slot(make_job_id(9.0, random.Random(9))))):
        with pytest.raises(StorageError, match=JOB):
            make_register().restore({"schema": b"2", JOB: data})


@pytest.mark.parametrize(
    "slot",
    [
        Slot(JOB, Ballot(1, A, 1), Ballot(2, A, 1), record(1)),
        Slot(JOB, Ballot(2, A, 1), Ballot(), record(1)),
        Slot(JOB, Ballot(2, A, 1), Ballot(2, A, 1), None),
        Slot(JOB, Ballot(2, A, 1), Ballot(2, A, 1), replace(record(1), holders=())),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused_by_name(slot):
    with pytest.raises(StorageError, match=JOB):
        make_register().restore({"schema": b"2", JOB: encode_value(Slot, slot)})


def test_a_record_that_cannot_be_encoded_leaves_no_trace_in_a_holder():
    """Memory that is ahead of the disk would answer for what the next life does not know."""
    holder = make_acceptor()
    poisoned = AcceptRequest(JOB, Ballot(2, A, 1), record(1, "caf\udce9"), next_ballot=Ballot(3, A, 1))
    for _ in range(2):
        with pytest.raises(LocalProtocolError):
            holder.accept(poisoned)
        assert (dict(holder.records), holder.has_slot(JOB)) == ({}, False)
    _, effects = holder.accept(replace(poisoned, value=record(1)))
    assert [each.key for each in effects[1:]] == ["schema", JOB]


def test_an_update_that_no_holder_could_store_is_refused_before_it_becomes_a_round():
    register = make_register()
    holders = (A, B, C)
    with pytest.raises(LocalProtocolError, match="JobRecord"):
        register.step(update(1, holders, reason="caf\udce9"), 0.0)
    assert register.next_deadline_s == float("inf")


def test_a_room_whose_schema_entry_alone_is_missing_is_read_and_gets_it_back():
    register = make_register()
    register.restore({JOB: encode_value(Slot, Slot(JOB, Ballot(1, A, 1), Ballot(1, A, 1), record(1)))})
    assert register.records[JOB] == record(1)
    effects = register.step(update(2), 0.0)
    assert [each.key for each in effects if isinstance(each, Persist)] == ["schema", JOB]


@pytest.mark.parametrize(("schema", "found"), [({"schema": b"3"}, "'3'"), ({"schema": b"\xff"}, "")])
def test_a_room_of_another_schema_is_refused_with_nothing_restored(schema, found):
    register = make_register()
    with pytest.raises(StorageError, match=f"unknown schema version {found}") as caught:
        register.restore({**schema, JOB: encode_value(Slot, Slot(JOB, Ballot(1, A, 1), Ballot(1, A, 1), record(1)))})
    assert "version of swarm-agent" in caught.value.remedy
    assert register.records == {}


def test_requests_that_can_never_be_served_are_our_own_bug():
    register = make_register()
    with pytest.raises(LocalProtocolError, match="holders"):
        register.step(ReadRequested(1, JOB, Configuration()), 0.0)
    with pytest.raises(LocalProtocolError, match="holders"):
        register.step(read(1, A, A), 0.0)
    with pytest.raises(LocalProtocolError, match="not above"):
        register.step(UpdateRequested(1, JOB, held_by(A), (1, 1), record(1)), 0.0)
    other = make_job_id(9.0, random.Random(9))
    with pytest.raises(LocalProtocolError, match="cannot be that of"):
        register.step(UpdateRequested(1, other, held_by(A), None, record(1)), 0.0)


# --- several holders


def test_a_steady_proposer_needs_one_round_trip():
    wire = Wire((A, B, C))
    assert wire.ask(A, update(1, (A, B, C))) == [UpdateDecided(1, record(1, holders=(A, B, C)))]
    wire.messages.clear()
    for version in (2, 3, 4):
        value = record(version, holders=(A, B, C))
        assert wire.ask(A, update(version, (A, B, C), update_id=version)) == [UpdateDecided(version, value)]
    kinds = [type(message) for message in wire.messages]
    assert kinds.count(PrepareRequest) == 0
    assert kinds.count(AcceptRequest) == 9


def test_a_read_elsewhere_sees_the_decided_record_with_one_holder_gone():
    wire = Wire((A, B, C))
    wire.cut = {C}
    wire.ask(A, update(1, (A, B, C)))
    wire.cut = {A}
    assert wire.ask_again_and_again(C, read(2, A, B, C)) == [ReadDecided(2, record(1, holders=(A, B, C)))]


def test_a_node_that_holds_nothing_can_update():
    wire = Wire((A, B))
    assert wire.ask(B, update(1, (A,))) == [UpdateDecided(1, record(1))]
    assert wire.registers[B].records == {}
    assert wire.registers[A].records == {JOB: record(1)}
    assert wire.ask(A, update(2, (A,))) == [UpdateDecided(1, record(2))]


def test_a_conflict_after_anothers_update_is_certain_with_one_remote_holder():
    wire = Wire((A, B))
    wire.ask(B, update(1, (A,)))
    wire.ask(A, update(2, (A,), reason="from a"))
    register = wire.registers[B]
    assert wire.ask(B, update(2, (A,), update_id=9, reason="from b")) == []
    assert 0.010 <= register.next_deadline_s <= 0.100
    assert wire.ask(B, TimerFired(), register.next_deadline_s) == [UpdateConflicted(9, record(2, "from a"))]


def test_an_update_that_is_repeated_after_others_have_written_is_not_decided_once_more():
    """Its proposer still remembers it as the newest; were that believed, a shepherd of old would act again."""
    wire = Wire((A, B, C))
    first = update(1, (A, B, C))
    assert wire.ask(A, first) == [UpdateDecided(1, record(1, holders=(A, B, C)))]
    assert wire.ask(A, replace(first, update_id=2)) == [UpdateDecided(2, record(1, holders=(A, B, C)))]
    wire.cut = {A}
    assert wire.ask_again_and_again(B, update(2, (A, B, C), update_id=3)) == [
        UpdateDecided(3, record(2, holders=(A, B, C)))
    ]
    wire.cut = set()
    assert isinstance(wire.ask_again_and_again(A, replace(first, update_id=4))[0], UpdateUncertain)
    assert wire.ask_again_and_again(A, replace(first, update_id=5)) == [
        UpdateConflicted(5, record(2, holders=(A, B, C)))
    ]


def test_without_a_majority_the_outcome_is_uncertain_at_the_deadline_and_names_the_silent():
    wire = Wire((A, B, C))
    wire.cut = {B, C}
    assert wire.ask(A, update(1, (A, B, C))) == []
    sent_count = len(wire.messages)
    assert wire.ask(A, TimerFired(), 0.5) == []
    assert len(wire.messages) == sent_count + 2
    (result,) = wire.ask(A, TimerFired(), 10.0)
    assert isinstance(result, UpdateUncertain)
    assert "b, c" in result.reason


def test_silent_holders_are_asked_ever_more_seldom():
    wire = Wire((A, B, C))
    wire.cut = {B, C}
    wire.ask(A, update(1, (A, B, C)))
    asked_s = [0.0]
    while (now_s := wire.registers[A].next_deadline_s) < UPDATE_TIMEOUT_S:
        count = len(wire.messages)
        wire.ask(A, TimerFired(), now_s)
        asked_s += [now_s] * (len(wire.messages) > count)
    assert asked_s == [0.0, 0.5, 1.5, 3.5, 7.5]


def test_requests_for_one_job_are_served_in_order():
    wire = Wire((A, B, C))
    wire.cut = {B, C}
    wire.ask(A, update(1, (A, B, C)))
    wire.ask(A, update(2, (A, B, C), update_id=2), 0.1)
    wire.cut = set()
    results = wire.ask(A, TimerFired(), 0.5)
    assert [result.update_id for result in results] == [1, 2]
    assert all(isinstance(result, UpdateDecided) for result in results)


def test_waiting_requests_are_bounded():
    wire = Wire((A, B))
    wire.cut = {B}
    results = [wire.ask(A, update(n + 1, (B,), update_id=n)) for n in range(66)]
    assert [bool(result) for result in results] == [False] * 65 + [True]
    assert isinstance(results[-1][0], UpdateUncertain)


def test_an_accepted_value_of_a_minority_may_win_and_is_then_completed_for_all():
    """A dies after one holder accepted; the next reader asks that holder and must not leave the value half known."""
    wire = Wire((A, B, C))
    wire.ask(A, update(1, (A, B, C)))
    wire.cut = {B, C}
    wire.ask(A, update(2, (A, B, C)))
    wire.cut = {B}
    assert wire.ask_again_and_again(C, read(2, A, B, C)) == [ReadDecided(2, record(2, holders=(A, B, C)))]
    wire.cut = {A}
    wire.registers[A] = make_register(A, 2)
    assert wire.ask_again_and_again(B, read(3, A, B, C)) == [ReadDecided(3, record(2, holders=(A, B, C)))]


def test_foreign_or_contradictory_messages_are_dropped_and_counted():
    register = make_register()
    other = make_job_id(9.0, random.Random(9))
    crowd = tuple(Holder(NodeId(f"n{n}"), 1) for n in range(6))
    own, following, store = Ballot(2, C, 1), Ballot(3, C, 1), STORES[A]
    by_c = record(1, shepherd=C, holders=(C, A))
    nonsense = [
        "text",
        PrepareRequest(JOB, Ballot(2, B, 1), store),  # another's ballot
        PrepareRequest(JOB, Ballot(COUNTER_MAX + 1, C, 1), store),
        PrepareRequest(JOB, Ballot(0, C, 1), store),
        PrepareRequest(JOB, Ballot(1, C, 1), store),  # kept for first records
        AcceptRequest(other, own, record(1), following, store),  # another job's value
        AcceptRequest(JOB, own, record(1), Ballot(3, B, 1), store),
        AcceptRequest(JOB, Ballot(1, C, 1), record(1), own, store),  # kept for the first holder
        AcceptRequest(JOB, Ballot(1, C, 1), replace(by_c, leaving_holders=held_by(B).holders), own, store),
        AcceptRequest(JOB, own, replace(record(1), holders=()), following, store),
        AcceptRequest(JOB, own, replace(by_c, holders=(), leaving_holders=held_by(B).holders), following, store),
        AcceptRequest(JOB, own, replace(by_c, holders=tuple(Holder(A, n) for n in range(2))), following, store),
        AcceptRequest(JOB, own, replace(by_c, holders=crowd), following, store),
        AcceptRequest(JOB, own, replace(by_c, leaving_holders=crowd), following, store),
        PrepareAnswer(other, Ballot(2, A, 1), True, Ballot(2, A, 1), Ballot(2, A, 1), record(1)),
        PrepareAnswer(JOB, Ballot(2, A, 1), True, Ballot(2, A, 1), Ballot(2, A, 1), None),
        PrepareAnswer(JOB, Ballot(2, A, 1), True, Ballot(2, A, 1), Ballot(), record(1)),
        PrepareAnswer(JOB, Ballot(2, A, 1), True, Ballot(2, A, 1), Ballot(2, A, 1), replace(record(1), holders=())),
        PrepareAnswer(JOB, Ballot(2, A, 1), True, Ballot(3, A, 1), Ballot(), None),  # promised to another as well
        PrepareAnswer(JOB, Ballot(2, A, 1), True, Ballot(2, A, 1), own, by_c),  # accepted above its promise
        PrepareAnswer(JOB, Ballot(2, A, 1), False, Ballot(COUNTER_MAX + 1, B, 1), Ballot(), None),
        AcceptAnswer(JOB, Ballot(2, A, 1), True, Ballot(1, A, 1)),  # accepted below its promise
        AcceptAnswer(JOB, Ballot(2, A, 1), False, Ballot(COUNTER_MAX + 1, B, 1)),
    ]
    for message in nonsense:
        assert register.step(PeerMessageReceived(C, message), 0.0) == []
    assert register.dropped_messages == {"nonsense": len(nonsense)}
    assert register.step(PeerMessageReceived(C, PrepareRequest(JOB, own, store + 1)), 0.0) == []
    assert register.dropped_messages == {"nonsense": len(nonsense), "wrong_store": 1}
    assert register.records == {}
    answers = register.step(PeerMessageReceived(C, AcceptRequest(JOB, Ballot(1, C, 1), by_c, own, store)), 0.0)
    assert answers[-1] == SendPeer(C, AcceptAnswer(JOB, Ballot(1, C, 1), True, own, store))


def test_when_a_holder_reports_the_last_ballot_of_all_a_request_waits_for_its_deadline_and_says_why():
    """Given up at once, it would be repeated at once by whoever must have it written, and the step would never end."""
    register = make_register()
    register.step(read(1, B), 0.0)
    refusal = PrepareAnswer(JOB, Ballot(2, A, 1), False, Ballot(COUNTER_MAX, B, 1), Ballot(), None, STORES[B])
    assert register.step(PeerMessageReceived(B, refusal), 0.0) == []
    assert register.step(TimerFired(), register.next_deadline_s) == []
    assert register.step(read(2, B), 5.0) == []
    results = register.step(TimerFired(), 10.0)
    assert [type(result) for result in results] == [UpdateUncertain]
    assert f"a ballot counter near {COUNTER_MAX}" in results[0].reason
    assert register.next_deadline_s == 15.0
    register.validate()


def test_an_answer_under_another_store_counts_for_nobody():
    register = make_register()
    register.step(read(1, B), 0.0)
    promise = PrepareAnswer(JOB, Ballot(2, A, 1), True, Ballot(2, A, 1), Ballot(), None, STORES[B] + 1)
    assert register.step(PeerMessageReceived(B, promise), 0.0) == []
    assert register.step(PeerMessageReceived(C, replace(promise, store=STORES[B])), 0.0) == []
    assert register.step(PeerMessageReceived(B, replace(promise, store=STORES[B])), 0.0) == [ReadDecided(1, None)]


def test_a_holder_without_room_is_silent_about_new_jobs(monkeypatch):
    monkeypatch.setattr(acceptor, "SLOTS_MAX", 1)
    register = make_register()
    register.step(update(1), 0.0)
    other = make_job_id(9.0, random.Random(9))
    assert register.step(PeerMessageReceived(C, PrepareRequest(other, Ballot(2, C, 1), STORES[A])), 0.0) == []
    assert register.dropped_messages == {"no_room": 1}
    value = replace(record(1), job_id=other)
    (result,) = register.step(UpdateRequested(2, other, held_by(A), None, value), 0.0)
    assert isinstance(result, UpdateUncertain)


# --- the acceptor


def test_an_acceptor_keeps_its_promise_and_tells_what_stands_in_the_way():
    holder = make_acceptor()
    high, low = Ballot(5, A, 1), Ballot(4, B, 1)
    answer, writes = holder.prepare(PrepareRequest(JOB, high), 0.0)
    assert answer.is_promised
    assert [type(each) for each in writes] == [Persist, Persist]  # the schema and the promise
    refused, writes = holder.prepare(PrepareRequest(JOB, low), 0.0)
    assert (refused.is_promised, refused.promised, writes) == (False, high, [])
    late, writes = holder.accept(AcceptRequest(JOB, low, record(1), Ballot(5, B, 1)))
    assert (late.is_accepted, late.promised, writes) == (False, high, [])
    holder.validate()


def test_a_repeated_accept_is_confirmed_without_a_write():
    holder = make_acceptor()
    request = AcceptRequest(JOB, Ballot(1, A, 1), record(1), Ballot(2, A, 1))
    first, writes = holder.accept(request)
    again, more = holder.accept(request)
    assert first == again == AcceptAnswer(JOB, Ballot(1, A, 1), True, Ballot(2, A, 1), STORES[A])
    assert ([type(each) for each in writes], more) == ([RecordAccepted, Persist, Persist], [])


def test_another_value_under_a_ballot_that_was_used_is_refused():
    holder = make_acceptor()
    request = AcceptRequest(JOB, Ballot(2, A, 1), record(1), Ballot(3, A, 1))
    holder.accept(request)
    answer, effects = holder.accept(replace(request, value=record(1, "another")))
    assert (answer.is_accepted, effects) == (False, [])
    assert holder.records == {JOB: record(1)}


def test_ballots_order_by_counter_then_name_then_generation():
    ballots = [Ballot(1, B, 9), Ballot(2, A, 1), Ballot(1, A, 2), Ballot(), Ballot(1, A, 1)]
    assert sorted(ballots) == [Ballot(), Ballot(1, A, 1), Ballot(1, A, 2), Ballot(1, B, 9), Ballot(2, A, 1)]


def test_job_ids_are_the_storage_keys():
    """Retention lists keys of the room as job ids."""
    _accepted, _schema, write, *_ = make_register().step(update(1), 0.0)
    assert isinstance(write, Persist)
    assert JobId(write.key) == JOB


def taken_over(value: JobRecord, writer: NodeId, counter: int, at: Acceptor, generation: int = 1) -> RecordAccepted:
    ballot, following = Ballot(counter, writer, generation), Ballot(counter + 1, writer, generation)
    _, effects = at.accept(AcceptRequest(JOB, ballot, value, following, STORES[A]))
    (accepted,) = [effect for effect in effects if isinstance(effect, RecordAccepted)]
    return accepted


def test_a_record_shows_that_its_shepherd_is_alive_only_if_that_wrote_it() -> None:
    """Others that find a record have it accepted again, long after its shepherd has died."""
    holders = (A, B, C)
    acceptor = make_acceptor()
    assert taken_over(record(1, shepherd=B, holders=holders), B, 2, acceptor).is_by_shepherd
    assert not taken_over(record(2, shepherd=B, holders=holders), C, 4, acceptor).is_by_shepherd
    assert not taken_over(record(3, shepherd=B, holders=holders), B, 6, acceptor, generation=2).is_by_shepherd


def test_a_job_that_is_handed_over_gives_its_successor_time() -> None:
    holders = (A, B, C)
    acceptor = make_acceptor()
    taken_over(record(1, shepherd=B, holders=holders), B, 2, acceptor)
    value = record(2, shepherd=C, holders=holders)
    handed = replace(value, shepherd_generation=0, epoch=2)
    assert not taken_over(handed, B, 4, acceptor, generation=2).is_by_shepherd
    assert not taken_over(replace(handed, version=3), B, 6, acceptor).is_by_shepherd, "B has handed it over already"
    acceptor = make_acceptor()
    taken_over(record(1, shepherd=B, holders=holders), B, 2, acceptor)
    assert taken_over(handed, B, 4, acceptor).is_by_shepherd


def test_a_former_shepherd_that_brings_itself_up_to_date_says_nothing_of_its_successor() -> None:
    holders = (A, B, C)
    acceptor = make_acceptor()
    taken_over(record(1, shepherd=B, holders=holders), B, 2, acceptor)
    found = replace(record(2, shepherd=C, holders=holders), epoch=2)
    assert not taken_over(found, B, 4, acceptor).is_by_shepherd


def test_a_record_that_is_accepted_again_shows_nothing() -> None:
    value = record(1, shepherd=B, holders=(A, B, C))
    acceptor = make_acceptor()
    taken_over(value, B, 2, acceptor)
    assert not taken_over(value, B, 4, acceptor).is_by_shepherd


def remind(wire: Wire, node: NodeId) -> list[NodeId]:
    """Deliver what the others are reminded of; who was."""
    reminders = wire.registers[node].remind(lambda other: other not in wire.cut)
    for effect in reminders:
        for answer in wire.registers[effect.recipient].step(PeerMessageReceived(node, effect.message), 0.0):
            if isinstance(answer, SendPeer):
                wire.registers[node].step(PeerMessageReceived(effect.recipient, answer.message), 0.0)
        wire.registers[node].validate()
    return [effect.recipient for effect in reminders]


def test_a_holder_that_missed_a_decided_record_is_sent_it_until_it_has_it():
    wire = Wire((A, B, C))
    wire.cut = {C}
    wire.ask(A, update(1, (A, B, C)))
    assert remind(wire, A) == []
    wire.cut = set()
    assert wire.registers[C].records == {}
    assert remind(wire, A) == [C]
    assert wire.registers[C].records == {JOB: record(1, holders=(A, B, C))}
    assert remind(wire, A) == []
    assert wire.ask(A, update(2, (A, B, C))) == [UpdateDecided(1, record(2, holders=(A, B, C)))]
    assert remind(wire, A) == []


def test_a_holder_that_has_promised_a_higher_ballot_is_not_reminded_for_ever():
    wire = Wire((A, B, C))
    wire.cut = {C}
    wire.ask(A, update(1, (A, B, C)))
    wire.cut = {A}
    wire.ask_again_and_again(B, update(2, (A, B, C)))
    wire.cut = set()
    assert remind(wire, A) == [C]
    assert wire.registers[C].records == {JOB: record(2, holders=(A, B, C))}
    assert remind(wire, A) == []
