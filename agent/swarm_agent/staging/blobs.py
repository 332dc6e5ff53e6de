"""Blobs by content: shipped files, tree manifests and requirements, each named by the SHA-256 of its bytes.

A blob is stored whole or not at all: it is written beside its place, compared with its name, and renamed.  Nothing
is synced to disk on the way; whoever unpacks a blob checks it again (see `staging.tree`), which costs less than one
fsync per file of a tree.
"""

import asyncio
import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarmsched.errors import SwarmError
from swarmsched.tree import FILE_BYTES_LIMIT

CHUNK_BYTES = 2**18
IMPORT_BYTES = 2**20
_HEX = frozenset("0123456789abcdef")


class BlobError(SwarmError):
    """A blob that was not stored or cannot be had; the store is as it was."""

    code = "blob"

    def __init__(self, digest: str, problem: str, remedy: str = "") -> None:
        self.digest, self.problem, self.remedy = digest, problem, remedy
        super().__init__(f"blob {digest[:12]}: {problem}")


@dataclass(slots=True)
class _Kept:
    size_bytes: int
    used_s: float


class BlobStore:
    """Files named by the SHA-256 of their content; the least recently used go when `limit_bytes` is exceeded.

    Pinned blobs stay, so the store may for a while be larger than its limit.
    """

    def __init__(self, directory: Path, limit_bytes: int = 20 * 2**30) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._index: dict[str, _Kept] | None = None
        self._pins: Counter[str] = Counter()
        self._names = itertools.count()

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Those that are not here, in the order given, each once."""
        known = self._known()
        return tuple(digest for digest in dict.fromkeys(digests) if digest not in known)

    def path(self, digest: str) -> Path | None:
        """The file, for reading only, or None; counts as a use."""
        kept = self._known().get(digest)
        if kept is None:
            return None
        path = self._place(digest)
        kept.used_s = time.time()
        try:
            os.utime(path)  # a restarted agent learns the order of use from the files
        except FileNotFoundError:  # somebody cleaned up behind our back
            del self._known()[digest]
            return None
        return path

    def size_bytes(self, digest: str) -> int | None:
        """Size of a blob, or None when it is not here."""
        kept = self._known().get(digest)
        return kept.size_bytes if kept else None

    @property
    def held_bytes(self) -> int:
        """Bytes of all blobs."""
        return sum(kept.size_bytes for kept in self._known().values())

    async def put(self, digest: str, chunks: AsyncIterable[bytes]) -> int:
        """Store a stream if its SHA-256 is `digest`; returns its size.

        A blob that is here already is not read again.  Raises `BlobError`, and then nothing is kept.
        """
        if not is_digest(digest):
            raise BlobError(digest, "is no SHA-256 digest", "name it by 64 lower-case hexadecimal digits")
        kept = self._known().get(digest)
        if kept:
            return kept.size_bytes
        folder = self.directory / "incoming"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder / f"{os.getpid()}-{next(self._names)}"
        try:
            size_bytes = await self._write(draft, digest, chunks)
            place = self._place(digest)
            place.parent.mkdir(mode=0o700, exist_ok=True)
            draft.rename(place)
        except OSError as error:
            problem = f"cannot be stored: {error.strerror or error}"
            raise BlobError(digest, problem, f"see that {self.directory} has room and can be written") from error
        finally:
            draft.unlink(missing_ok=True)
        self._known()[digest] = _Kept(size_bytes, time.time())
        self._evict(digest)
        return size_bytes

    def import_file(self, source: int) -> tuple[str, int]:
        """Copy an open file to its place, on disk before this returns; (digest, size).  For a worker thread.

        The blob counts only once the loop's thread has called `admit`, and some call must have read the store before.
        Raises OSError; then nothing is kept.
        """
        folder = self.directory / "incoming"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder / f"{os.getpid()}-{next(self._names)}"
        hasher, size_bytes = hashlib.sha256(), 0
        try:
            with draft.open("xb", buffering=0) as file:
                while data := os.read(source, IMPORT_BYTES):
                    hasher.update(data)
                    size_bytes += len(data)
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                os.fdatasync(file.fileno())
            place = self._place(hasher.hexdigest())
            place.parent.mkdir(mode=0o700, exist_ok=True)
            draft.rename(place)
        finally:
            draft.unlink(missing_ok=True)
        return hasher.hexdigest(), size_bytes

    def admit(self, sizes: Mapping[str, int]) -> None:
        """Take up blobs that `import_file` has put in place; the caller looks with `missing` whether all are there."""
        known = self._known()
        for digest, size_bytes in sizes.items():
            if not self._place(digest).exists():
                continue  # another blob's arrival made it go an instant ago
            known.setdefault(digest, _Kept(size_bytes, time.time())).used_s = time.time()
        with self.pinned(sizes):
            self._evict("")

    def discard(self, digest: str) -> None:
        """Remove one blob, pinned or not: it is damaged."""
        self._known().pop(digest, None)
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
            while data := file.read(CHUNK_BYTES):
                yield data
                await asyncio.sleep(0)  # a large file must not keep the loop to itself

    def pin(self, digests: Iterable[str]) -> None:
        """Keep these until `drop`; each pin needs its own."""
        self._pins.update(digests)

    def drop(self, digests: Iterable[str]) -> None:
        """Take pins away, and remove what has none left."""
        mine = tuple(digests)
        self._pins.subtract(mine)
        self._pins = +self._pins
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
            self._pins.subtract(mine)
            self._pins = +self._pins

    async def _write(self, draft: Path, digest: str, chunks: AsyncIterable[bytes]) -> int:
        hasher, size_bytes = hashlib.sha256(), 0
        limit_bytes = min(self.limit_bytes, FILE_BYTES_LIMIT)
        with draft.open("xb", buffering=0) as file:
            async for chunk in chunks:
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    raise BlobError(digest, f"is larger than {limit_bytes} bytes", "raise blob_cache_bytes_max")
                hasher.update(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
        if hasher.hexdigest() != digest:
            raise BlobError(digest, f"the content received has another digest, {hasher.hexdigest()[:12]}", "send again")
        return size_bytes

    def _evict(self, newest: str) -> None:
        known = self._known()
        excess = self.held_bytes - self.limit_bytes
        for digest in sorted(known, key=lambda name: known[name].used_s):
            if excess <= 0:
                return
            if digest != newest and not self._pins[digest]:
                self._place(digest).unlink(missing_ok=True)
                excess -= known.pop(digest).size_bytes

    def _known(self) -> dict[str, _Kept]:
        if self._index is None:
            self._index = {}
            for draft in self.directory.glob("incoming/*"):  # of an earlier life
                draft.unlink(missing_ok=True)
            for path in self.directory.glob("??/*"):
                if is_digest(path.name):
                    stat = path.stat()
                    self._index[path.name] = _Kept(stat.st_size, stat.st_mtime)
        return self._index

    def _place(self, digest: str) -> Path:
        return self.directory / digest[:2] / digest


def is_digest(text: str) -> bool:
    """True for 64 lower-case hexadecimal digits."""
    return len(text) == 64 and set(text) <= _HEX


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
