import errno
import logging
import os
import socket
from collections.abc import Iterator

import pytest

from swarm_agent.transport.udp import DATAGRAM_BYTES_MAX, UdpTransport
from swarmsched.events import DatagramReceived, DatagramSendFailed, Event
from swarmsched.wire.sealing import INSTANCE_ID_BYTES, WIRE_MAJOR, Keyring, Sealer
from tests.agent.testing import free_port, wait_until

KEY = b"k" * 32


def sealer(key: bytes = KEY, label: str = "swarm") -> Sealer:
    return Sealer(keyring=Keyring(key), label=label, instance_id=os.urandom(INSTANCE_ID_BYTES))


class Port:
    def __init__(self, host: str = "127.0.0.1", sealed_by: Sealer | None = None) -> None:
        self.events: list[Event] = []
        self.address = (host, free_port("127.0.0.1" if host == "::" else host))
        self.transport = UdpTransport(self.address, sealed_by or sealer(), self.events.append)
        self.transport.open()


@pytest.fixture
async def port() -> Iterator[Port]:  # type: ignore[misc]  # an async fixture yields
    made = Port()
    yield made
    made.transport.close()


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_packet_arrives_with_its_source(host: str) -> None:
    a, b = Port(host), Port(host)
    try:
        a.transport.send(b.address, b"hello")
        await wait_until(lambda: b.events)
        assert b.events == [DatagramReceived(a.address, b"hello")]
    finally:
        a.transport.close()
        b.transport.close()


async def test_an_ipv6_wildcard_socket_speaks_ipv4_with_plain_addresses(port: Port) -> None:
    both = Port("::")
    try:
        both.transport.send(port.address, b"out")
        port.transport.send(("127.0.0.1", both.address[1]), b"in")
        await wait_until(lambda: port.events and both.events)
        assert port.events == [DatagramReceived(("127.0.0.1", both.address[1]), b"out")]
        assert both.events == [DatagramReceived(port.address, b"in")]
    finally:
        both.transport.close()


async def test_a_burst_of_a_thousand_packets_arrives_whole(port: Port, stranger: socket.socket) -> None:
    sender = sealer()
    for index in range(1_000):
        stranger.sendto(sender.seal(b"%d" % index), port.address)

    await wait_until(lambda: len(port.events) == 1_000)
    assert [event.payload for event in port.events] == [b"%d" % index for index in range(1_000)]


SEALED = sealer().seal(b"x" * 100)


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"", "malformed"),
        (b"GET / HTTP/1.1\r\n" * 4, "foreign"),
        (SEALED[:10], "malformed"),
        (SEALED[:-1], "wrong_key"),
        (SEALED[:60] + bytes([SEALED[60] ^ 1]) + SEALED[61:], "wrong_key"),
        (SEALED + b"x" * DATAGRAM_BYTES_MAX, "oversized"),
        (sealer(b"z" * 32).seal(b"x"), "wrong_key"),
        (sealer(label="other").seal(b"x"), "wrong_key"),
        (SEALED[:3] + bytes([WIRE_MAJOR + 1]) + SEALED[4:], "foreign_version"),
        (Sealer(keyring=None, label="swarm", instance_id=b"i" * 16).seal(b"x"), "not_encrypted"),
        (SEALED[:2] + b"\x07" + SEALED[3:], "malformed"),
    ],
    ids=[
        "empty",
        "http",
        "cut_head",
        "cut_tail",
        "flipped_bit",
        "too_long",
        "other_key",
        "other_label",
        "other_major",
        "not_sealed",
        "unknown_mode",
    ],
)
async def test_what_is_not_ours_is_dropped_and_counted_by_reason(
    port: Port, stranger: socket.socket, packet: bytes, reason: str
) -> None:
    stranger.sendto(packet, port.address)
    stranger.sendto(sealer().seal(b"after"), port.address)

    await wait_until(lambda: port.events)
    assert [event.payload for event in port.events] == [b"after"]
    assert port.transport.drops.counters == {reason: 1}


async def test_a_replayed_packet_is_dropped(port: Port, stranger: socket.socket) -> None:
    packet = sealer().seal(b"once")
    stranger.sendto(packet, port.address)
    stranger.sendto(packet, port.address)

    await wait_until(lambda: port.transport.drops.counters["replayed"] == 1)
    assert len(port.events) == 1


async def test_a_flood_of_bad_packets_is_logged_once(
    port: Port, stranger: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = sealer(b"z" * 32)
    with caplog.at_level(logging.INFO, "swarm.transport"):
        for _ in range(50):
            stranger.sendto(wrong.seal(b"x"), port.address)
        await wait_until(lambda: port.transport.drops.counters["wrong_key"] == 50)

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "wrong cluster key" in lines[0]
    assert "127.0.0.1" in lines[0]


async def test_a_refused_send_is_an_event(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def sendto(self, packet: bytes, address: object) -> int:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    real = port.transport._socket
    monkeypatch.setattr(port.transport, "_socket", Refusing())
    port.transport.send(("127.0.0.1", 9), b"x")
    monkeypatch.setattr(port.transport, "_socket", real)

    assert port.events == [DatagramSendFailed(("127.0.0.1", 9), "EPERM")]


async def test_a_send_that_the_kernel_cannot_route_is_an_event(port: Port) -> None:
    port.transport.send(("255.255.255.255", 9), b"x")

    assert len(port.events) == 1
    assert isinstance(port.events[0], DatagramSendFailed)


async def test_a_port_in_use_is_an_os_error(port: Port) -> None:
    second = UdpTransport(port.address, sealer(), lambda event: None)
    with pytest.raises(OSError, match="in use"):
        second.open()
