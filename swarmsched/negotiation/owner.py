"""The owner's side of placement: obeys shepherds as far as the ledger allows, runs tasks, reports until heard.

The ledger says what is booked; this machine connects it with the task runner.  Every handler is idempotent: a
repeated command gets the stored answer, a repeated task event changes nothing, a report is repeated until the
shepherd has acknowledged its revision.  GPUs come free only when no process of the task is left.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

from msgspec.structs import replace

from swarmsched.api import StartPhase
from swarmsched.authority.contact import ContactLine, Stamp
from swarmsched.authority.message import ContactAnswered
from swarmsched.effects import (
    Announce,
    Effect,
    ForgetTask,
    Persist,
    PublishWorld,
    SendPeer,
    SetBatch,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
)
from swarmsched.errors import ProtocolError, RemoteProtocolError, StorageError
from swarmsched.events import (
    FoundTask,
    RankExited,
    RendezvousBound,
    RendezvousFailed,
    TaskEstimated,
    TaskEvent,
    TaskExited,
    TaskFact,
    TaskFreezeChanged,
    TaskPhaseChanged,
    TasksFound,
    TaskStaged,
    TaskStageFailed,
    TaskStarted,
    TimerFired,
    WorkerTold,
)
from swarmsched.fields import U32, NodeName, Text, Value, cleaned
from swarmsched.holders import Configuration
from swarmsched.ids import AttemptKey, JobId, NodeId, TaskKey, handle
from swarmsched.ledger.booking import BookingState
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import (
    ClaimRequest,
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    OwnerCommand,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    TaskBatch,
    TaskEstimate,
    TaskReport,
    TaskReportReceived,
    WorldRequest,
)
from swarmsched.negotiation.hold_desk import HoldDesk
from swarmsched.negotiation.trouble import Trouble
from swarmsched.record import JobRecord
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage, TaskStatus
from swarmsched.wire.codec import decode_value, encode_value

REPORT_INTERVAL_S = 2.0
REPORT_INTERVAL_S_MAX = 30.0
UNLAUNCHED_REPORT_S = 15.0
RELEASE_GRACE_S = 5.0
TASK_ROOM = "task"
PROVEN = {TaskFailure.SYNC: "the files", TaskFailure.ENVIRONMENT: "the environment"}
"""What a start may lack by the node's own fault, as others show."""


class StoredTask(Value):
    """What is durable of a task: its order, and its job's holders if they have changed since. So is who must hear of
    it even when its lease is gone.

    The end of a task that was never launched is kept here too, for no shim has left a record of it.
    """

    order: TaskOrder
    shepherd: NodeName
    is_ended: bool = False  # and no shim has left a record of how
    failure: TaskFailure = TaskFailure.NONE
    detail: Text = ""
    was_launched: bool = False  # written before the shim starts: if it is not found again, its ranks were lost
    holders: Configuration = Configuration()  # frozen; empty: those of the order
    former_holders: Configuration = Configuration()  # frozen
    epoch: U32 = 0  # of the newest record that is known to name those holders, and its version
    version: U32 = 0


@dataclass(slots=True)
class _Task:
    """A committed task.  `status.revision` grows with each change; `acknowledged` is what the shepherd has heard."""

    order: TaskOrder
    shepherd: NodeId
    status: TaskStatus
    acknowledged: int = -1
    next_report_s: float = 0.0
    report_interval_s: float = REPORT_INTERVAL_S
    started_s: float = math.inf  # on our monotonic clock
    is_launch_wanted: bool = False
    was_launched: bool = False
    is_stopping: bool = False  # a launch that arrives now comes too late
    is_superseded: bool = False  # a majority of the holders says that its attempt is over
    is_released: bool = False  # nobody wants to hear of it any more
    holders: tuple[Configuration, Configuration, Stamp] | None = None  # (present, former, stamp), unless the order's
    is_orphan: bool = False  # it was found, and no order for it: it is stopped, and booked until it has ended


