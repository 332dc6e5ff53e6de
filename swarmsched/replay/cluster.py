"""The servers of a replay: what each has, when it fails and returns, and what is booked on it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from swarmsched.errors import ConfigError
from swarmsched.estimate import StepCost
from swarmsched.ids import NodeId
from swarmsched.models.hosts import MBIT, NETWORK_BYTES_PER_S, Offer, Tasks, peak_flops, throughput
from swarmsched.replay.churn import NodeEvent
from swarmsched.replay.profiles import Shape
from swarmsched.replay.table import rows
from swarmsched.resources import Demand, Free, GpuCount, Share
from swarmsched.view import NodeView

GPU = Demand(gpus=1)
"""What one rank of a replayed job needs."""
GPUS_MOST = 1_024
"""Of one server: more is a slip."""
CORES_MOST = 4_096
NETWORK_MOST = 10_000_000
_MODEL = "gpu"


@dataclass
class Fleet:
    """GPUs by node, and their class where one was told; a node that is down has none to give."""

    gpus: Mapping[NodeId, int]
    models: Mapping[NodeId, str] = field(default_factory=dict)
    events: Sequence[NodeEvent] = ()  # by time
    down: set[NodeId] = field(default_factory=set)
    cores: Mapping[NodeId, int] = field(default_factory=dict)
    mbit_s: Mapping[NodeId, int] = field(default_factory=dict)  # of the network, where it was told
    _passed: int = 0  # events

    @classmethod
    def even(cls, nodes: int, gpus_per_node: int) -> "Fleet":
        """Nodes `n001`, `n002`, ... alike."""
        return cls({NodeId(f"n{number:03d}"): gpus_per_node for number in range(1, nodes + 1)})

    @property
    def total(self) -> int:
        """GPUs of all nodes."""
        return sum(self.gpus.values())

    @property
    def usable(self) -> int:
        """GPUs of the nodes that are up."""
        return self.total - sum([self.gpus[node] for node in self.down])

    @property
    def largest(self) -> int:
        """GPUs of the largest node."""
        return max(self.gpus.values())

    @property
    def next_event_s(self) -> float:
        """When a node fails or returns next; infinite when none does any more."""
        return self.events[self._passed].time_s if self._passed < len(self.events) else inf

    def pass_to(self, now_s: float) -> set[NodeId]:
        """What happens to nodes until then; tells those that have failed, also where they are back by then."""
        failed = set()
        while self.next_event_s <= now_s:
            event = self.events[self._passed]
            self._passed += 1
            if event.is_up:
                self.down.discard(event.node)
            elif event.node not in self.down:
                self.down.add(event.node)
                failed.add(event.node)
        return failed

    def classes(self, shares: Iterable[Share]) -> frozenset[str]:
        """Classes of the GPUs on the nodes of the shares."""
        return frozenset([self.models[share.node] for share in shares if share.node in self.models])

    @property
    def usual_class(self) -> str:
        """The class of most GPUs, the first by name of several; empty where none was told."""
        counts: Counter[str] = Counter()
        for node, model in self.models.items():
            counts[model] += self.gpus[node]
        return min(counts, key=lambda model: (-counts[model], model), default="")

    @property
    def class_sizes(self) -> Mapping[str, int]:
        """GPUs of each class; one without a name where none was told."""
        counts: Counter[str] = Counter()
        for node, gpus in self.gpus.items():
            counts[self.models.get(node, "")] += gpus
        return {model: count for model, count in counts.items() if count}

    @property
    def class_parts(self) -> Mapping[str, float]:
        """Which part of all GPUs each class has; one without a name where none was told."""
        return {model: count / self.total for model, count in self.class_sizes.items()}

    def mixes(self, gpus: int) -> bool:
        """True of a job that needs more than there are of any one class: its user has to say that it mixes them."""
        return gpus > max(self.class_sizes.values(), default=0)

    def speed_ratio(
        self, work: StepCost, shares: Sequence[Share], booked: Mapping[NodeId, int], *, on_usual: bool
    ) -> float:
        """Speed of a job there, by its work, over that on hosts with enough cores and a network of 10 Gbit/s.

        Those have GPUs of the usual class, or else of those that it has.  The GPUs of a node have even parts of its
        cores, as far as they are `booked`.
        """
        layout, usual = [], []
        for share in shares:
            peak = peak_flops(self.models.get(share.node, "")) or 1.0
            cores = self.cores.get(share.node, CORES_MOST) * share.ranks // max(share.ranks, booked[share.node])
            network = self.mbit_s.get(share.node, 0) * MBIT or NETWORK_BYTES_PER_S
            host = Offer(share.node, share.ranks, max(cores, share.ranks), inf, peak, network_bytes_per_s=network)
            like = peak_flops(self.usual_class) or 1.0 if on_usual else peak
            best = host._replace(cpus=CORES_MOST, network_bytes_per_s=NETWORK_BYTES_PER_S, flops_per_s=like)
            layout.append((host, Tasks(share.ranks, 0)))
            usual.append((best, Tasks(share.ranks, 0)))
        return throughput(work, layout) / throughput(work, usual)

    def part(self, model: str, gpus: int) -> "Fleet":
        """So many GPUs of one class, on as few nodes as have them; fewer where there are no more."""
        there = [node for node in self.gpus if self.models.get(node, "") == model]
        kept: dict[NodeId, int] = {}
        for node in sorted(there, key=lambda each: (-self.gpus[each], each)):
            if taken := min(self.gpus[node], gpus - sum(kept.values())):
                kept[node] = taken
        return Fleet(kept, dict.fromkeys(kept, model) if model else {})

    def packings(self, most: int) -> tuple[tuple[str, Shape], ...]:
        """Each number of GPUs to `most` on the fewest nodes of one class, and of all together (no class)."""
        groups = {"": list(self.gpus.values())}
        for node, model in sorted(self.models.items()):
            groups.setdefault(model, []).append(self.gpus[node])
        return tuple(
            [(model, shape) for model, sizes in groups.items() for shape in _filled(sorted(sizes)[::-1], most)]
        )

    def overbooked(self, held: Iterable[Sequence[Share]]) -> NodeId | None:
        """A node that would have to give more than it has, if there is one."""
        booked = self._booked(held)
        return next((node for node, ranks in booked.items() if ranks > self._usable(node)), None)

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
        gpus, model, cores = self.gpus[node], self.models.get(node) or _MODEL, self.cores.get(node, 0)
        free = _free(gpus - booked, model, cores * (gpus - booked) // gpus if gpus else cores)
        capacity = _free(gpus, model, cores, self.mbit_s.get(node, 0))
        return NodeView(node, free, capacity, gpus, is_available=node not in self.down)


def _free(gpus: int, model: str, cores: int, network_mbit_s: int = 0) -> Free:
    return Free((GpuCount(model, 0, gpus),) if gpus else (), cores, network_mbit_s=network_mbit_s)


def _filled(sizes: Sequence[int], most: int) -> list[Shape]:
    """Servers filled one GPU after another, in their order."""
    shapes: list[Shape] = []
    for at, size in enumerate(sizes):
        shapes += [(*sizes[:at], gpus) for gpus in range(1, min(size, most - len(shapes)) + 1)]
        if len(shapes) >= most:
            break
    return shapes


def read_cluster(name: str, lines: Iterable[str]) -> Fleet:
    """Servers from a table `node, gpus[, gpu_model, cores, network_mbit_s]`; ConfigError names file, row and column."""
    gpus: dict[NodeId, int] = {}
    models: dict[NodeId, str] = {}
    cores: dict[NodeId, int] = {}
    mbit_s: dict[NodeId, int] = {}
    for row in rows(name, lines, ("node", "gpus")):
        node = NodeId(row.text("node"))
        if not 0 < len(node) <= 63 or node in gpus:
            problem = f"{node!r} is there twice" if node in gpus else f"{row['node']!r} is no name"
            raise row.error("node", problem, "a name of its own for each node")
        gpus[node] = row.count("gpus", most=GPUS_MOST)
        if model := row.text("gpu_model"):
            models[node] = model
        if row.get("cores"):
            cores[node] = row.count("cores", least=1, most=CORES_MOST)
        if row.get("network_mbit_s"):
            mbit_s[node] = row.count("network_mbit_s", least=1, most=NETWORK_MOST)
    if not sum(gpus.values()):
        raise ConfigError(name, "has no node with a GPU", "one row a node, as in n001,4")
    if unnamed := [node for node in gpus if models and node not in models]:
        raise ConfigError(f"{name}, node {unnamed[0]}, gpu_model", "is empty", "name it for every node, or for none")
    if uncounted := [node for node in gpus if cores and node not in cores]:
        raise ConfigError(f"{name}, node {uncounted[0]}, cores", "is empty", "count them for every node, or for none")
    return Fleet(gpus, models, cores=cores, mbit_s=mbit_s)
