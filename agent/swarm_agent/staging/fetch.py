"""Bringing blobs from other agents: one sealed stream per batch, the sources in turn, each blob once at a time.

What is brought holds up the start of a task, and one of the sources has often just died.  So those that are believed
alive are asked first, and one that says nothing for a moment is passed over until all others were asked.

Whatever keeps a source from answering may be over the next moment: it is asked again, a little later each time and with
more patience, as long as blobs come or not much time has passed.  Only that it does not have a blob is taken for final.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

from swarm_agent.staging.blobs import SMALL_BYTES, BlobError, BlobStore, NotStored, TooLarge, is_digest
from swarmsched.errors import SwarmError
from swarmsched.ids import NodeId

BATCH = 128  # digests asked in one stream
FIRST_ANSWER_S = 0.5  # a living agent takes a few milliseconds; the dead may not be known as such yet
PATIENCE_S_MAX = 10.0  # doubled with each round
PAUSE_S, PAUSE_S_MAX = 0.1, 2.0  # between rounds, likewise
GIVEN_UP_S, ROUNDS_LEAST = 30.0, 4  # in which no blob has come
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


class NotReached(BlobError):
    """Blobs are wanted that may be on nodes which could not be asked."""


class BlobFetcher:
    """Makes sure that blobs are here, and serves ours to others."""

    def __init__(self, blobs: BlobStore, peers: PeerStreams, node_id: NodeId) -> None:
        self._blobs, self._peers, self._node_id = blobs, peers, node_id
        self._lock = asyncio.Lock()  # two tasks with the same tree: the second finds what the first has brought
        self._silent: set[NodeId] = set()  # said nothing in time when they were last asked
        self._wanted: Counter[str] = Counter()  # what calls of `ensure` that have not returned bring

    def serve(self) -> None:
        """Answer peers that ask for blobs."""
        self._peers.on_stream(QUERY, self._answer)

    def is_bringing(self, digests: Iterable[str]) -> bool:
        """True while one of these is being brought, or waits for its turn."""
        return any(self._wanted[digest] for digest in digests)

    async def ensure(self, digests: Iterable[str], sources: Sequence[NodeId], *, is_patient: bool = True) -> int:
        """Bring what is missing; returns how many were brought.  With `is_patient` false every source is asked once.

        Raises `NotStored` where this node's disk refuses them, `TooLarge` where it takes none that large, and otherwise
        `BlobError` naming the nodes asked, a `NotReached` if one that may have them could not be asked.
        """
        missing = await asyncio.to_thread(self._blobs.missing, tuple(digests))
        self._wanted.update(missing)
        try:
            await self._ensure(missing, sources, is_patient=is_patient)
        finally:
            self._wanted.subtract(missing)
            self._wanted = +self._wanted
        return len(missing)

    async def _ensure(self, missing: tuple[str, ...], sources: Sequence[NodeId], *, is_patient: bool) -> None:
        problems: dict[NodeId, str] = {}  # of sources that may have it
        lacking: dict[NodeId, None] = {}
        others = [node for node in dict.fromkeys(sources) if node != self._node_id]
        moved_s, idle_rounds, pause_s, patience_s = time.monotonic(), 0, PAUSE_S, FIRST_ANSWER_S
        while missing:
            before, idle_rounds = len(missing), idle_rounds + 1
            async with self._lock:  # given back between rounds: others may have sources that answer
                for source in self._in_turn(others):
                    missing = await asyncio.to_thread(self._blobs.missing, missing)
                    if not missing or source in lacking:
                        continue
                    problems.pop(source, None)
                    try:
                        await self._fetch_from(source, missing, patience_s)
                    except (NotStored, TooLarge):
                        raise
                    except (SwarmError, OSError) as error:
                        problems[source] = str(error) or type(error).__name__
                    else:
                        lacking[source] = None
                missing = await asyncio.to_thread(self._blobs.missing, missing)
            if len(missing) < before:
                moved_s, idle_rounds = time.monotonic(), 0
            is_over = time.monotonic() + pause_s > moved_s + GIVEN_UP_S and idle_rounds >= ROUNDS_LEAST
            is_over = is_over or not is_patient
            if missing and (is_over or not problems):
                told = "; ".join(f"{source}: {problems.get(source, 'does not have it')}" for source in others)
                what = f"could not be fetched ({len(missing)} missing; {told or 'no node is known to hold it'})"
                raise (NotReached if problems else BlobError)(missing[0], what, "submit the job again")
            if missing:
                await asyncio.sleep(pause_s)
                pause_s, patience_s = min(PAUSE_S_MAX, 2 * pause_s), min(PATIENCE_S_MAX, 2 * patience_s)

    def _in_turn(self, sources: Sequence[NodeId]) -> list[NodeId]:
        """Those that answered last and are alive first."""
        alive = frozenset(self._peers.live_peers())
        return sorted(sources, key=lambda node: (node in self._silent, node not in alive))

    async def _fetch_from(self, source: NodeId, digests: Sequence[str], patience_s: float) -> None:
        """Take what the source has."""
        for first in range(0, len(digests), BATCH):
            await self._fetch_batch(source, list(digests[first : first + BATCH]), patience_s)

    async def _fetch_batch(self, source: NodeId, digests: list[str], patience_s: float) -> None:
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
        self, source: NodeId, answers: AsyncIterator[dict[str, Any]], patience_s: float
    ) -> dict[str, Any] | None:
        """The first answer, and whether the source is silent."""
        try:
            async with asyncio.timeout(patience_s):
                answer = await anext(answers, None)
        except TimeoutError:
            self._silent.add(source)
            raise TimeoutError(f"no answer within {patience_s:g} s") from None
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
