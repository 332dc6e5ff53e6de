"""One simulated machine: disk, task model and clock of a node, and the driver that performs its effects.

The driver keeps the same promise as the agent's: a `Persist` is a barrier, whatever comes after it waits until it is
on disk, and only what promises nothing durable passes (`Urgency`).  Writes that wait together share one fsync.  At a
crash the group that is being written is lost or kept as a whole, like a database transaction; everything behind it is
lost.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import Command, CommitCheckpoint
from swarmsched.effects import (
    Announce,
    ComputePlan,
    DropShard,
    Effect,
    HostShard,
    Persist,
    ReplyToClient,
    SendDatagram,
    SendPeer,
    ShardPlaced,
    TaskEffect,
)
from swarmsched.errors import ConfigError, RemoteProtocolError
from swarmsched.estimate import Estimate, NoisePoint, SpeedPoint
from swarmsched.events import (
    AggregationRead,
    ClientCommandReceived,
    DatagramReceived,
    DiskChanged,
    DiskFilled,
    Event,
    LoopLagged,
    PlanComputed,
    PlanFailed,
    ResourcesRead,
    ShardWanted,
    TaskEstimated,
    TasksFound,
    TimerFired,
    WorkLagged,
)
from swarmsched.ids import Address, NodeId
from swarmsched.node.config import RETAINED_JOBS, NodeConfig, Restored
from swarmsched.node.lanes import Lanes
from swarmsched.node.node import Node
from swarmsched.node.urgency import Urgency
from swarmsched.policies.registry import plan_anyway
from swarmsched.resources import NodeResources
from swarmsched.shards import AggregatorPlace, RangeKey, ShardOrder, ShardReading
from swarmsched.simulator.chance import stream
from swarmsched.simulator.clock import START_UTC_S, HostClock
from swarmsched.simulator.disk import Disk
from swarmsched.simulator.loop import EventLoop
from swarmsched.simulator.observer import InvariantViolated, Observer, hooks
from swarmsched.simulator.tasks import (
    Behaviour,
    ElasticAttempts,
    RunningTask,
    TaskChange,
    TaskModel,
    checkpoint_number,
)
from swarmsched.view import ClusterView, Plan, PolicySetting

TIMER_FLOOR_S = 0.001
DEADLINE_SLACK_S = 1e-9  # what rounding may leave between a deadline and the clock
LAG_REPORTED_S = 0.2
TELEMETRY_PERIOD_S = 5.0
ASKS_FOR_HOST_S = 5.0
FIRST_AGGREGATOR_PORT = 40_000
PLAN_S = 0.010
SIMULATED_BATCH, SIMULATED_STEPS, SIMULATED_SPEED_UP = 64, 1e6, 0.8
MAILBOX_MAX = 10_000  # events that wait for a paused node; the oldest are lost
BACKLOG_MAX = 2_000  # effects behind a stalled disk; beyond it peers' messages are refused
FAULT_S = 1.0  # until an agent whose core raised is up again
HISTORY_MAX = 2_000  # announcements kept
WRITE_SURVIVES_RATIO = 0.5  # a crash in the middle of an fsync: it had reached the disk, nobody was told


class Surroundings(Protocol):
    """What lies between machines."""

    def send_datagram(self, source: "Host", effect: SendDatagram) -> None:
        """Carry a packet, or lose it."""

    def send_peer(self, source: "Host", effect: SendPeer) -> None:
        """Carry a peer message, or report its loss."""

    def are_connected(self, one: "Host", other: "Host") -> bool:
        """True while messages pass both ways in good time and hardly any is lost."""


MakePlan = Callable[[PolicySetting, ClusterView, float], Plan]
MakeNode = Callable[[NodeConfig, Restored, random.Random], Node]
"""The seam for substitutes that break one rule on purpose; production code has no switch for that."""


class Host:
    """A machine that can crash, start again, pause and go on.  `node` is None while its agent is down."""

    def __init__(
        self,
        node_id: NodeId,
        address: Address,
        resources: NodeResources,
        seeds: tuple[Address, ...],
        loop: EventLoop,
        rng: random.Random,
        surroundings: Surroundings,
        behaviour: Behaviour,
        observers: Sequence[Observer] = (),
        make_node: MakeNode = Node,
        make_disk: Callable[[random.Random], Disk] = Disk,
        clock: HostClock | None = None,
        is_witness: bool = False,
        retained_jobs: int = RETAINED_JOBS,
        attempts: ElasticAttempts | None = None,
        gives_room: bool = False,
    ) -> None:
        """`gives_room`: to shards of aggregation."""
        self.node_id = node_id
        self.address = address
        self.resources = resources  # may be replaced; read every TELEMETRY_PERIOD_S
        self.node: Node | None = None
        self.loop = loop
        self.clock = clock or HostClock(loop)
        self.storage = make_disk(stream(rng.getrandbits(64), "disk"))
        self.replies: dict[int, object] = {}
        self.on_reply: Callable[[int, object], None] | None = None  # hears of each reply instead of `replies`
        self.history: deque[tuple[float, Announce]] = deque(maxlen=HISTORY_MAX)
        self.generation = 0  # of the agent that runs or ran last
        self.step_count = 0
        self.is_lost = False  # for ever; it is not started again
        self.plan_s = PLAN_S  # until its planner answers
        self.make_plan: MakePlan = plan_anyway
        self.planner_fails = False
        self.hosted: dict[RangeKey, int] = {}  # rounds by range, of the aggregator that lives
        watch = (self._commit, self._task_changed, attempts)
        self.tasks = TaskModel(loop, address[0], self.post, behaviour, self.clock, *watch)
        self._seeds = seeds
        self._rng = rng
        self._surroundings = surroundings
        self._make_node = make_node
        self.is_witness = is_witness
        self._retained_jobs, self._gives_room = retained_jobs, gives_room
        self._stepped, self._performed = hooks(observers, "stepped"), hooks(observers, "performed")
        self._on_start, self._on_crash = hooks(observers, "agent_started"), hooks(observers, "agent_crashed")
        self._on_wipe, self._on_task = hooks(observers, "disk_wiped"), hooks(observers, "task_changed")
        self._life = 0  # grows with each start and end; callbacks of an earlier life do nothing
        self._paused_since_s: float | None = None
        self._mailbox: deque[Event] = deque(maxlen=MAILBOX_MAX)
        self.event_s = 0.0  # that the agent needs for an event, datagrams apart; others wait in the lanes meanwhile
        self._lanes: Lanes[Event] = Lanes()
        self._is_busy = False
        self._backlog: list[Effect] = []  # behind the barrier
        self._writing: list[Persist] = []  # the group that is being fsynced
        self._urgency = Urgency()
        self._is_writing = True  # as the node knows it
        self._shortage = ""  # of its disk, as it is
        self._wake_at_s = math.inf  # virtual time of the next look at the deadline
        self._deadline_s = math.inf  # of the node, on this machine's clock
        self._last_request_id = -1  # of the ranks' own commands; negative, so that no client's is met

    def has(self, resources: NodeResources) -> None:
        """Telemetry reads other devices from now on."""
        self.resources = resources

    def slow_planner(self, plan_s: float, *, fails: bool) -> None:
        """The planner answers after so long, or says that there is no plan."""
        self.plan_s, self.planner_fails = plan_s, fails

    @property
    def is_up(self) -> bool:
        """True while the agent's process exists, paused or not."""
        return self.node is not None

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `go_on`."""
        return self._paused_since_s is not None

    @property
    def is_overloaded(self) -> bool:
        """True while the disk stalls and too much waits for it: peers are told to try again."""
        return len(self._backlog) >= BACKLOG_MAX

    @property
    def disk(self) -> dict[str, dict[str, bytes]]:
        """What is durable, by room and key."""
        return self.storage.rooms

    @property
    def now_s(self) -> float:
        """What this machine's monotonic clock shows."""
        return self.clock.now_s

    @property
    def available_bytes(self) -> int:
        """Of its memory: of every other machine somebody else has nearly all."""
        is_taken = self.address[0].split(".")[2] in "13579"
        return self.resources.memory_bytes // (8 if is_taken else 1)

    # --- life

    def start(self) -> None:
        """Start the agent on what the disk has, under a generation that was never used."""
        assert self.node is None, f"{self.node_id} is up"
        self._life += 1
        self._urgency, self._is_writing = Urgency(), True
        config = NodeConfig.begin(
            self.node_id,
            self.address,
            self.storage,
            instance_id=self._rng.randbytes(16),
            now_s=self.clock.now_s,
            utc_s=self.clock.utc_s,
            seeds=self._seeds,
            software_version="simulated",
            is_witness=self.is_witness,
            retained_jobs=self._retained_jobs,
        )
        self.generation = config.generation
        restored = Restored({room: dict(entries) for room, entries in self.disk.items()})
        try:
            self.node = self._make_node(config, restored, stream(self._rng.getrandbits(64), self.node_id))
        except Exception as error:
            problem = f"{type(error).__name__}: {error} while {self.node_id} started"
            raise InvariantViolated("every agent starts again", problem) from error
        for hook in self._on_start:
            hook(self)
        self.post(TasksFound(self.tasks.found()))
        if self._shortage:
            self.post(DiskFilled(self._shortage))
        self._read_telemetry(self._life)

    def bring_up(self) -> None:
        """Start the agent unless it is up, or the machine is lost for ever."""
        if self.node is None and not self.is_lost:
            self.start()

    def crash(self) -> None:
        """The agent dies: what was not on disk is lost, tasks run on."""
        assert self.node is not None, f"{self.node_id} is down"
        if self._writing and not self.storage.is_full(self.loop.now_s) and self._rng.random() < WRITE_SURVIVES_RATIO:
            self.storage.write(self._writing)
        self.node = None
        self.hosted.clear()
        self._life += 1
        self._writing, self._backlog, self._paused_since_s = [], [], None
        self._wake_at_s = math.inf
        self._mailbox.clear()
        self._lanes.clear()
        self._is_busy = False
        self.tasks.agent_died()
        for hook in self._on_crash:
            hook(self)

    def cut_power(self, *, loses_files: bool = False) -> None:
        """The whole machine is off: agent, shims and ranks end at once."""
        if self.node is not None:
            self.crash()
        self.tasks.power_cut(loses_files=loses_files)
        self.clock.boot()

    def wipe(self) -> None:
        """The machine is off and gets a new, empty disk."""
        self.cut_power()
        self.tasks.wipe()
        self._lose_store()

    def lose_database(self) -> None:
        """The agent dies, and somebody moves its database aside; its tasks run on."""
        if self.node is not None:
            self.crash()
        self._lose_store()

    def _lose_store(self) -> None:
        self.storage.wipe()
        for hook in self._on_wipe:
            hook(self)

    def set_clock_rate(self, rate: float) -> None:
        """The monotonic clock runs faster or slower from now on."""
        self.clock.set_rate(rate)
        self.tasks.clock_changed()
        if self._wake_at_s < math.inf:
            self._arm()

    def pause(self) -> None:
        """SIGSTOP: time goes on, the node does not see it."""
        if self._paused_since_s is None and self.node is not None:
            self._paused_since_s = self.loop.now_s

    def go_on(self) -> None:
        """SIGCONT: all that arrived meanwhile comes at once."""
        if self._paused_since_s is None:
            return
        lag_s = self.loop.now_s - self._paused_since_s
        self._paused_since_s = None
        waiting: list[Event] = [LoopLagged(lag_s)] if lag_s > LAG_REPORTED_S else []
        waiting, life = [*waiting, *self._mailbox], self._life
        self._mailbox.clear()
        for event in waiting:  # at once: what comes in this instant is newer
            self._take(event, life)
        self._wake_at_s = math.inf
        self._arm()
        self._drain()
        self._work(self._life)

    def is_connected_to(self, other: "Host") -> bool:
        """True while messages between the two pass in good time."""
        return self._surroundings.are_connected(self, other)

    def post(self, event: Event) -> None:
        """Hand over an event after whatever is going on now; lost when the agent is down."""
        self.loop.post_later(0.0, self._take, event, self._life)

    def receive(self, event: Event) -> None:
        """Hand over an event now, to whichever life the agent is in.  Only from the loop."""
        self._take(event, self._life)

    # --- steps

    def _take(self, event: Event, life: int) -> None:
        if life != self._life or self.node is None:
            return
        if self._paused_since_s is not None:
            self._mailbox.append(event)
        elif (self.event_s or self._lanes) and not isinstance(event, DatagramReceived):
            self._lanes.put(event, self.loop.now_s)
            self._work(life)
        else:
            self._step(self.node, event)

    def _work(self, life: int) -> None:
        """Take the next event, unless one is being handled: its effects show when it has cost its time."""
        if not self._is_busy and self._lanes and not self.is_paused:
            self._is_busy = True
            self.loop.post_later(self.event_s, self._worked, life)

    def _worked(self, life: int) -> None:
        if life != self._life or self.node is None:
            return
        self._is_busy = False
        if not self.is_paused:
            if (lag_s := self._lanes.news_of_lag_s(self.loop.now_s)) > 0.0:
                self._step(self.node, WorkLagged(lag_s))
            self._step(self.node, self._lanes.take())
            self._work(life)

    def _step(self, node: Node, event: Event) -> None:
        self.step_count += 1
        try:
            effects = node.step(event, self.clock.now_s)
        except RemoteProtocolError:
            return  # as in the agent: a peer's bad message is that message's fault only
        except Exception as error:
            self.crash()  # as the agent does: memory may be ahead of the disk
            self.loop.post_later(FAULT_S, self.bring_up)
            problem = f"{type(error).__name__}: {error} while {self.node_id} handled {event!r}"
            raise InvariantViolated("no handler raises", problem) from error
        for hook in self._stepped:
            hook(self, event, effects)
        for effect in effects:
            if type(effect) is SendDatagram:
                self._surroundings.send_datagram(self, effect)
            elif self._urgency.may_pass(effect):
                self._perform(effect)
            else:
                self._backlog.append(effect)
        if self._backlog and not self._writing:
            self._drain()
        self._deadline_s = node.next_deadline_s
        self._arm()

    def _arm(self) -> None:
        """Look at the deadline when it comes.  A look that is planned earlier finds nothing due and plans this one."""
        when_s = max(self.clock.when(self._deadline_s), self.loop.now_s + TIMER_FLOOR_S)
        if when_s < self._wake_at_s:
            self._wake_at_s = when_s
            self.loop.post_at(when_s, self._wake, when_s, self._life)

    def _wake(self, planned_s: float, life: int) -> None:
        if planned_s != self._wake_at_s or life != self._life or self.node is None:
            return
        self._wake_at_s = math.inf
        if self._paused_since_s is not None:
            return
        if self._deadline_s <= self.clock.now_s + DEADLINE_SLACK_S:
            self._step(self.node, TimerFired())
        else:
            self._arm()

    def _read_telemetry(self, life: int) -> None:
        if life == self._life:
            self.post(ResourcesRead(self.resources))
            if self._gives_room and not self.is_witness:
                place = AggregatorPlace(f"{self.address[0]}:{FIRST_AGGREGATOR_PORT + life}")
                self.post(AggregationRead(place, self.available_bytes, self._readings()))
            self.loop.post_later(TELEMETRY_PERIOD_S, self._read_telemetry, life)

    # --- effects

    def _drain(self) -> None:
        """Perform up to the first write, then put all waiting writes on disk together, then the rest."""
        if self._writing or self._paused_since_s is not None:
            return
        backlog, self._backlog = self._backlog, []
        first = next((n for n, effect in enumerate(backlog) if type(effect) is Persist), len(backlog))
        for effect in backlog[:first]:
            self._urgency.performed(effect)
            self._perform(effect)
        if first == len(backlog):
            return
        if self.storage.is_full(self.loop.now_s):
            self._tell_disk(is_writing=False)
        self._writing = [effect for effect in backlog[first:] if isinstance(effect, Persist)]
        rest = [effect for effect in backlog[first:] if not isinstance(effect, Persist)]
        self.loop.post_later(self.storage.fsync_s(self.loop.now_s), self._synced, rest, self._life)

    def _synced(self, rest: Sequence[Effect], life: int) -> None:
        if life != self._life:
            return
        if self.storage.is_full(self.loop.now_s):  # it filled up meanwhile
            self.loop.post_later(self.storage.fsync_s(self.loop.now_s), self._synced, rest, life)
            return
        self.storage.write(self._writing)
        self._writing = []
        self._tell_disk(is_writing=True)
        self._backlog[:0] = rest
        self._drain()

    def _tell_disk(self, *, is_writing: bool) -> None:
        if is_writing != self._is_writing:
            self._is_writing = is_writing
            self.post(DiskChanged(is_writing))

    def tell_shortage(self, shortage: str) -> None:
        """The agent looks at its disk, as it does again when it starts."""
        if shortage != self._shortage:
            self._shortage = shortage
            if self.node is not None:
                self.post(DiskFilled(shortage))

    def _perform(self, effect: Effect) -> None:
        for hook in self._performed:
            hook(self, effect)
        match effect:
            case SendPeer():
                self._surroundings.send_peer(self, effect)
            case ComputePlan():
                self._compute_plan(effect)
            case ReplyToClient(request_id=request_id, reply=reply):
                self._reply(request_id, reply)
            case Announce():
                self.history.append((self.loop.now_s, effect))
            case HostShard(order):
                self.hosted[order.key] = self.hosted.get(order.key, 0)
            case DropShard(key):
                self.hosted.pop(key, None)
            case ShardPlaced():
                pass  # checkers see it
            case _:
                assert isinstance(effect, TaskEffect), f"{effect} was not performed"
                self.tasks.perform(effect)

    def _compute_plan(self, effect: ComputePlan) -> None:
        """The planner's process: a pure function, answered after a while."""
        answer: PlanComputed | PlanFailed
        try:
            if self.planner_fails:
                raise ConfigError("planner", "the process died", "")
            plan = self.make_plan(effect.setting, effect.view, self.clock.now_s)
            answer = PlanComputed(replace(plan, elapsed_s=plan.elapsed_s or self.plan_s))
        except ConfigError as error:
            answer = PlanFailed(effect.view.version, str(error))
        delay_s = answer.plan.elapsed_s if isinstance(answer, PlanComputed) else self.plan_s
        self.loop.post_later(delay_s, self._take, answer, self._life)

    # --- clients and ranks

    def command(self, request_id: int, command: Command) -> None:
        """A client asks."""
        self.post(ClientCommandReceived(request_id, command, self.clock.utc_s))

    def _reply(self, request_id: int, reply: object) -> None:
        if self.on_reply is not None:
            self.on_reply(request_id, reply)
        elif request_id > 0:
            self.replies[request_id] = reply

    def _commit(self, task: RunningTask, checkpoint: Checkpoint) -> None:
        """A rank has completed a checkpoint and tells the agent of its own machine."""
        order = task.order
        self._last_request_id -= 1
        self.command(self._last_request_id, CommitCheckpoint(order.job_id, order.attempt, checkpoint, order.part))
        if order.spec.is_resizable and not order.is_worker:
            estimate = simulated_estimate(task, checkpoint_number(checkpoint))
            self.post(TaskEstimated(*task.key.of_attempt, estimate, task.global_batch))

    def _readings(self) -> tuple[ShardReading, ...]:
        """A round each time; where several ranges are hosted, those of some jobs come to wait for the others."""
        told = []
        for key in self.hosted:
            count = self.hosted[key] = self.hosted[key] + 1
            waits_s = TELEMETRY_PERIOD_S if len(self.hosted) > 1 and sum(key.job_id.encode()) % 2 else 0.0
            told.append(ShardReading(key, count, count, 0.01 * count, 1_000 * count, waits_s, 2))
        return tuple(told)

    def _ask_for_host(self, task: RunningTask) -> None:
        """As ranks do that train apart, again and again, whether or not an agent hears it."""
        if task.is_over:
            return
        if not task.is_frozen:
            order, learners = task.order, ("0", "1")
            key = RangeKey(*order.key.of_attempt, order.node_rank * task.elements)
            plan = (order.attempt, 1)
            wanted = ShardOrder(key, task.elements, "model", "secret", 1.0, 0.0, True, plan, learners, 0)
            self.post(ShardWanted.about(order.key, wanted))
        self.loop.post_later(ASKS_FOR_HOST_S, self._ask_for_host, task)

    def _task_changed(self, task: RunningTask, change: TaskChange) -> None:
        if change is TaskChange.STARTED and task.elements:
            self._ask_for_host(task)
        for hook in self._on_task:
            hook(self, task, change)


__all__ = ["START_UTC_S", "TELEMETRY_PERIOD_S", "Host", "MakeNode", "Observer", "Surroundings"]


def simulated_estimate(task: RunningTask, done: int) -> Estimate:
    """What ranks would report after so many checkpoints. The more ranks, the faster, though not in proportion, and
    the longer they train, the more a larger batch is worth."""
    ranks, batch = task.order.world_size, task.global_batch or SIMULATED_BATCH
    point = SpeedPoint(ranks, len(task.order.shares), max(1, batch // ranks), ranks**-SIMULATED_SPEED_UP)
    noise = (NoisePoint(batch, float(done)),)
    left = max(1.0, SIMULATED_STEPS - done)
    return Estimate((), 0.0, (point,), noise, remaining=left, done=float(done), is_partial=True)
