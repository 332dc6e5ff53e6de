"""Other holders for a job, and another shepherd: what a shepherd changes of who keeps its jobs, a few at a time."""

import random
from collections.abc import Mapping

from swarmsched.clock import Clock
from swarmsched.cluster import Candidate
from swarmsched.holder.choice import excess_jobs, next_holders, successor
from swarmsched.holder.machine import Answered
from swarmsched.holders import Configuration, Holders
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.update import Asker, ReadDecided, ReadRequested
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.record_writer import ReadRecord, ShepherdEffect
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.told import HoldersWished, SuccessorWished

CHANGES_PER_REVIEW = 32
SETTLED_S = 30.0  # that a gang runs before its nodes are relieved of holding: short jobs are not worth two updates


class Replacement:
    """Exchanges holders that are lost, and hands jobs over where this node has far more than its share."""

    def __init__(self, own: Candidate, shepherds: Shepherds, rng: random.Random) -> None:
        self._own, self._me = own, own.holder.node
        self._shepherds = shepherds
        self._rng = rng
        self._probes: dict[JobId, Holders] = {}  # who would be the holders if the new ones among them answer

    def mend(
        self, failed: set[NodeId], gone: Mapping[NodeId, float], candidates: list[Candidate], clock: Clock
    ) -> list[ShepherdEffect]:
        """Replace holders that are gone, since when it says, and end joint configurations.

        Jobs that lost a node start again within a moment: new holders do not know yet how long it has been silent.
        """
        effects: list[ShepherdEffect] = []
        changes = 0
        for job in [job for job in self._shepherds.jobs.values() if _is_quiet(job, failed)]:
            if changes >= CHANGES_PER_REVIEW:
                break
            made = self._mend(job, candidates, gone, clock)
            changes += bool(made)
            effects += made
        return effects

    def _mend(
        self, job: JobShepherd, candidates: list[Candidate], gone: Mapping[NodeId, float], clock: Clock
    ) -> list[ShepherdEffect]:
        record = job.record
        if record.leaving_holders:
            return job.step(HoldersWished(record.holders, ()), clock)
        is_settled = clock.now_s >= job.gang.running_since_s + SETTLED_S
        chosen = next_holders(
            record, self._me, [self._own, *candidates], gone, self._rng, clock.now_s, is_settled=is_settled
        )
        newcomers = tuple(holder for holder in chosen or () if holder not in record.holders)
        return self._probe(job.job_id, newcomers, chosen) if chosen and newcomers else []

    def _probe(self, job_id: JobId, newcomers: Holders, chosen: Holders) -> list[ShepherdEffect]:
        """Hear from new holders first, by the store that is meant: an exchange with one that cannot answer is never
        decided, and until it is nothing else can be."""
        if job_id in self._probes:
            return []
        self._probes[job_id] = chosen
        update_id, asked = next(self._shepherds.update_ids), Configuration(newcomers)
        return [ReadRecord(ReadRequested(update_id, job_id, asked, asker=Asker.REPLACEMENT))]

    def probed(self, answer: Answered, clock: Clock) -> list[ShepherdEffect]:
        """The new holders have answered, or have not."""
        chosen = self._probes.pop(answer.request.job_id)
        job = self._shepherds.jobs.get(answer.request.job_id)
        is_answered = isinstance(answer.result, ReadDecided)
        if job is None or not is_answered or not job.is_calm or job.record.leaving_holders:
            return []
        return job.step(HoldersWished(chosen, job.record.holders), clock)

    def hand_over(self, candidates: list[Candidate], clock: Clock) -> list[ShepherdEffect]:
        """What is too much, to holders that shepherd less."""
        effects: list[ShepherdEffect] = []
        surplus = min(CHANGES_PER_REVIEW, excess_jobs(len(self._shepherds.jobs), candidates, self._me))
        for job in list(self._shepherds.jobs.values()):
            if surplus <= 0:
                break
            to = successor(job.record, self._me, candidates) if job.is_calm else None
            if to is not None:
                surplus -= 1
                effects += job.step(SuccessorWished(to), clock)
        return effects


def _is_quiet(job: JobShepherd, failed: set[NodeId]) -> bool:
    return job.is_calm and not any(share.node in failed for share in job.record.shares)
