"""Shipped files of live jobs, kept by the nodes that hold the records of these jobs.

A job that starts elsewhere must find its files although the agent that took them is dead.  So a node that holds a job's
record, or shepherds the job, brings the tree and the requirements here in the background, and pins them until the job
has ended.  Which these are is read from the records again and again: a new holder, a restarted agent and a store from
which somebody has removed something all need the same, and nothing else has to be remembered.

The smallest comes first, a small piece at a time, and never what a task that starts here is fetching anyway.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from swarm_agent.room import room_for_others
from swarm_agent.staging.blobs import BlobError, BlobStore, NotStored, TooLarge
from swarm_agent.staging.fetch import BATCH, BlobFetcher, NotReached, PeerStreams
from swarmsched.api import JobSpec
from swarmsched.errors import SwarmError
from swarmsched.events import FilesAway
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.tree import BadTree, Tree

LOOK_INTERVAL_S = 0.5
VERIFY_INTERVAL_S = 300.0  # for what somebody else has removed from the store
PIECE_BYTES = 16 * 2**20
SHARE_OF_CACHE = 0.5  # the rest is for what tasks of this node need, and for uploads
RETRY_S, RETRY_S_MAX = 0.5, 60.0  # doubled with each failure
FAILURES_LEAST = 2  # in a row, before it counts: one source may have been busy
TOLD_EVERY_S = 10.0  # to the core, whose shepherds change

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Parcel:
    """A tree or a file of requirements, and what of it is not here yet."""

    digest: str
    is_tree: bool
    missing_bytes: int  # as the submission says, until its manifest is here
    sources: tuple[NodeId, ...] = ()
    blobs: Mapping[str, int] | None = None  # sizes of all that belongs to it, once they are known
    missing: list[str] = field(default_factory=list)
    verify_s: float = field(default_factory=lambda: time.monotonic() + VERIFY_INTERVAL_S)
    retry_s: float = 0.0
    failures: int = 0  # since the last piece came
    tried: frozenset[NodeId] = frozenset()  # sources that were alive then
    is_unanswered: bool = False  # a source could not be asked the last time
    is_refused: bool = False  # by this node, for want of room or as no tree: a start tells what is wrong, if anything

    @property
    def is_whole(self) -> bool:
        """True while all of it is here, as far as this node knows."""
        return self.blobs is not None and not self.missing

    def next_piece(self) -> tuple[list[str], int]:
        """The next blobs, one at least, and their size."""
        assert self.blobs is not None
        count, size_bytes = 0, 0
        for digest in self.missing[-1 : -BATCH - 1 : -1]:
            if count and size_bytes + self.blobs[digest] > PIECE_BYTES:
                break
            count, size_bytes = count + 1, size_bytes + self.blobs[digest]
        return self.missing[-count:], size_bytes

    def lacks(self, digests: Iterable[str]) -> None:
        """These are what is missing, all others are here."""
        assert self.blobs is not None
        self.missing = list(digests)
        self.missing_bytes = sum(self.blobs[digest] for digest in self.missing)


class NotKept(BlobError):
    """This node has no room for what only others may need."""


class HeldFiles:
    """Brings and keeps the files of live jobs whose records are on this node.  Belongs to the loop's thread."""

    def __init__(
        self,
        blobs: BlobStore,
        peers: PeerStreams,
        node_id: NodeId,
        records: Callable[[], Mapping[JobId, JobRecord]],
        of_tasks: BlobFetcher,
        post: Callable[[FilesAway], None],
    ) -> None:
        self._blobs, self._peers, self._node_id, self._records = blobs, peers, node_id, records
        self._of_tasks, self._post = of_tasks, post
        # Of its own: what is kept for others must not make a task of this node wait.
        self._fetcher = BlobFetcher(blobs, peers, node_id)
        self._parcels: dict[str, _Parcel] = {}
        self._pins: Counter[str] = Counter()  # of blobs: in how many parcels each is
        self._held_bytes = 0
        self._away: tuple[JobId, ...] = ()  # jobs whose files cannot be had, as the core was told last
        self._told_s = 0.0
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at the records."""
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Leave what is under way; the next life of the agent takes it up."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def has(self, spec: JobSpec) -> bool:
        """True when all files of a job whose record is here are on this node."""
        parcels = [self._parcels.get(digest) for digest in _digests(spec)]
        return all(parcel is not None and parcel.is_whole for parcel in parcels)

    def is_away(self, job_id: JobId) -> bool:
        """True for a live job with a record here whose files no agent has that can be reached."""
        return job_id in self._away

    @property
    def held_bytes(self) -> int:
        """Size of what is kept, or is to come, for the jobs whose records are here."""
        return self._held_bytes

    @property
    def incomplete_count(self) -> int:
        """Trees and files of requirements that are to be here and are not yet."""
        return sum(not parcel.is_whole for parcel in self._parcels.values())

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # it is tried again, and nobody else would tell
                log.exception("files of live jobs could not be looked after")
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def look(self) -> None:
        """Follow the records, then bring one piece after another as long as any can be had."""
        self._follow()
        await self._verify()
        while (parcel := self._next()) is not None:
            await self._bring_piece(parcel)
            self._follow()
        self._tell()

    def _tell(self) -> None:
        """Name the jobs of which a start would fail, wherever it were tried."""
        alive, now_s = {self._node_id, *self._peers.live_peers()}, time.monotonic()
        lost = {digest for digest, parcel in self._parcels.items() if _is_away(parcel, alive)}
        records = self._records() if lost else {}
        away = tuple(
            job_id
            for job_id, record in records.items()
            if not record.is_ended and not lost.isdisjoint(_digests(record.spec))
        )
        if away != self._away or (away and now_s >= self._told_s + TOLD_EVERY_S):
            self._away, self._told_s = away, now_s
            self._post(FilesAway(away))

    def _follow(self) -> None:
        """Take up what live jobs need, and let go of what none needs any more."""
        wanted: dict[str, _Parcel] = {}
        for record in self._records().values():
            if record.is_ended:
                continue
            for digest in _digests(record.spec):
                known = wanted.get(digest)
                if known is None:
                    is_tree = digest == record.spec.tree
                    size_bytes = record.spec.held_bytes if is_tree else 0
                    known = wanted[digest] = self._parcels.get(digest) or _Parcel(digest, is_tree, size_bytes)
                    known.sources = ()
                known.sources = tuple(dict.fromkeys((*known.sources, *_sources(record))))
        for digest in self._parcels.keys() - wanted.keys():
            self._let_go(self._parcels[digest])
        self._parcels = wanted

    def _next(self) -> _Parcel | None:
        """The parcel of which least is missing, among those of which something can be had now."""
        now_s, alive = time.monotonic(), {self._node_id, *self._peers.live_peers()}
        able = [
            parcel
            for parcel in self._parcels.values()
            if not parcel.is_whole
            and (parcel.retry_s <= now_s or not parcel.tried.issuperset(alive.intersection(parcel.sources)))
            and not alive.isdisjoint(parcel.sources)
            and not self._of_tasks.is_bringing(parcel.missing[-1:] or (parcel.digest,))
        ]
        return min(able, key=lambda parcel: parcel.missing_bytes, default=None)

    async def _bring_piece(self, parcel: _Parcel) -> None:
        alive = {self._node_id, *self._peers.live_peers()}
        sources = [node for node in parcel.sources if node in alive]
        try:
            if parcel.blobs is None:
                await self._open(parcel, sources)
            else:
                piece, size_bytes = parcel.next_piece()
                await self._make_room(parcel.missing_bytes)
                await self._fetcher.ensure(piece, sources, is_patient=False)
                del parcel.missing[-len(piece) :]
                parcel.missing_bytes -= size_bytes
        except (SwarmError, BadTree, OSError) as error:
            self._failed(parcel, error, sources)
        else:
            parcel.failures, parcel.is_refused = 0, False

    async def _open(self, parcel: _Parcel, sources: list[NodeId]) -> None:
        """Learn what belongs to it, and pin that; raises where this node has no room for it."""
        with self._blobs.pinned([parcel.digest]):
            await self._fetcher.ensure([parcel.digest], sources, is_patient=False)
            path = self._blobs.path(parcel.digest)
            if path is None:
                raise BlobError(parcel.digest, "vanished from this node's store")
            blobs = {parcel.digest: path.stat().st_size}
            if parcel.is_tree:
                tree = await asyncio.to_thread(lambda: Tree.from_bytes(path.read_bytes()))
                blobs |= tree.blobs
            new_bytes = sum(size for digest, size in blobs.items() if not self._pins[digest])
            limit_bytes = int(SHARE_OF_CACHE * self._blobs.limit_bytes)
            if self._held_bytes + new_bytes > limit_bytes:
                told = f"{new_bytes} bytes more than the {self._held_bytes} that are kept for live jobs"
                raise NotKept(parcel.digest, f"{told} are beyond {limit_bytes}, half of blob_cache_bytes_max")
            missing = await asyncio.to_thread(self._blobs.missing, tuple(blobs))
            await self._make_room(sum(blobs[digest] for digest in missing))
            if self._parcels.get(parcel.digest) is parcel:  # else its last job has ended meanwhile
                self._pin(blobs)
                parcel.blobs = blobs
                parcel.lacks(missing)

    async def _verify(self) -> None:
        """Find out what somebody has removed from the store."""
        for parcel in list(self._parcels.values()):
            if parcel.is_whole and parcel.blobs is not None and parcel.verify_s <= time.monotonic():
                parcel.lacks(await asyncio.to_thread(self._gone, parcel.blobs))
                parcel.verify_s = time.monotonic() + VERIFY_INTERVAL_S

    def _gone(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in digests if self._blobs.path(digest) is None]

    async def _make_room(self, size_bytes: int) -> None:
        """See that so much fits beside what is left free, where need be by removing what nobody has used for long."""
        while (lacking := size_bytes - (room_bytes := room_for_others(self._blobs.directory))) > 0:
            if not self._blobs.shed(lacking):
                problem = f"{size_bytes} bytes do not fit into the {max(0, room_bytes)} that this node has for others"
                raise NotKept("", problem)
            await asyncio.sleep(0)

    def _failed(self, parcel: _Parcel, error: Exception, sources: Iterable[NodeId]) -> None:
        if not parcel.failures:
            log.warning("files of a live job are not kept here digest=%s error=%s", parcel.digest[:12], error)
        parcel.retry_s = time.monotonic() + min(RETRY_S_MAX, RETRY_S * 2**parcel.failures)
        parcel.failures, parcel.tried = parcel.failures + 1, frozenset(sources)
        parcel.is_unanswered = isinstance(error, NotReached)
        parcel.is_refused = isinstance(error, NotKept | NotStored | TooLarge | BadTree | OSError)

    def _pin(self, blobs: Mapping[str, int]) -> None:
        new = [digest for digest in blobs if not self._pins[digest]]
        self._pins.update(blobs.keys())
        self._held_bytes += sum(blobs[digest] for digest in new)
        self._blobs.pin(new)

    def _let_go(self, parcel: _Parcel) -> None:
        """Its blobs stay in the cache of files until these need the room."""
        blobs = parcel.blobs or {}
        self._pins.subtract(blobs.keys())
        old = [digest for digest in blobs if not self._pins[digest]]
        for digest in old:
            del self._pins[digest]
        self._held_bytes -= sum(blobs[digest] for digest in old)
        self._blobs.unpin(old)


def _is_away(parcel: _Parcel, alive: AbstractSet[NodeId]) -> bool:
    """True for what is not here, nor with anybody who can be asked, while somebody else may have it.

    What those who are named all lack is lost: the job is started, and fails for want of it.
    """
    absent = [node for node in parcel.sources if node not in alive]
    if parcel.is_whole or parcel.is_refused or not (absent or parcel.is_unanswered):
        return False
    return parcel.failures >= FAILURES_LEAST or len(absent) == len(parcel.sources)


def sources_of(spec: JobSpec, holders: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Nodes that may have a job's files: those that its submission names, then the holders of its record."""
    return tuple(dict.fromkeys((*spec.blob_sources, *holders)))


def _sources(record: JobRecord) -> tuple[NodeId, ...]:
    holders = [holder.node for holder in record.configuration.members]
    return sources_of(record.spec, [*holders, record.shepherd])


def _digests(spec: JobSpec) -> tuple[str, ...]:
    return tuple(digest for digest in (spec.tree, spec.requirements) if digest)
