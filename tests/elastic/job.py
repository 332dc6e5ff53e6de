"""An elastic job of real processes: the agent's own task socket, a template that forks workers, and their logs."""

import asyncio
import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swarm_agent.task.account import Account
from swarm_agent.task.membership import TaskMemberships
from swarm_agent.task.reports import TaskReports
from swarm_agent.task.tasksocket import SocketFolder, TaskSockets
from swarmsched.ids import JobId, TaskKey
from tests.agent.supervision.testing import make_order
from tests.agent.testing import free_port
from tests.elastic.testing import DEVICE, PACKAGE, PRELUDE, ROOT, TRAIN

KEY = TaskKey(JobId("00000000000000000000000001"), 1)
DEADLINE_S = 60.0
POLL_S = 0.005


def until(is_so: Callable[[], object], what: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what()}"
        time.sleep(POLL_S)


class Template:
    """Imports torch once for all workers of a test run, and what is to be imported before."""

    def __init__(self, python: Path = TRAIN, imports: str = "torch") -> None:
        path = os.pathsep.join((str(PACKAGE.parent), str(ROOT)))
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [python, "-c", f"import {imports}\nfrom tests.elastic.forking import main\nmain()"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started: list[int] = []
        self.codes: dict[int, int] = {}
        self.errors: list[str] = []
        assert json.loads(self.process.stdout.readline()) == {"ready": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            news = json.loads(line)
            if "error" in news:
                self.errors.append(news["error"])
            elif "code" in news:
                self.codes[news["pid"]] = news["code"]
            else:
                self.started.append(news["pid"])

    def send(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def start(self, **request) -> int:
        count = len(self.started)
        self.send(json.dumps(request))
        until(lambda: len(self.started) > count, lambda: "a worker was forked")
        return self.started[count]

    def finish(self, folder: Path, text: str, **env: str) -> tuple[int, str, str]:
        """Exit code, output and errors of a script: as `testing.Script`, without the time that its imports take."""
        script, out, err = (folder / name for name in ("train.py", "train.out", "train.err"))
        script.write_text(PRELUDE + text)
        base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
        files = {"script": str(script), "cwd": str(folder), "out": str(out), "err": str(err)}
        pid = self.start(argv=[], env={**base, **env}, **files)
        until(lambda: pid in self.codes, lambda: f"{script} ends; it wrote {err.read_text()}")
        return self.codes[pid], out.read_text(), err.read_text()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self._thread.join()
        self.process.stdout.close()


class Worker:
    """A process of the job; its log is lines of JSON."""

    def __init__(self, job: "Job", name: str, **env: str) -> None:
        self.job, self.name = job, name
        self.log, self.err = job.folder / f"{name}.log", job.folder / f"{name}.err"
        base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
        if DEVICE == "cuda":  # NCCL refuses ranks that share a GPU, unless they seem to be on hosts of their own
            base |= {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}
        task = {"SWARM_TASK_SOCKET": str(job.socket), "SWARM_TASK_TOKEN": "secret", "SWARM_WORKER": name}
        self.pid = job.template.start(
            script=str(job.script),
            argv=[],
            env={"DEVICE": DEVICE, **base, **task, **job.env, **env},
            cwd=str(job.folder),
            out=str(self.log),
            err=str(self.err),
        )

    @property
    def lines(self) -> list[dict]:
        """What it has told so far, as far as lines are complete."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    @property
    def code(self) -> int | None:
        return self.job.template.codes.get(self.pid)

    @property
    def step(self) -> int:
        return max((line.get("step", -1) for line in self.lines), default=-1)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> int:
        until(
            lambda: self.code is not None,
            lambda: f"{self.name} ends; it wrote {self.lines[-1:]}, {self.err.read_text()}",
        )
        return self.job.template.codes[self.pid]


class Job:
    """Speaks as the agent would: publishes plans to its workers."""

    def __init__(self, folder: Path, template: Template, script: str, **env: str) -> None:
        self.folder, self.template, self.env = folder, template, env
        folder.mkdir(exist_ok=True)
        self.script = folder / "train.py"
        self.script.write_text(script)
        self.workers: dict[str, Worker] = {}
        self.version = 0
        self.memberships = TaskMemberships(lambda key: make_order("true") if key == KEY else None)
        self.reports = TaskReports(lambda key: make_order("true") if key == KEY else None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.socket = Path(f"/tmp/swarm-elastic-{os.getpid()}-{id(self):x}")
        self._sockets = self._do(self._open)

    def _open(self) -> TaskSockets:
        folder = SocketFolder(self.folder)
        folder.path = self.socket
        sockets = TaskSockets(folder)
        sockets.on_request("member", self.memberships.handle)
        sockets.on_request("report", self.reports.handle)
        sockets.start()
        sockets.open(KEY, "secret", Account("me", "/", "/bin/sh"))
        self.socket = sockets.path(KEY)
        return sockets

    async def _stop(self) -> None:
        self._sockets.stop()
        for _ in range(3):  # connections that were accepted this instant have no task yet
            await asyncio.sleep(0.01)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

    def _do(self, act: Callable):
        async def acted():
            return act()

        return asyncio.run_coroutine_threadsafe(acted(), self._loop).result(DEADLINE_S)

    def start(self, *names: str, **env: str) -> None:
        for name in names:
            self.workers[name] = Worker(self, name, **env)

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    @property
    def standings(self) -> dict:
        return dict(self.memberships.members(KEY))

    def ready(self, *names: str) -> None:
        """Wait until these have come."""
        until(lambda: all(name in self.standings for name in names), lambda: f"{names} come; {self.problems()}")

    def plan(self, *names: str, lost: tuple[str, ...] = (), **changes) -> dict:
        """The next one, with these members."""
        self.ready(*names)
        self.version += 1
        members = [{"worker": name, "address": self.standings[name].address} for name in names]
        return {"version": self.version, "epoch": 1, "members": members, "lost": list(lost), **changes}

    def publish(self, *names: str, lost: tuple[str, ...] = (), **changes) -> int:
        plan = self.plan(*names, lost=lost, **changes)
        self._do(lambda: self.memberships.publish(KEY, plan))
        return self.version

    def switch(self, *names: str, lost: tuple[str, ...] = (), past: int = 2, timeout_s: float = DEADLINE_S) -> int:
        """Publish a plan and wait until its members have trained some steps by it; returns its version."""
        version = self.publish(*names, lost=lost)
        for name in names:
            self.trains(name, version, past, timeout_s)
        return version

    def trains(self, name: str, version: int, past: int = 2, timeout_s: float = DEADLINE_S) -> None:
        """Wait until a worker has done some steps by this plan."""
        worker = self.workers[name]
        until(
            lambda: sum(line.get("version") == version for line in worker.lines) >= past,
            lambda: f"{name} trains by plan {version}; {self.problems()}",
            timeout_s,
        )

    def set_batch(self, batch: int) -> None:
        """As the swarm would, in answers to reports."""
        until(lambda: KEY in self.reports.tasks, lambda: "somebody reports")
        self._do(lambda: self.reports.set_batch(KEY, batch))

    @staticmethod
    def free_port() -> int:
        return free_port()

    def problems(self) -> str:
        """For a test that fails."""
        told = {name: (each.state, each.step, each.problem) for name, each in self.standings.items()}
        errors = {name: worker.err.read_text()[-2_000:] for name, worker in self.workers.items() if worker.err.exists()}
        return f"{told}\n" + "\n".join(f"{name}: {text}" for name, text in errors.items() if text)

    def close(self) -> None:
        for worker in self.workers.values():
            if worker.code is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.signal(9)
                worker.ended()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.socket.unlink(missing_ok=True)
        self.socket.parent.rmdir()


@contextlib.contextmanager
def elastic_job(folder: Path, template: Template, script: str, **env: str) -> Iterator[Job]:
    job = Job(folder, template, script, **env)
    try:
        yield job
    finally:
        job.close()
