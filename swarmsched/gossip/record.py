"""The node record: what one node says of itself to all, written only by its owner.

The record counts GPUs by kind and does not name them; whoever plans for a remote node gets placeholder devices with
the right model and memory, which is all that `fits` looks at.  Details travel on request over HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from functools import lru_cache
from typing import Annotated, Protocol

from swarmsched.errors import RemoteProtocolError
from swarmsched.fields import U8, U16, U32, U53, MaxLength, Name, NodeName
from swarmsched.ids import NodeId
from swarmsched.resources import Free, Gpu, GpuHealth, NodeResources
from swarmsched.view import NodeView
from swarmsched.wire.codec import decode_value, encode_value

RECORD_BYTES_LIMIT = 512
RECORDS_REMEMBERED = 1_024
GPUS_LIMIT = 64
UNREACHABLE_LIMIT = 4


class NodeFlag(IntFlag):
    """Bits of `NodeRecord.flags`."""

    HTTP_READY = 1
    DRAINING = 2
    CONFLICT = 4  # two machines answer under this name
    TELEMETRY_OK = 8
    TELEMETRY_STALE = 16
    SIMULATED = 32  # its GPUs are simulated
    WITNESS = 64  # votes and holds, never runs jobs


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """Devices of one model and memory.  `count` are all that the node has, `free` those it can give now."""

    model: Name
    count: U16
    free: U16
    memory_bytes: U53


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node.  `(generation, version)` grows with every rewrite; larger is newer.

    Counts of unhealthy, foreign, stale and draining GPUs are parts of the groups' counts.  Utilisations are averages
    over 30 s in percent of all GPUs, or of all cores.
    """

    node_id: NodeName
    generation: U53 = 0
    version: U53 = 0
    groups: Annotated[tuple[GpuGroup, ...], MaxLength(8)] = ()
    cpus_total: U32 = 0
    cpus_free: U32 = 0
    memory_total_bytes: U53 = 0
    memory_free_bytes: U53 = 0
    gpu_utilisation_percent: U8 = 0
    cpu_utilisation_percent: U8 = 0
    gpu_memory_used_bytes: U53 = 0
    unhealthy_gpus: U16 = 0
    foreign_gpus: U16 = 0
    stale_gpus: U16 = 0
    draining_gpus: U16 = 0
    running_ranks: U16 = 0
    queued_jobs: U32 = 0  # shepherded here
    live_jobs: U32 = 0  # shepherded here, queued ones included
    flags: U32 = 0
    software_version: Annotated[str, MaxLength(24)] = ""
    unreachable: Annotated[tuple[NodeName, ...], MaxLength(UNREACHABLE_LIMIT)] = ()
    zone: Annotated[str, MaxLength(16)] = ""  # reserved for swarms of swarms
    ledger_version: U53 = 0  # of the owner's ledger when it wrote this: `FreeReport.version` counts the same
    store_id: U53 = 0  # identity of the database behind it, by which it can be a holder; 0: not told

    @property
    def stamp(self) -> tuple[int, int]:
        """(generation, version): larger is newer."""
        return (self.generation, self.version)

    @property
    def ledger_stamp(self) -> tuple[int, int]:
        """(generation, ledger version): comparable with those of an owner's answer."""
        return (self.generation, self.ledger_version)

    @property
    def total_gpus(self) -> int:
        """All devices, usable or not."""
        return sum(group.count for group in self.groups)

    @property
    def free_gpus(self) -> int:
        """Devices that could be given now."""
        return sum(group.free for group in self.groups)

    def has(self, flag: NodeFlag) -> bool:
        """True when the flag is set."""
        return bool(self.flags & flag)

    def check(self) -> None:
        """Raise RemoteProtocolError for values that no honest owner writes."""
        for group in self.groups:
            if group.free > group.count:
                raise RemoteProtocolError(f"{group.free} of {group.count} GPUs free", kind="NodeRecord")
        if self.total_gpus > GPUS_LIMIT:
            raise RemoteProtocolError(f"{self.total_gpus} GPUs, more than {GPUS_LIMIT}", kind="NodeRecord")
        if self.cpus_free > self.cpus_total or self.memory_free_bytes > self.memory_total_bytes:
            raise RemoteProtocolError("more is free than there is", kind="NodeRecord")


