"""Randomised model of the register: a few nodes, one job, every fault that the register must stand, and a checker.

Nodes keep proposing at the same time, also changes of holders; the network loses, doubles, delays and cuts off; nodes
crash with whatever was not on disk yet, and lose their disks.  Rules broken on purpose must be seen by the checker.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.effects import Persist, SendPeer
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.holders import Configuration, Holder, Quorum, majority
from swarmsched.ids import NodeId
from swarmsched.jobs import proposer, register
from swarmsched.jobs.acceptor import Slot
from swarmsched.jobs.message import Ballot
from swarmsched.jobs.register import Register
from swarmsched.jobs.round import Round
from swarmsched.jobs.update import (
    ReadRequested,
    RecordAccepted,
    Result,
    UpdateConflicted,
    UpdateDecided,
    UpdateRequested,
    UpdateUncertain,
)
from swarmsched.record import JobRecord
from swarmsched.wire.codec import decode_value
from tests.swarmsched.building import JOB

SPEC = JobSpec(command=("true",))
CHAOS_S = 12.0


class Violation(AssertionError):
    """What the checker saw."""


@dataclass
class Operation:
    """What one client did, for the checker."""

    request: UpdateRequested | ReadRequested
    floor: int  # the newest version that anybody had been told of when it started


@dataclass
class Checker:
    """Watches what clients are told and what disks hold.

    Every update raises the version by one from the version that it names, and names the record with that version
    (`detail` repeats its unique `reason`).  So the history is linearizable exactly if no two records with one version
    are ever decided, each names the one before it, and nobody who starts after a version was told gets an older one.
    """

    decided: dict[int, JobRecord] = field(default_factory=dict)
    told: int = 0  # the newest version that a client was told of
    accepted: dict[Ballot, tuple[JobRecord, set[Holder]]] = field(default_factory=dict)
    decided_count: int = 0
    change_count: int = 0

    def see_disk(self, holder: Holder, slot: Slot) -> None:
        """A holder's slot has come to its disk."""
        if slot.accepted is None:
            return
        record, holders = self.accepted.setdefault(slot.accepted_ballot, (slot.accepted, set()))
        self.require(record == slot.accepted, f"two records under {slot.accepted_ballot}")
        holders.add(holder)
        if record.configuration.is_quorum(holders):
            self.see_decided(record)

    def see_result(self, operation: Operation, result: Result) -> None:
        if isinstance(result, UpdateUncertain):
            return
        seen = result.current if isinstance(result, UpdateConflicted) else result.record
        version = 0 if seen is None else seen.version
        self.require(version >= operation.floor, f"{result} is older than version {operation.floor}")
        if seen is not None:
            self.see_decided(seen)
        self.told = max(self.told, version)
        self.decided_count += isinstance(result, UpdateDecided)

    def see_decided(self, record: JobRecord) -> None:
        if record.version not in self.decided:
            before, after = self.decided.get(record.version - 1), self.decided.get(record.version + 1)
            self.require(before is None or record.detail == before.reason, f"{record} does not follow {before}")
            self.require(after is None or after.detail == record.reason, f"{after} does not follow {record}")
            self.change_count += before is not None and before.configuration != record.configuration
        first = self.decided.setdefault(record.version, record)
        self.require(first == record, f"two records with version {record.version}: {first} and {record}")

    def require(self, is_true: bool, text: str) -> None:
        if not is_true:
            raise Violation(text)


@dataclass
class Machine:
    """One node: its disk, its register, and the effects that wait for the disk."""

    name: NodeId
    store: int = 1
    generation: int = 0
    disk: dict[str, bytes] = field(default_factory=dict)
    register: Register | None = None  # None while it is down
    pending: list[object] = field(default_factory=list)
    believed: JobRecord | None = None
    operation: Operation | None = None
    is_cut_off: bool = False


@dataclass
class Rules:
    """What a negative control breaks, and how often its faults come (None: drawn)."""

    quorum: Quorum = majority
    is_joint: bool = True
    renews_store: bool = True
    is_durable: bool = True
    crash_every_s: float | None = None
    wipe: float | None = None


