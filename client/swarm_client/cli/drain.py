"""`swarm drain`: have a node take no new work, and give away what it has, before it is repaired or switched off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm_client.address import quote
from swarm_client.conversation import TO_SHEPHERD
from swarm_client.failure import OK, Failure, UsageError
from swarm_client.job_id import job_path
from swarm_client.job_list import list_jobs
from swarm_client.options import Arguments, Command, Option
from swarm_client.session import Session, one_positional

COMMAND = Command(
    "drain",
    "Have a node take no new work; what runs there runs on, but for workers of elastic jobs.",
    (
        Option("--reason", "why, for those who ask what is wrong with it", "TEXT"),
        Option("--migrate", "move running jobs that are elastic or save checkpoints to other nodes"),
        Option("--off", "take work again"),
    ),
    positionals="NODE",
    details=(
        "The node drains until --off, restarts of the agent included.  The node still keeps records of jobs and acts\n"
        "for those that were submitted there; `swarm nodes NODE` shows which jobs run on it.  Workers of elastic\n"
        "jobs leave it while the others train, and others join elsewhere.  With --migrate each job that has something\n"
        "to go on from is moved if there is room; the others are named, and the exit code is 5."
    ),
    examples=('swarm drain node-3 --migrate --reason "new power supply"', "swarm drain node-3 --off"),
)


def execute(session: Session, arguments: Arguments) -> int:
    """0 once the node itself has it on disk."""
    name = one_positional(arguments, "node")
    for option in ("reason", "migrate"):
        if arguments["off"] and arguments[option]:
            raise UsageError(f"--{option} does not go with --off", "leave out one of them")
    body = {"draining": not arguments["off"], "reason": arguments["reason"] or ""}
    path = f"/v1/nodes/{quote(name)}/drain"
    node = session.agents.call(f"cannot drain {name}", "PUT", path, body=body)
    session.printer.changed(node)
    if session.printer.is_for_people:
        stays = "" if arguments["migrate"] else "; what runs there runs on"
        work = f"no new work{stays}" if node["is_draining"] else "work again"
        session.tell(f"{node['node']} takes {work}")
    return _migrate(session, str(node["node"])) if arguments["migrate"] else OK


def _migrate(session: Session, node: str) -> int:
    """Have each job there go on elsewhere; the first failure's code if one does not."""
    code, jobs = OK, _jobs_on(session, node)
    if not jobs:
        session.tell(f"nothing runs on {node}")
    for job in jobs:
        action, path = f"{job['handle']} stays on {node}", job_path(str(job["id"]), "/migrate")
        try:
            session.agents.call(action, "POST", path, body={"avoid": [node]}, terms=TO_SHEPHERD)
        except Failure as failure:
            session.warn(failure.problem)
            code = code or failure.exit_code
        else:
            session.tell(f"{job['handle']} goes on elsewhere")
    return code


def _jobs_on(session: Session, node: str) -> list[Mapping[str, Any]]:
    jobs = list_jobs(session.agents, {"fields": "id,handle,nodes", "state": "starting,running"})["items"]
    return [job for job in jobs if any(share["node"] == node for share in job.get("nodes") or ())]
