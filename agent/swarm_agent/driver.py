"""The only caller of `Node.step` in production: events in, effects out, one timer.

Whatever happens (a packet, a peer message, a command, a task that ended) is posted as an event.  Events of one loop
turn are handed to the core together; datagrams leave at once, all other effects pass the durable barrier.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from swarm_agent.barrier import Barrier, DurableStore, Marker
from swarmsched.effects import Effect, SendDatagram
from swarmsched.events import Event, LoopLagged, TimerFired

LAG_REPORTED_S = 0.2
TIMER_LIMIT_S = 1.0  # the timer is never further away, so that lag is seen even when the core sleeps
TIMER_FLOOR_S = 0.001
EVENTS_PER_TURN = 256  # then the loop gets a chance to read sockets
BACKLOG_LIMIT = 2_000  # effects behind a stalled disk; beyond it peers' messages are refused

log = logging.getLogger("swarm.driver")


class Machine(Protocol):
    """What the driver needs of a node; `swarmsched.node.Node` is one."""

    def step(self, event: Event, now_s: float) -> Sequence[Effect]:
        """Take in an event and say what to do."""

    @property
    def next_deadline_s(self) -> float:
        """When the machine wants `TimerFired`."""


class Driver:
    """Drives one machine on the running loop.  Not thread safe: every method belongs to the loop's thread."""

    def __init__(
        self,
        machine: Machine,
        store: DurableStore,
        perform: Callable[[Effect], None],
        on_disk_health: Callable[[str], None] = lambda complaint: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._perform_port = perform
        self._clock = clock
        self._barrier = Barrier(store, self._perform, on_disk_health)
        self._inbox: deque[Event | Marker] = deque()
        self._turn_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_s = float("inf")  # when the timer should fire; late by more than LAG_REPORTED_S is lag
        self._is_running = False
        self._on_stepped: list[Callable[[], None]] = []
        self.counters: Counter[str] = Counter()  # events, effects by class name; step_errors, perform_errors, ...
        self._stepped_count = 0
        self.lag_s_max = 0.0

    @property
    def barrier(self) -> Barrier:
        """The durable barrier, for its figures."""
        return self._barrier

    @property
    def is_overloaded(self) -> bool:
        """True while the disk stalls and the backlog is at its limit: peers must be told to try again."""
        return bool(self._barrier.complaint) and self._barrier.backlog >= BACKLOG_LIMIT

    def start(self) -> None:
        """Begin to hand over events; those posted before are handed over first."""
        self._is_running = True
        self._schedule_turn()

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop stepping, then wait for pending commits; false when the disk refused till the end."""
        self._is_running = False
        for handle in (self._timer, self._turn_handle):
            if handle is not None:
                handle.cancel()
        return await self._barrier.close(timeout_s)

    def on_stepped(self, callback: Callable[[], None]) -> None:
        """Call back after each turn in which the core took in something; must be cheap and must not raise."""
        self._on_stepped.append(callback)

    def post(self, event: Event) -> None:
        """Hand an event to the core in the next turn."""
        self._inbox.append(event)
        self._schedule_turn()

    async def settled(self) -> None:
        """Wait until the effects of everything posted so far were performed, commits included."""
        marker = Marker()
        self._inbox.append(marker)
        self._schedule_turn()
        await marker.reached

    def _schedule_turn(self) -> None:
        if self._is_running and self._turn_handle is None:
            self._turn_handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_handle = None
        stepped_count = self._stepped_count
        self._report_lag()
        for _ in range(min(len(self._inbox), EVENTS_PER_TURN)):
            item = self._inbox.popleft()
            if isinstance(item, Marker):
                self._barrier.add(item)
            else:
                self._step(item)
        if self._machine.next_deadline_s <= self._clock():
            self._step(TimerFired())
        self._barrier.flush()
        self._arm()
        if self._inbox:
            self._schedule_turn()
        if self._stepped_count != stepped_count:
            for callback in self._on_stepped:
                callback()

    def _report_lag(self) -> None:
        lag_s = self._clock() - self._armed_for_s
        self._armed_for_s = float("inf")
        if lag_s > LAG_REPORTED_S:
            self.lag_s_max = max(self.lag_s_max, lag_s)
            self._step(LoopLagged(lag_s))

    def _step(self, event: Event) -> None:
        self.counters[type(event).__name__] += 1
        self._stepped_count += 1
        try:
            effects = self._machine.step(event, self._clock())
        except Exception:  # the one place: a fault in a handler costs its event, not the agent
            self.counters["step_errors"] += 1
            log.exception("event dropped: the core raised event=%s", type(event).__name__)
            return
        for effect in effects:
            if isinstance(effect, SendDatagram):
                self._perform(effect)
            else:
                self._barrier.add(effect)

    def _perform(self, effect: Effect) -> None:
        self.counters[type(effect).__name__] += 1
        try:
            self._perform_port(effect)
        except Exception:  # same place for the way out: one effect fails, the order of the rest holds
            self.counters["perform_errors"] += 1
            log.exception("effect failed effect=%s", type(effect).__name__)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now_s = self._clock()
        deadline_s = min(max(self._machine.next_deadline_s, now_s + TIMER_FLOOR_S), now_s + TIMER_LIMIT_S)
        self._armed_for_s = deadline_s
        self._timer = asyncio.get_running_loop().call_later(deadline_s - now_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._schedule_turn()
