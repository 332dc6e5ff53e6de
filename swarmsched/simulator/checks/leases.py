"""Invariant "leases": no node hosts more than a quarter of its available memory, or for an attempt that is long over.

Hosted is what a driver was told to host, and a range that nobody dropped goes with its agent.  An attempt is over when
no process of it is left on any machine.
"""

from collections.abc import Sequence
from typing import ClassVar

from swarmsched.effects import DropShard, Effect, HostShard
from swarmsched.ids import AttemptKey, NodeId
from swarmsched.shards import RangeKey, ShardOrder
from swarmsched.simulator.checks.checker import Checker, Topic
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

INVARIANT = "leases"
OF_MEMORY = 4
ELEMENT_BYTES = 14  # and one for each learner
LEFT_OVER_S = 30.0
"""A lease ends 20 s after it was renewed last; a renewal may be late."""


class LeaseChecker(Checker):
    """Keeps a book of what is hosted where."""

    PERFORMED: ClassVar[tuple[Topic, ...]] = (HostShard, DropShard)

    def __init__(self) -> None:
        self._hosted: dict[NodeId, dict[RangeKey, ShardOrder]] = {}
        self._idle_s: dict[tuple[NodeId, RangeKey], float] = {}  # since when hosted for an attempt that is over

    def performed(self, host: Host, effect: Effect) -> None:
        """Count what one more takes."""
        book = self._hosted.setdefault(host.node_id, {})
        if isinstance(effect, DropShard):
            book.pop(effect.range, None)
            self._idle_s.pop((host.node_id, effect.range), None)
            return
        assert isinstance(effect, HostShard)
        order = effect.order
        book[order.key] = order
        taken = sum(each.size * (ELEMENT_BYTES + len(each.learners)) for each in book.values())
        given = host.available_bytes // OF_MEMORY
        if taken > given:
            raise Violation(INVARIANT, f"{host.node_id} hosts {taken} bytes with {order.key}, of {given} that it gives")

    def agent_crashed(self, host: Host) -> None:
        """The aggregator ends with its agent."""
        for key in self._hosted.pop(host.node_id, {}):
            self._idle_s.pop((host.node_id, key), None)

    def looked(self, hosts: Sequence[Host]) -> None:
        """Look for what should be gone."""
        alive = {attempt for host in hosts for attempt in _attempts(host)}
        for host in hosts:
            for key in self._hosted.get(host.node_id, ()):
                place = (host.node_id, key)
                if key.attempt_key in alive or host.is_paused:
                    self._idle_s.pop(place, None)
                    continue
                since_s = self._idle_s.setdefault(place, host.loop.now_s)
                if host.loop.now_s > since_s + LEFT_OVER_S:
                    problem = f"{host.node_id} hosts {key} for {host.loop.now_s - since_s:.0f} s after its attempt"
                    raise Violation(INVARIANT, problem)


def _attempts(host: Host) -> set[AttemptKey]:
    """With processes on that machine."""
    return {task.key.of_attempt for task in host.tasks.running}
