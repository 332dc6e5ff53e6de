"""Tickets, submissions, idempotency keys, and every way to get them wrong."""

import asyncio
import io
import json

import pytest

from swarm_agent.http import exchange
from swarm_agent.http.peers import Peers
from swarmsched.commands import Refused, SubmitJob
from swarmsched.errors import FieldProblem
from tests.agent.http.testing import store_of
from tests.agent.testing import wait_until

SPEC = {"command": ["python", "train.py"], "ranks": 2, "gpus_per_rank": 1}
TICKET = {"job_id": "0" * 26, "holders": ["n1"], "stores": ["11ae"]}


def ticket_of(document):
    """What a client gives back of a ticket."""
    return {key: document[key] for key in ("job_id", "holders", "stores")}


def made_at(desks):
    """Names of the agents whose core was asked to create a job."""
    return [name for name, desk in desks.items() if any(isinstance(each, SubmitJob) for each in desk.agent.commands)]


async def test_a_submission_without_a_ticket_makes_one_job(n1):
    response = await n1.ask("POST", "/v1/jobs", json={"spec": SPEC})
    document = await response.json()
    assert response.status == 201
    assert response.headers["Location"] == f"/v1/jobs/{document['id']}"
    assert response.headers["X-Swarm-Node"] == "n1"
    assert (document["state"], document["gpus"], document["was_known"]) == ("queued", 2, False)


@pytest.mark.parametrize(
    ("more", "default", "expected"),
    [({}, True, True), ({}, False, False), ({"restartable": False}, True, False), ({"restartable": True}, False, True)],
)
async def test_the_swarms_setting_says_whether_a_job_may_be_begun_again_that_does_not(
    desks, n1, more, default, expected
):
    await n1.ask("PUT", "/v1/config", json={"policy": "swarm", "restartable": default})
    n1.agent.ticket_holders = ("n2", "n1")
    await n1.post("/v1/jobs", {"spec": SPEC | more}, 201)
    (command,) = [each for each in desks["n2"].agent.commands if isinstance(each, SubmitJob)]
    assert command.spec.restartable is expected


async def test_a_forwarded_submission_has_only_keys_that_say_something(n1, monkeypatch):
    """An agent of an earlier release refuses a key that it does not know, whatever its value."""
    bodies, forward = [], Peers.forward

    async def heard(self, node, call, *rest):
        bodies.append(json.loads(call.body))
        return await forward(self, node, call, *rest)

    monkeypatch.setattr(Peers, "forward", heard)
    n1.agent.ticket_holders = ("n2", "n1")
    await n1.post("/v1/jobs", {"spec": {**SPEC, "slurm_env": False, "restartable": False, "priority": 2}}, 201)
    assert [body["spec"] for body in bodies] == [{**SPEC, "priority": 2}]


@pytest.mark.parametrize(
    "more",
    [
        {"command": ["a"] * 5_000},
        {"env": {str(n): "" for n in range(1_025)}},
        {"nodes": ["n1", "n1"]},
        {"workdir": "/caf\udce9"},
    ],
    ids=("words", "variables", "node twice", "not UTF-8"),
)
async def test_a_dry_run_and_a_submission_refuse_alike_what_cannot_be_stored(n1, more):
    dry, real = [
        await n1.post("/v1/jobs", {"spec": SPEC | more, "dry_run": is_dry_run}, 422) for is_dry_run in (True, False)
    ]
    assert dry["errors"] == real["errors"]
    assert n1.agent.known == {}


async def test_the_same_ticket_makes_one_job_at_whichever_agent_it_is_repeated(n1, n2):
    ticket = await n1.post("/v1/tickets")
    body = {"ticket": ticket_of(ticket), "spec": SPEC}
    first = await n1.post("/v1/jobs", body, 201)
    again = await n2.post("/v1/jobs", body, 200)
    assert (first["id"], again["id"], again["was_known"]) == (ticket["job_id"], ticket["job_id"], True)
    assert list(n1.agent.known) == [ticket["job_id"]]
    assert n2.agent.known == {}


async def test_a_ticket_whose_holders_are_away_has_an_unknown_outcome(n1, n2, swarm):
    ticket = await n1.post("/v1/tickets")
    swarm.down.add("n1")
    body = {"ticket": ticket_of(ticket), "spec": SPEC}
    problem = await n2.post("/v1/jobs", body, 503)
    assert (problem["code"], problem["retry_after_seconds"]) == ("unavailable", 1)
    assert "n1" in problem["detail"]


