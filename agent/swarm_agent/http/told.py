"""What this agent has told of jobs: whoever asks it twice must not see a job go back.

Any holder may answer for a job, and one that was cut off knows less than the others.  So the agent that a client asks
remembers what it has told, passes over answers that are older, and where nothing newer can be had tells the same again.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from swarm_agent.http.exchange import HttpReply
from swarmsched.documents import JobDocument
from swarmsched.ids import JobId

STAMP = "X-Swarm-Stamp"  # of an answer that rests on a record: EPOCH.VERSION
JOBS_LIMIT = 500  # a document has some kilobytes

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Telling:
    """A record's stamp and, if it was told as a whole, its document."""

    stamp: Stamp
    body: bytes
    told_utc_s: float


class Told:
    """The newest that was told of each job; of the jobs that were asked for longest ago, nothing."""

    def __init__(self, jobs_limit: int = JOBS_LIMIT) -> None:
        self._jobs_limit = jobs_limit
        self._newest: OrderedDict[JobId, Telling] = OrderedDict()

    def is_older(self, job_id: JobId, shown: HttpReply) -> bool:
        """True for a record that is older than what was told of the job."""
        stamp, last = stamp_of(shown), self._newest.get(job_id)
        return stamp is not None and last is not None and stamp < last.stamp

    def keep(self, job_id: JobId, shown: HttpReply, *, is_whole: bool) -> None:
        """Remember an answer that goes out; of a part of a document only the stamp is of use."""
        stamp, last = stamp_of(shown), self._newest.get(job_id)
        if stamp is None or not isinstance(shown.body, bytes):
            return
        if is_whole:
            self._newest[job_id] = Telling(stamp, shown.body, time.time())
        elif last is None or stamp > last.stamp:
            self._newest[job_id] = Telling(stamp, b"", time.time())
        self._newest.move_to_end(job_id)
        while len(self._newest) > self._jobs_limit:
            self._newest.popitem(last=False)

    def stamp(self, job_id: JobId) -> Stamp:
        """Of what was told last; (0, 0) for a job that nothing was told of."""
        last = self._newest.get(job_id)
        return last.stamp if last else (0, 0)

    def again(self, job_id: JobId) -> JobDocument | None:
        """The document that was told last, with its age; None where it was told in part only."""
        last = self._newest.get(job_id)
        if last is None or not last.body:
            return None
        job = msgspec.json.decode(last.body, type=JobDocument)
        job.staleness_seconds = round(job.staleness_seconds + time.time() - last.told_utc_s, 3)
        return job


def stamp_header(stamp: Stamp) -> dict[str, str]:
    """What an answer that rests on a record carries."""
    return {STAMP: f"{stamp[0]}.{stamp[1]}"}


def stamp_of(shown: HttpReply) -> Stamp | None:
    """None for an answer that does not rest on a record, or comes from an agent that does not say."""
    epoch, _, version = shown.headers.get(STAMP, "").partition(".")
    return (int(epoch), int(version)) if epoch.isdecimal() and version.isdecimal() else None
