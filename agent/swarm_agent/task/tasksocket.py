"""The socket between one task's ranks and their agent: requests of training scripts come in here.

One JSON object per line, each with a version field "v".  A request has "token" (SWARM_TASK_TOKEN) and "type"; what
else it has is its handler's business.  One request at a time is answered on a connection.  An answer has the same
"type" and "ok"; when that is false also "error" (a code), "problem" and "remedy".  What is no proper request is
answered once more, and the connection closed.

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
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm_agent.task.account import Account
from swarmsched.errors import ConfigError, SwarmError
from swarmsched.ids import TaskKey

log = logging.getLogger(__name__)

VERSION = 1
LINE_BYTES_MAX = 65_536
CONNECTIONS_MAX = 64
SUN_PATH_BYTES = 107  # without the closing zero (unix(7))
NAME_LENGTH = 16
BACKLOG = 64
KEY_SHOWN = 40
# From 3.13 on a server removes its path when it closes, and tasks would not find the next agent; before that none does.
KEEP_PATH: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}

Request = dict[str, Any]
Handler = Callable[[TaskKey, Request], Awaitable[dict[str, Any]]]


class Refusal(SwarmError):
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


class TaskSocket:
    """Listens for one task from `open` to `close`; both belong to the loop's thread."""

    def __init__(self, key: TaskKey, path: Path, token: str, handlers: Mapping[str, Handler]) -> None:
        self.key, self.path, self.token = key, path, token
        self._handlers = handlers
        self._opening: asyncio.Task[asyncio.Server] | None = None
        self._connections: set[asyncio.Task[None]] = set()

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
        serving = asyncio.start_unix_server(self._connected, sock=listening, limit=LINE_BYTES_MAX, **KEEP_PATH)
        self._opening = asyncio.get_running_loop().create_task(serving)

    def close(self, *, is_over: bool) -> None:
        """Stop listening; the path goes only when the task `is_over`, otherwise the next agent takes it."""
        if self._opening:
            self._opening.add_done_callback(_close_server)
            self._opening = None
        for connection in self._connections:
            connection.cancel()
        if is_over:
            self.path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        is_too_many = len(self._connections) >= CONNECTIONS_MAX
        self._connections.add(connection)
        try:
            if is_too_many:
                raise Refusal("too_many_connections", f"this task has {CONNECTIONS_MAX} connections already", "use one")
            while await self._serve_one(reader, writer):
                continue
        except Refusal as refusal:
            await _write(writer, "error", refusal.to_json())
        except (ConnectionError, asyncio.CancelledError):
            log.debug("task socket: connection ended job_id=%s attempt=%d", *self.key.of_attempt)
        finally:
            self._connections.discard(connection)
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; false at the end of the stream.  Raises `Refusal` for what ends the connection."""
        try:
            line = await reader.readline()
        except ValueError as error:
            raise Refusal("too_large", f"a line has more than {LINE_BYTES_MAX} bytes", "send a shorter one") from error
        if not line.endswith(b"\n"):
            return False
        request, handler = self._checked(line)
        try:
            answer = await handler(self.key, request)
        except Refusal as refusal:
            answer = refusal.to_json()
        except Exception:  # a fault of ours costs this request, not the agent
            log.exception(
                "task socket: request failed job_id=%s attempt=%d type=%s", *self.key.of_attempt, request["type"]
            )
            answer = Refusal("internal", "the agent failed at this request", "see the agent's log").to_json()
        await _write(writer, request["type"], answer)
        return True

    def _checked(self, line: bytes) -> tuple[Request, Handler]:
        try:
            request = json.loads(line, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise Refusal("bad_request", f"the line is not JSON: {error}", "send one JSON object per line") from error
        if not isinstance(request, dict):
            raise Refusal("bad_request", "the line is not a JSON object", "send one JSON object per line")
        version, kind, token = request.get("v"), request.get("type"), request.get("token")
        if isinstance(version, bool) or version != VERSION:
            remedy = "use the swarm_elastic that the agent puts on PYTHONPATH"
            raise Refusal("bad_version", f"version {version!r} is not spoken here, but {VERSION}", remedy)
        given = token.encode("utf-8", "replace") if isinstance(token, str) else b""
        if not hmac.compare_digest(given, self.token.encode()):
            raise Refusal("bad_token", "the token is not this task's", "send the value of SWARM_TASK_TOKEN")
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            raise Refusal("unknown_type", f"a request of type {kind!r} is not known here", f"known: {known}")
        return request, handler


class TaskSockets:
    """The sockets of all tasks that run here."""

    def __init__(self, folder: SocketFolder, account: Account) -> None:
        self._folder, self._account = folder, account
        self._handlers: dict[str, Handler] = {}
        self._open: dict[TaskKey, TaskSocket] = {}

    def on_request(self, kind: str, handler: Handler) -> None:
        """Answer requests of this type, of whichever task."""
        self._handlers[kind] = handler

    def path(self, key: TaskKey) -> Path:
        """Where the task's ranks find it."""
        return self._folder.of(key)

    def open(self, key: TaskKey, token: str) -> None:
        """Listen for a task.  Raises OSError."""
        self.close(key)
        opened = TaskSocket(key, self.path(key), token, self._handlers)
        opened.open(self._account)
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


def _each_once(pairs: list[tuple[str, Any]]) -> Request:
    """An object without repeated keys, of which all but one would silently be lost; raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)[:KEY_SHOWN]!r} is there twice"
        )
    return found


def _close_server(opening: "asyncio.Task[asyncio.Server]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def _write(writer: asyncio.StreamWriter, kind: str, answer: dict[str, Any]) -> None:
    with suppress(ConnectionError):  # whoever asked is gone
        writer.write(json.dumps({"v": VERSION, "type": kind} | answer).encode() + b"\n")
        await writer.drain()
