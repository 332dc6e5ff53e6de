"""A model of one machine's tasks: ports, staging, ranks that run for a while and exit.

It stands for supervision and its shims, and like them it outlives the agent: what happens while the node is down is
told by `found` when it is back.  Nothing runs; a rank's length and exit code come from a `Behaviour`.  Ranks whose
time is over on the machine's clock stand still until it is extended, whether an agent lives or not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from swarmsched.checkpoint import Checkpoint
from swarmsched.effects import (
    BindRendezvous,
    ExtendAttempt,
    ForgetTask,
    PublishWorld,
    ReleaseRendezvous,
    SetBatch,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
    TaskEffect,
)
from swarmsched.events import (
    FoundTask,
    RankExited,
    RendezvousBound,
    TaskExited,
    TaskFact,
    TaskFreezeChanged,
    TaskPhaseChanged,
    TaskStaged,
    TaskStageFailed,
    TaskStarted,
    WorkerTold,
)
from swarmsched.ids import AttemptKey, TaskKey
from swarmsched.simulator.clock import HostClock
from swarmsched.simulator.loop import EventLoop, Timer
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage, TaskStatus
from swarmsched.world import Worker, WorkerState, WorldPlan

BIND_S = 0.000_5
STAGE_S = 0.050
START_S = 0.020
SWITCH_S = 0.050  # from the news of a world until a worker trains in it, or has left
LAST_STEP_S = 2 * SWITCH_S  # of a training that is over once they train: nobody ends before all have switched
BUILD_S = 60.0  # that it waits for the others of a world, which it gives up then
ASKS_AGAIN_S = 0.5  # after its agent's restart, or when it was frozen
WRITE_BACK_S = 30.0  # until the kernel has put on disk what nobody has synced
SILENT_S = 2.0  # until an agent knows of a worker that it stands still
WAITS_S = 3.0  # until others say that they wait for it
WAITS = "waits for a rank that stands still"
TIMES_OUT_S = 4.0  # from then on until that has timed out
COPY_S = (0.05, 0.3, 2.0, 9.0)  # that checkpoints of elastic attempts take to other machines, one after another
TERMINATE_S = 0.010  # from SIGTERM to the last exit, for ranks that obey
SIGTERM, SIGKILL = 15, 9
FIRST_PORT = 29_500
FOR_EVER_S = 1e6  # a rank that runs so long has no end of its own
CLOCK_STEP_S = 1e-6  # what rounding may leave
CLOCK_SLACK_S = 0.5
STAGE_FAILURES = (TaskFailure.SYNC, TaskFailure.ENVIRONMENT, TaskFailure.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How one rank will go: `duration_s` of running, then this exit code.

    A `failure` of a task's first rank keeps the whole task from starting: while staging, if it is staged at all and
    the failure is of that kind, otherwise at the launch.  Rank 0 commits a checkpoint every `checkpoint_period_s` of
    running, and takes that much off its duration for each one that it resumes from; of an elastic attempt whoever is
    first of the newest world that trains commits.  One that outlives SIGKILL computes no more.  The duration of an
    elastic part counts from the first start of its attempt; once one stands still the others wait until they train
    without it, and nothing but SIGKILL ends it while any is there.  One that hangs goes on asking its agent meanwhile.
    Once one dies, or a connection between two ends, all of its world wait for the next.
    """

    duration_s: float
    exit_code: int = 0
    obeys_sigterm: bool = True
    failure: TaskFailure = TaskFailure.NONE
    checkpoint_period_s: float = math.inf
    outlives_kill_s: float = 0.0  # the kernel lets go of it only then
    ready_s: float = 0.3  # from its start until the worker of an elastic part is
    hears_s: float = 0.0  # from the moment at which its agent knows a world until it does
    stays: bool = False  # when it has left: only a stop ends it
    refuses: bool = False  # to train in whatever world names it
    stands_still_s: float = math.inf  # after it has begun to train
    hangs: bool = False
    elements: int = 0  # of the range that its task asks to have hosted


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


class TaskChange(Enum):
    """What becomes of a task's processes."""

    STARTED = "started"  # they exist and run
    FROZEN = "frozen"
    THAWED = "thawed"
    REBATCHED = "rebatched"  # they go on with another global batch
    REGROUPED = "regrouped"  # its worker trains in another world
    ENDED = "ended"  # none is left


