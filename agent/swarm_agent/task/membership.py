"""Which workers of an elastic job have come, and which of them are to train: requests of type `member`.

Each worker asks again and again, and is answered when there is a plan newer than the one it knows, or after a while.
What it says of itself with each request is kept, so the last word of each is how it stands.  A thread does the asking,
whatever training waits for: who asks no more stands still as a process, stopped or stuck in its kernel or a library.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from swarm_agent.task.tasksocket import Refusal, Request
from swarmsched.ids import TaskKey
from swarmsched.task import TaskOrder
from swarmsched.world import WorkerState

ANSWER_S = 20.0
SILENT_S = 30.0  # after an answer; a thread may wait for the interpreter while training loads something large
WORKERS_MAX = 1_024  # of one task
NAME_LENGTH_MAX = 200
PROBLEM_LENGTH_MAX = 500
COUNT_MOST = 1 << 53
SECONDS_MOST = 1e6
STATES = ("ready", "training", "left", "refused")

Plan = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker's last word.

    `version` is the newest plan that it has heard of, `trains` that in which it trains (0: none), `step` the last one
    that it has done (-1: none), `layout` a hash of its model; `pause_s` is what its last switch has cost, `busy_s` what
    its own part of a step takes (0: not known); one that has timed out has waited for others for as long as its script
    allows; `failed` is the newest plan that came to nothing for it.
    """

    worker: str
    address: str
    version: int
    trains: int
    step: int
    layout: str
    state: str
    problem: str
    pause_s: float
    busy_s: float
    heard_s: float
    has_timed_out: bool = False
    failed: int = 0
    is_silent: bool = False  # it has not asked again

    @property
    def news(self) -> tuple[object, ...]:
        """What others should hear of, which is not each step."""
        numbers = (self.version, self.trains, self.pause_s, self.busy_s)
        return (self.state, self.address, self.problem, self.is_silent, self.has_timed_out, self.failed, *numbers)


@dataclass(slots=True)
class Membership:
    """Of one task.  `news` is replaced and set whenever something has changed."""

    plan: Plan | None = None
    standings: dict[str, Standing] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)  # how often each worker has asked
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wake all who wait."""
        self.news.set()
        self.news = asyncio.Event()


class TaskMemberships:
    """Answers requests of type `member`; forgets with the task."""

    def __init__(
        self,
        order_of: Callable[[TaskKey], TaskOrder | None],
        tell: Callable[[TaskKey, Standing], None] = lambda key, standing: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` hears of each elastic part's own worker, named by its number, when there is news of it."""
        self._order_of, self._tell, self._now = order_of, tell, now
        self._tasks: dict[TaskKey, Membership] = {}

    def publish(self, key: TaskKey, plan: Plan) -> None:
        """Tell all workers of a task of a plan; one that is not newer than the last has come late, or again."""
        task = self._tasks.setdefault(key, Membership())
        if task.plan is None or plan["version"] > task.plan["version"]:
            task.plan = plan
            task.tell()

    def members(self, key: TaskKey) -> Mapping[str, Standing]:
        """The last word of each worker of a task, by its name."""
        task = self._tasks.get(key)
        return dict(task.standings) if task else {}

    async def wait(self, key: TaskKey, is_so: Callable[[Mapping[str, Standing]], bool]) -> None:
        """Return once something is so of the workers of a task."""
        task = self._tasks.setdefault(key, Membership())
        while not is_so(task.standings):
            await task.news.wait()

    def expect(self, key: TaskKey) -> None:
        """The worker of an elastic part that ran already when this agent started: it asks soon, or stands still."""
        unheard = Standing(str(key.part), "", 0, 0, -1, "", WorkerState.UNKNOWN.value, "", 0.0, 0.0, self._now())
        task = self._tasks.setdefault(key, Membership())
        asyncio.get_running_loop().call_later(ANSWER_S + SILENT_S, self._listen, key, task, unheard, 0)

    def forget(self, key: TaskKey) -> None:
        """The task is no more."""
        task = self._tasks.pop(key, None)
        if task:
            task.tell()

    async def handle(self, key: TaskKey, request: Request) -> dict[str, Any]:
        """One request; waits for a plan.  Raises `Refusal`."""
        if self._order_of(key) is None:
            raise Refusal("conflict", "this task is over", "end this process")
        standing = _standing(request, self._now())
        task = self._tasks.setdefault(key, Membership())
        if standing.worker not in task.standings and len(task.standings) >= WORKERS_MAX:
            raise Refusal("too_many", f"this task has {WORKERS_MAX} workers already", "start fewer")
        turn = task.asked[standing.worker] = task.asked.get(standing.worker, 0) + 1
        before, task.standings[standing.worker] = task.standings.get(standing.worker), standing
        if standing.worker == str(key.part) and (before is None or before.news != standing.news):
            self._tell(key, standing)
        task.tell()

        def newer() -> Plan | None:
            return task.plan if task.plan is not None and task.plan["version"] > standing.version else None

        def is_answered() -> bool:
            # A worker that asks anew has no use for an older answer; one that goes away waits for none.
            is_over = task.asked[standing.worker] != turn or self._tasks.get(key) is not task
            return is_over or newer() is not None or standing.state in ("left", "refused")

        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not is_answered():
                    await task.news.wait()
        asyncio.get_running_loop().call_later(SILENT_S, self._listen, key, task, standing, turn)
        return {"ok": True, "plan": newer()}

    def _listen(self, key: TaskKey, task: Membership, told: Standing, turn: int) -> None:
        """Tell of a worker that has not asked again, and does not leave."""
        is_over = task.asked.get(told.worker, 0) != turn or self._tasks.get(key) is not task
        if is_over or told.state in ("left", "refused"):
            return
        task.standings[told.worker] = replace(told, is_silent=True)
        if told.worker == str(key.part):
            self._tell(key, task.standings[told.worker])
        task.tell()


