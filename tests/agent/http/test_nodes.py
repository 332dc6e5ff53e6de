"""Members, nodes, GPUs and the swarm-wide setting."""

import asyncio
import json
import time

import pytest
from msgspec.structs import replace

from swarm_agent.http.nodes import BodyCache
from swarmsched.api import JobState
from swarmsched.commands import DrainNode, ForgetMember, Refused, SetSwarmSetting
from swarmsched.errors import FieldProblem
from swarmsched.ids import NodeId
from swarmsched.policies.registry import POLICIES
from swarmsched.view import Elasticity, PolicySetting
from tests.agent.http.testing import a_card, a_record, job_id


async def test_nodes_carry_the_gpus_that_their_owners_tell(n1):
    document = await n1.get("/v1/nodes")
    assert [each["name"] for each in document["items"]] == ["n1", "n2", "n3"]
    assert [gpu["uuid"] for each in document["items"] for gpu in each["gpus"]] == [
        f"{name}-{at}" for name in ("n1", "n2", "n3") for at in range(2)
    ]
    assert document["staleness_seconds"] == 0.5


async def test_gpus_of_a_silent_node_are_unknown_and_not_idle(n1, swarm):
    swarm.down.add(NodeId("n2"))
    by_name = {each["name"]: each for each in (await n1.get("/v1/nodes"))["items"]}
    assert (by_name["n2"]["gpus"], by_name["n2"]["total_gpus"]) == (None, 2)
    document = await n1.get("/v1/gpus")
    assert document["silent_nodes"] == ["n2"]
    assert {each["node"] for each in document["items"]} == {"n1", "n3"}


async def test_one_node_and_the_nearest_to_a_misspelt_one(n1):
    assert (await n1.get("/v1/nodes/n2"))["name"] == "n2"
    problem = await n1.get("/v1/nodes/n22", 404)
    assert (problem["code"], problem["nearest"]) == ("unknown_node", "n2")
    assert problem["detail"] == "there is no node 'n22'"


async def test_prometheus_gets_every_member_that_has_not_left(n1, swarm):
    swarm.statuses |= {NodeId("n2"): "failed", NodeId("n3"): "left"}
    assert await n1.get("/v1/members/prometheus") == [
        {"targets": ["127.0.0.1:7000"], "labels": {"swarm_node": "n1"}},
        {"targets": ["127.0.0.1:7001"], "labels": {"swarm_node": "n2"}},
    ]


async def test_only_members_that_are_gone_can_be_forgotten(n1, swarm):
    response = await n1.ask("DELETE", "/v1/members/n2")
    assert (response.status, (await response.json(content_type=None))["code"]) == (409, "conflict")
    swarm.statuses[NodeId("n2")] = "failed"
    assert (await n1.ask("DELETE", "/v1/members/n2")).status == 200
    assert n1.agent.commands == [ForgetMember(NodeId("n2"))] * 2


async def test_a_node_whose_answer_cannot_be_read_is_shown_without_its_gpus_and_logged(n1, swarm, caplog):
    async def tell_gpus(*_):
        return {"gpus": [{"index": "first"}], "tasks": []}

    assert (await n1.get("/v1/nodes/n2"))["gpus"] is not None
    swarm.agents[NodeId("n2")].queries["gpus"] = tell_gpus
    async with asyncio.timeout(10.0):
        while (await n1.get("/v1/nodes/n2"))["gpus"] is not None:
            await asyncio.sleep(0.05)
    assert (await n1.get("/v1/nodes/n1"))["gpus"] is not None
    assert "answer of another agent cannot be read node=n2" in caplog.text


async def test_a_node_is_drained_through_any_agent_and_by_itself_alone(n1, swarm):
    told = {"api_version": "v1", "node": "n2", "is_draining": True, "drain_reason": "new disk"}
    response = await n1.ask("PUT", "/v1/nodes/n2/drain", json={"draining": True, "reason": "new\n disk"})
    assert (response.status, await response.json()) == (200, told)
    assert (n1.agent.commands, swarm.agents[NodeId("n2")].commands) == ([], [DrainNode(True, "new disk")])
    response = await n1.ask("PUT", "/v1/nodes/n1/drain", json={"draining": False})
    assert (await response.json())["is_draining"] is False
    assert n1.agent.commands == [DrainNode(False)]


