"""The agents of one swarm as the command sees them: any of them answers; when one does not, the next is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from swarm_client.address import Address, quote, readable, spell
from swarm_client.cache import read_cache, write_cache
from swarm_client.conversation import (
    CONNECT_LIMIT_S,
    MEMBERS_LIMIT,
    PLAIN,
    STREAM,
    Answer,
    Ask,
    Broken,
    Conversation,
    End,
    ErrorAnswer,
    Lost,
    RequestTerms,
    Sleep,
    Success,
    Unreached,
    Unusable,
    live_addresses,
)
from swarm_client.failure import (
    CONFLICT,
    NOT_AUTHORISED,
    NOT_FOUND,
    SWARM_FAILED,
    USAGE,
    AgentRefusal,
    Failure,
    NoAgentAnswered,
)
from swarm_client.http import Connection, ConnectionBroken, Response, SizedBody, Waiter, connect

MEMBERS_STALE_S = 300.0

IMPOSSIBLE = "impossible_request"
"""Of a refusal that speaks of the request as a whole: its field is but one of those that would have to be less."""
_OPTIONS = {"grace_seconds": "--grace", "signal": "--signal", "reason": "--reason", "nodes": "--to", "avoid": "--off"}
"""Keys of what is sent about a job or a node, by the options that set them."""
_EXIT_CODES = {
    400: USAGE,
    401: NOT_AUTHORISED,
    403: NOT_AUTHORISED,
    404: NOT_FOUND,
    409: CONFLICT,
    410: NOT_FOUND,
    412: CONFLICT,
}


_Request = tuple[str, str, dict[str, str], bytes | SizedBody]
"""Method, path with its query, headers, body."""


class Agents:
    """Sends requests to one of the agents; remembers which answered last and which members there are.

    `read_token` is called before the first request only, so that a command that needs none does not fail for it.
    """

    def __init__(self, hosts: Sequence[Address], read_token: Callable[[], str], waiter: Waiter, memory: str) -> None:
        self.waiter = waiter
        self._memory = memory
        self._read_token = read_token
        self._token: str | None = None
        self._known: dict[str, Any] = read_cache(memory)
        self.addresses = _in_order(hosts, self._known)
        self._idle: Connection | None = None
        self.last_headers: dict[str, str] = {}

    def call(
        self,
        action: str,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: object = None,
        headers: dict[str, str] | None = None,
        terms: RequestTerms = PLAIN,
    ) -> Any:
        """Send JSON, return JSON.  `action` begins the sentence of a refusal: "cannot list jobs".

        Raises `AgentRefusal` for an error document, `NoAgentAnswered` when nobody answers, and `Failure` when an
        answer was lost that may have been given.
        """
        data = b"" if body is None else json.dumps(body).encode()
        request = (method, path + _query_text(query or {}), headers or {}, data)
        done = self._converse(action, terms, request)
        self.last_headers = dict(done.answer.headers)
        return done.document

    def stream(self, action: str, path: str, *, query: dict[str, str], headers: dict[str, str]) -> Response:
        """An answer that is read as it comes, from the first agent that gives one.  Raises as `call` does."""
        request = ("GET", path + _query_text(query), {"Accept": "text/event-stream", **headers}, b"")
        response = self._converse(action, STREAM, request, is_stream=True).answer.stream
        assert isinstance(response, Response)
        return response

    def _converse(self, action: str, terms: RequestTerms, request: _Request, *, is_stream: bool = False) -> Success:
        """Do what the conversation says, and tell it what came of that."""
        conversation = Conversation(self.addresses, terms, time.monotonic())
        event: Unreached | Broken | Answer | None = None
        while True:
            effect = conversation.step(event, time.monotonic())
            event = None
            if isinstance(effect, Ask):
                event = self._ask(effect, request, is_stream=is_stream)
            elif isinstance(effect, Sleep):
                self.waiter.sleep(effect.seconds)
            else:
                return self._ended(action, effect)

    def _ask(self, ask: Ask, request: _Request, *, is_stream: bool) -> Unreached | Broken | Answer:
        method, target, headers, data = request
        idle, self._idle = self._idle, None
        is_kept = ask.may_reuse and idle is not None and idle.is_reusable and idle.address == ask.address
        if idle is not None and not is_kept:
            idle.close()
        connection = idle if idle is not None and is_kept else connect(ask.address, self.waiter, ask.connect_s)
        if isinstance(connection, Unreached):
            return connection
        try:
            response = connection.request(method, target, self._headers(headers, data), data, ask.limit_s)
            is_open = is_stream and response.status < 300
            body = b"" if is_open else response.read()
        except ConnectionBroken as error:
            connection.close()
            return Broken(connection.address, str(error), is_kept)
        except BaseException:
            connection.close()  # half an answer was read: the connection is of no use
            raise
        if not is_open:
            self._idle = connection
        return Answer(connection.address, response.status, response.headers, body, response if is_open else None)

    def _ended(self, action: str, end: End) -> Success:
        if isinstance(end, Success):
            self._prefer(end.answer.address)
            return end
        if isinstance(end, ErrorAnswer):
            self._prefer(end.address)
            raise read_problem(action, end)
        if isinstance(end, Lost):
            raise Failure(
                "the answer was lost, and whether the request was carried out is unknown:"
                f" {spell(end.address)}: {end.cause}",
                "look with `swarm ps` before you try again",
                SWARM_FAILED,
            )
        if isinstance(end, Unusable):
            where = spell(end.address)
            if end.is_stranger:
                raise Failure(f"what answers at {where} is not an agent", "check host and port", SWARM_FAILED)
            raise Failure(f"the answer of {where} cannot be used: {end.cause}", "try again", SWARM_FAILED)
        raise NoAgentAnswered([spell(address) for address in self.addresses], end.cause)

    def upload(
        self, action: str, method: str, path: str, headers: dict[str, str], body: SizedBody, limit_s: float
    ) -> Any:
        """Send a streamed body to the first agent only; a broken connection is a `Failure`."""
        first = self.addresses[0]
        ask = Ask(first, CONNECT_LIMIT_S, limit_s, may_reuse=True)
        event = self._ask(ask, (method, path, headers, body), is_stream=False)
        if isinstance(event, Unreached):
            raise NoAgentAnswered([spell(first)], event.cause)
        if isinstance(event, Broken):
            raise Failure(f"{action}: {event.cause}", "run the command again", SWARM_FAILED)
        end = Conversation((first,), RequestTerms(repeatable=False, busy_limit_s=0.0), 0.0).step(event, 0.0)
        assert not isinstance(end, Ask | Sleep)
        return self._ended(action, end).document

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open; a later request opens it again."""
        if self._idle is not None:
            self._idle.close()
        self._idle = None

    def _headers(self, headers: dict[str, str], data: bytes | SizedBody) -> dict[str, str]:
        sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        sent |= {"Content-Type": "application/json"} if data else {}
        return sent | {"Accept": "application/json"} | headers

    @property
    def token(self) -> str:
        """The bearer token, read when it is first needed."""
        if self._token is None:
            self._token = self._read_token()
        return self._token

    def pin(self, address: Address) -> None:
        """Ask this agent first from now on."""
        if address in self.addresses:
            self.addresses.remove(address)
            self.addresses.insert(0, address)

    def demote(self, address: Address) -> None:
        """Ask this agent last from now on."""
        if address in self.addresses:
            self.addresses.remove(address)
            self.addresses.append(address)

    def _prefer(self, address: Address) -> None:
        self.pin(address)
        if self._known.get("last") != spell(address) and len(self.addresses) > 1:
            self._known["last"] = spell(address)
            self._write_memory()

    def learn(self, *, is_for_now: bool = False) -> None:
        """Ask for the members unless they are known; silent when that fails.

        Their addresses are for the next command, and with `is_for_now` also for this one, which may outlive its agent.
        """
        if not (self._memory or is_for_now):
            return
        age_s = time.time() - float(self._known.get("learnt_utc_s", 0.0))
        if 0 <= age_s < MEMBERS_STALE_S:
            return
        try:
            items = self.call("cannot list members", "GET", "/v1/members").get("items", [])
        except Failure:
            return  # a courtesy to the next command must not spoil this one
        self.remember(items)

    def remember(self, members: Sequence[dict[str, Any]]) -> None:
        """Keep the addresses of live members, for this command, should its agents die, and for the next."""
        live = live_addresses(members)
        if live:
            self._known |= {"members": live, "learnt_utc_s": time.time()}
            self.addresses += [each for each in readable(live) if each not in self.addresses]
            self._write_memory()

    def _write_memory(self) -> None:
        if self._memory and not write_cache(self._memory, self._known):
            self._memory = ""  # do without


