"""The end of an attempt whose nodes are lost: nothing new of a job starts before every leftover of it is settled.

A leftover is settled by its owner, who says that no process is left, or by silence: a majority of the job's holders
has the record that gives the attempt up, so they will never let it run on, and has not let it run for so long that
its ranks are surely frozen (`authority.contact_book` has the argument).  Both ways are tried at the same time; an
owner that is cut off from its shepherd alone is told by the holders that its attempt is over.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

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
ENOUGH_S = patience_s(FREEZE_AFTER_S)  # of silence, after which ranks surely stand still
GIVE_UP_S = ENOUGH_S - ASK_AGAIN_S  # the rest is what it takes to have it decided, and to ask once more
SOON_S = 0.05
BELIEF_S = 3.0  # after which a belief that is not told again is none


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
        """An owner says that no process of a leftover is left, or an operator that the owner is lost. True when it
        was open."""
        return self.open.pop(Leftover(place.node, attempt, part=place.part), None) is not None

    def silence_told(self, sender: NodeId, answer: SilenceAnswer, record: JobRecord) -> list[Leftover]:
        """A holder's answer; the leftovers that it settles."""
        holders = [holder for holder in record.configuration.members if holder.node == sender]
        is_enough = answer.has_record and answer.silent_s >= ENOUGH_S
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
        return _ask_for_silence(record, dict.fromkeys((each.attempt, each.node) for each in self.open))


@dataclass(slots=True)
class Suspicions:
    """Nodes that are believed lost while ranks of the present attempt are there; volatile.

    Another attempt cannot start before the holders' silence is long enough, however early this one is given up.  So it
    is given up only shortly before that moment: a node that merely stood still may be back by then, its ranks with it.
    """

    quorum: Quorum = majority
    next_deadline_s: float = float("inf")
    _believed_s: dict[NodeId, float] = field(default_factory=dict)  # when that belief was last told
    _silent: dict[NodeId, dict[Holder, None]] = field(default_factory=dict)  # holders that have told enough silence

    def suspect(self, node: NodeId, record: JobRecord, now_s: float) -> list[SendPeer]:
        """Ask for how long that node has been silent; to be told again for as long as it is believed."""
        is_new = node not in self._believed_s
        self._believed_s[node] = now_s
        if not is_new:
            return []
        self.next_deadline_s = min(self.next_deadline_s, now_s + ASK_AGAIN_S)
        return _ask_for_silence(record, [(record.attempt, node)])

    def is_confirmed(self, node: NodeId, record: JobRecord) -> bool:
        """A majority of the holders has let nothing run there for as long as it takes."""
        return record.configuration.is_quorum(self._silent.get(node, {}), self.quorum)

    def clear(self, node: NodeId) -> None:
        """A node is back."""
        self._believed_s.pop(node, None)
        self._silent.pop(node, None)

    def forget(self) -> None:
        """The attempt is over."""
        self._believed_s.clear()
        self._silent.clear()

    def on_timer(self, record: JobRecord, now_s: float) -> list[SendPeer]:
        """Ask again what is due."""
        if now_s < self.next_deadline_s:
            return []
        self._silent.clear()  # a yes may have come in between
        self._believed_s = {node: at_s for node, at_s in self._believed_s.items() if now_s < at_s + BELIEF_S}
        self.next_deadline_s = now_s + ASK_AGAIN_S if self._believed_s else float("inf")
        return _ask_for_silence(record, [(record.attempt, node) for node in self._believed_s])

    def silence_told(self, sender: NodeId, answer: SilenceAnswer, record: JobRecord, now_s: float) -> None:
        """A holder's answer."""
        if answer.owner not in self._believed_s or answer.attempt != record.attempt:
            return
        if answer.silent_s < GIVE_UP_S:
            again_s = now_s + max(SOON_S, GIVE_UP_S - answer.silent_s)
            self.next_deadline_s = min(self.next_deadline_s, again_s)
            return
        holders = [holder for holder in record.configuration.members if holder.node == sender]
        self._silent.setdefault(answer.owner, {}).update(dict.fromkeys(holders))


def _ask_for_silence(record: JobRecord, tasks: Iterable[tuple[int, NodeId]]) -> list[SendPeer]:
    return [
        SendPeer(holder.node, SilenceRequest(record.job_id, attempt, node, *record.stamp))
        for attempt, node in tasks
        for holder in record.configuration.members
    ]
