import asyncio
import os
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from swarm_agent import startup
from swarm_agent.driver import Driver
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.fetch import BlobFetcher
from swarm_agent.transport import arrivals, envelope, inbox, outbox, rpc
from swarm_agent.transport import peer as peer_module
from swarm_agent.transport.link import ANSWER, NUMBER
from swarm_agent.transport.peer import LIFE_HEADER, LINK_PATH, MESSAGES_PATH, SEAL_HEADER, PeerChannel
from swarm_agent.transport.rpc import PeerRpc
from swarmsched.authority.message import LeaseGranted, LeaseRenewal
from swarmsched.effects import Effect, Persist, SendPeer
from swarmsched.errors import AgentUnreachable, LocalProtocolError, RemoteProtocolError, UnknownJob
from swarmsched.events import Event, PeerMessageReceived, PeerSendFailed
from swarmsched.ids import Address, NodeId
from swarmsched.wire.sealing import BODY_FRAME_BYTES, INSTANCE_ID_BYTES, BodyReader, Keyring, Sealer
from tests.agent.testing import ControlledStore, ScriptedMachine, free_port, wait_until

KEY = b"k" * 32
A, B = NodeId("a"), NodeId("b")


class TextCodec:
    """Messages are text; `?` cannot be decoded."""

    def encode(self, message: object) -> bytes:
        return str(message).encode()

    def decode(self, data: bytes) -> object:
        if data == b"?":
            raise RemoteProtocolError("unknown message kind")
        return data.decode()


class Peer:
    """One agent's channel on a real port, over a scripted core."""

    def __init__(self, name: NodeId, addresses: dict[NodeId, Address], key: bytes = KEY) -> None:
        self.name = name
        self.addresses = addresses
        self.store = ControlledStore()
        self.store.is_open = True
        self.machine = ScriptedMachine()
        self.driver = Driver(self.machine, self.store, self._perform)
        sealer = Sealer(keyring=Keyring(key), label="s", instance_id=os.urandom(INSTANCE_ID_BYTES), purpose="body")
        self.sealer = sealer
        self.channel = PeerChannel(name, sealer, TextCodec(), self.driver, addresses.get)
        self.rpc = PeerRpc(name, sealer, self.channel)
        self.bodies: list[bytes] = []
        self.runner: web.AppRunner | None = None

    def _perform(self, effect: Effect) -> None:
        assert isinstance(effect, SendPeer)
        self.channel.send(effect.recipient, effect.message)

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app[arrivals.ARRIVALS] = arrivals.Arrivals()
        self.channel.add_routes(app)
        self.rpc.add_routes(app)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        assert self.runner.server is not None
        app[arrivals.ARRIVALS].watch(self.runner.server)
        port = port or free_port()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.addresses[self.name] = ("127.0.0.1", port)
        self.channel.open()
        self.driver.start()

    async def stop(self) -> None:
        self.store.is_open, self.store.error = True, None
        self.store.allow(100)
        await self.channel.close()
        if self.runner is not None:
            await self.runner.cleanup()
        await self.driver.stop()

    def answer(self, respond: Callable[[str], Sequence[Effect]]) -> None:
        """Effects for each message that comes."""

        def on_event(event: Event) -> Sequence[Effect]:
            return respond(str(event.message)) if isinstance(event, PeerMessageReceived) else ()

        self.machine.respond = on_event

    @property
    def received(self) -> list[tuple[NodeId, object]]:
        return [(e.sender, e.message) for e in self.machine.events if isinstance(e, PeerMessageReceived)]

    @property
    def failed(self) -> list[object]:
        return [e.message for e in self.machine.events if isinstance(e, PeerSendFailed)]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Peer, Peer]]:
    addresses: dict[NodeId, Address] = {}
    peers = (Peer(A, addresses), Peer(B, addresses))
    for peer in peers:
        await peer.start()
    yield peers
    for peer in peers:
        await peer.stop()


