"""What is inside a sealed body of the peer channel, and how it is read from and written to HTTP.

Plain text of every request: msgpack of [sender, recipient, life, content].  The sender's name is inside, so that only a
holder of the key can claim one; the recipient's is too, since an address may have passed to another node.  `life` is
the recipient's instance id: what was sniffed on its way to one process means nothing to the next one, whose replay
windows are empty.  A recipient of another life says its own, and the sender seals anew; who asks for the first time
does not know it.  That answer needs no seal: a wrong one makes a request that nobody takes.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack  # ships neither stubs nor py.typed
from aiohttp import StreamReader, web

from swarm_agent.transport.arrivals import vouch
from swarmsched.errors import RemoteProtocolError
from swarmsched.ids import NodeId, is_node_name
from swarmsched.wire.sealing import Sealer

PREFIX = "/peer/v1"
REQUEST_BYTES_MAX = 16 * 2**20
REQUEST_READ_S = 30.0
RESTARTED = 421  # HTTP status: sealed for another life; the text is the instance id of this one, in hexadecimal
ANSWER_BYTES_MAX = 64 * 2**20
CONTENT_TYPE = "application/vnd.swarmsched.sealed"
HEADERS = {"Content-Type": CONTENT_TYPE}


class WrongRecipient(Exception):
    """The request was meant for another node that had this address."""


class WrongLife(Exception):
    """The request was sealed for a process that was here before this one, or for nobody yet."""


@dataclass(frozen=True, slots=True)
class Request:
    """An opened request.  `context` binds the answer to it."""

    sender: NodeId
    instance_id: bytes
    content: Any
    context: bytes


def pack(value: object) -> bytes:
    """msgpack, with bytes and text kept apart; what is not UTF-8 in a text is shown by its number."""
    return bytes(msgpack.packb(value, use_bin_type=True, unicode_errors="backslashreplace"))


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
    """Read, open and check one request, frame by frame: of a stranger no more than the first one is read.

    Raises `RemoteProtocolError`, or `web.HTTPConflict` and `web.HTTPMisdirectedRequest` for what is not for this
    process.
    """
    source = request.remote or ""
    reader = sealer.body_reader("POST", request.path, source=source)
    digest, pieces, size = hashlib.sha256(), list[bytes](), 0
    try:
        async with asyncio.timeout(REQUEST_READ_S):
            async for data in request.content.iter_any():
                digest.update(data)
                size += len(data)
                if size > REQUEST_BYTES_MAX:
                    raise RemoteProtocolError(f"a body exceeds {REQUEST_BYTES_MAX} bytes", peer=source)
                for piece in reader.feed(data):
                    vouch(request)
                    pieces.append(piece)
        reader.finish()
        return _checked(b"".join(pieces), reader.instance_id, digest.digest(), sealer, own, source)
    except TimeoutError as error:
        raise RemoteProtocolError(f"a body took longer than {REQUEST_READ_S:g} s", peer=source) from error
    except WrongRecipient as error:
        raise web.HTTPConflict(text=str(error)) from error
    except WrongLife as error:
        raise web.HTTPMisdirectedRequest(text=str(error)) from error


def open_request(sealed: bytes, path: str, sealer: Sealer, own: NodeId, source: str) -> Request:
    """Open and check one request to `path`.  Raises `WrongRecipient`, `WrongLife` or `RemoteProtocolError`."""
    opened = sealer.open_body("POST", path, sealed, source=source)
    return _checked(opened.payload, opened.instance_id, context_of(sealed), sealer, own, source)


def _checked(plain: bytes, instance_id: bytes, context: bytes, sealer: Sealer, own: NodeId, source: str) -> Request:
    match unpack(plain, source):
        case [str(sender), str(recipient), bytes(life), content] if is_node_name(sender):
            if recipient != own:
                raise WrongRecipient(f"this is {own}, not {recipient}")
            if life != sealer.instance_id:
                raise WrongLife(sealer.instance_id.hex())
            return Request(NodeId(sender), instance_id, content, context)
        case _:
            raise RemoteProtocolError("a request is not [sender, recipient, life, content]", peer=source)


def seal_request(sealer: Sealer, path: str, own: NodeId, recipient: NodeId, life: bytes, content: object) -> bytes:
    """The body of a request to `path`; `life` is the recipient's instance id, empty when it is not known yet."""
    return sealer.seal_body("POST", path, pack([own, recipient, life, content]))


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
