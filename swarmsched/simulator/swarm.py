"""A swarm of simulated machines that run real nodes; the tests' and the simulate command's way to drive them."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from swarmsched.api import JobSpec
from swarmsched.commands import Command, CreateTicket, JobAccepted, SubmitJob, TicketIssued
from swarmsched.effects import SendDatagram, SendPeer
from swarmsched.errors import JobError, UnknownJob
from swarmsched.events import DatagramReceived, DatagramSendFailed, PeerMessageReceived, PeerSendFailed
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.message import AcceptRequest, PrepareRequest
from swarmsched.ledger.message import HoldRequest
from swarmsched.node.config import RETAINED_JOBS
from swarmsched.node.node import Node
from swarmsched.node.parts import Parts
from swarmsched.node.protocol import PEER_CODEC
from swarmsched.record import JobRecord
from swarmsched.resources import Gpu, NodeResources
from swarmsched.simulator.chance import stream
from swarmsched.simulator.clock import HostClock
from swarmsched.simulator.disk import Disk
from swarmsched.simulator.host import Host, MakeNode
from swarmsched.simulator.loop import CALLBACKS_MOST, EventLoop
from swarmsched.simulator.network import Network, NetworkFaults
from swarmsched.simulator.observer import InvariantViolated, Observer, hooks
from swarmsched.simulator.tasks import Behaviour, ElasticAttempts, read_command

PORT = 7400
SEED_COUNT = 3
Link = tuple[NodeId, NodeId]
REFUSED_S = 0.001  # until a connection to a machine without agent is refused
CODED_PERIOD = 8  # of so many peer messages of one kind one is encoded and decoded, to see that the wire carries it
LOOK_S = 0.05
COMMITTING = (HoldRequest, PrepareRequest, AcceptRequest)  # what a namesake never gets: checkers do not see its disk
GIB = 2**30


def simulated_resources(node: NodeId, gpu_count: int) -> NodeResources:
    """A server with that many GPUs, 8 cores and 64 GiB each, at least one server's worth."""
    gpus = tuple(Gpu(f"{node}-gpu-{n}", n, "Simulated H100", 80 * GIB, is_simulated=True) for n in range(gpu_count))
    return NodeResources(gpus, 8 * max(1, gpu_count), 64 * GIB * max(1, gpu_count))


