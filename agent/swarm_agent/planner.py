"""Planning outside the loop: one child process that runs policies and fits models, started on need, ended when idle.

Only the child imports policies, so numpy never enters the agent's process.  Parent and child speak frames of 4 bytes
of length and msgpack over the child's stdin and stdout: what is asked (a plan, a table of speeds, the time to come),
and what is answered to each.  What takes longer than `DEADLINE_S` costs the child its life; of a plan the core gets
`PlanFailed`.
"""

import asyncio
import gc
import logging
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from msgspec import DecodeError
from msgspec.msgpack import Decoder, encode
from msgspec.structs import replace

from swarm_agent.installed import entry_points_of
from swarm_agent.task.shim import now, read_stat
from swarmsched.api import JobState
from swarmsched.effects import ComputePlan
from swarmsched.estimate import SpeedQuestion, SpeedTable
from swarmsched.events import Event, PlanComputed, PlanFailed
from swarmsched.ids import JobId
from swarmsched.models import ONE_THREAD
from swarmsched.view import ClusterView, Outlook, Plan, PolicySetting, Span

DEADLINE_S = 30.0
BUSY_RATIO = 10.0  # by how much longer a plan may take on a machine that has no time for it
IDLE_S = 60.0
STOP_TIMEOUT_S = 2.0
TABLE_TIMEOUT_S = 2.0  # a person waits
QUESTIONS_MOST = 16
FORESIGHT_S = 5.0  # between two looks ahead
FORESIGHT_PER_TIME = 20.0  # and so many times as long as the last one took
FRESH_S = 30.0  # as old as a plan becomes while somebody waits, and a little
NICENESS = 5
OBJECTS_PER_COLLECTION = 50_000  # plans leave few circles, and each look for them goes over all jobs
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LENGTH = struct.Struct(">I")
_Planned = tuple[PolicySetting, ClusterView, float]  # the float: the time
# The last of a request: whether to tell what becomes of the jobs, by the plan that is asked for, else by the last one.
_REQUEST = Decoder(tuple[_Planned | None, SpeedQuestion | None, bool])
_Answer = tuple[Plan | None, SpeedTable | None, tuple[Outlook, ...] | None, str]  # the last: what went wrong
_ANSWER: Decoder[_Answer] = Decoder(_Answer)

