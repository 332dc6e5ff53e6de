"""The owner's side of contact: until when may the ranks on this node run?

Every 2 s the owner asks each holder whether its tasks may run on, once for all parts of an attempt: what holders give
up is an attempt, never a part.  A task may run until `FREEZE_AFTER_S` after the sending of the oldest contact among the
newest ones that a majority of its job's holders has answered with *valid*; the shim keeps that time, so that it holds
although this agent dies.  Why that keeps two attempts from running at the same time is told in `contact_book`.

A task gets no time before the first such majority.  Time on credit would be counted from this owner's receipt of a
command that may have been long on its way, and no holder would know of it: it could tell its shepherd that the task is
silent although it has just begun.  The record that names a task is with the holders before its owner hears of it, so a
task that is watched from its order on has its time before its ranks are ready.

A task without processes needs no time, but is watched on until its result was heard: its shepherd may be gone for ever
while the job goes on, or has ended, without that result.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarmsched.api import Isolation
from swarmsched.authority.message import (
    TASKS_MAX,
    ContactAnswered,
    ContactedTask,
    OwnerContact,
    TaskNews,
    TaskStanding,
    sequences,
)
from swarmsched.authority.tally import agreed, runs_free
from swarmsched.authority.timing import CONTACT_PERIOD_S, FREEZE_AFTER_S
from swarmsched.effects import ExtendAttempt, SendPeer
from swarmsched.fields import Value
from swarmsched.holders import Configuration, Holder, Quorum, majority
from swarmsched.ids import AttemptKey, JobId, NodeId

CONTACT_GAP_S = 0.05  # between two contacts with one holder, however many tasks begin in between

Stamp = tuple[int, int]


class Heard(Value):
    """A holder's newest word on a task: the newest is the answer to the contact that was sent last."""

    sequence: int
    standing: TaskStanding
    stamp: Stamp  # of the holder's record
    has_record: bool
    valid_s: float  # sending of the contact that was answered with valid; -infinite for any other answer


@dataclass(slots=True)
class WatchedAttempt:
    """An attempt that has tasks on this node, and what its holders say of it."""

    key: AttemptKey
    configuration: Configuration
    stamp: Stamp  # of the newest record that is known to name that configuration; never falls
    isolation: Isolation
    counted_s: float  # latest deadline that a quorum has given, or when the watch began; never falls
    told_s: float  # the deadline that the shim was given last, as far as this life knows
    has_ended: bool = False  # no process is left, and its result was not heard yet
    former: Configuration = Configuration()  # noqa: RUF009  # frozen; the one that was replaced last
    is_saved: bool = True  # configuration, stamp and former one are what the owner has on disk
    heard: dict[Holder, Heard] = field(default_factory=dict)  # only of the configuration's members

    def holder(self, node: NodeId) -> Holder | None:
        """Which holder speaks when that node does: of two stores the present one, for the other one is gone."""
        return next((each for each in self.configuration.members if each.node == node), None)


@dataclass(slots=True)
class ContactPath:
    """The contacts with one holder node."""

    due_s: float
    last_s: float = -math.inf
    sent: dict[int, tuple[float, OwnerContact]] = field(default_factory=dict)  # unanswered, not too old to count

    def hasten(self, now_s: float) -> None:
        """A contact is due at once."""
        self.due_s = min(self.due_s, max(now_s, self.last_s + CONTACT_GAP_S))


