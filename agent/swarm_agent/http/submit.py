"""Tickets and the submission of jobs.

A ticket names the holders of the job with their databases.  The first one is meant to act for the job, so it is asked
first; any of them can create the job, and whoever creates it does so by compare-and-set at a majority: however often
a ticket is repeated, and wherever, there is one job.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from swarm_agent.http.exchange import Call, Document, HttpReply, answer, boolean, encode
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.idempotency import IdempotencyKeys
from swarm_agent.http.job_document import job_document_now
from swarm_agent.http.outlook import outlook_of
from swarm_agent.http.peers import FORWARD_TIMEOUT_S, Peers
from swarm_agent.http.port import AgentPort, commanded
from swarm_agent.http.problem import Problem, from_rejection, invalid
from swarmsched import ids
from swarmsched.api import JobSpec, told
from swarmsched.card import card_of
from swarmsched.commands import CreateTicket, JobAccepted, SubmitJob, TicketIssued
from swarmsched.documents import SubmittedJobDocument, TicketDocument
from swarmsched.errors import JobRejected
from swarmsched.gossip.member import MemberView
from swarmsched.gossip.record import NodeFlag
from swarmsched.holders import HOLDERS_MAX, HOLDERS_WANTED, Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.specification import FIELDS
from swarmsched.view import JobView

SUBMIT_S = 25.0  # for all holders together, below the 30 s that clients wait
INTRODUCTION_S = 3.0  # three rounds of gossip; a job that one holder keeps is lost with it
INTRODUCTION_POLL_S = 0.05
NAMED_MOST = 3
_VERSION = re.compile(r"\d+(\.\d+)*")
_STORE = re.compile(r"[0-9a-f]{1,14}")
_STORE_END = 2**53


def _is_before(member: MemberView, version: str) -> bool:
    """True for an agent of an earlier version than that; what tells no number is taken for new."""
    found = _VERSION.match(member.software_version)
    return found is not None and _numbers(found[0]) < _numbers(version)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


class SubmitRoutes:
    """Handlers of POST /v1/tickets and POST /v1/jobs."""

    def __init__(self, agent: AgentPort, facts: AgentFacts, peers: Peers) -> None:
        self._agent, self._facts, self._peers = agent, facts, peers
        self._keys = IdempotencyKeys()

    async def create_ticket(self, call: Call) -> HttpReply:
        """POST /v1/tickets: no side effect."""
        call.json()
        ticket = await self._ticket()
        handle = ids.handle(ticket.job_id)
        return answer(TicketDocument(**_ticket_document(ticket), handle=handle, node=self._agent.config.name))

    async def submit_job(self, call: Call) -> HttpReply:
        """POST /v1/jobs."""

        async def act(memo: dict[str, object]) -> HttpReply:
            return await self._submit(call, memo)

        return await self._keys.once(call.headers.get("idempotency-key", ""), call.body, act)

    async def _submit(self, call: Call, memo: dict[str, object]) -> HttpReply:
        document = call.json("spec", "ticket", "dry_run")
        is_dry_run = boolean("dry_run", document.get("dry_run", False))
        spec = self._with_source(self._with_names(_spec(document)))
        if not call.hops and "restartable" not in document["spec"]:
            spec = structs.replace(spec, restartable=self._facts.setting()[0].is_restartable)
        ticket = memo.get("ticket") or _ticket_from(document.get("ticket")) or await self._ticket()
        assert isinstance(ticket, TicketIssued), "nothing else is put into the memo"
        memo["ticket"] = ticket
        command = SubmitJob(ticket.job_id, ticket.holders, spec, is_dry_run)
        if call.hops:
            return await self._create(command)
        self._refuse_what_others_drop(spec)
        return await self._at_holders(call, command)

    def _refuse_what_others_drop(self, spec: JobSpec) -> None:
        """Raise `Problem` while agents of an earlier version are there that would make another job of this one."""
        asked = told(spec)
        for row in FIELDS:
            if row.binding and row.key in asked:
                older = [each for each in self._facts.members() if each.is_available and _is_before(each, row.since)]
                if older:
                    names = ", ".join(f"{each.node_id} ({each.software_version})" for each in older[:NAMED_MOST])
                    detail = f"{row.key} is not known to agents of before {row.since}, which are: {names}"
                    raise Problem("conflict", detail, "upgrade these agents, or leave it out until then")

    async def _at_holders(self, call: Call, command: SubmitJob) -> HttpReply:
        """Ask the ticket's holders in order, this agent in its place, until one knows what became of the job."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SUBMIT_S
        forwarded = replace(call, path="/v1/jobs", body=_request(command))
        problem = Problem("unavailable", "no time was left")
        for holder in self._in_order(command.holders):
            try:
                if holder.node == self._agent.config.name:
                    return await self._create(command)
                timeout_s = min(FORWARD_TIMEOUT_S, end_s - loop.time())
                reply = await self._peers.forward(holder.node, forwarded, timeout_s)
            except Problem as error:
                if error.status != 503:
                    raise
                problem = error
                continue
            if reply.status != 503:
                return reply
            problem = Problem("unavailable", f"{holder.node} cannot take the job now")
        raise _nobody_took_it(command, problem)

    def _in_order(self, holders: Sequence[Holder]) -> Iterator[Holder]:
        """As the ticket has them, but a witness last: it holds jobs and acts for none."""
        own = self._agent.config
        if holders[0].node == own.name and not own.witness:
            yield holders[0]  # as a rule; what the others are need not be looked up then
            holders = holders[1:]
        witnesses = {each.record.node_id for each in self._facts.nodes() if each.record.has(NodeFlag.WITNESS)}
        yield from sorted(holders, key=lambda holder: holder.node in witnesses)

    async def _create(self, command: SubmitJob) -> HttpReply:
        """Create the job as one of its holders, or find that it was created before."""
        own = Holder(self._agent.config.name, self._facts.store_id)
        if own not in command.holders:
            detail = f"{own.node} is not a holder of this ticket, or has lost the database that it held it in"
            raise Problem("not_ready", detail, "ask the next holder of the ticket, or take a new ticket")
        reply = await commanded(self._agent, command, JobAccepted, "/spec")
        shown = job_document_now(reply.record, self._facts)
        if command.is_dry_run or command.spec.deadline_utc_s:
            more = [JobView(card_of(reply.record))] if command.is_dry_run and not reply.was_known else []
            shown.outlook = outlook_of(await self._agent.foresee((reply.record.job_id,), more), reply.record)
        is_new = not reply.was_known and not command.is_dry_run
        headers = {} if command.is_dry_run else {"Location": f"/v1/jobs/{reply.record.job_id}"}
        gpus = sum(each.record.total_gpus for each in self._facts.nodes())
        job = SubmittedJobDocument(
            **structs.asdict(shown), was_known=reply.was_known, dry_run=command.is_dry_run, swarm_gpus=gpus
        )
        return answer(job, 201 if is_new else 200, headers)

    async def _ticket(self) -> TicketIssued:
        """One with three holders where three are alive: gossip brings a new member's name before its database."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + INTRODUCTION_S
        ticket = await commanded(self._agent, CreateTicket(), TicketIssued)
        while len(ticket.holders) < HOLDERS_WANTED and self._has_strangers() and loop.time() < end_s:
            await asyncio.sleep(INTRODUCTION_POLL_S)
            ticket = await commanded(self._agent, CreateTicket(), TicketIssued)
        return ticket

    def _has_strangers(self) -> bool:
        """Whether a living member could hold jobs as soon as it is known which database it keeps."""
        introduced = {each.record.node_id for each in self._facts.nodes() if each.record.store_id}
        return any(each.is_available and each.node_id not in introduced for each in self._facts.members())

    def _with_names(self, spec: JobSpec) -> JobSpec:
        """With the nodes' own spelling of their names."""
        nodes, exclude = (tuple(map(self._facts.named, names)) for names in (spec.nodes, spec.exclude))
        return structs.replace(spec, nodes=nodes, exclude=exclude)

    def _with_source(self, spec: JobSpec) -> JobSpec:
        """Name this agent as a source of shipped files that it has, when the client named none."""
        wanted = [digest for digest in (spec.tree, spec.requirements) if digest]
        if not wanted or spec.blob_sources or self._agent.blobs.missing(wanted):
            return spec
        return JobSpec.from_json({**spec.to_json(), "blob_sources": [self._agent.config.name]})


