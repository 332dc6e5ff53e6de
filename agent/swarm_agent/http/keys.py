"""The documents of jobs, members, nodes, GPUs and tasks, key by key. A row has the key's name, its JSON Schema, and
where its value comes from. Answers and /openapi.json are both made from these tables, which
docs/reference/http-api.md explains.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from swarm_agent.attendance import Attendance
from swarm_agent.http.exchange import Document
from swarm_agent.http.model import MODEL
from swarm_agent.http.outlook import OUTLOOK
from swarm_agent.http.progress import PROGRESS, by_time_limit
from swarm_agent.http.schema import (
    COUNT,
    FLAG,
    JOB_ID,
    NUMBER,
    SECONDS,
    TEXT,
    TIME,
    VERSION,
    Schema,
    array,
    choice,
    maybe,
    record,
    ref,
)
from swarm_agent.http.when import rfc3339
from swarmsched import ids
from swarmsched.api import API_VERSION, EndReason, JobSpec, JobState, StartPhase
from swarmsched.checkpoint import Checkpoint
from swarmsched.policies.calm import PAUSE_BUDGET
from swarmsched.record import JobRecord, Rescaling, own_exit_code, shell_exit_code
from swarmsched.resources import Share, ranks_by_node, world_size
from swarmsched.view import JobView

SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIALS")
MASK = "***"

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class DocKey(Generic[S]):
    """One key of a document that tells of an `S`."""

    name: str
    schema: Schema
    value: Callable[[S], object]


@dataclass(frozen=True, slots=True)
class JobDocKey:
    """One key of a job's document: by the record, and by the card; null where a card does not tell it."""

    name: str
    type: Schema
    of_record: Callable[["ByRecord"], object]
    of_card: Callable[[JobView], object] | None = None

    @property
    def schema(self) -> Schema:
        """What cards do not tell may be null."""
        return self.type if self.of_card else maybe(self.type)


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

    def at_end(self, value: object) -> object:
        """Null until the job has ended."""
        return value if self.record.is_ended else None

    def progress(self) -> Document | None:
        """By its time limit; what ranks reported is added by whoever asks their nodes."""
        is_running = self.record.state in (JobState.RUNNING, JobState.STOPPING)
        return by_time_limit(self.record.attempt, self.elapsed_s, self.spec.time_limit_s) if is_running else None

    def shares(self) -> list[Document]:
        """A job's nodes in the order of ranks; those of an elastic job have any numbers."""
        first, documents = 0, []
        for node, ranks in ranks_by_node(self.record.shares).items():
            first_rank = None if self.spec.elastic else first
            documents.append({"node": node, "ranks": ranks, "first_rank": first_rank, "is_paused": None})
            first += ranks
        return documents

    def world(self) -> Document | None:
        """Which workers of an elastic job train, in the order of their ranks, and which come and go."""
        record = self.record
        if not self.spec.elastic:
            return None
        groups = {"training": record.members, "joining": record.joining, "leaving": record.leaving}
        if not record.world.version:  # all are being started
            groups = {"joining": record.shares}
        return {
            "version": record.world.version,
            "workers": [_worker(share, state) for state, shares in groups.items() for share in shares],
            "lost": list(record.world.lost),
            "last_worker": record.last_part if record.shares else 0,
        }


def document(keys: Iterable[DocKey[S]], source: S) -> Document:
    """Every key with its value."""
    return {key.name: key.value(source) for key in keys}


def properties(keys: Iterable[DocKey[Any] | JobDocKey]) -> Schema:
    """The schemas of keys by name."""
    return {key.name: key.schema for key in keys}


def time_or_none(utc_s: float) -> str | None:
    """0 stands for "not yet" in records."""
    return rfc3339(utc_s) if utc_s else None


def _worker(share: Share, state: str) -> Document:
    return {"worker": share.part, "node": share.node, "state": state, "problem": None}


def spec_document(spec: JobSpec) -> Document:
    """The specification with the values of secret variables masked."""
    is_secret = {name: name.upper().endswith(SECRET_ENDINGS) for name in spec.env}
    return {**spec.to_json(), "env": {name: MASK if is_secret[name] else value for name, value in spec.env.items()}}


def card_progress(view: JobView) -> Document | None:
    """As `ByRecord.progress`."""
    card = view.card
    is_running = card.state in (JobState.RUNNING, JobState.STOPPING)
    return by_time_limit(card.attempt, view.running_s(0.0), card.time_limit_s) if is_running else None


