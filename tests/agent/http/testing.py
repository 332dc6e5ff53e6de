"""A small swarm in one process for tests of the API: agents without cores whose records the test sets itself.

Logs, blobs, events and readiness are the real ones; questions between agents go through msgpack as on the wire.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack  # ships neither stubs nor py.typed
from msgspec.structs import replace

from swarm_agent.config import AgentConfig
from swarm_agent.doctor import Diagnosis
from swarm_agent.eventlog import EventLog
from swarm_agent.http.facts import AgentFacts, GpuFacts
from swarm_agent.http.stream import closing
from swarm_agent.planner import Foreseen
from swarm_agent.readiness import Check, Readiness
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.supervision.kept_work import KeptFolder
from swarm_agent.supervision.logs import LogConfig, LogStore
from swarm_agent.task.reports import Reported
from swarm_agent.telemetry.reading import GpuReading
from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.card import card_of
from swarmsched.commands import (
    CancelJob,
    Command,
    CommitCheckpoint,
    CreateTicket,
    Done,
    DrainNode,
    ForgetMember,
    JobAccepted,
    MigrateJob,
    RecoverJob,
    Refused,
    Reply,
    ScaleJob,
    SetSwarmSetting,
    SettingStored,
    SignalJob,
    SubmitJob,
    TicketIssued,
)
from swarmsched.errors import AgentUnreachable, RemoteProtocolError
from swarmsched.estimate import SpeedQuestion, SpeedTable
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.gossip.record import GpuGroup, NodeFlag, NodeRecord, NodeStatus
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.models.table import tabulate
from swarmsched.negotiation.shepherd import TrailStep
from swarmsched.policies.explain import JobAhead, NodeVerdict, WhyReport
from swarmsched.record import JobRecord
from swarmsched.resources import GpuHealth, Share
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import Elasticity, JobView, Outlook, PolicySetting, Span
from swarmsched.world import Worker, World

TOKEN, OLD_TOKEN = "a-token-for-tests-only", "another-one-that-is-valid"  # not secrets
SUBMITTED_UTC_S = 1_700_000_000.0


@dataclass
class SwarmInOneProcess:
    """The agents by name; `down` ones cannot be asked."""

    directory: Path
    agents: dict[NodeId, "AgentWithoutCore"] = field(default_factory=dict)
    down: set[NodeId] = field(default_factory=set)
    statuses: dict[NodeId, str] = field(default_factory=dict)

    def add(self, name: str) -> "AgentWithoutCore":
        """One more agent."""
        agent = AgentWithoutCore(self, NodeId(name))
        self.agents[NodeId(name)] = agent
        return agent


class AgentWithoutCore(AgentFacts):
    """An `AgentPort` and its `Facts` in one; `answer` may replace the plain behaviour of the core."""

    def __init__(self, swarm: SwarmInOneProcess, name: NodeId) -> None:
        folder = swarm.directory / name
        folder.mkdir()
        self.swarm = swarm
        self.config = AgentConfig(name=name, data_dir=folder)
        self.events, self.readiness = EventLog(), Readiness()
        self.readiness.add("membership", lambda: Check("membership", is_ok=True, detail="joined"))
        self.logs = LogStore(LogConfig(directory=folder / "logs"))
        self.blobs = BlobStore(folder / "blobs")
        self.blobs.load()
        self.store_id = store_of(name)
        self.ticket_holders: tuple[str, ...] = (name,)
        self.known: dict[JobId, JobRecord] = {}
        self.over: set[JobId] = set()
        self.known_tasks: list[TaskStatus] = []
        self.witnesses: set[NodeId] = set()
        self.draining: set[str] = set()
        self.unheard: set[NodeId] = set()  # whose node record gossip has not brought here
        self.questions: dict[JobId, SpeedQuestion] = {}
        self.outlooks: list[Outlook] = []
        self.hypothetical: list[JobView] = []  # of which it was asked, though they were not there
        self.known_reports: dict[TaskKey, Reported] = {}
        self.known_cards: list[JobView] = []
        self.known_places: dict[JobId, Location] = {}
        self.without_files: set[JobId] = set()
        self.kept_trees: set[str] = set()
        self.kept_folders: dict[JobId, list[KeptFolder]] = {}
        self.policy = (PolicySetting("fifo", {}, Elasticity.ADVISE), 1)
        self.commands: list[Command] = []
        self.answer: Callable[[Command], Awaitable[Reply]] = self.obey
        self.queries: dict[str, Callable[[NodeId, dict[str, Any]], Awaitable[dict[str, Any]]]] = {}
        self.streams: dict[str, Callable[[NodeId, dict[str, Any]], AsyncIterator[dict[str, Any]]]] = {}
        self.callbacks: list[Callable[[], None]] = []

    def has_files(self, spec: JobSpec) -> bool:
        """What `kept_trees` has."""
        return spec.tree in self.kept_trees

    async def left_behind(self, job_id: JobId) -> list[KeptFolder]:
        """What `kept_folders` has."""
        return self.kept_folders.get(job_id, [])

    # What a test does.

    def put(self, record: JobRecord) -> JobRecord:
        """The core has stored a record."""
        self.known[record.job_id] = record
        self.stepped()
        return record

    def change(self, job_id: JobId, **changes: object) -> JobRecord:
        """The core has changed a record."""
        return self.put(self.known[job_id].updated(**changes))

    def stepped(self) -> None:
        """The core took in something."""
        for callback in self.callbacks:
            callback()

    # The facade.

    def on_stepped(self, callback: Callable[[], None]) -> None:
        """As the driver."""
        self.callbacks.append(callback)

    async def command(self, command: Command, timeout_s: float = 10.0) -> Reply:
        """Ask the scripted core."""
        self.commands.append(command)
        return await self.answer(command)

    async def query(
        self, node_id: NodeId, kind: str, payload: dict[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Ask another agent of this process."""
        return _wire(await self._peer(node_id).queries[kind](self.config.name, _wire(payload)))

    async def query_stream(self, node_id: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask another agent of this process; ends with an error when that goes down."""
        handler = self._peer(node_id).streams[kind]
        async with closing(handler(self.config.name, _wire(payload))) as answers:
            async for answer in answers:
                self._peer(node_id)
                yield _wire(answer)

    def on_query(self, kind: str, handler: Callable[[NodeId, dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        """As the real agent."""
        self.queries[kind] = handler

    def on_stream(self, kind: str, handler: Callable[[NodeId, dict[str, Any]], AsyncIterator[dict[str, Any]]]) -> None:
        """As the real agent."""
        self.streams[kind] = handler

    def _peer(self, node_id: NodeId) -> "AgentWithoutCore":
        if node_id in self.swarm.down or node_id not in self.swarm.agents:
            raise AgentUnreachable([str(node_id)], "connection refused")
        return self.swarm.agents[node_id]

    # The facts.

    def members(self) -> list[MemberView]:
        """Everybody, alive unless the test says otherwise."""
        statuses = [MemberStatus(self.swarm.statuses.get(name, "alive")) for name in self.swarm.agents]
        return [
            MemberView(name, ("127.0.0.1", 7000 + at), 1, 0, status, 1.0, b"", "0.1.0", 0, 0)
            for at, (name, status) in enumerate(zip(self.swarm.agents, statuses, strict=True))
        ]

    def member(self, name: NodeId) -> MemberView | None:
        """One of them."""
        return next((each for each in self.members() if each.node_id == name), None)

    def nodes(self) -> list[NodeStatus]:
        """Two GPUs each."""
        heard = [agent for name, agent in self.swarm.agents.items() if name not in self.unheard]
        return [NodeStatus(self._record_of(agent), 0.5) for agent in heard]

    def node(self, name: NodeId) -> NodeStatus | None:
        """One of them."""
        return next((each for each in self.nodes() if each.record.node_id == name), None)

    def _record_of(self, agent: "AgentWithoutCore") -> NodeRecord:
        return NodeRecord(
            node_id=agent.config.name,
            groups=(GpuGroup("Test GPU", 2, 1, 2**30),),
            cpus_total=4,
            cpus_free=3,
            memory_total_bytes=2**31,
            memory_free_bytes=2**30,
            flags=NodeFlag.WITNESS * (agent.config.name in self.witnesses)
            + NodeFlag.DRAINING * (agent.config.name in self.draining),
            store_id=agent.store_id,
        )

    def records(self) -> Mapping[JobId, JobRecord]:
        """As set by the test."""
        return dict(self.known)

    def record(self, job_id: JobId) -> JobRecord | None:
        """As set by the test."""
        return self.known.get(job_id)

    def is_over(self, job_id: JobId) -> bool:
        """As set by the test."""
        return job_id in self.over

    def is_shepherd(self, job_id: JobId) -> bool:
        """True for a live record of ours."""
        record = self.known.get(job_id)
        return record is not None and not record.is_ended and record.shepherd == self.config.name

    def cards(self) -> tuple[JobView, ...]:
        """As set by the test."""
        return tuple(self.known_cards)

    def places(self) -> Mapping[JobId, Location]:
        """As set by the test."""
        return self.known_places

    def setting(self) -> tuple[PolicySetting, int]:
        """As stored last."""
        return self.policy

    def trail(self, job_id: JobId) -> Sequence[TrailStep]:
        """One step of the job's shepherd, where this agent acts for it."""
        return (TrailStep(1_700_000_000.0, "OwnerAnswer", "n2", ("Placed",)),)

    def why(self, job_id: JobId) -> WhyReport:
        """A short explanation."""
        record, name = self.known[job_id], self.config.name
        return WhyReport(
            job_id=job_id,
            state=record.state,
            policy_id="fifo",
            needs="4 GPUs",
            free="1 GPU",
            reason="needs 4 GPUs, 1 free",
            position=2,
            ahead_count=1,
            ahead=(JobAhead(job_id, 1, 0, "is first"),),
            node_count=1,
            nodes=(NodeVerdict(name, 1, "1 of 2 GPUs free"),),
            shares=(),
            job_reason="",
        )

    def speed_question(self, job_id: JobId) -> SpeedQuestion | None:
        """As set by the test."""
        return self.questions.get(job_id)

    def has_no_files(self, job_id: JobId) -> bool:
        return job_id in self.without_files

    def size_reason(self, record: JobRecord) -> str:
        """For jobs of which there is a question."""
        return "more would not help it" if record.job_id in self.questions else ""

    def foreseen(self) -> Foreseen:
        """What `outlooks` has."""
        return Foreseen(0.0, SUBMITTED_UTC_S, {each.job_id: each for each in self.outlooks})

    async def foresee(self, wanted: Collection[JobId], more: Sequence[JobView] = ()) -> Foreseen | None:
        """The same, with a start for each that is not there yet."""
        self.hypothetical += more
        news = [Outlook(job.job_id, Span(60.0, 30.0), Span(120.0, 90.0), 60.0) for job in more]
        return Foreseen(0.0, SUBMITTED_UTC_S, {each.job_id: each for each in (*self.outlooks, *news)})

    async def tabulate(self, question: SpeedQuestion) -> SpeedTable | None:
        """As the planner's process."""
        return tabulate(question)

    def gpus(self) -> list[GpuFacts]:
        """Two simulated devices."""
        name = self.config.name
        return [GpuFacts(name, a_reading(f"{name}-{at}", at)) for at in range(2)]

    def tasks(self) -> list[TaskStatus]:
        """As set by the test."""
        return self.known_tasks

    def reported(self) -> dict[TaskKey, Reported]:
        """As set by the test."""
        return self.known_reports

    def telemetry(self) -> tuple[str, str]:
        """Fine."""
        return ("ok", "2 GPUs")

    # A core that says yes.

    async def obey(self, command: Command) -> Reply:
        """The plainest behaviour that is still true to the contract."""
        match command:
            case CreateTicket():
                return TicketIssued(job_id(len(self.commands)), holders_of(*self.ticket_holders))
            case SubmitJob():
                return self._submit(command)
            case CancelJob(job_id=job):
                return JobAccepted(self.change(job, state=JobState.STOPPING, stop_reason=EndReason.CANCELLED))
            case SignalJob(job_id=job) | MigrateJob(job_id=job):
                if self.known[job].state is not JobState.RUNNING:
                    return Refused("conflict", f"the job is {self.known[job].state.value}", "wait until it runs")
                return JobAccepted(self.known[job])
            case ScaleJob(job_id=job, ranks=ranks, ranks_most=most):
                spec = replace(self.known[job].spec, ranks=ranks, ranks_most=most)
                return JobAccepted(self.change(job, spec=spec))
            case SetSwarmSetting(setting=setting):
                self.policy = (setting, self.policy[1] + 1)
                return SettingStored(*self.policy)
            case ForgetMember(node=node):
                is_alive = self.swarm.statuses.get(node, "alive") == "alive"
                return Refused("conflict", f"{node} is alive", "stop its agent first") if is_alive else Done()
            case DrainNode():
                return Done()
            case RecoverJob(job_id=job):
                return JobAccepted(self.change(job, is_forced=True, holders=holders_of(self.config.name)))
            case CommitCheckpoint():
                return Refused("conflict", "no rank runs here", "")

    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """One check, and it is well."""
        return (Diagnosis("disk_space", "ok", "100 GiB free"),)

    def _submit(self, command: SubmitJob) -> Reply:
        if command.job_id in self.known:
            return JobAccepted(self.known[command.job_id], was_known=True)
        record = a_record(command.job_id, self.config.name, spec=command.spec, holders=command.holders)
        if not command.is_dry_run:
            self.put(record)
        return JobAccepted(record)


def a_reading(uuid: str, index: int) -> GpuReading:
    """Of a simulated device."""
    return GpuReading(
        index=index,
        uuid=uuid,
        model="Test GPU",
        memory_total_bytes=2**30,
        health=GpuHealth.OK,
        age_s=0.1,
        is_simulated=True,
    )


def a_task(
    job: JobId, attempt: int, *, is_frozen: bool = False, part: int = 0, worker: Worker | None = None
) -> TaskStatus:
    """One whose ranks run."""
    stage, told = TaskStage.STARTED, worker or Worker()
    return TaskStatus(job, 1, attempt, NodeId("n1"), stage, is_frozen=is_frozen, part=part, worker=told)


def job_id(number: int, *, random_part: str = "") -> JobId:
    """A well-formed id; `random_part` begins the handle."""
    tail = f"{random_part}{number:0>4}"
    return JobId("01hf0000000"[:10] + tail.ljust(16, "0")[:16])


def store_of(name: str) -> int:
    """A database identity for each name."""
    return 0x1000 + sum(name.encode())


def holder_of(name: str) -> Holder:
    """A node with the database that its agent here has."""
    return Holder(NodeId(name), store_of(name))


def holders_of(*names: str) -> tuple[Holder, ...]:
    """Several of them."""
    return tuple(holder_of(name) for name in names)


def a_record(
    job: JobId,
    shepherd: str,
    *,
    spec: JobSpec | None = None,
    holders: tuple[str | Holder, ...] = (),
    nodes: tuple[tuple[str, int], ...] = (),
    **changes: Any,
) -> JobRecord:
    """A queued job; `nodes` places it as attempt 1."""
    record = JobRecord(
        job_id=job,
        spec=spec or JobSpec(command=("true",), ranks=max(1, sum(ranks for _, ranks in nodes))),
        submitted_utc_s=SUBMITTED_UTC_S,
        epoch=1,
        version=1,
        shepherd=NodeId(shepherd),
        shepherd_generation=1,
        holders=tuple(each if isinstance(each, Holder) else holder_of(each) for each in holders or (shepherd,)),
    )
    shares = tuple(Share(NodeId(node), ranks) for node, ranks in nodes)
    return replace(record, **{"shares": shares, "attempt": 1 if nodes else 0, **changes})


def an_elastic_record(
    job: JobId, shepherd: str, workers: Mapping[int, str], world: World | None = None, **changes: Any
) -> JobRecord:
    """A job that runs, of workers on nodes by their numbers; all train unless the world says otherwise."""
    spec = JobSpec(("true",), ranks=1, ranks_most=4, elastic=True)
    known = {
        "shares": tuple(Share(NodeId(node), 1, part=part) for part, node in workers.items()),
        "world": world or World(1, tuple(workers), has_trained=True),
        "last_part": max(workers, default=0),
        "attempt": 1,
        "state": JobState.RUNNING,
    }
    return a_record(job, shepherd, spec=spec, **{**known, **changes})


def a_card(record: JobRecord, age_s: float = 2.0) -> JobView:
    """What gossip would say of a record."""
    return JobView(card_of(record), -age_s)


def _wire(payload: dict[str, Any]) -> dict[str, Any]:
    try:
        result: dict[str, Any] = msgpack.unpackb(msgpack.packb(payload), raw=False, strict_map_key=True)
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(f"cannot travel: {error}") from error
    return result
