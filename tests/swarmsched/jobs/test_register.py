import heapq
import random
from dataclasses import dataclass, field

import pytest

from swarmsched.api import JobSpec
from swarmsched.effects import Persist, SendPeer
from swarmsched.errors import LocalProtocolError, StorageError
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.ids import JobId, NodeId, make_job_id
from swarmsched.jobs.acceptor import Acceptor
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot, PrepareAnswer, PrepareRequest
from swarmsched.jobs.proposer import COUNTER_MAX, majority
from swarmsched.jobs.register import (
    ReadDecided,
    ReadRequested,
    Register,
    Result,
    UpdateConflicted,
    UpdateDecided,
    UpdateRequested,
    UpdateUncertain,
)
from swarmsched.record import JobRecord

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
JOB = make_job_id(0.0, random.Random(7))
SPEC = JobSpec(command=("true",))


def record(version: int, reason: str = "", shepherd: NodeId = A, holders: tuple[NodeId, ...] = (A,)) -> JobRecord:
    return JobRecord(JOB, SPEC, 0.0, 1, version, shepherd, 1, holders, reason=reason)


def make_register(node: NodeId = A, generation: int = 1) -> Register:
    return Register(node, generation, random.Random(1))


def update(version: int, holders: tuple[NodeId, ...] = (A,), update_id: int = 1, reason: str = "") -> UpdateRequested:
    expected = (1, version - 1) if version > 1 else None
    return UpdateRequested(update_id, JOB, holders, expected, record(version, reason, holders=holders))


class Wire:
    """Registers joined without delay or loss; counts messages."""

    def __init__(self, nodes: tuple[NodeId, ...]) -> None:
        self.registers = {node: make_register(node) for node in nodes}
        self.cut: set[NodeId] = set()
        self.messages: list[object] = []

    def ask(
        self, node: NodeId, event: UpdateRequested | ReadRequested | TimerFired, now_s: float = 0.0
    ) -> list[Result]:
        results: list[Result] = []
        queue = [(node, node, effect) for effect in self.registers[node].step(event, now_s)]
        while queue:
            _, source, effect = queue.pop(0)
            if isinstance(effect, SendPeer):
                self.messages.append(effect.message)
                if effect.recipient not in self.cut:
                    received = PeerMessageReceived(source, effect.message)
                    answers = self.registers[effect.recipient].step(received, now_s)
                    queue += [(source, effect.recipient, answer) for answer in answers]
            elif not isinstance(effect, Persist):
                results.append(effect)
        for each in self.registers.values():
            each.validate()
        return results

    def ask_again_and_again(self, node: NodeId, event: UpdateRequested | ReadRequested) -> list[Result]:
        """Ask and let the node's own timers run until it has an answer."""
        results = self.ask(node, event)
        while not results:
            deadline_s = self.registers[node].next_deadline_s
            assert deadline_s < 10.0
            results = self.ask(node, TimerFired(), deadline_s)
        return results


# --- one holder


def test_the_only_holder_decides_within_the_step_with_one_write():
    effects = make_register().step(update(1), 0.0)
    assert [type(effect) for effect in effects] == [Persist, UpdateDecided]
    assert effects[0].room == "register"
    assert effects[0].key == JOB
    assert effects[1] == UpdateDecided(1, record(1))


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
    assert make_register().step(ReadRequested(5, JOB, (A,)), 0.0) == [ReadDecided(5, None)]


def test_a_restart_keeps_what_was_persisted():
    register = make_register()
    disk = {}
    for version in (1, 2, 3):
        for effect in register.step(update(version), 0.0):
            if isinstance(effect, Persist):
                disk[effect.key] = effect.value
    again = make_register(generation=2)
    again.restore(disk)
    again.validate()
    assert again.step(ReadRequested(1, JOB, (A,)), 0.0) == [ReadDecided(1, record(3))]
    assert again.drop(JOB) == [Persist("register", JOB, None)]
    assert again.records == {}


