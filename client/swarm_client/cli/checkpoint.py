"""`swarm checkpoint`: inside a task, what `swarm_elastic.checkpoint` is for scripts that are not Python."""

from __future__ import annotations

from swarm_client.failure import OK, Failure, UsageError
from swarm_client.options import Arguments, Command, Option
from swarm_client.quantity import duration
from swarm_client.session import Session
from swarm_client.task_socket import ask_agent

TIMEOUT_S = 600.0
NO_WAIT_TIMEOUT_S = 10.0

COMMAND = Command(
    "checkpoint",
    "Commit a finished checkpoint of the job that this runs in; the next attempt resumes from it.",
    (
        Option("--no-wait", "return once the agent has taken it; a refusal later on is only in the agent's log"),
        Option("--timeout", "give up after this time (default: 10m; with --no-wait 10s)", "TIME", read=duration),
    ),
    positionals="NAME",
    details="NAME is a file or folder directly in $SWARM_CHECKPOINT_DIR, or its path.\n"
    "Exit code: 0 committed, 1 not committed, 2 not inside a task.",
    examples=("swarm checkpoint step-1000.pt", "swarm checkpoint last.pt --no-wait"),
    has_output=False,
)


def execute(session: Session, arguments: Arguments) -> int:
    """Exit code: 0 when it was committed (or taken, with --no-wait), 1 when not, 2 outside of a task."""
    if len(arguments.positionals) != 1:
        raise UsageError("checkpoint needs one NAME", "swarm checkpoint step-1000.pt")
    if not arguments.positionals[0]:
        raise UsageError("the NAME of the checkpoint is empty", "swarm checkpoint step-1000.pt")
    wait = not arguments["no_wait"]
    timeout_s = arguments.get("timeout", TIMEOUT_S if wait else NO_WAIT_TIMEOUT_S)
    name = arguments.positionals[0]
    answer = ask_agent({"type": "checkpoint", "name": name, "wait": wait}, timeout_s)
    if answer.get("ok") is not True:
        problem = str(answer.get("problem") or "the agent's answer made no sense")
        raise Failure(f"checkpoint {name} was not committed: {problem}", str(answer.get("remedy") or ""))
    session.tell(f"checkpoint {name} committed" if wait else f"checkpoint {name} taken")
    return OK
