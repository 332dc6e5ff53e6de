"""Processes that wait with their imports done, so that newcomers of elastic jobs train at once.

A worker that runs has one like it wait beside it: same interpreter, same environment but for what each task has of its
own.  It becomes the next worker here that would be started like that, with the shim that is its parent: see `shim.Warm`
and `swarm_elastic.template`.  Whatever a job adds to the interpreter's path is code of that job, which has not booked
this: so it is held in a scope of its own, and has of the environment what imports look at, not what jobs keep in it.
"""

import asyncio
import fcntl
import logging
import os
import re
import secrets
import select
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from swarm_agent.supervision.forkserver import ForkServer
from swarm_agent.supervision.limits import TaskLimits, kill_scope, warm_scope_name
from swarm_agent.task import shim
from swarm_agent.task.account import Account

log = logging.getLogger(__name__)

KEPT_S = 600.0  # without a worker like it
REQUEST_BYTES_MAX = 48 * 2**10  # what the pipe to the process takes at once, with room for its numbers
PYTHON = re.compile(r"(/.*/)?python(3(\.\d+)?)?")
PREFIX = "warm-"
NUL = "\0"
OF_A_TASK = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


IMPORTS_ENV = re.compile(
    r"PATH|HOME|USER|LANG|LANGUAGE|TZ|TMPDIR|VIRTUAL_ENV|GLIBC_TUNABLES|PYTHON[A-Z_]*|(LD|LC|XDG|CONDA|MALLOC|CUDA|NVIDIA"
    r"|ROCM|OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|TORCH|PYTORCH|TORCHINDUCTOR|TRITON)_\w+"
)
"""What is looked at while torch is imported; all else comes when the process becomes a worker."""
SECRET = re.compile("TOKEN|SECRET|PASS|_KEY|CREDENTIAL")


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a process is started with; of equal ones each can become the other's worker."""

    python: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    account: Account

    @property
    def has_code_of_a_job(self) -> bool:
        """True where imports find more than what is installed."""
        env = dict(self.env)
        return "LD_PRELOAD" in env or os.pathsep in env.get("PYTHONPATH", "")


def warm_start(
    command: tuple[str, ...], env: Mapping[str, str], account: Account
) -> tuple[WarmStart, tuple[str, ...]] | None:
    """How a process for this command waits, and what it is to run; None for what Python does not run.

    An interpreter below the working directory has none, since nobody knows that directory yet; nor has one with options
    other than -u.
    """
    count = 2 if command[1:2] == ("-u",) else 1
    python, argv = command[:count], command[count:]
    is_text = len(argv) > 1 and argv[0] in ("-m", "-c")
    is_script = bool(argv) and argv[0].endswith(".py") and not argv[0].startswith("-")
    size = sum(len(word) + 1 for word in argv) + sum(len(name) + len(value) + 2 for name, value in env.items())
    if not PYTHON.fullmatch(python[0]) or not (is_text or is_script) or size > REQUEST_BYTES_MAX:
        return None
    kept = [name for name in env if IMPORTS_ENV.fullmatch(name) and not SECRET.search(name) and name not in OF_A_TASK]
    return WarmStart(python, tuple([(name, env[name]) for name in sorted(kept)]), account), argv


