"""Parameters of plane A, each with its meaning, its constraint and a rule of thumb."""

from swarmsched.errors import ConfigError
from swarmsched.fields import Value
from swarmsched.ids import Address, NodeId, is_node_name
from swarmsched.wire.sealing import INSTANCE_ID_BYTES, WIRE_MINOR_HIGHEST, WIRE_MINOR_LOWEST

PACKET_CEILING_MIN_BYTES = 512
PACKET_CEILING_MAX_BYTES = 1_400


class MembershipConfig(Value, kw_only=True):
    """Who this node is and how it watches the others.  The defaults suit 3 to 10,000 nodes in one site."""

    node_id: NodeId
    """This node's name, unique in the swarm."""

    address: Address
    """Where others reach it, by UDP and TCP.  An address that they can route to, not a wildcard."""

    generation: int
    """Larger than at any earlier start of this name: max(stored + 1, seconds since 1970).  On disk before the start."""

    instance_id: bytes
    """16 random bytes, new at each start of the process: tells two holders of one name apart."""

    seeds: tuple[Address, ...] = ()
    """Addresses to greet at the start, and for ever while nobody there is known.  Two or three suffice."""

    software_version: str = ""
    """Shown to people; at most 32 characters."""

    lowest_minor: int = WIRE_MINOR_LOWEST
    """Lowest wire minor understood."""

    highest_minor: int = WIRE_MINOR_HIGHEST
    """Highest wire minor understood; the swarm uses the highest that all understand."""

    probe_period_s: float = 1.0
    """One member is probed per period; positive.  Shorter detects sooner and costs in proportion."""

    probe_timeout_s: float = 0.5
    """Wait for the direct answer; below the period.  Twice the 99th percentile of the round trip is enough."""

    indirect_helpers: int = 3
    """Members asked to probe a silent one; at least 0.  Three keep a 5 % loss from becoming a suspicion."""

    rumour_interval_s: float = 0.2
    """Time between two rounds of rumours while there is news; positive."""

    rumour_peers: int = 3
    """Members told per round; at least 1."""

    hash_interval_s: float = 5.0
    """Time between two comparisons of the membership hash; repairs what rumours missed."""

    dial_interval_s: float = 5.0
    """Time between two attempts to reach a dead member or an absent seed; bounds how long a split lasts."""

    lonely_dial_interval_s: float = 1.0
    """The same while no other member is known at all."""

    slow_dial_after_s: float = 3_600.0
    """A member dead for longer is dialled at every `slow_dial_every`-th attempt only."""

    slow_dial_every: int = 12
    """See `slow_dial_after_s`; at least 1."""

    gossip_to_dead_s: float = 30.0
    """A member that failed more recently still gets rumours, so that it learns of the verdict and refutes it."""

    keep_dead_s: float = 86_400.0
    """Then a failed or departed member is forgotten."""

    packet_ceiling_bytes: int = 1_200
    """Largest payload, before sealing: 512 to 1,400.  1,200 fits under VXLAN and WireGuard."""

    concurrent_probes: int = 16
    """Probes under way at once, at least 1: one per period, the others after send errors."""

    def __post_init__(self) -> None:
        if not is_node_name(self.node_id):
            raise ConfigError(
                "node_id", f"{self.node_id!r} is not a node name", "1 to 63 letters, digits, '-', '_', '.'"
            )
        if len(self.instance_id) != INSTANCE_ID_BYTES:
            raise ConfigError("instance_id", f"has {len(self.instance_id)} bytes", f"{INSTANCE_ID_BYTES} are needed")
        if self.generation < 1:
            raise ConfigError("generation", f"{self.generation} is below 1", "use seconds since 1970")
        if not 0 < self.probe_timeout_s < self.probe_period_s:
            raise ConfigError("probe_timeout_s", f"{self.probe_timeout_s} is not within the probe period", "lower it")
        if not PACKET_CEILING_MIN_BYTES <= self.packet_ceiling_bytes <= PACKET_CEILING_MAX_BYTES:
            accepted = f"{PACKET_CEILING_MIN_BYTES} to {PACKET_CEILING_MAX_BYTES}"
            raise ConfigError("packet_ceiling_bytes", f"{self.packet_ceiling_bytes} is out of range", accepted)
        for name in ("rumour_interval_s", "hash_interval_s", "dial_interval_s", "lonely_dial_interval_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", "give a time in seconds")
        for name in ("rumour_peers", "slow_dial_every", "concurrent_probes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is below 1", "give 1 or more")
