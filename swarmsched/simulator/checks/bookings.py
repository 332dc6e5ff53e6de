"""Invariant 1: a GPU is booked for at most one attempt of one job, and nothing is booked that is not there."""

from collections.abc import Iterable, Sequence

from swarmsched.effects import Effect, StartTask
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.ids import NodeId, TaskKey
from swarmsched.ledger.booking import ROOM, Booking, BookingState, LedgerEntry
from swarmsched.ledger.message import HoldRequest
from swarmsched.resources import Free, GpuHealth, counted
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.ledger_view import changed_bookings, ledger_of, stored_bookings
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host


class _Books:
    """One machine's bookings as they were written, and what was ever installed there."""

    def __init__(self) -> None:
        self.gpus: dict[str, TaskKey] = {}  # uuid -> who has it
        self.entries: dict[TaskKey, Booking] = {}
        self.deadlines_s: dict[TaskKey, float] = {}  # of those that are held, by the owner's clock
        self.installed: set[str] = set()  # a booked GPU stays booked when it vanishes; never iterated
        self.cpus_installed = 0
        self.memory_bytes_installed = 0


class BookingChecker(Checker):
    """Follows every booking that is written, and gives others the books that it keeps."""

    EVENTS = (HoldRequest,)
    EFFECTS = (ROOM, StartTask)
    PERFORMED = (StartTask,)

    def __init__(self) -> None:
        self.busiest_count = 0  # most GPUs of one node that were booked at once: a run that books none proves nothing
        self._books: dict[NodeId, _Books] = {}

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Enter what the step has booked and freed.  What it starts has a lease."""
        books = self._books_of(host)
        self._enter(host, books, dict(changed_bookings(effects)))
        if isinstance(event, PeerMessageReceived) and isinstance(event.message, HoldRequest):
            _renew(host, books, event.message)
        self._weigh(host, books)
        for effect in effects:
            if isinstance(effect, StartTask):
                _expect_booking(host, books, effect, (BookingState.LEASED,))

    def performed(self, host: Host, effect: Effect) -> None:
        """A task starts: on its own GPUs, where no process of another is left.

        While the start waited for the disk, its lease may have been released; the end of the task waits behind it.
        """
        assert isinstance(effect, StartTask)
        _expect_booking(host, self._books_of(host), effect, (BookingState.LEASED, BookingState.DRAINING))
        key, mine = _key(effect), _gpus(effect)
        for task in host.tasks.running:
            if mine & set(task.gpus) and task.order.key != key:
                raise Violation(1, f"{host.node_id} starts {key} on GPUs of {task.order.job_id}/{task.order.attempt}")

    def agent_started(self, host: Host) -> None:
        """Read the bookings anew from the disk, as the ledger must have done."""
        books = self._books_of(host)
        books.gpus, books.entries, books.deadlines_s = {}, {}, {}
        books.installed.update(gpu.uuid for gpu in host.resources.gpus)
        self._enter(host, books, {each.key: each for each in stored_bookings(host.disk.get(ROOM, {}))})
        self._compare(host, books, "restored")

    def looked(self, hosts: Sequence[Host]) -> None:
        """Compare the books with the whole ledgers."""
        for host in hosts:
            if host.node is None or host.node_id not in self._books:
                continue
            self._compare(host, self._books[host.node_id], "booked without a write")

    # What others want to know.

    def entry(self, host: Host, key: TaskKey) -> Booking | None:
        """The booking of a task."""
        return self._books_of(host).entries.get(key)

    def entries(self, host: Host) -> tuple[Booking, ...]:
        """All bookings of a machine."""
        return tuple(self._books_of(host).entries.values())

    def deadline_s(self, host: Host, booking: Booking) -> float:
        """When a hold ends at the latest, by the owner's clock."""
        return self._books_of(host).deadlines_s[booking.key]

    def free(self, host: Host) -> Free:
        """What is installed, usable and booked for nobody."""
        books, resources = self._books_of(host), host.resources
        usable = [gpu for gpu in resources.gpus if gpu.health is GpuHealth.OK and gpu.uuid not in books.gpus]
        cpus = resources.cpu_count - sum(entry.cpus for entry in books.entries.values())
        memory_bytes = resources.memory_bytes - sum(entry.memory_bytes for entry in books.entries.values())
        return Free(counted(usable), max(0, cpus), max(0, memory_bytes))

    def _compare(self, host: Host, books: _Books, what: str) -> None:
        present, known = _told(ledger_of(host).entries), _told(books.entries.values())
        if present != known:
            raise Violation(1, f"{host.node_id} {what}: {present}, written were {known}")

    def _books_of(self, host: Host) -> _Books:
        return self._books.setdefault(host.node_id, _Books())

    def _enter(self, host: Host, books: _Books, changed: dict[TaskKey, Booking | None]) -> None:
        """All that a step frees is free before anything is booked by it."""
        for key in changed:
            before = books.entries.pop(key, None)
            books.deadlines_s.pop(key, None)
            for uuid in before.gpus if before is not None else ():
                del books.gpus[uuid]
        for key, entry in changed.items():
            if entry is None:
                continue
            books.entries[key] = entry
            if entry.state is BookingState.HELD:
                books.deadlines_s[key] = host.now_s + entry.ttl_s
            for uuid in entry.gpus:
                other = books.gpus.setdefault(uuid, key)
                if other != key:
                    raise Violation(1, f"{uuid} of {host.node_id} is booked for {other} and for {key}")

    def _weigh(self, host: Host, books: _Books) -> None:
        resources = host.resources
        books.installed.update(gpu.uuid for gpu in resources.gpus)
        books.cpus_installed = max(books.cpus_installed, resources.cpu_count)
        books.memory_bytes_installed = max(books.memory_bytes_installed, resources.memory_bytes)
        if not books.gpus.keys() <= books.installed:
            raise Violation(1, f"{host.node_id} booked GPUs that it never had: {sorted(books.gpus)}")
        entries = books.entries.values()
        cpus, memory_bytes = sum(entry.cpus for entry in entries), sum(entry.memory_bytes for entry in entries)
        if cpus > books.cpus_installed or memory_bytes > books.memory_bytes_installed:
            raise Violation(1, f"{host.node_id} booked {cpus} cores and {memory_bytes} bytes, more than it has")
        self.busiest_count = max(self.busiest_count, len(books.gpus))


def _renew(host: Host, books: _Books, request: HoldRequest) -> None:
    """A repeat gives a hold its full time again, which needs no write: after a restart also one of the same number."""
    if request.key in books.deadlines_s:
        books.deadlines_s[request.key] = host.now_s + request.ttl_s


def _key(effect: StartTask) -> TaskKey:
    return effect.order.key


def _gpus(effect: StartTask) -> set[str]:
    return {gpu.uuid for gpu in effect.gpus}


def _expect_booking(host: Host, books: _Books, effect: StartTask, states: Sequence[BookingState]) -> None:
    entry = books.entries.get(_key(effect))
    if entry is None or entry.state not in states or not _gpus(effect) <= set(entry.gpus):
        problem = f"{host.node_id} starts {_key(effect)} on {sorted(_gpus(effect))} with the booking {entry}"
        raise Violation(1, problem)


def _told(entries: Iterable[Booking | LedgerEntry]) -> dict[TaskKey, tuple[object, ...]]:
    """What a booking and the entry that a ledger shows of it have in common."""
    return {
        each.key: (
            each.state,
            each.epoch,
            each.ranks,
            each.gpus,
            each.cpus,
            each.memory_bytes,
        )
        for each in entries
    }
