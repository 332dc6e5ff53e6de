"""Rare paths that were walked, counted: a run in which one of them never fires has tested less than it seems.

The names are stable; `NAMES` says what each one means.
"""

from collections.abc import Sequence

from swarmsched.aggregation.message import AggregationMove
from swarmsched.api import JobState
from swarmsched.authority.message import ContactAnswered, TaskStanding
from swarmsched.commands import CommitCheckpoint, JobAccepted, Refused, SubmitJob
from swarmsched.effects import Effect, HostShard, ReplyToClient, SendPeer, StopTask
from swarmsched.events import ClientCommandReceived, Event, PeerMessageReceived
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.jobs.message import AcceptRequest, PrepareRequest
from swarmsched.ledger.message import CheckpointAnswer
from swarmsched.record import JobRecord, PlanState
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_new_beginning
from swarmsched.simulator.host import Host
from swarmsched.simulator.tasks import RunningTask, TaskChange

NAMES = {
    "shepherd taken over": "a decided record names another shepherd than the one before",
    "prepared recovered by another shepherd": "an attempt that one shepherd prepared was launched under another",
    "joint configuration seen": "a decided record has leaving holders",
    "holder replaced": "a decided record has other holders than the job's first, and none is leaving",
    "gang restarted after node loss": "a decided record counts one more restart",
    "gang preempted": "a decided record counts one more preemption",
    "gang rescaled": "a decided record counts one more attempt that was ended for another size or other hosts",
    "workers joined a gang that trains": "a decided world has members that the one before had not",
    "workers left a gang that trains": "a decided world lacks members of the one before that live",
    "worker lost by a gang that trains": "a decided world names one more that is gone",
    "worker that stands still left behind": "a worker is lost that asks its agent no more",
    "worker that hangs left behind": "a worker is lost that goes on asking",
    "members that lost one another go on together": "a decided world has the members of the one before",
    "gang restarted after its workers were killed": "a restart's reason is a signal",
    "node lost by a gang that trains": "an attempt goes on, and its record names what it left on a lost node",
    "newcomer given up": "a decided record lets a part go that never was a member",
    "change of a gang taken over": "a decided record has parts that join, and another shepherd than the one before",
    "gang relaunched": "a decided record counts one more relaunch",
    "leftover settled": "a decided record has no leftovers after one that had",
    "task frozen": "the ranks of a task were frozen",
    "task thawed": "frozen ranks went on",
    "task killed because its attempt was over": "a holder said so to its owner, who stopped it",
    "conflict name seen": "a member was shown as in conflict",
    "hold expired": "an owner freed an undecided hold at its deadline",
    "submit repeated at another holder found known": "a client was told of the job that it had made elsewhere",
    "checkpoint committed": "a decided record has a new checkpoint",
    "checkpoint refused as stale": "a rank was told that its checkpoint does not count",
    "store refused": "a holder was asked for a store that it does not have any more",
    "recover forced": "an operator went on without the lost holders",
    "yield happened": "a shepherd gave up an undecided hold for another job",
    "claim used": "a job started on GPUs that it had claimed",
    "range hosted by another node": "a node hosts a range for an attempt that has no process there",
    "range moved": "a host asked to have a range hosted elsewhere, since rounds had come to wait",
    "stale record of an ended job dropped": "a holder that knew a job open heard that it is past its retention",
}


