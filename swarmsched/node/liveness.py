"""Plane A of one node: who is alive, and what operators want of members."""

import random
from collections.abc import Iterable, Mapping

from swarmsched.clock import Clock
from swarmsched.commands import Done, ForgetMember, Refused
from swarmsched.effects import Announce, ReplyToClient
from swarmsched.events import DatagramSendFailed, LoopLagged, PeerSendFailed, TimerFired
from swarmsched.facts import Admitted
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.gossip.membership import Membership, MembershipEvent
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import MEMBERSHIP_PEER_KINDS
from swarmsched.holder.machine import NodeEffect, Taker
from swarmsched.node.config import NodeConfig
from swarmsched.node.publication import GossipTraffic

PEER_MESSAGES = tuple(MEMBERSHIP_PEER_KINDS.values())
LIVE = (MemberStatus.ALIVE, MemberStatus.SUSPECT, MemberStatus.CONFLICT)


class Liveness:
    """Membership as one of the node's machines."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        own = (GossipTraffic.MEMBERSHIP, *PEER_MESSAGES, DatagramSendFailed, LoopLagged, TimerFired)
        self.takes: Mapping[object, Taker] = {
            **dict.fromkeys(own, self._step),
            PeerSendFailed: self._undelivered,
            ForgetMember: self._forget,
            MemberChanged: self._tell,
        }

    @property
    def next_deadline_s(self) -> float:
        """When to probe, to gossip or to judge."""
        return self._membership.next_deadline_s

    def _step(self, event: MembershipEvent, clock: Clock) -> Iterable[NodeEffect]:
        return self._membership.step(event, clock.now_s)

    def _undelivered(self, event: PeerSendFailed, clock: Clock) -> Iterable[NodeEffect]:
        return self._membership.step(event, clock.now_s) if isinstance(event.message, PEER_MESSAGES) else []

    def _forget(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        assert isinstance(asked.command, ForgetMember)
        node, request_id = asked.command.node, asked.request_id
        member = self._membership.member(node)
        if member is None:
            return [ReplyToClient(request_id, Refused("not_found", f"no member is called {node}", "swarm nodes"))]
        if member.status in LIVE:
            problem = f"{node} is {member.status.value}; forgetting is for members that are gone for good"
            return [ReplyToClient(request_id, Refused("conflict", problem, "stop its agent first"))]
        return [*self._membership.forget(node, clock.now_s), ReplyToClient(request_id, Done())]

    def _tell(self, change: MemberChanged, clock: Clock) -> Iterable[NodeEffect]:
        member = change.member
        text = f"{member.node_id} is {member.status.value}"
        fields = {"status": member.status.value, "address": "{}:{}".format(*member.address)}
        return [Announce("member.changed", text, node=member.node_id, fields=fields)]

    def validate(self) -> None:
        """Members, probes and rumours."""
        self._membership.validate()


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
