"""A shepherd's updates of its job's record: one at a time, in order, each made from the record as it then is."""

from collections import deque
from collections.abc import Callable, Iterator

from swarmsched.effects import Effect
from swarmsched.fields import Value
from swarmsched.jobs.update import ReadRequested, UpdateRequested
from swarmsched.negotiation.changes import Change
from swarmsched.record import JobRecord


class WriteRecord(Value):
    """Internal effect: the node hands the update to the register and its outcome back to the shepherd."""

    update: UpdateRequested


class ReadRecord(Value):
    """Internal effect: the node hands the question to the register."""

    read: ReadRequested


ShepherdEffect = Effect | WriteRecord | ReadRecord
Continuation = Callable[[float], list[ShepherdEffect]]
"""Run with the present time once the update is durable."""


class RecordWriter:
    """The newest decided record of one job, and the updates that wait behind the one under way."""

    def __init__(self, record: JobRecord, update_ids: Iterator[int]) -> None:
        self.record = record
        self._update_ids = update_ids
        self._waiting: deque[tuple[Change, Continuation, Continuation]] = deque()
        self._in_flight: tuple[UpdateRequested, Continuation, Continuation] | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """True while an update is under way or waits its turn."""
        return self._in_flight is not None or bool(self._waiting)

    @property
    def waiting_count(self) -> int:
        """Updates that wait behind the one under way."""
        return len(self._waiting)

    def write(self, change: Change, then: Continuation, otherwise: Continuation, now_s: float) -> list[ShepherdEffect]:
        """Queue an update; it begins at once when none is under way.  `otherwise` runs when it is no longer wanted."""
        self._waiting.append((change, then, otherwise))
        return self._begin_next(now_s)

    def close(self) -> None:
        """Write nothing more: the job is another's."""
        self._is_closed = True
        self._waiting.clear()

    def written(self, update_id: int, record: JobRecord, now_s: float) -> list[ShepherdEffect] | None:
        """Our update is decided: its continuation, then the next update.  None for an update that is not under way."""
        if self._in_flight is None or update_id != self._in_flight[0].update_id:
            return None
        (_, then, _), self._in_flight = self._in_flight, None
        self.record = record
        return [*then(now_s), *self._begin_next(now_s)]

    def refused(self, update_id: int, now_s: float) -> list[ShepherdEffect] | None:
        """Our update can never be written: it is left out, and the next one begins.  None as for `written`."""
        if self._in_flight is None or update_id != self._in_flight[0].update_id:
            return None
        (_, _, otherwise), self._in_flight = self._in_flight, None
        return [*otherwise(now_s), *self._begin_next(now_s)]

    def repeat(self, update_id: int) -> list[ShepherdEffect]:
        """The register could not tell whether it is written: the same update again, which is harmless if it is."""
        if self._in_flight is None or update_id != self._in_flight[0].update_id:
            return []
        return [WriteRecord(self._in_flight[0])]

    def validate(self) -> None:
        """One update at a time, made from the record that is decided; others wait behind it."""
        update = self._in_flight[0] if self._in_flight else None
        assert update is not None or not self._waiting, "nothing waits behind nothing"
        assert update is None or update.job_id == self.record.job_id
        assert update is None or update.expected == self.record.stamp, "it was made from another record"

    def _begin_next(self, now_s: float) -> list[ShepherdEffect]:
        effects: list[ShepherdEffect] = []
        while self._waiting and self._in_flight is None and not self._is_closed:
            change, then, otherwise = self._waiting.popleft()
            changes = change(self.record)
            if changes is None:
                effects += otherwise(now_s)
                continue
            value = self.record.updated(**changes)
            configuration, stamp = self.record.configuration, self.record.stamp
            update = UpdateRequested(next(self._update_ids), value.job_id, configuration, stamp, value)
            self._in_flight = (update, then, otherwise)
            effects.append(WriteRecord(update))
        return effects
