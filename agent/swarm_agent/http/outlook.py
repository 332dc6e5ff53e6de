"""What is expected of a job: its start and end, whether that is by its deadline, and whether it is served fairly."""

from collections.abc import Iterable, Mapping
from statistics import median

from swarm_agent.http.exchange import Document
from swarm_agent.http.when import rfc3339
from swarm_agent.planner import Foreseen
from swarmsched.api import JobState
from swarmsched.documents import FairnessDocument, OutlookDocument, WorstJobDocument
from swarmsched.ids import JobId, handle
from swarmsched.models.deadlines import prospect
from swarmsched.record import JobRecord
from swarmsched.view import Span


def outlook_of(foreseen: Foreseen | None, job: JobRecord) -> OutlookDocument | None:
    """Of one job that has not ended; null where the planner has not told of it."""
    outlook = foreseen.outlooks.get(job.job_id) if foreseen else None
    if foreseen is None or outlook is None or job.is_ended:
        return None
    utc_s, deadline_utc_s, is_queued = foreseen.seen_utc_s, job.spec.deadline_utc_s, job.state is JobState.QUEUED
    return OutlookDocument(
        **_times("starts_at", outlook.start if is_queued else None, utc_s),
        **_times("ends_at", outlook.end, utc_s),
        deadline=prospect(outlook.end, deadline_utc_s - utc_s).value if deadline_utc_s else None,
        ranks_least=outlook.ranks_least or None,
        rho=round(outlook.rho(max(0.0, utc_s - job.submitted_utc_s)), 3) or None,
        problem=outlook.problem if is_queued else "",
    )


def fairness_document(foreseen: Foreseen | None, submitted: Mapping[JobId, float]) -> FairnessDocument | None:
    """Of all jobs of which rho is known; null where that is none."""
    if foreseen is None:
        return None
    rhos = dict(_rhos(foreseen, submitted))
    if not rhos:
        return None
    worst = max(rhos, key=lambda each: (rhos[each], each))
    return FairnessDocument(
        rho_median=round(median(rhos.values()), 3),
        rho_worst=round(rhos[worst], 3),
        worst_job=WorstJobDocument(id=worst, handle=handle(worst)),
        jobs=len(rhos),
    )


def _rhos(foreseen: Foreseen, submitted: Mapping[JobId, float]) -> Iterable[tuple[JobId, float]]:
    for job_id, outlook in foreseen.outlooks.items():
        rho = outlook.rho(max(0.0, foreseen.seen_utc_s - submitted[job_id])) if job_id in submitted else 0.0
        if rho:
            yield job_id, rho


def _times(name: str, span: Span | None, utc_s: float) -> Document:
    """As expected, at the earliest and at the latest."""
    ends = (span.expected_s, span.low_s, span.high_s) if span else (None, None, None)
    keys = (name, f"{name}_earliest", f"{name}_latest")
    return {key: None if end is None else rfc3339(utc_s + end) for key, end in zip(keys, ends, strict=True)}
