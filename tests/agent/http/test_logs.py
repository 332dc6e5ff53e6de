"""Output of jobs: merged, followed from the queue to the end, and resumed anywhere."""

import asyncio
import json
from dataclasses import replace
from itertools import count

import pytest
from msgspec import convert

from swarm_agent.http import app as app_module
from swarm_agent.http import logs as logs_module
from swarm_agent.http import stream as stream_module
from swarm_agent.http.log_cursor import LogCursor, decode_cursor
from swarm_agent.http.log_places import LogFinder
from swarm_agent.http.log_source import LogSource
from swarm_agent.http.logs import LogQuery, _Follower
from swarm_agent.task import shim
from swarm_agent.task.shim import LogWriter
from swarmsched.api import EndReason, JobSpec, JobState, StartPhase
from swarmsched.documents import JobDocument
from swarmsched.fields import PART_MOST, RANK_MOST
from swarmsched.ids import NodeId, TaskKey
from swarmsched.resources import Share
from swarmsched.world import World
from tests.agent.http.testing import a_record, an_elastic_record, job_id
from tests.agent.testing import wait_until

JOB = job_id(1, random_part="wxyz")
SSE = {"Accept": "text/event-stream"}
TWO_NODES = (("n1", 1), ("n2", 2))


class Lines:
    """Records of a stream as they come."""

    def __init__(self, response):
        self.response = response

    async def next(self):
        async with asyncio.timeout(5):
            while True:
                line = (await self.response.content.readline()).strip()
                if line:
                    return json.loads(line)

    async def until(self, kind, **keys):
        while True:
            record = await self.next()
            if record["type"] == kind and all(record.get(key) == value for key, value in keys.items()):
                return record

    async def rest(self):
        async with asyncio.timeout(5):
            return [json.loads(line) for line in (await self.response.read()).splitlines() if line]


async def read(desk, query="", headers=None):
    response = await desk.ask("GET", f"/v1/jobs/{JOB}/logs{query}", headers=headers or {})
    assert response.status == 200, await response.text()
    return response


async def records_of(desk, query=""):
    return await Lines(await read(desk, query)).rest()


def texts(records):
    return [(each["rank"], each["text"]) for each in records if each["type"] == "log"]


def run(desk, nodes=TWO_NODES, **changes):
    return desk.agent.put(a_record(JOB, desk.agent.config.name, nodes=nodes, state=JobState.RUNNING, **changes))


def end(desk, exit_code=0):
    reason = EndReason.FAILED if exit_code else EndReason.COMPLETED
    desk.agent.change(JOB, state=JobState.ENDED, exit_code=exit_code, end_reason=reason)


async def test_a_rank_that_the_job_does_not_have_is_a_mistake_and_not_an_empty_log(n1):
    run(n1)
    response = await n1.ask("GET", f"/v1/jobs/{JOB}/logs?rank=9")
    assert response.status == 400
    assert "no rank 9" in (await response.json())["detail"]


async def test_kept_output_of_all_nodes_is_merged_by_time_at_any_agent(n1, n2, n3, output):
    run(n1)
    output(n1.agent).write(JOB, 0, b"a\n", at=1.0)
    output(n2.agent).write(JOB, 1, b"b\n", at=2.0)
    output(n2.agent).write(JOB, 2, b"d\n", kind=b"e", at=4.0)
    output(n1.agent).write(JOB, 0, b"c\n", at=3.0)
    for desk in (n1, n2, n3):
        records = await records_of(desk)
        assert texts(records) == [(0, "a\n"), (1, "b\n"), (0, "c\n"), (2, "d\n")]
    assert [each["stream"] for each in records] == ["stdout", "stdout", "stdout", "stderr"]
    assert [each["node"] for each in records] == ["n1", "n2", "n1", "n2"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?rank=1,2", [(1, "b\n"), (2, "d\n")]),
        ("?stream=stderr", [(2, "d\n")]),
        ("?tail=1", [(1, "b\n"), (0, "c\n"), (2, "d\n")]),
        ("?tail=0", []),
        ("?since=1970-01-01T00:00:03Z", [(0, "c\n"), (2, "d\n")]),
    ],
)
async def test_filters(n1, n2, n3, output, query, expected):
    run(n1)
    output(n1.agent).write(JOB, 0, b"a\n", at=1.0)
    output(n2.agent).write(JOB, 1, b"b\n", at=2.0)
    output(n1.agent).write(JOB, 0, b"c\n", at=3.0)
    output(n2.agent).write(JOB, 2, b"d\n", kind=b"e", at=4.0)
    assert texts(await records_of(n3, query)) == expected


