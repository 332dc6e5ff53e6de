"""The agent: one node's core, its ports to the world, and the facade that HTTP, supervision and telemetry are given."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from swarm_agent.config import AgentConfig
from swarm_agent.driver import Driver
from swarm_agent.eventlog import EventLog
from swarm_agent.faults import Faults
from swarm_agent.journal import FIELDS
from swarm_agent.planner import FRESH_S, Foreseen, Planner
from swarm_agent.readiness import Readiness
from swarm_agent.security import Secrets
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.held_files import HeldFiles
from swarm_agent.storage.store import Store
from swarm_agent.supervision.kept_work import KeptFolder
from swarm_agent.supervision.logs import LogStore
from swarm_agent.supervision.runner import TaskRunner
from swarm_agent.task.shim import now
from swarm_agent.telemetry.source import Telemetry
from swarm_agent.transport.arrivals import Arrivals
from swarm_agent.transport.peer import MessageCodec, PeerChannel
from swarm_agent.transport.rpc import PeerRpc
from swarm_agent.transport.udp import UdpTransport
from swarmsched.api import JobSpec
from swarmsched.commands import Command, Refused, Reply
from swarmsched.effects import (
    AggregationEffect,
    Announce,
    ComputePlan,
    Effect,
    ReplyToClient,
    SendDatagram,
    SendPeer,
    TaskEffect,
)
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import ClientCommandReceived, DiskChanged, PeerMessageReceived
from swarmsched.gossip.member import MemberStatus
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.node import Node
from swarmsched.view import JobView
from swarmsched.wire.sealing import Sealer

COMMAND_TIMEOUT_S = 10.0
COMMANDS_LIMIT = 10_000  # waiting for their reply; beyond it new ones are refused

log = logging.getLogger("swarm.agent")


class Agent:
    """What the rooms of the agent share.  Everything here belongs to the event loop's thread.

    `swarm_agent.startup` builds one, connects the rooms (`tasks`, `logs`, `blobs`, `files`, `telemetry`) and starts it.
    """

    tasks: TaskRunner
    logs: LogStore
    blobs: BlobStore
    files: HeldFiles
    telemetry: Telemetry

    def __init__(
        self,
        config: AgentConfig,
        secrets: Secrets,
        node: Node,
        store: Store,
        *,
        address: Address,
        udp_sealer: Sealer,
        body_sealer: Sealer,
        codec: MessageCodec,
        faults: Faults,
    ) -> None:
        self.config = config
        self.secrets = secrets
        self.node = node
        self.store_id = store.store_id  # by which this agent can be a holder
        self.address = address  # resolved form of `config.advertised`
        self.started_utc_s = time.time()
        self.events = EventLog()
        self.arrivals = Arrivals()
        self.readiness = Readiness()
        self.faults = faults
        self.driver = Driver(
            node,
            store,
            self._perform,
            self._on_disk_health,
            faults=faults,
            on_refused=self._on_refused,
            on_failed=self._on_failed,
        )
        self.post = self.driver.post  # hands an event to the core; only from the loop's thread
        self.udp = UdpTransport(config.listen, udp_sealer, self.post)
        self.channel = PeerChannel(config.name, body_sealer, codec, self.driver, node.address_of)
        self.rpc = PeerRpc(config.name, body_sealer, self.channel)
        self.query, self.query_stream = self.rpc.query, self.rpc.query_stream
        self.on_query, self.on_stream = self.rpc.on_query, self.rpc.on_stream
        self.on_stepped = self.driver.on_stepped
        self.planner = Planner(self.post)
        self.tabulate = self.planner.tabulate
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._last_request_id = 0
        self._observers: list[Callable[[Announce], None]] = []

    @property
    def work_sentence(self) -> str:
        """Whether this node takes new work, and why not."""
        ledger = self.node.ledger
        because = f": {ledger.drain_reason}" if ledger.drain_reason else ""
        if ledger.is_draining:
            return f"draining, takes no new work{because}"
        return f"takes no new work for now: {ledger.avoided_reason}" if ledger.avoided_reason else "takes new work"

    def now_s(self) -> float:
        """The clock that the core runs on; hand it to the node's snapshots."""
        return now()

    async def foresee(self, wanted: Collection[JobId], more: Sequence[JobView] = ()) -> Foreseen | None:
        """What is expected of all jobs, and of some that are not there yet; None where the planner is not in time.

        What it told of the last plan serves again where it knows those that are wanted.
        """
        told, now_s = self.planner.foreseen, self.now_s()
        if not more and told.outlooks.keys() >= set(wanted) and now_s - told.seen_s < FRESH_S:
            return told
        view = self.node.cluster_view(now_s)
        return await self.planner.foresee(self.node.setting.policy_setting, replace(view, jobs=(*view.jobs, *more)))

    def on_announce(self, observer: Callable[[Announce], None]) -> None:
        """Tell an observer (metrics) of each announcement, once it is durable."""
        self._observers.append(observer)

    async def command(self, command: Command, timeout_s: float = COMMAND_TIMEOUT_S) -> Reply:
        """Ask the core.

        `Refused` not_ready means that nothing happened, unavailable that the outcome is open.
        """
        complaint = self.driver.barrier.complaint
        if complaint:
            return Refused(
                "not_ready", f"this agent's disk refuses to write: {complaint}", "free space, or ask another"
            )
        if len(self._replies) >= COMMANDS_LIMIT:
            return Refused("not_ready", f"{COMMANDS_LIMIT} commands wait already", "try again, or ask another agent")
        self._last_request_id += 1
        request_id = self._last_request_id
        reply = self._replies[request_id] = asyncio.get_running_loop().create_future()
        self.post(ClientCommandReceived(request_id, command, time.time()))
        try:
            async with asyncio.timeout(timeout_s):
                answer: Reply = await reply
                return answer
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s; the outcome is unknown"
            return Refused("unavailable", problem, "repeat with the same ticket: it creates the job once")
        finally:
            del self._replies[request_id]

    async def left_behind(self, job_id: JobId) -> list[KeptFolder]:
        """Working folders of a job's attempts that are over, on this node."""
        return await self.tasks.upkeep.left_behind(job_id)

    def has_files(self, spec: JobSpec) -> bool:
        """True when all files of a job whose record is here are on this node."""
        return self.files.has(spec)

    def live_peers(self) -> list[NodeId]:
        """Members that are alive and not suspect, without this node."""
        members = self.node.members(self.now_s())
        alive = (member.node_id for member in members if member.status is MemberStatus.ALIVE)
        return [node_id for node_id in alive if node_id != self.config.name]

    def ended_utc_s(self, job_id: JobId) -> float | None:
        """When the job ended, 0 while it lives, None when nothing is known of it here."""
        record, location = self.node.record(job_id), self.node.locations().get(job_id)
        if record is not None:
            return record.ended_utc_s or 0.0
        if location is not None:
            return location.ended_utc_s
        return 0.0 if any(job.job_id == job_id for job in self.node.foreign_jobs()) else None

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendDatagram(destination, payload):
                self.udp.send(destination, payload)
            case SendPeer(recipient, message) if recipient == self.config.name:
                self.post(PeerMessageReceived(recipient, message))
            case SendPeer(recipient, message):
                self.channel.send(recipient, message)
            case ReplyToClient(request_id, reply):
                self._reply(request_id, reply)
            case ComputePlan():
                self.planner.submit(effect)
            case Announce():
                self._announce(effect)
            case _ if isinstance(effect, TaskEffect):
                self.tasks.perform(effect)
            case _ if isinstance(effect, AggregationEffect):
                self.tasks.aggregation.perform(effect)

    def _reply(self, request_id: int, reply: object) -> None:
        """Nobody waits any more once the command timed out; the core's answer is then no news to anyone."""
        waiting = self._replies.get(request_id)
        if waiting is not None and not waiting.done():
            assert isinstance(reply, Reply)
            waiting.set_result(reply)

    def _announce(self, announce: Announce) -> None:
        self.events.append(announce, time.time())
        named = {"job": announce.job_id, "node": announce.node}
        fields = {key: value for key, value in named.items() if value} | dict(announce.fields)
        log.info("%s: %s", announce.kind, announce.text, extra={FIELDS: fields})
        for observer in self._observers:
            observer(announce)

    def _on_refused(self, error: RemoteProtocolError) -> None:
        self.channel.drops.record(error, error.peer)

    def _on_failed(self) -> None:
        remedy = "repeat with the same ticket, here in some seconds or at another agent"
        for request_id in self._replies:
            self._reply(request_id, Refused("unavailable", "the agent's core failed and starts again", remedy))

    def _on_disk_health(self, complaint: str) -> None:
        self.post(DiskChanged(is_writing=not complaint))
        if complaint:
            log.error("the disk refuses to write, nothing is acknowledged until it does: %s", complaint)
        else:
            log.info("the disk writes again, nothing was lost")
