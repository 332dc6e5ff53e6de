"""All checkers together, as one observer.

A step or an effect is shown only to the checkers that asked for its topics: what most steps are about (gossip)
concerns two or three of them, and calling all the others would cost more than they do.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from swarmsched.effects import Effect
from swarmsched.events import Event
from swarmsched.ids import NodeId
from swarmsched.simulator.checks.attempts import AttemptChecker
from swarmsched.simulator.checks.authority import AuthorityChecker
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.checker import Checker, Topic, topic_of
from swarmsched.simulator.checks.checkpoints import CheckpointChecker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.durability import DurabilityChecker
from swarmsched.simulator.checks.epochs import EpochChecker
from swarmsched.simulator.checks.freezes import FreezeChecker
from swarmsched.simulator.checks.gangs import GangChecker
from swarmsched.simulator.checks.holds import HoldChecker
from swarmsched.simulator.checks.leases import LeaseChecker
from swarmsched.simulator.checks.linearity import LinearityChecker
from swarmsched.simulator.checks.machines import INTERVAL, MachineChecker
from swarmsched.simulator.checks.service import ServiceChecker
from swarmsched.simulator.checks.sometimes import Sometimes
from swarmsched.simulator.checks.starts import StartChecker
from swarmsched.simulator.checks.stops import StopChecker
from swarmsched.simulator.checks.traffic import TrafficChecker
from swarmsched.simulator.checks.views import ViewChecker
from swarmsched.simulator.checks.waits import WaitChecker
from swarmsched.simulator.checks.worlds import WorldChecker
from swarmsched.simulator.host import Host
from swarmsched.simulator.tasks import RunningTask, TaskChange

LOOK_INTERVAL = 1_000
"""Steps of the swarm between two full checks."""

C = TypeVar("C", bound=Checker)
Stepped = Callable[[Host, Event, Sequence[Effect]], None]
Performed = Callable[[Host, Effect], None]


class Suite:
    """An observer that hands on to checkers, in their order.  Those that others learn from stand first."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self.checkers = tuple(checkers)
        self.hosts: dict[NodeId, Host] = {}
        self._look_in = LOOK_INTERVAL
        self._by_step: dict[tuple[Topic, tuple[Topic, ...]], tuple[Stepped, ...]] = {}
        self._by_effect: dict[Topic, tuple[Performed, ...]] = {}

    def get(self, kind: type[C]) -> C:
        """The checker of that class."""
        return next(checker for checker in self.checkers if isinstance(checker, kind))

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Show a step to whom it concerns; now and then look at everything."""
        topics = NOTHING
        if len(effects) == 1:
            topics = (topic_of(effects[0]),)
        elif effects:
            topics = tuple(dict.fromkeys([topic_of(effect) for effect in effects]))
        key = (topic_of(event), topics)
        concerned = self._by_step.get(key)
        if concerned is None:
            concerned = self._by_step[key] = self._concerned_by_step(*key)
        for stepped in concerned:
            stepped(host, event, effects)
        self._look_in -= 1
        if not self._look_in:
            self.look()

    def performed(self, host: Host, effect: Effect) -> None:
        """Show an effect to whom it concerns."""
        topic = topic_of(effect)
        concerned = self._by_effect.get(topic)
        if concerned is None:
            concerned = self._by_effect[topic] = self._concerned_by_effect(topic)
        for performed in concerned:
            performed(host, effect)

    def agent_started(self, host: Host) -> None:
        """An agent has started."""
        self.hosts[host.node_id] = host
        for checker in self.checkers:
            checker.agent_started(host)

    def agent_crashed(self, host: Host) -> None:
        """An agent is dead."""
        for checker in self.checkers:
            checker.agent_crashed(host)

    def disk_wiped(self, host: Host) -> None:
        """A machine has lost its disk."""
        for checker in self.checkers:
            checker.disk_wiped(host)

    def name_shared(self, node: NodeId) -> None:
        """A second machine may answer under this name."""
        for checker in self.checkers:
            checker.name_shared(node)

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """Processes have changed."""
        for checker in self.checkers:
            checker.task_changed(host, task, change)

    def look(self) -> None:
        """A full check of all machines."""
        self._look_in = LOOK_INTERVAL
        hosts = tuple(self.hosts.values())
        for checker in self.checkers:
            checker.looked(hosts)

    def finish(self) -> None:
        """The run is over: look once more, and ask for what only the end can show."""
        self.look()
        hosts = tuple(self.hosts.values())
        for checker in self.checkers:
            checker.finished(hosts)

    def _concerned_by_step(self, event: Topic, effects: tuple[Topic, ...]) -> tuple[Stepped, ...]:
        return tuple(
            checker.stepped
            for checker in self.checkers
            if checker.SEES_ALL_STEPS or event in checker.EVENTS or not set(checker.EFFECTS).isdisjoint(effects)
        )

    def _concerned_by_effect(self, topic: Topic) -> tuple[Performed, ...]:
        return tuple(
            checker.performed for checker in self.checkers if checker.SEES_ALL_PERFORMED or topic in checker.PERFORMED
        )


NOTHING: tuple[Topic, ...] = ()


def all_checkers(validate_interval: int = INTERVAL) -> Suite:
    """Every safety invariant and the counters of rare paths: one observer for a whole swarm.

    `validate_interval`: every so many steps the machines of a node check themselves, which costs more than the step.
    """
    decided, books = DecidedRecords(), BookingChecker()
    return Suite(
        [
            decided,
            books,
            EpochChecker(),
            AuthorityChecker(decided),
            LinearityChecker(decided),
            GangChecker(decided, books),
            AttemptChecker(decided),
            StartChecker(decided),
            StopChecker(decided),
            WaitChecker(),
            WorldChecker(decided),
            FreezeChecker(decided),
            CheckpointChecker(decided),
            ViewChecker(),
            DurabilityChecker(decided),
            HoldChecker(decided, books),
            ServiceChecker(decided),
            LeaseChecker(),
            TrafficChecker(),
            MachineChecker(validate_interval),
            Sometimes(decided),
        ]
    )
