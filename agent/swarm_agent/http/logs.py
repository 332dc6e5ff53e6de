"""The output of a job: all ranks of all nodes in one stream, past and to come.

A followed stream begins before the job does: it tells each change of state, opens the logs of the nodes once the job
is placed, and ends with the job's own end after everything that the nodes have was delivered.  While a job waits
for another attempt, what there is to read is the output of the last one.
"""

import asyncio
import base64
import heapq
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from swarm_agent.http.exchange import Call, HttpReply
from swarm_agent.http.jobs import JobRoutes
from swarm_agent.http.log_cursor import LogCursor, decode_cursor
from swarm_agent.http.log_places import (
    LogFinder,
    LogPlaces,
    current_places,
    groups_of,
    has_output,
    ranks_of_present,
)
from swarm_agent.http.log_source import LogRequest, LogSource
from swarm_agent.http.parameter import Parameter, integer, words
from swarm_agent.http.problem import Problem, bad_parameter
from swarm_agent.http.schema import TEXT
from swarm_agent.http.stream import FOLLOW, LOSSLESS, Record, closing, resume_cursor, stream_answer
from swarm_agent.http.watch import JobWatch
from swarm_agent.http.when import SINCE, rfc3339
from swarm_agent.supervision.logs import BadCursor
from swarmsched.api import JobSpec
from swarmsched.documents import JobDocument
from swarmsched.errors import AgentUnreachable, RemoteProtocolError
from swarmsched.fields import RANK_MOST
from swarmsched.ids import JobId, NodeId

TAIL_LIMIT = 1_000_000
ATTEMPT_MOST = 2**32 - 1  # as records have it
QUEUE_LIMIT = 16  # records of up to 128 KiB: what is lost with this agent is to be read again elsewhere
RETRY_S = 0.5  # while a node cannot be reached
LEFT_RETRY_S = 10.0  # the same of one where no rank runs any more
REOPEN_S = 1.0  # a change of the job reopens a node's stream at once; this bounds the wait for a start that made none
DRAIN_S = 2.0  # for the next record of an attempt that is over, where nothing hinders it
STREAMS = ("stdout", "stderr", "system")
NO_GROUPS = JobSpec(())
CANNOT_READ = (AgentUnreachable, RemoteProtocolError, BadCursor)


def _ranks_from(given: str | None) -> tuple[tuple[str, int], ...]:
    return tuple(_rank(word.strip()) for word in (given or "").split(",") if word.strip())


def _rank(word: str) -> tuple[str, int]:
    """Its group, or nothing, and its number there."""
    group, _, number = word.rpartition(".")
    if not number.isdecimal() or len(number) > len(str(RANK_MOST)) or int(number) > RANK_MOST:
        raise bad_parameter(
            "rank", f"{word[:20]!r} is not a rank", f"whole numbers from 0 to {RANK_MOST}, or GROUP.NUMBER"
        )
    return group, int(number)


def _names_from(given: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (given or "").split(",") if word.strip())


ATTEMPT = integer("attempt", "An earlier attempt; 0 is the newest that has output.", 0, 0, ATTEMPT_MOST)
CURSOR = Parameter("cursor", TEXT, "Go on behind this place.", lambda given: decode_cursor(given or ""))
RANKS = Parameter("rank", TEXT, "Ranks, with commas: 0,3 or, of a job with groups, server.0.", _ranks_from)
GROUPS = Parameter("group", TEXT, "Of ranks of these groups only, with commas.", _names_from)
STREAM = words("stream", "stdout, stderr or system, with commas.", STREAMS)
TAIL = integer("tail", "Only so many of the last lines of each rank.", None, 0, TAIL_LIMIT)


