"""CPU time of one step through the whole node, as each packet of the liveness plane costs it."""

import random
import statistics
import time
from collections.abc import Sequence

from swarmsched.effects import Effect, SendDatagram
from swarmsched.events import DatagramReceived, Event, TimerFired
from swarmsched.gossip.message import MEMBERSHIP_CODEC, Ack, Gossip, Ping, Standing, Update, is_membership_payload
from swarmsched.ids import NodeId
from swarmsched.node import Node, NodeConfig, Restored

MEMBERS = 30
RUNS = 7
CALLS = 2_000
QUIET_S = 60.0  # by then nothing is left to spread
ME, PEER = NodeId("node-00"), NodeId("node-01")
ADDRESS = ("10.0.0.2", 7)


def run() -> list[tuple[str, float, str]]:
    """(measure, median of several runs, unit)."""
    pings = [Ping(number, ME, PEER) for number in range(CALLS)]
    # No probe waits for these; they take the path of those that one waits for but for two dictionary entries.
    acks = [Ack(1_000_000 + number, PEER, 1_000, 0, b"\1" * 16) for number in range(CALLS)]
    return [
        ("node: step of a probe (<= 20)", _median_us([_arrived(ping) for ping in pings]), "us"),
        ("node: step of an acknowledgement (<= 20)", _median_us([_arrived(ack) for ack in acks]), "us"),
    ]


def _arrived(message: object) -> DatagramReceived:
    return DatagramReceived(ADDRESS, MEMBERSHIP_CODEC.encode(message))


def _median_us(events: Sequence[Event]) -> float:
    node, now_s = _settled()
    times_us = []
    for _ in range(RUNS):
        started_s = time.process_time()
        for event in events:
            node.step(event, now_s)
        times_us.append((time.process_time() - started_s) / len(events) * 1e6)
    return statistics.median(times_us)


def _settled() -> tuple[Node, float]:
    """A node of a swarm of 30 with no news to spread; its timers are not due again at the returned time."""
    node = Node(NodeConfig(ME, ("10.0.0.1", 7), 1_000, b"\0" * 16, 1, 0.0, 0.0), Restored(), random.Random(1))
    node.step(TimerFired(), 0.0)
    for number in range(1, MEMBERS):
        name = NodeId(f"node-{number:02}")
        claim = Update(name, "10.0.0.2", 7 + number, 1_000, 0, Standing.ALIVE, bytes([number]) * 16)
        node.step(DatagramReceived(ADDRESS, MEMBERSHIP_CODEC.encode(Gossip((claim,)))), 0.1)
    now_s = 0.1
    while now_s < QUIET_S:
        now_s = max(now_s + 0.001, node.next_deadline_s)
        for effect in node.step(TimerFired(), now_s):
            _answer(node, effect, now_s)
    return node, now_s


def _answer(node: Node, effect: Effect, now_s: float) -> None:
    """Every other member is well and acknowledges at once."""
    if not isinstance(effect, SendDatagram) or not is_membership_payload(effect.payload):
        return
    message = MEMBERSHIP_CODEC.decode(effect.payload)
    if isinstance(message, Ping):
        number = int(message.target.removeprefix("node-"))
        ack = Ack(message.sequence, message.target, 1_000, 0, bytes([number]) * 16)
        node.step(DatagramReceived(effect.destination, MEMBERSHIP_CODEC.encode(ack)), now_s)


if __name__ == "__main__":
    for measure, value, unit in run():
        print(f"{measure}: {value:.1f} {unit}")
