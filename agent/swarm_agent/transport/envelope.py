"""What is inside a sealed body of the peer channel, and how it is read from and written to HTTP.

Plain text of every request: msgpack of [sender, recipient, content].  The sender's name is inside, so that only a
holder of the key can claim one; the recipient's is too, since an address may have passed to another node.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
from aiohttp import StreamReader, web

from swarmsched.errors import RemoteProtocolError
from swarmsched.ids import NodeId, is_node_name
from swarmsched.wire.sealing import Sealer

PREFIX = "/peer/v1"
REQUEST_BYTES_MAX = 16 * 2**20
ANSWER_BYTES_MAX = 64 * 2**20
CONTENT_TYPE = "application/vnd.swarmsched.sealed"
HEADERS = {"Content-Type": CONTENT_TYPE}


class WrongRecipient(Exception):
    """The request was meant for another node that had this address."""


@dataclass(frozen=True, slots=True)
class Request:
    """An opened request.  `context` binds the answer to it."""

    sender: NodeId
    instance_id: bytes
    content: Any
    context: bytes


def pack(value: object) -> bytes:
    """msgpack, with bytes and text kept apart."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes, peer: str) -> Any:
    """One msgpack value; `RemoteProtocolError` for anything else."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"not msgpack: {error}", peer=peer) from error


def context_of(sealed: bytes) -> bytes:
    """What ties an answer to its question: a digest of the sealed question, whose counter is unique."""
    return hashlib.sha256(sealed).digest()


async def read_request(request: web.Request, sealer: Sealer, own: NodeId) -> Request:
    """Read, open and check one request.  Raises `RemoteProtocolError` or `web.HTTPConflict`."""
    source = request.remote or ""
    sealed = await read_bounded(request.content, REQUEST_BYTES_MAX, source)
    try:
        return open_request(sealed, request.path, sealer, own, source)
    except WrongRecipient as error:
        raise web.HTTPConflict(text=str(error)) from error


def open_request(sealed: bytes, path: str, sealer: Sealer, own: NodeId, source: str) -> Request:
    """Open and check one request to `path`.  Raises `WrongRecipient` or `RemoteProtocolError`."""
    opened = sealer.open_body("POST", path, sealed, source=source)
    match unpack(opened.payload, source):
        case [str(sender), str(recipient), content] if is_node_name(sender):
            if recipient != own:
                raise WrongRecipient(f"this is {own}, not {recipient}")
            return Request(NodeId(sender), opened.instance_id, content, context_of(sealed))
        case _:
            raise RemoteProtocolError("a request is not [sender, recipient, content]", peer=source)


def seal_request(sealer: Sealer, path: str, own: NodeId, recipient: NodeId, content: object) -> bytes:
    """The body of a request to `path`."""
    return sealer.seal_body("POST", path, pack([own, recipient, content]))


async def read_bounded(content: StreamReader, limit: int, peer: str) -> bytes:
    """The whole body; `RemoteProtocolError` when it is longer than `limit` bytes."""
    pieces, size = [], 0
    async for piece in content.iter_any():
        size += len(piece)
        if size > limit:
            raise RemoteProtocolError(f"a body exceeds {limit} bytes", peer=peer)
        pieces.append(piece)
    return b"".join(pieces)


def as_mapping(value: object, peer: str) -> Mapping[str, Any]:
    """A mapping with text keys; `RemoteProtocolError` for anything else."""
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"expected a mapping, not {type(value).__name__}", peer=peer)
    return value
