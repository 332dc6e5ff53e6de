"""Tools for tests: waiting for conditions, free ports, stores under control, and real agents on loopback."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm_agent.config import AgentConfig
from swarm_agent.security import generate_key
from swarmsched.effects import Effect, Persist
from swarmsched.errors import AgentUnreachable
from swarmsched.events import Event
from swarmsched.ids import Address, NodeId

POLL_S, POLL_S_MAX, POLL_S_GROWTH = 0.02, 0.2, 1.05
# A test waits for a condition; how long that takes on a loaded machine is not what it is about.
PATIENCE_S = 60.0
ANSWER_S = 30.0
STOP_TIMEOUT_S = 30.0
OWN_ACCOUNT = "root" if os.geteuid() == 0 else ""
"""`job_user` of agents whose jobs may run as whoever runs the tests."""


def agent_config(folder: Path, name: str = "a", **settings: Any) -> AgentConfig:
    """Of an agent on loopback with one simulated GPU, and a folder of its own in this one."""
    plain = {"listen": ("127.0.0.1", free_port()), "simulated_gpus": 1, "job_user": OWN_ACCOUNT}
    return AgentConfig(**{"name": NodeId(name), "data_dir": folder / name, **plain, **settings})


async def wait_until(predicate: Callable[..., object], timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """Return once the predicate is true; `AssertionError` when it is not within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what or predicate}"
        await asyncio.sleep(POLL_S)


def wait_until_sync(predicate: Callable[..., object], timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """As `wait_until`, for tests without a loop; it asks less often as time goes by, for agents work to answer."""
    deadline_s, pause_s = time.monotonic() + timeout_s, POLL_S
    while not predicate():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what or predicate}"
        threading.Event().wait(pause_s)
        pause_s = min(POLL_S_MAX, POLL_S_GROWTH * pause_s)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now for both TCP and UDP."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(100):
        with socket.socket(family, socket.SOCK_STREAM) as tcp, socket.socket(family, socket.SOCK_DGRAM) as udp:
            tcp.bind((host, 0))
            port = int(tcp.getsockname()[1])
            try:
                udp.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError("no port is free for both TCP and UDP")


class ControlledStore:
    """A store whose commits wait for `allow` and fail while `error` is set; `committed` lists what is durable."""

    def __init__(self) -> None:
        self.committed: list[tuple[Persist, ...]] = []
        self.attempts = 0
        self.error: Exception | None = None
        self._permits = threading.Semaphore(0)
        self.is_open = False  # True: commits do not wait

    def allow(self, count: int = 1) -> None:
        """Let so many commits finish."""
        self._permits.release(count)

    def commit(self, entries: Sequence[Persist]) -> None:
        """Wait for a permit, then fail or keep the entries."""
        self.attempts += 1
        if not self.is_open:
            assert self._permits.acquire(timeout=10), "a commit was never allowed"
        if self.error is not None:
            raise self.error
        self.committed.append(tuple(entries))


class ScriptedMachine:
    """A core that answers each event by calling `respond`, and records all events."""

    def __init__(self, respond: Callable[[Event], Sequence[Effect]] = lambda event: ()) -> None:
        self.respond = respond
        self.events: list[Event] = []
        self.deadline_s = float("inf")

    def step(self, event: Event, now_s: float) -> Sequence[Effect]:
        """Record and respond; a deadline that passed is cleared first."""
        self.events.append(event)
        if self.deadline_s <= now_s:
            self.deadline_s = float("inf")
        return self.respond(event)

    @property
    def next_deadline_s(self) -> float:
        """As set by the test."""
        return self.deadline_s


