"""Requests about one job: find it, then act here or have the agent act that shepherds it."""

import asyncio
import json
import signal as signals
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

import msgspec
from msgspec import structs

from swarm_agent.attendance import no_majority
from swarm_agent.http.exchange import Call, Document, HttpReply, answer, as_object
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.find import Found, JobFinder, over
from swarm_agent.http.job_document import card_document, job_document_now
from swarm_agent.http.joblist import FIELDS, trimmed
from swarm_agent.http.model import model_document
from swarm_agent.http.outlook import outlook_of
from swarm_agent.http.parameter import choice, number, text
from swarm_agent.http.pauses import pauses, tasks_here, with_pauses, with_problems
from swarm_agent.http.peers import (
    FORWARD_TIMEOUT_S,
    LIST_TIMEOUT_S,
    SAFE_METHODS,
    SEARCH_TIMEOUT_S,
    Peers,
    code_of,
    first_unique,
)
from swarm_agent.http.port import AgentPort
from swarm_agent.http.problem import KINDS, Problem, from_refusal, invalid
from swarm_agent.http.progress import reported_here, with_reports
from swarm_agent.http.stream import closing
from swarm_agent.http.told import Told, stamp_header, stamp_of
from swarm_agent.http.views import left_document, why_document
from swarm_agent.http.watch import JobWatch
from swarmsched import ids
from swarmsched.api import NODE_CLOSENESS, JobState, nearest
from swarmsched.commands import (
    CancelJob,
    Command,
    JobAccepted,
    MigrateJob,
    RecoverJob,
    Refused,
    ScaleJob,
    SignalJob,
)
from swarmsched.documents import (
    JobDocument,
    LeftListDocument,
    ModelDocument,
    NodeFolders,
    NodePart,
    OutlookDocument,
    WaitDocument,
)
from swarmsched.holders import majority
from swarmsched.ids import JobId, NodeId, is_job_id
from swarmsched.record import JobRecord
from swarmsched.specification import NODES_LIMIT, RANKS_LIMIT
from swarmsched.view import JobView

FAILOVER_S = 21.0  # a new shepherd acts within 20 s of the death of the old one; clients are promised a word in 25 s
LAST_TRY_S = 1.0  # what the last try is given all the same
REASON_S = 1.5  # to find out why nobody acts
FAILOVER_PAUSE_S = 0.5
HELD_COPY_PATIENCE_S = 2.0  # for the shepherd's own word, where a copy is at hand
WAIT_DEFAULT_S = 60.0
WAIT_LIMIT_S = 300.0
GRACE_LIMIT_S = 86_400.0
REASON_LIMIT = 200
SIGNAL_NUMBER_LIMIT = 64
ATTENDANCE_FIELDS = "holders,leaving_holders,has_majority"
PASSING = ("shepherd_unreachable", "not_ready", "unavailable", "unknown_job")
HEARSAY = "X-Swarm-Source"  # of an answer that rests on gossip: whoever has the record knows more
FOLLOWED_STATES = {"done": ("ended",), "running": ("running", "stopping", "ended")}

GOAL = choice("for", "What to wait for.", list(FOLLOWED_STATES))
TIMEOUT = number("timeout", "Seconds.", WAIT_DEFAULT_S, 0.0, WAIT_LIMIT_S)
USER = text("user", "Whose newest job @last means.")

Local = Callable[[JobId, Call], Awaitable[HttpReply]]


