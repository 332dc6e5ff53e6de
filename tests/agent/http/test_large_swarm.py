"""A front with 500 members behind it: what is gathered from all of them is complete, and bounded in time."""

import asyncio
import time

import pytest

from swarm_agent.eventlog import EventLog
from swarm_agent.http import events as events_module
from swarm_agent.http import peers as peers_module
from swarm_agent.http.events import Events
from swarm_agent.http.exchange import as_object
from swarm_agent.http.find import JobFinder
from swarm_agent.http.joblist import JobList
from swarm_agent.http.log_places import LogFinder
from swarm_agent.http.peers import FAN_OUT_LIMIT, Peers
from swarm_agent.http.views import gpu_document
from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.effects import Announce
from swarmsched.ids import NodeId
from tests.agent.http.testing import SUBMITTED_UTC_S, AgentWithoutCore, a_card, a_record, job_id

MEMBERS = 500


class Member(AgentWithoutCore):
    """One of many: knows of nobody else, and answers what agents ask one another with the real handlers."""

    under_way = most_under_way = 0  # questions to all of them

    def __init__(self, swarm, name):
        super().__init__(swarm, name)
        peers = Peers(self, self)
        finder = JobFinder(self, peers)
        self.delay_s = 0.0
        self.queries = {
            "jobs": self.after_a_while(JobList(self, peers).on_jobs),
            "events": self.after_a_while(Events(self, peers).on_events),
            "kept_output": self.after_a_while(LogFinder(self, peers).on_kept),
            "gpus": self.after_a_while(self.tell_gpus),
            "find": self.after_a_while(self.tell_matches(finder)),
        }
        self.asked = 0

    def after_a_while(self, handler):
        async def answer(sender, payload):
            self.asked += 1
            Member.under_way += 1
            Member.most_under_way = max(Member.most_under_way, Member.under_way)
            try:
                await asyncio.sleep(self.delay_s)
                return await handler(sender, payload)
            finally:
                Member.under_way -= 1

        return answer

    async def tell_gpus(self, _, __):
        return {"gpus": [as_object(gpu_document(each)) for each in self.gpus()], "tasks": []}

    def tell_matches(self, finder):
        async def tell(_, payload):
            return {"matches": finder.likeliest(payload["reference"], payload.get("user", "")), "names": []}

        return tell

    def members(self):
        return ()

    def nodes(self):
        return ()


@pytest.fixture
def crowd(swarm, n1):
    """The members besides n1, each with a running job, an ended one, and an event."""
    for name in ("n2", "n3"):
        del swarm.agents[NodeId(name)]
    Member.under_way = Member.most_under_way = 0
    found = []
    for number in range(1, MEMBERS):
        name = f"m{number:03}"
        member = Member(swarm, NodeId(name))
        swarm.agents[NodeId(name)] = member
        for at, state in ((number, JobState.RUNNING), (MEMBERS + number, JobState.ENDED)):
            reason = EndReason.COMPLETED if state is JobState.ENDED else EndReason.NONE
            spec = JobSpec(command=("true",), name=f"job-{at}")
            submitted_utc_s = SUBMITTED_UTC_S + at
            record = a_record(job_id(at), name, spec=spec, state=state, submitted_utc_s=submitted_utc_s)
            member.put(record.updated(end_reason=reason))
        member.events.append(Announce("job.started", f"at {name}"), 1_000.0 + number)
        found.append(member)
    return found


async def pages(desk, path):
    items, cursor, totals = [], "", set()
    while cursor is not None:
        found = await desk.get(f"{path}&cursor={cursor}")
        assert (found["silent_nodes"], found["unasked_nodes"]) == ([], [])
        items += found["items"]
        totals.add(found["total"])
        cursor = found["next_cursor"]
    return items, totals


async def test_what_500_members_have_is_complete_and_none_is_called_silent(n1, crowd, swarm, monkeypatch):
    monkeypatch.setattr(peers_module, "FAN_OUT_S", 30.0)  # of whatever machine this runs on
    items, totals = await pages(n1, "/v1/jobs?all=1&limit=600")
    assert ({each["id"] for each in items}, len(items)) == (
        {job_id(at) for at in range(1, 2 * MEMBERS) if at != MEMBERS},
        2 * MEMBERS - 2,
    )
    assert totals == {2 * MEMBERS - 2}
    assert Member.most_under_way <= FAN_OUT_LIMIT
    gpus = await n1.get("/v1/gpus")
    assert {each["node"] for each in gpus["items"]} == set(swarm.agents)
    assert (gpus["silent_nodes"], gpus["unasked_nodes"]) == ([], [])
    status = await n1.get("/v1/status")
    assert (status["jobs"]["running"], status["between_shepherds"]) == (MEMBERS - 1, 0)
    texts = [each["text"] for each in (await n1.get("/v1/events?limit=1000"))["items"]]
    assert texts == [f"at {member.config.name}" for member in crowd]
    problem = await n1.get("/v1/jobs/job-0/wait", 404)
    assert (problem["silent_nodes"], problem["unasked_nodes"]) == ([], [])