@pytest.mark.parametrize("query", ["?rank=-1", "?rank=x", "?stream=out", "?tail=-1", "?cursor=%21", "?follow=maybe"])
async def test_malformed_filters_are_refused(n1, query):
    run(n1)
    await n1.get(f"/v1/jobs/{JOB}/logs{query}", 400)


async def test_a_follower_sees_queue_start_output_and_end(n1, n2, n3, output):
    n1.agent.put(a_record(JOB, "n1"))
    lines = Lines(await read(n3, "?follow=1"))
    assert (await lines.next())["state"] == "queued"
    n1.agent.change(JOB, reason="needs 3 GPUs, 1 free")
    assert (await lines.next())["reason"] == "needs 3 GPUs, 1 free"
    shares = a_record(JOB, "n1", nodes=TWO_NODES).shares
    n1.agent.change(JOB, state=JobState.STARTING, phase=StartPhase.LAUNCH, shares=shares, attempt=1)
    assert (await lines.next())["phase"] == "launch"
    for desk in (n1, n2):
        desk.agent.logs.opened(TaskKey(JOB, 1))
    n1.agent.change(JOB, state=JobState.RUNNING, phase=StartPhase.NONE)
    assert (await lines.next())["state"] == "running"
    output(n2.agent).write(JOB, 2, b"hello\n")
    assert texts([await lines.next()]) == [(2, "hello\n")]
    output(n1.agent).write(JOB, 0, b"no newline")
    assert texts([await lines.next()]) == [(0, "no newline")]
    for desk in (n1, n2):
        desk.agent.logs.closed(TaskKey(JOB, 1))
    end(n1, exit_code=3)
    records = await lines.rest()
    assert [each["type"] for each in records] == ["state", "end"]
    assert (records[-1]["exit_code"], records[-1]["shell_exit_code"], records[-1]["end_reason"]) == (3, 3, "failed")


async def test_output_written_just_before_the_end_is_delivered_once(n1, n2, output):
    run(n1)
    lines = Lines(await read(n1, "?follow=1"))
    await lines.until("state", state="running")
    for number in range(50):
        output(n2.agent).write(JOB, 1, f"{number}\n".encode(), at=float(number))
    end(n1)
    records = await lines.rest()
    assert texts(records) == [(1, f"{number}\n") for number in range(50)]
    assert records[-1]["type"] == "end"


class ManyLines(LogSource):
    """A source of 300 records, which stands where a node's logs do."""

    async def read(self, node, request):
        for number in range(int(request.cursors.get("0") or 0), 300):
            record = {"rank": 0, "stream": "stdout", "utc_s": float(number), "data": b"%d\n" % number}
            yield [{**record, "cursor": str(number + 1), "dropped": 0, "is_mark": False}]
        if request.follow:
            await asyncio.Event().wait()


async def test_a_slow_client_loses_no_record_when_the_job_ends(n1, monkeypatch):
    """The end finds one record between the source and the full queue, and a stream that does not end by itself."""
    monkeypatch.setattr(logs_module, "DRAIN_S", 0.05)
    run(n1, nodes=(("n1", 1),))
    running = convert(await n1.get(f"/v1/jobs/{JOB}"), JobDocument)
    end(n1)
    ended = convert(await n1.get(f"/v1/jobs/{JOB}"), JobDocument)
    may_end = asyncio.Event()

    async def documents():
        yield running
        await may_end.wait()
        yield ended

    query = LogQuery(ranks=(), streams=(), tail=None, since_utc_s=None, attempt=0)
    follower = _Follower(ManyLines(n1.agent, n1.agent), LogFinder(n1.agent, n1.agent), query, LogCursor())
    records = follower.records(documents())
    seen = [await anext(records)]
    await wait_until(follower._queue.full)
    may_end.set()
    seen += [record async for record in records]
    assert texts(seen) == [(0, f"{number}\n") for number in range(300)]
    assert seen[-1]["type"] == "end"


