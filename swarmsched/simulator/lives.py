"""Invariant 7, from the beginning of each life: an agent never starts under a generation that its name has used.

Peers let a higher generation win whatever they knew of a lower one; two lives under one generation would be one member
to them.  A machine that has lost its disk may have forgotten; then the time of day stands in, and peers correct it.
"""

from collections.abc import Sequence

from swarmsched.effects import Effect
from swarmsched.events import Event
from swarmsched.ids import NodeId
from swarmsched.simulator.host import Host
from swarmsched.simulator.observer import InvariantViolated


class LifeChecker:
    """The highest generation of each machine since its disk was new."""

    def __init__(self) -> None:
        self._highest: dict[NodeId, int] = {}

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Nothing to see here."""

    def performed(self, host: Host, effect: Effect) -> None:
        """Nothing to see here."""

    def agent_started(self, host: Host) -> None:
        """Compare with the lives before."""
        highest = self._highest.get(host.node_id, 0)
        if host.generation <= highest:
            used = f"generation {host.generation} after {highest}"
            raise InvariantViolated("7", f"invariant 7: {host.node_id} starts under {used}")
        self._highest[host.node_id] = host.generation

    def disk_wiped(self, host: Host) -> None:
        """A machine that lost its disk may have forgotten."""
        self._highest.pop(host.node_id, None)
