"""How a node's configuration becomes the two gossip planes, and which peer messages are theirs."""

import random

from swarmsched.gossip.exchange import STATE_MESSAGES
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import MEMBERSHIP_PEER_KINDS
from swarmsched.gossip.setting import SETTING_KEY, SETTING_ROOM
from swarmsched.gossip.state import StateConfig, StatePlane
from swarmsched.node.config import NodeConfig, Restored
from swarmsched.policies.registry import check_setting

MEMBERSHIP_PEER_MESSAGES = tuple(MEMBERSHIP_PEER_KINDS.values())
STATE_PEER_MESSAGES = tuple(STATE_MESSAGES.values())


def make_membership(config: NodeConfig, rng: random.Random, make: type[Membership] = Membership) -> Membership:
    """Plane A of this node."""
    return make(
        MembershipConfig(
            node_id=config.node_id,
            address=config.address,
            generation=config.generation,
            instance_id=config.instance_id,
            seeds=config.seeds,
            software_version=config.software_version[:32],
            packet_ceiling_bytes=config.packet_bytes,
            probe_period_s=config.timings.probe_period_s,
        ),
        rng,
    )


def make_state_plane(config: NodeConfig, restored: Restored, rng: random.Random) -> StatePlane:
    """Plane B of this node, with the swarm-wide setting as it was stored; SwarmError if that is unusable."""
    plane = StatePlane(
        StateConfig(config.node_id, config.generation, config.packet_bytes, config.timings.round_s), rng, check_setting
    )
    stored = restored.room(SETTING_ROOM).get(SETTING_KEY)
    if stored is not None:
        plane.restore_setting(stored)
    return plane
