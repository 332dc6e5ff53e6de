"""The aggregator: `python -m swarm_agent.aggregation.aggregator HOST`, a child of the agent that holds shards of jobs.

Orders come on stdin, a JSON object on each line: `{"set": {...}}` has a shard and its plan, `{"drop": [...]}` job,
attempt and start of one.  On stdout it tells at which port it listens and the fingerprint of its certificate, and then,
after orders and now and then, how its shards are.  It ends with its stdin, and writes nothing to disk: learners hold
all that a successor needs.

Learners connect by TLS 1.3.  They know the fingerprint from their plan, and prove by the plan's key that they belong
to the job; the standard library is all that a training script has for this.  Each connection has a thread, which reads
into the arrays that the shard works on, and sends meanwhile.  What strangers send is 4 KiB at most, for 10 s.
"""

import hashlib
import hmac
import json
import os
import select
import socket
import ssl
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, NamedTuple

import numpy as np

from swarm_agent.footprint import give_back_memory
from swarmsched.aggregation import frame
from swarmsched.aggregation.blocks import BLOCK, Blocks, Floats, block_count, empty
from swarmsched.aggregation.frame import FrameKind
from swarmsched.aggregation.rule import MergeRule
from swarmsched.aggregation.shard import (
    AggregationPlan,
    AskWeights,
    ContributionCame,
    LearnerCame,
    LearnerGone,
    Object,
    PlanHeard,
    PlanNumber,
    Publish,
    SendWeights,
    Shard,
    ShardEffect,
    ShardEvent,
    ShardVersion,
    TimePassed,
    TurnAway,
    WeightsCame,
    Welcome,
)
from swarmsched.errors import RemoteProtocolError

HELLO_S = 10.0
SILENT_S = 30.0  # learners say something each 5
CONNECTIONS_MAX = 512
STRANGERS_MAX = 64
BEHIND_MOST = 4  # changes that wait to be sent to one learner; one that is slower gets the weights once it can
RECORD = 16_384  # of TLS
TOLD_EVERY_S = 0.5
IDLE_S = 3_600.0
CERTIFICATE = "-----BEGIN CERTIFICATE-----"


class ShardKey(NamedTuple):
    """A shard by the attempt of a job and where its range begins."""

    job: str
    attempt: int
    start: int


