"""Where the output of an attempt lies.

A job's record names the nodes of its present attempt only, and of an elastic one only those workers that have not left.
What others wrote, and an attempt that was given up, stays on the nodes that ran it until its retention is over; they
alone know, and are asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from swarm_agent.http.exchange import Document
from swarm_agent.http.peers import SEARCH_TIMEOUT_S, Peers, first_unique
from swarm_agent.http.port import AgentPort
from swarm_agent.http.problem import bad_parameter
from swarmsched.api import JobSpec, RankGroup
from swarmsched.documents import JobDocument
from swarmsched.ids import JobId, NodeId

NAMED_MAX = 5
OUTPUT_PHASES = ("sync", "environment", "launch")

Attempts = dict[int, tuple[int, ...]]
"""Ranks with output on one node, by attempt."""

KeptRanks = dict[int, dict[NodeId, tuple[int, ...]]]
"""Ranks with output on each node, by attempt."""


@dataclass(frozen=True, slots=True)
class LogPlaces:
    """The nodes that ran an attempt's ranks; `problem` says what of it cannot be had."""

    attempt: int
    ranks: Mapping[NodeId, tuple[int, ...]]
    is_current: bool = True
    problem: str = ""


def has_output(document: JobDocument) -> bool:
    """True once the nodes of the present attempt may have something to show."""
    is_starting = document.state == "starting" and document.phase in OUTPUT_PHASES
    return bool(document.nodes) and (is_starting or document.state in ("running", "stopping", "ended"))


def current_places(document: JobDocument) -> LogPlaces:
    """Places of the present attempt that its record names."""
    ranks: dict[NodeId, tuple[int, ...]] = {}
    spec = groups_of(document)
    for share in document.nodes:
        if share.first_rank is not None and share.ranks is not None:
            group = spec.group_names.index(share.group) if spec.groups else 0
            first, node = spec.first_number(group) + share.first_rank, NodeId(share.node)
            ranks[node] = (*ranks.get(node, ()), *range(first, first + share.ranks))
    for each in document.world.workers if document.world else ():
        ranks[NodeId(each.node)] = (*ranks.get(NodeId(each.node), ()), each.worker - 1)
    return LogPlaces(document.attempt, ranks)


def groups_of(document: JobDocument) -> JobSpec:
    """The groups of a job, as far as ranks are numbered by them: of most jobs there is but one, without a name."""
    spec = document.spec or {}
    others = [RankGroup(each["name"], (), each["ranks"]) for each in spec.get("groups") or ()]
    return JobSpec((), group=spec.get("group") or "", groups=tuple(others))


def last_worker(document: JobDocument) -> int:
    """Of an elastic job, 0 for others; its workers write as ranks that count from 0, as all others do."""
    return document.world.last_worker if document.world else 0


def ranks_of_present(document: JobDocument) -> int:
    """Numbers of ranks of the present attempt, of one that is to come where there is none, are below this."""
    sizes = (document.ranks, document.ranks_most, document.world_size)
    largest = max(each or 0 for each in sizes) + groups_of(document).first_number(0)
    return max(largest, last_worker(document))


def _has_several_sizes(document: JobDocument) -> bool:
    """True where nobody can tell how many ranks an attempt has had."""
    is_resizable = (document.ranks_most or 0) > document.ranks
    return is_resizable or bool(document.world or document.rescalings)