def test_an_unreadable_entry_is_refused_by_name():
    with pytest.raises(StorageError, match=JOB):
        make_register().restore({JOB: b"\x93\x01\x02"})


def test_requests_that_can_never_be_served_are_our_own_bug():
    register = make_register()
    with pytest.raises(LocalProtocolError, match="holders"):
        register.step(ReadRequested(1, JOB, ()), 0.0)
    with pytest.raises(LocalProtocolError, match="holders"):
        register.step(ReadRequested(1, JOB, (A, A)), 0.0)
    with pytest.raises(LocalProtocolError, match="not above"):
        register.step(UpdateRequested(1, JOB, (A,), (1, 1), record(1)), 0.0)
    other = make_job_id(9.0, random.Random(9))
    with pytest.raises(LocalProtocolError, match="cannot be that of"):
        register.step(UpdateRequested(1, other, (A,), None, record(1)), 0.0)


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
    assert wire.ask_again_and_again(C, ReadRequested(2, JOB, (A, B, C))) == [
        ReadDecided(2, record(1, holders=(A, B, C)))
    ]


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
    assert wire.ask_again_and_again(C, ReadRequested(2, JOB, (A, B, C))) == [
        ReadDecided(2, record(2, holders=(A, B, C)))
    ]
    wire.cut = {A}
    wire.registers[A] = make_register(A, 2)
    assert wire.ask_again_and_again(B, ReadRequested(3, JOB, (A, B, C))) == [
        ReadDecided(3, record(2, holders=(A, B, C)))
    ]


def test_foreign_or_contradictory_messages_are_dropped_and_counted():
    register = make_register()
    other = make_job_id(9.0, random.Random(9))
    nonsense = [
        "text",
        PrepareRequest(JOB, Ballot(1, B, 1)),
        PrepareRequest(JOB, Ballot(COUNTER_MAX + 1, C, 1)),
        AcceptRequest(other, Ballot(1, C, 1), record(1), Ballot(2, C, 1)),
        PrepareAnswer(other, Ballot(1, A, 1), True, Ballot(1, A, 1), Ballot(1, A, 1), record(1)),
    ]
    for message in nonsense:
        assert register.step(PeerMessageReceived(C, message), 0.0) == []
    assert register.dropped_message_count == len(nonsense)


# --- the acceptor


def test_an_acceptor_keeps_its_promise_and_tells_what_stands_in_the_way():
    acceptor = Acceptor()
    high, low = Ballot(5, A, 1), Ballot(4, B, 1)
    answer, writes = acceptor.prepare(PrepareRequest(JOB, high))
    assert answer.is_promised
    assert len(writes) == 1
    refused, writes = acceptor.prepare(PrepareRequest(JOB, low))
    assert (refused.is_promised, refused.promised, writes) == (False, high, [])
    late, writes = acceptor.accept(AcceptRequest(JOB, low, record(1), Ballot(5, B, 1)))
    assert (late.is_accepted, late.promised, writes) == (False, high, [])
    acceptor.validate()


def test_a_repeated_accept_is_confirmed_without_a_write():
    acceptor = Acceptor()
    request = AcceptRequest(JOB, Ballot(1, A, 1), record(1), Ballot(2, A, 1))
    first, writes = acceptor.accept(request)
    again, more = acceptor.accept(request)
    assert first == again == AcceptAnswer(JOB, Ballot(1, A, 1), True, Ballot(2, A, 1))
    assert (len(writes), more) == (1, [])


def test_ballots_order_by_counter_then_name_then_generation():
    ballots = [Ballot(1, B, 9), Ballot(2, A, 1), Ballot(1, A, 2), Ballot(), Ballot(1, A, 1)]
    assert sorted(ballots) == [Ballot(), Ballot(1, A, 1), Ballot(1, A, 2), Ballot(1, B, 9), Ballot(2, A, 1)]


# --- safety under faults


