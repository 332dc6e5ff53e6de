"""/openapi.json: OpenAPI 3.1, made from the table of routes and the schemas."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from swarm_agent.http.problem import CONTENT_TYPE, KINDS
from swarm_agent.http.routes import BodyKind, Parameter, Reply, Route
from swarm_agent.http.schema import ref, schemas

GENERAL_PROBLEMS = ("wrong_host", "cross_origin", "internal")
DESCRIPTION = "Every agent of a swarm serves this API, and any agent answers any request."
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
    if not route.is_public:
        codes.append("unauthorised")
    if route.parameters:
        codes.append("bad_parameter")
    if route.body is BodyKind.JSON:
        codes += ["bad_json", "too_large", "unsupported_media_type", "invalid"]
    if route.body is BodyKind.STREAM:
        codes.append("too_large")
    return tuple(dict.fromkeys(codes))


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [_path_parameter(name) for name in PATH_PARAMETER.findall(route.path)]
        + [_parameter(each) for each in route.parameters],
        "responses": _responses(route),
    }
    if route.is_public:
        operation["security"] = []
    if route.body is not BodyKind.NONE:
        operation["requestBody"] = _request_body(route)
    return operation


def _request_body(route: Route) -> dict[str, Any]:
    content = {"schema": ref(route.body_schema)} if route.body_schema else {}
    return {"required": route.is_body_required, "content": {route.body_type: content}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.text,
        "schema": {"type": parameter.schema},
    }


def _responses(route: Route) -> dict[str, Any]:
    responses = {str(status): _success(reply) for status, reply in sorted(route.replies.items())}
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