def _standing(request: Request, now_s: float) -> Standing:
    """Checked; raises `Refusal`."""
    return Standing(
        worker=_text(request, "worker", rf"[\x21-\x7e]{{1,{NAME_LENGTH_MAX}}}", "send the value of SWARM_WORKER"),
        address=_text(request, "address", r"[\x21-\x7e]{1,249}:[0-9]{1,5}", "send host:port of the worker's store"),
        version=_count(request, "version", 0),
        trains=_count(request, "trains", 0, 0),
        step=_count(request, "step", -1, -1),
        layout=_text(request, "layout", r"[0-9a-f]{0,64}", "send a hash in hexadecimal", ""),
        state=_text(request, "state", "|".join(STATES), f"send one of {', '.join(STATES)}"),
        problem=_text(request, "problem", r"(?s:.*)", "send a text", "")[:PROBLEM_LENGTH_MAX],
        pause_s=_seconds(request, "pause_s"),
        busy_s=_seconds(request, "busy_s"),
        heard_s=now_s,
        has_timed_out=_flag(request, "has_timed_out"),
        failed=_count(request, "failed", 0, 0),
    )


def _text(request: Request, name: str, pattern: str, remedy: str, default: str | None = None) -> str:
    value = request.get(name, default)
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise Refusal("bad_member", f"{name} {_shown(value)} cannot be", remedy)
    return value


def _count(request: Request, name: str, least: int, default: int | None = None) -> int:
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= COUNT_MOST:
        raise Refusal("bad_member", f"{name} {_shown(value)} cannot be", f"send a whole number from {least} on")
    return value


def _seconds(request: Request, name: str) -> float:
    value = request.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= SECONDS_MOST:
        raise Refusal("bad_member", f"{name} {_shown(value)} cannot be", f"send seconds, from 0 to {SECONDS_MOST:g}")
    return float(value)


def _flag(request: Request, name: str) -> bool:
    value = request.get(name, False)
    if not isinstance(value, bool):
        raise Refusal("bad_member", f"{name} {_shown(value)} cannot be", "send true or false")
    return value


def _shown(value: object) -> str:
    text = "a number of many digits" if isinstance(value, int) and abs(value) > COUNT_MOST else repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
