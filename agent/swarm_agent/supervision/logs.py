"""Output of the tasks of this node: reading it by cursor, following it as it grows, and removing it in time.

The shim writes (see `shim.LogWriter` for the format and what is kept); while no shim runs, that is before a task
starts and after one was lost, the agent adds lines of its own by `say`.  So a log has one writer at any time.

A cursor is a place in everything a rank ever wrote, not in a file: it stays good when the middle of a long log is
dropped, and whoever comes from before the gap is told how many bytes are missing.  To a follower that is not to miss
any, the writer is slowed down instead: see `readers`.
"""

import asyncio
import os
import re
import shutil
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from stat import S_ISREG

from swarm_agent.supervision.readers import Reader, Readers
from swarm_agent.task.shim import (
    HEADER_BYTES,
    LOST,
    RECORD_BYTES_MAX,
    SYSTEM,
    LogWriter,
    segment_path,
    segments,
)
from swarmsched.errors import SwarmError
from swarmsched.ids import AttemptKey, JobId, TaskKey, is_job_id

READ_BYTES = 2**18  # of one call, unless told otherwise
LEAST_READ_BYTES = HEADER_BYTES + RECORD_BYTES_MAX
VANISHED_RETRIES = 5


class BadCursor(SwarmError):
    """A cursor that no answer of ours contained."""

    code = "bad_cursor"

    def __init__(self, cursor: str) -> None:
        super().__init__(f"{cursor[:64]!r} is no log cursor of this task")
        self.cursor, self.remedy = cursor, "leave it out to read from the beginning"


class Stream(Enum):
    """Where a record comes from."""

    STDOUT = "stdout"
    STDERR = "stderr"
    SYSTEM = "system"  # the agent's own words, one line each


_LOST = re.compile(LOST.replace(b"[", rb"\[").replace(b"%d", rb"(\d+)"))
_STREAMS = {ord("o"): Stream.STDOUT, ord("e"): Stream.STDERR, ord("s"): Stream.SYSTEM}


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes as they were read from the rank; they may end within a line or a character.

    `cursor` continues after this record.  `dropped_bytes` above 0: a marker, so much is missing here, and `data` says
    why where it was not for the limit.
    """

    stream: Stream
    utc_s: float
    data: bytes
    cursor: str
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Limits of kept output.

    Of each rank `limit_bytes` are kept, the first `head_bytes` and the newest rest.  Finished attempts go after
    `retention_s`, and the oldest of them earlier when all logs together exceed `total_limit_bytes`.
    """

    directory: Path
    limit_bytes: int = 64 * 2**20
    head_bytes: int = 8 * 2**20
    retention_s: float = 14 * 86_400.0
    total_limit_bytes: int = 20 * 2**30


@dataclass(frozen=True, slots=True)
class _Place:
    """A cursor taken apart: position in the framed log, and bytes of output before it."""

    position: int
    payload: int

    def __str__(self) -> str:
        return f"{self.position:x}.{self.payload:x}"

    @classmethod
    def parse(cls, cursor: str) -> "_Place":
        if not cursor:
            return cls(0, 0)
        position, dot, payload = cursor.partition(".")
        try:
            place = cls(int(position, 16), int(payload, 16))
        except ValueError as error:
            raise BadCursor(cursor) from error
        if not dot or not 0 <= place.payload <= place.position < 2**56:
            raise BadCursor(cursor)
        return place


