"""Asking other agents: many at once within a bound, or one on behalf of a client."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from swarm_agent.http.exchange import Call, HttpReply
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.port import AgentPort
from swarm_agent.http.principal import principal_from
from swarm_agent.http.problem import CONTENT_TYPE, Problem
from swarm_agent.http.reach import answer_of, items_of
from swarm_agent.http.stream import closing
from swarmsched.errors import AgentUnreachable, RemoteProtocolError
from swarmsched.gossip.member import MemberStatus
from swarmsched.ids import NodeId

log = logging.getLogger("swarm.http")

T = TypeVar("T")

LIST_TIMEOUT_S = 0.3
SEARCH_TIMEOUT_S = 2.0
FORWARD_TIMEOUT_S = 12.0  # above the 10 s that the core is given for a command
FAN_OUT_LIMIT = 64  # asked at once, for all requests together
FAN_OUT_S = 2.5  # that it may take to ask all, beside the time of one
HOPS_LIMIT = 2
FORWARDED_HEADERS = ("content-type", "if-match", "accept")

SAFE_METHODS = ("GET", "HEAD")

Question = dict[str, Any] | Callable[[NodeId], dict[str, Any]]
Absent = dict[str, Any]
"""Keys of lists and of the status: `silent_nodes` and `unasked_nodes`."""
Dispatch = Callable[[Call], Awaitable[HttpReply]]


@dataclass(frozen=True, slots=True)
class FanOut:
    """Answers by node, who said nothing in time, and who could not be asked in time."""

    answers: dict[NodeId, dict[str, Any]]
    silent: tuple[NodeId, ...] = ()
    unasked: tuple[NodeId, ...] = ()

    @property
    def absent(self) -> Absent:
        """Whose part is missing, as documents say it."""
        return {"silent_nodes": list(self.silent), "unasked_nodes": list(self.unasked)}

    def read(self, kind: type[T]) -> dict[NodeId, T]:
        """Answers as structs; one that this version cannot read is logged, and left out."""
        found: dict[NodeId, T] = {}
        for node, answer in self.answers.items():
            try:
                found[node] = msgspec.convert(answer, kind)
            except msgspec.ValidationError as error:
                log.warning("answer of another agent cannot be read node=%s error=%s", node, error)
        return found


class Peers:
    """The other agents, as seen from this one."""

    def __init__(self, agent: AgentPort, facts: AgentFacts) -> None:
        self._agent, self._facts = agent, facts
        self._turns = asyncio.Semaphore(FAN_OUT_LIMIT)

    @property
    def own_name(self) -> NodeId:
        """This agent."""
        return self._agent.config.name

    def reachable(self) -> list[NodeId]:
        """Other members that are alive or merely suspect, alive ones first."""
        return self._others(MemberStatus.ALIVE) + self._others(MemberStatus.SUSPECT)

    def alive(self) -> list[NodeId]:
        """Other members that nobody doubts."""
        return self._others(MemberStatus.ALIVE)

    def unreachable(self) -> list[NodeId]:
        """Other members that are known but failed or in conflict: they may have what we look for."""
        return self._others(MemberStatus.FAILED, MemberStatus.CONFLICT)

    def _others(self, *statuses: MemberStatus) -> list[NodeId]:
        members = self._facts.members()
        return [each.node_id for each in members if each.status in statuses and each.node_id != self.own_name]

    def is_gone(self, node: NodeId) -> bool:
        """True for a member that is known to have failed or left."""
        member = self._facts.member(node)
        return member is not None and member.status in (MemberStatus.FAILED, MemberStatus.LEFT)

    def likeliest(self, nodes: Iterable[NodeId]) -> list[NodeId]:
        """Each once, in order, but those that are gone last; without this agent."""
        others = first_unique(nodes, (self.own_name,))
        return sorted(others, key=self.is_gone)

    async def ask_all(self, kind: str, payload: Question, timeout_s: float) -> FanOut:
        """Ask all reachable members."""
        return await self.ask(self.reachable(), kind, payload, timeout_s, self.unreachable())

    async def ask(
        self,
        names: Sequence[NodeId],
        kind: str,
        payload: Question,
        timeout_s: float,
        away: Sequence[NodeId] = (),
        is_enough: Callable[[NodeId, dict[str, Any]], bool] = lambda *_: False,
    ) -> FanOut:
        """Ask these, a few at a time, until all have been or one's answer `is_enough`; `away` are silent unasked.

        Each has `timeout_s` to answer, and all together `FAN_OUT_S` more: who does not come to be asked by then has
        said nothing wrong, and is not called silent.
        """
        found: dict[NodeId, dict[str, Any] | None] = {}
        question = payload if callable(payload) else lambda _: payload

        async def in_turn(name: NodeId) -> bool:
            async with self._turns:
                answer = found[name] = await self._ask(name, kind, question(name), timeout_s)
            return answer is not None and is_enough(name, answer)

        tasks = [asyncio.create_task(in_turn(name)) for name in names]
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout(timeout_s + FAN_OUT_S):
                    for each in asyncio.as_completed(tasks):
                        if await each:
                            break
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        answers = {name: answer for name in names if (answer := found.get(name)) is not None}
        silent = [name for name in names if name in found and name not in answers]
        return FanOut(answers, (*silent, *away), tuple(name for name in names if name not in found))

    async def _ask(self, name: NodeId, kind: str, payload: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._agent.query(name, kind, payload, timeout_s)
        except (AgentUnreachable, RemoteProtocolError, TimeoutError):
            return None

    async def forward(self, node: NodeId, call: Call, timeout_s: float = FORWARD_TIMEOUT_S) -> HttpReply:
        """Have another agent answer.

        Raises `Problem` shepherd_unreachable when it cannot be asked, and unavailable when it was asked for a change
        and its answer was lost.
        """
        if call.hops >= HOPS_LIMIT:
            raise Problem("shepherd_unreachable", f"agents disagree on who acts for this job; {node} was named last")
        payload = {
            "method": call.method,
            "path": call.path,
            "query": dict(call.query),
            "headers": {name: call.headers[name] for name in FORWARDED_HEADERS if name in call.headers},
            "body": call.body,
            "request_id": call.request_id,
            "hops": call.hops + 1,
            "by": call.principal.to_json(),
        }
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer_of(node, self.is_gone, self._agent.query(node, "api", payload, timeout_s))
        except (AgentUnreachable, RemoteProtocolError, TimeoutError) as error:
            detail = f"{node} does not answer: {error or 'no answer in time'}"
            is_open = call.method not in SAFE_METHODS and _was_sent(error)
            raise Problem("unavailable" if is_open else "shepherd_unreachable", detail) from error
        return _answer_from(reply, node)

    async def stream(self, node: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask another agent for a stream; raises `AgentUnreachable` as soon as it is known to be gone."""
        source = self._agent.query_stream(node, kind, payload)
        async with closing(items_of(node, self.is_gone, source)) as items:
            async for item in items:
                yield item

    def serve(self, dispatch: Dispatch) -> None:
        """Answer what other agents forward."""

        async def on_api(sender: NodeId, payload: dict[str, Any]) -> dict[str, Any]:
            reply = await dispatch(_call_from(payload))
            if not isinstance(reply.body, bytes):
                raise RemoteProtocolError("streams are not forwarded", kind="api", peer=sender)
            return {
                "status": reply.status,
                "body": reply.body,
                "content_type": reply.content_type,
                "headers": dict(reply.headers),
            }

        self._agent.on_query("api", on_api)


