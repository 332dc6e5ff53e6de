"""Blobs by content: shipped files, tree manifests and requirements, each named by the SHA-256 of its bytes.

A blob is stored whole or not at all: it is written beside its place, compared with its name, and renamed.  Nothing
is synced to disk on the way; whoever unpacks a blob checks it again (see `staging.tree`), which costs less than one
fsync per file of a tree.
"""

import asyncio
import errno
import hashlib
import itertools
import math
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from swarm_agent.room import check_room
from swarmsched.errors import SwarmError
from swarmsched.tree import FILE_BYTES_LIMIT

CHUNK_BYTES = 2**18
SMALL_BYTES = 2**16  # blobs up to this are stored many at a time: one at a time, each would wait for a thread
IMPORT_BYTES = 2**20
EVICTIONS_AT_ONCE = 64
UNUSED_S = 600.0  # an upload in pieces is over by then, and so is the start of a task that brings its files
ROOM_EVERY_BYTES = 64 * IMPORT_BYTES
BLOCK_BYTES = 512  # in which st_blocks counts (stat(3))
ZEROS = bytes(IMPORT_BYTES)
_HEX = frozenset("0123456789abcdef")


class BlobError(SwarmError):
    """A blob that was not stored or cannot be had; the store is as it was."""

    code = "blob"

    def __init__(self, digest: str, problem: str, remedy: str = "") -> None:
        self.digest, self.problem, self.remedy = digest, problem, remedy
        super().__init__(f"blob {digest[:12]}: {problem}")


class NotStored(BlobError):
    """This node's disk does not take a blob; `error` says why."""

    def __init__(self, digest: str, error: OSError, remedy: str) -> None:
        self.error = error
        super().__init__(digest, f"cannot be stored: {error.strerror or error}", remedy)


class TooLarge(BlobError):
    """A blob is larger than this node takes, from whomever it comes."""


class _Draft:
    """A blob on its way in; every method but `close` is for a worker thread."""

    def __init__(self, path: Path, digest: str, limit_bytes: int) -> None:
        self._path, self._digest, self._limit_bytes = path, digest, limit_bytes
        self._hasher = hashlib.sha256()
        self._file: BinaryIO | None = None
        self.size_bytes = 0
        self.is_placed = False

    def write(self, pieces: Iterable[bytes]) -> None:
        """Add some bytes.  Raises `BlobError` or OSError."""
        self._file = self._file or self._path.open("xb")
        for piece in pieces:
            self.size_bytes += len(piece)
            if self.size_bytes > self._limit_bytes:
                problem = f"is larger than {self._limit_bytes} bytes"
                raise TooLarge(self._digest, problem, "raise blob_cache_bytes_max")
            self._hasher.update(piece)
            write_or_skip(self._file, piece)

    def finish(self, pieces: Iterable[bytes], place: Path) -> None:
        """Add the last bytes and put the whole into its place.  Raises `BlobError` or OSError."""
        self.write(pieces)
        assert self._file is not None
        self._file.truncate(self.size_bytes)
        self._file.close()
        found = self._hasher.hexdigest()
        if found != self._digest:
            raise BlobError(self._digest, f"the content received has another digest, {found[:12]}", "send again")
        place.parent.mkdir(mode=0o700, exist_ok=True)
        self._path.rename(place)
        self.is_placed = True

    def close(self) -> None:
        """Remove what did not get to its place."""
        if self._file is not None:
            with suppress(OSError):  # a full disk: it is removed anyway
                self._file.close()
            self._path.unlink(missing_ok=True)


