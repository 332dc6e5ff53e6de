"""The document of a job: by its record, and by its card."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from msgspec.structs import fields

from swarm_agent.attendance import Attendance
from swarm_agent.http.exchange import Document
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.progress import by_time_limit
from swarm_agent.http.when import aged, rfc3339
from swarmsched import ids
from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.checkpoint import Checkpoint
from swarmsched.documents import (
    CheckpointDocument,
    GroupDocument,
    JobDocument,
    JobNodeDocument,
    LeftoverDocument,
    ProgressDocument,
    RescalingDocument,
    WorkerDocument,
    WorldDocument,
)
from swarmsched.policies.base import need
from swarmsched.policies.calm import PAUSE_BUDGET
from swarmsched.record import JobRecord, Rescaling, own_exit_code, shell_exit_code
from swarmsched.resources import Share, merged, of_first, ranks_by_node, world_size
from swarmsched.view import JobView

SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIALS")
MASK = "***"


@dataclass(frozen=True, slots=True)
class ByRecord:
    """A job by its record, at a moment; `attendance` tells which of its holders are there."""

    record: JobRecord
    now_utc_s: float
    attendance: Attendance

    @property
    def spec(self) -> JobSpec:
        """What was asked for."""
        return self.record.spec

    @property
    def elapsed_s(self) -> float:
        """Running time of the current attempt; wall clocks may jump, so never below 0."""
        if not self.record.started_utc_s:
            return 0.0
        return round(max(0.0, (self.record.ended_utc_s or self.now_utc_s) - self.record.started_utc_s), 3)

    @property
    def queued_s(self) -> float:
        """Until it ran first."""
        record = self.record
        until_utc_s = record.first_started_utc_s or record.started_utc_s or record.ended_utc_s or self.now_utc_s
        return round(max(0.0, until_utc_s - record.submitted_utc_s), 3)

    @property
    def attained_gpu_s(self) -> float:
        """Finished attempts plus the running one."""
        record = self.record
        is_running = record.state in (JobState.RUNNING, JobState.STOPPING) and record.started_utc_s
        span_s = max(0.0, self.elapsed_s - record.counted_s) if is_running else 0.0
        return record.attained_gpu_s + record.serving_gpus * span_s

    @property
    def paused_ratio(self) -> float | None:
        """Part of the time since it ran first in which it stood still for another size or other hosts."""
        first_utc_s = self.record.first_started_utc_s
        since_s = (self.record.ended_utc_s or self.now_utc_s) - first_utc_s if first_utc_s else 0.0
        return round(min(1.0, self.record.paused_s / since_s), 4) if since_s > 0 else None

    def progress(self) -> ProgressDocument | None:
        """By its time limit; what ranks reported is added by whoever asks their nodes."""
        is_running = self.record.state in (JobState.RUNNING, JobState.STOPPING)
        return by_time_limit(self.record.attempt, self.elapsed_s, self.spec.time_limit_s) if is_running else None

    def shares(self) -> list[JobNodeDocument]:
        """A job's nodes by group, in the order of ranks in it; those of an elastic group have any numbers."""
        first, documents = Counter[int](), list[JobNodeDocument]()
        for share in merged(self.record.shares):
            first_rank = None if self.spec.elastic and not share.group else first[share.group]
            group = self.spec.of_group(share.group).group or None
            documents.append(JobNodeDocument(node=share.node, ranks=share.ranks, first_rank=first_rank, group=group))
            first[share.group] += share.ranks
        return documents

    def groups(self) -> list[GroupDocument]:
        """A job's groups, the first one first; none of a job that has but one."""
        found, record = list[GroupDocument](), self.record
        for number, name in enumerate(self.spec.group_names):
            group = self.spec.of_group(number)
            held = record.training if not number else [each for each in record.shares if each.group == number]
            size = ranks_by_node(held)
            found.append(
                GroupDocument(
                    name=name,
                    command=list(group.command),
                    ranks=group.ranks,
                    ranks_most=group.ranks_most,
                    gpus_per_rank=group.demand.gpus,
                    needs=need(group.demand, group.ranks),
                    world_size=size.total(),
                    nodes=list(size),
                )
            )
        return found

    def failed_rank(self) -> tuple[str | None, int | None]:
        """The group, if there are several, and the number in it of the rank that failed first; nothing where none."""
        if self.record.failed_rank < 0:
            return None, None
        name, index = self.spec.in_group(self.record.failed_rank)
        return name or None, index

    def world(self) -> WorldDocument | None:
        """Which workers of an elastic job train, in the order of their ranks, and which come and go."""
        record = self.record
        if not self.spec.elastic:
            return None
        groups = {"training": record.members, "joining": record.joining, "leaving": record.leaving}
        if not record.world.version:  # all are being started
            groups = {"joining": of_first(record.shares)}
        return WorldDocument(
            version=record.world.version,
            workers=[_worker(share, state) for state, shares in groups.items() for share in shares],
            lost=list(record.world.lost),
            last_worker=record.last_part if record.shares else 0,
        )


