"""Jobs of the whole swarm in one list: what every agent says of its own, and gossip for those that are silent."""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict as filter_keys
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, convert
from msgspec.structs import asdict

from swarm_agent.http.exchange import Call, Document, HttpReply, answer, as_object, decode_cursor, encode_cursor
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.job_document import card_document, job_document
from swarm_agent.http.outlook import outlook_of
from swarm_agent.http.parameter import Parameter, flag, integer, text, words
from swarm_agent.http.pauses import pauses, tasks_here, with_pauses
from swarm_agent.http.peers import LIST_TIMEOUT_S, Absent, FanOut, Peers
from swarm_agent.http.progress import reported_here, with_reports
from swarm_agent.http.schema import TEXT
from swarm_agent.http.views import LIVE_STATES
from swarmsched.api import API_VERSION, END_REASONS, JobState
from swarmsched.documents import JobDocument, NodeJobs, NodeReport
from swarmsched.ids import JobId, NodeId

DEFAULT_LIMIT = 100
LIMIT_MAX = 1_000
EVERYTHING = 10_000  # jobs taken into account for queues and status
LIVE_FIELDS = ("state", "queue", "gpus", "user", "handle", "survives_deaths", "has_majority")
STATE_WORDS = (*(state.value for state in JobState), *END_REASONS)

KNOWN_FIELDS = JobDocument.__struct_fields__
BLANK: Document = {
    **dict.fromkeys(KNOWN_FIELDS),
    **dict.fromkeys(("handle", "name", "user", "queue", "state", "phase", "reason"), ""),
    **dict.fromkeys(("submitted_at", "shepherd", "source", "as_of"), ""),
    **dict.fromkeys(("priority", "gpus", "gpus_per_rank", "ranks", "attempt", "epoch"), 0),
    **dict.fromkeys(("attained_gpu_seconds", "staleness_seconds"), 0.0),
    "api_version": API_VERSION,
    "nodes": [],
}
"""Of a job that another agent told in part; nobody is shown a key that was not asked for."""