async def test_following_an_ended_job_gives_its_output_and_the_end(n1, n3, output):
    run(n1)
    output(n1.agent).write(JOB, 0, b"a\nb\n")
    end(n1)
    records = await records_of(n3, "?follow=1&tail=1")
    assert [each["type"] for each in records] == ["state", "log", "end"]
    assert texts(records) == [(0, "b\n")]


async def test_a_second_attempt_is_followed_from_its_beginning(n1, n2, output):
    run(n1, nodes=(("n1", 1),))
    output(n1.agent).write(JOB, 0, b"first\n")
    lines = Lines(await read(n1, "?follow=1"))
    await lines.until("log", text="first\n")
    shares = a_record(JOB, "n1", nodes=(("n2", 1),)).shares
    n1.agent.change(JOB, state=JobState.QUEUED, shares=())
    output(n2.agent).write(JOB, 0, b"second\n", attempt=2)
    n1.agent.change(JOB, state=JobState.RUNNING, attempt=2, shares=shares)
    assert (await lines.until("log"))["text"] == "second\n"
    end(n1)
    assert (await lines.rest())[-1]["type"] == "end"


async def test_what_a_tail_left_out_is_not_sent_on_return(n1, n2, output):
    run(n1)
    output(n1.agent).write(JOB, 0, b"old\n", at=1.0)
    output(n2.agent).write(JOB, 1, b"old\n", at=1.0)
    for desk in (n1, n2):
        desk.agent.logs.opened(TaskKey(JOB, 1))
    lines = Lines(await read(n1, "?follow=1&tail=0"))
    writer = asyncio.create_task(_write_on(output(n1.agent)))  # what comes before the tail is read is left out as well
    async with asyncio.timeout(5):
        while True:  # until both nodes have said where their output begins
            record = await lines.until("log")
            if set(decode_cursor(record["cursor"]).ranks) == {"0", "1"}:
                break
    writer.cancel()
    lines.response.close()
    output(n2.agent).write(JOB, 1, b"new\n", at=3.0)
    found = texts(await records_of(n2, f"?cursor={record['cursor']}"))
    assert [text for rank, text in found if rank == 1] == ["new\n"]
    behind = [int(number) for rank, text in found if rank == 0 for number in text.split()]
    last = int(record["text"].split()[-1])
    assert behind == list(range(last + 1, last + 1 + len(behind))), "what was sent, or left out, is not sent again"


async def _write_on(rank_output):
    for number in count():
        rank_output.write(JOB, 0, f"{number}\n".encode(), at=2.0)
        await asyncio.sleep(0.02)


def events_of(body):
    """(event, id, data) of each message."""
    found = []
    for block in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if fields:
            found.append((fields["event"], fields["id"], json.loads(fields["data"])))
    return found


async def test_last_event_id_resumes_at_another_agent_without_loss_or_repetition(n1, n2, n3, output):
    run(n1)
    for number in range(6):
        output((n1 if number % 2 else n2).agent).write(
            JOB, 0 if number % 2 else 1, f"{number}\n".encode(), at=float(number)
        )
    end(n1)
    whole = events_of(await (await read(n1, "?follow=1", SSE)).read())
    assert [kind for kind, _, _ in whole] == ["state", *["log"] * 6, "end"]
    for stop in range(1, 7):
        seen = [data["text"] for kind, _, data in whole[: stop + 1] if kind == "log"]
        response = await read(n3, "?follow=1&tail=0", {**SSE, "Last-Event-ID": whole[stop][1]})
        rest = events_of(await response.read())
        seen += [data["text"] for kind, _, data in rest if kind == "log"]
        assert sorted(seen) == [f"{number}\n" for number in range(6)]
        assert rest[-1][0] == "end"


async def test_bytes_that_are_not_utf8_arrive_as_base64(n1, output):
    run(n1, nodes=(("n1", 1),))
    output(n1.agent).write(JOB, 0, b"\xff\x00\r\n")
    (record,) = await records_of(n1)
    assert record["data"] == "/wANCg=="
    assert "text" not in record


