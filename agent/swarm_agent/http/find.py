"""Finding a job by what people type: a full id, a prefix of id or handle, a name, or `@last`.

Whoever shepherds the job decides about it; this only says who that may be.  Names and short prefixes are looked up at
all agents, since only all of them together know whether there is a second match; a full id or handle is not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swarm_agent.attendance import Attendance
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.job_document import card_document, job_document
from swarm_agent.http.peers import LIST_TIMEOUT_S, SEARCH_TIMEOUT_S, FanOut, Peers, first_unique
from swarm_agent.http.problem import Problem
from swarm_agent.http.views import bare_summary, job_summary
from swarmsched import ids
from swarmsched.api import JobState, near_word
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.view import JobView

LAST = "@last"
MATCHES_LIMIT = 20
NAMES_LIMIT = 200
TOLD_LIMIT = 100
REFERENCE_LIMIT = 128

Summary = dict[str, Any]

_RECORD = {"source": "record"}
"""In the summary of a job whose record is there, and not merely what gossip says of it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A job and the nodes that may act for it or know of it, those with its record first; may include this agent."""

    job_id: JobId
    candidates: tuple[NodeId, ...]


def over(job_id: JobId) -> Problem:
    """What is said of a job that is past its retention."""
    return Problem("job_over", f"{job_id} has ended, and its record is past its retention")


class JobFinder:
    """Looks a job up, here first and then everywhere."""

    def __init__(self, facts: AgentFacts, peers: Peers) -> None:
        self._facts, self._peers = facts, peers

    async def find(self, reference: str, user: str = "", *, may_ask: bool = True) -> Found:
        """Raises `Problem` unknown_job or ambiguous_job.  With `may_ask` false only this agent's knowledge counts."""
        if not reference or len(reference) > REFERENCE_LIMIT:
            raise Problem("unknown_job", "a job id, handle or name has 1 to 128 characters")
        own_name = self._peers.own_name
        matches = {own_name: self.matches(reference, user)}
        fan_out = FanOut({})
        names = self.names()
        is_here = bool(matches[own_name])
        if may_ask and not _with_whole_id(matches[own_name], reference):
            timeout_s = LIST_TIMEOUT_S if is_here else SEARCH_TIMEOUT_S
            fan_out = await self._peers.ask_all("find", {"reference": reference, "user": user}, timeout_s)
            for node, reply in fan_out.answers.items():
                matches[node] = [each for each in _dicts(reply.get("matches")) if ids.is_job_id(str(each.get("id")))]
                names += [str(name) for name in reply.get("names", [])][:NAMES_LIMIT]
        matches[own_name] = matches[own_name] or self.past_retention(reference)
        return _choose(reference, matches, fan_out, names)

    def known(self, job_id: JobId) -> tuple[NodeId, ...]:
        """Who may act for the job, by what this agent knows at this moment."""
        record, place = self._facts.record(job_id), self._facts.places().get(job_id)
        shepherds = [job.card.shepherd for job in self._facts.cards() if job.job_id == job_id]
        nodes = [record.shepherd, *record.configuration.nodes] if record else []
        nodes = shepherds + nodes + ([place.shepherd, *place.holders] if place else [])
        return tuple(first_unique(node for node in nodes if node))

    async def search(self, job_id: JobId) -> tuple[NodeId, ...]:
        """Who else has the record, by asking everybody that can be reached; for when nobody who is `known` answers.

        What gossip says of a job's holders may be old, or not have come here yet.
        """

        def has_record(_: NodeId, reply: Mapping[str, Any]) -> bool:
            return _has_record(_dicts(reply.get("matches")), job_id)

        payload = {"reference": job_id}
        found = await self._peers.ask(self._peers.reachable(), "find", payload, SEARCH_TIMEOUT_S, (), has_record)
        return tuple(node for node, reply in found.answers.items() if has_record(node, reply))

    def matches(self, reference: str, user: str = "") -> list[Summary]:
        """Summaries of jobs that this agent knows under the reference; of very many, the first ones."""
        if reference == LAST:
            return self._last(user)
        by_id = self._by_id(reference.lower())
        return _with_whole_id(by_id, reference) or self._by_name(reference) or by_id

    def likeliest(self, reference: str, user: str) -> list[Summary]:
        """The same for another agent, and of very many those that can be meant: live ones first, the newest first."""
        found = self.matches(reference, user)
        return sorted(
            found, key=lambda each: (each.get("state") != JobState.ENDED.value, _age_key(each)), reverse=True
        )[:TOLD_LIMIT]

    def past_retention(self, reference: str) -> list[Summary]:
        """What is left here of a job with that full id; others may still have its record."""
        job_id = JobId(reference.lower())
        return [bare_summary(job_id, JobState.ENDED)] if ids.is_job_id(job_id) and self._facts.is_over(job_id) else []

    def names(self) -> list[str]:
        """Names and handles, for "did you mean"."""
        known = [record.spec.name or ids.handle(job_id) for job_id, record in self._facts.records().items()]
        known += [job.card.name or ids.handle(job.job_id) for job in self._facts.cards()]
        return known[-NAMES_LIMIT:]

    def _last(self, user: str) -> list[Summary]:
        newest = [record for record in self._facts.records().values() if user in ("", record.spec.user)]
        newest_cards = [job for job in self._facts.cards() if user in ("", job.card.user)]
        found = [_of_record(max(newest, key=lambda each: each.submitted_utc_s))] if newest else []
        found += [_of_card(max(newest_cards, key=lambda job: job.card.submitted_utc_s))] if newest_cards else []
        return found

    def _by_id(self, prefix: str) -> list[Summary]:
        places = self._facts.places()
        if ids.is_job_id(prefix):
            named = [JobId(prefix)] if JobId(prefix) in places else []
        else:
            named = [job_id for job_id in places if ids.matches_prefix(job_id, prefix)]
        found: dict[str, Summary] = {}
        for job_id in named[:MATCHES_LIMIT]:
            place = places[job_id]
            found[job_id] = bare_summary(job_id, place.state, place.shepherd)
        for job in self._facts.cards():
            if ids.matches_prefix(job.job_id, prefix):
                found[job.job_id] = _of_card(job)
        for job_id, record in self._facts.records().items():
            if ids.matches_prefix(job_id, prefix):
                found[job_id] = _of_record(record)
        return list(found.values())

    def _by_name(self, name: str) -> list[Summary]:
        found = {job.job_id: _of_card(job) for job in self._facts.cards() if job.card.name == name}
        named = [record for record in self._facts.records().values() if record.spec.name == name]
        return list((found | {record.job_id: _of_record(record) for record in named}).values())


