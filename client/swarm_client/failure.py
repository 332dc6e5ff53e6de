"""What the command reports to people: a sentence that says what failed and why, a second that says what to do."""

from collections.abc import Sequence

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
NOT_AUTHORISED = 4
CONFLICT = 5
TIMED_OUT = 124
SWARM_FAILED = 125
INTERRUPTED = 130
LOOK_CLOSER = "; `swarm doctor` looks closer"  # which `swarm doctor` itself leaves out


class Failure(Exception):
    """Ends the command with `exit_code` (docs/reference/cli.md) after two lines on stderr."""

    def __init__(self, problem: str, remedy: str = "", exit_code: int = FAILED) -> None:
        self.problem, self.remedy, self.exit_code = problem, remedy, exit_code
        super().__init__(problem)

    def end_with(self, exit_code: int) -> None:
        """Another code ends the command."""
        self.exit_code = exit_code


class UsageError(Failure):
    """The command line or a file cannot be used as written; nothing was sent."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy, USAGE)


class NoAgentAnswered(Failure):
    """No agent answered."""

    def __init__(self, addresses: Sequence[str], cause: str) -> None:
        self.addresses = tuple(addresses)
        where = ", ".join(addresses) or "(no address known)"
        super().__init__(
            f"no agent answered at {where}: {cause.removeprefix(f'{where}: ')}" if addresses else "no agent is known",
            f"start one (swarm local up, systemctl start swarm-agent) or set SWARM_HOSTS{LOOK_CLOSER}",
            SWARM_FAILED,
        )


class AgentRefusal(Failure):
    """An agent answered with a problem (RFC 9457)."""

    def __init__(
        self, problem: str, remedy: str, exit_code: int, *, status: int, code: str, retry_after_s: float = 0.0
    ) -> None:
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        super().__init__(problem, remedy, exit_code)
