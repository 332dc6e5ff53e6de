"""The peer channel: messages between cores, in sealed batches over HTTP on the agents' one TCP port.

`POST /peer/v1/messages` hands a batch to the receiving core.  What that core sends back to the same peer while it
handles the batch, once durable, rides in the answer; later messages travel in requests of their own.  Whatever was
not certainly delivered is reported to the core as `PeerSendFailed`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from yarl import URL

from swarm_agent.transport import envelope
from swarm_agent.transport.drops import DropLog
from swarm_agent.transport.inbox import Inbox
from swarm_agent.transport.outbox import Outbox, Outgoing
from swarmsched.errors import LocalProtocolError, RemoteProtocolError, SwarmError
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.ids import Address, NodeId
from swarmsched.wire.sealing import Sealer

MESSAGES_PATH = f"{envelope.PREFIX}/messages"
CONNECT_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 10.0
SETTLE_TIMEOUT_S = 1.0  # then the answer leaves without what the core has not made durable yet
CONNECTIONS_MAX = 512
CONNECTIONS_PER_PEER_MAX = 16
KEEP_ALIVE_S = 60.0  # below the server's, so that a connection is not closed under a request
MESSAGE_BYTES_MAX = 8 * 2**20
SEND_FAILURES = (aiohttp.ClientError, OSError, SwarmError, TimeoutError)

log = logging.getLogger("swarm.transport")


class MessageCodec(Protocol):
    """Turns messages of the peer channel into bytes and back."""

    def encode(self, message: object) -> bytes:
        """Bytes of a message; `LocalProtocolError` for one that may not be sent."""

    def decode(self, data: bytes) -> object:
        """The message; `RemoteProtocolError` for anything malformed."""


class CorePort(Protocol):
    """What the channel needs of the driver."""

    @property
    def is_overloaded(self) -> bool:
        """True while messages must be refused."""

    def post(self, event: Event) -> None:
        """Hand an event to the core."""

    async def settled(self) -> None:
        """Wait until the effects of everything posted so far were performed."""


class PeerChannel:
    """Sends and receives messages of the core.  Everything belongs to the event loop's thread."""

    def __init__(
        self,
        node_id: NodeId,
        sealer: Sealer,
        codec: MessageCodec,
        core: CorePort,
        address_of: Callable[[NodeId], Address | None],
    ) -> None:
        self._node_id = node_id
        self._sealer = sealer
        self._codec = codec
        self._core = core
        self._address_of = address_of
        self._outboxes: dict[NodeId, Outbox] = {}
        self._answers: dict[NodeId, list[list[Outgoing]]] = {}  # answers being gathered, by asking peer
        self._inbox = Inbox()
        self._session: aiohttp.ClientSession | None = None
        self.drops = DropLog("peer body")
        self.counters: Counter[str] = Counter()  # sent, received (messages), requests, sent_bytes, received_bytes

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client session, shared with queries; only between `open` and `close`."""
        assert self._session is not None
        return self._session

    def open(self) -> None:
        """Make the client session; nothing is dialled yet."""
        connector = aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, limit_per_host=CONNECTIONS_PER_PEER_MAX, keepalive_timeout=KEEP_ALIVE_S
        )
        timeout = aiohttp.ClientTimeout(total=SEND_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )

    async def close(self) -> None:
        """Give up what is in flight and close all connections."""
        for outbox in self._outboxes.values():
            await outbox.close()
        if self._session is not None:
            await self._session.close()

    def add_routes(self, app: web.Application) -> None:
        """Serve `POST /peer/v1/messages`; the body's seal is its authentication."""
        app.router.add_post(MESSAGES_PATH, self._on_messages)

    def send(self, recipient: NodeId, message: object) -> None:
        """Send a message, in the answer to a request of that peer if one is being handled, else in a batch.

        Raises `LocalProtocolError` for a message that may not be sent.
        """
        encoded = self._codec.encode(message)
        if len(encoded) > MESSAGE_BYTES_MAX:
            raise LocalProtocolError(f"{len(encoded)} bytes exceed {MESSAGE_BYTES_MAX}", kind=type(message).__name__)
        outgoing = Outgoing(message, encoded)
        if gathering := self._answers.get(recipient):
            gathering[0].append(outgoing)
        else:
            self._enqueue(recipient, outgoing)

    def url_of(self, node_id: NodeId, path: str) -> URL:
        """Where a peer serves `path`; `RemoteProtocolError` for a node that is not known."""
        address = self._address_of(node_id)
        if address is None:
            raise RemoteProtocolError("is not a known member", peer=node_id)
        return URL.build(scheme="http", host=address[0], port=address[1], path=path)

    def _enqueue(self, recipient: NodeId, outgoing: Outgoing) -> None:
        outbox = self._outboxes.get(recipient)
        if outbox is None:
            outbox = self._outboxes[recipient] = Outbox(recipient, self._send_batch, self._core.post, SEND_FAILURES)
        outbox.add(outgoing)

    async def _send_batch(self, recipient: NodeId, sequence: int, batch: list[Outgoing]) -> None:
        url = self.url_of(recipient, MESSAGES_PATH)
        content = [sequence, [outgoing.encoded for outgoing in batch]]
        body = envelope.seal_request(self._sealer, MESSAGES_PATH, self._node_id, recipient, content)
        self.counters["requests"] += 1
        async with self.session.post(url, data=body, headers=envelope.HEADERS) as response:
            answer = await envelope.read_bounded(response.content, envelope.ANSWER_BYTES_MAX, recipient)
            if response.status != 200:
                raise RemoteProtocolError(
                    f"HTTP {response.status}: {answer[:200].decode(errors='replace')}", peer=recipient
                )
        self.counters["sent"] += len(batch)
        self.counters["sent_bytes"] += len(body)
        opened = self._sealer.open_body("POST", MESSAGES_PATH, answer, envelope.context_of(body), recipient)
        for message in self._decode(envelope.unpack(opened.payload, recipient), recipient):
            self._core.post(PeerMessageReceived(recipient, message))

    async def _on_messages(self, request: web.Request) -> web.Response:
        source = request.remote or ""
        if self._core.is_overloaded:
            raise web.HTTPServiceUnavailable(text="the disk of this agent refuses to write")
        try:
            opened = await envelope.read_request(request, self._sealer, self._node_id)
            sequence, messages = self._batch(opened.content, source)
        except RemoteProtocolError as error:
            self.drops.record(error, source)
            raise web.HTTPBadRequest(text=str(error)) from error
        answer = await self._handle(opened, sequence, messages)
        if request.transport is None or request.transport.is_closing():
            # The asker is gone: what would have been the answer travels by itself.
            for outgoing in answer:
                self._enqueue(opened.sender, outgoing)
            answer = []
        plain = envelope.pack([outgoing.encoded for outgoing in answer])
        self.counters["sent"] += len(answer)
        body = self._sealer.seal_body("POST", MESSAGES_PATH, plain, opened.context)
        return web.Response(body=body, content_type=envelope.CONTENT_TYPE)

    async def _handle(self, opened: envelope.Request, sequence: int, messages: list[object]) -> list[Outgoing]:
        """Post the messages in turn and gather what the core sends back until it has settled."""
        await self._inbox.wait_turn(opened.instance_id, sequence)
        answer: list[Outgoing] = []
        gathering = self._answers.setdefault(opened.sender, [])
        gathering.append(answer)
        try:
            for message in messages:
                self._core.post(PeerMessageReceived(opened.sender, message))
            self._inbox.passed(opened.instance_id, sequence)
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._core.settled()
        except TimeoutError:
            self.counters["unsettled"] += 1
        finally:
            gathering.remove(answer)
            if not gathering:
                del self._answers[opened.sender]
        return answer

    def _batch(self, content: Any, source: str) -> tuple[int, list[object]]:
        match content:
            case [int(sequence), [*encoded]] if sequence >= 0:
                return sequence, self._decode(encoded, source)
            case _:
                raise RemoteProtocolError("a batch is not [sequence, messages]", peer=source)

    def _decode(self, encoded: Any, source: str) -> list[object]:
        """All messages that can be read; one that cannot costs only itself."""
        if not isinstance(encoded, list) or not all(isinstance(item, bytes) for item in encoded):
            raise RemoteProtocolError("messages are not a list of bytes", peer=source)
        messages = []
        for item in encoded:
            try:
                messages.append(self._codec.decode(item))
            except RemoteProtocolError as error:
                self.drops.record(error, source)
        self.counters["received"] += len(messages)
        self.counters["received_bytes"] += sum(map(len, encoded))
        return messages
