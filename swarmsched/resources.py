"""GPUs, cores and memory: what a node offers, what a job asks, and the one check that compares them.

`fits` is used by the planner and by the owner's ledger alike: two different checks are how other schedulers came
to refuse their own plans for ever.  It works on counts of interchangeable devices; only the ledger knows the devices
themselves and picks them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated

from msgspec import Meta
from msgspec.structs import asdict, replace

from swarmsched.fields import U8, U16, U32, U53, Name, Part, Value
from swarmsched.ids import NodeId, Place


class GpuHealth(Enum):
    """Whether a GPU may be given to a job."""

    OK = "ok"
    FOREIGN = "foreign"  # processes that this agent did not start use it
    UNHEALTHY = "unhealthy"  # lost, XID or ECC error
    STALE = "stale"  # no reading for longer than the telemetry deadline


class Gpu(Value):
    """One device of a node as the owner knows it."""

    uuid: Annotated[str, Meta(max_length=96)]
    index: U16
    model: Name
    memory_bytes: U53
    health: GpuHealth = GpuHealth.OK
    is_simulated: bool = False
    note: Annotated[str, Meta(max_length=200)] = ""  # whose processes, which XID; shown to people


LABELS_MOST, LABEL_LENGTH = 8, 24
Labels = Annotated[tuple[Annotated[str, Meta(max_length=LABEL_LENGTH)], ...], Meta(max_length=LABELS_MOST)]
"""What a node has beside devices: `nvlink`, `engine=apptainer`."""
_LABEL = re.compile(rf"(?=.{{1,{LABEL_LENGTH}}}$)[a-z0-9][a-z0-9._-]*(=[A-Za-z0-9][A-Za-z0-9._-]*)?")
LABEL_FORM = f"NAME or NAME=VALUE, at most {LABEL_LENGTH} characters: small letters, digits, '.', '-' and '_'"


class NodeResources(Value):
    """All that a node has, free or not.  `cpu_count` in cores, `memory_bytes` of host memory."""

    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=64)]
    cpu_count: U32
    memory_bytes: U53
    labels: Labels = ()
    network_mbit_s: U32 = 0  # of the interface over which ranks train, each way; 0: not known


Device = tuple[str, int, tuple[str, ...]]


class Demand(Value):
    """What one rank of a job needs.  A rank without GPUs (`gpus` 0) is allowed.

    `cpus` and `memory_bytes` of 0 mean "not counted"; an empty `gpu_type` accepts any, otherwise it is a
    case-insensitive part of the model name; `gpu_memory_bytes` is the least memory of each GPU.  `refused_gpus` are
    parts of the names of models that it does not take.  `labels` are those that its node must have: each as it is, or
    by its name alone (`engine` for `engine=docker`).
    """

    gpus: U16 = 0
    cpus: U32 = 0
    memory_bytes: U53 = 0
    gpu_type: Name = ""
    gpu_memory_bytes: U53 = 0
    refused_gpus: Annotated[tuple[Name, ...], Meta(max_length=8)] = ()
    labels: Labels = ()

    @property
    def device(self) -> Device:
        """All of it that says which devices suit."""
        return (self.gpu_type, self.gpu_memory_bytes, self.refused_gpus)


class GroupNeed(Value):
    """What a group of ranks needs that a gang has beside its first one."""

    ranks: U16
    demand: Demand


class GangDemand(Demand):
    """What each rank of a gang's first group needs, and what its other groups need `beside` it, by their numbers."""

    beside: tuple[GroupNeed, ...] = ()


def with_beside(demand: Demand, beside: tuple[GroupNeed, ...]) -> Demand:
    """What each rank needs, with what other groups need beside it; the demand itself where there are none."""
    return GangDemand(**asdict(demand), beside=beside) if beside else demand


def demand_of(demand: Demand, group: int) -> Demand:
    """What each rank of a group needs; 0 is the first group."""
    return demand.beside[group - 1].demand if group and isinstance(demand, GangDemand) else demand


def needs_beside(demand: Demand) -> tuple[GroupNeed, ...]:
    """What a gang's other groups need beside its first one, which is all of most gangs."""
    return demand.beside if isinstance(demand, GangDemand) else ()


class GpuCount(Value):
    """So many devices of one model and memory, which are interchangeable for a demand."""

    model: Name
    memory_bytes: U53
    count: U16