class Hosted:
    """A shard with the learners that are connected to it.  Its lock orders all that happens to it."""

    def __init__(self, order: Mapping[str, Any], wake: threading.Event) -> None:
        self.size, self.layout = int(order["size"]), str(order["layout"])
        self.rule = MergeRule(**order["rule"])
        self.secret = str(order["key"])
        self.shard = Shard(self.size, self.rule, self.layout, plan_of(order), time.time_ns(), order.get("every", 0))
        self.connections: dict[str, LearnerConnection] = {}
        self.rounds = 0
        self._copied: tuple[ShardVersion, weakref.ref[Floats] | None] = (ShardVersion(), None)
        self._cpu_s, self._link_bytes, self._wait_s = 0.0, 0, 0.0
        self._lock, self._wake = threading.Lock(), wake

    def is_alike(self, order: Mapping[str, Any]) -> bool:
        """Whether an order is of this shard, and not of another one in its place."""
        return (self.size, self.layout, self.rule) == (order["size"], order["layout"], MergeRule(**order["rule"]))

    def step(self, event: ShardEvent) -> None:
        """Tell the shard, and send what follows."""
        with self._lock:
            self._step(event)

    def hear(self, connection: "LearnerConnection", event: LearnerCame | ContributionCame | WeightsCame) -> None:
        """The word of a learner; one that has come anew says nothing any more on the connection before."""
        former = None
        with self._lock:
            present = self.connections.get(event.learner)
            if isinstance(event, LearnerCame):
                self.connections[event.learner], former = connection, present
            elif present is not connection:
                return
            self._step(event)
        if former is not None and former is not connection:
            former.end()

    def count(self, cpu_s: float, link_bytes: int) -> None:
        """What a learner's connection has taken of this node."""
        with self._lock:
            self._cpu_s += cpu_s
            self._link_bytes += link_bytes

    def _step(self, event: ShardEvent) -> None:
        began_s, began_cpu_s, rounds = time.monotonic(), time.thread_time(), self.rounds
        for effect in self.shard.step(event, began_s):
            self._act(effect)
        if self.rounds != rounds:  # it was closed, and what that took beyond its work was waiting for a core
            self._wait_s = max(0.0, time.monotonic() - began_s - (time.thread_time() - began_cpu_s))
        self._wake.set()

    def leave(self, connection: "LearnerConnection", learner: str) -> None:
        """A connection has ended."""
        with self._lock:
            if self.connections.get(learner) is connection:
                del self.connections[learner]
                self._step(LearnerGone(learner))

    def _act(self, effect: ShardEffect) -> None:
        match effect:
            case Publish():
                self.rounds += 1
                self._publish(effect)
            case SendWeights(learner):
                self._send_weights(learner)
            case Welcome(learner, version):
                self._send(learner, frame.frame(FrameKind.WELCOME, frame.FrameWelcomed(frame.to_wire(version))))
            case AskWeights(learner):
                self._send(learner, frame.frame(FrameKind.ASK))
            case TurnAway(learner, objection):
                self._send(learner, frame.frame(FrameKind.AWAY, frame.FrameRefused(objection.name, objection.value)))
            case Object(learner, objection, base, detail):
                text = f"{objection.value}: {detail}" if detail else objection.value
                refused = frame.FrameRefused(objection.name, text, frame.to_wire(base))
                self._send(learner, frame.frame(FrameKind.REFUSED, refused))

    def _send(self, learner: str, *parts: bytes | memoryview) -> None:
        connection = self.connections.get(learner)
        if connection is not None:
            connection.send(parts)

    def _publish(self, effect: Publish) -> None:
        """One array for all learners: nothing changes it any more."""
        base, version, counted = frame.to_wire(effect.base), frame.to_wire(effect.version), dict(effect.counted)
        every = self.shard.every
        parts: list[bytes | memoryview] = []
        for at in range(frame.piece_count(self.size)):
            content = content_of(effect.change, *frame.bounds(self.size, at))
            length = sum(len(each) for each in content)
            parts += [frame.frame(FrameKind.NEXT, frame.FrameNext(base, version, counted, at, every), length), *content]
        for learner in self.shard.plan.learners:
            connection = self.connections.get(learner)
            if connection is not None:
                connection.send(parts, is_change=True)

    def _send_weights(self, learner: str) -> None:
        assert self.shard.weights is not None
        weights, version = self._copy_of_weights(), frame.to_wire(self.shard.version)
        counted, every = dict(self.shard.counted), self.shard.every
        for at in range(frame.piece_count(len(weights))):
            content = content_of(Blocks(weights), *frame.bounds(len(weights), at))
            length = sum(len(each) for each in content)
            self._send(
                learner, frame.frame(FrameKind.STATE, frame.FrameWeights(version, counted, at, every), length), *content
            )

    def _copy_of_weights(self) -> Floats:
        """One for all that are given the same version: it lives until the last of them has it."""
        version, copy = self._copied
        found = copy() if copy is not None and version == self.shard.version else None
        if found is None:
            assert self.shard.weights is not None
            found = self.shard.weights.copy()
            self._copied = (self.shard.version, weakref.ref(found))
        return found

    def told(self) -> dict[str, Any]:
        """How it is."""
        with self._lock:
            shard = self.shard
            return {
                "plan": list(shard.plan.number),
                "version": shard.version.number,
                "rounds": self.rounds,
                "waiting": list(shard.waiting),
                "connected": sorted(self.connections),
                "cpu_s": round(self._cpu_s, 6),
                "link_bytes": self._link_bytes,
                "wait_s": round(self._wait_s, 6),
                "refused": {objection.name: count for objection, count in shard.refused.items()},
            }


