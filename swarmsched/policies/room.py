"""Free capacity while a plan is made: what is left on each node after the jobs planned so far.

Fit is always asked of `resources.ranks_that_fit`, the function that owners use too.  Its answers are remembered for
each demand and asked again only for nodes that changed, which keeps a plan of a thousand jobs in milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from swarmsched.ids import NodeId
from swarmsched.resources import Demand, Free, Gpu, Share, pick_gpus, ranks_that_fit, suits
from swarmsched.view import NodeView

Kind = tuple[str, int]
"""Model and memory of a device: devices of one kind are interchangeable."""


class Room:
    """Mutable copy of the free resources of the available nodes, in node order."""

    def __init__(self, nodes: Iterable[NodeView]) -> None:
        self._free: dict[NodeId, Free] = {node.node: node.free for node in nodes if node.is_available}
        # Nodes in the order in which they changed; each remembered fit knows how much of it it has seen.
        self._changes: list[NodeId] = []
        self._fits: dict[Demand, _Fits] = {}

    @property
    def nodes(self) -> Sequence[NodeId]:
        """Available nodes."""
        return tuple(self._free)

    def copy(self) -> "Room":
        """An independent room with the same free resources."""
        other = Room(())
        other._free = dict(self._free)
        return other

    def free(self, node: NodeId) -> Free:
        """What is left on a node."""
        return self._free[node]

    def fits(self, demand: Demand) -> Mapping[NodeId, int]:
        """Ranks of this demand that each node holds, for the nodes that hold any."""
        return self._fresh(demand).by_node

    def ranks(self, demand: Demand) -> int:
        """Ranks of this demand that all nodes hold together."""
        return self._fresh(demand).total

    def free_gpus(self, demand: Demand) -> int:
        """Free devices that suit the demand, whether or not enough of them are together."""
        return sum(suits(gpu, demand) for free in self._free.values() for gpu in free.gpus)

    def picks(self, shares: Iterable[Share], demand: Demand) -> list[tuple[NodeId, tuple[Gpu, ...]]]:
        """The devices that each share would get here."""
        return [(share.node, pick_gpus(self._free[share.node], demand, share.ranks)) for share in shares]

    def take(self, shares: Iterable[Share], demand: Demand) -> None:
        """Book shares that fit; the devices are those that `picks` names."""
        shares = tuple(shares)
        self.take_like(shares, demand, self.picks(shares, demand))

    def take_like(
        self, shares: Iterable[Share], demand: Demand, picks: Iterable[tuple[NodeId, tuple[Gpu, ...]]]
    ) -> None:
        """Book shares with devices of the same kinds as `picks`; the caller has checked `has_like`."""
        for share, (node, gpus) in zip(shares, picks, strict=True):
            free = self._free[node]
            self._free[node] = Free(
                without(free.gpus, gpus),
                free.cpus - share.ranks * demand.cpus,
                free.memory_bytes - share.ranks * demand.memory_bytes,
            )
            self._changes.append(node)

    def has_like(self, picks: Iterable[tuple[NodeId, tuple[Gpu, ...]]]) -> bool:
        """True when every picked device has a free one of its kind on the same node here."""
        return all(
            not Counter(kind_of(gpu) for gpu in gpus) - Counter(kind_of(gpu) for gpu in self._free[node].gpus)
            for node, gpus in picks
        )

    def give(self, node: NodeId, gpus: Sequence[Gpu], cpus: int, memory_bytes: int) -> None:
        """Return resources to a node; ignored for a node that is not available."""
        free = self._free.get(node)
        if free is None:
            return
        self._free[node] = Free(free.gpus + tuple(gpus), free.cpus + cpus, free.memory_bytes + memory_bytes)
        self._changes.append(node)

    def _fresh(self, demand: Demand) -> "_Fits":
        fits = self._fits.get(demand)
        if fits is None:
            fits = self._fits[demand] = _Fits()
            for node, free in self._free.items():
                fits.update(node, ranks_that_fit(free, demand))
        elif fits.seen_changes < len(self._changes):
            for node in dict.fromkeys(self._changes[fits.seen_changes :]):
                fits.update(node, ranks_that_fit(self._free[node], demand))
        fits.seen_changes = len(self._changes)
        return fits


class _Fits:
    """Remembered answers for one demand."""

    __slots__ = ("by_node", "seen_changes", "total")

    def __init__(self) -> None:
        self.by_node: dict[NodeId, int] = {}
        self.total = 0
        self.seen_changes = 0

    def update(self, node: NodeId, ranks: int) -> None:
        self.total += ranks - self.by_node.pop(node, 0)
        if ranks:
            self.by_node[node] = ranks


def kind_of(gpu: Gpu) -> Kind:
    """What makes two devices interchangeable for a demand."""
    return (gpu.model, gpu.memory_bytes)


def without(gpus: Sequence[Gpu], taken: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """`gpus` less one device of the same kind for each taken one, the first of them first."""
    gone = Counter(kind_of(gpu) for gpu in taken)
    left = []
    for gpu in gpus:
        kind = kind_of(gpu)
        if gone[kind]:
            gone[kind] -= 1
        else:
            left.append(gpu)
    return tuple(left)