class Free(Value):
    """What a node can give now, or all that it could give: usable devices by kind, cores and bytes of memory."""

    gpus: Annotated[tuple[GpuCount, ...], Meta(max_length=64)] = ()
    cpus: U32 = 0
    memory_bytes: U53 = 0
    labels: Labels = ()
    network_mbit_s: U32 = 0  # of a capacity alone; 0: not known

    @property
    def gpu_count(self) -> int:
        """Devices of all kinds."""
        return sum([each.count for each in self.gpus])


class FreeReport(Value):
    """An owner's fresh state, in every answer of its: repairs the asker's view.

    `(generation, version)` is that of the ledger; a gossiped node record with an older one must not overwrite this.
    """

    generation: U53
    version: U53
    gpus: U16
    cpus: U32
    memory_bytes: U53
    running_ranks: U16 = 0


class Share(Value):
    """One part of a gang: `ranks` ranks on `node`, all of one `group`.

    `origin` says from where its owner granted the hold (`ids.origin_of`); 0 until then.  Parts of further groups have
    the numbers of these, so that a node may have parts of several.
    """

    node: Annotated[NodeId, Meta(max_length=63)]
    ranks: U16
    origin: U53 = 0  # not compared
    part: Part = 0
    group: U8 = 0

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place(self.node, self.part)

    def __eq__(self, other: object) -> bool:
        return type(other) is Share and (self.place, self.ranks) == (other.place, other.ranks)

    def __hash__(self) -> int:
        return hash((self.node, self.ranks))


SHARES_MOST = 1_024
"""Parts of a gang: one on each of a thousand nodes, or twice the workers of an elastic job, half of them leaving."""
Shares = Annotated[tuple[Share, ...], Meta(max_length=SHARES_MOST)]


def suits(gpu: Gpu | GpuCount, demand: Demand) -> bool:
    """True when a device, booked or not, meets type and memory of the demand."""
    is_of_type = not demand.gpu_type or demand.gpu_type.lower() in gpu.model.lower()
    is_refused = demand.refused_gpus and any(each.lower() in gpu.model.lower() for each in demand.refused_gpus)
    return is_of_type and not is_refused and gpu.memory_bytes >= demand.gpu_memory_bytes


def counted(gpus: Iterable[Gpu]) -> tuple[GpuCount, ...]:
    """Devices by kind, in the order in which the kinds first appear."""
    counts = Counter((gpu.model, gpu.memory_bytes) for gpu in gpus)
    return tuple(GpuCount(*kind, count) for kind, count in counts.items())


def most_frequent(gpus: Iterable[GpuCount], demand: Demand) -> str:
    """The model of most of the devices that suit the demand, the first by name of several; empty where none does."""
    counts: Counter[str] = Counter()
    for each in gpus:
        if suits(each, demand):
            counts[each.model] += each.count
    return min(counts, key=lambda model: (-counts[model], model), default="")


def gpu_class(gpus: Iterable[GpuCount], demand: Demand) -> str:
    """The class of a node's GPUs for a demand: the model of those that suit it, of several their names."""
    return "+".join(sorted({each.model for each in gpus if suits(each, demand)}))


def suitable(gpus: Iterable[GpuCount], demand: Demand) -> int:
    """How many of the devices suit the demand, whether or not enough of them are together."""
    return sum([each.count for each in gpus if suits(each, demand)])


def is_label(text: str) -> bool:
    """True for what may be a label of a node."""
    return _LABEL.fullmatch(text) is not None


def missing_labels(labels: Sequence[str], demand: Demand) -> list[str]:
    """Labels that the demand asks for and a node has not."""
    names = {each.partition("=")[0] for each in labels}
    return [each for each in demand.labels if each not in labels and each not in names]


