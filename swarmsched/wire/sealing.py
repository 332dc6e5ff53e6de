"""Sealing of gossip packets and peer channel bodies: AES-256-GCM with a keyring and a derived key per sender.

Every process draws a 128-bit instance id at its start and seals with HKDF(cluster key, cluster label, instance id),
so its nonce may be a plain counter that starts at zero and is never stored.  The cluster label and the whole head are
associated data: two swarms, or two incompatible versions, never mix, and no bit of a packet can be changed.

Packet: magic "SW", mode, wire major, wire minor, instance id (16 bytes), counter (8 bytes), then the ciphertext with
its tag, 45 bytes more than the payload.  A body has the same head with another magic, then frames of at most 64 KiB,
each with its length, and is bound to method, path and the caller's context (an answer names its question there).

A shared key gives membership, not identity: any holder of the key can pose as any member.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarmsched.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from swarmsched.wire.replay import ReplayWindow

WIRE_MAJOR = 2
WIRE_MINOR_LOWEST = 0
WIRE_MINOR_HIGHEST = 0

KEY_BYTES = 32
INSTANCE_ID_BYTES = 16
BODY_FRAME_BYTES = 65_536
SENDERS_REMEMBERED = 20_000
"""Sending processes whose keys and counters are kept, least recently heard dropped first.

A packet of a dropped sender could be replayed once more; generations and versions above make that harmless.
"""

_PACKET_MAGIC = b"SW"
_BODY_MAGIC = b"SB"
_PLAIN, _SEALED = 0, 1
_HEAD = struct.Struct(">2sBBB16sQ")
_FRAME_HEAD = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_LAST_FRAME = 1 << 31
_TAG_BYTES = 16
PACKET_OVERHEAD_BYTES = _HEAD.size + _TAG_BYTES


@dataclass(frozen=True, slots=True)
class Keyring:
    """Cluster keys of 32 bytes: `primary` seals, all of them open.

    Rotation: add the new key everywhere, make it primary everywhere, then remove the old one.
    """

    primary: bytes
    others: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        for key in (self.primary, *self.others):
            if len(key) != KEY_BYTES:
                raise ConfigError("cluster key", f"has {len(key)} bytes", f"give exactly {KEY_BYTES} random bytes")

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Primary first."""
        return (self.primary, *self.others)


class Opened(NamedTuple):
    """What was inside, and which process says to have sent it (authenticated unless the packet was plain)."""

    instance_id: bytes
    minor: int
    payload: bytes


@dataclass(slots=True)
class _Sender:
    """One sending process: its derived keys by cluster key, and the counters already seen."""

    ciphers: dict[bytes, AESGCM]
    seen: ReplayWindow


