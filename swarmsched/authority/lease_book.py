"""The holder's side of leases: how long this node votes for no other shepherd than the present one (notes, 3.4).

Only durations on this node's own clock are compared.  What a restarted holder had granted is forgotten, so it waits
for one full lease from its start; updates of the present shepherd it accepts at once, which is not asked here.

A lease is that of one life of a shepherd, the one that its records name.  A later life takes its jobs up by itself,
without asking for votes; one that has lost its disk knows nothing of them, and must not keep others away.
"""

from swarmsched.authority.message import LeaseGranted, LeaseRenewal
from swarmsched.authority.timing import LEASE_TTL_S, patience_s
from swarmsched.effects import SendPeer
from swarmsched.ids import NodeId

LEASES_MAX = 20_000  # as many as there may be members
PATIENCE_S = patience_s(LEASE_TTL_S)


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