async def test_a_ticket_carries_holders_with_their_databases(n1):
    n1.agent.ticket_holders = ("n2", "n3", "n1")
    ticket = await n1.post("/v1/tickets")
    assert ticket["holders"] == ["n2", "n3", "n1"]
    assert [int(store, 16) for store in ticket["stores"]] == [store_of(name) for name in ticket["holders"]]


async def test_a_ticket_waits_for_the_databases_of_members_that_have_just_been_met(n1):
    n1.agent.unheard = {"n2", "n3"}
    asked = asyncio.ensure_future(n1.post("/v1/tickets"))
    await wait_until(lambda: len(n1.agent.commands) > 1)
    assert not asked.done()
    n1.agent.ticket_holders = ("n1", "n2", "n3")
    n1.agent.unheard = set()
    assert (await asked)["holders"] == ["n1", "n2", "n3"]


async def test_a_ticket_does_not_wait_for_ever_for_a_member_that_tells_nothing_of_itself(n1, monkeypatch):
    monkeypatch.setattr("swarm_agent.http.submit.INTRODUCTION_S", 0.2)
    n1.agent.unheard = {"n2"}
    assert (await n1.post("/v1/tickets"))["holders"] == ["n1"]
    assert len(n1.agent.commands) > 1


@pytest.mark.parametrize("status", ["suspect", "failed", "left"])
async def test_a_ticket_does_not_wait_for_a_member_that_is_not_alive(n1, swarm, status):
    n1.agent.unheard = {"n2"}
    swarm.statuses["n2"] = status
    assert (await n1.post("/v1/tickets"))["holders"] == ["n1"]
    assert len(n1.agent.commands) == 1


@pytest.mark.parametrize("asked", ["n1", "n2", "n3"])
async def test_the_first_holder_of_a_ticket_is_asked_whoever_the_client_asks(desks, n1, asked):
    n1.agent.ticket_holders = ("n2", "n1")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    document = await desks[asked].post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 201)
    assert document["holders"] == ["n2", "n1"]
    assert made_at(desks) == ["n2"]


@pytest.mark.parametrize(("asked", "taker"), [("n1", "n3"), ("n3", "n3")])
async def test_the_next_holder_takes_the_job_when_the_first_cannot_be_reached(desks, swarm, n1, asked, taker):
    n1.agent.ticket_holders = ("n2", "n3", "n1")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    swarm.down.add("n2")
    await desks[asked].post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 201)
    assert made_at(desks) == [taker]


async def test_an_agent_that_holds_takes_the_job_when_all_before_it_are_away(desks, swarm, n1):
    n1.agent.ticket_holders = ("n2", "n3", "n1")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    swarm.down |= {"n2", "n3"}
    await n1.post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 201)
    assert made_at(desks) == ["n1"]


@pytest.mark.parametrize("code", ["not_ready", "unavailable"])
async def test_the_next_holder_is_asked_when_the_first_does_not_know_the_outcome(desks, n1, n2, code):
    async def unsure(command):
        return Refused(code, "no majority answered")

    n1.agent.ticket_holders = ("n2", "n3")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    n2.agent.answer = unsure
    await n1.post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 201)
    assert made_at(desks) == ["n2", "n3"]


async def ticket_that_is_refused(n1, n2):
    """A ticket of n2 and n3 for n1's client, of which n2 wants no job."""

    async def no(command):
        return Refused("conflict", "the ticket was used for another job", "ask for a new ticket")

    n1.agent.ticket_holders = ("n2", "n3")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    n2.agent.answer = no
    return ticket


async def test_a_refusal_of_the_first_holder_is_final(desks, n1, n2):
    ticket = await ticket_that_is_refused(n1, n2)
    problem = await n1.post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 409)
    assert problem["code"] == "conflict"
    assert made_at(desks) == ["n2"]


async def test_a_refusal_of_another_holder_is_a_refusal_when_it_is_repeated(n1, n2):
    ticket = await ticket_that_is_refused(n1, n2)
    for _ in range(2):
        await n1.post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 409, headers={"Idempotency-Key": "k1"})


async def test_a_holder_that_lost_its_database_is_passed_over(desks, n1, n2):
    n1.agent.ticket_holders = ("n2", "n3")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    n2.agent.store_id += 1
    await n1.post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 201)
    assert made_at(desks) == ["n3"]


async def test_a_witness_is_asked_last(desks, swarm, n1):
    n1.agent.ticket_holders = ("n2", "n3", "n1")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    for desk in desks.values():
        desk.agent.witnesses.add("n3")
    swarm.down.add("n2")
    await n1.post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 201)
    assert made_at(desks) == ["n1"]


