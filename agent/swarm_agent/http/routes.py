"""The table of routes: what the server serves, what /openapi.json says, and what may be forwarded, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from swarm_agent.http.exchange import Handler


class BodyKind(Enum):
    """What a route's request body is."""

    NONE = "none"
    JSON = "json"
    STREAM = "stream"  # handed to the handler as it comes, with limits of its own


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or header: JSON Schema type and a sentence."""

    name: str
    schema: str
    text: str
    place: str = "query"


@dataclass(frozen=True, slots=True)
class Reply:
    """A documented success: a name in the schemas, or a content type without one."""

    schema: str = ""
    content_types: tuple[str, ...] = ("application/json",)
    text: str = "done"
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """One operation.  `path` has `{name}` parts; `problems` are codes that it may answer besides the general ones."""

    method: str
    path: str
    handler: Handler
    operation: str
    summary: str
    tag: str
    replies: Mapping[int, Reply]
    parameters: tuple[Parameter, ...] = ()
    body: BodyKind = BodyKind.NONE
    body_schema: str = ""
    body_type: str = "application/json"
    is_body_required: bool = True
    problems: tuple[str, ...] = ()
    is_public: bool = False


def match(routes: Mapping[tuple[str, str], Route], method: str, path: str) -> tuple[Route, dict[str, str]] | None:
    """The route of a forwarded path and its parameters; forwarded paths are few and short, so this may be plain."""
    parts = path.split("/")
    for (known_method, pattern), route in routes.items():
        names = pattern.split("/")
        if known_method != method or len(names) != len(parts):
            continue
        params = {}
        for name, part in zip(names, parts, strict=True):
            if name.startswith("{") and part:
                params[name[1:-1]] = part
            elif name != part:
                break
        else:
            return route, params
    return None
