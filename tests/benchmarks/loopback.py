"""What the benchmarks of a whole swarm share: agents as an installation has them, their processes, HTTP, the disk."""

import http.client
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.agent.testing import RunningAgent, start_agents, wait_until_sync

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CONVERGED_TIMEOUT_S = 60.0
SWARM = Path(sys.executable).with_name("swarm")


@contextmanager
def compiled_bytecode() -> Iterator[None]:
    """Let every process started in this block keep its bytecode, as installed packages do."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        try:
            with start_agents(1) as (agent,):  # compiles
                agent.ended(agent.submit("true"))
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def settled_agents(count: int, gpus: int = 2) -> Iterator[list[RunningAgent]]:
    """Agents that all see one another."""
    with start_agents(count, gpus) as agents:
        for agent in agents:
            wait_until_sync(lambda agent=agent: sees_all(agent, count), CONVERGED_TIMEOUT_S, f"{agent.name} sees all")
        yield agents


def sees_all(agent: RunningAgent, count: int) -> bool:
    """True when this agent is ready and has a fresh record of every member."""
    try:
        nodes = agent.get("/v1/nodes")["items"]
    except (OSError, KeyError):
        return False
    return sum(node["status"] == "alive" and (node["total_gpus"] or 0) > 0 for node in nodes) == count


class Client:
    """One kept connection to an agent, as a program that submits jobs has."""

    def __init__(self, agent: RunningAgent) -> None:
        self._connection = http.client.HTTPConnection(*agent.address, timeout=60)
        self._headers = {"Authorization": f"Bearer {agent.token}", "Content-Type": "application/json"}
        self._connection.connect()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Parsed JSON of an answer; fails on a problem."""
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, self._headers)
        response = self._connection.getresponse()
        document = json.load(response)
        assert response.status < 300, document
        return document

    def submit(self, *command: str, **spec: object) -> Any:
        """The document of a new job."""
        return self.call("POST", "/v1/jobs", {"spec": {"command": list(command), **spec}})

    def first_line(self, job_id: str) -> str:
        """Follow a job's output until its first line; the connection is of no use afterwards."""
        self._connection.request("GET", f"/v1/jobs/{job_id}/logs?follow=1", headers=self._headers)
        response = self._connection.getresponse()
        while line := response.readline():
            record = json.loads(line) if line.strip() else {}
            if record.get("type") == "log":
                return str(record["text"])
        raise AssertionError(f"{job_id} ended without a line")


def median_ms(call: Callable[[], object], runs: int) -> float:
    """Median wall time of a call; the first one is not counted."""
    times_ms = []
    for _ in range(runs + 1):
        started_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - started_s) * 1_000)
    return statistics.median(times_ms[1:])


def fsync_median_ms(runs: int = 50) -> float:
    """What the disk below the agents' data takes to make 4 KiB durable."""
    with tempfile.TemporaryFile() as file:

        def write() -> None:
            file.write(bytes(4_096))
            file.flush()
            os.fsync(file.fileno())

        return median_ms(write, runs)


def resident_bytes(pid: int) -> int:
    """VmRSS, as top and ps show it."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1_024


def proportional_bytes(pid: int) -> int:
    """Pss: pages shared with other processes are counted in parts."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1_024


def cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended and been waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def children(pid: int, word: str) -> list[int]:
    """Processes below `pid` with a word in their command line."""
    found, parents = [], {pid}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:
            continue  # it ended meanwhile
        if parent in parents:
            parents.add(int(folder.name))
            if word in command:
                found.append(int(folder.name))
    return found


def metric(agent: RunningAgent, name: str, **labels: str) -> float:
    """One sample of /metrics, whatever the order of its labels."""
    connection = http.client.HTTPConnection(*agent.address, timeout=30)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {agent.token}"})
    for line in connection.getresponse().read().decode().splitlines():
        if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items()):
            connection.close()
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no sample {name} {labels}")
