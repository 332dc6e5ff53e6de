"""A learner's connection to one shard: a thread that sends contributions and takes what is published.

TLS 1.3 by the standard library.  The shard is known by the fingerprint of its certificate, this learner by the key of
the plan.  Whatever breaks is connected anew: a shard tells then what it has counted, or takes from its learners what
they were shown, if it is a successor.  Frames are those of `swarmsched.aggregation.frame`.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from swarm_elastic._shown import BLOCK, PIECE, Packed, Shown, Version

HEAD = struct.Struct("<BII")
HELLO, DELTA, WEIGHTS, STATE, NEXT, WELCOME, ASK, AWAY, REFUSED, PING = range(1, 11)
FIELDS_BYTES_MAX = 262_144
RECORD = 16_384  # of TLS
CONNECT_S = 5.0
PING_S = 5.0
SILENT_S = 15.0
AGAIN_S, AGAIN_MOST_S = 0.2, 2.0
PASSING = ("OLD_PLAN", "UNHEARD_PLAN", "NO_WEIGHTS", "TOO_OLD", "COUNTED")
"""Objections that come with changes and go by themselves; all others are told to people."""

ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""As other connections do: the shard ended in the middle of it."""


class ShardPlace(NamedTuple):
    """Where a shard is served."""

    address: str
    fingerprint: str


class LearnerSeat(NamedTuple):
    """Of this learner in its plan."""

    job: str
    attempt: int
    plan: tuple[int, int]
    learner: str
    layout: str
    key: str
    leaves: bool = False  # the plan names it no more


class ShardGone(OSError):
    """The connection cannot go on; it is made anew."""


