"""What a shepherd says to single owners of its job, and the questions that it repeats until they are answered."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count

from swarmsched.effects import SendPeer
from swarmsched.ids import NodeId, Place
from swarmsched.ledger.message import OwnerAnswer, OwnerCommand, StatusRequest
from swarmsched.record import JobRecord

ID_RANGE, ID_RANGES = 2**20, 4_000  # all below the ids that are set apart at the end of 32 bits
Kind = Callable[..., OwnerCommand]
ASK_AGAIN_S = 2.0
ASK_AGAIN_S_MAX = 30.0


class Commands:
    """Commands of one shepherd, each with an id of its own.

    Every epoch has its range of ids: a late answer to a command of an earlier life must not pass for an answer to
    one of this life.
    """

    def __init__(self, me: NodeId, epoch: int) -> None:
        self._me = me
        self.ids: Iterator[int] = count(1 + (epoch % ID_RANGES) * ID_RANGE)

    def to(self, place: Place, kind: Kind, record: JobRecord, attempt: int, *more: object, **named: object) -> SendPeer:
        """One about the part of an attempt there, with what its kind says beside that."""
        numbers = (record.job_id, record.epoch, attempt, next(self.ids))
        return SendPeer(place.node, kind(*numbers, self._me, *more, part=place.part, **named))


class Inquiry:
    """Questions that owners have not answered yet; repeated ever more slowly, for an owner may be down for long."""

    def __init__(self) -> None:
        self._pending: dict[Place, SendPeer] = {}
        self._interval_s = ASK_AGAIN_S
        self._again_s = float("inf")

    @property
    def next_deadline_s(self) -> float:
        """When to ask again."""
        return self._again_s if self._pending else float("inf")

    def ask(self, questions: Mapping[Place, SendPeer], now_s: float) -> list[SendPeer]:
        """Send these, and again until each owner is heard."""
        self._pending |= questions
        self._interval_s = ASK_AGAIN_S
        self._again_s = now_s + self._interval_s
        return list(questions.values())

    def answered(self, answer: OwnerAnswer) -> bool:
        """True when this answers one of our questions; it is asked no more."""
        asked = question.message if (question := self._pending.get(answer.place)) else None
        if not isinstance(asked, StatusRequest) or asked.command_id != answer.command_id:
            return False
        del self._pending[answer.place]
        return True

    def forget(self) -> None:
        """The attempt is over: nothing is asked any more."""
        self._pending.clear()

    def on_timer(self, now_s: float) -> list[SendPeer]:
        """Repeat what is due."""
        if now_s < self.next_deadline_s:
            return []
        self._interval_s = min(ASK_AGAIN_S_MAX, self._interval_s * 1.5)
        self._again_s = now_s + self._interval_s
        return list(self._pending.values())
