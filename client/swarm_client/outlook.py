"""What is expected of a job, in words: when it starts, whether it ends by its deadline, whether it is served fairly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm_client.output import plain
from swarm_client.quantity import moment, show_duration, show_moment, show_time, show_wait

if TYPE_CHECKING:
    from swarmsched.documents import JobDocument, WhyDocument

UNKNOWN = "not known"
SAME_RATIO = 0.02
"""Ends of an interval that are this close say no more than the expectation."""


def shown_start(job: JobDocument) -> str:
    """`~2:15`: the time until it starts as expected; `?` where nobody knows, `-` of one that waits no more."""
    if job.state != "queued":
        return "-"
    starts_at = job.outlook and job.outlook.starts_at
    return f"~{show_duration(_until(starts_at, job))}" if starts_at else "?"


def start_text(job: JobDocument | WhyDocument) -> str:
    """When it starts, within which interval; or why nobody knows."""
    outlook = job.outlook
    if not outlook or not outlook.starts_at:
        return f"{UNKNOWN}: {plain((outlook and outlook.problem) or 'nothing was planned in time')}"
    if _until(outlook.starts_at, job) <= 0.0:
        return "at any moment"
    span = outlook.starts_at, outlook.starts_at_earliest, outlook.starts_at_latest
    return f"{_when(*span, job)}, if nobody else comes"


def facts(job: JobDocument) -> Iterator[tuple[str, str]]:
    """(name, text) of a job that has not ended."""
    outlook = job.outlook
    if job.state == "queued":
        yield "Starts", start_text(job)
    if outlook and outlook.ends_at:
        span = outlook.ends_at, outlook.ends_at_earliest, outlook.ends_at_latest
        yield "Ends", f"{_when(*span, job)}, if nobody else comes"
    if outlook and outlook.rho:
        of = "its time to the end, over that alone on an equal share of the GPUs"
        yield "Fairness", f"rho {outlook.rho:.2f}: {of}"
    if job.paused_seconds:
        budget = f" (budget {job.pause_budget_ratio:.0%})" if job.pause_budget_ratio else ""
        part = f", {job.paused_ratio:.1%} of its time{budget}" if job.paused_ratio else ""
        yield "Pauses", f"{show_wait(job.paused_seconds)} in all for other sizes or hosts{part}"


def deadline_text(job: JobDocument) -> str:
    """Whether it ends by its deadline, which it has."""
    deadline_utc_s = float((job.spec or {})["deadline_utc_seconds"])
    outlook, shown = job.outlook, show_moment(deadline_utc_s)
    answer = outlook and outlook.deadline
    if outlook and outlook.ends_at and answer == "late":
        late = show_duration(moment(outlook.ends_at) - deadline_utc_s)
        return f"{shown}: no, it ends {late} later as expected"
    if outlook is None or answer not in ("met", "likely"):
        why = (outlook and outlook.problem) or "how long it takes is not known"
        return f"{shown}: {UNKNOWN} whether it ends by then, since {plain(why)}"
    sure = "yes" if answer == "met" else "yes as expected, though not if all goes slowly"
    if outlook.starts_at and _until(outlook.starts_at, job) > 0.0:
        sure += f", from {show_time(_whole(outlook.starts_at))} on"
    least, is_flexible = outlook.ranks_least, (job.ranks_most or 0) > job.ranks
    needs = f"; it needs {least} rank{'s' * (least != 1)} for that" if least and is_flexible else ""
    return f"{shown}: {sure}{needs}"


def _when(expected: str, earliest: str | None, latest: str | None, job: JobDocument | WhyDocument) -> str:
    """`2026-01-31T12:04:00Z, in 2:15 (1:50 to 4:00)`."""
    expected_s = _until(expected, job)
    text = f"{show_time(_whole(expected))}, in {show_duration(expected_s)}"
    low_s = _until(earliest, job) if earliest else expected_s
    if latest is None:
        return f"{text} ({show_duration(low_s)} or more)"
    high_s = _until(latest, job)
    is_sharp = high_s - low_s <= SAME_RATIO * expected_s
    return text if is_sharp else f"{text} ({show_duration(low_s)} to {show_duration(high_s)})"


def _until(text: str, job: JobDocument | WhyDocument) -> float:
    """Seconds from the moment of the document, by the clock of who wrote it."""
    return max(0.0, moment(text) - moment(job.as_of))


def _whole(text: str) -> str:
    return text.partition(".")[0] + "Z"
