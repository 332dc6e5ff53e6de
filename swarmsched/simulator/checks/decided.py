"""Which records the registers have decided, as nobody inside the swarm can see it.

A record is decided when one ballot's acceptance of it is durable at a majority of its holders, and of the leaving
ones while there are any.  Acceptances are taken from the writes of the room `register` and count once the machine's
disk has them; the value of a ballot is known from the request for it, or read from the write where a holder accepted
on its own account.  Whoever needs to know what was decided subscribes here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from swarmsched.effects import Effect, Persist
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import JobId, is_job_id
from swarmsched.jobs.acceptor import ROOM, Slot
from swarmsched.jobs.message import AcceptRequest, Ballot, PrepareRequest
from swarmsched.record import JobRecord
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.host import Host
from swarmsched.wire.codec import decode_value

NO_BALLOT = Ballot()

Heard = Callable[[JobId, JobRecord | None, JobRecord], None]
"""A job, the record that was decided before, and the one that is decided now."""


@dataclass(frozen=True, slots=True)
class Write:
    """One write of a slot: `value` is the record that it accepts, None for a mere promise or a deletion."""

    job_id: JobId
    data: bytes | None
    ballot: Ballot = NO_BALLOT
    value: JobRecord | None = None


@dataclass(slots=True)
class DecidedHistory:
    """One job's decided records.  `open` are ballots above the last decided one and who accepted them."""

    last: JobRecord | None = None
    last_ballot: Ballot = NO_BALLOT
    records: dict[int, JobRecord] = field(default_factory=dict)  # by version; of one that was forced, from there on
    open: dict[Ballot, tuple[JobRecord, dict[Holder, None]]] = field(default_factory=dict)
    forced_epoch: int = 0  # records below it were given up by an operator