class JobRoutes:
    """Handlers of `/v1/jobs/JOB...`."""

    def __init__(self, agent: AgentPort, facts: AgentFacts, peers: Peers, finder: JobFinder, watch: JobWatch) -> None:
        self._agent, self._facts, self._peers, self._finder, self._watch = agent, facts, peers, finder, watch
        self._told = Told()

    async def on_find(self, _: NodeId, payload: Document) -> Document:
        """Another agent looks for a job."""
        reference, user = str(payload.get("reference", "")), str(payload.get("user", ""))
        matches = self._finder.likeliest(reference, user) or self._finder.past_retention(reference)
        return {"matches": matches, "names": self._finder.names()}

    async def on_tasks(self, _: NodeId, payload: Document) -> Document:
        """Another agent wants to know what of a job is here."""
        return as_object(self._own_part(JobId(str(payload.get("job_id", "")))))

    async def get_job(self, call: Call) -> HttpReply:
        """GET /v1/jobs/JOB."""
        found = await self.find(call)
        return await self._tell(found, call)

    async def why_job(self, call: Call) -> HttpReply:
        """GET /v1/jobs/JOB/why."""
        found = await self.find(call)
        return await self._read(found, call, self._explain)

    async def on_left(self, _: NodeId, payload: Document) -> Document:
        """Another agent wants to know which folders of a job lie here."""
        return as_object(await self._left_here(JobId(str(payload.get("job_id", "")))))

    async def left_job(self, call: Call) -> HttpReply:
        """GET /v1/jobs/JOB/left: which node ran an attempt that is over only that node knows, so all are asked."""
        found = await self.find(call)
        told = await self._peers.ask_all("left", {"job_id": found.job_id}, SEARCH_TIMEOUT_S)
        parts = {self._peers.own_name: await self._left_here(found.job_id), **told.read(NodeFolders)}
        items = [structs.replace(each, node=node) for node, part in sorted(parts.items()) for each in part.items]
        return answer(LeftListDocument(items=items, **told.absent))

    async def _left_here(self, job_id: JobId) -> NodeFolders:
        kept = await self._agent.left_behind(job_id) if is_job_id(job_id) else []
        return NodeFolders(items=list(map(left_document, kept)))

    async def cancel_job(self, call: Call) -> HttpReply:
        """POST /v1/jobs/JOB/cancel and DELETE /v1/jobs/JOB."""
        document = call.json("grace_seconds", "reason")
        grace_s, reason = _grace(document.get("grace_seconds")), short_text(document.get("reason", ""))
        found = await self.find(call)
        return await self._change(found, call, CancelJob(found.job_id, grace_s, reason))

    async def signal_job(self, call: Call) -> HttpReply:
        """POST /v1/jobs/JOB/signal."""
        number = signal_number(call.json("signal").get("signal"))
        found = await self.find(call)
        return await self._change(found, call, SignalJob(found.job_id, number))

    async def scale_job(self, call: Call) -> HttpReply:
        """POST /v1/jobs/JOB/scale: other numbers of ranks from now on."""
        document = call.json("ranks", "ranks_most")
        ranks = whole("ranks", document.get("ranks"), 1, RANKS_LIMIT)
        most = whole("ranks_most", document.get("ranks_most", 0), 0, RANKS_LIMIT)
        found = await self.find(call)
        return await self._change(found, call, ScaleJob(found.job_id, ranks, most))

    async def migrate_job(self, call: Call) -> HttpReply:
        """POST /v1/jobs/JOB/migrate: other hosts, now or not at all."""
        document = call.json("nodes", "avoid")
        nodes, avoid = (node_names(key, document.get(key, [])) for key in ("nodes", "avoid"))
        if not nodes and not avoid:
            raise invalid("", "names no nodes", 'for example {"nodes": ["gpu4"]} or {"avoid": ["gpu1"]}')
        found = await self.find(call)
        nodes, avoid = (tuple(map(self._facts.named, names)) for names in (nodes, avoid))
        self._check_names((*nodes, *avoid))
        return await self._change(found, call, MigrateJob(found.job_id, nodes, avoid))

    def _check_names(self, nodes: Iterable[NodeId]) -> None:
        known = [member.node_id for member in self._facts.members()]
        for node in nodes:
            if node not in known:
                raise Problem("unknown_node", f"there is no node {node!r}{nearest(node, known, NODE_CLOSENESS)}")

    async def recover_job(self, call: Call) -> HttpReply:
        """POST /v1/jobs/JOB/recover: an operator declares the holders that do not answer dead for good."""
        if call.json("force").get("force") is not True:
            remedy = 'send {"force": true} once you are sure that the silent holders never come back with their disks'
            raise invalid("/force", "must be true", remedy)
        found = await self.find(call)
        self._check_not_ended(found.job_id)
        return await self._at_holders(found, call, RecoverJob(found.job_id))

    def _check_not_ended(self, job_id: JobId) -> None:
        """What a record from before the end would run again."""
        place, record = self._facts.places().get(job_id), self._facts.record(job_id)
        if record and place and place.state is JobState.ENDED and record.stamp < place.stamp:
            raise Problem("job_over", f"{job_id} has ended, as {place.shepherd} told before it was lost")

    async def wait_job(self, call: Call) -> HttpReply:
        """GET /v1/jobs/JOB/wait: woken by the change itself, wherever the shepherd is."""
        goal, timeout_s = GOAL.of(call), TIMEOUT.of(call)
        found = await self.find(call)
        last: JobDocument | None = None
        try:
            async with asyncio.timeout(timeout_s), closing(self._watch.watch(found)) as states:
                async for job in states:
                    last = job
                    if job.state in FOLLOWED_STATES[goal]:
                        return answer(WaitDocument(met=True, job=job))
        except TimeoutError:
            pass  # a wait that was not met is an answer, not an error
        if last is None:
            told = await self._tell(found, replace(call, path=f"/v1/jobs/{found.job_id}", query={}))
            last = msgspec.json.decode(_bytes(told), type=JobDocument)
        return answer(WaitDocument(met=False, job=last))

    async def find(self, call: Call) -> Found:
        """The job that the path names; a forwarded request is not sent round again."""
        return await self._finder.find(call.params["job"], USER.of(call), may_ask=call.hops == 0)

    async def _tell(self, found: Found, call: Call) -> HttpReply:
        """Show the job to a client: never an older state of it than this agent has told before."""
        shown, fields = await self._read(found, call, self._show), FIELDS.of(call)
        if call.hops:
            return shown
        if not self._told.is_older(found.job_id, shown):
            self._told.keep(found.job_id, shown, is_whole=not fields)
            return shown
        job, stamp = self._told.again(found.job_id), self._told.stamp(found.job_id)
        if job is None:
            known = f"{self._peers.own_name} has told of epoch {stamp[0]}, version {stamp[1]} of it"
            raise Problem("shepherd_unreachable", f"whoever answers for job {found.job_id} knows an old state: {known}")
        self._doubt(job)
        return answer(trimmed(job, fields), headers=stamp_header(stamp))

    def _doubt(self, job: JobDocument) -> None:
        """Of a document that is not the newest: what depends on who is there at this moment."""
        holders = job.holders or []
        present = self._facts.attendance().present.intersection(holders)
        job.has_majority = None if len(present) >= majority(len(holders)) else False
        job.survives_deaths = None
        with_pauses(job, {})
        with_problems(job, {})

    async def _show(self, job_id: JobId, call: Call) -> HttpReply:
        record, fields = self._record(job_id), FIELDS.of(call)
        job = job_document_now(record, self._facts)
        if not record.is_ended and (not fields or {"model", "size_reason"}.intersection(fields)):
            job.model = await self._model(job_id)
            job.size_reason = self._facts.size_reason(record) or None
        if not record.is_ended and (not fields or "outlook" in fields):
            job.outlook = await self._outlook(record)
        return await self._shown(job, call, stamp_header(record.stamp))

    async def _outlook(self, record: JobRecord) -> OutlookDocument | None:
        return outlook_of(await self._agent.foresee((record.job_id,)), record)

    async def _model(self, job_id: JobId) -> ModelDocument | None:
        question = self._facts.speed_question(job_id)
        table = await self._agent.tabulate(question) if question is not None else None
        return model_document(question, table) if question and table and table.rows else None

    async def _show_card(self, view: JobView, call: Call) -> HttpReply:
        place, job = self._facts.places().get(view.job_id), card_document(view, time.time())
        if place is not None:
            job.holders = list(place.holders)
            self._doubt(job)
        return await self._shown(job, call, {HEARSAY: "card"})

    async def _shown(self, job: JobDocument, call: Call, headers: Mapping[str, str]) -> HttpReply:
        fields = FIELDS.of(call)
        if not fields or {"nodes", "progress", "world", "files_on"}.intersection(fields):
            await self._ask_its_nodes(job)
        return answer(trimmed(job, fields), headers=headers)

    async def _ask_its_nodes(self, job: JobDocument) -> None:
        """Say of each node of the job whether its ranks are frozen, null where it does not say, and what they told;
        and which of its holders have its files."""
        own, job_id, spec = self._peers.own_name, JobId(job.id), job.spec or {}
        is_running, is_live = job.state in ("running", "stopping"), job.state != "ended"
        has_files = is_live and bool(spec.get("tree") or spec.get("requirements"))
        others = [NodeId(share.node) for share in job.nodes] if is_running else []
        if has_files:
            others += set(self._peers.alive()).intersection(map(NodeId, job.holders or ()))
        fan_out = await self._peers.ask(first_unique(others, (own,)), "tasks", {"job_id": job_id}, LIST_TIMEOUT_S)
        parts = {own: self._own_part(job_id), **fan_out.read(NodePart)}
        if has_files:
            job.files_on = sorted(node for node, part in parts.items() if part.has_files)
        if is_running:
            tasks = {node: part.tasks for node, part in parts.items()}
            with_pauses(job, pauses(tasks))
            with_problems(job, tasks)
            with_reports(job, [each for part in parts.values() for each in part.reports])

    def _own_part(self, job_id: JobId) -> NodePart:
        record = self._facts.record(job_id)
        return NodePart(
            tasks=tasks_here(self._facts, job_id),
            reports=reported_here(self._facts, job_id),
            has_files=record is not None and self._agent.has_files(record.spec),
        )

    async def _explain(self, job_id: JobId, _: Call) -> HttpReply:
        record = self._record(job_id)
        job = job_document_now(record, self._facts)
        if job.progress:
            await self._ask_its_nodes(job)
        model = None if record.is_ended else await self._model(job_id)
        outlook = None if record.is_ended else await self._outlook(record)
        return answer(why_document(record, self._facts, job.progress, model, outlook))

    def _record(self, job_id: JobId) -> JobRecord:
        record = self._facts.record(job_id)
        if record is None:
            raise Problem("unknown_job", f"{self._peers.own_name} does not have job {job_id} any more")
        return record

    async def _read(self, found: Found, call: Call, local: Local) -> HttpReply:
        """From the shepherd if it can be asked; else from a held copy or a card, with its age."""
        if self._facts.has_last_word(found.job_id):
            return await local(found.job_id, call)
        if call.hops and self._facts.is_over(found.job_id):
            raise over(found.job_id)
        outcome: HttpReply | Problem
        try:
            if self._facts.record(found.job_id) is not None:
                outcome = await self._forward(found, call, HELD_COPY_PATIENCE_S)
            else:
                outcome = await self._forward_or_search(found, call)
        except Problem as problem:
            if problem.code not in ("shepherd_unreachable", "unknown_job"):
                raise
            outcome = problem
        if isinstance(outcome, HttpReply) and self._is_newest(found.job_id, outcome):
            return outcome
        return await self._from_here(found.job_id, call, local, outcome)

    def _is_newest(self, job_id: JobId, shown: HttpReply) -> bool:
        """False for hearsay, and for the word of a deposed shepherd where the copy that is held here is newer."""
        record, stamp = self._facts.record(job_id), stamp_of(shown)
        return HEARSAY not in shown.headers and (record is None or stamp is None or record.stamp <= stamp)

    async def _from_here(self, job_id: JobId, call: Call, local: Local, outcome: HttpReply | Problem) -> HttpReply:
        """What this agent has itself, where nobody with a record has answered; else what came of asking."""
        if self._facts.record(job_id) is not None:
            return await local(job_id, call)
        if self._facts.is_over(job_id):
            raise over(job_id)
        card = next((each for each in self._facts.cards() if each.job_id == job_id), None)
        if card is not None and local == self._show:
            return await self._show_card(card, call)
        if isinstance(outcome, Problem):
            raise outcome
        return outcome

    async def _change(self, found: Found, call: Call, command: Command) -> HttpReply:
        """Have the shepherd do it, and wait for the next one while none acts.

        Only the agent that the client asked waits.  A signal whose answer was lost is not sent again: two are not one.
        """
        if call.hops:
            return await self._change_now(found, call, command)
        loop = asyncio.get_running_loop()
        end_s, was_sent = loop.time() + FAILOVER_S, False
        while True:
            try:
                async with asyncio.timeout_at(max(end_s, loop.time() + LAST_TRY_S)):
                    return await self._change_now(found, call, command)
            except TimeoutError:
                last = Problem("unavailable", "no answer in time")
            except Problem as problem:
                is_unknown = problem.code == "unavailable" and isinstance(command, SignalJob)
                if problem.code not in PASSING or is_unknown:
                    raise
                last = problem
            was_sent = was_sent or last.code == "unavailable"
            if loop.time() + FAILOVER_PAUSE_S >= end_s:
                raise await self._nobody_acts(found, call, last, was_sent=was_sent)
            await asyncio.sleep(FAILOVER_PAUSE_S)

    async def _nobody_acts(self, found: Found, call: Call, last: Problem, *, was_sent: bool) -> Problem:
        """What a client is told after all the waiting; `last` stays as it is where it says more."""
        question = replace(call, method="GET", path=f"/v1/jobs/{found.job_id}", query={"fields": ATTENDANCE_FIELDS})
        document: Document = {}
        try:
            async with asyncio.timeout(REASON_S):
                shown = await self._read(found, replace(question, body=b""), self._show)
                document = json.loads(_bytes(shown))
        except (TimeoutError, Problem):
            pass  # nobody who can be asked knows the holders
        holders = [NodeId(name) for key in ("holders", "leaving_holders") for name in document.get(key) or ()]
        if document.get("has_majority") is False and holders:
            present = self._facts.attendance().present
            return _no_majority(found.job_id, holders, present, was_sent=was_sent)
        if last.code not in ("shepherd_unreachable", "unknown_job"):
            return last
        handle = ids.handle(found.job_id)
        detail = f"no shepherd acts for job {handle} at this moment ({last.detail})"
        remedy = f"{_done(was_sent=was_sent)}; try again in a moment, and see who holds it with: swarm status {handle}"
        return Problem("shepherd_unreachable", detail, remedy)

    async def _change_now(self, found: Found, call: Call, command: Command) -> HttpReply:
        if not self._facts.is_shepherd(found.job_id):
            record = self._facts.record(found.job_id)
            if self._facts.is_over(found.job_id):
                raise over(found.job_id)
            if record is None or not record.is_ended:
                return await self._forward(found, call)
        return await self._obeyed(found, command)

    async def _obeyed(self, found: Found, command: Command) -> HttpReply:
        before = self._facts.record(found.job_id)
        reply = await self._agent.command(command)
        if isinstance(reply, Refused):
            raise from_refusal(_with_remedy(reply))
        record = reply.record if isinstance(reply, JobAccepted) else self._record(found.job_id)
        job = job_document_now(record, self._facts)
        if isinstance(command, CancelJob):
            return answer({**structs.asdict(job), "had_ended": before is not None and before.is_ended}, 202)
        return answer(job, 202)

    async def _at_holders(self, found: Found, call: Call, command: Command) -> HttpReply:
        """Have the shepherd do it if one acts, else any holder: this agent if it has the record."""
        record = self._facts.record(found.job_id)
        if self._facts.is_over(found.job_id):
            raise over(found.job_id)
        if record is not None and (call.hops or self._facts.is_shepherd(found.job_id)):
            return await self._obeyed(found, command)
        try:
            return await (self._forward_or_search(found, call) if record is None else self._forward(found, call))
        except Problem as problem:
            if record is None or problem.code != "shepherd_unreachable":
                raise
        return await self._obeyed(found, command)

    async def _forward_or_search(self, found: Found, call: Call) -> HttpReply:
        """As `_forward`, and when nobody known has a word to say, ask who has the record at all.

        That somebody else has heard of the job counts only if nobody has its record, and so does an old record.
        """
        outcome: HttpReply | Problem
        try:
            outcome = await self._forward(found, call)
        except Problem as problem:
            if problem.code != "shepherd_unreachable":
                raise
            outcome = problem
        if isinstance(outcome, Problem) or HEARSAY in outcome.headers or self._told.is_older(found.job_id, outcome):
            holders = () if call.hops else await self._finder.search(found.job_id)
            if holders:
                return await self._forward(found, call, nodes=holders)
        if isinstance(outcome, Problem):
            raise outcome
        return outcome

    async def _forward(
        self, found: Found, call: Call, timeout_s: float = FORWARD_TIMEOUT_S, nodes: Iterable[NodeId] = ()
    ) -> HttpReply:
        """Ask the candidates, or `nodes`, in turn; 404 and 503 of one of them only mean that it is not the right one.

        410 counts if no other one has the record: each drops it in its own time.  So does a record that is older than
        what was told of the job.
        """
        tail = call.path.split("/", 4)[4:]
        path = "/".join(["/v1/jobs", found.job_id, *tail])
        gone: HttpReply | None = None
        older: HttpReply | None = None
        hearsay: HttpReply | None = None
        problem = Problem("shepherd_unreachable", f"no agent that acts for job {found.job_id} is known")
        for node in self._peers.likeliest(nodes or (*self._finder.known(found.job_id), *found.candidates)):
            try:
                reply = await self._peers.forward(node, replace(call, path=path), timeout_s)
            except Problem as error:
                problem = error
                if error.code == "unavailable":
                    raise  # it may have been done: the caller knows whether to do it again
                continue
            if reply.status == KINDS["job_over"].status:
                gone = reply
                continue
            if HEARSAY in reply.headers:
                hearsay = hearsay or reply
                continue
            if self._told.is_older(found.job_id, reply):
                older = older or reply
                continue
            if reply.status not in (404, 503):
                return reply
            if call.method not in SAFE_METHODS and code_of(reply) == "unavailable":
                raise Problem("unavailable", f"{node} could not tell whether it was done")
            problem = Problem("shepherd_unreachable", f"{node} does not act for job {found.job_id}")
        answered = gone or older or hearsay
        if answered is not None:
            return answered
        raise problem


