"""Waiting jobs of the whole swarm in rank order, kept from look to look: only what has changed finds a new place."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from swarmsched.card import RankKey
from swarmsched.ids import JobId
from swarmsched.view import JobView, Order

KEYS_S = 1.0
"""So long a key that changes with time stands before it is made anew."""


class Queue:
    """Jobs stand by their keys, or by their ids where no order is declared.  Invariant: `_keys` is sorted."""

    def __init__(self, order: Order | None) -> None:
        self._order = order
        self._keys: list[tuple[RankKey, JobId]] = []
        self._jobs: dict[JobId, tuple[RankKey, JobView]] = {}
        self._fresh_until_s = float("-inf")

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[JobView]:
        """First in rank first; the queue may not change meanwhile."""
        for _, job_id in self._keys:
            yield self._jobs[job_id][1]

    def put(self, job: JobView, now_s: float) -> bool:
        """A job that waits, new or as it now is; true for a new one."""
        is_new = job.job_id not in self._jobs
        self.drop(job.job_id)
        key = self._key(job, now_s)
        insort(self._keys, (key, job.job_id))
        self._jobs[job.job_id] = (key, job)
        return is_new

    def drop(self, job_id: JobId) -> None:
        """The job waits no more; nothing for a job that is not here."""
        known = self._jobs.pop(job_id, None)
        if known is not None:
            del self._keys[bisect_left(self._keys, (known[0], job_id))]

    def use(self, order: Order | None, now_s: float) -> None:
        """Stand in another order."""
        self._order = order
        self._rank_anew(now_s)

    def refresh(self, now_s: float) -> None:
        """Put those in order whose keys change with time."""
        if self._order is not None and not self._order.is_timeless and now_s >= self._fresh_until_s:
            self._rank_anew(now_s)

    def count_before(self, job_id: JobId) -> int:
        """How many stand before a job; 0 for one that is not here."""
        known = self._jobs.get(job_id)
        return bisect_left(self._keys, (known[0], job_id)) if known is not None else 0

    def validate(self) -> None:
        """Re-derive the order."""
        assert self._keys == sorted((key, job_id) for job_id, (key, _) in self._jobs.items())

    def _rank_anew(self, now_s: float) -> None:
        self._fresh_until_s = now_s + KEYS_S
        self._jobs = {job_id: (self._key(job, now_s), job) for job_id, (_, job) in self._jobs.items()}
        self._keys = sorted([(key, job_id) for job_id, (key, _) in self._jobs.items()])

    def _key(self, job: JobView, now_s: float) -> RankKey:
        return self._order.rank_key(job, now_s) if self._order is not None else ()