STATE = choice(*(state.value for state in JobState))
PHASE = choice(*(phase.value for phase in StartPhase))
END_REASONS = tuple(each.value for each in EndReason if each not in (EndReason.NONE, EndReason.RESCALED))
"""What is told of ended jobs; one whose ranks were ended for another size waits to run again."""
END_REASON = choice(*END_REASONS)

# One key a line.
# fmt: off

CHECKPOINT: tuple[DocKey[Checkpoint], ...] = (
    DocKey("name", TEXT, lambda each: each.name),
    DocKey("attempt", COUNT, lambda each: each.attempt),
    DocKey("node", TEXT, lambda each: each.node),
    DocKey("committed_at", TIME, lambda each: rfc3339(each.committed_utc_s)),
    DocKey("size_bytes", COUNT, lambda each: each.size_bytes),
    DocKey("copies", array(TEXT), lambda each: list(each.copies)),
)
"""What the next attempt resumes from; `copies` lists who keeps a packed copy, none in a shared folder."""

RESCALING: tuple[DocKey[Rescaling], ...] = (
    DocKey("decided_at", TIME, lambda each: rfc3339(each.utc_s)),
    DocKey("ranks_before", COUNT, lambda each: each.ranks_before),
    DocKey("ranks_after", maybe(COUNT), lambda each: each.ranks_after or None),
    DocKey("pause_seconds", maybe(SECONDS), lambda each: round(each.pause_s, 3) if each.ranks_after else None),
    DocKey("reason", TEXT, lambda each: each.reason),
)
"""One change of size or hosts; null until its ranks run again."""

SHARE = record({"node": TEXT, "ranks": maybe(COUNT), "first_rank": maybe(COUNT), "is_paused": maybe(FLAG)})
WORKER_STATE = choice("training", "joining", "leaving")
WORLD = record({
    "version": COUNT,
    "workers": array(record({"worker": COUNT, "node": TEXT, "state": WORKER_STATE, "problem": maybe(TEXT)})),
    "lost": array(COUNT),
    "last_worker": COUNT,
})
"""Version 0: its attempt is being started.  Of numbers up to `last_worker` those that are not there have left.
`problem` is empty where all is well, null where nobody says."""

LEFTOVER = record({"node": TEXT, "attempt": COUNT})

