"""A user who submits and reads throughout, through every agent, and remembers all that was said.

The user is a process of its own: what the test does, how busy it is and what it believes do not reach it.  The test
starts it with a block and asks for its verdict at the end:

    with Checker(swarm) as checker:
        ...
        checker.verify()

Run as `python -m tests.chaos.checker ORDER` (JSON: folder, addresses, seed, submits, observations), it works until a
line comes on its standard input: the seconds that accepted jobs may take to end from then on.  Its answer is one line,
`{"faults": [...], "answers": N}`, and every answer that it heard is a line of the file of observations.
"""

import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from swarmsched.errors import AgentUnreachable
from tests.agent.testing import AgentApi, Contact, wait_until_sync
from tests.chaos.history import JobHistory, order_faults, overlaps
from tests.chaos.view import TICKET_KEYS, View, beat_command

ROOT = Path(__file__).parents[2]
PAUSE_S = 0.25
CALL_TIMEOUT_S = 6.0
VERDICT_MARGIN_S = 60.0
CODES = (0, 0, 7)
NO_MAJORITY = (503, 504)


class Checker:
    """The process, as a test has it: it works for the time of a block."""

    def __init__(self, swarm: View, seed: int = 1, *, submits: bool = True) -> None:
        self._swarm, self._seed, self._submits = swarm, seed, submits
        self.observations = swarm.folder / f"checker-{seed}.jsonl"
        self._log = self.observations.with_suffix(".log")

    def __enter__(self) -> Self:
        order = {
            "folder": str(self._swarm.folder),
            "addresses": {name: agent.address for name, agent in self._swarm.agents.items()},
            "seed": self._seed,
            "submits": self._submits,
            "observations": str(self.observations),
        }
        self.observations.touch()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.checker", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """The process that observes."""
        return self._process.pid

    @property
    def accepted(self) -> list[str]:
        """Jobs of the checker's own that were acknowledged so far."""
        lines = self.observations.read_text().splitlines(keepends=True)
        heard = [json.loads(line) for line in lines if line.endswith("\n")]
        return list(dict.fromkeys(each["job"] for each in heard if each["what"] == "submit" and each["is_accepted"]))

    def verify(self, timeout_s: float = 60.0) -> None:
        """Have it wait until every accepted job has ended for every agent, and judge all that was heard and written."""
        faults, answers = self.verdict(timeout_s)
        assert not faults, "\n".join(faults)
        assert answers > 0, "the checker has read nothing"

    def verdict(self, timeout_s: float = 60.0) -> tuple[list[str], int]:
        """What must not have been, and how many answers were read; the checker ends with it."""
        try:
            said, _ = self._process.communicate(f"{timeout_s}\n", timeout_s + VERDICT_MARGIN_S)
        except subprocess.TimeoutExpired:
            said = ""
        assert said, f"the checker gives no verdict (exit code {self._process.poll()}): {self._log.read_text()}"
        verdict = json.loads(said)
        return verdict["faults"], verdict["answers"]


@dataclass
class Request:
    """A job that was asked for; `is_accepted` once an agent acknowledged it."""

    ticket: dict[str, Any]
    spec: dict[str, Any]
    exit_code: int
    is_accepted: bool = False

    @property
    def job(self) -> str:
        return str(self.ticket["job_id"])