class LearnerConnection:
    """One learner's, in a thread of its own.  Any thread may `send`."""

    def __init__(self, aggregator: "Aggregator", plain: socket.socket) -> None:
        self._aggregator, self._plain = aggregator, plain
        self._tls: ssl.SSLSocket | None = None
        self._out: deque[memoryview] = deque()
        self._changes: deque[int] = deque()  # how many parts were to be sent when each change that waits was through
        self._queued = self._sent = 0
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_over = False
        self._moved = 0  # bytes, both ways, that were not counted yet
        self._heard_s = time.monotonic()
        self.hosted: Hosted | None = None
        self._learner = ""
        self._change = empty(0, is_quantised=True)  # what a contribution is read into
        self._weights = np.empty(0, np.float32)
        self._next = 0  # piece

    def send(
        self, parts: "tuple[bytes | memoryview, ...] | list[bytes | memoryview]", *, is_change: bool = False
    ) -> None:
        """Queue what is to be sent, in one piece; a learner that is far behind has its connection ended instead."""
        with self._lock:
            if self._is_over:
                return
            while self._changes and self._changes[0] <= self._sent:
                self._changes.popleft()
            if is_change and len(self._changes) >= BEHIND_MOST:
                self._is_over = True
            else:
                self._out.extend(memoryview(part) for part in parts)
                self._queued += len(parts)
                if is_change:
                    self._changes.append(self._queued)
            os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """Have the thread end soon."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serve until the learner goes, breaks the rules or is silent."""
        try:
            self._plain.settimeout(HELLO_S)
            self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._tls = self._aggregator.context.wrap_socket(self._plain, server_side=True)
            self._tls.setblocking(False)
            counted_s = time.thread_time()
            while True:
                self._take_frame()
                if self.hosted is not None:
                    self.hosted.count(time.thread_time() - counted_s, self._moved)
                    counted_s, self._moved = time.thread_time(), 0
        except (OSError, EOFError, RemoteProtocolError) as error:
            if self.hosted is None:
                self._aggregator.count_stranger(error)
        finally:
            with self._lock:
                self._is_over = True
                self._out.clear()
            if self.hosted is not None:
                self.hosted.leave(self, self._learner)
            for each in (self._tls, self._plain):
                if each is not None:
                    each.close()
            os.close(self._wake)  # nobody writes to it once this is over
            self._aggregator.forget(self)

    # Frames.

    def _take_frame(self) -> None:
        is_known = self.hosted is not None
        kind, fields, content = frame.head(self._bytes(frame.HEAD.size), is_known=is_known)
        data = self._bytes(fields)
        if kind is FrameKind.HELLO and not content:
            self._greet(frame.read(kind, frame.FrameHello, data))
        elif kind is FrameKind.DELTA:
            self._take_delta(frame.read(kind, frame.FrameDelta, data), content)
        elif kind is FrameKind.WEIGHTS:
            self._take_weights(frame.read(kind, frame.FrameWeights, data), content)
        elif kind is FrameKind.PING and not content:
            self.send((frame.frame(FrameKind.PING),))
        else:
            raise RemoteProtocolError(f"a learner sends no {kind.name} with {content} bytes")

    def _greet(self, hello: frame.FrameHello) -> None:
        hosted = self._aggregator.find(ShardKey(hello.job, hello.attempt, hello.start))
        is_right = hosted is not None and hmac.compare_digest(hello.key.encode(), hosted.secret.encode())
        if hosted is None or not is_right:
            raise RemoteProtocolError("there is no such shard, or the key is not that of its plan")
        if self.hosted is not None and (self.hosted is not hosted or self._learner != hello.learner):
            raise RemoteProtocolError("a connection is of one learner and one shard")
        self._learner, self.hosted = hello.learner, hosted
        plan, version = frame.plan_number(hello.plan), frame.from_wire(hello.version)
        event = LearnerCame(hello.learner, plan, hello.layout, version, hello.leaves)
        hosted.hear(self, event)

    def _take_delta(self, delta: frame.FrameDelta, content: int) -> None:
        assert self.hosted is not None
        size, is_quantised = self.hosted.size, self.hosted.rule.is_quantised
        start, stop = self._expect(delta.at, size, content, is_quantised=is_quantised)
        if delta.at == 0:
            self._change = empty(size, is_quantised=is_quantised)
        for part in content_of(self._change, start, stop):
            self._fill(part)
        if self._is_whole(delta.at, size):
            plan, base = frame.plan_number(delta.plan), frame.from_wire(delta.base)
            change, self._change = self._change, empty(0, is_quantised=is_quantised)
            event = ContributionCame(self._learner, plan, base, delta.steps, delta.samples, change, delta.cost)
            self.hosted.hear(self, event)

    def _take_weights(self, told: frame.FrameWeights, content: int) -> None:
        assert self.hosted is not None
        start, stop = self._expect(told.at, self.hosted.size, content, is_quantised=False)
        if told.at == 0:
            self._weights = np.empty(self.hosted.size, np.float32)
        self._fill(self._weights[start:stop].data.cast("B"))
        if self._is_whole(told.at, self.hosted.size):
            weights, self._weights = self._weights, np.empty(0, np.float32)
            version = frame.from_wire(told.version)
            self.hosted.hear(self, WeightsCame(self._learner, version, weights, told.counted, told.every))

    def _expect(self, at: int, size: int, content: int, *, is_quantised: bool) -> tuple[int, int]:
        """The bounds of the piece that comes next; raises `RemoteProtocolError` for any other, before it is read."""
        start, stop = frame.bounds(size, at)
        if at not in (0, self._next) or content != frame.content_bytes(stop - start, is_quantised=is_quantised):
            raise RemoteProtocolError(f"piece {at} with {content} bytes is not the one that comes next")
        return start, stop

    def _is_whole(self, at: int, size: int) -> bool:
        self._next = 0 if at + 1 == frame.piece_count(size) else at + 1
        return self._next == 0

    # Bytes.

    def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        """Read until it is full, and send meanwhile.  Raises OSError and EOFError."""
        assert self._tls is not None
        while view:
            wants = select.POLLOUT if self._flush() else 0
            try:
                count = self._tls.recv_into(view[:RECORD])
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN | wants)
            else:
                if not count:
                    raise EOFError
                view = view[count:]
                self._moved += count
                self._heard_s = time.monotonic()

    def _flush(self) -> bool:
        """Send what can be sent now; True where more waits for the other side."""
        assert self._tls is not None
        while True:
            with self._lock:
                part = self._out[0] if self._out else None
            if part is None:
                return False
            try:
                count = self._tls.send(part[:RECORD])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return True
            self._moved += count
            with self._lock:
                self._out[0] = part[count:]
                if not self._out[0]:
                    self._out.popleft()
                    self._sent += 1

    def _wait(self, events: int) -> None:
        """Until there is something to do; raises OSError where the time is over."""
        limit_s = self._heard_s + (SILENT_S if self.hosted else HELLO_S) - time.monotonic()
        if self._is_over or limit_s <= 0:
            raise TimeoutError
        assert self._tls is not None
        poll = select.poll()
        poll.register(self._tls, events)
        poll.register(self._wake, select.POLLIN)
        poll.poll(limit_s * 1e3)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)


