"""A swarm of real agents, each on a host of its own, and the ways to hurt it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_agent.security import generate_key
from swarmsched.errors import AgentUnreachable
from tests.agent.testing import PATIENCE_S, RunningAgent, wait_until_sync
from tests.chaos.history import Beat
from tests.chaos.view import BEAT, BEATS, TICKET_KEYS, View, beat_command, up_file
from tests.testbed.netns import Cables, Host, Network

PORT = 7433
SEEDS = 2
WATCH_PERIOD_S = 0.3
PREFERENCE = "-10"  # nice value of a session among sessions, sched(7)
HOSTS_FILE = "hosts"
DEBIANS_HOSTS = "127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n"
NAMED = 'mount --bind "$1" /etc/hosts; hostname "$0"; shift; exec "$@"'
"""Has a program see a file of hosts and a name of its own."""
TOLD = ("state", "attempt", "epoch", "version", "shepherd", "holders", "source", "staleness_seconds", "reason")
SWARM = Path(sys.executable).with_name("swarm")


@dataclass
class Machine:
    """A host with its disk and, while it is up, its agent."""

    host: Host
    agent: RunningAgent

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def is_up(self) -> bool:
        """True while the agent should answer; a file beside its configuration tells it to the checker too."""
        return up_file(self._base, self.name).exists()

    @is_up.setter
    def is_up(self, is_up: bool) -> None:
        if is_up:
            up_file(self._base, self.name).touch()
        else:
            up_file(self._base, self.name).unlink(missing_ok=True)

    @property
    def _base(self) -> Path:
        return self.agent.config_file.parent.parent

    def start_agent(self) -> None:
        """Start the agent again with the same name and disk."""
        self.agent.process = spawn(self.host, self.agent.config_file, self.agent.log_file)
        wait_until_sync(self.agent.is_live, PATIENCE_S, f"{self.name} answers /livez")
        self.is_up = True

    def kill_agent(self) -> float:
        """SIGKILL for the agent alone; shims and ranks stay.  Returns the time of the kill."""
        self.is_up = False
        self.agent.kill()
        return time.monotonic()

    def stop_agent(self) -> None:
        """SIGTERM, as for an upgrade."""
        self.is_up = False
        self.agent.stop()

    def cut_power(self) -> float:
        """Agent, shims and ranks are gone at once, and the network is told nothing.  Returns the time."""
        self.is_up = False
        self.host.cut_power()
        self.agent.process.wait()
        return time.monotonic()

    def power_on(self) -> None:
        """The machine boots: same name, same disk."""
        self.host.plug_in()
        self.start_agent()

    @contextmanager
    def frozen_agent(self) -> Iterator[None]:
        """The agent stands still (SIGSTOP) for the time of a block."""
        self.is_up = False
        os.kill(self.agent.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.agent.process.pid, signal.SIGCONT)
            self.is_up = True

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Agent, shims and ranks stand still for the time of a block."""
        self.is_up = False
        self.host.freeze()
        try:
            yield
        finally:
            self.host.signal_all(signal.SIGCONT)
            self.is_up = True

    def rank_pids(self) -> set[int]:
        """Processes of ranks on this host, frozen ones too."""
        return {pid for pid in self.host.pids() if is_rank(pid)}


