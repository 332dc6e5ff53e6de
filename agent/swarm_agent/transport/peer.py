"""The peer channel: messages between cores, in sealed batches over kept connections to the agents' one TCP port.

A WebSocket on `/peer/v1/messages` carries batches one way and their answers back.  A batch is handed to the receiving
core; what that core sends back to the same peer while it handles the batch, once durable, rides in the answer, and
later messages travel in batches of their own, and so does what is urgent.  Whatever was not certainly delivered is
reported to the core as `PeerSendFailed`.
"""

import asyncio
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from yarl import URL

from swarm_agent.transport import envelope
from swarm_agent.transport.arrivals import vouch
from swarm_agent.transport.drops import DropLog
from swarm_agent.transport.inbox import Inbox
from swarm_agent.transport.link import ANSWER, NUMBER, OK, Link
from swarm_agent.transport.outbox import UNORDERED, Outbox, Outgoing
from swarmsched.errors import LocalProtocolError, RemoteProtocolError, SwarmError
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.ids import Address, NodeId
from swarmsched.wire.sealing import Sealer

MESSAGES_PATH = f"{envelope.PREFIX}/messages"
LINK_PATH = f"{MESSAGES_PATH}#link"  # what the seal that opens a connection is bound to
SEAL_HEADER = "X-Swarm-Seal"
LIFE_HEADER = "X-Swarm-Life"
CONNECT_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 10.0
SETTLE_TIMEOUT_S = 1.0  # then the answer leaves without what the core has not made durable yet
CLOSE_TIMEOUT_S = 1.0
CONNECTIONS_MAX = 512
CONNECTIONS_PER_PEER_MAX = 16
KEEP_ALIVE_S = 30.0
"""How long a connection is kept without a question: less than the server keeps it, so that none is closed under a
request, and less than a stream may be silent, whose timer may outlive it and would end what is asked there next."""
LINK_IDLE_S = 90.0  # that a connection for batches may stand without one; the asking end closes it before
MESSAGE_BYTES_MAX = 8 * 2**20
SEND_FAILURES = (aiohttp.ClientError, OSError, SwarmError, TimeoutError)


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


