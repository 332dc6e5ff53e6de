"""`swarm events`: what happened in the swarm; with -f, what happens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarm_client.conversation import Contact
from swarm_client.failure import NOT_FOUND, OK, SWARM_FAILED, Failure, NoAgentAnswered, UsageError
from swarm_client.http import ConnectionBroken
from swarm_client.job_id import job_path
from swarm_client.options import Arguments, Command, Option
from swarm_client.output import Column, Printer, plain
from swarm_client.quantity import show_time, whole
from swarm_client.reading import read
from swarm_client.session import Session

if TYPE_CHECKING:
    from swarmsched.documents import EventDocument

COMMAND = Command(
    "events",
    "What happened in the swarm, oldest first.",
    (
        Option("-f --follow", "go on until Ctrl-C"),
        Option("--limit", "the last N (default 100)", "N", read=whole(1, 1_000)),
        Option("--kind", "only these, for example job or job.started", "KIND"),
        Option("--job", "only of this job", "JOB"),
        Option("--node", "only of this node", "NODE"),
    ),
)
COLUMNS: tuple[Column[EventDocument], ...] = (
    Column("TIME", lambda event: show_time(event.time, has_fraction=True)),
    Column("AGENT", lambda event: event.agent),
    Column("KIND", lambda event: event.kind),
    Column("JOB", lambda event: (event.job_id or "")[10:18] or "-"),
    Column("TEXT", lambda event: event.text),
)
FOLLOWED_WIDTHS = (24, 8, 16, 8, 0)  # lines that come one by one cannot wait for the widest
SILENCE_S = 40.0
LASTING_S = 2.0  # of a stream that was more than a connection
ID_LENGTH = 8  # of a handle, the shortest that names a job by itself


def execute(session: Session, arguments: Arguments) -> int:
    """A table, or a line for each event as it comes."""
    if arguments.positionals:
        raise UsageError(f"events takes no {arguments.positionals[0]!r}", "use --job, --node or --kind")
    query = {key: str(arguments[key]) for key in ("limit", "kind", "job", "node") if arguments[key] is not None}
    if "job" in query:
        query["job"] = _job_id(session, query["job"])
    if arguments["follow"]:
        _check_lines(session.printer)
        return _follow(session, {**query, "follow": "1"})
    document = session.agents.call("cannot list events", "GET", "/v1/events", query=query)
    from swarmsched.documents import EventDocument

    session.printer.listed(document, COLUMNS, EventDocument)
    return OK


def _job_id(session: Session, reference: str) -> str:
    """The id behind a name or `@last`; of a job that is gone its events may still be there, under its id."""
    asked = session.query_for(reference)
    try:
        job = session.agents.call(f"cannot list events of {reference}", "GET", job_path(reference), query=asked)
    except Failure as failure:
        if failure.exit_code == NOT_FOUND and len(reference) >= ID_LENGTH:
            return reference
        raise
    return str(job["id"])


def _check_lines(printer: Printer) -> None:
    """What comes one by one is neither one YAML document nor a table whose widths are known."""
    if not printer.template and (printer.output == "yaml" or printer.output.startswith("custom-columns=")):
        shape = printer.output.partition("=")[0]
        raise UsageError(f"-o {shape} does not go with --follow", "use -o jsonl or --format, or leave out --follow")


def _follow(session: Session, query: dict[str, str]) -> int:
    """Reconnects elsewhere when an agent goes; ends with an error when none answers for the contact timeout."""
    contact = Contact(float(session.config.values["contact_timeout"]))
    cursor, is_known = "", False
    while True:
        opened_s = None
        headers = {"Last-Event-ID": cursor} if cursor else {}
        try:
            response = session.agents.stream("cannot follow events", "/v1/events", query=query, headers=headers)
            opened_s, is_known = time.monotonic(), True
            for event in response.events(SILENCE_S):
                cursor = event.id or cursor
                contact.found()
                _print(session, event.json())
            cause = "the agent ended the stream"
        except ConnectionBroken as error:
            cause = str(error)
        except NoAgentAnswered as error:
            if not is_known:
                raise
            cause = error.problem
        now_s = time.monotonic()
        if opened_s is not None and now_s - opened_s > LASTING_S:
            contact.found()  # though nothing happened in the swarm
        pause_s = contact.pause_s(now_s)
        if pause_s is None:
            raise Failure(f"cannot follow events: {cause}", "`swarm doctor` looks closer", SWARM_FAILED)
        session.waiter.sleep(pause_s)


def _print(session: Session, event: Mapping[str, Any]) -> None:
    printer = session.printer
    if "kind" not in event:
        return
    if printer.is_for_people:
        from swarmsched.documents import EventDocument

        told = read(event, EventDocument)
        cells = (column.show(told).ljust(width) for column, width in zip(COLUMNS, FOLLOWED_WIDTHS, strict=True))
        printer.line(plain("  ".join(cells)))
    else:
        printer.items([event], ()) if printer.output == "name" or printer.template else printer.line(_line(event))
    printer.stream.flush()


def _line(event: Mapping[str, Any]) -> str:
    import json

    return json.dumps(event, ensure_ascii=False)
