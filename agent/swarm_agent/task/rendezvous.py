"""The port on which rank 0 will wait for the others: bound early, so that nobody else can take it meanwhile.

The owner of rank 0 binds and listens before the gang is committed; the other owners connect to prove that they can
reach it; the shim inherits the socket and closes it just before rank 0 starts, which then binds the port itself.
Nobody accepts here: the kernel completes the probes' handshakes and drops them with the socket, which leaves no
connection in TIME_WAIT that could hinder the next bind.

Rank 0 may import for a while before it binds, and the port is nobody's meanwhile.  So that another agent of this
machine does not give it to a task of its own, the shim holds a name in the abstract namespace of Unix sockets for as
long as it lives.
"""

import asyncio
import errno
import os
import socket
from dataclasses import dataclass

from swarm_agent.task import shim
from swarmsched.ids import TaskKey

BACKLOG = 512  # one probe per node of a gang may stand unaccepted


class NoFreePort(OSError):
    """Every port of the range is taken; nothing is bound."""


@dataclass(frozen=True, slots=True)
class BoundPort:
    """A listening socket that waits for its task."""

    host: str
    port: int
    socket: socket.socket


class Rendezvous:
    """The ports held for tasks that have not started yet."""

    def __init__(self, host: str, ports: tuple[int, int]) -> None:
        self._host, self._ports = host, ports
        self._bound: dict[TaskKey, BoundPort] = {}
        self._next_port = ports[0]  # goes round, so that a port just released is the last to be used again

    def bind(self, key: TaskKey) -> BoundPort:
        """Bind a free port for the task; the same one again when asked again.  Raises `NoFreePort` or OSError."""
        if key not in self._bound:
            self._bound[key] = self._first_free()
        return self._bound[key]

    def take(self, key: TaskKey) -> BoundPort | None:
        """Hand the port over: the caller owns the socket from now on."""
        return self._bound.pop(key, None)

    def release(self, key: TaskKey) -> None:
        """Close the port, if it is still held."""
        bound = self._bound.pop(key, None)
        if bound:
            bound.socket.close()

    def close(self) -> None:
        """Close all."""
        for key in list(self._bound):
            self.release(key)

    def _first_free(self) -> BoundPort:
        low, high = self._ports
        held = {bound.port for bound in self._bound.values()}
        for is_last_resort in (False, True):  # most tasks bind at once or never: a promised port is better than none
            for _ in range(high - low + 1):
                port = self._next_port
                self._next_port = low if port >= high else port + 1
                if port in held:
                    continue
                listening = listen(self._host, port)
                if listening and (is_last_resort or not is_promised(port)):
                    return BoundPort(self._host, port, listening)
                if listening:
                    listening.close()
        raise NoFreePort(f"no free port of {low}-{high} on {self._host}; widen rendezvous_ports")


def listen(host: str, port: int) -> socket.socket | None:
    """A listening socket, or None when the port is in use.  Other errors (no such address) are raised."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    return listening


def is_promised(port: int) -> bool:
    """True while the shim of some agent's task, on this machine, holds the port's name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.bind(shim.PORT_NAME % port)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


async def probe(host: str, port: int, *, timeout_s: float, attempts: int) -> str:
    """Try to connect; an empty string when it worked, otherwise the last error in words."""
    problem = "not tried"
    for _ in range(attempts):
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s, {attempts} times"
        except OSError as error:
            is_plain = error.errno and error.errno > 0  # negative: of name resolution, which words it well
            problem = os.strerror(error.errno) if is_plain and error.errno else str(error)
        else:
            return ""
    return problem
