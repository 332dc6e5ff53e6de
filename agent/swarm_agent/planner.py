"""Planning outside the loop: one child process that runs policies and fits models, started on need, ended when idle.

Only the child imports policies, so numpy never enters the agent's process.  Parent and child speak frames of 4 bytes
of length and msgpack over the child's stdin and stdout: a pair, of which one half is null (a plan, a table of speeds).
What takes longer than `DEADLINE_S` costs the child its life; of a plan the core gets `PlanFailed`.
"""

import asyncio
import gc
import logging
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from msgspec import DecodeError
from msgspec.msgpack import Decoder, encode
from msgspec.structs import replace

from swarm_agent.task.shim import now, read_stat
from swarmsched.effects import ComputePlan
from swarmsched.estimate import SpeedQuestion, SpeedTable
from swarmsched.events import Event, PlanComputed, PlanFailed
from swarmsched.models import ONE_THREAD
from swarmsched.view import ClusterView, Plan, PolicySetting

DEADLINE_S = 30.0
BUSY_RATIO = 10.0  # by how much longer a plan may take on a machine that has no time for it
IDLE_S = 60.0
STOP_TIMEOUT_S = 2.0
TABLE_TIMEOUT_S = 2.0  # a person waits
QUESTIONS_MOST = 16
NICENESS = 5
OBJECTS_PER_COLLECTION = 50_000  # plans leave few circles, and each look for them goes over all jobs
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LENGTH = struct.Struct(">I")
_REQUEST = Decoder(tuple[tuple[PolicySetting, ClusterView, float] | None, SpeedQuestion | None])  # the float: the time
_Answer = tuple[Plan | None, SpeedTable | None, str]  # the last: what went wrong, if neither is there
_ANSWER: Decoder[_Answer] = Decoder(_Answer)

log = logging.getLogger("swarm.planner")


class Planner:
    """Runs one request at a time; of plans that wait only the newest counts, older ones are obsolete."""

    def __init__(self, post: Callable[[Event], None], deadline_s: float = DEADLINE_S, idle_s: float = IDLE_S) -> None:
        self._post = post
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._child: asyncio.subprocess.Process | None = None
        self._waiting: ComputePlan | None = None
        self._questions: deque[tuple[SpeedQuestion, asyncio.Future[SpeedTable]]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.observe_plan: Callable[[str, str, float], None] = lambda policy, result, elapsed_s: None

    def submit(self, request: ComputePlan) -> None:
        """Plan, and post `PlanComputed` or `PlanFailed`; a request still waiting is answered as superseded."""
        if self._waiting is not None:
            self._post(self._failed(self._waiting, "superseded by a newer view"))
        self._waiting = request
        self._wake()

    async def tabulate(self, question: SpeedQuestion, timeout_s: float = TABLE_TIMEOUT_S) -> SpeedTable | None:
        """A job's speed by world size; None where there is no answer in time, or too many ask."""
        if len(self._questions) >= QUESTIONS_MOST:
            return None
        answer: asyncio.Future[SpeedTable] = asyncio.get_running_loop().create_future()
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
        while self._waiting is not None or self._questions:
            request, self._waiting = self._waiting, None
            if request is not None:
                self._post(await self._planned(request))
            else:
                await self._told(*self._questions.popleft())
        self._worker = None
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._retire)

    async def _planned(self, request: ComputePlan) -> Event:
        plan, _, problem = await self._ask(((request.setting, request.view, now()), None))
        name = request.setting.name
        if plan is None:
            self.observe_plan(name, "failed", 0.0)
            return self._failed(request, problem)
        if plan.fault:
            log.warning("backfill planned in the place of %s: %s", name, plan.fault)
        if plan.oddity:
            log.warning("some jobs are planned as if nothing were known of them: %s", plan.oddity)
        self.observe_plan(name, "fell_back" if plan.fault else "planned", plan.elapsed_s)
        return PlanComputed(plan)

    async def _told(self, question: SpeedQuestion, answer: "asyncio.Future[SpeedTable]") -> None:
        if answer.done():  # nobody waits any more
            return
        _, table, problem = await self._ask((None, question))
        if problem:
            log.warning("no table of speeds error=%s", problem)
        if table is not None and not answer.done():
            answer.set_result(table)

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
        return None, None, problem

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
    plan = None
    try:
        plan, question = _REQUEST.decode(frame)
        return encode((plan and _plan(*plan), question and _table(question), ""))
    except Exception as error:  # noqa: BLE001  # a fault of a policy or a fit is an answer, not the end of the planner
        name = plan[0].name if plan else "the fit"
        return encode((None, None, f"{name} raised {type(error).__name__}: {error}"))


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


if __name__ == "__main__":
    os.nice(NICENESS)
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except OSError:  # the agent was killed, and its log, which is ours as well, has no need of what we could not say
        os._exit(1)
