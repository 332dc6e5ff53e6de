"""The ranks of one membership version, and what they can do together.

A group is made once for a version and thrown away with it.  Gloo tells of a peer that died only to its neighbours, and
of one that hangs to nobody, so a group can be closed from any thread: its own TCP connections are shut down, which ends
every operation here and, through the peers, everywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from swarm_elastic import _background

OPERATION_S = 86_400.0  # operations are ended by `close`, not by a clock
STATE_TAG = 1
LOOK_TURNS = 4  # as often it looks at its connections, which takes longer
ESTABLISHED = 1  # tcp(7): the first byte of TCP_INFO
GONE = "the group was closed, or a connection of it ended"
CLOSED = "the group was closed for a newer one"
TURN = datetime.timedelta(seconds=0.05)  # how often a wait looks whether its group was closed
POLLS, POLL_MOST_S = 16, 1e-3  # looks at a sum of a GPU in twice the time that it took so far; at least so often
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the process ends, or a sum, when a peer is gone
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_RUNTIME_CONNECT": "0",  # all connections while the group is built
}

_building = threading.Lock()

Address = tuple[str, int]


class GroupLost(Exception):
    """This group is of no more use: a peer died, or it was closed for a newer one."""


class PendingOperation(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when it is done.  Raises `GroupLost`."""


class Group(Protocol):
    """What training needs of a transport; every operation may raise `GroupLost`."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> PendingOperation:
        """Begin to sum a tensor of the training device over all ranks, in place."""

    def gather(self, row: list[int]) -> list[list[int]]:
        """Give a row of integers and get those of all ranks, in rank order."""

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send a contiguous tensor; sends to one rank are received in order."""

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to receive into a contiguous tensor."""

    def finish(self, transfers: list[Any]) -> None:
        """Wait until what `send` and `receive` have begun is done."""

    def close(self) -> None:
        """End all operations, here and at the peers; returns at once, from any thread, any number of times."""


class _Done:
    def wait(self) -> None:
        """It never began."""


class Alone:
    """A group of one, without a connection."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor) -> PendingOperation:
        """The sum of one."""
        return _Done()

    def gather(self, row: list[int]) -> list[list[int]]:
        """The one row."""
        return [row]

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """There is nobody."""
        raise GroupLost(f"rank {to} is not in a group of one")

    receive = send

    def finish(self, transfers: list[Any]) -> None:
        """Nothing was begun."""

    def close(self) -> None:
        """Nothing is open."""


class _GlooSum:
    """Forgets gloo's own handle when it is done, since a handle keeps the connections of a dead group alive.

    Gloo may miss that a connection has ended under a send (2.13: the operation waits for its time limit), so it is not
    enough to shut connections down: whoever waits looks now and then whether the group was closed, or is broken.
    """

    def __init__(self, group: GlooGroup, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self) -> None:
        problem = self._outcome()
        self._work = None
        if problem:
            raise GroupLost(problem)

    def _outcome(self) -> str:
        """What went wrong."""
        watch = _Watch(self._group)
        while not self._work.is_completed():
            is_late = _problem_of(lambda: self._work.wait(TURN))
            if is_late and watch.is_vain():
                return GONE
        return _problem_of(self._work.wait)


class _Watch:
    """Whether an operation is waited for in vain; asked once in each turn."""

    def __init__(self, group: GlooGroup) -> None:
        self._group, self._turns, self._broken = group, 0, 0

    def is_vain(self) -> bool:
        """True when the group was closed, or a connection of it has been gone for some turns."""
        self._turns += 1
        if self._turns % LOOK_TURNS == 0:
            self._broken = 0 if self._group.is_whole else self._broken + 1
        return self._group.is_closed or self._broken > 1


