"""The agent's side of its aggregator: requests of type `outer`, and the child process, there while it is needed.

A rank asks to have a range of its attempt's outer weights hosted, and is told where; it asks again and again, and hears
of another address once there is one.  Where that is the core decides: here or at another node.  What this node hosts is
kept, and told to a child that is started anew: its shards take their weights from the learners.
"""

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm_agent.task.tasksocket import PENALTY_S, PER_SECOND_MOST, Budget, Declined, Request, shown
from swarm_agent.telemetry.host import HostProbe
from swarmsched.effects import AggregationEffect, DropShard, HostShard, ShardPlaced
from swarmsched.events import AggregationRead, Event, ShardGivenUp, ShardWanted
from swarmsched.ids import JobId, TaskKey, address_text
from swarmsched.models import ONE_THREAD
from swarmsched.shards import LEARNERS_MAX, WORD_MOST, AggregatorPlace, RangeKey, ShardOrder, ShardReading

ARGV = (sys.executable, "-P", "-m", "swarm_agent.aggregation.aggregator")
ANSWER_S = 20.0
START_S = 20.0
AGAIN_S, AGAIN_MOST_S = 0.2, 10.0
STOP_S = 2.0
TELL_S = 5.0
LINE_BYTES_MAX = 2**20
SIZE_MOST = 2**40
PLAN = ("plan[0]", "plan[1]")

log = logging.getLogger("swarm.aggregator")


class Aggregation:
    """Tells the core what ranks ask for, and hosts what it orders.  Everything belongs to the event loop's thread."""

    def __init__(
        self,
        host: str,
        is_running: Callable[[TaskKey], bool],
        post: Callable[[Event], None],
        *,
        hosts: bool = True,
        available_bytes: Callable[[], int] = lambda: HostProbe().read().memory_available_bytes,
        argv: tuple[str, ...] = ARGV,
    ) -> None:
        """`host`: where learners of other nodes reach this one; `hosts`: false of a node that gives nothing."""
        self._host, self._is_running, self._post, self._argv = host, is_running, post, argv
        self._hosts, self._available_bytes = hosts, available_bytes
        self._hosted: dict[RangeKey, ShardOrder] = {}
        self._answers: dict[tuple[TaskKey, int], ShardPlaced] = {}  # by task and start
        self._limits: dict[TaskKey, Budget] = {}
        self._child: Process | None = None
        self._running: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._place = AggregatorPlace()
        self._news = asyncio.Event()
        self.told: Mapping[str, Any] = {}
        self.starts = 0

    def start(self) -> None:
        """Tell the core now and then what may be given, and how shards are."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def handle(self, key: TaskKey, request: Request) -> dict[str, Any]:
        """One request; waits for an address that is not `known`.  Raises `Declined`."""
        if not self._is_running(key):
            raise Declined("conflict", "this task is over", "end this process")
        if not self._limits.setdefault(key, Budget(PER_SECOND_MOST, PER_SECOND_MOST)).take_one():
            await asyncio.sleep(PENALTY_S)
            raise Declined("too_many", f"more than {PER_SECOND_MOST} requests in a second", "ask when you are answered")
        order = _order(key, request)
        slot = (key, order.key.start)
        self._answers.pop(slot, None)  # of an earlier question
        if request.get("drop") is True:
            self._post(ShardGivenUp.about(key, order.key.start))
            return {"ok": True}
        self._post(ShardWanted.about(key, order))
        known = request.get("known")
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not _is_news(self._answers.get(slot), known):
                    await self._news.wait()
        answer = self._answers.get(slot)
        if answer is None:
            raise Declined("unavailable", "no aggregator has answered in time", "see the agent's log, or ask again")
        if answer.code:
            raise Declined(answer.code, answer.problem, answer.remedy)
        return {"ok": True, "address": answer.place.address, "fingerprint": answer.place.fingerprint}

    def forget(self, key: TaskKey) -> None:
        """The task is no more, and nothing that it asked for."""
        self._limits.pop(key, None)
        for task, start in [slot for slot in self._answers if slot[0] == key]:
            del self._answers[task, start]
            self._post(ShardGivenUp.about(task, start))

    def perform(self, effect: AggregationEffect) -> None:
        """What the core asks for."""
        match effect:
            case ShardPlaced():
                self._answers[effect.key, effect.start] = effect
                self._tell_news()
            case HostShard(order):
                self._hosted[order.key] = order
                self._tell({"set": _told(order)})
                if self._running is None:
                    self._running = asyncio.get_running_loop().create_task(self._run())
            case DropShard(range):
                self._hosted.pop(range, None)
                self._tell({"drop": [range.job_id, range.attempt, range.start]})
                if not self._hosted:
                    self._end()

    async def stop(self) -> None:
        """End the child."""
        self._hosted.clear()
        for each in (self._watching, self._running):
            if each is not None:
                each.cancel()
                await asyncio.gather(each, return_exceptions=True)
        await self._put_away()

    async def _watch(self) -> None:
        while True:
            self._tell_core()
            await asyncio.sleep(TELL_S)

    def _tell_core(self) -> None:
        """What the child has taken is not available any more, and is no less what may be given."""
        taken = resident_bytes(self._child.pid) if self._child is not None else 0
        memory_bytes = self._available_bytes() + taken if self._hosts else 0
        readings = tuple(map(_reading, self.told.get("shards", ())))
        self._post(AggregationRead(self._place, memory_bytes, readings))

    # The child.

    async def _run(self) -> None:
        """Keep a child while something is wanted."""
        pause_s = AGAIN_S
        while self._hosted:
            try:
                self._child = await asyncio.create_subprocess_exec(
                    *self._argv, self._host, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES_MAX,
                    env={**os.environ, **ONE_THREAD}, start_new_session=True,
                )  # fmt: skip
                self.starts += 1
                await self._follow(self._child)
                pause_s = AGAIN_S
            except (OSError, ValueError, TimeoutError) as error:
                log.warning("the aggregator does not start error=%s", error)
            await self._put_away()
            if self._hosted:
                log.warning("the aggregator ended, and is started anew shards=%d", len(self._hosted))
                await asyncio.sleep(pause_s)
                pause_s = min(AGAIN_MOST_S, 2 * pause_s)
        self._running = None

    async def _follow(self, child: Process) -> None:
        """From the start of the child to its end."""
        assert child.stdout is not None
        async with asyncio.timeout(START_S):
            hello = json.loads(await child.stdout.readline())
        address = address_text((self._host, int(hello["port"])))
        self._set_place(AggregatorPlace(address, str(hello["fingerprint"])))
        for order in self._hosted.values():
            self._tell({"set": _told(order)})
        log.info("aggregator started address=%s pid=%d", address, child.pid)
        while line := await child.stdout.readline():
            self.told = json.loads(line)

    async def _put_away(self) -> None:
        child, self._child = self._child, None
        self.told = {}
        self._set_place(AggregatorPlace())
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()

    def _set_place(self, place: AggregatorPlace) -> None:
        if place != self._place:
            self._place = place
            self._tell_core()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _tell(self, order: Mapping[str, Any]) -> None:
        """One order; a child that starts hears of all when it has."""
        if self._child is not None and self._place.address:
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(order).encode() + b"\n")

    def _end(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()


def resident_bytes(pid: int) -> int:
    """What a process has of this node's memory; 0 of one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _is_news(answer: ShardPlaced | None, known: object) -> bool:
    return answer is not None and (bool(answer.code) or answer.place.address != known)


