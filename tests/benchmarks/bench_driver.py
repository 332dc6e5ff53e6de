"""What the agent's input and output cost: a durable commit, a UDP round trip, a peer message round trip."""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from aiohttp import web

from swarm_agent.driver import Driver
from swarm_agent.storage.store import Store
from swarm_agent.transport.peer import PeerChannel
from swarm_agent.transport.udp import UdpTransport
from swarmsched.effects import Effect, Persist, SendPeer
from swarmsched.events import DatagramReceived, Event, PeerMessageReceived
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.ledger.message import TaskReportReceived
from swarmsched.node.protocol import PEER_CODEC
from swarmsched.wire.sealing import INSTANCE_ID_BYTES, Keyring, Sealer
from tests.agent.testing import ControlledStore, ScriptedMachine, free_port

COMMITS = 200
DATAGRAMS = 2_000
MESSAGES = 300
A, B = NodeId("a"), NodeId("b")


def run() -> list[tuple[str, float, str]]:
    """(name, value, unit) of each figure; medians."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return [
            ("fsync of this disk, median", fsync_s() * 1e3, "ms"),
            ("durable commit of 3 entries, median", commit_s() * 1e3, "ms"),
            ("sealed UDP round trip, median", runner.run(udp_round_trip_s()) * 1e6, "us"),
            ("peer message round trip, median", runner.run(peer_round_trip_s()) * 1e3, "ms"),
            ("peer message round trip with a durable answer, median", runner.run(peer_round_trip_s(True)) * 1e3, "ms"),
        ]


def fsync_s() -> float:
    """Append 4 KiB and fsync."""
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        times = []
        for _ in range(COMMITS):
            started_s = time.perf_counter()
            file.write(b"x" * 4_096)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def commit_s() -> float:
    """Three entries of 1 kB in one transaction of the agent's store."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        store = Store.open(Path(folder) / "agent.db", label="bench", node="a")
        times = []
        for number in range(COMMITS):
            entries = [Persist("register", f"job{number}.{part}", b"x" * 1_000) for part in range(3)]
            started_s = time.perf_counter()
            store.commit(entries)
            times.append(time.perf_counter() - started_s)
        store.close()
    return statistics.median(times)


def _sealer(purpose: str = "packet") -> Sealer:
    instance_id = os.urandom(INSTANCE_ID_BYTES)
    return Sealer(keyring=Keyring(b"k" * 32), label="bench", instance_id=instance_id, purpose=purpose)


async def udp_round_trip_s() -> float:
    """200 bytes there and back between two transports of one process."""
    addresses = [("127.0.0.1", free_port()) for _ in range(2)]
    answered = asyncio.Event()

    def on_answer(event: Event) -> None:
        answered.set()

    def echo(event: Event) -> None:
        assert isinstance(event, DatagramReceived)
        responder.send(event.source, event.payload)

    asker = UdpTransport(addresses[0], _sealer(), on_answer)
    responder = UdpTransport(addresses[1], _sealer(), echo)
    asker.open()
    responder.open()
    times = []
    for _ in range(DATAGRAMS):
        answered.clear()
        started_s = time.perf_counter()
        asker.send(addresses[1], b"x" * 200)
        await answered.wait()
        times.append(time.perf_counter() - started_s)
    asker.close()
    responder.close()
    return statistics.median(times)


class _Peer:
    """A channel on a port of its own over a scripted core."""

    def __init__(self, name: NodeId, addresses: dict[NodeId, Address], store: ControlledStore | Store) -> None:
        self.machine = ScriptedMachine()
        self.driver = Driver(self.machine, store, self._perform)
        self.channel = PeerChannel(name, _sealer("body"), PEER_CODEC, self.driver, addresses.get)
        self.address = addresses[name] = ("127.0.0.1", free_port())

    def _perform(self, effect: Effect) -> None:
        assert isinstance(effect, SendPeer)
        self.channel.send(effect.recipient, effect.message)

    async def start(self) -> web.AppRunner:
        app = web.Application()
        self.channel.add_routes(app)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, *self.address).start()
        self.channel.open()
        self.driver.start()
        return runner


async def peer_round_trip_s(is_durable: bool = False) -> float:
    """A small message and its answer; with `is_durable`, the answer waits for a commit of the real store."""
    addresses: dict[NodeId, Address] = {}
    answered = asyncio.Event()
    message = TaskReportReceived(JobId("01" + "a" * 24), 1, 1)

    def on_answer(event: Event) -> Sequence[Effect]:
        answered.set()
        return ()

    def on_message(event: Event) -> Sequence[Effect]:
        answer = [SendPeer(A, message)] if isinstance(event, PeerMessageReceived) else []
        return [Persist("register", "job", b"x" * 1_000), *answer] if is_durable else answer

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        store = Store.open(Path(folder) / "agent.db", label="bench", node="b")
        asker, responder = _Peer(A, addresses, ControlledStore()), _Peer(B, addresses, store)
        asker.machine.respond, responder.machine.respond = on_answer, on_message
        runners = [await asker.start(), await responder.start()]
        times = []
        for _ in range(MESSAGES):
            answered.clear()
            started_s = time.perf_counter()
            asker.channel.send(B, message)
            await answered.wait()
            times.append(time.perf_counter() - started_s)
        for peer, runner in zip((asker, responder), runners, strict=True):
            await peer.channel.close()
            await runner.cleanup()
            await peer.driver.stop()
        store.close()
    return statistics.median(times)


if __name__ == "__main__":
    for name, value, unit in run():
        print(f"{name:60} {value:10.3f} {unit}")
