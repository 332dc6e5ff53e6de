"""The `swarm` command: finds the command's module, runs it, and turns failures into two lines and an exit code.

Each command is a module of this package with a `COMMAND` (its options) and `execute(session, arguments) -> int`.
Only the module of the command that was typed is imported: start-up is part of every command's latency.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from swarm_client.failure import FAILED, INTERRUPTED, OK, USAGE, Failure, UsageError
from swarm_client.options import Arguments, Command, Option, help_text, nearest, parse

GROUPS: dict[str, dict[str, str]] = {
    "Jobs": {
        "run": "submit a job, stream its output, return its exit code",
        "submit": "queue a job, print its id and return",
        "ps": "list jobs",
        "status": "everything about one job; without one, the swarm in a few numbers",
        "why": "why a job is pending, or why it has what it has",
        "logs": "output of a job",
        "attach": "stream a job's output again, as `run` does",
        "wait": "wait until jobs have ended, or run",
        "cancel": "stop jobs",
        "scale": "give a job another number of GPUs",
        "migrate": "move a job to other nodes",
        "recover": "go on without lost holders of a job, by force",
    },
    "Nodes, and the swarm as a whole": {
        "nodes": "nodes, their GPUs, and who holds them",
        "top": "live view of nodes and jobs",
        "events": "what happened in the swarm",
        "drain": "have a node take no new work, or again",
        "forget": "give up a node that is gone for good",
        "doctor": "look for what is wrong and say how to mend it",
    },
    "Inside a task": {
        "checkpoint": "commit a finished checkpoint",
        "report": "tell how far training has come",
    },
    "To try things": {
        "local": "a swarm of several agents on this machine",
        "simulate": "a swarm in virtual time, with faults drawn from seeds; recorded jobs under a policy",
    },
    "This command": {
        "login": "remember a swarm's address and token",
        "config": "show or change settings",
        "version": "version of the client, and of the agents",
        "completion": "completion script for bash, zsh or fish",
    },
}
COMMANDS: dict[str, str] = {name: summary for group in GROUPS.values() for name, summary in group.items()}
ALIASES = {"queue": "ps", "describe": "status", "inspect": "status", "stop": "cancel"}
LATER = {
    "exec": "`swarm logs` and `swarm status` show a job from outside; a shell on its node is ssh's",
    "shell": "jobs are not interactive: `swarm run` a script, or use ssh on a node",
    "ssh": "`swarm nodes -o wide` has the addresses of the nodes for your own ssh",
    "hold": "`swarm cancel` it, and submit it again later",
    "release": "nothing is held: what waits is told by `swarm why JOB`",
    "requeue": "`swarm cancel` it, and submit it again: a checkpoint of the old job is not taken over",
    "history": "`swarm ps -a` lists ended jobs of the last week, `swarm events` what happened",
    "pull": "write results to a shared folder; `swarm status JOB` says where a job's folder lies",
    "cp": "write results to a shared folder; `swarm status JOB` says where a job's folder lies",
    "forward": "`swarm status JOB` names the node: ssh -L PORT:localhost:PORT NODE",
    "array": "submit once for each index: for i in 0 1 2; do swarm submit -- python t.py $i; done",
    "user": "everybody who has the swarm's token may do all; --user of `swarm ps` only filters",
    "quota": "none are kept; priorities are: -p of `swarm run`",
}
"""What people look for and there is not yet, each with the way of today."""
ELSEWHERE = {
    "kill": "cancel",
    "rm": "cancel",
    "delete": "cancel",
    "list": "ps",
    "ls": "ps",
    "jobs": "ps",
    "job": "status",
    "show": "status",
    "log": "logs",
    "node": "nodes",
    "members": "nodes",
    "cordon": "drain",
    "uncordon": "drain NODE --off",
    "undrain": "drain NODE --off",
    "salloc": "run",
    "info": "nodes",
    "sbatch": "submit",
    "srun": "run",
    "squeue": "ps",
    "sacct": "ps",
    "sinfo": "nodes",
    "scancel": "cancel",
}
BROKEN_PIPE = 141
SHAPING = ("output", "format")
"""Keys of the common options that shape what is printed."""

COMMON: tuple[Option, ...] = (
    Option("-o --output", "table, wide, json, jsonl, yaml, name or custom-columns=HEADING:FIELD,...", "FORMAT"),
    Option("--format", "print each item by a template such as '{{.handle}} {{.state}}'", "TEMPLATE"),
    Option("-q --quiet", "no messages; lists and what is changed: ids or names only"),
    Option("--context", "swarm to talk to, of those in the configuration", "NAME"),
    Option("--no-color", "no colour", key="no_color"),
    Option("-v --verbose", "say more; twice: tracebacks", repeats=True),
    Option("-h --help", "this help"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (docs/reference/cli.md lists them)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _dispatch(words)
        finally:
            sys.stdout.flush()
    except Failure as failure:
        return _report(failure, words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  # so that the interpreter's last flush is silent
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return _report_bug(error, words)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  # as above
        return _report(Failure(f"the output cannot be written: {error.strerror}", "make room where it goes"), words)
    except Exception as error:  # noqa: BLE001  # the last resort of the command
        return _report_bug(error, words)


def _dispatch(words: list[str]) -> int:
    if words == ["--version"]:
        words = ["version"]
    before = parse(words, COMMON, takes_command=True)
    if before.command and before.command[0] == "help":
        before.command = [*before.command[1:2], "--help"][: len(before.command)]
        before.values["help"] = True
    if not before.command or before.command == ["--help"]:
        return _without_command(before)
    name = ALIASES.get(before.command[0], before.command[0])
    if name not in COMMANDS:
        raise _unknown_command(name, before.command[1:])
    module = _module(name)
    command = load_command(name)
    arguments = parse(before.command[1:], (*command.options, *COMMON), takes_command=command.takes_command)
    arguments.values = before.values | arguments.values
    arguments.spellings = before.spellings | arguments.spellings
    if arguments["help"]:
        sys.stdout.write(help_text(command, common_options(command)))
        return OK
    if not command.has_output:
        refuse_shaping(arguments, f"`swarm {name}`")
    if arguments.command and not command.takes_command:
        raise UsageError(f"{name} takes nothing after `--`", f"`swarm {name} --help` shows its use")

    from swarm_client.session import Session

    session = Session(arguments)
    try:
        code = module.execute(session, arguments)
    finally:
        session.close()
    assert isinstance(code, int)
    return code


def _module(name: str):  # type: ignore[no-untyped-def]  # a module; naming the type would import typing
    import importlib

    return importlib.import_module(f"swarm_client.cli.{name}")


def load_command(name: str) -> Command:
    """The table of one command; imports its module."""
    command = _module(name).COMMAND
    assert isinstance(command, Command)
    return command


def common_options(command: Command) -> tuple[Option, ...]:
    """The options of all commands that this one takes."""
    return tuple(option for option in COMMON if command.has_output or option.key not in SHAPING)


def refuse_shaping(arguments: Arguments, where: str) -> None:
    """Raise for -o and --format where they would go as if they had not been given."""
    for key in SHAPING:
        if arguments[key] is not None:
            spelling = arguments.spellings[key]
            raise UsageError(f"{spelling} does not go with {where}", f"leave out {spelling}: there is nothing to shape")


def _without_command(arguments: Arguments) -> int:
    text = overview()
    if arguments["help"]:
        sys.stdout.write(text)
        return OK
    sys.stderr.write(text)
    return USAGE


def _unknown_command(name: str, rest: Sequence[str] = ()) -> UsageError:
    if name in LATER:
        return UsageError(f"command {name!r} is not available in this version", LATER[name])
    meant = _meant(name, rest)
    near = f"; did you mean {meant}?" if meant else nearest(name, [*COMMANDS, *ALIASES])
    return UsageError(f"unknown command {name!r}{near}", "`swarm --help` lists the commands")


def _meant(name: str, rest: Sequence[str]) -> str:
    """Today's words for another program's; of `node drain X` and `job cancel Y` what follows is a command itself."""
    if name in ("node", "nodes", "job", "jobs") and rest and rest[0] in COMMANDS:
        return " ".join(rest)
    return ELSEWHERE.get(name, "")


def overview() -> str:
    """What `swarm --help` prints."""
    lines = ["Usage: swarm COMMAND [OPTIONS]", "", "Runs jobs on a swarm of GPU servers."]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:12}{summary}" for name, summary in commands.items())]
    lines += ["", f"`swarm COMMAND --help` explains one.  Aliases: {_aliases()}.", ""]
    return "\n".join(lines)


def _aliases() -> str:
    return ", ".join(f"{alias} ({name})" for alias, name in ALIASES.items())


def _report_bug(error: Exception, words: Sequence[str]) -> int:
    bug = Failure(f"internal error: {type(error).__name__}: {error}", "run it again with -vv and report it")
    return _report(bug, words, error)


def _report(failure: Failure, words: Sequence[str], cause: BaseException | None = None) -> int:
    """Two lines on stderr; the traceback only when asked for."""
    options = words[: words.index("--")] if "--" in words else words
    if "-vv" in options or list(options).count("-v") + list(options).count("--verbose") > 1:
        import traceback

        traceback.print_exception(cause or failure)
    remedy = f"  {failure.remedy}\n" if failure.remedy else ""
    try:
        sys.stderr.write(f"swarm: {failure.problem}\n{remedy}")
    except OSError:
        return failure.exit_code  # nobody is there to read it
    return failure.exit_code or FAILED
