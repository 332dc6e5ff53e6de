"""The one shape of a node's machines: what each takes, when its time has come, and what must hold of its state."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from swarmsched.clock import Clock
from swarmsched.facts import Fact
from swarmsched.fields import Value
from swarmsched.gossip.member import MemberChanged
from swarmsched.jobs.update import EndConfirmed, RecordAccepted, Request, Result
from swarmsched.negotiation.record_writer import ShepherdEffect


class Answered(Value):
    """The register has answered a request: told to those who take such results, and to its asker."""

    request: Request
    result: Result


NodeEffect = ShepherdEffect | MemberChanged | RecordAccepted | EndConfirmed | Answered | Fact
"""What a machine gives back: effects for the driver, and facts for other machines."""

Taker = Callable[[Any, Clock], Iterable[NodeEffect] | None]
"""Takes one kind of thing: an event, `PeerMessageReceived` with that kind of message, `Admitted` with that kind of
command, a fact, or `Answered`."""


class Machine(Protocol):
    """A part of a node that others reach by what it takes."""

    @property
    def takes(self) -> Mapping[object, Taker]:
        """By type (of the event, message, command, fact or result), and answers to its own requests by asker."""

    @property
    def next_deadline_s(self) -> float:
        """When `TimerFired` is due; it changes only by what is taken, or by what another machine asks of this one."""

    def validate(self) -> None:
        """Raise AssertionError when the state contradicts itself.  For tests and the simulator."""
