"""`swarm migrate`: moves a running job to other nodes."""

from __future__ import annotations

from swarm_client.conversation import TO_SHEPHERD
from swarm_client.failure import OK, UsageError
from swarm_client.job_id import job_path
from swarm_client.options import Arguments, Command, Option
from swarm_client.session import Session, one_positional

COMMAND = Command(
    "migrate",
    "Move a running job to other nodes.",
    (
        Option("--to", "these nodes, comma separated", "NODES"),
        Option("--off", "any but these nodes, comma separated", "NODES"),
    ),
    positionals="JOB",
    details=(
        "The ranks of the job are stopped with their grace time once the place is kept, and go on there from its\n"
        "newest checkpoint.  Of an elastic job others join there while it trains, and then those that are to go\n"
        "leave.  Where there is no room, or nothing to go on from, it is refused and the job runs on.\n"
        "Example: swarm migrate k3j9x0ab --off gpu3"
    ),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Print the job."""
    reference = one_positional(arguments, "job")
    nodes, avoid = _names(arguments["to"]), _names(arguments["off"])
    if not nodes and not avoid:
        raise UsageError("say where it is to go: --to NODES, --off NODES, or both", "for example --off gpu3")
    job = session.agents.call(
        f"cannot migrate {reference}",
        "POST",
        job_path(reference, "/migrate"),
        query=session.query_for(reference),
        body={"nodes": nodes, "avoid": avoid},
        terms=TO_SHEPHERD,
    )
    session.printer.changed(job)
    if session.printer.is_for_people:
        how = "moves while it trains" if job.get("world") else "goes on elsewhere"
        session.tell(f"job {job['handle']} {how}; see swarm status {job['handle']}")
    return OK


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