log = logging.getLogger("swarm.planner")


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What is expected of jobs from a moment on, by the monotonic clock and by the calendar."""

    seen_s: float
    seen_utc_s: float
    outlooks: Mapping[JobId, Outlook]


class Promises:
    """When the jobs that wait were first expected to start: what becomes of that is measured."""

    def __init__(self) -> None:
        self._starts: dict[JobId, tuple[float, Span]] = {}

    def hear(self, foreseen: Foreseen, waiting: Collection[JobId]) -> None:
        """Keep the first word on each that still waits; that it starts at once is no prediction."""
        told = {one: each.start for one, each in foreseen.outlooks.items() if one in waiting and each.start}
        news = {one: (foreseen.seen_s, start) for one, start in told.items() if start.high_s != 0.0}
        self._starts = {**news, **{one: each for one, each in self._starts.items() if one in waiting}}

    def kept(self, job_id: JobId, now_s: float) -> tuple[float, str] | None:
        """Predicted minus actual seconds of a job that has just started, and whether that was within its interval."""
        if job_id not in self._starts:
            return None
        seen_s, start = self._starts.pop(job_id)
        waited_s = now_s - seen_s
        is_late = start.high_s is not None and waited_s > start.high_s
        return start.expected_s - waited_s, "later" if is_late else "earlier" if waited_s < start.low_s else "within"


_Question = tuple[_Planned | None, SpeedQuestion | None, bool]


class Planner:
    """Runs one request at a time; of plans that wait only the newest counts, older ones are obsolete."""

    def __init__(self, post: Callable[[Event], None], deadline_s: float = DEADLINE_S, idle_s: float = IDLE_S) -> None:
        self._post = post
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._child: asyncio.subprocess.Process | None = None
        self._waiting: ComputePlan | None = None
        self._questions: deque[tuple[_Question, asyncio.Future[_Answer]]] = deque()
        self._look_s = float("-inf")  # when to look ahead again
        self._queued: Collection[JobId] = ()  # by the last plan's view, until it was looked ahead
        self.foreseen = Foreseen(float("-inf"), 0.0, {})  # by the last plans
        self.promises = Promises()
        self._worker: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._observe_plan: Callable[[str, str, float], None] = lambda policy, result, elapsed_s: None

    def tell_plans(self, observe: Callable[[str, str, float], None]) -> None:
        """`observe` hears of each plan: its policy, its result, and how long it took."""
        self._observe_plan = observe

    def submit(self, request: ComputePlan) -> None:
        """Plan, and post `PlanComputed` or `PlanFailed`; a request still waiting is answered as superseded."""
        if self._waiting is not None:
            self._post(self._failed(self._waiting, "superseded by a newer view"))
        self._waiting = request
        self._wake()

    async def tabulate(self, question: SpeedQuestion, timeout_s: float = TABLE_TIMEOUT_S) -> SpeedTable | None:
        """A job's speed by world size; None where there is no answer in time, or too many ask."""
        answer = await self._answered((None, question, False), timeout_s)
        return answer[1] if answer else None

    async def foresee(
        self, setting: PolicySetting, view: ClusterView, timeout_s: float = TABLE_TIMEOUT_S
    ) -> Foreseen | None:
        """What becomes of the jobs of a view, some of which may not be there yet; None as above."""
        now_s = now()
        answer = await self._answered(((setting, view, now_s), None, True), timeout_s)
        return _foreseen(now_s, answer[2]) if answer and answer[2] is not None else None

    async def _answered(self, question: _Question, timeout_s: float) -> _Answer | None:
        if len(self._questions) >= QUESTIONS_MOST:
            return None
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._questions.append((question, answer))
        self._wake()
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """End the child."""
        self._waiting = None
        self._questions.clear()
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._end_child()
        await asyncio.gather(*self._ending)

    async def _work(self) -> None:
        while self._waiting is not None or self._questions or self._is_look_due():
            request, self._waiting = self._waiting, None
            if request is not None:
                self._post(await self._planned(request))
                self._queued = {job.job_id for job in request.view.jobs if job.state is JobState.QUEUED}
            elif self._questions:
                await self._told(*self._questions.popleft())
            else:
                await self._look_ahead()
        self._worker = None
        loop, wait_s = asyncio.get_running_loop(), self._look_s - now()
        if self._queued and wait_s < self._idle_s:
            self._idle = loop.call_later(max(0.0, wait_s), self._wake)
        else:
            self._idle = loop.call_later(self._idle_s, self._retire)

    async def _planned(self, request: ComputePlan) -> Event:
        plan, _, _, problem = await self._ask(((request.setting, request.view, now()), None, False))
        name = request.setting.name
        if plan is None:
            self._observe_plan(name, "failed", 0.0)
            return self._failed(request, problem)
        if plan.fault:
            log.warning("backfill planned in the place of %s: %s", name, plan.fault)
        if plan.oddity:
            log.warning("some jobs are planned as if nothing were known of them: %s", plan.oddity)
        self._observe_plan(name, "fell_back" if plan.fault else "planned", plan.elapsed_s)
        return PlanComputed(plan)

    def _is_look_due(self) -> bool:
        return bool(self._queued) and now() >= self._look_s

    async def _look_ahead(self) -> None:
        """What becomes of the jobs by the last plan, which has not waited for it."""
        queued, self._queued = self._queued, ()
        begun_s = now()
        _, _, outlooks, problem = await self._ask((None, None, True))
        self._look_s = now() + max(FORESIGHT_S, FORESIGHT_PER_TIME * (now() - begun_s))
        if outlooks is None:
            log.warning("no look ahead error=%s", problem)
            return
        self.foreseen = _foreseen(begun_s, outlooks)
        self.promises.hear(self.foreseen, queued)

    async def _told(self, question: _Question, answer: "asyncio.Future[_Answer]") -> None:
        if answer.done():  # nobody waits any more
            return
        told = await self._ask(question)
        if told[3]:
            log.warning("no answer to a question error=%s", told[3])
        if not answer.done():
            answer.set_result(told)

    def _failed(self, request: ComputePlan, error: str) -> PlanFailed:
        log.debug("no plan version=%d error=%s", request.view.version, error)
        return PlanFailed(request.view.version, error)

    async def _ask(self, request: object) -> _Answer:
        """What the child says; one that is late or has ended is replaced when it is needed again."""
        exchange = asyncio.ensure_future(self._exchange(encode(request)))
        try:
            await self._until_late(exchange)
            if exchange.done():
                return exchange.result()
            problem = f"planning took longer than {self._deadline_s:g} s"
        except (OSError, asyncio.IncompleteReadError, DecodeError) as error:
            problem = f"the planner process ended: {error}"
        finally:
            exchange.cancel()
        await self._end_child(kill=True)
        return None, None, None, problem

    async def _until_late(self, exchange: "asyncio.Future[_Answer]") -> None:
        """Return once it is done, or late: the child has computed for too long, stands still, or waits for its turn
        without end on a busy machine."""
        begun_s, cpu_s = time.monotonic(), self._cpu_s()
        while True:
            await asyncio.wait([exchange], timeout=self._deadline_s)
            fields = read_stat(self._child.pid) if self._child else None
            is_at_work = fields is not None and fields[0] in (b"R", b"D")
            is_over = time.monotonic() - begun_s > BUSY_RATIO * self._deadline_s
            if exchange.done() or not is_at_work or is_over or self._cpu_s() - cpu_s >= self._deadline_s:
                return

    def _cpu_s(self) -> float:
        """Seconds that the child has computed so far."""
        fields = read_stat(self._child.pid) if self._child and self._child.returncode is None else None
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0

    async def _exchange(self, frame: bytes) -> _Answer:
        if self._child is None or self._child.returncode is not None:
            self._child = await _start_child()
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(_LENGTH.pack(len(frame)) + frame)
        await stdin.drain()
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        return _ANSWER.decode(await stdout.readexactly(length))

    def _retire(self) -> None:
        task = asyncio.get_running_loop().create_task(self._end_child())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_child(self, kill: bool = False) -> None:
        """Closing its input is the request to stop; one that does not listen is killed."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        if kill and child.returncode is None:
            child.kill()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


def _foreseen(seen_s: float, outlooks: Iterable[Outlook]) -> Foreseen:
    return Foreseen(seen_s, time.time() - (now() - seen_s), {each.job_id: each for each in outlooks})


async def _start_child() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "swarm_agent.planner",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **ONE_THREAD},
        limit=2**20,
        start_new_session=True,  # a Ctrl-C at a terminal is for the agent to handle
    )


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The child: answer requests until the input ends, be it within one of them.  Raises OSError: nobody reads on."""
    while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        frame = _answer(requests.read(length))
        answers.write(_LENGTH.pack(len(frame)) + frame)
        answers.flush()


