"""How far a job has come: what its ranks reported to their nodes, or its time limit where that says more."""

from collections.abc import Iterable

from swarm_agent.http.exchange import Document
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.schema import COUNT, NUMBER, SECONDS, TEXT, TIME, Schema, choice, maybe
from swarm_agent.http.when import rfc3339
from swarm_agent.task.reports import Reported
from swarmsched.ids import JobId, TaskKey
from swarmsched.models.progress import FIGURES

SOURCES = {"total_steps": "steps", "total_epochs": "epochs", "target_loss": "loss"}
WITHOUT_INTERVAL = {"remaining_seconds_low": None, "remaining_seconds_high": None}
UNKNOWN, TIME_LIMIT = "unknown", "time_limit"

PROGRESS: Schema = {
    "attempt": COUNT,
    "ratio": maybe(NUMBER),
    "remaining_seconds": maybe(SECONDS),
    "remaining_seconds_low": maybe(SECONDS),
    "remaining_seconds_high": maybe(SECONDS),
    "source": choice(*SOURCES.values(), TIME_LIMIT, UNKNOWN),
    "rank": maybe(COUNT),
    **dict.fromkeys(FIGURES, maybe(NUMBER)),
    "step_seconds": maybe(SECONDS),
    "samples_per_second": maybe(NUMBER),
    "reported_at": maybe(TIME),
    "oddities": maybe({"type": "object", "additionalProperties": COUNT}),
    "problem": maybe(TEXT),
}
"""All null but `attempt` and `source` where nothing was reported and there is no time limit."""


def by_time_limit(attempt: int, ran_s: float, limit_s: float) -> Document:
    """Of a job that runs, as far as its record tells."""
    known = {**dict.fromkeys(PROGRESS), "attempt": attempt, "source": UNKNOWN}
    if limit_s:
        known |= {"source": TIME_LIMIT, "ratio": min(1.0, ran_s / limit_s)}
        known["remaining_seconds"] = max(0.0, limit_s - ran_s)
    return known


def reported_here(facts: AgentFacts, job_id: JobId | None = None) -> list[Document]:
    """What the tasks of this node reported, or those of one job; `job_id` in each says whose it is."""
    tasks = facts.reported()
    return [{"job_id": key[0], **_of_task(key, each)} for key, each in tasks.items() if job_id in (None, key[0])]


def _of_task(key: TaskKey, reported: Reported) -> Document:
    """Without what is not known."""
    progress = reported.progress
    document: Document = {
        "attempt": key[1],
        "rank": progress.rank,
        **progress.figures,
        "ratio": progress.ratio,
        "step_seconds": progress.step_s,
        "samples_per_second": progress.samples_per_s,
        "reported_at": rfc3339(reported.reported_utc_s) if reported.reported_utc_s else None,
        "oddities": dict(reported.oddities),
        "problem": reported.problem or None,
    }
    end, remaining = progress.end, progress.remaining
    if end and remaining:
        document |= {
            "remaining_seconds": remaining.seconds,
            "remaining_seconds_low": remaining.low_s,
            "remaining_seconds_high": remaining.high_s,
            "source": SOURCES[end.goal],
        }
    return {name: value for name, value in document.items() if value is not None}


def with_reports(job: Document, reports: Iterable[Document]) -> None:
    """Add to a job's document what its nodes told of this attempt.

    The lowest rank that tells a figure counts; of several that were the lowest one after another, who spoke last.
    """
    known = job.get("progress")
    if not known:
        return
    mine = [each for each in reports if each.get("attempt") == known["attempt"]]
    limit = {name: known[name] for name in ("remaining_seconds", "source")}
    for report in sorted(mine, key=lambda each: (-each["rank"], each.get("reported_at", ""))):
        if "remaining_seconds" in report:
            known |= WITHOUT_INTERVAL  # that of another rank
        known |= {name: value for name, value in report.items() if name in PROGRESS}
    left_s, limit_s = known["remaining_seconds"], limit["remaining_seconds"]
    if limit_s is not None and left_s > limit_s:  # it will be stopped before it is done
        known |= {**limit, **WITHOUT_INTERVAL}
