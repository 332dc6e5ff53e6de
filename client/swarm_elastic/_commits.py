"""Telling the agent that a checkpoint is complete, without making training wait.

A caller only puts a name into a queue.  One thread talks to the agent, one request at a time; of those that gather
meanwhile, or while no agent answers, only the newest is sent, since only the newest can count.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import queue
import select
import socket
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from swarm_elastic._arguments import seconds, shown

VERSION = 1
QUEUE_MAX = 256  # the thread empties the queue several times a second
TURN_S = 0.2  # how often the thread looks at the queue while it waits for the agent
AWAY_S = 0.5  # pause before the agent is tried again
ANSWER_BYTES_MAX = 1 << 20
NAME_LENGTH_MAX, NAME_BYTES_MAX = 200, 255  # as agents have it
WAIT_S = 600.0
EXIT_WAIT_S_MAX = 30.0
EXIT_AWAY_S = 5.0  # an agent that has been away for so long is not waited for


class CheckpointResult(NamedTuple):
    """What became of a checkpoint.  `epoch` is the job's when it was committed; the others tell why it was not."""

    name: str
    is_committed: bool
    epoch: int = 0
    error: str = ""
    problem: str = ""
    remedy: str = ""


class CheckpointRefused(Exception):
    """A checkpoint that does not count.  `error` is a stable code.

    conflict: a newer attempt of the job runs; end this process.  superseded: a newer checkpoint came first.
    not_found, bad_name, changed, too_large and others: see `problem` and `remedy`.  unwritten: `Elastic.checkpoint`
    could not write it.  timeout: no answer in time, so the outcome is unknown.
    """

    def __init__(self, result: CheckpointResult) -> None:
        self.result = result
        self.name, self.error = result.name, result.error
        self.problem, self.remedy = result.problem, result.remedy
        super().__init__(f"checkpoint {result.name!r}: {result.problem}{_hint(result)}")


def checkpoint(name: str | os.PathLike[str], *, wait: bool = False, timeout_s: float = WAIT_S) -> bool:
    """Commit a finished file or folder in SWARM_CHECKPOINT_DIR, by name or path, as the job's newest checkpoint.

    Call it on one rank, when all have written.  Returns at once; True when it was taken.  With `wait` it returns True
    when the checkpoint counts, and raises `CheckpointRefused` when it does not.  False outside of a swarm, or when it
    was dropped.
    """
    return state().commit(name, wait, seconds("timeout_s", timeout_s))


def flush(timeout_s: float = EXIT_WAIT_S_MAX) -> bool:
    """Wait until everything taken so far was answered; False if it was not in time.  Done at exit by itself."""
    return state().flush(seconds("timeout_s", timeout_s))


class _Wish:
    """One checkpoint on its way."""

    def __init__(self, name: str, is_awaited: bool, world: int) -> None:
        self.name, self.is_awaited, self.world = name, is_awaited, world
        self.done = threading.Event()
        self.result: CheckpointResult | None = None


