"""Ends that this holder has accepted and that perhaps nobody tells of: their shepherd may have died on the way.

It may have died before it could say that the end is decided.  All holders may have one then, each under another ballot,
and nobody stands for a job that has ended wherever one looks.  Whoever reads the record has it decided.  Or it has died
before gossip had carried the news.  So a holder looks after each end when the shepherd has had its time.
"""

import random
from collections.abc import Collection, Iterable, Iterator

from swarmsched.ids import JobId
from swarmsched.record import JobRecord

WAIT_S, WAIT_S_MAX = 10.0, 15.0  # not the same for all holders, who would get in each other's way
RECENT_S = 600.0  # no write is tried for so long: older ends of an earlier life were decided, or given up


class UntoldEnds:
    """Ended jobs, in the order in which they are due."""

    def __init__(self, rng: random.Random) -> None:
        self._wait_s = rng.uniform(WAIT_S, WAIT_S_MAX)
        self._due_s: dict[JobId, float] = {}

    def restore(self, records: Iterable[JobRecord], now_s: float) -> None:
        """The last ends of an earlier life, the newest first: what it knew of them is forgotten."""
        ended = sorted((each for each in records if each.is_ended), key=lambda each: each.ended_utc_s, reverse=True)
        recent = (each for each in ended if each.ended_utc_s >= ended[0].ended_utc_s - RECENT_S)
        self._due_s |= {record.job_id: now_s for record in recent}

    def accepted(self, job_id: JobId, now_s: float) -> None:
        """An end came into our store."""
        self._due_s.setdefault(job_id, now_s + self._wait_s)

    def settled(self, job_id: JobId) -> None:
        """Others have it from us, or it was never decided, or it is no concern of ours any more."""
        self._due_s.pop(job_id, None)

    def due(self, now_s: float) -> Iterator[JobId]:
        """Those whose time has come; each that is taken comes again later unless it is settled by then."""
        while self._due_s:
            job_id, due_s = next(iter(self._due_s.items()))
            if now_s < due_s:
                return
            del self._due_s[job_id]
            self.accepted(job_id, now_s)
            yield job_id

    @property
    def jobs(self) -> Collection[JobId]:
        """All of them."""
        return self._due_s.keys()