def read_problem(action: str, refused: ErrorAnswer) -> AgentRefusal:
    """Turn an error document (RFC 9457) into the two lines that people read."""
    problem, status, code = refused.problem, refused.status, refused.code
    detail = str(problem.get("detail") or problem.get("title") or f"the agent answered {status}")
    fields = [error for error in problem.get("errors", []) if isinstance(error, dict)]
    if fields and code != IMPOSSIBLE:
        detail = "; ".join(f"{_field(error)}: {error.get('detail', '')}" for error in fields)
    remedies = [str(error["remedy"]) for error in fields if error.get("remedy")] or [str(problem.get("remedy") or "")]
    remedies = list(dict.fromkeys(remedies))
    matches, near = problem.get("matches"), problem.get("nearest")
    if matches:
        remedies = ["it may be " + ", ".join(_match(match) for match in matches[:8])]
    elif near:
        names = near if isinstance(near, list) else [near]
        remedies = ["did you mean " + " or ".join(_match(name) for name in names[:3]) + "?"]
    if problem.get("silent_nodes"):
        silent = problem["silent_nodes"]
        whose = "its" if len(silent) == 1 else "their"
        remedies = [each.rstrip(".") for each in remedies]
        remedies.append(f"{', '.join(map(str, silent))} did not answer, so {whose} jobs are not known")
    if problem.get("unasked_nodes"):
        remedies.append(f"{len(problem['unasked_nodes'])} agents could not be asked in time: try again")
    if status in (401, 403) and not any(remedies):
        remedies = ["give the swarm's token: swarm login HOST --token-file FILE, or SWARM_TOKEN_FILE"]
    default = USAGE if status in (413, 422) and code != IMPOSSIBLE else SWARM_FAILED
    return AgentRefusal(
        f"{action}: {detail}",
        "; ".join(remedy for remedy in remedies if remedy),
        _EXIT_CODES.get(status, default),
        status=status,
        code=code,
    )


def _field(error: dict[str, Any]) -> str:
    """What was typed, for what the API calls `?rank`, `/spec/ranks_most` or `/grace_seconds`."""
    pointer = str(error.get("pointer", ""))
    if pointer.startswith("?"):
        return f"--{pointer[1:]}"
    if pointer.startswith("/spec/"):
        from swarm_client.job_key import option_of  # only to word an error: it brings all keys of jobs

        return option_of(pointer.removeprefix("/spec/"))
    key = pointer.lstrip("/")
    return _OPTIONS.get(key.partition("/")[0]) or key.replace("/", ".") or "request"


def _match(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(str(value[key]) for key in ("handle", "name") if value.get(key)) or str(value.get("id", ""))
    return str(value)


def _query_text(query: dict[str, str]) -> str:
    if not query:
        return ""
    return "?" + "&".join(f"{quote(key)}={quote(value)}" for key, value in query.items())


def _in_order(hosts: Sequence[Address], known: dict[str, Any]) -> list[Address]:
    """The agent that answered last, the configured ones, those learnt; each once."""
    every = list(dict.fromkeys([*hosts, *readable(known.get("members", []))]))
    last = known.get("last")
    return sorted(every, key=lambda address: spell(address) != last)[:MEMBERS_LIMIT]
