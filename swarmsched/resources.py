"""GPUs, cores and memory: what a node offers, what a job asks, and the one check that compares them.

`fits` is used by the planner and by the owner's ledger alike: two different checks are how other schedulers came
to refuse their own plans for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from swarmsched.fields import U16, U32, U53, MaxLength, Name
from swarmsched.ids import NodeId


class GpuHealth(Enum):
    """Whether a GPU may be given to a job."""

    OK = "ok"
    FOREIGN = "foreign"  # processes that this agent did not start use it
    UNHEALTHY = "unhealthy"  # lost, XID or ECC error
    STALE = "stale"  # no reading for longer than the telemetry deadline


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device of a node as the owner knows it."""

    uuid: Annotated[str, MaxLength(96)]
    index: U16
    model: Name
    memory_bytes: U53
    health: GpuHealth = GpuHealth.OK
    is_simulated: bool = False
    note: Annotated[str, MaxLength(200)] = ""  # whose processes, which XID; shown to people


@dataclass(frozen=True, slots=True)
class NodeResources:
    """All that a node has, free or not.  `cpu_count` in cores, `memory_bytes` of host memory."""

    gpus: Annotated[tuple[Gpu, ...], MaxLength(64)]
    cpu_count: U32
    memory_bytes: U53


@dataclass(frozen=True, slots=True)
class Demand:
    """What one rank of a job needs.  A rank without GPUs (`gpus` 0) is allowed.

    `cpus` and `memory_bytes` of 0 mean "not counted"; an empty `gpu_type` accepts any, otherwise it is a
    case-insensitive part of the model name; `gpu_memory_bytes` is the least memory of each GPU.
    """

    gpus: U16 = 0
    cpus: U32 = 0
    memory_bytes: U53 = 0
    gpu_type: Name = ""
    gpu_memory_bytes: U53 = 0


@dataclass(frozen=True, slots=True)
class Free:
    """What a node can give now.  `gpus` are the offered, healthy, unbooked devices, in index order."""

    gpus: tuple[Gpu, ...]
    cpus: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """One node's part of a gang: `ranks` ranks on `node`.

    `origin` says from where its owner granted the hold (`ids.origin_of`); 0 until then.
    """

    node: Annotated[NodeId, MaxLength(63)]
    ranks: U16
    origin: U53 = field(default=0, compare=False)


def suits(gpu: Gpu, demand: Demand) -> bool:
    """True when the device itself, booked or not, meets type and memory of the demand."""
    return demand.gpu_type.lower() in gpu.model.lower() and gpu.memory_bytes >= demand.gpu_memory_bytes


def ranks_that_fit(free: Free, demand: Demand) -> int:
    """How many ranks of `demand` the free resources hold, at most 65,535."""
    limits = [65_535]
    if demand.gpus:
        limits.append(sum(suits(gpu, demand) for gpu in free.gpus) // demand.gpus)
    if demand.cpus:
        limits.append(free.cpus // demand.cpus)
    if demand.memory_bytes:
        limits.append(free.memory_bytes // demand.memory_bytes)
    return max(0, min(limits))


def fits(free: Free, demand: Demand, ranks: int) -> bool:
    """True when `ranks` ranks of `demand` fit into the free resources."""
    return ranks_that_fit(free, demand) >= ranks


def pick_gpus(free: Free, demand: Demand, ranks: int) -> tuple[Gpu, ...]:
    """The first suitable devices by index; the caller has checked `fits`."""
    wanted = ranks * demand.gpus
    return tuple([gpu for gpu in free.gpus if suits(gpu, demand)][:wanted])


def world_size(shares: Sequence[Share]) -> int:
    """Number of ranks of a placement."""
    return sum(share.ranks for share in shares)