class LogFinder:
    """Finds the output of attempts, past ones as well."""

    def __init__(self, agent: AgentPort, peers: Peers) -> None:
        self._agent, self._peers = agent, peers

    async def on_kept(self, _: NodeId, payload: Document) -> Document:
        """Another agent wants to know what output is kept here."""
        kept = self._kept_here(JobId(str(payload.get("job_id", ""))))
        return {"attempts": {str(attempt): list(ranks) for attempt, ranks in kept.items()}}

    async def find(self, document: JobDocument, attempt: int = 0) -> LogPlaces:
        """Of that attempt; 0 means the present one or, while that has nothing to show, the last one that has.

        Raises `Problem` for an attempt that has not been.
        """
        current = document.attempt
        if attempt > current:
            told = f"there has been no attempt {attempt}: the job is at attempt {current}"
            raise bad_parameter("attempt", told, "leave it out for the newest")
        is_of_record = bool(document.nodes) and (attempt == current or (not attempt and has_output(document)))
        if is_of_record or not current:
            return await self._with_those_that_left(document, current_places(document))
        return await self._search(document, attempt)

    async def _with_those_that_left(self, document: JobDocument, places: LogPlaces) -> LogPlaces:
        """With workers of the present attempt that its record names no more."""
        count, named = last_worker(document), sum(len(each) for each in places.ranks.values())
        if named >= count:
            return places
        kept, silent = await self._ask(JobId(document.id), places.attempt, count)
        ranks = {node: (*each,) for node, each in places.ranks.items()}
        for node, found in kept.get(places.attempt, {}).items():
            ranks[node] = tuple(sorted({*ranks.get(node, ()), *found}))
        are_found = sum(len(each) for each in ranks.values()) >= count
        problem = "" if are_found else _silence(silent, "output of workers that have left")
        return LogPlaces(places.attempt, ranks, problem=problem)

    async def _search(self, document: JobDocument, attempt: int) -> LogPlaces:
        count = None if _has_several_sizes(document) else ranks_of_present(document)
        kept, silent = await self._ask(JobId(document.id), attempt, count)
        current = document.attempt
        chosen = attempt or max((number for number in kept if number <= current), default=current)
        ranks = kept.get(chosen, {})
        is_current = chosen == current and document.state not in ("queued", "ended")
        return LogPlaces(chosen, ranks, is_current, "" if is_current else _problem(document, chosen, ranks, silent))

    async def _ask(self, job_id: JobId, attempt: int, count: int | None) -> tuple[KeptRanks, tuple[NodeId, ...]]:
        """What is kept on every node that answers, and who does not.

        Of a known attempt only until all was found, where it is known how many ranks it had.
        """
        kept: KeptRanks = {}
        _add(kept, self._peers.own_name, self._kept_here(job_id))

        def is_all_found() -> bool:
            return bool(attempt and count) and sum(len(each) for each in kept.get(attempt, {}).values()) >= (count or 0)

        def add(node: NodeId, answer: Document) -> bool:
            _add(kept, node, msgspec.convert(answer.get("attempts", {}), Attempts, strict=False))
            return is_all_found()

        reachable = [] if is_all_found() else self._peers.reachable()
        away, payload = self._peers.unreachable(), {"job_id": job_id}
        found = await self._peers.ask(reachable, "kept_output", payload, SEARCH_TIMEOUT_S, away, add)
        return kept, tuple(first_unique((*found.silent, *found.unasked)))

    def _kept_here(self, job_id: JobId) -> Attempts:
        logs = self._agent.logs
        return {attempt: logs.ranks(job_id, attempt) for attempt in logs.attempts(job_id)}


def _add(kept: KeptRanks, node: NodeId, attempts: Attempts) -> None:
    for attempt, ranks in attempts.items():
        if ranks:
            kept.setdefault(attempt, {})[node] = ranks


def _problem(
    document: JobDocument, attempt: int, ranks: Mapping[NodeId, tuple[int, ...]], silent: tuple[NodeId, ...]
) -> str:
    """What cannot be had, and who may have it."""
    if document.world:  # which numbers its workers had nobody knows
        return _silence(silent, f"output of attempt {attempt}")
    count, spec = groups_of(document).first_number(0) + document.ranks, groups_of(document)
    missing = [spec.rank_name(each) for each in sorted(set(range(count)).difference(*ranks.values()))]
    if not missing:
        return ""
    told = f"no node that answers has output of attempt {attempt} of {_listed('rank', missing)}"
    return f"{told}; {_silence(silent, 'it')}" if silent else told


def _silence(silent: tuple[NodeId, ...], what: str) -> str:
    """Who may have what is missing, or nothing."""
    return f"{_listed('node', silent)} did not answer and may have {what}" if silent else ""


def _listed(word: str, items: Sequence[str]) -> str:
    named = ", ".join(str(each) for each in items[:NAMED_MAX])
    more = f" and {len(items) - NAMED_MAX} more" if len(items) > NAMED_MAX else ""
    return f"{word}{'s' if len(items) > 1 else ''} {named}{more}"
