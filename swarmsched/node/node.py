"""One node of the swarm: membership, gossiped state, register, ledger and shepherds behind one `step`.

The node only routes.  Each of its machines says what it takes; an event, a peer's message or a client's command goes to
those that take its kind, in their order, and so does each fact that machines tell one another.  All of that is settled
within the same step, in order, so that a durable write always stands before what depends on it.  Whatever is left goes
to the driver.
"""

import random
from collections import deque
from collections.abc import Iterable
from typing import Any, get_args

from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.effects import Effect
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import (
    ClientCommandReceived,
    DatagramReceived,
    Event,
    PeerMessageReceived,
    ResourcesRead,
    TasksFound,
    TimerFired,
)
from swarmsched.facts import Admitted, Awoke, CapacityChanged, Fact, GenerationRaised, SettingChanged
from swarmsched.gossip.member import MemberChanged
from swarmsched.gossip.message import is_membership_payload
from swarmsched.holder.holding import HolderLife, Holding
from swarmsched.holder.machine import Answered, Machine, NodeEffect, Taker
from swarmsched.holder.records import Records
from swarmsched.jobs.register import Register
from swarmsched.jobs.update import EndConfirmed, RecordAccepted
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.record_writer import ReadRecord, WriteRecord
from swarmsched.negotiation.shepherd_state import ShepherdParts
from swarmsched.node.aggregation import AggregationDesk
from swarmsched.node.clients import Clients
from swarmsched.node.config import NodeConfig, Restored
from swarmsched.node.jobs import Jobs
from swarmsched.node.liveness import Liveness, make_membership
from swarmsched.node.parts import PRODUCTION, Parts
from swarmsched.node.publication import GossipTraffic, Publication, make_state_plane
from swarmsched.node.resources import Resources
from swarmsched.node.snapshot import Snapshot

Internal = Fact | MemberChanged | RecordAccepted | EndConfirmed | WriteRecord | ReadRecord | Answered
INTERNAL = frozenset(get_args(Internal))
LAST = frozenset((GenerationRaised, SettingChanged, CapacityChanged))
"""Facts that sum up what a step has changed."""


