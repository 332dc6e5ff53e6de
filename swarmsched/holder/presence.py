"""Who is there, as far as a job's record depends on it: members that are away, for how long, and whether for good."""

from collections.abc import Iterable

from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.ids import NodeId
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.record import JobRecord

STRANGER_S = 15.0  # that nobody has told of a node: by then a swarm that was split knows all its members again
NAMESAKE_S = 10.0  # that only another machine answers under a name: by then a swarm knows names with two holders
REFUTED_S = 1.0  # that a verdict "failed" stands before its node's ranks count as lost
PLANNED_STOP_S = 120.0  # that an agent that said goodbye may stay away before its ranks count as lost


class Presence:
    """What one node has heard of the others in this life."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._gone: dict[NodeId, tuple[float, MemberStatus]] = {}  # members that are not alive: since when, and how
        self._met: dict[NodeId, None] = {me: None}  # members that were ever heard of
        self._strangers: dict[NodeId, float] = {}  # nodes of our jobs that were not: since when
        self._shared: set[NodeId] = set()  # names with two holders: what answers under them says little

    def changed(self, member: MemberView, now_s: float) -> bool:
        """Keep in mind since when members are away; true for one that just went."""
        self._met[member.node_id] = None
        self._strangers.pop(member.node_id, None)
        if member.status in (MemberStatus.FAILED, MemberStatus.LEFT):
            since_s, _ = self._gone.get(member.node_id, (now_s, member.status))
            self._gone[member.node_id] = (since_s, member.status)
            return True
        if member.status is MemberStatus.ALIVE:
            self._gone.pop(member.node_id, None)
            self._shared.discard(member.node_id)  # no other status ends a conflict: of two, one may leave
        elif member.status is MemberStatus.CONFLICT:
            self._shared.add(member.node_id)
        return False

    def is_there(self, node: NodeId) -> bool:
        """True for a node that was met and has not gone."""
        return node in self._met and node not in self._gone

    def may_answer(self, record: JobRecord) -> bool:
        """True while enough of its holders seem to be there."""
        configuration = record.configuration
        return configuration.is_quorum([each for each in configuration.members if self.is_there(each.node)])

    @property
    def failed(self) -> set[NodeId]:
        """Nodes on which a verdict stands."""
        return {node for node, (_, status) in self._gone.items() if status is MemberStatus.FAILED}

    @property
    def away(self) -> dict[NodeId, float]:
        """Since when nodes of our jobs are not there."""
        return self._strangers | {node: since_s for node, (since_s, _) in self._gone.items()}

    def next_verdict_s(self, now_s: float) -> float:
        """When the next verdict comes to count."""
        verdicts = (since_s + REFUTED_S for since_s, status in self._gone.values() if status is MemberStatus.FAILED)
        return min((at_s for at_s in verdicts if now_s < at_s), default=float("inf"))

    def look_for_strangers(self, jobs: Iterable[JobShepherd], now_s: float) -> None:
        """Nodes and holders of these jobs that were never met in this life."""
        strangers: dict[NodeId, float] = {}
        for job in jobs:
            record = job.record
            nodes = [*(share.node for share in record.shares), *(each.node for each in record.configuration.members)]
            strangers |= {node: self._strangers.get(node, now_s) for node in nodes if node not in self._met}
        self._strangers = strangers

    def lost(self, now_s: float) -> frozenset[NodeId]:
        """Nodes whose ranks count as lost: failed, stopped on purpose for too long, or heard of by nobody.

        An agent that restarts while others are down never meets those, and nobody may be left who tells of them.
        A verdict must stand for a moment: the halves of a healed split bring fresh ones about nodes that are well and
        refute them within a round trip, and an attempt is worth more than that.
        """
        gone = [
            node
            for node, (since_s, status) in self._gone.items()
            if now_s >= since_s + (REFUTED_S if status is MemberStatus.FAILED else PLANNED_STOP_S)
        ]
        return frozenset((*gone, *(node for node, at_s in self._strangers.items() if now_s >= at_s + STRANGER_S)))

    def lost_of(self, job: JobShepherd, lost: frozenset[NodeId], now_s: float) -> list[NodeId]:
        """Which nodes of a job have lost its ranks: those, and those of whose name only another machine answers."""
        replaced = job.namesakes.standing(now_s, NAMESAKE_S)
        given_up = lost.union(node for node in replaced if node not in self._shared or job.hangs_on(node))
        return list(dict.fromkeys(share.node for share in job.record.shares if share.node in given_up))

    def validate(self) -> None:
        """Whoever went was there, and this node is."""
        assert self._gone.keys() <= self._met.keys(), "a member is gone that was never there"
        assert self._me not in self._gone
