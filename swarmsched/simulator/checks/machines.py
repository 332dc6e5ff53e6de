"""Every machine's own `validate` ("machines"): its cross-references, and the bounds of its queues (invariant 11).

One whose deadline is always due would have its story never end ("spins").
"""

from collections.abc import Sequence
from typing import ClassVar

from swarmsched.effects import Effect
from swarmsched.events import Event, TimerFired
from swarmsched.ids import NodeId
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

INVARIANT = "machines"
INTERVAL = 1_000
TIMERS_MOST = 500
"""Of one node in a virtual second: 30 were the most in 60 stories, and one that is always due has 1,000."""


class MachineChecker(Checker):
    """The node of each `interval`-th step of the swarm: it costs more than the step.  And how often each is due."""

    SEES_ALL_STEPS: ClassVar[bool] = True

    def __init__(self, interval: int = INTERVAL) -> None:
        self._interval = interval
        self._left = interval
        self._timers: dict[NodeId, int] = {}  # that have fired in this second
        self._second_ends_s = 1.0

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Validate the node that the step was on."""
        if type(event) is TimerFired:
            self._fired(host)
        self._left -= 1
        if self._left:
            return
        self._left = self._interval
        assert host.node is not None
        try:
            host.node.validate()
        except AssertionError as error:
            raise Violation(INVARIANT, f"{host.node_id}: {error}") from error

    def _fired(self, host: Host) -> None:
        if host.loop.now_s >= self._second_ends_s:
            self._timers, self._second_ends_s = {}, host.loop.now_s + 1.0
        count = self._timers[host.node_id] = self._timers.get(host.node_id, 0) + 1
        if count > TIMERS_MOST:
            raise Violation("spins", f"{host.node_id} was due {count} times within a virtual second")
