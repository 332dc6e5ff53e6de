"""The merged cluster log."""

import asyncio
import json
import re
from pathlib import Path

import swarm_agent
import swarmsched
from swarm_agent.eventlog import KINDS
from swarmsched.effects import Announce
from swarmsched.ids import NodeId


def say(desk, text, at, kind="job.started", job_id=None):
    desk.agent.events.append(Announce(kind, text, job_id, desk.agent.config.name), at)


def texts(document):
    return [each["text"] for each in document["items"]]


async def test_events_of_all_agents_by_time(n1, n2, n3):
    say(n2, "b", 2.0)
    say(n1, "a", 1.0)
    say(n3, "c", 3.0)
    for desk in (n1, n2, n3):
        document = await desk.get("/v1/events")
        assert texts(document) == ["a", "b", "c"]
        assert [each["agent"] for each in document["items"]] == ["n1", "n2", "n3"]
    assert texts(await n1.get("/v1/events?limit=2")) == ["b", "c"]


async def test_a_cursor_goes_on_at_another_agent(n1, n2):
    for number in range(6):
        say((n1, n2)[number % 2], str(number), float(number + 1))
    document = await n1.get("/v1/events")
    middle = document["items"][2]["cursor"]
    assert texts(await n2.get(f"/v1/events?cursor={middle}")) == ["3", "4", "5"]
    assert texts(await n2.get(f"/v1/events?cursor={middle}&limit=1")) == ["3"]
    assert texts(await n2.get(f"/v1/events?cursor={document['next_cursor']}")) == []


async def test_filters(n1):
    say(n1, "placed", 1.0, "job.placed")
    say(n1, "joined", 2.0, "member.changed")
    say(n1, "jobless", 3.0, "jobless")
    assert texts(await n1.get("/v1/events?kind=job")) == ["placed"]
    assert texts(await n1.get("/v1/events?kind=member.changed,job.placed")) == ["placed", "joined"]
    assert texts(await n1.get("/v1/events?node=n2")) == []
    assert texts(await n1.get("/v1/events?node=N1")) == texts(await n1.get("/v1/events?node=n1")) != []
    assert texts(await n1.get("/v1/events?since=1970-01-01T00:00:02Z")) == ["joined", "jobless"]


async def test_a_kind_that_there_is_not_is_refused_with_those_that_there_are(n1):
    problem = await n1.get("/v1/events?kind=job,job.startd,nope", 400)
    assert [each["detail"] for each in problem["errors"]] == [
        "'job.startd' is not known; did you mean 'job.started'?",
        "'nope' is not known; did you mean 'node'?",
    ]
    assert problem["remedy"].startswith("one or more of: aggregation, api, claim, hold, ")


def test_all_kinds_that_the_core_announces_are_known():
    core = Path(swarmsched.__file__).parent
    rooms = ("aggregation", "gossip", "holder", "jobs", "ledger", "negotiation", "node")
    texts = [path.read_text() for room in rooms for path in (core / room).rglob("*.py")]
    found = {kind for text in texts for kind in re.findall(r'"([a-z]+\.[a-z_]+)"', text)}
    served = (Path(swarm_agent.__file__).parent / "http/app.py").read_text()
    assert sorted(found | set(re.findall(r'Announce\("([a-z.]+)"', served))) == list(KINDS)


async def test_a_silent_agent_is_named(n1, swarm):
    swarm.down.add(NodeId("n2"))
    assert (await n1.get("/v1/events"))["silent_nodes"] == ["n2"]


async def messages(response):
    """Parsed server-sent events as they come."""
    while True:
        block = (await response.content.readuntil(b"\n\n")).decode()
        fields = dict(line.split(": ", 1) for line in block.strip().split("\n") if not line.startswith(":"))
        if fields:
            yield fields["id"], json.loads(fields["data"])


async def test_followers_see_past_and_new_events_of_every_agent_and_resume_anywhere(n1, n2, n3):
    say(n1, "past", 1.0)
    headers = {"Accept": "text/event-stream"}
    async with asyncio.timeout(5):
        first = messages(await n3.ask("GET", "/v1/events?follow=1", headers=headers))
        assert (await anext(first))[1]["text"] == "past"
        say(n2, "new at n2", 2.0)
        cursor, record = await anext(first)
        assert (record["text"], record["agent"], record["type"]) == ("new at n2", "n2", "event")
        say(n1, "missed", 3.0)
        again = await n1.ask("GET", "/v1/events", headers={**headers, "Last-Event-ID": cursor})
        second = messages(again)
        assert (await anext(second))[1]["text"] == "missed"
        say(n3, "and new", 4.0)
        assert (await anext(second))[1]["text"] == "and new"
        again.close()
