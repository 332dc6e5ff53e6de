"""One job's shepherd: the only writer of its record, from acceptance to the last exit code.

A word comes in (`told`), changes what is known or wished (`heard`), and what is due follows from that and from the
decided record (`due`).  Register updates run one at a time and in order.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from swarmsched.clock import Clock
from swarmsched.errors import InvalidTransition
from swarmsched.events import PeerMessageReceived, PeerSendFailed, TimerFired
from swarmsched.fields import Value
from swarmsched.jobs.update import UpdateRefused
from swarmsched.ledger.message import TaskEstimate
from swarmsched.negotiation.due import due
from swarmsched.negotiation.heard import HEARD
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.negotiation.told import SteppedDown

TRAIL_LENGTH = 50
ROUTINE = (TimerFired, TaskEstimate)  # what comes all the time is of interest only where it changes something


class TrailStep(Value):
    """Something that a shepherd was told, by whom, and the changes of the record that it wished then."""

    utc_s: float
    told: str
    by: str
    changes: tuple[str, ...]


class JobShepherd(ShepherdState):
    """Acts for one job under one epoch."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._trail: deque[TrailStep] = deque(maxlen=TRAIL_LENGTH)

    def step(self, told: object, clock: Clock) -> list[ShepherdEffect]:
        """Take one word, of a kind that `HEARD` names, and do what is due.

        Raises `InvalidTransition`, with the last steps as notes, where it would have the record change as none may.
        """
        self.see(clock.now_s, clock.utc_s)
        subject = told.message if isinstance(told, PeerMessageReceived) else told
        try:
            effects = HEARD[type(subject)](self, told)
            if isinstance(told, UpdateRefused | SteppedDown):  # what is due still would be refused at once again
                effects += [*self.writer.go_on(self.decided), *self.answered_clients()]
            else:
                effects += due(self)
        except InvalidTransition as error:
            self._note(subject, told, clock)
            error.add_note("\n".join(told_trail(self.trail)))
            raise
        self._note(subject, told, clock)
        return effects

    def _note(self, subject: object, told: object, clock: Clock) -> None:
        changes = self.writer.take_wished()
        if changes or not isinstance(subject, ROUTINE):
            self._trail.append(TrailStep(clock.utc_s, type(subject).__name__, _by(told), changes))

    @property
    def trail(self) -> tuple[TrailStep, ...]:
        """What it was told last, the oldest first."""
        return tuple(self._trail)


def told_trail(trail: Iterable[TrailStep]) -> list[str]:
    """A trail for people, one line a step."""
    return [
        f"{each.utc_s:.3f} {each.told}{f' by {each.by}' if each.by else ''}"
        f"{' -> ' + ', '.join(each.changes) if each.changes else ''}"
        for each in trail
    ]


def _by(told: Any) -> str:
    if isinstance(told, PeerMessageReceived):
        return str(told.sender)
    if isinstance(told, PeerSendFailed):
        return str(told.recipient)
    return str(getattr(told, "node", ""))