class GlooGroup:
    """Over TCP by gloo, for tensors in main memory.  Building waits until all members build."""

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout_s: float) -> None:
        """`store` is this version's alone.  Raises RuntimeError when a member does not come within `timeout_s`."""
        self.rank, self.size = rank, size
        self.is_closed = False
        self._closing, self._beginning = threading.Lock(), threading.Lock()
        device, self._listener = _device(host)
        options: Any = ProcessGroupGloo._Options()  # noqa: SLF001  # the only way to a device of our own
        timeout = datetime.timedelta(seconds=timeout_s)
        for name, value in {"devices": [device], "threads": 2, "timeout": timeout}.items():
            setattr(options, f"_{name}", value)
        store.set(f"listener/{rank}", f"{self._listener[0]} {self._listener[1]}")
        self._group: Any = ProcessGroupGloo(store, rank, size, options)
        self._group.set_timeout(datetime.timedelta(seconds=OPERATION_S))
        listeners = (store.get(f"listener/{each}").decode().split() for each in range(size) if each != rank)
        self._peers = {(host, int(port)) for host, port in listeners}
        self._established = _established(self._listener, self._peers)

    @property
    def is_whole(self) -> bool:
        """Whether all connections to its peers stand."""
        return _established(self._listener, self._peers) >= self._established

    def all_reduce(self, tensor: torch.Tensor) -> PendingOperation:
        return _GlooSum(self, self._begin("allreduce", [tensor]))

    def gather(self, row: list[int]) -> list[list[int]]:
        table = torch.zeros(self.size, len(row), dtype=torch.int64)
        table[self.rank] = torch.tensor(row)
        _GlooSum(self, self._begin("allreduce", [table])).wait()
        rows: list[list[int]] = table.tolist()
        return rows

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        return self._begin("send", [tensor], to, STATE_TAG)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        return self._begin("recv", [tensor], source, STATE_TAG)

    def finish(self, transfers: list[Any]) -> None:
        # A time limit would break the connection, so they are waited for in a thread of their own.
        problems: list[str] = []
        is_done = threading.Event()

        def wait() -> None:
            problems.extend(filter(None, (_problem_of(transfer.wait) for transfer in transfers)))
            is_done.set()

        _background.start("swarm-transfer", wait)
        watch = _Watch(self)
        while not is_done.wait(TURN.total_seconds()):
            if watch.is_vain():
                raise GroupLost(GONE)
        if problems:
            raise GroupLost(problems[0])

    def close(self) -> None:
        with self._closing:
            group, self._group, self.is_closed = self._group, None, True
        if group is None:
            return
        _shut_down(self._listener, self._peers)
        doomed = [group]
        del group
        # The end of a group waits for its threads, and those for the peers' last words.
        _background.start("swarm-drop", self._drop, doomed)

    def _drop(self, doomed: list[Any]) -> None:
        with self._beginning:  # who is in it holds the group, and must not be the last who lets go of it
            pass
        doomed.clear()

    def _begin(self, operation: str, *arguments: Any) -> Any:
        with self._beginning:
            return _begun(self._group, operation, *arguments)


class NcclGroup(GlooGroup):
    """Sums of tensors of a GPU by NCCL; all else, and the news that a peer is gone, by gloo beside it.

    A sum of NCCL that a peer has left runs on until its communicator is aborted, and then ends like any other, with
    whatever it had by then.  So nothing may abort it but `close`, and a sum counts only if it ended before that.
    State goes through main memory: for a send NCCL would make a communicator of the two, and wait for the other in it.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout_s: float, device: torch.device) -> None:
        self.device = device
        self._nccl: Any = None
        super().__init__(store, rank, size, host, timeout_s)
        try:
            self._connect(store)
        except Exception:
            self.close()
            raise

    def _connect(self, store: Store) -> None:
        """With all members: here, in the thread that builds, and not in the first sum."""
        from torch.distributed import ProcessGroupNCCL

        os.environ.update(NCCL_VARIABLES)
        options = ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=OPERATION_S)  # noqa: SLF001  # as torch's own does
        self._nccl = ProcessGroupNCCL(PrefixStore("nccl", store), self.rank, self.size, options)
        self._nccl.eager_connect_single_device(self.device)

    @property
    def has_failed(self) -> bool:
        """Whether NCCL's own connections, which may be on another network, are of no more use."""
        nccl = self._nccl
        return nccl is not None and nccl.get_error().name != "SUCCESS"

    def all_reduce(self, tensor: torch.Tensor) -> PendingOperation:
        return _NcclSum(self, _begun(self._nccl, "allreduce", [tensor]))

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        return super().send(tensor.cpu(), to)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        if not tensor.is_cuda:
            return super().receive(tensor, source)
        landed = torch.empty_like(tensor, device="cpu")
        return _Landing(super().receive(landed, source), landed, tensor)

    def close(self) -> None:
        super().close()  # first, so that no sum is believed that the abort has ended
        with self._closing:
            nccl, self._nccl = self._nccl, None
        if nccl is not None:
            _background.start("swarm-abort", nccl.abort)


