"""Logs on disk, without processes: what is kept, what is said about the rest, and cursors that stay good."""

import asyncio
import os
import random
import subprocess
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_agent.supervision.logs import BadCursor, LogConfig, LogPiece, LogStore, Stream
from swarm_agent.task import shim
from swarm_agent.task.shim import HEADER_BYTES, STDERR, STDOUT, SYSTEM, LogWriter, segments
from swarmsched.ids import JobId, TaskKey, make_job_id

JOB = make_job_id(0.0, random.Random(1))
LIMIT, HEAD = 64 * 1024, 16 * 1024


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    return LogStore(LogConfig(directory=tmp_path, limit_bytes=LIMIT, head_bytes=HEAD))


def writer(store: LogStore, attempt: int = 1, rank: int = 0) -> LogWriter:
    return LogWriter(str(store.config.directory / JOB / str(attempt) / str(rank)), LIMIT, HEAD)


def read_all(store: LogStore, cursor: str = "") -> list[LogPiece]:
    return read_rank(store, 0, cursor)


def read_rank(store: LogStore, rank: int, cursor: str = "") -> list[LogPiece]:
    found: list[LogPiece] = []
    while True:
        records, cursor = store.read(JOB, 1, rank, cursor)
        if not records:
            return found
        found.extend(records)


def read_tail(store: LogStore, rank: int, lines: int) -> list[LogPiece]:
    first, cursor = store.tail(JOB, 1, rank, lines)
    return [*first, *read_rank(store, rank, cursor)]


def test_records_come_back_with_stream_time_and_bytes(store: LogStore) -> None:
    log = writer(store)
    log.write(STDOUT, b"one\n", 100.25)
    log.write(STDERR, b"two", 101.5)
    assert [(r.stream, r.utc_s, r.data) for r in read_all(store)] == [
        (Stream.STDOUT, 100.25, b"one\n"),
        (Stream.STDERR, 101.5, b"two"),
    ]


def test_a_cursor_continues_after_its_record(store: LogStore) -> None:
    log = writer(store)
    log.write(STDOUT, b"one\n", 1.0)
    first, cursor = store.read(JOB, 1, 0)
    assert store.read(JOB, 1, 0, cursor) == ((), cursor)
    log.write(STDOUT, b"two\n", 2.0)
    assert [r.data for r in store.read(JOB, 1, 0, cursor)[0]] == [b"two\n"]
    assert [r.data for r in store.read(JOB, 1, 0, first[0].cursor)[0]] == [b"two\n"]


def test_what_is_dropped_is_counted_to_the_byte_whatever_the_cursor(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "FIRST_READER_S", 0.0)
    log = writer(store)
    rng = random.Random(7)
    written, cursors = 0, [("", 0)]
    for index in range(2_000):
        data = bytes([index % 256]) * rng.randrange(1, 400)
        log.write(STDOUT, data, float(index))
        written += len(data)
        if index in (0, 10, 100, 500, 1_500):
            records = read_all(store, cursors[-1][0])
            cursors.append((records[-1].cursor, written))
    assert sum(path.stat().st_size for path in store.config.directory.rglob("*.log")) <= LIMIT
    for cursor, before in cursors:
        records = read_all(store, cursor)
        assert before + sum(len(r.data) + r.dropped_bytes for r in records) == written
        assert sum(r.dropped_bytes > 0 for r in records) <= 1
        assert [r.utc_s for r in records] == sorted(r.utc_s for r in records)
        assert records[-1].utc_s == 1_999.0


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 60),
    ranks=st.integers(1, 3),
    limit_bytes=st.sampled_from((1, 300, 5_000, 2**17, 2**18)),
    lines=st.integers(0, 50),
    rng=st.randoms(use_true_random=False),
)
def test_kept_output_is_read_back_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    ranks: int,
    limit_bytes: int,
    lines: int,
    rng: random.Random,
) -> None:
    """However it was cut into records and segments, from whichever cursor, in pages of whatever size."""
    store = LogStore(LogConfig(directory=tmp_path_factory.mktemp("logs"), limit_bytes=4 * 2**20, head_bytes=HEAD))
    written = [b""] * ranks
    writers = [LogWriter(str(store.config.directory / JOB / "1" / str(rank)), 400_000, HEAD) for rank in range(ranks)]
    for size in (rng.randrange(1, 20_000) for _ in range(count)):
        rank = min(rng.randrange(5), ranks - 1)
        data = (b"%d " % len(written[rank]) * size)[: size - 1] + rng.choice((b"\n", b"x"))
        writers[rank].write(STDOUT, data, 1.0)
        written[rank] += data
    for rank, expected in enumerate(written):
        pages, cursors, cursor = [b""], [""], ""
        while True:
            records, cursor = store.read(JOB, 1, rank, cursor, limit_bytes)
            if not records:
                break
            if len(expected) <= 300_000:
                assert not any(record.dropped_bytes for record in records)
            pages.append(b"".join(record.data for record in records))
            cursors.append(cursor)
        dropped = sum(record.dropped_bytes for record in read_rank(store, rank))
        assert sum(map(len, pages)) + dropped == len(expected)
        if not dropped:
            assert b"".join(pages) == expected
            index = rng.randrange(len(pages))
            rest = b"".join(record.data for record in read_rank(store, rank, cursors[index]))
            assert rest == b"".join(pages[index + 1 :])
            tail = b"".join(record.data for record in read_tail(store, rank, lines))
            assert tail == b"".join(expected.splitlines(keepends=True)[-lines:] if lines else [])


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 30_000), st.sampled_from((b"\n", b"\0", b"\xff\r", b"x"))), max_size=60),
    speeds=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    returns=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
