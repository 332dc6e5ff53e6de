"""A small process that waits with the shim's code loaded and forks one for each task: an interpreter less per task.

It ends when its connection to the agent does; the shims that it has forked live on.  If it dies first, the agent starts
another one, and shims by themselves meanwhile (`ShimLink`).
"""

import asyncio
import os
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm_agent.task import shim

RESTART_S = 1.0
REPLY_BYTES = 64
SHIM_ENV = ("LD_LIBRARY_PATH",)  # where a Python built as a shared library finds itself

CATCHABLE = [shim.SIGTERM, shim.SIGCHLD, shim.SIGPIPE, 1, 2, 3]  # that an agent may ignore, and ranks must not

OnForked = Callable[[int, int], None]
"""Given the pid and a pidfd of the shim; pid 0 when nobody knows whether there is one."""


def spawn(argv: list[str], actions: Sequence[tuple[Any, ...]]) -> int:
    """Start a process of the shim's code in a session of its own, without what the agent ignores or has open; its pid.

    Raises OSError.
    """
    env = {name: os.environ[name] for name in SHIM_ENV if name in os.environ}
    return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsid=True, setsigdef=CATCHABLE)


class ForkServer:
    """Forks shims on demand.  Everything belongs to the event loop's thread."""

    def __init__(self, python: str, program: Path) -> None:
        self.command = [python, "-I", "-S", str(program)]  # that starts a shim by itself, with its directory
        self.pid = 0  # of the server; 0 without one
        self._connection: socket.socket | None = None
        self._forking: deque[OnForked] = deque()  # in the order of the requests, which is that of the replies
        self._started_s = float("-inf")

    def start(self) -> None:
        """Start it, unless it runs or was started just now."""
        if self._connection or time.monotonic() < self._started_s + RESTART_S:
            return
        self._started_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = "/dev/null"
        with theirs:
            actions = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
            ]
            try:
                self.pid = spawn([*self.command, "serve"], actions)
            except OSError:  # shims are started by themselves, and say what is wrong
                ours.close()
                return
        ours.setblocking(False)
        self._connection = ours
        asyncio.get_running_loop().add_reader(ours, self._read)

    def stop(self) -> None:
        """Let it end; it forks what it was asked for before."""
        self._disconnect()

    def fork(self, directory: Path, fds: Sequence[int], on_forked: OnForked) -> bool:
        """Ask for a shim of this task with these descriptors (the lock, then the listening socket if there is one).

        False when it cannot be asked; then nothing was forked, and `on_forked` is not called.
        """
        self.start()
        if self._connection is None:
            return False
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
        try:
            self._connection.sendmsg([os.fsencode(directory)], rights)
        except OSError:
            return False
        self._forking.append(on_forked)
        return True

    def _read(self) -> None:
        assert self._connection is not None
        try:
            reply, fds, _, _ = socket.recv_fds(self._connection, REPLY_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            reply, fds = b"", []
        if reply and fds:
            self._forking.popleft()(int(reply), fds[0])
        elif reply:
            self._forking.popleft()(0, -1)
        else:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is None:
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self._connection = None
        pid, self.pid = self.pid, 0
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)  # the connection was its life
        forking, self._forking = self._forking, deque()
        for on_forked in forking:
            on_forked(0, -1)
