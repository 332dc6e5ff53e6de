"""The servers of a replay, and what is booked on them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmsched.ids import NodeId
from swarmsched.resources import Demand, Free, GpuCount, Share
from swarmsched.view import NodeView

GPU = Demand(gpus=1)
"""What one rank of a replayed job needs."""
_MODEL = "gpu"


@dataclass
class Cluster:
    """GPUs by node; a node that is down has none to give."""

    gpus: Mapping[NodeId, int]
    down: set[NodeId] = field(default_factory=set)

    @classmethod
    def even(cls, nodes: int, gpus_per_node: int) -> "Cluster":
        """Nodes `n001`, `n002`, ... alike."""
        return cls({NodeId(f"n{number:03d}"): gpus_per_node for number in range(1, nodes + 1)})

    @property
    def total(self) -> int:
        """GPUs of all nodes."""
        return sum(self.gpus.values())

    def overbooked(self, held: Iterable[Sequence[Share]]) -> NodeId | None:
        """A node that would have to give more than it has, if there is one."""
        booked = self._booked(held)
        return next((node for node, count in booked.items() if count > self._usable(node)), None)

    def views(self, held: Iterable[Sequence[Share]]) -> tuple[NodeView, ...]:
        """Each node with what jobs leave of it."""
        booked = self._booked(held)
        return tuple([self._view(node, booked[node]) for node in self.gpus])

    def _booked(self, held: Iterable[Sequence[Share]]) -> Counter[NodeId]:
        booked: Counter[NodeId] = Counter()
        for shares in held:
            for share in shares:
                booked[share.node] += share.ranks
        return booked

    def _usable(self, node: NodeId) -> int:
        return 0 if node in self.down else self.gpus.get(node, 0)

    def _view(self, node: NodeId, booked: int) -> NodeView:
        gpus = self.gpus[node]
        return NodeView(node, _free(gpus - booked), _free(gpus), gpus, is_available=node not in self.down)


def _free(count: int) -> Free:
    return Free((GpuCount(_MODEL, 0, count),) if count else ())
