"""The only caller of `Node.step` in production: events in, effects out, one timer.

Whatever happens (a packet, a peer message, a command, a task that ended) is posted as an event.  Events of one loop
turn are handed to the core together, urgent ones first; what promises nothing durable leaves at once (`Urgency`), all
else passes the durable barrier.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from swarm_agent.barrier import Barrier, DurableStore, Marker
from swarm_agent.faults import Faults
from swarm_agent.task.shim import now
from swarmsched.effects import Effect
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import Event, LoopLagged, TimerFired, WorkLagged
from swarmsched.node.lanes import Lanes
from swarmsched.node.urgency import Urgency

LAG_REPORTED_S = 0.2
TIMER_LIMIT_S = 1.0  # the timer is never further away, so that lag is seen even when the core sleeps
TIMER_FLOOR_S = 0.001
LAG_PERIOD_S = 1.0  # that one figure of the loop's lag stands for
EVENTS_PER_TURN = 256  # then the loop gets a chance to read sockets
BACKLOG_LIMIT = 2_000  # effects behind a stalled disk; beyond it peers' messages are refused

log = logging.getLogger("swarm.driver")


class DrivenNode(Protocol):
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
        machine: DrivenNode,
        store: DurableStore,
        perform: Callable[[Effect], None],
        on_disk_health: Callable[[str], None] = lambda complaint: None,
        clock: Callable[[], float] = now,
        faults: Faults | None = None,
        on_refused: Callable[[RemoteProtocolError], None] = lambda error: None,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine = machine
        self._perform_port = perform
        self._clock = clock
        self._urgency = Urgency()
        self.barrier = Barrier(store, self._perform_in_turn, on_disk_health)
        self._inbox: Lanes[Event | Marker] = Lanes()
        self._turn_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_s = float("inf")  # when the timer should fire; late by more than LAG_REPORTED_S is lag
        self._is_running = False
        self._faults = faults or Faults()
        self._on_refused = on_refused  # hears of a message that the core refused; it has changed nothing
        self._on_failed = on_failed
        self._event: Event | None = None  # that the core is at
        self.failed = asyncio.Event()  # the core raised: its memory may be ahead of the disk, so it is stepped no more
        self._on_stepped: list[Callable[[], None]] = []
        self.counters: Counter[str] = Counter()  # events, effects by class name
        self._stepped_count = 0
        self.lag_s_max = 0.0
        self._lag_s, self._lag_told_s = 0.0, clock()
        self._observe_lag: Callable[[float], None] = lambda lag_s: None  # hears once a second of the longest one in it

    def tell_lag(self, observe: Callable[[float], None]) -> None:
        """`observe` hears once a second of the longest lag of the loop in it."""
        self._observe_lag = observe

    @property
    def is_overloaded(self) -> bool:
        """True while the disk stalls and the backlog is at its limit: peers must be told to try again."""
        return bool(self.barrier.complaint) and self.barrier.backlog >= BACKLOG_LIMIT

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
        return await self.barrier.close(timeout_s)

    def on_stepped(self, callback: Callable[[], None]) -> None:
        """Call back after each turn in which the core took in something; must be cheap and must not raise."""
        self._on_stepped.append(callback)

    def post(self, event: Event) -> None:
        """Hand an event to the core in the next turn."""
        self._inbox.put(event, self._clock())
        self._schedule_turn()

    async def settled(self) -> None:
        """Wait until the effects of everything posted so far were performed, commits included."""
        marker = Marker()
        self._inbox.put(marker, self._clock())
        self._schedule_turn()
        await marker.reached

    def _schedule_turn(self) -> None:
        if self._is_running and self._turn_handle is None:
            self._turn_handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_handle = None
        stepped_count = self._stepped_count
        try:
            self._take_turn()
        except Exception as error:  # the one place: what follows from here on is for the next life of the core
            self._is_running = False
            self._faults.note(self._event, error)
            log.critical("the core raised; it starts again from the disk event=%r", self._event, exc_info=error)
            self.failed.set()
            self._on_failed()
            return
        if self._stepped_count != stepped_count:
            for callback in self._on_stepped:
                callback()

    def _take_turn(self) -> None:
        self._report_lag()
        for _ in range(min(len(self._inbox), EVENTS_PER_TURN)):
            item = self._inbox.take()
            if isinstance(item, Marker):
                self.barrier.add(item)
            else:
                self._step(item)
        if self._machine.next_deadline_s <= self._clock():
            self._step(TimerFired())
        self.barrier.flush()
        self._arm()
        if self._inbox:
            self._schedule_turn()

    def _report_lag(self) -> None:
        now_s = self._clock()
        lag_s, waited_s = max(0.0, now_s - self._armed_for_s), self._inbox.waited_s(now_s)
        self._armed_for_s = float("inf")
        self._lag_s = max(self._lag_s, lag_s, waited_s)
        self.lag_s_max = max(self.lag_s_max, self._lag_s)
        if now_s >= self._lag_told_s + LAG_PERIOD_S:
            self._observe_lag(self._lag_s)
            self._lag_s, self._lag_told_s = 0.0, now_s
        if lag_s > LAG_REPORTED_S:
            self._step(LoopLagged(lag_s))
        if (lag_s := self._inbox.news_of_lag_s(now_s, self.barrier.waited_s)) > 0.0:
            self._step(WorkLagged(lag_s))

    def _step(self, event: Event) -> None:
        self.counters[type(event).__name__] += 1
        self._stepped_count += 1
        if self._faults.refuses(event):
            return
        self._event = event
        try:
            effects = self._machine.step(event, self._clock())
        except RemoteProtocolError as error:
            self._on_refused(error)
            effects = ()
        self._event = None
        for effect in effects:
            if self._urgency.may_pass(effect):
                self._perform(effect)
            else:
                self.barrier.add(effect)

    def _perform_in_turn(self, effect: Effect) -> None:
        self._urgency.performed(effect)
        self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        self.counters[type(effect).__name__] += 1
        try:
            self._perform_port(effect)
        except Exception:  # one effect fails, as if it were lost on its way; the order of the rest holds
            self._faults.counts["effects"] += 1
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
