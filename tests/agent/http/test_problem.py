"""Problems: one table, documented, and used for the refusals of aiohttp as well."""

import base64

import pytest

from swarm_agent.http.problem import Problem
from swarmsched.api import PROBLEMS_LIMIT
from tests.agent.http.testing import a_record, job_id


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("GET", "/errors/nosuch", 404, "not_found"),
        ("PATCH", "/v1/jobs", 405, "method_not_allowed"),
        ("DELETE", "/v1/members/prometheus", 404, "unknown_node"),
        ("GET", "/v1/jobs/x%2F..%2F..%2Fetc", 404, "unknown_job"),
        ("GET", "/v1/jobs?limit=ten", 400, "bad_parameter"),
        ("GET", "/v1/jobs?limit=5&limit=6", 400, "bad_parameter"),
        ("GET", "/v1/jobs?state=runing", 400, "bad_parameter"),
        ("GET", "/v1/jobs/x/wait?for=ever", 400, "bad_parameter"),
        ("GET", "/v1/jobs/x/logs?rank=one", 400, "bad_parameter"),
        ("GET", f"/v1/jobs/x/logs?rank={'9' * 5_000}", 400, "bad_parameter"),
        ("GET", "/v1/jobs?cursor=zzz", 400, "bad_parameter"),
        ("GET", "/v1/events?since=yesterday", 400, "bad_parameter"),
        ("GET", "/v1/events?cursor=e30h", 400, "bad_parameter"),
        ("GET", "/v1/nodes?fields=name", 422, "unknown_parameter"),
        ("GET", "/v1/jobs/x?If-Match=1", 422, "unknown_parameter"),
        ("POST", "/v1/jobs/x/cancel?grace_seconds=3", 422, "unknown_parameter"),
        ("GET", "/livez?verbose", 422, "unknown_parameter"),
    ],
)
async def test_refusals_are_problem_documents(n1, method, path, status, code):
    response = await n1.ask(method, path)
    assert response.status == status, await response.text()
    document = await response.json(content_type=None)
    assert response.content_type == "application/problem+json"
    assert (document["code"], document["status"], document["type"]) == (code, status, f"/errors/{code}")
    assert document["remedy"]


async def test_a_misspelt_parameter_is_told_with_those_that_the_route_takes(n1):
    document = await n1.get("/v1/jobs/x/why?usr=jane&x=1", 422)
    assert document["detail"] == "usr: unknown parameter; did you mean 'user'?; x: unknown parameter"
    assert [each["pointer"] for each in document["errors"]] == ["?usr", "?x"]
    assert document["remedy"] == "this route takes: user"
    assert (await n1.get("/v1/nodes?x=1", 422))["remedy"] == "this route takes none"


@pytest.mark.parametrize("path", ["/v1/jobs", f"/v1/jobs/{job_id(1)}"])
async def test_unknown_names_of_fields_are_told_with_the_nearest_and_those_that_there_are(n1, path):
    n1.agent.put(a_record(job_id(1), "n1"))
    document = await n1.get(f"{path}?fields=stat,name,xyz", 422)
    assert document["code"] == "unknown_field"
    assert document["detail"] == "fields: 'stat' is not known; did you mean 'state'?; fields: 'xyz' is not known"
    assert [each["pointer"] for each in document["errors"]] == ["?fields", "?fields"]
    known = document["remedy"].removeprefix("one or more of: ").split(", ")
    assert set(known) == (await n1.get(f"/v1/jobs/{job_id(1)}")).keys()


async def test_each_key_of_a_job_is_a_field(n1):
    n1.agent.put(a_record(job_id(1), "n1"))
    whole = await n1.get(f"/v1/jobs/{job_id(1)}")
    assert (await n1.get(f"/v1/jobs/{job_id(1)}?fields={','.join(whole)}")).keys() == whole.keys()


async def test_all_mistakes_in_a_query_are_told_at_once(n1):
    document = await n1.get("/v1/jobs?limit=0&state=runing,x&all=perhaps&cursor=zzz&fields=stat&name=a", 400)
    assert document["code"] == "bad_parameter"
    pointers = ["?all", "?state", "?state", "?limit", "?cursor", "?fields"]
    assert [each["pointer"] for each in document["errors"]] == pointers
    assert document["errors"][3]["remedy"] == "a number from 1 to 1000"
    assert "state: 'runing' is not known; did you mean 'running'?" in document["detail"]


async def test_the_code_of_several_mistakes_is_that_of_the_gravest(n1):
    document = await n1.get("/v1/jobs?fields=stat&limit=0&stat=queued&name=a&name=a", 422)
    assert document["code"] == "unknown_parameter"
    assert [each["pointer"] for each in document["errors"]] == ["?stat", "?name", "?limit", "?fields"]


