"""CPU time of plane A: a step of a probe or an acknowledgement, the codec, and sealing."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarmsched.events import DatagramReceived, TimerFired
from swarmsched.fields import U32, U53, NodeName, Seconds
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import MEMBERSHIP_CODEC, Ack, Gossip, Ping, Standing, Update
from swarmsched.ids import NodeId
from swarmsched.wire.codec import Codec
from swarmsched.wire.sealing import Keyring, Sealer

MEMBERS = 30
RUNS = 7
CALLS = 2_000


@dataclass(frozen=True, slots=True)
class FiveFields:
    """A message of usual size."""

    job: NodeName
    epoch: U32
    version: U53
    ttl_s: Seconds
    is_held: bool


def run() -> list[tuple[str, float, str]]:
    """(measure, median of several runs, unit)."""
    codec = Codec({1: FiveFields})
    message = FiveFields(NodeId("node-01"), 3, 1_700_000_000, 5.0, True)
    encoded = codec.encode(message)
    return [
        ("membership: step of a probe", _probe_step_us(), "us"),
        ("membership: step of an acknowledgement", _ack_step_us(), "us"),
        ("codec: encode 5 fields", _median_us(lambda _: codec.encode(message)), "us"),
        ("codec: decode 5 fields", _median_us(lambda _: codec.decode(encoded)), "us"),
        ("sealing: seal and open 60 bytes", _sealing_us(60), "us"),
        ("sealing: seal and open 1200 bytes", _sealing_us(1_200), "us"),
    ]


def _probe_step_us() -> float:
    membership = _settled()
    events = [
        DatagramReceived(("10.0.0.2", 7), MEMBERSHIP_CODEC.encode(Ping(number, NodeId("node-00"), NodeId("node-01"))))
        for number in range(CALLS)
    ]
    return _median_us(lambda index: membership.step(events[index], 100.0))


def _ack_step_us() -> float:
    """Acknowledgements that no probe waits for take the same path but for two dictionary entries."""
    membership = _settled()
    events = [
        DatagramReceived(
            ("10.0.0.2", 7), MEMBERSHIP_CODEC.encode(Ack(1_000_000 + number, NodeId("node-01"), 1_000, 0, b"\1" * 16))
        )
        for number in range(CALLS)
    ]
    return _median_us(lambda index: membership.step(events[index], 100.0))


def _sealing_us(size_bytes: int) -> float:
    keyring = Keyring(bytes(32))
    sender = Sealer(keyring=keyring, label="bench", instance_id=b"s" * 16)
    receiver = Sealer(keyring=keyring, label="bench", instance_id=b"r" * 16)
    payload = bytes(size_bytes)
    return _median_us(lambda _: receiver.open(sender.seal(payload)))


def _settled() -> Membership:
    """A member of a swarm of 30 with no news to spread."""
    config = MembershipConfig(
        node_id=NodeId("node-00"), address=("10.0.0.1", 7), generation=1_000, instance_id=b"\0" * 16
    )
    membership = Membership(config, random.Random(1))
    membership.step(TimerFired(), 0.0)
    for number in range(1, MEMBERS):
        claim = Update(
            NodeId(f"node-{number:02}"), "10.0.0.2", 7 + number, 1_000, 0, Standing.ALIVE, bytes([number]) * 16
        )
        membership.step(DatagramReceived(("10.0.0.2", 7), MEMBERSHIP_CODEC.encode(Gossip((claim,)))), 0.1)
    now_s = 0.1
    while membership._outbox.rumours:
        now_s += 0.2
        membership.step(TimerFired(), now_s)
    membership._next_deadline_s = membership._next_probe_s = membership._next_hash_s = 1_000.0
    membership._prober._probes.clear()
    membership._prober._probed.clear()
    membership._suspicions._by_node.clear()
    return membership


def _median_us(call: Callable[[int], object]) -> float:
    times_us = []
    for _ in range(RUNS):
        started = time.process_time()
        for index in range(CALLS):
            call(index)
        times_us.append((time.process_time() - started) / CALLS * 1e6)
    return statistics.median(times_us)