async def test_a_name_is_found_wherever_it_is(n1, crowd, monkeypatch):
    monkeypatch.setattr(peers_module, "FAN_OUT_S", 30.0)
    finder = JobFinder(n1.agent, Peers(n1.agent, n1.agent))
    for number in (1, 70, MEMBERS - 1):
        assert (await finder.find(f"job-{number}")).job_id == job_id(number)
        assert await finder.search(job_id(number)) == (crowd[number - 1].config.name,)


async def test_members_that_do_not_answer_cost_a_bounded_time_and_only_those_that_were_asked_are_silent(
    n1, crowd, monkeypatch
):
    monkeypatch.setattr(peers_module, "FAN_OUT_S", 0.6)
    monkeypatch.setattr("swarm_agent.http.joblist.LIST_TIMEOUT_S", 0.2)
    dead = crowd[::2]
    for member in dead:
        member.delay_s = 60.0
    n1.agent.known_cards = [a_card(each) for member in crowd for each in member.known.values() if not each.is_ended]
    begun_s = time.monotonic()
    found = await n1.get("/v1/jobs?limit=1000")
    assert time.monotonic() - begun_s < 5.0
    silent, unasked = set(found["silent_nodes"]), set(found["unasked_nodes"])
    assert not silent & unasked
    assert silent <= {member.config.name for member in dead}
    assert {member.config.name for member in dead} <= silent | unasked
    assert all(member.asked for member in crowd if member.config.name in silent)
    assert unasked, "a member that takes long holds a place in the queue"
    assert {each["id"] for each in found["items"]} == {job_id(number) for number in range(1, MEMBERS)}, "by gossip"


async def test_jobs_of_which_nobody_speaks_are_said_to_be_between_two_shepherds(n1, n2, n3):
    ours, taken = a_record(job_id(1), "n2"), a_record(job_id(2), "n3")
    n2.agent.put(ours)
    n1.agent.known_cards = [a_card(ours), a_card(taken)]
    status = await n1.get("/v1/status")
    assert (status["jobs"]["queued"], status["between_shepherds"]) == (1, 1)
    n1.agent.over.add(job_id(2))
    assert (await n1.get("/v1/status"))["between_shepherds"] == 0


async def test_of_jobs_of_one_name_without_number_the_newest_that_lives_is_meant(n1, n2):
    spec = JobSpec(command=("true",), name="train")
    for number in range(300):
        state = JobState.RUNNING if number == 120 else JobState.ENDED
        n2.agent.put(a_record(job_id(number), "n2", spec=spec, state=state, submitted_utc_s=SUBMITTED_UTC_S + number))
    assert (await n1.get("/v1/jobs/train"))["id"] == job_id(120)


async def test_going_on_from_a_cursor_skips_no_event_however_many_there_are(n1, n2):
    for number in range(2_000):
        n2.agent.events.append(Announce("job.started" if number % 2 else "node.drained", str(number)), 1_000.0 + number)
    document = await n1.get("/v1/events?limit=1&since=1970-01-01T00:00:00Z&kind=job")
    assert document["items"][0]["text"] == "1999", "the newest without a cursor"
    n1.agent.events.append(Announce("job.started", "first"), 999.0)
    cursor = (await n1.get("/v1/events?limit=1&node=n1"))["next_cursor"]
    texts = []
    while True:
        page = await n1.get(f"/v1/events?limit=300&kind=job&cursor={cursor}")
        if not page["items"]:
            break
        texts += [int(each["text"]) for each in page["items"]]
        cursor = page["next_cursor"]
    assert texts == sorted(set(texts))
    assert len(texts) == 1_000


async def test_followers_hear_of_who_joins_later(n1, swarm, monkeypatch):
    monkeypatch.setattr(events_module, "LOOK_S", 0.05)
    response = await n1.ask("GET", "/v1/events?follow=1")
    swarm.add("n9").events = EventLog()
    newcomer = swarm.agents[NodeId("n9")]
    newcomer.streams["events"] = Events(newcomer, Peers(newcomer, newcomer)).on_follow
    newcomer.events.append(Announce("node.joined", "here I am"), time.time())
    async with asyncio.timeout(10):
        while not (line := (await response.content.readline()).strip()):
            continue
    assert b"here I am" in line
    response.close()
