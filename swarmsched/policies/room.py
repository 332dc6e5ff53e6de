"""Free capacity while a plan is made: what is left on each node after the jobs planned so far.

Fit is always asked of `resources.ranks_that_fit`, the function that owners use too.  Its answers are remembered for
each demand and asked again only for nodes that changed, which keeps a plan of a thousand jobs in milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from swarmsched.api import JobState
from swarmsched.ids import NodeId
from swarmsched.resources import (
    Demand,
    Device,
    Free,
    GpuCount,
    Share,
    demand_of,
    gpu_class,
    less,
    more,
    needs_beside,
    picked,
    ranks_that_fit,
    suitable,
)
from swarmsched.view import JobView, NodeView

Picks = Sequence[tuple[NodeId, tuple[GpuCount, ...]]]
"""Devices that each share takes, by kind."""


class Room:
    """Mutable copy of the free resources of the available nodes, in node order."""

    def __init__(self, nodes: Iterable[NodeView]) -> None:
        available = [node for node in nodes if node.is_available]
        self._set({node.node: node.free for node in available}, {node.node: node.capacity for node in available}, {})

    def _set(
        self,
        free: dict[NodeId, Free],
        capacity: Mapping[NodeId, Free],
        classes: dict[Device, Mapping[NodeId, str]],
    ) -> None:
        self._free = free
        self._capacity = capacity
        self._classes = classes  # of the nodes, by what makes a device suit: rooms of the same nodes share them
        # Nodes in the order in which they changed; each remembered fit knows how much of it it has seen.
        self._changes: list[NodeId] = []
        self._fits: dict[Demand, _Fits] = {}
        self._by_free: dict[tuple[int, int], dict[NodeId, None]] | None = None  # made when asked for

    @property
    def has_nodes(self) -> bool:
        """True when any node is available."""
        return bool(self._free)

    def copy(self) -> "Room":
        """An independent room with the same free resources."""
        other = Room(())
        other._set(dict(self._free), self._capacity, self._classes)
        other._fits = {demand: self._fresh(demand).copy() for demand in self._fits}
        return other

    def emptied(self) -> "Room":
        """The room when everything that runs has ended, whoever that is."""
        other = Room(())
        other._set(dict(self._capacity), self._capacity, self._classes)
        return other

    @property
    def nodes(self) -> Iterable[NodeId]:
        """Nodes that are available."""
        return self._free

    @property
    def change_count(self) -> int:
        """How often something was booked on a node, or given back."""
        return len(self._changes)

    def changed(self, since: int) -> Sequence[NodeId]:
        """The nodes on which that was after so many changes, once for each."""
        return self._changes[since:]

    def free(self, node: NodeId) -> Free:
        """What is left on a node."""
        return self._free[node]

    def capacity(self, node: NodeId) -> Free:
        """All that a node has, booked or not."""
        return self._capacity[node]

    def has(self, shares: Iterable[Share]) -> bool:
        """True when the nodes of all shares are available."""
        return all(share.node in self._free for share in shares)

    def fits(self, demand: Demand) -> Mapping[NodeId, int]:
        """Ranks of this demand that each node holds, for the nodes that hold any."""
        return self._fresh(demand).by_node

    def ranks(self, demand: Demand) -> int:
        """Ranks of this demand that all nodes hold together."""
        return self._fresh(demand).total

    def ranks_alike(self, demand: Demand) -> int:
        """The most ranks of this demand that nodes of one class hold together."""
        return max(self._fresh(demand).by_class.values(), default=0)

    def is_of_one_class(self, demand: Demand) -> bool:
        """True when all GPUs that suit a demand are of one class, as far as any are free."""
        return len(self._fresh(demand).by_class) < 2

    def classes(self, demand: Demand) -> Mapping[NodeId, str]:
        """The class of GPUs that each node has for a demand, for the nodes that have any, booked or not."""
        key = demand.device
        known = self._classes.get(key)
        if known is None:
            found = {node: gpu_class(has.gpus, demand) for node, has in self._capacity.items()}
            known = self._classes[key] = {node: name for node, name in found.items() if name}
        return known

    def apart(self, fits: Mapping[NodeId, int], demand: Demand) -> Mapping[str, Mapping[NodeId, int]]:
        """What nodes of this room hold, by class of their GPUs; without a name where there is but one, or none."""
        if not demand.gpus or self.is_of_one_class(demand):
            return {"": fits}
        classes, found = self.classes(demand), dict[str, dict[NodeId, int]]()
        for node, ranks in fits.items():
            found.setdefault(classes.get(node, ""), {})[node] = ranks
        return found

    def free_gpus(self, demand: Demand) -> int:
        """Free devices that suit the demand, whether or not enough of them are together."""
        return self._fresh(demand).gpus

    def by_what_is_free(self, gpus: int) -> Iterator[Iterable[NodeId]]:
        """Nodes with at least so many free devices, the fewest and then the fewest cores first, equal ones together."""
        if self._by_free is None:
            self._by_free = {}
            for node, free in self._free.items():
                self._by_free.setdefault((free.gpu_count, free.cpus), {})[node] = None
        for key in sorted(self._by_free):
            if key[0] >= gpus:
                yield self._by_free[key]

    def picks(self, shares: Iterable[Share], demand: Demand) -> Picks:
        """The devices that each share would get here."""
        found, left = [], dict[NodeId, tuple[GpuCount, ...]]()
        for share in shares:
            gpus = left.get(share.node, self._free[share.node].gpus)
            found.append((share.node, picked(gpus, demand_of(demand, share.group), share.ranks)))
            if needs_beside(demand):  # another group may have a share there
                left[share.node] = less(gpus, found[-1][1])
        return found

    def take(self, shares: Sequence[Share], demand: Demand) -> None:
        """Book shares that fit; the devices are those that `picks` names."""
        self.take_like(shares, demand, self.picks(shares, demand))

    def take_like(self, shares: Sequence[Share], demand: Demand, picks: Picks) -> None:
        """Book shares with devices of the same kinds as `picks`; the caller has checked `has_like`."""
        for share, (node, gpus) in zip(shares, picks, strict=True):
            free, each = self._free[node], demand_of(demand, share.group)
            # A node may offer less than was booked there: what a job lacks on one is not missing on the others.
            cpus = max(0, free.cpus - share.ranks * each.cpus)
            memory_bytes = max(0, free.memory_bytes - share.ranks * each.memory_bytes)
            self._put(node, Free(less(free.gpus, gpus), cpus, memory_bytes, free.labels))

    def has_like(self, picks: Picks) -> bool:
        """True when every picked device has a free one of its kind on the same node here."""
        wanted: Counter[tuple[NodeId, str, int]] = Counter()
        for node, gpus in picks:
            for each in gpus:
                wanted[node, each.model, each.memory_bytes] += each.count
        free = {
            (node, each.model, each.memory_bytes): each.count
            for node in {node for node, _ in picks}
            for each in self._free[node].gpus
        }
        return all(count <= free.get(kind, 0) for kind, count in wanted.items())

    @contextmanager
    def lent(self, shares: Sequence[Share], demand: Demand) -> Iterator[None]:
        """Book shares that fit for a while; afterwards the room is as it was."""
        before = {share.node: self._free[share.node] for share in shares}
        self.take(shares, demand)
        try:
            yield
        finally:
            for node, free in before.items():
                self._put(node, free)

    def release(self, shares: Iterable[Share], demand: Demand) -> None:
        """Give back what a job holds, as far as one can tell: which devices it has is not gossiped.

        The first taken ones that suit it; nothing on a node that is not available.
        """
        for share in shares:
            free = self._free.get(share.node)
            if free is None:
                continue
            most, each = self._capacity[share.node], demand_of(demand, share.group)
            gpus = picked(less(most.gpus, free.gpus), each, share.ranks)
            self._put(
                share.node,
                Free(
                    more(free.gpus, gpus) if gpus else free.gpus,
                    min(most.cpus, free.cpus + share.ranks * each.cpus),
                    min(most.memory_bytes, free.memory_bytes + share.ranks * each.memory_bytes),
                    free.labels,
                ),
            )

    def _put(self, node: NodeId, free: Free) -> None:
        if self._by_free is not None:
            before = self._free[node]
            kept = self._by_free[before.gpu_count, before.cpus]
            del kept[node]
            if not kept:
                del self._by_free[before.gpu_count, before.cpus]
            self._by_free.setdefault((free.gpu_count, free.cpus), {})[node] = None
        self._free[node] = free
        self._changes.append(node)

    def _fresh(self, demand: Demand) -> "_Fits":
        fits, change_count = self._fits.get(demand), len(self._changes)
        if fits is not None and fits.seen_changes == change_count:
            return fits
        if fits is None:
            fits = self._fits[demand] = _Fits(self.classes(demand) if demand.gpus else {})
            for node, free in self._free.items():
                fits.update(node, free, demand)
        else:
            for node in dict.fromkeys(self._changes[fits.seen_changes :]):
                fits.update(node, self._free[node], demand)
        fits.seen_changes = change_count
        return fits


def may_resize(job: JobView, room: Room) -> bool:
    """True where all that a job has is to be decided on. It waits, or it runs, lets its size be changed, and what it
    would leave is known and within reach. One that did not say so is never touched."""
    if job.state is JobState.QUEUED:
        return True
    is_known = not job.card.hidden_ranks and room.has(job.shares)
    return job.state is JobState.RUNNING and job.card.elastic is not None and is_known


class _Fits:
    """Remembered answers for one demand."""

    __slots__ = ("_classes", "_gpus_by_node", "by_class", "by_node", "gpus", "seen_changes", "total")

    def __init__(self, classes: Mapping[NodeId, str]) -> None:
        self._classes = classes
        self.by_class: dict[str, int] = {}
        self.by_node: dict[NodeId, int] = {}
        self._gpus_by_node: dict[NodeId, int] = {}
        self.total = self.gpus = 0
        self.seen_changes = 0

    def copy(self) -> "_Fits":
        other = _Fits(self._classes)
        other.by_node, other._gpus_by_node = dict(self.by_node), dict(self._gpus_by_node)
        other.by_class = dict(self.by_class)
        other.total, other.gpus = self.total, self.gpus
        return other

    def update(self, node: NodeId, free: Free, demand: Demand) -> None:
        ranks, gpus = ranks_that_fit(free, demand), suitable(free.gpus, demand)
        more_ranks, name = ranks - self.by_node.pop(node, 0), self._classes.get(node, "")
        self.total += more_ranks
        self.by_class[name] = self.by_class.get(name, 0) + more_ranks
        self.gpus += gpus - self._gpus_by_node.pop(node, 0)
        if ranks:
            self.by_node[node] = ranks
        if gpus:
            self._gpus_by_node[node] = gpus
