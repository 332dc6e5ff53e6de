"""The holder's side of the register: promises and accepted records, durable before they are told.

One slot per job.  A slot's promise never falls, and nothing below it is accepted; whatever was accepted is told to
every later ballot.  Every handler may meet a message late, twice or out of order: it answers from the slot, and a
repeated request gets the same verdict without another write.

A job whose record is past its retention has no slot, but a tombstone: it gets no vote any more (`tombstones`).

The one thing that a holder decides by itself is a vote: it does not promise a change of shepherd while the lease that
it gave to the present one runs.  That is for calm; an accept is never refused for a lease.
"""

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from swarmsched.effects import Persist
from swarmsched.errors import ProtocolError, StorageError
from swarmsched.fields import Job, Value
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.message import (
    AcceptAnswer,
    AcceptRequest,
    Ballot,
    EndDecided,
    PrepareAnswer,
    PrepareRequest,
)
from swarmsched.jobs.succession import configuration_problem
from swarmsched.jobs.tombstones import Tombstones
from swarmsched.jobs.update import EndConfirmed, RecordAccepted
from swarmsched.record import JobRecord
from swarmsched.wire.codec import decode_value, encode_value

ROOM = "register"
SCHEMA_KEY = "schema"
SCHEMA_VERSION = b"2"  # 1 carried no version, and named holders without their store
SLOTS_MAX = 200_000

MayChangeShepherd = Callable[[NodeId, int, float], bool]
"""False while the lease that this holder gave to that shepherd, in the life of that generation, runs at that time."""
AcceptorEffect = Persist | RecordAccepted


class Slot(Value):
    """One job's durable state at this holder.  `promised` >= `accepted_ballot`; `accepted` None only with ballot 0."""

    job_id: Job
    promised: Ballot = Ballot()  # frozen
    accepted_ballot: Ballot = Ballot()  # frozen
    accepted: JobRecord | None = None


