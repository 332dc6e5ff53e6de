"""A swarm of real agents on this machine: started, stopped and removed together, to try things and to break them.

Everything lies in one folder, `$XDG_STATE_HOME/swarm/local/NAME`, and a short-named one for sockets.  A process is
only ever signalled while its id and its start time are those that were recorded, so that a reused process id is safe.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_client.address import Address, parse_address
from swarm_client.agents import Agents
from swarm_client.config import memory_file_of, read_toml, state_home, user_file
from swarm_client.failure import CONFLICT, NOT_FOUND, SWARM_FAILED, Failure
from swarm_client.http import Waiter
from swarm_client.toml_edit import remove_key, remove_section, save, set_key

AGENTS_LIMIT = 50
CONVERGE_LIMIT_S = 60.0
DEFAULT_NAME = "local"
STOP_LIMIT_S = 15.0
CANCEL_LIMIT_S = 20.0
LEFTOVER_LIMIT_S = 5.0
POLL_S = 0.05  # of processes and agents that start or stop; nothing on a job's path waits for it
FIRST_PORT, LAST_PORT = 10_000, 19_999  # below the agents' range for rendezvous ports and the kernel's own
RENDEZVOUS_FIRST, RENDEZVOUS_LAST = 20_000, 32_000
LOG_LINES_SHOWN = 8


class LocalSwarm:
    """The local swarm called `name`; `state` is what was written down when it was started."""

    def __init__(self, name: str, environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
        self.name = name
        self.folder = Path(state_home(environment)) / "swarm" / "local" / name
        self._environment, self._tell = environment, tell
        self.state: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Failure(
                f"{self.folder / 'state.json'} cannot be read: {error}", "remove the folder by hand"
            ) from error
        return document if isinstance(document, dict) else {}

    def _write(self) -> None:
        draft = self.folder / "state.json.new"
        draft.write_text(json.dumps(self.state, indent=2), encoding="utf-8")
        draft.replace(self.folder / "state.json")

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """What was recorded of each agent."""
        nodes = self.state.get("nodes", [])
        assert isinstance(nodes, list)
        return nodes

    def node(self, name: str) -> dict[str, Any]:
        """One agent by name."""
        self.require_up()
        for node in self.nodes:
            if node["name"] == name:
                return node
        known = ", ".join(node["name"] for node in self.nodes)
        raise Failure(f"the local swarm has no node {name!r}", f"its nodes are {known}", NOT_FOUND)

    def command(self, words: str) -> str:
        """How to say something about this swarm: `swarm local WORDS`, with its name where it has one of its own."""
        return f"swarm local {words}" + (f" --name {self.name}" if self.name != DEFAULT_NAME else "")

    def require_up(self) -> None:
        """Complain when there is no such swarm."""
        if not self.state:
            others = sorted(file.parent.name for file in self.folder.parent.glob("*/state.json"))
            which = "no local swarm" + (f" {self.name!r}" if self.name != DEFAULT_NAME or others else "")
            remedy = f"start one: {self.command('up --agents 3 --gpus 2')}"
            if others:
                remedy += f", or say which with --name: {', '.join(others)}"
            raise Failure(f"{which} is up", remedy, NOT_FOUND)

    def up(self, agents: int, gpus: int) -> float:
        """Start and wait until each agent sees all others alive; return how long that took in seconds.

        When anything fails, all that was started is ended and removed again.
        """
        self._claim()
        try:
            started_s = time.monotonic()
            self._prepare(agents, gpus)
            for node in self.nodes:
                self._start(node)
            self._await_convergence(self.nodes)
            self._make_current()
        except BaseException:
            self._end_processes()
            self._remove_files()
            raise
        return time.monotonic() - started_s

    def _claim(self) -> None:
        if self.state:
            running = sum(is_running(node) for node in self.nodes)
            raise Failure(
                f"a local swarm is already up ({running} of {len(self.nodes)} agents run)",
                f"use it, or remove it first: {self.command('down')}",
                CONFLICT,
            )
        try:
            self.folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            raise Failure(
                f"{self.folder} exists: another `swarm local up` is under way, or was broken off",
                f"wait for it, or remove the folder: {self.command('down')}",
                CONFLICT,
            ) from None

    def _prepare(self, agents: int, gpus: int) -> None:
        """Write keys and configurations; nothing runs yet."""
        ports = free_ports(agents)
        self.state = {
            "name": self.name,
            "gpus": gpus,
            "nodes": [
                {"name": f"node{index + 1}", "address": f"127.0.0.1:{port}", "pid": 0, "start_ticks": 0}
                for index, port in enumerate(ports)
            ],
        }
        for file in ("cluster.key", "token"):
            _write_secret(self.folder / file, secrets.token_hex(32))
        for index, node in enumerate(self.nodes):
            self._write_config(index, node, gpus)
        self._write()

    def _write_config(self, index: int, node: Mapping[str, Any], gpus: int) -> None:
        name = node["name"]
        data = self.folder / name
        data.mkdir(mode=0o700)
        width = (RENDEZVOUS_LAST - RENDEZVOUS_FIRST) // len(self.nodes)
        first = RENDEZVOUS_FIRST + index * width
        values: dict[str, Any] = {
            "name": name,
            "listen": node["address"],
            "seeds": [other["address"] for other in self.nodes if other is not node][:8],
            "cluster_label": "local",
            "cluster_key_file": str(self.folder / "cluster.key"),
            "token_file": str(self.folder / "token"),
            "data_dir": str(data),
            "simulated_gpus": gpus,
            "rendezvous_ports": f"{first}-{first + width - 1}",
            "job_user": "root" if os.geteuid() == 0 else "",  # jobs are whoever starts the swarm
        }
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        (self.folder / f"{name}.toml").write_text(text, encoding="utf-8")

    def _start(self, node: dict[str, Any]) -> None:
        """Start one agent's process and record it before anything else happens."""
        name = node["name"]
        command = [sys.executable, "-m", "swarm_agent", "--config", str(self.folder / f"{name}.toml")]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=agent_environment(self._environment),
                start_new_session=True,
            )
        node["pid"], node["start_ticks"] = process.pid, start_ticks(process.pid)
        self._write()
        # The agent outlives this command; without this the interpreter would warn about a child left behind.
        process.returncode = 0

    def start(self, name: str) -> None:
        """Start an agent that was stopped, and wait until it has joined again."""
        node = self.node(name)
        if is_running(node):
            raise Failure(
                f"{name} runs already (pid {node['pid']})", f"stop it first: {self.command(f'stop {name}')}", CONFLICT
            )
        self._start(node)
        self._await_convergence([other for other in self.nodes if is_running(other)])

    def stop(self, name: str, *, kill: bool) -> None:
        """End one agent by SIGTERM, or SIGKILL; its jobs' processes go on, as they would on a server."""
        node = self.node(name)
        if not is_running(node):
            raise Failure(f"{name} does not run", f"start it: {self.command(f'start {name}')}", CONFLICT)
        send_signal(node, signal.SIGKILL if kill else signal.SIGTERM)
        if not wait_until(lambda: not is_running(node), STOP_LIMIT_S):
            raise Failure(
                f"{name} (pid {node['pid']}) did not end within {STOP_LIMIT_S:.0f} s of SIGTERM",
                f"end it by force: {self.command(f'stop {name} --kill')}",
                SWARM_FAILED,
            )

    def down(self) -> None:
        """Cancel jobs, end the agents, remove files and context."""
        if not self.state and not self.folder.exists():
            self.require_up()
        self._cancel_jobs()
        self._end_processes()
        self._restore_context()
        self._remove_files()

    def agents(self, nodes: Sequence[Mapping[str, Any]] | None = None) -> Agents:
        """A client of this swarm."""
        token = (self.folder / "token").read_text(encoding="utf-8").strip()
        addresses = [_address(node) for node in (self.nodes if nodes is None else nodes)]
        return Agents(addresses, lambda: token, Waiter(), "")

    def items(self) -> list[dict[str, Any]]:
        """Name, address, pid and state of each agent."""
        return [
            {
                "name": node["name"],
                "address": node["address"],
                "pid": node["pid"] if is_running(node) else None,
                "state": "running" if is_running(node) else "stopped",
                "simulated_gpus": self.state["gpus"],
                "log": str(self.folder / f"{node['name']}.log"),
            }
            for node in self.nodes
        ]

    def _await_convergence(self, nodes: Sequence[dict[str, Any]]) -> None:
        """Wait until each of the nodes sees each of them alive, with its resources known."""
        expected = {node["name"] for node in nodes}
        clients = {node["name"]: self.agents([node]) for node in nodes}

        def is_converged() -> bool:
            for node in nodes:
                if not is_running(node):
                    raise Failure(f"{node['name']} ended at its start: {self._last_log(node)}", "", SWARM_FAILED)
                if node["name"] in clients and expected <= _seen_alive(clients[node["name"]]):
                    clients.pop(node["name"]).close()
            return not clients

        try:
            is_timely = wait_until(is_converged, CONVERGE_LIMIT_S)
        finally:
            for client in clients.values():
                client.close()
        if not is_timely:
            missing = ", ".join(clients)
            log = self._last_log(next(node for node in nodes if node["name"] in clients))
            raise Failure(
                f"{missing} did not join within {CONVERGE_LIMIT_S:.0f} s: {log}",
                "is the machine overloaded?",
                SWARM_FAILED,
            )

    def _last_log(self, node: Mapping[str, Any]) -> str:
        try:
            lines = (self.folder / f"{node['name']}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return " / ".join(lines[-LOG_LINES_SHOWN:]) or "(its log is empty)"

    def _make_current(self) -> None:
        file = Path(user_file(self._environment))
        document, text = read_toml(str(file))
        self.state["previous_context"] = document.get("context")
        self._write()
        section = f"contexts.{self.name}"
        text = set_key(text, section, "hosts", [node["address"] for node in self.nodes])
        text = set_key(text, section, "token_file", str(self.folder / "token"))
        save(file, set_key(text, "", "context", self.name))

    def _restore_context(self) -> None:
        file = Path(user_file(self._environment))
        document, text = read_toml(str(file))
        text = remove_section(text, f"contexts.{self.name}")
        previous = self.state.get("previous_context")
        if document.get("context") == self.name:
            is_left = isinstance(previous, str) and previous in document.get("contexts", {}) and previous != self.name
            text = set_key(text, "", "context", str(previous)) if is_left else remove_key(text, "", "context")
        if text or file.exists():
            save(file, text)
        _remove_empty(file.parent)

    def _cancel_jobs(self) -> None:
        nodes = [node for node in self.nodes if is_running(node)]
        if not nodes:
            return
        agents = self.agents(nodes)

        def is_quiet() -> bool:
            jobs = agents.call("cannot list jobs", "GET", "/v1/jobs", query={"limit": "1000"})["items"]
            for job in jobs:
                if job["state"] != "stopping":
                    agents.call("cannot cancel", "POST", f"/v1/jobs/{job['id']}/cancel", body={"grace_seconds": 1})
            return not jobs

        try:
            if not wait_until(is_quiet, CANCEL_LIMIT_S):
                self._tell(f"jobs did not end within {CANCEL_LIMIT_S:.0f} s and are ended by force")
        except Failure as failure:
            self._tell(f"jobs are ended by force: {failure.problem}")
        finally:
            agents.close()

    def _end_processes(self) -> None:
        """SIGTERM, then SIGKILL to the agents; then whatever their shims still hold."""
        for node in self.nodes:
            if is_running(node):
                send_signal(node, signal.SIGTERM)
        if not wait_until(lambda: not any(is_running(node) for node in self.nodes), STOP_LIMIT_S):
            for node in self.nodes:
                if is_running(node):
                    send_signal(node, signal.SIGKILL)
            wait_until(lambda: not any(is_running(node) for node in self.nodes), LEFTOVER_LIMIT_S)
        self._end_leftovers()

    def _end_leftovers(self) -> None:
        """Tasks whose agent was killed: their shims name this swarm's folders on their command lines."""
        marks = [str(self.folder).encode() + b"/"]

        def kill() -> bool:
            left = list(processes_of(marks))
            for process in left:
                send_signal(process, signal.SIGKILL)
            return not left

        if not wait_until(kill, LEFTOVER_LIMIT_S):
            self._tell("some processes of jobs could not be ended")

    def _remove_files(self) -> None:
        addresses = [_address(node) for node in self.nodes]
        if addresses:
            Path(memory_file_of(self._environment, self.name, addresses)).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.state = {}
        base = Path(state_home(self._environment)) / "swarm"
        for folder in (base / "local", base / "members", base):
            _remove_empty(folder)


def _seen_alive(agents: Agents) -> set[str]:
    """Names that an agent sees alive with a record; none while it does not answer."""
    try:
        nodes = agents.call("cannot list nodes", "GET", "/v1/nodes")["items"]
    except Failure:
        return set()  # still starting; the caller's deadline bounds this
    return {node["name"] for node in nodes if node["status"] == "alive" and node["total_gpus"] is not None}


def _address(node: Mapping[str, Any]) -> Address:
    return parse_address(str(node["address"]), 0)


def _write_secret(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text + "\n")


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # not empty, or not there


def agent_environment(mine: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without the variables that would configure the agents or hold secrets."""
    return {name: value for name, value in mine.items() if not name.startswith("SWARM_")}


def free_ports(count: int) -> list[int]:
    """Ports on loopback that are free for TCP and UDP; held open together until all are found."""
    found: list[int] = []
    held: list[socket.socket] = []
    rng = random.Random(os.urandom(8))
    try:
        for port in rng.sample(range(FIRST_PORT, LAST_PORT + 1), 2_000):
            if len(found) == count:
                break
            sockets = _bind_both(port)
            if sockets:
                held += sockets
                found.append(port)
    finally:
        for each in held:
            each.close()
    if len(found) < count:
        raise Failure(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}", "end other programs", SWARM_FAILED)
    return sorted(found)


def _bind_both(port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        sock = socket.socket(socket.AF_INET, kind)
        sockets.append(sock)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            for each in sockets:
                each.close()
            return []
    return sockets


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Ask again and again; True when the condition came true within `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end_s:
            return False
        time.sleep(POLL_S)
    return True


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the command's name; empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """When the process was started, in clock ticks since boot; 0 when it is gone or a zombie."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])


def is_running(process: Mapping[str, Any]) -> bool:
    """True while the recorded process, and not another with its id, runs."""
    return bool(process["pid"]) and start_ticks(process["pid"]) == process["start_ticks"] != 0


def send_signal(process: Mapping[str, Any], number: signal.Signals) -> None:
    """Signal the recorded process; a process that is gone is left alone."""
    if not is_running(process):
        return
    try:
        os.kill(process["pid"], number)
    except ProcessLookupError:
        return


def processes_of(marks: Sequence[bytes]) -> Iterator[dict[str, int]]:
    """Processes with one of the marks on their command line, and all their descendants; never this process."""
    parents: dict[int, int] = {}
    roots: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        fields = _stat(int(entry.name))
        if not fields or fields[0] in "ZX":
            continue
        parents[int(entry.name)] = int(fields[1])
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if any(word.startswith(mark) for mark in marks for word in words.split(b"\0")) and _is_shim(words):
            roots.add(int(entry.name))
    for pid in parents:
        ancestor, seen = pid, 0
        while ancestor and ancestor not in roots and seen < len(parents):
            ancestor, seen = parents.get(ancestor, 0), seen + 1
        if ancestor in roots:
            yield {"pid": pid, "start_ticks": start_ticks(pid)}


def _is_shim(command_line: bytes) -> bool:
    """A person's `tail -f` of a log is not ours to end; Python processes with these folders as arguments are."""
    return b"python" in command_line.split(b"\0")[0].rpartition(b"/")[2]