async def test_messages_of_one_turn_travel_in_one_request_in_order(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    for index in range(100):
        a.channel.send(B, f"m{index}")

    await wait_until(lambda: len(b.received) == 100)
    assert b.received == [(A, f"m{index}") for index in range(100)]
    assert a.channel.counters["requests"] == 1


async def test_a_lease_is_granted_while_an_answer_waits_for_the_disk(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    renewal, granted = LeaseRenewal(1), LeaseGranted(1)
    answers: dict[str, list[Effect]] = {"write": [Persist("meta", "k", b"v"), SendPeer(A, "written")]}
    answers[str(renewal)] = [SendPeer(A, granted)]
    b.answer(lambda text: answers[text])
    b.store.is_open = False
    a.channel.send(B, "write")
    await wait_until(lambda: b.store.attempts == 1)
    a.channel.send(B, renewal)
    await wait_until(lambda: a.received)
    assert a.received == [(B, str(granted))]
    b.store.is_open = True
    b.store.allow()
    await wait_until(lambda: len(a.received) == 2)


async def test_order_holds_while_several_requests_are_in_flight(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "BATCH_MESSAGES_MAX", 3)
    a, b = pair
    for index in range(300):
        a.channel.send(B, f"m{index}")

    await wait_until(lambda: len(b.received) == 300)
    assert [message for _, message in b.received] == [f"m{index}" for index in range(300)]
    assert a.channel.counters["requests"] == 100


async def test_a_batch_that_overtook_another_waits_for_it_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    box = inbox.Inbox()
    await box.wait_turn(b"i", 0)
    box.passed(b"i", 0)
    second = asyncio.ensure_future(box.wait_turn(b"i", 2))
    await asyncio.sleep(0)
    assert not second.done()
    await box.wait_turn(b"i", 1)
    box.passed(b"i", 1)
    await second
    box.passed(b"i", 2)

    monkeypatch.setattr(inbox, "GAP_WAIT_S", 0.01)
    async with asyncio.timeout(30):
        await box.wait_turn(b"i", 9)


async def test_an_answer_rides_back_on_the_request_and_only_after_its_commit(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.answer(lambda message: [Persist("register", "j", b"v"), SendPeer(A, f"re {message}")])
    b.store.is_open = False
    a.channel.send(B, "prepare")
    await wait_until(lambda: b.store.attempts == 1)
    assert a.received == []

    b.store.allow()
    await wait_until(lambda: a.received)
    assert a.received == [(B, "re prepare")]
    assert b.channel.counters["requests"] == 0


async def test_an_answer_that_becomes_durable_late_comes_in_a_request_of_its_own(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_agent.transport.peer.SETTLE_TIMEOUT_S", 0.05)
    a, b = pair
    b.answer(lambda message: [Persist("register", "j", b"v"), SendPeer(A, "late")])
    b.store.is_open = False
    a.channel.send(B, "prepare")
    await wait_until(lambda: a.channel.counters["sent"] == 1)
    assert a.received == []

    b.store.allow()
    await wait_until(lambda: a.received == [(B, "late")])
    assert b.channel.counters["requests"] == 1


async def test_every_message_to_an_unreachable_peer_is_reported_as_failed(pair: tuple[Peer, Peer]) -> None:
    a, _ = pair
    gone = NodeId("gone")
    a.addresses[gone] = ("127.0.0.1", free_port())
    a.channel.send(gone, "one")
    a.channel.send(gone, "two")
    a.channel.send(NodeId("never-heard-of"), "three")

    await wait_until(lambda: len(a.failed) == 3)
    assert sorted(map(str, a.failed)) == ["one", "three", "two"]


async def test_batches_share_a_connection_and_a_peer_that_moved_gets_another(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    a.channel.send(B, "one")
    await wait_until(lambda: len(b.received) == 1)
    first = a.channel._links[B]
    a.channel.send(B, "two")
    await wait_until(lambda: len(b.received) == 2)
    assert a.channel._links[B] is first
    moved = Peer(B, {})
    await moved.start()
    try:
        a.addresses[B] = moved.addresses[B]
        a.channel.send(B, "three")
        await wait_until(lambda: moved.received == [(A, "three")])
        await wait_until(lambda: not b.channel._served)
    finally:
        await moved.stop()


async def test_a_peer_that_was_started_again_is_reached_again(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    a.channel.send(B, "before")
    await wait_until(lambda: b.received)
    link = a.channel._links[B]
    await b.stop()
    await wait_until(lambda: not link.is_usable)
    again = Peer(B, a.addresses)
    await again.start()
    try:
        a.channel.send(B, "after")
        await wait_until(lambda: again.received == [(A, "after")])
        assert a.failed == []
    finally:
        await again.stop()


async def test_a_connection_without_batches_is_closed_by_the_serving_end(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.channel.send(B, "once")
    await wait_until(lambda: len(b.received) == 1)
    monkeypatch.setattr(peer_module, "LINK_IDLE_S", 0.05)
    a.channel.send(B, "twice")
    await wait_until(lambda: b.channel.counters["idle_links"] == 1)
    monkeypatch.undo()
    a.channel.send(B, "again")  # which is lost, and told so, where it crosses the end of the connection
    await wait_until(lambda: len(b.received) == 3 or a.failed)
    a.channel.send(B, "and again")
    await wait_until(lambda: "and again" in str(b.received))


async def test_an_address_that_passed_to_another_node_does_not_get_the_message(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    a.addresses[NodeId("c")] = a.addresses[B]
    a.channel.send(NodeId("c"), "for c only")

    await wait_until(lambda: a.failed)
    assert b.received == []


async def test_a_full_outbox_fails_the_message_at_once(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MESSAGES_LIMIT", 2)
    a, b = pair
    for index in range(3):
        a.channel.send(B, f"m{index}")

    await wait_until(lambda: len(b.received) == 2 and a.failed == ["m2"])


async def test_one_message_that_cannot_be_read_costs_only_itself(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    for message in ("before", "?", "after"):
        a.channel.send(B, message)

    await wait_until(lambda: len(b.received) == 2)
    assert b.received == [(A, "before"), (A, "after")]
    assert b.channel.drops.counters["malformed"] == 1


async def test_a_message_too_large_is_our_own_mistake(pair: tuple[Peer, Peer]) -> None:
    with pytest.raises(LocalProtocolError, match="exceed"):
        pair[0].channel.send(B, "x" * (9 * 2**20))


async def test_a_peer_with_another_key_is_refused_and_counted(pair: tuple[Peer, Peer]) -> None:
    _, b = pair
    stranger = Peer(NodeId("x"), b.addresses, key=b"z" * 32)
    await stranger.start()
    try:
        stranger.channel.send(B, "let me in")
        await wait_until(lambda: stranger.failed)
        assert b.received == []
        assert b.channel.drops.counters["wrong_key"] == 1
    finally:
        await stranger.stop()


def pass_for(b: Peer, life: bytes | None = None) -> dict[str, str]:
    """The header that opens a connection to a peer, for a holder of the key."""
    life = b.sealer.instance_id if life is None else life
    sealer = Sealer(keyring=Keyring(KEY), label="s", instance_id=os.urandom(INSTANCE_ID_BYTES), purpose="body")
    return {SEAL_HEADER: b64encode(envelope.seal_request(sealer, LINK_PATH, A, B, life, None)).decode()}


async def post(b: Peer, body: bytes) -> tuple[int, str]:
    """Status and text of the answer to one frame; status 0 when the connection is closed instead."""
    host, port = b.addresses[B]
    url = f"http://{host}:{port}{MESSAGES_PATH}"
    async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=pass_for(b)) as link:
        await link.send_bytes(NUMBER.pack(7) + body)
        answer = await link.receive(timeout=10.0)
        if answer.type is not aiohttp.WSMsgType.BINARY:
            return 0, ""
        number, status = ANSWER.unpack_from(answer.data)
        assert number == 7
        return status, answer.data[ANSWER.size :].decode(errors="replace")


async def test_a_replayed_body_is_refused(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    body = envelope.seal_request(a.sealer, MESSAGES_PATH, A, B, b.sealer.instance_id, [0, [b"once"]])

    assert (await post(b, body))[0] == 200
    status, text = await post(b, body)
    assert status == 400
    assert "seen before" in text
    assert b.received == [(A, "once")]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 400), ({SEAL_HEADER: "%"}, 400), ({SEAL_HEADER: "U0I="}, 400), (b"", 421), (b"x" * 16, 421)],
)
async def test_a_stranger_gets_no_connection_for_large_frames(
    pair: tuple[Peer, Peer], headers: dict[str, str] | bytes, status: int
) -> None:
    _, b = pair
    host, port = b.addresses[B]
    sent = pass_for(b, headers) if isinstance(headers, bytes) else headers
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(f"http://{host}:{port}{MESSAGES_PATH}", headers=sent)
    assert caught.value.status == status
    if status == envelope.RESTARTED:
        assert caught.value.headers.get(LIFE_HEADER) == b.sealer.instance_id.hex()


async def test_what_was_sniffed_in_one_life_of_a_receiver_is_refused_by_the_next(pair: tuple[Peer, Peer]) -> None:
    """Replay windows live in memory, so a request names the process that it is for."""
    a, b = pair
    asked: list[object] = []

    async def on_signal(_: NodeId, payload: dict[str, object]) -> dict[str, object]:
        asked.append(payload)
        return {}

    b.rpc.on_query("signal", on_signal)
    path, url = "/peer/v1/query/signal", "http://{}:{}/peer/v1/query/signal".format(*b.addresses[B])
    sniffed = envelope.seal_request(a.sealer, path, A, B, b.sealer.instance_id, {"signal": 10})
    async with aiohttp.ClientSession() as session:
        statuses = []
        for is_restarted in (False, False, True):
            if is_restarted:
                await restart(b)
                b.rpc.on_query("signal", on_signal)
            async with session.post(url, data=sniffed) as response:
                statuses.append(response.status)
                answer = await response.text(errors="replace")
    assert statuses == [200, 400, envelope.RESTARTED]
    assert answer == b.sealer.instance_id.hex(), "the sender learns of it and seals anew"
    assert asked == [{"signal": 10}]
    assert await a.rpc.query(B, "signal", {"signal": 12}) == {}
    a.channel.send(B, "hello again")
    await wait_until(lambda: b.received == [(A, "hello again")])


async def restart(b: Peer) -> None:
    """Another life at the same address, with a memory of nothing."""
    _, port = b.addresses[B]
    await b.stop()
    b.__init__(B, b.addresses)  # type: ignore[misc]  # all of it anew
    await b.start(port)


async def test_only_the_first_frame_of_a_strangers_body_is_read(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = pair
    stranger = Sealer(keyring=Keyring(b"x" * 32), label="s", instance_id=os.urandom(INSTANCE_ID_BYTES), purpose="body")
    path = "/peer/v1/query/x"
    writer = stranger.body_writer("POST", path)

    async def megabytes() -> AsyncIterator[bytes]:
        yield writer.head
        for _ in range(240):
            yield writer.frame(b"\0" * BODY_FRAME_BYTES)

    read: list[int] = []
    feed = BodyReader.feed

    def counted(self: BodyReader, data: bytes) -> Iterator[bytes]:
        read.append(len(data))
        return feed(self, data)

    monkeypatch.setattr(BodyReader, "feed", counted)
    async with aiohttp.ClientSession() as session:
        try:
            url = "http://{}:{}".format(*b.addresses[B]) + path
            async with session.post(url, data=megabytes()) as response:
                assert response.status == 400
        except aiohttp.ClientError:
            pass  # turned away while it was still talking
    assert sum(read) < 2**20, "what one read of the socket brought, of 15 MiB"


async def test_a_stranger_has_little_time_and_the_oldest_of_too_many_goes(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = pair
    monkeypatch.setattr(arrivals, "STRANGERS_PER_ADDRESS", 3)
    address = b.addresses[B]
    async with aiohttp.ClientSession() as session:
        known = await session.ws_connect("http://{}:{}".format(*address) + MESSAGES_PATH, headers=pass_for(b))
        strangers = []
        for words in (b"", b"GET / HT", b"POST /peer/v1/query/x HTTP/1.1\r\n", b"", b""):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(words)
            strangers.append((reader, writer))
        async with asyncio.timeout(30.0):
            for reader, _ in strangers[:2]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not any(reader.at_eof() for reader, _ in strangers[2:])

        monkeypatch.setattr(arrivals, "PATIENCE_S", 0.01)
        late, writer = await asyncio.open_connection(*address)
        async with asyncio.timeout(30.0):
            with suppress(ConnectionError):
                assert await late.read() == b""
        await known.send_bytes(NUMBER.pack(7) + b"nonsense")
        answer = await known.receive(timeout=10.0)
        assert ANSWER.unpack_from(answer.data) == (7, 400), "who was let in stays"
        for _, opened in [*strangers, (late, writer)]:
            opened.close()
        await known.close()


@pytest.mark.parametrize("content", [[0], "text", [-1, []], [0, ["text"]], [0, 7], {"a": 1}, ["0", []]])
async def test_a_malformed_batch_is_refused(pair: tuple[Peer, Peer], content: object) -> None:
    a, b = pair
    body = envelope.seal_request(a.sealer, MESSAGES_PATH, A, B, b.sealer.instance_id, content)

    assert (await post(b, body))[0] == 400
    assert b.channel.drops.counters["malformed"] == 1
    assert b.received == []


async def test_truncated_oversized_and_redirected_bodies_are_refused(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    body = envelope.seal_request(a.sealer, MESSAGES_PATH, A, B, b.sealer.instance_id, [0, [b"m"]])
    assert (await post(b, body[:-1]))[0] == 400
    assert (await post(b, b""))[0] == 400
    elsewhere = envelope.seal_request(a.sealer, "/peer/v1/query/x", A, B, b.sealer.instance_id, [0, [b"m"]])
    assert (await post(b, elsewhere))[0] == 400
    monkeypatch.setattr(envelope, "REQUEST_BYTES_MAX", 1_000)
    large = envelope.seal_request(a.sealer, MESSAGES_PATH, A, B, b.sealer.instance_id, [0, [b"m" * 5_000]])
    assert (await post(b, large))[0] == 0
    assert b.received == []


async def test_an_agent_whose_disk_stalls_turns_messages_away(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr(type(b.driver), "is_overloaded", property(lambda self: True))
    a.channel.send(B, "m")

    await wait_until(lambda: a.failed == ["m"])
    assert b.received == []


async def test_a_query_is_answered_by_its_handler(pair: tuple[Peer, Peer]) -> None:
    a, b = pair

    async def echo(sender: NodeId, payload: dict[str, object]) -> dict[str, object]:
        return {"from": sender, "data": payload["data"]}

    b.rpc.on_query("echo", echo)
    assert await a.rpc.query(B, "echo", {"data": b"\x00" * 300_000}) == {"from": "a", "data": b"\x00" * 300_000}
    assert await b.rpc.query(B, "echo", {"data": b"local"}) == {"from": "b", "data": b"local"}
    with pytest.raises(LocalProtocolError):
        b.rpc.on_query("echo", echo)


async def test_errors_of_a_query_arrive_as_their_types(pair: tuple[Peer, Peer]) -> None:
    a, b = pair

    async def unknown(sender: NodeId, payload: dict[str, object]) -> dict[str, object]:
        raise UnknownJob("j")

    async def broken(sender: NodeId, payload: dict[str, object]) -> dict[str, object]:
        raise ZeroDivisionError("oops")

    async def endless(sender: NodeId, payload: dict[str, object]) -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    b.rpc.on_query("unknown", unknown)
    b.rpc.on_query("broken", broken)
    b.rpc.on_query("endless", endless)
    with pytest.raises(UnknownJob):
        await a.rpc.query(B, "unknown", {})
    with pytest.raises(RemoteProtocolError, match="oops"):
        await a.rpc.query(B, "broken", {})
    with pytest.raises(RemoteProtocolError, match="not answered here"):
        await a.rpc.query(B, "absent", {})
    with pytest.raises(AgentUnreachable, match="in time"):
        await a.rpc.query(B, "endless", {}, timeout_s=0.1)
    a.addresses[NodeId("gone")] = ("127.0.0.1", free_port())
    with pytest.raises(AgentUnreachable):
        await a.rpc.query(NodeId("gone"), "echo", {})


async def test_a_stream_delivers_items_as_they_come(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    gate = asyncio.Event()

    async def count(sender: NodeId, payload: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        yield {"n": 1, "big": b"x" * 200_000}
        await gate.wait()
        yield {"n": 2}

    b.rpc.on_stream("count", count)
    items = a.rpc.query_stream(B, "count", {})
    first = await anext(items)
    assert (first["n"], len(first["big"])) == (1, 200_000)
    gate.set()
    assert [item async for item in items] == [{"n": 2}]


async def test_heartbeats_keep_a_silent_stream_open_and_are_not_shown(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(rpc, "STREAM_SILENCE_S", 2.0)
    a, b = pair

    async def slow(sender: NodeId, payload: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        await asyncio.sleep(2.5)
        yield {"n": 1}

    b.rpc.on_stream("slow", slow)
    assert [item async for item in a.rpc.query_stream(B, "slow", {})] == [{"n": 1}]


def test_a_connection_is_given_up_before_a_timer_that_is_left_of_a_stream_can_end_the_next_question() -> None:
    assert peer_module.KEEP_ALIVE_S < rpc.STREAM_SILENCE_S
    assert peer_module.KEEP_ALIVE_S < startup.KEEP_ALIVE_S


async def test_an_error_in_the_middle_of_a_stream_is_raised_after_its_items(pair: tuple[Peer, Peer]) -> None:
    a, b = pair

    async def breaks(sender: NodeId, payload: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        yield {"n": 1}
        raise UnknownJob("j")

    b.rpc.on_stream("breaks", breaks)
    items = a.rpc.query_stream(B, "breaks", {})
    assert await anext(items) == {"n": 1}
    with pytest.raises(UnknownJob):
        await anext(items)


async def test_closing_a_stream_ends_the_peers_handler(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "HEARTBEAT_S", 0.02)
    a, b = pair
    ended = asyncio.Event()

    async def endless(sender: NodeId, payload: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        try:
            yield {"n": 0}
            await asyncio.Event().wait()
        finally:
            ended.set()

    b.rpc.on_stream("endless", endless)
    items = a.rpc.query_stream(B, "endless", {})
    await anext(items)
    await items.aclose()  # type: ignore[attr-defined]  # an async generator behind its interface

    await wait_until(ended.is_set)


class Streams:
    """The channel of a peer, as those who fetch blobs see it."""

    def __init__(self, peer: Peer, *alive: NodeId) -> None:
        self.query_stream, self.on_stream = peer.rpc.query_stream, peer.rpc.on_stream
        self._alive = alive

    def live_peers(self) -> Sequence[NodeId]:
        return self._alive


@pytest.fixture
def dead_address() -> Iterator[Address]:
    """One that answers nothing, not even that it is closed, as a machine without power: its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            wire = stack.enter_context(socket.socket())
            wire.setblocking(False)
            wire.connect_ex(listener.getsockname())
        yield listener.getsockname()


async def test_blobs_come_from_a_living_peer_while_a_dead_one_is_still_believed_alive(
    pair: tuple[Peer, Peer], dead_address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "CONNECT_TIMEOUT_S", 3_600.0)
    a, b = pair
    dead = NodeId("dead")
    a.addresses[dead] = dead_address
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await a.rpc.query(dead, "anything", {}, timeout_s=3_600)
    mine, theirs = BlobStore(tmp_path / "a"), BlobStore(tmp_path / "b")
    BlobFetcher(theirs, Streams(b), B).serve()
    digest = await theirs.put_bytes(b"weights")
    async with asyncio.timeout(60):
        assert await BlobFetcher(mine, Streams(a, dead, B), A).ensure([digest], [dead, B]) == 1
    assert mine.missing([digest]) == ()
