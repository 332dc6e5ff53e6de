"""Where the shards of aggregation are hosted: what this node's ranks ask for, and what it gives to others', as one
machine."""

import random
from collections.abc import Iterable, Mapping, Sequence

from swarmsched.aggregation.broker import Broker
from swarmsched.aggregation.lender import Lender
from swarmsched.aggregation.message import (
    AggregationHosted,
    AggregationLease,
    AggregationMove,
    AggregationQuote,
    AggregationQuoted,
    AggregationRelease,
    AggregationRenewal,
)
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.events import (
    AggregationRead,
    PeerSendFailed,
    ResourcesRead,
    ShardGivenUp,
    ShardWanted,
    TaskExited,
    TimerFired,
)
from swarmsched.facts import NodeChanged
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.holder.machine import NodeEffect, Taker
from swarmsched.ids import NodeId
from swarmsched.ledger.ledger import Ledger
from swarmsched.node.config import NodeConfig
from swarmsched.shards import AggregationRoom, ShardLoad


class AggregationDesk:
    """Broker and lender of one node."""

    def __init__(self, config: NodeConfig, ledger: Ledger, cluster: Cluster, rng: random.Random) -> None:
        me, self._cluster = config.node_id, cluster

        def takes_work() -> bool:
            return not (config.is_witness or ledger.is_draining or ledger.avoided_reason)

        self.lender = lender = Lender(me, lambda: ledger.free.cpus, takes_work)
        self.broker = broker = Broker(me, config.generation, rng, self._candidates)
        self._told_room: AggregationRoom | None = None
        takes: dict[object, Taker] = {
            ShardWanted: lambda event, clock: broker.want(event, clock.now_s),
            ShardGivenUp: lambda event, clock: broker.give_up(event.key, event.start),
            TaskExited: lambda event, clock: broker.give_up(event.key),
            AggregationQuoted: lambda event, clock: broker.quoted(event.sender, event.message, clock.now_s),
            AggregationHosted: lambda event, clock: broker.hosted(event.sender, event.message, clock.now_s),
            AggregationMove: lambda event, clock: broker.move(event.sender, event.message, clock.now_s),
            PeerSendFailed: lambda event, clock: broker.undelivered(event.recipient, event.message, clock.now_s),
            MemberChanged: self._member_changed,
            AggregationQuote: lambda event, clock: lender.quote(event.sender, event.message, clock.now_s),
            AggregationLease: lambda event, clock: lender.lease(event.sender, event.message, clock.now_s),
            AggregationRenewal: lambda event, clock: lender.renew(event.sender, event.message, clock.now_s),
            AggregationRelease: lambda event, clock: lender.release(event.sender, event.message),
            AggregationRead: lambda event, clock: lender.read(event, clock.now_s),
            ResourcesRead: lambda event, clock: lender.has_link(event.resources.network_mbit_s),
            TimerFired: self._on_timer,
        }
        self.takes: Mapping[object, Taker] = {kind: self._announcing(take) for kind, take in takes.items()}

    def _announcing(self, take: Taker) -> Taker:
        """The same, and others hear of it when there is more or less room than before."""

        def taking(taken: object, clock: Clock) -> Iterable[NodeEffect]:
            effects = take(taken, clock) or ()
            if self.lender.room == self._told_room:
                return effects
            self._told_room = self.lender.room
            return [*effects, NodeChanged()]

        return taking

    @property
    def next_deadline_s(self) -> float:
        """When a lease ends, is to be renewed, or an answer is late."""
        return min(self.lender.next_deadline_s, self.broker.next_deadline_s)

    def _on_timer(self, event: TimerFired, clock: Clock) -> Iterable[NodeEffect]:
        return [*self.lender.on_timer(clock.now_s), *self.broker.on_timer(clock.now_s)]

    def _member_changed(self, change: MemberChanged, clock: Clock) -> Iterable[NodeEffect]:
        member = change.member
        may_live = member.status in (MemberStatus.ALIVE, MemberStatus.SUSPECT)
        return () if may_live else self.broker.gone(member.node_id, clock.now_s)

    def _candidates(self, load: ShardLoad, now_s: float) -> Sequence[NodeId]:
        """Other nodes that could, by what they have told; those that know no leases tell nothing."""
        return [
            status.record.node_id
            for status in self._cluster.others(now_s)
            if (room := status.record.aggregation) is not None
            and room.memory_bytes >= load.memory_bytes
            and room.core_ms
            and room.link_bytes_per_s
        ]

    def validate(self) -> None:
        """Leases on both sides."""
        self.lender.validate()
        self.broker.validate()
