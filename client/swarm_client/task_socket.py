"""Inside a task: one request to its agent, over the socket that docs/reference/checkpoints.md describes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping

from swarm_client.failure import FAILED, Failure, UsageError

AGAIN_S = 0.5
VERSION = 1


def ask_agent(request: Mapping[str, object], timeout_s: float) -> dict[str, object]:
    """The answer, `{}` for one that makes no sense.  UsageError outside of a task, Failure when nobody answers."""
    path, token = os.environ.get("SWARM_TASK_SOCKET", ""), os.environ.get("SWARM_TASK_TOKEN", "")
    if not path or not token:
        problem = "not inside a task of a swarm: SWARM_TASK_SOCKET and SWARM_TASK_TOKEN are not set"
        raise UsageError(problem, "call it from the command of a job: swarm run -- ./train.sh")
    line = json.dumps({"v": VERSION, "token": token, **request}).encode("utf-8", "replace")
    return _ask(path, line + b"\n", timeout_s)


def _ask(path: str, line: bytes, timeout_s: float) -> dict[str, object]:
    """The agent's answer; an agent that is being started again is waited for."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return _ask_once(path, line, end_s)
        except TimeoutError:
            raise Failure(f"no answer of the agent within {timeout_s:g} s", "it may still be done", FAILED) from None
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
