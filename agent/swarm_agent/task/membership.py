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

from swarm_agent.task.tasksocket import PENALTY_S, PER_SECOND_MOST, Budget, Declined, Request, fitting, shown
from swarmsched.fields import cleaned
from swarmsched.ids import TaskKey
from swarmsched.task import TaskOrder
from swarmsched.world import VERSION_MOST, Worker, WorkerState, WorldPlan

ANSWER_S = 20.0
SILENT_S = 30.0  # after an answer; a thread may wait for the interpreter while training loads something large
WORKERS_MAX = 64  # of one task: each has a connection
NAME_LENGTH_MAX = 200
PROBLEM_LENGTH_MAX = 500
COUNT_MOST = 1 << 53
SECONDS_MOST = 1e6
STATES = ("ready", "training", "left", "refused")
GONE = ("left", "refused")
NEWS_PER_S = 1.0  # of one worker, and what a change of members takes may come at once
NEWS_AT_ONCE = 10

Plan = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LastWord:
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
    def told(self) -> Worker:
        """What others hear of, which is not each step."""
        numbers = (self.version, self.trains, self.pause_s, self.busy_s)
        state, problem = WorkerState(self.state), cleaned(self.problem)
        return Worker(state, self.address, *numbers, problem, self.is_silent, self.has_timed_out, self.failed)


@dataclass(slots=True, eq=False)
class Asking:
    """One worker, and its newest request; whatever is to happen later has one timer, which the next request ends."""

    standing: LastWord
    news: Budget
    answer: asyncio.Event = field(default_factory=asyncio.Event)  # of the newest request, which is to look again
    told: Worker | None = None
    silence: asyncio.TimerHandle | None = None
    telling: asyncio.TimerHandle | None = None

    def rest(self) -> None:
        """Let go of its timers."""
        for timer in (self.silence, self.telling):
            if timer:
                timer.cancel()
        self.silence = self.telling = None


@dataclass(slots=True)
class TaskMembership:
    """Of one task.  `news` is replaced and set whenever something has changed."""

    limit: Budget
    plan: Plan | None = None
    workers: dict[str, Asking] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def standings(self) -> dict[str, LastWord]:
        """The last word of each worker, by its name."""
        return {name: asking.standing for name, asking in self.workers.items()}

    def tell(self) -> None:
        """Wake all who wait for workers."""
        self.news.set()
        self.news = asyncio.Event()

    def answer_all(self) -> None:
        """Let all requests look whether they are answered."""
        for asking in self.workers.values():
            asking.answer.set()


