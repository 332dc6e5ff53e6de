"""The agent's side of its aggregator: requests of type `outer`, and the child process, there while it is needed.

A rank asks to have a range of its attempt's outer weights hosted, and is told where; it asks again and again, and hears
of another address once there is one.  What was asked for is kept, and told to a child that is started anew: its shards
take their weights from the learners.
"""

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from swarm_agent.task.tasksocket import PENALTY_S, PER_SECOND_MOST, Budget, Declined, Request, shown
from swarm_agent.telemetry.host import HostProbe
from swarmsched.ids import TaskKey
from swarmsched.models import ONE_THREAD

ARGV = (sys.executable, "-P", "-m", "swarm_agent.aggregation.aggregator")
ANSWER_S = 20.0
START_S = 20.0
AGAIN_S, AGAIN_MOST_S = 0.2, 10.0
STOP_S = 2.0
LINE_BYTES_MAX = 2**20
MEMORY_SHARE = 0.25  # of what is available
SHARDS_MAX = 256
LEARNERS_MAX = 1_024
SIZE_MOST = 2**40
TEXT_MOST = 200
PLAN = ("plan[0]", "plan[1]")
FIXED_BYTES = 14  # of an element: weights, momentum, what quantising lost, the change; and 1 for each learner

log = logging.getLogger("swarm.aggregator")


class _Wanted(NamedTuple):
    """A shard that a task asked for."""

    task: TaskKey
    order: Mapping[str, Any]

    @property
    def memory_bytes(self) -> int:
        return int(self.order["size"]) * (FIXED_BYTES + len(self.order["plan"]["learners"]))


