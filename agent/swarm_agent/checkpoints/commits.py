"""Commits: from a rank's word that a checkpoint is complete to the job's register, one at a time for each task.

If checkpoints are named faster than they can be committed the newest wins: of those that wait only the last is
committed, the others are answered at once.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from swarm_agent.checkpoints.copies import Copies
from swarm_agent.checkpoints.folders import CheckpointFolders, name_problem
from swarm_agent.checkpoints.kept import KeptCheckpoints
from swarm_agent.checkpoints.pack import pack, size_of
from swarm_agent.staging.blobs import BlobError, BlobStore
from swarm_agent.task.account import Account
from swarm_agent.task.tasksocket import Declined, Request, fitting
from swarm_agent.threads import Threads
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CheckpointCommitted, Command, CommitCheckpoint, Refused, Reply
from swarmsched.ids import NodeId, TaskKey
from swarmsched.task import TaskOrder

log = logging.getLogger(__name__)

WORLD_MOST = 2**32 - 1
COMMIT_TIMEOUT_S = 40.0  # the core itself looks for a shepherd for 30 s


class Commander(Protocol):
    """The part of the agent that asks the core."""

    async def command(self, command: Command, timeout_s: float = ...) -> Reply:
        """Ask the core."""
        ...


@dataclass(slots=True, eq=False)
class _Wish:
    name: str
    world: int
    epoch: asyncio.Future[int]


@dataclass(slots=True, eq=False)
class _Desk:
    """One task's commits: one under way, one waiting."""

    waiting: _Wish | None = None
    work: asyncio.Task[None] | None = None