async def test_line_breaks_in_output_cannot_forge_events(n1, output):
    run(n1, nodes=(("n1", 1),))
    output(n1.agent).write(JOB, 0, b"x\n\nevent: end\ndata: {}\n\n\r")
    end(n1)
    kinds = [kind for kind, _, _ in events_of(await (await read(n1, "?follow=1", SSE)).read())]
    assert kinds == ["state", "log", "end"]


async def test_a_node_that_is_away_is_named_and_the_others_output_comes(n1, n2, n3, output, swarm):
    run(n1)
    output(n1.agent).write(JOB, 0, b"a\n")
    swarm.down.add("n2")
    records = await records_of(n3)
    assert [(each["type"], each["node"]) for each in records] == [("warning", "n2"), ("log", "n1")]


async def test_what_is_missing_is_told_whatever_was_asked_for_and_what_may_still_come_is_told_apart(
    n1, n2, n3, output, swarm
):
    run(n1)
    output(n1.agent).write(JOB, 0, b"[7 bytes of output were lost: the disk was full]\n", kind=b"s")
    swarm.down.add("n2")
    gap, warning = sorted(await records_of(n3, "?stream=stdout"), key=lambda each: each["type"])
    assert (gap["type"], gap["skipped_bytes"], gap["text"]) == ("gap", 7, "the disk was full")
    assert (warning["type"], warning["is_missing"]) == ("warning", True)
    lines = Lines(await read(n3, "?follow=1"))
    assert (await lines.until("warning", node="n2"))["is_missing"] is False
    lines.response.close()


@pytest.mark.parametrize("value", [None, "1", "0"])
async def test_only_who_asks_for_it_is_waited_for(n1, n3, output, value, monkeypatch):
    """Also through another agent; what is kept here is small, so that the writer has to wait at once."""
    run(n1, nodes=(("n1", 1),))
    n1.agent.logs.opened(TaskKey(JOB, 1))
    folder = n1.agent.logs.config.directory / JOB / "1" / "0"
    writer = LogWriter(str(folder), 2**20, 2**16)
    writer.write(b"o", b"begin\n", 1.0)
    lines = Lines(await read(n3, "?follow=1", {"X-Swarm-Lossless": value} if value else {}))
    await lines.until("log")
    assert (folder / shim.READER_NAME).exists() is (value == "1")
    lines.response.close()


async def test_silence_is_filled_with_heartbeats(n1, monkeypatch):
    monkeypatch.setattr(app_module, "HEARTBEAT_S", 0.02)
    n1.agent.put(a_record(JOB, "n1"))
    for headers, beat in ((SSE, stream_module.SSE_HEARTBEAT), ({}, stream_module.NDJSON_HEARTBEAT)):
        response = await read(n1, "?follow=1", headers)
        async with asyncio.timeout(5):
            await response.content.readuntil(b"}\n\n" if headers else b"}\n")
            assert await response.content.readexactly(len(beat)) == beat
        response.close()


async def test_a_slow_client_holds_back_its_own_stream_only(n1, n3, output, monkeypatch):
    """The client reads nothing: memory stays bounded, other requests are answered, and then it is let go."""
    monkeypatch.setattr(app_module, "SLOW_CLIENT_S", 0.3)
    run(n1, nodes=(("n1", 1),))
    line = b"x" * 1_000 + b"\n"
    writer = output(n1.agent)
    for _ in range(9):
        writer.write(JOB, 0, line * 1_000)
    end(n1)
    slow = await n3.client.get(
        f"/v1/jobs/{JOB}/logs?follow=1", headers={"Authorization": "Bearer a-token-for-tests-only"}, read_bufsize=1_024
    )
    assert (await n3.get(f"/v1/jobs/{JOB}"))["state"] == "ended"
    slow.close()
    assert [each["type"] for each in await records_of(n1, "?follow=1&tail=1")][-1] == "end"


async def test_too_many_streams_are_refused_with_a_time_to_come_back(n1, monkeypatch):
    monkeypatch.setattr(app_module, "STREAMS_LIMIT", 1)
    n1.agent.put(a_record(JOB, "n1"))
    first = await read(n1, "?follow=1")
    response = await n1.ask("GET", f"/v1/jobs/{JOB}/logs?follow=1")
    assert (response.status, response.headers["Retry-After"]) == (429, "5")
    first.close()


