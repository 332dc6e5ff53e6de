"""What a checker may see of a simulated swarm."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from swarmsched.effects import Effect
from swarmsched.events import Event
from swarmsched.ids import NodeId
from swarmsched.simulator.tasks import RunningTask, TaskChange

if TYPE_CHECKING:
    from swarmsched.simulator.host import Host


class InvariantViolated(AssertionError):
    """A rule is broken: its name, and what was seen."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


class Observer(Protocol):
    """A checker: sees every step and every performed effect, changes nothing, raises AssertionError.

    It may also have any method of `MomentObserver`.
    """

    def stepped(self, host: "Host", event: Event, effects: Sequence[Effect]) -> None:
        """`host.node` has handled the event; its effects are not performed yet."""

    def performed(self, host: "Host", effect: Effect) -> None:
        """The effect takes place now; everything before it is durable."""


class MomentObserver(Protocol):
    """Further moments that an observer may want to see."""

    def agent_started(self, host: "Host") -> None:
        """An agent has started: `host.node` is new, `host.generation` and `host.disk` are what it started on."""

    def agent_crashed(self, host: "Host") -> None:
        """The agent is dead; what it had not made durable is lost.  `host.node` is None."""

    def disk_wiped(self, host: "Host") -> None:
        """The machine was switched off and has a new disk."""

    def name_shared(self, node: NodeId) -> None:
        """From now on a second machine may answer under this name; its steps are not seen."""

    def task_changed(self, host: "Host", task: RunningTask, change: TaskChange) -> None:
        """Processes of a task were started, frozen, thawed, told another batch, or have all ended, with or without an
        agent."""


def hooks(observers: Sequence[Observer], name: str) -> tuple[Callable[..., None], ...]:
    """That method of all observers that have it."""
    return tuple(hook for hook in (getattr(observer, name, None) for observer in observers) if hook is not None)
