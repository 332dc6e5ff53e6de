"""A small HTTP/1.1 client on plain sockets, for commands whose whole budget an import of `http.client` would use up.

It speaks what the agents speak: requests with a length, answers with a length or in chunks, and Server-Sent Events.
No TLS, no redirects, no proxies (an agent answers for another by itself).  `swarm_client.agents` builds on it;
`swarm_client.sdk` uses aiohttp instead.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from swarm_client.address import Address, spell
from swarm_client.conversation import ANSWER_LIMIT_S, Unreached

HEAD_BYTES_LIMIT = 65_536
BODY_BYTES_LIMIT = 256 * 2**20
EVENT_BYTES_LIMIT = 8 * 2**20
SILENCE_LIMIT_S = 40.0  # agents send a heartbeat every 15 s on a stream


class ConnectionBroken(Exception):
    """The connection ended or broke the protocol; whether the request was carried out is unknown."""


class AnswerLate(ConnectionBroken):
    """No answer within the time allowed."""


class Waiter:
    """Waits for a socket and, meanwhile, for other descriptors (signals, the keyboard) whose callbacks it calls."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._before_wait: Callable[[], None] | None = None

    def do_before_wait(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` before each wait, for example to show what was printed so far; None: nothing."""
        self._before_wait = callback

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the descriptor is readable while something is awaited."""
        self._callbacks[descriptor] = callback

    def forget(self, descriptor: int) -> None:
        """Stop watching."""
        self._callbacks.pop(descriptor, None)

    def call_after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` once, `delay_s` from now, while something is awaited."""
        self._timers.append((time.monotonic() + delay_s, callback))

    def _run_timers(self) -> float:
        """Call what is due; return when the next is."""
        now_s = time.monotonic()
        due = [callback for at_s, callback in self._timers if at_s <= now_s]
        self._timers = [timer for timer in self._timers if timer[0] > now_s]
        for callback in due:
            callback()
        return min((at_s for at_s, _ in self._timers), default=float("inf"))

    def sleep(self, limit_s: float) -> None:
        """Wait for nothing but the callbacks."""
        self.wait(-1, limit_s)

    def wait(self, descriptor: int, limit_s: float, *, for_writing: bool = False) -> bool:
        """True when the descriptor is ready, False after `limit_s`; callbacks may raise."""
        if self._before_wait is not None:
            self._before_wait()
        end_s = time.monotonic() + limit_s
        while True:
            next_timer_s = self._run_timers()
            poll = select.poll()
            for watched in self._callbacks:
                poll.register(watched, select.POLLIN)
            if descriptor >= 0:
                poll.register(descriptor, select.POLLOUT if for_writing else select.POLLIN)
            left_s = min(end_s, next_timer_s) - time.monotonic()
            ready = [fd for fd, _ in poll.poll(max(0, int(left_s * 1000) + 1))]
            for watched in ready:
                if watched != descriptor and watched in self._callbacks:
                    self._callbacks[watched]()
            if descriptor in ready:
                return True
            if time.monotonic() >= end_s:
                return False


class Connection:
    """One connection to one agent, reused while answers are read to their end."""

    def __init__(self, sock: socket.socket, address: Address, waiter: Waiter) -> None:
        self.address = address
        self._socket, self._waiter = sock, waiter
        self._buffer = bytearray()
        self.is_reusable = True

    def close(self) -> None:
        """Close; nothing may be read any more."""
        self.is_reusable = False
        self._socket.close()

    def request(
        self, method: str, target: str, headers: dict[str, str], body: bytes | SizedBody, answer_limit_s: float
    ) -> Response:
        """Send a request and read the head of its answer.  Raises `ConnectionBroken`."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {spell(self.address)}"]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        if len(body) or method not in ("GET", "HEAD", "DELETE"):
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if isinstance(body, bytes):
            self._send(head + body, answer_limit_s)
        else:
            self._send(head, answer_limit_s)
            for part in body.parts:
                self._send(part, answer_limit_s)
        return self._read_head(answer_limit_s, has_body=method != "HEAD")

    def _send(self, data: bytes, limit_s: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                if not self._waiter.wait(self._socket.fileno(), limit_s, for_writing=True):
                    self._fail(AnswerLate("the agent does not take the request"))
            except OSError as error:
                self._fail(ConnectionBroken(_cause(error)))

    def receive(self, limit_s: float) -> bytes:
        """Some bytes; empty at the end of the stream.  Raises `ConnectionBroken`."""
        while True:
            try:
                return self._socket.recv(65_536)
            except BlockingIOError:
                if not self._waiter.wait(self._socket.fileno(), limit_s):
                    self._fail(AnswerLate(f"no answer for {limit_s:g} s"))
            except OSError as error:
                self._fail(ConnectionBroken(_cause(error)))

    def _fail(self, error: ConnectionBroken) -> None:
        self.close()
        raise error

    def fill(self, limit_s: float) -> None:
        """Add received bytes to the buffer; the end of the stream is an error here."""
        data = self.receive(limit_s)
        if not data:
            self._fail(ConnectionBroken("the agent closed the connection"))
        self._buffer += data

    def take_line(self, limit_s: float) -> bytes:
        """One line without its end."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > HEAD_BYTES_LIMIT:
                self._fail(ConnectionBroken("a line of the answer is too long"))
            self.fill(limit_s)
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line

    def take(self, limit: int, limit_s: float) -> bytes:
        """At least one and at most `limit` bytes."""
        if not self._buffer:
            self.fill(limit_s)
        data = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return data

    def _read_head(self, limit_s: float, *, has_body: bool) -> Response:
        while True:
            status = self._read_status(limit_s)
            headers = self._read_headers(limit_s)
            if status >= 200:
                break
        if headers.get("connection", "").lower() == "close":
            self.is_reusable = False
        if not has_body:
            headers = {**headers, "transfer-encoding": "", "content-length": "0"}
        return Response(self, status, headers)

    def _read_status(self, limit_s: float) -> int:
        words = self.take_line(limit_s).split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            self._fail(ConnectionBroken("what answered does not speak HTTP/1.1; is this the agent's port?"))
        return int(words[1])

    def _read_headers(self, limit_s: float) -> dict[str, str]:
        headers: dict[str, str] = {}
        size = 0
        while line := self.take_line(limit_s):
            size += len(line)
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or size > HEAD_BYTES_LIMIT:
                self._fail(ConnectionBroken("the head of the answer is malformed or too long"))
            headers[name.strip().lower()] = value.strip()
        return headers


class SizedBody:
    """A request body that is too large to hold: its length in bytes and its parts."""

    def __init__(self, size_bytes: int, parts: Iterator[bytes]) -> None:
        self.size_bytes, self.parts = size_bytes, parts

    def __len__(self) -> int:
        return self.size_bytes


class Response:
    """An answer whose head was read; read the body to its end before the connection is used again."""

    def __init__(self, connection: Connection, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._connection = connection
        self.address = connection.address

    def chunks(self, limit_s: float = ANSWER_LIMIT_S) -> Iterator[bytes]:
        """The body piece by piece, as it arrives.  Raises `ConnectionBroken` when it ends too early."""
        if self.status == 204 or self.status == 304:
            return
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            yield from self._chunked(limit_s)
        elif "content-length" in self.headers:
            yield from self._counted(limit_s)
        else:
            yield from self._until_close(limit_s)

    def _chunked(self, limit_s: float) -> Iterator[bytes]:
        connection = self._connection
        while True:
            size_text = connection.take_line(limit_s).split(b";")[0].strip()
            try:
                left = int(size_text, 16)
            except ValueError:
                connection.close()
                raise ConnectionBroken("a chunk of the answer has no size") from None
            if left == 0:
                break
            while left:
                data = connection.take(left, limit_s)
                left -= len(data)
                yield data
            connection.take_line(limit_s)
        while connection.take_line(limit_s):
            continue

    def _counted(self, limit_s: float) -> Iterator[bytes]:
        text = self.headers["content-length"]
        if not text.isdigit():
            self._connection.close()
            raise ConnectionBroken(f"the answer has the length {text!r}")
        left = int(text)
        while left:
            data = self._connection.take(left, limit_s)
            left -= len(data)
            yield data

    def _until_close(self, limit_s: float) -> Iterator[bytes]:
        connection = self._connection
        connection.is_reusable = False
        while data := connection.take(65_536, limit_s) if connection._buffer else connection.receive(limit_s):  # noqa: SLF001  # Response is Connection's other half
            yield data

    def read(self, limit_s: float = ANSWER_LIMIT_S) -> bytes:
        """The whole body, at most 256 MiB."""
        parts: list[bytes] = []
        size = 0
        for part in self.chunks(limit_s):
            size += len(part)
            if size > BODY_BYTES_LIMIT:
                self._connection.close()
                raise ConnectionBroken("the answer is too large")
            parts.append(part)
        return b"".join(parts)

    def json(self, limit_s: float = ANSWER_LIMIT_S) -> Any:
        """The body as JSON; `ConnectionBroken` when it is none."""
        data = self.read(limit_s)
        try:
            return json.loads(data) if data else {}
        except ValueError:
            raise ConnectionBroken(f"the answer is not JSON: {data[:60]!r}") from None

    def events(self, silence_limit_s: float = SILENCE_LIMIT_S) -> Iterator[ServerEvent]:
        """Server-Sent Events until the stream ends; a comment counts as a sign of life."""
        return parse_events(_lines(self.chunks(silence_limit_s)))

    def close(self) -> None:
        """Give up the rest of the body; the connection is closed."""
        self._connection.close()


class ServerEvent:
    """One message of a stream: `id` to resume after, `kind` ("message" unless said), `data`."""

    __slots__ = ("data", "id", "kind")

    def __init__(self, id: str, kind: str, data: str) -> None:  # noqa: A002  # the field is called id in the standard
        self.id, self.kind, self.data = id, kind, data

    def __repr__(self) -> str:
        return f"ServerEvent({self.id!r}, {self.kind!r}, {self.data!r})"

    def json(self) -> Any:
        """The data as JSON."""
        try:
            return json.loads(self.data)
        except ValueError:
            raise ConnectionBroken(f"a message of the stream is not JSON: {self.data[:60]!r}") from None


def parse_events(lines: Iterator[bytes]) -> Iterator[ServerEvent]:
    """Group lines into events (WHATWG HTML, section 9.2.6); an event without its blank line is dropped."""
    last_id, kind = "", ""
    data: list[str] = []
    for raw in lines:
        if not raw:
            if data:
                yield ServerEvent(last_id, kind or "message", "\n".join(data))
            kind, data = "", []
            continue
        if raw.startswith(b":"):
            continue
        name, _, value = raw.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last_id = value


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        start = 0
        while (end := buffer.find(b"\n", start)) >= 0:
            yield bytes(buffer[start:end]).rstrip(b"\r")
            start = end + 1
        del buffer[:start]
        if len(buffer) > EVENT_BYTES_LIMIT:
            raise ConnectionBroken("a line of the stream is too long")
    if buffer:
        yield bytes(buffer)


def connect(address: Address, waiter: Waiter, limit_s: float) -> Connection | Unreached:
    """A connection to an agent that takes one in time."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        return Unreached(address, _cause(error))
    connection = Connection(sock, address, waiter)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(target)
        if code == errno.EINPROGRESS:
            if not waiter.wait(sock.fileno(), limit_s, for_writing=True):
                connection.close()
                return Unreached(address, "no answer", is_late=True)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    except BaseException:
        connection.close()
        raise
    if code:
        connection.close()
        return Unreached(address, os.strerror(code).lower())
    return connection


def _cause(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