async def test_the_end_of_the_agent_ends_its_streams(n1):
    n1.agent.put(a_record(JOB, "n1"))
    response = await read(n1, "?follow=1")
    lines = Lines(response)
    await lines.next()
    async with asyncio.timeout(5):
        await n1.client.close()


def give_up(desk, attempt=1, **changes):
    """The attempt was lost with a node, and the job waits for another."""
    reason = "needs 3 GPUs, 1 free"
    desk.agent.change(JOB, state=JobState.QUEUED, shares=(), attempt=attempt, restarts=1, reason=reason, **changes)


def lines_of_two_attempts(n1, n2, output):
    """Attempt 1 ran on n1 and n2, attempt 2 on n2 and n1."""
    for attempt, first, second in ((1, n1, n2), (2, n2, n1)):
        output(first.agent).write(JOB, 0, f"first of {attempt}\n".encode(), attempt=attempt, at=1.0)
        for rank in (1, 2):
            text = f"rank {rank} of {attempt}\n".encode()
            output(second.agent).write(JOB, rank, text, attempt=attempt, at=1.0 + rank)


def of_attempt(number, *ranks):
    return [(rank, f"rank {rank} of {number}\n" if rank else f"first of {number}\n") for rank in ranks or (0, 1, 2)]


async def test_while_a_job_waits_the_output_of_its_last_attempt_is_found_on_the_nodes_that_ran_it(n1, n2, n3, output):
    run(n1)
    output(n1.agent).write(JOB, 0, b"first of 1\n", at=1.0)
    output(n2.agent).write(JOB, 1, b"rank 1 of 1\n", at=2.0)
    output(n2.agent).write(JOB, 2, b"rank 2 of 1\n", at=3.0)
    give_up(n1)
    for desk in (n1, n3):
        head, *records = await records_of(desk)
        text = "attempt 1, which is over; the job is queued: needs 3 GPUs, 1 free"
        assert (head["type"], head["attempt"], head["text"]) == ("attempt", 1, text)
        assert texts(records) == of_attempt(1)
    assert texts(await records_of(n3, "?rank=1&tail=1")) == of_attempt(1, 1)


async def test_output_that_nobody_has_is_told_with_who_may_have_it(n1, n2, n3, swarm, output):
    run(n1)
    output(n1.agent).write(JOB, 0, b"first of 1\n")
    output(n2.agent).write(JOB, 1, b"rank 1 of 1\n")
    give_up(n1)
    swarm.down.add("n2")
    _, warning, *records = await records_of(n3)
    expected = "no node that answers has output of attempt 1 of ranks 1, 2; node n2 did not answer and may have it"
    assert (warning["type"], warning["text"]) == ("warning", expected)
    assert texts(records) == of_attempt(1, 0)


async def test_any_attempt_is_read_by_its_number_and_one_that_was_not_is_a_mistake(n1, n2, n3, output):
    run(n1, nodes=(("n2", 1), ("n1", 2)), attempt=2)
    lines_of_two_attempts(n1, n2, output)
    assert texts(await records_of(n3)) == texts(await records_of(n3, "?attempt=2")) == of_attempt(2)
    head, *records = await records_of(n3, "?attempt=1")
    assert head["text"] == "attempt 1, which is over; the job is running"
    assert texts(records) == of_attempt(1)
    for query, told in (("?attempt=3", "no attempt 3: the job is at attempt 2"), ("?attempt=1&follow=1", "followed")):
        assert told in (await n3.get(f"/v1/jobs/{JOB}/logs{query}", 400))["detail"]


async def test_attempt_that_never_wrote_is_passed_over_and_reading_goes_on_behind_a_cursor(n1, n2, n3, output):
    run(n1)
    lines_of_two_attempts(n1, n2, output)
    give_up(n1, attempt=4)
    head, first, *others = await records_of(n3)
    assert head["attempt"] == 2
    assert texts([first, *others]) == of_attempt(2)
    assert texts(await records_of(n1, f"?cursor={first['cursor']}")) == texts(others)


