"""A member that only gossips: the agent's membership, state plane, driver, UDP and peer channel, and nothing else.

`gossip_system` starts this once and asks for members over a socket: each is a fork, since sixty interpreters would
take a minute to start.  A member takes one JSON order a line and writes one sighting a line: `begin` starts a life with
a fresh view, `change` writes a new node record, `end` closes the sockets without farewell.
"""

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NoReturn

import uvloop
from aiohttp import web

from swarm_agent.driver import Driver
from swarm_agent.footprint import give_back_memory
from swarm_agent.transport.peer import PeerChannel
from swarm_agent.transport.udp import UdpTransport
from swarmsched.effects import Effect, Persist, SendDatagram, SendPeer
from swarmsched.events import DatagramReceived, Event, PeerMessageReceived, TimerFired
from swarmsched.gossip.exchange import STATE_MESSAGES
from swarmsched.gossip.member import MemberChanged, MemberStatus, MemberView
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import MEMBERSHIP_PEER_KINDS, is_membership_payload
from swarmsched.gossip.record import GpuGroup, NodeRecord
from swarmsched.gossip.state import MemberRef, StateConfig, StatePlane
from swarmsched.ids import Address, NodeId
from swarmsched.policies.registry import check_setting
from swarmsched.wire.codec import Codec
from swarmsched.wire.sealing import INSTANCE_ID_BYTES, Keyring, Sealer

LABEL = "bench"
GPUS = 8
GIB = 2**30
KEEP_ALIVE_S = 75.0
ORDER_BYTES_MAX = 16


class Gossip:
    """Both planes behind one `step`, put together as a node does; tells what a scheduler here would now see."""

    def __init__(self, membership: Membership, state: StatePlane, name: NodeId) -> None:
        self._membership = membership
        self._state = state
        self._name = name
        self._heard: dict[NodeId, int] = {}  # the newest ledger version told, by origin
        self._wanted: int | None = 0  # the change to publish with the next event

    @property
    def next_deadline_s(self) -> float:
        """When `TimerFired` is due."""
        return min(self._membership.next_deadline_s, self._state.next_deadline_s)

    def step(self, event: Event, now_s: float) -> Sequence[Effect]:
        """Take in one event; returns what is to be sent."""
        effects: list[Effect] = []
        if self._wanted is not None:
            effects += self._publish(self._wanted, now_s)
            self._wanted = None
        for effect in self._route(event, now_s):
            if isinstance(effect, MemberChanged):
                self._note(effect.member)
                _tell(effect.member.status.value, effect.member.node_id)
            else:
                effects.append(effect)
        return effects

    def want(self, change: int) -> None:
        """Write this node's record anew with the next event; `change` is its ledger's version."""
        self._wanted = change

    def expect_changes(self) -> None:
        """From now on say which records of others are new."""
        self._heard = {self._name: 0}

    def _publish(self, change: int, now_s: float) -> list[Effect]:
        """Each change has other free GPUs than the one before."""
        group = GpuGroup("NVIDIA H100 80GB HBM3", GPUS, GPUS - change % GPUS, 80 * GIB)
        record = NodeRecord(
            node_id=self._name,
            groups=(group,),
            cpus_total=96,
            cpus_free=96,
            memory_total_bytes=1_024 * GIB,
            memory_free_bytes=1_000 * GIB,
            software_version="benchmark",
            ledger_version=change,
        )
        return self._state.publish_node(record, now_s)

    def _tell_heard(self, now_s: float) -> None:
        for status in self._state.node_records(now_s):
            origin, change = NodeId(status.record.node_id), status.record.ledger_version
            if change > self._heard.get(origin, 0):
                self._heard[origin] = change
                _tell("heard", f"{origin}-{change}")

    def _route(self, event: Event, now_s: float) -> list[Any]:
        match event:
            case TimerFired():
                machines = [each for each in (self._membership, self._state) if now_s >= each.next_deadline_s]
                return [effect for machine in machines for effect in machine.step(event, now_s)]
            case DatagramReceived(payload=payload) if not is_membership_payload(payload):
                return self._on_state(event, now_s)
            case PeerMessageReceived(message=message) if isinstance(message, tuple(STATE_MESSAGES.values())):
                return self._on_state(event, now_s)
            case _:
                return [*self._membership.step(event, now_s)]  # type: ignore[arg-type]  # no other event is posted here

    def _on_state(self, event: DatagramReceived | PeerMessageReceived, now_s: float) -> list[Any]:
        """Changes are looked for only once one was announced, so that an idle member does an idle agent's work."""
        effects = self._state.step(event, now_s)
        if self._heard:
            self._tell_heard(now_s)
        return [*effects]

    def _note(self, member: MemberView) -> None:
        if member.node_id == self._name:
            return
        if member.status in (MemberStatus.ALIVE, MemberStatus.SUSPECT):
            self._state.put_peer(MemberRef(member.node_id, member.address, member.generation))
        else:
            self._state.drop_peer(member.node_id)