class Model:
    """The nodes, the network and the disks, in virtual time."""

    def __init__(self, seed: int, rules: Rules, is_changing: bool = True) -> None:
        self.rng = rng = random.Random(seed)
        self.rules = rules
        self.machines = {NodeId(f"n{index}"): Machine(NodeId(f"n{index}")) for index in range(rng.randint(3, 6))}
        self.names = list(self.machines)
        count = rng.choice([1, 2, 3, 3, 3, min(5, len(self.names))])
        self.ticket = Configuration(tuple(Holder(name, 1) for name in rng.sample(self.names, count)))
        self.loss = rng.choice([0.0, 0.05, 0.2])
        self.duplicate = rng.choice([0.0, 0.2, 0.5])
        self.delay_s = rng.choice([0.001, 0.01, 0.1])
        self.disk_s = rng.choice([0.0, 0.005, 0.05])
        self.crash_every_s = rules.crash_every_s or rng.choice([1e9, 2.0, 0.5])
        self.wipe = rules.wipe or rng.choice([0.0, 0.3, 0.6])
        self.change = rng.choice([0.1, 0.4]) if is_changing else 0.0
        self.takeover = rng.choice([0.0, 0.3])
        self.checker = Checker()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = 0
        self.now_s = 0.0
        self.is_chaos = True
        self.wipe_count = 0
        self.step_count = 0
        for name in self.names:
            self.start(name)
        self.after(rng.expovariate(1 / self.crash_every_s), self.break_something)

    # --- time

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.sequence, what))

    def run_until(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        while self.queue and self.queue[0][0] <= until_s and not is_done():
            self.now_s, _, what = heapq.heappop(self.queue)
            what()

    # --- machines

    def start(self, name: NodeId) -> None:
        machine = self.machines[name]
        if machine.register is not None:
            return
        machine.generation += 1
        machine.register = Register(
            name,
            machine.generation,
            machine.store,
            random.Random(self.rng.getrandbits(32)),
            quorum=self.rules.quorum,
            may_change_shepherd=lambda shepherd, _generation, now_s: (int(now_s) + int(shepherd[1:])) % 3 > 0,
            update_timeout_s=2.0,
        )
        machine.register.restore(machine.disk)
        machine.register.validate()
        self.think_later(name)

    def break_something(self) -> None:
        """Crash a node, perhaps with the loss of its disk, or cut one off for a while."""
        if not self.is_chaos:
            return
        name = self.rng.choice(self.names)
        if self.rng.random() < 0.3:
            self.machines[name].is_cut_off = not self.machines[name].is_cut_off
        else:
            self.crash(name)
        self.after(self.rng.expovariate(1 / self.crash_every_s), self.break_something)

    def crash(self, name: NodeId) -> None:
        machine = self.machines[name]
        for effect in machine.pending[: self.rng.randint(0, len(machine.pending))]:
            self.perform(name, effect)
        machine.pending, machine.register, machine.operation = [], None, None
        if not self.rules.is_durable or (self.rng.random() < self.wipe and self.can_spare(name)):
            self.wipe_count += 1
            machine.disk.clear()
            machine.store += self.rules.renews_store
        self.after(self.rng.uniform(0.0, 1.0), lambda: self.start(name))

    def can_spare(self, name: NodeId) -> bool:
        """Only so that the test goes on: without a majority nothing is ever decided again.  What is safe stays safe
        however many disks are lost."""
        newest = self.checker.decided.get(max(self.checker.decided, default=0))
        configuration = self.ticket if newest is None else newest.configuration
        others = [Holder(each.name, each.store) for each in self.machines.values() if each.name != name]
        return configuration.is_quorum(others)

    def step(self, name: NodeId, event: object) -> None:
        machine = self.machines[name]
        if machine.register is None:
            return
        self.step_count += 1
        machine.pending += machine.register.step(event, self.now_s)  # type: ignore[arg-type]
        machine.register.validate()
        if machine.register.next_deadline_s < 1e9:
            self.after(max(machine.register.next_deadline_s - self.now_s, 0.0), lambda: self.fire(name))
        delay_s = self.rng.expovariate(1 / self.disk_s) if self.disk_s else 0.0
        generation = machine.generation
        self.after(delay_s, lambda: self.flush(name, generation))

    def fire(self, name: NodeId) -> None:
        running = self.machines[name].register
        if running is not None and running.next_deadline_s <= self.now_s:
            self.step(name, TimerFired())

    def flush(self, name: NodeId, generation: int) -> None:
        machine = self.machines[name]
        if machine.generation == generation and machine.register is not None:
            effects, machine.pending = machine.pending, []
            for effect in effects:
                self.perform(name, effect)

    def perform(self, name: NodeId, effect: object) -> None:
        machine = self.machines[name]
        if isinstance(effect, Persist):
            assert effect.value is not None
            machine.disk[effect.key] = effect.value
            if effect.key == JOB:
                self.checker.see_disk(Holder(name, machine.store), decode_value(Slot, effect.value))
        elif isinstance(effect, SendPeer):
            self.send(name, effect)
        elif not isinstance(effect, RecordAccepted):
            self.answer(name, effect)  # type: ignore[arg-type]

    def send(self, sender: NodeId, effect: SendPeer) -> None:
        recipient = effect.recipient
        if recipient != sender:
            if self.machines[sender].is_cut_off or self.machines[recipient].is_cut_off:
                return
            if self.rng.random() < self.loss:
                return
        for _ in range(2 if self.rng.random() < self.duplicate else 1):
            delay_s = self.rng.lognormvariate(0.0, 1.0) * self.delay_s
            self.after(delay_s, lambda: self.step(recipient, PeerMessageReceived(sender, effect.message)))

    # --- clients: one at each node, with one request at a time

    def think_later(self, name: NodeId) -> None:
        if self.is_chaos:
            self.after(self.rng.uniform(0.0, 0.3), lambda: self.think(name))

    def think(self, name: NodeId) -> None:
        machine = self.machines[name]
        if not self.is_chaos or machine.register is None or machine.operation is not None:
            return
        self.sequence += 1
        if self.rng.random() < 0.2:
            spreads = self.rng.random() < 0.5
            self.ask(name, ReadRequested(self.sequence, JOB, self.configuration(machine), spreads))
        else:
            self.ask(name, self.update(machine))

    def configuration(self, machine: Machine) -> Configuration:
        return self.ticket if machine.believed is None else machine.believed.configuration

    def update(self, machine: Machine) -> UpdateRequested:
        believed, rng = machine.believed, self.rng
        reason = f"{machine.name} {machine.generation} {self.sequence}"
        asked = self.configuration(machine)
        if believed is None:
            value = JobRecord(JOB, SPEC, 0.0, 1, 1, machine.name, 1, asked.holders, reason=reason)
            return UpdateRequested(self.sequence, JOB, asked, None, value)
        takes_over = believed.shepherd != machine.name and rng.random() < self.takeover
        value = believed.updated(reason=reason, detail=believed.reason)
        if takes_over:
            value = replace(value, shepherd=machine.name)
        value = replace(value, **self.new_holders(believed))
        return UpdateRequested(self.sequence, JOB, asked, believed.stamp, value, takes_over)

    def new_holders(self, believed: JobRecord) -> dict[str, tuple[Holder, ...]]:
        if self.rng.random() >= max(self.change, 0.5 if believed.leaving_holders else 0.0):
            return {}
        if believed.leaving_holders and self.rng.random() < 0.8:
            return {"leaving_holders": ()}
        names = self.rng.sample(self.names, self.rng.randint(1, min(5, len(self.names))))
        holders = tuple(Holder(name, self.machines[name].store) for name in names)
        return {"holders": holders, "leaving_holders": believed.holders if self.rules.is_joint else ()}

    def ask(self, name: NodeId, request: UpdateRequested | ReadRequested, floor: int | None = None) -> None:
        self.machines[name].operation = Operation(request, self.checker.told if floor is None else floor)
        self.step(name, request)

    def answer(self, name: NodeId, result: Result) -> None:
        machine = self.machines[name]
        operation = machine.operation
        assert operation is not None
        assert operation.request.update_id == result.update_id
        machine.operation = None
        self.checker.see_result(operation, result)
        if isinstance(result, UpdateUncertain):
            self.go_on_after_uncertain(name, operation)
            return
        machine.believed = result.current if isinstance(result, UpdateConflicted) else result.record
        self.think_later(name)

    def go_on_after_uncertain(self, name: NodeId, operation: Operation) -> None:
        if self.is_chaos and self.rng.random() < 0.5:
            self.sequence += 1
            self.ask(name, replace(operation.request, update_id=self.sequence), operation.floor)
        elif self.is_chaos and self.rng.random() < 0.5:
            self.machines[name].believed = None  # as if it knew only the ticket
            self.think_later(name)
        else:
            self.think_later(name)

    # --- after the faults

    def heal(self) -> None:
        self.is_chaos = False
        self.loss = self.duplicate = 0.0
        self.delay_s, self.disk_s = 0.001, 0.0
        for machine in self.machines.values():
            machine.is_cut_off = False
        self.run_until(self.now_s + 10.0)
        assert all(machine.operation is None for machine in self.machines.values())

    def read(self, name: NodeId, configuration: Configuration) -> JobRecord | None:
        """Read once, and let the record reach all its holders; None when no majority answers."""
        self.sequence += 1
        machine = self.machines[name]
        machine.believed = None
        self.ask(name, ReadRequested(self.sequence, JOB, configuration, spreads=True))
        self.run_until(self.now_s + 5.0, lambda: machine.operation is None)
        assert machine.operation is None
        self.run_until(self.now_s + 1.0)
        return machine.believed


def run_seed(seed: int, rules: Rules | None = None, is_changing: bool = True) -> Model:
    """Faults, then calm; afterwards everybody reads one same record, no older than any that was ever told."""
    model = Model(seed, rules or Rules(), is_changing)
    model.run_until(CHAOS_S)
    model.heal()
    newest = model.checker.decided.get(max(model.checker.decided, default=0))
    asked = model.ticket if newest is None or not model.wipe_count else newest.configuration
    seen = [model.read(name, asked) for name in model.names]
    if not model.wipe_count:  # else a majority of holders may be gone for good
        assert newest is None or None not in seen
    assert len({each.reason for each in seen if each is not None}) <= 1
    return model


def is_caught(rules: Rules, *, is_changing: bool = True, seeds: int = 60, times: int = 3) -> bool:
    """True if the checker sees a violation in that many of so many seeds."""
    count = 0
    for seed in range(seeds):
        try:
            run_seed(seed, rules, is_changing)
        except Violation:
            count += 1
        if count == times:
            return True
    return False


def test_the_register_is_linearizable_while_holders_change_and_disks_are_lost():
    models = [run_seed(seed) for seed in range(40)]
    # Else the faults were too bad, or too few, for the test to say anything.
    assert sum(model.step_count for model in models) > 50_000
    assert sum(model.checker.decided_count for model in models) > 500
    assert sum(model.checker.change_count for model in models) > 100
    assert sum(model.wipe_count for model in models) > 20


def test_the_register_is_linearizable_with_fixed_holders():
    models = [run_seed(seed, is_changing=False) for seed in range(1_000, 1_015)]
    assert sum(model.checker.decided_count for model in models) > 250


def test_the_checker_catches_a_quorum_of_one():
    assert is_caught(Rules(quorum=lambda _holder_count: 1))


def test_the_checker_catches_holders_that_change_without_a_joint_phase(monkeypatch):
    for module in (proposer, register):
        monkeypatch.setattr(module, "may_follow", lambda _following, _present: True)
    assert is_caught(Rules(is_joint=False))


def test_the_checker_catches_votes_under_the_identity_of_a_lost_disk():
    rules = Rules(renews_store=False, crash_every_s=0.5, wipe=1.0)
    assert is_caught(rules, is_changing=False)


def test_the_checker_catches_promises_that_do_not_survive_a_restart():
    assert is_caught(Rules(is_durable=False, renews_store=False, crash_every_s=0.5))


def test_the_checker_catches_records_that_are_told_before_they_are_decided(monkeypatch):
    monkeypatch.setattr(Round, "is_decided", lambda _round, _ballot, _quorum: True)
    assert is_caught(Rules())
