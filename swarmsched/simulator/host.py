"""One simulated machine: disk, task model and clock of a node, and the driver that performs its effects.

The driver keeps the same promise as the agent's: a `Persist` is a barrier, whatever comes after it waits until it is
on disk, and only datagrams pass.  Writes that wait together share one fsync.  At a crash the group that is being
written is lost or kept as a whole, like a database transaction; everything behind it is lost.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from swarmsched.effects import Announce, ComputePlan, Effect, Persist, ReplyToClient, SendDatagram, SendPeer
from swarmsched.errors import ConfigError, RemoteProtocolError
from swarmsched.events import Event, LoopLagged, PlanComputed, PlanFailed, ResourcesRead, TasksFound, TimerFired
from swarmsched.ids import Address, NodeId
from swarmsched.node.config import NodeConfig, Restored
from swarmsched.node.node import Node
from swarmsched.policies.registry import make_policy
from swarmsched.resources import NodeResources
from swarmsched.simulator.chance import stream
from swarmsched.simulator.loop import EventLoop, Timer
from swarmsched.simulator.tasks import TASK_EFFECTS, Behaviour, TaskModel
from swarmsched.view import Plan

START_UTC_S = 1_700_000_000.0
TIMER_FLOOR_S = 0.001
TIMER_LIMIT_S = 1.0
TELEMETRY_PERIOD_S = 5.0
FSYNC_MEDIAN_S = 0.001
PLAN_S = 0.010
MAILBOX_MAX = 10_000  # events that wait for a paused node; the oldest are lost
HISTORY_MAX = 2_000  # announcements kept


class Observer(Protocol):
    """A checker: sees every step and every performed effect, changes nothing, raises AssertionError."""

    def stepped(self, host: "Host", event: Event, effects: Sequence[Effect]) -> None:
        """`host.node` has handled the event; its effects are not performed yet."""

    def performed(self, host: "Host", effect: Effect) -> None:
        """The effect takes place now; everything before it is durable."""


class Surroundings(Protocol):
    """What lies between machines."""

    def send_datagram(self, source: "Host", effect: SendDatagram) -> None:
        """Carry a packet, or lose it."""

    def send_peer(self, source: "Host", effect: SendPeer) -> None:
        """Carry a peer message, or report its loss."""


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
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.resources = resources  # may be replaced; read every TELEMETRY_PERIOD_S
        self.node: Node | None = None
        self.disk: dict[str, dict[str, bytes]] = {}
        self.replies: dict[int, object] = {}
        self.history: deque[tuple[float, Announce]] = deque(maxlen=HISTORY_MAX)
        self.generation = int(START_UTC_S)
        self.step_count = 0
        self.tasks = TaskModel(loop, address[0], self.post, behaviour)
        self._seeds = seeds
        self._loop = loop
        self._rng = rng
        self._surroundings = surroundings
        self._observers = observers
        self._make_node = make_node
        self._life = 0  # grows with each start; callbacks of an earlier life do nothing
        self._paused_since_s: float | None = None
        self._mailbox: deque[Event] = deque(maxlen=MAILBOX_MAX)
        self._backlog: list[Effect] = []  # behind the barrier
        self._writing: list[Persist] = []  # the group that is being fsynced
        self._timer: Timer | None = None

    @property
    def is_up(self) -> bool:
        """True while the agent's process exists, paused or not."""
        return self.node is not None

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `go_on`."""
        return self._paused_since_s is not None

    # --- life

    def start(self) -> None:
        """Start the agent on what the disk has, under a generation that was never used."""
        assert self.node is None, f"{self.node_id} is up"
        self._life += 1
        self.generation += 1
        config = NodeConfig(
            node_id=self.node_id,
            address=self.address,
            generation=self.generation,
            instance_id=self._rng.randbytes(16),
            seeds=self._seeds,
            software_version="simulated",
            utc_offset_s=START_UTC_S,
        )
        restored = Restored({room: dict(entries) for room, entries in self.disk.items()})
        self.node = self._make_node(config, restored, stream(self._rng.getrandbits(64), self.node_id))
        self.post(TasksFound(self.tasks.found()))
        self._read_telemetry()

    def crash(self) -> None:
        """The agent dies: what was not on disk is lost, tasks run on."""
        assert self.node is not None, f"{self.node_id} is down"
        if self._writing and self._rng.random() < 0.5:  # the fsync had reached the disk, nobody was told
            self._write(self._writing)
        self.node = None
        self._life += 1
        self._writing, self._backlog, self._paused_since_s = [], [], None
        self._mailbox.clear()
        self._disarm()
        self.tasks.agent_died()

    def pause(self) -> None:
        """SIGSTOP: time goes on, the node does not see it."""
        if self._paused_since_s is None:
            self._paused_since_s = self._loop.now_s
            self._disarm()

    def go_on(self) -> None:
        """SIGCONT: all that arrived meanwhile comes at once."""
        if self._paused_since_s is None:
            return
        lag_s = self._loop.now_s - self._paused_since_s
        self._paused_since_s = None
        self.post(LoopLagged(lag_s))
        for event in self._mailbox:
            self.post(event)
        self._mailbox.clear()
        self._drain()

    def post(self, event: Event) -> None:
        """Hand over an event after whatever is going on now; lost when the agent is down."""
        life = self._life
        self._loop.call_later(0.0, lambda: self._take(event, life))

    # --- steps

    def _take(self, event: Event, life: int) -> None:
        if life != self._life or self.node is None:
            return
        if self.is_paused:
            self._mailbox.append(event)
        else:
            self._step(self.node, event)

    def _step(self, node: Node, event: Event) -> None:
        self.step_count += 1
        try:
            effects = node.step(event, self._loop.now_s)
        except RemoteProtocolError:
            return  # as in the agent: a peer's bad message is that message's fault only
        for observer in self._observers:
            observer.stepped(self, event, effects)
        for effect in effects:
            if isinstance(effect, SendDatagram):
                self._surroundings.send_datagram(self, effect)
            else:
                self._backlog.append(effect)
        self._drain()
        self._arm(node)

    def _arm(self, node: Node) -> None:
        self._disarm()
        now_s = self._loop.now_s
        when_s = min(max(node.next_deadline_s, now_s + TIMER_FLOOR_S), now_s + TIMER_LIMIT_S)
        self._timer = self._loop.call_at(when_s, lambda: self._step(node, TimerFired()))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_telemetry(self) -> None:
        life = self._life
        self.post(ResourcesRead(self.resources))
        self._loop.call_later(TELEMETRY_PERIOD_S, lambda: self._read_telemetry() if life == self._life else None)

    # --- effects

    def _drain(self) -> None:
        """Perform up to the first write, then put all waiting writes on disk together, then the rest."""
        if self._writing or self.is_paused:
            return
        backlog, self._backlog = self._backlog, []
        first = next((n for n, effect in enumerate(backlog) if isinstance(effect, Persist)), len(backlog))
        for effect in backlog[:first]:
            self._perform(effect)
        self._writing = [effect for effect in backlog[first:] if isinstance(effect, Persist)]
        if not self._writing:
            return
        rest = [effect for effect in backlog[first:] if not isinstance(effect, Persist)]
        life = self._life
        fsync_s = self._rng.lognormvariate(math.log(FSYNC_MEDIAN_S), 0.5)
        self._loop.call_later(fsync_s, lambda: self._synced(rest, life))

    def _synced(self, rest: Sequence[Effect], life: int) -> None:
        if life != self._life:
            return
        self._write(self._writing)
        self._writing = []
        self._backlog[:0] = rest
        self._drain()

    def _write(self, writes: Sequence[Persist]) -> None:
        for write in writes:
            room = self.disk.setdefault(write.room, {})
            if write.value is None:
                room.pop(write.key, None)
            else:
                room[write.key] = write.value

    def _perform(self, effect: Effect) -> None:
        for observer in self._observers:
            observer.performed(self, effect)
        match effect:
            case SendPeer():
                self._surroundings.send_peer(self, effect)
            case ComputePlan():
                self._compute_plan(effect)
            case ReplyToClient(request_id=request_id, reply=reply):
                self.replies[request_id] = reply
            case Announce():
                self.history.append((self._loop.now_s, effect))
            case _:
                assert isinstance(effect, TASK_EFFECTS), f"{effect} was not performed"
                self.tasks.perform(effect)

    def _compute_plan(self, effect: ComputePlan) -> None:
        """The planner's process: a pure function, answered after a while."""
        answer: PlanComputed | PlanFailed
        try:
            plan = make_policy(effect.setting).plan(effect.view, self._loop.now_s)
            answer = PlanComputed(Plan(plan.version, plan.policy_id, plan.entries, PLAN_S))
        except ConfigError as error:
            answer = PlanFailed(effect.view.version, str(error))
        life = self._life
        self._loop.call_later(PLAN_S, lambda: self._take(answer, life))
