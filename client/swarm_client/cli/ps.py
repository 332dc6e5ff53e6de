"""`swarm ps`: the jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarm_client.failure import OK, UsageError
from swarm_client.job_list import list_jobs
from swarm_client.options import Arguments, Command, Option, nearest
from swarm_client.outlook import shown_start
from swarm_client.output import Column, state_style
from swarm_client.quantity import show_count, show_duration, show_few, show_ratio, show_time, whole
from swarm_client.reading import read
from swarm_client.session import Session
from swarm_client.start_phase import with_phase

STATES = ("queued", "starting", "running", "stopping", "ended")
LIMIT_DEFAULT, LIMIT_MOST = 100, 1_000_000
END_REASONS = ("completed", "failed", "cancelled", "timeout", "node_lost", "oom", "preempted")


def _states(text: str) -> str:
    known = (*STATES, *END_REASONS)
    for word in text.split(","):
        if word not in known:
            raise UsageError(
                f"--state {word!r} is not known{nearest(word, known)}", f"one or more of {', '.join(known)}"
            )
    return text


if TYPE_CHECKING:
    from swarmsched.documents import JobDocument, ProgressDocument

COMMAND = Command(
    "ps",
    "List live jobs: those that run, newest first, then those that wait, in order of priority and age.",
    (
        Option("-a --all", "ended jobs as well"),
        Option("--user", "of this user only", "NAME"),
        Option("--mine", "of the caller only"),
        Option("--state", "only these, comma separated: queued, running, ended, failed, ...", "STATES", read=_states),
        Option("-n --name", "of this name only", "NAME"),
        Option("--limit", f"at most this many (default {LIMIT_DEFAULT})", "N", read=whole(1, LIMIT_MOST)),
        Option("-l --long", "more columns, as -o wide: holders and how many of their deaths the job survives"),
        Option("-w --watch", "show again every second until Ctrl-C"),
    ),
    aliases=("queue",),
)


def shown_gpus(job: JobDocument) -> str:
    """`now/wanted`: GPUs held and GPUs asked for; of an ended job the latter alone."""
    if job.state == "ended":
        return str(job.gpus)
    return f"{job.gpus if job.state in ('running', 'stopping', 'starting') and job.nodes else 0}/{job.gpus}"


def shown_state(job: JobDocument, *, is_brief: bool = False) -> str:
    """State with phase, or how the job ended."""
    if job.state == "ended":
        return job.end_reason or "ended"
    return with_phase(job.state, job.phase, is_brief=is_brief)


def _elapsed(job: JobDocument) -> str:
    return show_duration(job.elapsed_seconds) if job.started_at else "-"


def shown_ratio(progress: ProgressDocument | None) -> str:
    """`37%`, or the step that was reached where no total is known."""
    if progress is None:
        return "-"
    if progress.ratio is None and progress.step is not None:
        return f"step {progress.step:.10g}"
    return show_ratio(progress.ratio)


def shown_remaining(progress: ProgressDocument | None) -> str:
    """`2:15`; `<2:15` where only a time limit is known."""
    if progress is None:
        return "-"
    return "<" * (progress.source == "time_limit") + show_duration(progress.remaining_seconds)


def _reason(job: JobDocument) -> str:
    if job.state != "ended":
        known = _standstill(job) or job.reason
        return known or ("waits to be planned" if job.state == "queued" else "-")
    return job.detail or (f"exit code {job.shell_exit_code}" if job.shell_exit_code else "-")


def _standstill(job: JobDocument) -> str:
    """Why nothing happens to a job whatever its record says: its shepherd, if any, cannot write the reason down."""
    paused = [share.node for share in job.nodes if share.is_paused]
    if paused:
        where = f" on {show_few(paused)}" if len(paused) < len(job.nodes) else ""
        return f"paused{where}: no majority of its holders answers"
    return "no majority of its holders is there" if job.has_majority is False else ""


def survives(deaths: int | None, has_majority: bool | None) -> str:
    """How many deaths of its holders a job survives; `lost` when too many are gone already."""
    return "-" if deaths is None else str(deaths) if has_majority is not False else "lost"


def _survives(job: JobDocument) -> str:
    text = survives(job.survives_deaths, job.has_majority)
    return f"{text} (forced)" if job.is_forced else text


def _groups(job: JobDocument) -> str:
    """`worker 4/4, server 0/1`: the ranks that each group has, and those that it asked for."""
    return ", ".join(f"{each.name} {each.world_size}/{each.ranks}" for each in job.groups or ()) or "-"


COLUMNS: tuple[Column[JobDocument], ...] = (
    Column("ID", lambda job: job.handle),
    Column("NAME", lambda job: job.name or "-", is_name=True),
    Column("USER", lambda job: job.user or "-", gives_way=True),
    Column("STATE", lambda job: shown_state(job, is_brief=True), style=state_style),
    Column("GPUS", shown_gpus, is_right=True),
    Column("NODES", lambda job: show_few(list(dict.fromkeys(share.node for share in job.nodes))), gives_way=True),
    Column("WAITED", lambda job: show_duration(job.queued_seconds), is_right=True, gives_way=True),
    Column("START", shown_start, is_right=True, gives_way=True),
    Column("ELAPSED", _elapsed, is_right=True, gives_way=True),
    Column("PROGRESS", lambda job: shown_ratio(job.progress), is_right=True, gives_way=True),
    Column("ETA", lambda job: shown_remaining(job.progress), is_right=True, gives_way=True),
    Column("GROUPS", _groups, is_wide=True),
    Column("QUEUE", lambda job: job.queue or "-", is_wide=True),
    Column("PRIORITY", lambda job: str(job.priority), is_wide=True, is_right=True),
    Column("SHEPHERD", lambda job: job.shepherd or "-", is_wide=True),
    Column("HOLDERS", lambda job: ",".join(job.holders or []) or "-", is_wide=True),
    Column("SURVIVES", _survives, is_wide=True, is_right=True),
    Column("RESTARTS", lambda job: str(job.restarts or 0), is_wide=True, is_right=True),
    Column("SUBMITTED", lambda job: show_time(job.submitted_at), is_wide=True),
    Column("REASON", _reason),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Print the table once, or again and again with -w."""
    if arguments.positionals:
        raise UsageError(f"ps takes no {arguments.positionals[0]!r}", "`swarm status JOB` shows one job")
    query, limit = job_query(session, arguments), int(arguments.get("limit", LIMIT_DEFAULT))
    if arguments["watch"]:
        from swarm_client.watch import watch

        if not session.printer.is_for_people:
            raise UsageError("--watch shows tables alone", "leave out --watch, or -q, -o and --format")
        return watch(session, lambda: _lines(session, query, limit))
    document = list_jobs(session.agents, query, limit)
    if session.printer.is_for_people:
        session.printer.table(by_turn(document["items"]), session.printer.chosen(COLUMNS))
    else:
        session.printer.page(document)
    _remarks(session, document)
    session.agents.learn()
    return OK