class _Refused(Exception):
    """A batch that is not taken; `status` as HTTP has it."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


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
        self._links: dict[NodeId, Link] = {}
        self._lives: dict[NodeId, bytes] = {}  # instance ids of peers, as they last said themselves
        self._served: set[web.WebSocketResponse] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._answers: dict[NodeId, list[list[Outgoing]]] = {}  # answers being gathered, by asking peer
        self._inbox = Inbox()
        self._session: aiohttp.ClientSession | None = None
        self._link_session: aiohttp.ClientSession | None = None
        self.drops = DropLog("peer body")
        self.counters: Counter[str] = Counter()  # sent, received (messages), requests, sent_bytes, received_bytes

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client session, shared with queries; only between `open` and `close`."""
        assert self._session is not None
        return self._session

    def open(self) -> None:
        """Make the client sessions; nothing is dialled yet."""
        connector = aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, limit_per_host=CONNECTIONS_PER_PEER_MAX, keepalive_timeout=KEEP_ALIVE_S
        )
        self._session = _client(connector)
        self._link_session = _client(aiohttp.TCPConnector(limit=0))  # a connection to each peer, and kept

    async def close(self) -> None:
        """Give up what is in flight and close all connections."""
        for outbox in self._outboxes.values():
            await outbox.close()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for session in (self._session, self._link_session):
            if session is not None:
                await session.close()

    def add_routes(self, app: web.Application) -> None:
        """Serve `/peer/v1/messages`; the seal in the request, and that of each frame's body, is the authentication."""
        app.router.add_get(MESSAGES_PATH, self._on_link)
        app.on_shutdown.append(self._end_links)

    def send(self, recipient: NodeId, message: object) -> None:
        """Send a message, in the answer to a request of that peer if one is being handled, else in a batch.

        Raises `LocalProtocolError` for a message that may not be sent.
        """
        encoded = self._codec.encode(message)
        if len(encoded) > MESSAGE_BYTES_MAX:
            raise LocalProtocolError(f"{len(encoded)} bytes exceed {MESSAGE_BYTES_MAX}", kind=type(message).__name__)
        outgoing = Outgoing(message, encoded)
        if (gathering := self._answers.get(recipient)) and not outgoing.is_urgent:
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
        link = self._link_to(recipient)
        content = [sequence, [outgoing.encoded for outgoing in batch]]
        body = b""

        def seal() -> bytes:
            nonlocal body
            body = self.seal(MESSAGES_PATH, recipient, content)
            return body

        self.counters["requests"] += 1
        status, answer = await link.ask(seal)
        if status != OK:
            raise RemoteProtocolError(f"HTTP {status}: {answer[:200].decode(errors='replace')}", peer=recipient)
        self.counters["sent"] += len(batch)
        self.counters["sent_bytes"] += len(body)
        opened = self._sealer.open_body("POST", MESSAGES_PATH, answer, envelope.context_of(body), recipient)
        for message in self._decode(envelope.unpack(opened.payload, recipient), recipient):
            self._core.post(PeerMessageReceived(recipient, message))

    def _link_to(self, recipient: NodeId) -> Link:
        """The connection for the next batch: another one when the peer has moved, or the last one is stuck or gone."""
        url, link = self.url_of(recipient, MESSAGES_PATH), self._links.get(recipient)
        if link is not None and (link.url != url or not link.is_usable):
            link.retire()
            link = None
        if link is None:
            link = self._links[recipient] = Link(url, partial(self._dial, recipient))
        return link

    def seal(self, path: str, recipient: NodeId, content: object) -> bytes:
        """The body of a request, sealed for the life of the recipient that was last heard of."""
        life = self._lives.get(recipient, b"")
        return envelope.seal_request(self._sealer, path, self._node_id, recipient, life, content)

    def met(self, recipient: NodeId, life: str) -> None:
        """Take note of the instance id that a recipient has answered with.  Raises `RemoteProtocolError`."""
        try:
            self._lives[recipient] = bytes.fromhex(life)
        except ValueError as error:
            raise RemoteProtocolError(f"{life[:40]!r} is no instance id", peer=recipient) from error

    async def _dial(self, recipient: NodeId, url: URL) -> aiohttp.ClientWebSocketResponse:
        try:
            return await self._connect(recipient, url)
        except aiohttp.WSServerHandshakeError as error:
            if error.status != envelope.RESTARTED or error.headers is None:
                raise
            self.met(recipient, error.headers.get(LIFE_HEADER, ""))
        return await self._connect(recipient, url)

    async def _connect(self, recipient: NodeId, url: URL) -> aiohttp.ClientWebSocketResponse:
        assert self._link_session is not None
        timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S)
        headers = {SEAL_HEADER: b64encode(self.seal(LINK_PATH, recipient, None)).decode()}
        return await self._link_session.ws_connect(
            url, timeout=timeout, max_msg_size=envelope.ANSWER_BYTES_MAX, headers=headers
        )

    async def _on_link(self, request: web.Request) -> web.WebSocketResponse:
        """Frames of one connection; those whose answers wait for the disk do not hold up the next ones."""
        self._admit(request)
        size_max = envelope.REQUEST_BYTES_MAX + NUMBER.size
        link = web.WebSocketResponse(timeout=CLOSE_TIMEOUT_S, max_msg_size=size_max, compress=False)
        await link.prepare(request)
        self._served.add(link)
        try:
            async with asyncio.timeout(LINK_IDLE_S) as patience:
                async for message in link:
                    patience.reschedule(asyncio.get_running_loop().time() + LINK_IDLE_S)
                    if message.type is not aiohttp.WSMsgType.BINARY or len(message.data) < NUMBER.size:
                        break
                    task = asyncio.create_task(self._serve_frame(link, message.data, request.remote or ""))
                    self._serving.add(task)
                    task.add_done_callback(self._serving.discard)
        except TimeoutError:
            self.counters["idle_links"] += 1
        finally:
            self._served.discard(link)
            await link.close()
        return link

    def _admit(self, request: web.Request) -> None:
        """A stranger gets no connection over which frames of megabytes could be sent."""
        source = request.remote or ""
        try:
            sealed = b64decode(request.headers.get(SEAL_HEADER, ""), validate=True)
            envelope.open_request(sealed, LINK_PATH, self._sealer, self._node_id, source)
        except envelope.WrongRecipient as error:
            raise web.HTTPConflict(text=str(error)) from error
        except envelope.WrongLife as error:
            raise web.HTTPMisdirectedRequest(text=str(error), headers={LIFE_HEADER: str(error)}) from error
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{SEAL_HEADER} is not base64") from error
        except RemoteProtocolError as error:
            self.drops.record(error, source)
            raise web.HTTPBadRequest(text=str(error)) from error
        vouch(request)

    async def _end_links(self, _app: web.Application) -> None:
        for link in list(self._served):
            await link.close(code=aiohttp.WSCloseCode.GOING_AWAY)

    async def _serve_frame(self, link: web.WebSocketResponse, frame: bytes, source: str) -> None:
        (number,) = NUMBER.unpack_from(frame)
        try:
            opened, sequence, messages = self._open_batch(frame[NUMBER.size :], source)
        except _Refused as refusal:
            with suppress(ConnectionError):  # it is gone: nobody is there to be refused
                await link.send_bytes(ANSWER.pack(number, refusal.status) + str(refusal).encode())
            return
        answer = await self._handle(opened, sequence, messages)
        plain = envelope.pack([outgoing.encoded for outgoing in answer])
        body = self._sealer.seal_body("POST", MESSAGES_PATH, plain, opened.context)
        try:
            await link.send_bytes(ANSWER.pack(number, OK) + body)
        except ConnectionError:  # the asker is gone: what would have been the answer travels by itself
            for outgoing in answer:
                self._enqueue(opened.sender, outgoing)
            return
        self.counters["sent"] += len(answer)

    def _open_batch(self, sealed: bytes, source: str) -> tuple[envelope.Request, int, list[object]]:
        if self._core.is_overloaded:
            raise _Refused(503, "the disk of this agent refuses to write")
        try:
            opened = envelope.open_request(sealed, MESSAGES_PATH, self._sealer, self._node_id, source)
            return opened, *self._batch(opened.content, source)
        except envelope.WrongRecipient as error:
            raise _Refused(409, str(error)) from error
        except envelope.WrongLife as error:
            raise _Refused(envelope.RESTARTED, str(error)) from error
        except RemoteProtocolError as error:
            self.drops.record(error, source)
            raise _Refused(400, str(error)) from error

    async def _handle(self, opened: envelope.Request, sequence: int, messages: list[object]) -> list[Outgoing]:
        """Post the messages in turn and gather what the core sends back until it has settled."""
        if sequence == UNORDERED:  # nothing here waits for the disk, and what the core answers has its own way
            for message in messages:
                self._core.post(PeerMessageReceived(opened.sender, message))
            return []
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


def _client(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=SEND_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    jar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=jar, trust_env=False, auto_decompress=False
    )
