"""`swarm drain`: have a node take no new work, before it is repaired or switched off."""

from __future__ import annotations

from swarm_client.agents import quote
from swarm_client.cli.session import Session, one_positional
from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command, Option

COMMAND = Command(
    "drain",
    "Have a node take no new work; what runs there runs on.",
    (
        Option("--reason", "why, for those who ask what is wrong with it", "TEXT"),
        Option("--off", "take work again"),
    ),
    positionals="NODE",
    details=(
        "It lasts until --off, restarts of the agent included.  The node still keeps records of jobs and acts for\n"
        "those that were submitted there; `swarm nodes NODE` shows which jobs run on it."
    ),
    examples=('swarm drain node-3 --reason "new power supply"', "swarm drain node-3 --off"),
)


def execute(session: Session, arguments: Arguments) -> int:
    """0 once the node itself has it on disk."""
    name = one_positional(arguments, "node")
    if arguments["off"] and arguments["reason"]:
        raise UsageError("--reason does not go with --off", "leave out one of them")
    body = {"draining": not arguments["off"], "reason": arguments["reason"] or ""}
    path = f"/v1/nodes/{quote(name)}/drain"
    node = session.agents.call(f"cannot drain {name}", "PUT", path, body=body)
    session.printer.changed(node)
    if session.printer.is_for_people:
        work = "no new work; what runs there runs on" if node["is_draining"] else "work again"
        session.tell(f"{node['node']} takes {work}")
    return OK
