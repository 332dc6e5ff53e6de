"""What clients ask of a node: tickets, submits, cancels, signals and settings, each answered exactly once.

Nothing is created before its record is durable, and a repeated ticket meets the job that it made before.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.commands import (
    CancelJob,
    JobAccepted,
    Refused,
    Reply,
    SignalJob,
    SubmitJob,
    TicketIssued,
)
from swarmsched.effects import ReplyToClient
from swarmsched.errors import CapacityError, FieldProblem
from swarmsched.holders import HOLDERS_WANTED, Holder
from swarmsched.ids import JobId, NodeId, is_job_id, make_job_id
from swarmsched.jobs.update import UpdateConflicted, UpdateDecided, UpdateRequested, UpdateUncertain
from swarmsched.negotiation.holding import Candidate, choose_holders, excess_jobs
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.record_writer import ShepherdEffect, WriteRecord
from swarmsched.negotiation.shepherd import Clock
from swarmsched.policies.explain import impossible
from swarmsched.record import JobRecord
from swarmsched.resources import Free

SIGNAL_LIMIT = 64
TICKETS_KEPT = 10_000  # an older one costs its job one more round trip
_TICKET_USED = Refused("conflict", "the ticket was used for another job", "ask for a new ticket")


@dataclass(slots=True)
class _Creation:
    """A first record on its way to disk, and the clients who wait for it."""

    record: JobRecord
    waiting: list[int]


class Submission:
    """The client-facing side of a node's shepherds."""

    def __init__(self, own: Candidate, generation: int, placement: Placement, rng: random.Random) -> None:
        self._me = own.holder
        self._generation = generation
        self._is_witness = own.is_witness
        self._placement = placement
        self._rng = rng
        self._creations: dict[int, _Creation] = {}
        self._issued: dict[JobId, None] = {}  # by this life, not used yet; oldest first

    @property
    def _update_ids(self) -> Iterator[int]:
        return self._placement.update_ids

    def ticket(self, own: Candidate, candidates: Sequence[Candidate], clock: Clock) -> Reply:
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
        return not lacks_gpus and not excess_jobs(len(self._placement.jobs), candidates, own.holder.node)

    def submit(
        self,
        request_id: int,
        command: SubmitJob,
        known: JobRecord | None,
        capacities: Mapping[NodeId, Free] | None,
        clock: Clock,
    ) -> list[ShepherdEffect]:
        """Create the job, or find the one that this ticket made before.

        `capacities` are all nodes that were ever seen, up or down; None while that is not known yet.
        """
        refusal = self._refusal(command, known, capacities)
        if refusal is not None:
            return [ReplyToClient(request_id, refusal)]
        shepherd = self._placement.jobs.get(command.job_id)
        if known is not None and shepherd is not None:  # otherwise the register must be asked
            if command.is_dry_run:
                return [ReplyToClient(request_id, JobAccepted(known, was_known=True))]
            return shepherd.tell(request_id, clock, was_known=True)
        for creation in self._creations.values():
            if creation.record.job_id == command.job_id:
                if not _is_same_job(creation.record.spec, command.spec):
                    return [ReplyToClient(request_id, _TICKET_USED)]
                creation.waiting.append(request_id)
                return []
        record = self._first_record(command, clock)
        if known is not None and known.stamp == record.stamp:
            record = known  # our own, of an earlier try that may be lying at a minority
        if command.is_dry_run:
            return [ReplyToClient(request_id, JobAccepted(record))]
        update_id = next(self._update_ids)
        self._creations[update_id] = _Creation(record, [request_id])
        is_new = record.job_id in self._issued
        self._issued.pop(record.job_id, None)
        configuration = record.configuration
        update = UpdateRequested(update_id, record.job_id, configuration, None, record, is_issued_here=is_new)
        return [WriteRecord(update)]

    def creating(self) -> Mapping[JobId, object]:
        """Jobs whose first record is on its way."""
        return {creation.record.job_id: creation for creation in self._creations.values()}

    def _refusal(
        self, command: SubmitJob, known: JobRecord | None, capacities: Mapping[NodeId, Free] | None
    ) -> Refused | None:
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
            return None if _is_same_job(known.spec, command.spec) else _TICKET_USED
        if self._is_witness:
            return Refused("unavailable", "a witness acts for no job", "repeat with the same ticket at another holder")
        error = impossible(command.spec, capacities) if capacities is not None else None
        return _too_much(error, command.spec) if error is not None else None

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

    def job_of(self, update_id: int) -> tuple[JobId, ...]:
        """The job of a creation."""
        return (self._creations[update_id].record.job_id,)

    def concerns(self, update_id: int) -> bool:
        """True for the outcome of a creation."""
        return update_id in self._creations

    def created(self, result: UpdateDecided | UpdateConflicted | UpdateUncertain, clock: Clock) -> list[ShepherdEffect]:
        """The register has spoken about a first record."""
        creation = self._creations.pop(result.update_id)
        effects: list[ShepherdEffect] = []
        match result:
            case UpdateDecided(record=record):
                effects += self._placement.add(record).accepted(clock)
                self._placement.look_soon(clock.now_s)
                reply: Reply = JobAccepted(record)
            case UpdateConflicted(current=JobRecord() as current):
                is_same = _is_same_job(current.spec, creation.record.spec)
                reply = JobAccepted(current, was_known=True) if is_same else _TICKET_USED
            case UpdateConflicted():
                reply = Refused("unavailable", "the register changed under the submit", "repeat with the same ticket")
            case UpdateUncertain(reason=reason):
                reply = Refused("unavailable", f"outcome unknown: {reason}", "repeat with the same ticket")
        return [*(ReplyToClient(request_id, reply) for request_id in creation.waiting), *effects]

    def over(self, update_id: int) -> list[ShepherdEffect]:
        """The ticket made a job that is past its retention by now: it must not run again."""
        creation = self._creations.pop(update_id)
        refusal = past_retention(creation.record.job_id)
        return [ReplyToClient(request_id, refusal) for request_id in creation.waiting]

    def cancel(
        self, request_id: int, command: CancelJob, known: JobRecord | None, clock: Clock
    ) -> list[ShepherdEffect]:
        """Stop a job; one that has ended stays as it is, and that is no error."""
        shepherd = self._placement.jobs.get(command.job_id)
        if shepherd is None:
            return [ReplyToClient(request_id, _known_or_not(command.job_id, known))]
        return shepherd.cancel(request_id, command.grace_s, command.reason, clock)

    def signal(
        self, request_id: int, command: SignalJob, known: JobRecord | None, clock: Clock
    ) -> list[ShepherdEffect]:
        """Send a signal to running ranks."""
        shepherd = self._placement.jobs.get(command.job_id)
        if not 1 <= command.signal <= SIGNAL_LIMIT:
            problem = FieldProblem("/signal", f"{command.signal} is not a signal", f"1 to {SIGNAL_LIMIT}")
            return [ReplyToClient(request_id, Refused("invalid", problem.problem, problem.remedy, (problem,)))]
        if shepherd is None:
            reply = _known_or_not(command.job_id, known)
            if isinstance(reply, JobAccepted):
                reply = Refused("conflict", "the job has ended; no rank is left to signal", "")
            return [ReplyToClient(request_id, reply)]
        if shepherd.record.state not in (JobState.RUNNING, JobState.STOPPING):
            state = shepherd.record.state.value
            return [
                ReplyToClient(request_id, Refused("conflict", f"the job is {state}: no rank runs yet", "wait for it"))
            ]
        return [*shepherd.signal(command.signal, clock), *shepherd.tell(request_id, clock)]

    def validate(self) -> None:
        """Whoever waits for a first record is one client, and waits for one creation."""
        waiting = [request_id for creation in self._creations.values() for request_id in creation.waiting]
        assert len(set(waiting)) == len(waiting)
        assert len({creation.record.job_id for creation in self._creations.values()}) == len(self._creations)
        assert len(self._issued) <= TICKETS_KEPT