class State:
    """One process's dealings with its agent."""

    def __init__(self) -> None:
        self.path, self._token = os.environ.get("SWARM_TASK_SOCKET", ""), os.environ.get("SWARM_TASK_TOKEN", "")
        self.last_result: CheckpointResult | None = None
        self.dropped = 0
        self.world = 0  # the version of the membership in which this process trains
        self._count = threading.Lock()
        self._queue: queue.SimpleQueue[_Wish] = queue.SimpleQueue()  # neither side ever waits for a lock of ours
        self._newest: _Wish | None = None  # taken last, by any caller
        self._following: _Wish | None = None  # the newest of what was queued while the agent has been asked
        self._pid = os.getpid()
        self._away_since_s = 0.0  # 0: the agent answered last time
        self._has_thread = False
        self._has_told = False

    def commit(self, name: str | os.PathLike[str], wait: bool, timeout_s: float) -> bool:
        """See `checkpoint`."""
        name = as_text(name)
        if not self.path:
            self._tell_that_nothing_happens()
            return False
        wish = _Wish(name, wait, self.world)
        is_taken = self._queue.qsize() < QUEUE_MAX
        if is_taken:
            self._newest = wish
            self._queue.put(wish)
            self._start()
        else:
            self._drop(wish, "superseded", "too many checkpoints wait already")
        return self._await(wish, timeout_s) if wait else is_taken

    def give_up(self, name: str, wait: bool, problem: str) -> bool:
        """As if it was refused: it could not be written.  False, or CheckpointRefused where that is waited for."""
        wish = _Wish(name, wait, self.world)
        remedy = "make room, or have the folder there; training goes on"
        self._settle(wish, CheckpointResult(name, False, error="unwritten", problem=problem, remedy=remedy))
        return self._await(wish, 0.0) if wait else False

    def flush(self, timeout_s: float) -> bool:
        """See `swarm_elastic.flush`."""
        newest = self._newest
        return newest is None or newest.done.wait(timeout_s)

    def _await(self, wish: _Wish, timeout_s: float) -> bool:
        wish.done.wait(timeout_s)
        result = wish.result
        if result is None:
            problem = f"no answer of the agent within {timeout_s:g} s; it may still be committed"
            result = CheckpointResult(wish.name, False, error="timeout", problem=problem)
        if not result.is_committed:
            raise CheckpointRefused(result)
        return True

    def _start(self) -> None:
        # Not `threading.Thread`: its start waits until the new thread runs, which takes long beside a busy one.
        if not self._has_thread:
            self._has_thread = True
            _thread.start_new_thread(self._run, ())
            atexit.register(self._flush_at_exit)

    def _flush_at_exit(self) -> None:
        newest, end_s = self._newest, time.monotonic() + _exit_wait_s()
        if newest is None or os.getpid() != self._pid:
            return
        while not newest.done.wait(TURN_S) and time.monotonic() < end_s and self._away_for_s() < EXIT_AWAY_S:
            continue
        if not newest.done.is_set():
            print(f"swarm_elastic: checkpoint {newest.name!r} was not committed before the end", file=sys.stderr)

    def _away_for_s(self) -> float:
        return time.monotonic() - self._away_since_s if self._away_since_s else 0.0

    # In the thread.

    def _run(self) -> None:
        while True:
            wish: _Wish | None = self._newer_than(self._queue.get())
            while wish:
                wish = self._deliver(wish)

    def _newer_than(self, wish: _Wish) -> _Wish:
        """Of this one and all that are queued the newest; the others are given up."""
        while True:
            try:
                wish = self._superseded(wish, self._queue.get_nowait())
            except queue.Empty:
                return wish

    def _superseded(self, wish: _Wish, newer: _Wish) -> _Wish:
        self._drop(wish, "superseded", f"superseded by a newer checkpoint, {newer.name}")
        return newer

    def _deliver(self, wish: _Wish) -> _Wish | None:
        """Ask once; the one to ask for next, which is this one again when no agent answered and none is newer."""
        self._following = None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(AWAY_S)
                connection.connect(self.path)
                connection.sendall(self._request(wish))
                result = _result(wish.name, self._receive(connection))
        except (OSError, EOFError):
            self._away_since_s = self._away_since_s or time.monotonic()
            time.sleep(AWAY_S)
            return self._newer_than(self._superseded(wish, self._following) if self._following else wish)
        except Exception as error:  # noqa: BLE001  # without this thread nothing would be committed, and nobody told why
            problem = f"the agent could not be asked: {type(error).__name__}: {error}"
            result = CheckpointResult(wish.name, False, error="internal", problem=problem)
        self._away_since_s = 0.0
        self._settle(wish, result)
        return self._following

    def _request(self, wish: _Wish) -> bytes:
        request: dict[str, object] = {"v": VERSION, "type": "checkpoint", "token": self._token}
        request |= {"name": wish.name, "wait": True} | ({"world": wish.world} if wish.world else {})
        return json.dumps(request).encode("utf-8", "replace") + b"\n"

    def _receive(self, connection: socket.socket) -> dict[str, object]:
        """The agent's answer; `_following` is kept up meanwhile."""
        data = b""
        while b"\n" not in data:
            if readable(TURN_S, connection.fileno()):
                more = connection.recv(1 << 16)
                if not more or len(data) > ANSWER_BYTES_MAX:
                    raise EOFError
                data += more
            elif not self._queue.empty():
                self._following = self._newer_than(self._following or self._queue.get())
        try:
            answer = json.loads(data.partition(b"\n")[0])
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else {}

    def _settle(self, wish: _Wish, result: CheckpointResult) -> None:
        self.last_result = wish.result = result
        if not result.is_committed and not wish.is_awaited:
            with suppress(Exception):  # a stderr that the script has closed, say, must not end the thread
                warn(f"checkpoint {wish.name!r} was refused: {result.problem}{_hint(result)}")
        wish.done.set()

    def _drop(self, wish: _Wish, error: str, problem: str) -> None:
        with self._count:
            self.dropped += 1
        wish.result = CheckpointResult(wish.name, False, error=error, problem=problem, remedy="commit less often")
        wish.done.set()

    def _tell_that_nothing_happens(self) -> None:
        if not self._has_told:
            self._has_told = True
            warn("SWARM_TASK_SOCKET is not set: not run by swarmsched, so checkpoints are not committed")


