"""One request to a swarm, as decisions alone: whom to ask next, how long to wait, what may be asked again.

A `Conversation` opens no socket and reads no clock.  Its driver tells it what happened (`Unreached`, `Broken`,
`Answer`, or None at the beginning and after a pause) and does what it is given: `Ask` an agent, `Sleep`, or one of the
ends.  `swarm_client.agents` drives it for the command, `swarm_client.sdk` for programs.

1. Every agent is asked once, in order: each is given `patience_s`, the last one `limit_s`.
2. Where an answer was late or lost all are asked once more, each for `limit_s`; no try begins after twice that time.
3. A swarm that is too busy in all its agents is asked again after the pause that it asks for.

A request that is not `repeatable` goes to another agent only where no agent can have carried it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from swarm_client.address import Address, spell

PATIENCE_S = 0.3  # for a connection, and for an answer, while other agents have not been asked
CONNECT_LIMIT_S = 1.5  # in which a lost packet is sent again
SUBMIT_PATIENCE_S = 1.0
ANSWER_LIMIT_S = 30.0
SUBMIT_LIMIT_S = 120.0  # of a swarm that is too busy to take a job; a repeated ticket is one job
BUSY_RETRIES = 3
BUSY_LIMIT_S = 30.0  # for all of them together
BUSY_PAUSE_S = 2.0  # at most, whatever an agent asks for
SHEPHERD_LIMIT_S = 25.0  # for a cancel or a signal, which an agent holds back while no shepherd acts
SHEPHERD_WAIT_S = 23.5  # what the agent itself takes of that at most; with less left, another try would be cut off
STREAM_SILENCE_S = 20.0  # agents send a heartbeat every 5 s
CONTACT_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
MEMBERS_LIMIT = 64

WRONG_DOOR = 421
"""Of an agent that serves people elsewhere: it has done nothing, and another one may do it."""
BUSY = (429, 503)
PASSING = (*BUSY, 502, 504)
WAITED_FOR = ("shepherd_unreachable",)
"""Codes of an agent that has waited by itself: to ask again would wait again."""
NOTHING_DONE = ("not_ready", "too_many_requests", "too_many_streams")
"""Codes that say that the request was not carried out, whatever it was (docs/reference/errors.md)."""


class RequestTerms(NamedTuple):
    """What one request allows.

    `busy_limit_s` bounds the tries at a swarm that is too busy; None: three within 30 s.  A request that
    `needs_shepherd` is held back by the agent while none acts: all tries together end after `SHEPHERD_LIMIT_S`.
    """

    repeatable: bool = True
    patience_s: float = PATIENCE_S
    limit_s: float = ANSWER_LIMIT_S
    busy_limit_s: float | None = None
    needs_shepherd: bool = False


PLAIN = RequestTerms()
TO_SHEPHERD = RequestTerms(needs_shepherd=True)
ONCE = RequestTerms(repeatable=False)
ONCE_TO_SHEPHERD = RequestTerms(repeatable=False, needs_shepherd=True)
SUBMISSION = RequestTerms(patience_s=SUBMIT_PATIENCE_S, busy_limit_s=SUBMIT_LIMIT_S)
"""Of a job with its ticket, which makes one job of however many tries."""
STREAM = RequestTerms(patience_s=1.0, limit_s=STREAM_SILENCE_S, busy_limit_s=0.0)


class Unreached(NamedTuple):
    """An event: the agent took no connection, and nothing was sent to it; `is_late`: not within its time."""

    address: Address
    cause: str
    is_late: bool = False


class Broken(NamedTuple):
    """An event: the request was sent, and its answer was late, ended early or made no sense.

    `is_kept` tells of a connection from an earlier request: it may have been closed before this one came.
    """

    address: Address
    cause: str
    is_kept: bool = False


class Answer(NamedTuple):
    """An event: an answer; names of headers are in lower case.  `stream` is the driver's, of one read as it comes."""

    address: Address
    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: Any = None


class Ask(NamedTuple):
    """An effect: send the request to this agent, with limits for its connection and for its answer.

    A request that may not be repeated needs a connection of its own: on a kept one nobody knows who ended it.
    """

    address: Address
    connect_s: float
    limit_s: float
    may_reuse: bool