class User:
    """Submits a short job now and then and reads one at a time, through agents drawn by `seed`.

    A submit that is not answered is repeated with its ticket at another agent until it is accepted, as the client
    library does it.  `note` is given every answer; `judge` at the end judges everything.
    """

    def __init__(self, swarm: View, seed: int, note: Callable[[dict[str, Any]], None], *, submits: bool) -> None:
        self._swarm, self._draw, self._note, self._submits = swarm, random.Random(seed), note, submits
        self._requests: list[Request] = []
        self._histories: dict[str, JobHistory] = {}
        self._faults: list[str] = []
        self.answers = 0

    def act(self) -> None:
        """Submit, or repeat a submit, and read."""
        pending = [request for request in self._requests if not request.is_accepted]
        if pending and self._draw.random() < 0.5:
            self._submit(self._draw.choice(pending))
        elif self._submits:
            self._ask()
        jobs = [*self._swarm.submitted, *(request.job for request in self._accepted[-6:])]
        if jobs:
            self._read(self._draw.choice(jobs))

    def judge(self, timeout_s: float) -> list[str]:
        """All that must not have been, once every accepted job has ended for every agent."""
        until_s = time.monotonic() + timeout_s
        for request in self._requests:
            self._expect_acceptance(request, until_s)
        for request in self._accepted:
            self._expect_end(request, until_s)
        for agent in self._swarm.answering():
            self._check_list(agent)
        written = []
        for job in dict.fromkeys((*self._swarm.submitted, *(request.job for request in self._requests))):
            self._read(job)
            written += overlaps(self._swarm.beats(job)) + order_faults(self._swarm.beats_dir, job)
        said = [fault for history in self._histories.values() for fault in history.faults]
        return [*self._faults, *said, *written]

    @property
    def _accepted(self) -> list[Request]:
        return [request for request in self._requests if request.is_accepted]

    def _expect_acceptance(self, request: Request, until_s: float) -> None:
        try:
            wait_until_sync(lambda: self._submit(request), until_s - time.monotonic())
        except AssertionError:
            self._faults.append(f"nobody accepts {request.job}")

    def _expect_end(self, request: Request, until_s: float) -> None:
        """With the exit code of its ranks."""
        try:
            done = self._swarm.wait_ended(request.job, until_s - time.monotonic())
        except (AssertionError, AgentUnreachable) as error:
            self._faults.append(f"accepted job {request.job} does not end everywhere: {error}")
            return
        if done["shell_exit_code"] != request.exit_code:
            self._faults.append(f"{request.job} should have ended with {request.exit_code}: {done}")

    def _check_list(self, agent: AgentApi) -> None:
        """Every accepted job is listed once."""
        items = agent.get("/v1/jobs?all=true&limit=1000", timeout_s=15)["items"]
        listed = [item["id"] for item in items]
        wrong = {each.job: listed.count(each.job) for each in self._accepted if listed.count(each.job) != 1}
        if wrong:
            self._faults.append(f"how often {agent.name} lists accepted jobs: {wrong}")

    def _ask(self) -> None:
        """Take a ticket and submit with it."""
        agent = self._agent()
        status, document = self._call(agent, "POST", "/v1/tickets", {})
        if status != 200:
            if status and status not in NO_MAJORITY:
                self._faults.append(f"{agent.name} gives no ticket: {status} {document}")
            return
        ticket = {key: document[key] for key in TICKET_KEYS if key in document}
        code = self._draw.choice(CODES)
        spec = {"command": beat_command(self._swarm.beats_dir, 0.1, code), "name": "checker"}
        request = Request(ticket, spec, code)
        self._requests.append(request)
        self._submit(request)

    def _submit(self, request: Request) -> bool:
        """True once the job is accepted; a refusal that is no lack of a majority is a fault."""
        if request.is_accepted:
            return True
        agent = self._agent()
        body = {"ticket": request.ticket, "spec": request.spec}
        status, document = self._call(agent, "POST", "/v1/jobs", body)
        request.is_accepted = status in (200, 201)
        told = {"job": request.job, "status": status, "is_accepted": request.is_accepted}
        self._note({"what": "submit", "agent": agent.name, **told})
        if status and not request.is_accepted and status not in NO_MAJORITY:
            self._faults.append(f"{agent.name} refuses {request.job}: {status} {document}")
        return request.is_accepted

    def _read(self, job: str) -> None:
        agent = self._agent()
        status, document = self._call(agent, "GET", f"/v1/jobs/{job}")
        self._note({"what": "read", "agent": agent.name, "job": job, "status": status, "document": document})
        if status == 200:
            self.answers += 1
            self._histories.setdefault(job, JobHistory(job)).hear(agent.name, document)

    def _call(self, agent: AgentApi, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and answer; status 0 when nobody answers."""
        try:
            return agent.call(method, path, body, timeout_s=CALL_TIMEOUT_S)
        except AgentUnreachable as error:
            return 0, str(error)

    def _agent(self) -> AgentApi:
        return self._draw.choice(self._swarm.answering())


def main(order: dict[str, Any]) -> None:
    """Observe until the verdict is asked for, or until who asked for it is gone."""
    folder = Path(order["folder"])
    token = (folder / "token").read_text()
    agents = {name: Contact(name, (host, port), token) for name, (host, port) in order["addresses"].items()}
    with Path(order["observations"]).open("a", buffering=1) as stream:

        def note(heard: dict[str, Any]) -> None:
            stream.write(json.dumps({"at_s": time.monotonic(), **heard}) + "\n")

        user = User(View(folder, agents), order["seed"], note, submits=order["submits"])
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            user.act()
        if asked := sys.stdin.readline():
            print(json.dumps({"faults": user.judge(float(asked)), "answers": user.answers}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
