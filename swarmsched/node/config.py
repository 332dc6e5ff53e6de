"""What a node is told at its birth: who it is, and what was durable before."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmsched.ids import Address, NodeId

RETAINED_JOBS = 2_000  # some 2 kB of memory each


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Identity and limits of one node.

    `generation` was made durable before the first step; `instance_id` is random per process.  `utc_offset_s` is the
    wall clock minus the driver's monotonic clock at the start, for display and submit times only.
    """

    node_id: NodeId
    address: Address
    generation: int
    instance_id: bytes
    store_id: int  # random, made with the database: who loses the one loses the other
    seeds: tuple[Address, ...] = ()
    started_s: float = 0.0  # on the driver's monotonic clock
    software_version: str = ""
    utc_offset_s: float = 0.0
    packet_bytes: int = 1_200  # most payload of a gossip packet
    is_witness: bool = False  # holds records and votes; runs, places and shepherds nothing
    retained_jobs: int = RETAINED_JOBS  # ended jobs whose records are kept; the oldest go first


@dataclass(frozen=True, slots=True)
class Restored:
    """Durable entries of an earlier life, by room and key; empty on the first start."""

    entries: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)

    def room(self, name: str) -> Mapping[str, bytes]:
        """Entries of one room."""
        return self.entries.get(name, {})
