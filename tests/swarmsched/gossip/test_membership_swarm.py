"""Whole swarms of `Membership` objects in virtual time: convergence, detection, and no false verdicts."""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from swarmsched.effects import Persist, SendDatagram, SendPeer
from swarmsched.events import DatagramReceived, DatagramSendFailed, PeerMessageReceived, PeerSendFailed, TimerFired
from swarmsched.gossip.dissemination import MembershipEffect
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.gossip.membership import Membership, MembershipEvent
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.ids import Address, NodeId

ALIVE, SUSPECT, FAILED, LEFT, CONFLICT = MemberStatus


@dataclass
class Process:
    """One agent process: the machine, and what happens to it."""

    membership: Membership
    address: Address
    is_running: bool = True
    is_paused: bool = False
    inbox: list[MembershipEvent] = field(default_factory=list)  # what arrives while paused
    changes: list[tuple[float, MemberChanged]] = field(default_factory=list)
    sent_bytes: int = 0
    sent_packets: int = 0


class Swarm:
    """A seeded network: datagrams with loss and delay, streams without loss, cuts between processes."""

    def __init__(self, seed: int, loss: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.loss = loss
        self.processes: list[Process] = []
        self.is_cut: Callable[[Process, Process], bool] = lambda a, b: False
        self.refuses: Callable[[Process, Process], bool] = lambda a, b: False
        self.udp_is_blocked: Callable[[Process, Process], bool] = lambda a, b: False
        self._queue: list[tuple[float, int, Process, MembershipEvent]] = []
        self._number = 0
        self._step_count = 0

    def start(self, name: str, *, port: int, seeds: Iterable[int] = (), generation: int = 1_000) -> Process:
        config = MembershipConfig(
            node_id=NodeId(name),
            address=("10.0.0.1", port),
            generation=generation,
            instance_id=self.rng.randbytes(16),
            seeds=tuple(("10.0.0.1", seed) for seed in seeds),
            software_version="1.0",
        )
        process = Process(Membership(config, random.Random(self.rng.getrandbits(64))), ("10.0.0.1", port))
        for other in self.processes:  # a port has one owner
            if other.address == process.address:
                assert not other.is_running
        self.processes.append(process)
        self._deliver(process, TimerFired())
        return process

    def start_many(self, count: int, *, seeds: Iterable[int] = (1,)) -> list[Process]:
        return [self.start(f"node-{number:02}", port=number, seeds=seeds) for number in range(1, count + 1)]

    def kill(self, process: Process) -> None:
        process.is_running = False

    def pause(self, process: Process) -> None:
        process.is_paused = True

    def resume(self, process: Process) -> None:
        process.is_paused = False
        inbox, process.inbox = process.inbox, []
        timers = [event for event in inbox if isinstance(event, TimerFired)]
        for event in timers[:1] + [event for event in inbox if not isinstance(event, TimerFired)]:
            self._deliver(process, event)

    def run_until(self, end_s: float, done: Callable[[], bool] = lambda: False) -> float:
        """The time at which `done` became true, or `end_s`."""
        next_look_s = self.now_s
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, process, event = heapq.heappop(self._queue)
            if process.is_running:
                self._deliver(process, event)
                if self.now_s >= next_look_s:
                    next_look_s = self.now_s + 0.01
                    if done():
                        return self.now_s
        self.now_s = end_s
        return end_s

    def converged(self) -> bool:
        running = [process for process in self.processes if process.is_running]
        hashes = {process.membership.membership_hash for process in running}
        return len(hashes) == 1 and all(len(process.membership.alive()) == len(running) for process in running)

    def sees(self, viewer: Process, name: str) -> MemberStatus | None:
        view = viewer.membership.member(NodeId(name), self.now_s)
        return None if view is None else view.status

    def _deliver(self, process: Process, event: MembershipEvent) -> None:
        if process.is_paused:
            process.inbox.append(event)
            return
        if isinstance(event, TimerFired) and self.now_s < process.membership.next_deadline_s:
            return
        effects = process.membership.step(event, self.now_s)
        self._step_count += 1
        if self._step_count % 97 == 0:  # each step would cost most of the run
            process.membership.validate()
        self.perform(process, effects)
        deadline_s = process.membership.next_deadline_s
        if deadline_s < 1e9:
            self._put(max(deadline_s, self.now_s), process, TimerFired())

    def perform(self, process: Process, effects: Sequence[MembershipEffect]) -> None:
        for effect in effects:
            match effect:
                case SendDatagram(destination, payload):
                    self._send_datagram(process, destination, payload)
                case SendPeer(recipient, message):
                    self._send_peer(process, recipient, message)
                case MemberChanged():
                    process.changes.append((self.now_s, effect))
                case Persist(room, key, _):
                    assert (room, key) == ("meta", "generation")

    def _send_datagram(self, sender: Process, destination: Address, payload: bytes) -> None:
        assert len(payload) <= 1_200
        sender.sent_bytes += len(payload)
        sender.sent_packets += 1
        target = self._at(destination)
        if target is None or self.rng.random() < self.loss or self.is_cut(sender, target):
            return
        if self.udp_is_blocked(sender, target):
            return
        if self.refuses(sender, target):
            self._put(self.now_s, sender, DatagramSendFailed(destination, "EPERM"))
            return
        self._put(self.now_s + self._delay_s(), target, DatagramReceived(sender.address, payload))

    def _send_peer(self, sender: Process, recipient: NodeId, message: object) -> None:
        address = sender.membership.address_of(recipient)
        target = None if address is None else self._at(address)
        if target is None or target.is_paused or self.is_cut(sender, target) or self.refuses(sender, target):
            self._put(self.now_s + 0.01, sender, PeerSendFailed(recipient, message, "refused"))
            return
        name = sender.membership._config.node_id
        self._put(self.now_s + 2 * self._delay_s(), target, PeerMessageReceived(name, message))

    def _at(self, address: Address) -> Process | None:
        return next((p for p in self.processes if p.address == address and p.is_running), None)

    def _delay_s(self) -> float:
        return 0.0002 + self.rng.expovariate(1 / 0.001)

    def _put(self, at_s: float, process: Process, event: MembershipEvent) -> None:
        self._number += 1
        heapq.heappush(self._queue, (at_s, self._number, process, event))


def verdicts(swarm: Swarm, status: MemberStatus, since_s: float = 0.0) -> list[tuple[float, str, str]]:
    """(time, viewer, member) of every change to a status."""
    return [
        (at_s, process.membership._config.node_id, change.member.node_id)
        for process in swarm.processes
        for at_s, change in process.changes
        if change.member.status is status and at_s >= since_s
    ]


def settled(seed: int, count: int, loss: float = 0.0) -> tuple[Swarm, list[Process]]:
    swarm = Swarm(seed)
    nodes = swarm.start_many(count)
    assert swarm.run_until(10.0, swarm.converged) < 10.0
    swarm.run_until(swarm.now_s + 3.0)
    swarm.loss = loss
    return swarm, nodes


@pytest.mark.parametrize("seed", range(8))
def test_thirty_nodes_that_know_one_seed_see_all_within_one_and_a_half_seconds(seed: int) -> None:
    swarm = Swarm(seed)
    swarm.start_many(30)
    assert swarm.run_until(10.0, swarm.converged) <= 1.5


@pytest.mark.parametrize(("count", "limit_s"), [(2, 5.5), (3, 7.5), (10, 8.0), (30, 10.0)])
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_node_is_failed_at_all_survivors(seed: int, count: int, limit_s: float) -> None:
    swarm, nodes = settled(seed, count)
    killed_s = swarm.now_s
    swarm.kill(nodes[-1])
    name = nodes[-1].membership._config.node_id
    done_s = swarm.run_until(killed_s + 60.0, lambda: all(swarm.sees(node, name) is FAILED for node in nodes[:-1]))
    assert done_s - killed_s <= limit_s
    assert {member for _, _, member in verdicts(swarm, FAILED)} == {name}


def test_a_quarter_of_packets_lost_for_two_minutes_fails_nobody() -> None:
    swarm, _ = settled(1, 30, loss=0.25)
    swarm.run_until(swarm.now_s + 120.0)
    assert verdicts(swarm, FAILED) == []


@pytest.mark.parametrize("seed", range(3))
def test_nodes_paused_for_twenty_seconds_fail_no_healthy_one_and_come_back(seed: int) -> None:
    swarm, nodes = settled(seed, 30)
    paused = nodes[3:6]
    names = {node.membership._config.node_id for node in paused}
    for node in paused:
        swarm.pause(node)
    swarm.run_until(swarm.now_s + 20.0)
    for node in paused:
        swarm.resume(node)
    swarm.run_until(swarm.now_s + 20.0)
    assert {member for _, _, member in verdicts(swarm, FAILED)} <= names
    assert swarm.converged()


@pytest.mark.parametrize("seed", range(4))
def test_a_restart_under_the_same_name_is_never_failed(seed: int) -> None:
    swarm, nodes = settled(seed, 30)
    before_s = swarm.now_s
    swarm.kill(nodes[7])
    swarm.run_until(before_s + 0.1)
    restarted = swarm.start("node-08", port=108, seeds=[1], generation=1_001)
    assert swarm.run_until(before_s + 30.0, swarm.converged) - before_s <= 1.6
    swarm.run_until(before_s + 30.0)
    assert verdicts(swarm, FAILED) == []
    assert restarted.membership.generation == 1_001


@pytest.mark.parametrize("seed", range(4))
def test_a_restart_with_an_older_generation_jumps_above_it(seed: int) -> None:
    swarm, nodes = settled(seed, 5)
    swarm.kill(nodes[2])
    restarted = swarm.start("node-03", port=3, seeds=[1], generation=7)
    swarm.run_until(swarm.now_s + 10.0, swarm.converged)
    assert restarted.membership.generation == 1_001
    assert swarm.converged()
    assert verdicts(swarm, CONFLICT) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_split_in_halves_heals_within_fifteen_seconds(seed: int) -> None:
    swarm, nodes = settled(seed, 30)
    left = {id(node) for node in nodes[:15]}
    swarm.is_cut = lambda a, b: (id(a) in left) != (id(b) in left)
    swarm.run_until(swarm.now_s + 45.0)
    assert all(len(node.membership.alive()) == 15 for node in nodes)
    healed_s = swarm.now_s
    swarm.is_cut = lambda a, b: False
    assert swarm.run_until(healed_s + 60.0, swarm.converged) - healed_s <= 15.0
    assert verdicts(swarm, FAILED, since_s=healed_s) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_split_by_egress_rules_is_detected_within_fifteen_seconds(seed: int) -> None:
    swarm, nodes = settled(seed, 30)
    left = {id(node) for node in nodes[:15]}
    began_s = swarm.now_s
    swarm.refuses = lambda a, b: (id(a) in left) != (id(b) in left)
    done_s = swarm.run_until(began_s + 60.0, lambda: all(len(node.membership.alive()) == 15 for node in nodes))
    assert done_s - began_s <= 15.0


@pytest.mark.parametrize("seed", range(3))
def test_one_node_cut_off_is_failed_and_fails_the_others(seed: int) -> None:
    swarm, nodes = settled(seed, 10)
    lone = nodes[4]
    began_s = swarm.now_s
    swarm.is_cut = lambda a, b: (a is lone) != (b is lone)
    swarm.run_until(began_s + 60.0)
    assert all(swarm.sees(node, "node-05") is FAILED for node in nodes if node is not lone)
    assert lone.membership.alive() == ["node-05"]
    swarm.is_cut = lambda a, b: False
    assert swarm.run_until(began_s + 120.0, swarm.converged) - began_s - 60.0 <= 15.0


@pytest.mark.parametrize("seed", range(4))
def test_two_holders_of_one_name_are_both_in_conflict_and_nobody_else_suffers(seed: int) -> None:
    swarm, nodes = settled(seed, 5)
    clone = swarm.start("node-03", port=103, seeds=[1], generation=1_004)
    swarm.run_until(swarm.now_s + 30.0)
    viewers = [node for node in nodes if node is not nodes[2]]
    assert {swarm.sees(node, "node-03") for node in viewers} == {CONFLICT}
    assert swarm.sees(nodes[2], "node-03") is CONFLICT
    assert swarm.sees(clone, "node-03") is CONFLICT
    assert "node-03" not in nodes[0].membership.alive()
    assert len(nodes[0].membership.alive()) == 4
    assert {member for _, _, member in verdicts(swarm, FAILED)} == set()


@pytest.mark.parametrize("seed", range(8))
def test_two_holders_of_one_name_find_one_another_and_all_know_within_three_seconds(seed: int) -> None:
    swarm, nodes = settled(seed, 5)
    began_s = swarm.now_s
    clone = swarm.start("node-03", port=103, seeds=[1], generation=1_004)
    viewers = (*nodes, clone)
    done_s = swarm.run_until(began_s + 60.0, lambda: all(swarm.sees(one, "node-03") is CONFLICT for one in viewers))
    assert done_s - began_s <= 3.0


@pytest.mark.parametrize("seed", range(8))
def test_a_conflict_ends_with_its_second_holder_even_if_the_restart_knows_no_generation(seed: int) -> None:
    swarm, nodes = settled(seed, 5)
    clone = swarm.start("node-03", port=103, seeds=[1], generation=1_004)
    swarm.run_until(swarm.now_s + 10.0)
    assert swarm.sees(nodes[0], "node-03") is CONFLICT
    generation = clone.membership.generation
    swarm.kill(clone)
    swarm.kill(nodes[2])
    swarm.kill(nodes[3])
    restarted = swarm.start("node-03", port=3, seeds=[4], generation=generation)
    newcomer = swarm.start("node-04", port=4, seeds=[3], generation=1_001)
    swarm.is_cut = lambda a, b: (a is restarted) != (b is restarted) and newcomer not in (a, b)
    swarm.run_until(swarm.now_s + 4.0)
    swarm.is_cut = lambda a, b: False
    swarm.run_until(swarm.now_s + 30.0, swarm.converged)
    assert swarm.converged()


def test_a_swarm_whose_rumours_are_all_lost_agrees_by_hash_checks() -> None:
    swarm, nodes = settled(2, 10)
    began_s = swarm.now_s
    for node in nodes:
        node.membership._outbox.rumours.put = lambda update: None  # no news is spread
    swarm.start("late", port=50, seeds=[1])
    assert swarm.run_until(began_s + 60.0, swarm.converged) - began_s <= 30.0


@pytest.mark.parametrize("seed", range(3))
def test_a_node_without_udp_is_alive_and_marked_degraded(seed: int) -> None:
    swarm, nodes = settled(seed, 4)
    dumb = nodes[2]
    swarm.udp_is_blocked = lambda a, b: (a is dumb) != (b is dumb)
    swarm.run_until(swarm.now_s + 60.0)
    assert verdicts(swarm, FAILED) == []
    view = nodes[0].membership.member(NodeId("node-03"), swarm.now_s)
    assert view is not None
    assert view.degraded_udp


def test_a_member_that_leaves_is_never_failed_and_not_dialled() -> None:
    swarm, nodes = settled(3, 10)
    leaver = nodes[5]
    swarm.perform(leaver, leaver.membership.leave(swarm.now_s))
    swarm.run_until(swarm.now_s + 1.0)
    swarm.kill(leaver)
    swarm.run_until(swarm.now_s + 30.0)
    assert verdicts(swarm, FAILED) == []
    assert all(swarm.sees(node, "node-06") is LEFT for node in nodes if node is not leaver)


def test_an_idle_swarm_of_thirty_sends_less_than_a_kilobyte_per_second() -> None:
    swarm, nodes = settled(4, 30)
    for node in nodes:
        node.sent_bytes = node.sent_packets = 0
    swarm.run_until(swarm.now_s + 60.0)
    sealing_and_ip_bytes = 45 + 28
    rates = [(node.sent_bytes + node.sent_packets * sealing_and_ip_bytes) / 60.0 for node in nodes]
    assert max(rates) < 500.0
    assert max(node.sent_packets for node in nodes) / 60.0 < 3.0
