"""Samples that ranks of another group load: they `serve` a dataset, and the ranks that train ask for samples by number.

The group is that of a job with `[[group]]` tables (docs/how-to/groups.md).  Its first rank listens where the swarm has
kept a port for it and knows the others.  Each side shows by HMAC-SHA-256 that it has the secret of the attempt, which
the swarm gives to ranks of this job alone: samples travel as pickle, which would run what a stranger sends.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pickle
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

NONCE_BYTES = 32
INDICES_MOST = 65_536  # of one request
GREETING_S = 10.0  # for a stranger to show that it is none
RETRY_S = 0.2
LOOK_AGAIN_S = 30.0  # for ranks that have come since
GET, LIST, JOIN = b"G", b"L", b"J"
FINE, FAILED = 0, 1


class NoSample(RuntimeError):
    """A sample that could not be had: the dataset's own error, or nobody who serves."""


def serve(dataset: Any) -> None:
    """Load samples of a map-style dataset for the ranks that train, until the swarm stops this rank.

    Each connection has a thread, so the dataset is asked by several at once; more ranks of the group use more cores.
    RuntimeError outside of a job with groups.
    """
    group = os.environ.get("SWARM_GROUP")
    if not group:
        raise RuntimeError("serve() needs a group of ranks of its own: write a [[group]] table for it in the job file")
    is_first = os.environ.get("SWARM_RANK") == "0"
    server = _Server(("", int(os.environ["MASTER_PORT"]) if is_first else 0), dataset, _secret())
    if not is_first:
        threading.Thread(target=_join, args=(_first_of(group), server.server_address[1]), daemon=True).start()
    with server:
        server.serve_forever()


def served(dataset: Any, group: str = "input", *, timeout_s: float = 300.0) -> Any:
    """The same dataset, whose samples the ranks of that group load; the dataset itself where there is no such group.

    `timeout_s` is for how long a sample is waited for while none of these ranks answers; then `NoSample` is raised.
    """
    if group not in os.environ.get("SWARM_GROUPS", "").split(","):
        return dataset
    return _Served(dataset, _first_of(group), timeout_s)


def _secret() -> bytes:
    return os.environ["SWARM_JOB_SECRET"].encode()


def _first_of(group: str) -> tuple[str, int]:
    name = f"SWARM_GROUP_{group.upper().replace('-', '_')}"
    return os.environ[f"{name}_HOST"], int(os.environ[f"{name}_PORT"])


def _join(first: tuple[str, int], port: int) -> None:
    """Tell the first rank of the group where this one listens, again whenever that rank has begun anew."""
    while True:
        with suppress(OSError, EOFError), closing(SampleLink(first, _secret())) as connection:
            connection.ask(JOIN, struct.pack("!H", port))
            connection.wait_for_end()
        time.sleep(RETRY_S)