class TaskMemberships:
    """Answers requests of type `member`; forgets with the task."""

    def __init__(
        self,
        order_of: Callable[[TaskKey], TaskOrder | None],
        tell: Callable[[TaskKey, Worker], None] = lambda key, worker: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` hears of each elastic part's own worker, named by its number, when there is news of it."""
        self._order_of, self._tell, self._now = order_of, tell, now
        self._tasks: dict[TaskKey, TaskMembership] = {}

    def publish(self, key: TaskKey, plan: Plan) -> None:
        """Tell all workers of a task of a plan; one that is not newer than the last has come late, or again."""
        task = self._of(key)
        if task.plan is None or plan["version"] > task.plan["version"]:
            task.plan = plan
            task.answer_all()

    def members(self, key: TaskKey) -> Mapping[str, LastWord]:
        """The last word of each worker of a task, by its name."""
        task = self._tasks.get(key)
        return task.standings if task else {}

    def world(self, key: TaskKey) -> int:
        """The version in which the own worker of an elastic part trains; 0 where it has not told."""
        standing = self.members(key).get(str(key.part))
        return standing.trains if standing else 0

    async def wait(self, key: TaskKey, is_so: Callable[[Mapping[str, LastWord]], bool]) -> None:
        """Return once something is so of the workers of a task."""
        task = self._of(key)
        while not is_so(task.standings):
            await task.news.wait()

    def expect(self, key: TaskKey) -> None:
        """The worker of an elastic part that ran already when this agent started: it asks soon, or stands still."""
        unheard = LastWord(str(key.part), "", 0, 0, -1, "", WorkerState.UNKNOWN.value, "", 0.0, 0.0, self._now())
        task = self._of(key)
        asking = task.workers[unheard.worker] = self._asking(unheard)
        self._listen_after(ANSWER_S + SILENT_S, key, task, asking)

    def forget(self, key: TaskKey) -> None:
        """The task is no more."""
        task = self._tasks.pop(key, None)
        if task:
            task.answer_all()
            for asking in task.workers.values():
                asking.rest()

    async def handle(self, key: TaskKey, request: Request) -> dict[str, Any]:
        """One request; waits for a plan.  Raises `Refusal`."""
        if self._order_of(key) is None:
            raise Declined("conflict", "this task is over", "end this process")
        task = self._of(key)
        if not task.limit.take_one():
            await asyncio.sleep(PENALTY_S)
            raise Declined("too_many", f"more than {PER_SECOND_MOST} requests in a second", "ask when you are answered")
        standing = _standing(request, self._now())
        fitting(Worker, standing.told, "bad_member")
        asking = task.workers.get(standing.worker)
        if asking is None:
            if len(task.workers) >= WORKERS_MAX:
                raise Declined("too_many", f"this task has {WORKERS_MAX} workers already", "start fewer")
            asking = task.workers[standing.worker] = self._asking(standing)
        asking.answer.set()  # a worker that asks anew has no use for an older answer
        answer = asking.answer = asyncio.Event()
        asking.standing = standing
        if asking.silence:
            asking.silence.cancel()
        self._tell_news(key, task, asking)
        task.tell()

        def newer() -> Plan | None:
            return task.plan if task.plan is not None and task.plan["version"] > standing.version else None

        def is_newest() -> bool:
            return asking.answer is answer and self._tasks.get(key) is task

        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while is_newest() and newer() is None and standing.state not in GONE:  # who leaves waits for none
                    answer.clear()
                    await answer.wait()
        if is_newest() and standing.state not in GONE:
            self._listen_after(SILENT_S, key, task, asking)
        return {"ok": True, "plan": newer()}

    def _of(self, key: TaskKey) -> TaskMembership:
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = TaskMembership(Budget(PER_SECOND_MOST, PER_SECOND_MOST, self._now))
        return task

    def _asking(self, standing: LastWord) -> Asking:
        return Asking(standing, Budget(NEWS_PER_S, NEWS_AT_ONCE, self._now))

    def _tell_news(self, key: TaskKey, task: TaskMembership, asking: Asking) -> None:
        """Tell the shepherd, who is another's agent: of a worker that changes all the time once a second only."""
        if asking.telling:
            asking.telling.cancel()
            asking.telling = None
        told = asking.standing.told
        if asking.standing.worker != str(key.part) or told == asking.told:
            return
        if asking.news.take_one():
            asking.told = told
            self._tell(key, told)
        else:
            later = asyncio.get_running_loop().call_later
            asking.telling = later(1.0 / NEWS_PER_S, self._tell_news, key, task, asking)

    def _listen_after(self, pause_s: float, key: TaskKey, task: TaskMembership, asking: Asking) -> None:
        asking.silence = asyncio.get_running_loop().call_later(pause_s, self._listen, key, task, asking)

    def _listen(self, key: TaskKey, task: TaskMembership, asking: Asking) -> None:
        """Tell of a worker that has not asked again, and does not leave."""
        asking.standing = replace(asking.standing, is_silent=True)
        self._tell_news(key, task, asking)
        task.tell()


def _standing(request: Request, now_s: float) -> LastWord:
    """Checked; raises `Refusal`."""
    return LastWord(
        worker=_text(request, "worker", rf"[\x21-\x7e]{{1,{NAME_LENGTH_MAX}}}", "send the value of SWARM_WORKER"),
        address=_address(request),
        version=_count(request, "version", 0, VERSION_MOST),
        trains=_count(request, "trains", 0, VERSION_MOST, 0),
        step=_count(request, "step", -1, COUNT_MOST, -1),
        layout=_text(request, "layout", r"[0-9a-f]{0,64}", "send a hash in hexadecimal", ""),
        state=_text(request, "state", "|".join(STATES), f"send one of {', '.join(STATES)}"),
        problem=_text(request, "problem", r"(?s:.*)", "send a text", "")[:PROBLEM_LENGTH_MAX],
        pause_s=_seconds(request, "pause_s"),
        busy_s=_seconds(request, "busy_s"),
        heard_s=now_s,
        has_timed_out=_flag(request, "has_timed_out"),
        failed=_count(request, "failed", 0, VERSION_MOST, 0),
    )


def _address(request: Request) -> str:
    """Of the worker's store, behind the secret of it where there is one: both go to the other members together."""
    address = _text(request, "address", r"[\x21-\x7e]{1,249}:[0-9]{1,5}", "send host:port of the worker's store")
    secret = _text(request, "secret", r"[0-9a-f]{0,64}", "send it in hexadecimal", "")
    return f"{secret}@{address}" if secret else address


def document_of(plan: WorldPlan) -> Plan:
    """The plan as workers are told of it."""
    members = [member(str(each.part), each.address) for each in plan.members]
    lost = [str(part) for part in plan.lost]
    told = {"version": plan.version, "epoch": plan.epoch, "members": members, "lost": lost}
    return told | {"may_start": plan.may_start}


def member(worker: str, address: str) -> dict[str, str]:
    """As a plan names one, for workers of all versions."""
    secret, _, place = address.rpartition("@")
    return {"worker": worker, "address": place} | ({"secret": secret} if secret else {})


def _text(request: Request, name: str, pattern: str, remedy: str, default: str | None = None) -> str:
    value = request.get(name, default)
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise Declined("bad_member", f"{name} {shown(value)} cannot be", remedy)
    return value


def _count(request: Request, name: str, least: int, most: int, default: int | None = None) -> int:
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Declined("bad_member", f"{name} {shown(value)} cannot be", f"send a whole number from {least} to {most}")
    return value


def _seconds(request: Request, name: str) -> float:
    value = request.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= SECONDS_MOST:
        raise Declined("bad_member", f"{name} {shown(value)} cannot be", f"send seconds, from 0 to {SECONDS_MOST:g}")
    return float(value)


def _flag(request: Request, name: str) -> bool:
    value = request.get(name, False)
    if not isinstance(value, bool):
        raise Declined("bad_member", f"{name} {shown(value)} cannot be", "send true or false")
    return value
