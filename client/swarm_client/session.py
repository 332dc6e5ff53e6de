"""What every command is given: configuration, agents, and where to print."""

from __future__ import annotations

import os
import sys
from functools import cached_property

from swarm_client.agents import Agents
from swarm_client.config import COLORS, OUTPUTS, Config, load
from swarm_client.failure import CONFLICT, NOT_AUTHORISED, NOT_FOUND, SWARM_FAILED, Failure, UsageError
from swarm_client.http import Waiter
from swarm_client.options import Arguments, nearest
from swarm_client.output import Printer


class Session:
    """One command's surroundings; parts are made when they are first used."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.waiter = Waiter()
        self.is_quiet, self.is_verbose = bool(arguments["quiet"]), bool(arguments["verbose"])

    @cached_property
    def config(self) -> Config:
        """Settings merged from all sources."""
        output = self._arguments["output"]
        if output is not None and output not in OUTPUTS and not output.startswith("custom-columns="):
            choices = (*OUTPUTS, "custom-columns=")
            raise UsageError(f"-o {output!r} is not known{nearest(output, choices)}", f"one of {', '.join(choices)}")
        if output is None and self._arguments["long"]:
            output = "wide"
        options = {"context": self._arguments["context"], "output": output}
        if self._arguments["no_color"]:
            options["color"] = COLORS[2]
        return load(os.environ, options, self.folder)

    @cached_property
    def folder(self) -> str:
        """Where the command was typed."""
        try:
            return os.getcwd()  # noqa: PTH109  # pathlib is slow to import
        except FileNotFoundError as error:
            raise UsageError("the current folder does not exist any more", "change into one that does") from error

    @cached_property
    def agents(self) -> Agents:
        """The agents of the current context."""
        config = self.config
        return Agents(config.addresses, config.read_token, self.waiter, config.memory_file)

    @cached_property
    def printer(self) -> Printer:
        """Prints to standard output."""
        output = "name" if self.is_quiet else self.config.values["output"]
        return Printer(output, self.config.values["color"], self._arguments["format"] or "", sys.stdout)

    @cached_property
    def user(self) -> str:
        """Name of the user who runs the command."""
        from swarm_client.job_request import caller  # only for some commands: it brings all keys of jobs

        return caller(self.config.environment)

    def query_for(self, reference: str, query: dict[str, str] | None = None) -> dict[str, str]:
        """A query about a job: `@last` means the caller's own last job."""
        return {**(query or {}), "user": self.user} if reference == "@last" and self.user else query or {}

    def close(self) -> None:
        """Close connections, if any was opened."""
        agents = self.__dict__.get("agents")
        if agents is not None:
            agents.close()

    def tell(self, text: str) -> None:
        """A message for people, on standard error; none with -q."""
        if not self.is_quiet:
            self.warn(text)

    @staticmethod
    def warn(text: str) -> None:
        """A message that -q does not silence."""
        try:
            sys.stderr.write(f"swarm: {text}\n")
            sys.stderr.flush()
        except OSError:
            return  # nobody is there to read it


def one_positional(arguments: Arguments, what: str) -> str:
    """The single word that a command needs, for example a job."""
    if len(arguments.positionals) != 1:
        given = f"{len(arguments.positionals)} were given" if arguments.positionals else "none was given"
        raise UsageError(f"one {what} is needed, {given}", f"name one {what}; `--help` shows the use")
    if not arguments.positionals[0]:
        raise UsageError(f"'' names no {what}", f"name one {what}; `--help` shows the use")
    return arguments.positionals[0]


def as_swarm_failure(failure: Failure) -> Failure:
    """For commands whose exit code may be the job's own: refusals become 125 (docs/reference/cli.md)."""
    if failure.exit_code in (NOT_FOUND, NOT_AUTHORISED, CONFLICT):
        failure.end_with(SWARM_FAILED)
    return failure
