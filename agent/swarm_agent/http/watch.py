"""Watching one job: its document at once and at every change, from whichever agent shepherds it.

On the shepherd a watcher sleeps until a step of the core has changed the record: there is no polling interval.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec

from swarm_agent.http.exchange import Document, as_object
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.find import Found, JobFinder, over
from swarm_agent.http.job_document import job_document_now
from swarm_agent.http.peers import Peers
from swarm_agent.http.problem import Problem
from swarm_agent.http.stream import closing
from swarmsched.documents import JobDocument
from swarmsched.errors import AgentUnreachable, RemoteProtocolError
from swarmsched.ids import JobId, NodeId

RETRY_S = 0.25  # doubling to RETRY_LIMIT_S while no shepherd can be reached
RETRY_LIMIT_S = 2.0
GIVE_UP_S = 30.0  # a new shepherd acts within 20 s of the death of the old one

PAST_RETENTION: Document = {"is_over": True}
"""What an agent answers that keeps of a job no more than that it has ended."""

ChangeKey = tuple[object, ...]


class JobChanges:
    """Wakes those who wait for a change of a job's record on this agent."""

    def __init__(self, facts: AgentFacts) -> None:
        self._facts = facts
        self._waiting: dict[JobId, list[tuple[ChangeKey, asyncio.Future[None]]]] = {}

    def key(self, job_id: JobId) -> ChangeKey:
        """What a watcher is told about; phase and reason may change without a new version."""
        record, is_shepherd = self._facts.record(job_id), self._facts.is_shepherd(job_id)
        if record is None:
            return (is_shepherd,)
        return (is_shepherd, record.stamp, record.state, record.phase, record.reason, record.attempt)

    def on_stepped(self) -> None:
        """Called after the core took in something; costs one lookup for each watched job."""
        for job_id in list(self._waiting):
            key = self.key(job_id)
            for seen, future in self._waiting[job_id]:
                if seen != key and not future.done():
                    future.set_result(None)

    async def wait(self, job_id: JobId, seen: ChangeKey) -> None:
        """Return when the record's key differs from `seen`."""
        if self.key(job_id) != seen:
            return
        entry = (seen, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(job_id, []).append(entry)
        try:
            await entry[1]
        finally:
            self._waiting[job_id].remove(entry)
            if not self._waiting[job_id]:
                del self._waiting[job_id]


class JobWatch:
    """Watches jobs on this agent and, through their shepherds, elsewhere."""

    def __init__(self, facts: AgentFacts, peers: Peers, finder: JobFinder, changes: JobChanges) -> None:
        self._facts, self._peers = facts, peers
        self._finder, self._changes = finder, changes

    async def on_watch(self, _: NodeId, payload: Document) -> AsyncIterator[Document]:
        """Another agent's watch of a job that is shepherded here."""
        job_id = JobId(str(payload.get("job_id", "")))
        async with closing(self._local(job_id)) as documents:
            async for document in documents:
                yield as_object(document)
        if self._facts.is_over(job_id):
            yield PAST_RETENTION

    async def watch(self, found: Found) -> AsyncIterator[JobDocument]:
        """Documents, newest state first; ends after the one that says the job has ended.

        Raises `Problem` shepherd_unreachable when nobody who acts for the job was reachable for 30 s, and job_over when
        the job is past its retention.
        """
        failing_since_s: float | None = None
        delay_s = RETRY_S
        loop = asyncio.get_running_loop()
        while True:
            async with closing(self._from_anyone(found)) as documents:
                async for document in documents:
                    failing_since_s, delay_s = None, RETRY_S
                    yield document
                    if document.state == "ended":
                        return
            failing_since_s = loop.time() if failing_since_s is None else failing_since_s
            if loop.time() - failing_since_s > GIVE_UP_S:
                raise Problem("shepherd_unreachable", f"no agent that acts for job {found.job_id} answers")
            await asyncio.sleep(delay_s)
            delay_s = min(RETRY_LIMIT_S, delay_s * 2)

    async def _from_anyone(self, found: Found) -> AsyncIterator[JobDocument]:
        """From this agent if it acts for the job, else from the first candidate that has something to say.

        Raises `Problem` job_over when none has the record, and one knows that it is past its retention.
        """
        if self._facts.has_last_word(found.job_id):
            async with closing(self._local(found.job_id)) as documents:
                async for document in documents:
                    yield document
            return
        is_over = self._facts.is_over(found.job_id)
        for node in self._peers.likeliest((*self._finder.known(found.job_id), *found.candidates)):
            was_heard = False
            try:
                async with closing(self._peers.stream(node, "watch", {"job_id": found.job_id})) as answers:
                    async for told in answers:
                        if told == PAST_RETENTION:
                            is_over = True
                            break
                        job = msgspec.convert(told, JobDocument)
                        was_heard = True
                        yield job
            except (AgentUnreachable, RemoteProtocolError, msgspec.ValidationError):
                pass  # the next candidate is asked; after the last one, `watch` waits and tries all again
            if was_heard:
                return
        if is_over:
            raise over(found.job_id)

    async def _local(self, job_id: JobId) -> AsyncIterator[JobDocument]:
        """Ends when this agent no longer acts for the job, or when the job has ended."""
        while self._facts.has_last_word(job_id):
            record = self._facts.record(job_id)
            assert record is not None, "local jobs have a record"
            key = self._changes.key(job_id)
            yield job_document_now(record, self._facts)
            if record.is_ended:
                return
            await self._changes.wait(job_id, key)