class OwnerReport(Protocol):
    """The fresh state in an owner's answer (`ledger.message.FreeReport`)."""

    @property
    def generation(self) -> int:
        """Of the owner's node record."""

    @property
    def version(self) -> int:
        """Of the owner's node record when it answered."""

    @property
    def gpus(self) -> int:
        """Free devices."""

    @property
    def cpus(self) -> int:
        """Free cores."""

    @property
    def memory_bytes(self) -> int:
        """Free host memory."""

    @property
    def running_ranks(self) -> int:
        """Ranks on the node."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node record as this node knows it.  `age_s`: since its owner wrote it, or answered us."""

    record: NodeRecord
    age_s: float
    is_repaired: bool = False  # free figures are from an owner's answer that is newer than the record


def encode_record(record: NodeRecord) -> bytes:
    """Bytes within the hard limit; names of unreachable peers are left out first if they do not fit."""
    body = encode_value(NodeRecord, record)
    if len(body) > RECORD_BYTES_LIMIT:
        body = encode_value(NodeRecord, replace(record, unreachable=()))
    if len(body) > RECORD_BYTES_LIMIT:
        body = encode_value(NodeRecord, replace(record, unreachable=(), groups=record.groups[:4]))
    return body


@lru_cache(maxsize=RECORDS_REMEMBERED)
def decode_record(body: bytes) -> NodeRecord:
    """A well-formed record, whose values are still to be checked; RemoteProtocolError for anything else.

    The same body comes from several peers, and in a simulation to several nodes of one process.
    """
    if len(body) > RECORD_BYTES_LIMIT:
        raise RemoteProtocolError(f"{len(body)} bytes, more than {RECORD_BYTES_LIMIT}", kind="NodeRecord")
    return decode_value(NodeRecord, body)


def groups_of(resources: NodeResources, free: Free) -> tuple[GpuGroup, ...]:
    """Devices of a node counted by kind, at most eight kinds (further kinds are left out)."""
    totals: dict[tuple[str, int], int] = {}
    for gpu in resources.gpus:
        totals[gpu.model, gpu.memory_bytes] = totals.get((gpu.model, gpu.memory_bytes), 0) + 1
    frees: dict[tuple[str, int], int] = {}
    for gpu in free.gpus:
        frees[gpu.model, gpu.memory_bytes] = frees.get((gpu.model, gpu.memory_bytes), 0) + 1
    kinds = list(totals.items())[:8]
    return tuple(GpuGroup(kind[0], count, min(count, frees.get(kind, 0)), kind[1]) for kind, count in kinds)


def repaired(record: NodeRecord, report: OwnerReport) -> NodeRecord:
    """The record with the free figures of its owner's later answer, which counts devices of all kinds together."""
    return replace(
        record,
        groups=_with_free(record.groups, report.gpus),
        cpus_free=min(report.cpus, record.cpus_total),
        memory_free_bytes=min(report.memory_bytes, record.memory_total_bytes),
        running_ranks=report.running_ranks,
    )


def node_view(record: NodeRecord, *, is_available: bool) -> NodeView:
    """The planner's picture of a remote node, with placeholder devices."""
    usable = record.total_gpus - record.unhealthy_gpus - record.foreign_gpus - record.stale_gpus - record.draining_gpus
    return NodeView(
        record.node_id,
        free_of(record),
        record.total_gpus,
        is_available,
        _placeholders(record.node_id, [(group, group.count) for group in record.groups])[: max(usable, 0)],
    )


def free_of(record: NodeRecord) -> Free:
    """What a remote node can give, with placeholder devices that carry model and memory."""
    gpus = _placeholders(record.node_id, [(group, group.free) for group in record.groups])
    return Free(gpus, record.cpus_free, record.memory_free_bytes)


def capacity_of(record: NodeRecord) -> NodeResources:
    """All that a remote node has, usable now or not, with placeholder devices."""
    gpus = _placeholders(record.node_id, [(group, group.count) for group in record.groups])
    return NodeResources(gpus, record.cpus_total, record.memory_total_bytes)


def _placeholders(node: NodeId, counts: Sequence[tuple[GpuGroup, int]]) -> tuple[Gpu, ...]:
    gpus: list[Gpu] = []
    for group, count in counts:
        for _ in range(count):
            index = len(gpus)
            gpus.append(Gpu(f"{node}#{index}", index, group.model, group.memory_bytes, GpuHealth.OK))
    return tuple(gpus)


def _with_free(groups: Sequence[GpuGroup], free: int) -> tuple[GpuGroup, ...]:
    """Spread a total over the groups, changing as little as possible: exact for nodes with one kind."""
    change = free - sum(group.free for group in groups)
    result = []
    for group in groups:
        adjusted = max(0, min(group.count, group.free + change))
        change -= adjusted - group.free
        result.append(replace(group, free=adjusted))
    return tuple(result)