def by_turn(items: Sequence[Mapping[str, Any]]) -> list[JobDocument]:
    """What waits comes behind the rest, by priority and age, which is its turn as far as the policy does not choose."""
    from swarmsched.documents import JobDocument

    jobs = [read(item, JobDocument) for item in items]
    waiting = [job for job in jobs if job.state == "queued"]
    waiting.sort(key=lambda job: (-job.priority, job.submitted_at, job.id))
    return [*(job for job in jobs if job.state != "queued"), *waiting]


def job_query(session: Session, arguments: Arguments) -> dict[str, str]:
    """Filters of the request from the options."""
    query: dict[str, str] = {}
    if arguments["all"]:
        query["all"] = "1"
    for key in ("state", "name", "user"):
        if arguments[key] is not None:
            query[key] = str(arguments[key])
    if arguments["mine"]:
        query["user"] = session.user
    return query


def _lines(session: Session, query: dict[str, str], limit: int) -> list[str]:
    document = list_jobs(session.agents, query, limit)
    return session.printer.table_lines(by_turn(document["items"]), session.printer.chosen(COLUMNS))


def _remarks(session: Session, document: Mapping[str, Any]) -> None:
    """What the table cannot show, on standard error."""
    silent = document.get("silent_nodes") or []
    if silent:
        whose = "its" if len(silent) == 1 else "their"
        session.tell(f"{', '.join(map(str, silent))} did not answer; {whose} jobs are shown as last heard of")
    if document.get("unasked_nodes"):
        count = len(document["unasked_nodes"])
        session.tell(f"{show_count(count, 'agent')} could not be asked in time; jobs are shown as last heard of")
    more = (document.get("total") or 0) - len(document["items"])
    if document.get("next_cursor") and more > 0:
        session.tell(f"{show_count(more, 'more job')} {'is' if more == 1 else 'are'} not shown; use --limit")
