"""What clients ask of a node: admission of their commands, tickets, submits, and wishes about jobs.

Each is answered exactly once.  Nothing is created before its record is durable, and a repeated ticket meets the job
that it made before.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from swarmsched.api import NODE_CLOSENESS, JobSpec, JobState, nearest
from swarmsched.card import card_of
from swarmsched.clock import Clock
from swarmsched.cluster import Candidate, Cluster
from swarmsched.commands import (
    OF_JOBS,
    CancelJob,
    Command,
    CreateTicket,
    JobAccepted,
    MigrateJob,
    RecoverJob,
    Refused,
    Reply,
    ScaleJob,
    SignalJob,
    SubmitJob,
    TicketIssued,
)
from swarmsched.effects import ReplyToClient
from swarmsched.errors import FieldProblem, JobRejected
from swarmsched.events import ClientCommandReceived
from swarmsched.facts import Admitted, Awoke
from swarmsched.holder.choice import choose_holders, excess_jobs
from swarmsched.holder.holding import Holding
from swarmsched.holder.machine import Answered, NodeEffect, Taker
from swarmsched.holder.retention import past_retention
from swarmsched.holders import HOLDERS_WANTED, Holder
from swarmsched.ids import JobId, NodeId, is_job_id, make_job_id
from swarmsched.jobs.update import Asker, UpdateConflicted, UpdateDecided, UpdateRequested, UpdateUncertain
from swarmsched.negotiation.placement.asked import cannot_scale, scaled
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.record_writer import WriteRecord
from swarmsched.negotiation.told import AnswerWished, FirstWritten, SignalAsked, SizeAsked, StopAsked
from swarmsched.node.config import NodeConfig
from swarmsched.policies.explain import explain, impossible
from swarmsched.record import JobRecord
from swarmsched.view import JobView

SETTLE_S = 5.0  # after the start, until the swarm's totals are trusted
SIGNAL_LIMIT = 64
TICKETS_KEPT = 10_000  # an older one costs its job one more round trip
_TICKET_USED = Refused("conflict", "the ticket was used for another job", "ask for a new ticket")


@dataclass(slots=True)
class _Creation:
    """A first record on its way to disk, and the clients who wait for it."""

    record: JobRecord
    waiting: list[int]


class Clients:
    """The client-facing side of a node."""

    def __init__(
        self, config: NodeConfig, cluster: Cluster, placement: Placement, holding: Holding, rng: random.Random
    ) -> None:
        self._own, self._me = config.own, config.own.holder
        self._generation = config.generation
        self._has_seeds = bool(config.seeds)
        self._cluster = cluster
        self._placement, self._shepherds = placement, placement.shepherds
        self._holding = holding
        self._rng = rng
        self._open_since_s = float("inf")  # before that no command is taken
        self._creations: dict[JobId, _Creation] = {}
        self._issued: dict[JobId, None] = {}  # by this life, not used yet; oldest first
        self.takes: Mapping[object, Taker] = {
            ClientCommandReceived: self._admit,
            CreateTicket: self._ticket,
            SubmitJob: self._submit,
            CancelJob: self._cancel,
            SignalJob: self._signal,
            ScaleJob: self._scale,
            MigrateJob: self._migrate,
            Awoke: self._awoke,
            Asker.CREATION: self._created,
        }

    next_deadline_s = float("inf")

    def _awoke(self, told: Awoke, clock: Clock) -> None:
        self._open_since_s = clock.now_s

    def _admit(self, event: ClientCommandReceived, clock: Clock) -> Iterable[NodeEffect]:
        """Commands on a job are for the present shepherd, and for a job that is still kept."""
        command = event.command
        effects: list[NodeEffect] = []
        if isinstance(command, (SubmitJob, *OF_JOBS, RecoverJob)):
            effects += self._holding.check_authority(command.job_id, clock)
        refusal = self._refusal_of(command, clock)
        if refusal is not None:
            return [*effects, ReplyToClient(event.request_id, refusal)]
        return [*effects, Admitted(event.request_id, command)]

    def _refusal_of(self, command: Command, clock: Clock) -> Refused | None:
        if clock.now_s < self._open_since_s:
            problem = "this agent is still starting: its resources are not read yet"
            return Refused("not_ready", problem, "try again in a second")
        if not isinstance(command, (SubmitJob, *OF_JOBS, RecoverJob)):
            return None
        if self._holding.is_over(command.job_id):
            return past_retention(command.job_id)
        known = self._holding.record(command.job_id) if isinstance(command, OF_JOBS) else None
        if known is not None and self._holding.is_in_doubt(known):
            return Refused("unavailable", f"whether {command.job_id} has ended is not decided yet", "ask again soon")
        return None

    # Tickets.

    def _ticket(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        own = replace(self._own, total_gpus=len(self._cluster.own_resources.gpus))
        return [ReplyToClient(asked.request_id, self._issue(own, self._cluster.candidates(clock.now_s), clock))]

    def _issue(self, own: Candidate, candidates: Sequence[Candidate], clock: Clock) -> Reply:
        """A fresh id and its holders; the first is the intended shepherd.

        That is this node, unless it is no place for one (no GPUs where others have some) or has too many already.
        """
        holders = (
            own.holder,
            *choose_holders([own], candidates, self._rng, HOLDERS_WANTED - 1, has_witness=own.is_witness),
        )
        first = next((holder for holder in holders if self._should_shepherd(holder, own, candidates)), own.holder)
        if own.is_witness and len(holders) == 1:
            return Refused("unavailable", "this is a witness, and no other agent is alive", "start another agent")
        ordered = (first, *(holder for holder in holders if holder != first))
        job_id = make_job_id(clock.utc_s, self._rng)
        self._issued[job_id] = None
        if len(self._issued) > TICKETS_KEPT:
            del self._issued[next(iter(self._issued))]
        return TicketIssued(job_id, ordered)

    def _should_shepherd(self, holder: Holder, own: Candidate, candidates: Sequence[Candidate]) -> bool:
        each = next(candidate for candidate in (own, *candidates) if candidate.holder == holder)
        if each.is_witness:
            return False
        if holder != own.holder:
            return True
        lacks_gpus = not own.total_gpus and any(other.total_gpus for other in candidates)
        return not lacks_gpus and not excess_jobs(len(self._shepherds.jobs), candidates, own.holder.node)

    # Submits.

    def _submit(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        """Create the job, or find the one that this ticket made before."""
        command: SubmitJob = asked.command
        request_id = asked.request_id
        known = self._holding.record(command.job_id)
        refusal = self._refusal(command, known, clock)
        if refusal is not None:
            return [ReplyToClient(request_id, refusal)]
        shepherd = self._shepherds.jobs.get(command.job_id)
        if known is not None and shepherd is not None:  # otherwise the register must be asked
            if command.is_dry_run:
                return [self._forecast(request_id, JobAccepted(known, was_known=True), clock)]
            return shepherd.step(AnswerWished(request_id, was_known=True), clock)
        creation = self._creations.get(command.job_id)
        if creation is not None:
            if not _is_same_job(creation.record, command.spec):
                return [ReplyToClient(request_id, _TICKET_USED)]
            creation.waiting.append(request_id)
            return []
        record = self._first_record(command, clock)
        if known is not None and known.stamp == record.stamp:
            record = known  # our own, of an earlier try that may be lying at a minority
        if command.is_dry_run:
            return [self._forecast(request_id, JobAccepted(record), clock)]
        return [self._create(record, request_id)]

    def _create(self, record: JobRecord, request_id: int) -> WriteRecord:
        job_id, holders = record.job_id, record.configuration
        self._creations[job_id] = _Creation(record, [request_id])
        update = UpdateRequested(next(self._shepherds.update_ids), job_id, holders, None, record)
        is_new = job_id in self._issued
        self._issued.pop(job_id, None)
        return WriteRecord(replace(update, is_issued_here=is_new, asker=Asker.CREATION))

    def _forecast(self, request_id: int, reply: JobAccepted, clock: Clock) -> ReplyToClient:
        """The same acceptance with a sentence on what would happen, for a dry run."""
        view, record = self._placement.policy.cluster_view(clock), reply.record
        view = replace(view, jobs=(*view.jobs, JobView(card_of(record), clock.now_s)))  # nobody else shows it
        told = self._placement.plans.told
        reason = explain(record, view, self._placement.policy.setting, clock.now_s, told=told).forecast()
        return ReplyToClient(request_id, replace(reply, record=replace(record, reason=reason[:1024])))

    def _knows_all(self, now_s: float) -> bool:
        """False just after the start, when a request that is possible may look impossible."""
        has_settled = not self._has_seeds or now_s >= self._open_since_s + SETTLE_S
        return has_settled and self._cluster.is_complete(now_s)

    def _refusal(self, command: SubmitJob, known: JobRecord | None, clock: Clock) -> Refused | None:
        if not is_job_id(command.job_id):
            problem = FieldProblem("/ticket/job_id", f"{command.job_id!r} is not a job id", "ask for a new ticket")
            return Refused("invalid", problem.problem, problem.remedy, (problem,))
        if self._me not in command.holders:
            names = ", ".join(holder.node for holder in command.holders)
            lost_store = any(holder.node == self._me.node for holder in command.holders)
            lost = f"{self._me.node} has lost the store that the ticket names"
            why = lost if lost_store else f"the ticket names holders {names}"
            return Refused("conflict", why, "ask for a new ticket")
        if known is not None:
            return None if _is_same_job(known, command.spec) else _TICKET_USED
        late_s = clock.utc_s - command.spec.deadline_utc_s if command.spec.deadline_utc_s else -1.0
        if late_s >= 0:
            told = f"{command.spec.deadline_utc_s:.0f} is {late_s:.0f} s in the past"
            late = FieldProblem("/deadline_utc_seconds", told, "give a time to come, or leave it out")
            return Refused("invalid", late.problem, late.remedy, (late,))
        if self._own.is_witness:
            return Refused("unavailable", "a witness acts for no job", "repeat with the same ticket at another holder")
        if not self._knows_all(clock.now_s):
            return None
        return _unknown(command.spec, self._cluster.names(clock.now_s)) or self._too_much(command.spec, clock)

    def _too_much(self, spec: JobSpec, clock: Clock) -> Refused | None:
        """Where all nodes that are remembered, up or down, could not hold it together."""
        error = impossible(spec, self._cluster.capacities(clock.now_s))
        if error is None:
            return None
        is_choice = bool(spec.nodes or spec.exclude)
        remedy = "allow other nodes, or ask for less" if is_choice else "ask for less, or add nodes"
        problem = FieldProblem("/nodes" if is_choice else "/ranks", str(error), remedy)
        return Refused("impossible", str(error), problem.remedy, (problem,))

    def _first_record(self, command: SubmitJob, clock: Clock) -> JobRecord:
        return JobRecord(
            job_id=command.job_id,
            spec=command.spec,
            submitted_utc_s=clock.utc_s,
            epoch=1,
            version=1 + command.holders.index(self._me),  # see `JobRecord.updated`
            shepherd=self._me.node,
            shepherd_generation=self._generation,
            holders=command.holders,
        )

    def _created(self, answer: Answered, clock: Clock) -> Iterable[NodeEffect]:
        """The register has spoken about a first record."""
        creation = self._creations.pop(answer.request.job_id)
        effects: list[NodeEffect] = []
        match answer.result:
            case UpdateDecided(record=record):
                effects += self._shepherds.add(record).step(FirstWritten(), clock)
                reply: Reply = JobAccepted(record)
            case UpdateConflicted(current=JobRecord() as current):
                is_same = _is_same_job(current, creation.record.spec)
                reply = JobAccepted(current, was_known=True) if is_same else _TICKET_USED
            case UpdateConflicted():
                reply = Refused("unavailable", "the register changed under the submit", "repeat with the same ticket")
            case UpdateUncertain(reason=reason):
                reply = Refused("unavailable", f"outcome unknown: {reason}", "repeat with the same ticket")
            case _:  # the ticket made a job that is past its retention by now: it must not run again
                reply = past_retention(creation.record.job_id)
        return [*(ReplyToClient(request_id, reply) for request_id in creation.waiting), *effects]

    # Jobs that are there.

    def _cancel(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        """Stop a job; one that has ended stays as it is, and that is no error."""
        command: CancelJob = asked.command
        shepherd = self._shepherds.jobs.get(command.job_id)
        if shepherd is None:
            return [ReplyToClient(asked.request_id, self._known_or_not(command.job_id))]
        return shepherd.step(StopAsked(asked.request_id, command.grace_s, command.reason), clock)

    def _signal(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        """Send a signal to running ranks."""
        command: SignalJob = asked.command
        request_id = asked.request_id
        shepherd = self._shepherds.jobs.get(command.job_id)
        if not 1 <= command.signal <= SIGNAL_LIMIT:
            problem = FieldProblem("/signal", f"{command.signal} is not a signal", f"1 to {SIGNAL_LIMIT}")
            return [ReplyToClient(request_id, Refused("invalid", problem.problem, problem.remedy, (problem,)))]
        if shepherd is None:
            return [ReplyToClient(request_id, self._ended_or_not(command.job_id))]
        if shepherd.record.state not in (JobState.RUNNING, JobState.STOPPING):
            state = shepherd.record.state.value
            refusal = Refused("conflict", f"the job is {state}: no rank runs yet", "wait for it")
            return [ReplyToClient(request_id, refusal)]
        return shepherd.step(SignalAsked(request_id, command.signal), clock)

    def _scale(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        """Other numbers of ranks, for a job that waits or runs."""
        command: ScaleJob = asked.command
        shepherd = self._shepherds.jobs.get(command.job_id)
        if shepherd is None:
            return [ReplyToClient(asked.request_id, self._ended_or_not(command.job_id))]
        try:
            spec = scaled(shepherd.decided.spec, command.ranks, command.ranks_most)
        except JobRejected as rejected:
            first = rejected.problems[0]
            refusal = Refused("invalid", first.problem, first.remedy, tuple(rejected.problems))
            return [ReplyToClient(asked.request_id, refusal)]
        too_much = self._too_much(spec, clock) if self._knows_all(clock.now_s) else None
        if too_much is not None:
            return [ReplyToClient(asked.request_id, too_much)]
        not_now = cannot_scale(shepherd.record, spec)
        if not_now is not None:
            return [ReplyToClient(asked.request_id, not_now)]
        return shepherd.step(SizeAsked(asked.request_id, spec), clock)

    def _migrate(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        """Other hosts, for a job that runs."""
        command: MigrateJob = asked.command
        shepherd = self._shepherds.jobs.get(command.job_id)
        if shepherd is None:
            return [ReplyToClient(asked.request_id, self._ended_or_not(command.job_id))]
        return self._placement.migrate(asked.request_id, shepherd, command, clock)

    def _ended_or_not(self, job_id: JobId) -> Reply:
        """Of a job that nobody acts for here, and that must not have ended."""
        reply = self._known_or_not(job_id)
        is_ended = isinstance(reply, JobAccepted)
        return Refused("conflict", "the job has ended; no rank of it is left", "") if is_ended else reply

    def _known_or_not(self, job_id: JobId) -> Reply:
        known = self._holding.record(job_id)
        if known is None:
            return Refused("not_found", f"no job {job_id} here", "check the id with: swarm ps -a")
        if not known.is_ended:
            problem = f"no shepherd of {job_id} acts here; the record names {known.shepherd}"
            return Refused("unavailable", problem, "ask again: another shepherd acts for it soon")
        return JobAccepted(known)

    def validate(self) -> None:
        """Whoever waits for a first record is one client, and waits for one creation."""
        waiting = [request_id for creation in self._creations.values() for request_id in creation.waiting]
        assert len(set(waiting)) == len(waiting)
        assert all(creation.record.job_id == job_id for job_id, creation in self._creations.items())
        assert len(self._issued) <= TICKETS_KEPT


def _is_same_job(known: JobRecord, repeated: JobSpec) -> bool:
    """Equal but for what agents fill in (where its files may be fetched, the swarm's default) and changed sizes."""
    spec = known.spec
    sizes = {"ranks": spec.ranks, "ranks_most": spec.ranks_most} if known.scalings else {}
    filled = {"blob_sources": spec.blob_sources, "restartable": spec.restartable}
    return spec == replace(repeated, **filled, **sizes)


def _unknown(spec: JobSpec, known: Sequence[NodeId]) -> Refused | None:
    """The job would run where its owner believes that it cannot."""
    for key, names in (("nodes", spec.nodes), ("exclude", spec.exclude)):
        node = next(iter(sorted(set(names) - set(known))), "")
        if node:
            problem = f"there is no node {node!r}{nearest(node, known, NODE_CLOSENESS)}"
            field = FieldProblem(f"/{key}", problem, "list them with: swarm nodes")
            return Refused("impossible", problem, field.remedy, (field,))
    return None
