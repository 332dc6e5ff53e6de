"""Hand-made histories for checkers: machines that do exactly what a test says, right or wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.effects import Effect, Persist, SendPeer
from swarmsched.events import Event, PeerMessageReceived, TimerFired
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.record import NodeStatus
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.jobs.acceptor import ROOM as REGISTER_ROOM
from swarmsched.jobs.acceptor import Slot
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot
from swarmsched.ledger.booking import BOOKING_PREFIX, FENCE_PREFIX, Booking, BookingState, LedgerEntry, booking_entry
from swarmsched.ledger.booking import ROOM as LEDGER_ROOM
from swarmsched.ledger.message import OwnerAnswer, OwnerCommand, Refusal
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Gpu, NodeResources, Share
from swarmsched.simulator.checks.suite import Suite, all_checkers
from swarmsched.simulator.host import Host
from swarmsched.simulator.loop import EventLoop
from swarmsched.simulator.tasks import RunningTask
from swarmsched.task import TaskOrder
from swarmsched.wire.codec import encode_value
from tests.swarmsched.building import NOTHING_FREE, make_record

JOB = JobId("01hf7yatfm22f9ckwwzd5v6xwp")
NODES = (NodeId("a"), NodeId("b"), NodeId("c"))
GPUS = 4


@dataclass
class FakeLedger:
    """Bookings and epochs as a test puts them."""

    bookings: dict[TaskKey, LedgerEntry] = field(default_factory=dict)
    epochs: dict[JobId, int] = field(default_factory=dict)
    avoided_reason: str = ""

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """As of the real one."""
        return tuple(self.bookings.values())

    def entry(self, key: TaskKey) -> LedgerEntry | None:
        """As of the real one."""
        return self.bookings.get(key)

    def epoch_of(self, job_id: JobId) -> int:
        """As of the real one."""
        return self.epochs.get(job_id, 0)


@dataclass
class FakeNode:
    """What checkers read of a node."""

    ledger: FakeLedger = field(default_factory=FakeLedger)
    generation: int = 1
    known_members: list[MemberView] = field(default_factory=list)
    known_records: list[NodeStatus] = field(default_factory=list)
    fault: str = ""  # what `validate` complains of
    held: JobRecord | None = None

    def record(self, job_id: JobId) -> JobRecord | None:
        """As the test put it."""
        return self.held

    def members(self, now_s: float) -> list[MemberView]:
        """As the test put them."""
        return self.known_members

    def node_records(self, now_s: float) -> list[NodeStatus]:
        """As the test put them."""
        return self.known_records

    def validate(self) -> None:
        """Complain, if there is something to complain of."""
        assert not self.fault, self.fault


@dataclass
class FakeStorage:
    """The identity of a disk."""

    store_id: int
    fsync_median_s: float = 0.001

    def is_full(self, now_s: float) -> bool:
        """It has room."""
        return False


@dataclass
class FakeTasks:
    """The tasks that have processes."""

    running: list[RunningTask] = field(default_factory=list)


@dataclass
class Machine:
    """A machine in a history.  Its clock shows virtual time."""

    node_id: NodeId
    loop: EventLoop
    storage: FakeStorage
    node: FakeNode = field(default_factory=FakeNode)
    disk: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tasks: FakeTasks = field(default_factory=FakeTasks)
    generation: int = 1
    is_lost: bool = False
    is_up: bool = True
    is_paused: bool = False
    is_connected: bool = True

    def is_connected_to(self, other: Host) -> bool:
        """As the test puts it."""
        return self.is_connected

    @property
    def now_s(self) -> float:
        """Its monotonic clock."""
        return self.loop.now_s

    @property
    def resources(self) -> NodeResources:
        """Four GPUs."""
        return NodeResources(gpus_of(self.node_id, GPUS), 8, 2**36)

    @property
    def available_bytes(self) -> int:
        """All of its memory."""
        return self.resources.memory_bytes

    @property
    def host(self) -> Host:
        """As checkers take it."""
        return cast("Host", self)


class History:
    """Three machines, all checkers, and verbs for what happens."""

    def __init__(self, make_suite: Callable[[], Suite] = all_checkers) -> None:
        self.loop = EventLoop()
        self.suite = make_suite()
        self.machines = {
            name: Machine(name, self.loop, FakeStorage(index)) for index, name in enumerate(NODES, start=1)
        }
        self._counter = 0
        for machine in self.machines.values():
            self.suite.agent_started(machine.host)

    def __getitem__(self, name: str) -> Machine:
        return self.machines[NodeId(name)]

    @property
    def holders(self) -> tuple[Holder, ...]:
        """All three, on their stores."""
        return tuple(Holder(name, machine.storage.store_id) for name, machine in self.machines.items())

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.run_for(seconds)

    def step(self, name: str, event: Event | None = None, *effects: Effect) -> None:
        """A machine handles an event.  What `written` tells of is the booking as it then stands in the ledger."""
        bookings = self._encoded_bookings(name)
        told = [
            replace(each, value=bookings[each.key])
            if isinstance(each, Persist) and each.value and each.key in bookings
            else each
            for each in effects
        ]
        self.suite.stepped(self[name].host, event or TimerFired(), told)

    def perform(self, name: str, effect: Effect) -> None:
        """An effect takes place."""
        self.suite.performed(self[name].host, effect)

    def restart(self, name: str) -> None:
        """The agent dies and is started again; its disk has what its ledger has, unless a test has put it there."""
        machine = self[name]
        self.suite.agent_crashed(machine.host)
        machine.disk.setdefault(LEDGER_ROOM, self._encoded_bookings(name))
        self.suite.agent_started(machine.host)
        del machine.disk[LEDGER_ROOM]

    def wipe(self, name: str) -> None:
        """The machine gets an empty disk with another identity, and its agent is started again."""
        machine = self[name]
        self.suite.agent_crashed(machine.host)
        machine.disk.clear()
        machine.storage.store_id += 100
        self.suite.disk_wiped(machine.host)
        self.suite.agent_started(machine.host)

    # --- the register

    def record(self, **changes: object) -> JobRecord:
        """A first record of `JOB`, held by all three, with changes."""
        spec = JobSpec(("true",), ranks=2, demand=Demand(gpus=1))
        return replace(make_record(NODES[0], self.holders, job_id=JOB, spec=spec), **changes)

    def accept(self, record: JobRecord, names: Sequence[str], ballot: Ballot) -> None:
        """These machines accept it, durably, and say so."""
        for name in names:
            request = AcceptRequest(record.job_id, ballot, record, ballot, self[name].storage.store_id)
            self.write(name, record, ballot, PeerMessageReceived(NodeId(ballot.node), request))
            answer = AcceptAnswer(record.job_id, ballot, True, ballot, self[name].storage.store_id)
            self.perform(name, SendPeer(NodeId(ballot.node), answer))

    def write(self, name: str, record: JobRecord, ballot: Ballot, event: Event | None = None) -> None:
        """One machine has written what it accepted, and its disk has it."""
        data = encode_value(Slot, Slot(record.job_id, ballot, ballot, record))
        self.step(name, event, Persist(REGISTER_ROOM, record.job_id, data))
        self[name].disk.setdefault(REGISTER_ROOM, {})[record.job_id] = data

    def decide(self, record: JobRecord, names: Sequence[str] = NODES) -> JobRecord:
        """A majority accepts it under a new ballot."""
        self.accept(record, names, self.ballot(record.shepherd))
        return record

    def ballot(self, node: str) -> Ballot:
        """One above all before."""
        self._counter += 1
        return Ballot(self._counter, NodeId(node), 1)

    # --- owners

    def _encoded_bookings(self, name: str) -> dict[str, bytes]:
        entries = self[name].node.ledger.entries
        shared = [field for field in Booking.__struct_fields__ if field in LedgerEntry.__struct_fields__]
        stored = [Booking(**{field: getattr(each, field) for field in shared}, ttl_s=5.0) for each in entries]
        return {booking_entry(each.key): encode_value(Booking, each) for each in stored}

    def note(self, name: str, job_id: JobId, attempt: int, state: BookingState) -> None:
        """A booking is made and written."""
        self.book(name, job_id, attempt, state)
        self.step(name, None, written(job_id, attempt))

    def book(
        self, name: str, job_id: JobId, attempt: int, state: BookingState, gpus: int = 1, first: int = 0, epoch: int = 1
    ) -> LedgerEntry:
        """A booking stands in the ledger; `written` tells of it."""
        uuids = tuple(gpu.uuid for gpu in gpus_of(NodeId(name), GPUS)[first : first + gpus])
        entry = LedgerEntry(job_id, epoch, attempt, "a", state, gpus, uuids, 0, 0, self.loop.now_s + 5.0)
        self[name].node.ledger.bookings[TaskKey(job_id, attempt)] = entry
        self[name].node.ledger.epochs[job_id] = max(epoch, self[name].node.ledger.epoch_of(job_id))
        return entry

    def unbook(self, name: str, job_id: JobId, attempt: int) -> None:
        """It stands there no more."""
        del self[name].node.ledger.bookings[TaskKey(job_id, attempt)]

    def obey(self, name: str, command: OwnerCommand, *effects: Effect, refusal: Refusal = Refusal.NONE) -> None:
        """An owner handles a command, writes and answers."""
        answer = SendPeer(NodeId("a"), self.answer(name, command, refusal))
        self.step(name, PeerMessageReceived(NodeId("a"), command), *effects, answer)
        self.perform(name, answer)

    def answer(self, name: str, command: OwnerCommand, refusal: Refusal = Refusal.NONE) -> OwnerAnswer:
        """Its answer, under the epoch that its ledger has."""
        epoch = self[name].node.ledger.epoch_of(command.job_id)
        return OwnerAnswer(
            command.job_id, epoch, command.attempt, command.command_id, NodeId(name), refusal, NOTHING_FREE
        )


def written(job_id: JobId, attempt: int, *, is_there: bool = True) -> Persist:
    """The write of a booking, or its deletion."""
    return Persist(LEDGER_ROOM, f"{BOOKING_PREFIX}{job_id}/{attempt}", b"booking" if is_there else None)


def fence_dropped(job_id: JobId) -> Persist:
    """The deletion of a job's fence."""
    return Persist(LEDGER_ROOM, f"{FENCE_PREFIX}{job_id}", None)


def gpus_of(node: NodeId, count: int) -> tuple[Gpu, ...]:
    """The first GPUs of a machine."""
    return tuple(Gpu(f"{node}-{index}", index, "H100", 2**30) for index in range(count))


def order_of(record: JobRecord, node: str) -> TaskOrder:
    """What an owner is told to run."""
    return TaskOrder(
        record.job_id,
        record.epoch,
        record.attempt,
        NodeId(node),
        record.spec,
        record.shares,
        "",
        0,
        record.configuration,
        record.version,
        record.checkpoint,
    )


def gang(*names: str) -> tuple[Share, ...]:
    """One rank on each of these."""
    return tuple(Share(NodeId(name), 1) for name in names)
