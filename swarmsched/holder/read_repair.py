"""Holders that have missed an update: they learn of it from what others say, and have the record sent to them again.

A majority is enough for every decision, so the third holder may lag behind: it was down, or its cable was.  Until it
has the newest record it is no help to anybody, and for a job that has ended no further update would ever reach it.
"""

from collections.abc import Iterator, Mapping

from swarmsched.holder.machine import Answered
from swarmsched.ids import JobId
from swarmsched.jobs.update import Asker, JobOver, ReadDecided, ReadRequested
from swarmsched.negotiation.record_writer import ReadRecord
from swarmsched.record import JobRecord

AT_ONCE_MAX = 8
TRY_AGAIN_S = 5.0
SUSPECTS_MAX = 10_000


class ReadRepair:
    """The jobs of which this node's record is old, as it seems."""

    def __init__(self) -> None:
        self._stale: dict[JobId, None] = {}
        self._asked: set[int] = set()  # reads under way
        self._not_before_s: dict[JobId, float] = {}

    def suspect(self, job_id: JobId) -> None:
        """Somebody knows a newer record than the one here."""
        if len(self._stale) < SUSPECTS_MAX:
            self._stale[job_id] = None

    def answered(self, answer: Answered) -> None:
        """One of our reads is over; without a majority that answered it is as much in doubt as before."""
        self._asked.remove(answer.request.update_id)
        if isinstance(answer.result, ReadDecided | JobOver):
            self._stale.pop(answer.request.job_id, None)
        else:
            self.suspect(answer.request.job_id)

    def on_timer(self, held: Mapping[JobId, JobRecord], update_ids: Iterator[int], now_s: float) -> list[ReadRecord]:
        """Have a few records sent again; those that still seem old are suspected again."""
        reads = []
        self._not_before_s = {job_id: at_s for job_id, at_s in self._not_before_s.items() if at_s > now_s}
        for job_id in list(self._stale):
            if len(self._asked) >= AT_ONCE_MAX:
                break
            if job_id in self._not_before_s:
                continue
            record = held.get(job_id)
            del self._stale[job_id]
            if record is None:
                continue
            self._not_before_s[job_id] = now_s + TRY_AGAIN_S
            read = ReadRequested(next(update_ids), job_id, record.configuration, spreads=True, asker=Asker.READ_REPAIR)
            self._asked.add(read.update_id)
            reads.append(ReadRecord(read))
        return reads

    def validate(self) -> None:
        """Few are asked for at once, and few are remembered."""
        assert len(self._asked) <= AT_ONCE_MAX
        assert len(self._stale) <= SUSPECTS_MAX
