"""`swarm version`: of the client, and of the agents when asked."""

from __future__ import annotations

from swarm_client.failure import OK
from swarm_client.options import Arguments, Command, Option
from swarm_client.session import Session

COMMAND = Command("version", "Print the version.", (Option("--agents", "versions of the agents as well"),))


def client_version() -> str:
    """Version of the installed distribution."""
    from swarm_client import __version__

    return __version__


def execute(session: Session, arguments: Arguments) -> int:
    """One line; with --agents one more for each node."""
    document: dict[str, object] = {"api_version": "v1", "client": client_version()}
    if arguments["agents"]:
        members = session.agents.call("cannot list members", "GET", "/v1/members")["items"]
        document["agents"] = [{"name": each["name"], "version": each["version"]} for each in members]
    if not session.printer.is_for_people:
        session.printer.document(document)
        return OK
    session.printer.line(f"swarm {document['client']}")
    for each in document.get("agents", []):  # type: ignore[attr-defined]  # a list, two lines above
        session.printer.line(f"{each['name']} {each['version'] or 'unknown'}")
    return OK