def _of_record(record: JobRecord) -> Summary:
    return {**job_summary(job_document(record, record.submitted_utc_s, Attendance())), **_RECORD}


def _of_card(job: JobView) -> Summary:
    return job_summary(card_document(job, job.card.submitted_utc_s - job.written_s))


def _with_whole_id(candidates: list[Summary], reference: str) -> list[Summary]:
    """Of a full id or a whole handle, which 40 random bits make unique."""
    whole = reference.lower()
    return [each for each in candidates if whole in (each["id"], ids.handle(JobId(str(each["id"]))))]


def _choose(reference: str, matches: dict[NodeId, list[Summary]], fan_out: FanOut, names: list[str]) -> Found:
    merged: dict[str, Summary] = {}
    owners: dict[str, list[NodeId]] = {}
    for node, found in matches.items():
        for each in found:
            told = {key: value for key, value in each.items() if key not in _RECORD}
            merged[each["id"]] = {**told, **{k: v for k, v in merged.get(each["id"], {}).items() if v is not None}}
            owners.setdefault(each["id"], []).append(node)
    if not merged:
        raise _unknown(reference, fan_out, names)
    chosen = _one_of(reference, list(merged.values()))
    job_id = JobId(str(chosen["id"]))
    shepherds = [NodeId(str(each["shepherd"])) for each in _with_id(matches.values(), job_id) if each.get("shepherd")]
    with_record = [node for node in owners[job_id] if _has_record(matches[node], job_id)]
    return Found(job_id, tuple(first_unique([*shepherds, *with_record, *owners[job_id]])))


def _one_of(reference: str, candidates: list[Summary]) -> Summary:
    """A whole id, then a name, then the beginning of an id, which must be unique; of a name the newest live job is
    meant, else the newest."""
    if reference == LAST:
        return max(candidates, key=_age_key)
    whole = _with_whole_id(candidates, reference)
    named = [each for each in candidates if each.get("name") == reference]
    if named and not whole:
        live = [each for each in named if each.get("state") != JobState.ENDED.value]
        return max(live or named, key=_age_key)
    if len(whole or candidates) > 1:
        raise _ambiguous(reference, whole or candidates)
    return (whole or candidates)[0]


def _age_key(summary: Summary) -> tuple[str, str]:
    return (str(summary.get("submitted_at") or ""), str(summary["id"]))


def _ambiguous(reference: str, candidates: list[Summary]) -> Problem:
    newest = sorted(candidates, key=_age_key, reverse=True)
    shown = ", ".join(str(each["handle"]) for each in newest[:5])
    more = f" and {len(newest) - 5} more" if len(newest) > 5 else ""
    return Problem(
        "ambiguous_job",
        f"{reference!r} matches {len(newest)} jobs: {shown}{more}",
        "give more characters of the id",
        extra={"matches": newest[:MATCHES_LIMIT]},
    )


def _unknown(reference: str, fan_out: FanOut, names: list[str]) -> Problem:
    asked = f"; {', '.join(fan_out.silent)} did not answer and may know it" if fan_out.silent else ""
    if fan_out.unasked:
        asked += f"; {len(fan_out.unasked)} members could not be asked in time and may know it"
    extra: dict[str, Any] = {**fan_out.absent}
    if close := near_word(reference, names):
        extra["nearest"] = close
    return Problem("unknown_job", f"there is no job {reference!r}{asked}", extra=extra)


def _with_id(groups: Iterable[list[Summary]], job_id: str) -> list[Summary]:
    return [each for group in groups for each in group if each["id"] == job_id]


def _has_record(found: list[Summary], job_id: str) -> bool:
    return any(each.get("source") == "record" for each in _with_id([found], job_id))


def _dicts(value: object) -> list[Summary]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list | tuple) else []
