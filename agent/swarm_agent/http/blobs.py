"""Shipped files on their way in: one by one, or many small ones packed into one body."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from swarm_agent.http.exchange import Call, HttpReply, answer, limited
from swarm_agent.http.port import AgentPort
from swarm_agent.http.problem import Problem, invalid
from swarm_agent.staging.blobs import SMALL_BYTES, BlobError, is_digest
from swarmsched.documents import MissingDocument, StoredBlobDocument, StoredPackDocument
from swarmsched.tree import FILE_BYTES_LIMIT

PACK_TYPE = "application/vnd.swarmsched.blobs"
PACK_BYTES_LIMIT = 2**30
PACKED_BLOB_BYTES_LIMIT = 2**24
DIGESTS_LIMIT = 10_000
SMALL_AT_ONCE = 64
HEAD_BYTES = 40  # 32 of the digest, 8 of the length


class BlobUploads:
    """Handlers of /v1/blobs."""

    def __init__(self, agent: AgentPort) -> None:
        self._agent = agent

    async def list_missing_blobs(self, call: Call) -> HttpReply:
        """POST /v1/blobs/missing."""
        digests = call.json("digests").get("digests")
        if not isinstance(digests, list) or len(digests) > DIGESTS_LIMIT:
            raise invalid("/digests", "must be a list of digests", f"at most {DIGESTS_LIMIT} of them")
        wrong = [index for index, each in enumerate(digests) if not isinstance(each, str) or not is_digest(each)]
        if wrong:
            raise invalid(f"/digests/{wrong[0]}", "is not a SHA-256 digest", "64 lower-case hexadecimal digits")
        missing = await asyncio.to_thread(self._agent.blobs.missing, digests)
        return answer(MissingDocument(missing=list(missing), node=self._agent.config.name))

    async def head_blob(self, call: Call) -> HttpReply:
        """HEAD /v1/blobs/SHA256."""
        digest = _digest(call)
        size_bytes = self._agent.blobs.size_bytes(digest)
        if size_bytes is None:
            raise Problem("unknown_blob", f"blob {digest[:12]} is not on {self._agent.config.name}")
        return HttpReply(200, b"", "application/octet-stream", {"Content-Length": str(size_bytes)})

    async def put_blob(self, call: Call) -> HttpReply:
        """PUT /v1/blobs/SHA256."""
        digest = _digest(call)
        is_known = not self._agent.blobs.missing([digest])
        size_bytes = await self._put(digest, limited(call.stream, FILE_BYTES_LIMIT, "send it in parts"))
        document = StoredBlobDocument(sha256=digest, size_bytes=size_bytes, node=self._agent.config.name)
        return answer(document, 200 if is_known else 201)

    async def put_blobs(self, call: Call) -> HttpReply:
        """POST /v1/blobs: frames of digest, length and content until the body ends."""
        content_type = call.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != PACK_TYPE:
            raise Problem("unsupported_media_type", f"the body is {content_type or 'untyped'}", f"send {PACK_TYPE}")
        reader = _PackReader(limited(call.stream, PACK_BYTES_LIMIT, "send it in parts"))
        stored = known = total = 0
        small: dict[str, bytes] = {}
        try:
            while (head := await reader.head()) is not None:
                digest, size_bytes = head
                total += size_bytes
                if digest in small or not self._agent.blobs.missing([digest]):
                    known += 1
                elif size_bytes <= SMALL_BYTES:
                    small[digest] = b"".join([piece async for piece in reader.rest()])
                    stored += 1
                else:
                    await self._put(digest, reader.rest())
                    stored += 1
                async for _ in reader.rest():
                    pass  # a blob that is here already is skipped, not stored again
                if len(small) == SMALL_AT_ONCE:
                    small = await self._put_all(small)
                elif not (stored + known) % SMALL_AT_ONCE:
                    await asyncio.sleep(0)  # thousands may come in one piece of the body
        except Problem:
            await self._put_all(small)  # what came before is kept
            raise
        await self._put_all(small)
        own = self._agent.config.name
        return answer(StoredPackDocument(stored=stored, known=known, size_bytes=total, node=own))

    async def _put_all(self, contents: dict[str, bytes]) -> dict[str, bytes]:
        """Store them; what is left then is nothing."""
        with _told():
            await self._agent.blobs.put_all(contents)
        return {}

    async def _put(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        with _told():
            return await self._agent.blobs.put(digest, chunks)


@contextmanager
def _told() -> Iterator[None]:
    """The store's refusals as problems."""
    try:
        yield
    except BlobError as error:
        code = "storage_full" if isinstance(error.__cause__, OSError) else "bad_blob"
        raise Problem(code, str(error), error.remedy) from error


class _PackReader:
    """Cuts a body into frames without holding more than one chunk and one head."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = b""
        self._left = 0  # bytes of the current blob that were not read yet

    async def head(self) -> tuple[str, int] | None:
        """Digest and size of the next blob; None at the end of the body."""
        while len(self._buffer) < HEAD_BYTES:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                if self._buffer:
                    raise Problem("bad_blob", "the body ends within the head of a blob")
                return None
            self._buffer += chunk
        digest, size_bytes = self._buffer[:32].hex(), int.from_bytes(self._buffer[32:HEAD_BYTES], "big")
        if size_bytes > PACKED_BLOB_BYTES_LIMIT:
            raise Problem("bad_blob", f"blob {digest[:12]} has {size_bytes} bytes", "use PUT above 16 MiB")
        self._buffer = self._buffer[HEAD_BYTES:]
        self._left = size_bytes
        return digest, size_bytes

    async def rest(self) -> AsyncIterator[bytes]:
        """What is left of the current blob."""
        while self._left:
            if not self._buffer:
                chunk = await anext(self._chunks, None)
                if chunk is None:
                    raise Problem("bad_blob", f"the body ends {self._left} bytes before the end of a blob")
                self._buffer = chunk
            piece, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
            self._left -= len(piece)
            if piece:
                yield piece


def _digest(call: Call) -> str:
    digest = call.params["sha256"]
    if not is_digest(digest):
        raise Problem("unknown_blob", f"{digest[:20]!r} is not a SHA-256 digest", "64 lower-case hexadecimal digits")
    return digest