async def test_a_reader_that_goes_on_misses_nothing_however_slow_it_is_and_what_is_kept_stays_limited(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[int, bytes]],
    speeds: list[int],
    returns: bool,
    rng: random.Random,
) -> None:
    """Several readers, the slowest decides; one that loses its agent goes on from its own last cursor elsewhere."""
    store = LogStore(LogConfig(directory=tmp_path_factory.mktemp("logs"), limit_bytes=LIMIT, head_bytes=HEAD))
    key, log, written = TaskKey(JOB, 1), writer(store), b""
    store.opened(key)
    readers = [SlowReader(store) for _ in speeds]
    for size, kind in pieces:
        data = kind * (size // len(kind) + 1)
        while log.is_crowded and not log.make_room():
            for reader in readers:
                await reader.take(1)
        log.write(STDOUT, data, 1.0)
        written += data
        store.wake(key.of_attempt)
        kept = sum(path.stat().st_size for path in store.config.directory.rglob("*.log"))
        assert kept <= LIMIT + 60_000
        for reader, speed in zip(readers, speeds, strict=True):
            await reader.take(speed)
        if returns and rng.random() < 0.1:
            readers[0] = await readers[0].elsewhere()
    log.close()
    store.closed(key)
    for reader in readers:
        await reader.take(1_000)
        assert b"".join(reader.seen) == written


class SlowReader:
    """Takes records when it is told to; one more is always asked for."""

    def __init__(self, store: LogStore, cursor: str = "", seen: tuple[bytes, ...] = ()) -> None:
        self._store, self._cursor, self.seen = store, cursor, [*seen]
        self._records = store.follow(JOB, 1, 0, cursor, is_lossless=True)
        self._next = asyncio.ensure_future(anext(self._records, None))

    async def take(self, count: int) -> None:
        """So many, as far as they are there."""
        for _ in range(count):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not self._next.done() or (record := self._next.result()) is None:
                return
            assert not record.dropped_bytes
            self.seen.append(record.data)
            self._cursor = record.cursor
            self._next = asyncio.ensure_future(anext(self._records, None))

    async def elsewhere(self) -> "SlowReader":
        """The same client through another agent, behind what it has got; what was on its way to it is lost."""
        self._next.cancel()
        await asyncio.gather(self._next, return_exceptions=True)
        assert isinstance(self._records, AsyncGenerator)
        await self._records.aclose()
        return SlowReader(self._store, self._cursor, tuple(self.seen))


async def test_a_reader_that_has_gone_is_waited_for_only_for_a_while(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(shim, "now", lambda: clock[0])
    store.opened(TaskKey(JOB, 1))
    log = writer(store)
    log.write(STDOUT, b"begin\n", 1.0)
    reader = store.follow(JOB, 1, 0, is_lossless=True)
    await anext(reader)
    for _ in range(100):
        log.write(STDOUT, bytes(1_000), 1.0)
    assert not log.make_room()
    clock[0] += 40.0
    assert store.waiting_writers == 0
    store.keep_up()
    assert store.waiting_writers == 1
    clock[0] += 40.0
    assert not log.make_room(), "it is still there, and its agent says so"
    assert isinstance(reader, AsyncGenerator)
    await reader.aclose()
    clock[0] += 29.0
    store.keep_up()
    assert not log.make_room(), "it may come back"
    clock[0] += 2.0
    assert log.make_room()
    store.keep_up()
    assert (log.make_room(), store.waiting_writers) == (True, 0)


def test_a_writer_waits_a_moment_for_the_first_reader_and_for_no_agent_that_has_died(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(shim, "now", lambda: clock[0])
    log = writer(store)
    for _ in range(100):
        log.write(STDOUT, bytes(1_000), 1.0)
    assert not log.make_room()
    clock[0] += 9.0
    (Path(log.directory) / shim.READER_NAME).write_bytes(shim.reader_text(0, clock[0] + 45.0))
    clock[0] += 40.0
    assert not log.make_room()
    clock[0] += 6.0
    assert log.make_room()


@pytest.mark.parametrize("content", [b"", b"x", b"5@", b"zz@9e99 zz@9e99", b"1@nan 1@nan", b"1@inf 2@inf"])
def test_a_damaged_word_about_readers_holds_a_writer_no_longer_than_none(
    store: LogStore, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """An empty one is what a writer sees between an agent's opening of the file and its first words."""
    clock = [1_000.0]
    monkeypatch.setattr(shim, "now", lambda: clock[0])
    log = writer(store)
    log.write(STDOUT, b"begin\n", 1.0)
    (Path(log.directory) / shim.READER_NAME).write_bytes(content)
    for _ in range(100):
        log.write(STDOUT, bytes(1_000), 1.0)
    assert log.make_room() is (b"nan" in content), "that is a word, and no time to wait until"
    clock[0] += shim.FIRST_READER_S
    assert log.make_room()


def test_a_long_line_of_our_own_can_be_read_again(store: LogStore) -> None:
    """A build tool may print a line that is larger than any read of a rank's output."""
    log = LogWriter(str(store.config.directory / JOB / "1" / "0"), 64 * 2**20, 8 * 2**20)
    log.write(SYSTEM, b"x" * 300_000 + b"\n", 1.0)
    assert b"".join(record.data for record in read_all(store)) == b"x" * 300_000 + b"\n"


def test_the_beginning_is_kept(store: LogStore) -> None:
    log = writer(store)
    for index in range(5_000):
        log.write(STDOUT, b"%08d" % index * 10, 1.0)
    kept = b"".join(r.data for r in read_all(store))
    assert kept.startswith(b"00000000")
    assert len(read_all(store)[0].data) == 80
    assert sum(len(r.data) for r in read_all(store)) > LIMIT // 2


def test_a_record_larger_than_a_segment_is_split(store: LogStore) -> None:
    log = writer(store)
    log.write(STDOUT, b"x" * (LIMIT // 2), 1.0)
    assert sum(len(r.data) + r.dropped_bytes for r in read_all(store)) == LIMIT // 2


def test_another_writer_goes_on_where_the_first_stopped(store: LogStore) -> None:
    first = writer(store)
    for index in range(1_000):
        first.write(STDOUT, b"%03d" % index * 50, 1.0)
    first.close()
    store.say(JOB, 1, 0, "swarm: one\nswarm: two")
    second = writer(store)
    second.write(STDOUT, b"end", 2.0)
    assert [r.data for r in read_all(store)[-3:]] == [b"swarm: one\n", b"swarm: two\n", b"end"]
    assert sum(len(r.data) + r.dropped_bytes for r in read_all(store)) == 1_000 * 150 + 22 + 3


def test_a_torn_record_is_cut_off_by_the_next_writer(store: LogStore) -> None:
    log = writer(store)
    log.write(STDOUT, b"whole\n", 1.0)
    log.close()
    directory = str(store.config.directory / JOB / "1" / "0")
    (path,) = Path(directory).iterdir()
    with path.open("ab") as file:
        file.write(b"o" + bytes(8) + (100).to_bytes(4, "big") + b"only a part")
    assert [r.data for r in read_all(store)] == [b"whole\n"]
    log.write(STDOUT, b"next\n", 2.0)
    assert [r.data for r in read_all(store)] == [b"whole\n", b"next\n"]
    assert len(segments(directory)) == 1


@pytest.mark.parametrize("cursor", ["x", "1", "-1.0", "5.9", "1.0.0", "fffffffffffffffffffff.0", "../.."])
def test_a_made_up_cursor_is_refused(store: LogStore, cursor: str) -> None:
    writer(store).write(STDOUT, b"hello\n", 1.0)
    with pytest.raises(BadCursor):
        store.read(JOB, 1, 0, cursor)


def test_a_cursor_between_records_is_refused(store: LogStore) -> None:
    writer(store).write(STDOUT, b"hello hello hello\n", 1.0)
    with pytest.raises(BadCursor):
        store.read(JOB, 1, 0, "3.0")


@pytest.mark.parametrize("job_id", ["../../etc", "", "a" * 26 + "/.."])
def test_a_job_id_never_becomes_another_path(store: LogStore, job_id: str) -> None:
    with pytest.raises(BadCursor):
        store.read(JobId(job_id), 1, 0)
    assert store.attempts(JobId(job_id)) == ()
    assert store.ranks(JobId(job_id), 1) == ()


def test_a_task_without_output_reads_as_empty(store: LogStore) -> None:
    assert store.read(JOB, 1, 0) == ((), "0.0")
    assert read_tail(store, 0, 5) == []


def test_attempts_and_ranks_are_listed(store: LogStore) -> None:
    for attempt, rank in ((2, 0), (1, 11), (1, 2)):
        writer(store, attempt, rank).write(STDOUT, b"x", 1.0)
    assert store.attempts(JOB) == (1, 2)
    assert store.ranks(JOB, 1) == (2, 11)


@pytest.mark.parametrize(
    ("pieces", "lines", "expected"),
    [
        ([b"a\nb\nc\n"], 2, b"b\nc\n"),
        ([b"a\nb\n", b"c\n"], 2, b"b\nc\n"),
        ([b"a\nb", b"b\nc\n"], 2, b"bb\nc\n"),
        ([b"a\nb\nunfinished"], 2, b"b\nunfinished"),
        ([b"a\n", b"b"], 1, b"b"),
        ([b"a\nb\n"], 10, b"a\nb\n"),
        ([b"a\nb\n"], 0, b""),
    ],
)
def test_tail_cuts_at_lines_not_at_records(store: LogStore, pieces: list[bytes], lines: int, expected: bytes) -> None:
    log = writer(store)
    for piece in pieces:
        log.write(STDOUT, piece, 1.0)
    assert b"".join(r.data for r in read_tail(store, 0, lines)) == expected
    first, cursor = store.tail(JOB, 1, 0, lines)
    log.write(STDOUT, b"later", 2.0)
    assert len(first) <= 1, "the search keeps nothing but where to begin"
    assert read_rank(store, 0, cursor)[-1].data == b"later"


def test_since_finds_the_first_record_of_that_time(store: LogStore) -> None:
    log = writer(store)
    for index in range(5_000):
        log.write(STDOUT, b"%04d" % index, float(index))
    assert store.read(JOB, 1, 0, store.since(JOB, 1, 0, 4_990.0))[0][0].data == b"4990"
    assert store.read(JOB, 1, 0, store.since(JOB, 1, 0, 9_999.0))[0] == ()


async def test_follow_wakes_at_news_and_ends_with_the_task(store: LogStore) -> None:
    key = TaskKey(JOB, 1)
    store.opened(key)
    log = writer(store)
    log.write(STDOUT, b"one", 1.0)
    following = store.follow(JOB, 1, 0)
    assert (await anext(following)).data == b"one"
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.write(STDOUT, b"two", 2.0)
    store.wake(key.of_attempt)
    assert (await asyncio.wait_for(waiting, 5.0)).data == b"two"
    log.write(STDOUT, b"last", 3.0)
    store.closed(key)
    assert [r.data async for r in following] == [b"last"]


async def test_follow_of_a_finished_task_ends(store: LogStore) -> None:
    writer(store).write(STDOUT, b"one", 1.0)
    assert [r.data async for r in store.follow(JOB, 1, 0)] == [b"one"]


def test_what_logs_take_is_known_of_running_ended_and_removed_tasks(tmp_path: Path) -> None:
    """Of what earlier lives of the agent have left the first look for old logs tells."""
    frame = HEADER_BYTES + 500
    store = LogStore(LogConfig(directory=tmp_path, retention_s=1e12))
    writer(store, 1).write(STDOUT, bytes(500), 1.0)
    store.measure()
    assert store.held_bytes is None
    store.prune(now_utc_s=1_000.0)
    assert store.held_bytes == frame
    store.opened(TaskKey(JOB, 2))
    store.opened(TaskKey(JOB, 3))
    long, short = writer(store, 2), writer(store, 3)
    long.write(STDOUT, bytes(500), 2.0)
    store.measure()
    assert store.held_bytes == 2 * frame
    short.write(STDOUT, bytes(500), 3.0)
    store.closed(TaskKey(JOB, 3))
    long.write(STDOUT, bytes(500), 3.0)
    store.measure()
    assert store.held_bytes == 4 * frame
    store.closed(TaskKey(JOB, 2))
    LogStore(LogConfig(directory=tmp_path, total_limit_bytes=0)).prune(now_utc_s=1_000.0)
    store.measure()
    assert store.held_bytes == 2 * frame, "of those that do not change it is not asked again"
    store.prune(now_utc_s=1_000.0)
    assert store.held_bytes == 0


def test_old_and_surplus_logs_of_finished_tasks_go_first(tmp_path: Path) -> None:
    store = LogStore(LogConfig(directory=tmp_path, retention_s=100.0, total_limit_bytes=1_600))
    for attempt, mtime in ((1, 100.0), (2, 950.0), (3, 960.0), (4, 10.0)):
        writer(store, attempt).write(STDOUT, bytes(500), 1.0)
        for path in (tmp_path / JOB / str(attempt)).rglob("*"):
            os.utime(path, (mtime, mtime))
    store.opened(TaskKey(JOB, 4))
    store.prune(now_utc_s=1_000.0)
    assert store.attempts(JOB) == (2, 3, 4)  # 1 was too old, 4 still runs
    small = LogStore(LogConfig(directory=tmp_path, total_limit_bytes=1_200))
    small.opened(TaskKey(JOB, 4))
    small.prune(now_utc_s=1_000.0)
    assert small.attempts(JOB) == (3, 4)


def fill(path: Path) -> None:
    """Write to a file until its disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4_096))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_costs_output_and_says_so_when_there_is_room_again(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    store = LogStore(LogConfig(directory=mount))
    log = LogWriter(str(mount / JOB / "1" / "0"), 2**20, 2**19)
    try:
        ballast = mount / "ballast"
        log.write(STDOUT, b"before\n", 1.0)
        ballast.write_bytes(bytes(200 * 1024))
        for _ in range(100):
            log.write(STDOUT, b"x" * 1_000, 2.0)
        assert log.lost_bytes > 0
        lost = log.lost_bytes
        ballast.unlink()
        log.write(STDOUT, b"after\n", 3.0)
        records = read_all(store)
        assert records[0].data == b"before\n"
        assert records[-2].data == b"[%d bytes of output were lost: the disk was full]\n" % lost
        assert records[-2].dropped_bytes == lost
        assert records[-1].data == b"after\n"
        fill(ballast)
        for _ in range(100):
            log.write(STDOUT, b"y" * 1_000, 4.0)
        lost = log.lost_bytes
        log.close()
        ended = read_all(store, records[-1].cursor)
        assert ended[-1].dropped_bytes == lost > 0
        assert sum(r.dropped_bytes or len(r.data) for r in ended) == 100 * 1_000
        notes = [r.data for r in records if r.stream is Stream.SYSTEM]
        kept = sum(len(r.data) for r in records[1:-1] if r.stream is Stream.STDOUT)
        assert kept + sum(int(note[1:].split()[0]) for note in notes) == 100 * 1_000
    finally:
        log.close()
        subprocess.run(["umount", str(mount)], check=True)