class Commits:
    """Answers requests of type `checkpoint`."""

    def __init__(
        self,
        node_id: NodeId,
        folders: CheckpointFolders,
        blobs: BlobStore,
        copies: Copies,
        kept: KeptCheckpoints,
        commander: Commander,
        order_of: Callable[[TaskKey], TaskOrder | None],
        account_of: Callable[[TaskKey], Account | None],
        world_of: Callable[[TaskKey], int],
        threads: Threads,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`world_of`: the version of the membership in which a task's own worker trains, 0 where none has told."""
        self._node_id, self._folders, self._blobs = node_id, folders, blobs
        self._copies, self._kept, self._commander = copies, kept, commander
        self._order_of, self._account_of, self._world_of = order_of, account_of, world_of
        self._threads, self._clock = threads, clock
        self._desks: dict[TaskKey, _Desk] = {}

    async def handle(self, key: TaskKey, request: Request) -> dict[str, Any]:
        """One request; with `wait` false it is answered once the name is known to be good."""
        name = self._checked_name(key, request.get("name"))
        wait = request.get("wait", True)
        if not isinstance(wait, bool):
            raise Declined("bad_request", "wait must be true or false", "leave it out to wait")
        wish = self._enqueue(key, name, self._checked_world(key, request))
        if not wait:
            return {"ok": True, "name": name, "committed": False}
        epoch = await asyncio.shield(wish.epoch)  # who asked may go away; the commit goes on
        return {"ok": True, "name": name, "committed": True, "epoch": epoch}

    async def stop(self) -> None:
        """Abandon what is under way."""
        working = [desk.work for desk in self._desks.values() if desk.work]
        for work in working:
            work.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    def _checked_name(self, key: TaskKey, name: object) -> str:
        """Scripts name it by the path, too, to which they have written it."""
        if isinstance(name, str):
            name = name.removeprefix(f"{self._folders.of(*key.of_attempt)}/").removesuffix("/")
        problem = name_problem(name)
        if problem:
            raise Declined("bad_name", problem, "name a file or folder directly in SWARM_CHECKPOINT_DIR")
        path = self._folders.of(*key.of_attempt) / str(name)
        if not os.path.lexists(path):  # where a link leads is the job's choice, and may be a file system that hangs
            remedy = "write it into SWARM_CHECKPOINT_DIR first, then commit it"
            raise Declined("not_found", f"{path} does not exist", remedy)
        return str(name)

    def _checked_world(self, key: TaskKey, request: Request) -> int:
        """Of now: by the time that it is copied its writer may have switched, or left."""
        world = request.get("world", 0)
        if isinstance(world, bool) or not isinstance(world, int) or not 0 <= world <= WORLD_MOST:
            raise Declined("bad_request", "world must be a version of the membership", "leave it out")
        return world or self._world_of(key)

    def _enqueue(self, key: TaskKey, name: str, world: int) -> _Wish:
        desk = self._desks.setdefault(key, _Desk())
        wish = _Wish(name, world, asyncio.get_running_loop().create_future())
        wish.epoch.add_done_callback(lambda done: _note_refusal(key, name, done))
        if desk.waiting:
            problem = f"superseded by a newer checkpoint, {name}, before its turn came"
            desk.waiting.epoch.set_exception(Declined("superseded", problem, "commit less often"))
        desk.waiting = wish
        if desk.work is None:
            desk.work = asyncio.get_running_loop().create_task(self._work(key, desk))
        return wish

    async def _work(self, key: TaskKey, desk: _Desk) -> None:
        try:
            while wish := desk.waiting:
                desk.waiting = None
                await self._settle(wish, self._commit(key, wish))
        finally:
            del self._desks[key]
            if desk.waiting and not desk.waiting.epoch.done():
                desk.waiting.epoch.cancel()

    async def _settle(self, wish: _Wish, commit: Awaitable[int]) -> None:
        try:
            epoch = await commit
        except asyncio.CancelledError:
            wish.epoch.cancel()
            raise
        except Declined as refusal:
            wish.epoch.set_exception(refusal)
        except Exception as error:  # a fault of ours costs this commit and is told as one
            log.exception("checkpoint failed name=%s", wish.name)
            wish.epoch.set_exception(Declined("internal", f"the agent failed: {error!r}", "see the agent's log"))
        else:
            wish.epoch.set_result(epoch)

    async def _commit(self, key: TaskKey, wish: _Wish) -> int:
        order, account = self._order_of(key), self._account_of(key)
        if order is None or account is None:
            raise Declined("conflict", "this task is over", "end this process")
        folder = self._folders.of(*key.of_attempt)
        if self._folders.is_shared:
            size_bytes = await self._threads.run(size_of, folder, wish.name)
            return await self._register(order, self._checkpoint(order, wish, size_bytes))
        checkpoint = await self._pack_and_copy(key, order, account, wish)
        try:
            epoch = await self._register(order, checkpoint)
        except Declined as refusal:
            if refusal.code == "conflict":
                keep = [digest for digest in self._kept.digests(order.job_id) if digest != checkpoint.digest]
                self._kept.retain(order.job_id, keep)
            raise
        self._kept.committed(order.job_id, checkpoint.digest)
        return epoch

    async def _pack_and_copy(self, key: TaskKey, order: TaskOrder, account: Account, wish: _Wish) -> Checkpoint:
        folder, uid = self._folders.of(order.job_id, order.attempt), account.uid
        limit_bytes, runs = self._kept.job_bytes_max, partial(self._runs, key)
        tree = await self._threads.run(pack, folder, wish.name, self._blobs, uid, limit_bytes, runs)
        self._blobs.admit(tree.blobs)
        if self._blobs.missing(tree.blobs):
            raise Declined("storage", "parts of the copy vanished from this node's store", "commit it again")
        with self._blobs.pinned(tree.blobs):
            if excess := self._kept.excess(order.job_id, tree.blobs):
                raise Declined("too_large", excess, "write smaller ones, or raise checkpoint_bytes_max of the agents")
            try:
                digest = await self._blobs.put_bytes(await self._threads.run(tree.to_bytes))
            except BlobError as error:
                raise Declined("storage", str(error), error.remedy) from error
            self._kept.add(order.job_id, digest, tree.blobs, self._node_id)
        resumed = [order.checkpoint.digest] if order.checkpoint and order.checkpoint.digest else []
        keep = dict.fromkeys((*resumed, *self._kept.digests(order.job_id)))
        peers = await self._copies.spread(order, digest, tree.size_bytes, keep)
        return self._checkpoint(order, wish, tree.size_bytes, digest, (self._node_id, *peers))

    def _runs(self, key: TaskKey) -> bool:
        return self._order_of(key) is not None

    def _checkpoint(
        self, order: TaskOrder, wish: _Wish, size_bytes: int, digest: str = "", copies: tuple[NodeId, ...] = ()
    ) -> Checkpoint:
        numbers = (self._clock(), size_bytes, digest, copies)
        return Checkpoint(wish.name, order.attempt, self._node_id, *numbers, world=wish.world)

    async def _register(self, order: TaskOrder, checkpoint: Checkpoint) -> int:
        told = fitting(Checkpoint, checkpoint, "bad_checkpoint")
        command = CommitCheckpoint(order.job_id, order.attempt, told, order.part)
        reply = await self._commander.command(command, timeout_s=COMMIT_TIMEOUT_S)
        if isinstance(reply, CheckpointCommitted):
            return reply.epoch
        assert isinstance(reply, Refused), f"a commit was answered by {type(reply).__name__}"
        if reply.code == "conflict":
            raise Declined("conflict", f"it does not count: {reply.problem}", reply.remedy)
        raise Declined(reply.code, reply.problem, reply.remedy)


def _note_refusal(key: TaskKey, name: str, done: "asyncio.Future[int]") -> None:
    """Who does not wait learns of it here only."""
    if not done.cancelled() and (error := done.exception()):
        log.warning("checkpoint not committed job_id=%s attempt=%d name=%s error=%s", *key.of_attempt, name, error)