class Sealer:
    """Seals what this process sends and opens what others send, of one purpose (packets, or bodies).

    `keyring` None means that the operator turned encryption off.  The switches serve a rolling change: first all
    agents get the key with both switches off, then `verify_outgoing` (send sealed) on everywhere, then
    `verify_incoming` (refuse plain).  Sealed packets are opened whenever there is a keyring.
    """

    def __init__(
        self,
        *,
        keyring: Keyring | None,
        label: str,
        instance_id: bytes,
        verify_incoming: bool = True,
        verify_outgoing: bool = True,
        purpose: str = "packet",
        senders_max: int = SENDERS_REMEMBERED,
    ) -> None:
        if len(instance_id) != INSTANCE_ID_BYTES:
            raise LocalProtocolError(f"an instance id has {INSTANCE_ID_BYTES} bytes, not {len(instance_id)}")
        self._label = label.encode()
        self._instance_id = instance_id
        self._purpose = purpose.encode()
        self._verify_incoming = verify_incoming
        self._verify_outgoing = verify_outgoing
        self._senders_max = senders_max
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()
        self._counter = 0
        self._associated = self._purpose + b"\0" + self._label  # binds every ciphertext to this swarm
        self._keyring: Keyring | None = None
        self._own_cipher: AESGCM | None = None
        self.set_keyring(keyring)

    @property
    def instance_id(self) -> bytes:
        """The random name of this process, drawn at its start."""
        return self._instance_id

    def set_keyring(self, keyring: Keyring | None) -> None:
        """Use these keys from now on.  Counters seen so far stay: a rotation opens no door to replays."""
        self._keyring = keyring
        self._own_cipher = None if keyring is None else self._derive(keyring.primary, self._instance_id)
        for sender in self._senders.values():
            sender.ciphers.clear()

    def seal(self, payload: bytes) -> bytes:
        """The packet to send."""
        self._counter = counter = self._counter + 1
        cipher = self._own_cipher
        if cipher is None or not self._verify_outgoing:
            return self._head(_PACKET_MAGIC, _PLAIN, counter) + payload
        head = self._head(_PACKET_MAGIC, _SEALED, counter)
        return head + cipher.encrypt(_nonce(counter), payload, self._associated + head)

    def open(self, packet: bytes, source: str = "") -> Opened:
        """Inverse of `seal` for any sender of this swarm; RemoteProtocolError says why a packet was refused.

        A refused packet changes nothing here.  `source` is for the error text.
        """
        mode, minor, instance_id, counter = _read_head(_PACKET_MAGIC, packet, source)
        body = packet[_HEAD.size :]
        if mode == _PLAIN:
            self._refuse_plain(source)
            return Opened(instance_id, minor, body)
        associated = self._associated + packet[: _HEAD.size]
        sender, payload = self._decrypt(instance_id, _nonce(counter), body, associated, source)
        self._remember(instance_id, sender, counter, source)
        return Opened(instance_id, minor, payload)

    def seal_body(self, method: str, path: str, body: bytes, context: bytes = b"") -> bytes:
        """A whole peer channel body; `open_body` needs the same method, path and context."""
        stream = self.body_writer(method, path, context)
        pieces = [body[at : at + BODY_FRAME_BYTES] for at in range(0, len(body), BODY_FRAME_BYTES)] or [b""]
        last = len(pieces) - 1
        return stream.head + b"".join(stream.frame(piece, is_last=index == last) for index, piece in enumerate(pieces))

    def open_body(self, method: str, path: str, sealed: bytes, context: bytes = b"", source: str = "") -> Opened:
        """Inverse of `seal_body`; RemoteProtocolError if anything is missing, altered, repeated or follows the end."""
        reader = self.body_reader(method, path, context, source)
        payload = b"".join(reader.feed(sealed))
        reader.finish()
        return Opened(reader.instance_id, reader.minor, payload)

    def body_writer(self, method: str, path: str, context: bytes = b"") -> "BodyWriter":
        """Seals a body piece by piece: send `head`, then each `frame`, the final one with `is_last`."""
        self._counter += 1
        cipher = self._own_cipher if self._verify_outgoing else None
        mode = _PLAIN if cipher is None else _SEALED
        head = self._head(_BODY_MAGIC, mode, self._counter)
        return BodyWriter(head, cipher, self._counter, self._body_associated(method, path, context) + head)

    def body_reader(self, method: str, path: str, context: bytes = b"", source: str = "") -> "BodyReader":
        """Opens a body as its bytes come in."""
        return BodyReader(self, self._body_associated(method, path, context), source)

    def _body_associated(self, method: str, path: str, context: bytes) -> bytes:
        parts = (self._associated, method.encode(), path.encode(), context)
        return b"".join(_FRAME_HEAD.pack(len(part)) + part for part in parts)

    def _head(self, magic: bytes, mode: int, counter: int) -> bytes:
        return _HEAD.pack(magic, mode, WIRE_MAJOR, WIRE_MINOR_HIGHEST, self._instance_id, counter)

    def _refuse_plain(self, source: str) -> None:
        if self._keyring is not None and self._verify_incoming:
            raise RemoteProtocolError(
                "it is not encrypted and this agent accepts only encrypted ones; give the sender the cluster key",
                peer=source,
            )

    def _decrypt(
        self, instance_id: bytes, nonce: bytes, body: bytes, associated: bytes, source: str
    ) -> tuple[_Sender, bytes]:
        if self._keyring is None:
            raise RemoteProtocolError("it is encrypted and this agent has no cluster key", peer=source)
        sender = self._senders.get(instance_id) or _Sender({}, ReplayWindow())
        for key in self._keyring.keys:
            cipher = sender.ciphers.get(key)
            if cipher is None:
                cipher = self._derive(key, instance_id)
            try:
                payload = cipher.decrypt(nonce, body, associated)
            except InvalidTag:
                continue
            sender.ciphers[key] = cipher
            return sender, payload
        raise RemoteProtocolError(
            f"it opens with none of the {len(self._keyring.keys)} cluster key(s) of this swarm: "
            "wrong cluster key, another swarm's label, or damaged on the way",
            peer=source,
        )

    def _remember(self, instance_id: bytes, sender: _Sender, counter: int, source: str) -> None:
        """Only after authentication, so that strangers can neither fill the memory nor close a window."""
        if not sender.seen.accept(counter):
            raise RemoteProtocolError(f"message {counter} of this sender was seen before, or is too old", peer=source)
        self._senders[instance_id] = sender
        self._senders.move_to_end(instance_id)
        if len(self._senders) > self._senders_max:
            self._senders.popitem(last=False)

    def _derive(self, key: bytes, instance_id: bytes) -> AESGCM:
        info = b"swarmsched " + self._purpose + b" key" + instance_id
        return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=self._label, info=info).derive(key))


