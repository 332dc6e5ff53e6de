"""One data directory, one agent: an advisory lock that the kernel drops when its holder dies."""

import fcntl
import os
import stat
from pathlib import Path
from typing import Self

from swarm_agent.folder import make_folder
from swarmsched.errors import StorageError

LOCK_FILE = "agent.lock"


class DataDirectoryLock:
    """Held from `acquire` to `release`; the file holds the process id of the newest holder, for people."""

    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / LOCK_FILE
        self._descriptor = -1

    def acquire(self) -> Self:
        """Take the lock, making the directory if need be; others may pass through it and see nothing of it.

        Raises `StorageError`, which names the process that has it.
        """
        try:
            make_folder(self._file.parent, 0o711)
            _close_to_others(self._file.parent)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            problem = f"cannot be used as data directory: {error.strerror}"
            raise StorageError(
                str(self._file.parent), problem, "check path and permissions, or set data_dir"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            problem = f"is in use by another agent, process {holder}"
            remedy = "stop that agent first, or give this one a data_dir of its own"
            raise StorageError(str(self._file.parent), problem, remedy) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        """Give the lock up; harmless when it is not held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _close_to_others(folder: Path) -> None:
    """A folder that an earlier agent, or somebody's `mkdir`, has left open; not one that many share, such as /tmp."""
    status = folder.stat()
    if status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX and status.st_mode & 0o066:
        folder.chmod(stat.S_IMODE(status.st_mode) & 0o711)