def has_ended(pidfd: int, limit_s: float = 0.0) -> bool:
    """Whether a process ends within that time.  By poll: select takes no descriptor above 1023."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(limit_s * 1e3))


@dataclass(slots=True, eq=False)
class Waiting:
    """A shim and its process that wait."""

    directory: Path
    start: WarmStart
    commands: int
    used_s: float  # monotonic: when a worker like it was last seen
    pid: int = 0
    pidfd: int = -1

    @property
    def is_ready(self) -> bool:
        """True when its imports are done."""
        return self.pidfd >= 0 and (self.directory / "ready").exists() and not has_ended(self.pidfd)

    def hand_over(self, task_dir: Path, launch: bytes) -> None:
        """Give the shim its task, whose folder is ready but for these.  Raises OSError; then the shim ends."""
        order = b"stop"
        try:
            (task_dir / "launch").write_bytes(launch)
            for name in ("lock", "commands", "shim.err"):
                (self.directory / name).rename(task_dir / name)
            order = b"launch " + os.fsencode(task_dir)
        finally:
            self._tell_last(order)

    def end(self) -> None:
        """A waiting process is not needed any more."""
        with suppress(OSError):
            self._tell_last(b"stop")

    def _tell_last(self, order: bytes) -> None:
        try:
            os.write(self.commands, order + b"\n")
        finally:
            os.close(self.commands)
            self._remove()

    def _remove(self) -> None:
        """Under another name first: a shim that has only begun adds files, and a folder with a new one would stay."""
        gone = self.directory
        with suppress(OSError):
            gone = gone.rename(gone.with_suffix(".gone"))
        shutil.rmtree(gone, ignore_errors=True)


class WarmPool:
    """What waits on this node, at most `limit`.  Everything belongs to the event loop's thread."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._waiting: list[Waiting] = []
        self._failed: set[WarmStart] = set()  # whose imports are not there

    def start(self) -> None:
        """What an earlier agent had is over."""
        for left in self._folder.glob(f"{PREFIX}*"):
            if (left / "lock").exists():  # it was given no task
                kill_scope(warm_scope_name(left.name))
            shutil.rmtree(left, ignore_errors=True)

    def stop(self) -> None:
        """End all."""
        for waiting in [*self._waiting]:
            self._end(waiting)

    def __len__(self) -> int:
        """How many are ready."""
        return sum(each.is_ready for each in self._waiting)

    def take(self, start: WarmStart) -> Waiting | None:
        """One that is ready, for whoever calls `hand_over` next."""
        found = next((each for each in self._waiting if each.start == start and each.is_ready), None)
        if found:
            self._let_go(found)
        return found

    def leave(self, running: Iterable[WarmStart]) -> None:
        """A worker has ended: given those that run, end what waits with code of a job that has none here any more."""
        starts = set(running)
        for waiting in [*self._waiting]:
            if waiting.start.has_code_of_a_job and waiting.start not in starts:
                self._end(waiting)

    def adjust(self, running: Iterable[WarmStart], server: ForkServer, limits: TaskLimits) -> None:
        """Given the workers that run, the latest first: start what they need, end what none has needed for long."""
        starts, now_s = dict.fromkeys(running), time.monotonic()
        wanted = Counter(islice(cycle(starts), self._limit if starts else 0))
        for waiting in [*self._waiting]:
            if waiting.start in starts:
                waiting.used_s = now_s
            elif now_s - waiting.used_s > KEPT_S:
                self._end(waiting)
        for start, count in wanted.items():
            missing = 0 if start in self._failed else count - sum(each.start == start for each in self._waiting)
            for _ in range(missing):
                if len(self._waiting) < self._limit or self._make_room(wanted):
                    self._begin(start, server, limits)

    def _make_room(self, wanted: Mapping[WarmStart, int]) -> bool:
        others = [each for each in self._waiting if each.start not in wanted]
        if others:
            self._end(min(others, key=lambda each: each.used_s))
        return bool(others)

    def _begin(self, start: WarmStart, server: ForkServer, limits: TaskLimits) -> None:
        directory = self._folder / f"{PREFIX}{secrets.token_hex(6)}"
        account = (str(start.account.uid), str(start.account.gid))
        groups = [str(group) for group in start.account.groups]
        scope = limits.warm_scope(directory.name)
        argv = [*start.python, "-m", "swarm_elastic.template"]
        env = [f"{name}={value}" for name, value in start.env]
        parts = [*account, *map(NUL.join, map(shim.counted, (groups, argv, env, [*scope])))]
        lock = -1
        try:
            directory.mkdir(mode=0o700)
            (directory / "warm").write_bytes(NUL.join(parts).encode("utf-8", "surrogateescape"))
            os.mkfifo(directory / "commands", 0o600)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            commands = os.open(directory / "commands", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            waiting = Waiting(directory, start, commands, time.monotonic())
            self._waiting.append(waiting)
            if not server.fork(directory, [lock], lambda pid, pidfd: self._forked(waiting, pid, pidfd)):
                self._end(waiting)
        except OSError as error:
            log.warning("no process can wait for workers error=%s", error)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            if lock >= 0:
                os.close(lock)

    def _forked(self, waiting: Waiting, pid: int, pidfd: int) -> None:
        if waiting not in self._waiting or not pid:  # it reads that it is to stop, or was never there
            if pidfd >= 0:
                os.close(pidfd)
            self._end(waiting)
            return
        waiting.pid, waiting.pidfd = pid, pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, waiting)

    def _ended(self, waiting: Waiting) -> None:
        """By itself: it could not import, or somebody has killed it."""
        kill_scope(warm_scope_name(waiting.directory.name))
        if not (waiting.directory / "ready").exists():
            self._failed.add(waiting.start)
            error = ""
            with suppress(OSError):
                error = (waiting.directory / "shim.err").read_text(errors="replace").strip().rpartition("\n")[2]
            log.info("no process waits for workers of this kind python=%s error=%s", waiting.start.python[0], error)
        self._end(waiting)

    def _let_go(self, waiting: Waiting) -> None:
        self._waiting.remove(waiting)
        if waiting.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(waiting.pidfd)

    def _end(self, waiting: Waiting) -> None:
        if waiting not in self._waiting:
            return
        self._let_go(waiting)
        if waiting.pidfd >= 0:
            os.close(waiting.pidfd)
        waiting.end()
