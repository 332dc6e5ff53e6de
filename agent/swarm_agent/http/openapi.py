"""/openapi.json: OpenAPI 3.1, made from the table of routes and the schemas."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from swarm_agent.http.components import schemas
from swarm_agent.http.exchange import JSON_TYPE
from swarm_agent.http.parameter import Parameter
from swarm_agent.http.problem import CONTENT_TYPE, KINDS
from swarm_agent.http.routes import Reply, Route
from swarm_agent.http.schema import ref

GENERAL_PROBLEMS = ("wrong_host", "cross_origin", "unknown_parameter", "internal")
DESCRIPTION = "Every agent of a swarm serves this API, and any agent answers any request."
TAGS = {
    **dict.fromkeys(("tickets", "jobs", "queues"), "jobs"),
    **dict.fromkeys(("nodes", "gpus", "members", "events", "config", "status"), "nodes"),
    "blobs": "blobs",
}
"""By the first word of a path under /v1; the rest is for monitors and browsers."""

PATH_PARAMETER = re.compile(r"\{([a-z0-9]+)\}")


def openapi_document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "swarmsched", "version": version, "description": DESCRIPTION},
        "paths": paths,
        "security": [{"token": []}],
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def problem_codes(route: Route) -> tuple[str, ...]:
    """Every kind of problem that the route may answer."""
    codes = [*route.problems, *GENERAL_PROBLEMS]
    if route.right is not None:
        codes += ["unauthorised", "forbidden"]
    if route.parameters:
        codes += ["bad_parameter", *(each.code for each in route.parameters)]
    if route.body:
        codes += ["bad_json", "too_large", "request_timeout", "unsupported_media_type", "invalid"]
    if route.stream_type:
        codes += ["too_large", "request_timeout"]
    return tuple(dict.fromkeys(codes))


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "tags": [TAGS.get(f"{route.path}//".split("/")[2], "health")],
        "parameters": [*map(_path_parameter, PATH_PARAMETER.findall(route.path)), *map(_parameter, route.parameters)],
        "responses": _responses(route),
    }
    if route.right is None:
        operation["security"] = []
    else:
        operation["x-right"] = route.right.value
    if route.body or route.stream_type:
        operation["requestBody"] = _request_body(route)
    return operation


def _request_body(route: Route) -> dict[str, Any]:
    content = {JSON_TYPE: {"schema": ref(route.body)}} if route.body else {route.stream_type: {}}
    return {"required": route.is_body_required, "content": content}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _parameter(parameter: Parameter[Any]) -> dict[str, Any]:
    told = {"name": parameter.name, "in": parameter.place, "description": parameter.text}
    return {**told, "schema": parameter.schema}


def _responses(route: Route) -> dict[str, Any]:
    responses = {str(reply.status): _success(reply) for reply in route.replies}
    by_status: dict[int, list[str]] = {}
    for code in problem_codes(route):
        by_status.setdefault(KINDS[code].status, []).append(code)
    for status, codes in sorted(by_status.items()):
        text = "; ".join(f"{code}: {KINDS[code].title}" for code in codes)
        content = {CONTENT_TYPE: {"schema": ref("Problem")}}
        known = responses.get(str(status))
        if known is None:
            responses[str(status)] = {"description": text, "content": content, "headers": _headers(())}
        else:
            known["content"].update(content)
    return responses


def _success(reply: Reply) -> dict[str, Any]:
    schema: Mapping[str, Any] = {"schema": ref(reply.schema)} if reply.schema else {}
    content = {each: dict(schema) for each in reply.content_types}
    return {"description": reply.text, "content": content, "headers": _headers(reply.headers)}


def _headers(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: {"schema": {"type": "string"}} for name in ("X-Swarm-Node", "X-Request-Id", *names)}
