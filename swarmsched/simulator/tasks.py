"""A model of one machine's tasks: ports, staging, ranks that run for a while and exit.

It stands for supervision and its shims, and like them it outlives the agent: what happens while the node is down is
told by `found` when it is back.  Nothing runs; a rank's length and exit code come from a `Behaviour`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarmsched.effects import (
    BindRendezvous,
    ForgetTask,
    ReleaseRendezvous,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
)
from swarmsched.events import (
    RankExited,
    RendezvousBound,
    TaskExited,
    TaskPhaseChanged,
    TaskStaged,
    TaskStageFailed,
    TaskStarted,
)
from swarmsched.ids import JobId
from swarmsched.simulator.loop import EventLoop, Timer
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage, TaskStatus

TaskEffect = BindRendezvous | ReleaseRendezvous | StageTask | StartTask | SignalTask | StopTask | ForgetTask
TASK_EFFECTS = (BindRendezvous, ReleaseRendezvous, StageTask, StartTask, SignalTask, StopTask, ForgetTask)
TaskFact = RendezvousBound | TaskPhaseChanged | TaskStaged | TaskStageFailed | TaskStarted | RankExited | TaskExited
Key = tuple[JobId, int]

BIND_S = 0.000_5
STAGE_S = 0.050
START_S = 0.020
TERMINATE_S = 0.010  # from SIGTERM to the last exit, for ranks that obey
SIGTERM, SIGKILL = 15, 9
FIRST_PORT = 29_500
STAGE_FAILURES = (TaskFailure.SYNC, TaskFailure.ENVIRONMENT, TaskFailure.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How one rank will go: `duration_s` of running, then this exit code.

    A `failure` of a task's first rank keeps the whole task from starting: while staging, if it is staged at all and
    the failure is of that kind, otherwise at the launch.
    """

    duration_s: float
    exit_code: int = 0
    obeys_sigterm: bool = True
    failure: TaskFailure = TaskFailure.NONE


Behaviour = Callable[[TaskOrder, int], RankPlan]
"""From an order and a global rank to what that rank does."""


def read_command(order: TaskOrder, rank: int) -> RankPlan:
    """The default behaviour: `sleep SECONDS`, `true`, `false`, `exit CODE`; anything else exits with 127 at once."""
    del rank
    match order.spec.command:
        case ("sleep", seconds):
            return RankPlan(float(seconds))
        case ("true",):
            return RankPlan(0.0)
        case ("false",):
            return RankPlan(0.0, 1)
        case ("exit", code):
            return RankPlan(0.0, int(code))
        case _:
            return RankPlan(0.0, 127)


@dataclass(slots=True)
class RunningTask:
    """One task of the machine.  `plans` loses a rank when it exits; the task is over when it is empty."""

    order: TaskOrder
    gpus: tuple[str, ...]  # UUIDs
    plans: dict[int, RankPlan]
    has_started: bool = False
    exits: list[RankExit] = field(default_factory=list)
    timers: dict[int, Timer] = field(default_factory=dict)  # one for each rank whose end is known
    ends_s: dict[int, float] = field(default_factory=dict)  # when that timer fires
    failure: TaskFailure = TaskFailure.NONE  # why no rank was started

    @property
    def is_over(self) -> bool:
        """True when no process is left."""
        return not self.plans

    def status(self) -> TaskStatus:
        """What a search of the disk finds."""
        stage = TaskStage.EXITED if self.is_over else TaskStage.STARTED if self.has_started else TaskStage.LAUNCHED
        order = self.order
        exits = tuple(self.exits)
        return TaskStatus(order.job_id, order.epoch, order.attempt, order.node, stage, exits, self.failure)


