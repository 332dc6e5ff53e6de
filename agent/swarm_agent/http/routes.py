"""What a route is: one row of the table that the server serves, /openapi.json tells, and forwarding looks up."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarm_agent.http.exchange import JSON_TYPE, NDJSON_TYPE, Handler
from swarm_agent.http.parameter import Parameter
from swarm_agent.http.principal import Principal, Right
from swarm_agent.http.problem import Problem, bad_parameter, refuse_unknown, refused_parameters
from swarmsched.api import KEY_SHOWN, PROBLEMS_LIMIT

UNKNOWN = "unknown_parameter"
SAFE_METHODS = ("GET", "HEAD")
QUERY_CODES = (UNKNOWN, "bad_parameter", "unknown_field")
"""Of mistakes in a query, the gravest first."""


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
    `reserved` is no value of the last part, since a path of its own ends with it.

    A body is JSON by the schema `body`, or else of `stream_type` and handed to the handler as it comes, with limits of
    its own.  The operation's id is the handler's name in camel case, unless one is given.

    `right` is what a principal needs for it; None: nothing, not even a token.  `only_adds`: nothing that is there
    already becomes another one.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    replies: tuple[Reply, ...]
    parameters: tuple[Parameter[Any], ...] = ()
    body: str = ""
    stream_type: str = ""
    is_body_required: bool = True
    problems: tuple[str, ...] = ()
    right: Right | None = Right.VIEW
    only_adds: bool = False
    given_id: str = ""
    reserved: str = ""

    @property
    def is_audited(self) -> bool:
        """True where it changes what is there already."""
        return self.method not in SAFE_METHODS and not self.only_adds

    def check_right(self, principal: Principal) -> None:
        """Raises `Problem` forbidden for one who has not the right that it needs."""
        if self.right is not None and self.right not in principal.rights:
            what = f"the right {self.right.value!r}, which {self.method} {self.path} needs"
            raise Problem("forbidden", f"{principal.name or 'whoever asks'} has not {what}")

    @property
    def pattern(self) -> str:
        """The path as aiohttp matches it."""
        return f"{self.path.removesuffix('}')}:(?!{self.reserved}$)[^{{}}/]+}}" if self.reserved else self.path

    @property
    def operation_id(self) -> str:
        """What generated clients call it."""
        first, *others = self.handler.__name__.split("_")
        return self.given_id or first + "".join(word.title() for word in others)

    @property
    def is_streamed(self) -> bool:
        """True where the answer may go on for ever."""
        return any(NDJSON_TYPE in reply.content_types for reply in self.replies)

    def read_query(self, given: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Each parameter once.  All that cannot be used are refused in one answer, by the code of the gravest mistake.

        A misspelt filter would silently show too much, and of two values of one name one would silently be lost.
        """
        query, twice = _once(given)
        known = {each.name: each for each in self.parameters if each.place == "query"}
        remedy = f"this route takes: {', '.join(known)}" if known else "this route takes none"
        checks: list[Callable[[], object]] = [lambda: refuse_unknown(query, list(known), UNKNOWN, "?", remedy)]
        checks += [partial(_refuse_second, name) for name in twice]
        checks += [partial(each.read, query[each.name]) for each in known.values() if each.name in query]
        problems = [problem for problem in map(_problem_of, checks) if problem is not None]
        if problems:
            code = min((problem.code for problem in problems), key=QUERY_CODES.index)
            raise refused_parameters(code, [field for each in problems for field in each.errors][:PROBLEMS_LIMIT])
        return query


def _once(given: Iterable[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Values by name, and the names that are there again."""
    query: dict[str, str] = {}
    twice: list[str] = []
    for name, value in given:
        if name not in query:
            query[name] = value
        elif name not in twice:
            twice.append(name)
    return query, twice


def _refuse_second(name: str) -> None:
    raise bad_parameter(name[:KEY_SHOWN], "is there twice", "give it once, several values with commas")


def _problem_of(check: Callable[[], object]) -> Problem | None:
    try:
        check()
    except Problem as problem:
        return problem
    return None


def match(routes: Iterable[Route], method: str, path: str) -> tuple[Route, Mapping[str, str]] | None:
    """The route of a forwarded path and its parameters; forwarded paths are few and short, so this may be plain."""
    for route in routes:
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.path.replace(".", r"\."))
        found = re.fullmatch(pattern, path) if route.method == method else None
        if found:
            return route, found.groupdict()
    return None
