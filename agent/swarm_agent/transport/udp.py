"""Gossip packets over UDP: sealed on the way out, opened and drained in batches on the way in.

The socket is read through `add_reader`, up to `DRAIN_LIMIT` packets a wake-up: the stock datagram transport takes one
per loop turn and loses bursts.  A refused send is an event like any other, since to the failure detector it counts as
a failed probe.
"""

import asyncio
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address

from swarm_agent.transport.drops import DropLog
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import DatagramReceived, DatagramSendFailed, Event
from swarmsched.gossip.message import is_membership_payload
from swarmsched.ids import Address
from swarmsched.wire.sealing import Sealer

DRAIN_LIMIT = 64
RECEIVE_BUFFER_BYTES = 4 * 2**20
DATAGRAM_BYTES_MAX = 1_500
"""Sealed; the largest payload that may be configured is 1,400 bytes."""

SO_RCVBUFFORCE = 33  # Linux; the socket module does not name it
_MAPPED = "::ffff:"

log = logging.getLogger("swarm.transport")


class UdpTransport:
    """One socket for all gossip.  Everything but the constructor belongs to the event loop's thread."""

    def __init__(self, listen: Address, sealer: Sealer, post: Callable[[Event], None]) -> None:
        self._listen = listen
        self._sealer = sealer
        self._post = post
        self._socket: socket.socket | None = None
        self._is_ipv6 = False
        self.drops = DropLog("datagram")
        # sent, received, sent_bytes, received_bytes, send_errors; bytes of each plane as sent_bytes_PLANE
        self.counters: Counter[str] = Counter()

    @property
    def receive_buffer_bytes(self) -> int:
        """What the kernel granted; Linux reports twice the usable size.  0 while closed."""
        if self._socket is None:
            return 0
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2

    def open(self) -> None:
        """Bind and begin to read; raises `OSError` when the address is in use or not ours."""
        self._is_ipv6 = ip_address(self._listen[0]).version == 6
        sock = socket.socket(socket.AF_INET6 if self._is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            if self._is_ipv6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            _enlarge_receive_buffer(sock)
            sock.bind(self._listen)
        except OSError:
            sock.close()
            raise
        self._socket = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._drain)

    def close(self) -> None:
        """Stop reading and close; harmless when it is not open."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def send(self, destination: Address, payload: bytes) -> None:
        """Seal and send one packet; what the kernel refuses is posted as `DatagramSendFailed`."""
        if self._socket is None:
            self._fail(destination, "the socket is closed")
            return
        packet = self._sealer.seal(payload)
        try:
            self._socket.sendto(packet, self._to_kernel(destination))
        except OSError as error:
            self._fail(destination, errno.errorcode.get(error.errno or 0, str(error)))
            return
        self.counters["sent"] += 1
        self.counters["sent_bytes"] += len(packet)
        self.counters[f"sent_bytes_{_plane_of(payload)}"] += len(packet)

    def _fail(self, destination: Address, error: str) -> None:
        self.counters["send_errors"] += 1
        log.debug("datagram not sent destination=%s:%d error=%s", *destination, error)
        self._post(DatagramSendFailed(destination, error))

    def _drain(self) -> None:
        for _ in range(DRAIN_LIMIT):
            if self._socket is None:
                return
            try:
                # One byte more than allowed, so that a longer packet shows as too long instead of as cut.
                packet, origin = self._socket.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except BlockingIOError:
                return
            except OSError as error:
                self.counters["receive_errors"] += 1
                log.debug("datagram not received error=%s", error)
                return
            self._receive(packet, _from_kernel(origin))

    def _receive(self, packet: bytes, source: Address) -> None:
        self.counters["received"] += 1
        self.counters["received_bytes"] += len(packet)
        try:
            if len(packet) > DATAGRAM_BYTES_MAX:
                raise RemoteProtocolError(f"a datagram exceeds {DATAGRAM_BYTES_MAX} bytes", peer=source[0])
            opened = self._sealer.open(packet, source[0])
        except RemoteProtocolError as error:
            self.drops.record(error, source[0])
            return
        self.counters[f"received_bytes_{_plane_of(opened.payload)}"] += len(packet)
        self._post(DatagramReceived(source, opened.payload))

    def _to_kernel(self, destination: Address) -> Address:
        host, port = destination
        return (_MAPPED + host, port) if self._is_ipv6 and ":" not in host else destination


def _plane_of(payload: bytes) -> str:
    return "liveness" if is_membership_payload(payload) else "state"


def _from_kernel(origin: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return (origin[0].removeprefix(_MAPPED), origin[1])


def _enlarge_receive_buffer(sock: socket.socket) -> None:
    """4 MiB holds a burst of some thousand packets; without the privilege to exceed the limit we take what we get."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