@pytest.mark.parametrize(
    ("node", "body", "status", "code"),
    [
        ("n2", {}, 422, "invalid"),
        ("n2", {"draining": "yes"}, 422, "invalid"),
        ("n2", {"draining": True, "why": ""}, 422, "invalid"),
        ("n2", {"draining": True, "reason": "x" * 201}, 422, "invalid"),
        ("n9", {"draining": True}, 404, "unknown_node"),
    ],
)
async def test_a_drain_with_mistakes_reaches_nobody(n1, swarm, node, body, status, code):
    response = await n1.ask("PUT", f"/v1/nodes/{node}/drain", json=body)
    assert (response.status, (await response.json(content_type=None))["code"]) == (status, code)
    assert [agent.commands for agent in swarm.agents.values()] == [[] for _ in swarm.agents]


async def test_a_node_that_does_not_answer_is_not_said_to_drain(n1, swarm):
    swarm.down.add(NodeId("n2"))
    problem = await n1.ask("PUT", "/v1/nodes/n2/drain", json={"draining": True})
    assert (problem.status, (await problem.json(content_type=None))["code"]) == (503, "unavailable")


@pytest.mark.parametrize(
    ("status", "words", "is_lost"), [("failed", "n2 has been down since", True), ("left", "n2 has been gone", False)]
)
async def test_a_node_that_is_down_cannot_be_drained_and_need_not(n1, swarm, status, words, is_lost):
    swarm.down.add(NodeId("n2"))
    swarm.statuses[NodeId("n2")] = status
    response = await n1.ask("PUT", "/v1/nodes/n2/drain", json={"draining": True})
    problem = await response.json(content_type=None)
    assert (response.status, problem["code"]) == (409, "conflict")
    assert words in problem["detail"]
    assert ("swarm forget n2" in problem["remedy"]) is is_lost


async def test_a_setting_changed_by_another_is_not_overwritten(n1):
    first = await n1.ask("GET", "/v1/config")
    body = {"policy": "las", "parameters": {"queues": 2}}
    second = await n1.ask("PUT", "/v1/config", json=body, headers={"If-Match": first.headers["ETag"]})
    assert (second.status, (await second.json())["policy"]) == (200, "las")
    assert second.headers["ETag"] == (await n1.ask("GET", "/v1/config")).headers["ETag"] != first.headers["ETag"]
    third = await n1.ask("PUT", "/v1/config", json=body, headers={"If-Match": first.headers["ETag"]})
    assert (third.status, (await third.json(content_type=None))["code"]) == (412, "version_conflict")
    assert third.headers["ETag"] == second.headers["ETag"]
    assert n1.agent.commands == [SetSwarmSetting(PolicySetting("las", {"queues": 2.0}, Elasticity.ADVISE))]


async def test_how_elastic_jobs_are_is_part_of_the_setting_and_stays_when_it_is_not_named(n1):
    assert (await (await n1.ask("GET", "/v1/config")).json())["elasticity"] == "advise"
    for body, elasticity in (({"policy": "swarm", "elasticity": "on"}, "on"), ({"policy": "fifo"}, "on")):
        answered = await n1.ask("PUT", "/v1/config", json=body)
        assert (answered.status, (await answered.json())["elasticity"]) == (200, elasticity)
    refused = await n1.ask("PUT", "/v1/config", json={"policy": "swarm", "elasticity": "yes"})
    problem = await refused.json(content_type=None)
    assert (refused.status, problem["errors"][0]["pointer"]) == (422, "/elasticity")


async def test_what_jobs_are_by_default_is_part_of_the_setting_and_stays_when_it_is_not_named(n1):
    assert (await (await n1.ask("GET", "/v1/config")).json())["restartable"] is False
    for body in ({"policy": "swarm", "restartable": True}, {"policy": "fifo"}):
        assert (await (await n1.ask("PUT", "/v1/config", json=body)).json())["restartable"] is True
    refused = await n1.ask("PUT", "/v1/config", json={"policy": "swarm", "restartable": 1})
    assert (await refused.json(content_type=None))["errors"][0]["pointer"] == "/restartable"


