"""The asking end of a kept connection to one peer: many questions under way at a time, each answered under its number.

A WebSocket carries them, so that a question costs one small frame each way: as requests of their own, a third of the
time that a durable submission takes went into HTTP.  Frames are a number (8 bytes), in answers a status as HTTP has it
(2 bytes), and the body.

A connection may be dead without anybody knowing: what lies in between drops packets, or has only just stopped to, and
TCP repeats ever more seldom.  So one with a question that has waited for long takes no more: the next one dials anew.
"""

import asyncio
import itertools
import struct
from collections.abc import Awaitable, Callable

import aiohttp
from yarl import URL

ANSWER_TIMEOUT_S = 10.0
STUCK_S = 1.5  # above the second that a peer may take until its disk has written
IDLE_S = 60.0  # below the serving end's patience, so that a connection is not closed under a question
NUMBER = struct.Struct(">Q")
ANSWER = struct.Struct(">QH")
OK = 200

Dial = Callable[[URL], Awaitable[aiohttp.ClientWebSocketResponse]]


class Link:
    """One connection, opened when it is made.  Close it when it is not needed any more."""

    def __init__(self, url: URL, dial: Dial) -> None:
        self.url = url
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[float, asyncio.Future[tuple[int, bytes]]]] = {}
        self._is_retired = False
        self._used_s = self._now_s()
        self._opened: asyncio.Future[aiohttp.ClientWebSocketResponse] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(dial))

    @property
    def is_usable(self) -> bool:
        """False when the next question should go over another connection."""
        if self._is_retired or self._life.done():
            return False
        now_s = self._now_s()
        if self._waiting:
            asked_s, _ = next(iter(self._waiting.values()))
            return now_s < asked_s + STUCK_S
        return now_s < self._used_s + IDLE_S

    def retire(self) -> None:
        """No more questions: close it once the last one is answered."""
        self._is_retired = True
        if not self._waiting:
            self._life.cancel()

    async def close(self) -> None:
        """End it now; questions under way fail."""
        self._life.cancel()
        await asyncio.wait([self._life])

    async def ask(self, seal: Callable[[], bytes]) -> tuple[int, bytes]:
        """Status and body of the answer to what `seal` gives once the connection is there.

        Raises `TimeoutError` without one, and `aiohttp.ClientError` or `OSError` when the connection cannot be made
        or is lost; the question may have been heard then.
        """
        number, self._used_s = next(self._numbers), self._now_s()
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (self._used_s, answer)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                connection = await asyncio.shield(self._opened)
                await connection.send_bytes(NUMBER.pack(number) + seal())
                return await answer
        except TimeoutError as error:
            self.retire()
            raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from error
        finally:
            del self._waiting[number]
            if self._is_retired and not self._waiting:
                self._life.cancel()

    async def _live(self, dial: Dial) -> None:
        try:
            connection = await dial(self.url)
        except BaseException as error:
            self._fail(error if isinstance(error, Exception) else aiohttp.ClientConnectionError("given up"))
            if isinstance(error, Exception):
                return
            raise
        self._opened.set_result(connection)
        try:
            await self._read(connection)
        finally:
            self._is_retired = True  # to close it takes a moment
            self._fail(aiohttp.ClientConnectionError("the connection was lost"))
            await connection.close()

    async def _read(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        async for message in connection:
            if message.type is not aiohttp.WSMsgType.BINARY or len(message.data) < ANSWER.size:
                return  # no peer of ours: as good as lost
            number, status = ANSWER.unpack_from(message.data)
            if number in self._waiting and not (answer := self._waiting[number][1]).done():
                answer.set_result((status, message.data[ANSWER.size :]))

    def _fail(self, error: Exception) -> None:
        """Who asks waits for the one or the other of these; asyncio complains of what nobody has looked at."""
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