class _Landing:
    """Goes on to a GPU when it is received."""

    def __init__(self, work: Any, landed: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work, self._landed, self._tensor = work, landed, tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._landed)


class _NcclSum:
    """Waits on the host as well: that a sum failed must be known before the optimizer uses it."""

    def __init__(self, group: NcclGroup, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self) -> None:
        work, self._work = self._work, None
        problem = _problem_of(work.wait) or self._outcome()  # the first has only the GPU wait
        if problem:
            raise GroupLost(problem)

    def _outcome(self) -> str:
        """What went wrong."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._group.device))
        watch, begun_s = _Watch(self._group), time.monotonic()
        look_s = begun_s + TURN.total_seconds()
        while not done.query():
            now_s = time.monotonic()
            if now_s > look_s:
                look_s = now_s + TURN.total_seconds()
                if watch.is_vain() or self._group.has_failed:
                    self._group.close()  # all that this GPU is given from now on waits behind the sum
                    break
            time.sleep(min(POLL_MOST_S, (now_s - begun_s) / POLLS))
        return GONE if self._group.is_closed else ""


def build(store: Store, rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> Group:
    """The group of a version for a model on this device; waits for all members.  Raises RuntimeError."""
    if size == 1:
        return Alone()
    if device.type == "cuda":
        return NcclGroup(store, rank, size, host, timeout_s, device)
    return GlooGroup(store, rank, size, host, timeout_s)


def _begun(group: Any, operation: str, *arguments: Any) -> Any:
    """The work of an operation of torch's group, which is None once that was closed.  Raises `GroupLost`."""
    if group is None:
        raise GroupLost(CLOSED)
    works: list[Any] = []
    problem = _problem_of(lambda: works.append(getattr(group, operation)(*arguments)))
    if problem:
        raise GroupLost(problem)
    return works.pop()


def _problem_of(act: Any) -> str:
    """What went wrong, as text: the error itself holds frames, and those what must be let go of."""
    try:
        act()
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""


def _device(host: str) -> tuple[Any, Address]:
    """Gloo's endpoint for one group, and where it listens, by which the group's connections are known."""
    with _building:
        before = set(_sockets())
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        where = {"interface": interface.split(",")[0]} if interface else {"hostname": host}
        device = ProcessGroupGloo.create_device(**where)
        for descriptor, _ in set(_sockets()) - before:
            names = _names(descriptor)
            if names and names[1] is None:
                return device, names[0]
    raise RuntimeError(f"gloo does not listen on {host}")


def _shut_down(listener: Address, peers: set[Address]) -> None:
    """End the connections from or to these endpoints; works on those of this process only."""
    for connection in _connections(listener, peers):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _established(listener: Address, peers: set[Address]) -> int:
    """How many of the connections stand."""
    return sum(
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        for connection in _connections(listener, peers)
    )


def _connections(listener: Address, peers: set[Address]) -> Iterator[socket.socket]:
    for descriptor, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            own, peer = connection.getsockname()[:2], connection.getpeername()[:2]
            if own == listener or peer in peers:
                yield connection


def _sockets() -> list[tuple[int, str]]:
    """Descriptors of this process that are sockets, and which: a number may soon be another's."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            link = str(path.readlink())
            if link.startswith("socket:"):
                found.append((int(path.name), link))
    return found


def _names(descriptor: int) -> tuple[Address, Address | None] | None:
    """Own and the peer's address of a TCP socket; no peer: it listens."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return None
        is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return connection.getsockname()[:2], None if is_listening else connection.getpeername()[:2]
    return None
