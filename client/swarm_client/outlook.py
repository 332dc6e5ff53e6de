"""What is expected of a job, in words: when it starts, whether it ends by its deadline, whether it is served fairly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swarm_client.output import plain
from swarm_client.quantity import moment, show_duration, show_moment, show_time, show_wait

UNKNOWN = "not known"
SAME_RATIO = 0.02
"""Ends of an interval that are this close say no more than the expectation."""


def shown_start(job: Mapping[str, Any]) -> str:
    """`~2:15`: the time until it starts as expected; `?` where nobody knows, `-` of one that waits no more."""
    if job.get("state") != "queued" or "outlook" not in job:
        return "-"
    starts_at = (job.get("outlook") or {}).get("starts_at")
    return f"~{show_duration(_until(starts_at, job))}" if starts_at else "?"


def start_text(job: Mapping[str, Any]) -> str:
    """When it starts, within which interval; or why nobody knows."""
    outlook = job.get("outlook")
    if not outlook or not outlook.get("starts_at"):
        why = plain(str((outlook or {}).get("problem") or "nothing was planned in time"))
        return f"{UNKNOWN}: {why}"
    if _until(outlook["starts_at"], job) <= 0.0:
        return "at any moment"
    return f"{_when('starts_at', outlook, job)}, if nobody else comes"


def facts(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) of a job that has not ended."""
    outlook = job.get("outlook") or {}
    if job.get("state") == "queued" and "outlook" in job:
        yield "Starts", start_text(job)
    if outlook.get("ends_at"):
        yield "Ends", f"{_when('ends_at', outlook, job)}, if nobody else comes"
    if outlook.get("rho"):
        of = "its time to the end, over that alone on an equal share of the GPUs"
        yield "Fairness", f"rho {outlook['rho']:.2f}: {of}"
    if job.get("paused_seconds"):
        budget = f" (budget {job['pause_budget_ratio']:.0%})" if job.get("pause_budget_ratio") else ""
        part = f", {job['paused_ratio']:.1%} of its time{budget}" if job.get("paused_ratio") else ""
        yield "Pauses", f"{show_wait(job['paused_seconds'])} in all for other sizes or hosts{part}"


def deadline_text(job: Mapping[str, Any]) -> str:
    """Whether it ends by its deadline, which it has."""
    outlook = job.get("outlook") or {}
    deadline_utc_s = float((job.get("spec") or {})["deadline_utc_seconds"])
    shown, answer = show_moment(deadline_utc_s), outlook.get("deadline")
    if answer == "late":
        late = show_duration(moment(outlook["ends_at"]) - deadline_utc_s)
        return f"{shown}: no, it ends {late} later as expected"
    if answer not in ("met", "likely"):
        why = outlook.get("problem") or "how long it takes is not known"
        return f"{shown}: {UNKNOWN} whether it ends by then, since {plain(str(why))}"
    sure = "yes" if answer == "met" else "yes as expected, though not if all goes slowly"
    if outlook.get("starts_at") and _until(outlook["starts_at"], job) > 0.0:
        sure += f", from {show_time(_whole(outlook['starts_at']))} on"
    least, ranks = outlook.get("ranks_least"), job.get("ranks") or 1
    needs = (
        f"; it needs {least} rank{'s' * (least != 1)} for that" if least and job.get("ranks_most", 0) > ranks else ""
    )
    return f"{shown}: {sure}{needs}"


def _when(name: str, outlook: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """`2026-01-31T12:04:00Z, in 2:15 (1:50 to 4:00)`."""
    expected_s = _until(outlook[name], job)
    text = f"{show_time(_whole(outlook[name]))}, in {show_duration(expected_s)}"
    earliest, latest = outlook.get(f"{name}_earliest"), outlook.get(f"{name}_latest")
    low_s = _until(earliest, job) if earliest else expected_s
    if latest is None:
        return f"{text} ({show_duration(low_s)} or more)"
    high_s = _until(latest, job)
    is_sharp = high_s - low_s <= SAME_RATIO * expected_s
    return text if is_sharp else f"{text} ({show_duration(low_s)} to {show_duration(high_s)})"


def _until(text: str, job: Mapping[str, Any]) -> float:
    """Seconds from the moment of the document, by the clock of who wrote it."""
    return max(0.0, moment(text) - moment(str(job["as_of"])))


def _whole(text: str) -> str:
    return text.partition(".")[0] + "Z"