class Aggregation:
    """Hosts shards of tasks of this node.  Everything belongs to the event loop's thread."""

    def __init__(
        self,
        host: str,
        is_running: Callable[[TaskKey], bool],
        available_bytes: Callable[[], int] = lambda: HostProbe().read().memory_available_bytes,
        argv: tuple[str, ...] = ARGV,
    ) -> None:
        """`host` is the address at which learners of other nodes reach this one."""
        self._host, self._is_running, self._argv = host, is_running, argv
        self._available_bytes = available_bytes
        self._wanted: dict[tuple[str, int, int], _Wanted] = {}  # by job, attempt and start
        self._limits: dict[TaskKey, Budget] = {}
        self._child: Process | None = None
        self._running: asyncio.Task[None] | None = None
        self._place: tuple[str, str] | None = None  # address and fingerprint
        self._news = asyncio.Event()
        self.told: Mapping[str, Any] = {}
        self.starts = 0

    @property
    def shard_count(self) -> int:
        """How many ranges are held here."""
        return len(self._wanted)

    async def handle(self, key: TaskKey, request: Request) -> dict[str, Any]:
        """One request; waits for an address that is not `known`.  Raises `Declined`."""
        if not self._is_running(key):
            raise Declined("conflict", "this task is over", "end this process")
        if not self._limits.setdefault(key, Budget(PER_SECOND_MOST, PER_SECOND_MOST)).take_one():
            await asyncio.sleep(PENALTY_S)
            raise Declined("too_many", f"more than {PER_SECOND_MOST} requests in a second", "ask when you are answered")
        order = _order(key, request)
        if request.get("drop") is True:
            self._drop([name for name, each in self._wanted.items() if each.task == key and name[2] == order["start"]])
            return {"ok": True}
        self._want(_Wanted(key, order))
        known = request.get("known")
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while self._place is None or self._place[0] == known:
                    news = self._news
                    await news.wait()
        if self._place is None:
            raise Declined("unavailable", "the aggregator of this node does not start", "see the agent's log")
        return {"ok": True, "address": self._place[0], "fingerprint": self._place[1]}

    def forget(self, key: TaskKey) -> None:
        """The task is no more, and nothing that it asked for."""
        self._limits.pop(key, None)
        self._drop([name for name, wanted in self._wanted.items() if wanted.task == key])

    def _drop(self, gone: list[tuple[str, int, int]]) -> None:
        for name in gone:
            del self._wanted[name]
            self._tell({"drop": name})
        if gone and not self._wanted:
            self._end()

    async def stop(self) -> None:
        """End the child."""
        self._wanted.clear()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._put_away()

    def _want(self, wanted: _Wanted) -> None:
        order = wanted.order
        name = (order["job"], order["attempt"], order["start"])
        former = self._wanted.get(name)
        number, obeyed = order["plan"]["number"], former.order["plan"]["number"] if former else None
        if former is not None and former.task != wanted.task and number <= obeyed:
            raise Declined("conflict", "another rank of this job has this range hosted here", "ask for another one")
        if former is not None and number < obeyed:
            problem = f"plan {number} cannot be: this range is hosted here under {obeyed}"
            raise Declined("conflict", problem, "ask under the newest plan")
        if former is not None and former.order == order:
            return
        others = [each for each in self._wanted.values() if each is not former]
        if len(others) >= SHARDS_MAX:
            raise Declined("too_many", f"this node hosts {SHARDS_MAX} ranges already", "ask an agent of another node")
        held = sum(each.memory_bytes for each in others)
        room = int(MEMORY_SHARE * self._available_bytes()) - held
        if wanted.memory_bytes > room:
            problem = f"size {order['size']} takes {wanted.memory_bytes} bytes, and {max(0, room)} may be taken here"
            raise Declined("no_room", problem, "train on more nodes, of which each hosts a smaller range")
        self._wanted[name] = wanted
        self._tell({"set": dict(order)})
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    # The child.

    async def _run(self) -> None:
        """Keep a child while something is wanted."""
        pause_s = AGAIN_S
        while self._wanted:
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
            if self._wanted:
                log.warning("the aggregator ended, and is started anew shards=%d", len(self._wanted))
                await asyncio.sleep(pause_s)
                pause_s = min(AGAIN_MOST_S, 2 * pause_s)
        self._running = None

    async def _follow(self, child: Process) -> None:
        """From the start of the child to its end."""
        assert child.stdout is not None
        async with asyncio.timeout(START_S):
            hello = json.loads(await child.stdout.readline())
        self._set_place((_joined(self._host, int(hello["port"])), str(hello["fingerprint"])))
        for wanted in self._wanted.values():
            self._tell({"set": dict(wanted.order)})
        log.info("aggregator started address=%s pid=%d", self._place and self._place[0], child.pid)
        while line := await child.stdout.readline():
            self.told = json.loads(line)

    async def _put_away(self) -> None:
        child, self._child = self._child, None
        self._set_place(None)
        self.told = {}
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

    def _set_place(self, place: tuple[str, str] | None) -> None:
        self._place = place
        self._news.set()
        self._news = asyncio.Event()

    def _tell(self, order: Mapping[str, Any]) -> None:
        """One order; a child that starts hears of all when it has."""
        if self._child is not None and self._place is not None:
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(order).encode() + b"\n")

    def _end(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()


def _order(key: TaskKey, request: Request) -> dict[str, Any]:
    """What the child is told; of which job is told by the socket, and by no word of the script.  Raises `Declined`."""
    rule = request.get("rule")
    if not isinstance(rule, dict):
        raise _bad("rule", rule, "send rate, momentum and is_quantised")
    learners = request.get("learners")
    if not isinstance(learners, list) or not 1 <= len(learners) <= LEARNERS_MAX:
        raise _bad("learners", learners, f"send 1 to {LEARNERS_MAX} names")
    if not all(isinstance(each, str) and 0 < len(each) <= TEXT_MOST for each in learners):
        raise _bad("learners", learners, f"send 1 to {LEARNERS_MAX} names")
    job, attempt = key.of_attempt
    return {
        "job": job,
        "attempt": attempt,
        "start": _count(request, "start", 0, SIZE_MOST),
        "size": _count(request, "size", 1, SIZE_MOST),
        "layout": _text(request, "layout"),
        "key": _text(request, "key"),
        "every": _count({"every": 0, **request}, "every", 0, SIZE_MOST),
        "rule": {
            "rate": _number(rule, "rate", 0.0, 2.0),
            "momentum": _number(rule, "momentum", 0.0, 0.999_999),
            "is_quantised": rule.get("is_quantised", True) is True,
        },
        "plan": {
            "number": _plan(request, attempt),
            "learners": learners,
            "quorum": _count(request, "quorum", 0, LEARNERS_MAX),
        },
    }


def _plan(request: Mapping[str, Any], attempt: int) -> list[int]:
    """Of a gang that changes its plans are numbered; all others have one."""
    number = request.get("plan", [attempt, 1])
    if not isinstance(number, list) or len(number) != len(PLAN):
        raise _bad("plan", number, "send two whole numbers, or leave it out")
    told = dict(zip(PLAN, number, strict=True))
    return [_count(told, name, 0, SIZE_MOST) for name in PLAN]


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
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_MOST or not value.isascii():
        raise _bad(name, value, f"send 1 to {TEXT_MOST} ASCII characters")
    return value


def _bad(name: str, value: object, remedy: str) -> Declined:
    return Declined("bad_outer", f"{name} {shown(value)} cannot be", remedy)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
