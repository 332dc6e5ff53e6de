"""`swarm forget`: give up a node that is gone for good."""

from __future__ import annotations

from swarm_client.address import quote
from swarm_client.failure import OK
from swarm_client.options import Arguments, Command
from swarm_client.session import Session, one_positional

COMMAND = Command(
    "forget",
    "Give up a node that is gone for good: no agent tries to reach it any more.",
    positionals="NODE",
    details=(
        "`swarm nodes` then shows it as left, and nobody is warned that it is down.  It may come back as it likes.\n"
        "A node that is alive is refused; jobs that too few holders are left of need `swarm recover`."
    ),
    examples=("swarm forget node-3",),
)


def execute(session: Session, arguments: Arguments) -> int:
    """0 once an agent has given the node up, of which the others hear from it; 5 while the node is alive."""
    name = one_positional(arguments, "node")
    node = session.agents.call(f"cannot forget {name}", "DELETE", f"/v1/members/{quote(name)}")
    session.printer.changed(node)
    if session.printer.is_for_people:
        session.tell(f"{node['node']} is given up, and may come back as it likes")
    return OK
