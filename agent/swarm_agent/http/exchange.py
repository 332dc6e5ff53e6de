"""A request and its answer without the web framework, so that a forwarded request runs the same handlers."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from swarm_agent.http.principal import NOBODY, Principal
from swarm_agent.http.problem import Problem, bad_parameter, invalid, refuse_unknown
from swarmsched.fields import is_text

JSON_TYPE = "application/json"
NDJSON_TYPE = "application/x-ndjson"
SSE_TYPE = "text/event-stream"
BODY_STALL_S = 60.0

T = TypeVar("T")
E = TypeVar("E")
Document = dict[str, Any]
"""A JSON object."""


async def no_stream() -> AsyncIterator[bytes]:
    """The stream of a request that has none."""
    chunks: tuple[bytes, ...] = ()
    for chunk in chunks:
        yield chunk


async def limited(chunks: AsyncIterator[bytes], limit_bytes: int, remedy: str = "") -> AsyncIterator[bytes]:
    """The chunks of a body; `Problem` once they are too many, or none comes for a minute."""
    size_bytes = 0
    while (chunk := await _next_of(chunks)) is not None:
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            raise Problem("too_large", f"the body has more than {limit_bytes} bytes", remedy)
        yield chunk


async def _next_of(chunks: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(BODY_STALL_S):
            return await anext(chunks, None)
    except TimeoutError as error:
        raise Problem("request_timeout", f"nothing of the body came for {BODY_STALL_S:g} s") from error


@dataclass(frozen=True, slots=True)
class Call:
    """One request.  `hops` counts agents that passed it on; header names are lower case."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    request_id: str = ""
    hops: int = 0
    stream: AsyncIterator[bytes] = field(default_factory=no_stream)
    principal: Principal = NOBODY

    def json(self, *known: str) -> dict[str, Any]:
        """The body as an object with some of the `known` keys and no others; an empty body is an empty object."""
        if not self.body:
            return {}
        try:
            document = json.loads(self.body)
            json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            pointer = next(_not_utf8(document, ""), "")
            raise invalid(pointer, "is not UTF-8 (a lone surrogate)", "use text in UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise Problem("bad_json", f"the body is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise Problem("bad_json", f"the body must be an object, not {type(document).__name__}")
        refuse_unknown(document, known)
        return document


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What goes back.  A body that is an iterator is streamed as it comes; `heartbeat` is sent in its silences."""

    status: int
    body: bytes | AsyncIterator[bytes] = b""
    content_type: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)
    heartbeat: bytes = b""


Handler = Callable[[Call], Awaitable[HttpReply]]


def boolean(key: str, value: object) -> bool:
    """A key of a body that is true or false."""
    if not isinstance(value, bool):
        raise invalid(f"/{key}", f"{value!r} is neither true nor false", "use true or false")
    return value


def _not_utf8(value: object, pointer: str) -> Iterator[str]:
    """Where the texts are that cannot be encoded."""
    if isinstance(value, str) and not is_text(value):
        yield pointer
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _not_utf8(each, f"{pointer}/{index}")
    if isinstance(value, dict):
        for name, each in value.items():
            shown = name.encode("utf-8", "backslashreplace").decode()
            if shown != name:
                yield f"{pointer}/{shown}"
            yield from _not_utf8(each, f"{pointer}/{shown}")


def encode_cursor(document: object) -> str:
    """Opaque text without line breaks."""
    return base64.urlsafe_b64encode(json.dumps(document, separators=(",", ":")).encode()).decode().rstrip("=")


def decode_cursor(text: str, shape: type[T], empty: E) -> T | E:
    """Inverse of `encode_cursor`, or `empty` where there is no text; `Problem` for what is not of that shape."""
    if not text:
        return empty
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=shape)
    except ValueError as error:
        remedy = "use the cursor of a record, or next_cursor"
        raise bad_parameter("cursor", "is not one that this API gave", remedy) from error


def encode(document: object) -> bytes:
    """Compact JSON in UTF-8 of a struct, or of what JSON is made of, with structs in it."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=msgspec.to_builtins)
    return text.encode("utf-8", "replace")


def as_object(document: msgspec.Struct) -> Document:
    """A struct as a JSON object, to be sent to another agent."""
    told: Document = msgspec.to_builtins(document)
    return told


def answer(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpReply:
    """A JSON answer."""
    return HttpReply(status, encode(document), headers=headers or {})