def _is_same_job(known: JobSpec, repeated: JobSpec) -> bool:
    """Equal but for where its files may be fetched, which each agent fills in by itself."""
    return replace(known, blob_sources=()) == replace(repeated, blob_sources=())


def _known_or_not(job_id: JobId, known: JobRecord | None) -> Reply:
    if known is None:
        return Refused("not_found", f"no job {job_id} here", "check the id with: swarm ps -a")
    if not known.is_ended:
        problem = f"no shepherd of {job_id} acts here; the record names {known.shepherd}"
        return Refused("unavailable", problem, "ask again: another shepherd acts for it soon")
    return JobAccepted(known)


def past_retention(job_id: JobId) -> Refused:
    """What is said of a job of which nothing is known but that it is over."""
    problem = f"{job_id} has ended, and its record is past its retention"
    return Refused("over", problem, "for another run of it, submit it anew")


def _too_much(error: CapacityError, spec: JobSpec) -> Refused:
    is_choice = bool(spec.nodes or spec.exclude)
    remedy = "allow other nodes, or ask for less" if is_choice else "ask for less, or add nodes"
    problem = FieldProblem("/nodes" if is_choice else "/ranks", str(error), remedy)
    return Refused("impossible", str(error), problem.remedy, (problem,))


def with_reason(reply: JobAccepted, reason: str) -> JobAccepted:
    """The same acceptance with a sentence on what would happen, for a dry run."""
    return replace(reply, record=replace(reply.record, reason=reason[:1024]))
