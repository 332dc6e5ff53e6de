"""What a person and a program wait for: a submission, a first line, a list, two hundred short jobs; on real agents."""

import os
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

from tests.agent.testing import RunningAgent
from tests.benchmarks.loopback import (
    SWARM,
    Client,
    compiled_bytecode,
    fsync_median_ms,
    median_ms,
    settled_agents,
)

RUNS = 11
ROUNDS = 3
JOBS = 200
SUBMITTERS = 4
GPUS_PER_AGENT = 4
AGENTS = 4  # 16 slots
WRK_S = 3
DEADLINE_S = 120.0

Row = tuple[str, float, str]


def run() -> list[Row]:
    """(measure, median of several runs, unit)."""
    with compiled_bytecode(), settled_agents(AGENTS, GPUS_PER_AGENT) as agents:
        return [
            ("swarm: fsync of 4 KiB on this disk", fsync_median_ms(), "ms"),
            ("swarm: submission accepted at the API (<= 30)", submit_ms(agents[0]), "ms"),
            ("swarm: API submission to first line (<= 100)", first_line_ms(agents[0]), "ms"),
            *command_rows(agents[0]),
            *_throughput_rows(agents),
            *_http_rows(agents[0]),
        ]


def submit_ms(agent: RunningAgent) -> float:
    """From the request to the answer that the job is durable."""
    client = Client(agent)

    def submit() -> None:
        started_s = time.perf_counter()
        job = client.submit("true")
        times_ms.append((time.perf_counter() - started_s) * 1_000)
        client.call("GET", f"/v1/jobs/{job['id']}/wait?for=done")

    times_ms: list[float] = []
    for _ in range(RUNS + 1):
        submit()
    client.close()
    return statistics.median(times_ms[1:])


def first_line_ms(agent: RunningAgent) -> float:
    """From the request to the first line of output in the submitter's hands."""
    times_ms = []
    for _ in range(RUNS + 1):
        submitter, reader = Client(agent), Client(agent)
        started_s = time.perf_counter()
        job = submitter.submit("echo", "hello")
        assert reader.first_line(job["id"]) == "hello\n"
        times_ms.append((time.perf_counter() - started_s) * 1_000)
        submitter.call("GET", f"/v1/jobs/{job['id']}/wait?for=done")
        reader.close()
        submitter.close()
    return statistics.median(times_ms[1:])


def command_rows(agent: RunningAgent) -> list[Row]:
    """The command in a shell, the interpreter's start included."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("print('hello')\n")
        environment = _environment(Path(home), agent)

        def line(*words: str) -> float:
            return statistics.median([_first_line_of(words, environment, folder) for _ in range(RUNS + 1)][1:])

        def listed() -> None:
            subprocess.run([SWARM, "ps"], env=environment, cwd=folder, check=True, capture_output=True)

        return [
            ("swarm: `swarm run` typed to first line (<= 400)", line("run", "--", "echo", "hello"), "ms"),
            ("swarm: `swarm run --no-sync` to first line", line("run", "--no-sync", "--", "echo", "hello"), "ms"),
            ("swarm: `swarm ps` (<= 200)", median_ms(listed, RUNS), "ms"),
        ]


def _environment(home: Path, agent: RunningAgent) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_", "XDG_"))}
    homes = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "STATE", "CACHE")}
    return mine | homes | {"SWARM_HOSTS": f"127.0.0.1:{agent.address[1]}", "SWARM_TOKEN": agent.token}


def _first_line_of(words: tuple[str, ...], environment: dict[str, str], folder: str) -> float:
    started_s = time.perf_counter()
    with subprocess.Popen(
        [SWARM, *words], env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        elapsed_ms = (time.perf_counter() - started_s) * 1_000
        _, complaints = process.communicate()
    assert line == b"hello\n", complaints
    return elapsed_ms


def _throughput_rows(agents: list[RunningAgent]) -> list[Row]:
    spread = [jobs_per_s(agents) for _ in range(ROUNDS)]
    single = [jobs_per_s(agents[:1]) for _ in range(ROUNDS)]
    return [
        (f"swarm: {JOBS} jobs on 16 slots, submitted at {AGENTS} agents (>= 30)", statistics.median(spread), "jobs/s"),
        (f"swarm: {JOBS} jobs on 16 slots, submitted at one agent (>= 30)", statistics.median(single), "jobs/s"),
    ]


def jobs_per_s(entries: list[RunningAgent]) -> float:
    """Jobs that ended a second, from the first submission to the last end; every one must have completed."""
    started_s = time.time()
    submitters = [_Submitter(entries[number % len(entries)]) for number in range(SUBMITTERS)]
    for submitter in submitters:
        submitter.start()
    for submitter in submitters:
        submitter.join(DEADLINE_S)
    job_ids = [job_id for submitter in submitters for job_id in submitter.job_ids]
    assert len(job_ids) == JOBS, f"{len(job_ids)} of {JOBS} jobs were accepted"
    client = Client(entries[0])
    documents = [_ended(client, job_id) for job_id in job_ids]
    client.close()
    reasons = {document["end_reason"] for document in documents}
    assert reasons == {"completed"}, reasons
    ended_s = max(datetime.fromisoformat(str(document["ended_at"])).timestamp() for document in documents)
    return JOBS / (ended_s - started_s)


def _ended(client: Client, job_id: str) -> dict[str, object]:
    answer = client.call("GET", f"/v1/jobs/{job_id}/wait?for=done&timeout={DEADLINE_S:.0f}")
    assert answer["met"], answer
    return dict(answer["job"])


class _Submitter(threading.Thread):
    """Submits its part of the jobs one after another over one connection."""

    def __init__(self, agent: RunningAgent) -> None:
        super().__init__(daemon=True)
        self._client = Client(agent)
        self.job_ids: list[str] = []

    def run(self) -> None:
        for _ in range(JOBS // SUBMITTERS):
            self.job_ids.append(self._client.submit("true", gpus_per_rank=1)["id"])
        self._client.close()


def _http_rows(agent: RunningAgent) -> list[Row]:
    """One agent asked by wrk over eight connections; see also bench_http, which needs no wrk."""
    wrk = shutil.which("wrk")
    if wrk is None:
        print("swarm: /v1/nodes is not measured here: wrk is not installed (Debian package wrk)")
        return []
    words = [wrk, "-t1", "-c8", f"-d{WRK_S}s", "-H", f"Authorization: Bearer {agent.token}", f"{agent.url}/v1/nodes"]
    rates = []
    for _ in range(ROUNDS):
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        assert "Non-2xx" not in said, said
        found = re.search(r"Requests/sec:\s+([\d.]+)", said)
        assert found is not None, said
        rates.append(float(found[1]))
    return [("swarm: /v1/nodes of a swarm of 4, real agent, wrk (>= 1000)", statistics.median(rates), "1/s")]