class Aggregator:
    """All shards of this process, and who is connected."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.strangers = 0
        self.last_problem = ""
        self._shards: dict[ShardKey, Hosted] = {}
        self._connections: set[LearnerConnection] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.has_obeyed = threading.Event()

    def obey(self, order: Mapping[str, Any]) -> None:
        """One order of the agent."""
        if "drop" in order:
            with self._lock:
                gone = self._shards.pop(ShardKey(*order["drop"]), None)
            for connection in list(gone.connections.values()) if gone else ():
                connection.end()
            return
        told = order["set"]
        key = ShardKey(told["job"], told["attempt"], told["start"])
        found = self.find(key)
        if found is not None and found.is_alike(told):
            found.secret = told["key"]
            found.step(PlanHeard(plan_of(told)))
            return
        with self._lock:
            self._shards[key] = Hosted(told, self._wake)

    def find(self, key: ShardKey) -> Hosted | None:
        """A shard."""
        with self._lock:
            return self._shards.get(key)

    def accept(self, plain: socket.socket) -> None:
        """Serve whoever connects; too many strangers have to wait for one another."""
        connection = LearnerConnection(self, plain)
        with self._lock:
            strangers = sum(each.hosted is None for each in self._connections)
            if len(self._connections) >= CONNECTIONS_MAX or strangers >= STRANGERS_MAX:
                plain.close()
                return
            self._connections.add(connection)
        threading.Thread(target=connection.run, daemon=True).start()

    def forget(self, connection: LearnerConnection) -> None:
        """A connection has ended."""
        with self._lock:
            self._connections.discard(connection)

    def count_stranger(self, error: Exception) -> None:
        """One that has not shown the key has gone."""
        with self._lock:
            self.strangers += 1
            self.last_problem = f"{type(error).__name__}: {error}"[:200]

    def told(self) -> dict[str, Any]:
        """How all is."""
        with self._lock:
            shards = dict(self._shards)
        told = [
            {"job": key.job, "attempt": key.attempt, "start": key.start} | each.told() for key, each in shards.items()
        ]
        return {"shards": told, "strangers": self.strangers, "problem": self.last_problem}

    def keep_time(self) -> None:
        """Tell shards that time has passed, for ever."""
        while True:
            self._wake.clear()
            with self._lock:
                shards = list(self._shards.values())
            now_s = time.monotonic()
            deadlines = [(each.shard.next_deadline_s, each) for each in shards]
            for deadline_s, each in deadlines:
                if deadline_s <= now_s:
                    each.step(TimePassed())
            next_s = min((at for at, _ in deadlines if at > now_s), default=now_s + IDLE_S)
            self._wake.wait(max(0.0, min(IDLE_S, next_s - now_s)))


def content_of(blocks: Blocks, start: int, stop: int) -> list[memoryview]:
    """The bytes of a piece, as they are sent, or to be read into."""
    if start == stop:
        return []
    values = blocks.values[start:stop].data.cast("B")
    if blocks.scales is None:
        return [values]
    first = start // BLOCK
    return [blocks.scales[first : first + block_count(stop - start)].data.cast("B"), values]


def plan_of(order: Mapping[str, Any]) -> AggregationPlan:
    """The plan of an order."""
    told = order["plan"]
    number = PlanNumber(*told["number"])
    return AggregationPlan(number, tuple(told["learners"]), told.get("quorum", 0), told.get("batch_most", 0))


def certificate() -> tuple[ssl.SSLContext, str]:
    """A key of this life, and the fingerprint by which learners know it.

    A process of its own makes it, which ends at once: what it imports would take a quarter of this one's memory.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, _pem())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        pem = stream.read()
    os.waitpid(pid, 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    file = os.memfd_create("certificate")  # ssl reads files alone, and a key belongs to none
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    text = pem.decode()
    return context, hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[text.index(CERTIFICATE) :])).hexdigest()


