"""Working folders of tasks that are over: what of them is kept, how much, and for how long."""

import logging
import os
import stat
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarm_agent.folder import remove_tree
from swarm_agent.supervision.orders import parse_directory_name
from swarmsched.ids import AttemptKey, JobId

log = logging.getLogger(__name__)

SPARED_S = 600.0
BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """The working folder of an attempt that is over; it stays until then at most, less where room is needed."""

    attempt: int
    path: Path
    size_bytes: int
    until_utc_s: float


class KeptWork:
    """The folders DATA/jobs/<id>/<attempt>; use it in worker threads, one call at a time."""

    def __init__(self, directory: Path, retention_s: float, limit_bytes: int) -> None:
        self._directory, self._retention_s, self._limit_bytes = directory, retention_s, limit_bytes
        self._sizes: dict[Path, int] = {}  # of folders in which nothing changes any more
        self._closed: set[Path] = set()
        self.held_bytes: int | None = None  # of all of them; unknown until they were looked at

    def close(self, key: AttemptKey, now_utc_s: float, *, is_success: bool) -> None:
        """Nothing runs in the attempt's folder any more; its retention begins.

        Of one that succeeded only what it has written or changed stays: what was shipped can be had again.
        """
        folder = self._directory / key[0] / str(key[1])
        with suppress(FileNotFoundError):  # a task that runs in a folder of the node's has none
            self._closed.add(folder)
            if is_success:
                with suppress(RecursionError):  # then all of it stays as long as what failed does
                    _remove_untouched(folder / "work", folder.stat().st_mtime_ns)
            os.utime(folder, (now_utc_s, now_utc_s))

    def prune(self, now_utc_s: float, live: Collection[AttemptKey]) -> None:
        """Remove folders that are too old, and the oldest while all together exceed the limit."""
        ended = sorted(self._ended(live, now_utc_s))
        sizes = {folder: self._size(folder) for _, folder in ended}
        total = sum(sizes.values())
        for when_utc_s, folder in ended:
            if now_utc_s - when_utc_s > self._retention_s or total > self._limit_bytes:
                total -= sizes.pop(folder)
                remove_tree(folder)
                log.info("work folder removed path=%s", folder)
                with suppress(OSError):  # other attempts are still there
                    folder.parent.rmdir()
        self._sizes, self.held_bytes = sizes, sum(sizes.values())
        self._closed.intersection_update(sizes)

    def of_job(self, job_id: JobId, live: Collection[AttemptKey]) -> list[KeptFolder]:
        """What is kept of a job's attempts that are over; changes nothing here, and may run beside the others."""
        found = []
        for folder in (self._directory / job_id).glob("*"):
            key, work = parse_directory_name(f"{job_id}.{folder.name}"), folder / "work"
            with suppress(OSError, RecursionError):  # it is being removed, or lies too deep to be measured here
                if key and key.of_attempt not in live and work.is_dir():
                    size = self._sizes.get(folder) or _size_on_disk(folder)
                    until_utc_s = folder.stat().st_mtime + self._retention_s
                    found.append(KeptFolder(key.attempt, work, size, until_utc_s))
        return sorted(found, key=lambda each: each.attempt)

    def _ended(self, live: Collection[AttemptKey], now_utc_s: float) -> Iterator[tuple[float, Path]]:
        """(when, folder); one that nobody has closed may belong to a task that is staged just now."""
        for folder in self._directory.glob("*/*"):
            key = parse_directory_name(f"{folder.parent.name}.{folder.name}")
            when_utc_s = folder.stat().st_mtime
            if key and key.of_attempt not in live and (folder in self._closed or when_utc_s < now_utc_s - SPARED_S):
                yield when_utc_s, folder

    def _size(self, folder: Path) -> int:
        if folder not in self._sizes:
            try:
                self._sizes[folder] = _size_on_disk(folder)
            except RecursionError:
                told = subprocess.run(["du", "-sxB1", "--", folder], capture_output=True, check=False).stdout
                self._sizes[folder] = int(told.split()[0]) if told else 0
        return self._sizes[folder]


def _size_on_disk(folder: Path) -> int:
    return sum(
        os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * BLOCK_BYTES
        for _, folders, files, fd in os.fwalk(folder, follow_symlinks=False)
        for name in (*folders, *files)
    )


def _remove_untouched(work: Path, shipped_ns: int) -> None:
    """Remove the files that nobody has written, moved or changed since the tree was put there, and empty folders.

    The time of the last change of an inode cannot be set back, unlike that of its content.
    """
    for _, folders, files, fd in os.fwalk(work, topdown=False, follow_symlinks=False):
        for name in (*files, *folders):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                with suppress(OSError):  # something is left in it
                    os.rmdir(name, dir_fd=fd)
            elif status.st_ctime_ns < shipped_ns:
                os.unlink(name, dir_fd=fd)
    with suppress(OSError):  # as above
        work.rmdir()
