"""The async client: submit, follow and stop jobs from Python.

    async with SwarmClient(["10.0.0.5:7433"], token_file="~/.config/swarm/token") as swarm:
        job = await swarm.submit(["python", "train.py"], ranks=4, gpus_per_rank=1)
        async for record in swarm.logs(job.id, follow=True):
            print(record.text, end="")
        job = await swarm.wait(job.id)

Any agent answers; when one cannot be reached the next is asked.  A submission is repeated with its ticket, so there is
one job however often an answer was lost.  Errors: `AgentUnreachable` when no agent answered, `SwarmRequestError` when
one refused (with its stable `code`, HTTP `status` and `remedy`), `JobRejected` for a specification that is wrong in
itself, `ConfigError` for a token file that cannot be used.
"""

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from swarm_client.address import DEFAULT_PORT, parse_address, quote, readable, spell
from swarm_client.config import read_token_file
from swarm_client.conversation import (
    ONCE,
    ONCE_TO_SHEPHERD,
    PLAIN,
    STREAM,
    STREAM_SILENCE_S,
    SUBMISSION,
    TO_SHEPHERD,
    Answer,
    Ask,
    Broken,
    Contact,
    Conversation,
    End,
    ErrorAnswer,
    Lost,
    RequestTerms,
    Sleep,
    Success,
    Unreached,
    live_addresses,
    passes,
)  # fmt: skip
from swarm_client.failure import Failure
from swarm_client.job_request import caller
from swarmsched.api import EndReason, JobSpec, JobState, told
from swarmsched.documents import EventDocument, JobDocument, NodeDocument
from swarmsched.errors import AgentUnreachable, ConfigError, FieldProblem, JobRejected, SwarmError

LINE_BYTES_LIMIT = 8 * 2**20
WAIT_ROUND_S = 30.0
CONTACT_LIMIT_S = 30.0  # a new shepherd acts within 20 s of the death of the old one
PAGE = 1_000

T = TypeVar("T")


class SwarmRequestError(SwarmError):
    """An agent refused; nothing was changed."""

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(document.get("code", "unknown"))
        self.remedy = str(document.get("remedy") or "")
        self.errors: list[Mapping[str, Any]] = list(document.get("errors") or [])
        super().__init__(str(document.get("detail") or document.get("title") or f"status {status}"))


@dataclass(frozen=True, slots=True)
class Job:
    """A job as an agent described it; times are RFC 3339 text, durations seconds.

    `document` is the whole answer (docs/reference/http-api.md) for what has no attribute here.
    """

    id: str
    handle: str
    state: JobState
    name: str = ""
    user: str = ""
    phase: str = ""
    reason: str = ""
    end_reason: EndReason | None = None
    exit_code: int | None = None
    signal: int | None = None
    shell_exit_code: int | None = None
    ranks: int | None = None
    gpus: int | None = None
    nodes: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read a job document; keys that a later agent adds stay in `document`."""
        return _read(cls, document, nodes=[share["node"] for share in document.get("nodes") or []])

    @property
    def is_ended(self) -> bool:
        """True once nothing about the job changes any more."""
        return self.state is JobState.ENDED

    @property
    def told(self) -> JobDocument:
        """The whole answer with types: `job.told.outlook.starts_at`.  Keys of a newer agent are in `document` alone."""
        return msgspec.convert(self.document, JobDocument)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A piece of a rank's output: `data` as it was written, usually a line with its end.

    `skipped_bytes` above 0: so many were not kept between what came before and what follows, and `data` is empty.
    """

    rank: int
    node: str
    stream: str
    data: bytes
    time: str = ""
    cursor: str = ""
    skipped_bytes: int = 0

    @property
    def text(self) -> str:
        """The data as text; bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A member of the swarm; None where its record has not arrived."""

    name: str
    status: str
    address: str = ""
    free_gpus: int | None = None
    total_gpus: int | None = None
    jobs: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def told(self) -> NodeDocument:
        """The whole answer with types, its GPUs and tasks included."""
        return msgspec.convert(self.document, NodeDocument)


@dataclass(frozen=True, slots=True)
class SwarmEvent:
    """Something that happened, as one agent logged it."""

    time: str
    agent: str
    kind: str
    text: str
    job_id: str | None = None
    cursor: str = ""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def told(self) -> EventDocument:
        """The whole answer with types, its fields included."""
        return msgspec.convert(self.document, EventDocument)


