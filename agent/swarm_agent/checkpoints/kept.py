"""Which packed checkpoints this node keeps, and for how long; the list survives the agent.

DATA/kept-checkpoints/<job id>.json lists digests of manifests.  Their blobs are pinned, so that the cache of shipped
files cannot push them out.
"""

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm_agent.staging.blobs import BlobStore
from swarmsched.ids import JobId, NodeId, is_job_id
from swarmsched.tree import BadTree, Tree

log = logging.getLogger(__name__)

KEEP = 2
KEEP_OF_OTHERS = 4  # of writers that may know nothing of one another: the first rank of an elastic job moves


@dataclass(slots=True)
class _Copy:
    blobs: tuple[str, ...]  # of the manifest and all that it names
    is_committed: bool
    writer: NodeId  # for whom it is kept; unknown in lists of older agents


@dataclass(slots=True)
class KeptCheckpoints:
    """The list, oldest first for each job.  Belongs to the loop's thread."""

    directory: Path
    blobs: BlobStore
    job_bytes_max: int = 2**50
    _copies: dict[JobId, dict[str, _Copy]] = field(default_factory=dict)

    def load(self) -> None:
        """Read what an earlier life kept; entries whose blobs are gone are dropped."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.directory.glob("*.json"):
            if is_job_id(path.stem):
                self._load(JobId(path.stem), path)

    def digests(self, job_id: JobId) -> tuple[str, ...]:
        """Manifests of the job's copies on this node, oldest first."""
        return tuple(self._copies.get(job_id, ()))

    @property
    def held_bytes(self) -> int:
        """What the copies of all jobs take, a blob that several of them name once."""
        copies = (copy for of_job in self._copies.values() for copy in of_job.values())
        return sum(self.blobs.size_bytes(blob) or 0 for blob in {blob for copy in copies for blob in copy.blobs})

    def excess(self, job_id: JobId, new: Mapping[str, int], keep: Collection[str] | None = None) -> str:
        """How a further copy would be more than a job may have here, beside those that stay; empty where it is not."""
        copies = self._copies.get(job_id, {})
        blobs = {blob for name, copy in copies.items() if keep is None or name in keep for blob in copy.blobs}
        held_bytes = sum(self.blobs.size_bytes(blob) or 0 for blob in blobs - new.keys()) + sum(new.values())
        if held_bytes <= self.job_bytes_max:
            return ""
        told = f"with this one the job's checkpoints have {held_bytes} bytes on this node"
        return f"{told}, and checkpoint_bytes_max is {self.job_bytes_max}"

    def add(self, job_id: JobId, digest: str, blobs: Iterable[str], writer: NodeId) -> None:
        """Keep this copy, whose blobs are in the store."""
        copies = self._copies.setdefault(job_id, {})
        known = copies.pop(digest, None)
        copies[digest] = known or _Copy((digest, *blobs), is_committed=False, writer=writer)
        if known is None:
            self.blobs.pin(copies[digest].blobs)
        self._save(job_id)

    def committed(self, job_id: JobId, digest: str) -> None:
        """The register knows it: keep it and the one before, and what is newer."""
        copies = self._copies.get(job_id, {})
        if digest not in copies:
            return
        copies[digest].is_committed = True
        order = list(copies)
        older = [name for name in order[: order.index(digest)] if copies[name].is_committed]
        keep = {*older[len(older) - KEEP + 1 :], *order[order.index(digest) :]}
        self.retain(job_id, keep)

    def settle(self, job_id: JobId, writer: NodeId, keep: Collection[str]) -> None:
        """Drop what a writer does not need any more; of others' copies it cannot say which the register names."""
        copies = self._copies.get(job_id, {})
        others = [name for name, copy in copies.items() if copy.writer != writer]
        self.retain(job_id, {*keep, *others[-KEEP_OF_OTHERS:]})

    def retain(self, job_id: JobId, keep: Collection[str]) -> None:
        """Drop the job's copies that are not in `keep`."""
        copies = self._copies.get(job_id, {})
        for digest in [name for name in copies if name not in keep]:
            self.blobs.drop(copies.pop(digest).blobs)
        if not copies:
            self._copies.pop(job_id, None)
        self._save(job_id)

    def jobs(self) -> list[tuple[JobId, float]]:
        """Every job with copies here, and seconds since 1970 when its list last changed."""
        return [(job_id, self._path(job_id).stat().st_mtime) for job_id in list(self._copies)]

    def _load(self, job_id: JobId, path: Path) -> None:
        try:
            entries = json.loads(path.read_bytes())
            listed = [(str(e["digest"]), bool(e["committed"]), NodeId(str(e.get("writer", "")))) for e in entries]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("list of kept checkpoints cannot be read, it is dropped path=%s error=%s", path, error)
            listed = []
        for digest, is_committed, writer in listed:
            blobs = self._blobs_of(digest)
            if blobs is None:
                log.warning("a kept checkpoint is gone job_id=%s digest=%s", job_id, digest[:12])
                continue
            self._copies.setdefault(job_id, {})[digest] = copy = _Copy((digest, *blobs), is_committed, writer)
            self.blobs.pin(copy.blobs)
        if job_id not in self._copies:
            path.unlink(missing_ok=True)

    def _blobs_of(self, digest: str) -> tuple[str, ...] | None:
        path = self.blobs.path(digest)
        if path is None:
            return None
        try:
            tree = Tree.from_bytes(path.read_bytes())
        except (OSError, BadTree):
            return None
        return None if self.blobs.missing(tree.blobs) else tuple(tree.blobs)

    def _save(self, job_id: JobId) -> None:
        """Without fsync: a list lost in a power cut costs a pin, and the store's own age order keeps new blobs."""
        path, copies = self._path(job_id), self._copies.get(job_id)
        if not copies:
            path.unlink(missing_ok=True)
            return
        listed = [
            {"digest": digest, "committed": copy.is_committed, "writer": copy.writer} for digest, copy in copies.items()
        ]
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(listed))
        draft.rename(path)

    def _path(self, job_id: JobId) -> Path:
        return self.directory / f"{job_id}.json"