def _pem() -> bytes:
    """A key, and a certificate that it has signed itself."""
    import datetime  # noqa: PLC0415  # see above

    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarm aggregator")])
    begun = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begun - datetime.timedelta(days=1))
        .not_valid_after(begun + datetime.timedelta(days=3_650))
        .sign(secret, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    key = secret.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return key + made.public_bytes(serialization.Encoding.PEM)


def serve(host: str, orders: IO[str], answers: IO[str]) -> None:
    """The child: obey until the orders end."""
    context, fingerprint = certificate()
    aggregator = Aggregator(context)
    listening = socket.create_server((host, 0), backlog=128, family=family_of(host))
    told = {"port": listening.getsockname()[1], "fingerprint": fingerprint}
    give_back_memory()
    answers.write(json.dumps(told) + "\n")
    answers.flush()
    threading.Thread(target=aggregator.keep_time, daemon=True).start()
    threading.Thread(target=_accept, args=(aggregator, listening), daemon=True).start()
    threading.Thread(target=_tell, args=(aggregator, answers), daemon=True).start()
    for line in orders:
        aggregator.obey(json.loads(line))
        aggregator.has_obeyed.set()


def family_of(host: str) -> socket.AddressFamily:
    """Of an address of this node."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _accept(aggregator: Aggregator, listening: socket.socket) -> None:
    while True:
        try:
            plain, _ = listening.accept()
        except OSError:  # no descriptor is left
            time.sleep(1.0)
        else:
            aggregator.accept(plain)


def _tell(aggregator: Aggregator, answers: IO[str]) -> None:
    """Where something has changed."""
    last: dict[str, Any] = {}
    while True:
        aggregator.has_obeyed.wait(TOLD_EVERY_S)
        aggregator.has_obeyed.clear()
        told = aggregator.told()
        if told != last:
            answers.write(json.dumps(told) + "\n")
            answers.flush()
            last = told


def main() -> None:
    """Serve, and end at once with the agent: daemon threads may be within a merge."""
    serve(sys.argv[1], sys.stdin, sys.stdout)
    os._exit(0)


if __name__ == "__main__":
    main()
