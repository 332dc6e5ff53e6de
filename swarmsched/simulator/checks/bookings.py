"""Invariant 1: a GPU is booked for at most one attempt of one job, and nothing is booked that is not there."""

from collections.abc import Sequence

from swarmsched.effects import Effect, StartTask
from swarmsched.events import Event
from swarmsched.ids import NodeId
from swarmsched.ledger.booking import ROOM, BookingState, LedgerEntry
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.ledger_view import Key, changed_bookings, ledger_of
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host


class _Books:
    """One machine's bookings as its ledger has them, and what was ever installed there."""

    def __init__(self) -> None:
        self.gpus: dict[str, Key] = {}  # uuid -> who has it
        self.entries: dict[Key, LedgerEntry] = {}
        self.installed: set[str] = set()  # a booked GPU stays booked when it vanishes; never iterated
        self.cpus_installed = 0
        self.memory_bytes_installed = 0


class BookingChecker(Checker):
    """Follows every booking of every ledger."""

    EFFECTS = (ROOM,)
    PERFORMED = (StartTask,)

    def __init__(self) -> None:
        self.busiest_count = 0  # most GPUs of one node that were booked at once: a run that books none proves nothing
        self._books: dict[NodeId, _Books] = {}

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Enter what the step has booked and freed."""
        books = self._books_of(host)
        for key, _ in changed_bookings(effects):
            self._enter(host, books, key, ledger_of(host).entry(*key))
        self._weigh(host, books)

    def performed(self, host: Host, effect: Effect) -> None:
        """A task starts: on the GPUs of its lease, where no process of another is left."""
        assert isinstance(effect, StartTask)
        order = effect.order
        key = (order.job_id, order.attempt)
        entry = self._books_of(host).entries.get(key)
        mine = {gpu.uuid for gpu in effect.gpus}
        if entry is None or entry.state is not BookingState.LEASED or not mine <= set(entry.gpus):
            raise Violation(1, f"{host.node_id} starts {key} on {sorted(mine)} with the booking {entry}")
        for task in host.tasks.running:
            if mine & set(task.gpus) and (task.order.job_id, task.order.attempt) != key:
                raise Violation(1, f"{host.node_id} starts {key} on GPUs of {task.order.job_id}/{task.order.attempt}")

    def agent_started(self, host: Host) -> None:
        """Read the bookings anew from what it started on."""
        books = self._books_of(host)
        books.gpus, books.entries = {}, {}
        for entry in ledger_of(host).entries:
            self._enter(host, books, (entry.job_id, entry.attempt), entry)

    def looked(self, hosts: Sequence[Host]) -> None:
        """Compare the books with the whole ledgers."""
        for host in hosts:
            if host.node is None or host.node_id not in self._books:
                continue
            present = {(entry.job_id, entry.attempt): entry.gpus for entry in ledger_of(host).entries}
            known = {key: entry.gpus for key, entry in self._books[host.node_id].entries.items()}
            if present != known:
                raise Violation(1, f"{host.node_id} booked without a write: {present}, written were {known}")

    def _books_of(self, host: Host) -> _Books:
        return self._books.setdefault(host.node_id, _Books())

    def _enter(self, host: Host, books: _Books, key: Key, entry: LedgerEntry | None) -> None:
        before = books.entries.pop(key, None)
        for uuid in before.gpus if before is not None else ():
            if books.gpus.get(uuid) == key:
                del books.gpus[uuid]
        if entry is None:
            return
        books.entries[key] = entry
        for uuid in entry.gpus:
            other = books.gpus.setdefault(uuid, key)
            # One that was freed in the same step is entered later.
            if other != key and ledger_of(host).entry(*other) is not None:
                raise Violation(1, f"{uuid} of {host.node_id} is booked for {other} and for {key}")
            books.gpus[uuid] = key

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
