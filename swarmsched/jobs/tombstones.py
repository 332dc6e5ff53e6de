"""What a holder keeps of a job whose record is past its retention: that it is over.

A majority of the holders may have dropped the record of an ended job while another one slept with an old, open version
of it.  To find nothing at that majority would mean to it that nobody has gone on, and it would have the job run again.
So whoever drops a record keeps the job's id, refuses every vote on it, and says why.  One such word is enough for
anybody: only records whose end is known to be decided are dropped, and nothing is decided after an end.
"""

from collections.abc import Mapping

from swarmsched.effects import Persist
from swarmsched.errors import StorageError
from swarmsched.ids import JobId, is_job_id

ROOM = "over"
TOMBSTONES_MAX = 20_000  # some 125 bytes of memory each


class Tombstones:
    """Ids of jobs that are over, those that came first forgotten first.  `limit`: how many are kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: dict[JobId, None] = {}  # the oldest first
        self._next_number = 0

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Read back the room's entries; raises `StorageError` for what cannot be read, with nothing restored."""
        numbers = {_job_id(key): _number(key, value) for key, value in entries.items()}
        self._jobs = dict.fromkeys(sorted(numbers, key=lambda job_id: (numbers[job_id], job_id)))
        self._next_number = 1 + max(numbers.values(), default=-1)

    def add(self, job_id: JobId) -> list[Persist]:
        """That job is over; adding it again changes nothing."""
        if job_id in self._jobs:
            return []
        self._jobs[job_id] = None
        writes = [Persist(ROOM, job_id, b"%d" % self._next_number)]
        self._next_number += 1
        while len(self._jobs) > self._limit:
            oldest = next(iter(self._jobs))
            del self._jobs[oldest]
            writes.append(Persist(ROOM, oldest, None))
        return writes


def _job_id(key: str) -> JobId:
    if not is_job_id(key):
        raise StorageError(f"{ROOM}/{key[:64]}", "the entry is not called like a job", "")
    return JobId(key)


def _number(key: str, value: bytes) -> int:
    """By which the entries are in order."""
    if not value.isdigit() or len(value) > 16:
        raise StorageError(f"{ROOM}/{key}", f"unreadable entry: {value[:16]!r} is not a number", "")
    return int(value)
