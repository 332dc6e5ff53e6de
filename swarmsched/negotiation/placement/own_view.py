"""The jobs that one agent shepherds, as policies see them: a view is made once for each news and kept."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import ceil

from swarmsched.api import JobState
from swarmsched.card import card_of
from swarmsched.clock import Clock
from swarmsched.estimate import Estimate
from swarmsched.ids import JobId, NodeId
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.record import JobRecord
from swarmsched.view import JobView


@dataclass(slots=True)
class _Kept:
    """A view and what it was made of."""

    record: JobRecord
    rest: tuple[float, float, float, tuple[NodeId, ...], Estimate | None]
    view: JobView


class OwnViews:
    """Views by job."""

    def __init__(self) -> None:
        self._kept: dict[JobId, _Kept] = {}

    @property
    def jobs(self) -> AbstractSet[JobId]:
        """Whose views are kept."""
        return self._kept.keys()

    def drop(self, job_id: JobId) -> None:
        """The job is not shepherded here any more."""
        self._kept.pop(job_id, None)

    def of(self, job: JobShepherd, clock: Clock) -> JobView:
        """The same object until something of the job has changed."""
        record, now_s = job.record, clock.now_s
        avoided = tuple(sorted({*job.barred, *job.pacing.avoided_at(now_s)}))
        rests_until_s = job.pacing.rests_until_s(now_s)
        rest = (job.queued_since_s, job.gang.running_since_s, rests_until_s, avoided, job.estimate)
        known = self._kept.get(record.job_id)
        if known is not None and known.record is record and known.rest == rest:
            return known.view
        running_s = max(0.0, now_s - job.gang.running_since_s)
        queued_s = max(0.0, now_s - job.queued_since_s) if record.state is JobState.QUEUED else 0.0
        rests_s = ceil(max(0.0, rests_until_s - now_s)) if record.state is JobState.QUEUED else 0
        card = card_of(
            record,
            queued_s=queued_s,
            running_s=running_s,
            rests_s=rests_s,
            utc_s=clock.utc_s,
            estimate=job.estimate,
        )
        view = JobView(card, now_s, avoided)
        self._kept[record.job_id] = _Kept(record, rest, view)
        return view
