"""What a node is told at its birth: who it is, and what was durable before."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from swarmsched.cluster import Candidate
from swarmsched.gossip.membership_config import PROBE_PERIOD_S
from swarmsched.gossip.state import ROUND_S
from swarmsched.holders import Holder
from swarmsched.ids import Address, NodeId

PACKET_BYTES = 1_200
RETAINED_JOBS = 2_000  # some 2 kB of memory each


class Database(Protocol):
    """What of a node outlives its process, as far as its identity goes."""

    @property
    def store_id(self) -> int:
        """Random, made with the database: who loses the one loses the other."""

    def next_generation(self, now_utc_s: float, /) -> int:
        """A number above all that earlier lives used, durable when this returns."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Periods of the two gossip planes, which check them; those on which safety rests (leases, contacts) are fixed."""

    probe_period_s: float = PROBE_PERIOD_S
    round_s: float = ROUND_S


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Identity and limits of one node in one life of its process; `begin` makes it, for agent and simulator alike.

    `generation` was made durable before the first step; `instance_id` is random per process.  `utc_offset_s` is the
    wall clock minus the driver's clock at the start, for display and submit times only.  What a restarted holder may
    say of leases and of silence counts from `started_s`: an earlier one would let two attempts run at once.
    """

    node_id: NodeId
    address: Address
    generation: int
    instance_id: bytes
    store_id: int
    started_s: float  # on the driver's clock
    utc_offset_s: float
    seeds: tuple[Address, ...] = ()
    software_version: str = ""
    packet_bytes: int = PACKET_BYTES  # most payload of a gossip packet
    is_witness: bool = False  # holds records and votes; runs, places and shepherds nothing
    retained_jobs: int = RETAINED_JOBS  # ended jobs whose records are kept; the oldest go first
    zone: str = ""  # what fails together with this node has the same; holders of a job are sought in different ones
    api_address: str = ""  # where people ask this node, if it is not where peers do
    timings: Timings = Timings()

    @classmethod
    def begin(
        cls,
        node_id: NodeId,
        address: Address,
        database: Database,
        *,
        instance_id: bytes,
        now_s: float,
        utc_s: float,
        seeds: tuple[Address, ...],
        software_version: str,
        is_witness: bool,
        packet_bytes: int = PACKET_BYTES,
        retained_jobs: int = RETAINED_JOBS,
        zone: str = "",
        api_address: str = "",
    ) -> "NodeConfig":
        """A new life at `now_s` on the driver's clock, under a generation that no earlier one used."""
        return cls(
            node_id=node_id,
            address=address,
            generation=database.next_generation(utc_s),
            instance_id=instance_id,
            store_id=database.store_id,
            started_s=now_s,
            utc_offset_s=utc_s - now_s,
            seeds=seeds,
            software_version=software_version,
            packet_bytes=packet_bytes,
            is_witness=is_witness,
            retained_jobs=retained_jobs,
            zone=zone,
            api_address=api_address,
        )

    @property
    def own(self) -> Candidate:
        """This node as one that could hold or shepherd."""
        return Candidate(Holder(self.node_id, self.store_id), self.zone, is_witness=self.is_witness)


@dataclass(frozen=True, slots=True)
class Restored:
    """Durable entries of an earlier life, by room and key; empty on the first start."""

    entries: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)

    def room(self, name: str) -> Mapping[str, bytes]:
        """Entries of one room."""
        return self.entries.get(name, {})
