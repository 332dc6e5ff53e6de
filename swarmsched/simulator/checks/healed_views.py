"""Invariants 12 and 13: after healing all views of members and records become equal, and the dead are known as such."""

import math

from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.ids import NodeId
from swarmsched.simulator.checks.healing import Healed, Rule
from swarmsched.simulator.host import Host

MEMBERSHIP_S = 15.0
"""Full, equal membership (docs/explanation/invariants.md, 12)."""

ROUNDS_TO_ALL = ((3, 2), (30, 7), (100, 8), (1_000, 10), (3_000, 11), (10_000, 13))
"""(members, rounds of 1 s that reach all), in the 99th percentile of a model of such exchanges."""

RENEWAL_S = 30.0
"""A record is written anew at least so often (protocol, plane B); an exchange tells of recent changes only, so what a
split kept from a node comes with the next writing, or with the full exchange of every minute."""

SUSPICION_S, SUSPICION_FACTOR = 3.0, 6.0
"""Minimum 3 x max(1, log10 N) s, maximum six times that (protocol, plane A)."""

VERDICT_SLACK_S = 2.0
"""Failed within suspicion maximum + 2 s (docs/explanation/invariants.md, 13)."""

HEALTH_S = 15.0
"""A survivor that was itself in trouble probes more slowly until its health has recovered (Lifeguard, 2018)."""

LIVE = (MemberStatus.ALIVE, MemberStatus.SUSPECT)
GONE = (MemberStatus.FAILED, MemberStatus.LEFT)


class EqualMembership(Rule):
    """Every agent sees every running agent alive, and all under the same generation and incarnation."""

    invariant = 12

    def __init__(self) -> None:
        super().__init__(MEMBERSHIP_S)

    def missing(self, healed: Healed) -> str:
        """The first two views that differ."""
        up = healed.up
        first: dict[NodeId, tuple[int, int]] = {}
        for host in up:
            view = members_of(host)
            for other in up:
                member = view.get(other.node_id)
                if member is None or member.status is not MemberStatus.ALIVE:
                    status = "nothing" if member is None else member.status.value
                    return f"{host.node_id} knows {other.node_id}, which runs, as {status}"
                stamp = (member.generation, member.incarnation)
                if first.setdefault(other.node_id, stamp) != stamp:
                    return f"{host.node_id} knows {other.node_id} as {stamp}, another as {first[other.node_id]}"
        return ""


class EqualState(Rule):
    """Every agent has every running node's record, as it was at healing or newer."""

    invariant = 12

    def __init__(self, node_count: int) -> None:
        super().__init__(MEMBERSHIP_S + RENEWAL_S + 2.0 * rounds_to_all(node_count))
        self._wanted: dict[NodeId, tuple[int, int]] | None = None

    def missing(self, healed: Healed) -> str:
        """The first record that a view lacks."""
        if self._wanted is None:
            self._wanted = {host.node_id: _records_of(host).get(host.node_id, (0, 0)) for host in healed.up}
        for host in healed.up:
            known = _records_of(host)
            for node, stamp in self._wanted.items():
                if known.get(node, (0, 0)) < stamp:
                    return f"{host.node_id} has the record {known.get(node)} of {node}, at healing it was {stamp}"
        return ""


class DeadAreKnown(Rule):
    """No agent takes a machine for live whose agent is down."""

    invariant = 13

    def __init__(self, node_count: int) -> None:
        maximum_s = SUSPICION_FACTOR * SUSPICION_S * max(1.0, math.log10(max(1, node_count)))
        super().__init__(HEALTH_S + maximum_s + VERDICT_SLACK_S)

    def missing(self, healed: Healed) -> str:
        """The first wrong verdict."""
        down = [host.node_id for host in healed.swarm.hosts.values() if not host.is_up]
        for host in healed.up:
            view = members_of(host)
            for node in down:
                member = view.get(node)
                if member is not None and member.status not in GONE:
                    return f"{host.node_id} knows {node}, which is down, as {member.status.value}"
        return ""


class LiveStayKnown(Rule):
    """Once full, membership stays so: no running, connected agent is called failed."""

    invariant = 13

    def __init__(self) -> None:
        super().__init__(math.inf)

    def broken(self, healed: Healed) -> str:
        """The first wrong verdict, once the bound of equal membership has passed."""
        if healed.now_s - healed.since_s <= MEMBERSHIP_S:
            return ""
        up = healed.up
        for host in up:
            view = members_of(host)
            for other in up:
                member = view.get(other.node_id)
                if member is None or member.status not in LIVE:
                    status = "nothing" if member is None else member.status.value
                    return f"{host.node_id} knows {other.node_id}, which runs, as {status}"
        return ""


def rounds_to_all(node_count: int) -> int:
    """Rounds after which a record has reached all, for the next larger size of the table."""
    return next((rounds for size, rounds in ROUNDS_TO_ALL if node_count <= size), ROUNDS_TO_ALL[-1][1])


def members_of(host: Host) -> dict[NodeId, MemberView]:
    """What a running agent knows of members."""
    assert host.node is not None
    return {member.node_id: member for member in host.node.members(host.now_s)}


def _records_of(host: Host) -> dict[NodeId, tuple[int, int]]:
    assert host.node is not None
    return {status.record.node_id: status.record.stamp for status in host.node.node_records(host.now_s)}
