"""`swarm checkpoint`: inside a task, what `swarm_elastic.checkpoint` is for scripts that are not Python."""

from __future__ import annotations

import json
import os
import socket
import time

from swarm_client.cli.session import Session
from swarm_client.failure import FAILED, OK, Failure, UsageError
from swarm_client.options import Arguments, Command, Option
from swarm_client.quantity import duration

AGAIN_S = 0.5
TIMEOUT_S = 600.0
NO_WAIT_TIMEOUT_S = 10.0
VERSION = 1

COMMAND = Command(
    "checkpoint",
    "Commit a finished checkpoint of the job that this runs in; the next attempt resumes from it.",
    (
        Option("--no-wait", "return once the agent has taken it; a refusal later on is only in the agent's log"),
        Option("--timeout", "give up after this time (default: 10m; with --no-wait 10s)", "TIME", read=duration),
    ),
    positionals="NAME",
    details="NAME is a file or folder directly in $SWARM_CHECKPOINT_DIR.\n"
    "Exit code: 0 committed, 1 not committed, 2 not inside a task.",
)


def execute(session: Session, arguments: Arguments) -> int:
    """Exit code: 0 when it was committed (or taken, with --no-wait), 1 when not, 2 outside of a task."""
    if len(arguments.positionals) != 1:
        raise UsageError("checkpoint needs one NAME", "swarm checkpoint step-1000.pt")
    if not arguments.positionals[0]:
        raise UsageError("the NAME of the checkpoint is empty", "swarm checkpoint step-1000.pt")
    path, token = os.environ.get("SWARM_TASK_SOCKET", ""), os.environ.get("SWARM_TASK_TOKEN", "")
    if not path or not token:
        problem = "not inside a task of a swarm: SWARM_TASK_SOCKET and SWARM_TASK_TOKEN are not set"
        raise UsageError(problem, "call it from the command of a job: swarm run -- ./train.sh")
    wait = not arguments["no_wait"]
    timeout_s = arguments.get("timeout", TIMEOUT_S if wait else NO_WAIT_TIMEOUT_S)
    name = arguments.positionals[0]
    request = {"v": VERSION, "type": "checkpoint", "token": token, "name": name, "wait": wait}
    answer = _ask(path, json.dumps(request).encode("utf-8", "replace") + b"\n", timeout_s)
    if answer.get("ok") is not True:
        problem = str(answer.get("problem") or "the agent's answer made no sense")
        raise Failure(f"checkpoint {name} was not committed: {problem}", str(answer.get("remedy") or ""))
    session.tell(f"checkpoint {name} committed" if wait else f"checkpoint {name} taken")
    return OK


def _ask(path: str, line: bytes, timeout_s: float) -> dict[str, object]:
    """The agent's answer; an agent that is being started again is waited for."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return _ask_once(path, line, end_s)
        except TimeoutError:
            raise Failure(
                f"no answer of the agent within {timeout_s:g} s", "it may still be committed", FAILED
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() + AGAIN_S > end_s:
                cause = getattr(error, "strerror", None) or "it hung up"
                raise Failure(f"the agent does not answer at {path}: {cause}", "it may be down; try again") from None
            time.sleep(AGAIN_S)


def _ask_once(path: str, line: bytes, end_s: float) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.01, end_s - time.monotonic()))
        connection.connect(path)
        connection.sendall(line)
        with connection.makefile("rb") as answers:
            data = answers.readline()
    if not data:
        raise EOFError
    try:
        answer = json.loads(data)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
