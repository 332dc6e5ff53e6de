"""The socket between one task's ranks and their agent: requests of training scripts come in here.

One JSON object per line, each with a version field "v".  A request has "token" (SWARM_TASK_TOKEN) and "type"; what
else it has is its handler's business.  One request at a time is answered on a connection.  An answer has the same
"type" and "ok"; when that is false also "error" (a code), "problem" and "remedy".  What is no proper request is
answered once more, and the connection closed.

Whoever speaks here is a stranger, and the loop is everybody's: each task has a `Budget` of it, from which connections,
reads and lines are paid.  Who has spent it waits, and each line waits for a turn of the loop of its own.

The path is the same in every life of an agent, so ranks find the next one where they met the last.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from swarm_agent.task.account import Account
from swarmsched.errors import ConfigError, LocalProtocolError, SwarmError
from swarmsched.ids import TaskKey
from swarmsched.wire.codec import encode_value

log = logging.getLogger(__name__)

VERSION = 1
LINE_BYTES_MAX = 65_536
PARTS_MAX = 2_000  # of a line, by its commas and brackets: each costs a hundred times what a letter does
CONNECTIONS_MAX = 64
SUN_PATH_BYTES = 107  # without the closing zero (unix(7))
NAME_LENGTH = 16
BACKLOG = 64
SHOWN_LENGTH = 40
UNIT_BYTES = 1_024  # of a line; each unit costs the loop some 0.1 ms, be it bytes, a read or a request
UNITS_PER_SECOND = 600
UNITS_AT_ONCE = 1_200
PER_SECOND_MOST = 100  # requests of one kind and task; each rank of swarm_elastic sends at most one a second
PENALTY_S = 0.2  # who sends more is answered later: a connection has one request at a time
ACCEPT_AGAIN_S = 1.0  # no descriptor is left

T = TypeVar("T")
Request = dict[str, Any]
Handler = Callable[[TaskKey, Request], Awaitable[dict[str, Any]]]


class Declined(SwarmError):
    """A request that is not fulfilled; becomes an answer."""

    def __init__(self, code: str, problem: str, remedy: str = "") -> None:
        self.code, self.problem, self.remedy = code, problem, remedy
        super().__init__(f"{code}: {problem}")

    def to_json(self) -> dict[str, Any]:
        """The keys of the answer."""
        return {"ok": False, "error": self.code, "problem": self.problem, "remedy": self.remedy}


class SocketFolder:
    """Where the sockets of this agent's tasks are: below its data directory, or in /tmp where that path is too long."""

    def __init__(self, data_dir: Path) -> None:
        near = data_dir / "sockets"
        is_short = len(os.fsencode(near)) + 1 + NAME_LENGTH <= SUN_PATH_BYTES
        mark = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
        self.path = near if is_short else Path(f"/tmp/swarm-{os.geteuid()}-{mark}")  # noqa: S108  # checked by `make`

    def make(self) -> None:
        """Create it, passable but not readable for others.  Raises `ConfigError` if it is somebody else's."""
        self.path.mkdir(mode=0o711, parents=True, exist_ok=True)
        found = self.path.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not is_ours:
            problem = f"{self.path}, where the sockets of tasks belong, is not a directory of this agent's alone"
            raise ConfigError("data_dir", problem, f"remove {self.path}, or choose a shorter data_dir")
        self.path.chmod(0o711)

    def of(self, key: TaskKey) -> Path:
        """The socket of a task."""
        return self.path / hashlib.sha256(str(key).replace("/", ".").encode()).hexdigest()[:NAME_LENGTH]

    def sweep(self, keep: set[Path]) -> None:
        """Remove sockets of tasks that are no more."""
        for path in self.path.iterdir():
            if path not in keep:
                path.unlink(missing_ok=True)