@dataclass
class Operation:
    """What one client did, for the checker."""

    request: UpdateRequested | ReadRequested
    started_s: float
    floor: int  # the newest version that anybody had been told of when it started


@dataclass
class LinearChecker:
    """Watches answers only.  Every update raises the version by one from the version it names, so the history is
    linearizable exactly if (1) no two records with one version are ever told, and (2) nobody who starts after a
    version was told gets an older one."""

    told: dict[int, JobRecord] = field(default_factory=dict)
    newest: int = 0
    decided_count: int = 0

    def see(self, operation: Operation, result: Result) -> None:
        if isinstance(result, UpdateUncertain):
            return
        seen = result.current if isinstance(result, UpdateConflicted) else result.record
        version = 0 if seen is None else seen.version
        assert version >= operation.floor, f"{result} is older than version {operation.floor}"
        if seen is not None:
            assert self.told.setdefault(version, seen) == seen, f"two records with version {version}"
        self.newest = max(self.newest, version)
        self.decided_count += isinstance(result, UpdateDecided)


class FaultySwarm:
    """Registers over a network that loses, doubles, delays and reorders, with crashes in the middle of a step."""

    def __init__(self, holder_count: int, seed: int, quorum=majority) -> None:
        self.rng = random.Random(seed)
        self.quorum = quorum
        self.holders = tuple(NodeId(f"n{index}") for index in range(holder_count))
        self.nodes = (*self.holders, NodeId("outsider"))
        self.loss = self.rng.choice([0.0, 0.05, 0.3])
        self.duplicate = self.rng.choice([0.0, 0.2, 0.5])
        self.delay_s = self.rng.choice([0.001, 0.01, 0.2])
        self.crash = self.rng.choice([0.0, 0.01, 0.05])
        self.disks: dict[NodeId, dict[str, bytes]] = {node: {} for node in self.nodes}
        self.generations = dict.fromkeys(self.nodes, 0)
        self.registers: dict[NodeId, Register] = {}
        self.believed: dict[NodeId, JobRecord | None] = dict.fromkeys(self.nodes)
        self.open: dict[NodeId, Operation | None] = dict.fromkeys(self.nodes)
        self.checker = LinearChecker()
        self.queue: list[tuple[float, int, NodeId, object]] = []
        self.sequence = 0
        self.now_s = 0.0
        for node in self.nodes:
            self.restart(node)

    def restart(self, node: NodeId) -> None:
        self.generations[node] += 1
        seed = self.rng.getrandbits(32)
        self.registers[node] = Register(
            node, self.generations[node], random.Random(seed), majority=self.quorum, update_timeout_s=3.0
        )
        self.registers[node].restore(self.disks[node])
        self.open[node] = None
        self.at(self.now_s + self.rng.uniform(0.0, 0.3), node, "think")

    def at(self, when_s: float, node: NodeId, what: object) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (when_s, self.sequence, node, what))

    def run(self, until_s: float) -> None:
        while self.queue and self.queue[0][0] <= until_s:
            self.now_s, _, node, what = heapq.heappop(self.queue)
            if what == "think":
                self.think(node)
            elif what == "timer":
                if self.registers[node].next_deadline_s <= self.now_s:
                    self.step(node, TimerFired())
            else:
                self.step(node, what)

    def think(self, node: NodeId) -> None:
        """One request at a time: mostly updates of what the node believes current."""
        if self.open[node] is not None:
            return
        self.sequence += 1
        believed = self.believed[node]
        request: UpdateRequested | ReadRequested = ReadRequested(self.sequence, JOB, self.holders)
        if self.rng.random() < 0.7:
            version = 1 if believed is None else believed.version + 1
            expected = None if believed is None else believed.stamp
            value = record(version, f"{node} {self.sequence}", node, self.holders)
            request = UpdateRequested(self.sequence, JOB, self.holders, expected, value)
        self.open[node] = Operation(request, self.now_s, self.checker.newest)
        self.step(node, request)

    def step(self, node: NodeId, event: object) -> None:
        register = self.registers[node]
        effects = register.step(event, self.now_s)  # type: ignore[arg-type]
        register.validate()
        is_crashing = self.rng.random() < self.crash
        if is_crashing:
            effects = effects[: self.rng.randint(0, len(effects))]
        for effect in effects:
            self.perform(node, effect)
        if is_crashing:
            self.restart(node)
        elif register.next_deadline_s < 1e9:
            self.at(max(register.next_deadline_s, self.now_s), node, "timer")

    def perform(self, node: NodeId, effect: object) -> None:
        if isinstance(effect, Persist):
            assert effect.value is not None
            self.disks[node][effect.key] = effect.value
        elif isinstance(effect, SendPeer):
            self.send(node, effect)
        else:
            self.answer(node, effect)  # type: ignore[arg-type]

    def send(self, node: NodeId, effect: SendPeer) -> None:
        if self.rng.random() < self.loss and effect.recipient != node:
            return
        for _ in range(2 if self.rng.random() < self.duplicate else 1):
            delay_s = self.rng.lognormvariate(0.0, 1.0) * self.delay_s
            self.at(self.now_s + delay_s, effect.recipient, PeerMessageReceived(node, effect.message))

    def answer(self, node: NodeId, result: Result) -> None:
        operation = self.open[node]
        assert operation is not None
        assert operation.request.update_id == result.update_id
        self.open[node] = None
        self.checker.see(operation, result)
        if not isinstance(result, UpdateUncertain):
            self.believed[node] = result.current if isinstance(result, UpdateConflicted) else result.record
        self.at(self.now_s + self.rng.uniform(0.0, 0.2), node, "think")

    def heal_and_read(self) -> None:
        """After the faults, everybody must read one same record, no older than any that was ever told."""
        self.loss = self.crash = self.duplicate = 0.0
        self.delay_s = 0.001
        for node in self.nodes:
            self.restart(node)
        self.queue.clear()
        for node in self.nodes:
            request = ReadRequested(0, JOB, self.holders)
            self.open[node] = Operation(request, self.now_s, self.checker.newest)
            self.step(node, request)
            while self.open[node] is not None:
                self.now_s, _, other, what = heapq.heappop(self.queue)
                if what != "think":
                    self.step(other, TimerFired() if what == "timer" else what)


