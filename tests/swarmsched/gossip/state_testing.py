"""A virtual network of state planes for tests and benchmarks: seeded delay and loss, virtual time, bytes counted.

Only this plane: who is alive is set by hand.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterable

from swarmsched.effects import SendDatagram, SendPeer
from swarmsched.events import DatagramReceived, PeerMessageReceived, TimerFired
from swarmsched.gossip.exchange import STATE_MESSAGES
from swarmsched.gossip.record import GpuGroup, NodeRecord
from swarmsched.gossip.setting import CheckSetting
from swarmsched.gossip.state import MemberRef, StateConfig, StateEffect, StateEvent, StatePlane
from swarmsched.ids import Address, NodeId
from swarmsched.view import PolicySetting
from swarmsched.wire.codec import Codec

GENERATION = 1_700_000_000


class StateNetwork:
    """Nodes n000, n001, ...; `effects` gathers what is not sent anywhere, e.g. Persist."""

    def __init__(
        self,
        count: int,
        seed: int,
        *,
        loss_ratio: float = 0.0,
        delay_s: float = 0.002,
        check_setting: CheckSetting | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1_000.0
        self.loss_ratio, self.delay_s = loss_ratio, delay_s
        self.planes: dict[NodeId, StatePlane] = {}
        self.sent_bytes: Counter[NodeId] = Counter()
        self.effects: list[tuple[NodeId, StateEffect]] = []
        self.down: set[NodeId] = set()
        self.cut: set[tuple[NodeId, NodeId]] = set()  # (from, to) links that lose everything
        self._check_setting = check_setting or _accept
        self._codec = Codec(STATE_MESSAGES)
        self._queue: list[tuple[float, int, NodeId, StateEvent]] = []
        self._sequence = 0
        self._timers: dict[NodeId, float] = {}
        for index in range(count):
            self.add(NodeId(f"n{index:03}"), seed * 1_000 + index)

    @property
    def nodes(self) -> list[NodeId]:
        """All names."""
        return list(self.planes)

    def add(self, node: NodeId, seed: int, generation: int = GENERATION) -> StatePlane:
        """A new node (or a restarted one); call `connect` afterwards."""
        config = StateConfig(node, generation)
        self.planes[node] = StatePlane(config, random.Random(seed), self._check_setting)
        self._timers.pop(node, None)
        return self.planes[node]

    def connect(self) -> None:
        """Tell every live node of every other live one."""
        members = [MemberRef(node, self.address(node)) for node in self.planes]
        for node, plane in self.planes.items():
            for member in members:
                is_gone = member.node_id in (node, *self.down) or (node, member.node_id) in self.cut
                if is_gone:
                    plane.drop_peer(member.node_id)
                else:
                    plane.put_peer(member)
            self._arm(node)

    def address(self, node: NodeId) -> Address:
        """Where a node listens."""
        return ("10.0.0.1", 1_000 + list(self.planes).index(node))

    def perform(self, node: NodeId, effects: Iterable[StateEffect]) -> None:
        """Carry out the effects of a step or of a direct call."""
        for effect in effects:
            match effect:
                case SendDatagram(destination, payload):
                    self.sent_bytes[node] += len(payload)
                    target = list(self.planes)[destination[1] - 1_000]
                    self._deliver(node, target, DatagramReceived(self.address(node), payload), self.loss_ratio)
                case SendPeer(recipient, message):
                    data = self._codec.encode(message)
                    self.sent_bytes[node] += len(data)
                    self._deliver(node, recipient, PeerMessageReceived(node, self._codec.decode(data)), 0.0)
                case _:
                    self.effects.append((node, effect))
        self._arm(node)

    def run(self, duration_s: float, *, validate: bool = False) -> None:
        """Let virtual time pass."""
        end_s = self.now_s + duration_s
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, node, event = heapq.heappop(self._queue)
            if node in self.down or (isinstance(event, TimerFired) and self._timers.get(node) != self.now_s):
                continue
            if isinstance(event, TimerFired):
                del self._timers[node]
            self.perform(node, self.planes[node].step(event, self.now_s))
            if validate:
                self.planes[node].validate()
        self.now_s = end_s

    def publish(self, node: NodeId, draft: NodeRecord) -> None:
        """Give a node something to say of itself."""
        self.perform(node, self.planes[node].publish_node(draft, self.now_s))

    def versions(self, viewer: NodeId) -> dict[NodeId, tuple[int, int]]:
        """What a node knows of all."""
        return {status.record.node_id: status.record.stamp for status in self.planes[viewer].node_records(self.now_s)}

    def _deliver(self, source: NodeId, target: NodeId, event: StateEvent, loss_ratio: float) -> None:
        if (source, target) in self.cut or self.rng.random() < loss_ratio:
            return
        self._put(self.now_s + self.rng.uniform(0.5, 1.5) * self.delay_s, target, event)

    def _put(self, at_s: float, node: NodeId, event: StateEvent) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (at_s, self._sequence, node, event))

    def _arm(self, node: NodeId) -> None:
        deadline_s = max(self.now_s, self.planes[node].next_deadline_s)
        if deadline_s < 1e18 and self._timers.get(node) != deadline_s:
            self._timers[node] = deadline_s
            self._put(deadline_s, node, TimerFired())


def sample_record(node: NodeId, *, free: int = 8, count: int = 8, utilisation_percent: int = 0) -> NodeRecord:
    """A server with eight GPUs."""
    return NodeRecord(
        node,
        groups=(GpuGroup("NVIDIA H100 80GB HBM3", count, free, 80 * 2**30),),
        cpus_total=96,
        cpus_free=96,
        memory_total_bytes=2**40,
        memory_free_bytes=2**40,
        gpu_utilisation_percent=utilisation_percent,
        software_version="0.1.0",
    )


def _accept(setting: PolicySetting) -> None:
    """Any setting will do."""
