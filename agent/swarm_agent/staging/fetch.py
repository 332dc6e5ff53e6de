"""Bringing blobs from other agents: one sealed stream per batch, the sources in turn, each blob once at a time.

What is brought holds up the start of a task, and one of the sources has often just died.  So those that are believed
alive are asked first, and one that says nothing for a moment is passed over until all others were asked.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from swarm_agent.staging.blobs import SMALL_BYTES, BlobError, BlobStore, is_digest
from swarmsched.errors import SwarmError
from swarmsched.ids import NodeId

BATCH = 128  # digests asked in one stream
FIRST_ANSWER_S = 0.5  # a living agent takes a few milliseconds; the dead may not be known as such yet
QUERY = "blob"

StreamHandler = Callable[[NodeId, dict[str, Any]], AsyncIterator[dict[str, Any]]]


class PeerStreams(Protocol):
    """Sealed streams from and to other agents."""

    def query_stream(self, node_id: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask a peer; iterate over its answers.  Ends in a `SwarmError` or OSError when the peer cannot be reached."""
        ...

    def on_stream(self, kind: str, handler: StreamHandler) -> None:
        """Answer such questions of peers."""
        ...

    def live_peers(self) -> Sequence[NodeId]:
        """Members that are alive and not suspect, without this node."""
        ...


class BlobFetcher:
    """Makes sure that blobs are here, and serves ours to others."""

    def __init__(self, blobs: BlobStore, peers: PeerStreams, node_id: NodeId) -> None:
        self._blobs, self._peers, self._node_id = blobs, peers, node_id
        self._lock = asyncio.Lock()  # two tasks with the same tree: the second finds what the first has brought
        self._silent: set[NodeId] = set()  # said nothing in time when they were last asked

    def serve(self) -> None:
        """Answer peers that ask for blobs."""
        self._peers.on_stream(QUERY, self._answer)

    async def ensure(self, digests: Iterable[str], sources: Sequence[NodeId]) -> int:
        """Bring what is missing; returns how many were brought.  Raises `BlobError` naming the nodes asked."""
        wanted = tuple(digests)
        async with self._lock:
            missing = at_first = await asyncio.to_thread(self._blobs.missing, wanted)
            problems: dict[NodeId, str] = {}
            for source, patience_s in self._turns(sources) if missing else ():
                if patience_s is None and source not in self._silent:
                    continue
                problem = await self._fetch_from(source, missing, patience_s)
                missing = await asyncio.to_thread(self._blobs.missing, missing)
                if not missing:
                    break
                problems[source] = problem or "does not have it"
        if missing:
            told = "; ".join(f"{source}: {problem}" for source, problem in problems.items())
            told = told or "no node is known to hold it"
            raise BlobError(
                missing[0], f"could not be fetched ({len(missing)} missing; {told})", "submit the job again"
            )
        return len(at_first)

    def _turns(self, sources: Sequence[NodeId]) -> Iterator[tuple[NodeId, float | None]]:
        """Whom to ask and for how long to wait for a first answer; at last the silent for as long as streams wait."""
        alive = frozenset(self._peers.live_peers())
        others = [node for node in dict.fromkeys(sources) if node != self._node_id]
        others.sort(key=lambda node: (node in self._silent, node not in alive))
        for patience_s in (FIRST_ANSWER_S, None):
            yield from ((node, patience_s) for node in others)

    async def _fetch_from(self, source: NodeId, digests: Sequence[str], patience_s: float | None) -> str:
        """Take what the source has; what went wrong, if anything."""
        try:
            for first in range(0, len(digests), BATCH):
                await self._fetch_batch(source, list(digests[first : first + BATCH]), patience_s)
        except (SwarmError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__
        return ""

    async def _fetch_batch(self, source: NodeId, digests: list[str], patience_s: float | None) -> None:
        answers = self._peers.query_stream(source, QUERY, {"digests": digests})
        answer = await self._first(source, answers, patience_s)
        small: dict[str, bytes] = {}
        try:
            while answer is not None:
                digest, data = answer.get("digest"), answer.get("data")
                if digest not in digests:
                    raise BlobError(str(digest)[:64], f"{source} sent what was not asked for")
                if answer.get("is_last") and isinstance(data, bytes) and len(data) <= SMALL_BYTES:
                    small[digest] = data
                elif not answer.get("is_missing"):
                    await self._blobs.put(digest, _content(answer, answers, digest))
                answer = await anext(answers, None)
        finally:  # what came before a stream broke is kept
            await self._blobs.put_all(small)

    async def _first(
        self, source: NodeId, answers: AsyncIterator[dict[str, Any]], patience_s: float | None
    ) -> dict[str, Any] | None:
        """The first answer, and whether the source is silent."""
        try:
            async with asyncio.timeout(patience_s):
                answer = await anext(answers, None)
        except TimeoutError:
            self._silent.add(source)
            raise TimeoutError(f"no answer within {patience_s} s" if patience_s else "no answer") from None
        self._silent.discard(source)
        return answer

    async def _answer(self, _: NodeId, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        asked = payload.get("digests") or [payload.get("digest")]
        if not isinstance(asked, list | tuple) or len(asked) > BATCH:
            return
        for digest in asked:
            if not isinstance(digest, str) or not is_digest(digest) or self._blobs.missing([digest]):
                yield {"digest": digest, "is_missing": True}
                continue
            left_bytes = self._blobs.size_bytes(digest) or 0
            if not left_bytes:
                yield {"digest": digest, "data": b"", "is_last": True}
            async for data in self._blobs.read(digest):
                left_bytes -= len(data)
                yield {"digest": digest, "data": data, "is_last": left_bytes <= 0}


async def _content(first: dict[str, Any], answers: AsyncIterator[dict[str, Any]], digest: str) -> AsyncIterator[bytes]:
    """The pieces of one blob, of which `first` has been read already."""
    answer = first
    while True:
        data = answer.get("data")
        if answer.get("digest") != digest or not isinstance(data, bytes):
            raise BlobError(digest, "the stream broke off")
        yield data
        if answer.get("is_last"):
            return
        try:
            answer = await anext(answers)
        except StopAsyncIteration:
            raise BlobError(digest, "the stream broke off") from None
