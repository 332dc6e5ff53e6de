"""The node record: what one node says of itself to all, written only by its owner.

The record counts GPUs by kind and does not name them, which is all that `fits` looks at.  Details travel on request
over HTTP.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from swarmsched.errors import RemoteProtocolError
from swarmsched.fields import U8, U16, U32, U53, Name, NodeName, Value
from swarmsched.resources import Free, FreeReport, GpuCount, Labels, NodeResources, counted
from swarmsched.shards import AggregationRoom
from swarmsched.view import NodeView
from swarmsched.wire.codec import decode_value, encode_value

RECORD_BYTES_LIMIT = 512
RECORDS_REMEMBERED = 1_024
GPUS_LIMIT = 64
ZONE_LENGTH = 16
API_ADDRESS_LENGTH = 264  # of a name of 255, brackets and a port
DRAIN_REASON_LENGTH = 64  # told to all nodes; the whole text stays on the node that drains
AVOIDED_REASON_LENGTH = 120


class NodeFlag(IntEnum):
    """Bits of `NodeRecord.flags`; the others are free.

    They are joined as integers: each look at the swarm asks for those of all nodes, and `IntFlag` is ten times slower.
    """

    DRAINING = 2
    CONFLICT = 4  # two machines answer under this name
    AVOIDED = 8  # it starts nothing for a while: its disk is nearly full, or starts have failed there by its own fault
    WITNESS = 64  # votes and holds, never runs jobs
    DISK_STALLED = 128  # its disk takes no writes: it acknowledges nothing


class GpuGroup(Value):
    """Devices of one model and memory.  `count` are all that the node has, `free` those it can give now."""

    model: Name
    count: U16
    free: U16
    memory_bytes: U53


class NodeRecord(Value):
    """One node.  `(generation, version)` grows with every rewrite; larger is newer.

    Counts of unhealthy, foreign and stale GPUs are parts of the groups' counts.  Utilisations are averages
    over 30 s in percent of all GPUs, or of all cores.
    """

    node_id: NodeName
    generation: U53 = 0
    version: U53 = 0
    groups: Annotated[tuple[GpuGroup, ...], Meta(max_length=8)] = ()
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
    running_ranks: U16 = 0
    live_jobs: U32 = 0  # shepherded here, queued ones included
    flags: U32 = 0
    software_version: Annotated[str, Meta(max_length=24)] = ""
    zone: Annotated[str, Meta(max_length=ZONE_LENGTH)] = ""  # nodes of one zone may fail together; "": not told
    ledger_version: U53 = 0  # of the owner's ledger when it wrote this: `FreeReport.version` counts the same
    store_id: U53 = 0  # identity of the database behind it, by which it can be a holder; 0: not told
    drain_reason: Annotated[str, Meta(max_length=DRAIN_REASON_LENGTH)] = ""
    avoided_reason: Annotated[str, Meta(max_length=AVOIDED_REASON_LENGTH)] = ""
    labels: Labels = ()
    api_address: Annotated[str, Meta(max_length=API_ADDRESS_LENGTH)] = ""  # where people ask; "": where peers do
    network_mbit_s: U32 = 0  # over which ranks train, each way; 0: not known
    aggregation: AggregationRoom | None = None  # what is left for other nodes' jobs; None: it hosts none

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


class NodeStatus(Value):
    """A node record as this node knows it.  `age_s`: since its owner wrote it, or answered us."""

    record: NodeRecord
    age_s: float
    is_repaired: bool = False  # free figures are from an owner's answer that is newer than the record


def encode_record(record: NodeRecord) -> bytes:
    """Bytes within the hard limit; reasons are left out first if they do not fit, then kinds of GPUs."""
    body = encode_value(NodeRecord, record)
    if len(body) > RECORD_BYTES_LIMIT:
        record = replace(record, drain_reason="", avoided_reason="")
        body = encode_value(NodeRecord, record)
    if len(body) > RECORD_BYTES_LIMIT:
        body = encode_value(NodeRecord, replace(record, groups=record.groups[:4]))
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
    frees = {(each.model, each.memory_bytes): each.count for each in free.gpus}
    return tuple(
        GpuGroup(
            each.model, each.count, min(each.count, frees.get((each.model, each.memory_bytes), 0)), each.memory_bytes
        )
        for each in counted(resources.gpus)[:8]
    )


def repaired(record: NodeRecord, report: FreeReport) -> NodeRecord:
    """The record with the free figures of its owner's later answer, which counts devices of all kinds together."""
    return replace(
        record,
        groups=_with_free(record.groups, report.gpus),
        cpus_free=min(report.cpus, record.cpus_total),
        memory_free_bytes=min(report.memory_bytes, record.memory_total_bytes),
        running_ranks=report.running_ranks,
    )


def node_view(record: NodeRecord, *, is_available: bool) -> NodeView:
    """The planner's picture of a remote node.  Which kind its unusable devices are of is not told: never a free one."""
    unusable = record.unhealthy_gpus + record.foreign_gpus + record.stale_gpus
    usable: list[GpuCount] = []
    for group in reversed(record.groups):
        barred = min(unusable, group.count - group.free)
        unusable -= barred
        usable.insert(0, GpuCount(group.model, group.memory_bytes, group.count - barred))
    free = tuple(GpuCount(group.model, group.memory_bytes, group.free) for group in record.groups if group.free)
    return NodeView(
        record.node_id,
        Free(free, record.cpus_free, record.memory_free_bytes, record.labels),
        _capacity(record, tuple(each for each in usable if each.count)),
        record.total_gpus,
        is_available,
    )


def capacity_of(record: NodeRecord) -> Free:
    """All that a remote node has, usable now or not."""
    return _capacity(record, tuple(GpuCount(group.model, group.memory_bytes, group.count) for group in record.groups))


def _capacity(record: NodeRecord, gpus: tuple[GpuCount, ...]) -> Free:
    return Free(gpus, record.cpus_total, record.memory_total_bytes, record.labels, record.network_mbit_s)


def _with_free(groups: Sequence[GpuGroup], free: int) -> tuple[GpuGroup, ...]:
    """Spread a total over the groups, changing as little as possible: exact for nodes with one kind."""
    change = free - sum(group.free for group in groups)
    result = []
    for group in groups:
        adjusted = max(0, min(group.count, group.free + change))
        change -= adjusted - group.free
        result.append(replace(group, free=adjusted))
    return tuple(result)