ALL = flag("all", "Ended jobs too.")
CURSOR = Parameter(
    "cursor", TEXT, "Go on behind this place.", lambda given: decode_cursor(given or "", tuple[str, str], None)
)
FIELDS = words("fields", "Keys of each item, with commas; id is always there.", KNOWN_FIELDS, "unknown_field")
LIMIT = integer("limit", "At most so many.", DEFAULT_LIMIT, 1, LIMIT_MAX)
NAME = text("name", "Only jobs of this name.")
OWNER = text("user", "Only jobs of this user.")
STATE = words("state", "States, and reasons of ended jobs, with commas.", STATE_WORDS)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs; `before` is (submitted_at, id) of the last item of the page before."""

    states: tuple[str, ...] = ()
    user: str = ""
    name: str = ""
    before: tuple[str, str] | None = None
    limit: Annotated[int, Meta(ge=0, le=EVERYTHING)] = DEFAULT_LIMIT
    fields: tuple[str, ...] = ()

    def accepts(self, job: JobDocument) -> bool:
        """True for a job that belongs into the list, whatever page it is on."""
        return (
            (not self.states or job.state in self.states or job.end_reason in self.states)
            and self.user in ("", job.user)
            and self.name in ("", job.name)
        )

    def shows(self, key: str) -> bool:
        """True if items have this key."""
        return not self.fields or key in self.fields


@dataclass(frozen=True, slots=True)
class Gathered:
    """Jobs, newest submission first, at most the limit; how many match in all; whose part is missing.

    `unclaimed` are live jobs by what gossip says, of which nobody speaks: they are between two shepherds.
    """

    jobs: list[JobDocument]
    total: int
    is_cut: bool
    absent: Absent
    unclaimed: int = 0


class JobList:
    """Gathers jobs here and from all agents."""

    def __init__(self, facts: AgentFacts, peers: Peers) -> None:
        self._facts, self._peers = facts, peers

    async def list_jobs(self, call: Call) -> HttpReply:
        """GET /v1/jobs."""
        wanted = _filter_from(call)
        found = await self.gather(wanted)
        cursor = encode_cursor(_order(found.jobs[-1])) if found.is_cut and found.jobs else None
        items = [trimmed(job, wanted.fields) for job in found.jobs]
        oldest = max((job.staleness_seconds for job in found.jobs), default=0.0)
        pages = {"total": found.total, **found.absent, "staleness_seconds": oldest}
        return answer({"api_version": API_VERSION, "items": items, "next_cursor": cursor, **pages})

    async def live(self) -> Gathered:
        """All live jobs, with the keys that counting needs."""
        return await self.gather(JobFilter(states=LIVE_STATES, limit=EVERYTHING, fields=LIVE_FIELDS), sys.maxsize)

    async def gather(self, wanted: JobFilter, limit: int = 0) -> Gathered:
        """Own jobs, answers within 300 ms, and cards of shepherds that gave none."""
        fan_out = await self._peers.ask_all("jobs", filter_keys(wanted), LIST_TIMEOUT_S)
        own, page = self.own(wanted)
        parts = {self._peers.own_name: own, **fan_out.read(NodeJobs)}
        answers, paused = list(parts.values()), pauses({node: part.tasks for node, part in parts.items()})
        jobs = {job.id: job for job in page}
        for job in (_partial(item) for told in answers for item in told.items):
            known = jobs.get(job.id)
            if known is None or _is_newer(job, known):
                jobs[job.id] = job
        claimed = {tail for told in answers for tail in told.others.split()}.union(map(_tail, jobs))
        unclaimed = sum(_tail(job_id) not in claimed for job_id in self._known_live(fan_out))
        for job in self._stand_ins(wanted, frozenset((*fan_out.silent, *fan_out.unasked))):
            jobs.setdefault(job.id, job)
        newest = sorted(jobs.values(), key=_order, reverse=True)
        reports: dict[str, list[NodeReport]] = {}
        for report in (report for told in answers for report in told.reports):
            reports.setdefault(report.job_id, []).append(report)
        newest, is_cut = newest[: limit or wanted.limit], len(newest) > (limit or wanted.limit)
        for job in newest:
            with_reports(job, reports.get(job.id, []))
            with_pauses(job, paused)
        is_cut = is_cut or any(told.is_cut for told in answers)
        return Gathered(newest, len(claimed.union(map(_tail, jobs))), is_cut, fan_out.absent, unclaimed)

    def own(self, wanted: JobFilter) -> tuple[NodeJobs, list[JobDocument]]:
        """What this agent can say, and its page: jobs that it shepherds, and ended ones that it has kept.

        Between two shepherds nobody acts for a job, and still it must not be missing: so its holders, and who was its
        shepherd last, speak of it as well.
        """
        now_utc_s, attendance = time.time(), self._facts.attendance()
        own, records = self._peers.own_name, self._facts.records().values()
        mine = [
            each
            for each in records
            if each.is_ended
            or each.shepherd == own
            or each.shepherd not in attendance.present
            or self._facts.is_shepherd(each.job_id)
        ]
        told, page = _page([job_document(record, now_utc_s, attendance) for record in mine], wanted)
        if wanted.shows("outlook"):
            foreseen = self._facts.foreseen()
            for job in page:
                job.outlook = outlook_of(foreseen, self._facts.records()[JobId(job.id)])
        told.reports = reported_here(self._facts) if wanted.shows("progress") else []
        told.tasks = tasks_here(self._facts) if wanted.shows("nodes") else []
        return told, page

    async def on_jobs(self, _: NodeId, payload: Document) -> Document:
        """Another agent gathers the swarm's jobs."""
        wanted = convert(payload, JobFilter)
        told, page = self.own(wanted)
        keys = ("attempt", "epoch", "version", "submitted_at", "staleness_seconds", "name", *wanted.fields)
        told.items = [trimmed(job, keys if wanted.fields else ()) for job in page]
        return as_object(told)

    def _known_live(self, fan_out: FanOut) -> Iterator[JobId]:
        """Live jobs of shepherds that have answered, by gossip as it is now."""
        for job in self._facts.cards():
            if job.card.shepherd in fan_out.answers and not self._facts.is_over(job.job_id):
                yield job.job_id

    def _stand_ins(self, wanted: JobFilter, silent: frozenset[NodeId]) -> list[JobDocument]:
        """Cards and held copies of jobs whose shepherds did not answer; the copies know more."""
        now_utc_s, attendance = time.time(), self._facts.attendance()
        known = [job for job in self._facts.cards() if job.card.shepherd in silent]
        jobs = {job.job_id: card_document(job, now_utc_s) for job in known}
        for job_id, record in self._facts.records().items():
            if record.shepherd in silent and not record.is_ended:
                jobs[job_id] = job_document(record, now_utc_s, attendance)
        return _page(list(jobs.values()), wanted)[1]


def _page(jobs: list[JobDocument], wanted: JobFilter) -> tuple[NodeJobs, list[JobDocument]]:
    """The newest that match and come after the cursor; `others` names all other matches, for the count.

    Several agents know an ended job, so numbers could not be added up.
    """
    matching = [job for job in jobs if wanted.accepts(job)]
    rest = [job for job in matching if wanted.before is None or _order(job) < wanted.before]
    rest.sort(key=_order, reverse=True)
    items = rest[: wanted.limit]
    shown = {job.id for job in items}
    others = " ".join(_tail(job.id) for job in matching if job.id not in shown)
    return NodeJobs(others=others, is_cut=len(rest) > wanted.limit), items


def _partial(item: Document) -> JobDocument:
    """A job as another agent told it, perhaps in part."""
    return convert({**BLANK, **item}, JobDocument)


def _tail(job_id: str) -> str:
    """The random part of an id."""
    return job_id[-16:]


def _order(job: JobDocument) -> tuple[str, str]:
    return (job.submitted_at, job.id)


def _is_newer(job: JobDocument, known: JobDocument) -> bool:
    return (job.epoch, job.version or 0) > (known.epoch, known.version or 0)


def trimmed(job: JobDocument, fields: tuple[str, ...]) -> Document:
    """Only the wanted keys and the id, or all."""
    return {key: getattr(job, key) for key in ("id", *fields)} if fields else asdict(job)


def _filter_from(call: Call) -> JobFilter:
    states = STATE.of(call)
    if not states and not ALL.of(call):
        states = LIVE_STATES
    return JobFilter(
        states=states,
        user=OWNER.of(call),
        name=NAME.of(call),
        before=CURSOR.of(call),
        limit=LIMIT.of(call),
        fields=FIELDS.of(call),
    )