class BlobStore:
    """Files named by the SHA-256 of their content; the least recently used go when `limit_bytes` is exceeded.

    Pinned blobs stay, and few go at once, so the store may for a while be larger than its limit.  It can be used at
    once: until `load` has read what earlier lives kept, a blob that is asked for is looked for on the disk.
    """

    def __init__(self, directory: Path, limit_bytes: int = 20 * 2**30) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._index: OrderedDict[str, int] = OrderedDict()  # sizes by digest, least recently used first
        self._held_bytes = 0
        self._is_loaded = self._is_closed = False
        self._lost: set[str] = set()  # while it is being read: what is not here, whatever the reader has seen
        self._lock = threading.Lock()  # of all those: unpacking asks for paths in worker threads
        self._pins: Counter[str] = Counter()
        self._life = os.urandom(4).hex()
        self._names = itertools.count()

    def load(self) -> None:
        """Learn what earlier lives left, while others use the store; for a worker thread.  Raises OSError.

        It takes as long as a look at each file does, minutes for millions of them on a slow disk.
        """
        for draft in self.directory.glob("incoming/*"):
            if not draft.name.startswith(self._life):
                draft.unlink(missing_ok=True)
        found: list[tuple[float, str, int]] = []
        for folder in self.directory.glob("??"):
            if self._is_closed:
                return
            found += _blobs_in(folder)
        found.sort()
        index = OrderedDict((name, size_bytes) for _, name, size_bytes in found)
        held_bytes = sum(index.values())
        with self._lock:
            for digest in (*self._lost, *self._index):
                held_bytes -= index.pop(digest, 0)
            index.update(self._index)  # what was used meanwhile is the newest
            self._index, self._held_bytes = index, self._held_bytes + held_bytes
            self._is_loaded = True
            self._lost.clear()

    def close(self) -> None:
        """Make `load` give up; the store is used no more."""
        self._is_closed = True

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Digests that are not here, in the order given, each once; of many ask in a worker thread."""
        return tuple(digest for digest in dict.fromkeys(digests) if self.size_bytes(digest) is None)

    def path(self, digest: str) -> Path | None:
        """The file, for reading only, or None; counts as a use."""
        if self.size_bytes(digest) is None:
            return None
        path = self._place(digest)
        try:
            os.utime(path)  # a restarted agent learns the order of use from the files
        except FileNotFoundError:  # somebody cleaned up behind our back
            self._lose(digest)
            return None
        with self._lock, suppress(KeyError):  # it went this instant
            self._index.move_to_end(digest)
        return path

    def size_bytes(self, digest: str) -> int | None:
        """Size of a blob, or None when it is not here."""
        known_bytes = self._index.get(digest)
        if known_bytes is not None or self._is_loaded or not is_digest(digest):
            return known_bytes
        try:
            found_bytes = self._place(digest).stat().st_size
        except OSError:
            return None
        with self._lock:
            if self._is_loaded or digest in self._index or digest in self._lost:  # by another thread, this instant
                return self._index.get(digest)
            self._index[digest] = found_bytes
            self._held_bytes += found_bytes
        return found_bytes

    @property
    def is_loaded(self) -> bool:
        """True once what earlier lives kept is known."""
        return self._is_loaded

    @property
    def held_bytes(self) -> int:
        """Bytes of all blobs, those of earlier lives once they are loaded."""
        return self._held_bytes

    async def put(self, digest: str, chunks: AsyncIterable[bytes]) -> int:
        """Store a stream if its SHA-256 is `digest`; returns its size.

        A blob that is here already is not read again.  Raises `BlobError`, and then nothing is kept.
        """
        if not is_digest(digest):
            raise BlobError(digest, "is no SHA-256 digest", "name it by 64 lower-case hexadecimal digits")
        kept_bytes = self.size_bytes(digest)
        if kept_bytes is not None:
            return kept_bytes
        draft = _Draft(self._new_draft(), digest, min(self.limit_bytes, FILE_BYTES_LIMIT))
        try:
            pieces: list[bytes] = []
            waiting_bytes = 0
            async for chunk in chunks:
                pieces.append(chunk)
                waiting_bytes += len(chunk)
                if waiting_bytes >= IMPORT_BYTES:
                    await _to_the_end(draft.write, pieces)
                    pieces, waiting_bytes = [], 0
            await _to_the_end(draft.finish, pieces, self._place(digest))
        except OSError as error:
            raise self._not_stored(digest, error) from error
        finally:
            draft.close()
            if draft.is_placed:
                self._keep({digest: draft.size_bytes})
        return draft.size_bytes

    async def put_all(self, contents: Mapping[str, bytes]) -> None:
        """Store small blobs by digest, all in one turn of a worker thread.

        Raises `BlobError` for the first that is not stored; those before it are kept.
        """
        missing = {digest: contents[digest] for digest in self.missing(contents)}
        stored: dict[str, int] = {}

        def store() -> None:
            for digest, content in missing.items():
                draft = _Draft(self._new_draft(), digest, min(self.limit_bytes, FILE_BYTES_LIMIT))
                try:
                    draft.finish([content], self._place(digest))
                except OSError as error:
                    raise self._not_stored(digest, error) from error
                finally:
                    draft.close()
                stored[digest] = len(content)

        try:
            await _to_the_end(store)
        finally:
            self._keep(stored)

    def import_file(self, source: int, may_go_on: Callable[[], bool]) -> tuple[str, int]:
        """Copy an open file to its place, on disk before this returns; (digest, size).  For a worker thread.

        One that grows meanwhile is read no further than it was.  The blob counts once the loop's thread has called
        `admit`, or goes by `abandon`.  Raises OSError; then nothing is kept.
        """
        draft = self._new_draft()
        hasher, size_bytes, at_first = hashlib.sha256(), 0, os.fstat(source)
        check_room(self.directory, min(at_first.st_size, at_first.st_blocks * BLOCK_BYTES))
        try:
            with draft.open("xb") as file:
                while size_bytes <= at_first.st_size and (data := os.read(source, IMPORT_BYTES)):
                    if self._is_closed or not may_go_on():
                        raise InterruptedError(errno.EINTR, "nobody wants it any more")
                    if size_bytes % ROOM_EVERY_BYTES == 0:
                        check_room(self.directory, 0)
                    hasher.update(data)
                    size_bytes += len(data)
                    write_or_skip(file, data)
                file.truncate(size_bytes)
                os.fdatasync(file.fileno())
            place = self._place(hasher.hexdigest())
            place.parent.mkdir(mode=0o700, exist_ok=True)
            draft.rename(place)
        finally:
            draft.unlink(missing_ok=True)
        return hasher.hexdigest(), size_bytes

    def admit(self, sizes: Mapping[str, int]) -> None:
        """Take up blobs that `import_file` has put in place; the caller looks with `missing` whether all are there."""
        # One that is not there any more went an instant ago, when another arrived.
        self._keep({digest: size_bytes for digest, size_bytes in sizes.items() if self._place(digest).exists()})

    def abandon(self, digests: Iterable[str]) -> None:
        """Remove what `import_file` has put in place and nobody will `admit`; for a worker thread."""
        for digest in digests:
            if self._is_loaded and digest not in self._index:
                self._place(digest).unlink(missing_ok=True)

    def discard(self, digest: str) -> None:
        """Remove one blob, pinned or not: it is damaged."""
        self._lose(digest)
        self._place(digest).unlink(missing_ok=True)

    async def put_bytes(self, data: bytes) -> str:
        """Store bytes under their own digest, which is returned."""
        digest = hashlib.sha256(data).hexdigest()
        await self.put(digest, _once(data))
        return digest

    async def read(self, digest: str) -> AsyncIterator[bytes]:
        """The content in pieces; raises `BlobError` when it is not here."""
        path = self.path(digest)
        if path is None:
            raise BlobError(digest, "is not on this node")
        with path.open("rb", buffering=0) as file:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield data
                if len(data) < CHUNK_BYTES:
                    return

    def pin(self, digests: Iterable[str]) -> None:
        """Keep these until `drop`; each pin needs its own."""
        self._pins.update(digests)

    def drop(self, digests: Iterable[str]) -> None:
        """Take pins away, and remove what has none left."""
        mine = tuple(digests)
        self.unpin(mine)
        for digest in mine:
            if not self._pins[digest]:
                self.discard(digest)

    @contextmanager
    def pinned(self, digests: Iterable[str]) -> Iterator[None]:
        """Keep these from being removed meanwhile, those still to come included."""
        mine = tuple(digests)
        self._pins.update(mine)
        try:
            yield
        finally:
            self.unpin(mine)

    def unpin(self, digests: Iterable[str]) -> None:
        """Take pins away; what has none left stays until its room is needed."""
        for digest in digests:
            left = self._pins[digest] - 1
            if left > 0:
                self._pins[digest] = left
            else:
                del self._pins[digest]  # not `+self._pins`: of a large tree all are pinned while each arrives

    def _new_draft(self) -> Path:
        folder = self.directory / "incoming"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"{self._life}-{next(self._names)}"

    def _not_stored(self, digest: str, error: OSError) -> "NotStored":
        return NotStored(digest, error, f"see that {self.directory} has room and can be written")

    def _keep(self, sizes: Mapping[str, int]) -> None:
        """Count blobs that are in place as the newest, then make room for them."""
        for digest, size_bytes in sizes.items():
            with self._lock:
                self._held_bytes += size_bytes - self._index.pop(digest, 0)
                self._index[digest] = size_bytes
                self._lost.discard(digest)
        with self.pinned(sizes):
            self._evict()

    def _lose(self, digest: str) -> None:
        with self._lock:
            self._held_bytes -= self._index.pop(digest, 0)
            if not self._is_loaded:
                self._lost.add(digest)

    def shed(self, size_bytes: int) -> bool:
        """Remove some of what was used longest ago and not for a while, up to that size; False where nothing is."""
        return self._remove_oldest(size_bytes, unused_since_utc_s=time.time() - UNUSED_S)

    def _evict(self) -> None:
        self._remove_oldest(self._held_bytes - self.limit_bytes)

    def _remove_oldest(self, excess: int, unused_since_utc_s: float = math.inf) -> bool:
        leaving = list[str]()
        if excess <= 0 or not self._is_loaded:  # which are the oldest is not known before
            return False
        with self._lock:
            for digest, size_bytes in self._index.items():
                if excess <= 0 or len(leaving) >= EVICTIONS_AT_ONCE:
                    break
                if self._pins[digest]:
                    continue
                if unused_since_utc_s < math.inf and self._used_utc_s(digest) > unused_since_utc_s:
                    break  # so are all that follow
                leaving.append(digest)
                excess -= size_bytes
        for digest in leaving:
            self.discard(digest)
        return bool(leaving)

    def _used_utc_s(self, digest: str) -> float:
        try:
            return self._place(digest).stat().st_mtime
        except OSError:
            return 0.0  # somebody cleaned up behind our back

    def _place(self, digest: str) -> Path:
        return self.directory / digest[:2] / digest


def _blobs_in(folder: Path) -> Iterator[tuple[float, str, int]]:
    """Time of the last use, name and size of each."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed this instant
                if is_digest(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, entry.name, status.st_size


async def _to_the_end(work: Callable[..., None], *arguments: object) -> None:
    """Run it in a worker thread, and go on no earlier than it has ended, also when cancelled: it writes."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def write_or_skip(file: BinaryIO, data: bytes) -> None:
    """Add to a file, which is cut to its size in the end: where all is zero a hole takes no room."""
    if data == ZEROS[: len(data)]:
        file.seek(len(data), os.SEEK_CUR)
    else:
        file.write(data)


def is_digest(text: str) -> bool:
    """True for 64 lower-case hexadecimal digits."""
    return len(text) == 64 and set(text) <= _HEX


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