class Node(Snapshot):
    """Everything that decides on one server; drive it with `step`."""

    def __init__(self, config: NodeConfig, restored: Restored, rng: random.Random, parts: Parts = PRODUCTION) -> None:
        me = config.node_id

        def fork() -> random.Random:
            """A generator of its own for each machine, so that a draw more in one does not change the others."""
            return random.Random(rng.getrandbits(64))

        self._config, self._utc_offset_s = config, config.utc_offset_s
        self._membership = make_membership(config, fork(), parts.make_membership)
        self._state = state = make_state_plane(config, restored, fork())
        lease_book = parts.make_lease_book(config.started_s)
        register = Register(
            me,
            config.generation,
            config.store_id,
            fork(),
            quorum=parts.quorum,
            may_change_shepherd=lease_book.may_change,
            tombstones_max=parts.tombstones_max,
        )
        register.restore(restored.room("register"), restored.room("over"))
        self._records = Records(me, register)
        self._resources = resources = Resources(config, restored, parts, register.records, lambda: state.locations)
        self._cluster = Cluster(me, self._membership, state, resources.ledger, is_witness=config.is_witness)
        shepherd_parts = ShepherdParts(parts.make_attempt, parts.may_commit, parts.quorum)
        self._placement = placement = Placement(me, self._cluster, fork(), shepherd_parts)
        placement.set_policy(state.setting.policy_setting, config.started_s)
        clients_rng = fork()
        life = HolderLife(config.own, config.generation, parts.quorum, config.retained_jobs, config.started_s)
        contact_book = parts.make_contact_book(config.started_s, parts.quorum)
        self._holding = Holding(life, self._records, placement, self._cluster, lease_book, contact_book, fork)
        self._liveness = Liveness(self._membership)
        self._aggregation = aggregation = AggregationDesk(config, resources.ledger, self._cluster, fork())
        told = (resources.ledger, placement, register.records, lambda: aggregation.lender.room)
        self._publication = Publication(config, state, self._cluster, *told)
        self._jobs = Jobs(me, placement, state, resources, self._holding)
        self._clients = Clients(config, self._cluster, placement, self._holding, clients_rng)
        planes: tuple[Machine, ...] = (self._liveness, self._publication, resources, self._records)
        self._acting = frozenset[Machine]((self._holding, self._clients))
        self._machines = (*planes, self._jobs, self._holding, self._clients, aggregation)
        self._shepherding = {self._jobs, self._holding, self._clients}  # those that may have touched a job of ours
        self._routes: dict[object, list[tuple[Machine, Taker]]] = {}
        for machine in self._machines:
            for kind, take in machine.takes.items():
                self._routes.setdefault(kind, []).append((machine, take))
        self._timers = self._routes[TimerFired]
        self._due_s: dict[Machine, float] = {}  # when each machine wants a `TimerFired`
        self._moved: set[Machine] = {*self._machines}  # whose deadline may be another one by now
        self._next_deadline_s = 0.0
        self._last: dict[NodeEffect, None] = {}  # facts that wait for the end of the step
        self._is_awake = False
        self._missing: set[type] = {ResourcesRead, TasksFound}  # what this node must know before it is awake
        self._note_deadlines()

    # The one entry point.

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Take in one event; returns what the driver must do, in order."""
        if type(event) is ClientCommandReceived:
            self._utc_offset_s = event.now_utc_s - now_s
            clock = Clock(now_s, event.now_utc_s)
        else:
            clock = Clock(now_s, now_s + self._utc_offset_s)
        effects = self._settle(self._take(event, clock), clock)
        if self._last or not self._moved.isdisjoint(self._shepherding) or self._due_s[self._jobs] <= now_s:
            while self._last or self._jobs.is_unsettled(now_s):
                effects += self._settle(self._round_off(clock), clock)
        return effects

    @property
    def next_deadline_s(self) -> float:
        """When `TimerFired` is due."""
        if self._moved:
            self._note_deadlines()
        return self._next_deadline_s

    def _take(self, event: Event, clock: Clock) -> list[NodeEffect]:
        kind = type(event)
        if kind is DatagramReceived:
            assert isinstance(event, DatagramReceived)
            is_membership = is_membership_payload(event.payload)
            return self._deliver(GossipTraffic.MEMBERSHIP if is_membership else GossipTraffic.STATE, event, clock)
        if kind is TimerFired:
            return self._fire(event, clock)
        if isinstance(event, PeerMessageReceived):
            message = type(event.message)
            if message not in self._routes:
                raise RemoteProtocolError("no machine takes it", kind=message.__name__, peer=event.sender)
            return self._deliver(message, event, clock)
        effects = self._deliver(kind, event, clock)
        return [*effects, *self._wake_up(kind)] if kind in self._missing else effects

    def _fire(self, event: Event, clock: Clock) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if self._moved:
            self._note_deadlines()
        for machine, take in self._timers:
            if self._due_s[machine] <= clock.now_s:
                self._moved.add(machine)
                effects += take(event, clock) or ()
        return effects

    def _wake_up(self, known: type) -> Iterable[NodeEffect]:
        """Once, when this node knows what it has and what runs on it."""
        self._missing.remove(known)
        self._is_awake = not self._missing
        return [Awoke()] if self._is_awake else []

    # What machines tell one another.

    def _settle(self, effects: list[Any], clock: Clock) -> list[Effect]:
        if INTERNAL.isdisjoint(map(type, effects)):
            return effects
        work: deque[Any] = deque(effects)
        done: list[Effect] = []
        while work:
            effect = work.popleft()
            kind = type(effect)
            if kind in LAST:
                self._last[effect] = None
            elif kind in INTERNAL:
                work.extendleft(reversed(self._react(effect, clock)))
            else:
                done.append(effect)
        return done

    def _round_off(self, clock: Clock) -> list[NodeEffect]:
        """When all else of a step is settled: what sums it up is told once, and jobs look at their queue."""
        last, self._last = self._last, {}
        self._moved.add(self._jobs)
        told = [effect for fact in last for effect in self._react(fact, clock)]
        return [*told, *self._jobs.settle(clock)]

    def _react(self, fact: NodeEffect, clock: Clock) -> list[NodeEffect]:
        if isinstance(fact, Answered):
            told = self._deliver(type(fact.result), fact, clock)
            return [*told, *self._deliver(fact.request.asker, fact, clock)]
        kind = type(fact.command) if isinstance(fact, Admitted) else type(fact)
        return self._deliver(kind, fact, clock)

    def _deliver(self, kind: object, taken: object, clock: Clock) -> list[NodeEffect]:
        """Hand something to all that take its kind."""
        effects: list[NodeEffect] = []
        for machine, take in self._routes.get(kind, ()):
            self._moved.add(machine)
            effects += take(taken, clock) or ()
        return effects

    # Time.

    def _note_deadlines(self) -> None:
        """Of those machines that were reached since this was last asked, and of the jobs, where others act for them."""
        if not self._moved.isdisjoint(self._acting):
            self._moved.add(self._jobs)
        for machine in self._moved:
            self._due_s[machine] = machine.next_deadline_s
        self._moved.clear()
        self._next_deadline_s = min(self._due_s.values())

    def validate(self) -> None:
        """Every machine's invariants, for tests and the simulator; and that none sleeps too long."""
        asked_again = {*self._moved, self._jobs} if self._moved else set()
        for machine in self._machines:
            machine.validate()
            is_in_time = machine in asked_again or self._due_s[machine] <= machine.next_deadline_s
            assert is_in_time, f"{type(machine).__name__} would miss its deadline"
