"""A training script in a process of its own, and a scripted agent for it to talk to."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

import swarm_elastic

ROOT = Path(__file__).resolve().parents[2]
TRAIN, INTEGRATIONS = (ROOT / venv / "bin" / "python" for venv in (".venv-train", ".venv-integrations"))
TRAIN = Path(os.environ.get("TRAIN_PYTHON", TRAIN))  # another interpreter with torch, such as one with CUDA
DEVICE = os.environ.get("TRAIN_DEVICE", "cpu")
"""Where jobs of these tests train; all workers share the one GPU of `cuda`."""
PACKAGE = Path(swarm_elastic.__file__).parent
DEADLINE_S = 60.0
PRELUDE = "import json, os, sys, time\nimport swarm_elastic\n"
MANY_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
"""
"""More of them than `select` can wait for."""
COMMITTED = {"v": 1, "type": "checkpoint", "ok": True, "committed": True, "epoch": 4}


def needs(python: Path) -> list[pytest.MarkDecorator]:
    """Marks of tests whose scripts run in one of these interpreters, which have torch."""
    missing = pytest.mark.skipif(not python.exists(), reason=f"there is no {python}; `make test` makes it")
    return [pytest.mark.torch, missing]


class ScriptedAgent:
    """Listens where a task's socket would be.  `answer` makes an answer of a request, or None to hang up."""

    def __init__(self, path: Path, answer: Callable[[dict], object] = lambda _: COMMITTED) -> None:
        self.path, self.answer = path, answer
        self.requests: queue.Queue[dict] = queue.Queue()
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self.listening.bind(str(path))
        self.listening.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            # A script that has given up closes its end while it is being answered.
            with contextlib.suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
                for line in stream:
                    request = json.loads(line)
                    self.requests.put(request)
                    answer = self.answer(request)
                    if answer is None:
                        break
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()


class Script:
    """A training script that runs."""

    def __init__(self, folder: Path, text: str, python: str = sys.executable, **env: str) -> None:
        path = folder / "train.py"
        path.write_text(PRELUDE + text)
        task = {"SWARM_TASK_SOCKET": str(folder / "s"), "SWARM_TASK_TOKEN": "secret", "PYTHONPATH": str(PACKAGE.parent)}
        self.process = subprocess.Popen(
            [python, str(path)],
            env={"PATH": os.environ["PATH"], **task, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err