@dataclass(frozen=True, slots=True)
class LogQuery:
    """What a client asked for: ranks by group and number, or all of groups.

    Once the job is known, `numbers` are those of the ranks among all, and `spec` has the names of its groups.
    """

    ranks: tuple[tuple[str, int], ...]
    streams: tuple[str, ...]
    tail: int | None
    since_utc_s: float | None
    attempt: int
    is_lossless: bool = False
    groups: tuple[str, ...] = ()
    spec: JobSpec = NO_GROUPS
    numbers: frozenset[int] = frozenset()  # all, where empty
    is_resolved: bool = False

    def wants(self, number: int) -> bool:
        """True for a rank whose output is to be read."""
        return not self.numbers or number in self.numbers


class JobLogs:
    """Handler of GET /v1/jobs/JOB/logs."""

    def __init__(self, jobs: JobRoutes, watch: JobWatch, source: LogSource, finder: LogFinder) -> None:
        self._jobs, self._watch, self._source, self._finder = jobs, watch, source, finder

    async def read_logs(self, call: Call) -> HttpReply:
        """A stream, with `follow` until the job has ended."""
        query, cursor = _query_from(call), CURSOR.read(resume_cursor(call))
        is_followed = FOLLOW.of(call)
        if is_followed and query.attempt:
            raise bad_parameter("attempt", "one attempt cannot be followed", "leave out attempt or follow")
        found = await self._jobs.find(call)
        documents = self._watch.watch(found)
        if is_followed:
            if query.groups or any(name for name, _ in query.ranks):
                async with closing(self._watch.watch(found)) as ahead:
                    _of_job(query, await anext(ahead), is_open=True)  # a stream that has begun could not refuse it
            return stream_answer(call, _Follower(self._source, self._finder, query, cursor).records(documents))
        async with closing(documents):
            document = await anext(documents)
        query = _of_job(query, document)
        places = await self._finder.find(document, cursor.attempt or query.attempt)
        return stream_answer(call, _past(self._source, document, places, query, cursor))


def _of_job(query: LogQuery, document: JobDocument, *, is_open: bool = False) -> LogQuery:
    """The query with the numbers of the ranks that it names; `is_open`: ranks may come that are not there yet.

    A rank or group that the job does not have is a mistake, not an empty log; which earlier workers had nobody knows.
    """
    spec, end = groups_of(document), ranks_of_present(document)
    numbers = set[int]()
    for name in query.groups:
        first, count = _numbers(spec, "group", name, end)
        numbers |= {*range(first, first + count)}
    for name, rank in query.ranks:
        first, count = _numbers(spec, "rank", name, end)
        if rank >= count and not is_open and not (query.attempt and document.world):
            last, of = count - 1, f" of group {name}" if name else ""
            raise bad_parameter(
                "rank", f"the job has no rank {rank}{of}", f"its ranks are 0 to {last}" if last else "only 0"
            )
        numbers.add(first + rank)
    return replace(query, spec=spec, numbers=frozenset(numbers), is_resolved=document.spec is not None)


def _numbers(spec: JobSpec, parameter: str, name: str, end: int) -> tuple[int, int]:
    """The number of a group's first rank among all, and how many it has; no name stands for the first group."""
    names = spec.group_names
    if name and name not in names:
        known = ", ".join(names) or "it has but one group, without a name"
        raise bad_parameter(parameter, f"the job has no group {name[:40]!r}", f"its groups: {known}")
    group = names.index(name) if name else 0
    first = spec.first_number(group)
    return first, spec.groups[group - 1].ranks if group else end - first


async def _past(
    source: LogSource, document: JobDocument, places: LogPlaces, query: LogQuery, cursor: LogCursor
) -> AsyncIterator[Record]:
    """An attempt's output behind the cursor; of one that was given up it is said first which it is."""
    is_announced = cursor.attempt == places.attempt
    cursor.begin(places.attempt)
    if not places.is_current and not is_announced:
        yield {**_attempt_record(document, places), "cursor": cursor.encode()}
    if places.problem and not is_announced:
        yield {**_missing(places.problem), "cursor": cursor.encode()}
    async with closing(past_records(source, document, places, query, cursor)) as records:
        async for record in records:
            yield record


