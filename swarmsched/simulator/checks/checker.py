"""What all checkers have in common: which moments they want to see, and hooks that do nothing unless overridden."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from swarmsched.effects import Announce, Effect, Persist, ReplyToClient, SendPeer
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.ids import NodeId
from swarmsched.simulator.host import Host
from swarmsched.simulator.tasks import RunningTask, TaskChange

Topic = type | str
"""What a checker asks for: the class of an event, effect, peer message or reply, the room of a write, the kind of an
announcement."""


_READERS: Mapping[type, Callable[[Any], Topic]] = {
    PeerMessageReceived: lambda event: type(event.message),
    SendPeer: lambda effect: type(effect.message),
    ReplyToClient: lambda effect: type(effect.reply),
    Persist: attrgetter("room"),
    Announce: attrgetter("kind"),
}


def topic_of(thing: Event | Effect) -> Topic:
    """The topic of an event or effect."""
    kind = type(thing)
    read = _READERS.get(kind)
    return kind if read is None else read(thing)


class Checker:
    """An observer.  It is shown a step if the event or one of its effects is among its topics."""

    EVENTS: ClassVar[tuple[Topic, ...]] = ()
    EFFECTS: ClassVar[tuple[Topic, ...]] = ()  # of a step, not performed yet
    PERFORMED: ClassVar[tuple[Topic, ...]] = ()
    SEES_ALL_STEPS: ClassVar[bool] = False
    SEES_ALL_PERFORMED: ClassVar[bool] = False

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """`host.node` has handled the event; its effects are not performed yet."""

    def performed(self, host: Host, effect: Effect) -> None:
        """The effect takes place now; everything before it is durable."""

    def agent_started(self, host: Host) -> None:
        """`host.node` is new: what it knows, it has from its disk."""

    def agent_crashed(self, host: Host) -> None:
        """The agent is dead; what it had not made durable is lost."""

    def disk_wiped(self, host: Host) -> None:
        """The machine's disk is gone, and with it all that was durable there."""

    def name_shared(self, node: NodeId) -> None:
        """A second machine, which is not seen, may answer under this name from now on."""

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """Processes of a task were started, frozen, thawed, or have all ended, whether or not an agent lives."""

    def looked(self, hosts: Sequence[Host]) -> None:
        """A full check, now and then.  `hosts` are all machines that were ever seen."""

    def finished(self, hosts: Sequence[Host]) -> None:
        """The run is over."""
