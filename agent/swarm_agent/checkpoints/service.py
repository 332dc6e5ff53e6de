"""All that this node does about checkpoints, put together for the task runner."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from swarm_agent.checkpoints.commits import Commander, Commits
from swarm_agent.checkpoints.copies import Copies
from swarm_agent.checkpoints.folders import CheckpointFolders
from swarm_agent.checkpoints.kept import KeptCheckpoints
from swarm_agent.checkpoints.restore import Restorer
from swarm_agent.folder import remove_tree
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.fetch import PeerStreams
from swarm_agent.task.account import Account
from swarm_agent.threads import Threads
from swarmsched.ids import JobId, NodeId, TaskKey, is_job_id
from swarmsched.task import TaskOrder

THREADS = 2


class CheckpointPeers(PeerStreams, Commander, Protocol):
    """The part of the agent that checkpoints need."""

    blobs: BlobStore

    def ended_utc_s(self, job_id: JobId) -> float | None:
        """When the job ended, 0 while it lives, None when nothing is known of it."""
        ...


class CheckpointService:
    """Commits, copies, restores, and forgets in the end."""

    def __init__(
        self,
        node_id: NodeId,
        data_dir: Path,
        folders: CheckpointFolders,
        agent: CheckpointPeers,
        order_of: Callable[[TaskKey], TaskOrder | None],
        account_of: Callable[[TaskKey], Account | None],
        world_of: Callable[[TaskKey], int],
        retention_s: float,
        job_bytes_max: int,
    ) -> None:
        self._folders, self._agent, self._retention_s = folders, agent, retention_s
        self._kept = KeptCheckpoints(data_dir / "kept-checkpoints", agent.blobs, job_bytes_max)
        self._copies = Copies(agent.blobs, agent, node_id, self._kept)
        # Jobs say how much there is to do here: it must not fill the threads that everybody shares, nor each other's.
        self._threads = commit, restore = Threads(THREADS, "commit"), Threads(THREADS, "restore")
        ours = (node_id, folders, agent.blobs, self._copies, self._kept, agent)
        self.commits = Commits(*ours, order_of, account_of, world_of, commit)
        self.restorer = Restorer(folders, agent.blobs, self._copies, restore)

    def start(self) -> None:
        """Take up what an earlier life kept, and take copies for peers."""
        self._kept.load()
        self._copies.serve()

    @property
    def held_bytes(self) -> int:
        """What the copies of checkpoints take that this node keeps."""
        return self._kept.held_bytes

    async def stop(self) -> None:
        """Abandon what is under way."""
        await self.commits.stop()
        for threads in self._threads:
            threads.close()

    async def prune(self, now_utc_s: float) -> None:
        """Drop copies of jobs that ended longer ago than the retention, and their folders unless nodes share them.

        Of a job that nothing is known of, what has not changed for so long is dropped.  May raise OSError.
        """
        for job_id, changed_utc_s in self._kept.jobs():
            if self._is_over(job_id, changed_utc_s, now_utc_s):
                self._kept.retain(job_id, ())
        if not self._folders.is_shared:
            found = await asyncio.to_thread(_job_folders, self._folders.root)
            for folder, changed_utc_s in found:
                if self._is_over(JobId(folder.name), changed_utc_s, now_utc_s):
                    await asyncio.to_thread(remove_tree, folder)

    def _is_over(self, job_id: JobId, changed_utc_s: float, now_utc_s: float) -> bool:
        ended_utc_s = self._agent.ended_utc_s(job_id)
        if ended_utc_s is None:
            return now_utc_s - changed_utc_s > self._retention_s
        return ended_utc_s > 0 and now_utc_s - ended_utc_s > self._retention_s


def _job_folders(root: Path) -> list[tuple[Path, float]]:
    """Every job's folder, and when an attempt last put something into its own."""
    folders = [path for path in root.iterdir() if is_job_id(path.name) and path.is_dir()]
    return [(folder, max(path.stat().st_mtime for path in (folder, *folder.iterdir()))) for folder in folders]
