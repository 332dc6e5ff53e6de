"""Start-up of the `swarm` command: every command pays it."""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.client.testing import TOKEN, FakeAgent, end, job_document, log, state

RUNS = 15


def run() -> list[tuple[str, float, str]]:
    """Median wall time of whole processes, with bytecode compiled as an installation has it."""
    with tempfile.TemporaryDirectory() as folder, FakeAgent() as agent:
        agent.answers["GET /v1/jobs"] = {"api_version": "v1", "items": [job_document()] * 20, "next_cursor": None}
        agent.stream = lambda _: iter([state("running", "1"), log("hello\n", "2"), end("3")])
        environment = _environment(Path(folder), agent)
        rows = [("bare interpreter", ["-c", "pass"], "python -c pass")]
        rows.append(("swarm version", [*_swarm(), "version"], "target 60 ms"))
        rows.append(("swarm ps, 20 jobs, agent that answers at once", [*_swarm(), "ps"], "target 200 ms"))
        rows.append(
            ("swarm run --no-sync to exit, agent that answers at once", [*_swarm(), "run", "--no-sync", "--", "x"], "")
        )
        first_byte = (
            "swarm ps to the first byte that it sends",
            _first_byte_ms(environment, folder),
            "ms target 60 ms",
        )
        return [
            first_byte,
            *((name, _median_ms(words, environment, folder), f"ms {note}".strip()) for name, words, note in rows),
        ]


def _swarm() -> list[str]:
    return ["-c", "import sys; from swarm_client.cli import main; sys.exit(main())"]


def _environment(folder: Path, agent: FakeAgent) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_", "PYTHON"))}
    homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "STATE", "CACHE")}
    cache = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    return mine | homes | cache | {"SWARM_HOSTS": agent.address, "SWARM_TOKEN": TOKEN}


def _first_byte_ms(environment: dict[str, str], folder: str) -> float:
    times_ms = []
    for number in range(RUNS + 1):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            given = environment | {"SWARM_HOSTS": f"127.0.0.1:{listening.getsockname()[1]}"}
            start_s = time.perf_counter()
            with subprocess.Popen([sys.executable, *_swarm(), "ps"], env=given, cwd=folder) as process:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1)
                    if number:  # the first run compiles
                        times_ms.append((time.perf_counter() - start_s) * 1000)
                    process.kill()
    return statistics.median(times_ms)


def _median_ms(words: list[str], environment: dict[str, str], folder: str) -> float:
    times_ms = []
    for number in range(RUNS + 1):
        start_s = time.perf_counter()
        subprocess.run([sys.executable, *words], env=environment, cwd=folder, check=True, capture_output=True)
        if number:  # the first run compiles
            times_ms.append((time.perf_counter() - start_s) * 1000)
    return statistics.median(times_ms)
