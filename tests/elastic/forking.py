"""A process that has imported torch and forks workers, for tests that start many: `python -m tests.elastic.forking`.

It is the product's template that does not become one worker, but forks all of them.  Each line of stdin is a worker to
start, `{"script": path, "argv": [...], "env": {...}, "cwd": path, "out": path, "err": path}`; `env` is all of its
environment.  Each line of stdout is news: `{"ready": true}` once, `{"pid": n, "script": path}` for a worker that was
started, in the order of the requests, `{"pid": n, "code": n}` for one that ended (negative: by a signal), and
`{"error": text}` for a line that is no request.  The end of stdin ends it, but not its workers.
"""

import json
import os
import select
from typing import Any

from swarm_elastic.template import run, set_environment, warm_up

FIELDS = {"script": str, "argv": list, "env": dict, "cwd": str, "out": str, "err": str}
CHUNK = 1 << 16


class Template:
    """Forks on request."""

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


def become(request: dict[str, Any]) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    _redirect(0, os.devnull, os.O_RDONLY)
    _redirect(1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _redirect(2, request["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    set_environment(request["env"])
    run([request["script"], *request["argv"]])


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
    warm_up()
    request = Template().serve()
    if request:
        become(request)


if __name__ == "__main__":
    main()
