"""Bringing back the checkpoint that a task resumes from: ROOT/<job id>/<attempt that wrote it>/<name>.

What lies there already is used only if it is what was committed, byte for byte: scripts that write the same name
again and again leave a half-written file when they are killed.
"""

import logging
import os
import secrets
import shutil
from pathlib import Path

from swarm_agent.checkpoints.copies import Copies
from swarm_agent.checkpoints.folders import CheckpointFolders
from swarm_agent.checkpoints.pack import manifest
from swarm_agent.staging.blobs import BlobError, BlobStore, NotStored
from swarm_agent.staging.fetch import NotReached
from swarm_agent.staging.tree import Unpacker
from swarm_agent.task.account import Account
from swarm_agent.task.tasksocket import Declined
from swarm_agent.threads import Threads
from swarmsched.checkpoint import Checkpoint
from swarmsched.errors import SwarmError
from swarmsched.ids import JobId
from swarmsched.task import TaskOrder
from swarmsched.tree import BadTree, Tree

log = logging.getLogger(__name__)


class NotRestored(SwarmError):
    """The checkpoint is not on this node and cannot be brought; the error behind it says why not."""

    code = "not_restored"


class Restorer:
    """Restores; repeating it finds what the first call left."""

    def __init__(self, folders: CheckpointFolders, blobs: BlobStore, copies: Copies, threads: Threads) -> None:
        self._folders, self._blobs, self._copies, self._threads = folders, blobs, copies, threads

    async def bring(self, order: TaskOrder, account: Account) -> Path | None:
        """Path of the checkpoint that the order names, or None without one.  Raises `NotRestored`."""
        checkpoint = order.checkpoint
        if checkpoint is None:
            return None
        path = self._folders.of(order.job_id, checkpoint.attempt) / checkpoint.name
        if not checkpoint.digest:
            if not await self._threads.run(path.exists):
                told = f"{_described(checkpoint)} is not at {path} on {order.node}, and nothing was copied"
                raise NotRestored(f"{told}; see that checkpoint_dir is the same file system on all nodes")
        elif not await self._threads.run(_is_there, path, checkpoint):
            await self._fetch(order, checkpoint, account)
        return path

    async def _fetch(self, order: TaskOrder, checkpoint: Checkpoint, account: Account) -> None:
        try:
            try:
                await self._bring_and_unpack(order, checkpoint, account)
            except (NotReached, NotStored):
                raise
            except BlobError as error:  # a blob that rotted on this disk is gone now, and another node may have it
                log.warning("checkpoint is fetched again job_id=%s error=%s", order.job_id, error)
                await self._bring_and_unpack(order, checkpoint, account)
        except (BlobError, BadTree) as error:
            tried = ", ".join(checkpoint.copies) or "none"
            told = f"{_described(checkpoint)} could not be brought to {order.node} (copies: {tried})"
            raise NotRestored(f"{told}: {error}") from error
        except OSError as error:
            told = f"{_described(checkpoint)} could not be unpacked on {order.node}"
            raise NotRestored(f"{told}: {error.strerror or error} ({self._folders.root})") from error

    async def _bring_and_unpack(self, order: TaskOrder, checkpoint: Checkpoint, account: Account) -> None:
        tree = await self._copies.bring(checkpoint.digest, checkpoint.copies)
        with self._blobs.pinned(tree.blobs):
            await self._threads.run(self._unpack, order.job_id, checkpoint, tree, account)

    def _unpack(self, job_id: JobId, checkpoint: Checkpoint, tree: Tree, account: Account) -> None:
        """Under a name in the agent's own folder first: in the job's folder the job could swap it for a link."""
        target = self._folders.make(job_id, checkpoint.attempt, account) / checkpoint.name
        draft = self._folders.root / job_id / f"draft-{secrets.token_hex(8)}"
        try:
            Unpacker(self._blobs, account.uid, account.gid).unpack(tree, draft)
            if os.path.lexists(target):
                target.rename(draft / f".old-{secrets.token_hex(8)}")
            (draft / checkpoint.name).rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _is_there(path: Path, checkpoint: Checkpoint) -> bool:
    if not os.path.lexists(path):
        return False
    try:
        return manifest(path.parent, path.name).digest == checkpoint.digest
    except Declined:
        return False


def _described(checkpoint: Checkpoint) -> str:
    return f"checkpoint {checkpoint.name!r} of attempt {checkpoint.attempt} (written on {checkpoint.node})"