async def test_follower_of_a_waiting_job_gets_the_last_attempt_and_then_the_next(n1, n2, n3, output):
    run(n1)
    output(n1.agent).write(JOB, 0, b"first of 1\n")
    give_up(n1)
    lines = Lines(await read(n3, "?follow=1&tail=1"))
    assert (await lines.next())["state"] == "queued"
    assert (await lines.next())["type"] == "attempt"
    assert (await lines.next())["type"] == "warning"
    assert texts([await lines.next()]) == of_attempt(1, 0)
    shares = a_record(JOB, "n1", nodes=(("n2", 3),)).shares
    output(n2.agent).write(JOB, 0, b"one\ntwo\n", attempt=2)
    n1.agent.change(JOB, state=JobState.RUNNING, shares=shares, attempt=2)
    assert (await lines.next())["state"] == "running"
    assert texts([await lines.next()]) == [(0, "one\ntwo\n")]
    end(n1)
    assert [each["type"] for each in await lines.rest()] == ["state", "end"]


async def test_job_that_ended_while_it_waited_shows_its_last_attempt(n1, n2, n3, output):
    run(n1)
    output(n2.agent).write(JOB, 1, b"rank 1 of 1\n")
    give_up(n1)
    end(n1)
    for query in ("", "?follow=1"):
        records = await records_of(n3, query)
        assert texts(records) == of_attempt(1, 1)
        assert "attempt 1, which is over; the job is ended" in [each.get("text") for each in records]


async def test_job_that_is_placed_for_the_first_time_has_nothing_to_tell_yet(n1, n3):
    run(n1)
    n1.agent.change(JOB, state=JobState.STARTING, phase=StartPhase.PLACE)
    assert await records_of(n3) == []


CHANGED = {3: "n1", 4: "n2", 6: "n1"}
"""Workers of an attempt of which 1, 2 and 5 have left."""


def speak(writer, *workers, attempt=1):
    for worker in workers:
        writer.write(JOB, worker - 1, f"{worker}\n".encode(), attempt=attempt, at=float(worker))


def of_workers(*workers):
    return [(worker - 1, f"{worker}\n") for worker in workers]


async def test_output_of_workers_is_there_also_of_those_that_have_left(n1, n2, n3, output):
    n1.agent.put(an_elastic_record(JOB, "n1", CHANGED))
    speak(output(n1.agent), 1, 3, 6)
    speak(output(n2.agent), 4)
    speak(output(n3.agent), 2)  # where none is left
    for desk in (n1, n2, n3):
        assert texts(await records_of(desk)) == of_workers(1, 2, 3, 4, 6)
    assert texts(await records_of(n3, "?rank=5")) == of_workers(6)
    assert texts(await records_of(n3, "?rank=0,1,3")) == of_workers(1, 2, 4)
    assert "its ranks are 0 to 5" in str(await n3.get(f"/v1/jobs/{JOB}/logs?rank=6", 400))
    end(n1)
    assert texts(await records_of(n2)) == of_workers(1, 2, 3, 4, 6)


async def test_workers_are_read_and_gone_on_from_however_many_came_before(n1, n2, n3, output):
    n1.agent.put(an_elastic_record(JOB, "n1", {70_000: "n1", PART_MOST: "n2"}))
    speak(output(n1.agent), 70_000)
    speak(output(n2.agent), PART_MOST)
    first, last = await records_of(n3, f"?rank=69999,{RANK_MOST}")
    assert texts([first, last]) == of_workers(70_000, PART_MOST)
    assert texts(await records_of(n3, f"?cursor={first['cursor']}")) == of_workers(PART_MOST)
    assert "is not a rank" in str(await n3.get(f"/v1/jobs/{JOB}/logs?rank={RANK_MOST + 1}", 400))


async def test_a_node_that_may_have_output_of_workers_that_left_is_named(n1, n2, n3, swarm, output):
    n1.agent.put(an_elastic_record(JOB, "n1", {3: "n1"}))
    speak(output(n1.agent), 1, 3)
    swarm.down.add("n2")
    warning, *records = await records_of(n3)
    told = "node n2 did not answer and may have output of workers that have left"
    assert (warning["type"], warning["text"]) == ("warning", told)
    assert texts(records) == of_workers(1, 3)