class ShardLink:
    """To the shard that holds `shown`, which begins at element `start`.  All but `run` is for the training thread."""

    def __init__(
        self,
        membership: LearnerSeat,
        start: int,
        shown: Shown,
        place: Callable[[], ShardPlace | None],
        complain: Callable[[str], None],
    ) -> None:
        """`place` is asked before each connection; `complain` hears what people should know."""
        self._membership, self._start, self._shown = membership, start, shown
        self._size = len(shown.weights)
        self._place, self._complain = place, complain
        self._counted: dict[str, int] = {}
        self._moved: torch.Tensor | None = None  # what is to be added to the learner's own weights
        self._changed = threading.Condition()  # guards shown, counted, moved and the flags
        self._is_welcome = False
        self._is_closed = False
        self._is_moving = False  # to a newer plan, and perhaps another place
        self._pings, self._pongs, self._mark = 0, 0, 0  # on this connection; the mark follows the contribution
        self._is_delivered = False  # the shard has the contribution, or has refused it
        self.refusal = ""  # why this learner cannot ever come in
        self._to_send = False  # the contribution
        self._told = (Version(), 0, 0, 0.0)  # its base, steps, samples, and what the last round has cost
        self._every = 0  # steps between rounds, of the version that is shown
        self._tls: ssl.SSLSocket | None = None
        self._out: deque[memoryview] = deque()
        self._heard_s = self._pinged_s = 0.0
        self._change = Packed(torch.empty(0), None)  # what is being read
        self._next = 0  # piece of it
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.bytes_sent = self.bytes_heard = self.rounds = 0
        self.counted_s = 0.0  # when a version came that has the contribution which was under way
        self._thread = threading.Thread(target=self._run, name="swarm-shard", daemon=True)
        self._thread.start()

    @property
    def is_settled(self) -> bool:
        """Nothing is to be waited for: no contribution is under way, or nobody is there to answer."""
        with self._changed:
            return not self._shown.is_waiting or not self._is_welcome

    @property
    def version(self) -> Version:
        """The outer weights that this learner was shown."""
        with self._changed:
            return self._shown.version

    @property
    def every(self) -> int:
        """Steps from the round of that version to the next; 0 where this shard does not decide it."""
        with self._changed:
            return self._every

    def shown_weights(self) -> torch.Tensor:
        """A copy of the outer weights."""
        with self._changed:
            return self._shown.weights.clone()

    def take_moved(self) -> torch.Tensor | None:
        """What is to be added to the learner's own weights, now and before anything is contributed."""
        with self._changed:
            moved, self._moved = self._moved, None
            return moved

    def contribute(self, now: torch.Tensor, steps: int, samples: int, cost: float) -> bool:
        """Send how far the learner's own weights have come; False where the last one is still under way.

        `cost` is what the last round took, in steps; below 0: not known.
        """
        with self._changed:
            if self._shown.is_waiting or not self._is_welcome or self._moved is not None:
                return False
            self._shown.take(now)
            self._is_delivered = False
            self._to_send, self._told = True, (self._shown.version, steps, samples, cost)
        self._wake()
        return True

    def wait(self, timeout_s: float, is_so: Callable[[], bool]) -> bool:
        """Until something is so of this link."""
        with self._changed:
            return self._changed.wait_for(is_so, timeout_s)

    def wait_for_version(self, number: int, timeout_s: float) -> bool:
        """Until this learner was shown a version as high as that."""
        return self.wait(timeout_s, lambda: self._shown.version.number >= number)

    def is_shown(self) -> bool:
        """Whether there are outer weights at all; for `wait`."""
        return self._shown.version.number >= 0

    def is_answered(self) -> bool:
        """As `is_settled`, for `wait`."""
        return not self._shown.is_waiting or not self._is_welcome

    def is_welcome(self) -> bool:
        """Whether the shard takes contributions now; for `wait`."""
        return self._is_welcome

    def is_delivered(self) -> bool:
        """Whether the shard has heard the last contribution, and keeps it for its round; for `wait`."""
        return self._is_delivered

    def follow(self, membership: LearnerSeat) -> None:
        """Go on by a newer plan, on a connection of its own: the shard may be elsewhere."""
        with self._changed:
            self._membership = membership
            self._is_moving, self._is_welcome = True, False
        self._wake()

    def close(self) -> None:
        """End the connection and the thread."""
        with self._changed:
            self._is_closed = True
        self._wake()
        self._thread.join(CONNECT_S)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    # In the thread.

    def _run(self) -> None:
        pause_s = AGAIN_S
        while not self._is_closed:
            with self._changed:
                self._is_moving = False
            try:
                place = self._place()
                if place is not None:
                    self._connect(place)
                    pause_s = AGAIN_S
                    self._converse()
            except (OSError, ValueError) as error:
                if isinstance(error, ssl.SSLError) and not isinstance(error, ENDED):
                    self._complain(f"a shard cannot be talked to: {error}")
            except Exception as error:  # noqa: BLE001  # without this thread there would be no rounds, and nobody told why
                self._complain(f"a shard is connected to anew, after {type(error).__name__}: {error}")
            finally:
                self._part()
            if self._is_moving:
                pause_s = AGAIN_S
            elif not self._is_closed:
                self._sleep(pause_s)
                pause_s = min(AGAIN_MOST_S, 2 * pause_s)

    def _sleep(self, pause_s: float) -> None:
        """Until there is news, and no longer than that."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.poll(1e3 * pause_s)
        self._drain()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake_read, 1 << 10):
                continue

    def _part(self) -> None:
        """What was sent may have been counted: it stays to be asked for."""
        tls, self._tls = self._tls, None
        if tls is not None:
            tls.close()
        self._out.clear()
        with self._changed:
            self._is_welcome = self._to_send = False
            self._pings = self._pongs = self._mark = 0
            self._changed.notify_all()

    def _connect(self, place: ShardPlace) -> None:
        host, _, port = place.address.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the fingerprint is looked at instead
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        plain = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._tls = context.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        found = hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(found, place.fingerprint):
            raise ShardGone("another process answers at the address of the shard")
        self._tls.setblocking(False)
        self._heard_s = self._pinged_s = time.monotonic()

    def _converse(self) -> None:
        self._greet()
        while True:
            head = HEAD.unpack(self._bytes(HEAD.size))
            if head[1] > FIELDS_BYTES_MAX or head[2] > 4 * PIECE:
                raise ShardGone("the shard sent a frame that is none")
            fields = json.loads(self._bytes(head[1]))
            self._take(head[0], fields, head[2])

    def _greet(self) -> None:
        with self._changed:
            self._is_welcome = False
            version = self._shown.version
        told = self._membership._asdict()
        self._send(HELLO, {**told, "start": self._start, "version": _to_wire(version)})

    def _take(self, kind: int, fields: Mapping[str, Any], content: int) -> None:
        if self._is_moving:
            raise ShardGone("a newer plan is followed")
        if kind == NEXT:
            self._take_next(fields, content)
        elif kind == STATE:
            self._take_state(fields, content)
        elif content:
            raise ShardGone(f"the shard sent {content} bytes with a frame of kind {kind}")
        elif kind == WELCOME:
            with self._changed:
                self._shown.rename(_version(fields["version"]))
                self._is_welcome = not self._is_moving
                self._changed.notify_all()
        elif kind == ASK:
            self._tell_weights()
        elif kind == PING:
            self._hear_pong()
        elif kind == REFUSED:
            self._hear_refusal(fields)
        elif kind == AWAY:
            if fields["objection"] not in PASSING:
                self.refusal = str(fields["text"])
                self._complain(f"this learner is refused: {fields['text']}")
            raise ShardGone(fields["text"])

    def _hear_refusal(self, fields: Mapping[str, Any]) -> None:
        name = fields["objection"]
        with self._changed:
            if name != "COUNTED":
                self._shown.give_up(_version(fields["base"]))
            self._changed.notify_all()
        if name not in PASSING:
            self._complain(f"a contribution is refused: {fields['text']}")
        if name in ("OLD_PLAN", "UNHEARD_PLAN", "STRANGER", "COUNTED"):
            raise ShardGone(fields["text"])

    def _hear_pong(self) -> None:
        """The shard has read all that was sent before that ping."""
        with self._changed:
            self._pongs += 1
            self._is_delivered = self._is_delivered or bool(self._mark and self._pongs >= self._mark)
            self._changed.notify_all()

    def _ping(self) -> None:
        self._pings += 1
        self._send(PING, {})

    def _take_next(self, fields: Mapping[str, Any], content: int) -> None:
        packed = self._read_piece(fields["at"], self._size, content, is_quantised=self._shown.is_quantised)
        if packed is None:
            return
        counted = fields["counted"]
        with self._changed:
            base, version = _version(fields["base"]), _version(fields["version"])
            was_waiting = self._shown.is_waiting
            moved = self._shown.move(base, version, packed, counted)
            if was_waiting and not self._shown.is_waiting:
                self.counted_s = time.monotonic()
            if moved is not None:
                self._counted.update(counted)
                self._every = int(fields.get("every", 0))
                self._add(moved)
                self.rounds += 1
        if moved is None:
            self._greet()

    def _take_state(self, fields: Mapping[str, Any], content: int) -> None:
        packed = self._read_piece(fields["at"], self._size, content, is_quantised=False)
        if packed is None:
            return
        with self._changed:
            moved = self._shown.replace(_version(fields["version"]), packed.values, fields["counted"])
            self._counted = dict(fields["counted"])
            self._every = int(fields.get("every", 0))
            self._add(moved)
            self._is_welcome = not self._is_moving

    def _add(self, moved: torch.Tensor) -> None:
        self._moved = moved if self._moved is None else self._moved.add_(moved)
        self._changed.notify_all()

    def _read_piece(self, at: int, size: int, content: int, *, is_quantised: bool) -> Packed | None:
        """The vector, once it is whole."""
        start, stop = at * PIECE, min((at + 1) * PIECE, size)
        blocks = -(-(stop - start) // BLOCK) if is_quantised else 0
        if (
            at not in (0, self._next)
            or start >= max(1, size)
            or content != 4 * blocks + (stop - start) * (1 if is_quantised else 4)
        ):
            raise ShardGone(f"the shard sent piece {at} with {content} bytes, which is not the one that comes next")
        if at == 0:
            values = torch.empty(size, dtype=torch.int8 if is_quantised else torch.float32)
            self._change = Packed(values, torch.empty(-(-size // BLOCK)) if is_quantised else None)
        if self._change.scales is not None:
            self._fill(_bytes_of(self._change.scales[start // BLOCK : start // BLOCK + blocks]))
        self._fill(_bytes_of(self._change.values[start:stop]))
        self._next = 0 if stop == size else at + 1
        return self._change if self._next == 0 else None

    def _tell_weights(self) -> None:
        with self._changed:
            weights, counted = self._shown.weights.clone(), dict(self._counted)
            version, every = _to_wire(self._shown.version), self._every
        for at, (start, stop) in enumerate(_pieces(self._size)):
            self._send(
                WEIGHTS, {"version": version, "counted": counted, "at": at, "every": every}, [weights[start:stop]]
            )

    def _send_contribution(self) -> None:
        with self._changed:
            if not self._to_send or not self._is_welcome:
                return
            self._to_send = False
            packed, (base, steps, samples, cost) = self._shown.packed(), self._told
        fields = {"plan": self._membership.plan, "base": _to_wire(base), "steps": steps, "samples": samples}
        fields |= {"cost": cost}
        for at, (start, stop) in enumerate(_pieces(self._size)):
            parts = [packed.values[start:stop]]
            if packed.scales is not None:
                parts.insert(0, packed.scales[start // BLOCK : -(-stop // BLOCK)])
            self._send(DELTA, {**fields, "at": at}, parts)
        self._ping()
        self._mark = self._pings

    def _send(self, kind: int, fields: Mapping[str, Any], parts: Sequence[torch.Tensor] = ()) -> None:
        data = json.dumps(fields).encode()
        views = [_bytes_of(part) for part in parts if len(part)]
        self._out.append(memoryview(HEAD.pack(kind, len(data), sum(map(len, views))) + data))
        self._out.extend(views)

    # Bytes.

    def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        """Read until it is full, and send meanwhile."""
        assert self._tls is not None
        while view:
            wants = select.POLLOUT if self._flush() else 0
            try:
                count = self._tls.recv_into(view[:RECORD])
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN | wants)
            else:
                if not count:
                    raise ShardGone("the shard hung up")
                view = view[count:]
                self.bytes_heard += count
                self._heard_s = time.monotonic()

    def _flush(self) -> bool:
        """Send what can be sent; True where more waits for the other side."""
        assert self._tls is not None
        while self._out:
            try:
                count = self._tls.send(self._out[0][:RECORD])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return True
            self.bytes_sent += count
            self._out[0] = self._out[0][count:]
            if not self._out[0]:
                self._out.popleft()
        return False

    def _wait(self, events: int) -> None:
        """Until there is something to do.  Raises `ShardGone` where the shard is silent, or this is closed."""
        now_s = time.monotonic()
        if self._is_closed or self._is_moving or now_s > self._heard_s + SILENT_S:
            raise ShardGone("closed, silent, or a newer plan is followed")
        if now_s >= self._pinged_s + PING_S:
            self._pinged_s = now_s
            self._ping()
            events |= select.POLLOUT
        assert self._tls is not None
        poll = select.poll()
        poll.register(self._tls, events)
        poll.register(self._wake_read, select.POLLIN)
        poll.poll(1e3 * PING_S)
        self._drain()
        if self._to_send:
            self._send_contribution()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, which may be written to; torch need not have numpy."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    array = (ctypes.c_char * count).from_address(tensor.data_ptr())
    array.owner = tensor  # lives as long as the view does
    return memoryview(array).cast("B")


def _pieces(size: int) -> list[tuple[int, int]]:
    return [(start, min(start + PIECE, size)) for start in range(0, max(1, size), PIECE)]


def _version(told: Sequence[int]) -> Version:
    return Version(int(told[0]), (int(told[1]), int(told[2]), int(told[3])))


def _to_wire(version: Version) -> list[int]:
    return [version.number, *version.origin]
