"""Blobs by content: skeleton of signatures, filled in shortly."""

from collections.abc import AsyncIterable, Iterable
from pathlib import Path


class BlobStore:
    """Files named by the SHA-256 of their content, least recently used ones removed above a limit."""

    def __init__(self, directory: Path, limit_bytes: int = 50 * 2**30) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Those that are not here, in the order given, each once."""
        raise NotImplementedError

    async def put(self, digest: str, chunks: AsyncIterable[bytes]) -> int:
        """Store a stream if its SHA-256 is `digest`; returns its size.  Raises `BlobError`, nothing kept."""
        raise NotImplementedError

    def path(self, digest: str) -> Path | None:
        """The file, for reading only, or None."""
        raise NotImplementedError
