"""The agents of one swarm as the command sees them: any of them answers; when one does not, the next is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import count

from swarm_client.annotations import Any, Self
from swarm_client.cache import read_cache, write_cache
from swarm_client.failure import (
    CONFLICT,
    NOT_AUTHORISED,
    NOT_FOUND,
    SWARM_FAILED,
    USAGE,
    AgentRefusal,
    Failure,
    NoAgentAnswered,
    UsageError,
)
from swarm_client.http import (
    ANSWER_LIMIT_S,
    Address,
    Connection,
    ConnectionBroken,
    Response,
    SizedBody,
    Waiter,
    connect_any,
    parse_address,
    spell,
)

FIRST_PATIENCE_S = 0.3  # for an answer, while other agents have not been asked
SUBMIT_PATIENCE_S = 1.0
SUBMIT_LIMIT_S = 120.0  # of a swarm that is too busy to take a job; a repeated ticket is one job
MEMBERS_LIMIT = 64
MEMBERS_STALE_S = 300.0
BUSY_RETRIES = 3
BUSY_LIMIT_S = 30.0  # for all of them together
SHEPHERD_LIMIT_S = 25.0  # for a cancel or a signal, which an agent holds back while no shepherd acts
SHEPHERD_WAIT_S = 23.5  # what the agent itself takes of that at most; with less left, another try would be cut off
DEFAULT_PORT = 7433

IMPOSSIBLE = "impossible_request"
"""Of a refusal that speaks of the request as a whole: its field is but one of those that would have to be less."""
WAITED_FOR = ("shepherd_unreachable",)  # the agent has waited for a new shepherd by itself

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~,:@")
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
        self._open: Connection | None = None
        self._refused: tuple[Connection, Response] | None = None
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
        repeatable: bool = True,
        patience_s: float = FIRST_PATIENCE_S,
        needs_shepherd: bool = False,
        busy_limit_s: float = 0.0,
    ) -> Any:
        """Send JSON, return JSON.  `action` begins the sentence of a refusal: "cannot list jobs".

        Raises `Refusal` for an error document and `Unreachable` when nobody answers.  A request that is not
        repeatable is sent to one agent only; when its answer is lost the outcome is unknown and `Failure` says so.
        One that needs a shepherd is waited for by the agent: all tries together end after `SHEPHERD_LIMIT_S`.  With
        `busy_limit_s` a swarm that cannot take it is asked again for so long, however often.
        """
        data = b"" if body is None else json.dumps(body).encode()
        end_s = time.monotonic() + (SHEPHERD_LIMIT_S if needs_shepherd else busy_limit_s or BUSY_LIMIT_S)
        for attempt in count():
            response = self.send(
                method,
                path,
                query=query,
                data=data,
                headers=headers,
                repeatable=repeatable,
                patience_s=patience_s,
                shepherd_end_s=end_s if needs_shepherd else None,
            )
            document = self._finish(response)
            if response.status < 400:
                return document
            refusal = read_problem(action, response.status, document)
            is_passing = refusal.status in (429, 503) and refusal.retry_after_s and refusal.code not in WAITED_FOR
            latest_s = end_s - (SHEPHERD_WAIT_S if needs_shepherd else 0.0)
            has_tried = attempt == BUSY_RETRIES and not busy_limit_s
            if not is_passing or has_tried or time.monotonic() >= latest_s:
                raise refusal
            self.waiter.sleep(min(refusal.retry_after_s, 2.0))
        raise AssertionError("the loop ends by return or raise")

    def upload(
        self, action: str, method: str, path: str, headers: dict[str, str], body: SizedBody, limit_s: float
    ) -> Any:
        """Send a streamed body to the first agent only; a broken connection is a `Failure`."""
        sent = {**self._authorization, "Accept": "application/json", **headers}
        connection, _ = self._connect(self.addresses[:1], [])
        if connection is None:
            raise NoAgentAnswered([spell(self.addresses[0])], "no answer")
        try:
            response = connection.request(method, path, sent, body, limit_s)
        except ConnectionBroken as error:
            raise Failure(f"{action}: {error}", "run the command again", SWARM_FAILED) from error
        except BaseException:
            connection.close()  # half a body was sent: the connection is of no use
            raise
        self._open = connection
        document = self._finish(response)
        if response.status >= 400:
            raise read_problem(action, response.status, document)
        return document

    def send(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        data: bytes | SizedBody = b"",
        headers: dict[str, str] | None = None,
        repeatable: bool = True,
        patience_s: float = FIRST_PATIENCE_S,
        shepherd_end_s: float | None = None,
    ) -> Response:
        """The head of the answer of the first agent that gives one; agents that are not ready (503) come last.

        With `shepherd_end_s` no try goes on for longer, and one agent's waiting for a shepherd is enough.
        """
        target = path + _query_text(query or {})
        sent = {**self._authorization, "Accept": "application/json", **(headers or {})}
        if data:
            sent.setdefault("Content-Type", "application/json")
        causes: list[str] = []
        for is_last_round in (False, True):
            left = list(self.addresses)
            while left and not (shepherd_end_s and _is_too_late(shepherd_end_s, is_last_round=is_last_round)):
                connection, is_fresh = self._connect(left, causes)
                if connection is None:
                    break
                if is_fresh:
                    left.remove(connection.address)
                limit_s = ANSWER_LIMIT_S if is_last_round or not left or not repeatable else patience_s
                if shepherd_end_s is not None:
                    limit_s = min(limit_s, max(0.1, shepherd_end_s - time.monotonic()))
                began_s = time.monotonic()
                try:
                    response = connection.request(method, target, sent, data, limit_s)
                except ConnectionBroken as error:
                    connection.close()
                    causes.append(f"{spell(connection.address)}: {error}")
                    if not repeatable and is_fresh:
                        raise _unknown_outcome(causes[-1]) from error
                    continue
                has_waited = shepherd_end_s is not None and time.monotonic() - began_s > SHEPHERD_WAIT_S / 2
                if response.status == 503 and left and repeatable and not has_waited:
                    causes.append(f"{spell(connection.address)}: not ready")
                    self._keep_refused((connection, response))
                    continue
                self._keep_refused(None)
                self._prefer(connection.address)
                self._open = connection
                return response
        if self._refused is not None:  # what an agent said tells more than that others are silent
            (self._open, refused), self._refused = self._refused, None
            return refused
        raise NoAgentAnswered([spell(address) for address in self.addresses], "; ".join(_newest_of_each(causes)[-4:]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_refused(self, refused: tuple[Connection, Response] | None) -> None:
        """Keep an answer of 503 for the case that no agent has a better one, in the place of the last."""
        if self._refused is not None:
            self._refused[0].close()
        self._refused = refused

    def close(self) -> None:
        """Close what is open; a later request opens it again."""
        self._keep_refused(None)
        for connection in (self._idle, self._open):
            if connection is not None:
                connection.close()
        self._idle = self._open = None

    @property
    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def token(self) -> str:
        """The bearer token, read when it is first needed."""
        if self._token is None:
            self._token = self._read_token()
        return self._token

    def _connect(self, left: list[Address], causes: list[str]) -> tuple[Connection | None, bool]:
        """A kept connection if it leads to one of the agents left, else a fresh one, else None."""
        idle, self._idle = self._idle, None
        if idle is not None and idle.is_reusable and idle.address in left:
            return idle, False
        if idle is not None:
            idle.close()
        try:
            return connect_any(left, self.waiter), True
        except NoAgentAnswered as error:
            causes.append(error.problem)
            if len(left) == len(self.addresses):
                raise
            return None, True

    def _finish(self, response: Response) -> Any:
        self.last_headers = headers = response.headers
        if "x-swarm-node" not in headers and headers.get("server") != "swarm-agent":  # its HTTP library knows no node
            response.close()
            raise Failure(
                f"what answers at {spell(response.address)} is not an agent", "check host and port", SWARM_FAILED
            )
        try:
            document = response.json()
        except ConnectionBroken as error:
            raise Failure(
                f"the answer of {spell(response.address)} cannot be used: {error}", "try again", SWARM_FAILED
            ) from error
        self._idle = self._open
        return document

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
        live = [str(m["address"]) for m in members if m.get("status") in ("alive", "suspect") and m.get("address")]
        if live:
            self._known |= {"members": sorted(live)[:MEMBERS_LIMIT], "learnt_utc_s": time.time()}
            self.addresses += [each for each in _parsed(self._known["members"]) if each not in self.addresses]
            self._write_memory()

    def _write_memory(self) -> None:
        if self._memory and not write_cache(self._memory, self._known):
            self._memory = ""  # do without


def _newest_of_each(causes: Sequence[str]) -> list[str]:
    """Of each address what it was last: all were asked twice."""
    return list({cause.partition(": ")[0]: cause for cause in causes}.values())


def read_problem(action: str, status: int, document: Any) -> AgentRefusal:
    """Turn an error document (RFC 9457) into the two lines that people read."""
    problem = document if isinstance(document, dict) else {}
    code = str(problem.get("code", ""))
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
        retry_after_s=float(problem.get("retry_after_seconds") or 0.0),
    )


def _field(error: dict[str, Any]) -> str:
    """What was typed, for what the API calls `?rank`, `/spec/ranks_most` or `/grace_seconds`."""
    pointer = str(error.get("pointer", ""))
    if pointer.startswith("?"):
        return f"--{pointer[1:]}"
    if pointer.startswith("/spec/"):
        from swarm_client.job_request import option_of  # only to word an error: it brings all keys of jobs

        return option_of(pointer.removeprefix("/spec/"))
    key = pointer.lstrip("/")
    return _OPTIONS.get(key.partition("/")[0]) or key.replace("/", ".") or "request"


def _match(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(str(value[key]) for key in ("handle", "name") if value.get(key)) or str(value.get("id", ""))
    return str(value)


def _is_too_late(shepherd_end_s: float, *, is_last_round: bool) -> bool:
    """True when an agent's waiting for a shepherd would no longer fit; the last round takes what is left."""
    return time.monotonic() >= shepherd_end_s - (0.0 if is_last_round else SHEPHERD_WAIT_S)


