"""Reading a checkpoint from a job's folder: its manifest, and copies of its files in the blob store.

The folder belongs to the job, which may change it at any moment and need not be friendly, while the agent may be
root.  So every step is taken relative to an open folder and no link is followed: what is read lies in that folder.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm_agent.room import NoRoom
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.task.tasksocket import Declined
from swarmsched.tree import (
    DEPTH_LIMIT,
    ENTRIES_LIMIT,
    FILE_BYTES_LIMIT,
    TREE_BYTES_LIMIT,
    BadTree,
    EntryKind,
    Tree,
    TreeEntry,
    target_problem,
)

READ_BYTES = 2**20
TOO_LARGE_REMEDY = "keep checkpoints on a file system that all nodes share: checkpoint_dir, checkpoint_dir_shared"
CHANGED_REMEDY = "name a checkpoint when it is complete, and do not touch it before it is committed"

Reader = Callable[[int], tuple[str, int]]
"""From an open file to its SHA-256 and size."""


def pack(
    folder: Path,
    name: str,
    blobs: BlobStore,
    uid: int = -1,
    limit_bytes: int = 2**63,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Tree:
    """Copy every file below `folder`/`name` into the store, on disk before this returns; for a worker thread.

    The loop's thread hands the manifest's blobs to `BlobStore.admit`.  With `uid` 0 or above, files of other accounts
    are refused.  Raises `Refusal`; then nothing is kept.
    """
    walk = _Walk(lambda source: blobs.import_file(source, may_go_on), uid, limit_bytes)
    try:
        return walk.tree(folder, name)
    except Declined:
        blobs.abandon(entry.sha256 for entry in walk.entries if entry.kind is EntryKind.FILE)
        raise


def manifest(folder: Path, name: str) -> Tree:
    """The manifest of what is there now; for a worker thread.  Raises `Refusal`."""
    return _Walk(_digest_of).tree(folder, name)


def size_of(folder: Path, name: str) -> int:
    """Bytes of all files of a checkpoint, links not followed; for a worker thread.  Raises `Refusal`."""
    try:
        root = os.lstat(folder / name)
        if not stat.S_ISDIR(root.st_mode):
            return root.st_size
        found, above = 0, len(str(folder)) + 1
        for parent, _, files in os.walk(folder / name):
            if parent.count("/", above) >= DEPTH_LIMIT:
                raise _too_deep(name)
            found += sum(os.lstat(os.path.join(parent, file)).st_size for file in files)  # noqa: PTH118
    except OSError as error:
        raise _unreadable(folder / name, error) from error
    return found


@dataclass(slots=True)
class _Walk:
    """One pass over one checkpoint."""

    read: Reader
    uid: int = -1
    limit_bytes: int = 2**63
    entries: list[TreeEntry] = field(default_factory=list)
    total_bytes: int = 0

    def tree(self, folder: Path, name: str) -> Tree:
        try:
            root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._visit(root, name, name)
            finally:
                os.close(root)
            return Tree.of(self.entries)
        except BadTree as error:
            raise Declined("bad_checkpoint", f"{folder / name}: {error}", TOO_LARGE_REMEDY) from error
        except NoRoom as error:
            raise Declined("storage", f"{folder / name} was not copied: {error.strerror}", TOO_LARGE_REMEDY) from error
        except OSError as error:
            raise _unreadable(folder / name, error) from error

    def _visit(self, parent: int, name: str, path: str) -> None:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if len(self.entries) >= ENTRIES_LIMIT:
            raise Declined("too_large", f"the checkpoint has more than {ENTRIES_LIMIT} files", TOO_LARGE_REMEDY)
        if stat.S_ISDIR(found.st_mode):
            self._visit_folder(parent, name, path)
        elif stat.S_ISLNK(found.st_mode):
            self._visit_link(os.readlink(name, dir_fd=parent), path)
        elif stat.S_ISREG(found.st_mode):
            self._visit_file(parent, name, path)
        else:
            raise Declined("bad_checkpoint", f"{path} is no file, folder or link", "leave sockets and pipes out of it")

    def _visit_folder(self, parent: int, name: str, path: str) -> None:
        if path.count("/") >= DEPTH_LIMIT:  # before there is an open folder for each of thousands
            raise _too_deep(path)
        here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            names = sorted(os.listdir(here))  # noqa: PTH208
            if not names:
                self.entries.append(TreeEntry(path, EntryKind.DIR))
            for below in names:
                self._visit(here, below, f"{path}/{below}")
        finally:
            os.close(here)

    def _visit_link(self, target: str, path: str) -> None:
        inner = path.partition("/")[2]
        if not inner:
            raise Declined("bad_checkpoint", f"{path} is a link to {target!r}", "commit the name that it points to")
        problem = target_problem(inner, target)  # from the checkpoint's own folder, which is all that is copied
        if problem:
            raise Declined("bad_checkpoint", f"{path} {problem}", "use links only within the checkpoint")
        self.entries.append(TreeEntry(path, EntryKind.LINK, target=target))

    def _visit_file(self, parent: int, name: str, path: str) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # it may have become a pipe meanwhile
        source = os.open(name, flags, dir_fd=parent)
        try:
            before = os.fstat(source)
            self._check(before, path)
            digest, size_bytes = self.read(source)
            after = os.fstat(source)
        finally:
            os.close(source)
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, size_bytes):
            raise Declined("changed", f"{path} changed while it was copied", CHANGED_REMEDY)
        self.total_bytes += size_bytes
        self.entries.append(TreeEntry(path, EntryKind.FILE, before.st_mode & 0o777, size_bytes, digest))

    def _check(self, found: os.stat_result, path: str) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise Declined("changed", f"{path} changed while it was copied", CHANGED_REMEDY)
        if self.uid >= 0 and found.st_uid != self.uid:
            problem = f"{path} belongs to another account than the job's"
            raise Declined("bad_checkpoint", problem, "write checkpoints as the job's own account")
        if found.st_size > FILE_BYTES_LIMIT:
            raise Declined("too_large", f"{path} has more than {FILE_BYTES_LIMIT} bytes", TOO_LARGE_REMEDY)
        limit_bytes = min(self.limit_bytes, TREE_BYTES_LIMIT)
        if self.total_bytes + found.st_size > limit_bytes:
            raise Declined("too_large", f"the checkpoint has more than {limit_bytes} bytes", TOO_LARGE_REMEDY)


def _too_deep(path: str) -> Declined:
    problem = f"{path[:80]} has folders that lie more than {DEPTH_LIMIT} deep"
    return Declined("bad_checkpoint", problem, "write its files into fewer folders within one another")


def _digest_of(source: int) -> tuple[str, int]:
    hasher, size_bytes = hashlib.sha256(), 0
    while data := os.read(source, READ_BYTES):
        hasher.update(data)
        size_bytes += len(data)
    return hasher.hexdigest(), size_bytes


def _unreadable(path: Path, error: OSError) -> Declined:
    with suppress(OSError):
        os.lstat(path)
        return Declined("unreadable", f"{path} could not be copied: {error.strerror or error}", CHANGED_REMEDY)
    return Declined("not_found", f"{path} does not exist", "write it into SWARM_CHECKPOINT_DIR first, then commit it")