class Owner:
    """Plane D of one node."""

    def __init__(self, node_id: NodeId, ledger: Ledger, line: ContactLine) -> None:
        self._node_id = node_id
        self._ledger = ledger
        self._line = line
        self._tasks: dict[TaskKey, _Task] = {}
        self._desk = HoldDesk(node_id, ledger, self._tasks.__contains__)
        self._trouble = Trouble()
        self._trouble_again_s = math.inf  # when to look whether it is over

    def restore(self, entries: Mapping[str, bytes], now_s: float) -> None:
        """Take back the orders of committed tasks; call before the first step.  Raises `StorageError`."""
        for key, data in entries.items():
            stored = _read_task(key, data)
            order = stored.order
            status = self._fresh_status(order)
            if stored.is_ended:
                status = replace(status, stage=TaskStage.EXITED, failure=stored.failure, detail=stored.detail)
            task = _Task(order, stored.shepherd, status, next_report_s=now_s, was_launched=stored.was_launched)
            self._tasks[order.key] = task
            if stored.holders.holders:
                task.holders = (stored.holders, stored.former_holders, (stored.epoch, stored.version))
            self._watch(task, now_s)
            self._mark_ended(order.key)

    @property
    def tasks(self) -> tuple[TaskStatus, ...]:
        """All tasks that this node has committed to, ended ones until the shepherd has acknowledged them."""
        return tuple(task.status for task in self._tasks.values())

    def order(self, key: TaskKey) -> TaskOrder | None:
        """The order of a task that is known here."""
        task = self._tasks.get(key)
        return task.order if task else None

    @property
    def next_deadline_s(self) -> float:
        """When a report, a contact or the end of a hold is due."""
        due = [task.next_report_s for task in self._tasks.values() if _must_report(task)]
        others = (self._ledger.next_deadline_s, self._line.next_deadline_s, self._desk.next_deadline_s)
        return min([*others, self._trouble_again_s, *due])

    @property
    def is_in_conflict(self) -> bool:
        """True while two machines answer under our name: nothing new is begun here."""
        return self._desk.is_in_conflict

    def note_conflict(self, *, is_there: bool) -> None:
        """Two machines answer under our name, or do no more."""
        self._desk.note_conflict(is_there=is_there)

    def step(self, event: TaskEvent | TimerFired, now_s: float) -> list[Effect]:
        """Task facts from the runner, or time."""
        match event:
            case TimerFired():
                return self._on_timer(now_s)
            case RendezvousBound():
                return self._desk.bound(event)
            case RendezvousFailed():
                return self._desk.bind_failed(event, now_s)
            case TasksFound():
                return self._on_found(event, now_s)
            case TaskEstimated():
                shepherd = self.shepherd_of(event.of_attempt)
                told = TaskEstimate(event.job_id, event.attempt, event.estimate, event.global_batch)
                return [SendPeer(shepherd, told)] if shepherd else []
            case _:
                return self._on_task_event(event, now_s)

    def obey(self, sender: NodeId, command: OwnerCommand, now_s: float) -> list[Effect]:
        """A shepherd's command; answered exactly once per arrival unless the answer must wait for a fact."""
        if command.shepherd != sender:
            raise RemoteProtocolError(f"names shepherd {command.shepherd}", kind=type(command).__name__, peer=sender)
        match command:
            case HoldRequest():
                return self._desk.hold(command, now_s)
            case ClaimRequest():
                answer, durable = self._ledger.claim(command, now_s)
                return [*durable, SendPeer(command.shepherd, answer)]
            case CommitRequest():
                return self._commit(command, now_s)
            case LaunchRequest():
                return self._launch(command, now_s)
            case ReleaseRequest():
                return self._release(command, now_s)
            case StopRequest():
                return self._stop(command, now_s)
            case SignalRequest():
                return self._signal(command, now_s)
            case WorldRequest():
                return self._publish(command, now_s)
            case StatusRequest():
                return self._tell_status(command, now_s)
            case _:
                assert_never(command)

    def disk_filled(self, shortage: str, now_s: float) -> list[Effect]:
        """Nothing new is begun while its disk is nearly full."""
        self._trouble.ran_short(shortage)
        return self._heed_trouble(now_s)

    def looked_at_gpus(self, now_s: float) -> list[Effect]:
        """Telemetry has told of this node's devices: shepherds hear of tasks that have one that failed, or is gone."""
        effects: list[Effect] = []
        for key, task in self._tasks.items():
            is_ailing = self._ledger.is_ailing(key)
            if is_ailing != task.status.is_ailing and task.status.stage is not TaskStage.EXITED:
                effects += self._change(task, now_s, is_ailing=is_ailing)
        return effects

    def drain(self, reason: str | None) -> list[Effect]:
        """Take no new work for a reason, or again for None; what is held, leased or running stays."""
        if reason == (self._ledger.drain_reason if self._ledger.is_draining else None):
            return []
        what = "new work again" if reason is None else f"no new work: {reason}" if reason else "no new work"
        told = Announce("node.draining", f"{self._node_id} takes {what}", node=self._node_id)
        return [*self._ledger.set_draining(reason), told]

    def answered(self, message: TaskReportReceived | TaskBatch) -> list[Effect]:
        """A shepherd's answer to our news: it has heard a revision, or says with which batch live ranks go on."""
        if isinstance(message, TaskReportReceived):
            return self.acknowledge(message)
        is_live = self.shepherd_of(message.of_attempt) is not None
        return [SetBatch(message.job_id, message.attempt, message.global_batch)] if is_live else []

    def acknowledge(self, message: TaskReportReceived) -> list[Effect]:
        """The shepherd has heard a revision; an ended task is then forgotten."""
        key = message.key
        task = self._tasks.get(key)
        if task is None or message.generation != task.status.generation:
            return []
        task.acknowledged = max(task.acknowledged, message.revision)
        if task.status.stage is not TaskStage.EXITED or task.acknowledged < task.status.revision:
            return []
        return self._forget(key)

    # Commands, in the order of a placement.

    def _commit(self, request: CommitRequest, now_s: float) -> list[Effect]:
        if request.order.node != self._node_id:
            raise RemoteProtocolError(f"order is for {request.order.node}", kind="CommitRequest", peer=request.shepherd)
        key = request.key
        answer, durable = self._ledger.commit(request, now_s)
        effects: list[Effect] = [*durable]
        task = self._tasks.get(key)
        answer = _corrected(answer, task)
        if answer.refusal is not Refusal.NONE:
            return [*effects, SendPeer(request.shepherd, answer)]
        if task is None:
            effects += self._accept_order(request, now_s)
            task = self._tasks[key]
        effects += self._adopt(task, request.shepherd, request.epoch, now_s)
        is_staged = task.status.stage is not TaskStage.ORDERED
        return [*effects, SendPeer(request.shepherd, replace(answer, is_staged=is_staged))]

    def _accept_order(self, request: CommitRequest, now_s: float) -> list[Effect]:
        order = request.order
        unlaunched_s = now_s + UNLAUNCHED_REPORT_S
        task = _Task(order, request.shepherd, self._fresh_status(order), acknowledged=0, next_report_s=unlaunched_s)
        durable = _persist(task)
        self._tasks[order.key] = task
        self._watch(task, now_s)
        effects: list[Effect] = [durable, *self._line.on_timer(now_s)]
        if order.needs_staging:
            return [*effects, StageTask(order)]
        task.status = replace(task.status, stage=TaskStage.STAGED)
        return effects

    def _launch(self, request: LaunchRequest, now_s: float) -> list[Effect]:
        answer, durable = self._ledger.check(request, now_s)
        task = self._tasks.get(request.key)
        answer = _corrected(answer, task)
        if answer.refusal is Refusal.NONE and task is None:
            answer = replace(answer, refusal=Refusal.NOT_COMMITTED)
        effects: list[Effect] = [*durable, SendPeer(request.shepherd, answer)]
        if answer.refusal is Refusal.NONE and task is not None:
            effects = [*self._adopt(task, request.shepherd, request.epoch, now_s), *effects]
            task.is_launch_wanted = True
            effects += self._start(task, now_s)
        return effects

    def _start(self, task: _Task, now_s: float) -> list[Effect]:
        """Once it is wanted, and a majority of the holders has said that it may run."""
        if task.status.stage is not TaskStage.STAGED or task.is_stopping or not task.is_launch_wanted:
            return []  # already launched, being stopped, or not staged: the shepherd hears of that by report
        until_s = self._line.deadline_s(task.order.key.of_attempt)
        if until_s <= now_s or self._ledger.is_waking:
            return []  # asked again with the next contact
        order = task.order
        gpus = self._ledger.gpus_of(order.key)
        missing = order.local_ranks * order.spec.demand.gpus - len(gpus)
        if missing > 0:  # a rank without its own would take another's, or fail as if the job were to blame
            detail = f"{missing} of its GPUs vanished from {self._node_id} before its start"
            return self._exited(task, now_s, failure=TaskFailure.INTERNAL, detail=detail)
        self._change(task, None, stage=TaskStage.LAUNCHED)
        task.acknowledged = task.status.revision  # the answer to the command says it
        self._desk.launched(order.key)
        task.was_launched = True
        return [_persist(task), StartTask(order, gpus, until_s)]

    def _release(self, request: ReleaseRequest, now_s: float) -> list[Effect]:
        key = request.key
        proven: list[Effect] = []
        if request.fault in PROVEN and self._ledger.repeated(request) is None:
            detail = f"{PROVEN[request.fault]} of {handle(request.job_id)} could be had elsewhere, and not here"
            self._trouble.failed(request.fault, detail, now_s)
            proven = self._heed_trouble(now_s)
        answer, durable = self._ledger.release(request, now_s)
        effects: list[Effect] = [*durable, *self._desk.withdraw(key), SendPeer(request.shepherd, answer)]
        effects += [*proven, *self._desk.retry(now_s)]
        task = self._tasks.get(key)
        if task is None or answer.refusal is Refusal.STALE_EPOCH:
            return effects
        if task.status.stage is TaskStage.EXITED:
            return [*effects, *self._forget(key)]
        task.is_released = task.is_stopping = True
        return [*effects, StopTask.about(key, RELEASE_GRACE_S)]

    def _stop(self, request: StopRequest, now_s: float) -> list[Effect]:
        answer, durable, task = self._check(request, now_s)
        effects: list[Effect] = [*durable, SendPeer(request.shepherd, answer)]
        if task is None or answer.refusal is not Refusal.NONE:
            return effects
        task.is_stopping = True
        if task.status.stage is TaskStage.EXITED:
            return [*effects, *self._report(task, now_s)]
        return [*effects, StopTask.about(request.key, request.grace_s)]

    def _signal(self, request: SignalRequest, now_s: float) -> list[Effect]:
        stored = self._ledger.repeated(request)
        if stored is not None:
            return [SendPeer(request.shepherd, stored)]
        answer, durable, task = self._check(request, now_s)
        effects: list[Effect] = [*durable, SendPeer(request.shepherd, answer)]
        if task is not None and answer.refusal is Refusal.NONE:
            effects.append(SignalTask.about(request.key, request.signal))
        return effects

    def _publish(self, request: WorldRequest, now_s: float) -> list[Effect]:
        answer, durable, task = self._check(request, now_s)
        effects: list[Effect] = [*durable, SendPeer(request.shepherd, answer)]
        if task is not None and answer.refusal is Refusal.NONE and task.status.stage is not TaskStage.EXITED:
            effects.append(PublishWorld.about(request.key, request.plan))
        return effects

    def _tell_status(self, request: StatusRequest, now_s: float) -> list[Effect]:
        answer, durable, task = self._check(request, now_s)
        effects: list[Effect] = [*durable, SendPeer(request.shepherd, answer)]
        if task is None or answer.refusal is not Refusal.NONE:
            return effects
        task.acknowledged = -1
        task.is_released = task.is_released and not task.is_orphan
        return [*effects, *self._report(task, now_s)]

    def _check(
        self, request: StopRequest | SignalRequest | WorldRequest | StatusRequest, now_s: float
    ) -> tuple[OwnerAnswer, list[Persist], _Task | None]:
        """The ledger's word, corrected by ours: an ended task has no lease any more but is not unknown."""
        answer, durable = self._ledger.check(request, now_s)
        task = self._tasks.get(request.key)
        if answer.refusal is Refusal.STALE_EPOCH:
            return answer, durable, task
        if task is None:
            return replace(answer, refusal=Refusal.UNKNOWN), durable, None
        adopted = self._adopt(task, request.shepherd, request.epoch, now_s)
        durable = [*durable, *(effect for effect in adopted if isinstance(effect, Persist))]
        return _corrected(answer, task), durable, task

    # Facts from the runner.

    def _note_fault(self, task: _Task, event: TaskFact, now_s: float) -> list[Effect]:
        """What a start that came to nothing by this node's own fault, or succeeded, says of those that follow."""
        status = task.status
        match event:
            case TaskStaged():
                self._trouble.staged(task.order)
            case TaskStarted():
                self._trouble.started()
            case TaskStageFailed(failure=TaskFailure.INTERNAL, detail=detail):
                is_build = status.phase == StartPhase.ENVIRONMENT.value
                kind = TaskFailure.ENVIRONMENT if is_build else TaskFailure.SYNC
                self._trouble.failed(kind, cleaned(detail), now_s)
            case TaskExited(failure=TaskFailure.INTERNAL, detail=detail):
                self._trouble.failed(TaskFailure.INTERNAL, cleaned(detail), now_s)
            case _:
                return []
        return self._heed_trouble(now_s)

    def _heed_trouble(self, now_s: float) -> list[Effect]:
        before, reason = self._ledger.avoided_reason, self._trouble.reason(now_s)
        self._trouble_again_s = self._trouble.ends_s(now_s)
        self._ledger.set_avoided(reason)
        if bool(reason) == bool(before):
            return []
        if not reason:
            return [Announce("node.offered", f"{self._node_id} takes new work again", node=self._node_id)]
        return [Announce("node.avoided", f"{self._node_id} takes no new work: {reason}", node=self._node_id)]

    def _on_task_event(self, event: TaskFact, now_s: float) -> list[Effect]:
        task = self._tasks.get(event.key)
        if task is None and isinstance(event, TaskExited):
            return [ForgetTask.about(event.key)]  # one that nobody ordered, or that was given up
        if task is None or task.status.stage is TaskStage.EXITED:
            return []
        return [*self._note_fault(task, event, now_s), *self._take_fact(task, event, now_s)]

    def _take_fact(self, task: _Task, event: TaskFact, now_s: float) -> list[Effect]:
        match event:
            case TaskPhaseChanged(phase=phase):
                return self._change(task, now_s, phase=cleaned(phase, 16))
            case TaskStaged():
                if task.status.stage is not TaskStage.ORDERED:
                    return []
                return self._change(task, now_s, stage=TaskStage.STAGED, phase="")
            case TaskStageFailed(failure=failure, detail=detail):
                return self._exited(task, now_s, failure=failure, detail=cleaned(detail))
            case TaskStarted():
                task.started_s = now_s
                return self._change(task, now_s, stage=TaskStage.STARTED, phase="")
            case TaskFreezeChanged(is_frozen=is_frozen):
                return [self._tell_freeze(task, is_frozen), *self._change(task, now_s, is_frozen=is_frozen)]
            case WorkerTold(worker=worker):
                return self._change(task, now_s, worker=worker)
            case RankExited():
                return self._rank_exited(task, event.exit, now_s)
            case TaskExited(exits=exits, failure=failure, detail=detail):
                return self._exited(task, now_s, exits=exits, failure=failure, detail=cleaned(detail))
            case _:
                assert_never(event)

    def _rank_exited(self, task: _Task, rank_exit: RankExit, now_s: float) -> list[Effect]:
        exits = task.status.exits
        is_known = any(known.rank == rank_exit.rank for known in exits)
        return [] if is_known else self._change(task, now_s, exits=(*exits, rank_exit))

    def _exited(self, task: _Task, now_s: float, **changes: object) -> list[Effect]:
        """No process is left: the lease ends, and only then is anybody told."""
        key = task.order.key
        if task.is_orphan:  # that it obeyed our signal says nothing about the job
            changes |= {"failure": TaskFailure.LOST, "detail": f"{self._node_id} had lost its order"}
            if not task.is_released:  # else its result is kept for ever if whoever asked for it forgets the job
                self._watch(task, now_s)
        _, durable = self._ledger.end(key, now_s)
        effects: list[Effect] = [*self._desk.drop_port(key), *durable]
        if task.is_released:
            return [*effects, *self._forget(key)]
        report = self._change(task, now_s, stage=TaskStage.EXITED, **changes)
        self._mark_ended(key)
        return [*effects, *([] if _has_shim_record(task) else [_persist(task)]), *report]

    def _on_found(self, event: TasksFound, now_s: float) -> list[Effect]:
        """After a restart: the disk knows which tasks ever started; what it does not know was never launched."""
        effects: list[Effect] = []
        found = {each.status.key: each for each in event.tasks}
        for key, task in list(self._tasks.items()):
            known = found.pop(key, None)
            if known is not None:
                effects += self._resume(task, known.status, now_s)
            elif task.status.stage is not TaskStage.EXITED:
                effects += self._take_up(task, now_s)
            entry = self._ledger.entry(key)
            if entry is not None and entry.state is BookingState.DRAINING:
                task.is_released = task.is_stopping = True
                effects.append(StopTask.about(key, RELEASE_GRACE_S))
        for orphan in found.values():
            effects += self._end_orphan(orphan, now_s)
        for entry in self._ledger.entries:
            if entry.state is BookingState.DRAINING and entry.key not in self._tasks:
                effects += self._ledger.end(entry.key, now_s)[1]  # it ended while no agent ran
        return effects

    def _end_orphan(self, found: FoundTask, now_s: float) -> list[Effect]:
        """Its order was lost with the database, its processes were not: they have their GPUs until they are gone."""
        order, status = found.order, found.status
        key = order.key
        text = "found a task that nobody ordered; stopping it"
        effects: list[Effect] = [Announce("task.orphaned", text, order.job_id, self._node_id)]
        if status.stage is not TaskStage.EXITED:
            status = replace(status, generation=self._ledger.report().generation)
            task = _Task(order, self._node_id, status, acknowledged=status.revision, was_launched=True)
            task.is_orphan = task.is_released = task.is_stopping = True
            self._tasks[key] = task
            effects += self._ledger.drain(order, found.gpus, now_s)
        return [*effects, StopTask.about(key, RELEASE_GRACE_S)]

    def _take_up(self, task: _Task, now_s: float) -> list[Effect]:
        """A task without processes or a record of them: with its lease one that was never launched is brought as far as
        it was; of any other the result is lost."""
        if task.was_launched:
            detail = f"{self._node_id} has no record of what became of its processes"
            return self._exited(task, now_s, failure=TaskFailure.LOST, detail=detail)
        if self._ledger.entry(task.order.key) is None:
            detail = f"{self._node_id} has no record of how it ended"
            told = self._change(task, now_s, stage=TaskStage.EXITED, failure=TaskFailure.LOST, detail=detail)
            self._mark_ended(task.order.key)
            return told
        if task.order.needs_staging:
            return [StageTask(task.order)]
        return self._change(task, now_s, stage=TaskStage.STAGED)

    def _resume(self, task: _Task, status: TaskStatus, now_s: float) -> list[Effect]:
        changes: dict[str, object] = {
            "exits": status.exits,
            "failure": status.failure,
            "detail": cleaned(status.detail),
            "is_frozen": status.is_frozen,
        }
        task.acknowledged = -1
        if task.status.stage is TaskStage.EXITED:
            return []  # why it ended stands in our own books
        if status.stage is TaskStage.EXITED:
            return self._exited(task, now_s, **changes)
        if status.ran_s:
            task.started_s = now_s - status.ran_s
        return self._change(task, now_s, stage=status.stage, **changes)

    # Reports.

    def _change(self, task: _Task, now_s: float | None, **changes: object) -> list[Effect]:
        """A new revision; reported at once unless `now_s` is None."""
        task.status = replace(task.status, **changes, revision=task.status.revision + 1)
        task.report_interval_s = REPORT_INTERVAL_S
        return [] if now_s is None else self._report(task, now_s)

    def _report(self, task: _Task, now_s: float) -> list[Effect]:
        task.next_report_s = now_s + task.report_interval_s
        task.report_interval_s = min(REPORT_INTERVAL_S_MAX, task.report_interval_s * 1.5)
        status = replace(task.status, ran_s=max(0.0, now_s - task.started_s))
        return [SendPeer(task.shepherd, TaskReport(status, self._ledger.report(), self._ledger.origin))]

    def _on_timer(self, now_s: float) -> list[Effect]:
        expired_holds, durable = self._ledger.expire(now_s)
        effects: list[Effect] = [*durable]
        for expired in expired_holds:
            effects += self._desk.drop_port(expired.key)
            effects.append(Announce("hold.expired", "hold ran out undecided", expired.job_id, self._node_id))
        effects += self._line.on_timer(now_s)
        if now_s >= self._trouble_again_s:
            effects += self._heed_trouble(now_s)
        effects += self._desk.retry(now_s)
        for task in self._tasks.values():
            if _must_report(task) and now_s >= task.next_report_s:
                effects += self._report(task, now_s)
        return effects

    # Small things.

    def _adopt(self, task: _Task, shepherd: NodeId, epoch: int, now_s: float) -> list[Effect]:
        """A shepherd of a newer epoch takes over; it hears everything again."""
        if epoch <= task.status.epoch and shepherd == task.shepherd:
            return []
        durable = [] if task.is_orphan else [_persist(task, shepherd)]
        task.shepherd = shepherd
        task.status = replace(task.status, epoch=max(epoch, task.status.epoch))
        task.acknowledged, task.next_report_s = -1, now_s
        return [*durable]

    def generation_changed(self, now_s: float) -> None:
        """This node speaks under a newer generation: whatever was told under the old one is told again."""
        generation = self._ledger.report().generation
        for task in self._tasks.values():
            task.status = replace(task.status, generation=generation)
            task.acknowledged, task.next_report_s = -1, now_s

    def _fresh_status(self, order: TaskOrder) -> TaskStatus:
        generation = self._ledger.report().generation
        numbers = (order.job_id, order.epoch, order.attempt)
        return TaskStatus(*numbers, order.node, TaskStage.ORDERED, generation=generation, part=order.part)

    def forget(self, job_id: JobId, now_s: float) -> list[Effect]:
        """The job has ended: free the holds that are left of it here, and the ports that were bound for them."""
        _, durable = self._ledger.forget(job_id, now_s)
        return [*durable, *self._desk.drop_idle_ports(job_id)]

    # What the holders say.

    def contact_answered(self, sender: NodeId, message: ContactAnswered, now_s: float) -> list[Effect]:
        """A holder lets our tasks run on, or tells that some are over: those end.

        The result of one that had ended before is wanted by nobody then, and its shepherd may never acknowledge it.
        """
        effects: list[Effect] = [*self._line.answered(sender, message, now_s)]
        for attempt in self._line.over:
            for key in self._parts(attempt):
                effects += self._end_superseded(key, now_s)
        for task in self._tasks.values():
            effects += self._start(task, now_s)
        return [*effects, *self._save_holders()]

    def end_left_over(self, ended_epoch: Callable[[JobId], int], now_s: float) -> list[Effect]:
        """Tasks whose time is over, of jobs whose end everybody was told: of their holders too few are left to say so.

        `ended_epoch`: in which epoch a job has ended; 0 for one that nobody has told of.
        """
        effects: list[Effect] = []
        for key, task in list(self._tasks.items()):
            is_silent = self._line.is_watched(key.of_attempt) and now_s >= self._line.deadline_s(key.of_attempt)
            if is_silent and ended_epoch(key[0]) >= task.status.epoch:
                effects += self._end_superseded(key, now_s)
        return effects

    def learn(self, record: JobRecord, now_s: float) -> list[Effect]:
        """Our own store has this record, whose holders count from this moment. Else, as one of two old holders, we
        would go on believing that nobody can decide without us."""
        extended = self._line.learned(record.job_id, record.stamp, record.configuration, now_s)
        return [*extended, *self._save_holders()]

    def _save_holders(self) -> list[Persist]:
        saved: list[Persist] = []
        for watched in self._line.unsaved():
            for key in self._parts(watched.key):
                task = self._tasks[key]
                task.holders = (watched.configuration, watched.former, watched.stamp)
                saved.append(_persist(task))
        return saved

    def shepherd_of(self, attempt: AttemptKey) -> NodeId | None:
        """Whom its running tasks report to."""
        tasks = [self._tasks[key] for key in self._parts(attempt)]
        return next((task.shepherd for task in tasks if task.status.stage is not TaskStage.EXITED), None)

    def _parts(self, attempt: AttemptKey) -> list[TaskKey]:
        """The tasks that are known of it."""
        return [key for key in self._tasks if key.of_attempt == attempt]

    def _mark_ended(self, key: TaskKey) -> None:
        """Nothing of the attempt needs time to run any more, once the last of its tasks has ended."""
        if all(self._tasks[each].status.stage is TaskStage.EXITED for each in self._parts(key.of_attempt)):
            self._line.ended(key.of_attempt)

    def validate(self) -> None:
        """Re-derive what binds tasks to bookings and to contacts with holders."""
        self._desk.validate()
        self._line.validate()
        for key, task in self._tasks.items():
            assert key == task.order.key == task.status.key
            assert task.order.node == self._node_id or task.is_orphan
            assert task.acknowledged <= task.status.revision, "a revision was heard that was never told"
            is_over = task.status.stage is TaskStage.EXITED
            assert is_over or self._ledger.entry(key) is not None, f"{key} may have processes and is not booked"
            is_watched = self._line.is_watched(key.of_attempt)
            assert is_over or task.is_orphan or is_watched, f"{key} asks no holder how long it may run"

    def _end_superseded(self, key: TaskKey, now_s: float) -> list[Effect]:
        """Frozen ranks get no last words: another attempt may be running by now.  Those whose time is not over have
        what is left of it, since their shepherd orders a stop with grace just as the holders learn of it.
        """
        task = self._tasks.get(key)
        if task is None:
            return []
        if task.status.stage is TaskStage.EXITED:
            return self._forget(key)
        if task.is_superseded:
            return []
        task.is_superseded = task.is_stopping = True
        grace_s = max(0.0, min(task.order.spec.grace_s, RELEASE_GRACE_S, self._line.deadline_s(key.of_attempt) - now_s))
        text = "its job has gone on without it, or has ended"
        ended = Announce("task.killed_over", text, key[0], self._node_id, {"attempt": key[1]})
        return [ended, StopTask.about(key, grace_s)]

    def _tell_freeze(self, task: _Task, is_frozen: bool) -> Announce:
        kind, text = ("task.frozen", "no majority of the job's holders answers: its ranks are frozen")
        if not is_frozen:
            kind, text = ("task.thawed", "the job's holders answer again: its ranks go on")
        return Announce(kind, text, task.order.job_id, self._node_id, {"attempt": task.order.attempt})

    def _watch(self, task: _Task, now_s: float) -> None:
        order = task.order
        holders, former, stamp = task.holders or (order.configuration, Configuration(), (order.epoch, order.version))
        self._line.watch(order.key.of_attempt, holders, stamp, order.spec.on_isolation, now_s, former)

    def _forget(self, key: TaskKey) -> list[Effect]:
        del self._tasks[key]
        if not self._parts(key.of_attempt):
            self._line.forget(key.of_attempt)
        return [Persist(TASK_ROOM, str(key), None), ForgetTask.about(key)]