class SimulatedSwarm:
    """`node_count` machines named n000, n001, ...; the same seed and faults give the same history.

    `behaviour` says how long ranks run and how they end.  Observers see every step.  `make_parts` makes a node's parts
    from its machine's clock; without it nodes are made by `make_node`.  `gives_room`: machines host shards.
    """

    def __init__(
        self,
        node_count: int,
        gpus_per_node: int,
        seed: int,
        faults: NetworkFaults | None = None,
        *,
        behaviour: Behaviour = read_command,
        observers: Sequence[Observer] = (),
        make_node: MakeNode = Node,
        make_disk: Callable[[random.Random], Disk] = Disk,
        make_clock: Callable[[EventLoop, random.Random], HostClock] = lambda loop, rng: HostClock(loop),
        make_parts: Callable[[HostClock], Parts] | None = None,
        witnesses: Collection[NodeId] = (),
        retained_jobs: int = RETAINED_JOBS,
        gpu_counts: Mapping[NodeId, int] | None = None,
        callbacks_most: int = CALLBACKS_MOST,
        gives_room: bool = False,
    ) -> None:
        self.seed = seed
        self._observers, self._behaviour, self._make_clock = observers, behaviour, make_clock
        self._namesakes: list[Host] = []
        self.loop = EventLoop(callbacks_most)
        self.network = Network(faults or NetworkFaults(), stream(seed, "network"))
        self.rng = stream(seed, "swarm")  # for the tests' own choices
        self._last_request_id = 0
        names = [NodeId(f"n{index:03}") for index in range(node_count)]
        addresses = {name: (f"10.{index >> 8}.{index & 255}.1", PORT) for index, name in enumerate(names)}
        clocks = {name: make_clock(self.loop, stream(seed, f"clock {name}")) for name in names}

        counts = gpu_counts or {}
        attempts = ElasticAttempts()

        def maker(name: NodeId) -> MakeNode:
            return make_node if make_parts is None else partial(Node, parts=make_parts(clocks[name]))

        self.hosts = {
            name: Host(
                node_id=name,
                address=addresses[name],
                resources=simulated_resources(name, 0 if name in witnesses else counts.get(name, gpus_per_node)),
                seeds=tuple(addresses[seed_name] for seed_name in names[:SEED_COUNT] if seed_name != name),
                loop=self.loop,
                rng=stream(seed, f"host {name}"),
                surroundings=self,
                behaviour=behaviour,
                observers=observers,
                make_node=maker(name),
                make_disk=make_disk,
                clock=clocks[name],
                is_witness=name in witnesses,
                retained_jobs=retained_jobs,
                attempts=attempts,
                gives_room=gives_room,
            )
            for name in names
        }
        self._by_address = {host.address: host for host in self.hosts.values()}
        self._refused: dict[Link, int] = {}  # links on which the kernel refuses to send; by how many faults
        self._sent_counts: dict[type, int] = {}

    # --- driving

    def start(self, spread_s: float = 0.5) -> None:
        """Start all agents, each at its own moment within `spread_s`; they are up when this returns."""
        for host in self.hosts.values():
            self.loop.call_later(self.rng.uniform(0.0, spread_s), host.bring_up)
        self.run_for(spread_s)

    def run_until(self, predicate: Callable[[], bool], limit_s: float) -> bool:
        """Run until the predicate holds, at most `limit_s` virtual seconds; true when it held.

        It is asked every `LOOK_S`, since one that looks at all nodes costs far more than an event.
        """
        end_s = self.loop.now_s + limit_s
        while not predicate():
            if self.loop.now_s >= end_s:
                return False
            self.run_for(min(LOOK_S, end_s - self.loop.now_s))
        return True

    def run_for(self, duration_s: float) -> None:
        """Let virtual time pass."""
        self.loop.run_for(duration_s)

    def begin(self, node: NodeId, command: Command) -> int:
        """Give a node a client's command; the reply will stand in `hosts[node].replies` under the returned id."""
        self._last_request_id += 1
        self.hosts[node].command(self._last_request_id, command)
        return self._last_request_id

    def ask(self, node: NodeId, command: Command, limit_s: float = 15.0) -> object:
        """Give a node a command and run until it has answered; a reply type of `swarmsched.commands`.

        Raises TimeoutError when it does not in time."""
        request_id = self.begin(node, command)
        replies = self.hosts[node].replies
        if not self.loop.run_until(lambda: request_id in replies, limit_s):
            raise TimeoutError(f"{node} did not answer {command} within {limit_s:g} s (seed {self.seed})")
        return replies.pop(request_id)

    def submit(self, node: NodeId, spec: JobSpec) -> JobId:
        """Ticket and submit at one node.  Raises `JobError` when it is refused."""
        ticket = self.ask(node, CreateTicket())
        if not isinstance(ticket, TicketIssued):
            raise JobError("", f"no ticket: {ticket}")
        reply = self.ask(node, SubmitJob(ticket.job_id, ticket.holders, spec))
        if not isinstance(reply, JobAccepted):
            raise JobError(ticket.job_id, f"not accepted: {reply}")
        return ticket.job_id

    # --- namesakes

    def add_namesake(self, node: NodeId) -> Host:
        """Another machine that is called like this one, with a disk of its own, and down.

        Others hear its gossip and it theirs, and peer messages reach whichever of the two their sender believes in.  No
        checker sees its steps: they are told that the name is shared, and nothing may be entrusted to it.
        """
        number = len(self._namesakes)
        namesake = Host(
            node_id=node,
            address=(f"10.255.{number}.1", PORT),
            resources=simulated_resources(NodeId(f"{node}-namesake-{number}"), len(self.hosts[node].resources.gpus)),
            seeds=tuple(host.address for host in [*self.hosts.values()][:SEED_COUNT]),
            loop=self.loop,
            rng=stream(self.seed, f"namesake {number}"),
            surroundings=self,
            behaviour=self._behaviour,
            clock=self._make_clock(self.loop, stream(self.seed, f"namesake's clock {number}")),
        )
        self._namesakes.append(namesake)
        self._by_address[namesake.address] = namesake
        for hook in hooks(self._observers, "name_shared"):
            hook(node)
        return namesake

    # --- looking

    @property
    def machines(self) -> tuple[Host, ...]:
        """All that ever were, namesakes too."""
        return (*self.hosts.values(), *self._namesakes)

    @property
    def up(self) -> tuple[Host, ...]:
        """Machines whose agent runs, paused or not."""
        return tuple(host for host in self.hosts.values() if host.is_up)

    def record(self, job_id: JobId) -> JobRecord:
        """The newest record of the job that any running node has.  Raises `UnknownJob`."""
        records = [host.node.record(job_id) for host in self.up if host.node is not None]
        known = [record for record in records if record is not None]
        if not known:
            raise UnknownJob(job_id, [host.node_id for host in self.hosts.values() if not host.is_up])
        return max(known, key=lambda record: record.stamp)

    def is_converged(self) -> bool:
        """True when every running node sees exactly the running nodes as alive."""
        expected = [host.node_id for host in self.up]
        return all(self.alive_seen_by(node) == expected for node in expected)

    def alive_seen_by(self, node: NodeId) -> list[NodeId]:
        """Names of the members that a node believes alive, sorted."""
        machine = self.hosts[node].node
        members = machine.members(self.loop.now_s) if machine is not None else ()
        return sorted(member.node_id for member in members if member.status.value == "alive")

    # --- what lies between machines

    def refuse_sends(self, source: NodeId, destination: NodeId) -> None:
        """The kernel of `source` answers EPERM whenever something is sent to that destination."""
        self._refused[source, destination] = self._refused.get((source, destination), 0) + 1

    def allow_sends(self, source: NodeId, destination: NodeId) -> None:
        """Take back one `refuse_sends`."""
        count = self._refused.pop((source, destination), 0)
        if count > 1:
            self._refused[source, destination] = count - 1

    def heal_sends(self) -> None:
        """Take back every `refuse_sends`."""
        self._refused.clear()

    def send_datagram(self, source: Host, effect: SendDatagram) -> None:
        """Carry a gossip packet; nobody is told when it is lost, but a send that the kernel refuses is."""
        target = self._by_address.get(effect.destination)
        if target is None:
            return
        if self._refused and (source.node_id, target.node_id) in self._refused:
            source.post(DatagramSendFailed(effect.destination, "EPERM"))
            return
        fate = self.network.datagram(source.node_id, target.node_id, self.loop.now_s)
        if fate.arrivals_s:
            event = DatagramReceived(source.address, effect.payload)
            for delay_s in fate.arrivals_s:
                self.loop.post_later(delay_s, target.receive, event)

    def send_peer(self, source: Host, effect: SendPeer) -> None:
        """Carry a peer message; report its loss to its sender as the agent's channel does."""
        target = self._addressee(source, effect.recipient) if self._namesakes else self.hosts.get(effect.recipient)
        if target is None or (self._refused and (source.node_id, target.node_id) in self._refused):
            error = "connection refused" if target is None else "EPERM"
            self.loop.post_later(REFUSED_S, source.post, PeerSendFailed(effect.recipient, effect.message, error))
            return
        message = self._carried(effect.message)
        fate = self.network.peer_message(source.node_id, target.node_id, self.loop.now_s)
        for delay_s in fate.arrivals_s:
            self.loop.post_later(delay_s, self._deliver, source, target, effect.message, message)
        if fate.error:
            failed = PeerSendFailed(effect.recipient, effect.message, fate.error)
            self.loop.post_later(fate.error_after_s, source.post, failed)

    def are_connected(self, one: Host, other: Host) -> bool:
        """True while messages pass both ways in good time and hardly any is lost."""
        links = ((one.node_id, other.node_id), (other.node_id, one.node_id))
        is_refused = any(link in self._refused for link in links)
        return not is_refused and all(self.network.is_good(*link, self.loop.now_s) for link in links)

    def _addressee(self, source: Host, recipient: NodeId) -> Host | None:
        """The machine that answers where the sender believes that one of this name is."""
        if recipient == source.node_id:
            return source
        address = source.node.address_of(recipient) if source.node is not None else None
        return self.hosts.get(recipient) if address is None else self._by_address.get(address)

    def _carried(self, message: object) -> object:
        """What arrives: messages are immutable, so only a few of each kind need to go through the wire's form."""
        kind = type(message)
        count = self._sent_counts[kind] = self._sent_counts.get(kind, -1) + 1
        if count % CODED_PERIOD:
            return message
        encoded = PEER_CODEC.encode(message)
        arrived = PEER_CODEC.decode(encoded)
        # 3 and 3.0 are equal, their bytes are not
        if arrived != message or PEER_CODEC.encode(arrived) != encoded:
            raise InvariantViolated("wire", f"the wire made {arrived} of {message}")
        return arrived

    def _deliver(self, source: Host, target: Host, sent: object, arrived: object) -> None:
        if not target.is_up:
            source.post(PeerSendFailed(target.node_id, sent, "connection refused"))
        elif target.is_overloaded or (isinstance(arrived, COMMITTING) and target in self._namesakes):
            source.post(PeerSendFailed(target.node_id, sent, "overloaded"))
        else:
            target.receive(PeerMessageReceived(source.node_id, arrived))
