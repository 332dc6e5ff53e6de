"""Going on without lost holders: an operator's decision where the protocol itself must wait for ever.

Whoever orders it vouches for it that the lost holders stay away: were they alive behind a cut cable, their side could
go on by the old record.  The epoch leaps, so that every owner that hears of the forced record refuses the old side,
and so do the numbers of later attempts, so that none of them is taken for one of the old side's.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from swarmsched.clock import Clock
from swarmsched.cluster import Candidate
from swarmsched.commands import JobAccepted, RecoverJob, Refused, Reply
from swarmsched.effects import ReplyToClient
from swarmsched.holder.machine import Answered
from swarmsched.holder.retention import past_retention
from swarmsched.holders import HOLDERS_WANTED
from swarmsched.ids import JobId
from swarmsched.jobs.update import Asker, UpdateConflicted, UpdateDecided, UpdateRequested, UpdateUncertain
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.record_writer import ShepherdEffect, WriteRecord
from swarmsched.negotiation.told import LossDeclared
from swarmsched.record import FORCED_LEAP, JobRecord


class Recovery:
    """Forced takeovers under way on this node."""

    def __init__(self, own: Candidate, generation: int, shepherds: Shepherds) -> None:
        self._own = own
        self._generation = generation
        self._shepherds = shepherds
        self._under_way: dict[JobId, list[int]] = {}  # who asked

    def begin(
        self,
        request_id: int,
        command: RecoverJob,
        record: JobRecord | None,
        candidates: Sequence[Candidate],
        clock: Clock,
    ) -> list[ShepherdEffect]:
        """`record` is what this node holds of the job; refused where nothing has to be forced."""
        shepherd = self._shepherds.jobs.get(command.job_id)
        if shepherd is not None and shepherd.waits_for_lost:
            effects = shepherd.step(LossDeclared(), clock)
            return [*effects, ReplyToClient(request_id, JobAccepted(shepherd.record))]
        if command.job_id in self._under_way:
            self._under_way[command.job_id].append(request_id)
            return []
        refusal = self._refusal(command, record, candidates)
        if refusal is not None or record is None:
            return [ReplyToClient(request_id, refusal)]
        acting, *others = self._ranked(record, candidates)
        surplus = [each for each in others if each.is_witness][1:]
        holders = [each.holder for each in (acting, *others) if each not in surplus]
        is_ours = acting.holder == self._own.holder
        value = record.updated(
            epoch=record.epoch + FORCED_LEAP,
            shepherd=acting.holder.node,
            shepherd_generation=self._generation if is_ours else 0,  # another acts as soon as it sees the record
            holders=tuple(holders[:HOLDERS_WANTED]),
            leaving_holders=(),
            is_forced=True,
        )
        self._under_way[record.job_id] = [request_id]
        asked, before = value.configuration, record.stamp
        update = UpdateRequested(next(self._shepherds.update_ids), record.job_id, asked, before, value)
        return [WriteRecord(replace(update, takes_over=True, is_forced=True, asker=Asker.RECOVERY))]

    def _refusal(
        self, command: RecoverJob, record: JobRecord | None, candidates: Sequence[Candidate]
    ) -> Refused | None:
        if record is None:
            problem = f"no record of {command.job_id} is held here"
            return Refused("not_found", problem, "ask at one of its holders: `swarm status JOB` names them")
        if record.is_ended:
            return Refused("conflict", "the job has ended; there is nothing to recover", "")
        live = self._ranked(record, candidates)
        if live[0].is_witness:
            return Refused("unavailable", "only witnesses are alive, and none of them can act", "start another agent")
        members = record.configuration.members
        answering = [each for each in live if each.holder in members]
        can_act = any(not each.is_witness for each in answering)
        if can_act and record.configuration.is_quorum([each.holder for each in answering]):
            names = ", ".join(each.holder.node for each in answering)
            problem = f"a majority of its holders is alive ({names}); the job needs no force"
            return Refused("conflict", problem, "wait: a shepherd acts within 20 s")
        return None

    def _ranked(self, record: JobRecord, candidates: Sequence[Candidate]) -> list[Candidate]:
        """All who are alive: first one that can act, this node if it can, then holders of the record, then others."""
        members = record.configuration.members
        live = sorted((self._own, *candidates), key=lambda each: each.holder not in members)
        acting = min(live, key=lambda each: (each.is_witness, each is not self._own))
        return [acting, *(each for each in live if each is not acting)]

    def answered(self, answer: Answered) -> list[ReplyToClient]:
        """The register has spoken; all who asked hear of it."""
        asking = self._under_way.pop(answer.request.job_id)
        return [ReplyToClient(request_id, self._reply(answer)) for request_id in asking]

    def _reply(self, answer: Answered) -> Reply:
        match answer.result:
            case UpdateDecided(record=record):
                return JobAccepted(record)
            case UpdateConflicted(current=current):
                epoch = current.epoch if current is not None else 0
                problem = f"a newer record of it was found (epoch {epoch})"
                return Refused("conflict", problem, "look again: `swarm status JOB`")
            case UpdateUncertain(reason=reason):
                return Refused("unavailable", reason, "repeat the command")
            case _:
                return past_retention(answer.request.job_id)

    def validate(self) -> None:
        """Somebody waits for each."""
        assert all(self._under_way.values())
