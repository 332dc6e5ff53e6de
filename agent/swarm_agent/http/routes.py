"""What a route is: one row of the table that the server serves, /openapi.json tells, and forwarding looks up."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm_agent.http.exchange import JSON_TYPE, NDJSON_TYPE, Handler
from swarm_agent.http.problem import refuse_unknown


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
    content_types: tuple[str, ...] = (JSON_TYPE,)
    text: str = "done"
    headers: tuple[str, ...] = ()
    status: int = 200


@dataclass(frozen=True, slots=True)
class Route:
    """One operation.  `path` has `{name}` parts; `problems` are codes that it may answer besides the general ones.

    A body is JSON by the schema `body`, or else of `stream_type` and handed to the handler as it comes, with limits of
    its own.  The operation's id is the handler's name in camel case, unless one is given.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    replies: tuple[Reply, ...]
    parameters: tuple[Parameter, ...] = ()
    body: str = ""
    stream_type: str = ""
    is_body_required: bool = True
    problems: tuple[str, ...] = ()
    is_public: bool = False
    given_id: str = ""

    @property
    def operation_id(self) -> str:
        """What generated clients call it."""
        first, *others = self.handler.__name__.split("_")
        return self.given_id or first + "".join(word.title() for word in others)

    @property
    def is_streamed(self) -> bool:
        """True where the answer may go on for ever."""
        return any(NDJSON_TYPE in reply.content_types for reply in self.replies)

    def check_query(self, names: Iterable[str]) -> None:
        """Refuse parameters that it does not take: a misspelt filter would silently show too much."""
        known = [each.name for each in self.parameters if each.place == "query"]
        remedy = f"this route takes: {', '.join(known)}" if known else "this route takes none"
        refuse_unknown(names, known, "unknown_parameter", "?", remedy)


def match(routes: Iterable[Route], method: str, path: str) -> tuple[Route, Mapping[str, str]] | None:
    """The route of a forwarded path and its parameters; forwarded paths are few and short, so this may be plain."""
    for route in routes:
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.path.replace(".", r"\."))
        found = re.fullmatch(pattern, path) if route.method == method else None
        if found:
            return route, found.groupdict()
    return None
