"""`swarm login`: check an agent's address and token, and remember both as a context."""

from __future__ import annotations

import os
from pathlib import Path

from swarm_client.address import parse_address, spell
from swarm_client.agents import Agents
from swarm_client.config import check_token, memory_file_of, read_token_file, user_file
from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command, Option
from swarm_client.session import Session, one_positional
from swarm_client.toml_edit import save, set_key

COMMAND = Command(
    "login",
    "Check an agent's address and token, and make it the current context.",
    (
        Option("--token-file", "file with the swarm's token, mode 0600", "FILE"),
        Option("-n --name", "name of the context (default: the host)", "NAME"),
    ),
    positionals="HOST[:PORT][,HOST...]",
    examples=("swarm login gpu1 --token-file ~/.swarm-token", "swarm login 10.0.0.5:7433,10.0.0.6 --name lab"),
    has_output=False,
)


def execute(session: Session, arguments: Arguments) -> int:
    """Nothing is stored unless an agent accepted the token.

    The token of the current context stays here: a mistyped or foreign host must not learn it.
    """
    hosts = [text for text in one_positional(arguments, "agent").split(",") if text]
    if not hosts:
        raise UsageError(f"{arguments.positionals[0]!r} names no agent", "write host:port, for example 10.0.0.5:7433")
    addresses = [parse_address(text) for text in hosts]
    name = arguments["name"] or addresses[0][0]
    if not name or any(not (c.isalnum() or c in "-_") for c in name.replace(".", "-")):
        raise UsageError(f"{name!r} cannot name a context", "--name takes letters, digits, '-' and '_'")
    name = name.replace(".", "-").replace(":", "-")
    token_file = _token_file(session, arguments)
    memory = memory_file_of(session.config.environment, name, addresses)
    given = session.config.environment.get("SWARM_TOKEN", "").strip()
    token = read_token_file(token_file) if token_file else check_token(given, "SWARM_TOKEN") if given else ""
    with Agents(addresses, lambda: token, session.waiter, memory) as agents:
        members = agents.call("cannot log in", "GET", "/v1/members")["items"]
        agents.remember(members)
    _store(session, name, [spell(address) for address in addresses], token_file)
    alive = sum(member["status"] == "alive" for member in members)
    session.tell(f"context {name} is current: {alive} of {len(members)} members alive")
    return OK


def _token_file(session: Session, arguments: Arguments) -> str:
    given = arguments["token_file"] or session.config.environment.get("SWARM_TOKEN_FILE", "")
    if given:
        file = str(Path(given).expanduser().absolute())
        read_token_file(file)
        return file
    return ""


def _store(session: Session, name: str, hosts: list[str], token_file: str) -> None:
    file = Path(user_file(os.environ))
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    section = f"contexts.{name}"
    text = set_key(text, section, "hosts", list(hosts))
    if token_file:
        text = set_key(text, section, "token_file", token_file)
    save(file, set_key(text, "", "context", name))
    if session.config.environment.get("SWARM_TOKEN") and not token_file:
        session.tell("SWARM_TOKEN was used and is not stored; give --token-file to keep it")
