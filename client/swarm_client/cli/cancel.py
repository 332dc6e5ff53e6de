"""`swarm cancel`: stop jobs, or send them a signal."""

from __future__ import annotations

import sys

from swarm_client.conversation import ONCE_TO_SHEPHERD, TO_SHEPHERD
from swarm_client.failure import OK, Failure, UsageError
from swarm_client.job_id import job_path
from swarm_client.job_list import list_jobs
from swarm_client.options import Arguments, Command, Option
from swarm_client.quantity import duration
from swarm_client.session import Session

COMMAND = Command(
    "cancel",
    "Stop jobs: SIGTERM, then SIGKILL after the grace time.",
    (
        Option("--signal", "only send this signal (USR1, 10) and let the job go on", "SIGNAL"),
        Option("--grace", "time between SIGTERM and SIGKILL", "TIME", read=duration),
        Option("--all", "all live jobs"),
        Option("--mine", "the caller's jobs only"),
        Option("-n --name", "live jobs of this name", "NAME"),
        Option("-y --yes", "do not ask"),
    ),
    positionals="JOB...",
    aliases=("stop",),
    examples=("swarm cancel k3j9x0ab --grace 2m", "swarm cancel --mine", "swarm cancel @last --signal USR1"),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Print each job that was told; the first failure's code if any failed."""
    references = _chosen(session, arguments)
    code = OK
    for reference in references:
        try:
            _stop(session, arguments, reference)
        except Failure as failure:
            if len(references) == 1:
                raise
            session.warn(failure.problem)
            code = code or failure.exit_code
    return code


def _chosen(session: Session, arguments: Arguments) -> list[str]:
    is_selection = arguments["all"] or arguments["mine"] or arguments["name"]
    if bool(arguments.positionals) == bool(is_selection):
        raise UsageError("name jobs, or choose them by --all, --mine or --name", "for example swarm cancel k3j9x0ab")
    if arguments.positionals:
        return arguments.positionals
    query: dict[str, str] = {}
    if arguments["mine"]:
        query["user"] = session.user
    if arguments["name"]:
        query["name"] = arguments["name"]
    jobs = list_jobs(session.agents, query)["items"]
    if not jobs:
        session.tell("no such job is live")
    elif not arguments["mine"] and not arguments["yes"] and any(job["user"] != query.get("user") for job in jobs):
        _confirm(session, jobs)
    return [str(job["id"]) for job in jobs]


def _confirm(session: Session, jobs: list[dict[str, object]]) -> None:
    mine = session.user
    others = [job for job in jobs if job["user"] != mine]
    if not others:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{len(others)} of {len(jobs)} jobs are not yours", "add --mine, or -y to stop them all")
    sys.stderr.write(f"swarm: {len(others)} of {len(jobs)} jobs are not yours; stop them all? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was stopped", "add --mine for your own jobs only")


def _stop(session: Session, arguments: Arguments, reference: str) -> None:
    query = session.query_for(reference)
    if arguments["signal"]:
        body: dict[str, object] = {"signal": _signal(arguments["signal"])}
        action, path, is_repeatable = f"cannot signal {reference}", job_path(reference, "/signal"), False
    else:
        body = {} if arguments["grace"] is None else {"grace_seconds": arguments["grace"]}
        action, path, is_repeatable = f"cannot cancel {reference}", job_path(reference, "/cancel"), True
    terms = TO_SHEPHERD if is_repeatable else ONCE_TO_SHEPHERD
    job = session.agents.call(action, "POST", path, query=query, body=body, terms=terms)
    is_ours = job.get("end_reason") == "cancelled" and job.get("had_ended") is False
    if job.get("state") == "ended" and not is_ours:
        session.tell(f"job {job['handle']} had ended before ({job.get('end_reason')})")
    session.printer.changed(job)


def _signal(text: str) -> int | str:
    if text.isdecimal() and len(text) <= 2:
        return int(text)
    import signal

    name = text.upper().removeprefix("SIG")
    known = [each.name.removeprefix("SIG") for each in signal.Signals]
    if name not in known:
        from swarm_client.options import nearest

        raise UsageError(f"--signal {text!r} is no signal{nearest(name, known)}", "for example --signal USR1")
    return name
