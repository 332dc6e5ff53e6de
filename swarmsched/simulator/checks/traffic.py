"""Invariant 11: what a node sends per second stays under the cap, and no packet is larger than it may be.

The state plane's cap follows the size of the swarm; it holds for datagrams and for its messages over the peer channel,
each with its own burst.  The liveness plane has no cap in bytes; its packets are bounded by its own pace and by
what it must answer.  Windows are counted in virtual time, with room for a clock that runs fast.
"""

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

from swarmsched.effects import Effect, SendDatagram, SendPeer
from swarmsched.events import DatagramReceived, Event
from swarmsched.gossip.exchange import FullStateAnswer, StateDelta, StateDigest
from swarmsched.ids import NodeId
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

WINDOW_S = 10.0
CLOCK_RATIO = 1.06
PACKET_BYTES_MAX = 1_200  # the default of `packet_bytes_max`
PACKET_OVERHEAD_BYTES = 72  # IP, UDP and sealing, counted against the cap
STATE_CAPS = ((30, 5_000.0), (100, 12_000.0), (1_000, 40_000.0), (3_000, 120_000.0), (10_000, 200_000.0))
"""(members, bytes per second): docs/explanation/protocol.md, plane B; between them straight on logarithmic axes."""

PACKET_BURST_S, STREAM_BURST_S = 1.0, 20.0
LIVENESS_PACKETS_PER_S = 60.0  # rumours to 3 peers and probes, both five times over: after send errors, at joins
LIVENESS_ANSWERS_MAX = 5.0  # per packet received: an acknowledgement, and requests to three helpers
FIRST_STATE_KIND = 32  # kinds of gossip datagrams: 1 to 31 are plane A's, 32 to 63 plane B's


class _Window:
    """What one machine has sent and received since `since_s`."""

    __slots__ = ("liveness_packets", "members", "received", "since_s", "state_bytes", "stream_bytes")

    def __init__(self, since_s: float, members: int) -> None:
        self.since_s = since_s
        self.members = members
        self.state_bytes = 0
        self.stream_bytes = 0
        self.liveness_packets = 0
        self.received = 0


class TrafficChecker(Checker):
    """Counts what every machine sends."""

    EVENTS = (DatagramReceived,)
    EFFECTS: ClassVar = (SendDatagram, StateDigest, StateDelta, FullStateAnswer)

    def __init__(self) -> None:
        self.busiest_bytes_per_s = 0.0  # of the state plane of one node, over a window
        self._windows: dict[NodeId, _Window] = {}

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Count the step's packets and messages."""
        window = self._windows.get(host.node_id)
        now_s = host.loop.now_s
        if window is None or now_s - window.since_s >= WINDOW_S:
            if window is not None:
                self._close(host, window, now_s)
            window = self._windows[host.node_id] = _Window(now_s, len(self._windows) + (window is None))
        if type(event) is DatagramReceived:
            window.received += 1
        for effect in effects:
            if type(effect) is SendDatagram:
                self._count(host, window, effect.payload)
            elif type(effect) is SendPeer:
                window.stream_bytes += _stream_bytes(effect.message)

    def _count(self, host: Host, window: _Window, payload: bytes) -> None:
        size = len(payload)
        if size > PACKET_BYTES_MAX:
            raise Violation(11, f"{host.node_id} sends a packet of {size} bytes")
        if payload[0] >= FIRST_STATE_KIND:
            window.state_bytes += size + PACKET_OVERHEAD_BYTES
        else:
            window.liveness_packets += 1

    def _close(self, host: Host, window: _Window, now_s: float) -> None:
        span_s = (now_s - window.since_s) * CLOCK_RATIO
        cap = state_cap(max(window.members, len(self._windows)))
        self.busiest_bytes_per_s = max(self.busiest_bytes_per_s, window.state_bytes / max(span_s, WINDOW_S))
        for name, count, most in (
            ("bytes of state in packets", window.state_bytes, cap * (span_s + PACKET_BURST_S)),
            ("bytes of state over the peer channel", window.stream_bytes, cap * (span_s + STREAM_BURST_S)),
            (
                "packets of the liveness plane",
                window.liveness_packets,
                LIVENESS_PACKETS_PER_S * (span_s + PACKET_BURST_S) + LIVENESS_ANSWERS_MAX * window.received,
            ),
        ):
            if count > most:
                raise Violation(11, f"{host.node_id} sent {count} {name} in {span_s:.1f} s; at most {most:.0f}")

    def agent_started(self, host: Host) -> None:
        """A new life begins with full budgets; what the old one sent is judged by what it had."""
        window = self._windows.pop(host.node_id, None)
        if window is not None:
            self._close(host, window, host.loop.now_s)
        self._windows[host.node_id] = _Window(host.loop.now_s, len(self._windows) + 1)


def state_cap(members: int) -> float:
    """Most bytes per second of the state plane in a swarm of that size."""
    if members <= STATE_CAPS[0][0]:
        return STATE_CAPS[0][1]
    for (low, low_cap), (high, high_cap) in itertools.pairwise(STATE_CAPS):
        if members <= high:
            part = math.log(members / low) / math.log(high / low)
            return low_cap * math.exp(part * math.log(high_cap / low_cap))
    return STATE_CAPS[-1][1]


def _stream_bytes(message: object) -> int:
    """A lower estimate of a message's size, without encoding it."""
    if isinstance(message, StateDigest):
        return len(message.nodes) + len(message.cards) + len(message.locations) + len(message.buckets)
    if isinstance(message, StateDelta | FullStateAnswer):
        return sum(len(parcel.body) for parcel in message.parcels)
    return 0
