"""Host, Origin and token: what never reaches a handler."""

import json

import pytest

from swarm_agent.http.exchange import Call
from swarm_agent.http.guard import Guard, host_name, known_hosts
from swarm_agent.http.openapi import openapi_document
from swarm_agent.http.peers import Peers, code_of
from swarm_agent.http.principal import Principal, Right, principal_from
from swarm_agent.http.problem import Problem
from swarmsched.ids import NodeId
from tests.agent.http.testing import OLD_TOKEN, TOKEN, a_record, job_id

ALPHA, N1 = job_id(1), NodeId("n1")

EVERY_METHOD = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


async def test_every_private_operation_refuses_a_request_without_the_token(n1):
    document = await n1.get("/openapi.json")
    private = [
        (method, path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if operation.get("security") != []
    ]
    assert len(private) > 20
    for method, path in private:
        response = await n1.client.request(method, path.replace("{", "").replace("}", ""))
        assert (response.status, response.headers["WWW-Authenticate"][:6]) == (401, "Bearer"), (method, path)


async def test_each_of_several_tokens_is_accepted(n1):
    for token in (OLD_TOKEN, TOKEN):
        answer = await n1.client.get("/v1/nodes", headers={"Authorization": f"Bearer {token}"})
        assert answer.status == 200


@pytest.mark.parametrize(
    "given", ["Bearer wrong", "Basic a-token-for-tests-only", "a-token-for-tests-only", "Bearer ", "Bearer \u00e4"]
)
async def test_a_wrong_token_is_refused(n1, given):
    response = await n1.client.get("/v1/nodes", headers={"Authorization": given})
    assert response.status == 401
    assert (await response.json(content_type=None))["code"] == "unauthorised"


async def test_a_forwarded_request_keeps_who_asked_and_needs_the_right_of_its_route(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1"))
    viewer = Principal("guest", frozenset({Right.VIEW}))
    peers = Peers(n2.agent, n2.agent)
    assert (await peers.forward(N1, Call("GET", f"/v1/jobs/{ALPHA}", principal=viewer))).status == 200
    reply = await peers.forward(N1, Call("POST", f"/v1/jobs/{ALPHA}/cancel", principal=viewer))
    assert (reply.status, code_of(reply)) == (403, "forbidden")
    assert isinstance(reply.body, bytes)
    assert "guest has not the right 'use'" in json.loads(reply.body)["detail"]
    assert n1.agent.commands == []


@pytest.mark.parametrize(
    ("told", "rights"),
    [
        (None, set(Right)),  # of 0.1.0
        ({}, set()),
        ("operator", set()),
        ({"name": "operator"}, set()),
        ({"name": "x", "rights": "operate"}, set()),
        ({"name": "x", "rights": ["view", "fly", 7, None, ["use"]]}, {Right.VIEW}),
    ],
)
def test_who_is_told_wrongly_has_no_right(told, rights):
    assert principal_from(told).rights == rights


async def test_every_change_needs_more_than_to_see(n1):
    document = await n1.get("/openapi.json")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_public = operation.get("security") == []
            assert is_public == ("x-right" not in operation), (method, path)
            assert is_public or method in ("get", "head") or operation["x-right"] in ("use", "operate"), (method, path)


async def test_who_has_changed_something_that_was_there_is_an_event_and_who_has_added_something_is_none(n1):
    n1.agent.put(a_record(ALPHA, "n1"))
    await n1.ask("POST", "/v1/tickets")
    response = await n1.ask("POST", f"/v1/jobs/{ALPHA}/cancel")
    (event,) = [each for each in n1.agent.events.since() if each.kind == "api.changed"]
    assert event.fields == {
        "by": "operator",
        "method": "POST",
        "path": f"/v1/jobs/{ALPHA}/cancel",
        "status": response.status,
    }
    assert event.text == f"operator: POST /v1/jobs/{ALPHA}/cancel, answered {response.status}"


async def test_a_change_that_another_agent_refused_is_no_event(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1"))
    assert (await n2.ask("POST", f"/v1/jobs/{ALPHA}/signal", json={"signal": 2})).status == 409
    assert [each.kind for each in n2.agent.events.since() if each.kind == "api.changed"] == []


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/openapi.json", "/errors/unknown_job", "/"])
async def test_public_paths_need_no_token(n1, path):
    assert (await n1.client.get(path)).status == 200


@pytest.mark.parametrize("method", EVERY_METHOD)
@pytest.mark.parametrize("path", ["/v1/jobs", "/livez", "/", "/nowhere"])
async def test_a_rebound_name_is_refused_whatever_the_method(n1, method, path):
    response = await n1.ask(method, path, headers={"Host": "attacker.example"})
    assert response.status == 403
    assert (await response.json(content_type=None))["code"] == "wrong_host"
    assert n1.agent.commands == []


@pytest.mark.parametrize("method", EVERY_METHOD)
async def test_a_cross_origin_request_is_refused_whatever_the_method(n1, method):
    origins = ("https://attacker.example", "null", "http://[")
    for headers in (*({"Origin": each} for each in origins), {"Sec-Fetch-Site": "cross-site"}):
        response = await n1.ask(method, "/v1/jobs", headers=headers)
        assert response.status == 403
        assert (await response.json(content_type=None))["code"] == "cross_origin"
    assert n1.agent.commands == []


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
async def test_a_browser_has_no_business_where_agents_speak(n1, header):
    response = await n1.client.post("/peer/v1/query/api", headers={header: "same-origin"})
    assert (response.status, (await response.json(content_type=None))["code"]) == (403, "cross_origin")
    assert (await n1.client.post("/peer/v1/query/nothing")).status == 404, "agents are not turned away"


async def test_no_answer_tells_the_versions_of_what_serves_it(n1):
    for path in ("/livez", "/v1/jobs", "/nowhere"):
        assert (await n1.client.get(path)).headers["Server"] == "swarm-agent"


async def test_the_agents_own_page_may_call_it(n1):
    origin = str(n1.client.make_url("")).rstrip("/")
    assert (await n1.ask("GET", "/v1/jobs", headers={"Origin": origin, "Sec-Fetch-Site": "same-origin"})).status == 200


async def test_a_link_from_elsewhere_opens_the_page_and_nothing_else(n1):
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await n1.client.get("/", headers=headers)).status == 200
    assert (await n1.ask("GET", "/v1/jobs", headers=headers)).status == 403


@pytest.mark.parametrize("host", ["n1", "N1:7433", "localhost:1", "127.0.0.1", "127.9.9.9:80", "[::1]:7433", "n1."])
async def test_own_names_and_loopback_are_accepted(n1, host):
    assert (await n1.ask("GET", "/v1/members", headers={"Host": host})).status == 200


@pytest.mark.parametrize("host", ["", "10.1.2.3", "n1.attacker.example", "user@localhost", "localhost/x", "[::1", "n2"])
async def test_other_hosts_are_refused(host):
    guard = Guard(("t",), frozenset({"n1", "localhost"}))
    with pytest.raises(Problem) as caught:
        guard.check_host(host, "10.0.0.5")
    assert caught.value.code == "wrong_host"


async def test_the_address_of_the_connection_is_accepted():
    Guard(("t",), frozenset()).check_host("10.0.0.5:7433", "10.0.0.5")


async def test_configured_names_are_known(swarm):
    config = swarm.add("gpu1").config
    assert {"gpu1", "localhost", "127.0.0.1"} <= known_hosts(config)


def test_host_name_drops_port_brackets_and_case():
    assert (host_name("GPU1:80"), host_name("[::1]:80"), host_name("a:b:c")) == ("gpu1", "::1", None)


def test_the_document_marks_public_operations():
    assert openapi_document((), "1")["security"] == [{"token": []}]
