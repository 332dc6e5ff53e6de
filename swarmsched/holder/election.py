"""Which held jobs need a shepherd, and how this node becomes theirs.

A holder acts when the lease of a job's shepherd is over here, or when the record names this node and it does not act
(it restarted, had lost its majority, or was handed the job).  Holders start one after the other, in the order of the
record's list, so that there is one candidate as a rule.  Safety rests on none of this: the register lets one win, and
the epoch it writes fences all others.

Where all are slow, a change of shepherd mends nothing, and many of them keep all slow.  So a node that has been late
itself stands later, by the score that Lifeguard takes for accusations, and no node has more candidacies under way than
are decided in time.
"""

import random
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from swarmsched.gossip.health import LocalHealth
from swarmsched.holder.leases import LeaseBook
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.update import Asker, Request, UpdateRequested
from swarmsched.negotiation.record_writer import WriteRecord
from swarmsched.negotiation.window import Window
from swarmsched.record import JobRecord

LOOK_INTERVAL_S, LOOK_INTERVAL_CALM_S = 0.5, 1.0
"""With candidacies and without any: a lease lasts ten times as long as the longer one."""
START_DELAY_PER_POSITION_S = 0.5
START_JITTER_S = 0.5
TRY_AGAIN_S = 1.0


@dataclass(slots=True)
class Candidacy:
    """A job that nobody seems to act for; `update_id` while the register decides."""

    stamp: tuple[int, int]
    start_s: float
    tries: int = 0
    update_id: int | None = None


class Election:
    """The candidacies of one node."""

    def __init__(self, me: NodeId, generation: int, leases: LeaseBook, rng: random.Random) -> None:
        self._me = me
        self.generation = generation
        self._leases = leases
        self._rng = rng
        self._candidacies: dict[JobId, Candidacy] = {}
        self._health = LocalHealth()
        self._window: Window[int] = Window()
        self._look_s = 0.0

    @property
    def next_deadline_s(self) -> float:
        """When to look again."""
        return self._look_s

    def lagged(self, lag_s: float, now_s: float) -> None:
        """This node was late by that much."""
        self._health.lagged(lag_s, now_s)

    @property
    def is_late(self) -> bool:
        """True for a while after `lagged`."""
        return self._health.score > 0

    def look_soon(self, now_s: float) -> None:
        """A record came in that may name this node."""
        self._look_s = min(self._look_s, now_s)

    def on_timer(
        self, held: Mapping[JobId, JobRecord], acting: Container[JobId], update_ids: Iterator[int], now_s: float
    ) -> list[WriteRecord]:
        """Look at the open jobs that are held here, and stand for those whose time has come."""
        self._health.pass_time(now_s)
        due: list[tuple[float, JobId]] = []
        for job_id, record in held.items():
            if job_id in acting or not self._may_stand(record, now_s):
                self._withdraw(job_id)
                continue
            candidacy = self._candidacies.get(job_id)
            if candidacy is None or (candidacy.stamp != record.stamp and candidacy.update_id is None):
                candidacy = self._candidacies[job_id] = Candidacy(record.stamp, now_s + self._start_delay_s(record))
            if candidacy.update_id is None and candidacy.start_s <= now_s:
                due.append((candidacy.start_s, job_id))
        if len(self._candidacies) > len(held):
            for job_id in [job_id for job_id in self._candidacies if job_id not in held]:
                self._withdraw(job_id)
        writes = []
        for _, job_id in sorted(due):  # jobs whose other holders are lost, tried for ever, must not keep the rest away
            if self._window.is_full(now_s):
                break
            writes.append(self._stand(self._candidacies[job_id], held[job_id], next(update_ids), now_s))
        self._look_s = now_s + (LOOK_INTERVAL_S if self._candidacies else LOOK_INTERVAL_CALM_S)
        return writes

    def won(self, request: Request, now_s: float) -> None:
        """A majority has voted for us."""
        self._window.ended(request.update_id, now_s)
        self._candidacies.pop(request.job_id, None)

    def lost(self, request: Request, now_s: float) -> None:
        """Somebody else wrote, or no majority voted: look again later, if it is still needed then."""
        self._window.ended(request.update_id, now_s)
        candidacy = self._candidacies.get(request.job_id)
        if candidacy is not None and candidacy.update_id == request.update_id:
            candidacy.update_id = None
            candidacy.tries += 1
            wait_s = TRY_AGAIN_S * self._rng.uniform(0.5, 1.0 + candidacy.tries % 4)
            candidacy.start_s = now_s + self._health.multiplier * wait_s

    def _may_stand(self, record: JobRecord, now_s: float) -> bool:
        is_over = self._leases.may_change(record.shepherd, record.shepherd_generation, now_s)
        return is_over or record.shepherd == self._me

    def _start_delay_s(self, record: JobRecord) -> float:
        lateness = self._health.multiplier
        if record.shepherd == self._me:
            return (lateness - 1) * START_JITTER_S
        candidates = [holder.node for holder in record.holders if holder.node != record.shepherd]
        position = candidates.index(self._me) if self._me in candidates else len(candidates)
        return lateness * (position * START_DELAY_PER_POSITION_S + self._rng.uniform(0.0, START_JITTER_S))

    def _stand(self, candidacy: Candidacy, record: JobRecord, update_id: int, now_s: float) -> WriteRecord:
        candidacy.update_id = update_id
        self._window.begun(update_id, now_s)
        value = record.updated(epoch=record.epoch + 1, shepherd=self._me, shepherd_generation=self.generation)
        update = UpdateRequested(update_id, record.job_id, record.configuration, record.stamp, value)
        return WriteRecord(replace(update, takes_over=record.shepherd != self._me, asker=Asker.ELECTION))

    def validate(self) -> None:
        """Each update of ours is that of one candidacy."""
        waiting = [each.update_id for each in self._candidacies.values() if each.update_id is not None]
        assert len(set(waiting)) == len(waiting)

    def _withdraw(self, job_id: JobId) -> None:
        """One that the register is deciding on stays until it has spoken."""
        candidacy = self._candidacies.get(job_id)
        if candidacy is not None and candidacy.update_id is None:
            del self._candidacies[job_id]
