"""What a node believes of everybody else, made into the views that placement, policies and explanations take.

The own node stands in the view with its ledger's exact figures, all others with their gossiped records (repaired by
their owners' fresher answers).  A member that is not alive is shown and never chosen.
"""

from collections.abc import Collection

from swarmsched.gossip.card import CardStatus
from swarmsched.gossip.card import job_view as card_view
from swarmsched.gossip.member import MemberStatus
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.record import NodeFlag, NodeRecord, capacity_of, node_view
from swarmsched.gossip.state import StatePlane
from swarmsched.holders import Holder
from swarmsched.ids import NodeId
from swarmsched.ledger.ledger import Ledger
from swarmsched.negotiation.flock import Surroundings
from swarmsched.negotiation.holding import Candidate
from swarmsched.resources import NodeResources
from swarmsched.view import JobView, NodeView

_UNAVAILABLE = (NodeFlag.DRAINING, NodeFlag.CONFLICT, NodeFlag.WITNESS)


class Landscape:
    """Reads membership, state plane and ledger; keeps nothing but a cache of placeholder views."""

    def __init__(
        self, me: NodeId, membership: Membership, state: StatePlane, ledger: Ledger, *, is_witness: bool = False
    ) -> None:
        self._me = me
        self._membership = membership
        self._state = state
        self._ledger = ledger
        self._is_witness = is_witness
        self._views: dict[NodeId, tuple[NodeRecord, bool, NodeView]] = {}
        self._capacities: dict[NodeId, tuple[object, NodeResources]] = {}
        self.own_resources = NodeResources((), 0, 0)

    def around(self, now_s: float) -> Surroundings:
        """Everything that deciding about a job needs."""
        alive = frozenset(self._membership.alive())
        foreign = [s.record for s in self._state.node_records(now_s) if s.record.node_id != self._me]
        queued = sum(record.queued_jobs for record in foreign if record.node_id in alive)
        nodes = [self._own_view(), *(self._foreign_view(record, alive) for record in foreign)]
        return Surroundings(nodes, self._foreign_jobs(alive, now_s), queued)

    def is_complete(self, now_s: float) -> bool:
        """True when every live member's record has arrived, so that totals mean something."""
        known = {status.record.node_id for status in self._state.node_records(now_s)}
        return all(node in known for node in self._membership.alive() if node != self._me)

    def candidates(self, now_s: float) -> list[Candidate]:
        """Other nodes that could hold a record or shepherd a job: alive, and their store is known."""
        alive = frozenset(self._membership.alive())
        return [
            Candidate(
                Holder(status.record.node_id, status.record.store_id),
                status.record.zone,
                status.record.live_jobs,
                status.record.total_gpus,
                status.record.has(NodeFlag.WITNESS),
            )
            for status in self._state.node_records(now_s)
            if status.record.node_id in alive and status.record.node_id != self._me and status.record.store_id
        ]

    def capacities(self, now_s: float) -> dict[NodeId, NodeResources]:
        """All that every node has that may ever run a job, whether or not it is up now."""
        records = (status.record for status in self._state.node_records(now_s))
        others = {
            NodeId(record.node_id): self._capacity(record) for record in records if not record.has(NodeFlag.WITNESS)
        }
        others.pop(self._me, None)
        return others if self._is_witness else {**others, self._me: self.own_resources}

    def _capacity(self, record: NodeRecord) -> NodeResources:
        """What a node has rarely changes, and every submit asks: made anew only when it did."""
        kinds = tuple((group.model, group.count, group.memory_bytes) for group in record.groups)
        facts = (kinds, record.cpus_total, record.memory_total_bytes)
        known = self._capacities.get(record.node_id)
        if known is None or known[0] != facts:
            known = self._capacities[record.node_id] = (facts, capacity_of(record))
        return known[1]

    def _own_view(self) -> NodeView:
        is_barred = self._is_witness or self._ledger.is_draining or self._is_in_conflict(self._me)
        total = len(self.own_resources.gpus)
        return NodeView(self._me, self._ledger.free(0.0), total, not is_barred, self.own_resources.gpus)

    def _foreign_view(self, record: NodeRecord, alive: Collection[NodeId]) -> NodeView:
        is_alive = record.node_id in alive
        known = self._views.get(record.node_id)
        if known is None or known[0] is not record or known[1] != is_alive:
            is_available = is_alive and not any(record.has(flag) for flag in _UNAVAILABLE)
            known = (record, is_alive, node_view(record, is_available=is_available))
            self._views[record.node_id] = known
        return known[2]

    def _foreign_jobs(self, alive: Collection[NodeId], now_s: float) -> list[JobView]:
        """Live jobs of other shepherds that can act; the card of a dead one's job stands in nobody's way."""
        cards = self._state.cards(now_s)
        return [card_view(status) for status in cards if self._acts_elsewhere(status, alive)]

    def _acts_elsewhere(self, status: CardStatus, alive: Collection[NodeId]) -> bool:
        return status.card.shepherd != self._me and status.card.shepherd in alive

    def _is_in_conflict(self, node: NodeId) -> bool:
        member = self._membership.member(node)
        return member is not None and member.status is MemberStatus.CONFLICT
