"""The holder's side of contact: which tasks this node lets run on, and for how long it has not.

Why no two attempts of a job run at the same time.  Let a shepherd conclude that an attempt is silent: a majority Q of
the holders say that their record declares it over, and that they have let it run on last `patience_s(FREEZE_AFTER_S)`
ago or longer.  Let its owner's ranks run until U, which is `FREEZE_AFTER_S` after the sending of a contact that a
majority P of the holders, and each of P to that contact or to a later one, has answered with valid.

* *The fence is the accepted record itself.*  It is durable at a majority before the shepherd asks, and no later record
  brings an attempt back.  So whoever is in Q refuses from then on, after a restart too: nothing has to be remembered.
* *Same holders.*  P and Q share a holder.  It said valid before it said silent, at or after the sending that U counts
  from, and has counted its silence from there.  So U is over, on clocks that run 5 % apart as well.
* *A restarted holder* has forgotten whom it let run on, and counts from its start, which is later than all of that.
* *Other holders.*  The owner may not have heard that holders were replaced, and P and Q share nobody.  But the first
  step away from the owner's configuration was accepted by a majority of it, so somebody in P gave its valid before
  that step was decided; and everything that follows the step was proposed only afterwards.  A holder therefore counts
  silence from no earlier than its first record with the present configuration, whether it is new or stayed.
* *An owner without whom nothing can be decided*, and a job that asked for it, has ranks that run without contact.  Of
  those no silence is ever told: only the owner itself can say that they are gone.  While holders change it counts as
  one only where both the present and the leaving ones need it, for either may decide without the others.

What an operator forces by declaring holders lost for good is outside of this argument, as it is outside of the
register's.
"""

from collections.abc import Container, Mapping

from swarmsched.authority.message import (
    ContactAnswered,
    ContactedTask,
    OwnerContact,
    SilenceAnswer,
    SilenceRequest,
    TaskNews,
    TaskStanding,
)
from swarmsched.authority.tally import may_run_free
from swarmsched.holders import Configuration, Holder, Quorum, majority
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord

REMEMBERED_S = 600.0
REMEMBERED_MAX = 65_536  # tasks, and jobs


