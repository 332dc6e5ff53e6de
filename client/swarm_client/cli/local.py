"""`swarm local`: a swarm of several agents on this machine."""

from __future__ import annotations

import os

from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command, Option, nearest
from swarm_client.output import Column, Row
from swarm_client.quantity import show_count, whole
from swarm_client.session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from swarm_client.local import LocalSwarm

AGENTS_LIMIT = 50
ACTIONS = ("up", "down", "status", "stop", "start")
COMMAND = Command(
    "local",
    "A swarm of real agents on this machine, to try things and to break them.",
    (
        Option("--agents", "up: how many agents (default 3)", "N", read=whole(1, AGENTS_LIMIT)),
        Option("--gpus", "up: simulated GPUs of each (default 2)", "N", read=whole(0, 64)),
        Option("-n --name", "name of the swarm and its context (default local)", "NAME"),
        Option("--kill", "stop: by SIGKILL"),
    ),
    positionals="up | down | status | stop NODE | start NODE",
)
COLUMNS: tuple[Column[Row], ...] = (
    Column("NAME", lambda item: str(item["name"])),
    Column("ADDRESS", lambda item: str(item["address"])),
    Column("PID", lambda item: str(item["pid"] or "-"), is_right=True),
    Column("STATE", lambda item: str(item["state"]), style=lambda text: "green" if text == "running" else "red"),
    Column("GPUS", lambda item: f"{item['simulated_gpus']} simulated"),
    Column("LOG", lambda item: str(item["log"]), is_wide=True),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Carry out one action."""
    from swarm_client.local import DEFAULT_NAME, LocalSwarm

    words = arguments.positionals or ["status"]
    action, rest = words[0], words[1:]
    if action not in ACTIONS:
        raise UsageError(f"local {action!r} is not known{nearest(action, ACTIONS)}", f"one of {', '.join(ACTIONS)}")
    if len(rest) != (1 if action in ("stop", "start") else 0):
        raise UsageError(f"local {action} takes {'one NODE' if action in ('stop', 'start') else 'no names'}", "")
    name = arguments.get("name", DEFAULT_NAME)
    if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 40:
        raise UsageError(f"{name!r} cannot name a swarm", "--name takes up to 40 letters, digits, '-' and '_'")
    swarm = LocalSwarm(name, os.environ, session.warn)
    if action == "up":
        return _up(session, swarm, arguments)
    if action == "status":
        swarm.require_up()
        session.printer.items(swarm.items(), COLUMNS, name=name)
        return OK
    _change(session, swarm, action, rest, kill=bool(arguments["kill"]))
    return OK


def _up(session: Session, swarm: LocalSwarm, arguments: Arguments) -> int:
    agents, gpus = arguments.get("agents", 3), arguments.get("gpus", 2)
    took_s = swarm.up(agents, gpus)
    if not session.printer.is_for_people:
        session.printer.items(swarm.items(), COLUMNS, name=swarm.name)
        return OK
    line = session.printer.line
    each = " each" * (agents > 1)
    kind = f"{show_count(gpus, 'simulated GPU')}{each} (no real device)" if gpus else "no GPUs"
    line(f"Started {show_count(agents, 'agent')} with {kind}:")
    for item in swarm.items():
        line(f"  {item['name']}  {item['address']}  pid {item['pid']}")
    example = f"swarm run -g {min(2 * gpus, agents * gpus)} -- COMMAND" if gpus else "swarm run -- COMMAND"
    found = f"They found one another in {took_s:.1f} s" if agents > 1 else f"It was ready in {took_s:.1f} s"
    line(f"{found}.  Context {swarm.name!r} is current: try `{example}`.")
    line(f"`{swarm.command('down')}` removes everything again.")
    if session.config.environment.get("SWARM_HOSTS") or session.config.environment.get("SWARM_CONTEXT"):
        session.tell("SWARM_HOSTS or SWARM_CONTEXT is set and goes before the current context; unset it")
    return OK


def _change(session: Session, swarm: LocalSwarm, action: str, rest: list[str], *, kill: bool) -> None:
    if action == "down":
        agents = show_count(len(swarm.nodes), "agent")
        swarm.down()
        session.tell(f"the local swarm of {agents} is removed")
    elif action == "stop":
        swarm.stop(rest[0], kill=kill)
        session.tell(
            f"{rest[0]} was {'killed' if kill else 'stopped'}; `{swarm.command(f'start {rest[0]}')}` starts it again"
        )
    else:
        swarm.start(rest[0])
        session.tell(f"{rest[0]} runs again (pid {swarm.node(rest[0])['pid']})")