@dataclass(slots=True)
class RunningTask:
    """One task of the machine.  `plans` loses a rank when it exits; the task is over when it is empty."""

    order: TaskOrder
    gpus: tuple[str, ...]  # UUIDs
    plans: dict[int, RankPlan]
    until_s: float = math.inf  # on the machine's clock; then it freezes
    kill_s: float = math.inf  # virtual time of SIGKILL, once a stop was asked for
    began_s: float = 0.0  # virtual time
    has_started: bool = False
    is_frozen: bool = False
    exits: list[RankExit] = field(default_factory=list)
    ends: dict[int, tuple[float, Timer, RankExit]] = field(default_factory=dict)  # rank -> when, by virtual time
    left_s: dict[int, tuple[float, RankExit]] = field(default_factory=dict)  # frozen rank -> what it has yet to run
    failure: TaskFailure = TaskFailure.NONE  # why no rank was started, or how all were lost
    detail: str = ""
    checkpoint_count: int = 0  # of the job, with those of earlier attempts
    global_batch: int = 0  # with which its ranks train
    worker: Worker = field(default_factory=Worker)  # of an elastic part
    plan: WorldPlan | None = None  # the newest that reached it
    world: WorldPlan | None = None  # in which it trains, or did until that was lost
    copying: Checkpoint | None = None  # complete, on its way to other machines before it is committed
    copied_next: Checkpoint | None = None
    is_still: bool = False
    is_waiting: bool = False  # for another part that stands still, or for the next world
    lost: int = 0  # the newest world that came to nothing, told or not
    is_struck: bool = False  # from outside: nobody had ordered its end

    @property
    def key(self) -> TaskKey:
        """As in its order."""
        return self.order.key

    @property
    def is_over(self) -> bool:
        """True when no process is left."""
        return not self.plans

    @property
    def hangs(self) -> bool:
        """Where it stands still: it asks its agent for plans all the same."""
        return any(plan.hangs for plan in self.plans.values())

    @property
    def elements(self) -> int:
        """Of the range that it asks to have hosted; 0: it asks for none."""
        return max((plan.elements for plan in self.plans.values()), default=0)

    def status(self) -> TaskStatus:
        """What a search of the disk finds."""
        stage = TaskStage.EXITED if self.is_over else TaskStage.STARTED if self.has_started else TaskStage.LAUNCHED
        order = self.order
        return TaskStatus(
            order.job_id,
            order.epoch,
            order.attempt,
            order.node,
            stage,
            tuple(self.exits),
            self.failure,
            self.detail,
            is_frozen=self.is_frozen,
            part=order.part,
            worker=self.worker,
        )


@dataclass(slots=True)
class ElasticAttempts:
    """On all machines together: when each began to train, and its parts."""

    begun_s: dict[AttemptKey, float] = field(default_factory=dict)
    steps: dict[AttemptKey, int] = field(default_factory=dict)  # checkpoints that were written, by whichever part
    torn: dict[AttemptKey, None] = field(default_factory=dict)  # the next switch succeeds on one part only
    parts: dict[AttemptKey, list[tuple["TaskModel", RunningTask]]] = field(default_factory=dict)

    def trainers(self, attempt: AttemptKey) -> list[tuple["TaskModel", RunningTask]]:
        """Parts that train, or stand still."""
        return [(model, task) for model, task in self.live(attempt) if task.worker.trains]

    def live(self, attempt: AttemptKey) -> list[tuple["TaskModel", RunningTask]]:
        """Parts with processes."""
        return [(model, task) for model, task in self.parts.get(attempt, ()) if not task.is_over]


