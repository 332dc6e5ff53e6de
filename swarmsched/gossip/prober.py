"""The failure detector's asking half: direct probes, probes through helpers, the stream, and probes for others.

SWIM (Das, Gupta and Motivala, 2002), sections 3.1 and 4.3.
It finds out who does not answer; what is concluded from it is `Membership`'s.
"""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarmsched.effects import SendPeer
from swarmsched.gossip.dissemination import Dissemination
from swarmsched.gossip.health import LocalHealth
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import Ping, PingRequest, RelayAnswer, Standing, StreamPing
from swarmsched.gossip.roster import Roster
from swarmsched.gossip.rumour import RUMOURS_PER_PACKET
from swarmsched.ids import Address, NodeId

PROBE_TIMEOUT_S = 0.5  # for the direct answer: twice the 99th percentile of the round trip is enough
INDIRECT_HELPERS = 3  # asked to probe a silent member: three keep a 5 % loss from becoming a suspicion
CONCURRENT_PROBES = 16  # under way at once: one per period, the others after send errors

RELAYS_MAX = 256
"""Probes made for others at once; more requests are ignored, their senders have other helpers."""

RELAY_SHARE = 0.8
"""A helper answers after this part of the asker's remaining time, so that a "no" still counts."""


class ProbeOrder:
    """Shuffled round robin: every member is probed within 2 N - 1 periods, in an order that no two nodes share."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[NodeId] = []

    def add(self, node: NodeId) -> None:
        """A new member joins the current round at a random place."""
        self._order.insert(self._rng.randint(0, len(self._order)), node)

    def pop(self) -> NodeId | None:
        """The next name; None when the round is over.  The caller skips those that are not to be probed."""
        return self._order.pop() if self._order else None

    def restart(self, nodes: Sequence[NodeId]) -> None:
        """Begin a new round over these."""
        self._order = list(nodes)
        self._rng.shuffle(self._order)


@dataclass(slots=True)
class Probe:
    """A probe under way: direct until `indirect_at_s`, then through helpers and the stream until `deadline_s`."""

    sequence: int
    target: NodeId
    indirect_at_s: float
    deadline_s: float
    is_indirect: bool = False
    no_count: int = 0  # helpers that live but did not reach the target either

    @property
    def next_deadline_s(self) -> float:
        """When something is to be done about it."""
        return self.deadline_s if self.is_indirect else self.indirect_at_s

    def postpone(self, lag_s: float) -> None:
        """This node stood still: give the answers time to be read."""
        self.indirect_at_s += lag_s
        self.deadline_s += lag_s


@dataclass(slots=True)
class Relay:
    """A probe that this node makes for another."""

    requester: Address
    sequence: int
    target: NodeId
    deadline_s: float


class Prober:
    """Probes under way.  Sequence numbers are this node's own; late and doubled answers match none."""

    def __init__(
        self,
        config: MembershipConfig,
        roster: Roster,
        health: LocalHealth,
        outbox: Dissemination,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._roster = roster
        self._health = health
        self._outbox = outbox
        self._order = ProbeOrder(rng)
        self._probes: dict[int, Probe] = {}  # by sequence number; at most CONCURRENT_PROBES
        self._probed: dict[NodeId, int] = {}  # target -> sequence number of the same probes
        self._relays: dict[int, Relay] = {}  # by our own sequence number; at most RELAYS_MAX
        self._sequence = 0

    def earliest_deadline_s(self) -> float:
        """When `advance` has something to do; infinity if never."""
        deadline_s = math.inf
        for probe in self._probes.values():
            deadline_s = min(deadline_s, probe.next_deadline_s)
        for relay in self._relays.values():
            deadline_s = min(deadline_s, relay.deadline_s)
        return deadline_s

    def add(self, node: NodeId) -> None:
        """A member is new, or live again: it joins the round."""
        self._order.add(node)

    def drop(self, node: NodeId) -> None:
        """A member is dead: its probe means nothing any more."""
        if (number := self._probed.get(node)) is not None:
            self._take(number, node)

    def probe_next(self, now_s: float) -> None:
        """Start the period's probe.  A suspect is told of the accusation with it, so that it can refute at once."""
        node = self._next_target()
        if node is None or len(self._probes) >= CONCURRENT_PROBES:
            return
        probe = self._start(node, now_s)
        member = self._roster.get(node)
        assert member is not None
        about_it = () if member.update.standing is Standing.ALIVE else (member.update,)
        rumours = (*about_it, *self._outbox.take_rumours())[:RUMOURS_PER_PACKET]
        self._outbox.send(member.update.address, Ping(probe.sequence, node, self._config.node_id, rumours))

    def advance(self, now_s: float, suspects: Collection[NodeId]) -> list[NodeId]:
        """Move due probes on.  Returns the targets that answered in no way."""
        silent = []
        for probe in [probe for probe in self._probes.values() if probe.next_deadline_s <= now_s]:
            if not probe.is_indirect:
                self._ask_others(probe, now_s, suspects)
                continue
            self._take(probe.sequence, probe.target)
            if probe.no_count == 0:  # a helper's "no" shows that our own ears work
                self._health.probe_missed()
            silent.append(probe.target)
        for number in [number for number, relay in self._relays.items() if relay.deadline_s <= now_s]:
            self._answer(self._relays.pop(number), is_reached=False)
        return silent

    def send_failed(self, node: NodeId, now_s: float, suspects: Collection[NodeId]) -> None:
        """The kernel refused a packet to a live member: a failed direct probe; asking others begins at once."""
        number = self._probed.get(node)
        if number is not None:
            probe = self._probes[number]
        elif len(self._probes) < CONCURRENT_PROBES:
            probe = self._start(node, now_s)
        else:
            return
        if not probe.is_indirect:
            self._ask_others(probe, now_s, suspects)

    def acknowledged(self, sequence: int, node: NodeId) -> None:
        """A direct answer, to our own probe or to one that we make for another."""
        relay = self._relays.get(sequence)
        if relay is not None and relay.target == node:
            del self._relays[sequence]
            self._answer(relay, is_reached=True)
        self._succeed(sequence, node)

    def acknowledged_by_stream(self, sequence: int, node: NodeId) -> None:
        """The target lives; its UDP does not get through."""
        self._succeed(sequence, node, degraded_udp=True)

    def relayed(self, answer: RelayAnswer) -> None:
        """A helper's answer."""
        probe = self._probes.get(answer.sequence)
        if probe is None or probe.target != answer.target:
            return
        if answer.is_reached:
            self._succeed(answer.sequence, answer.target, indirect_only=True)
        else:
            probe.no_count += 1

    def relay(self, request: PingRequest, source: Address, now_s: float) -> bool:
        """Probe for another; False if too many are under way."""
        if len(self._relays) >= RELAYS_MAX:
            return False
        number = self._next_sequence()
        deadline_s = now_s + request.timeout_ms / 1000 * RELAY_SHARE
        self._relays[number] = Relay(source, request.sequence, request.target, deadline_s)
        self._outbox.send((request.host, request.port), Ping(number, request.target, self._config.node_id))
        return True

    def postpone(self, lag_s: float) -> None:
        """This node stood still: nobody is judged by answers that lie unread."""
        for probe in self._probes.values():
            probe.postpone(lag_s)

    def validate(self) -> None:
        """Re-derive the cross-references; AssertionError if one is wrong."""
        assert {probe.target: number for number, probe in self._probes.items()} == self._probed
        assert len(self._probes) <= CONCURRENT_PROBES
        assert len(self._relays) <= RELAYS_MAX

    def _next_target(self) -> NodeId | None:
        """The next live member without a probe under way; None if there is none."""
        for _ in range(2):
            while (node := self._order.pop()) is not None:
                member = self._roster.get(node)
                if member is not None and member.is_live and node not in self._probed:
                    return node
            self._order.restart(self._roster.live)
        return None

    def _start(self, node: NodeId, now_s: float) -> Probe:
        factor = self._health.multiplier
        indirect_at_s = now_s + PROBE_TIMEOUT_S * factor
        probe = Probe(self._next_sequence(), node, indirect_at_s, now_s + self._config.probe_period_s * factor)
        self._probes[probe.sequence] = probe
        self._probed[node] = probe.sequence
        return probe

    def _ask_others(self, probe: Probe, now_s: float, suspects: Collection[NodeId]) -> None:
        """Second half of a probe: through helpers, and over the stream."""
        probe.is_indirect = True
        target = self._roster.get(probe.target)
        assert target is not None
        host, port = target.update.address
        timeout_ms = int(1000 * max(0.0, probe.deadline_s - now_s))
        request = PingRequest(probe.sequence, probe.target, host, port, self._config.node_id, timeout_ms)
        for helper in self._roster.sample(INDIRECT_HELPERS, excluding={*suspects, *self._probed}):
            self._outbox.send_to(helper, request)
        self._outbox.emit(SendPeer(probe.target, StreamPing(probe.sequence, probe.target)))

    def _succeed(
        self, sequence: int, target: NodeId, *, degraded_udp: bool = False, indirect_only: bool = False
    ) -> None:
        if self._take(sequence, target) is None:
            return
        self._health.probe_acknowledged()
        member = self._roster.get(target)
        if member is not None:
            member.degraded_udp, member.indirect_only = degraded_udp, indirect_only

    def _take(self, sequence: int, target: NodeId) -> Probe | None:
        """The probe that this answers, no longer under way; None for a late, doubled or foreign answer."""
        probe = self._probes.get(sequence)
        if probe is None or probe.target != target:
            return None
        del self._probes[sequence], self._probed[target]
        return probe

    def _answer(self, relay: Relay, *, is_reached: bool) -> None:
        rumours = self._outbox.take_rumours()
        answer = RelayAnswer(relay.sequence, self._config.node_id, relay.target, is_reached, rumours)
        self._outbox.send(relay.requester, answer)

    def _next_sequence(self) -> int:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        return self._sequence