class LogStore:
    """Output of all tasks of this node, running or not.  Files are read in the calling thread, in small pieces."""

    def __init__(self, config: LogConfig) -> None:
        self.config = config
        self._live: set[TaskKey] = set()
        self._closed: deque[AttemptKey] = deque()  # since the last measurement
        self._looking = threading.Lock()  # of the worker threads that measure and prune, for the next line
        self._sizes: dict[AttemptKey, int] | None = None  # None before the first look at all
        self._held_bytes: int | None = None  # their sum
        self._followers: dict[AttemptKey, set[asyncio.Event]] = {}
        self._readers = Readers(LogWriter("", config.limit_bytes, config.head_bytes).segment_bytes)

    # Reading.

    def attempts(self, job_id: JobId) -> tuple[int, ...]:
        """Attempts of the job that have logs here, in order."""
        return _numbers(self.config.directory / job_id) if is_job_id(job_id) else ()

    def ranks(self, job_id: JobId, attempt: int) -> tuple[int, ...]:
        """Ranks of the attempt that have a log here, in order."""
        return _numbers(self.config.directory / job_id / str(attempt)) if is_job_id(job_id) else ()

    def read(
        self, job_id: JobId, attempt: int, rank: int, cursor: str = "", limit_bytes: int = READ_BYTES
    ) -> tuple[tuple[LogPiece, ...], str]:
        """Records after the cursor ('' is the beginning), about `limit_bytes` but at least one, and the next cursor.

        No records: nothing more is there now.  Raises `BadCursor`.
        """
        directory, place = self._directory(job_id, attempt, rank), _Place.parse(cursor)
        for _ in range(VANISHED_RETRIES):
            try:
                records = _read(directory, place, limit_bytes)
            except FileNotFoundError:  # the writer dropped the segment just now: look again
                continue
            return records, records[-1].cursor if records else str(place)
        return (), str(place)

    async def follow(
        self, job_id: JobId, attempt: int, rank: int, cursor: str = "", *, is_lossless: bool = False
    ) -> AsyncIterator[LogPiece]:
        """Records after the cursor and new ones as they come; ends when the task has exited and all was read.

        With `is_lossless` a rank that is too far ahead waits for this reader, as long as it takes what comes.
        """
        key, news = AttemptKey(job_id, attempt), asyncio.Event()
        self._followers.setdefault(key, set()).add(news)
        reader: Reader | None = None
        if is_lossless and key in self._live_attempts:
            reader = self._readers.open(str(self._directory(*key, rank)), _Place.parse(cursor).position)
        try:
            while True:
                news.clear()
                is_live = key in self._live_attempts  # asked before reading: what comes after the answer is not missed
                taken, (records, cursor) = cursor, self.read(job_id, attempt, rank, cursor)
                if reader is not None:
                    self._readers.advance(reader, _Place.parse(taken).position)
                for record in records:
                    yield record
                if not records and not is_live:
                    return
                if not records:
                    await news.wait()
        finally:
            if reader is not None:
                self._readers.close(reader)
            self._followers[key].discard(news)
            if not self._followers[key]:
                del self._followers[key]

    @property
    def waiting_writers(self) -> int:
        """Ranks that wait for a reader, as of the last `keep_up`."""
        return self._readers.waiting

    def keep_up(self) -> None:
        """Tell the writers that their readers are still there; to be called every some seconds."""
        self._readers.keep_up()

    def tail(self, job_id: JobId, attempt: int, rank: int, lines: int) -> tuple[tuple[LogPiece, ...], str]:
        """Where the last `lines` lines begin: their part of the record that they begin in, and the cursor after it.

        May look through all that is kept, so call it in a worker thread; `read` gives the rest.
        """
        wanted = lines + 1  # newlines from the end; the one that closes the line before ours marks the cut
        begin, is_last = "", True
        for record, before in _backwards(self._directory(job_id, attempt, rank)):
            begin = before
            if lines <= 0:
                return (), record.cursor
            if is_last and not record.data.endswith(b"\n"):
                wanted -= 1  # the last line is not finished
            is_last = False
            count = record.data.count(b"\n")
            if count >= wanted:
                cut = replace(record, data=_last_lines(record.data, wanted))
                return (cut,) if cut.data else (), record.cursor
            wanted -= count
        return (), begin

    def since(self, job_id: JobId, attempt: int, rank: int, utc_s: float) -> str:
        """Cursor of the first record at or after `utc_s`; the end when there is none."""
        cursor = ""
        while True:
            records, following = self.read(job_id, attempt, rank, cursor)
            if not records:
                return cursor
            for record in records:
                if record.utc_s >= utc_s and not record.dropped_bytes:
                    return cursor
                cursor = record.cursor
            cursor = following

    # Writing and waking; called by the task runner.

    def say(self, job_id: JobId, attempt: int, rank: int, text: str) -> None:
        """Add the agent's own words, one record a line.  Only while no shim writes this log."""
        writer = LogWriter(str(self._directory(job_id, attempt, rank)), self.config.limit_bytes, self.config.head_bytes)
        for line in text.splitlines():
            writer.write(SYSTEM, line.encode("utf-8", "replace") + b"\n")
        writer.close()
        self.wake(AttemptKey(job_id, attempt))

    def opened(self, key: TaskKey) -> None:
        """More output of this task is to be expected: followers wait for it."""
        self._live.add(key)

    def wake(self, key: AttemptKey) -> None:
        """There is news in the attempt's logs."""
        for news in self._followers.get(key, ()):
            news.set()

    def closed(self, key: TaskKey) -> None:
        """The task has exited; followers end when they have read all."""
        self._live.discard(key)
        self._closed.append(key.of_attempt)
        self.wake(key.of_attempt)

    @property
    def _live_attempts(self) -> set[AttemptKey]:
        return {key.of_attempt for key in self._live}

    # Room; for worker threads, since it takes a look at each file.

    @property
    def held_bytes(self) -> int | None:
        """Bytes of all logs as last measured; None until `prune` has seen them all."""
        return self._held_bytes

    def measure(self) -> None:
        """Look at the logs that grow, and at those that have ended since; the others are as they were."""
        with self._looking:
            if self._sizes is None:
                return
            changing = {self._closed.popleft() for _ in range(len(self._closed))} | self._live_attempts
            self._sizes |= {key: _look(self._attempt(*key))[1] for key in changing}
            self._held_bytes = sum(self._sizes.values())

    def prune(self, now_utc_s: float) -> list[Path]:
        """Remove finished attempts that are too old, or the oldest while all are too large; what was removed."""
        with self._looking:
            found = {key: _look(self._attempt(*key)) for key in self._attempts()}
            sizes = {key: size for key, (_, size) in found.items()}
            total, removed, live = sum(sizes.values()), list[Path](), self._live_attempts
            for newest, key in sorted((newest, key) for key, (newest, _) in found.items() if key not in live):
                if now_utc_s - newest > self.config.retention_s or total > self.config.total_limit_bytes:
                    total -= sizes.pop(key)
                    removed.append(self._remove(*key))
            self._sizes, self._held_bytes = sizes, sum(sizes.values())
        return removed

    def _remove(self, job_id: JobId, attempt: int) -> Path:
        path = self._attempt(job_id, attempt)
        shutil.rmtree(path, ignore_errors=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
        return path

    def _attempts(self) -> Iterator[AttemptKey]:
        for job_id in _job_names(self.config.directory):
            for attempt in self.attempts(job_id):
                yield AttemptKey(job_id, attempt)

    def _attempt(self, job_id: JobId, attempt: int) -> Path:
        return self.config.directory / job_id / str(attempt)

    def _directory(self, job_id: JobId, attempt: int, rank: int) -> Path:
        if not is_job_id(job_id):  # it becomes part of a path
            raise BadCursor(job_id)
        return self.config.directory / job_id / str(int(attempt)) / str(int(rank))


def _read(directory: Path, place: _Place, limit_bytes: int) -> tuple[LogPiece, ...]:
    """Records from `place` on, over segment borders and gaps."""
    try:
        known = segments(str(directory))
    except FileNotFoundError:
        return ()
    found: list[LogPiece] = []
    while limit_bytes > 0:
        index = max((i for i, (start, _) in enumerate(known) if start <= place.position), default=-1)
        if index < 0:
            break
        start, before = known[index]
        piece = _read_segment(directory, start, before, place, limit_bytes)
        if piece:
            found.extend(piece)
            limit_bytes -= sum(len(record.data) + HEADER_BYTES for record in piece)
            place = _Place.parse(piece[-1].cursor)
        elif index + 1 == len(known):
            break
        else:
            following = _Place(*known[index + 1])
            if following.payload > place.payload:
                gap = following.payload - place.payload
                utc_s = _first_time(directory, following)
                found.append(LogPiece(Stream.SYSTEM, utc_s, b"", str(following), dropped_bytes=gap))
            place = following
    return tuple(found)


def _read_segment(directory: Path, start: int, before: int, place: _Place, limit_bytes: int) -> list[LogPiece]:
    with open(segment_path(str(directory), start, before), "rb", buffering=0) as file:  # noqa: PTH123
        # Room for a record at least: nothing found must mean that the segment has ended.
        data = os.pread(file.fileno(), max(LEAST_READ_BYTES, limit_bytes), place.position - start)
    return _parse(data, place)


def _first_time(directory: Path, start: _Place) -> float:
    """When the first record of a segment was written."""
    path = segment_path(str(directory), start.position, start.payload)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return int.from_bytes(os.pread(file.fileno(), HEADER_BYTES, 0)[1:9], "big") / 1e6


def _parse(data: bytes, place: _Place) -> list[LogPiece]:
    """Whole frames in `data`, which begins at `place`."""
    found = []
    offset, position, payload = 0, place.position, place.payload
    while offset + HEADER_BYTES <= len(data):
        stream = _STREAMS.get(data[offset])
        length = int.from_bytes(data[offset + 9 : offset + HEADER_BYTES], "big")
        if stream is None or length > RECORD_BYTES_MAX:
            raise BadCursor(str(place))
        end = offset + HEADER_BYTES + length
        if end > len(data):
            break
        utc_s = int.from_bytes(data[offset + 1 : offset + 9], "big") / 1e6
        position, payload = position + end - offset, payload + length
        body = data[offset + HEADER_BYTES : end]
        lost = _LOST.fullmatch(body) if stream is Stream.SYSTEM else None
        dropped = int(lost[1]) if lost else 0
        found.append(LogPiece(stream, utc_s, body, f"{position:x}.{payload:x}", dropped))
        offset = end
    return found


def _backwards(directory: Path) -> Iterator[tuple[LogPiece, str]]:
    """All records and the cursors before them, the newest first, up to a gap; one segment is in memory at a time."""
    expected = None
    try:
        known = segments(str(directory))
    except FileNotFoundError:
        return
    for start, before in reversed(known):
        try:
            data = Path(segment_path(str(directory), start, before)).read_bytes()
        except FileNotFoundError:
            return
        offsets, end = array("Q"), 0
        while (following := _frame_end(data, end)) <= len(data):
            offsets.append(end)
            end = following
        if expected is not None and start + end != expected:
            return
        expected = start
        payload = before + end - HEADER_BYTES * len(offsets)
        for offset in reversed(offsets):
            payload -= end - offset - HEADER_BYTES
            place = _Place(start + offset, payload)
            yield _parse(data[offset:end], place)[0], str(place)
            end = offset


def _frame_end(data: bytes, offset: int) -> int:
    """Where the frame ends that begins at `offset`; beyond the data when it is not whole."""
    return offset + HEADER_BYTES + int.from_bytes(data[offset + 9 : offset + HEADER_BYTES], "big")


def _last_lines(data: bytes, newlines: int) -> bytes:
    """What follows the `newlines`-th newline from the end."""
    end = len(data)
    for _ in range(newlines):
        end = data.rfind(b"\n", 0, end)
    return data[end + 1 :]


def _look(directory: Path) -> tuple[float, int]:
    """When something was written there last, and how many bytes there are."""
    stats = [stat for file in directory.rglob("*") if (stat := _stat(file))]
    own = _stat(directory)
    newest = max((stat.st_mtime for stat in stats), default=own.st_mtime if own else 0.0)
    return newest, sum(stat.st_size for stat in stats if S_ISREG(stat.st_mode))


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except FileNotFoundError:  # a writer dropped the segment
        return None


def _numbers(directory: Path) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal()))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _job_names(directory: Path) -> Collection[JobId]:
    if not directory.is_dir():
        return ()
    return [JobId(path.name) for path in directory.iterdir() if is_job_id(path.name)]