async def test_a_setting_that_cannot_be_used_names_the_field(n1):
    async def no(_):
        where = FieldProblem("/policy", "there is no policy 'fifoo'; did you mean 'fifo'?", "fifo, backfill or las")
        return Refused("invalid", where.problem, where.remedy, (where,))

    n1.agent.answer = no
    for body, pointer in (
        ({"policy": "fifoo"}, "/policy"),
        ({}, "/policy"),
        ({"policy": "las", "parameters": {"queues": "two"}}, "/parameters/queues"),
        ({"policy": "las", "parameters": []}, "/parameters"),
        ({"policy": "las", "parameters": {"queues": 10**400}}, "/parameters/queues"),
        ({"police": "las"}, "/police"),
    ):
        response = await n1.ask("PUT", "/v1/config", json=body)
        assert (response.status, (await response.json(content_type=None))["errors"][0]["pointer"]) == (422, pointer)


async def test_a_setting_without_a_policy_names_all_that_there_are(n1):
    problem = await (await n1.ask("PUT", "/v1/config", json={"policy": ""})).json(content_type=None)
    assert problem["errors"][0]["remedy"] == f"one of {', '.join(POLICIES)}"


def test_a_body_is_remade_after_a_change_and_after_a_while(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    cache, made = BodyCache(), []

    def make():
        made.append(clock[0])
        return {"made": clock[0]}

    def get():
        return json.loads(cache.get("x", make))["made"]

    assert (get(), get()) == (100.0, 100.0)
    cache.on_stepped()
    assert get() == 100.0
    clock[0] = 100.06
    assert get() == 100.06
    clock[0] = 100.20
    assert get() == 100.06
    clock[0] = 100.32
    assert get() == 100.32
    assert len(made) == 3


async def test_head_of_a_document_has_no_body(n1):
    response = await n1.ask("HEAD", "/v1/nodes")
    assert (response.status, await response.read()) == (200, b"")


async def test_of_a_node_that_says_nothing_the_jobs_are_those_that_are_placed_there(n1, n3, swarm):
    swarm.down.add(NodeId("n2"))
    first, second = job_id(1), job_id(2)
    n1.agent.put(a_record(first, "n1", nodes=(("n1", 1), ("n2", 1)), state=JobState.RUNNING))
    n1.agent.put(a_record(job_id(3), "n1", nodes=(("n2", 1),), state=JobState.ENDED))
    n1.agent.known_cards = [a_card(a_record(second, "n3", nodes=(("n2", 1),), state=JobState.RUNNING))]
    told = {each["name"]: (each["jobs"], each["gpus"]) for each in (await n1.get("/v1/nodes"))["items"]}
    assert told["n2"] == ([first, second], None)
    assert (await n1.get("/v1/nodes/n2"))["jobs"] == [first, second]
    assert told["n3"][0] == []


async def test_names_of_nodes_are_compared_without_case_where_one_alone_fits(n1, swarm):
    assert (await n1.get("/v1/nodes/N2"))["name"] == "n2"
    assert (await n1.ask("PUT", "/v1/nodes/N1/drain", json={"draining": True})).status == 200
    swarm.statuses[NodeId("n2")] = "failed"
    assert (await n1.ask("DELETE", "/v1/members/N2")).status == 200
    assert n1.agent.commands == [DrainNode(True), ForgetMember(NodeId("n2"))]
    await n1.get("/v1/nodes/N9", 404)
    assert (await n1.get("/v1/nodes/none", 404)).get("nearest") is None


async def test_of_two_names_that_differ_in_case_alone_the_exact_one_is_meant(n1, monkeypatch):
    members = [replace(n1.agent.members()[0], node_id=NodeId(name)) for name in ("gpu1", "GPU1", "x")]
    monkeypatch.setattr(n1.agent, "members", lambda: members)
    assert [n1.agent.named(name) for name in ("gpu1", "GPU1", "Gpu1", "X")] == ["gpu1", "GPU1", "Gpu1", "x"]