def run_seed(holder_count: int, seed: int, quorum=majority) -> int:
    swarm = FaultySwarm(holder_count, seed, quorum)
    swarm.run(until_s=6.0)
    swarm.heal_and_read()
    return swarm.checker.decided_count


@pytest.mark.parametrize("holder_count", [1, 3, 5])
def test_the_register_is_linearizable_under_loss_crashes_and_contention(holder_count):
    decided_count = sum(run_seed(holder_count, seed) for seed in range({1: 40, 3: 80, 5: 25}[holder_count]))
    assert decided_count > 300  # else the network was too bad for the test to say anything


def test_the_checker_catches_a_quorum_of_one_among_three():
    """Negative control: a rule broken on purpose must be seen, or the test above is blind."""
    caught = 0
    for seed in range(20):
        try:
            run_seed(3, seed, quorum=lambda holder_count: 1)
        except AssertionError:
            caught += 1
    assert caught >= 10


def test_the_checker_catches_promises_that_do_not_survive_a_restart():
    class Forgetful(FaultySwarm):
        def restart(self, node: NodeId) -> None:
            self.disks[node].clear()
            super().restart(node)

    caught = 0
    for seed in range(60):
        try:
            swarm = Forgetful(3, seed)
            swarm.run(until_s=6.0)
        except AssertionError:
            caught += 1
    assert caught >= 5


def test_job_ids_are_the_storage_keys():
    """Retention lists keys of the room as job ids."""
    (write, _) = make_register().step(update(1), 0.0)
    assert isinstance(write, Persist)
    assert JobId(write.key) == JOB