class DecidedRecords(Checker):
    """Reconstructs the decided records of all jobs; raises nothing itself."""

    EFFECTS = (ROOM,)
    SEES_ALL_PERFORMED = True

    def __init__(self) -> None:
        self._histories: dict[JobId, DecidedHistory] = {}
        self._pending: dict[str, list[Write]] = {}  # by machine: perhaps not durable yet
        self._subscribers: list[Heard] = []

    def subscribe(self, heard: Heard) -> None:
        """Call that for each record that is decided, once, in the order of decisions."""
        self._subscribers.append(heard)

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """Every job with a decided record."""
        return tuple(job_id for job_id, history in self._histories.items() if history.last is not None)

    def last(self, job_id: JobId) -> JobRecord | None:
        """The record decided last."""
        history = self._histories.get(job_id)
        return None if history is None else history.last

    def open(self, job_id: JobId, holders: Collection[Holder]) -> list[JobRecord]:
        """Records that are newer than the decided one and that some of these have accepted."""
        history = self._histories.get(job_id)
        entries = () if history is None else history.open.values()
        return [value for value, acceptors in entries if not acceptors.keys().isdisjoint(holders)]

    def has_decided(self, job_id: JobId, stamp: tuple[int, int]) -> bool:
        """True if a record of that (epoch, version) is decided, or is an ancestor of a decided one as far as known."""
        history = self._histories.get(job_id)
        if history is None or history.last is None:
            return False
        epoch, version = stamp
        known = history.records.get(version)
        if known is not None:
            return known.epoch == epoch or epoch < history.forced_epoch
        return stamp <= history.last.stamp and version <= history.last.version

    def decides_end_alone(self, host: Host, job_id: JobId) -> bool:
        """True if an end that this machine alone decides stands among its writes that are perhaps not durable yet."""
        holders = {Holder(host.node_id, host.storage.store_id): None}
        values = [write.value for write in self._pending.get(host.node_id, ()) if write.job_id == job_id]
        return any(value and value.is_ended and is_majority(value.configuration, holders) for value in values)

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Note what the step has written to the register."""
        for effect in effects:
            if isinstance(effect, Persist) and effect.room == ROOM and is_job_id(effect.key):
                self._wrote(host, event, effect)

    def performed(self, host: Host, effect: Effect) -> None:
        """Something durable may lie behind this effect."""
        if self._pending.get(host.node_id):
            self.settle(host)

    def agent_started(self, host: Host) -> None:
        """What did not reach the disk is gone."""
        self.settle(host)
        self._pending.pop(host.node_id, None)

    def agent_crashed(self, host: Host) -> None:
        """The last group of writes may have reached the disk."""
        self.settle(host)
        self._pending.pop(host.node_id, None)

    def disk_wiped(self, host: Host) -> None:
        """Acceptances that were durable stay counted: they were decisions when they were made."""
        self._pending.pop(host.node_id, None)

    def settle(self, host: Host) -> None:
        """Count what the machine's disk has by now.  Writes reach it in order, so the newest found brings all before.

        A holder's writes of one key replace one another, and only the last can be found.
        """
        pending = self._pending.get(host.node_id)
        if not pending:
            return
        room = host.disk.get(ROOM, {})
        durable = 0
        for count, write in enumerate(pending, start=1):
            stored = room.get(write.job_id)
            if stored is write.data or stored == write.data:
                durable = count
        done, self._pending[host.node_id] = pending[:durable], pending[durable:]
        holder = Holder(host.node_id, host.storage.store_id)
        for write in done:
            if write.value is not None:
                self._accepted(write.job_id, write.ballot, write.value, holder)

    def _wrote(self, host: Host, event: Event, effect: Persist) -> None:
        job_id = JobId(effect.key)
        message = event.message if isinstance(event, PeerMessageReceived) else None
        write = Write(job_id, effect.value)
        if isinstance(message, AcceptRequest) and message.job_id == job_id:
            write = Write(job_id, effect.value, message.ballot, message.value)
        elif effect.value is not None and not (isinstance(message, PrepareRequest) and message.job_id == job_id):
            slot = decode_value(Slot, effect.value)
            write = Write(job_id, effect.value, slot.accepted_ballot, slot.accepted)
        self._pending.setdefault(host.node_id, []).append(write)

    def _accepted(self, job_id: JobId, ballot: Ballot, value: JobRecord, holder: Holder) -> None:
        history = self._histories.setdefault(job_id, DecidedHistory())
        # The survivors may not know of the ballots that the lost holders took part in.
        is_late = ballot <= history.last_ballot and not is_new_beginning(history.last, value)
        if value.epoch < history.forced_epoch or is_late:
            return
        known, acceptors = history.open.setdefault(ballot, (value, {}))
        acceptors[holder] = None
        if is_majority(known.configuration, acceptors):
            self._decide(job_id, history, ballot, known)

    def _decide(self, job_id: JobId, history: DecidedHistory, ballot: Ballot, value: JobRecord) -> None:
        before, history.last_ballot = history.last, ballot
        history.open = {each: entry for each, entry in history.open.items() if each > ballot}
        if before is value or before == value:
            return  # accepted once more, by somebody who could not know that it was decided
        history.last = value
        if value.is_forced and (before is None or value.epoch > before.epoch):
            history.forced_epoch = value.epoch
            history.records = {}
            history.open = {}
        for heard in self._subscribers:
            heard(job_id, before, value)
        history.records.setdefault(value.version, value)


def is_new_beginning(before: JobRecord | None, after: JobRecord) -> bool:
    """True when an operator went on with what was left: it may be older than what the lost holders had decided."""
    return before is not None and after.is_forced and after.epoch > before.epoch


def is_majority(configuration: Configuration, acceptors: dict[Holder, None]) -> bool:
    """More than half of the present holders, and of the leaving ones if there are any."""
    groups = [group for group in (configuration.holders, configuration.leaving) if group]
    return bool(groups) and all(2 * sum(holder in acceptors for holder in group) > len(group) for group in groups)
