"""Where the output of an attempt lies.

A job's record names the nodes of its present attempt only.  What an attempt wrote that was given up stays on the nodes
that ran it until its retention is over, and they alone know: they are asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from swarm_agent.http.exchange import Document
from swarm_agent.http.peers import FAN_OUT_LIMIT, SEARCH_TIMEOUT_S, Peers, first_unique
from swarm_agent.http.port import AgentPort
from swarm_agent.http.problem import bad_parameter
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


def has_output(document: Document) -> bool:
    """True once the nodes of the present attempt may have something to show."""
    is_starting = document["state"] == "starting" and document["phase"] in OUTPUT_PHASES
    return bool(document["nodes"]) and (is_starting or document["state"] in ("running", "stopping", "ended"))


def current_places(document: Document) -> LogPlaces:
    """Those of the present attempt."""
    shares = [share for share in document["nodes"] if share["first_rank"] is not None]
    ranks = {
        NodeId(each["node"]): tuple(range(each["first_rank"], each["first_rank"] + each["ranks"])) for each in shares
    }
    return LogPlaces(int(document["attempt"] or 0), ranks)


class LogFinder:
    """Finds the output of attempts, past ones as well."""

    def __init__(self, agent: AgentPort, peers: Peers) -> None:
        self._agent, self._peers = agent, peers

    async def on_kept(self, _: NodeId, payload: Document) -> Document:
        """Another agent wants to know what output is kept here."""
        kept = self._kept_here(JobId(str(payload.get("job_id", ""))))
        return {"attempts": {str(attempt): list(ranks) for attempt, ranks in kept.items()}}

    async def find(self, document: Document, attempt: int = 0) -> LogPlaces:
        """Of that attempt; 0 means the present one or, while that has nothing to show, the last one that has.

        Raises `Problem` for an attempt that has not been.
        """
        current = int(document["attempt"] or 0)
        if attempt > current:
            told = f"there has been no attempt {attempt}: the job is at attempt {current}"
            raise bad_parameter("attempt", told, "leave it out for the newest")
        is_of_record = bool(document["nodes"]) and (attempt == current or (not attempt and has_output(document)))
        if is_of_record or not current:
            return current_places(document)
        return await self._search(document, attempt)

    async def _search(self, document: Document, attempt: int) -> LogPlaces:
        kept, silent = await self._ask(JobId(document["id"]), attempt, document["ranks"])
        current = int(document["attempt"] or 0)
        chosen = attempt or max((number for number in kept if number <= current), default=current)
        ranks = kept.get(chosen, {})
        missing = sorted(set(range(document["ranks"])).difference(*ranks.values()))
        is_current = chosen == current and document["state"] not in ("queued", "ended")
        return LogPlaces(chosen, ranks, is_current, "" if is_current else _problem(chosen, missing, silent))

    async def _ask(self, job_id: JobId, attempt: int, ranks: int) -> tuple[KeptRanks, tuple[NodeId, ...]]:
        """What is kept on every node that answers, and who does not; of a known attempt only until all was found."""
        kept: KeptRanks = {}
        _add(kept, self._peers.own_name, self._kept_here(job_id))
        silent = [*self._peers.unreachable()]
        reachable = self._peers.reachable()
        for first in range(0, len(reachable), FAN_OUT_LIMIT):
            if attempt and sum(len(each) for each in kept.get(attempt, {}).values()) >= ranks:
                break
            found = await self._peers.ask(
                reachable[first : first + FAN_OUT_LIMIT], "kept_output", {"job_id": job_id}, SEARCH_TIMEOUT_S
            )
            for node, answer in found.answers.items():
                _add(kept, node, msgspec.convert(answer.get("attempts", {}), Attempts, strict=False))
            silent += found.silent
        return kept, tuple(first_unique(silent))

    def _kept_here(self, job_id: JobId) -> Attempts:
        logs = self._agent.logs
        return {attempt: logs.ranks(job_id, attempt) for attempt in logs.attempts(job_id)}


def _add(kept: KeptRanks, node: NodeId, attempts: Attempts) -> None:
    for attempt, ranks in attempts.items():
        if ranks:
            kept.setdefault(attempt, {})[node] = ranks


def _problem(attempt: int, missing: list[int], silent: tuple[NodeId, ...]) -> str:
    """What cannot be had, and who may have it."""
    if not missing:
        return ""
    told = f"no node that answers has output of attempt {attempt} of {_listed('rank', missing)}"
    return f"{told}; {_listed('node', silent)} did not answer and may have it" if silent else told


def _listed(word: str, items: list[int] | tuple[NodeId, ...]) -> str:
    named = ", ".join(str(each) for each in items[:NAMED_MAX])
    more = f" and {len(items) - NAMED_MAX} more" if len(items) > NAMED_MAX else ""
    return f"{word}{'s' if len(items) > 1 else ''} {named}{more}"