def _answer(frame: bytes) -> bytes:
    asked = question = None
    try:
        asked, question, looks_ahead = _REQUEST.decode(frame)
        plan = _plan(*asked) if asked else None
        made = [(*asked, plan)] if asked and plan else _last
        if not looks_ahead:
            _last[:] = made
        return encode((plan, question and _table(question), _outlooks(made) if looks_ahead else None, ""))
    except Exception as error:  # noqa: BLE001  # a fault of a policy or a fit is an answer, not the end of the planner
        name = asked[0].name if asked else "the fit" if question else "the look ahead"
        return encode((None, None, None, f"{name} raised {type(error).__name__}: {error}"))


_Made = list[tuple[PolicySetting, ClusterView, float, Plan]]
_last: _Made = []
"""In the child: the last plan that is to be followed, with what it was made from."""


def _outlooks(made: _Made) -> tuple[Outlook, ...] | None:
    from swarmsched.policies.outlook import foresee  # noqa: PLC0415  # nor does the parent look ahead

    return next((foresee(setting, view, plan, now_s) for setting, view, now_s, plan in made), None)


def _plan(setting: PolicySetting, view: ClusterView, now_s: float) -> Plan:
    from swarmsched.policies.registry import plan_anyway, policy_for  # noqa: PLC0415  # nor does the parent run policies

    with suppress(Exception, SystemExit):  # `plan_anyway` meets it as well, and knows what to do
        policy_for(setting, view)  # its import is not the time that the next plan takes
    started_s = time.monotonic()
    plan = plan_anyway(setting, view, now_s)
    return replace(plan, elapsed_s=time.monotonic() - started_s)


def _table(question: SpeedQuestion) -> SpeedTable:
    from swarmsched.models.table import tabulate  # noqa: PLC0415  # nor does it import numpy

    return tabulate(question)


def _main() -> None:
    from swarmsched.policies.registry import ENTRY_POINTS, add_installed  # noqa: PLC0415  # the parent has its own

    add_installed(entry_points_of(ENTRY_POINTS))  # the parent has told what is wrong with them
    os.nice(NICENESS)
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except OSError:  # the agent was killed, and its log, which is ours as well, has no need of what we could not say
        os._exit(1)


if __name__ == "__main__":
    _main()