class TaskModel:
    """All tasks of one machine.  Facts go to `tell`, which drops them while the agent is down.

    `commit` hears of each checkpoint that a rank has completed, `watch` of every change of processes.
    """

    def __init__(
        self,
        loop: EventLoop,
        host: str,
        tell: Callable[[RendezvousBound | TaskFact], None],
        behaviour: Behaviour,
        clock: HostClock | None = None,
        commit: Callable[[RunningTask, Checkpoint], None] = lambda task, checkpoint: None,
        watch: Callable[[RunningTask, TaskChange], None] = lambda task, change: None,
        attempts: ElasticAttempts | None = None,
    ) -> None:
        """`attempts` are shared by all machines."""
        self._loop = loop
        self._host = host
        self._tell = tell
        self._behaviour = behaviour
        self._clock = clock or HostClock(loop)
        self._commit = commit
        self._watch = watch
        self._attempts = attempts or ElasticAttempts()
        self._tasks: dict[TaskKey, RunningTask] = {}
        self._staging: dict[TaskKey, Timer] = {}
        self._ports: dict[TaskKey, int] = {}
        self._next_port = FIRST_PORT
        self._agent_life = 0  # a new agent knows no world that was told to the one before
        self._left_s_max = math.inf  # no rank runs longer from now on
        self.start_count = 0  # tasks ever started here
        self.ailment = TaskFailure.NONE  # by which all starts fail here now

    def fail_starts(self, how: TaskFailure) -> None:
        """Whatever is to start here fails so from now on; NONE: nothing does."""
        self.ailment = how

    @property
    def running(self) -> tuple[RunningTask, ...]:
        """Tasks with processes."""
        return tuple(task for task in self._tasks.values() if not task.is_over)

    @property
    def bound_ports(self) -> int:
        """Rendezvous ports that are neither released nor taken over by a task."""
        return len(self._ports)

    def found(self) -> tuple[FoundTask, ...]:
        """What an agent finds on the disk when it starts; workers ask it again."""
        for task in self.running:
            if task.worker.address:
                self._loop.post_later(ASKS_AGAIN_S, self._ask_again, task)
        return tuple(FoundTask(task.status(), task.order, task.gpus) for task in self._tasks.values())

    def agent_died(self) -> None:
        """Ports and staging belonged to the agent's process; tasks do not."""
        for timer in self._staging.values():
            timer.cancel()
        self._staging.clear()
        self._ports.clear()
        self._agent_life += 1

    def power_cut(self, *, loses_files: bool = False) -> None:
        """All processes end at once, and no shim lives to write down how.

        `loses_files`: those that were written in the last half minute had not reached the disk.
        """
        if loses_files:
            fresh_s = self._loop.now_s - WRITE_BACK_S
            self._tasks = {key: task for key, task in self._tasks.items() if self._end_for_good(task, fresh_s)}
        for task in list(self.running):
            task.failure = TaskFailure.LOST
            task.detail = f"the supervising process on {task.order.node} ended without a record"
            self._end(task)

    def _end_for_good(self, task: RunningTask, fresh_s: float) -> bool:
        """False for a task whose files are lost; its processes have ended then."""
        is_kept = task.began_s <= fresh_s
        if not is_kept and not task.is_over:
            self._end(task)
        return is_kept

    def wipe(self) -> None:
        """Control files were on the disk that is gone.  Only after `power_cut`."""
        self._tasks.clear()

    def hurry(self, left_s_max: float) -> None:
        """No rank has more to run than that from now on, but for those that only a stop ends."""
        self._left_s_max = left_s_max
        for task in self.running:
            for rank, (_, rank_exit) in list(task.left_s.items()):
                self._exit_later(task, rank_exit, self._left_s(task.plans[rank], left_s_max))
            for rank, (_, _, rank_exit) in list(task.ends.items()):
                self._exit_later(task, rank_exit, self._left_s(task.plans[rank], left_s_max))

    def finish(self, task: RunningTask, exit_code: int = 0) -> None:
        """The ranks of a task have done their work, or fail: they exit."""
        for rank in list(task.plans):
            self._exited(task, RankExit(rank, exit_code))

    def clock_changed(self) -> None:
        """The machine's clock runs at another rate: what was planned by it is planned again."""
        for task in self.running:
            self._keep_time(task)

    def perform(self, effect: TaskEffect) -> None:
        """Do what the node asks; all repeats are harmless."""
        match effect:
            case BindRendezvous(key=key):
                self._bind(key)
            case ReleaseRendezvous(key=key):
                self._ports.pop(key, None)
            case StageTask(order=order):
                self._stage(order)
            case StartTask():
                self._start(effect)
            case SignalTask(key=key, signal=signal):
                self._signal(key, signal)
            case SetBatch(of_attempt=attempt, global_batch=global_batch):
                self._rebatch(attempt, global_batch)
            case PublishWorld(key=key, plan=plan):
                self._publish(key, plan)
            case StopTask(key=key, grace_s=grace_s):
                self._stop(key, grace_s)
            case ExtendAttempt():
                self._extend(effect)
            case ForgetTask(key=key):
                self._forget(key)

    def _parts(self, attempt: AttemptKey) -> list[RunningTask]:
        return [task for key, task in self._tasks.items() if key.of_attempt == attempt]

    def _rebatch(self, attempt: AttemptKey, global_batch: int) -> None:
        for task in self._parts(attempt):
            task.global_batch = global_batch
            self._watch(task, TaskChange.REBATCHED)

    def _bind(self, key: TaskKey) -> None:
        if key not in self._ports:
            self._ports[key] = self._next_port
            self._next_port = FIRST_PORT + (self._next_port - FIRST_PORT + 1) % 1_000
        bound = RendezvousBound.about(key, self._host, self._ports[key])
        self._loop.call_later(BIND_S, lambda: self._tell(bound))

    def _stage(self, order: TaskOrder) -> None:
        key = order.key
        if key in self._staging or key in self._tasks:
            return
        phases = ["sync"] * bool(order.spec.tree) + ["environment"] * bool(order.spec.requirements)
        for phase in phases:
            self._tell(TaskPhaseChanged.about(key, phase))
        failure = self._behaviour(order, order.first_rank).failure
        self._staging[key] = self._loop.call_later(STAGE_S * max(1, len(phases)), lambda: self._staged(key, failure))

    def _staged(self, key: TaskKey, failure: TaskFailure) -> None:
        del self._staging[key]
        failure = failure if failure in STAGE_FAILURES else self.ailment
        if failure is not TaskFailure.NONE:
            self._tell(TaskStageFailed.about(key, failure, f"simulated: {failure.value}"))
        else:
            self._tell(TaskStaged.about(key))

    def _start(self, effect: StartTask) -> None:
        order = effect.order
        key = order.key
        if key in self._tasks:
            return
        self._ports.pop(key, None)
        count = 1 if order.spec.per_node else order.local_ranks
        plans = {order.first_rank + n: self._behaviour(order, order.first_rank + n) for n in range(count)}
        uuids = tuple(gpu.uuid for gpu in effect.gpus)
        batch = order.global_batch or order.spec.batches.first
        task = RunningTask(order, uuids, plans, effect.until_s, began_s=self._loop.now_s, global_batch=batch)
        self._tasks[key] = task
        if order.is_worker:
            self._attempts.parts.setdefault(key.of_attempt, []).append((self, task))
        self.start_count += 1
        self._watch(task, TaskChange.STARTED)
        self._keep_time(task)
        self._loop.post_later(START_S, self._started, task)

    def _started(self, task: RunningTask) -> None:
        if task.is_over:
            return
        order = task.order
        failure = task.plans[order.first_rank].failure
        if failure in (TaskFailure.NONE, *STAGE_FAILURES) and self.ailment is TaskFailure.INTERNAL:
            failure = TaskFailure.INTERNAL
        if failure not in (TaskFailure.NONE, *STAGE_FAILURES):
            task.failure = failure
            self._end(task)
            self._tell(TaskExited.about(task.key, (), failure, f"simulated: {failure.value}"))
            return
        task.has_started = True
        self._tell(TaskStarted.about(task.key, self._clock.utc_s))
        task.checkpoint_count = checkpoint_number(order.checkpoint)
        for rank, plan in list(task.plans.items()):
            done_s = 0.0
            if not math.isinf(plan.checkpoint_period_s):
                done_s = task.checkpoint_count * plan.checkpoint_period_s
            if order.is_worker:
                begun_s = self._attempts.begun_s.setdefault(task.key.of_attempt, self._loop.now_s)
                done_s = self._loop.now_s - begun_s
                self._loop.post_later(plan.ready_s, self._ready, task)
            left_s = max(0.0, plan.duration_s - done_s)
            self._exit_later(task, RankExit(rank, plan.exit_code), min(left_s, self._left_s(plan, self._left_s_max)))
        self._plan_checkpoint(task)

    def _left_s(self, plan: RankPlan, limit_s: float) -> float:
        return math.inf if plan.duration_s >= FOR_EVER_S else limit_s

    # Workers of elastic parts.

    def _ready(self, task: RunningTask) -> None:
        if task.is_over or task.worker.state is not WorkerState.UNKNOWN:
            return
        if task.is_frozen:
            self._loop.post_later(ASKS_AGAIN_S, self._ready, task)
            return
        self._say(task, state=WorkerState.READY, address=f"{self._host}:{7_000 + task.order.part}")

    def _say(self, task: RunningTask, **changes: object) -> None:
        task.worker = replace(task.worker, **changes)
        self._tell(WorkerTold.about(task.key, task.worker))

    def _ask_again(self, task: RunningTask) -> None:
        if task.is_still and not task.hangs:  # it says nothing, and what it has said is forgotten
            self._loop.post_later(SILENT_S, self._is_silent, task, Worker())
        elif not task.is_over and not task.is_frozen:
            self._tell(WorkerTold.about(task.key, task.worker))

    def _publish(self, key: TaskKey, plan: WorldPlan) -> None:
        task = self._tasks.get(key)
        if task is None or task.is_over:
            return
        does = next(iter(task.plans.values()))
        self._loop.post_later(does.hears_s, self._told_of, task, plan, self._agent_life)

    def _told_of(self, task: RunningTask, plan: WorldPlan, agent_life: int) -> None:
        is_newer = task.plan is None or plan.version > task.plan.version
        if is_newer and agent_life == self._agent_life and not task.is_over:
            task.plan = plan
            if task.is_still and not self._may_do_without(task, plan):  # as any process alone: for a person to end
                self.wake(task)
            else:
                self._hear(task)

    def _may_do_without(self, task: RunningTask, plan: WorldPlan) -> bool:
        """Whether members of the plan have the state of the training beside this one, which is not given up else."""
        others = [other.order.part for _, other in self._trainers(task) if other is not task]
        return any(member.part in others for member in plan.members)

    def _hear(self, task: RunningTask) -> None:
        """A frozen worker hears nothing; it asks when it goes on."""
        is_deaf = task.is_over or task.is_frozen or task.is_still
        if task.plan is None or is_deaf or task.plan.version <= task.worker.heard:
            return
        self._say(task, heard=task.plan.version)
        self._loop.post_later(SWITCH_S, self._switch, task, task.plan, self._loop.now_s + BUILD_S)

    def _switch(self, task: RunningTask, plan: WorldPlan, until_s: float) -> None:
        """Go over to it once all its members can, as those do that keep somebody with the state of the training."""
        if task.is_over or plan is not task.plan or plan.version <= task.lost:
            return
        if task.is_frozen or task.is_still:
            self._loop.post_later(ASKS_AGAIN_S, self._switch, task, plan, until_s)
            return
        (rank, does), part = next(iter(task.plans.items())), task.order.part
        members = [member.part for member in plan.members]
        live = {other.order.part: other for _, other in self._attempts.live(task.key.of_attempt)}
        there = [live[each] for each in members if each in live and live[each].worker.heard >= plan.version]
        if part not in members:
            self._say(task, state=WorkerState.LEFT)
            task.is_waiting = False
            waits_s = max(COPY_S) if task.copying is not None else 0.0  # for its last commit
            if not does.stays:
                self._exit_later(task, RankExit(rank, 0), SWITCH_S + waits_s)
        elif does.refuses:
            self._say(task, state=WorkerState.REFUSED)
            task.is_waiting = False
            self._exit_later(task, RankExit(rank, 1), SWITCH_S)
        elif any(other.is_still and other.order.part in members for _, other in self._trainers(task)):
            self._says_that_it_waits(task, in_switch=True)
            self._loop.post_later(ASKS_AGAIN_S, self._switch, task, plan, until_s)
        elif len(there) == len(members) and (plan.may_start or any(other.worker.trains for other in there)):
            self._train(task, plan, does)
        elif len(there) == len(members):
            self._say(task, state=WorkerState.REFUSED)  # training would begin anew
            task.is_waiting = False
            self._exit_later(task, RankExit(rank, 1), SWITCH_S)
        elif self._loop.now_s < until_s:
            self._loop.post_later(SWITCH_S, self._switch, task, plan, until_s)
        else:
            self.lose(task, plan.version)

    def _train(self, task: RunningTask, plan: WorldPlan, does: RankPlan) -> None:
        trainers = self._trainers(task)
        if task.key.of_attempt in self._attempts.torn and _any_in(plan, trainers):
            del self._attempts.torn[task.key.of_attempt]
            for model, other in self._attempts.live(task.key.of_attempt):
                model.lose(other, plan.version)
                model.lose(other, other.world.version if other.world else 0)
            return
        if not task.worker.trains and not math.isinf(does.stands_still_s):
            self._loop.post_later(does.stands_still_s, self._stand_still, task)
        pause_s = SWITCH_S if task.worker.trains else 0.0
        task.is_waiting, task.world = False, plan
        self._go_on(task)
        self._say(
            task, state=WorkerState.TRAINING, trains=plan.version, pause_s=pause_s, problem="", has_timed_out=False
        )
        self._watch(task, TaskChange.REGROUPED)

    def lose(self, task: RunningTask, version: int) -> None:
        """A world came to nothing for it: where it trains in that one it goes on in the next, or never."""
        task.lost = max(task.lost, version)
        is_in_it = task.world is not None and task.world.version == version
        if is_in_it and not task.is_waiting and task.worker.state is not WorkerState.LEFT:
            task.is_waiting = True
            self._hold_up(task)
        self._tell_lost(task)

    def _tell_lost(self, task: RunningTask) -> None:
        if task.lost > task.worker.failed and not (task.is_over or task.is_frozen or task.is_still):
            self._say(task, failed=task.lost, problem=f"plan {task.lost} lost a member")

    def _trainers(self, task: RunningTask) -> list[tuple["TaskModel", RunningTask]]:
        return self._attempts.trainers(task.key.of_attempt)

    def _stand_still(self, task: RunningTask) -> None:
        part = task.order.part
        others = [
            (model, other)
            for model, other in self._trainers(task)
            if other is not task and other.world is not None and _is_in(other.world, part)
        ]
        if task.is_over or task.is_frozen or not others:
            return
        if task.hangs and task.is_waiting:  # for the next world: nothing of its script runs that could hang
            self._loop.post_later(ASKS_AGAIN_S, self._stand_still, task)
            return
        task.is_still = True
        self._hold_up(task)
        self._loop.post_later(SILENT_S, self._is_silent, task, task.worker)
        for model, other in others:
            model.wait_for_another(other)

    def wait_for_another(self, task: RunningTask) -> None:
        """One that it trains with stands still."""
        task.is_waiting = True
        self._hold_up(task)
        self._loop.post_later(WAITS_S, self._says_that_it_waits, task)

    def _is_silent(self, task: RunningTask, told: Worker) -> None:
        if task.is_still and not task.is_over and not task.hangs:
            self._tell(WorkerTold.about(task.key, replace(told, is_silent=True)))

    def _says_that_it_waits(self, task: RunningTask, *, in_switch: bool = False) -> None:
        goes_on = not (task.is_waiting or in_switch)
        if not (goes_on or task.is_over or task.is_frozen or task.is_still or task.worker.problem == WAITS):
            self._say(task, problem=WAITS)
            self._loop.post_later(TIMES_OUT_S, self._times_out, task)

    def _times_out(self, task: RunningTask) -> None:
        if task.is_frozen:
            self._loop.post_later(TIMES_OUT_S, self._times_out, task)
        elif task.worker.problem and not (task.is_over or task.is_still):
            self._say(task, has_timed_out=True)

    def wake(self, task: RunningTask) -> None:
        """A worker goes on after it has stood still."""
        task.is_still = False
        self._go_on(task)
        self._say(task)
        self._tell_lost(task)
        self._hear(task)

    def _plan_checkpoint(self, task: RunningTask) -> None:
        """Rank 0 writes for the gang; of an elastic one each part asks itself whether it is to."""
        plan = task.plans.get(task.order.first_rank if task.order.is_worker else task.order.first_number)
        if plan is not None and not math.isinf(plan.checkpoint_period_s):
            self._loop.post_later(plan.checkpoint_period_s, self._complete_checkpoint, task)

    def _complete_checkpoint(self, task: RunningTask) -> None:
        """A frozen rank writes nothing; it is asked again a period later."""
        order = task.order
        if task.is_over or not (order.is_worker or order.first_number in task.plans):
            return
        if order.is_worker and self._is_first(task):
            steps, begun = self._attempts.steps, checkpoint_number(order.checkpoint)
            number = steps[order.key.of_attempt] = steps.get(order.key.of_attempt, begun) + 1
            self._copy(task, self._checkpoint(task, number))
        elif not order.is_worker and not task.is_frozen:
            task.checkpoint_count += 1
            self._commit(task, self._checkpoint(task, task.checkpoint_count))
        self._plan_checkpoint(task)

    def _checkpoint(self, task: RunningTask, number: int) -> Checkpoint:
        world = task.world.version if task.world is not None else 0
        order = task.order
        return Checkpoint(f"step-{number}", order.attempt, order.node, self._clock.utc_s, world=world)

    def _is_first(self, task: RunningTask) -> bool:
        """Whether this part writes: those of an older world wait for others, or know nothing of the newer one yet."""
        newest = max((other.worker.trains for _, other in self._trainers(task)), default=0)
        stands = task.is_frozen or task.is_still or task.is_waiting or task.worker.state is not WorkerState.TRAINING
        world = task.world
        return not stands and world is not None and world.version == newest and world.members[0].part == task.order.part

    def _copy(self, task: RunningTask, checkpoint: Checkpoint) -> None:
        """One after another; of those that wait the newest."""
        if task.copying is not None:
            task.copied_next = checkpoint
            return
        task.copying = checkpoint
        self._loop.post_later(COPY_S[checkpoint_number(checkpoint) % len(COPY_S)], self._copied, task)

    def _copied(self, task: RunningTask) -> None:
        done, following = task.copying, task.copied_next
        task.copying = task.copied_next = None
        if done is not None and not task.is_over:
            self._commit(task, done)
        if following is not None:
            self._copy(task, following)

    def _exit_later(self, task: RunningTask, rank_exit: RankExit, delay_s: float) -> None:
        """Whatever ends a rank first ends it; a frozen one has to run that long when it goes on."""
        rank, end_s = rank_exit.rank, self._loop.now_s + delay_s
        if task.is_frozen or task.is_still or (task.is_waiting and not rank_exit.signal):
            if rank not in task.left_s or delay_s < task.left_s[rank][0]:
                task.left_s[rank] = (delay_s, rank_exit)
            return
        if rank in task.ends:
            if task.ends[rank][0] <= end_s:
                return
            task.ends[rank][1].cancel()
        timer = self._loop.call_at(end_s, lambda: self._exited(task, rank_exit))
        task.ends[rank] = (end_s, timer, rank_exit)

    def _exited(self, task: RunningTask, rank_exit: RankExit) -> None:
        if rank_exit.rank not in task.plans:
            return
        task.ends.pop(rank_exit.rank, None)
        is_clean = not (rank_exit.exit_code or rank_exit.signal)
        if is_clean and task.order.is_worker and self._is_in_no_world(task):
            task.is_waiting = True  # for one that names it, for as long as there is none
            task.left_s[rank_exit.rank] = (LAST_STEP_S, rank_exit)
            return
        del task.plans[rank_exit.rank]
        task.left_s.pop(rank_exit.rank, None)
        task.exits.append(rank_exit)
        self._tell(RankExited.about(task.key, rank_exit))
        if task.is_over:
            self._end(task)
            self._tell(TaskExited.about(task.key, tuple(task.exits)))

    def _is_in_no_world(self, task: RunningTask) -> bool:
        """No worker has trained in one with it: those that have come to the end have done so together with it."""
        worlds = [other.world for _, other in self._attempts.parts[task.key.of_attempt] if other.world is not None]
        return not any(_is_in(world, task.order.part) for world in worlds)

    def _end(self, task: RunningTask) -> None:
        for _, timer, _ in task.ends.values():
            timer.cancel()
        task.plans, task.ends, task.left_s, task.is_frozen = {}, {}, {}, False
        self._watch(task, TaskChange.ENDED)
        left = self._trainers(task) if task.order.is_worker else []
        if task.failure is not TaskFailure.NONE or not task.exits or any(e.exit_code or e.signal for e in task.exits):
            for model, other in left:
                if other.world is not None and _is_in(other.world, task.order.part):
                    model.lose(other, other.world.version)
        if len(left) == 1 and left[0][1].is_still:  # nobody waits for it any more: only a person would end it
            left[0][0].wake(left[0][1])

    # The time that ranks may run.

    def _extend(self, effect: ExtendAttempt) -> None:
        for task in self._parts(effect.of_attempt):
            if task.is_over:
                continue
            task.until_s = effect.until_s
            if effect.until_s > self._clock.now_s:
                self._thaw(task)
            self._keep_time(task)

    def _keep_time(self, task: RunningTask) -> None:
        if not math.isinf(task.until_s):
            self._loop.post_at(self._clock.when(task.until_s), self._time_is_over, task)

    def _time_is_over(self, task: RunningTask) -> None:
        """Many of these stand in the loop for one task: only the one that matches its time means anything."""
        if task.is_over or task.is_frozen or math.isinf(task.until_s):
            return
        left_s = task.until_s - self._clock.now_s
        if left_s > CLOCK_STEP_S:
            if left_s < CLOCK_SLACK_S:  # the clock's rate has changed since this was planned
                self._keep_time(task)
            return
        task.is_frozen = True
        self._hold_up(task)
        self._watch(task, TaskChange.FROZEN)
        self._tell(TaskFreezeChanged.about(task.key, is_frozen=True))

    def _hold_up(self, task: RunningTask) -> None:
        now_s = self._loop.now_s
        for rank, (end_s, timer, rank_exit) in task.ends.items():
            timer.cancel()
            task.left_s[rank] = (max(0.0, end_s - now_s), rank_exit)
        task.ends = {}

    def _go_on(self, task: RunningTask) -> None:
        if task.is_frozen or task.is_still or task.is_waiting:
            return
        waiting, task.left_s = task.left_s, {}
        for left_s, rank_exit in waiting.values():
            self._exit_later(task, rank_exit, left_s)

    def _thaw(self, task: RunningTask) -> None:
        if not task.is_frozen:
            return
        task.is_frozen = False
        self._go_on(task)
        self._watch(task, TaskChange.THAWED)
        self._tell(TaskFreezeChanged.about(task.key, is_frozen=False))
        if task.is_waiting and task.worker.trains:
            self._loop.post_later(WAITS_S, self._says_that_it_waits, task)
        if task.worker.address:  # its agent may have started again meanwhile
            self._loop.post_later(ASKS_AGAIN_S, self._ask_again, task)
        self._tell_lost(task)
        self._hear(task)

    # What comes over tasks from outside.

    def lose_connections(self, attempt: AttemptKey, *, in_switch: bool) -> None:
        """Those between the members of an elastic gang, which all live; or when the first has switched next time."""
        if in_switch:
            self._attempts.torn[attempt] = None
            return
        for model, task in self._attempts.trainers(attempt):
            if task.world is not None and len(task.world.members) > 1:
                model.lose(task, task.world.version)

    def kill_workers(self, attempt: AttemptKey) -> None:
        """All that train, on all machines, by a signal that nobody of the swarm has sent."""
        for model, task in self._attempts.trainers(attempt):
            model.strike(task)

    def strike(self, task: RunningTask) -> None:
        """SIGKILL, for one task."""
        task.is_struck = True
        for rank in list(task.plans):
            self._exited(task, RankExit(rank, 0, SIGKILL))

    def kill_shim(self, task: RunningTask) -> None:
        """And whatever it leaves is ended by the agent, which may have others of that attempt here."""
        task.is_struck = True
        task.failure = TaskFailure.LOST
        task.detail = f"the supervising process on {task.order.node} was killed"
        for other in self._left_by(task):
            for rank in list(other.plans):
                self._exited(other, RankExit(rank, 0, SIGKILL))
        self._end(task)
        self._tell(TaskExited.about(task.key, (), task.failure, task.detail))

    def _left_by(self, task: RunningTask) -> list[RunningTask]:
        """Other tasks with processes that are taken for that one's."""
        return []

    # Stopping.

    def _stop(self, key: TaskKey, grace_s: float) -> None:
        staging = self._staging.pop(key, None)
        if staging is not None:
            staging.cancel()
        task = self._tasks.get(key)
        if task is None or task.is_over:
            exits, failure = ((), TaskFailure.NONE) if task is None else (tuple(task.exits), task.failure)
            self._tell(TaskExited.about(key, exits, failure))
            return
        self._terminate(task, grace_s)
        self._kill_at(task, self._loop.now_s + grace_s)

    def _signal(self, key: TaskKey, signal: int) -> None:
        task = self._tasks.get(key)
        if task is not None and signal == SIGTERM:
            self._terminate(task, math.inf)
        elif task is not None and signal == SIGKILL:
            self._kill_at(task, self._loop.now_s)

    def _terminate(self, task: RunningTask, grace_s: float) -> None:
        for rank, plan in task.plans.items():
            if plan.obeys_sigterm and grace_s > 0.0:
                self._exit_later(task, RankExit(rank, 0, SIGTERM), min(TERMINATE_S, grace_s))

    def _kill_at(self, task: RunningTask, when_s: float) -> None:
        """SIGKILL reaches frozen ranks too.  A repeated stop must not put off the kill of the first."""
        task.kill_s = min(task.kill_s, when_s)
        self._loop.post_at(task.kill_s, self._kill, task)

    def _kill(self, task: RunningTask) -> None:
        if self._loop.now_s >= task.kill_s:
            for rank, plan in list(task.plans.items()):
                rank_exit = RankExit(rank, 0, SIGKILL)
                if plan.outlives_kill_s:
                    self._loop.post_later(plan.outlives_kill_s, self._exited, task, rank_exit)
                else:
                    self._exited(task, rank_exit)

    def _forget(self, key: TaskKey) -> None:
        task = self._tasks.get(key)
        if task is not None and task.is_over:
            del self._tasks[key]


def _is_in(plan: WorldPlan, part: int) -> bool:
    return any(member.part == part for member in plan.members)


def _any_in(plan: WorldPlan, trainers: list[tuple[TaskModel, RunningTask]]) -> bool:
    return any(task.world is not None and task.world.version == plan.version for _, task in trainers)


def checkpoint_number(checkpoint: Checkpoint | None) -> int:
    """How many checkpoints a job had made when it wrote that one; 0 for none."""
    return int(checkpoint.name.removeprefix("step-")) if checkpoint is not None else 0