def _unknown_outcome(cause: str) -> Failure:
    return Failure(
        f"the answer was lost, and whether the request was carried out is unknown: {cause}",
        "look with `swarm ps` before you try again",
        SWARM_FAILED,
    )


def _query_text(query: dict[str, str]) -> str:
    if not query:
        return ""
    return "?" + "&".join(f"{quote(key)}={quote(value)}" for key, value in query.items())


def quote(text: str) -> str:
    """Percent-encode for a path segment or query value (RFC 3986).

    Bytes of the command line that are not UTF-8 come as surrogates; nothing in a swarm has such a name.
    """
    try:
        return "".join(c if c in _PLAIN else "".join(f"%{byte:02X}" for byte in c.encode()) for c in text)
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is not UTF-8", "write it in UTF-8") from None


def _in_order(hosts: Sequence[Address], known: dict[str, Any]) -> list[Address]:
    """The agent that answered last, the configured ones, those learnt; each once."""
    every = list(dict.fromkeys([*hosts, *_parsed(known.get("members", []))]))
    last = known.get("last")
    return sorted(every, key=lambda address: spell(address) != last)[:MEMBERS_LIMIT]


def _parsed(texts: Sequence[object]) -> list[Address]:
    """Addresses out of a cache or an answer; damaged ones are left out."""
    found = []
    for text in texts:
        try:
            found.append(parse_address(str(text), DEFAULT_PORT))
        except Failure:
            continue
    return found
