"""The holder's side of the register: promises and accepted records, durable before they are told.

One slot per job.  A slot's promise never falls, and nothing below it is accepted; whatever was accepted is told to
every later ballot.  Every handler may meet a message late, twice or out of order: it answers from the slot, and a
repeated request gets the same verdict without another write.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from swarmsched.effects import Persist
from swarmsched.errors import ProtocolError, StorageError
from swarmsched.fields import Job
from swarmsched.ids import JobId
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot, PrepareAnswer, PrepareRequest
from swarmsched.record import JobRecord
from swarmsched.wire.codec import decode_value, encode_value

ROOM = "register"
SLOTS_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Slot:
    """One job's durable state at this holder.  `promised` >= `accepted_ballot`; `accepted` None only with ballot 0."""

    job_id: Job
    promised: Ballot = Ballot()  # noqa: RUF009  # frozen
    accepted_ballot: Ballot = Ballot()  # noqa: RUF009  # frozen
    accepted: JobRecord | None = None


class Acceptor:
    """Slots by job.  At `SLOTS_MAX` slots new jobs get no answer, so that they find no majority here."""

    def __init__(self) -> None:
        self._slots: dict[JobId, Slot] = {}
        self._records: dict[JobId, JobRecord] = {}  # the accepted value of each slot that has one

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Read back the room's entries; raises `StorageError` for one that cannot be read, with nothing restored."""
        slots = {}
        for key, data in sorted(entries.items()):
            try:
                slots[JobId(key)] = decode_value(Slot, data)
            except ProtocolError as error:
                raise StorageError(f"{ROOM}/{key}", f"unreadable entry: {error}", "restore the database") from error
        for job_id, slot in slots.items():
            self._store(job_id, slot)

    @property
    def records(self) -> Mapping[JobId, JobRecord]:
        """The latest accepted record of each job held here; with several holders it may not be the decided one."""
        return MappingProxyType(self._records)

    def slot(self, job_id: JobId) -> Slot:
        """The job's slot, an empty one if there is none."""
        return self._slots.get(job_id) or Slot(job_id)

    def has_room(self, job_id: JobId) -> bool:
        """False at the limit, for a job without a slot."""
        return job_id in self._slots or len(self._slots) < SLOTS_MAX

    def prepare(self, request: PrepareRequest) -> tuple[PrepareAnswer, list[Persist]]:
        """Promise, unless a higher ballot was promised; the same ballot again is promised again."""
        slot = self.slot(request.job_id)
        is_promised = request.ballot >= slot.promised
        writes = []
        if request.ballot > slot.promised:
            slot = replace(slot, promised=request.ballot)
            writes = self._save(slot)
        answer = PrepareAnswer(
            job_id=request.job_id,
            ballot=request.ballot,
            is_promised=is_promised,
            promised=slot.promised,
            accepted_ballot=slot.accepted_ballot,
            accepted=slot.accepted,
        )
        return answer, writes

    def accept(self, request: AcceptRequest) -> tuple[AcceptAnswer, list[Persist]]:
        """Accept unless a higher ballot was promised, and promise the proposer's next one along with it."""
        slot = self.slot(request.job_id)
        writes = []
        # A repeated request lies below the promise that it brought itself.
        is_accepted = request.ballot >= slot.promised or request.ballot == slot.accepted_ballot
        if is_accepted and request.ballot != slot.accepted_ballot:
            promised = max(request.ballot, request.next_ballot)
            slot = replace(slot, promised=promised, accepted_ballot=request.ballot, accepted=request.value)
            writes = self._save(slot)
        return AcceptAnswer(request.job_id, request.ballot, is_accepted, slot.promised), writes

    def drop(self, job_id: JobId) -> list[Persist]:
        """Delete a slot whose job is past its retention."""
        self._records.pop(job_id, None)
        return [Persist(ROOM, job_id, None)] if self._slots.pop(job_id, None) else []

    def validate(self) -> None:
        """Raise AssertionError when a slot contradicts itself."""
        for job_id, slot in self._slots.items():
            assert slot.job_id == job_id
            assert slot.promised >= slot.accepted_ballot
            assert (slot.accepted is None) == (slot.accepted_ballot == Ballot())
            assert self._records.get(job_id) is slot.accepted
        assert set(self._records) <= set(self._slots)

    def _save(self, slot: Slot) -> list[Persist]:
        self._store(slot.job_id, slot)
        return [Persist(ROOM, slot.job_id, encode_value(Slot, slot))]

    def _store(self, job_id: JobId, slot: Slot) -> None:
        self._slots[job_id] = slot
        if slot.accepted is not None:
            self._records[job_id] = slot.accepted