def code_of(reply: HttpReply) -> str:
    """The code of an error that another agent answered; empty for anything else."""
    if reply.content_type != CONTENT_TYPE or not isinstance(reply.body, bytes):
        return ""
    try:
        document = json.loads(reply.body)
    except ValueError:
        return ""
    return str(document.get("code", "")) if isinstance(document, dict) else ""


def _was_sent(error: Exception) -> bool:
    """False when the question surely never reached the other agent."""
    cause = error.__cause__
    return not isinstance(error, AgentUnreachable) or not (
        cause is None or isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    )


def _call_from(payload: dict[str, Any]) -> Call:
    body = payload.get("body", b"")
    return Call(
        method=str(payload.get("method", "")),
        path=str(payload.get("path", "")),
        query=_texts(payload.get("query")),
        headers=_texts(payload.get("headers")),
        body=body if isinstance(body, bytes) else b"",
        request_id=str(payload.get("request_id", ""))[:64],
        hops=max(1, int(payload.get("hops", 1))),
        principal=principal_from(payload.get("by")),
    )


def _answer_from(reply: dict[str, Any], node: NodeId) -> HttpReply:
    status, body = reply.get("status"), reply.get("body")
    if not isinstance(status, int) or not 200 <= status <= 599 or not isinstance(body, bytes):
        raise Problem("shepherd_unreachable", f"{node} gave an answer that makes no sense")
    return HttpReply(status, body, str(reply.get("content_type", "")), _texts(reply.get("headers")))


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}


def first_unique(items: Iterable[NodeId], without: Sequence[NodeId] = ()) -> list[NodeId]:
    """In order, each once."""
    return [item for item in dict.fromkeys(items) if item not in without]
