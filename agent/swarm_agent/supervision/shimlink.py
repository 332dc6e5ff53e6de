"""One shim as the agent holds on to it: starting it, finding it again, telling it what to do, cleaning up after it."""

import fcntl
import hashlib
import os
import py_compile
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from swarm_agent.supervision.forkserver import ForkServer, spawn
from swarm_agent.supervision.limits import kill_scope, scope_name
from swarm_agent.supervision.orders import LaunchFile, ReadFacts
from swarm_agent.supervision.warm import Waiting, WarmStart, has_ended, warm_start
from swarm_agent.task import shim
from swarm_agent.task.account import Account
from swarmsched.task import TaskOrder

CHILD_LISTEN_FD, CHILD_LOCK_FD = shim.INHERITED_FDS
FIRST_FACT_S = 5.0


class ShimLink:
    """A task's directory and, while its shim lives, the two handles on it: a pidfd and the commands FIFO."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.facts = ReadFacts()
        self.pidfd = -1
        self._commands = self._lease = -1
        self._is_child = False
        self._is_starting = False
        self._listen_fd = -1  # kept while nobody knows whether the shim has it

    @property
    def facts_path(self) -> Path:
        """The shim's record."""
        return self.directory / "facts"

    def start(self, launch: LaunchFile, listen_fd: int, server: ForkServer, watch: Callable[[], None]) -> None:
        """Write the launch file and have the shim forked, in a session of its own. `watch` is called once `pidfd` is
        there, or when nobody can say whether there is a shim. Raises OSError; then nothing runs."""
        (self.directory / "launch").write_bytes(launch.to_bytes())
        os.mkfifo(self.directory / "commands", 0o600)
        self._open_commands()
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fds = [lock, listen_fd] if listen_fd >= 0 else [lock]
            self._is_starting = server.fork(self.directory, fds, partial(self._forked, watch))
            if not self._is_starting:
                self._spawn(lock, listen_fd, server.command)
        finally:
            os.close(lock)
        if not self._is_starting:
            watch()
        elif listen_fd >= 0:
            self._listen_fd = os.dup(listen_fd)

    def start_warm(self, launch: LaunchFile, waiting: Waiting) -> None:
        """Give the task to a shim that waits.  Raises OSError; then nothing runs."""
        self.facts.has_shim(waiting.pid)
        self.pidfd = waiting.pidfd
        waiting.hand_over(self.directory, launch.to_bytes())
        self._open_commands()

    def account(self) -> Account | None:
        """The account that the shim was told to start ranks as; None where it was told nothing."""
        with suppress(OSError, ValueError, StopIteration):
            launch = shim.Launch((self.directory / "launch").read_bytes())
            return Account("", "", "", launch.uid, launch.gid, tuple(launch.groups))
        return None

    def warm_start(self, account: Account) -> WarmStart | None:
        """What waits for workers like this one is started with."""
        with suppress(OSError, ValueError, StopIteration):
            launch = shim.Launch((self.directory / "launch").read_bytes())
            found = warm_start(tuple(launch.argv), dict(each.split("=", 1) for each in launch.ranks[0][1]), account)
            return found[0] if found else None
        return None

    def start_alone(self, command: Sequence[str]) -> None:
        """The server died and has not forked it: start it by itself.  Raises OSError; then nothing runs."""
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._spawn(lock, self._listen_fd, command)
        finally:
            os.close(lock)
            self._drop_listener()

    def _drop_listener(self) -> None:
        if self._listen_fd >= 0:
            os.close(self._listen_fd)
            self._listen_fd = -1

    def _spawn(self, lock: int, listen_fd: int, command: Sequence[str]) -> None:
        """Without the server: with an interpreter of its own."""
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, str(self.directory / "shim.err"), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, lock, CHILD_LOCK_FD),
        ]
        if listen_fd >= 0:
            actions.append((os.POSIX_SPAWN_DUP2, listen_fd, CHILD_LISTEN_FD))
        pid = spawn([*command, str(self.directory)], actions)
        self._is_child = True
        self.facts.has_shim(pid)
        self.pidfd = os.pidfd_open(pid)

    def _forked(self, watch: Callable[[], None], pid: int, pidfd: int) -> None:
        """The server has answered, or died; whoever has let go of the task meanwhile wants no handle."""
        if not self._is_starting:
            if pidfd >= 0:
                os.close(pidfd)
            return
        self._is_starting = False
        if pid:
            self.facts.has_shim(pid)
            self.pidfd = pidfd
            self._drop_listener()
        watch()

    def attach(self) -> bool:
        """Find the shim of an earlier life; False when it is gone, whatever its record says."""
        if not self._is_locked():
            self.facts.read(self.facts_path)
            return False
        deadline_s = time.monotonic() + FIRST_FACT_S
        while not self.facts.shim_pid and time.monotonic() < deadline_s:
            self.facts.read(self.facts_path)  # it was started an instant before the last agent died
            if not self.facts.shim_pid:
                time.sleep(0.01)
        try:
            self.pidfd = os.pidfd_open(self.facts.shim_pid)
        except (ProcessLookupError, ValueError, OSError):
            return False
        if shim.start_ticks(self.facts.shim_pid) != self.facts.shim_start_ticks:
            self.close()
            return False
        self._open_commands()
        return True

    def make_token(self) -> str:
        """A fresh secret between the ranks and the agent, kept for the agent's next life.  Raises OSError."""
        token = secrets.token_hex(16)
        (self.directory / "token").write_text(token)
        return token

    def token(self) -> str:
        """The secret that the ranks were given; empty when an earlier version started them without."""
        with suppress(OSError):
            return (self.directory / "token").read_bytes().decode("ascii", "replace")  # its ranks are told of another
        return ""

    def set_lease(self, until_s: float) -> None:
        """Write until when the ranks may run; the shim of an earlier version has no such file, and needs none.

        Raises OSError; then the earlier time stands.
        """
        if self._lease < 0:
            flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT if self.pidfd < 0 else 0)
            try:
                self._lease = os.open(self.directory / "lease", flags, 0o600)
            except FileNotFoundError:
                return
        os.pwrite(self._lease, shim.lease_text(until_s), 0)

    def tell(self, command: str) -> bool:
        """Send a command; False when the shim is gone or does not read."""
        if self._commands < 0:
            return False
        try:
            os.write(self._commands, command.encode() + b"\n")
        except OSError:
            return False
        return True

    def wait_end(self, limit_s: float) -> bool:
        """Block until the shim has ended; false when it has not within `limit_s`."""
        return has_ended(self.pidfd, limit_s)

    def reap(self) -> None:
        """Take the ended shim's exit status, if it was our child."""
        if self._is_child:
            with suppress(ChildProcessError):
                os.waitpid(self.facts.shim_pid, os.WNOHANG)
            self._is_child = False

    def close(self) -> None:
        """Let go of the handles; the shim runs on."""
        for fd in (self.pidfd, self._commands, self._lease):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self._commands = self._lease = -1
        self._is_starting = False
        self._drop_listener()

    def remove(self) -> None:
        """Delete the control files.  They lie in one folder, and no stranger's: `rmtree` would take far longer."""
        with suppress(OSError):
            for name in os.listdir(self.directory):  # noqa: PTH208
                os.unlink(self.directory / name)  # noqa: PTH108
            self.directory.rmdir()

    def last_error(self) -> str:
        """What a shim that crashed wrote last."""
        with suppress(OSError):
            lines = (self.directory / "shim.err").read_text(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else ""
        return ""

    def _open_commands(self) -> None:
        # Open for both, so that commands wait in the FIFO for a shim that is still starting.
        self._commands = os.open(self.directory / "commands", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _is_locked(self) -> bool:
        try:
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False


def compile_shim(folder: Path) -> Path:
    """The shim as byte code, which spares every start the compiler's 10 ms and 2 MB."""
    source = Path(shim.__file__)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    target = folder / f"shim-{sys.implementation.cache_tag}-{digest}.pyc"
    if not target.exists():
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(source), cfile=str(target), doraise=True, invalidation_mode=mode)
    return target


def end_leftovers(order: TaskOrder, facts: ReadFacts) -> bool:
    """SIGKILL what a killed shim left behind; False once nothing is left.

    They are known by the sessions of the recorded ranks, as long as their leaders are the processes that were
    recorded, and by the task's variables in their environment, which children inherit: of an elastic job, or
    of one with several groups, a node may have several tasks of one attempt.
    """
    kill_scope(scope_name(order, facts.shim_pid))
    sessions = {pid for pid, ticks in facts.rank_starts.items() if shim.start_ticks(pid) == ticks}
    variables = [f"SWARM_JOB_ID={order.job_id}", f"SWARM_ATTEMPT={order.attempt}", f"SWARM_NODE={order.node}"]
    variables += [f"SWARM_WORKER={order.part}"] if order.is_worker else []
    variables += [f"SWARM_GROUP={order.spec.group}"] if order.groups else []
    marks = [variable.encode() for variable in variables]
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    found = [pid for pid in pids if pid != os.getpid() and _belongs(pid, sessions, marks)]
    for pid in found:
        shim.send(pid, shim.SIGKILL)
    return bool(found)


def _belongs(pid: int, sessions: set[int], marks: Iterable[bytes]) -> bool:
    fields = shim.read_stat(pid)
    if not fields or fields[0] == b"Z":
        return False
    if int(fields[3]) in sessions:
        return True
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return False
    return all(mark in variables for mark in marks)