class Acceptor:
    """Slots by job.  At `SLOTS_MAX` slots new jobs get no answer, so that they find no majority here."""

    def __init__(self, me: Holder, may_change_shepherd: MayChangeShepherd, tombstones_max: int) -> None:
        self._me = me
        self._may_change_shepherd = may_change_shepherd
        self._slots: dict[JobId, Slot] = {}
        self._records: dict[JobId, JobRecord] = {}  # the accepted value of each slot that has one
        self._open: dict[JobId, JobRecord] = {}  # those of them that have not ended and name this holder
        self._tombstones = Tombstones(tombstones_max)
        self._is_schema_stored = False

    def restore(self, entries: Mapping[str, bytes], tombstones: Mapping[str, bytes]) -> None:
        """Read back both rooms' entries; raises `StorageError` for what cannot be read, with nothing restored."""
        slots = _read_entries(entries)
        self._tombstones.restore(tombstones)
        self._is_schema_stored = SCHEMA_KEY in entries
        for slot in slots:
            if slot.job_id not in self._tombstones:
                self._store(slot)

    @property
    def records(self) -> Mapping[JobId, JobRecord]:
        """The latest accepted record of each job held here; with several holders it may not be the decided one."""
        return MappingProxyType(self._records)

    @property
    def open_records(self) -> Mapping[JobId, JobRecord]:
        """Records that have not ended and name this holder, present or leaving."""
        return MappingProxyType(self._open)

    def slot(self, job_id: JobId) -> Slot:
        """The job's slot, an empty one if there is none."""
        return self._slots.get(job_id) or Slot(job_id)

    @property
    def over(self) -> Container[JobId]:
        """Jobs whose end was decided, and of which no more than that is kept here."""
        return self._tombstones

    def has_slot(self, job_id: JobId) -> bool:
        """True once anything was promised or accepted for the job."""
        return job_id in self._slots

    def has_room(self, job_id: JobId) -> bool:
        """False at the limit, for a job without a slot."""
        return job_id in self._slots or job_id in self._tombstones or len(self._slots) < SLOTS_MAX

    def may_promise(self, job_id: JobId, node: NodeId, now_s: float) -> bool:
        """False when a lease forbids to vote for that node as the job's next shepherd."""
        record = self._records.get(job_id)
        if record is None or record.shepherd == node:
            return True
        return self._may_change_shepherd(record.shepherd, record.shepherd_generation, now_s)

    def prepare(self, request: PrepareRequest, now_s: float) -> tuple[PrepareAnswer, list[AcceptorEffect]]:
        """Promise, unless a higher ballot was promised or a lease forbids it; the same ballot is promised again."""
        if request.job_id in self._tombstones:
            store = self._me.store
            return PrepareAnswer(
                request.job_id, request.ballot, False, Ballot(), Ballot(), None, store, is_over=True
            ), []
        slot = self.slot(request.job_id)
        is_free = not request.takes_over or self.may_promise(request.job_id, request.ballot.node, now_s)
        is_promised = is_free and request.ballot >= slot.promised
        effects: list[AcceptorEffect] = []
        if is_promised and request.ballot > slot.promised:
            slot = replace(slot, promised=request.ballot)
            effects += self._save(slot)
        answer = PrepareAnswer(
            job_id=request.job_id,
            ballot=request.ballot,
            is_promised=is_promised,
            promised=slot.promised,
            accepted_ballot=slot.accepted_ballot,
            accepted=slot.accepted,
            store=self._me.store,
        )
        return answer, effects

    def accept(self, request: AcceptRequest) -> tuple[AcceptAnswer, list[AcceptorEffect]]:
        """Accept unless a higher ballot was promised, and promise the proposer's next one along with it."""
        if request.job_id in self._tombstones:
            store = self._me.store
            return AcceptAnswer(request.job_id, request.ballot, False, Ballot(), store, is_over=True), []
        slot = self.slot(request.job_id)
        effects: list[AcceptorEffect] = []
        # A repeated request lies below the promise that it brought itself.
        is_repeated = request.ballot == slot.accepted_ballot and request.value == slot.accepted
        is_accepted = is_repeated or (request.ballot >= slot.promised and request.ballot != slot.accepted_ballot)
        if is_accepted and not is_repeated:
            is_by_shepherd = _is_by_shepherd(request, slot.accepted)
            promised = max(request.ballot, request.next_ballot)
            slot = replace(slot, promised=promised, accepted_ballot=request.ballot, accepted=request.value)
            durable = self._save(slot)
            # What follows from the record comes before its write: ranks that ran free by the old holders must have a
            # deadline before others can decide.
            effects += [RecordAccepted(request.value, is_by_shepherd), *durable]
        return AcceptAnswer(request.job_id, request.ballot, is_accepted, slot.promised, self._me.store), effects

    def end_decided(self, message: EndDecided) -> list[EndConfirmed]:
        """Whether that is the end which was accepted here; an older word says nothing of a newer record."""
        slot = self.slot(message.job_id)
        is_meant = slot.accepted is not None and slot.accepted.is_ended and slot.accepted_ballot == message.ballot
        return [EndConfirmed(message.job_id)] if is_meant else []

    def drop(self, job_id: JobId) -> list[Persist]:
        """Put a tombstone in the place of the slot of a job whose end is decided."""
        self._records.pop(job_id, None)
        self._open.pop(job_id, None)
        deleted = [Persist(ROOM, job_id, None)] if self._slots.pop(job_id, None) else []
        return [*self._tombstones.add(job_id), *deleted]

    def validate(self) -> None:
        """Raise AssertionError when a slot contradicts itself."""
        for job_id, slot in self._slots.items():
            assert slot.job_id == job_id
            assert slot.promised >= slot.accepted_ballot
            assert (slot.accepted is None) == (slot.accepted_ballot == Ballot())
            assert self._records.get(job_id) is slot.accepted
            assert job_id not in self._tombstones
        assert set(self._records) <= set(self._slots)
        assert self._open == {job_id: record for job_id, record in self._records.items() if self._is_open(record)}

    def _save(self, slot: Slot) -> list[Persist]:
        """Encoded first: memory must not know what the disk will not give back."""
        durable = [Persist(ROOM, slot.job_id, encode_value(Slot, slot))]
        if not self._is_schema_stored:
            durable.insert(0, Persist(ROOM, SCHEMA_KEY, SCHEMA_VERSION))
        self._is_schema_stored = True
        self._store(slot)
        return durable

    def _store(self, slot: Slot) -> None:
        self._slots[slot.job_id] = slot
        if slot.accepted is None:
            return
        self._records[slot.job_id] = slot.accepted
        if self._is_open(slot.accepted):
            self._open[slot.job_id] = slot.accepted
        else:
            self._open.pop(slot.job_id, None)

    def _is_open(self, record: JobRecord) -> bool:
        return not record.is_ended and self._me in record.configuration.members


def _is_by_shepherd(request: AcceptRequest, present: JobRecord | None) -> bool:
    """True for a new record from the shepherd that it names, or from the one that hands the job over to that.

    A hand-over names its successor in no life.  A former shepherd that brings itself up to date writes as well, and
    what it then names may have died long ago.
    """
    writer, value = (request.ballot.node, request.ballot.generation), request.value
    named_by = present if value.shepherd_generation == 0 else value
    is_named = named_by is not None and writer == (named_by.shepherd, named_by.shepherd_generation)
    return value != present and is_named


def _read_entries(entries: Mapping[str, bytes]) -> list[Slot]:
    """Where the schema's own entry is missing, entries that can all be read are of this one."""
    schema = entries.get(SCHEMA_KEY, SCHEMA_VERSION)
    if schema != SCHEMA_VERSION:
        found = repr(schema[:16].decode(errors="replace"))
        remedy = f"run the version of swarm-agent that wrote it; this one reads version {SCHEMA_VERSION.decode()}"
        raise StorageError(f"{ROOM}/{SCHEMA_KEY}", f"unknown schema version {found}", remedy)
    return [_read_slot(key, entries[key]) for key in sorted(entries) if key != SCHEMA_KEY]


def _read_slot(key: str, data: bytes) -> Slot:
    try:
        slot = decode_value(Slot, data)
    except ProtocolError as error:
        raise StorageError(f"{ROOM}/{key}", f"unreadable entry: {error}", "") from error
    record = slot.accepted
    is_whole = slot.promised >= slot.accepted_ballot and (record is None) == (slot.accepted_ballot == Ballot())
    is_its_own = slot.job_id == key and (record is None or record.job_id == key)
    if not is_whole or not is_its_own or (record is not None and configuration_problem(record.configuration)):
        raise StorageError(f"{ROOM}/{key}", "the entry contradicts itself", "")
    return slot