class Budget:
    """Something that comes at a steady rate, and of which some is saved up."""

    def __init__(self, per_second: float, at_once: float, now: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._at_once, self._now = per_second, at_once, now
        self._left, self._counted_s = at_once, now()

    def spend(self, amount: float) -> float:
        """Take so much; seconds for which whoever does is to wait, 0 while some is left."""
        self._left = self._count() - amount
        return max(0.0, -self._left / self._per_second)

    def take_one(self) -> bool:
        """Take one, if it is there."""
        self._left = self._count()
        is_there = self._left >= 1
        self._left -= is_there
        return is_there

    def _count(self) -> float:
        now_s = self._now()
        since_s, self._counted_s = now_s - self._counted_s, now_s
        return min(self._at_once, self._left + since_s * self._per_second)


class TaskSocket:
    """Listens for one task from `open` to `close`; both belong to the loop's thread."""

    def __init__(self, key: TaskKey, path: Path, token: str, handlers: Mapping[str, Handler]) -> None:
        self.key, self.path, self.token = key, path, token
        self._handlers = handlers
        self._listening: socket.socket | None = None
        self._accepting: asyncio.TimerHandle | None = None  # after a pause
        self._connections: set[asyncio.Task[None]] = set()
        self._budget = Budget(UNITS_PER_SECOND, UNITS_AT_ONCE)
        self._turn = asyncio.Lock()

    def open(self, account: Account) -> None:
        """Listen, for this account alone; who connects from now on is served.  Raises OSError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listening.fileno(), 0o600)  # before it has a name: Linux gives the name the same mode
            self.path.unlink(missing_ok=True)  # of an earlier life
            listening.bind(os.fspath(self.path))
            if account.uid >= 0:
                os.chown(self.path, account.uid, account.gid)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        self._accept_from_now_on()

    def close(self, *, is_over: bool) -> None:
        """Stop listening; the path goes only when the task `is_over`, otherwise the next agent takes it."""
        if self._listening:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        if self._accepting:
            self._accepting.cancel()
        for connection in self._connections:
            connection.cancel()
        if is_over:
            self.path.unlink(missing_ok=True)

    def _accept_from_now_on(self) -> None:
        self._accepting = None
        assert self._listening is not None
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """One connection in a turn of the loop; while the budget is spent they wait in the kernel."""
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("task socket: no connection is accepted for a while error=%s", error)
            pause_s = ACCEPT_AGAIN_S
        else:
            connection.setblocking(False)
            serving = asyncio.get_running_loop().create_task(self._serve(connection))
            self._connections.add(serving)
            serving.add_done_callback(self._connections.discard)
            pause_s = self._budget.spend(1)
        if pause_s:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._accepting = asyncio.get_running_loop().call_later(pause_s, self._accept_from_now_on)

    async def _serve(self, connection: socket.socket) -> None:
        rest = bytearray()
        try:
            if len(self._connections) > CONNECTIONS_MAX:
                raise Declined(
                    "too_many_connections", f"this task has {CONNECTIONS_MAX} connections already", "use one"
                )
            while line := await self._line(connection, rest):
                await self._answer(connection, line)
        except Declined as refusal:
            await _write(connection, "error", refusal.to_json())
        except (OSError, asyncio.CancelledError):
            log.debug("task socket: connection ended job_id=%s attempt=%d", *self.key.of_attempt)
        finally:
            connection.close()

    async def _line(self, connection: socket.socket, rest: bytearray) -> bytes:
        """The next one, and what came after it is the `rest`; empty at the end of the stream.  May raise `Declined`."""
        searched = 0
        while (end := rest.find(b"\n", searched)) < 0:
            searched = len(rest)
            if searched > LINE_BYTES_MAX:
                break
            await self._wait_turn(1)
            data = await asyncio.get_running_loop().sock_recv(connection, LINE_BYTES_MAX)
            if not data:
                return b""
            rest += data
        if not 0 <= end <= LINE_BYTES_MAX:
            raise Declined("too_large", f"a line has more than {LINE_BYTES_MAX} bytes", "send a shorter one")
        await self._wait_turn(1 + end // UNIT_BYTES)
        line = bytes(rest[: end + 1])
        del rest[: end + 1]
        return line

    async def _wait_turn(self, units: int) -> None:
        """Wait until the task may use the loop again, for the next turn at least; its ranks after one another."""
        async with self._turn:
            await asyncio.sleep(self._budget.spend(units))

    async def _answer(self, connection: socket.socket, line: bytes) -> None:
        """Answer one request.  Raises `Declined` for what ends the connection."""
        request, handler = self._checked(line)
        try:
            answer = await handler(self.key, request)
        except Declined as refusal:
            answer = refusal.to_json()
        except Exception:  # a fault of ours costs this request, not the agent
            log.exception(
                "task socket: request failed job_id=%s attempt=%d type=%s", *self.key.of_attempt, request["type"]
            )
            answer = Declined("internal", "the agent failed at this request", "see the agent's log").to_json()
        await _write(connection, request["type"], answer)

    def _checked(self, line: bytes) -> tuple[Request, Handler]:
        """What it asks, and who answers; the token is looked at before all else but the JSON itself."""
        if sum(map(line.count, b",[{")) > PARTS_MAX:
            raise Declined("bad_request", f"the line has more than {PARTS_MAX} values", "send one flat JSON object")
        try:
            request = json.loads(line, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise Declined("bad_request", f"the line is not JSON: {error}", "send one JSON object per line") from error
        if not isinstance(request, dict):
            raise Declined("bad_request", "the line is not a JSON object", "send one JSON object per line")
        version, kind, token = request.get("v"), request.get("type"), request.get("token")
        if isinstance(version, bool) or version != VERSION:
            remedy = "use the swarm_elastic that the agent puts on PYTHONPATH"
            raise Declined("bad_version", f"version {shown(version)} is not spoken here, but {VERSION}", remedy)
        given = token.encode("utf-8", "replace") if isinstance(token, str) else b""
        if not hmac.compare_digest(given, self.token.encode()):
            raise Declined("bad_token", "the token is not this task's", "send the value of SWARM_TASK_TOKEN")
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            raise Declined("unknown_type", f"a request of type {shown(kind)} is not known here", f"known: {known}")
        return request, handler


class TaskSockets:
    """The sockets of all tasks that run here."""

    def __init__(self, folder: SocketFolder) -> None:
        self._folder = folder
        self._handlers: dict[str, Handler] = {}
        self._open: dict[TaskKey, TaskSocket] = {}

    def on_request(self, kind: str, handler: Handler) -> None:
        """Answer requests of this type, of whichever task."""
        self._handlers[kind] = handler

    def path(self, key: TaskKey) -> Path:
        """Where the task's ranks find it."""
        return self._folder.of(key)

    def open(self, key: TaskKey, token: str, account: Account) -> None:
        """Listen for a task, for its account alone.  Raises OSError."""
        self.close(key)
        opened = TaskSocket(key, self.path(key), token, self._handlers)
        opened.open(account)
        self._open[key] = opened

    def close(self, key: TaskKey) -> None:
        """The task is over."""
        opened = self._open.pop(key, None)
        if opened:
            opened.close(is_over=True)

    def start(self) -> None:
        """Make the folder; raises `ConfigError`."""
        self._folder.make()

    def sweep(self) -> None:
        """Remove what tasks left that ended without an agent."""
        self._folder.sweep({self.path(key) for key in self._open})

    def stop(self) -> None:
        """Leave the paths to the next agent."""
        for opened in self._open.values():
            opened.close(is_over=False)
        self._open.clear()


def shown(value: object) -> str:
    """A value of a request in few letters, as a refusal names it."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else "a number of many digits"
    if not isinstance(value, str):  # it may be nested more deeply than anybody can print
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value[:SHOWN_LENGTH])
    return text if len(value) <= SHOWN_LENGTH else text + "..."


def fitting(cls: type[T], value: T, code: str) -> T:
    """What was made of a job's words, to be sent to other agents; raises `Declined` where no message can carry it."""
    try:
        encode_value(cls, value)
    except LocalProtocolError as error:
        raise Declined(code, f"other agents cannot be told of it: {error}", "send values that can be") from error
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> Request:
    """An object without repeated keys, of which all but one would silently be lost; raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {shown(next(name for name in times if times[name] > 1))} is there twice")
    return found


async def _write(connection: socket.socket, kind: str, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # whoever asked is gone
        data = json.dumps({"v": VERSION, "type": kind} | answer).encode() + b"\n"
        await asyncio.get_running_loop().sock_sendall(connection, data)