class NoDisk:
    """Nothing here outlives the process; the generation is given to it."""

    def commit(self, entries: Sequence[Persist]) -> None:
        """Forget them."""


class Life:
    """From `begin` to `end`: one generation, with the agent's own driver and transports."""

    def __init__(self, order: dict[str, Any]) -> None:
        name, generation = NodeId(order["name"]), order["generation"]
        self._address: Address = (order["host"], order["port"])
        instance_id, keyring = os.urandom(INSTANCE_ID_BYTES), Keyring(bytes.fromhex(order["key"]))
        rng = random.Random(instance_id)
        membership = Membership(
            MembershipConfig(
                node_id=name,
                address=self._address,
                generation=generation,
                instance_id=instance_id,
                seeds=tuple((host, port) for host, port in order["seeds"]),
            ),
            random.Random(rng.getrandbits(64)),
        )
        state = StatePlane(StateConfig(name, generation), random.Random(rng.getrandbits(64)), check_setting)
        self.gossip = Gossip(membership, state, name)
        self.driver = Driver(self.gossip, NoDisk(), self._perform)
        packet_sealer = Sealer(keyring=keyring, label=LABEL, instance_id=instance_id)
        body_sealer = Sealer(keyring=keyring, label=LABEL, instance_id=instance_id, purpose="body")
        self.udp = UdpTransport(self._address, packet_sealer, self.driver.post)
        codec = Codec({**MEMBERSHIP_PEER_KINDS, **STATE_MESSAGES})
        self._channel = PeerChannel(name, body_sealer, codec, self.driver, membership.address_of)

    async def open(self, stack: AsyncExitStack) -> None:
        """Take part until the stack is unwound."""
        self.udp.open()
        stack.callback(self.udp.close)
        self._channel.open()
        stack.push_async_callback(self._channel.close)
        await self._serve(stack)
        self.driver.start()
        stack.push_async_callback(self.driver.stop)

    async def _serve(self, stack: AsyncExitStack) -> None:
        app = web.Application()
        self._channel.add_routes(app)
        runner = web.AppRunner(
            app, access_log=None, handle_signals=False, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=0
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, *self._address, reuse_address=True).start()

    def _perform(self, effect: Effect) -> None:
        """What the two planes ask for; announcements are nobody's here."""
        match effect:
            case SendDatagram(destination, payload):
                self.udp.send(destination, payload)
            case SendPeer(recipient, message):
                self._channel.send(recipient, message)
            case _:
                pass


def _tell(status: str, subject: str) -> None:
    sys.stdout.write(f"{status} {subject}\n")
    sys.stdout.flush()


async def obey() -> None:
    """Take orders until there is nobody to give any."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with AsyncExitStack() as stack:
        while line := await reader.readline():
            order = json.loads(line)
            match order["do"]:
                case "begin":
                    now = Life(order)
                    await now.open(stack)
                    _tell("begun", "-")
                case "expect":
                    now.gossip.expect_changes()
                case "change":
                    now.gossip.want(order["change"])
                    now.driver.post(TimerFired())
                case "count":
                    counted = now.udp.counters
                    _tell("counted", f"{counted['sent_bytes_liveness']},{counted['sent_bytes_state']}")
                case "end":
                    await stack.aclose()
                    _tell("ended", "-")


def fork_members(control: socket.socket) -> None:
    """For each group id that arrives with a socket: a member with that socket as stdin and stdout; answers its pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for members
    give_back_memory()
    while True:
        order, channels, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, 1)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            _become_member(int(order), channels[0])
        os.close(channels[0])
        control.send(b"%d" % pid)


def _become_member(group: int, channel: int) -> NoReturn:
    os.setgid(group)
    os.dup2(channel, sys.stdin.fileno())
    os.dup2(channel, sys.stdout.fileno())
    os.close(channel)
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(obey())
    os._exit(0)


if __name__ == "__main__":
    fork_members(socket.socket(fileno=int(sys.argv[1])))