def _spec(document: Document) -> JobSpec:
    if "spec" not in document:
        raise invalid("/spec", "is missing", 'for example {"spec": {"command": ["python", "train.py"]}}')
    try:
        return JobSpec.from_json(document["spec"])
    except JobRejected as error:
        raise from_rejection(error, "/spec") from error


def _ticket_document(ticket: TicketIssued | SubmitJob) -> Document:
    return {
        "job_id": ticket.job_id,
        "holders": [holder.node for holder in ticket.holders],
        "stores": [f"{holder.store:014x}" for holder in ticket.holders],
    }


def _request(command: SubmitJob) -> bytes:
    document = {"ticket": _ticket_document(command), "spec": told(command.spec), "dry_run": command.is_dry_run}
    return encode(document)


def _nobody_took_it(command: SubmitJob, last: Problem) -> Problem:
    """One holder that is not ready has done nothing; of several, one may have begun."""
    if last.code == "not_ready" and len(command.holders) == 1:
        return last
    names = ", ".join(holder.node for holder in command.holders)
    detail = f"none of the ticket's holders ({names}) answers for the job: {last.detail}"
    return Problem("unavailable", detail, "repeat with the same ticket when they are back, or take a new ticket")


def _ticket_from(value: Any) -> TicketIssued | None:
    """The client's ticket, as a reply of the core would be."""
    if value is None:
        return None
    holders = _holders_from(value) if isinstance(value, dict) else ()
    if not holders or not isinstance(value.get("job_id"), str) or not ids.is_job_id(value["job_id"]):
        raise invalid("/ticket", "is not a ticket of this API", "send what POST /v1/tickets answered")
    return TicketIssued(JobId(value["job_id"]), holders)


def _holders_from(ticket: dict[str, Any]) -> tuple[Holder, ...]:
    """Names with their stores; empty unless all are well formed and no node is named twice."""
    names, stores = ticket.get("holders"), ticket.get("stores")
    if not isinstance(names, list) or not isinstance(stores, list) or not len(names) == len(stores) <= HOLDERS_MAX:
        return ()
    are_usable = all(isinstance(name, str) and ids.is_node_name(name) for name in names) and all(
        isinstance(store, str) and _STORE.fullmatch(store) and 0 < int(store, 16) < _STORE_END for store in stores
    )
    if not are_usable or len(set(names)) != len(names):
        return ()
    return tuple(Holder(NodeId(name), int(store, 16)) for name, store in zip(names, stores, strict=True))
