"""Problems: one table, documented, and used for the refusals of aiohttp as well."""

from pathlib import Path

import pytest

from swarm_agent.http.problem import KINDS, Problem

DOCUMENT = Path(__file__).parents[3] / "docs" / "errors.md"


def test_every_kind_is_documented_with_its_status():
    text = DOCUMENT.read_text()
    for code, kind in KINDS.items():
        assert f"| {kind.status} | `{code}` | {kind.title} |" in text, code


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
        ("GET", "/v1/jobs?cursor=zzz", 400, "bad_parameter"),
        ("GET", "/v1/events?since=yesterday", 400, "bad_parameter"),
        ("GET", "/v1/events?cursor=e30h", 400, "bad_parameter"),
    ],
)
async def test_refusals_are_problem_documents(n1, method, path, status, code):
    response = await n1.ask(method, path)
    assert response.status == status, await response.text()
    document = await response.json(content_type=None)
    assert response.content_type == "application/problem+json"
    assert (document["code"], document["status"], document["type"]) == (code, status, f"/errors/{code}")
    assert document["remedy"]


async def test_405_lists_the_methods(n1):
    response = await n1.ask("PATCH", "/v1/config")
    assert response.headers["Allow"] == "GET, HEAD, PUT"


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
