"""How long `swarm_elastic.checkpoint()` and `report()` keep a training script: they only put something into a queue.

Each case is a script of its own that computes between its calls, as training does, so that what the thread behind the
queue costs its caller is in the figures.  "Answers" is a scripted agent on a real socket, "real agent" a job of one,
which packs a file of a megabyte each time it comes to it; "away" has no socket; "silent" accepts and never answers
while the script calls without a pause, until the queue is full and names are given up.  After each call an empty loop
that takes about as long is measured too: its longest is what the machine does to any code.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import swarm_elastic
from tests.benchmarks.loopback import settled_agents

RUNS = 3
TARGET_MS = 5
FILE_BYTES = 1_000_000
NOTHING_TURNS = 150
SCRIPT = f"""
import json, os, sys, time
import swarm_elastic
count, step_s, folder = int(sys.argv[1]), float(sys.argv[2]), os.environ.get("SWARM_CHECKPOINT_DIR")
def report(number):
    return swarm_elastic.report(step=number, samples=64 * number, loss=0.5, total_steps=count)
def checkpoint(_):
    return swarm_elastic.checkpoint("last")
call = report if "report" in sys.argv else checkpoint
if folder:
    with open(os.path.join(folder, "last"), "wb") as file:
        file.write(os.urandom({FILE_BYTES}))
took, nothing, given_up = [], 0.0, 0
for number in range(count):
    end_s = time.perf_counter() + step_s
    while time.perf_counter() < end_s:
        pass
    begun_s = time.perf_counter()
    is_taken = call(number)
    took.append(time.perf_counter() - begun_s)
    given_up += not is_taken
    begun_s = time.perf_counter()
    for _ in range({NOTHING_TURNS}):
        pass
    nothing = max(nothing, time.perf_counter() - begun_s)
print(json.dumps([took, given_up, nothing, str(getattr(swarm_elastic.last_result, "error", None))]), flush=True)
os._exit(0)  # what waits still is not what is measured
"""
ANSWER = json.dumps({"v": 1, "type": "checkpoint", "ok": True, "committed": True, "epoch": 1}).encode() + b"\n"
TAKEN = json.dumps({"v": 1, "type": "report", "ok": True, "ignored": []}).encode() + b"\n"

Row = tuple[str, float, str]
Run = tuple[list[float], int, float]
"""Seconds of each call, how many names were given up, and the longest empty loop."""


def run() -> list[Row]:
    """(measure, value, unit): the median of all calls, the longest, and how many took longer than they may."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        path = Path(folder) / "s"
        with _listening(path, ANSWER):
            rows = _rows("agent answers", [_script(path, 2_000, 0.001) for _ in range(RUNS)])
        rows += _rows("agent away", [_script(Path(folder) / "none", 2_000, 0.001) for _ in range(RUNS)])
        with _listening(path, b""):
            silent = [_script(path, 100_000, 0.0) for _ in range(RUNS)]
            ignored = [_script(path, 100_000, 0.0, "report") for _ in range(RUNS)]
        with _listening(path, TAKEN):
            reported = [_script(path, 2_000, 0.001, "report") for _ in range(RUNS)]
    assert all(given_up > 10_000 for _, given_up, _ in silent), "the queue was never full"
    rows += _rows("agent silent, queue full", silent) + _rows("real agent, 1 MB each", _real())
    return [*rows, *_rows("agent answers", reported, "report"), *_rows("agent silent", ignored, "report")]


def _rows(case: str, runs: list[Run], call: str = "checkpoint") -> list[Row]:
    took = [each for run, _, _ in runs for each in run]
    return [
        (f"{call}(): {case}, median of {len(took)}", statistics.median(took) * 1e6, "us"),
        (f"{call}(): {case}, longest (<= {TARGET_MS})", max(took) * 1e3, "ms"),
        (f"{call}(): {case}, calls over {TARGET_MS} ms", sum(each > TARGET_MS / 1e3 for each in took), ""),
        (f"empty loop beside it: {case}, longest", max(nothing for _, _, nothing in runs) * 1e3, "ms"),
    ]


def _script(path: Path, count: int, step_s: float, call: str = "checkpoint") -> Run:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(swarm_elastic.__file__).parents[1]),
        "SWARM_TASK_SOCKET": str(path),
        "SWARM_TASK_TOKEN": "token",
    }
    command = [sys.executable, "-c", SCRIPT, str(count), str(step_s), call]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    took, given_up, nothing, _ = json.loads(done.stdout)
    return took, given_up, nothing


def _real() -> list[Run]:
    runs = []
    with settled_agents(1) as (agent,):
        for _ in range(RUNS):
            job = agent.ended(agent.submit(sys.executable, "-c", SCRIPT, "500", "0.01"))
            assert job["end_reason"] == "completed", job
            took, given_up, nothing, error = json.loads(agent.output(job))
            assert not error, error
            runs.append((took, given_up, nothing))
    return runs


@contextmanager
def _listening(path: Path, answer: bytes) -> Iterator[None]:
    """A socket where every line is answered so; never, if the answer is empty."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=_serve, args=(listening, answer))
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listening: socket.socket, answer: bytes) -> None:
    """One connection after another, as `swarm_elastic` makes them."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, connection.makefile("rwb") as stream:
            try:
                for _ in stream:
                    stream.write(answer)
                    stream.flush()
            except ConnectionError:
                continue
