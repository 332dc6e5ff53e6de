"""Where gangs go, for plans that place hundreds of jobs among a thousand nodes: `placement.choose` over arrays.

It chooses as that does without a generator.  What it knows of a node is brought up to date once that has changed.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from swarmsched.ids import JobId, NodeId
from swarmsched.policies.hosting import suited, work_of
from swarmsched.policies.placement import ODD, hashed, tie_break, tightness, with_other_groups
from swarmsched.policies.room import Room
from swarmsched.resources import Demand, Device, Share
from swarmsched.view import JobView

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

ANY_GPU = Demand(gpus=1)
CPUS_MOST = 2**33
"""Cores, booked ones too: `Sites` tells them and GPUs as one number."""
NO_NODE = np.iinfo(np.int64).max


class Sites:
    """The nodes of a room, which may change meanwhile, in order of their names."""

    def __init__(self, room: Room, jobs: Iterable[JobView] = ()) -> None:
        """`jobs`: all that have GPUs, of which some are to be kept `apart`."""
        self.room = room
        self._names = sorted(room.nodes)
        self._at = {name: at for at, name in enumerate(self._names)}
        self._hashes = np.array([hashed(name) for name in self._names], np.uint64)
        self._left = _Column(room, self._at, self._left_on)
        self._held: dict[Demand, _Column] = {}
        self._classes: dict[Device, Mapping[str, Mask]] = {}
        self._spread: dict[JobId, list[int]] = {}  # of jobs on several nodes
        self._crowd = np.zeros(len(self._names), np.int64)  # how many of those each node has
        for job in jobs:
            self.put(job.job_id, job.shares)

    def put(self, job_id: JobId, shares: Iterable[Share]) -> None:
        """The job is there now, and nowhere else."""
        self._crowd[self._spread.pop(job_id, [])] -= 1
        nodes = {at for share in shares if (at := self._at.get(share.node, -1)) >= 0}
        if len(nodes) > 1:
            self._spread[job_id] = list(nodes)
            self._crowd[self._spread[job_id]] += 1

    def is_crowded(self, job_id: JobId) -> bool:
        """True of a job on several nodes that shares one with another such job: they use its network at once."""
        return bool((self._crowd[self._spread.get(job_id, [])] > 1).any())

    def choose(self, job: JobView, ranks: int, *, apart: bool = False, gpu: str = "") -> tuple[Share, ...] | None:
        """Shares of so many ranks, the largest first, and those of other groups; None where there is no room.

        Among equal nodes it stays where it is.  `apart`: on one node, or on none that another job has which is on
        several.  `gpu`: on nodes whose GPUs are of that class alone.
        """
        if self.room.ranks_alike(job.demand) < ranks and not job.card.mixed_gpus:
            return None
        return with_other_groups(self.room, job, lambda: self._choose(job, ranks, apart, gpu))

    def _choose(self, job: JobView, ranks: int, apart: bool, gpu: str) -> tuple[Share, ...] | None:
        held = self._permitted(job) if job.card.nodes or job.excluded else self._held_of(job.demand)
        if gpu:
            held = np.where(self._nodes_by_class(ANY_GPU).get(gpu, False), held, 0)
        classes = {} if job.card.mixed_gpus else self._nodes_by_class(job.demand)
        others = self._others_crowd(job.job_id) if apart else None
        found = self._on_class(held, job, ranks, others, classes)
        if not found or work_of(job) is None:
            return found
        if others is not None:
            held = np.where(others, 0, held)
        allowed = {self._names[at]: int(held[at]) for at in np.flatnonzero(held)}
        is_there = all(share.node in allowed for share in found)
        return suited(self.room, job, ranks, allowed, found, tie_break(job.job_id)) if is_there else found

    def _on_class(
        self, held: Ints, job: JobView, ranks: int, others: Mask | None, classes: Mapping[str, Mask]
    ) -> tuple[Share, ...] | None:
        """On the fewest nodes of one class."""
        if len(classes) < 2:
            return self._found(held, job, ranks, others)
        found: dict[str, tuple[Share, ...]] = {}
        for name, there in classes.items():
            shares = self._found(np.where(there, held, 0), job, ranks, others)
            if shares is not None:
                found[name] = shares
        home = {share.node for share in job.shares}
        return found[min(found, key=lambda name: (*tightness(self.room, found[name], home), name))] if found else None

    def _found(self, held: Ints, job: JobView, ranks: int, others: Mask | None) -> tuple[Share, ...] | None:
        if others is not None and held.max(initial=0) < ranks:
            held = np.where(others, 0, held)
        return self._packed(held, job, ranks) if held.sum() >= ranks else None

    def _others_crowd(self, job_id: JobId) -> Mask:
        """Nodes that another job has which is on several."""
        crowd = self._crowd.copy()
        crowd[self._spread.get(job_id, [])] -= 1
        return np.asarray(crowd > 0)

    def _packed(self, held: Ints, job: JobView, ranks: int) -> tuple[Share, ...]:
        """On the fewest nodes, which hold them."""
        shares: list[Share] = []
        while ranks:
            most = int(held.max())
            if most >= ranks:
                left = np.where(held >= ranks, self._left.now(), NO_NODE)
                (at,) = self._first(left == left.min(), 1, job)
                return (*shares, Share(self._names[at], ranks))
            whole = self._first(held == most, (ranks - 1) // most, job)
            shares += [Share(self._names[at], most) for at in whole]
            ranks -= most * len(whole)
            held = held.copy()
            held[whole] = 0
        return tuple(shares)

    def _first(self, equal: Mask, count: int, job: JobView) -> list[int]:
        """So many of equal nodes, where it is already before others, by the hash of job and node."""
        there = [at for share in job.shares if (at := self._at.get(share.node, -1)) >= 0 and equal[at]]
        if there:
            equal[there] = False
            there = self._by_hash(np.array(there), count, job)
        if len(there) < count:
            there += self._by_hash(np.flatnonzero(equal), count - len(there), job)
        return there

    def _by_hash(self, nodes: Ints, count: int, job: JobView) -> list[int]:
        if len(nodes) < 2:
            return [int(node) for node in nodes]
        scores = (self._hashes[nodes] ^ np.uint64(hashed(job.job_id))) * np.uint64(ODD)
        if count == 1:
            return [int(nodes[scores.argmin()])]
        return [int(node) for node in nodes[scores.argsort(kind="stable")[:count]]]

    def _permitted(self, job: JobView) -> Ints:
        """What nodes hold of it, none where it may not go."""
        held = self._held_of(job.demand)
        if job.card.nodes:
            chosen = [self._at[node] for node in job.card.nodes if node in self._at]
            only = np.zeros_like(held)
            only[chosen] = held[chosen]
        else:
            only = held.copy()
        only[[self._at[node] for node in job.excluded if node in self._at]] = 0
        return only

    def _nodes_by_class(self, demand: Demand) -> Mapping[str, Mask]:
        key = demand.device
        if not demand.gpus:
            return {}
        if key not in self._classes:
            of_node = self.room.classes(demand)
            names = np.array([of_node.get(node, "") for node in self._names], object)
            self._classes[key] = {name: np.asarray(names == name) for name in sorted({*of_node.values()})}
        return self._classes[key]

    def _held_of(self, demand: Demand) -> Ints:
        column = self._held.get(demand)
        if column is None:
            column = self._held[demand] = _Column(self.room, self._at, lambda node: self.room.fits(demand).get(node, 0))
        return column.now()

    def _left_on(self, node: NodeId) -> int:
        """GPUs, then cores, that are free there, as one number."""
        free = self.room.free(node)
        return free.gpu_count * CPUS_MOST + free.cpus


class _Column:
    """A number of each node; not to be written to."""

    def __init__(self, room: Room, at: Mapping[NodeId, int], number: Callable[[NodeId], int]) -> None:
        self._room, self._at, self._number = room, at, number
        self._numbers = np.array([number(node) for node in at], np.int64)
        self._seen = room.change_count

    def now(self) -> Ints:
        """As the room is now."""
        for node in self._room.changed(self._seen):
            self._numbers[self._at[node]] = self._number(node)
        self._seen = self._room.change_count
        return self._numbers
