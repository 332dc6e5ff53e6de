"""Planning outside the loop: one child process that runs policies, started on need, ended when idle.

Only the child imports policies, so numpy never enters the agent's process.  Parent and child speak frames of 4 bytes
of length and msgpack over the child's stdin and stdout.
A plan that takes longer than `DEADLINE_S` costs the child its life and the core gets `PlanFailed`.
"""

import asyncio
import logging
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from msgspec import DecodeError
from msgspec.msgpack import Decoder, encode
from msgspec.structs import replace

from swarm_agent.task.shim import now
from swarmsched.effects import ComputePlan
from swarmsched.events import Event, PlanComputed, PlanFailed
from swarmsched.models import ONE_THREAD
from swarmsched.view import ClusterView, Plan, PolicySetting

DEADLINE_S = 30.0
IDLE_S = 60.0
STOP_TIMEOUT_S = 2.0
NICENESS = 5
_LENGTH = struct.Struct(">I")
_REQUEST = Decoder(tuple[PolicySetting, ClusterView, float])  # the last is the time
_ANSWER = Decoder(Plan | str)

log = logging.getLogger("swarm.planner")


class Planner:
    """Runs one request at a time; of those that wait only the newest counts, older ones are obsolete."""

    def __init__(self, post: Callable[[Event], None], deadline_s: float = DEADLINE_S, idle_s: float = IDLE_S) -> None:
        self._post = post
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._child: asyncio.subprocess.Process | None = None
        self._waiting: ComputePlan | None = None
        self._worker: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def submit(self, request: ComputePlan) -> None:
        """Plan, and post `PlanComputed` or `PlanFailed`; a request still waiting is answered as superseded."""
        if self._waiting is not None:
            self._fail(self._waiting, "superseded by a newer view")
        self._waiting = request
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """End the child."""
        self._waiting = None
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._end_child()
        await asyncio.gather(*self._ending)

    async def _work(self) -> None:
        while self._waiting is not None:
            request, self._waiting = self._waiting, None
            try:
                async with asyncio.timeout(self._deadline_s):
                    self._post(await self._plan(request))
            except TimeoutError:
                await self._abandon(request, f"planning took longer than {self._deadline_s:g} s")
            except (OSError, asyncio.IncompleteReadError, DecodeError) as error:
                await self._abandon(request, f"the planner process ended: {error}")
        self._worker = None
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._retire)

    async def _abandon(self, request: ComputePlan, error: str) -> None:
        await self._end_child(kill=True)
        self._fail(request, error)

    def _fail(self, request: ComputePlan, error: str) -> None:
        log.debug("no plan version=%d error=%s", request.view.version, error)
        self._post(PlanFailed(request.view.version, error))

    async def _plan(self, request: ComputePlan) -> Event:
        if self._child is None or self._child.returncode is not None:
            self._child = await _start_child()
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        frame = encode((request.setting, request.view, now()))
        stdin.write(_LENGTH.pack(len(frame)) + frame)
        await stdin.drain()
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        answer = _ANSWER.decode(await stdout.readexactly(length))
        return PlanComputed(answer) if isinstance(answer, Plan) else PlanFailed(request.view.version, answer)

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
    """The child: answer requests until the input ends."""
    while head := requests.read(_LENGTH.size):
        (length,) = _LENGTH.unpack(head)
        frame = _answer(requests.read(length))
        answers.write(_LENGTH.pack(len(frame)) + frame)
        answers.flush()


def _answer(frame: bytes) -> bytes:
    from swarmsched.policies.registry import compute_plan  # noqa: PLC0415  # nor does the parent run policies

    setting, view, now_s = _REQUEST.decode(frame)
    started_s = time.monotonic()
    try:
        plan = compute_plan(setting, view, now_s)
        return encode(replace(plan, elapsed_s=time.monotonic() - started_s))
    except Exception as error:  # noqa: BLE001  # a fault of a policy is an answer, not the end of the planner
        return encode(f"{setting.name} raised {type(error).__name__}: {error}")


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)
