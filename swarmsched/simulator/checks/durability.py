"""Invariant 8: what was accepted is never lost while fewer than a majority of its holders lost their disks.

A submit is acknowledged only when a majority of the holders has the record on disk; at the end of the run each such
job is still on the disk of a holder that the register would ask, and what was said of its end has not changed.  A
record is dropped only once its end is decided, and what stays is its tombstone.
"""

from collections.abc import Sequence

from swarmsched.commands import JobAccepted, SubmitJob
from swarmsched.effects import Effect, Persist, ReplyToClient
from swarmsched.events import ClientCommandReceived, Event
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId, is_job_id
from swarmsched.jobs.acceptor import ROOM, Slot
from swarmsched.jobs.tombstones import ROOM as TOMBSTONES
from swarmsched.record import JobRecord
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_new_beginning
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.wire.codec import decode_value

RESULT_FIELDS = ("state", "exit_code", "signal", "end_reason", "ended_utc_s", "detail", "failed_node", "failed_rank")


class DurabilityChecker(Checker):
    """Accepted jobs, and the disks that were lost."""

    EVENTS = (ClientCommandReceived,)
    EFFECTS = (ROOM,)
    PERFORMED = (JobAccepted,)

    def __init__(self, decided: DecidedRecords) -> None:
        self.accepted: dict[JobId, tuple[int, int]] = {}  # acknowledged submits, and the newest stamp that was told
        self.excused: dict[JobId, None] = {}  # of these, those that lost a majority of their holders' disks
        self._decided = decided
        self._submits: dict[tuple[NodeId, int], None] = {}  # open requests that create something
        self._stores: dict[NodeId, int] = {}  # present store of each machine
        self._hosts: dict[NodeId, Host] = {}
        self._lost: dict[Holder, None] = {}
        self._results: dict[JobId, JobRecord] = {}
        decided.subscribe(self._decided_next)

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Note submits, and what a holder forgets."""
        if isinstance(event, ClientCommandReceived):
            command = event.command
            if isinstance(command, SubmitJob) and not command.is_dry_run:
                self._submits[host.node_id, event.request_id] = None
        for effect in effects:
            if isinstance(effect, Persist) and effect.room == ROOM and effect.value is None and is_job_id(effect.key):
                self._forgot(host, JobId(effect.key))

    def performed(self, host: Host, effect: Effect) -> None:
        """A client is told that its job is accepted."""
        assert isinstance(effect, ReplyToClient)
        key = (host.node_id, effect.request_id)
        if key not in self._submits:
            return
        del self._submits[key]
        assert isinstance(effect.reply, JobAccepted)
        record = effect.reply.record
        self._decided.settle(host)
        if not self._decided.has_decided(record.job_id, record.stamp):
            raise Violation(
                8, f"{host.node_id} acknowledged {record.job_id} before a majority of its holders had it on disk"
            )
        self.accepted[record.job_id] = max(record.stamp, self.accepted.get(record.job_id, (0, 0)))

    def agent_started(self, host: Host) -> None:
        """Note which store its machine has, since after a loss it is another."""
        self._stores[host.node_id] = host.storage.store_id
        self._hosts[host.node_id] = host

    def disk_wiped(self, host: Host) -> None:
        """The machine's store is gone."""
        store = self._stores.get(host.node_id)
        if store is None:
            return
        self._lost[Holder(host.node_id, store)] = None
        for job_id in self._decided.jobs:
            record = self._decided.last(job_id)
            assert record is not None
            self._excuse(job_id, record)

    def finished(self, hosts: Sequence[Host]) -> None:
        """Look for every accepted job on the disks."""
        stores = {Holder(host.node_id, host.storage.store_id): host for host in hosts}
        for job_id, stamp in self.accepted.items():
            if job_id in self.excused:
                continue
            record = self._decided.last(job_id)
            assert record is not None
            members = [holder for holder in record.configuration.members if holder not in self._lost]
            if record.is_ended and any(_has_tombstone(stores.get(holder), job_id) for holder in members):
                continue
            found = [each for holder in members if (each := _stored_stamp(stores.get(holder), job_id)) is not None]
            if max(found, default=(0, 0)) < max(stamp, record.stamp):
                names = ", ".join(holder.node for holder in members)
                raise Violation(8, f"{job_id} was accepted as {stamp}, decided as {record.stamp}; {names} have {found}")

    def _excuse(self, job_id: JobId, record: JobRecord) -> None:
        groups = [group for group in (record.holders, record.leaving_holders) if group]
        if any(2 * sum(holder in self._lost for holder in group) > len(group) for group in groups):
            self.excused[job_id] = None

    def _has_lost_majority(self, record: JobRecord) -> bool:
        """Counts machines that are off for ever too: their disks are sound, and nobody can read them."""
        groups = [group for group in (record.holders, record.leaving_holders) if group]
        return any(2 * sum(self._is_gone(holder) for holder in group) >= len(group) for group in groups)

    def _is_gone(self, holder: Holder) -> bool:
        host = self._hosts.get(holder.node)
        return holder in self._lost or (host is not None and host.is_lost)

    def _forgot(self, host: Host, job_id: JobId) -> None:
        record = self._decided.last(job_id)
        is_over = record is None or record.is_ended or self._decided.decides_end_alone(host, job_id)
        if record is not None and not is_over and job_id not in self.excused:
            raise Violation(8, f"{host.node_id} forgot {job_id}, which is {record.state.value}")

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        self._excuse(job_id, after)
        if before is not None and is_new_beginning(before, after) and self._has_lost_majority(before):
            self.excused[job_id] = None
        if job_id in self.excused and after.is_forced:
            self._results.pop(job_id, None)  # an operator has made a new beginning from what was left
        ended = self._results.get(job_id)
        if ended is not None and any(getattr(ended, name) != getattr(after, name) for name in RESULT_FIELDS):
            raise Violation(8, f"the result of {job_id} changed after its end, from {ended} to {after}")
        if after.is_ended:
            self._results[job_id] = after


def _has_tombstone(host: Host | None, job_id: JobId) -> bool:
    return host is not None and job_id in host.disk.get(TOMBSTONES, {})


def _stored_stamp(host: Host | None, job_id: JobId) -> tuple[int, int] | None:
    """(epoch, version) of what a machine's disk has of the job."""
    data = None if host is None else host.disk.get(ROOM, {}).get(job_id)
    if data is None:
        return None
    accepted = decode_value(Slot, data).accepted
    return None if accepted is None else accepted.stamp
