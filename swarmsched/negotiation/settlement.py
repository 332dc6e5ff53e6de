"""The end of what an earlier attempt left behind: nothing new of a job starts before every leftover is settled.

A leftover is settled by its owner, who says that no process is left, or by silence: a majority of the job's holders
has the record that gives the attempt up, so they will never let it run on, and has not let it run for so long that
its ranks are surely frozen (`authority.contact_book` has the argument).  Both ways are tried at the same time; an
owner that is cut off from its shepherd alone is told by the holders that its attempt is over.
"""

from collections.abc import Collection, Iterable

from swarmsched.api import Isolation
from swarmsched.authority.message import SilenceAnswer, SilenceRequest
from swarmsched.authority.timing import FREEZE_AFTER_S, patience_s
from swarmsched.effects import SendPeer
from swarmsched.holders import Holder, Quorum, majority
from swarmsched.ids import NodeId, Place
from swarmsched.ledger.message import StopRequest
from swarmsched.negotiation.inquiry import Commands
from swarmsched.record import JobRecord, Leftover

ASK_AGAIN_S = 0.5
STOP_AGAIN_S = 2.0
LEFTOVER_GRACE_S = 5.0


class Settlement:
    """The leftovers of one job; volatile, since the record names them."""

    def __init__(self, commands: Commands, quorum: Quorum = majority) -> None:
        self._commands = commands
        self._quorum = quorum
        self.open: dict[Leftover, dict[Holder, None]] = {}  # not settled, with the holders for whom it is silenced
        self._asks_s = self._stops_s = float("inf")

    @property
    def next_deadline_s(self) -> float:
        """When to ask again."""
        return min(self._asks_s, self._stops_s) if self.open else float("inf")

    def begin(self, leftovers: Iterable[Leftover], record: JobRecord, now_s: float) -> list[SendPeer]:
        """The record that names them is durable: order the owners to stop, and ask the holders."""
        for leftover in leftovers:
            self.open.setdefault(leftover, {})
        self._asks_s = self._stops_s = now_s
        return self.on_timer(record, now_s)

    def keep(self, leftovers: Collection[Leftover]) -> None:
        """What the record does not name any more is settled: its gang ended while the record was being told of it."""
        named = {*leftovers}
        self.open = {each: silenced for each, silenced in self.open.items() if each in named}

    def forget(self) -> None:
        """The job has ended, or is another's."""
        self.open.clear()

    def on_timer(self, record: JobRecord, now_s: float) -> list[SendPeer]:
        """Repeat what is due."""
        effects: list[SendPeer] = []
        if self.open and now_s >= self._stops_s:
            self._stops_s = now_s + STOP_AGAIN_S
            grace_s = min(record.spec.grace_s, LEFTOVER_GRACE_S)
            effects += [self._commands.to(each.place, StopRequest, record, each.attempt, grace_s) for each in self.open]
        if self.open and now_s >= self._asks_s:
            self._asks_s = now_s + ASK_AGAIN_S
            effects += self._ask_holders(record)
        return effects

    def ended(self, place: Place, attempt: int) -> bool:
        """Its owner says that no process of it is left, or an operator that the owner is lost.  True when it was
        open."""
        return self.open.pop(Leftover(place.node, attempt, part=place.part), None) is not None

    def silence_told(self, sender: NodeId, answer: SilenceAnswer, record: JobRecord) -> list[Leftover]:
        """A holder's answer; the leftovers that it settles."""
        holders = [holder for holder in record.configuration.members if holder.node == sender]
        is_enough = answer.has_record and answer.silent_s >= patience_s(FREEZE_AFTER_S)
        is_present = (answer.epoch, answer.version) == record.stamp
        if not is_enough or not is_present:
            return []
        settled = []
        for leftover, silenced in list(self.open.items()):
            if (leftover.node, leftover.attempt) != (answer.owner, answer.attempt):
                continue
            silenced |= dict.fromkeys(holders)
            if record.configuration.is_quorum(silenced, self._quorum):
                del self.open[leftover]
                settled.append(leftover)
        return settled

    def _ask_holders(self, record: JobRecord) -> list[SendPeer]:
        """An answer is good for the record that it was asked with: with the next one holders may have changed."""
        if record.spec.on_isolation is Isolation.CONTINUE:
            return []  # its ranks are never frozen: silence proves nothing
        return [
            SendPeer(holder.node, SilenceRequest(record.job_id, attempt, node, *record.stamp))
            for attempt, node in dict.fromkeys((each.attempt, each.node) for each in self.open)
            for holder in record.configuration.members
        ]
