"""Copies of packed checkpoints on other nodes: asking for them, and taking those that others ask us to take."""

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from swarm_agent.checkpoints.kept import KeptCheckpoints
from swarm_agent.room import room_for_others
from swarm_agent.staging.blobs import BlobError, BlobStore, is_digest
from swarm_agent.staging.fetch import BlobFetcher, PeerStreams
from swarmsched.errors import SwarmError
from swarmsched.ids import JobId, NodeId, is_job_id
from swarmsched.task import TaskOrder
from swarmsched.tree import Tree

log = logging.getLogger(__name__)

QUERY = "checkpoint_copy"
COPIES_WANTED = 2  # on other nodes; with none alive the checkpoint counts all the same
ATTEMPTS_MAX = 5
PATIENCE_S = 60.0
PATIENCE_BYTES_PER_S = 5e6
KEEP_LISTED_MAX = 16


class Copies:
    """Both sides of a copy."""

    def __init__(self, blobs: BlobStore, peers: PeerStreams, node_id: NodeId, kept: KeptCheckpoints) -> None:
        self._blobs, self._peers, self._node_id, self._kept = blobs, peers, node_id, kept
        # Of its own: a long copy must not keep tasks waiting that want their files.
        self._fetcher = BlobFetcher(blobs, peers, node_id)

    def serve(self) -> None:
        """Take copies when peers ask."""
        self._peers.on_stream(QUERY, self._take)

    async def spread(self, order: TaskOrder, digest: str, size_bytes: int, keep: Iterable[str]) -> tuple[NodeId, ...]:
        """Have up to two peers fetch what is in our store; those that did.

        `keep` are the digests of the job's checkpoints that still count here; a peer drops what else it has from here.
        """
        question = {"job_id": order.job_id, "digest": digest, "size_bytes": size_bytes, "keep": [*keep]}
        candidates = iter(_ranked(order, self._peers.live_peers())[:ATTEMPTS_MAX])
        found = await asyncio.gather(*(self._first(candidates, question) for _ in range(COPIES_WANTED)))
        return tuple(node for node in found if node)

    async def bring(self, digest: str, sources: Sequence[NodeId]) -> Tree:
        """Make sure that all of a packed checkpoint is in our store, unpinned.  Raises `BlobError` or `BadTree`."""
        with self._blobs.pinned([digest]):
            await self._fetcher.ensure([digest], sources)
            path = self._blobs.path(digest)
            if path is None:
                raise BlobError(digest, "vanished from this node's store")
            tree = await asyncio.to_thread(lambda: Tree.from_bytes(path.read_bytes()))
            with self._blobs.pinned(tree.blobs):
                await self._fetcher.ensure(tree.blobs, sources)
        return tree

    async def _first(self, candidates: Iterator[NodeId], question: dict[str, Any]) -> NodeId | None:
        for node in candidates:
            problem = await self._ask(node, question)
            if not problem:
                return node
            log.warning("checkpoint not copied job_id=%s to=%s error=%s", question["job_id"], node, problem)
        return None

    async def _ask(self, node: NodeId, question: dict[str, Any]) -> str:
        """What went wrong, or nothing.  A stream, since its heartbeats tell a slow peer from a dead one."""
        try:
            async with asyncio.timeout(PATIENCE_S + question["size_bytes"] / PATIENCE_BYTES_PER_S):
                answers = self._peers.query_stream(node, QUERY, question)
                async with aclosing(answers):  # type: ignore[type-var]  # an async generator in every implementation
                    async for answer in answers:
                        return "" if answer.get("ok") is True else str(answer.get("problem"))[:500]
        except TimeoutError:
            return "it took too long"
        except (SwarmError, OSError) as error:
            return str(error)
        return "no answer"

    async def _take(self, sender: NodeId, question: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        job_id, digest, keep = question.get("job_id"), question.get("digest"), question.get("keep")
        size_bytes = question.get("size_bytes")
        is_sound = isinstance(job_id, str) and is_job_id(job_id) and isinstance(digest, str) and is_digest(digest)
        if not is_sound or not isinstance(size_bytes, int) or not _is_digest_list(keep):
            yield {"ok": False, "problem": "the question is malformed"}
            return
        try:
            self._check_room(size_bytes)
            if excess := self._kept.excess(JobId(str(job_id)), {str(digest): size_bytes}, keep):
                raise BlobError(str(digest), excess)
            await self._take_and_keep(JobId(str(job_id)), str(digest), sender, keep)  # type: ignore[arg-type]
        except (SwarmError, OSError) as error:
            yield {"ok": False, "problem": str(error)}
        else:
            yield {"ok": True}

    async def _take_and_keep(self, job_id: JobId, digest: str, sender: NodeId, keep: list[str]) -> None:
        tree = await self.bring(digest, [sender])
        blobs = (digest, *tree.blobs)
        with self._blobs.pinned(blobs):
            paths = [self._blobs.path(blob) for blob in blobs]
            await asyncio.to_thread(_sync, [path for path in paths if path])
            if missing := self._blobs.missing(blobs):
                raise BlobError(missing[0], "vanished from this node's store")
            self._kept.add(job_id, digest, tree.blobs, sender)
            self._kept.settle(job_id, sender, {digest, *keep})

    def _check_room(self, size_bytes: int) -> None:
        room_bytes = room_for_others(self._blobs.directory)
        if size_bytes > room_bytes:
            problem = f"{size_bytes} bytes do not fit into the {max(0, room_bytes)} that {self._node_id} has for others"
            raise BlobError("", problem)


def _ranked(order: TaskOrder, nodes: Sequence[NodeId]) -> list[NodeId]:
    """Nodes outside the gang and its holders first; within a class the same ones again for the same job."""
    gang = {share.node for share in order.shares}
    holders = set(order.configuration.nodes)

    def rank(node: NodeId) -> tuple[bool, bool, bytes]:
        return (node in gang, node in holders, hashlib.sha256(f"{order.job_id}\0{node}".encode()).digest())

    return sorted(nodes, key=rank)


def _is_digest_list(value: object) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) <= KEEP_LISTED_MAX
    return is_list and all(isinstance(item, str) and is_digest(item) for item in value)  # type: ignore[attr-defined]


def _sync(paths: Sequence[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
