"""`swarm attach`: stream a job again, with signals and exit code as in `run`."""

from __future__ import annotations

from swarm_client.attached import Attachment
from swarm_client.failure import Failure
from swarm_client.options import Arguments, Command, Option
from swarm_client.quantity import duration, whole
from swarm_client.session import Session, as_swarm_failure, one_positional

COMMAND = Command(
    "attach",
    "Stream a job's output again; signals and exit code as in `run`.",
    (
        Option("--tail", "begin with the last N lines of each rank (default: all)", "N", read=whole(0, 10**9)),
        Option("--label", "begin each line with the rank that wrote it"),
        Option("--timeout", "leave and return 124 after this time; the job goes on", "TIME", read=duration),
    ),
    positionals="JOB",
    has_output=False,
)


def execute(session: Session, arguments: Arguments) -> int:
    """Exit code: the job's own; 124 at --timeout; 125 when the swarm failed."""
    reference = one_positional(arguments, "job")
    query = {} if arguments["tail"] is None else {"tail": str(arguments["tail"])}
    session.agents.learn(is_for_now=True)  # whom to go on with, should this agent die
    try:
        return Attachment(
            session,
            reference,
            query=session.query_for(reference, query),
            label=bool(arguments["label"]),
            timeout_s=arguments.get("timeout", 0.0),
            cancels_on_timeout=False,
        ).follow()
    except Failure as failure:
        raise as_swarm_failure(failure) from failure.__cause__
