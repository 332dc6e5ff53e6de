"""`swarm why`: what a job needs, what is free, what fails on which nodes, who is ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swarm_client.cli.model import model_lines
from swarm_client.cli.nodes import natural
from swarm_client.cli.status import needs, oddities, remaining
from swarm_client.failure import OK
from swarm_client.job_id import job_path
from swarm_client.options import Arguments, Command
from swarm_client.outlook import start_text
from swarm_client.output import plain
from swarm_client.quantity import show_count
from swarm_client.session import Session, one_positional

COMMAND = Command("why", "Why a job is pending, or why it has what it has.", positionals="JOB")
SHOWN = 10


def execute(session: Session, arguments: Arguments) -> int:
    """Print sentences; the document with -o json."""
    reference = one_positional(arguments, "job")
    query = session.query_for(reference)
    report = session.agents.call(f"cannot explain {reference}", "GET", job_path(reference, "/why"), query=query)
    if not session.printer.is_for_people:
        session.printer.document(report)
        return OK
    for sentence in sentences(report):
        text = plain(sentence)
        session.printer.line(session.printer.paragraph(text, 4 if text.startswith("  ") else 2))
    if report.get("model"):
        for line in model_lines(report["model"], report["needs"].get("gpus_per_rank") or 0, session.printer):
            session.printer.line(line)
    return OK


def sentences(report: Mapping[str, Any]) -> Iterator[str]:
    """The report in words and numbers; lines of lists begin with two blanks."""
    if report["state"] == "ended":
        yield f"Job {report['handle']} has ended; `swarm status {report['handle']}` tells how."
        return
    yield f"Job {report['handle']} is {report['state']}: {report['summary']}"
    yield f"It needs {needs(report['needs'])}{_total(report['needs'])}."
    if report.get("progress"):
        yield f"Left: {remaining(report['progress'])}."
        if report["progress"].get("problem"):
            yield f"Odd about its reports: {oddities(report['progress'])}."
    free = report.get("free") or {}
    gpus = f"{free.get('gpus', 0)} of {free.get('total_gpus', 0)} GPUs"
    yield f"Free now: {gpus} on {show_count(free.get('nodes', 0), 'node')}."
    obstacles = [node for node in report.get("nodes") or [] if node.get("obstacle")]
    obstacles.sort(key=lambda node: natural(str(node["node"])))
    if obstacles and report["state"] == "queued":
        yield "What stands against it on each node:"
        yield from (f"  {node['node']}: {_fitting(node)}{node['obstacle']}" for node in obstacles[:SHOWN])
        yield from _more(obstacles)
    if report["state"] == "queued" and "outlook" in report:
        yield f"Expected start: {start_text(report)}."
    ahead = report.get("ahead") or []
    if ahead:
        yield f"{show_count(len(ahead), 'job')} ahead of it (policy {report.get('policy') or 'unknown'}):"
        yield from (f"  {_job(job)}: {job.get('reason') or 'earlier in the order'}" for job in ahead[:SHOWN])
        yield from _more(ahead)
    elif report["state"] == "queued":
        yield f"No job is ahead of it (policy {report.get('policy') or 'unknown'})."
    age_s = report.get("staleness_seconds")
    if age_s is not None and age_s > 5:
        yield f"This rests on news up to {age_s:.0f} s old."


def _total(wanted: Mapping[str, Any]) -> str:
    gpus = wanted.get("gpus") or 0
    ranks, most = wanted.get("ranks", 1), wanted.get("ranks_most") or 0
    at_least = " at least" if most > ranks else ""
    return f", {gpus} GPUs in all{at_least}" if gpus > 1 and ranks > 1 else ""


def _fitting(node: Mapping[str, Any]) -> str:
    fits = node.get("fits_ranks")
    return f"{show_count(fits, 'rank')} would fit; " if fits else ""


def _job(job: Mapping[str, Any]) -> str:
    words = [str(job.get("handle", ""))]
    if job.get("name"):
        words.append(str(job["name"]))
    if job.get("user"):
        words.append(f"of {job['user']}")
    return " ".join(words)


def _more(items: list[Any]) -> Iterator[str]:
    if len(items) > SHOWN:
        yield f"  and {len(items) - SHOWN} more"
