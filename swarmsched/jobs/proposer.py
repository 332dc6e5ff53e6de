"""The asking side of the register: rounds of prepare and accept for one job at a time (CASPaxos, sections 2.1, 2.2).

A round prepares a ballot at a majority of the job's holders, learns the newest accepted record from their promises,
and has the next record accepted by a majority.  A majority's accept carries the promise for the proposer's next
ballot, so as long as nobody else interferes an update costs one round trip.

Three results are told apart with care.  *Decided*: a majority accepted.  *Conflicted*: this request wrote nothing,
for certain.  *Uncertain*: an accept of this request may be lying at a minority and may yet be found and completed by
somebody's later round, or it was completed and overtaken.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from swarmsched.effects import SendPeer
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot, PrepareAnswer, PrepareRequest
from swarmsched.jobs.update import (
    ReadDecided,
    ReadRequested,
    Request,
    Result,
    UpdateConflicted,
    UpdateDecided,
    UpdateRequested,
    UpdateUncertain,
)
from swarmsched.record import JobRecord

Quorum = Callable[[int], int]
"""How many of that many holders must answer; any two quorums must share a holder."""

RESEND_S = 0.5
BACKOFF_MIN_S, BACKOFF_MAX_S, BACKOFF_LIMIT_S = 0.010, 0.100, 1.0
COUNTER_MAX = 2**31  # acceptors drop higher ballots: a broken peer must not drive the counter to its 32 bits' end
QUEUE_MAX = 64  # requests waiting for one job; more are answered uncertain at once
REMEMBERED_MAX = 100_000  # jobs with a prepared ballot; at the limit the oldest pays one more round trip


class Phase(Enum):
    """What a round is waiting for."""

    PREPARE = "prepare"
    ACCEPT = "accept"
    BACKOFF = "backoff"


@dataclass(slots=True)
class Round:
    """One request's attempts.  Answers count only for the present `ballot`, once per holder."""

    request: Request
    deadline_s: float
    quorum: int
    phase: Phase = Phase.PREPARE
    ballot: Ballot = field(default_factory=Ballot)
    wake_s: float = math.inf  # send again, or end of backoff
    promises: dict[NodeId, PrepareAnswer] = field(default_factory=dict)
    acceptances: dict[NodeId, None] = field(default_factory=dict)
    refusals: dict[NodeId, None] = field(default_factory=dict)
    proposal: AcceptRequest | None = None  # what ACCEPT sends
    outcome: Result | None = None  # what a majority of acceptances means
    is_own: bool = False  # `proposal` carries the request's value, not a repair of the current one
    was_maybe_written: bool = False  # an earlier ballot's accept of the own value may lie somewhere
    conflicts: int = 0

    @property
    def silent(self) -> list[NodeId]:
        """Holders that have not answered the present ballot, in their order."""
        answered = {**self.promises, **self.acceptances, **self.refusals}
        return [holder for holder in self.request.holders if holder not in answered]

    @property
    def is_lost(self) -> bool:
        """True when too many refused for the ballot to win."""
        return len(self.refusals) > len(self.request.holders) - self.quorum


@dataclass(frozen=True, slots=True)
class Prepared:
    """A ballot that a majority has promised us, and the record that was current then."""

    ballot: Ballot
    holders: tuple[NodeId, ...]
    current: JobRecord | None


