"""Unpacking a tree from blobs into a fresh folder.

`swarmsched.tree.Tree` has checked the manifest: no path leaves the folder or goes through a link.  Here the same is
enforced a second time by the kernel: every folder is opened without following links, relative to its parent, and
every file is created anew.  Contents are compared with their digests while they are copied, so a blob that rotted on
disk is found out.  A job gets copies and may change them: where the file system can, they share their blocks with
the blob until they are written to.  Hard links would not do, for a job of the blob's owner may write through them.
"""

import fcntl
import hashlib
import os
import shutil
import stat
from pathlib import Path

from swarm_agent.room import check_room
from swarm_agent.staging.blobs import BlobError, BlobStore, write_or_skip
from swarmsched.tree import EntryKind, Tree, TreeEntry

COPY_BYTES = 2**20
FOLDER_MODE = 0o755
FICLONE = 0x40049409  # ioctl_ficlonerange(2)


class Unpacker:
    """Writes one tree below one folder; use it once, in a worker thread."""

    def __init__(self, blobs: BlobStore, uid: int = -1, gid: int = -1) -> None:
        self._blobs, self._owner = blobs, (uid, gid)

    def unpack(self, tree: Tree, target: Path) -> None:
        """Create `target` with the tree's content; it must not exist.

        Raises `NoRoom`, `BadTree` or `BlobError`, or OSError of the file system; then `target` does not exist.
        """
        check_room(target.parent, tree.size_bytes)
        target.mkdir(mode=FOLDER_MODE)
        try:
            root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.fchown(root, *self._owner)
                os.fchmod(root, FOLDER_MODE)
                for entry in tree.entries:
                    self._place(root, entry)
            finally:
                os.close(root)
        except BaseException:
            shutil.rmtree(target)
            raise

    def _place(self, root: int, entry: TreeEntry) -> None:
        *folders, name = entry.path.split("/")
        parent = self._descend(root, folders)
        try:
            if entry.kind is EntryKind.FILE:
                self._file(parent, name, entry)
            elif entry.kind is EntryKind.LINK:
                os.symlink(entry.target, name, dir_fd=parent)
                os.chown(name, *self._owner, dir_fd=parent, follow_symlinks=False)
            else:
                os.close(self._folder(parent, name))
        finally:
            os.close(parent)

    def _descend(self, root: int, folders: list[str]) -> int:
        """Open the folder of an entry, making what is missing; the caller closes it."""
        here = os.dup(root)
        for name in folders:
            try:
                below = self._folder(here, name)
            finally:
                os.close(here)
            here = below
        return here

    def _folder(self, parent: int, name: str) -> int:
        try:
            os.mkdir(name, FOLDER_MODE, dir_fd=parent)
            is_new = True
        except FileExistsError:
            is_new = False
        opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        if is_new:
            os.fchown(opened, *self._owner)
            os.fchmod(opened, FOLDER_MODE)  # whatever the umask
        return opened

    def _file(self, parent: int, name: str, entry: TreeEntry) -> None:
        source = self._blobs.path(entry.sha256)
        if source is None:
            raise BlobError(entry.sha256, f"the content of {entry.path!r} is not on this node")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(name, flags, 0o600, dir_fd=parent), "wb") as copy:  # noqa: PTH123
            hasher, size_bytes = hashlib.sha256(), 0
            with source.open("rb", buffering=0) as blob:
                is_shared = _share(copy.fileno(), blob.fileno())
                while data := blob.read(COPY_BYTES):
                    hasher.update(data)
                    size_bytes += len(data)
                    if not is_shared:
                        write_or_skip(copy, data)
            if not is_shared:
                copy.truncate(size_bytes)
            if hasher.hexdigest() != entry.sha256:
                self._blobs.discard(entry.sha256)  # fetched anew next time
                raise BlobError(entry.sha256, f"the stored content of {entry.path!r} is damaged", "submit again")
            if size_bytes != entry.size_bytes:  # the manifest lies; the content may be another job's as well
                problem = f"{entry.path!r} has {size_bytes} bytes, not the {entry.size_bytes} of the manifest"
                raise BlobError(entry.sha256, problem, "make the manifest anew")
            os.fchown(copy.fileno(), *self._owner)
            os.fchmod(copy.fileno(), entry.mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO))


def _share(copy: int, source: int) -> bool:
    """Give an empty file the content of another without copying it; False where the file system cannot."""
    try:
        fcntl.ioctl(copy, FICLONE, source)
    except OSError:
        return False
    return True