async def test_nobody_is_asked_while_no_worker_has_left(n1, n2, n3, output, monkeypatch):
    n1.agent.put(an_elastic_record(JOB, "n1", {1: "n1", 2: "n1"}))
    speak(output(n1.agent), 1, 2)
    monkeypatch.setattr(LogFinder, "_ask", None)
    assert texts(await records_of(n3)) == of_workers(1, 2)


async def test_an_earlier_attempt_of_workers_is_read_whatever_their_number_was(n1, n2, n3, output):
    n1.agent.put(an_elastic_record(JOB, "n1", {1: "n1"}, attempt=2))
    speak(output(n1.agent), 1, 9, attempt=1)
    speak(output(n2.agent), 7, attempt=1)
    speak(output(n1.agent), 1, attempt=2)
    head, *records = await records_of(n3, "?attempt=1")
    assert (head["type"], texts(records)) == ("attempt", of_workers(1, 7, 9))
    assert texts(await records_of(n3, "?attempt=1&rank=8")) == of_workers(9)


async def test_a_follower_hears_workers_that_come_and_the_last_words_of_those_that_go(n1, n2, n3, output):
    n1.agent.put(an_elastic_record(JOB, "n1", {2: "n1", 3: "n1"}))
    speak(output(n2.agent), 1)  # it had left before
    keys = [(desk.agent.logs, TaskKey(JOB, 1, part)) for desk, part in ((n1, 2), (n1, 3), (n2, 4))]
    for logs, key in keys:
        logs.opened(key)
    lines = Lines(await read(n3, "?follow=1"))
    await lines.until("state", state="running")
    assert texts([await lines.next()]) == of_workers(1)
    four = Share(NodeId("n2"), 1, part=4)
    joining = World(1, (2, 3), (4,), has_trained=True)
    n1.agent.change(JOB, shares=(*n1.agent.known[JOB].shares, four), world=joining, last_part=4)
    await lines.until("state")
    speak(output(n2.agent), 4)
    assert texts([await lines.next()]) == of_workers(4)
    speak(output(n1.agent), 3)
    n1.agent.change(JOB, shares=(Share(NodeId("n1"), 1, part=2), four), world=World(2, (2, 4), has_trained=True))
    found = [await lines.next(), await lines.next()]
    assert texts(found) == of_workers(3)
    for logs, key in keys:
        logs.closed(key)
    speak(output(n1.agent), 2)
    end(n1)
    records = await lines.rest()
    assert texts(records) == of_workers(2)
    assert records[-1]["type"] == "end"


async def test_a_rank_of_a_job_that_takes_several_sizes_may_be_any_that_it_can_have(n1, output):
    spec = JobSpec(("true",), ranks=1, ranks_most=3)
    run(n1, nodes=(("n1", 2),), spec=spec)
    output(n1.agent).write(JOB, 1, b"b\n")
    assert texts(await records_of(n1, "?rank=1")) == [(1, "b\n")]
    assert "its ranks are 0 to 2" in str(await n1.get(f"/v1/jobs/{JOB}/logs?rank=3", 400))


async def test_what_is_on_its_way_when_the_job_ends_is_not_asked_for_again(n1, monkeypatch):
    """Its node may not keep it any more: the last records of a stream are taken from the stream."""
    monkeypatch.setattr(logs_module, "DRAIN_S", 0.2)

    class Dropping(ManyLines):
        async def read(self, node, request):
            if not request.follow:
                yield []
                return
            async for batch in ManyLines.read(self, node, replace(request, follow=False)):
                await asyncio.sleep(0)
                yield batch

    run(n1, nodes=(("n1", 1),))
    running = convert(await n1.get(f"/v1/jobs/{JOB}"), JobDocument)
    end(n1)
    ended = convert(await n1.get(f"/v1/jobs/{JOB}"), JobDocument)

    async def documents():
        yield running
        yield ended

    query = LogQuery(ranks=(), streams=(), tail=None, since_utc_s=None, attempt=0)
    follower = _Follower(Dropping(n1.agent, n1.agent), LogFinder(n1.agent, n1.agent), query, LogCursor())
    assert texts([record async for record in follower.records(documents())]) == [(0, f"{n}\n") for n in range(300)]