def _must_report(task: _Task) -> bool:
    """News, or a lease that was never launched: its shepherd may have forgotten it, and releases it then."""
    is_idle = task.status.stage in (TaskStage.ORDERED, TaskStage.STAGED)
    return is_idle or task.acknowledged < task.status.revision


def _corrected(answer: OwnerAnswer, task: _Task | None) -> OwnerAnswer:
    """An ended task has no lease any more, but its attempt is not over before its result was heard; and of one that is
    wound up, nothing may be said that means that nothing is left."""
    if task is None or answer.refusal in (Refusal.NONE, Refusal.STALE_EPOCH):
        return answer
    if task.status.stage is TaskStage.EXITED:
        return replace(answer, refusal=Refusal.NONE, detail="")
    return replace(answer, refusal=Refusal.DRAINING, detail="its processes are being stopped")


def _has_shim_record(task: _Task) -> bool:
    """Where an ended task's exit codes are after a restart: they are not in our own books."""
    return task.was_launched and task.status.failure is TaskFailure.NONE


def _persist(task: _Task, shepherd: NodeId | None = None) -> Persist:
    """`shepherd`: instead of the present one."""
    status = task.status
    is_ended = status.stage is TaskStage.EXITED and not _has_shim_record(task)
    stored = StoredTask(
        task.order, shepherd or task.shepherd, is_ended, status.failure, status.detail, task.was_launched
    )
    if task.holders is not None:
        holders, former, (epoch, version) = task.holders
        stored = replace(stored, holders=holders, former_holders=former, epoch=epoch, version=version)
    return Persist(TASK_ROOM, str(task.order.key), encode_value(StoredTask, stored))


def _read_task(key: str, data: bytes) -> StoredTask:
    try:
        return decode_value(StoredTask, data)
    except ProtocolError as error:
        raise StorageError(f"{TASK_ROOM}/{key}", f"unreadable entry: {error}", "") from error
