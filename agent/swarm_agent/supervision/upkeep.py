"""The upkeep of what tasks leave behind: logs, checkpoints, work folders, environments, and room on the disk."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from swarm_agent.checkpoints.service import CheckpointService
from swarm_agent.room import shortage
from swarm_agent.staging.requirements import EnvironmentStore
from swarm_agent.supervision.kept_work import KeptFolder, KeptWork
from swarm_agent.supervision.logs import LogStore
from swarmsched.events import DiskFilled
from swarmsched.ids import AttemptKey, JobId

log = logging.getLogger(__name__)

PRUNE_INTERVAL_S = 3_600.0
TIDY_INTERVAL_S = 1.0
ROOM_INTERVAL_S = 5.0
MEASURE_INTERVAL_S = 15.0  # about as often as it is asked for


@contextmanager
def _tried_again(what: str) -> Iterator[None]:
    """The next time does the rest: an administrator may delete at the same time, and a job may leave anything."""
    try:
        yield
    except OSError as error:
        log.debug("could not %s: %s", what, error)
    except Exception:
        log.exception("could not %s", what)


class Upkeep:
    """Removes, measures and watches in the background, from `start` to `stop`; everything in the loop's thread.

    `live` tells the attempts that have tasks which are not over.  `adjust` is called each time that logs are measured.
    `disks` are the folders whose disks must have room; `post` hears when one has too little, or has room again.
    """

    def __init__(
        self,
        disks: tuple[Path, ...],
        logs: LogStore,
        checkpoints: CheckpointService,
        work: KeptWork,
        environments: EnvironmentStore,
        live: Callable[[], set[AttemptKey]],
        adjust: Callable[[], None],
        post: Callable[[DiskFilled], None],
    ) -> None:
        self._disks, self._logs, self._checkpoints, self._work = disks, logs, checkpoints, work
        self._environments, self._live, self._adjust, self._post = environments, live, adjust, post
        self._closed: dict[AttemptKey, bool] = {}  # attempts with tasks that are over, and whether all succeeded
        self._has_closed = asyncio.Event()
        self._has_shortage = False
        self._look_for_room = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; room on the disks is told before this returns."""
        self._tell_room()
        works = (self._watch_room(), self._prune(), self._measure())
        self._running = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        """End what runs in the background."""
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def task_ended(self, attempt: AttemptKey, *, is_success: bool) -> None:
        """Let the attempt's folder be closed once all its tasks are over."""
        self._closed[attempt] = is_success and self._closed.get(attempt, True)
        self._has_closed.set()

    def start_failed(self) -> None:
        """Look for room at once: a full disk may be why."""
        self._look_for_room.set()

    async def left_behind(self, job_id: JobId) -> list[KeptFolder]:
        """The folders of a job's attempts that are over, as far as they are still here."""
        return await asyncio.to_thread(self._work.of_job, job_id, self._live())

    @property
    def held_bytes(self) -> dict[str, int | None]:
        """What is kept of tasks beside their output and shipped files; None where it is not known yet."""
        return {
            "work": self._work.held_bytes,
            "environment": self._environments.held_bytes,
            "checkpoint": self._checkpoints.held_bytes,
        }

    async def _prune(self) -> None:
        """Old logs and checkpoints go once an hour, work folders soon after a task has ended."""
        next_utc_s = 0.0
        while True:
            now_utc_s = time.time()
            live = self._live()
            with _tried_again("remove what is over"):
                if now_utc_s >= next_utc_s:
                    next_utc_s = now_utc_s + PRUNE_INTERVAL_S
                    await asyncio.to_thread(self._logs.prune, now_utc_s)
                    await self._checkpoints.prune(now_utc_s)
                closed = {key: self._closed.pop(key) for key in list(self._closed) if key not in live}
                await asyncio.to_thread(self._tidy_work, closed, live, now_utc_s)
            await asyncio.sleep(TIDY_INTERVAL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PRUNE_INTERVAL_S):
                    await self._has_closed.wait()
            self._has_closed.clear()

    def _tidy_work(self, closed: Mapping[AttemptKey, bool], live: set[AttemptKey], now_utc_s: float) -> None:
        for key, is_success in closed.items():
            self._work.close(key, now_utc_s, is_success=is_success)
        self._work.prune(now_utc_s, live)

    async def _measure(self) -> None:
        """What logs take is known to /metrics, which must not wait for a look at their files; and what waits."""
        while True:
            await asyncio.sleep(MEASURE_INTERVAL_S)
            with _tried_again("measure logs"):
                self._logs.keep_up()
                self._adjust()
                await asyncio.to_thread(self._logs.measure)
                await asyncio.to_thread(self._environments.measure)

    async def _watch_room(self) -> None:
        """A disk that fills is known within seconds, and at once where a start has failed."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_INTERVAL_S):
                    await self._look_for_room.wait()
            self._look_for_room.clear()
            self._tell_room()

    def _tell_room(self) -> None:
        with _tried_again("look for room on disk"):
            told = shortage(self._disks, was_short=self._has_shortage)
            if bool(told) != self._has_shortage:
                self._has_shortage = bool(told)
                self._post(DiskFilled(told))
