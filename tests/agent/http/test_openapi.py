"""The OpenAPI document is valid, and every success that it promises was seen and matches its schema."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from swarm_agent.http.blobs import PACK_TYPE
from swarm_agent.http.problem import CONTENT_TYPE, KINDS
from swarm_agent.http.spec_schema import asked_spec
from swarm_agent.supervision.kept_work import KeptFolder
from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.effects import Announce
from swarmsched.errors import JobRejected
from swarmsched.ids import NodeId
from swarmsched.specification import BY_GPU, FIELDS
from tests.agent.http.testing import a_record, job_id


def digest_of(data):
    return hashlib.sha256(data).hexdigest()


class Checker:
    """Holds answers against the document and remembers which promises were kept."""

    def __init__(self, desk, document):
        self.desk, self.document, self.seen = desk, document, set()

    async def check(self, method, pattern, status=200, *, path="", query="", kind="application/json", **more):
        response = await self.desk.ask(method, (path or pattern) + query, **more)
        body = await response.read()
        assert response.status == status, body
        promised = self.document["paths"][pattern][method.lower()]["responses"][str(status)]
        for header in promised["headers"]:
            assert header in response.headers, (pattern, header)
        assert response.content_type in promised["content"], (pattern, response.content_type)
        assert response.content_type == kind
        self.hold(promised["content"][kind].get("schema"), body, kind)
        self.seen.add((method.lower(), pattern, status))
        return response, body

    def hold(self, schema, body, kind):
        if schema is None:
            return
        documents = {
            "application/x-ndjson": lambda: [json.loads(line) for line in body.splitlines() if line],
            "text/event-stream": lambda: [
                json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ")
            ],
        }.get(kind, lambda: [json.loads(body)])()
        assert documents
        validator = Draft202012Validator({**schema, "components": self.document["components"]})
        for document in documents:
            validator.validate(document)

    def promised(self):
        return {
            (method, path, int(status))
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
            for status in operation["responses"]
            if int(status) < 400
        }


@pytest.fixture
async def checker(n1):
    return Checker(n1, await n1.get("/openapi.json"))


async def test_the_document_is_valid_openapi(checker):
    validate(checker.document)
    assert checker.document["openapi"] == "3.1.0"


async def test_every_promised_success_is_kept(checker, n1, swarm, output, tmp_path):
    job = "/v1/jobs/{job}"
    spec = {"command": ["true"], "name": "first"}
    await checker.check("POST", "/v1/tickets")
    _, body = await checker.check("POST", "/v1/jobs", 201, json={"spec": spec})
    found = json.loads(body)["id"]
    await checker.check("POST", "/v1/jobs", 200, json={"spec": spec, "dry_run": True})
    await checker.check("GET", "/v1/jobs", query="?all=1")
    await checker.check("GET", "/v1/jobs", query="?fields=state")
    await checker.check("GET", job, path=f"/v1/jobs/{found}")
    await checker.check("GET", f"{job}/why", path=f"/v1/jobs/{found}/why")
    checker.desk.agent.kept_folders[found] = [KeptFolder(1, Path("/d/jobs/x/1/work"), 7, 1.8e9)]
    await checker.check("GET", f"{job}/left", path=f"/v1/jobs/{found}/left")
    await checker.check("GET", f"{job}/wait", path=f"/v1/jobs/{found}/wait", query="?timeout=0.01")
    n1.agent.put(a_record(found, "n1", nodes=(("n1", 1),), state=JobState.RUNNING, started_utc_s=1.7e9))
    output(n1.agent).write(found, 0, b"hello\n")
    output(n1.agent).write(found, 0, b"\xff\n", kind=b"e")
    logs = f"{job}/logs"
    await checker.check("GET", logs, path=f"/v1/jobs/{found}/logs", kind="application/x-ndjson")
    await checker.check("POST", f"{job}/signal", 202, path=f"/v1/jobs/{found}/signal", json={"signal": "INT"})
    await checker.check("POST", f"{job}/scale", 202, path=f"/v1/jobs/{found}/scale", json={"ranks": 1})
    await checker.check("POST", f"{job}/migrate", 202, path=f"/v1/jobs/{found}/migrate", json={"avoid": ["n1"]})
    await checker.check("POST", f"{job}/cancel", 202, path=f"/v1/jobs/{found}/cancel", json={"grace_seconds": 1})
    await checker.check("POST", f"{job}/recover", 202, path=f"/v1/jobs/{found}/recover", json={"force": True})
    await checker.check("DELETE", job, 202, path=f"/v1/jobs/{found}")
    n1.agent.change(found, state=JobState.ENDED, ended_utc_s=1.7e9 + 5, signal=9, end_reason=EndReason.CANCELLED)
    events = {"headers": {"Accept": "text/event-stream"}, "kind": "text/event-stream"}
    await checker.check("GET", logs, path=f"/v1/jobs/{found}/logs", query="?follow=1", **events)
    await checker.check("GET", job, path=f"/v1/jobs/{found}")

    for path in ("/v1/nodes", "/v1/gpus", "/v1/queues", "/v1/members", "/v1/members/prometheus", "/v1/status"):
        await checker.check("GET", path)
    await checker.check("GET", "/v1/nodes/{node}", path="/v1/nodes/n2")
    await checker.check("PUT", "/v1/nodes/{node}/drain", path="/v1/nodes/n2/drain", json={"draining": True})
    swarm.statuses[NodeId("n3")] = "failed"
    await checker.check("DELETE", "/v1/members/{node}", path="/v1/members/n3")
    n1.agent.events.append(Announce("job.ended", "it ended", found, NodeId("n1"), {"exit_code": 0}), 1.7e9)
    await checker.check("GET", "/v1/events")
    await checker.check("GET", "/v1/config")
    await checker.check("PUT", "/v1/config", json={"policy": "las", "parameters": {"queues": 2}})
    await checker.check("GET", "/v1/doctor")

    data = b"content"
    blob = f"/v1/blobs/{digest_of(data)}"
    await checker.check("POST", "/v1/blobs/missing", json={"digests": [digest_of(data)]})
    await checker.check("PUT", "/v1/blobs/{sha256}", 201, path=blob, data=data)
    await checker.check("PUT", "/v1/blobs/{sha256}", 200, path=blob, data=data)
    await checker.check("HEAD", "/v1/blobs/{sha256}", path=blob, kind="application/octet-stream")
    pack = bytes.fromhex(digest_of(b"x")) + (1).to_bytes(8, "big") + b"x"
    await checker.check("POST", "/v1/blobs", data=pack, headers={"Content-Type": PACK_TYPE})

    for path in ("/livez", "/readyz", "/healthz"):
        await checker.check("GET", path, kind="text/plain")
    await checker.check("GET", "/metrics", kind="text/plain")
    await checker.check("GET", "/metrics/jobs", kind="text/plain")
    await checker.check("GET", "/errors/{code}", path="/errors/invalid", kind="text/plain")
    await checker.check("GET", "/openapi.json")
    await checker.check("GET", "/", kind="text/html")

    unseen = checker.promised() - checker.seen
    assert unseen == set()


async def test_a_card_is_a_job_document_too(checker, n1, swarm):
    from tests.agent.http.testing import a_card

    record = a_record(job_id(1), "n9")
    n1.agent.known_cards = [a_card(record)]
    await checker.check("GET", "/v1/jobs/{job}", path=f"/v1/jobs/{record.job_id}")


async def test_problems_match_their_schema_and_are_promised(checker, n1):
    cases: list[tuple[str, str, str, dict[str, Any]]] = [
        ("GET", "/v1/jobs/{job}", "/v1/jobs/nosuch", {}),
        ("GET", "/v1/nodes/{node}", "/v1/nodes/n9", {}),
        ("POST", "/v1/jobs", "/v1/jobs", {"json": {"spec": {"command": []}}}),
        ("GET", "/v1/jobs", "/v1/jobs?limit=0", {}),
        ("PUT", "/v1/blobs/{sha256}", f"/v1/blobs/{'0' * 64}", {"data": b"x"}),
    ]
    for method, pattern, path, more in cases:
        response = await n1.ask(method, path, **more)
        document = await response.json(content_type=None)
        promised = checker.document["paths"][pattern][method.lower()]["responses"][str(response.status)]
        assert response.content_type == CONTENT_TYPE
        assert document["code"] in promised["description"]
        assert document["instance"] == response.headers["X-Request-Id"]
        checker.hold(promised["content"][CONTENT_TYPE]["schema"], json.dumps(document).encode(), CONTENT_TYPE)


async def test_every_kind_of_problem_is_explained_at_its_type(n1):
    for code, kind in KINDS.items():
        response = await n1.client.get(f"/errors/{code}")
        assert response.status == 200
        assert kind.title in await response.text()


def beyond(schema):
    """A value that is just beyond a limit of the schema, for each limit that it has."""
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1)
    if "maxItems" in schema:
        yield [f"x{number}" for number in range(schema["maxItems"] + 1)]
    if "maxProperties" in schema:
        yield {f"X{number}": "" for number in range(schema["maxProperties"] + 1)}
    for each in schema.get("anyOf", [])[:1]:
        least = {name: each["properties"][name]["minimum"] for name in each["required"]}
        for name, figure in each["properties"].items():
            yield from ({**least, name: value} for value in beyond(figure))


SPEC = asked_spec()["properties"]


@pytest.mark.parametrize("key", SPEC)
def test_what_is_beyond_a_documented_limit_of_a_specification_is_refused(key):
    wrong = list(beyond(SPEC[key]))
    assert wrong or SPEC[key].keys() & {"enum"} or SPEC[key]["type"] == "boolean", "every other key has a limit"
    for value in wrong:
        with pytest.raises(JobRejected) as caught:
            JobSpec.from_json({"command": ["true"], key: value})
        assert caught.value.problems[0].pointer.startswith(f"/{key}"), value


@pytest.mark.parametrize(
    "key", [row.key for row in FIELDS if "minimum" in SPEC[row.key] and row.by not in ("batch", "local_batch", "gpus")]
)
def test_the_documented_limits_of_a_number_are_taken(key):
    for value in (SPEC[key]["minimum"], SPEC[key]["maximum"]):
        assert JobSpec.from_json({"command": ["true"], key: value}).to_json()[key] == value


@pytest.mark.parametrize("limit", ["minimum", "maximum"])
def test_the_documented_limits_of_local_batches_by_class_are_taken(limit):
    most = SPEC[BY_GPU]["additionalProperties"][limit]
    told = {f"gpu {number}": most for number in range(SPEC[BY_GPU]["maxProperties"])}
    document = {"command": ["true"], "global_batch": 8, "local_batch_most": 8, BY_GPU: told}
    assert JobSpec.from_json(document).to_json()[BY_GPU] == told


@pytest.mark.parametrize("limit", ["minimum", "maximum"])
def test_the_documented_limits_of_a_model_are_taken(limit):
    work = {name: schema[limit] for name, schema in SPEC["work"]["anyOf"][0]["properties"].items()}
    assert JobSpec.from_json({"command": ["true"], "work": work}).work is not None


@pytest.mark.parametrize(
    ("method", "pattern", "path", "body"),
    [
        ("POST", "/v1/jobs/{job}/cancel", f"/v1/jobs/{job_id(1)}/cancel", {"reason": "x" * 200}),
        ("POST", "/v1/jobs/{job}/cancel", f"/v1/jobs/{job_id(1)}/cancel", {"reason": "x" * 201}),
        ("POST", "/v1/jobs/{job}/cancel", f"/v1/jobs/{job_id(1)}/cancel", {"grace_seconds": 86_400}),
        ("POST", "/v1/jobs/{job}/cancel", f"/v1/jobs/{job_id(1)}/cancel", {"grace_seconds": 86_401}),
        ("POST", "/v1/jobs/{job}/signal", f"/v1/jobs/{job_id(1)}/signal", {"signal": 64}),
        ("POST", "/v1/jobs/{job}/signal", f"/v1/jobs/{job_id(1)}/signal", {"signal": 65}),
        ("POST", "/v1/jobs/{job}/scale", f"/v1/jobs/{job_id(1)}/scale", {"ranks": 4_096, "ranks_most": 4_096}),
        ("POST", "/v1/jobs/{job}/scale", f"/v1/jobs/{job_id(1)}/scale", {"ranks": 4_097}),
        ("PUT", "/v1/nodes/{node}/drain", "/v1/nodes/n1/drain", {"draining": True, "reason": "x" * 200}),
        ("PUT", "/v1/nodes/{node}/drain", "/v1/nodes/n1/drain", {"draining": True, "reason": "x" * 201}),
        ("POST", "/v1/blobs/missing", "/v1/blobs/missing", {"digests": ["0" * 64] * 10_000}),
        ("POST", "/v1/blobs/missing", "/v1/blobs/missing", {"digests": ["0" * 64] * 10_001}),
        ("PUT", "/v1/config", "/v1/config", {"policy": "las", "elasticity": "advise"}),
        ("PUT", "/v1/config", "/v1/config", {"policy": "las", "elasticity": "perhaps"}),
    ],
    ids=range(14),
)
async def test_a_body_is_refused_where_the_document_forbids_it(checker, n1, method, pattern, path, body):
    n1.agent.put(a_record(job_id(1), "n1", nodes=(("n1", 1),), state=JobState.RUNNING, started_utc_s=1.7e9))
    content = checker.document["paths"][pattern][method.lower()]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": checker.document["components"]}
    response = await n1.ask(method, path, json=body)
    assert (response.status < 300) == Draft202012Validator(schema).is_valid(body), await response.text()
    assert response.status < 300 or response.status == 422


async def test_a_parameter_is_refused_beyond_its_documented_limits_and_taken_at_them(checker, n1):
    n1.agent.put(a_record(job_id(1), "n1", state=JobState.ENDED, end_reason=EndReason.COMPLETED, attempt=0))
    tried = 0
    for pattern, operations in checker.document["paths"].items():
        for parameter in operations.get("get", {}).get("parameters", []):
            schema, path = parameter["schema"], pattern.format(job=job_id(1), node="n1", code="invalid")
            for value in beyond(schema) if parameter["in"] == "query" else ():
                refusal = await n1.get(f"{path}?{parameter['name']}={value}", 400)
                assert [each["pointer"] for each in refusal["errors"]] == [f"?{parameter['name']}"]
                tried += 1
            for value in (schema["minimum"], schema["default"]) if "default" in schema and "minimum" in schema else ():
                response = await n1.ask("GET", f"{path}?{parameter['name']}={value}")
                assert response.status == 200, (path, parameter)
    assert tried >= 10