class AgentApi:
    """The HTTP API of an agent, wherever it runs."""

    name: str
    address: Address
    token: str

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://{self.address[0]}:{self.address[1]}"

    def get(self, path: str, timeout_s: float = ANSWER_S) -> Any:
        """Parsed JSON of a GET with the token; `AgentUnreachable` when nobody answers."""
        return self.call("GET", path, timeout_s=timeout_s)[1]

    def call(self, method: str, path: str, body: object = None, timeout_s: float = ANSWER_S) -> tuple[int, Any]:
        """Status and parsed JSON of any request, problems included; `AgentUnreachable` when nobody answers."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)  # our own URL
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError as error:
            raise AgentUnreachable([self.url], str(error)) from error

    def submit(self, *command: str, **spec: Any) -> Any:
        """Submit a job here; returns its document.  Fails when it is refused."""
        status, job = self.call("POST", "/v1/jobs", {"spec": {"command": list(command), **spec}})
        assert status == 201, job
        return job

    def ended(self, job: Any, timeout_s: float = PATIENCE_S) -> Any:
        """The document of a job once it has ended; fails when it has not within `timeout_s`."""
        path = f"/v1/jobs/{job['id']}"
        self.call("GET", f"{path}/wait?for=done&timeout={timeout_s}", timeout_s=timeout_s + 5)
        document = self.get(path)
        assert document["state"] == "ended", document
        return document

    def output(self, job: Any, stream: str = "stdout") -> str:
        """What the ranks of a job have written so far, as this agent tells it."""
        return "".join(record["text"] for record in self.records(f"/v1/jobs/{job['id']}/logs?stream={stream}"))

    def records(self, path: str) -> list[Any]:
        """The `log` records that a stream of output has at this moment."""
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, headers=headers)  # the URL is our own
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            records = [json.loads(line) for line in response if line.strip()]
        return [record for record in records if record.get("type") == "log"]

    def page_of_metrics(self) -> str:
        """What /metrics answers."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return str(response.read().decode())

    def counted(self, family: str, **labels: str) -> float:
        """Sum of the values of a family with these labels; 0 while there is none."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.page_of_metrics().splitlines() if line.startswith(family)]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(each in line for each in wanted))


@dataclass(frozen=True)
class Contact(AgentApi):
    """An agent that another process started."""

    name: str
    address: Address
    token: str = field(repr=False)


@dataclass
class RunningAgent(AgentApi):
    """A real agent process on loopback."""

    name: str
    address: Address
    config_file: Path
    data_dir: Path
    log_file: Path
    token: str
    process: "subprocess.Popen[bytes]" = field(repr=False)
    packages: Path | None = None  # where another version is installed, of which it is then

    def is_live(self) -> bool:
        """True when /livez answers 200; fails when the process has ended."""
        assert self.process.poll() is None, f"{self.name} ended: {self.log_file.read_text()[-2_000:]}"
        try:
            with urllib.request.urlopen(f"{self.url}/livez", timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def restart(self) -> None:
        """Start the same agent again after `stop` or `kill`."""
        self.process = _spawn(self.config_file, self.log_file, self.packages)
        wait_until_sync(self.is_live, PATIENCE_S, f"{self.name} answers /livez")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode


@contextmanager
def start_agents(
    count: int,
    gpus: int = 2,
    settings: dict[str, Any] | None = None,
    wait_live: bool = True,
    packages: Path | None = None,
    first: dict[str, Any] | None = None,
) -> Iterator[list[RunningAgent]]:
    """Real agents named n1, n2... on loopback, joined through the first, with one key and token, in a temporary folder.

    `settings` are further keys of every agent's configuration, `first` of n1's alone, `packages` a folder with another
    version to start.
    At the end the agents are stopped and what is left of their tasks is killed.
    """
    with ExitStack() as stack:
        base = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-agents-", ignore_cleanup_errors=True))
        )
        stack.callback(_kill_tasks_below, base)
        for secret in ("cluster.key", "token"):
            (base / secret).touch(0o600)
            (base / secret).write_text(generate_key())
        ports = _distinct_ports(count)
        agents = []
        for index, port in enumerate(ports):
            seeds = [f"127.0.0.1:{ports[0]}"] if index else []
            own = {"simulated_gpus": gpus, **(settings or {}), **((first or {}) if index == 0 else {})}
            agent = _launch(base, f"n{index + 1}", port, seeds, own, packages)
            stack.callback(agent.stop)
            agents.append(agent)
        if wait_live:
            for agent in agents:
                wait_until_sync(agent.is_live, PATIENCE_S, f"{agent.name} answers /livez")
        yield agents


def _kill_tasks_below(base: Path) -> None:
    """Shims and ranks outlive their agents on purpose; those of this test have its folder in their command line, or
    in their environment.  Killed until none is found, since a rank may fork meanwhile."""

    def is_clean() -> bool:
        found = _processes_below(str(base).encode())
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until_sync(is_clean, what=f"no process of {base} is left")


def _processes_below(base: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and any(base in (folder / name).read_bytes() for name in ("cmdline", "environ")):
                found.append(int(folder.name))
        except OSError:
            continue  # it ended meanwhile, or is another account's
    return found


def _distinct_ports(count: int) -> list[int]:
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)


def _launch(
    base: Path, name: str, port: int, seeds: list[str], settings: dict[str, Any], packages: Path | None
) -> RunningAgent:
    home = base / name
    home.mkdir()
    values = {
        "name": name,
        "listen": f"127.0.0.1:{port}",
        "seeds": seeds,
        "data_dir": str(home / "data"),
        "cluster_key_file": str(base / "cluster.key"),
        "token_file": str(base / "token"),
        "job_user": OWN_ACCOUNT,
        **settings,
    }
    config_file = home / "agent.toml"
    # JSON's text, numbers, booleans and lists of text are TOML as well.
    config_file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    log_file = home / "agent.log"
    token = (base / "token").read_text()
    process = _spawn(config_file, log_file, packages)
    return RunningAgent(name, ("127.0.0.1", port), config_file, home / "data", log_file, token, process, packages)


def _spawn(config_file: Path, log_file: Path, packages: Path | None) -> "subprocess.Popen[bytes]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARM_")}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "swarm_agent", "--config", str(config_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
