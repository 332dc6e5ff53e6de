"""A worker's board: short texts by name, which the other members of its plans read where the plan says it is.

A board knows no password, but a secret that agents hand on with the address.  Whoever has not shown it within a moment
is hung up on.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import socketserver
import threading
from contextlib import suppress
from typing import Any, cast

REQUEST_BYTES_MAX = 1 << 10
ANSWER_BYTES_MAX = 1 << 20
PATIENCE_S = 2.0


class Board:
    """This worker's own; any thread may show and read."""

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_hex(16)
        self._texts: dict[str, str] = {}
        kind = _ServerV6 if ":" in host else _Server
        self._server = kind((host, 0), _Reader)
        self._server.board = self
        port = self._server.server_address[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        threading.Thread(target=self._server.serve_forever, name="swarm-board", daemon=True).start()

    def show(self, name: str, text: str) -> None:
        """Have others read it from now on."""
        self._texts[name] = text

    def text(self, name: str) -> str | None:
        """What is shown."""
        return self._texts.get(name)

    def close(self) -> None:
        """Show nothing more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    board: Board


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Reader(socketserver.StreamRequestHandler):
    timeout = PATIENCE_S

    def handle(self) -> None:
        board = cast("_Server", self.server).board
        with suppress(OSError, ValueError, LookupError, RecursionError):
            asked = json.loads(self.rfile.readline(REQUEST_BYTES_MAX))
            if isinstance(asked, list) and hmac.compare_digest(str(asked[0]).encode(), board.secret.encode()):
                self.wfile.write(json.dumps(board.text(str(asked[1]))).encode() + b"\n")


def read(endpoint: tuple[str, int], secret: str, name: str) -> str | None:
    """What another's board shows by that name; None where it shows nothing.  Raises OSError where it is away."""
    with socket.create_connection(endpoint, PATIENCE_S) as connection:
        connection.sendall(json.dumps([secret, name]).encode() + b"\n")
        with connection.makefile("rb") as stream:
            line = stream.readline(ANSWER_BYTES_MAX)
    if not line:
        raise ConnectionError("the board hung up")
    found: Any = json.loads(line)
    return found if isinstance(found, str) else None