class Sleep(NamedTuple):
    """An effect: let this time pass."""

    seconds: float


class Success(NamedTuple):
    """An end: the request was carried out.  `document` is None of a stream."""

    answer: Answer
    document: Any


class ErrorAnswer(NamedTuple):
    """An end: an agent answered with a problem (RFC 9457); without its `retry_after_s` it is not worth another try."""

    address: Address
    status: int
    problem: Mapping[str, Any]
    retry_after_s: float

    @property
    def code(self) -> str:
        """The stable word for the reason."""
        return str(self.problem.get("code", ""))


class Silent(NamedTuple):
    """An end: no agent answered; its newest cause of each."""

    causes: Mapping[Address, str]

    @property
    def cause(self) -> str:
        """The last few, as one text."""
        return "; ".join([f"{spell(address)}: {cause}" for address, cause in self.causes.items()][-4:])


class Lost(NamedTuple):
    """An end: the answer was lost, and nobody knows whether the request was carried out."""

    address: Address
    cause: str


class Unusable(NamedTuple):
    """An end: an answer that is of no use; a `stranger` is no agent at all."""

    address: Address
    cause: str
    is_stranger: bool = False


End = Success | ErrorAnswer | Silent | Lost | Unusable


class Conversation:
    """One request, from the first try to its end; `step` takes an event and gives what to do next."""

    def __init__(self, addresses: Iterable[Address], terms: RequestTerms, now_s: float) -> None:
        self._everybody, self._terms = tuple(addresses), terms
        limit_s = BUSY_LIMIT_S if terms.busy_limit_s is None else terms.busy_limit_s
        self._end_s = now_s + (SHEPHERD_LIMIT_S if terms.needs_shepherd else limit_s)
        self._retries = 0
        self._causes: dict[Address, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._left = list(self._everybody)
        self._is_last_round, self._may_be_late = False, False
        self._last_try_s = self._end_s
        self._best: ErrorAnswer | Unusable | None = None

    def step(self, event: Unreached | Broken | Answer | None, now_s: float) -> Ask | Sleep | End:
        """The next effect.  After an end there is none."""
        end: End | None = None
        if isinstance(event, Unreached):
            self._pass_over(event.address, event.cause)
            self._may_be_late |= event.is_late
        elif isinstance(event, Broken):
            end = self._broken(event)
        elif isinstance(event, Answer):
            end = self._answered(event)
        return end or self._ask(now_s) or self._ask_again(now_s) or self._pause_or_end(now_s)

    def _pass_over(self, address: Address, cause: str) -> None:
        self._causes.pop(address, None)  # the newest is told last
        self._causes[address] = cause
        if address in self._left:
            self._left.remove(address)

    def _broken(self, event: Broken) -> Lost | None:
        if not self._terms.repeatable:
            return Lost(event.address, event.cause)
        if not event.is_kept:
            self._pass_over(event.address, event.cause)
            self._may_be_late = True
        return None

    def _answered(self, answer: Answer) -> End | None:
        """The end that an answer is, or None where another agent may do better."""
        address = answer.address
        if answer.stream is not None:
            return Success(answer, None)
        if not _is_agent(answer.headers) or 300 <= answer.status < 400:
            self._best = self._best or Unusable(address, "it is not an agent", is_stranger=True)
            self._pass_over(address, "not an agent")
            return None
        try:
            document = json.loads(answer.body) if answer.body else {}
        except ValueError:
            cause = f"the answer is not JSON: {answer.body[:60]!r}"
            return Unusable(address, cause) if answer.status < 400 else ErrorAnswer(address, answer.status, {}, 0.0)
        if answer.status < 400:
            return Success(answer, document)
        problem = document if isinstance(document, dict) else {}
        refused = ErrorAnswer(address, answer.status, problem, _retry_after_s(problem, answer.headers))
        if refused.status == WRONG_DOOR:
            self._best = self._best or refused
            self._pass_over(address, "the door of agents")
            return None
        if not self._may_pass_over(refused):
            return refused
        self._best = refused
        self._pass_over(address, "not ready")
        return None

    def _may_pass_over(self, refused: ErrorAnswer) -> bool:
        if refused.status not in BUSY or (self._terms.needs_shepherd and refused.code in WAITED_FOR):
            return False
        return self._terms.repeatable or refused.code in NOTHING_DONE

    def _ask(self, now_s: float) -> Ask | None:
        """Ask who is left in this round, unless its time is over."""
        latest_s = self._last_try_s
        if not self._is_last_round:
            latest_s = self._end_s - SHEPHERD_WAIT_S if self._terms.needs_shepherd else float("inf")
        if not self._left or now_s >= latest_s:
            return None
        has_time = self._is_last_round or len(self._left) == 1
        limit_s = self._terms.limit_s if has_time or not self._terms.repeatable else self._terms.patience_s
        if self._terms.needs_shepherd:
            limit_s = min(limit_s, max(0.1, self._end_s - now_s))
        connect_s = CONNECT_LIMIT_S if has_time else PATIENCE_S
        return Ask(self._left[0], connect_s, limit_s, may_reuse=self._terms.repeatable)

    def _ask_again(self, now_s: float) -> Ask | None:
        """Begin the last round where one may do better: for who had too little time, or none at all."""
        if self._is_last_round or not (self._may_be_late or self._left):
            return None
        self._is_last_round = True
        self._last_try_s = self._end_s if self._terms.needs_shepherd else now_s + 2 * self._terms.limit_s
        self._left += [address for address in self._everybody if address not in self._left]
        return self._ask(now_s)

    def _pause_or_end(self, now_s: float) -> Sleep | End:
        """What an agent said tells more than that others are silent."""
        best = self._best
        if isinstance(best, ErrorAnswer) and self._may_pause(best, now_s):
            self._retries += 1
            self._begin()
            return Sleep(min(best.retry_after_s, BUSY_PAUSE_S))
        return best or Silent(self._causes)

    def _may_pause(self, refused: ErrorAnswer, now_s: float) -> bool:
        if not refused.retry_after_s or refused.code in WAITED_FOR:
            return False
        if self._terms.busy_limit_s is None and self._retries >= BUSY_RETRIES:
            return False
        return now_s < self._end_s - (SHEPHERD_WAIT_S if self._terms.needs_shepherd else 0.0)


class Contact:
    """How long nobody could be asked about something that lasts, such as a stream; over after `limit_s` of it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lost_since_s: float | None = None
        self._tries = 0

    def found(self) -> None:
        """Somebody answered."""
        self._lost_since_s, self._tries = None, 0

    def pause_s(self, now_s: float) -> float | None:
        """How long to wait before the next try after one that failed; None once it lasts for too long."""
        if self._lost_since_s is None:
            self._lost_since_s = now_s
        if self.lost_s(now_s) >= self._limit_s:
            return None
        self._tries += 1
        return CONTACT_PAUSES_S[min(self._tries, len(CONTACT_PAUSES_S)) - 1]

    def lost_s(self, now_s: float) -> float:
        """Time since the first try that failed."""
        return 0.0 if self._lost_since_s is None else now_s - self._lost_since_s


def passes(status: int, *, is_known: bool) -> bool:
    """Tell whether a refusal passes: another agent, or the same one soon, may do better.

    Of a job that was known before, even "no such job" only says that this agent has not heard of it.
    """
    return status in PASSING or (is_known and status == 404)


def live_addresses(members: object) -> list[str]:
    """Addresses of the members that may answer, out of a list of members; empty for anything else."""
    items = [each for each in members if isinstance(each, dict)] if isinstance(members, list) else []
    live = [str(m["address"]) for m in items if m.get("status") in ("alive", "suspect") and m.get("address")]
    return sorted(live)[:MEMBERS_LIMIT]


def _is_agent(headers: Mapping[str, str]) -> bool:
    """False for a proxy or another program; an answer of the agent's HTTP library alone names no node."""
    return "x-swarm-node" in headers or headers.get("server") == "swarm-agent"


def _retry_after_s(problem: Mapping[str, Any], headers: Mapping[str, str]) -> float:
    text = str(problem.get("retry_after_seconds") or headers.get("retry-after", ""))
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0
