"""Output of one node's ranks, for this agent's clients and, through a sealed stream, for other agents'."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from swarm_agent.http.exchange import Document
from swarm_agent.http.merge import merged
from swarm_agent.http.peers import Peers
from swarm_agent.http.port import AgentPort
from swarm_agent.http.stream import closing
from swarm_agent.supervision.logs import LogPiece, LogStore
from swarmsched.ids import JobId, NodeId

PAGE_BYTES = 2**17
SEARCHES_AT_ONCE = 2
BATCH_RECORDS = 128
BATCH_BYTES = 2**18

Batch = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which output.  `cursors` by rank win over `tail` and `since_utc_s`; `streams` empty: all."""

    job_id: JobId
    attempt: int
    ranks: tuple[int, ...]
    cursors: dict[str, str] = field(default_factory=dict)
    tail: int | None = None
    since_utc_s: float | None = None
    streams: tuple[str, ...] = ()
    follow: bool = False
    is_lossless: bool = False


class LogSource:
    """Reads logs here, and at other agents."""

    def __init__(self, agent: AgentPort, peers: Peers) -> None:
        self._agent, self._peers = agent, peers
        self._searches = asyncio.Semaphore(SEARCHES_AT_ONCE)

    async def on_logs(self, _: NodeId, payload: Document) -> AsyncIterator[Document]:
        """Another agent reads what was written here."""
        async with closing(self._local(msgspec.convert(payload, LogRequest))) as batches:
            async for batch in batches:
                yield {"records": batch}

    async def read(self, node: NodeId, request: LogRequest) -> AsyncIterator[Batch]:
        """Batches of records from a node.  Raises as `Peers.stream` does."""
        if node == self._agent.config.name:
            async with closing(self._local(request)) as batches:
                async for batch in batches:
                    yield batch
            return
        async with closing(self._peers.stream(node, "logs", asdict(request))) as answers:
            async for each in answers:
                yield each.get("records", [])

    async def _local(self, request: LogRequest) -> AsyncIterator[Batch]:
        if request.follow:
            sources = [self._follow_rank(request, rank) for rank in request.ranks]
            async with closing(merged(sources)) as records:
                async for record in records:
                    yield [record]
            return
        kept = self._agent.logs.ranks(request.job_id, request.attempt)
        pages = [
            _pages(self._agent.logs, request, rank, await self._start(request, rank))
            for rank in request.ranks
            if rank in kept
        ]
        batch, size = Batch(), 0
        for record in heapq.merge(*pages, key=lambda each: each["utc_s"]):
            batch.append(record)
            size += len(record["data"])
            if len(batch) >= BATCH_RECORDS or size >= BATCH_BYTES:
                yield batch
                batch, size = Batch(), 0
                await asyncio.sleep(0)  # reading files must not keep the loop from its sockets
        if batch:
            yield batch

    async def _follow_rank(self, request: LogRequest, rank: int) -> AsyncIterator[dict[str, Any]]:
        logs = self._agent.logs
        first, cursor = await self._start(request, rank)
        for record in first:
            if _is_wanted(record, request):
                yield _plain(rank, record)
        if cursor and not first:
            yield _mark(rank, cursor)
        followed = logs.follow(request.job_id, request.attempt, rank, cursor, is_lossless=request.is_lossless)
        async with closing(followed) as records:
            async for record in records:
                if _is_wanted(record, request):
                    yield _plain(rank, record)

    async def _start(self, request: LogRequest, rank: int) -> tuple[tuple[LogPiece, ...], str]:
        """Records to begin with, and the cursor after them."""
        logs, job_id, attempt = self._agent.logs, request.job_id, request.attempt
        if str(rank) in request.cursors:
            return (), request.cursors[str(rank)]
        if rank not in logs.ranks(job_id, attempt):
            return (), ""
        async with self._searches:  # each may look through all that is kept of a rank
            if request.tail is not None:
                return await asyncio.to_thread(logs.tail, job_id, attempt, rank, request.tail)
            if request.since_utc_s is not None:
                return (), await asyncio.to_thread(logs.since, job_id, attempt, rank, request.since_utc_s)
        return (), ""


def _pages(
    logs: LogStore, request: LogRequest, rank: int, start: tuple[tuple[LogPiece, ...], str]
) -> Iterator[dict[str, Any]]:
    records, cursor = start
    if cursor and not records:
        yield _mark(rank, cursor)
    while True:
        for record in records:
            if _is_wanted(record, request):
                yield _plain(rank, record)
        before = cursor
        records, cursor = logs.read(request.job_id, request.attempt, rank, cursor, PAGE_BYTES)
        if not records or cursor == before:
            return


def _is_wanted(record: LogPiece, request: LogRequest) -> bool:
    """What is missing is told whatever was asked for: nobody knows of which stream it was."""
    is_late = request.since_utc_s is None or record.utc_s >= request.since_utc_s
    return record.dropped_bytes > 0 or (is_late and (not request.streams or record.stream.value in request.streams))


def _plain(rank: int, record: LogPiece) -> dict[str, Any]:
    return {
        "rank": rank,
        "stream": record.stream.value,
        "utc_s": record.utc_s,
        "data": record.data,
        "cursor": record.cursor,
        "dropped": record.dropped_bytes,
        "is_mark": False,
    }


def _mark(rank: int, cursor: str) -> dict[str, Any]:
    """Where reading began: what came before was not asked for, and is not to be sent when the client comes back."""
    return {"rank": rank, "stream": "", "utc_s": 0.0, "data": b"", "cursor": cursor, "dropped": 0, "is_mark": True}