class Sometimes(Checker):
    """`counts` by name, zero for what never happened."""

    EVENTS = (ContactAnswered, ClientCommandReceived, PrepareRequest, AcceptRequest)
    PERFORMED = (
        "member.changed",
        "hold.expired",
        JobAccepted,
        Refused,
        CheckpointAnswer,
        "job.yielded",
        "claim.used",
        "job.over",
        HostShard,
        AggregationMove,
    )

    def __init__(self, decided: DecidedRecords) -> None:
        self.counts = dict.fromkeys(NAMES, 0)
        self._preparers: dict[TaskKey, str] = {}  # attempt -> who prepared it
        self._first_holders: dict[JobId, tuple[Holder, ...]] = {}
        self._made_at: dict[JobId, NodeId] = {}  # where a submit was first given
        self._submits: dict[tuple[NodeId, int], JobId] = {}
        self._commits: dict[tuple[NodeId, int], None] = {}
        decided.subscribe(self._decided_next)

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Requests, and what holders tell owners."""
        if isinstance(event, ClientCommandReceived):
            self._asked(host, event)
        elif isinstance(event, PeerMessageReceived):
            message = event.message
            if isinstance(message, ContactAnswered) and message.news:
                self._over(message, effects)
            elif isinstance(message, PrepareRequest | AcceptRequest) and message.store != host.storage.store_id:
                self._count("store refused")

    def performed(self, host: Host, effect: Effect) -> None:
        """Announcements and answers."""
        if isinstance(effect, ReplyToClient):
            self._replied(host, effect)
        elif isinstance(effect, SendPeer):
            answer = effect.message
            self._count("range moved", isinstance(answer, AggregationMove))
            self._count("checkpoint refused as stale", isinstance(answer, CheckpointAnswer) and not answer.is_committed)
        elif isinstance(effect, HostShard):
            here = {task.key.of_attempt for task in host.tasks.running}
            self._count("range hosted by another node", effect.order.key.attempt_key not in here)
        else:
            self._announced(effect)

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """Ranks freeze and go on."""
        self._count("task frozen", change is TaskChange.FROZEN)
        self._count("task thawed", change is TaskChange.THAWED)

    def _count(self, name: str, has_happened: bool = True) -> None:
        self.counts[name] += has_happened

    def _asked(self, host: Host, event: ClientCommandReceived) -> None:
        key, command = (host.node_id, event.request_id), event.command
        if isinstance(command, SubmitJob) and not command.is_dry_run:
            self._made_at.setdefault(command.job_id, host.node_id)
            self._submits[key] = command.job_id
        elif isinstance(command, CommitCheckpoint):
            self._commits[key] = None

    def _replied(self, host: Host, effect: ReplyToClient) -> None:
        key = (host.node_id, effect.request_id)
        job_id = self._submits.pop(key, None)
        if isinstance(effect.reply, JobAccepted) and job_id is not None:
            is_elsewhere = self._made_at[job_id] != host.node_id
            self._count("submit repeated at another holder found known", effect.reply.was_known and is_elsewhere)
        if key in self._commits:
            del self._commits[key]
            is_stale = isinstance(effect.reply, Refused) and effect.reply.code == "conflict"
            self._count("checkpoint refused as stale", is_stale)

    def _over(self, message: ContactAnswered, effects: Sequence[Effect]) -> None:
        over = {(news.job_id, news.attempt) for news in message.news if news.standing is TaskStanding.OVER}
        stopped = [each for each in effects if isinstance(each, StopTask) and (each.job_id, each.attempt) in over]
        self._count("task killed because its attempt was over", bool(stopped))

    def _announced(self, effect: Effect) -> None:
        kind = getattr(effect, "kind", "")
        if kind == "member.changed":
            self._count("conflict name seen", getattr(effect, "fields", {}).get("status") == "conflict")
        elif kind == "hold.expired":
            self._count("hold expired")
        elif kind == "job.yielded":
            self._count("yield happened")
        elif kind == "claim.used":
            self._count("claim used")
        elif kind == "job.over":
            self._count("stale record of an ended job dropped")

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        first = self._first_holders.setdefault(job_id, after.holders)
        if after.plan_state is PlanState.PREPARED:
            self._preparers.setdefault(TaskKey(job_id, after.attempt), after.shepherd)
        if before is None:
            return
        self._count("shepherd taken over", after.shepherd != before.shepherd)
        preparer = self._preparers.get(TaskKey(job_id, after.attempt), after.shepherd)
        is_launched = after.plan_state is PlanState.LAUNCHED and before.plan_state is not PlanState.LAUNCHED
        self._count("prepared recovered by another shepherd", is_launched and preparer != after.shepherd)
        self._count("joint configuration seen", bool(after.leaving_holders) and not before.leaving_holders)
        self._count(
            "holder replaced", bool(before.leaving_holders) and not after.leaving_holders and after.holders != first
        )
        self._count("gang restarted after node loss", after.restarts > before.restarts)
        is_killed = after.restarts > before.restarts and "killed by signal" in after.reason
        self._count("gang restarted after its workers were killed", is_killed)
        self._count("gang preempted", after.preemptions > before.preemptions)
        self._count("gang rescaled", after.rescales > before.rescales)
        self._count("gang relaunched", after.relaunches > before.relaunches)
        if after.attempt == before.attempt and after.state is JobState.RUNNING:
            self._regrouped(before, after)
        is_settled = bool(before.leftovers) and not after.leftovers and after.state is not JobState.ENDED
        self._count("leftover settled", is_settled)
        has_news = after.checkpoint is not None and after.checkpoint != before.checkpoint
        self._count("checkpoint committed", has_news)
        self._count("recover forced", is_new_beginning(before, after) and not before.is_forced)

    def _regrouped(self, before: JobRecord, after: JobRecord) -> None:
        """The gang of an elastic job has changed while it trained."""
        old, new = before.world, after.world
        has_left, is_named = set(old.members) - set(new.members), {share.part for share in after.shares}
        self._count("workers joined a gang that trains", bool(set(new.members) - set(old.members) and old.version))
        self._count("workers left a gang that trains", bool(has_left - set(new.lost)))
        self._count(
            "members that lost one another go on together", new.version > old.version and new.members == old.members
        )
        is_lost = bool(set(new.lost) - set(old.lost))
        self._count("worker lost by a gang that trains", is_lost)
        reason = after.rescalings[-1].reason if is_lost else ""
        self._count("worker that stands still left behind", "stands still" in reason)
        self._count("worker that hangs left behind", "does not come to its step" in reason)
        self._count("node lost by a gang that trains", len(after.leftovers) > len(before.leftovers))
        given_up = set(old.joining) - set(new.joining) - set(new.members)
        self._count("newcomer given up", bool(given_up & is_named))
        self._count("change of a gang taken over", bool(new.joining) and before.shepherd != after.shepherd)