def _reading(told: Mapping[str, Any]) -> ShardReading:
    """As the child tells it."""
    key = RangeKey(JobId(told["job"]), told["attempt"], told["start"])
    counts = (told["version"], told["rounds"], told["cpu_s"], told["link_bytes"], told["wait_s"])
    return ShardReading(key, *counts, len(told["connected"]))


def _told(order: ShardOrder) -> dict[str, Any]:
    """As the child is told."""
    job, attempt, start = order.key.job_id, order.key.attempt, order.key.start
    told = {"job": job, "attempt": attempt, "start": start, "size": order.size, "layout": order.layout}
    rule = {"rate": order.rate, "momentum": order.momentum, "is_quantised": order.is_quantised}
    plan = {"number": order.plan, "learners": order.learners, "quorum": order.quorum}
    return {**told, "key": order.secret, "every": order.every, "rule": rule, "plan": plan}


def _order(key: TaskKey, request: Request) -> ShardOrder:
    """What is to be hosted; of which job is told by the socket, and by no word of the script.  Raises `Declined`."""
    rule = request.get("rule")
    if not isinstance(rule, dict):
        raise _bad("rule", rule, "send rate, momentum and is_quantised")
    learners = request.get("learners")
    if not isinstance(learners, list) or not 1 <= len(learners) <= LEARNERS_MAX:
        raise _bad("learners", learners, f"send 1 to {LEARNERS_MAX} names")
    if not all(isinstance(each, str) and 0 < len(each) <= WORD_MOST for each in learners):
        raise _bad("learners", learners, f"send 1 to {LEARNERS_MAX} names")
    return ShardOrder(
        key=RangeKey(*key.of_attempt, _count(request, "start", 0, SIZE_MOST)),
        size=_count(request, "size", 1, SIZE_MOST),
        layout=_text(request, "layout"),
        secret=_text(request, "key"),
        rate=_number(rule, "rate", 0.0, 2.0),
        momentum=_number(rule, "momentum", 0.0, 0.999_999),
        is_quantised=rule.get("is_quantised", True) is True,
        plan=_plan(request, key.attempt),
        learners=tuple(learners),
        quorum=_count(request, "quorum", 0, LEARNERS_MAX),
        every=_count({"every": 0, **request}, "every", 0, SIZE_MOST),
    )


def _plan(request: Mapping[str, Any], attempt: int) -> tuple[int, int]:
    """Of a gang that changes its plans are numbered; all others have one."""
    number = request.get("plan", [attempt, 1])
    if not isinstance(number, list) or len(number) != len(PLAN):
        raise _bad("plan", number, "send two whole numbers, or leave it out")
    told = dict(zip(PLAN, number, strict=True))
    return _count(told, PLAN[0], 0, SIZE_MOST), _count(told, PLAN[1], 0, SIZE_MOST)


def _count(request: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _bad(name, value, f"send a whole number from {least} to {most}")
    return value


def _number(request: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _bad(name, value, f"send a number from {least:g} to {most:g}")
    return float(value)


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= WORD_MOST or not value.isascii():
        raise _bad(name, value, f"send 1 to {WORD_MOST} ASCII characters")
    return value


def _bad(name: str, value: object, remedy: str) -> Declined:
    return Declined("bad_outer", f"{name} {shown(value)} cannot be", remedy)
