"""How far a job has come: what its ranks reported to their nodes, or its time limit where that says more."""

from collections.abc import Iterable

from msgspec.structs import fields

from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.when import rfc3339
from swarm_agent.task.reports import Reported
from swarmsched.documents import JobDocument, LearnerDocument, NodeReport, ProgressDocument
from swarmsched.ids import JobId, TaskKey

SOURCES = {"total_steps": "steps", "total_epochs": "epochs", "target_loss": "loss"}
TIME_LIMIT = "time_limit"
FIGURES_TOLD = tuple(
    each.name for each in fields(ProgressDocument) if each.name not in ("attempt", "source", "learners")
)


def by_time_limit(attempt: int, ran_s: float, limit_s: float) -> ProgressDocument:
    """Of a job that runs, as far as its record tells."""
    known = ProgressDocument(attempt=attempt)
    if limit_s:
        known.source, known.ratio, known.remaining_seconds = (
            TIME_LIMIT,
            min(1.0, ran_s / limit_s),
            max(0.0, limit_s - ran_s),
        )
    return known


def reported_here(facts: AgentFacts, job_id: JobId | None = None) -> list[NodeReport]:
    """What the tasks of this node reported, or those of one job."""
    tasks = facts.reported()
    return [_of_task(key, each) for key, each in tasks.items() if job_id in (None, key[0])]


def _of_task(key: TaskKey, reported: Reported) -> NodeReport:
    progress = reported.progress
    end, remaining = progress.end, progress.remaining
    told = NodeReport(
        job_id=key[0],
        attempt=key[1],
        rank=progress.rank,
        ratio=progress.ratio,
        step_seconds=progress.step_s,
        samples_per_second=progress.samples_per_s,
        reported_at=rfc3339(reported.reported_utc_s) if reported.reported_utc_s else None,
        oddities=dict(reported.oddities),
        problem=reported.problem or None,
    )
    learners = [
        LearnerDocument(rank=rank, rounds=int(rounds), version=int(version), wait_ratio=waits)
        for rank, (rounds, version, waits) in reported.learners.items()
    ]
    told.learners = learners or None
    for name, figure in progress.figures.items():
        if name in FIGURES_TOLD:  # others are for planners
            setattr(told, name, figure)
    if end and remaining:
        told.remaining_seconds, told.source = remaining.seconds, SOURCES[end.goal]
        told.remaining_seconds_low, told.remaining_seconds_high = remaining.low_s, remaining.high_s
    return told


def with_reports(job: JobDocument, reports: Iterable[NodeReport]) -> None:
    """Add to a job's document what its nodes told of this attempt.

    The lowest rank that tells a figure counts; of several that were the lowest one after another, who spoke last.
    """
    known = job.progress
    if known is None:
        return
    mine = [each for each in reports if each.attempt == known.attempt]
    limit_s, by = known.remaining_seconds, known.source
    learners = {each.rank: each for report in mine for each in report.learners or ()}
    known.learners = [learners[rank] for rank in sorted(learners)] or None
    for report in sorted(mine, key=lambda each: (-(each.rank or 0), each.reported_at or "")):
        if report.remaining_seconds is not None:
            known.source, known.remaining_seconds_low, known.remaining_seconds_high = report.source, None, None
        for name in FIGURES_TOLD:
            if (value := getattr(report, name)) is not None:
                setattr(known, name, value)
    if limit_s is not None and (known.remaining_seconds or 0.0) > limit_s:  # it will be stopped before it is done
        known.remaining_seconds, known.source = limit_s, by
        known.remaining_seconds_low = known.remaining_seconds_high = None