class BodyWriter:
    """Frames of one body, in order.  The nonce is (body counter, frame index); the last frame says that it is."""

    def __init__(self, head: bytes, cipher: AESGCM | None, counter: int, associated: bytes) -> None:
        self.head = head
        self._cipher = cipher
        self._counter = counter
        self._associated = associated
        self._index = 0

    def frame(self, piece: bytes, *, is_last: bool = False) -> bytes:
        """One frame of at most 64 KiB."""
        if len(piece) > BODY_FRAME_BYTES:
            raise LocalProtocolError(f"a frame of {len(piece)} bytes exceeds {BODY_FRAME_BYTES}")
        if self._cipher is not None:
            associated = self._associated + bytes([is_last])
            piece = self._cipher.encrypt(_nonce(self._counter, self._index), piece, associated)
        self._index += 1
        return _FRAME_HEAD.pack(len(piece) | (_LAST_FRAME if is_last else 0)) + piece


class BodyReader:
    """Opens the frames of one body as they arrive; holds back at most one frame of input."""

    def __init__(self, sealer: Sealer, associated: bytes, source: str) -> None:
        self.instance_id = b""
        self.minor = 0
        self._sealer = sealer
        self._associated = associated
        self._source = source
        self._pending = bytearray()
        self._mode: int | None = None  # None until the head is complete
        self._counter = 0
        self._index = 0
        self._is_finished = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The pieces that are complete now; RemoteProtocolError ends the body."""
        self._pending += data
        if self._mode is None and len(self._pending) >= _HEAD.size:
            head = bytes(self._pending[: _HEAD.size])
            self._mode, self.minor, self.instance_id, self._counter = _read_head(_BODY_MAGIC, head, self._source)
            self._associated += head
            if self._mode == _PLAIN:
                self._sealer._refuse_plain(self._source)  # noqa: SLF001  # the two classes are one mechanism
            del self._pending[: _HEAD.size]
        while self._mode is not None and (frame := self._next_frame()) is not None:
            yield self._open(*frame)

    def finish(self) -> None:
        """Call when the transport says the body ended; RemoteProtocolError if it was cut short."""
        if not self._is_finished:
            raise RemoteProtocolError("the body was cut short", peer=self._source)

    def _next_frame(self) -> tuple[bytes, bool] | None:
        if self._pending and self._is_finished:
            raise RemoteProtocolError("bytes follow the last frame of the body", peer=self._source)
        if len(self._pending) < _FRAME_HEAD.size:
            return None
        (length,) = _FRAME_HEAD.unpack_from(self._pending)
        is_last, length = bool(length & _LAST_FRAME), length & ~_LAST_FRAME
        if length > BODY_FRAME_BYTES + _TAG_BYTES:
            raise RemoteProtocolError(f"a frame of {length} bytes exceeds the limit", peer=self._source)
        end = _FRAME_HEAD.size + length
        if len(self._pending) < end:
            return None
        frame = bytes(self._pending[_FRAME_HEAD.size : end])
        del self._pending[:end]
        return frame, is_last

    def _open(self, frame: bytes, is_last: bool) -> bytes:
        index, self._index = self._index, self._index + 1
        self._is_finished = is_last
        if self._mode == _PLAIN:
            return frame
        sealer, associated = self._sealer, self._associated + bytes([is_last])
        nonce = _nonce(self._counter, index)
        sender, piece = sealer._decrypt(self.instance_id, nonce, frame, associated, self._source)  # noqa: SLF001
        if index == 0:  # one counter per body: checked once, after its first frame proved authentic
            sealer._remember(self.instance_id, sender, self._counter, self._source)  # noqa: SLF001
        return piece


def _read_head(magic: bytes, data: bytes, source: str) -> tuple[int, int, bytes, int]:
    if len(data) < _HEAD.size:
        raise RemoteProtocolError(f"only {len(data)} bytes, not one of ours", peer=source)
    found, mode, major, minor, instance_id, counter = _HEAD.unpack_from(data)
    if found != magic:
        raise RemoteProtocolError("not a message of a swarm agent (wrong magic)", peer=source)
    if major != WIRE_MAJOR:
        where = source or "an unnamed source"
        raise RemoteProtocolError(f"wire major {major} from {where}, this agent speaks {WIRE_MAJOR}")
    if mode not in (_PLAIN, _SEALED):
        raise RemoteProtocolError(f"unknown sealing mode {mode}", peer=source)
    return mode, minor, instance_id, counter


def _nonce(counter: int, index: int = 0) -> bytes:
    """96 bits: frame index, then counter.  Packets have no frames."""
    return _FRAME_HEAD.pack(index) + _COUNTER.pack(counter)