async def test_a_ticket_of_which_no_holder_is_left_is_answered_in_time(desks, swarm, n1):
    n1.agent.ticket_holders = ("n2", "n3")
    ticket = ticket_of(await n1.post("/v1/tickets"))
    swarm.down |= {"n2", "n3"}
    problem = await n1.post("/v1/jobs", {"ticket": ticket, "spec": SPEC}, 503)
    assert problem["code"] == "unavailable"
    assert "n2, n3" in problem["detail"]
    assert "same ticket" in problem["remedy"]


async def test_a_dry_run_stores_nothing(n1):
    document = await n1.post("/v1/jobs", {"spec": SPEC, "dry_run": True}, 200)
    assert document["dry_run"]
    assert n1.agent.known == {}


async def test_an_idempotency_key_replays_the_first_answer(n1):
    headers = {"Idempotency-Key": "k1"}
    first = await n1.post("/v1/jobs", {"spec": SPEC}, 201, headers=headers)
    again = await n1.ask("POST", "/v1/jobs", json={"spec": SPEC}, headers=headers)
    assert (again.status, again.headers["Idempotency-Replayed"]) == (200, "true")
    assert (await again.json())["id"] == first["id"]
    assert len(n1.agent.known) == 1


async def test_a_key_with_another_body_is_refused(n1):
    headers = {"Idempotency-Key": "k1"}
    await n1.post("/v1/jobs", {"spec": SPEC}, 201, headers=headers)
    problem = await n1.post("/v1/jobs", {"spec": {**SPEC, "ranks": 3}}, 422, headers=headers)
    assert problem["code"] == "idempotency_key_reused"


async def test_a_key_under_way_is_refused_meanwhile(n1):
    gate, entered, plain = asyncio.Event(), asyncio.Event(), n1.agent.obey

    async def slow(command):
        entered.set()
        await gate.wait()
        return await plain(command)

    n1.agent.answer = slow
    first = asyncio.create_task(n1.post("/v1/jobs", {"spec": SPEC}, 201, headers={"Idempotency-Key": "k1"}))
    await entered.wait()
    problem = await n1.post("/v1/jobs", {"spec": SPEC}, 409, headers={"Idempotency-Key": "k1"})
    gate.set()
    assert problem["code"] == "idempotency_in_progress"
    assert (await first)["state"] == "queued"


async def test_a_repetition_after_an_unknown_outcome_uses_the_same_ticket(n1):
    plain, asked = n1.agent.obey, []

    async def lose_the_first_answer(command):
        reply = await plain(command)
        if isinstance(command, SubmitJob):
            asked.append(command.job_id)
            if len(asked) == 1:
                return Refused("unavailable", "no answer within 10 s; the outcome is unknown")
        return reply

    n1.agent.answer = lose_the_first_answer
    problem = await n1.post("/v1/jobs", {"spec": SPEC}, 503, headers={"Idempotency-Key": "k1"})
    assert problem["code"] == "unavailable"
    await n1.post("/v1/jobs", {"spec": SPEC}, 200, headers={"Idempotency-Key": "k1"})
    assert asked[0] == asked[1]
    assert len(n1.agent.known) == 1


@pytest.mark.parametrize("key", ["x" * 129, "\u00e4"])
async def test_a_malformed_key_is_refused(n1, key):
    problem = await n1.post("/v1/jobs", {"spec": SPEC}, 400, headers={"Idempotency-Key": key})
    assert problem["errors"][0]["pointer"] == "Idempotency-Key"


async def test_all_mistakes_of_a_specification_are_told_at_once(n1):
    spec = {"command": [], "ranks": 0, "gpu_per_rank": 1, "queue": "defualt"}
    problem = await n1.post("/v1/jobs", {"spec": spec}, 422)
    pointers = {each["pointer"] for each in problem["errors"]}
    assert pointers == {"/spec/command", "/spec/ranks", "/spec/gpu_per_rank", "/spec/queue"}
    assert "did you mean 'gpus_per_rank'" in problem["detail"]
    assert n1.agent.commands == []