class SwarmClient:
    """A connection to a swarm; use it as an async context manager."""

    def __init__(
        self, hosts: Sequence[str] = (), *, token: str | None = None, token_file: str | Path | None = None
    ) -> None:
        """Without arguments: SWARM_HOSTS, SWARM_TOKEN or SWARM_TOKEN_FILE of the environment.  Nothing is sent yet."""
        given = list(hosts) or [text for text in os.environ.get("SWARM_HOSTS", "").split(",") if text.strip()]
        self._addresses = [parse_address(text) for text in given or [f"127.0.0.1:{DEFAULT_PORT}"]]
        self._token, self._token_file = token, token_file
        self._session: aiohttp.ClientSession | None = None
        self._has_learnt = False

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None)
        token = self._read_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=LINE_BYTES_LIMIT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _read_token(self) -> str:
        if self._token is not None:
            return self._token
        file = self._token_file or os.environ.get("SWARM_TOKEN_FILE", "")
        if os.environ.get("SWARM_TOKEN") and not self._token_file:
            return os.environ["SWARM_TOKEN"]
        try:
            return read_token_file(str(Path(file).expanduser())) if file else ""
        except Failure as failure:
            raise ConfigError("token_file", failure.problem, failure.remedy) from failure

    async def submit(self, command: Sequence[str] | JobSpec, **spec: Any) -> Job:
        """Submit a list of words with keys of `JobSpec.to_json` (`ranks=4, gpus_per_rank=1`), or a whole spec.

        The user is the caller's account unless one is named.  Raises `JobRejected` before anything is sent when the
        specification is wrong in itself.
        """
        if isinstance(command, str):
            remedy = f"give a list of words, or ['sh', '-c', {command[:60]!r}]"
            raise JobRejected([FieldProblem("/command", "is one text, not a list of words", remedy)])
        keys = told(command) if isinstance(command, JobSpec) else {"command": command, **spec}
        checked = JobSpec.from_json({**keys, "user": keys.get("user") or caller(os.environ)})
        await self._learn()
        ticket = await self._call("POST", "/v1/tickets", body={})
        request = {
            "ticket": {key: ticket[key] for key in ("job_id", "holders", "stores") if key in ticket},
            "spec": {**told(checked), **{key: value for key, value in checked.to_json().items() if key in keys}},
            "dry_run": False,
        }
        return Job.from_json(await self._call("POST", "/v1/jobs", body=request, terms=SUBMISSION))

    async def job(self, job: str) -> Job:
        """One job by id, unique prefix, name or `@last`."""
        return Job.from_json(await self._call("GET", _job_path(job)))

    async def jobs(self, *, include_ended: bool = False, user: str = "", name: str = "") -> list[Job]:
        """Jobs, newest first; all pages."""
        query = _query(limit=PAGE, user=user, name=name, all=include_ended)
        return [Job.from_json(item) async for item in self._pages("/v1/jobs", query)]

    async def cancel(self, job: str, *, grace_s: float | None = None, reason: str = "") -> Job:
        """Stop a job: SIGTERM, then SIGKILL after the grace time.  Returns at once; `wait` for the end."""
        body = {"grace_seconds": grace_s, "reason": reason}
        return Job.from_json(await self._call("POST", _job_path(job, "/cancel"), body=body, terms=TO_SHEPHERD))

    async def scale(self, job: str, ranks: int, ranks_most: int = 0) -> Job:
        """Let a job have `ranks` ranks from now on, or from `ranks` to `ranks_most`.

        One that runs goes on from its newest checkpoint with that; an elastic one changes while it trains.
        """
        body = {"ranks": ranks, "ranks_most": ranks_most}
        return Job.from_json(await self._call("POST", _job_path(job, "/scale"), body=body, terms=TO_SHEPHERD))

    async def migrate(self, job: str, *, nodes: Sequence[str] = (), avoid: Sequence[str] = ()) -> Job:
        """Move a running job to `nodes`, or to any but those to `avoid`; an elastic one moves while it trains."""
        body = {"nodes": list(nodes), "avoid": list(avoid)}
        return Job.from_json(await self._call("POST", _job_path(job, "/migrate"), body=body, terms=TO_SHEPHERD))

    async def signal(self, job: str, signal: int | str) -> Job:
        """Send a signal (10, "USR1") to all ranks; sent once, to one agent."""
        path = _job_path(job, "/signal")
        return Job.from_json(await self._call("POST", path, body={"signal": signal}, terms=ONCE_TO_SHEPHERD))

    async def recover(self, job: str) -> Job:
        """Go on without holders that are lost for good: the operator's decision, as `swarm recover JOB --force`.

        Never call it while they may come back.  `SwarmRequestError` with code conflict when there is no need.
        """
        body = {"force": True}
        return Job.from_json(await self._call("POST", _job_path(job, "/recover"), body=body, terms=ONCE))

    async def wait(self, job: str, *, until: str = "done", timeout_s: float | None = None) -> Job:
        """Return the job once it has ended (`until="done"`) or runs (`"running"`); `TimeoutError` after `timeout_s`.

        Agents and the job's shepherd may die meanwhile; `AgentUnreachable` or `SwarmRequestError` when nobody could
        be asked about it for 30 s.
        """
        contact, is_known = Contact(CONTACT_LIMIT_S), False
        terms = RequestTerms(patience_s=WAIT_ROUND_S + 10.0, limit_s=WAIT_ROUND_S + 10.0)
        await self._learn()
        async with asyncio.timeout(timeout_s):
            while True:
                query = {"for": until, "timeout": str(WAIT_ROUND_S)}
                try:
                    answer = await self._call("GET", _job_path(job, "/wait"), query=query, terms=terms)
                except (AgentUnreachable, SwarmRequestError) as error:
                    pause_s = contact.pause_s(time.monotonic())
                    if pause_s is None or not _may_pass(error, is_known=is_known):
                        raise
                    await asyncio.sleep(pause_s)
                    continue
                contact.found()
                is_known = True
                found = Job.from_json(answer["job"])
                if answer["met"] or found.is_ended:
                    return found
                job = found.id

    async def logs(
        self, job: str, *, follow: bool = False, tail: int | None = None, rank: Iterable[int] = (), attempt: int = 0
    ) -> AsyncIterator[LogRecord]:
        """Output of a job; with `follow` until it has ended, through whichever agent can be reached.

        `attempt` 0: the newest that has any, which is the last one while the job waits for another.  A job that is too
        far ahead of whoever follows it waits, as one that writes into a pipe does.
        """
        query = _query(rank=",".join(map(str, rank)), tail=tail, follow=follow, attempt=attempt or None)
        await self._learn()
        async for record in self._stream(_job_path(job, "/logs"), query, ends=follow):
            if record.get("type") == "gap":
                yield _read(LogRecord, record, data=b"")
            if record.get("type") == "log":
                text = str(record.get("text", "")).encode()
                data = base64.b64decode(record["data"]) if "data" in record else text
                yield _read(LogRecord, record, data=data)

    async def nodes(self) -> list[NodeInfo]:
        """Members of the swarm with their resources, by the view of the agent that answers."""
        return [_read(NodeInfo, item) for item in (await self._call("GET", "/v1/nodes"))["items"]]

    async def events(self, *, follow: bool = False, kind: str = "", job: str = "") -> AsyncIterator[SwarmEvent]:
        """Events, oldest first; with `follow` for ever."""
        query = _query(kind=kind, job=job, follow=follow)
        if follow:
            async for record in self._stream("/v1/events", query, ends=True):
                if "kind" in record:
                    yield _read(SwarmEvent, record)
            return
        for item in (await self._call("GET", "/v1/events", query=query))["items"]:
            yield _read(SwarmEvent, item)

    async def _learn(self) -> None:
        """Once: the members' addresses, to go on with when the agents that were named die.  A courtesy: never fails."""
        if self._has_learnt:
            return
        self._has_learnt = True
        try:
            members = (await self._call("GET", "/v1/members"))["items"]
        except (SwarmError, LookupError, TypeError):
            return
        found = readable(live_addresses(members))
        self._addresses += [each for each in found if each not in self._addresses]

    async def _pages(self, path: str, query: dict[str, str]) -> AsyncIterator[Mapping[str, Any]]:
        while True:
            document = await self._call("GET", path, query=query)
            for item in document["items"]:
                yield item
            if not document.get("next_cursor"):
                return
            query = {**query, "cursor": str(document["next_cursor"])}

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        terms: RequestTerms = PLAIN,
    ) -> Any:
        """Ask the agents until one has carried it out."""
        request = {"method": method, "path": path, "params": query, "json": body}
        return (await self._converse(request, terms)).document

    async def _converse(self, request: Mapping[str, Any], terms: RequestTerms, *, is_stream: bool = False) -> Success:
        """Do what the conversation says, and tell it what came of that."""
        conversation = Conversation(self._addresses, terms, time.monotonic())
        event: Unreached | Broken | Answer | None = None
        while True:
            effect = conversation.step(event, time.monotonic())
            event = None
            if isinstance(effect, Ask):
                event = await self._ask(effect, **request, is_stream=is_stream)
            elif isinstance(effect, Sleep):
                await asyncio.sleep(effect.seconds)
            else:
                return self._ended(effect)

    async def _ask(self, ask: Ask, path: str, *, is_stream: bool, **request: Any) -> Unreached | Broken | Answer:
        read_s = STREAM_SILENCE_S if is_stream else ask.limit_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ask.connect_s, sock_read=read_s)
        url = f"http://{spell(ask.address)}{path}"
        try:
            response = await self._http.request(url=url, timeout=timeout, allow_redirects=False, **request)
            is_open = is_stream and response.status < 300
            body = b"" if is_open else await response.read()
        except aiohttp.ConnectionTimeoutError:
            return Unreached(ask.address, "no answer", is_late=True)
        except aiohttp.ClientConnectorError as error:
            return Unreached(ask.address, error.strerror or str(error))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Broken(ask.address, str(error) or type(error).__name__)
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(ask.address, response.status, headers, body, response if is_open else None)

    def _ended(self, end: End) -> Success:
        if isinstance(end, Success):
            self._addresses.remove(end.answer.address)
            self._addresses.insert(0, end.answer.address)  # who answered is asked first from now on
            return end
        if isinstance(end, ErrorAnswer):
            raise SwarmRequestError(end.status, end.problem)
        cause = end.cause
        if isinstance(end, Lost):
            cause = f"{spell(end.address)}: the answer was lost, and whether it was carried out is unknown: {cause}"
        raise AgentUnreachable([spell(address) for address in self._addresses], cause)

    async def _stream(self, path: str, query: Mapping[str, str], *, ends: bool) -> AsyncIterator[dict[str, Any]]:
        """Records of a stream; when it breaks it is resumed behind the last cursor, at whichever agent answers."""
        cursor, contact = "", Contact(CONTACT_LIMIT_S)
        headers = {"Accept": "application/x-ndjson", "X-Swarm-Lossless": "1"}
        while True:
            more = {"cursor": cursor} if cursor else {}
            request = {"method": "GET", "path": path, "params": {**query, **more}, "headers": headers}
            answer, error = None, "the stream ended early"
            try:
                answer = (await self._converse(request, STREAM, is_stream=True)).answer
                async for line in answer.stream.content:
                    if not line.strip():
                        continue
                    record = json.loads(line)
                    contact.found()
                    cursor = str(record.get("cursor") or cursor)
                    yield record
                    if record.get("type") == "end":
                        return
                if not ends:
                    return
            except (aiohttp.ClientError, TimeoutError, ValueError) as broken:
                error = str(broken) or type(broken).__name__
            except (AgentUnreachable, SwarmRequestError) as failed:
                if not _may_pass(failed, is_known=bool(cursor)):
                    raise
                error = str(failed)
            finally:
                if answer is not None:
                    answer.stream.close()
            if answer is not None:  # it stops, or could not go on either
                self._addresses.remove(answer.address)
                self._addresses.append(answer.address)
            pause_s = contact.pause_s(time.monotonic())
            if pause_s is None:
                raise AgentUnreachable([spell(each) for each in self._addresses], error)
            await asyncio.sleep(pause_s)

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use SwarmClient in an `async with` block")
        return self._session


def _may_pass(error: AgentUnreachable | SwarmRequestError, *, is_known: bool) -> bool:
    """True for a failure that passes: another agent, or the same one soon, may do better."""
    return is_known if isinstance(error, AgentUnreachable) else passes(error.status, is_known=is_known)


def _job_path(job: str, tail: str = "") -> str:
    try:
        return f"/v1/jobs/{quote(job)}{tail}"
    except Failure as failure:  # not UTF-8
        raise SwarmRequestError(404, {"code": "unknown_job", "detail": f"there is no job {job!r}"}) from failure


def _query(**given: str | int | bool | None) -> dict[str, str]:
    """Parameters of a request, without those that say nothing; 0 does say something."""
    known = {key: value for key, value in given.items() if value is not None and value is not False and value != ""}
    return {key: "1" if value is True else str(value) for key, value in known.items()}


def _read(kind: type[T], document: Mapping[str, Any], **told: object) -> T:
    """Keys of a document as attributes of the same names; what is null or not told leaves the default."""
    known = {key: value for key, value in {**document, "document": document, **told}.items() if value is not None}
    return msgspec.convert(known, kind)
