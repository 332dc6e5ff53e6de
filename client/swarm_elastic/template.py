"""A process that has imported torch and forks workers: `python -m swarm_elastic.template`.

To import torch takes seconds; a worker forked from here starts in a tenth of one.  Each line of stdin is a worker to
start, `{"script": path, "argv": [...], "env": {...}, "cwd": path, "out": path, "err": path}`; `env` is all of its
environment.  Each line of stdout is news: `{"ready": true}` once, `{"pid": n, "script": path}` for a worker that was
started, in the order of the requests, `{"pid": n, "code": n}` for one that ended (negative: by a signal), and
`{"error": text}` for a line that is no request.  The end of stdin ends it, but not its workers.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

WANTED = ("swarm_elastic._elastic", "torch._dynamo", "torch.utils.data")
"""What a worker would import in its first second; optimizers need the second of them."""
FIELDS = {"script": str, "argv": list, "env": dict, "cwd": str, "out": str, "err": str}
CHUNK = 1 << 16


class Template:
    """Forks on request.  Nothing is computed here and no GPU is touched, since neither survives a fork."""

    def __init__(self) -> None:
        self._workers: dict[int, int] = {}  # pid by the descriptor that tells of its end
        self._rest = b""

    def serve(self) -> dict[str, Any] | None:
        """Returns in each worker, with what it is to run; None in the template, at the end."""
        _tell({"ready": True})
        while True:
            readable, _, _ = select.select([0, *self._workers], [], [])
            for descriptor in readable:
                if descriptor != 0:
                    self._bury(descriptor)
            if 0 in readable:
                data = os.read(0, CHUNK)
                if not data:
                    return None
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    request = self._start(line)
                    if request:
                        return request

    def _start(self, line: bytes) -> dict[str, Any] | None:
        """The request, in the worker."""
        try:
            request = _checked(json.loads(line))
        except ValueError as error:
            _tell({"error": str(error)})
            return None
        pid = os.fork()
        if pid == 0:
            for descriptor in self._workers:
                os.close(descriptor)
            return request
        self._workers[os.pidfd_open(pid)] = pid
        _tell({"pid": pid, "script": request["script"]})
        return None

    def _bury(self, descriptor: int) -> None:
        pid = self._workers.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        _tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def run(request: dict[str, Any]) -> None:
    """Become a process that was started for this script alone."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _redirect(0, os.devnull, os.O_RDONLY)
    _redirect(1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _redirect(2, request["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
    sys.argv = [request["script"], *request["argv"]]
    sys.path[0:1] = [str(Path(request["script"]).resolve().parent), *_python_path()]
    runpy.run_path(request["script"], run_name="__main__")


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]


def _redirect(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o644)
    os.dup2(opened, descriptor)
    os.close(opened)


def _checked(request: object) -> dict[str, Any]:
    if not isinstance(request, dict):
        raise ValueError(f"a request must be an object, not {request!r}")
    for name, kind in FIELDS.items():
        if not isinstance(request.get(name), kind):
            raise ValueError(f"{name} must be a {kind.__name__}, not {request.get(name)!r}")
    return request


def _tell(news: dict[str, Any]) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def main() -> None:
    """See the head of this file."""
    for name in WANTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # workers share these objects for good, and need not go through them at their end
    request = Template().serve()
    if request:
        run(request)


if __name__ == "__main__":
    main()