class ContactBook:
    """When this node let which task run on, and since when it holds which job with the same others.

    `started_s`: when this life of the agent began.
    """

    def __init__(self, started_s: float, quorum: Quorum = majority) -> None:
        self._quorum = quorum
        self._floor_s = started_s  # no task that is not listed was let run on later than this
        self._valid_s: dict[tuple[NodeId, JobId, int], float] = {}  # by owner, job and attempt, the oldest first
        self._since_s: dict[JobId, tuple[Configuration, float]] = {}  # configuration of the job, and its first sight

    def accepted(self, record: JobRecord, now_s: float) -> None:
        """This node's acceptor took over that record, or found it at its start.

        To be called for every one, lest a change of holders and back remain unseen; the sooner, the sooner silence is
        told.
        """
        known = self._since_s.get(record.job_id)
        if known is None or known[0] != record.configuration:
            self._since_s.pop(record.job_id, None)
            self._since_s[record.job_id] = (record.configuration, now_s)
        while len(self._since_s) > REMEMBERED_MAX:
            del self._since_s[next(iter(self._since_s))]  # seen anew when it is asked for, which costs patience alone

    def dropped(self, job_id: JobId) -> None:
        """This node keeps no record of the job any more."""
        self._since_s.pop(job_id, None)

    def contacted(
        self,
        sender: NodeId,
        message: OwnerContact,
        records: Mapping[JobId, JobRecord],
        me: Holder,
        now_s: float,
        over: Container[JobId] = (),
    ) -> ContactAnswered:
        """Say of each task whether it may run on.  `records` are those that this node's acceptor has taken over.

        `over` are jobs that have ended and of which this node keeps no record any more.  A late or doubled contact is
        answered by what is known now.
        """
        news: list[TaskNews] = []
        for task in message.tasks:
            record = records.get(task.job_id)
            standing = TaskStanding.OVER if task.job_id in over else _standing(task, record, sender, me)
            if record is not None:
                self.accepted(record, now_s)
            if standing is TaskStanding.VALID:
                self._let_run(sender, task, now_s)
            if standing is not TaskStanding.VALID or record is None or record.stamp != _stamp(task):
                news.append(_news(task, standing, record))
        self._prune(now_s)
        return ContactAnswered(message.sequence, tuple(news))

    def silence(
        self, request: SilenceRequest, records: Mapping[JobId, JobRecord], me: Holder, now_s: float
    ) -> SilenceAnswer:
        """For how long that task was not let run on; `has_record` only if it never will be again.

        The asker must know that the record it asks with was decided, and count the holders of that record.
        """
        record = records.get(request.job_id)
        if record is not None:
            self.accepted(record, now_s)
        return SilenceAnswer(
            job_id=request.job_id,
            attempt=request.attempt,
            owner=request.owner,
            epoch=request.epoch,
            version=request.version,
            has_record=record is not None and self._is_fenced(request, record, me),
            silent_s=max(0.0, now_s - self._heard_s(request)),
        )

    def _is_fenced(self, request: SilenceRequest, record: JobRecord, me: Holder) -> bool:
        return (
            me in record.configuration.members
            and record.stamp >= (request.epoch, request.version)
            and _declared(record, request.owner, request.attempt) is TaskStanding.OVER
            and not may_run_free(request.owner, record.configuration, record.spec.on_isolation, self._quorum)
        )

    def _heard_s(self, request: SilenceRequest) -> float:
        valid_s = self._valid_s.get((request.owner, request.job_id, request.attempt), self._floor_s)
        _, since_s = self._since_s.get(request.job_id, (None, self._floor_s))
        return max(self._floor_s, valid_s, since_s)

    def _let_run(self, owner: NodeId, task: ContactedTask, now_s: float) -> None:
        key = (owner, task.job_id, task.attempt)
        self._valid_s.pop(key, None)
        self._valid_s[key] = now_s

    def _prune(self, now_s: float) -> None:
        """Forget tasks not let run for long, and the oldest at the limit; all the unlisted count from the latest."""
        while self._valid_s:
            key, valid_s = next(iter(self._valid_s.items()))
            if now_s < valid_s + REMEMBERED_S and len(self._valid_s) <= REMEMBERED_MAX:
                return
            del self._valid_s[key]
            self._floor_s = max(self._floor_s, valid_s)


def _standing(task: ContactedTask, record: JobRecord | None, owner: NodeId, me: Holder) -> TaskStanding:
    """What this holder may say of the task."""
    if record is None or me not in record.configuration.members:
        return TaskStanding.UNKNOWN
    declared = _declared(record, owner, task.attempt)
    if declared is TaskStanding.OVER and record.stamp < _stamp(task):
        return TaskStanding.UNKNOWN  # the owner knows a newer record than this one, which may never have been decided
    return declared


def _declared(record: JobRecord, owner: NodeId, attempt: int) -> TaskStanding:
    """What the record says of the task; nothing of an attempt that it has not come to."""
    if record.is_ended or record.attempt > attempt:
        return TaskStanding.OVER
    if record.attempt < attempt:
        return TaskStanding.UNKNOWN
    left = {each.place for each in record.leftovers if each.attempt == attempt}
    runs = any(share.node == owner and share.place not in left for share in record.shares)
    return TaskStanding.VALID if runs else TaskStanding.OVER


def _news(task: ContactedTask, standing: TaskStanding, record: JobRecord | None) -> TaskNews:
    if record is None:
        return TaskNews(task.job_id, task.attempt, standing)
    return TaskNews(task.job_id, task.attempt, standing, *record.stamp, record.configuration)


def _stamp(task: ContactedTask) -> tuple[int, int]:
    return (task.epoch, task.version)
