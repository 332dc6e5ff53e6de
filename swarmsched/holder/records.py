"""The register of one node, and who waits for which of its answers."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import get_args

from swarmsched.clock import Clock
from swarmsched.effects import Announce
from swarmsched.errors import LocalProtocolError
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.fields import cleaned
from swarmsched.holder.machine import Answered, NodeEffect, Taker
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.message import RegisterMessage
from swarmsched.jobs.register import Register, RegisterEvent
from swarmsched.jobs.update import Asker, Request, Result, UpdateConflicted, UpdateRefused
from swarmsched.negotiation.record_writer import ReadRecord, WriteRecord

ACCUSE_AGAIN_S = 60.0
ACCUSED_MAX = 1_000  # senders of nonsense remembered; names are claims, so they must not fill the memory


class Records:
    """Plane C of one node: hands requests to the register, and its results back to whoever asked."""

    def __init__(self, me: NodeId, register: Register) -> None:
        self._me = me
        self.register, self._dropped = register, register.dropped_messages
        self._asked: dict[int, Request] = {}  # by update id, until their askers hear of the outcome
        self._accused_s: dict[NodeId, float] = {}  # when senders of nonsense were last announced
        self.counters: Counter[str] = Counter()
        self.takes: Mapping[object, Taker] = {
            **dict.fromkeys(get_args(RegisterMessage), self._receive),
            WriteRecord: self._write,
            ReadRecord: lambda wanted, clock: self._ask(wanted.read, clock),
            **dict.fromkeys((*get_args(Result), UpdateRefused), self._heard),
            TimerFired: self._step,
        }

    @property
    def next_deadline_s(self) -> float:
        """When a round has to go on."""
        return self.register.next_deadline_s

    def asked_by(self, askers: Collection[Asker]) -> set[JobId]:
        """Jobs on which the register is deciding for those."""
        return {request.job_id for request in self._asked.values() if request.asker in askers}

    def _receive(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        """What makes no sense gets no answer, but an operator should hear who says such things."""
        count = self._dropped.get("nonsense", 0)
        effects = self._step(event, clock)
        if self._dropped.get("nonsense", 0) == count or not self._is_news_of(event.sender, clock.now_s):
            return effects
        kind = type(event.message).__name__
        text = f"{event.sender} sent a message about a record that makes no sense; it was dropped"
        return [Announce("peer.nonsense", text, node=event.sender, fields={"kind": kind}), *effects]

    def _is_news_of(self, sender: NodeId, now_s: float) -> bool:
        """Once a minute for each sender."""
        if now_s < self._accused_s.get(sender, float("-inf")) + ACCUSE_AGAIN_S:
            return False
        if len(self._accused_s) >= ACCUSED_MAX:
            self._accused_s.clear()
        self._accused_s[sender] = now_s
        return True

    def _ask(self, request: Request, clock: Clock) -> list[NodeEffect]:
        self._asked[request.update_id] = request
        return self._step(request, clock)

    def _write(self, wanted: WriteRecord, clock: Clock) -> Iterable[NodeEffect]:
        """One that cannot be encoded is left out, so that those behind it are not held up for ever."""
        update = wanted.update
        try:
            return self._ask(update, clock)
        except LocalProtocolError as error:
            self.counters["updates_refused"] += 1
            text = f"an update of its record cannot be stored and was left out: {cleaned(str(error))}"
            told = Announce("job.update_refused", text, update.job_id, self._me)
            return [told, self._answered(UpdateRefused(update.update_id, str(error)))]

    def _step(self, event: RegisterEvent, clock: Clock) -> list[NodeEffect]:
        effects = self.register.step(event, clock.now_s)
        return [self._answered(effect) if isinstance(effect, Result) else effect for effect in effects]

    def _answered(self, result: Result) -> Answered:
        request = self._asked[result.update_id]
        if isinstance(result, UpdateConflicted) and request.asker is Asker.SHEPHERD:
            self.counters["register_conflicts"] += 1
        return Answered(request, result)

    def _heard(self, answer: Answered, clock: Clock) -> None:
        """Its asker hears of it just now."""
        del self._asked[answer.result.update_id]

    def validate(self) -> None:
        """The register's own state; each request waits under its own number."""
        self.register.validate()
        assert all(update_id == request.update_id for update_id, request in self._asked.items())