async def test_more_than_the_swarm_ever_had_is_impossible(n1):
    async def no(command):
        if isinstance(command, SubmitJob):
            where = FieldProblem("/ranks", "asked for 64 GPUs; the swarm has 6", "ask for less")
            return Refused("impossible", where.problem, where.remedy, (where,))
        return await n1.agent.obey(command)

    n1.agent.answer = no
    problem = await n1.post("/v1/jobs", {"spec": {**SPEC, "ranks": 64}}, 422)
    assert (problem["code"], problem["errors"][0]["pointer"]) == ("impossible_request", "/spec/ranks")


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/spec"),
        ({"spec": SPEC, "tickets": {}}, "/tickets"),
        ({"spec": SPEC, "dry_run": "yes"}, "/dry_run"),
        ({"spec": SPEC, "ticket": "abc"}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "job_id": "../../etc/passwd"}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "holders": [], "stores": []}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "holders": ["a/b"]}}, "/ticket"),
        ({"spec": SPEC, "ticket": {"job_id": "0" * 26, "holders": ["n1"]}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "stores": []}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "stores": ["11ae", "11af"]}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "stores": [4526]}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "stores": ["0x11ae"]}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "stores": ["0"]}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "stores": ["20000000000000"]}}, "/ticket"),
        ({"spec": SPEC, "ticket": {**TICKET, "holders": ["n1", "n1"], "stores": ["11ae", "11ae"]}}, "/ticket"),
        (
            {"spec": SPEC, "ticket": {**TICKET, "holders": [f"m{n}" for n in range(6)], "stores": ["1"] * 6}},
            "/ticket",
        ),
    ],
)
async def test_each_malformed_part_is_named(n1, body, pointer):
    problem = await n1.post("/v1/jobs", body, 422)
    assert [each["pointer"] for each in problem["errors"]] == [pointer]
    assert problem["errors"][0]["remedy"]


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"spec"'])
async def test_what_is_not_a_json_object_is_a_bad_request(n1, data):
    response = await n1.ask("POST", "/v1/jobs", data=data, headers={"Content-Type": "application/json"})
    assert response.status == 400
    assert response.content_type == "application/problem+json"


async def test_a_body_above_one_mebibyte_is_refused_by_its_length(n1):
    response = await n1.ask(
        "POST", "/v1/jobs", data=io.BytesIO(b" " * (2**20 + 1)), headers={"Content-Type": "application/json"}
    )
    assert response.status == 413


async def test_a_body_above_one_mebibyte_is_refused_in_chunks_too(n1):
    async def chunks():
        for _ in range(20):
            yield b" " * 65_536

    response = await n1.ask("POST", "/v1/jobs", data=chunks(), headers={"Content-Type": "application/json"})
    assert response.status == 413


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [("POST", "/v1/jobs", "application/json"), ("PUT", f"/v1/blobs/{'0' * 64}", "application/octet-stream")],
)
async def test_a_body_that_stops_coming_is_not_waited_for(n1, method, path, kind, monkeypatch):
    monkeypatch.setattr(exchange, "BODY_STALL_S", 0.2)
    answered = asyncio.Event()

    async def chunks():
        yield b"{"
        await answered.wait()

    response = await n1.ask(method, path, data=chunks(), headers={"Content-Type": kind})
    answered.set()
    assert (response.status, (await response.json(content_type=None))["code"]) == (408, "request_timeout")


async def test_a_form_is_refused(n1):
    response = await n1.ask("POST", "/v1/jobs", data={"spec": "x"})
    assert response.status == 415


async def test_a_node_that_is_starting_says_when_to_come_back(n1):
    async def starting(_):
        return Refused("not_ready", "this agent is still starting", "try again in a second")

    n1.agent.answer = starting
    response = await n1.ask("POST", "/v1/tickets")
    assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_shipped_files_that_are_here_name_this_agent_as_their_source(n1):
    digest = await n1.agent.blobs.put_bytes(b"manifest")
    document = await n1.post("/v1/jobs", {"spec": {**SPEC, "tree": digest}}, 201)
    assert document["spec"]["blob_sources"] == ["n1"]


async def test_secrets_in_the_environment_are_masked(n1):
    spec = {**SPEC, "env": {"HF_TOKEN": "abc", "AWS_SECRET_ACCESS_KEY": "k", "SEED": "1"}}
    document = await n1.post("/v1/jobs", {"spec": spec}, 201)
    assert document["spec"]["env"] == {"HF_TOKEN": "***", "AWS_SECRET_ACCESS_KEY": "***", "SEED": "1"}


async def test_nodes_of_a_job_are_spelt_as_they_are_called(n1):
    answered = await n1.post("/v1/jobs", {"spec": {**SPEC, "nodes": ["N2", "n1"], "exclude": ["N3"]}}, 201)
    assert (answered["spec"]["nodes"], answered["spec"]["exclude"]) == (["n2", "n1"], ["n3"])
    assert answered["swarm_gpus"] == 6