@cache
def state() -> State:
    """This process's state; a forked child begins anew, since threads do not survive a fork."""
    return State()


os.register_at_fork(after_in_child=state.cache_clear)


def as_text(name: object) -> str:
    """The name of a checkpoint, which may be a path.  Raises TypeError."""
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str):
        raise TypeError(f"the name of a checkpoint must be text, not {type(text).__name__}")
    return text


def name_in(folder: str, name: object) -> str:
    """The name of a checkpoint that is to be written into this folder, by name or path.  Raises ValueError."""
    text = as_text(name)
    if not folder:  # it will not be written
        return text
    where, _, last = text.rpartition("/")
    last = last if where and os.path.realpath(where) == os.path.realpath(folder) else text
    is_good = 0 < len(last) <= NAME_LENGTH_MAX and last.isprintable() and "/" not in last and last[0] != "."
    if not is_good or len(last.encode("utf-8", "replace")) > NAME_BYTES_MAX:
        raise ValueError(
            f"the name of a checkpoint is {shown(text)}; it must be at most {NAME_LENGTH_MAX} printable characters, "
            "not begin with a dot, and lead nowhere but into SWARM_CHECKPOINT_DIR"
        )
    return last


def readable(timeout_s: float, *descriptors: int) -> list[int]:
    """Descriptors that can be read within this time. `select` would refuse descriptors above 1023, which scripts do
    have."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return [each for each, _ in poll.poll(timeout_s * 1e3)]


def _result(name: str, answer: dict[str, object]) -> CheckpointResult:
    if answer.get("ok") is True:
        epoch = answer.get("epoch")
        return CheckpointResult(name, True, epoch if isinstance(epoch, int) else 0)
    error, problem, remedy = (str(answer.get(key) or "") for key in ("error", "problem", "remedy"))
    return CheckpointResult(name, False, 0, error or "internal", problem or "the agent's answer made no sense", remedy)


def _hint(result: CheckpointResult) -> str:
    return f" ({result.remedy})" if result.remedy else ""


def _exit_wait_s() -> float:
    try:
        return min(EXIT_WAIT_S_MAX, float(os.environ.get("SWARM_GRACE_SECONDS", EXIT_WAIT_S_MAX)))
    except ValueError:
        return EXIT_WAIT_S_MAX


def warn(text: str) -> None:
    """Once for each text; a filter that turns warnings into errors must not end training."""
    try:
        warnings.warn("swarm_elastic: " + text, RuntimeWarning, stacklevel=5)
    except RuntimeWarning as warning:
        print(warning, file=sys.stderr)
