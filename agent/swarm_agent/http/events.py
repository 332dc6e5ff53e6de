"""The cluster log: the events of all agents, merged by time, as a list or as a stream.

Every agent keeps its own; a cursor therefore carries one position for each agent.  An agent's sequence restarts with
the agent, so a position is (time of the event, sequence) and the time decides.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict as chosen_keys
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from swarm_agent.eventlog import KINDS
from swarm_agent.http.exchange import Call, Document, HttpReply, answer, as_object, decode_cursor, encode_cursor
from swarm_agent.http.merge import merged
from swarm_agent.http.parameter import Parameter, integer, words
from swarm_agent.http.peers import LIST_TIMEOUT_S, Absent, Peers
from swarm_agent.http.port import AgentPort
from swarm_agent.http.schema import TEXT
from swarm_agent.http.stream import FOLLOW, Record, closing, resume_cursor, stream_answer, ticking, wants_events
from swarm_agent.http.views import event_document
from swarm_agent.http.when import SINCE, rfc3339
from swarmsched.documents import EventDocument, EventListDocument, NodeEvents
from swarmsched.errors import AgentUnreachable, RemoteProtocolError
from swarmsched.ids import NodeId

DEFAULT_LIMIT = 100
LIMIT_MAX = 1_000
LOOK_S = 2.0  # of quiet, after which it is looked whether somebody has joined
RETRY_S = 2.0  # until a peer that stopped answering is followed again

Positions = dict[str, tuple[str, Annotated[int, Meta(ge=0, le=2**63 - 1)]]]
"""Agent -> (time, sequence) of the last event delivered."""

Log = list[EventDocument]

CURSOR = Parameter(
    "cursor", TEXT, "Go on behind this place.", lambda given: decode_cursor(given or "", Positions, Positions())
)
JOBS = words("job", "Ids or handles, with commas.")
KIND = words("kind", "Kinds or their beginnings, with commas.", (*{kind.split(".")[0]: None for kind in KINDS}, *KINDS))
LIMIT = integer("limit", "At most so many past ones.", DEFAULT_LIMIT, 0, LIMIT_MAX)
NODES = words("node", "Nodes, with commas.")


class Events:
    """Handlers of GET /v1/events."""

    def __init__(self, agent: AgentPort, peers: Peers) -> None:
        self._agent, self._peers = agent, peers

    async def on_events(self, _: NodeId, payload: Document) -> Document:
        """Another agent lists our events: those behind `after`, or the newest, and of these at most so many."""
        limit = min(LIMIT_MAX, int(payload.get("most") or payload.get("limit") or 0))
        chosen, after = _choice_from(payload), _position(payload.get("after"))
        found = [event for event in self._own(chosen.since) if chosen.accepts(event)]
        if after is not None:
            found = [event for event in found if _place(event) > after][:limit]
        return as_object(NodeEvents(items=found[len(found) - min(limit, len(found)) :], last=_latest(self._agent)))

    async def on_follow(self, _: NodeId, payload: Document) -> AsyncIterator[Document]:
        """Another agent follows our events."""
        async with closing(self._follow_own(_position(payload.get("after")))) as events:
            async for event in events:
                yield as_object(event)

    async def list_events(self, call: Call) -> HttpReply:
        """GET /v1/events, with `follow` a stream."""
        chosen = _choice_of(call)
        positions, limit = CURSOR.read(resume_cursor(call)), LIMIT.of(call)
        past, starts, absent = await self._past(chosen, positions, limit)
        if FOLLOW.of(call) or wants_events(call):
            return stream_answer(call, self._stream(chosen, past, {**starts, **positions}))
        for event in past:
            event.cursor = _encode(_advance(positions, event))
        return answer(EventListDocument(items=past, next_cursor=_encode(positions), **absent))

    async def _past(self, chosen: "_Choice", after: Positions, limit: int) -> tuple[Log, Positions, Absent]:
        """Past events, where each agent's log ended at that moment, and whose are missing."""

        def question(name: NodeId) -> Document:
            position = after.get(name) if after else None
            more = {"after": list(position or ("", 0))} if after else {}
            return {"limit": LIMIT_MAX, "most": limit, **chosen_keys(chosen), **more}  # 0.1.0 knows no "most"

        fan_out = await self._peers.ask_all("events", question, LIST_TIMEOUT_S)
        events, ends = self._own(chosen.since), {str(self._agent.config.name): _latest(self._agent)}
        for node, part in fan_out.read(NodeEvents).items():
            events += part.items
            ends[node] = part.last
        fresh = [each for each in events if chosen.accepts(each) and _is_after(each, after)]
        fresh.sort(key=_order)
        # Going on from a cursor means the next ones; without one the newest are meant.
        past = fresh[:limit] if after else fresh[len(fresh) - min(limit, len(fresh)) :]
        return past, ends, fan_out.absent

    def _own(self, since: str) -> Log:
        name = self._agent.config.name
        events = [event_document(name, event) for event in self._agent.events.since()]
        return [event for event in events if event.time >= since]

    async def _stream(self, chosen: "_Choice", past: Log, positions: Positions) -> AsyncIterator[Record]:
        starts = dict(positions)
        for event in past:
            yield _record(event, _advance(positions, event))
        names = [self._agent.config.name, *self._peers.reachable()]
        while True:
            sources = [self._follow(name, starts.get(name)) for name in names]
            async with closing(ticking(merged(sources), LOOK_S)) as events:
                async for news in events:
                    if news is not None:
                        starts[news.agent] = _place(news)
                        if chosen.accepts(news) and _is_after(news, positions):
                            yield _record(news, _advance(positions, news))
                    elif new := sorted(set(self._peers.reachable()).difference(names)):
                        break
                else:
                    return
            names += new
            starts |= dict.fromkeys(new, ("", 0))  # who has joined is heard from its first word on

    async def _follow(self, name: NodeId, after: tuple[str, int] | None) -> AsyncIterator[EventDocument]:
        """One agent's events, for ever: when it goes away, its log is taken up again once it is back."""
        start = after or (_latest(self._agent) if name == self._agent.config.name else None)
        while True:
            source = self._follow_own(start) if name == self._agent.config.name else self._follow_at(name, start)
            try:
                async with closing(source) as events:
                    async for event in events:
                        start = _place(event)
                        yield event
            except (AgentUnreachable, RemoteProtocolError, msgspec.ValidationError):
                await asyncio.sleep(RETRY_S)
            else:
                await asyncio.sleep(RETRY_S)

    async def _follow_at(self, name: NodeId, after: tuple[str, int] | None) -> AsyncIterator[EventDocument]:
        source = self._agent.query_stream(name, "events", {"after": list(after) if after else None})
        async with closing(source) as events:
            async for event in events:
                yield msgspec.convert(event, EventDocument)

    async def _follow_own(self, after: tuple[str, int] | None) -> AsyncIterator[EventDocument]:
        """Our events behind a position; None: only those to come."""
        name, start = self._agent.config.name, after or _latest(self._agent)
        async with closing(self._agent.events.follow()) as events:
            async for event in events:
                document = event_document(name, event)
                if _place(document) > start:
                    yield document


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which events are wanted."""

    kinds: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    since: str = ""

    def accepts(self, event: EventDocument) -> bool:
        kind, job, node = event.kind, event.job_id or "", [(event.node or "").casefold(), event.agent.casefold()]
        return (
            (not self.kinds or any(kind == each or kind.startswith(f"{each}.") for each in self.kinds))
            and (not self.jobs or any(job.startswith(each) or job[10:].startswith(each) for each in self.jobs))
            and (not self.nodes or any(each.casefold() in node for each in self.nodes))
            and event.time >= self.since
        )


def _choice_of(call: Call) -> _Choice:
    since_utc_s = SINCE.of(call)
    since = "" if since_utc_s is None else rfc3339(since_utc_s)
    return _Choice(KIND.of(call), JOBS.of(call), NODES.of(call), since)


def _choice_from(payload: Document) -> _Choice:
    """What another agent's client wants; 0.1.0 says the time only, and chooses itself."""
    return msgspec.convert({key: payload[key] for key in _Choice.__slots__ if key in payload}, _Choice)


def _latest(agent: AgentPort) -> tuple[str, int]:
    newest = agent.events.since()[-1:]
    return (event_document("", newest[0]).time, newest[0].sequence) if newest else ("", 0)


def _record(event: EventDocument, positions: Positions) -> Record:
    return {"type": "event", **asdict(event), "cursor": _encode(positions)}


def _order(event: EventDocument) -> tuple[str, str, int]:
    return (event.time, event.agent, event.sequence)


def _is_after(event: EventDocument, positions: Positions) -> bool:
    return _place(event) > positions.get(event.agent, ("", 0))


def _advance(positions: Positions, event: EventDocument) -> Positions:
    positions[event.agent] = _place(event)
    return positions


def _place(event: EventDocument) -> tuple[str, int]:
    return (event.time, event.sequence)


def _position(value: object) -> tuple[str, int] | None:
    return (str(value[0]), int(value[1])) if isinstance(value, list | tuple) and len(value) == 2 else None


def _encode(positions: Positions) -> str:
    return encode_cursor(positions) if positions else ""