async def test_of_countless_mistakes_the_first_are_told(n1):
    fields = ",".join(f"x{number}" for number in range(200))
    document = await n1.get(f"/v1/jobs?fields={fields}", 422)
    assert len(document["errors"]) == PROBLEMS_LIMIT


async def test_405_lists_the_methods(n1):
    response = await n1.ask("PATCH", "/v1/config")
    assert response.headers["Allow"] == "GET, HEAD, PUT"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH"])
async def test_a_path_of_its_own_does_not_take_the_methods_of_a_blob(n1, method):
    response = await n1.ask(method, "/v1/blobs/missing")
    assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert (await n1.ask("HEAD", "/v1/blobs/missing2")).status == 404


async def test_a_fault_of_ours_is_told_without_its_details(n1, caplog):
    def broken():
        raise RuntimeError("the secret inside")

    n1.agent.setting = broken
    response = await n1.ask("GET", "/v1/config", headers={"X-Request-Id": "abc-1"})
    document = await response.json(content_type=None)
    assert (response.status, document["code"], document["instance"]) == (500, "internal", "abc-1")
    assert "secret inside" not in str(document)
    assert "abc-1" in caplog.text


async def test_a_request_id_that_could_forge_a_log_line_is_replaced(n1):
    response = await n1.ask("GET", "/livez", headers={"X-Request-Id": "a b=c"})
    assert response.headers["X-Request-Id"] != "a b=c"


def test_retry_after_goes_with_busy_answers_only():
    assert Problem("not_ready", "x").all_headers() == {"Retry-After": "1"}
    assert Problem("invalid", "x").all_headers() == {}


HOSTILE_BODIES = [
    rb'{"\ud800": 1}',
    rb'{"spec": {"\ud800": 1}}',
    rb'{"spec": {"command": ["echo", "\udcff"], "ranks": 1}}',
    rb'{"spec": {"command": ["a"], "env": {"\udcff": "\udcff"}}}',
    b'{"spec": {"command": ["a"], "name": "\xed\xa0\x80"}}',  # a surrogate in what looks like UTF-8
    rb'{"reason": "caf\udce9"}',
    rb'{"policy": "fifo", "parameters": {"\udcff": 1}}',
    b'{"policy": "las", "parameters": {"queues": 1e400}}',
    b'{"grace_seconds": NaN}',
    b'{"signal": ' + b"9" * 5_000 + b"}",
    b'{"a": ' * 20_000,
    b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
    b"\xff\xfe\x00",
]
JSON_ROUTES = ["/v1/tickets", "/v1/jobs", "/v1/jobs/x/cancel", "/v1/jobs/x/signal", "/v1/jobs/x/recover", "/v1/config"]


@pytest.mark.parametrize("path", JSON_ROUTES)
@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=range(len(HOSTILE_BODIES)))
async def test_a_body_that_cannot_be_stored_is_refused_and_never_a_fault_of_ours(n1, path, body):
    response = await n1.ask(
        "PUT" if path == "/v1/config" else "POST", path, data=body, headers={"Content-Type": "application/json"}
    )
    document = await response.json(content_type=None)
    assert response.status in (400, 422), document
    assert document["remedy"]
    if rb"\ud" in body:
        assert (document["code"], len(document["errors"])) == ("invalid", 1)
        assert document["errors"][0]["detail"] == "is not UTF-8 (a lone surrogate)"


HOSTILE_CURSORS = [
    "[Infinity,{}]",
    "[1e400,{}]",
    "[NaN,{}]",
    "[" * 3_000,
    "[1e30,{}]",
    '[1,{"0":"zz"}]',
    '[1,{"9999999999":"0.0"}]',
    '[1,{"-1":"0.0"}]',
    '{"n1":["a",1e400]}',
    '{"n1":["a",100000000000000000000]}',
    r'{"n1":["\ud800",1]}',
    r'["\ud800","x"]',
    r'{"\ud800":["a",1]}',
    "\xff",
]


@pytest.mark.parametrize("cursor", HOSTILE_CURSORS, ids=range(len(HOSTILE_CURSORS)))
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/events", "/v1/jobs/{job}/logs"])
async def test_a_cursor_that_this_api_never_gave_is_refused(n1, path, cursor):
    record = n1.agent.put(a_record(job_id(1), "n1"))
    path = path.format(job=record.job_id)
    opaque = base64.urlsafe_b64encode(cursor.encode("latin-1")).decode()
    document = await n1.get(f"{path}?cursor={opaque}", 400)
    assert (document["code"], document["errors"][0]["pointer"]) == ("bad_parameter", "?cursor")
    if path != "/v1/jobs":
        refused = await n1.ask("GET", path, headers={"Last-Event-ID": opaque})
        assert refused.status == 400
