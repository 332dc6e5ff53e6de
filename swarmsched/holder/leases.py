"""Leases: may this node act for the jobs that others hold, and for how long does it vote for nobody else?

A lease is for calm, not for safety: it keeps holders from voting for another shepherd while the present one is well
(docs/explanation/protocol.md, plane C).  It is kept between pairs of nodes for all jobs between the two, in memory
alone.  A grant counts from the sending of its renewal, while the holder counts from the receipt, so the shepherd's time
is over first, whatever the network did.  A lost renewal or grant is superseded by the next one.

Only durations on one clock are compared.  What a restarted holder had granted is forgotten, so it waits for one full
lease from its start; updates of the present shepherd it accepts at once, which is not asked here.  A lease is that of
one life of a shepherd, the one that its records name.  A later life takes its jobs up by itself, without asking for
votes; one that has lost its disk knows nothing of them, and must not keep others away.
"""

import math
from collections.abc import Collection

from swarmsched.authority.message import LeaseGranted, LeaseRenewal, sequences
from swarmsched.authority.tally import agreed
from swarmsched.authority.timing import LEASE_ACTING_RATIO, LEASE_RENEWAL_S, LEASE_TTL_S, patience_s
from swarmsched.effects import SendPeer
from swarmsched.holders import Configuration, Quorum, majority
from swarmsched.ids import NodeId

ACTING_S = LEASE_TTL_S * LEASE_ACTING_RATIO
LEASES_MAX = 20_000  # as many as there may be members
PATIENCE_S = patience_s(LEASE_TTL_S)


class LeaseKeeper:
    """The leases that other nodes have given to this one.  `generation` is that of this life of the agent."""

    def __init__(self, me: NodeId, generation: int, quorum: Quorum = majority) -> None:
        self._me = me
        self._generation = generation
        self._quorum = quorum
        self._sequences = sequences(generation)
        self._due_s: dict[NodeId, float] = {}  # next renewal, by holder
        self._asked_s: dict[NodeId, dict[int, float]] = {}  # sending of unanswered renewals that could still count
        self._granted_s: dict[NodeId, float] = {}  # sending of the newest granted renewal

    def set_holders(self, nodes: Collection[NodeId], now_s: float) -> None:
        """Who must grant: the holders of all jobs that this node acts for.  New ones are due for a renewal at once."""
        wanted = sorted({*nodes} - {self._me})
        self._due_s = {node: self._due_s.get(node, now_s) for node in wanted}
        self._asked_s = {node: self._asked_s.get(node, {}) for node in wanted}
        self._granted_s = {node: self._granted_s[node] for node in wanted if node in self._granted_s}

    @property
    def next_deadline_s(self) -> float:
        """When the next renewal is due; infinite without holders."""
        return min(self._due_s.values()) if self._due_s else math.inf

    def on_timer(self, now_s: float) -> list[SendPeer]:
        """The renewals that are due."""
        return [self._renew(node, now_s) for node, due_s in self._due_s.items() if now_s >= due_s]

    def granted(self, sender: NodeId, message: LeaseGranted) -> None:
        """A holder granted a renewal; a second, a late or an invented grant finds no renewal that it could be for."""
        sent_s = self._asked_s.get(sender, {}).pop(message.sequence, None)
        if sent_s is not None:
            self.assume(sender, sent_s)

    def assume(self, node: NodeId, sent_s: float) -> None:
        """That node accepted an update of ours that was sent then, which holders take for a renewal.

        The time of the sending, not that of the answer: the holder's lease began in between, and an answer that was
        long on its way must not make ours outlive it.
        """
        if node in self._due_s:
            self._granted_s[node] = max(sent_s, self._granted_s.get(node, -math.inf))

    def holds(self, configuration: Configuration, now_s: float) -> bool:
        """True while this node may act for a job with these holders."""
        return now_s < self.acting_until_s(configuration)

    def acting_until_s(self, configuration: Configuration) -> float:
        """When `holds` turns false unless more is granted; infinite where this node's own vote is enough."""
        granted_s = {
            holder: math.inf if holder.node == self._me else self._granted_s.get(holder.node, -math.inf)
            for holder in configuration.members
        }
        return agreed(configuration, granted_s, -math.inf, self._quorum) + ACTING_S

    def _renew(self, node: NodeId, now_s: float) -> SendPeer:
        self._due_s[node] = now_s + LEASE_RENEWAL_S
        sequence = next(self._sequences)
        recent = {each: sent_s for each, sent_s in self._asked_s[node].items() if now_s - sent_s < ACTING_S}
        self._asked_s[node] = {**recent, sequence: now_s}
        return SendPeer(node, LeaseRenewal(sequence, self._generation))


class LeaseBook:
    """The leases that this node has given.  `started_s`: when this life of the agent began."""

    def __init__(self, started_s: float) -> None:
        self._floor_s = started_s  # no shepherd that is not listed was heard later than this
        self._renewed_s: dict[tuple[NodeId, int], float] = {}  # by shepherd and generation, the oldest first

    def renew(self, sender: NodeId, message: LeaseRenewal, now_s: float) -> list[SendPeer]:
        """Grant it, from now on; a late or doubled one grants again, which costs patience alone."""
        self.touch(sender, message.generation, now_s)
        return [SendPeer(sender, LeaseGranted(message.sequence))]

    def touch(self, shepherd: NodeId, generation: int, now_s: float) -> None:
        """An update of that shepherd was accepted, which is as good as a renewal."""
        life = (shepherd, generation)
        self._renewed_s.pop(life, None)
        self._renewed_s[life] = now_s
        self._prune(now_s)

    def may_change(self, shepherd: NodeId, generation: int, now_s: float) -> bool:
        """True when this node may vote for another in that shepherd's place."""
        return now_s >= self.free_s(shepherd, generation)

    def free_s(self, shepherd: NodeId, generation: int) -> float:
        """When `may_change` turns true unless that life of the shepherd is heard again."""
        return max(self._floor_s, self._renewed_s.get((shepherd, generation), self._floor_s)) + PATIENCE_S

    def _prune(self, now_s: float) -> None:
        """Forget leases that are over; at the limit the oldest one, and from then on wait as long for all the rest."""
        while self._renewed_s:
            life, renewed_s = next(iter(self._renewed_s.items()))
            if now_s < renewed_s + PATIENCE_S and len(self._renewed_s) <= LEASES_MAX:
                return
            del self._renewed_s[life]
            self._floor_s = max(self._floor_s, renewed_s)