class Proposer:
    """Rounds of this node; requests for one job are served one after the other, in order of arrival."""

    def __init__(
        self, node_id: NodeId, generation: int, rng: random.Random, quorum: Quorum, update_timeout_s: float
    ) -> None:
        self._node_id = node_id
        self._generation = generation
        self._rng = rng
        self._quorum = quorum
        self._update_timeout_s = update_timeout_s
        self._rounds: dict[JobId, Round] = {}  # at most one per job
        self._waiting: dict[JobId, deque[tuple[Request, float]]] = {}  # with deadline; only jobs that have a round
        self._prepared: dict[JobId, Prepared] = {}  # each ballot is used at most once; oldest first
        self._counters: dict[JobId, int] = {}  # highest counter used or reported per job; never falls
        self._counter_floor = 0  # highest counter of all forgotten jobs, so that no ballot is ever used again

    @property
    def next_deadline_s(self) -> float:
        """When `fire` has something to do; infinite when nothing is under way."""
        return min((min(each.wake_s, each.deadline_s) for each in self._rounds.values()), default=math.inf)

    def is_busy(self, job_id: JobId) -> bool:
        """True while a request for the job is under way."""
        return job_id in self._rounds

    def next_ballot(self, job_id: JobId) -> Ballot:
        """A ballot above all that were used or reported for the job."""
        counter = max(self._counters.get(job_id, 0), self._counter_floor) + 1
        self._counters[job_id] = counter
        return Ballot(counter, self._node_id, self._generation)

    def observe(self, job_id: JobId, ballot: Ballot) -> None:
        """Somebody uses this ballot: the next own one goes above it."""
        if ballot.counter > self._counters.get(job_id, 0):
            self._counters[job_id] = ballot.counter

    def request(self, request: Request, now_s: float) -> list[SendPeer | Result]:
        """Begin, or queue behind the job's request under way."""
        deadline_s = now_s + self._update_timeout_s
        if request.job_id not in self._rounds:
            return self._begin(request, deadline_s, now_s)
        queue = self._waiting.setdefault(request.job_id, deque())
        if len(queue) >= QUEUE_MAX:
            return [UpdateUncertain(request.update_id, f"{QUEUE_MAX} updates of this job wait already")]
        queue.append((request, deadline_s))
        return []

    def receive(self, sender: NodeId, answer: PrepareAnswer | AcceptAnswer, now_s: float) -> list[SendPeer | Result]:
        """A holder answered; answers to ballots that are over, and second answers, change nothing."""
        round_ = self._rounds.get(answer.job_id)
        if round_ is None or answer.ballot != round_.ballot or sender not in round_.silent:
            return []
        self.observe(answer.job_id, answer.promised)
        match answer:
            case PrepareAnswer() if round_.phase is Phase.PREPARE:
                return self._on_prepare_answer(round_, sender, answer, now_s)
            case AcceptAnswer() if round_.phase is Phase.ACCEPT:
                return self._on_accept_answer(round_, sender, answer, now_s)
            case _:
                return []

    def fire(self, now_s: float) -> list[SendPeer | Result]:
        """Send again, end backoffs, give up what is past its deadline."""
        output: list[SendPeer | Result] = []
        due = [each for each in self._rounds.values() if min(each.wake_s, each.deadline_s) <= now_s]
        for round_ in due:
            output += self._wake(round_, now_s)
        return output

    def drop(self, job_id: JobId) -> None:
        """Forget an ended job; its ballots stay used."""
        self._prepared.pop(job_id, None)
        self._counter_floor = max(self._counter_floor, self._counters.pop(job_id, 0))

    def validate(self) -> None:
        """Raise AssertionError when rounds, queues and ballots contradict one another."""
        assert set(self._waiting) <= set(self._rounds)
        assert all(0 < len(queue) <= QUEUE_MAX for queue in self._waiting.values())
        assert len(self._prepared) <= REMEMBERED_MAX
        for job_id, round_ in self._rounds.items():
            assert round_.request.job_id == job_id
            assert job_id not in self._prepared
            assert round_.wake_s < math.inf
            assert round_.ballot.counter <= max(self._counters.get(job_id, 0), self._counter_floor)
            assert (round_.phase is not Phase.ACCEPT) or (round_.proposal is not None and round_.outcome is not None)

    # --- rounds

    def _begin(self, request: Request, deadline_s: float, now_s: float) -> list[SendPeer | Result]:
        prepared = self._prepared.get(request.job_id)
        if isinstance(request, UpdateRequested) and prepared is not None and prepared.current == request.value:
            return [UpdateDecided(request.update_id, request.value)]
        self._prepared.pop(request.job_id, None)
        round_ = Round(request, deadline_s, self._quorum(len(request.holders)))
        self._rounds[request.job_id] = round_
        if (
            isinstance(request, UpdateRequested)
            and prepared is not None
            and prepared.holders == request.holders
            and _stamp(prepared.current) == request.expected
        ):
            round_.ballot = prepared.ballot
            return self._propose_own(round_, request, now_s)
        return self._prepare(round_, now_s)

    def _prepare(self, round_: Round, now_s: float) -> list[SendPeer | Result]:
        job_id = round_.request.job_id
        if self._counters.get(job_id, 0) >= COUNTER_MAX - 1:
            reason = f"a holder of {job_id} reports a ballot counter of {COUNTER_MAX} or more"
            return self._finish(round_, UpdateUncertain(round_.request.update_id, reason), now_s)
        round_.phase = Phase.PREPARE
        round_.ballot = self.next_ballot(job_id)
        return [*self._send(round_, now_s)]

    def _on_prepare_answer(
        self, round_: Round, sender: NodeId, answer: PrepareAnswer, now_s: float
    ) -> list[SendPeer | Result]:
        if not answer.is_promised:
            return self._on_refusal(round_, sender, now_s)
        round_.promises[sender] = answer
        if len(round_.promises) < round_.quorum:
            return []
        newest = max(round_.promises.values(), key=lambda promise: promise.accepted_ballot)
        agreeing = [each for each in round_.promises.values() if each.accepted_ballot == newest.accepted_ballot]
        return self._on_current(round_, newest.accepted, len(agreeing) >= round_.quorum, now_s)

    def _on_current(
        self, round_: Round, current: JobRecord | None, is_chosen: bool, now_s: float
    ) -> list[SendPeer | Result]:
        """The promises told the newest record.  Unless a whole majority had it under one ballot, it must be accepted
        again before anybody is told of it: it might lie at a minority that the next reader does not ask."""
        request = round_.request
        outcome: Result
        match request:
            case ReadRequested():
                outcome = ReadDecided(request.update_id, current)
            case UpdateRequested() if current == request.value:
                outcome = UpdateDecided(request.update_id, request.value)
            case UpdateRequested() if _stamp(current) == request.expected:
                return self._propose_own(round_, request, now_s)
            case UpdateRequested() if round_.was_maybe_written:
                reason = "another update came after this one or instead of it"
                return self._finish(round_, UpdateUncertain(request.update_id, reason), now_s)
            case UpdateRequested():
                outcome = UpdateConflicted(request.update_id, current)
        if current is None or is_chosen:
            self._remember(request, round_.ballot, current)
            return self._finish(round_, outcome, now_s)
        round_.is_own = False
        return self._propose(round_, current, outcome, now_s)

    def _propose_own(self, round_: Round, request: UpdateRequested, now_s: float) -> list[SendPeer | Result]:
        round_.is_own = True
        return self._propose(round_, request.value, UpdateDecided(request.update_id, request.value), now_s)

    def _propose(self, round_: Round, value: JobRecord, outcome: Result, now_s: float) -> list[SendPeer | Result]:
        job_id = round_.request.job_id
        round_.phase = Phase.ACCEPT
        round_.proposal = AcceptRequest(job_id, round_.ballot, value, self.next_ballot(job_id))
        round_.outcome = outcome
        return [*self._send(round_, now_s)]

    def _on_accept_answer(
        self, round_: Round, sender: NodeId, answer: AcceptAnswer, now_s: float
    ) -> list[SendPeer | Result]:
        if not answer.is_accepted:
            return self._on_refusal(round_, sender, now_s)
        round_.acceptances[sender] = None
        if len(round_.acceptances) < round_.quorum:
            return []
        assert round_.proposal is not None
        assert round_.outcome is not None
        self._remember(round_.request, round_.proposal.next_ballot, round_.proposal.value)
        return self._finish(round_, round_.outcome, now_s)

    def _on_refusal(self, round_: Round, sender: NodeId, now_s: float) -> list[SendPeer | Result]:
        round_.refusals[sender] = None
        return self._back_off(round_, now_s) if round_.is_lost else []

    def _back_off(self, round_: Round, now_s: float) -> list[SendPeer | Result]:
        # A holder that refused a ballot refuses it for ever, so a ballot that all refused wrote nothing.
        if round_.phase is Phase.ACCEPT and round_.is_own:
            round_.was_maybe_written |= len(round_.refusals) < len(round_.request.holders)
        wait_s = self._rng.uniform(BACKOFF_MIN_S, BACKOFF_MAX_S) * 2.0 ** min(round_.conflicts, 10)
        round_.conflicts += 1
        round_.phase = Phase.BACKOFF
        round_.wake_s = now_s + min(wait_s, BACKOFF_LIMIT_S)
        return []

    def _wake(self, round_: Round, now_s: float) -> list[SendPeer | Result]:
        request = round_.request
        if round_.deadline_s <= now_s:
            silent = ", ".join(round_.silent) or "none"
            reason = f"no majority within {self._update_timeout_s:g} s; silent: {silent}"
            return self._finish(round_, UpdateUncertain(request.update_id, reason), now_s)
        if round_.phase is Phase.BACKOFF:
            return self._prepare(round_, now_s)
        if round_.refusals:  # the silent ones may be dead: a higher ballot may win without them
            return self._back_off(round_, now_s)
        round_.wake_s = now_s + RESEND_S
        return [SendPeer(holder, _message(round_)) for holder in round_.silent]

    def _send(self, round_: Round, now_s: float) -> list[SendPeer]:
        round_.promises, round_.acceptances, round_.refusals = {}, {}, {}
        round_.wake_s = now_s + RESEND_S
        message = _message(round_)
        return [SendPeer(holder, message) for holder in round_.request.holders]

    def _remember(self, request: Request, ballot: Ballot, current: JobRecord | None) -> None:
        self._prepared[request.job_id] = Prepared(ballot, request.holders, current)
        while len(self._prepared) > REMEMBERED_MAX:
            self.drop(next(iter(self._prepared)))

    def _finish(self, round_: Round, result: Result, now_s: float) -> list[SendPeer | Result]:
        job_id = round_.request.job_id
        del self._rounds[job_id]
        output: list[SendPeer | Result] = [result]
        while job_id in self._waiting and job_id not in self._rounds:
            queue = self._waiting[job_id]
            request, deadline_s = queue.popleft()
            if not queue:
                del self._waiting[job_id]
            output += self._begin(request, deadline_s, now_s)
        return output


def majority(holder_count: int) -> int:
    """More than half."""
    return holder_count // 2 + 1


def _stamp(record: JobRecord | None) -> tuple[int, int] | None:
    return None if record is None else record.stamp


def _message(round_: Round) -> PrepareRequest | AcceptRequest:
    if round_.phase is Phase.ACCEPT:
        assert round_.proposal is not None
        return round_.proposal
    return PrepareRequest(round_.request.job_id, round_.ballot)