def is_rank(pid: int) -> bool:
    """True for a process that runs beat.py itself."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(words) > 3 and words[3] == str(BEAT).encode()


@dataclass
class Swarm(View):
    """Machines by name, n1 first, and the network between them."""

    network: Network
    machines: dict[str, Machine]

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines.values())

    def hosts(self, *names: str) -> list[Host]:
        """Hosts of these machines."""
        return [self[name].host for name in names]

    def others(self, *names: str) -> list[Machine]:
        """All machines but these."""
        return [machine for machine in self if machine.name not in names]

    def up(self) -> list[Machine]:
        """Machines whose agent should answer."""
        return [machine for machine in self if machine.is_up]

    def isolate(self, *names: str) -> None:
        """Cut these machines off from the others, silently and both ways; among one another they talk."""
        self.network.cut(self.hosts(*names), [machine.host for machine in self.others(*names)])

    def submit(self, at: str, *, limit_s: float = 0, exit_code: int = 0, **spec: object) -> str:
        """Submit a job of beating ranks and return its id; without `limit_s` it runs until `end`."""
        return self.submit_with(self.ticket(at), at, limit_s=limit_s, exit_code=exit_code, **spec)

    def ticket(self, at: str) -> dict[str, Any]:
        """A ticket of that agent, as a submission carries it."""
        status, document = self[at].agent.call("POST", "/v1/tickets", {})
        assert status == 200, document
        return {key: document[key] for key in TICKET_KEYS if key in document}

    def ticket_held_by(self, at: str, *names: str) -> dict[str, Any]:
        """A ticket of that agent with these machines among the holders."""
        for _ in range(100):
            ticket = self.ticket(at)
            if set(names) <= set(ticket["holders"]):
                return ticket
        raise AssertionError(f"{at} never names {' and '.join(names)} as holders")

    def submit_with(
        self, ticket: dict[str, Any], at: str, *, limit_s: float = 0, exit_code: int = 0, **spec: object
    ) -> str:
        """Use a ticket."""
        command = beat_command(self.beats_dir, limit_s, exit_code)
        body = {"ticket": ticket, "spec": {"command": command, "env": {"CHAOS_SWARM": str(SWARM)}, **spec}}
        status, job = self[at].agent.call("POST", "/v1/jobs", body, timeout_s=30)
        assert status == 201, job
        self.note(job["id"])
        return str(job["id"])

    def tell(self, job: str, what: str, content: str) -> None:
        """Let the job's ranks find a file with that content."""
        draft = self.beats_dir / f"{job}.draft"
        draft.write_text(content)
        draft.rename(self.beats_dir / f"{job}.{what}")

    def end(self, job: str, exit_code: int = 0) -> None:
        """Let the job's ranks end with this code."""
        self.tell(job, "end", str(exit_code))

    def wait_for_beats(self, job: str, ranks: int, attempt: int = 1, timeout_s: float = 15.0) -> list[Beat]:
        """Once every rank of that attempt has written twice: the attempt's beats."""

        def is_running() -> bool:
            written = [beat.rank for beat in self.beats(job) if beat.attempt == attempt]
            return len(set(written)) == ranks and all(written.count(rank) > 1 for rank in set(written))

        wait_until_sync(is_running, timeout_s, f"{ranks} ranks of attempt {attempt} of {job} run")
        return [beat for beat in self.beats(job) if beat.attempt == attempt]

    def statuses(self, at: str) -> dict[str, str]:
        """Members as one agent sees them."""
        return {each["name"]: each["status"] for each in self[at].agent.get("/v1/members")["items"]}

    def watch(self, duration_s: float, *, may_fail: Collection[str] = ()) -> None:
        """For so long no agent that is up may see others failed than these: how long is what is tested."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            for machine in self.up():
                failed = {name for name, status in self.statuses(machine.name).items() if status == "failed"}
                assert failed <= set(may_fail), f"{machine.name} sees {failed}"
            threading.Event().wait(WATCH_PERIOD_S)

    def converge(self, timeout_s: float = 30.0) -> None:
        """Wait until all agents that are up see one another alive and know one another's GPUs."""
        names = [machine.name for machine in self.up()]

        def is_whole(machine: Machine) -> bool:
            statuses = self.statuses(machine.name)
            nodes = {node["name"]: node for node in machine.agent.get("/v1/nodes")["items"]}
            return all(statuses.get(name) == "alive" for name in names) and all(
                nodes.get(name, {}).get("total_gpus") is not None for name in names
            )

        for machine in self.up():
            wait_until_sync(lambda machine=machine: is_whole(machine), timeout_s, f"{machine.name} sees all")

    def story(self) -> str:
        """What agents logged, jobs went through and the checker heard, for a failed test."""
        parts = []
        for machine in self:
            log = machine.agent.log_file
            parts.append(f"--- {machine.name} {'up' if machine.is_up else 'down'}: {log}")
            parts += log.read_text(errors="replace").splitlines()[-40:]
        for job in self.submitted:
            parts += [f"--- {job}", *summary(self.beats(job)), *(self._told(job, machine) for machine in self.up())]
        for path in sorted(self.folder.glob("checker-*.jsonl")):
            parts += [f"--- {path}", *path.read_text().splitlines()[-20:]]
        return "\n".join(parts)

    def _told(self, job: str, machine: Machine) -> str:
        """What one agent says of a job, on one line."""
        try:
            document = machine.agent.get(f"/v1/jobs/{job}?fields={','.join(TOLD)}")
        except (AgentUnreachable, AssertionError) as error:
            return f"{machine.name} says: {error}"
        return f"{machine.name} says: {' '.join(f'{key}={document.get(key)!r}' for key in TOLD)}"