class _Served:
    """A dataset of which others load the samples."""

    def __init__(self, dataset: Any, first: tuple[str, int], timeout_s: float) -> None:
        self._dataset, self._first, self._timeout_s = dataset, first, timeout_s
        self._begin()

    def _begin(self) -> None:
        self._mine = threading.local()  # a connection to each server, for each thread
        self._lock = threading.Lock()
        self._made: list[SampleLink] = []  # of all threads
        self._servers: list[tuple[str, int]] = []
        self._looked_s = float("-inf")
        self._turn = 0
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="swarm_elastic served")
        self._pid = os.getpid()

    def __getstate__(self) -> tuple[Any, tuple[str, int], float]:
        """What another process needs; it has connections of its own."""
        return self._dataset, self._first, self._timeout_s

    def __setstate__(self, state: tuple[Any, tuple[str, int], float]) -> None:
        self._dataset, self._first, self._timeout_s = state
        self._begin()

    def close(self) -> None:
        """End its connections; whatever is asked afterwards makes others."""
        made, self._made = self._made, []
        for connection in made:
            connection.close()
        self._mine = threading.local()

    def __del__(self) -> None:
        if self.__dict__.get("_pid") == os.getpid():
            self.close()
            self._pool.shutdown(wait=False)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples by their numbers, in that order; each server loads a part of them."""
        if os.getpid() != self._pid:  # a fork has no threads, and must not use connections of others
            self._begin()
        until_s = time.monotonic() + self._timeout_s
        wanted = [int(index) for index in indices]
        parts = max(1, min(len(wanted), len(self._known(until_s))))
        size = min(INDICES_MOST, max(1, -(-len(wanted) // parts)))
        pieces = [wanted[at : at + size] for at in range(0, len(wanted), size)]
        if len(pieces) == 1:
            return self._fetch(pieces[0], until_s)
        return [
            sample for samples in self._pool.map(lambda each: self._fetch(each, until_s), pieces) for sample in samples
        ]

    def _known(self, until_s: float) -> list[tuple[str, int]]:
        """Where servers listen; asked again once in a while."""
        with self._lock:
            if not self._servers or time.monotonic() >= self._looked_s + LOOK_AGAIN_S:
                others = json.loads(self._ask([self._first], until_s, LIST))
                self._servers = [self._first, *[(str(host), int(port)) for host, port in others]]
                self._looked_s = time.monotonic()
            return self._servers

    def _fetch(self, indices: list[int], until_s: float) -> list[Any]:
        with self._lock:
            self._turn += 1
            at = self._turn % len(self._servers)
            servers = self._servers[at:] + self._servers[:at]
        body = self._ask(servers, until_s, GET, struct.pack(f"!{len(indices)}q", *indices))
        samples = pickle.loads(body)  # noqa: S301  # of who has shown to be of this job
        if len(samples) != len(indices):
            raise NoSample(f"{len(samples)} samples came for {len(indices)}")
        return list(samples)

    def _ask(self, servers: Sequence[tuple[str, int]], until_s: float, what: bytes, body: bytes = b"") -> bytes:
        """The answer of the first of them that gives one, in turn until the time is over."""
        held = self._mine.__dict__.setdefault("connections", {})
        while True:
            for server in servers:
                try:
                    if server not in held:
                        held[server] = SampleLink(server, _secret())
                        self._made.append(held[server])
                    return bytes(held[server].ask(what, body))
                except (OSError, EOFError):
                    if server in held:
                        held.pop(server).close()
            if time.monotonic() >= until_s:
                raise NoSample(f"no rank at {servers[0][0]}:{servers[0][1]} has served for {self._timeout_s:g} s")
            time.sleep(RETRY_S)


class SampleLink:
    """A connection to a rank that serves, which has shown that it is of this job; OSError or EOFError where it ends."""

    def __init__(self, server: tuple[str, int], secret: bytes) -> None:
        self._socket = socket.create_connection(server, GREETING_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs, mine = _read(self._socket, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            self._socket.sendall(mine + _proof(secret, b"asks", theirs, mine))
            if not hmac.compare_digest(_read(self._socket, 32), _proof(secret, b"serves", mine, theirs)):
                raise OSError(f"{server[0]}:{server[1]} is not of this job")
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, what: bytes, body: bytes = b"") -> bytes:
        """One question and its answer; `NoSample` with the words of the dataset's own error."""
        self._socket.sendall(what + struct.pack("!I", len(body)) + body)
        state, size = struct.unpack("!BQ", _read(self._socket, 9))
        answer = _read(self._socket, size)
        if state == FAILED:
            raise NoSample(answer.decode(errors="replace"))
        return answer

    def wait_for_end(self) -> None:
        """Until the other side has gone."""
        self._socket.recv(1)

    def close(self) -> None:
        """End it."""
        self._socket.close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], dataset: Any, secret: bytes) -> None:
        self.dataset, self.secret = dataset, secret
        self.others: dict[int, tuple[str, int]] = {}  # of this group, by their connections
        super().__init__(address, _Answers)

    def server_bind(self) -> None:
        """On all addresses of both families: the swarm has told the others one of them."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asks may go at any time, and strangers are told nothing."""


class _Answers(socketserver.BaseRequestHandler):
    """One connection."""

    server: _Server

    def handle(self) -> None:
        link = self.request
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(GREETING_S)
        mine = secrets.token_bytes(NONCE_BYTES)
        link.sendall(mine)
        theirs, proof = _read(link, NONCE_BYTES), _read(link, 32)
        if not hmac.compare_digest(proof, _proof(self.server.secret, b"asks", mine, theirs)):
            return
        link.sendall(_proof(self.server.secret, b"serves", theirs, mine))
        link.settimeout(None)
        try:
            while True:
                what, size = _read(link, 1), struct.unpack("!I", _read(link, 4))[0]
                if size > 8 * INDICES_MOST:
                    return
                state, answer = self._answer(what, _read(link, size))
                link.sendall(struct.pack("!BQ", state, len(answer)))
                link.sendall(answer)
        finally:
            self.server.others.pop(id(self), None)

    def _answer(self, what: bytes, body: bytes) -> tuple[int, bytes]:
        if what == LIST:
            return FINE, json.dumps(list(self.server.others.values())).encode()
        if what == JOIN and len(body) == 2:
            self.server.others[id(self)] = (
                self.client_address[0].removeprefix("::ffff:"),
                struct.unpack("!H", body)[0],
            )
            return FINE, b""
        if what != GET or not body or len(body) % 8:
            return FAILED, b"this is no question"
        indices = list(struct.unpack(f"!{len(body) // 8}q", body))
        dataset = self.server.dataset
        try:
            many = getattr(dataset, "__getitems__", None)
            samples = list(many(indices)) if many is not None else [dataset[index] for index in indices]
            return FINE, pickle.dumps(samples, protocol=5)
        except Exception as error:  # noqa: BLE001  # of whatever kind, it is told where the sample is missing
            named = f"{indices[:8]}{' ...' if len(indices) > 8 else ''}"
            return FAILED, f"dataset{named} failed where it is served: {type(error).__name__}: {error}".encode()


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, who + first + second, hashlib.sha256).digest()


def _read(link: socket.socket, size: int) -> bytes:
    """Just so many bytes; EOFError where it ends before."""
    parts, left = [], size
    while left:
        part = link.recv(min(left, 1 << 20))
        if not part:
            raise EOFError("the connection has ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
