"""What a node keeps of jobs that have ended: their records up to a number, and whether their ends are decided.

An accepted end may yet turn out not to be decided.  Until that is known nobody is told of it as a fact, and its record
is not dropped.  And somebody must tell everybody else that the job has ended, whatever became of its shepherd.
"""

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from swarmsched.authority.contact_book import ContactBook
from swarmsched.commands import Refused
from swarmsched.effects import Persist
from swarmsched.facts import EndKnown
from swarmsched.holder.presence import Presence
from swarmsched.holder.read_repair import ReadRepair
from swarmsched.holders import Holder
from swarmsched.ids import JobId
from swarmsched.jobs.register import Register
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.record import JobRecord

ASKED_AT_ONCE = 4  # at each look: after a restart they are many, and other reads wait in the same queue
WAIT_S, WAIT_S_MAX = 10.0, 15.0  # not the same for all holders, who would get in each other's way
RECENT_S = 600.0  # no write is tried for so long: older ends of an earlier life were decided, or given up


RetentionEffect = Persist | EndKnown


class Retention:
    """One node's ended jobs, from the acceptance of their end to their burial."""

    def __init__(
        self,
        me: Holder,
        register: Register,
        shepherds: Shepherds,
        read_repair: ReadRepair,
        contact_book: ContactBook,
        rng: random.Random,
        limit: int,
        started_s: float,
    ) -> None:
        """`limit`: of how many ended jobs the records are kept."""
        self._me = me
        self._register, self._shepherds = register, shepherds
        self._read_repair, self._contact_book = read_repair, contact_book
        self._limit = limit
        ended = sorted((each for each in register.records.values() if each.is_ended), key=lambda each: each.ended_utc_s)
        self._is_decided = {record.job_id: False for record in ended}  # as far as it is known here; oldest first
        self._untold = UntoldEnds(rng)
        self._untold.restore(ended, started_s)

    def accepted(self, record: JobRecord, now_s: float) -> Sequence[RetentionEffect]:
        """A record came into our store that may be an end, or show that one was never decided."""
        if not record.is_ended:
            self._is_decided.pop(record.job_id, None)
            self._untold.settled(record.job_id)
        elif record.job_id not in self._shepherds.jobs:
            self._untold.accepted(record.job_id, now_s)
            return self._retain(record.job_id, is_decided=False)
        return []

    def confirmed(self, job_id: JobId) -> Sequence[RetentionEffect]:
        """A job's shepherd says that the end is decided which was accepted here."""
        return self._retain(job_id, is_decided=True) if job_id in self._is_decided else []

    def read(self, record: JobRecord | None) -> Sequence[RetentionEffect]:
        """A read has found it, or has had it decided; perhaps nobody else can tell of it."""
        if record is None:
            return []
        if record.is_ended and self._is_former(record):
            return self.bury(record.job_id)
        if record.job_id not in self._is_decided:
            return []
        self._is_decided[record.job_id] = record.is_ended
        return [self._tell(record), *self._drop_oldest()] if record.is_ended else []

    def closed(self, job_id: JobId) -> Sequence[RetentionEffect]:
        """A shepherd of ours has brought it to its end; keep ended jobs up to a number, the oldest go first."""
        self._untold.settled(job_id)
        record = self._register.records.get(job_id)
        if record is not None and not record.is_ended:
            self._read_repair.suspect(job_id)  # the others have it: our own vote was promised to somebody else
            return []
        return self._retain(job_id, is_decided=True)

    def is_in_doubt(self, record: JobRecord) -> bool:
        """True for an end that this node has accepted and that may turn out not to be decided; it finds out then."""
        is_acting = record.job_id in self._shepherds.jobs
        is_in_doubt = record.is_ended and not is_acting and not self._is_known(record.job_id)
        if is_in_doubt:
            self._read_repair.suspect(record.job_id)
        return is_in_doubt

    def on_timer(self, presence: Presence, now_s: float) -> Sequence[RetentionEffect]:
        """Of each end that others hold as well somebody must know that it was decided, and tell everybody."""
        effects: list[RetentionEffect] = []
        asked = 0
        for job_id in self._untold.due(now_s):
            record = self._register.records[job_id]
            if self._is_known(job_id):
                effects.append(self._tell(record))
            elif job_id not in self._shepherds.jobs and presence.may_answer(record):
                self._read_repair.suspect(job_id)
                asked += 1
            if asked == ASKED_AT_ONCE:
                break
        return effects

    def bury(self, job_id: JobId) -> Sequence[Persist]:
        """Keep no more of the job than that it is over."""
        self._is_decided.pop(job_id, None)
        self._untold.settled(job_id)
        self._contact_book.dropped(job_id)
        return self._register.drop(job_id)

    def _tell(self, record: JobRecord) -> EndKnown:
        self._untold.settled(record.job_id)
        return EndKnown(record)

    def _retain(self, job_id: JobId, *, is_decided: bool) -> Sequence[RetentionEffect]:
        self._is_decided[job_id] = is_decided or self._is_decided.get(job_id, False)
        return self._drop_oldest()

    def _drop_oldest(self) -> Sequence[RetentionEffect]:
        """Only once their end is known to be decided: the others are asked about, and stay until that is answered."""
        excess = len(self._is_decided) - self._limit
        effects: list[RetentionEffect] = []
        for job_id in list(islice(self._is_decided, max(0, excess))):
            if self._is_known(job_id):
                effects += self.bury(job_id)
            else:
                self._read_repair.suspect(job_id)
        return effects

    def _is_former(self, ended: JobRecord) -> bool:
        """True where others hold that end, and an older record is here: nobody will tell this node of anything."""
        held = self._register.records.get(ended.job_id)
        return held is not None and not held.is_ended and self._me not in ended.configuration.members

    def _is_known(self, job_id: JobId) -> bool:
        record = self._register.records.get(job_id)
        is_alone = record is not None and record.configuration.is_quorum([self._me])
        return self._is_decided.get(job_id, False) or is_alone

    def validate(self) -> None:
        """All that is kept is the end of a job whose record is here, and that nobody here shepherds any more."""
        records = self._register.records
        for job_id in self._is_decided:
            assert job_id in records, "the end of a job is kept, and no record of it"
            assert records[job_id].is_ended, "the end of a live job is kept"
        assert all(job_id in records and records[job_id].is_ended for job_id in self._untold.jobs)


def past_retention(job_id: JobId) -> Refused:
    """What is said of a job of which nothing is known but that it is over."""
    problem = f"{job_id} has ended, and its record is past its retention"
    return Refused("over", problem, "for another run of it, submit it anew")


class UntoldEnds:
    """Ends that this holder has accepted and that perhaps nobody tells of, in the order in which they are due.

    Their shepherd may have died before it could say that the end is decided.  All holders may have one then, each under
    another ballot, and nobody stands for a job that has ended wherever one looks.  Whoever reads the record has it
    decided.  Or it has died before gossip had carried the news.  So a holder looks after each end when the shepherd has
    had its time.
    """

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
        """Jobs whose time has come; each that is taken comes again later unless it is settled by then."""
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