JOB: tuple[JobDocKey, ...] = (
    JobDocKey("api_version", VERSION, lambda _: API_VERSION, lambda _: API_VERSION),
    JobDocKey("id", JOB_ID, lambda job: job.record.job_id, lambda view: view.card.job_id),
    JobDocKey("handle", TEXT, lambda job: ids.handle(job.record.job_id), lambda view: ids.handle(view.card.job_id)),
    JobDocKey("name", TEXT, lambda job: job.spec.name, lambda view: view.card.name),
    JobDocKey("user", TEXT, lambda job: job.spec.user, lambda view: view.card.user),
    JobDocKey("queue", TEXT, lambda job: job.spec.queue, lambda view: view.card.queue),
    JobDocKey("priority", {"type": "integer"}, lambda job: job.spec.priority, lambda view: view.card.priority),
    JobDocKey("state", STATE, lambda job: job.record.state.value, lambda view: view.card.state.value),
    JobDocKey("phase", PHASE, lambda job: job.record.phase.value, lambda view: view.card.phase.value),
    JobDocKey("reason", TEXT, lambda job: job.record.reason, lambda view: view.card.reason),
    JobDocKey("end_reason", END_REASON,
           lambda job: job.at_end(None if job.record.end_reason is EndReason.NONE else job.record.end_reason.value)),
    JobDocKey("exit_code", {"type": "integer"}, lambda job: job.at_end(own_exit_code(job.record))),
    JobDocKey("signal", COUNT, lambda job: job.at_end(job.record.signal or None)),
    JobDocKey("shell_exit_code", COUNT, lambda job: job.at_end(shell_exit_code(job.record))),
    JobDocKey("submitted_at", TIME,
           lambda job: rfc3339(job.record.submitted_utc_s), lambda view: rfc3339(view.card.submitted_utc_s)),
    JobDocKey("started_at", TIME, lambda job: time_or_none(job.record.started_utc_s)),
    JobDocKey("ended_at", TIME, lambda job: time_or_none(job.record.ended_utc_s)),
    JobDocKey("elapsed_seconds", SECONDS, lambda job: job.elapsed_s),
    JobDocKey("queued_seconds", SECONDS, lambda job: job.queued_s),
    JobDocKey("gpus", COUNT, lambda job: job.record.gpus,
           lambda view: view.card.attained_rate or view.card.ranks * view.card.demand.gpus),
    JobDocKey("gpus_per_rank", COUNT, lambda job: job.spec.demand.gpus, lambda view: view.card.demand.gpus),
    JobDocKey("ranks", COUNT, lambda job: job.spec.ranks, lambda view: view.card.ranks),
    JobDocKey("ranks_most", COUNT, lambda job: job.spec.ranks_most),
    JobDocKey("world_size", COUNT, lambda job: world_size(job.record.training)),
    JobDocKey("nodes", array(SHARE), lambda job: job.shares(), lambda view: [
        {"node": share.node, "ranks": None, "first_rank": None, "is_paused": None} for share in view.card.shares]),
    JobDocKey("world", WORLD, lambda job: job.world()),
    JobDocKey("attempt", COUNT, lambda job: job.record.attempt, lambda view: view.card.attempt),
    JobDocKey("epoch", COUNT, lambda job: job.record.epoch, lambda view: view.card.epoch),
    JobDocKey("version", COUNT, lambda job: job.record.version),
    JobDocKey("shepherd", TEXT, lambda job: job.record.shepherd, lambda view: view.card.shepherd),
    JobDocKey("holders", array(TEXT), lambda job: [holder.node for holder in job.record.holders]),
    JobDocKey("leaving_holders", array(TEXT), lambda job: [holder.node for holder in job.record.leaving_holders]),
    JobDocKey("survives_deaths", COUNT, lambda job: job.attendance.survives_deaths(job.record.configuration)),
    JobDocKey("has_majority", FLAG, lambda job: job.attendance.has_majority(job.record.configuration)),
    JobDocKey("is_forced", FLAG, lambda job: job.record.is_forced),
    JobDocKey("restarts", COUNT, lambda job: job.record.restarts),
    JobDocKey("preemptions", COUNT, lambda job: job.record.preemptions),
    JobDocKey("rescales", COUNT, lambda job: job.record.rescales),
    JobDocKey("rescalings", array(record(properties(RESCALING))),
           lambda job: [document(RESCALING, each) for each in job.record.rescalings]),
    JobDocKey("paused_seconds", SECONDS, lambda job: round(job.record.paused_s, 3)),
    JobDocKey("paused_ratio", maybe(NUMBER), lambda job: job.paused_ratio),
    JobDocKey("pause_budget_ratio", NUMBER, lambda _: PAUSE_BUDGET),
    JobDocKey("leftovers", array(LEFTOVER),
           lambda job: [{"node": each.node, "attempt": each.attempt} for each in job.record.leftovers]),
    JobDocKey("checkpoint", record(properties(CHECKPOINT)),
           lambda job: document(CHECKPOINT, job.record.checkpoint) if job.record.checkpoint else None),
    JobDocKey("progress", maybe(record(PROGRESS)), lambda job: job.progress(), card_progress),
    JobDocKey("model", maybe(record(MODEL)), lambda _: None, lambda _: None),
    JobDocKey("size_reason", maybe(TEXT), lambda _: None, lambda _: None),
    JobDocKey("outlook", maybe(record(OUTLOOK)), lambda _: None, lambda _: None),
    JobDocKey("attained_gpu_seconds", SECONDS,
           lambda job: round(job.attained_gpu_s, 3), lambda view: round(view.attained_gpu_s(0.0), 3)),
    JobDocKey("files_on", maybe(array(TEXT)), lambda _: None, lambda _: None),
    JobDocKey("spec", ref("JobSpec"), lambda job: spec_document(job.spec)),
    JobDocKey("detail", TEXT, lambda job: job.record.detail),
    JobDocKey("failed_node", TEXT, lambda job: job.record.failed_node or None),
    JobDocKey("failed_rank", COUNT, lambda job: job.record.failed_rank if job.record.failed_rank >= 0 else None),
    JobDocKey("relaunches", COUNT, lambda job: job.record.relaunches),
    JobDocKey("source", choice("record", "card"), lambda _: "record", lambda _: "card"),
)

AGE: Schema = {"as_of": TIME, "staleness_seconds": SECONDS}
"""How old what is told is: at the end of documents of jobs, nodes and lists."""

NEEDS: Schema = {
    "ranks": COUNT, "ranks_most": COUNT, "gpus_per_rank": COUNT, "gpus": COUNT, "cpus_per_rank": COUNT,
    "memory_bytes_per_rank": COUNT, "gpu_memory_bytes": COUNT, "gpu_type": TEXT, "require": array(TEXT),
}
"""What is told of a specification where it is explained why a job waits."""
