"""Who a node is on plane A."""

from swarmsched.errors import ConfigError
from swarmsched.fields import Value
from swarmsched.ids import Address, NodeId, is_node_name
from swarmsched.wire.sealing import INSTANCE_ID_BYTES

PROBE_PERIOD_S = 1.0  # one member is probed per period; shorter detects sooner and costs in proportion
PROBE_PERIOD_MIN_S = 0.5  # within which a direct probe is answered
PROBE_PERIOD_MAX_S = 86_400.0  # nobody is watched: for simulations in which no machine fails
PACKET_CEILING_MIN_BYTES = 512
PACKET_CEILING_MAX_BYTES = 1_400


class MembershipConfig(Value, kw_only=True):
    """What differs from node to node; how others are watched suits 3 to 10,000 nodes in one site."""

    node_id: NodeId  # unique in the swarm
    address: Address  # where others reach it, by UDP and TCP: one that they can route to, not a wildcard
    generation: int  # larger than at any earlier start of this name, and on disk before the start
    instance_id: bytes  # 16 random bytes, new at each start of the process: tells two holders of one name apart
    seeds: tuple[Address, ...] = ()  # greeted at the start, and for ever while nobody there is known; 2 or 3 suffice
    software_version: str = ""  # shown to people; at most 32 characters
    packet_ceiling_bytes: int = 1_200  # largest payload, before sealing; 1,200 fits under VXLAN and WireGuard
    probe_period_s: float = PROBE_PERIOD_S

    def __post_init__(self) -> None:
        if not is_node_name(self.node_id):
            raise ConfigError(
                "node_id", f"{self.node_id!r} is not a node name", "1 to 63 letters, digits, '-', '_', '.'"
            )
        if len(self.instance_id) != INSTANCE_ID_BYTES:
            raise ConfigError("instance_id", f"has {len(self.instance_id)} bytes", f"{INSTANCE_ID_BYTES} are needed")
        if self.generation < 1:
            raise ConfigError("generation", f"{self.generation} is below 1", "use seconds since 1970")
        if not PACKET_CEILING_MIN_BYTES <= self.packet_ceiling_bytes <= PACKET_CEILING_MAX_BYTES:
            accepted = f"{PACKET_CEILING_MIN_BYTES} to {PACKET_CEILING_MAX_BYTES}"
            raise ConfigError("packet_ceiling_bytes", f"{self.packet_ceiling_bytes} is out of range", accepted)
        if not PROBE_PERIOD_MIN_S <= self.probe_period_s <= PROBE_PERIOD_MAX_S:
            accepted = f"{PROBE_PERIOD_MIN_S:g} to {PROBE_PERIOD_MAX_S:g} seconds"
            raise ConfigError("probe_period_s", f"{self.probe_period_s} is out of range", accepted)
