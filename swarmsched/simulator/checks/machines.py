"""Every machine's own `validate` ("machines"): its cross-references, and the bounds of its queues (invariant 11)."""

from collections.abc import Sequence
from typing import ClassVar

from swarmsched.effects import Effect
from swarmsched.events import Event
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

INVARIANT = "machines"
INTERVAL = 1_000


class MachineChecker(Checker):
    """The node of each `interval`-th step of the swarm: it costs more than the step."""

    SEES_ALL_STEPS: ClassVar[bool] = True

    def __init__(self, interval: int = INTERVAL) -> None:
        self._interval = interval
        self._left = interval

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Validate the node that the step was on."""
        self._left -= 1
        if self._left:
            return
        self._left = self._interval
        assert host.node is not None
        try:
            host.node.validate()
        except AssertionError as error:
            raise Violation(INVARIANT, f"{host.node_id}: {error}") from error