def ranks_that_fit(free: Free, demand: Demand) -> int:
    """How many ranks of `demand` the free resources hold, at most 65,535."""
    if demand.labels and missing_labels(free.labels, demand):
        return 0
    ranks = 65_535
    if demand.gpus:
        ranks = suitable(free.gpus, demand) // demand.gpus
    if demand.cpus:
        ranks = min(ranks, free.cpus // demand.cpus)
    if demand.memory_bytes:
        ranks = min(ranks, free.memory_bytes // demand.memory_bytes)
    return ranks


def fits(free: Free, demand: Demand, ranks: int) -> bool:
    """True when `ranks` ranks of `demand` fit into the free resources."""
    return ranks_that_fit(free, demand) >= ranks


def picked(gpus: Iterable[GpuCount], demand: Demand, ranks: int) -> tuple[GpuCount, ...]:
    """What so many ranks take of the devices: the first suitable kinds; fewer where there are not enough."""
    wanted, taken = ranks * demand.gpus, []
    for each in gpus:
        count = min(wanted, each.count) if wanted and suits(each, demand) else 0
        if count:
            taken.append(_counted(each, count))
            wanted -= count
    return tuple(taken)


def less(gpus: Iterable[GpuCount], taken: Iterable[GpuCount]) -> tuple[GpuCount, ...]:
    """The devices without those taken of each kind."""
    left = []
    for each in gpus:
        count = each.count
        for other in taken:
            if _is_alike(each, other):
                count -= other.count
        if count > 0:
            left.append(_counted(each, count))
    return tuple(left)


def more(gpus: Iterable[GpuCount], given: Iterable[GpuCount]) -> tuple[GpuCount, ...]:
    """The devices together with those given of each kind."""
    sums = {(each.model, each.memory_bytes): each.count for each in gpus}
    for each in given:
        kind = (each.model, each.memory_bytes)
        sums[kind] = sums.get(kind, 0) + each.count
    return tuple([GpuCount(*kind, count) for kind, count in sums.items()])


def _counted(gpus: GpuCount, count: int) -> GpuCount:
    return gpus if count == gpus.count else GpuCount(gpus.model, gpus.memory_bytes, count)


def without(free: Free, demand: Demand, ranks: int) -> Free:
    """What is left when so many ranks of the demand are taken; the caller has checked `fits`."""
    return Free(
        less(free.gpus, picked(free.gpus, demand, ranks)),
        free.cpus - ranks * demand.cpus,
        free.memory_bytes - ranks * demand.memory_bytes,
        free.labels,
    )


def _is_alike(one: GpuCount, other: GpuCount) -> bool:
    return one.memory_bytes == other.memory_bytes and one.model == other.model


def world_size(shares: Iterable[Share]) -> int:
    """Number of ranks of a placement's first group: those that train together."""
    return sum([share.ranks for share in shares if not share.group])


def gpus_of(shares: Iterable[Share], demand: Demand) -> int:
    """GPUs of a placement, all groups together."""
    return sum([share.ranks * demand_of(demand, share.group).gpus for share in shares])


def nodes_of(shares: Iterable[Share]) -> int:
    """On how many nodes a placement's first group is."""
    return len(of_first(shares))


def of_first(shares: Iterable[Share]) -> tuple[Share, ...]:
    """Shares of a placement's first group."""
    return tuple([share for share in shares if not share.group])


def of_others(shares: Iterable[Share]) -> tuple[Share, ...]:
    """Shares of a placement's other groups; none of most."""
    return tuple([share for share in shares if share.group])


def ranks_by_node(shares: Iterable[Share]) -> Counter[NodeId]:
    """Number of ranks on each node, in the order in which the nodes first appear."""
    ranks: Counter[NodeId] = Counter()
    for share in shares:
        ranks[share.node] += share.ranks
    return ranks


def together(shares: Sequence[Share], demand: Demand) -> tuple[int, Demand]:
    """Ranks of a demand that stand for all shares of a node: of several groups as many as they have GPUs together.

    What is kept for them comes free bit by bit, so each of these has its part of the cores and of the memory.
    """
    if not any(share.group for share in shares):
        return sum([share.ranks for share in shares]), plain(demand)
    needs = [(share.ranks, demand_of(demand, share.group)) for share in shares]
    ranks = sum([count * each.gpus for count, each in needs])
    gpu = next((each for _, each in needs if each.gpus), Demand())
    parts = max(1, ranks)
    return parts, replace(
        plain(gpu),
        gpus=min(1, ranks),
        cpus=-(-sum([count * each.cpus for count, each in needs]) // parts),
        memory_bytes=-(-sum([count * each.memory_bytes for count, each in needs]) // parts),
        gpu_type=gpu.gpu_type if len({each.device for _, each in needs if each.gpus}) == 1 else "",
        labels=(),
    )


def plain(demand: Demand) -> Demand:
    """What each rank of the first group needs, alone."""
    fields = {name: getattr(demand, name) for name in Demand.__struct_fields__}
    return Demand(**fields) if isinstance(demand, GangDemand) else demand


def merged(shares: Iterable[Share]) -> tuple[Share, ...]:
    """One share for each node and group, those of the first group first, nodes in the order in which they appear."""
    ranks: Counter[tuple[NodeId, int]] = Counter()
    for share in sorted(shares, key=lambda share: share.group):
        ranks[share.node, share.group] += share.ranks
    return tuple([Share(node, count, part=group, group=group) for (node, group), count in ranks.items()])
