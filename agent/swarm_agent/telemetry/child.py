"""The agent's side of the sampler child: start, a round per period under a deadline, stop.

A child that misses its deadline is asked to stop by closing its stdin; it may be inside a driver call that returns
later.  If it does not end within the patience it gets SIGTERM and then, once and as the last step, SIGKILL: killed
readers have frozen GPUs on real machines.  A process that even SIGKILL does not end is stuck in the kernel; it is
waited for, and no other child is started beside it.
"""

import asyncio
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

Message = Mapping[str, Any]

ARGV = (sys.executable, "-P", "-m", "swarm_agent.telemetry.sampler")
START_DEADLINE_S = 30.0  # nvmlInit takes seconds per GPU where the driver has no persistence mode
TERM_WAIT_S = 2.0
LINE_BYTES_LIMIT = 2**20

log = logging.getLogger(__name__)


class ChildEnd(Enum):
    """How a child's life ended."""

    STOPPED = "stopped"  # it said `absent` or `failed` and left
    CRASHED = "crashed"  # it left without a word
    HUNG = "hung"  # a call did not return within the deadline


class SamplerChild:
    """One child process.  `run` is its whole life.

    `on_message` is called in the loop for each line that it writes, `on_hung` when it misses the deadline of a round,
    and `ask` for what to say in the request beside the round's number.
    """

    def __init__(
        self,
        on_message: Callable[[Message], None],
        *,
        period_s: float,
        deadline_s: float,
        ask: Callable[[], Message],
        on_hung: Callable[[], None],
        argv: Sequence[str] = ARGV,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self._on_message = on_message
        self._period_s = period_s
        self._deadline_s = deadline_s
        self._start_deadline_s = max(start_deadline_s, deadline_s)
        self._ask = ask
        self._on_hung = on_hung
        self._argv = argv
        self._round = 0
        self._is_dismissed = False
        self.pid = 0

    async def run(self) -> ChildEnd:
        """Start the child and talk to it until it ends.  Raises `OSError` when it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LINE_BYTES_LIMIT, start_new_session=True
        )
        self.pid = process.pid
        try:
            outcome = await self._converse(process)
            await self._end(process, patience_s=self._deadline_s, kill_wait_s=None)
        except asyncio.CancelledError:
            await self._end(process, patience_s=1.0, kill_wait_s=1.0)
            raise
        return outcome

    async def _converse(self, process: Process) -> ChildEnd:
        loop = asyncio.get_running_loop()
        try:
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes just as the answer is there.
            async with asyncio.timeout(self._start_deadline_s):
                await self._await_kind(process, "hello")
            while not self._is_dismissed:
                begun_s = loop.time()
                self._request(process)
                async with asyncio.timeout(self._deadline_s):
                    await self._await_kind(process, "round")
                await asyncio.sleep(max(0.0, begun_s + self._period_s - loop.time()))
        except TimeoutError:
            if self._round:
                self._on_hung()
            return ChildEnd.HUNG
        except (EOFError, OSError) as error:
            if not self._is_dismissed:
                log.warning("sampler ended pid=%d error=%s", process.pid, error or type(error).__name__)
                return ChildEnd.CRASHED
        return ChildEnd.STOPPED

    def _request(self, process: Process) -> None:
        assert process.stdin is not None
        self._round += 1
        request = {**self._ask(), "round": self._round}
        process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _await_kind(self, process: Process, kind: str) -> None:
        while not self._is_dismissed:
            message = await self._next(process)
            if message["kind"] == kind and message.get("round", self._round) == self._round:
                return

    async def _next(self, process: Process) -> Message:
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
        except ValueError as error:
            raise EOFError(f"line of more than {LINE_BYTES_LIMIT} bytes") from error
        if not line.endswith(b"\n"):
            raise EOFError("it closed its output")
        message: Message = json.loads(line)
        self._is_dismissed |= message["kind"] in ("absent", "failed")
        self._on_message(message)
        return message

    async def _end(self, process: Process, *, patience_s: float, kill_wait_s: float | None) -> None:
        """Ask, then terminate, then kill once.  `kill_wait_s` None: wait for the end however long it takes."""
        assert process.stdin is not None
        process.stdin.close()
        if await self._ended(process, patience_s):
            return
        log.warning("sampler does not stop pid=%d action=SIGTERM", process.pid)
        with suppress(ProcessLookupError):
            process.terminate()
        if await self._ended(process, TERM_WAIT_S):
            return
        log.error("sampler does not stop pid=%d action=SIGKILL", process.pid)
        with suppress(ProcessLookupError):
            process.kill()
        if await self._ended(process, kill_wait_s if kill_wait_s is not None else TERM_WAIT_S):
            return
        log.error("sampler is stuck in the kernel pid=%d remedy=reboot", process.pid)
        if kill_wait_s is None:
            await process.wait()

    async def _ended(self, process: Process, wait_s: float) -> bool:
        """True once the process is gone.  What it still writes is taken: a late reading is better than none."""

        async def drain() -> None:
            with suppress(EOFError):
                while True:
                    await self._next(process)
            await process.wait()

        try:
            async with asyncio.timeout(wait_s):
                await drain()
        except TimeoutError:
            return False
        return True