def nodes_of(document: dict[str, Any]) -> list[str]:
    """Names of the machines that run a job, in rank order."""
    return [each["node"] for each in document["nodes"]]


def holders_of(document: dict[str, Any]) -> list[str]:
    """Names of the machines that keep a job's record."""
    return list(document["holders"])


def summary(beats: Sequence[Beat]) -> list[str]:
    """One line for each rank of each attempt."""
    lives: dict[tuple[int, int, int], list[Beat]] = {}
    for beat in beats:
        lives.setdefault((beat.attempt, beat.rank, beat.pid), []).append(beat)
    return [
        f"attempt {attempt} rank {rank} pid {pid} on {life[0].node}: {life[0].at_s:.2f} to {life[-1].at_s:.2f}, "
        f"{len(life)} beats, last word {life[-1].word!r}"
        for (attempt, rank, pid), life in lives.items()
    ]


def spawn(host: Host, config_file: Path, log_file: Path) -> "subprocess.Popen[bytes]":
    """Start an agent on a host."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARM_")}
    words = [sys.executable, "-m", "swarm_agent", "--config", str(config_file)]
    if (hosts := config_file.with_name(HOSTS_FILE)).exists():
        words = ["unshare", "--mount", "--uts", "sh", "-ec", NAMED, config_file.parent.name, str(hosts), *words]
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            host.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    prefer(process.pid)
    return process


def prefer(pid: int) -> None:
    """Let a session go before others: hosts share this machine's cores with whatever else runs, real ones would not."""
    with contextlib.suppress(OSError):  # a kernel that does not group processes by session
        Path(f"/proc/{pid}/autogroup").write_text(PREFERENCE)


@contextmanager
def start_machines(
    base: Path,
    count: int,
    *,
    gpus: int = 1,
    settings: dict[str, object] | None = None,
    disks: dict[str, Path],
    has_debians_hosts: bool = False,
    cables: Cables | None = None,
) -> Iterator[Swarm]:
    """Machines n1, n2... with one key and token, joined through the first two.

    `settings` are further keys of every agent's configuration, `disks` folders to keep a machine's data in.  With
    `has_debians_hosts` each calls itself 127.0.1.1, as Debian and Ubuntu install a host.
    """
    (base / BEATS).mkdir()
    for secret in ("cluster.key", "token"):
        (base / secret).touch(0o600)
        (base / secret).write_text(generate_key())
    with ExitStack() as stack:
        network = stack.enter_context(Network.build(count, cables))
        seeds = [f"{host.address}:{PORT}" for host in network.hosts[:SEEDS]]
        machines = {}
        for index, host in enumerate(network.hosts):
            name = f"n{index + 1}"
            values = {"seeds": seeds, "simulated_gpus": gpus, **(settings or {})}
            hosts = DEBIANS_HOSTS.format(name=name) if has_debians_hosts else ""
            machine = prepare(base, name, host, disks.get(name, base / name / "data"), values, hosts)
            stack.callback(machine.agent.process.wait)
            stack.callback(host.signal_all, signal.SIGKILL)
            machines[name] = machine
        for machine in machines.values():
            wait_until_sync(machine.agent.is_live, PATIENCE_S, f"{machine.name} answers /livez")
        contacts = {name: machine.agent for name, machine in machines.items()}
        yield Swarm(base, contacts, network, machines)


def prepare(base: Path, name: str, host: Host, data_dir: Path, settings: dict[str, object], hosts: str = "") -> Machine:
    """Write the configuration of a machine, and a file of hosts if it has its own, and start its agent."""
    home = base / name
    home.mkdir()
    if hosts:
        (home / HOSTS_FILE).write_text(hosts)
    values = {
        "name": name,
        "listen": f"{host.address}:{PORT}",
        "data_dir": str(data_dir),
        "cluster_key_file": str(base / "cluster.key"),
        "token_file": str(base / "token"),
        "job_user": "root",  # only root has namespaces, and its own jobs run there
        **settings,
    }
    config_file, log_file = home / "agent.toml", home / "agent.log"
    # JSON's text, numbers, booleans and lists of text are TOML as well.
    config_file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    process = spawn(host, config_file, log_file)
    token = (base / "token").read_text()
    agent = RunningAgent(name, (host.address, PORT), config_file, data_dir, log_file, token, process)
    machine = Machine(host, agent)
    machine.is_up = True
    return machine