class TaskModel:
    """All tasks of one machine.  Facts go to `tell`, which drops them while the agent is down."""

    def __init__(self, loop: EventLoop, host: str, tell: Callable[[TaskFact], None], behaviour: Behaviour) -> None:
        self._loop = loop
        self._host = host
        self._tell = tell
        self._behaviour = behaviour
        self._tasks: dict[Key, RunningTask] = {}
        self._staging: dict[Key, Timer] = {}
        self._ports: dict[Key, int] = {}
        self._next_port = FIRST_PORT
        self.start_count = 0  # tasks ever started here

    @property
    def running(self) -> tuple[RunningTask, ...]:
        """Tasks with processes."""
        return tuple(task for task in self._tasks.values() if not task.is_over)

    @property
    def bound_ports(self) -> int:
        """Rendezvous ports that are neither released nor taken over by a task."""
        return len(self._ports)

    def found(self) -> tuple[TaskStatus, ...]:
        """What an agent finds on the disk when it starts."""
        return tuple(task.status() for task in self._tasks.values())

    def agent_died(self) -> None:
        """Ports and staging belonged to the agent's process; tasks do not."""
        for timer in self._staging.values():
            timer.cancel()
        self._staging.clear()
        self._ports.clear()

    def perform(self, effect: TaskEffect) -> None:
        """Do what the node asks; all repeats are harmless."""
        match effect:
            case BindRendezvous(job_id=job_id, attempt=attempt):
                self._bind((job_id, attempt))
            case ReleaseRendezvous(job_id=job_id, attempt=attempt):
                self._ports.pop((job_id, attempt), None)
            case StageTask(order=order):
                self._stage(order)
            case StartTask():
                self._start(effect)
            case SignalTask(job_id=job_id, attempt=attempt, signal=signal):
                if signal in (SIGTERM, SIGKILL):
                    self._terminate((job_id, attempt), 0.0 if signal == SIGKILL else None)
            case StopTask(job_id=job_id, attempt=attempt, grace_s=grace_s):
                self._stop((job_id, attempt), grace_s)
            case ForgetTask(job_id=job_id, attempt=attempt):
                self._forget((job_id, attempt))

    def _bind(self, key: Key) -> None:
        if key not in self._ports:
            self._ports[key] = self._next_port
            self._next_port = FIRST_PORT + (self._next_port - FIRST_PORT + 1) % 1_000
        bound = RendezvousBound(*key, self._host, self._ports[key])
        self._loop.call_later(BIND_S, lambda: self._tell(bound))

    def _stage(self, order: TaskOrder) -> None:
        key = (order.job_id, order.attempt)
        if key in self._staging or key in self._tasks:
            return
        phases = ["sync"] * bool(order.spec.tree) + ["environment"] * bool(order.spec.requirements)
        for phase in phases:
            self._tell(TaskPhaseChanged(*key, phase))
        failure = self._behaviour(order, order.first_rank).failure
        self._staging[key] = self._loop.call_later(STAGE_S * max(1, len(phases)), lambda: self._staged(key, failure))

    def _staged(self, key: Key, failure: TaskFailure) -> None:
        del self._staging[key]
        if failure in STAGE_FAILURES:
            self._tell(TaskStageFailed(*key, failure, f"simulated: {failure.value}"))
        else:
            self._tell(TaskStaged(*key))

    def _start(self, effect: StartTask) -> None:
        order = effect.order
        key = (order.job_id, order.attempt)
        if key in self._tasks:
            return
        self._ports.pop(key, None)
        count = 1 if order.spec.per_node else order.local_ranks
        plans = {order.first_rank + n: self._behaviour(order, order.first_rank + n) for n in range(count)}
        self._tasks[key] = RunningTask(order, tuple(gpu.uuid for gpu in effect.gpus), plans)
        self.start_count += 1
        self._loop.call_later(START_S, lambda: self._started(key))

    def _started(self, key: Key) -> None:
        task = self._tasks.get(key)
        if task is None or task.is_over:
            return
        failure = task.plans[task.order.first_rank].failure
        if failure not in (TaskFailure.NONE, *STAGE_FAILURES):
            task.failure, task.plans = failure, {}
            self._tell(TaskExited(*key, (), failure, f"simulated: {failure.value}"))
            return
        task.has_started = True
        self._tell(TaskStarted(*key, self._loop.now_s))
        for rank, plan in list(task.plans.items()):
            rank_exit = RankExit(rank, plan.exit_code)
            self._exit_later(key, task, rank_exit, plan.duration_s)

    def _exit_later(self, key: Key, task: RunningTask, rank_exit: RankExit, delay_s: float) -> None:
        """Whatever ends a rank first ends it: a repeated stop must not put off the kill of the first."""
        rank, end_s = rank_exit.rank, self._loop.now_s + delay_s
        if rank in task.timers:
            if task.ends_s[rank] <= end_s:
                return
            task.timers[rank].cancel()
        task.ends_s[rank] = end_s
        task.timers[rank] = self._loop.call_at(end_s, lambda: self._exited(key, task, rank_exit))

    def _exited(self, key: Key, task: RunningTask, rank_exit: RankExit) -> None:
        if task.plans.pop(rank_exit.rank, None) is None:
            return
        task.timers.pop(rank_exit.rank, None)
        task.exits.append(rank_exit)
        self._tell(RankExited(*key, rank_exit))
        if task.is_over:
            self._tell(TaskExited(*key, tuple(task.exits)))

    def _stop(self, key: Key, grace_s: float) -> None:
        staging = self._staging.pop(key, None)
        if staging is not None:
            staging.cancel()
        task = self._tasks.get(key)
        if task is None or task.is_over:
            exits, failure = ((), TaskFailure.NONE) if task is None else (tuple(task.exits), task.failure)
            self._tell(TaskExited(*key, exits, failure))
        else:
            self._terminate(key, grace_s)

    def _terminate(self, key: Key, grace_s: float | None) -> None:
        """SIGTERM, and SIGKILL after the grace; None: only SIGTERM, 0: SIGKILL."""
        task = self._tasks.get(key)
        if task is None:
            return
        for rank, plan in list(task.plans.items()):
            if plan.obeys_sigterm and grace_s != 0.0:
                delay_s = TERMINATE_S if grace_s is None else min(TERMINATE_S, grace_s)
                self._exit_later(key, task, RankExit(rank, 0, SIGTERM), delay_s)
            elif grace_s is not None:
                self._exit_later(key, task, RankExit(rank, 0, SIGKILL), grace_s)

    def _forget(self, key: Key) -> None:
        task = self._tasks.get(key)
        if task is not None and task.is_over:
            del self._tasks[key]