async def past_records(
    source: LogSource, document: JobDocument, places: LogPlaces, query: LogQuery, cursor: LogCursor
) -> AsyncIterator[Record]:
    """What the nodes of an attempt have behind the cursor, by time as far as their clocks agree."""
    attempt = places.attempt
    cursor.begin(attempt)
    requests = _requests(document, places, query, cursor, is_followed=False)
    streams = [_flat(source, node, request) for node, request in requests]
    heap: list[tuple[float, int, NodeId, dict[str, Any]]] = []
    async with AsyncExitStack() as stack:
        for index, stream in enumerate(streams):
            await _push(heap, index, await stack.enter_async_context(closing(stream)))
        while heap:
            _, index, node, raw = heapq.heappop(heap)
            record = _record(attempt, node, raw, cursor, query.spec)
            if record is not None:
                yield record
            await _push(heap, index, streams[index])


class _Follower:
    """One client's followed stream."""

    def __init__(self, source: LogSource, finder: LogFinder, query: LogQuery, cursor: LogCursor) -> None:
        self._source, self._finder, self._query, self._cursor = source, finder, query, cursor
        self._queue: asyncio.Queue[Record | None] = asyncio.Queue(QUEUE_LIMIT)
        self._putting = asyncio.Lock()  # so that a record's cursor speaks of what went before it, and of no more
        self._pumps: list[asyncio.Task[None]] = []
        self._attempt = -1  # whose output is being read
        self._opened: set[int] = set()  # ranks of that
        self._there: set[int] = set()  # those that the job has now, or had last
        self._is_first = True
        self._changed = asyncio.Event()  # the job has changed: a node may have begun to write
        self._is_draining = False
        self._handed_on = 0  # records

    async def records(self, documents: AsyncIterator[JobDocument]) -> AsyncIterator[Record]:
        """Everything in the order in which it is to be sent."""
        runner = asyncio.create_task(self._run(documents))
        try:
            while (record := await self._queue.get()) is not None:
                yield record
            await runner
        finally:
            for task in (runner, *self._pumps):
                task.cancel()
            await asyncio.gather(runner, *self._pumps, return_exceptions=True)

    async def _run(self, documents: AsyncIterator[JobDocument]) -> None:
        last: JobDocument | None = None
        try:
            async with closing(documents):
                async for document in documents:
                    await self._take(document, last)
                    last = document
            if last is not None:
                await self._drain(last)
                if not has_output(last):
                    await self._show_last(last)
                await self._put(_end_record(last))
        except Problem as problem:
            # Without an `end` the client knows that it has to go on elsewhere.
            await self._put({"type": "warning", "text": problem.detail, "node": None, "is_missing": False})
        finally:
            if not _is_cancelling():
                await self._queue.put(None)

    async def _take(self, document: JobDocument, last: JobDocument | None) -> None:
        attempt = document.attempt
        if not self._query.is_resolved:
            self._query = _of_job(self._query, document, is_open=True)
        if last is not None and self._pumps and attempt != self._attempt:
            await self._drain(last)
        await self._put(_state_record(document))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if attempt and attempt != self._attempt and document.state != "ended":
            if has_output(document):
                await self._start(document, attempt)
            elif self._is_first:
                await self._show_last(document)
        elif attempt and attempt == self._attempt and has_output(document):
            self._open(document, current_places(document), replace(self._query, tail=None))
        self._is_first = False

    async def _show_last(self, document: JobDocument) -> None:
        """What was written before the job had to wait, or what of it is new to this client."""
        places = await self._finder.find(document)
        if self._cursor.attempt > places.attempt:
            return
        async with closing(_past(self._source, document, places, self._query, self._cursor)) as records:
            async for record in records:
                await self._queue.put(record)

    async def _start(self, document: JobDocument, attempt: int) -> None:
        """Open the logs of every node of the attempt; what was asked of the past concerns the first one only."""
        query = self._query if self._is_first else replace(self._query, tail=None)
        places = await self._finder.find(document)
        if places.problem:
            await self._put(_missing(places.problem))
        self._attempt, self._opened = attempt, set()
        self._cursor.begin(attempt)
        self._open(document, places, query)

    def _open(self, document: JobDocument, places: LogPlaces, query: LogQuery) -> None:
        """Open what is not open yet: workers of elastic jobs come and go."""
        self._there = {rank for ranks in current_places(document).ranks.values() for rank in ranks}
        new = {node: tuple(rank for rank in ranks if rank not in self._opened) for node, ranks in places.ranks.items()}
        requests = _requests(document, replace(places, ranks=new), query, self._cursor, is_followed=True)
        self._opened |= {rank for ranks in new.values() for rank in ranks}
        self._pumps += [asyncio.create_task(self._pump(node, request)) for node, request in requests]

    async def _pump(self, node: NodeId, request: LogRequest) -> None:
        """One node's records, from the last one on whenever it must be asked again, until `_drain` ends this.

        A stream that ends says that the task is not running there, which is so before its start as well; of ranks that
        have left it was the last word.
        """
        is_warned = False
        while True:
            changed = self._changed  # taken before reading, so that no change in between is missed
            have_left = self._there.isdisjoint(request.ranks)
            try:
                await self._deliver(node, request)
                if have_left:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(REOPEN_S):  # wait_for may lose the cancellation of `_drain`
                        await changed.wait()
                if self._is_draining:
                    return
            except CANNOT_READ as error:
                if self._is_draining:
                    return  # what is missing is asked for once more, and told
                if not is_warned:
                    await self._put(_warning(node, error))
                is_warned = True
                await asyncio.sleep(LEFT_RETRY_S if have_left else RETRY_S)
            request = replace(request, tail=None)

    async def _deliver(self, node: NodeId, request: LogRequest) -> None:
        async with closing(self._source.read(node, request)) as batches:
            async for batch in batches:
                for raw in batch:
                    await self._hand_on(node, request, raw)

    async def _hand_on(self, node: NodeId, request: LogRequest, raw: dict[str, Any]) -> None:
        """Deliver one record, or leave the cursor where it was: `_drain` may end this while the client is slow."""
        rank = str(raw["rank"])
        async with self._putting:
            before = dict(self._cursor.ranks)
            record = _record(request.attempt, node, raw, self._cursor, self._query.spec)
            try:
                if record is not None:
                    await self._queue.put(record)
            except asyncio.CancelledError:
                self._cursor.go_back(before)
                raise
        request.cursors[rank] = raw["cursor"]
        self._handed_on += 1

    async def _drain(self, document: JobDocument) -> None:
        """Deliver what is left of an attempt that is over: let the streams end, then read on from where they were.

        What is on its way here may not be kept there any more, if the client is slow.
        """
        self._is_draining, handed_on = True, -1
        self._changed.set()
        pending = set(self._pumps)
        while pending and (self._queue.full() or handed_on != self._handed_on):
            handed_on = self._handed_on
            _, pending = await asyncio.wait(pending, timeout=DRAIN_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self._pumps, self._is_draining = [], False
        if not has_output(document):
            return
        places = await self._finder.find(document)
        query = replace(self._query, tail=None) if self._attempt == places.attempt else self._query
        async with closing(past_records(self._source, document, places, query, self._cursor)) as records:
            async for record in records:
                await self._queue.put(record)

    async def _put(self, record: Record) -> None:
        async with self._putting:
            await self._queue.put({**record, "cursor": self._cursor.encode()})


async def _flat(source: LogSource, node: NodeId, request: LogRequest) -> AsyncIterator[tuple[NodeId, dict[str, Any]]]:
    """Records one by one; a node that does not answer gives one record that says so."""
    try:
        async with closing(source.read(node, request)) as batches:
            async for batch in batches:
                for raw in batch:
                    yield node, raw
    except CANNOT_READ as error:
        yield node, {"warning": {**_warning(node, error), "is_missing": True}, "utc_s": 0.0}


async def _push(
    heap: list[tuple[float, int, NodeId, dict[str, Any]]],
    index: int,
    stream: AsyncIterator[tuple[NodeId, dict[str, Any]]],
) -> None:
    following = await anext(stream, None)
    if following is not None:
        node, raw = following
        heapq.heappush(heap, (raw["utc_s"], index, node, raw))


def _requests(
    document: JobDocument, places: LogPlaces, query: LogQuery, cursor: LogCursor, *, is_followed: bool
) -> list[tuple[NodeId, LogRequest]]:
    """One request for each node that has ranks of interest.

    What a cursor does not name is read from its beginning: a client that goes on must not miss the first words of a
    rank that had been silent.
    """
    requests = []
    tail, since_utc_s = None if cursor.ranks else query.tail, query.since_utc_s
    job_id, attempt = JobId(document.id), places.attempt
    for node, ranks in places.ranks.items():
        wanted = tuple(rank for rank in ranks if query.wants(rank))
        if wanted:
            known = {rank: position for rank, position in cursor.ranks.items() if int(rank) in wanted}
            past = (tail, since_utc_s, query.streams)
            request = LogRequest(
                job_id, attempt, wanted, known, *past, follow=is_followed, is_lossless=is_followed and query.is_lossless
            )
            requests.append((node, request))
    return requests


def _record(attempt: int, node: NodeId, raw: dict[str, Any], cursor: LogCursor, spec: JobSpec) -> Record | None:
    """One record as the client gets it; None for a mark, which only tells where a rank's output begins."""
    if "warning" in raw:
        return {**raw["warning"], "cursor": cursor.encode()}
    cursor.advance(attempt, raw["rank"], raw["cursor"])
    if raw["is_mark"]:
        return None
    group, rank = spec.in_group(raw["rank"])
    head = {"rank": rank, "group": group or None, "node": node, "stream": raw["stream"], "time": rfc3339(raw["utc_s"])}
    if raw["dropped"]:
        lost = {"skipped_bytes": raw["dropped"], "text": "the disk was full" if raw["data"] else ""}
        return {"type": "gap", **head, "time": None, **lost, "cursor": cursor.encode()}
    return {"type": "log", **head, **_payload(raw["data"]), "cursor": cursor.encode()}


def _payload(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(data).decode()}


def _state_record(document: JobDocument) -> Record:
    keys = ("state", "phase", "reason", "attempt")
    return {"type": "state", **{key: getattr(document, key) for key in keys}, "job": document}


def _attempt_record(document: JobDocument, places: LogPlaces) -> Record:
    """Which attempt the output that follows is of, since it is not the one that the job is at now."""
    why = f": {document.reason}" if document.reason and document.state != "ended" else ""
    over = f"attempt {places.attempt}, which is over; the job is {document.state}{why}"
    return {"type": "attempt", "attempt": places.attempt, "text": over}


def _end_record(document: JobDocument) -> Record:
    keys = ("state", "exit_code", "signal", "end_reason", "shell_exit_code")
    return {"type": "end", **{key: getattr(document, key) for key in keys}, "job": document}


def _warning(node: NodeId, error: Exception) -> Record:
    is_there = isinstance(error, BadCursor) or (isinstance(error, RemoteProtocolError) and error.kind == BadCursor.code)
    what = "cannot go on from this cursor" if is_there else "does not answer"
    return {"type": "warning", "text": f"{node} {what}; its output is missing", "node": node, "is_missing": False}


def _missing(text: str) -> Record:
    """A warning about output that does not come any more."""
    return {"type": "warning", "text": text, "node": None, "is_missing": True}


def _query_from(call: Call) -> LogQuery:
    return LogQuery(
        ranks=RANKS.of(call),
        groups=GROUPS.of(call),
        streams=STREAM.of(call),
        tail=TAIL.of(call),
        since_utc_s=SINCE.of(call),
        attempt=ATTEMPT.of(call),
        is_lossless=LOSSLESS.read(call.headers.get(LOSSLESS.name.lower())) == "1",
    )


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
