"""A swarm of simulated machines that run real nodes; the tests' and the simulate command's way to drive them."""

from collections.abc import Callable, Sequence

from swarmsched.api import JobSpec
from swarmsched.commands import Command, CreateTicket, JobAccepted, SubmitJob, TicketIssued
from swarmsched.effects import SendDatagram, SendPeer
from swarmsched.errors import JobError, UnknownJob
from swarmsched.events import ClientCommandReceived, DatagramReceived, PeerMessageReceived, PeerSendFailed
from swarmsched.ids import JobId, NodeId
from swarmsched.node.node import Node
from swarmsched.node.protocol import PEER_CODEC
from swarmsched.record import JobRecord
from swarmsched.resources import Gpu, NodeResources
from swarmsched.simulator.chance import stream
from swarmsched.simulator.host import START_UTC_S, Host, MakeNode, Observer
from swarmsched.simulator.loop import EventLoop
from swarmsched.simulator.network import Fate, Network, NetworkFaults
from swarmsched.simulator.tasks import Behaviour, read_command

PORT = 7400
SEED_COUNT = 3
REFUSED_S = 0.001  # until a connection to a machine without agent is refused
LOOK_S = 0.05
GIB = 2**30


def simulated_resources(node: NodeId, gpu_count: int) -> NodeResources:
    """A server with that many GPUs, 8 cores and 64 GiB each, at least one server's worth."""
    gpus = tuple(Gpu(f"{node}-gpu-{n}", n, "Simulated H100", 80 * GIB, is_simulated=True) for n in range(gpu_count))
    return NodeResources(gpus, 8 * max(1, gpu_count), 64 * GIB * max(1, gpu_count))


class SimulatedSwarm:
    """`node_count` machines named n000, n001, ...; the same seed and faults give the same history.

    `behaviour` says how long ranks run and how they end.  Observers see every step.
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
    ) -> None:
        self.seed = seed
        self.loop = EventLoop()
        self.network = Network(faults or NetworkFaults(), stream(seed, "network"))
        self.rng = stream(seed, "swarm")  # for the tests' own choices
        self._last_request_id = 0
        names = [NodeId(f"n{index:03}") for index in range(node_count)]
        addresses = {name: (f"10.{index >> 8}.{index & 255}.1", PORT) for index, name in enumerate(names)}
        self.hosts = {
            name: Host(
                node_id=name,
                address=addresses[name],
                resources=simulated_resources(name, gpus_per_node),
                seeds=tuple(addresses[seed_name] for seed_name in names[:SEED_COUNT] if seed_name != name),
                loop=self.loop,
                rng=stream(seed, f"host {name}"),
                surroundings=self,
                behaviour=behaviour,
                observers=observers,
                make_node=make_node,
            )
            for name in names
        }
        self._by_address = {host.address: host for host in self.hosts.values()}

    # --- driving

    def start(self, spread_s: float = 0.5) -> None:
        """Start all agents, each at its own moment within `spread_s`; they are up when this returns."""
        for host in self.hosts.values():
            self.loop.call_later(self.rng.uniform(0.0, spread_s), host.start)
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
        event = ClientCommandReceived(self._last_request_id, command, START_UTC_S + self.loop.now_s)
        self.hosts[node].post(event)
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

    # --- looking

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

    def send_datagram(self, source: Host, effect: SendDatagram) -> None:
        """Carry a gossip packet; nobody is told when it is lost."""
        target = self._by_address.get(effect.destination)
        if target is None:
            return
        fate = self.network.datagram(source.node_id, target.node_id, self.loop.now_s)
        event = DatagramReceived(source.address, effect.payload)
        for delay_s in fate.arrivals_s:
            self.loop.call_later(delay_s, lambda: target.post(event))

    def send_peer(self, source: Host, effect: SendPeer) -> None:
        """Carry a peer message as bytes; report the loss to its sender as the agent's channel does."""
        failed = PeerSendFailed(effect.recipient, effect.message, "connection refused")
        target = self.hosts.get(effect.recipient)
        if target is None:
            self.loop.call_later(REFUSED_S, lambda: source.post(failed))
            return
        body = PEER_CODEC.encode(effect.message)
        fate = self.network.peer_message(source.node_id, target.node_id, self.loop.now_s)
        for delay_s in fate.arrivals_s:
            self.loop.call_later(delay_s, lambda: self._deliver(source, target, effect, body))
        if fate.error:
            self._report(source, effect, fate)

    def _deliver(self, source: Host, target: Host, effect: SendPeer, body: bytes) -> None:
        if target.is_up:
            target.post(PeerMessageReceived(source.node_id, PEER_CODEC.decode(body)))
        else:
            source.post(PeerSendFailed(effect.recipient, effect.message, "connection refused"))

    def _report(self, source: Host, effect: SendPeer, fate: Fate) -> None:
        failed = PeerSendFailed(effect.recipient, effect.message, fate.error)
        self.loop.call_later(fate.error_after_s, lambda: source.post(failed))
