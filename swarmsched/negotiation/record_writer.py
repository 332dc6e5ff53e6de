"""A shepherd's updates of its job's record: one at a time, in order, each made from the record as it then is."""

from collections import deque
from collections.abc import Iterator

from swarmsched.effects import Effect
from swarmsched.fields import Value
from swarmsched.jobs.update import ReadRequested, UpdateRequested
from swarmsched.negotiation.changes import RecordChange
from swarmsched.record import JobRecord


class WriteRecord(Value):
    """Internal effect: the node hands the update to the register and its outcome back to the shepherd."""

    update: UpdateRequested


class ReadRecord(Value):
    """Internal effect: the node hands the question to the register."""

    read: ReadRequested


ShepherdEffect = Effect | WriteRecord | ReadRecord


class RecordWriter:
    """Changes that wait behind the update that is under way."""

    def __init__(self, update_ids: Iterator[int]) -> None:
        self.in_flight: UpdateRequested | None = None
        self.wished_count = self.done_count = 0  # of changes: those up to the latter are decided, or obsolete
        self.waiting: deque[RecordChange] = deque()
        self._update_ids = update_ids
        self._wished: list[str] = []

    def wish(self, change: RecordChange) -> None:
        """A change is to be written in its turn, if it is still wanted then."""
        self.waiting.append(change)
        self.wished_count += 1
        self._wished.append(type(change).__name__)

    def take_wished(self) -> tuple[str, ...]:
        """Changes that were wished since this was last asked, by their kinds."""
        wished, self._wished = tuple(self._wished), []
        return wished

    def go_on(self, record: JobRecord) -> list[WriteRecord]:
        """Make the next update that is wanted from the decided record, unless one is under way."""
        while self.waiting and self.in_flight is None:
            fields = self.waiting.popleft().of(record)
            if fields is None:
                self.done_count += 1
                continue
            value = record.updated(**fields)
            update_id = next(self._update_ids)
            self.in_flight = UpdateRequested(update_id, value.job_id, record.configuration, record.stamp, value)
            return [WriteRecord(self.in_flight)]
        return []

    def conclude(self, update_id: int) -> bool:
        """Our update is decided, or can never be written; false for one that is not under way."""
        if self.in_flight is None or update_id != self.in_flight.update_id:
            return False
        self.in_flight = None
        self.done_count += 1
        return True

    def repeat(self, update_id: int) -> list[WriteRecord]:
        """The register could not tell whether it is written: the same update again, which is harmless if it is."""
        if self.in_flight is None or update_id != self.in_flight.update_id:
            return []
        return [WriteRecord(self.in_flight)]

    def validate(self, record: JobRecord) -> None:
        """One update at a time, made from the record that is decided; others wait behind it."""
        update = self.in_flight
        assert update is not None or not self.waiting, "nothing waits behind nothing"
        assert update is None or update.job_id == record.job_id
        assert update is None or update.expected == record.stamp, "it was made from another record"
        assert self.wished_count - self.done_count == len(self.waiting) + (update is not None)
