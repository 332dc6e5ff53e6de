"""A learner that speaks to an aggregator over real TCP, frame by frame, as tests want it: without torch."""

import socket
import ssl
from typing import Any

import msgspec
import numpy as np

from swarmsched.aggregation import frame
from swarmsched.aggregation.blocks import PIECE, Blocks, Floats
from swarmsched.aggregation.frame import FrameKind
from swarmsched.aggregation.shard import ShardVersion

KEY = "secret"
LAYOUT = "layout"
WAIT_S = 20.0
opened: list[ssl.SSLSocket] = []
"""Connections of the present test, to be closed when it ends."""


def connected(port: int) -> ssl.SSLSocket:
    """A connection that has said nothing yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opened.append(context.wrap_socket(socket.create_connection(("127.0.0.1", port), WAIT_S)))
    return opened[-1]


class WireLearner:
    """One learner of shard 0 of a job's first attempt."""

    def __init__(self, port: int, name: str, weights: Floats, job: str, key: str = KEY) -> None:
        self.name, self.weights, self.job, self.key = name, weights, job, key
        self.version = ShardVersion()
        self.counted: dict[str, int] = {}
        self.tls = connected(port)

    def greet(self, plan: tuple[int, int] = (1, 1), layout: str = LAYOUT) -> None:
        hello = frame.FrameHello(self.job, 1, 0, plan, self.name, layout, frame.to_wire(self.version), self.key)
        self.tls.sendall(frame.frame(FrameKind.HELLO, hello))

    def contribute(self, vector: Floats, samples: int = 8, pieces: int = 1 << 30, scale: float | None = None) -> None:
        """Of all its pieces, or of the first ones only; with its own scales, or another one."""
        blocks = Blocks.quantised(vector)
        assert blocks.scales is not None
        if scale is not None:
            blocks.scales[-1] = scale
        for at in range(min(pieces, frame.piece_count(len(vector)))):
            start, stop = frame.bounds(len(vector), at)
            first = start // 1_024
            content = blocks.scales[first : first + -(-(stop - start) // 1_024)].tobytes()
            content += blocks.values[start:stop].tobytes()
            delta = frame.FrameDelta((1, 1), frame.to_wire(self.version), 1, samples, at)
            self.tls.sendall(frame.frame(FrameKind.DELTA, delta, len(content)) + content)

    def hear(self) -> tuple[FrameKind, Any]:
        """The next message that is whole, obeyed: weights that are asked for are sent, those that come are kept."""
        moved = np.zeros_like(self.weights)
        while True:
            head = frame.HEAD.unpack(self._bytes(frame.HEAD.size))
            kind = FrameKind(head[0])
            fields: Any = msgspec.json.decode(self._bytes(head[1]), type=frame.FIELDS[kind])
            content = self._bytes(head[2])
            if kind is FrameKind.PING:
                return kind, fields
            if kind is FrameKind.ASK:
                self.tell_weights()
                return kind, fields
            if kind is FrameKind.WELCOME:
                self.version = frame.from_wire(fields.version)
            if kind in (FrameKind.STATE, FrameKind.NEXT):
                start, stop = frame.bounds(len(self.weights), fields.at)
                moved[start:stop] = self._piece(kind, content, stop - start)
                if stop < len(self.weights):
                    continue
                assert kind is FrameKind.STATE or frame.from_wire(fields.base) == self.version
                self.weights = moved if kind is FrameKind.STATE else self.weights + moved
                self.version, self.counted = frame.from_wire(fields.version), self.counted | fields.counted
            return kind, fields

    def until(self, wanted: FrameKind) -> Any:
        """The fields of the next message of that kind."""
        while True:
            kind, fields = self.hear()
            if kind is wanted:
                return fields

    def tell_weights(self) -> None:
        for at in range(frame.piece_count(len(self.weights))):
            start, stop = frame.bounds(len(self.weights), at)
            content = self.weights[start:stop].tobytes()
            told = frame.FrameWeights(frame.to_wire(self.version), self.counted, at)
            self.tls.sendall(frame.frame(FrameKind.WEIGHTS, told, len(content)) + content)

    def _piece(self, kind: FrameKind, content: bytes, count: int) -> Floats:
        if kind is FrameKind.STATE:
            return np.frombuffer(content, np.float32)
        blocks = -(-count // 1_024)
        scales = np.frombuffer(content[: 4 * blocks], np.float32)
        return Blocks(np.frombuffer(content[4 * blocks :], np.int8), scales).piece(0, count)

    def _bytes(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.tls.recv(min(count - len(data), PIECE))
            if not more:
                raise EOFError
            data += more
        return data
