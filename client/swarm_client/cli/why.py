"""`swarm why`: what a job needs, what is free, what fails on which nodes, who is ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from swarm_client.cli.model import model_lines
from swarm_client.cli.nodes import natural
from swarm_client.cli.status import needs, oddities, remaining
from swarm_client.failure import OK
from swarm_client.job_id import job_path
from swarm_client.options import Arguments, Command
from swarm_client.outlook import start_text
from swarm_client.output import plain
from swarm_client.quantity import show_count
from swarm_client.reading import items_of, read
from swarm_client.session import Session, one_positional

if TYPE_CHECKING:
    from swarmsched.documents import JobAheadDocument, NeedsDocument, VerdictDocument, WhyDocument

COMMAND = Command("why", "Why a job is pending, or why it has what it has.", positionals="JOB")
SHOWN = 10


def execute(session: Session, arguments: Arguments) -> int:
    """Print sentences; the document with -o json."""
    reference = one_positional(arguments, "job")
    query = session.query_for(reference)
    told = session.agents.call(f"cannot explain {reference}", "GET", job_path(reference, "/why"), query=query)
    if not session.printer.is_for_people:
        session.printer.document(told)
        return OK
    from swarmsched.documents import WhyDocument

    report = read(told, WhyDocument)
    for sentence in sentences(report):
        text = plain(sentence)
        session.printer.line(session.printer.paragraph(text, 4 if text.startswith("  ") else 2))
    if report.model:
        for line in model_lines(report.model, report.needs.gpus_per_rank, session.printer):
            session.printer.line(line)
    return OK


def sentences(report: WhyDocument) -> Iterator[str]:
    """The report in words and numbers; lines of lists begin with two blanks."""
    if report.state == "ended":
        yield f"Job {report.handle} has ended; `swarm status {report.handle}` tells how."
        return
    yield f"Job {report.handle} is {report.state}: {report.summary}"
    yield f"It needs {needs(dict(items_of(report.needs)))}{_total(report.needs)}."
    if report.progress:
        yield f"Left: {remaining(report.progress)}."
        if report.progress.problem:
            yield f"Odd about its reports: {oddities(report.progress)}."
    free = report.free
    yield f"Free now: {free.gpus} of {free.total_gpus} GPUs on {show_count(free.nodes, 'node')}."
    obstacles = [node for node in report.nodes if node.obstacle]
    obstacles.sort(key=lambda node: natural(node.node))
    if obstacles and report.state == "queued":
        yield "What stands against it on each node:"
        yield from (f"  {node.node}: {_fitting(node)}{node.obstacle}" for node in obstacles[:SHOWN])
        yield from _more(obstacles)
    if report.state == "queued":
        yield f"Expected start: {start_text(report)}."
    ahead = report.ahead
    if ahead:
        yield f"{show_count(len(ahead), 'job')} ahead of it (policy {report.policy}):"
        yield from (f"  {_job(job)}: {job.reason or 'earlier in the order'}" for job in ahead[:SHOWN])
        yield from _more(ahead)
    elif report.state == "queued":
        yield f"No job is ahead of it (policy {report.policy})."
    if report.staleness_seconds > 5:
        yield f"This rests on news up to {report.staleness_seconds:.0f} s old."


def _total(wanted: NeedsDocument) -> str:
    at_least = " at least" if wanted.ranks_most > wanted.ranks else ""
    return f", {wanted.gpus} GPUs in all{at_least}" if wanted.gpus > 1 and wanted.ranks > 1 else ""


def _fitting(node: VerdictDocument) -> str:
    return f"{show_count(node.fits_ranks, 'rank')} would fit; " if node.fits_ranks else ""


def _job(job: JobAheadDocument) -> str:
    return " ".join([job.handle, *([job.name] if job.name else []), *([f"of {job.user}"] if job.user else [])])


def _more(items: Sequence[object]) -> Iterator[str]:
    if len(items) > SHOWN:
        yield f"  and {len(items) - SHOWN} more"