class ContactLine:
    """The tasks of this node and its contacts with their holders.  `generation` is that of this life of the agent.

    Contacts with this node itself, where it is a holder, take the same way as all others.
    """

    def __init__(self, me: NodeId, generation: int, quorum: Quorum = majority) -> None:
        self._me = me
        self._quorum = quorum
        self._sequences = sequences(generation)
        self._tasks: dict[AttemptKey, WatchedAttempt] = {}
        self._lines: dict[NodeId, ContactPath] = {}

    def watch(
        self,
        key: AttemptKey,
        configuration: Configuration,
        stamp: Stamp,
        isolation: Isolation,
        now_s: float,
        former: Configuration = Configuration(),  # noqa: B008  # frozen
    ) -> None:
        """A task of a record with that `(epoch, version)` was ordered, or was found running after a restart.

        A contact is due at once.  Watching it again changes nothing, but that it has processes again.
        """
        if key in self._tasks:
            self._tasks[key].has_ended = False
            return
        task = self._tasks[key] = WatchedAttempt(key, configuration, stamp, isolation, now_s, now_s, former=former)
        self._open_lines(task, now_s)

    def ended(self, key: AttemptKey) -> None:
        """No process of it is left: it needs no time any more, only to know whether it is over."""
        if key in self._tasks:
            self._tasks[key].has_ended = True

    def forget(self, key: AttemptKey) -> None:
        """Nothing of it is left on this node, and nobody wants to hear of it."""
        self._tasks.pop(key, None)

    def learned(self, job_id: JobId, stamp: Stamp, configuration: Configuration, now_s: float) -> list[ExtendAttempt]:
        """A record of the job names these holders; an older one, or one with the same, changes nothing.

        To be called with every record that this node's own acceptor takes over, and its effects performed before that
        record is durable: where ranks ran free because nothing could be decided without this node, they must have a
        deadline before this node's acceptance lets others decide, also if this agent dies in between.
        """
        effects: list[ExtendAttempt] = []
        for task in self._tasks.values():
            if task.key.job_id == job_id and self._replace_configuration(task, stamp, configuration, now_s):
                effects += self._recount(task)
        return effects

    def unsaved(self) -> list[WatchedAttempt]:
        """Tasks whose holders were replaced since this was asked. They must outlive this agent, which could find
        nobody to ask once all the holders that its order names are gone."""
        changed = [task for task in self._tasks.values() if not task.is_saved]
        for task in changed:
            task.is_saved = True
        return changed

    def deadline_s(self, key: AttemptKey) -> float:
        """Until when its tasks may run, for their start; -infinite for one that is not watched."""
        task = self._tasks.get(key)
        return -math.inf if task is None else self._until_s(task)

    def is_watched(self, key: AttemptKey) -> bool:
        """True for an attempt whose holders are contacted."""
        return key in self._tasks

    def validate(self) -> None:
        """Every holder of a task has its line, and what was heard is of holders."""
        for key, task in self._tasks.items():
            assert key == task.key
            assert task.heard.keys() <= set(task.configuration.members)
            assert {holder.node for holder in task.configuration.members} <= self._lines.keys(), "a holder is not asked"

    @property
    def over(self) -> list[AttemptKey]:
        """Tasks that a quorum of their holders has declared over: they must be killed, and their results forgotten."""
        return [key for key, task in self._tasks.items() if self._is_over(task)]

    @property
    def next_deadline_s(self) -> float:
        """When the next contact is due; infinite without tasks."""
        return min([line.due_s for line in self._lines.values()]) if self._lines else math.inf

    def on_timer(self, now_s: float) -> list[SendPeer]:
        """The contacts that are due, each with all tasks of that holder."""
        due = [node for node, line in self._lines.items() if now_s >= line.due_s]
        tasks = self._contacted_tasks(due)
        effects: list[SendPeer] = []
        for node in due:
            if tasks[node]:
                effects += self._contact(node, self._lines[node], tasks[node], now_s)
            else:
                del self._lines[node]
        return effects

    def answered(self, sender: NodeId, message: ContactAnswered, now_s: float) -> list[ExtendAttempt]:
        """A holder's answer; a second, an invented or a much too late one finds no contact that it could be for."""
        line = self._lines.get(sender)
        sent = line.sent.pop(message.sequence, None) if line else None
        if sent is None:
            return []
        sent_s, contact = sent
        news = {each.of_attempt: each for each in message.news}
        effects: list[ExtendAttempt] = []
        for asked in contact.tasks:
            task = self._tasks.get(asked.of_attempt)
            if task is not None:
                told = news.get(asked.of_attempt)
                self._hear(task, sender, asked, told, message.sequence, sent_s, now_s)
                effects += self._recount(task)
        return effects

    def _hear(
        self,
        task: WatchedAttempt,
        sender: NodeId,
        asked: ContactedTask,
        news: TaskNews | None,
        sequence: int,
        sent_s: float,
        now_s: float,
    ) -> None:
        stamp = (asked.epoch, asked.version) if news is None else (news.epoch, news.version)
        if news is not None:
            # Before counting: holders that have been left may never hear of it, and would let the task run on under a
            # configuration whose majority decides nothing any more.  Of any majority of theirs at least one holder
            # knows that there is a next configuration, and its word must turn the others' away.
            self._replace_configuration(task, stamp, news.configuration, now_s)
        holder = task.holder(sender)
        last = task.heard.get(holder) if holder else None
        if holder is None or (last is not None and last.sequence > sequence):
            return
        standing = TaskStanding.VALID if news is None else news.standing
        # A holder that lags behind may let the task run on, if its holders are those that we know, or knew before.  Any
        # others are successors that were decided while we followed a record that never was.
        is_known = news is None or news.configuration in (task.configuration, task.former)
        is_counted = standing is TaskStanding.VALID and is_known
        task.heard[holder] = Heard(
            sequence,
            standing,
            stamp if is_known else (0, 0),
            has_record=news is None or bool(news.configuration.holders),
            valid_s=sent_s if is_counted else -math.inf,
        )
        self._raise_stamp(task)

    def _replace_configuration(
        self, task: WatchedAttempt, stamp: Stamp, configuration: Configuration, now_s: float
    ) -> bool:
        if stamp <= task.stamp or not configuration.holders or configuration == task.configuration:
            return False
        task.former, task.configuration, task.stamp = task.configuration, configuration, stamp
        task.is_saved = False
        task.heard = {holder: heard for holder, heard in task.heard.items() if holder in configuration.members}
        self._open_lines(task, now_s)
        return True

    def _raise_stamp(self, task: WatchedAttempt) -> None:
        """Follow records that name the same holders, once a quorum has them.

        A single holder's record may never have been decided, and what was decided instead may carry a lower stamp:
        whoever had followed the first would take the second for old news.
        """
        stamps = {holder: heard.stamp for holder, heard in task.heard.items()}
        task.stamp = max(task.stamp, agreed(task.configuration, stamps, (0, 0), self._quorum))

    def _recount(self, task: WatchedAttempt) -> list[ExtendAttempt]:
        """Extend by what is counted now.  Time once given stands, whatever is withdrawn later: the holders that gave
        it count their silence from later than its beginning."""
        valid_s = {holder: heard.valid_s for holder, heard in task.heard.items()}
        counted_s = agreed(task.configuration, valid_s, -math.inf, self._quorum) + FREEZE_AFTER_S
        task.counted_s = max(task.counted_s, counted_s)
        until_s = self._until_s(task)
        if until_s == task.told_s or task.has_ended:
            return []
        task.told_s = until_s
        return [ExtendAttempt(*task.key, until_s)]

    def _until_s(self, task: WatchedAttempt) -> float:
        """Without limit only once this node's own record says so: an order may be late, and its holders replaced."""
        own = task.holder(self._me)
        is_own_valid = own in task.heard and task.heard[own].valid_s > -math.inf
        may_be_free = is_own_valid or task.isolation is Isolation.CONTINUE
        is_free = may_be_free and runs_free(self._me, task.configuration, task.isolation, self._quorum)
        return math.inf if is_free else task.counted_s

    def _is_over(self, task: WatchedAttempt) -> bool:
        """Where the record is past its retention at a quorum, nobody will ever ask for a result any more."""
        declared = [
            holder
            for holder, heard in task.heard.items()
            if heard.standing is TaskStanding.OVER or (task.has_ended and not heard.has_record)
        ]
        return task.configuration.is_quorum(declared, self._quorum)

    def _open_lines(self, task: WatchedAttempt, now_s: float) -> None:
        for holder in task.configuration.members:
            self._lines.setdefault(holder.node, ContactPath(now_s)).hasten(now_s)

    def _contacted_tasks(self, nodes: list[NodeId]) -> dict[NodeId, list[ContactedTask]]:
        tasks: dict[NodeId, list[ContactedTask]] = {node: [] for node in nodes}
        for task in self._tasks.values() if nodes else ():
            contacted = ContactedTask(*task.key, *task.stamp)
            for node in dict.fromkeys(holder.node for holder in task.configuration.members):
                if node in tasks:
                    tasks[node].append(contacted)
        return tasks

    def _contact(self, node: NodeId, line: ContactPath, tasks: list[ContactedTask], now_s: float) -> Iterator[SendPeer]:
        line.due_s, line.last_s = now_s + CONTACT_PERIOD_S, now_s
        line.sent = {each: sent for each, sent in line.sent.items() if now_s - sent[0] < FREEZE_AFTER_S}
        for start in range(0, len(tasks), TASKS_MAX):
            contact = OwnerContact(next(self._sequences), tuple(tasks[start : start + TASKS_MAX]))
            line.sent[contact.sequence] = (now_s, contact)
            yield SendPeer(node, contact)
