"""Tickets and the submission of jobs."""

import time
from dataclasses import replace
from typing import Any

from swarm_agent.http.exchange import Answer, Call, answer, encode
from swarm_agent.http.idempotency import IdempotencyKeys
from swarm_agent.http.jobs import refuse_unknown_keys
from swarm_agent.http.peers import Peers
from swarm_agent.http.port import AgentPort
from swarm_agent.http.problem import Problem, from_refusal, from_rejection
from swarm_agent.http.views import Document, job_document
from swarmsched import ids
from swarmsched.api import API_VERSION, JobSpec
from swarmsched.commands import CreateTicket, JobAccepted, Refused, SubmitJob, TicketIssued
from swarmsched.errors import FieldProblem, JobRejected
from swarmsched.ids import JobId, NodeId

HOLDERS_LIMIT = 5


class Submission:
    """Handlers of POST /v1/tickets and POST /v1/jobs."""

    def __init__(self, agent: AgentPort, peers: Peers) -> None:
        self._agent, self._peers = agent, peers
        self._keys = IdempotencyKeys()

    async def create_ticket(self, call: Call) -> Answer:
        """POST /v1/tickets: no side effect."""
        refuse_unknown_keys(call.json(), ())
        ticket = await self._ticket()
        head = {"api_version": API_VERSION, "job_id": ticket.job_id, "handle": ids.handle(ticket.job_id)}
        return answer({**head, "holders": list(ticket.holders), "node": self._agent.config.name})

    async def submit_job(self, call: Call) -> Answer:
        """POST /v1/jobs."""

        async def act(memo: dict[str, object]) -> Answer:
            return await self._submit(call, memo)

        return await self._keys.once(call.headers.get("idempotency-key", ""), call.body, act)

    async def _submit(self, call: Call, memo: dict[str, object]) -> Answer:
        document = call.json()
        refuse_unknown_keys(document, ("spec", "ticket", "dry_run"))
        is_dry_run = _boolean(document.get("dry_run", False))
        spec = self._with_source(_spec(document))
        ticket = memo.get("ticket") or _ticket_from(document.get("ticket")) or await self._ticket()
        assert isinstance(ticket, TicketIssued), "nothing else is put into the memo"
        memo["ticket"] = ticket
        if self._agent.config.name not in ticket.holders:
            return await self._forward(call, ticket, spec, is_dry_run=is_dry_run)
        reply = await self._agent.command(SubmitJob(ticket.job_id, ticket.holders, spec, is_dry_run))
        if isinstance(reply, Refused):
            raise from_refusal(reply, "/spec")
        if not isinstance(reply, JobAccepted):
            raise Problem("internal", f"the core answered a submission with {type(reply).__name__}")
        shown = job_document(reply.record, time.time())
        is_new = not reply.was_known and not is_dry_run
        headers = {} if is_dry_run else {"Location": f"/v1/jobs/{reply.record.job_id}"}
        return answer({**shown, "was_known": reply.was_known, "dry_run": is_dry_run}, 201 if is_new else 200, headers)

    async def _forward(self, call: Call, ticket: TicketIssued, spec: JobSpec, *, is_dry_run: bool) -> Answer:
        """A ticket is good for its holders only: the record's compare-and-set happens there, whoever was asked."""
        named = {"job_id": ticket.job_id, "holders": list(ticket.holders)}
        body = encode({"ticket": named, "spec": spec.to_json(), "dry_run": is_dry_run})
        forwarded = replace(call, path="/v1/jobs", body=body)
        last = ""
        for holder in ticket.holders:
            try:
                return await self._peers.forward(holder, forwarded)
            except Problem as problem:
                last = problem.detail
        detail = f"none of the ticket's holders ({', '.join(ticket.holders)}) can be asked: {last}"
        raise Problem("unavailable", detail, "repeat with the same ticket when they are back, or take a new ticket")

    async def _ticket(self) -> TicketIssued:
        reply = await self._agent.command(CreateTicket())
        if isinstance(reply, Refused):
            raise from_refusal(reply)
        if not isinstance(reply, TicketIssued):
            raise Problem("internal", f"the core answered a ticket with {type(reply).__name__}")
        return reply

    def _with_source(self, spec: JobSpec) -> JobSpec:
        """Name this agent as a source of shipped files that it has, when the client named none."""
        wanted = [digest for digest in (spec.tree, spec.requirements) if digest]
        if not wanted or spec.blob_sources or self._agent.blobs.missing(wanted):
            return spec
        return JobSpec.from_json({**spec.to_json(), "blob_sources": [self._agent.config.name]})


def _spec(document: Document) -> JobSpec:
    if "spec" not in document:
        where = FieldProblem("/spec", "is missing", 'for example {"spec": {"command": ["python", "train.py"]}}')
        raise Problem("invalid", "spec: is missing", where.remedy, (where,))
    try:
        return JobSpec.from_json(document["spec"])
    except JobRejected as error:
        raise from_rejection(error, "/spec") from error


def _ticket_from(value: Any) -> TicketIssued | None:
    """The client's ticket, as a reply of the core would be."""
    if value is None:
        return None
    holders = value.get("holders") if isinstance(value, dict) else None
    is_usable = (
        isinstance(value, dict)
        and isinstance(value.get("job_id"), str)
        and ids.is_job_id(value["job_id"])
        and isinstance(holders, list)
        and 1 <= len(holders) <= HOLDERS_LIMIT
        and all(isinstance(each, str) and ids.is_node_name(each) for each in holders)
    )
    if not is_usable or holders is None:
        where = FieldProblem("/ticket", "is not a ticket of this API", "send what POST /v1/tickets answered")
        raise Problem("invalid", "ticket: is not a ticket of this API", where.remedy, (where,))
    return TicketIssued(JobId(value["job_id"]), tuple(NodeId(each) for each in holders))


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        where = FieldProblem("/dry_run", f"{value!r} is not true or false", "use true or false")
        raise Problem("invalid", f"dry_run: {where.problem}", where.remedy, (where,))
    return value