def job_document(record: JobRecord, now_utc_s: float, attendance: Attendance) -> JobDocument:
    """A job by its record; `attendance` tells which of its holders are there."""
    job, spec, is_ended = ByRecord(record, now_utc_s, attendance), record.spec, record.is_ended
    return JobDocument(
        id=record.job_id,
        handle=ids.handle(record.job_id),
        name=spec.name,
        user=spec.user,
        queue=spec.queue,
        priority=spec.priority,
        state=record.state.value,
        phase=record.phase.value,
        reason=record.reason,
        end_reason=record.end_reason.value if is_ended and record.end_reason is not EndReason.NONE else None,
        exit_code=own_exit_code(record) if is_ended else None,
        signal=record.signal or None if is_ended else None,
        shell_exit_code=shell_exit_code(record) if is_ended else None,
        submitted_at=rfc3339(record.submitted_utc_s),
        started_at=time_or_none(record.started_utc_s),
        ended_at=time_or_none(record.ended_utc_s),
        elapsed_seconds=job.elapsed_s,
        queued_seconds=job.queued_s,
        gpus=record.gpus,
        gpus_per_rank=spec.demand.gpus,
        ranks=spec.ranks,
        ranks_most=spec.ranks_most,
        world_size=world_size(record.training),
        nodes=job.shares(),
        groups=job.groups(),
        world=job.world(),
        attempt=record.attempt,
        epoch=record.epoch,
        version=record.version,
        shepherd=record.shepherd,
        holders=[holder.node for holder in record.holders],
        leaving_holders=[holder.node for holder in record.leaving_holders],
        survives_deaths=attendance.survives_deaths(record.configuration),
        has_majority=attendance.has_majority(record.configuration),
        is_forced=record.is_forced,
        restarts=record.restarts,
        preemptions=record.preemptions,
        rescales=record.rescales,
        rescalings=list(map(_rescaling, record.rescalings)),
        paused_seconds=round(record.paused_s, 3),
        paused_ratio=job.paused_ratio,
        pause_budget_ratio=PAUSE_BUDGET,
        leftovers=[LeftoverDocument(node=each.node, attempt=each.attempt) for each in record.leftovers],
        checkpoint=_checkpoint(record.checkpoint) if record.checkpoint else None,
        progress=job.progress(),
        attained_gpu_seconds=round(job.attained_gpu_s, 3),
        spec=spec_document(spec),
        detail=record.detail,
        failed_node=record.failed_node or None,
        failed_rank=job.failed_rank()[1],
        failed_group=job.failed_rank()[0],
        relaunches=record.relaunches,
        source="record",
        **aged(now_utc_s, 0.0),
    )


def card_document(view: JobView, now_utc_s: float) -> JobDocument:
    """A job of which only the card is known; keys that gossip does not carry are null."""
    card = view.card
    is_running = card.state in (JobState.RUNNING, JobState.STOPPING)
    known = {
        "id": card.job_id,
        "handle": ids.handle(card.job_id),
        "name": card.name,
        "user": card.user,
        "queue": card.queue,
        "priority": card.priority,
        "state": card.state.value,
        "phase": card.phase.value,
        "reason": card.reason,
        "submitted_at": rfc3339(card.submitted_utc_s),
        "gpus": card.attained_rate or card.ranks * card.demand.gpus,
        "gpus_per_rank": card.demand.gpus,
        "ranks": card.ranks,
        "nodes": [JobNodeDocument(node=share.node, ranks=None, first_rank=None) for share in card.shares],
        "attempt": card.attempt,
        "epoch": card.epoch,
        "shepherd": card.shepherd,
        "progress": by_time_limit(card.attempt, view.running_s(0.0), card.time_limit_s) if is_running else None,
        "attained_gpu_seconds": round(view.attained_gpu_s(0.0), 3),
        "source": "card",
        **aged(now_utc_s, -view.written_s),
    }
    return JobDocument(**{**UNKNOWN, **known})


UNKNOWN: dict[str, Any] = dict.fromkeys(each.name for each in fields(JobDocument) if each.required)


def job_document_now(record: JobRecord, facts: AgentFacts) -> JobDocument:
    """A job as it is at this moment, for whoever asks about this one alone."""
    return job_document(record, time.time(), facts.attendance_at(record.configuration))


def time_or_none(utc_s: float) -> str | None:
    """0 stands for "not yet" in records."""
    return rfc3339(utc_s) if utc_s else None


def spec_document(spec: JobSpec) -> Document:
    """The specification with the values of secret variables masked."""
    shown = spec.to_json()
    for each in (shown, *shown["groups"]):
        each["env"] = {
            name: MASK if name.upper().endswith(SECRET_ENDINGS) else value for name, value in each["env"].items()
        }
    return shown


def _worker(share: Share, state: str) -> WorkerDocument:
    return WorkerDocument(worker=share.part, node=share.node, state=state)


def _checkpoint(checkpoint: Checkpoint) -> CheckpointDocument:
    return CheckpointDocument(
        name=checkpoint.name,
        attempt=checkpoint.attempt,
        node=checkpoint.node,
        committed_at=rfc3339(checkpoint.committed_utc_s),
        size_bytes=checkpoint.size_bytes,
        copies=list(checkpoint.copies),
    )


def _rescaling(change: Rescaling) -> RescalingDocument:
    return RescalingDocument(
        decided_at=rfc3339(change.utc_s),
        ranks_before=change.ranks_before,
        ranks_after=change.ranks_after or None,
        pause_seconds=round(change.pause_s, 3) if change.ranks_after else None,
        reason=change.reason,
    )