def _with_remedy(refused: Refused) -> Refused:
    """The core has none where there is nothing to be done."""
    if refused.code == "conflict" and not refused.remedy:
        return structs.replace(refused, remedy="nothing needs to be done; `swarm status` of the job shows how it ended")
    return refused


def _no_majority(job_id: JobId, holders: list[NodeId], present: Collection[NodeId], *, was_sent: bool) -> Problem:
    """Nothing can be decided about the job, however long anybody waits."""
    handle = ids.handle(job_id)
    detail = no_majority(f"the holders of job {handle}", holders, present)
    remedy = f"{_done(was_sent=was_sent)}; start the lost agents again, or if they are lost for good: "
    code = "unavailable" if was_sent else "shepherd_unreachable"
    return Problem(code, detail, f"{remedy}swarm recover {handle} --force")


def _done(*, was_sent: bool) -> str:
    return "it may still be done once a majority is back" if was_sent else "nothing was changed"


def signal_number(value: object) -> int:
    """A number from 1 to 64, or a name with or without SIG."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= SIGNAL_NUMBER_LIMIT:
        return value
    names = [name for name in signals.Signals.__members__ if not name.startswith("SIGRT")]
    if isinstance(value, str):
        name = value.upper() if value.upper().startswith("SIG") else f"SIG{value.upper()}"
        if name in names:
            return int(signals.Signals[name])
    hint = nearest(f"SIG{value}", names) if isinstance(value, str) else ""
    raise invalid("/signal", f"{value!r} is not a signal{hint}", "a number from 1 to 64, or a name such as INT")


def whole(key: str, value: object, least: int, most: int) -> int:
    """A whole number of a body; raises `Problem` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise invalid(f"/{key}", f"{value!r} is out of range", f"a whole number from {least} to {most}")
    return value


def node_names(key: str, value: object) -> tuple[NodeId, ...]:
    """Names of nodes in a body; raises `Problem` for anything else."""
    if not isinstance(value, list) or len(value) > NODES_LIMIT:
        raise invalid(f"/{key}", "is no list of nodes", f"at most {NODES_LIMIT} names")
    for name in value:
        if not isinstance(name, str) or not ids.is_node_name(name):
            raise invalid(f"/{key}", f"{name!r} is no name of a node", "as `swarm nodes` lists them")
    return tuple(NodeId(name) for name in value)


def _grace(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= GRACE_LIMIT_S:
        raise invalid("/grace_seconds", f"{value!r} is out of range", f"a number from 0 to {GRACE_LIMIT_S:g}")
    return float(value)


def short_text(value: object) -> str:
    """`reason` of a body; raises `Problem` for anything but a short text."""
    if not isinstance(value, str) or len(value) > REASON_LIMIT:
        raise invalid("/reason", "is not a short text", f"at most {REASON_LIMIT} characters")
    return value


def _bytes(shown: HttpReply) -> bytes:
    assert isinstance(shown.body, bytes), "documents are not streamed"
    return shown.body
