"""What leaves a node on plane A: packets, rumours, corrections of a peer's old news, and whole member lists."""

import math
import random

from swarmsched.effects import Effect, SendDatagram, SendPeer
from swarmsched.facts import GenerationRaised
from swarmsched.gossip.identity import Identity
from swarmsched.gossip.member import MemberChanged
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import MEMBERS_PER_LIST, MEMBERSHIP_CODEC, Gossip, MemberList, Standing, Update
from swarmsched.gossip.roster import Roster
from swarmsched.gossip.rumour import RumourQueue, rumour_sends
from swarmsched.ids import Address, NodeId

MembershipEffect = Effect | MemberChanged | GenerationRaised

RUMOUR_INTERVAL_S = 0.2  # between two rounds of rumours while there is news
RUMOUR_PEERS = 3  # members told per round
GOSSIP_TO_DEAD_S = 30.0  # who failed more recently still gets rumours, so that it learns of the verdict and refutes it

HEAD_ROOM_BYTES = 240
"""Kept free of rumours in every packet for the largest message around them."""

CORRECTIONS_MAX = 8
"""Claims in one correction; a peer with more old news hears the rest at the next hash check."""

LIST_TOKENS_PER_S = 20_000
"""Members per second that are sent in lists; askers beyond it get nothing and ask again."""

SMALLEST_CLAIM_BYTES = 40


class Dissemination:
    """Collects the effects of one step; keeps the rumours and the budget of lists from step to step."""

    def __init__(self, config: MembershipConfig, identity: Identity, roster: Roster, rng: random.Random) -> None:
        self.rumours = RumourQueue()
        self.next_rumour_s = -math.inf  # earliest time of the next round; matters only while there is news
        self._config = config
        self._identity = identity
        self._roster = roster
        self._rng = rng
        self._effects: list[MembershipEffect] = []
        self._corrections: dict[NodeId, None] = {}  # whose claims the sender of the current message should hear
        self._list_tokens = float(LIST_TOKENS_PER_S)
        self._list_tokens_at_s = 0.0

    def emit(self, effect: MembershipEffect) -> None:
        """Add an effect to those of this step."""
        self._effects.append(effect)

    def drain(self) -> list[MembershipEffect]:
        """The effects of this step, in order."""
        effects, self._effects = self._effects, []
        self._corrections.clear()
        return effects

    @property
    def is_drained(self) -> bool:
        """True between steps."""
        return not self._effects and not self._corrections

    def send(self, destination: Address, message: object) -> None:
        """One packet to an address."""
        self._effects.append(SendDatagram(destination, MEMBERSHIP_CODEC.encode(message)))

    def send_to(self, node: NodeId, message: object) -> None:
        """One packet to a member."""
        member = self._roster.get(node)
        if member is not None:
            self.send(member.update.address, message)

    # Rumours

    def put_rumour(self, update: Update, now_s: float) -> None:
        """Spread this; the first news after a silence goes out at once."""
        if not self.rumours:
            self.next_rumour_s = max(self.next_rumour_s, now_s)
        self.rumours.put(update)

    def take_rumours(self) -> tuple[Update, ...]:
        """News to ride on a packet."""
        if not self.rumours:
            return ()
        room_bytes = self._config.packet_ceiling_bytes - HEAD_ROOM_BYTES
        return self.rumours.take(room_bytes, rumour_sends(len(self._roster.live) + 1))

    def spread(self, now_s: float) -> None:
        """One round of rumours, if due: to live members and to those that failed so lately that they may refute."""
        if not self.rumours or now_s < self.next_rumour_s:
            return
        self.next_rumour_s = now_s + RUMOUR_INTERVAL_S
        for peer in self._listeners(now_s):
            if rumours := self.take_rumours():
                self.send_to(peer, Gossip(rumours))

    def _listeners(self, now_s: float) -> list[NodeId]:
        """Whom this round tells.  The dead get no more than their share: after a split they are half of all."""
        count = RUMOUR_PEERS
        recently_failed = [name for name in self._roster.dead if self._may_refute(name, now_s)]
        if not recently_failed:
            return self._roster.sample(count)
        candidates = [*self._roster.live, *recently_failed]
        return self._rng.sample(candidates, min(count, len(candidates)))

    def _may_refute(self, node: NodeId, now_s: float) -> bool:
        member = self._roster.get(node)
        return (
            member is not None
            and member.update.standing is Standing.FAILED
            and now_s - member.changed_s < GOSSIP_TO_DEAD_S
        )

    # Corrections

    def correct(self, node: NodeId) -> None:
        """The sender of the current message has old news of `node`, which may be itself or this node."""
        self._corrections[node] = None

    def send_corrections(self, source: Address, now_s: float) -> bool:
        """Tell the sender what is known instead; True if there was anything to tell."""
        if not self._corrections:
            return False
        claims = []
        for node in list(self._corrections)[:CORRECTIONS_MAX]:
            if node == self._config.node_id:
                claims.append(self._identity.update)
            elif (member := self._roster.get(node)) is not None:
                claims.append(self._roster.claim(member, now_s))
        self._corrections.clear()
        self.send(source, Gossip(tuple(claims)))
        return True

    # Lists

    def send_list(self, node: NodeId, address: Address, *, wants_answer: bool, now_s: float) -> bool:
        """The whole table: in one packet if it fits, else over the peer channel; False if over budget."""
        if not self._spend_list_tokens(len(self._roster) + 1, now_s):
            return False
        claims = [self._identity.update, *(self._roster.claim(member, now_s) for member in self._roster)]
        if len(claims) <= self._config.packet_ceiling_bytes // SMALLEST_CLAIM_BYTES:
            payload = MEMBERSHIP_CODEC.encode(MemberList(self._config.node_id, tuple(claims), wants_answer))
            if len(payload) <= self._config.packet_ceiling_bytes:
                self._effects.append(SendDatagram(address, payload))
                return True
        if self._roster.get(node) is not None:  # otherwise its claim was refused: nobody to call back
            self._send_parts(node, claims, wants_answer=wants_answer)
        return True

    def _send_parts(self, node: NodeId, claims: list[Update], *, wants_answer: bool) -> None:
        for start in range(0, len(claims), MEMBERS_PER_LIST):
            part = tuple(claims[start : start + MEMBERS_PER_LIST])
            is_last = start + MEMBERS_PER_LIST >= len(claims)
            message = MemberList(self._config.node_id, part, wants_answer=wants_answer and is_last)
            self._effects.append(SendPeer(node, message))

    def _spend_list_tokens(self, count: int, now_s: float) -> bool:
        earned = (now_s - self._list_tokens_at_s) * LIST_TOKENS_PER_S
        self._list_tokens = min(float(LIST_TOKENS_PER_S), self._list_tokens + earned)
        self._list_tokens_at_s = now_s
        if self._list_tokens < count:
            return False
        self._list_tokens -= count
        return True
