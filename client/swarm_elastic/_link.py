"""The agent's ear and mouth: a thread that asks for plans and tells how this worker stands.

One request waits at the agent at any time.  When something changes here the connection is dropped and asked anew, so
that the agent, which keeps the last request of each worker, knows it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from swarm_elastic._commits import AWAY_S, VERSION, readable, warn
from swarm_elastic._plan import GangPlan, PlanInvalid, parse

ANSWER_BYTES_MAX = 1 << 20
PROBLEM_LENGTH = 500
POLL_S = 60.0  # an agent answers within 20


class WorkerNews(NamedTuple):
    """What an agent is told.

    `trains` is the version of the membership in which this worker trains, 0 for none; `pause_s` what the last switch
    has cost, `busy_s` what this worker's own part of a step takes; `has_timed_out` tells that it has waited for others
    for as long as its script allows; `failed` is the newest version that came to nothing for it.
    """

    state: str = "ready"
    trains: int = 0
    step: int = -1
    layout: str = ""
    problem: str = ""
    pause_s: float = 0.0
    busy_s: float = 0.0
    has_timed_out: bool = False
    failed: int = 0


class AgentLink:
    """Asks one agent for plans; `on_plan` is called in its thread, with versions that only grow."""

    def __init__(
        self,
        path: str,
        token: str,
        worker: str,
        address: str,
        on_plan: Callable[[GangPlan], None],
        secret: str = "",
    ) -> None:
        """`secret` is that of the store at the address, for the other members."""
        self._path, self._token = path, token
        self._own = {"worker": worker, "address": address} | ({"secret": secret} if secret else {})
        self._on_plan = on_plan
        self._known = 0  # the newest version that was heard of
        self._standing, self._told = WorkerNews(), threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="swarm-plans", daemon=True)

    def tell(self, **changes: object) -> None:
        """Tell the agent, soon and without waiting, what has changed of the standing; the first call begins to ask."""
        with self._lock:
            self._standing = self._standing._replace(**changes)  # type: ignore[arg-type]
            self._told.clear()
            with contextlib.suppress(BlockingIOError):  # full: the thread will wake anyway
                os.write(self._wake_write, b"x")
            if self._thread.ident is None:
                self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the agent was sent the present standing; false when it was not in time."""
        return self._told.wait(timeout_s)

    def close(self) -> None:
        """Ask no more; returns when nothing is asked."""
        self._is_closed = True
        self.tell()
        self._thread.join()

    # In the thread.

    def _run(self) -> None:
        while not self._is_closed:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(AWAY_S)
                    connection.connect(self._path)
                    self._converse(connection)
            except PlanInvalid as error:
                self._complain(str(error))
                time.sleep(AWAY_S)
            except (OSError, ValueError):
                time.sleep(AWAY_S)
            except Exception as error:  # noqa: BLE001  # without this thread there would be no plans, and nobody told why
                self._complain(f"plans are asked for again, after {type(error).__name__}: {error}")
                time.sleep(AWAY_S)

    def _converse(self, connection: socket.socket) -> None:
        """Ask until something is to be told.  Raises OSError or ValueError when the agent makes no sense."""
        while not self._is_closed:
            with self._lock:
                standing = self._standing
                _drain(self._wake_read)
            connection.sendall(self._request(standing))
            with self._lock:
                if standing == self._standing:
                    self._told.set()
            data = self._answer(connection)
            if data is None:
                return
            self._hear(json.loads(data))

    def _request(self, standing: WorkerNews) -> bytes:
        who = {"v": VERSION, "type": "member", "token": self._token, **self._own, "version": self._known}
        request = {**who, **standing._asdict()}
        return json.dumps(request).encode() + b"\n"

    def _answer(self, connection: socket.socket) -> bytes | None:
        """One line; None when there is something to tell instead."""
        data = b""
        while not data.endswith(b"\n"):
            ready = readable(POLL_S, connection.fileno(), self._wake_read)
            if self._wake_read in ready:
                return None
            more = connection.recv(1 << 16) if ready else b""
            if not more or len(data) > ANSWER_BYTES_MAX:
                raise OSError("the agent hung up, or did not answer")
            data += more
        return data

    def _hear(self, answer: object) -> None:
        if not isinstance(answer, dict) or answer.get("ok") is not True:
            problem = answer.get("problem") if isinstance(answer, dict) else answer
            warn(f"the agent refused to name plans: {problem}")
            raise OSError(f"refused: {problem}")
        if answer.get("plan") is None:
            return
        plan = parse(answer["plan"])
        if plan.version <= self._known:
            raise PlanInvalid(f"version of a plan must grow, not go from {self._known} to {plan.version}; count up")
        self._on_plan(plan)
        self._known = plan.version

    def _complain(self, problem: str) -> None:
        warn(problem)
        if self._standing.problem != problem:
            self.tell(problem=problem[:PROBLEM_LENGTH])


def _drain(pipe: int) -> None:
    try:
        while os.read(pipe, 1 << 10):
            continue
    except BlockingIOError:
        return
