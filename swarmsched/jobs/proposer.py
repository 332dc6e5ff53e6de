"""The asking side of the register: rounds of prepare and accept for one job at a time (CASPaxos, sections 2.1, 2.2).

A round prepares a ballot at a quorum of the job's holders, learns the newest accepted record from their promises,
and has the next record accepted by a quorum.  Those accepts carry the promise for the proposer's next ballot, so as
long as nobody else interferes an update costs one round trip.  Who the holders are is told by the newest record itself
(`succession`): a round that finds others than it asked goes on with those, under the same ballot.

A holder that has dropped an ended job refuses every vote on it and says that it is over (`tombstones`).  Whoever wants
to go on with the job has to hear that from one holder only.  Whoever reads, or writes an end, takes it for a refusal
first: others may still have the record.

Three results are told apart with care.  *Decided*: a quorum accepted.  *Conflicted*: this request wrote nothing,
for certain.  *Uncertain*: an accept of this request may be lying at a minority and may yet be found and completed by
somebody's later round, or it was completed and overtaken.

Ballots with counter 1 are kept for first records.  No ballot is below them, so there is nothing that a prepare could
learn, and only one proposer may use one: the first of the holders that the ticket names, once, and only in the life of
its process in which it issued that ticket itself.  No earlier life can have sent one then, and later ones prepare.  So
the other holders are asked while the own disk is still writing.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from itertools import islice

from msgspec.structs import replace

from swarmsched.effects import SendPeer
from swarmsched.fields import Value
from swarmsched.holders import Configuration, Holder, Quorum
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot, EndDecided, PrepareAnswer
from swarmsched.jobs.round import Round, RoundPhase
from swarmsched.jobs.succession import may_follow
from swarmsched.jobs.update import (
    JobOver,
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

RESEND_S, RESEND_S_MAX = 0.5, 4.0  # doubled with each time: what is late because of much to do needs no copies
BACKOFF_MIN_S, BACKOFF_MAX_S, BACKOFF_LIMIT_S = 0.010, 0.100, 1.0
COUNTER_MAX = 2**31  # acceptors drop higher ballots: a broken peer must not drive the counter to its 32 bits' end
FIRST_COUNTER = 1
MOVES_MAX = 100  # configurations that one request may follow
QUEUE_MAX = 64  # requests waiting for one job; more are answered uncertain at once
REMEMBERED_MAX = 100_000  # jobs with a prepared ballot; at the limit the oldest pays one more round trip
LOOKED_AT_MAX, REMINDERS_MAX = 1_000, 64  # at once, of the decided records that some holder has not confirmed

Output = list[SendPeer | Result]


class PreparedBallot(Value):
    """Memory of the last round, so that a steady shepherd's next update needs no prepare. `ballot` is one that a
    quorum of `configuration` has promised us, and `current` the decided record of that time."""

    ballot: Ballot
    configuration: Configuration
    current: JobRecord | None

    def serves(self, request: UpdateRequested) -> bool:
        """True if the update can be proposed under this ballot.

        A change of shepherd needs votes, which only a prepare asks for; a forced update asks other holders.  What was
        decided already is proposed again like anything else: it may have been overtaken since.
        """
        if self.current == request.value:
            return True
        if request.takes_over or request.is_forced:
            return False
        if self.current is None:
            return request.expected is None and request.configuration == self.configuration
        is_expected = request.expected == self.current.stamp
        return is_expected and may_follow(request.value.configuration, self.configuration)


class Proposer:
    """Rounds of this node; requests for one job are served one after the other, in order of arrival."""

    def __init__(
        self, me: Holder, generation: int, rng: random.Random, quorum: Quorum, update_timeout_s: float
    ) -> None:
        self._me = me
        self._generation = generation
        self._rng = rng
        self._quorum = quorum
        self._update_timeout_s = update_timeout_s
        self._rounds: dict[JobId, Round] = {}  # at most one per job
        self._waiting: dict[JobId, deque[tuple[Request, float]]] = {}  # with deadline; only jobs that have a round
        self._prepared: dict[JobId, PreparedBallot] = {}  # each ballot is used at most once; oldest first
        self._behind: dict[JobId, tuple[AcceptRequest, dict[Holder, None]]] = {}  # decided, and who never said so
        self._counters: dict[JobId, int] = {}  # highest counter used or reported per job; never falls
        self._counter_floor = FIRST_COUNTER  # highest of all forgotten jobs', so that no ballot is ever used again

    @property
    def next_deadline_s(self) -> float:
        """When `fire` has something to do; infinite when nothing is under way."""
        if not self._rounds:
            return math.inf
        return min([min(each.wake_s, each.deadline_s) for each in self._rounds.values()])

    def is_busy(self, job_id: JobId) -> bool:
        """True while a request for the job is under way."""
        return job_id in self._rounds

    def has_met(self, job_id: JobId) -> bool:
        """True once a ballot for the job was used or heard of."""
        return job_id in self._counters

    def next_ballot(self, job_id: JobId) -> Ballot:
        """A ballot above all that were used or reported for the job."""
        counter = max(self._counters.get(job_id, 0), self._counter_floor) + 1
        self._counters[job_id] = counter
        return Ballot(counter, self._me.node, self._generation)

    def observe(self, job_id: JobId, ballot: Ballot) -> None:
        """Somebody uses this ballot: the next own one goes above it."""
        if ballot.counter > self._counters.get(job_id, 0):
            self._counters[job_id] = ballot.counter

    def request(self, request: Request, now_s: float) -> Output:
        """Begin, or queue behind the job's request under way."""
        deadline_s = now_s + self._update_timeout_s
        under_way = self._rounds.get(request.job_id)
        if under_way is None:
            return self._begin(request, deadline_s, now_s)
        if isinstance(request, UpdateRequested) and request.is_forced and not under_way.is_forced:
            return [*self._make_way(request.job_id, now_s), *self._begin(request, deadline_s, now_s)]
        queue = self._waiting.setdefault(request.job_id, deque())
        if len(queue) >= QUEUE_MAX:
            return [UpdateUncertain(request.update_id, f"{QUEUE_MAX} updates of this job wait already")]
        queue.append((request, deadline_s))
        return []

    def create(self, request: UpdateRequested, now_s: float) -> Output:
        """Have a first record accepted without a prepare; who may, and when: see the module text."""
        round_ = Round(request, now_s + self._update_timeout_s, request.value.configuration)
        self._rounds[request.job_id] = round_
        round_.ballot = Ballot(FIRST_COUNTER, self._me.node, self._generation)
        self.observe(request.job_id, round_.ballot)
        return self._propose_own(round_, request, now_s)

    def receive(self, sender: NodeId, answer: PrepareAnswer | AcceptAnswer, now_s: float) -> Output:
        """A holder answered; answers to ballots that are over, and second answers, change nothing."""
        round_ = self._rounds.get(answer.job_id)
        holder = Holder(sender, answer.store)
        if isinstance(answer, AcceptAnswer):
            self._caught_up(holder, answer)
        if round_ is None or answer.ballot != round_.ballot or holder not in round_.silent:
            return []
        self.observe(answer.job_id, answer.promised)
        if answer.is_over:
            return self._on_over(round_, holder, now_s)
        match answer:
            case PrepareAnswer() if round_.phase is RoundPhase.PREPARE:
                return self._on_prepare_answer(round_, holder, answer, now_s)
            case AcceptAnswer() if round_.phase is RoundPhase.ACCEPT:
                return self._on_accept_answer(round_, holder, answer, now_s)
            case _:
                return []

    def fire(self, now_s: float) -> Output:
        """Send again, end backoffs, give up what is past its deadline."""
        output: Output = []
        due = [each for each in self._rounds.values() if min(each.wake_s, each.deadline_s) <= now_s]
        for round_ in due:
            output += self._wake(round_, now_s)
        return output

    def remind(self, is_there: Callable[[NodeId], bool]) -> list[SendPeer]:
        """Send decided records again to those holders that have not answered, some of the jobs at a time.

        A majority is enough for a decision, but of three holders that were two, one more may go: the third must have
        the record by then, or those that run the job hear from no majority.
        """
        output: list[SendPeer] = []
        for job_id in list(islice(self._behind, LOOKED_AT_MAX)):
            if len(output) >= REMINDERS_MAX:
                break
            proposal, holders = self._behind[job_id] = self._behind.pop(job_id)
            there = (holder for holder in holders if is_there(holder.node))
            output += [SendPeer(holder.node, replace(proposal, store=holder.store)) for holder in there]
        return output

    def drop(self, job_id: JobId) -> None:
        """Forget an ended job; its ballots stay used."""
        self._prepared.pop(job_id, None)
        self._behind.pop(job_id, None)
        self._counter_floor = max(self._counter_floor, self._counters.pop(job_id, 0))

    def validate(self) -> None:
        """Raise AssertionError when rounds, queues and ballots contradict one another."""
        assert set(self._waiting) <= set(self._rounds)
        assert all(0 < len(queue) <= QUEUE_MAX for queue in self._waiting.values())
        assert len(self._prepared) <= REMEMBERED_MAX
        assert len(self._behind) <= REMEMBERED_MAX
        assert all(holders for _, holders in self._behind.values())
        for job_id, round_ in self._rounds.items():
            assert round_.request.job_id == job_id
            assert job_id not in self._prepared
            assert round_.wake_s < math.inf
            assert round_.ballot.counter <= max(self._counters.get(job_id, 0), self._counter_floor)
            assert (round_.phase is not RoundPhase.ACCEPT) or round_.proposal is not None

    # --- rounds

    def _begin(self, request: Request, deadline_s: float, now_s: float) -> Output:
        prepared = self._prepared.pop(request.job_id, None)
        round_ = Round(request, deadline_s, _first_asked(request))
        if isinstance(request, UpdateRequested) and prepared is not None and prepared.serves(request):
            self._rounds[request.job_id] = round_
            round_.ballot, round_.configuration = prepared.ballot, prepared.configuration
            return self._propose_own(round_, request, now_s)
        self._rounds[request.job_id] = round_
        return self._prepare(round_, now_s)

    def _prepare(self, round_: Round, now_s: float) -> Output:
        job_id = round_.request.job_id
        if self._has_no_ballot(job_id):  # not given up at once: whoever then asks again at once would never end
            round_.phase, round_.wake_s = RoundPhase.BACKOFF, round_.deadline_s
            return []
        round_.phase = RoundPhase.PREPARE
        round_.ballot = self.next_ballot(job_id)
        return self._send(round_, now_s)

    def _on_over(self, round_: Round, holder: Holder, now_s: float) -> Output:
        round_.is_over = True
        round_.refusals[holder] = None
        request = round_.request
        goes_on = isinstance(request, UpdateRequested) and not request.value.is_ended
        return self._finish_over(round_, now_s) if goes_on or round_.is_lost(self._quorum) else []

    def _finish_over(self, round_: Round, now_s: float) -> Output:
        return self._finish(round_, JobOver(round_.request.update_id, round_.request.job_id), now_s)

    def _on_prepare_answer(self, round_: Round, holder: Holder, answer: PrepareAnswer, now_s: float) -> Output:
        if not answer.is_promised:
            if round_.takes_over and answer.promised <= answer.ballot and answer.accepted is not None:
                round_.has_leaseholder(answer.accepted.shepherd)
            return self._on_refusal(round_, holder, now_s)
        round_.promises[holder] = answer
        return self._settle_prepare(round_, now_s)

    def _settle_prepare(self, round_: Round, now_s: float) -> Output:
        """Go on when the holders of the newest record have promised; ask them when they were not known yet."""
        messages: list[SendPeer] = []
        while round_.is_promised(self._quorum) or round_.is_exchange_over:
            ballot, current = round_.newest
            wanted = _first_asked(round_.request) if current is None or round_.is_forced else current.configuration
            if wanted == round_.configuration:
                return self._on_current(round_, current, round_.is_decided(ballot, self._quorum), now_s)
            round_.moves += 1
            if round_.moves > MOVES_MAX:
                return self._give_up(round_, f"the holders changed more than {MOVES_MAX} times", now_s)
            round_.configuration = wanted
            messages = list(round_.messages())
        return [*messages]

    def _on_current(self, round_: Round, current: JobRecord | None, is_decided: bool, now_s: float) -> Output:
        """The promises told the newest record.  Unless a whole quorum had it under one ballot, it must be accepted
        again before anybody is told of it, or its holders are left: it might lie at a minority that the next reader
        does not ask.  A read that spreads it has it accepted again in any case."""
        request = round_.request
        if round_.is_over and (current is None or not current.is_ended):
            return self._finish_over(round_, now_s)
        outcome: Result | None
        match request:
            case ReadRequested():
                outcome = ReadDecided(request.update_id, current)
            case UpdateRequested() if current == request.value:
                outcome = UpdateDecided(request.update_id, request.value)
            case UpdateRequested(is_forced=True):
                return self._force(round_, request, current, now_s)
            case UpdateRequested() if _may_replace(request, current):
                if is_decided or current is None or current.configuration == request.value.configuration:
                    return self._propose_own(round_, request, now_s)
                outcome = None
            case UpdateRequested() if round_.was_maybe_written:
                return self._give_up(round_, "another update came after this one or instead of it", now_s)
            case UpdateRequested():
                outcome = UpdateConflicted(request.update_id, current)
        must_spread = isinstance(request, ReadRequested) and request.spreads
        if outcome is not None and (current is None or (is_decided and not must_spread)):
            told = self._tell_end(round_.newest[0], current)
            self._remember(round_, round_.ballot, current)
            return [*told, *self._finish(round_, outcome, now_s)]
        assert current is not None
        round_.is_own = False
        return self._propose(round_, round_.ballot, current, outcome, now_s)

    def _force(self, round_: Round, request: UpdateRequested, current: JobRecord | None, now_s: float) -> Output:
        if current is None or current.epoch < request.value.epoch:
            return self._propose_own(round_, request, now_s)
        if round_.was_maybe_written:
            return self._give_up(round_, "another update came after this one or instead of it", now_s)
        return self._finish(round_, UpdateConflicted(request.update_id, current), now_s)

    def _propose_own(self, round_: Round, request: UpdateRequested, now_s: float) -> Output:
        round_.is_own = True
        outcome = UpdateDecided(request.update_id, request.value)
        return self._propose(round_, round_.ballot, request.value, outcome, now_s)

    def _propose(self, round_: Round, ballot: Ballot, value: JobRecord, outcome: Result | None, now_s: float) -> Output:
        job_id = round_.request.job_id
        round_.phase = RoundPhase.ACCEPT
        round_.ballot = ballot
        round_.proposal = AcceptRequest(job_id, ballot, value, self.next_ballot(job_id))
        round_.outcome = outcome
        return self._send(round_, now_s)

    def _on_accept_answer(self, round_: Round, holder: Holder, answer: AcceptAnswer, now_s: float) -> Output:
        if not answer.is_accepted:
            return self._on_refusal(round_, holder, now_s)
        round_.acceptances[holder] = None
        return self._settle_accept(round_, now_s)

    def _settle_accept(self, round_: Round, now_s: float) -> Output:
        if not round_.is_accepted(self._quorum):
            return []
        proposal, request = round_.proposal, round_.request
        assert proposal is not None
        round_.configuration = proposal.value.configuration
        if round_.outcome is None:
            assert isinstance(request, UpdateRequested)
            round_.ballot = proposal.next_ballot
            return self._propose_own(round_, request, now_s)
        self._remember(round_, proposal.next_ballot, proposal.value)
        self._await_others(proposal, round_.silent)
        told = [*self._tell_end(proposal.ballot, proposal.value), *self._tell_reader(request, proposal)]
        return [*told, *self._finish(round_, round_.outcome, now_s)]

    def _tell_end(self, ballot: Ballot, record: JobRecord | None) -> list[SendPeer]:
        """The other holders may drop the record when its time comes, and need not ask before."""
        if record is None or not record.is_ended:
            return []
        others = (holder for holder in record.configuration.members if holder.node != self._me.node)
        return [SendPeer(holder.node, EndDecided(record.job_id, ballot, holder.store)) for holder in others]

    def _tell_reader(self, request: Request, proposal: AcceptRequest) -> list[SendPeer]:
        """Who was down while others took its place as a holder gets the record that says so: by its old one it would
        stand for shepherd for ever."""
        value, is_spread = proposal.value, isinstance(request, ReadRequested) and request.spreads
        is_former = is_spread and not value.is_ended and self._me not in value.configuration.members
        return [SendPeer(self._me.node, replace(proposal, store=self._me.store))] if is_former else []

    def _on_refusal(self, round_: Round, holder: Holder, now_s: float) -> Output:
        round_.refusals[holder] = None
        return self._back_off(round_, now_s) if round_.is_lost(self._quorum) else []

    def _back_off(self, round_: Round, now_s: float) -> Output:
        if round_.phase is RoundPhase.PREPARE and round_.leaseholder is not None:
            return self._give_up(round_, f"{round_.leaseholder} still has its lease", now_s)
        # A holder that refused a ballot refuses it for ever, so a ballot that all refused wrote nothing.
        if round_.phase is RoundPhase.ACCEPT and round_.is_own:
            round_.was_maybe_written |= bool(round_.acceptances) or bool(round_.silent)
        wait_s = self._rng.uniform(BACKOFF_MIN_S, BACKOFF_MAX_S) * 2.0 ** min(round_.conflicts, 10)
        round_.conflicts += 1
        round_.phase = RoundPhase.BACKOFF
        round_.wake_s = now_s + min(wait_s, BACKOFF_LIMIT_S)
        return []

    def _wake(self, round_: Round, now_s: float) -> Output:
        if round_.deadline_s <= now_s and round_.is_over:
            return self._finish_over(round_, now_s)
        if round_.deadline_s <= now_s:
            return self._give_up(round_, self._why_undecided(round_), now_s)
        if round_.phase is RoundPhase.BACKOFF:
            return self._prepare(round_, now_s)
        if round_.refusals:  # the silent ones may be dead: a higher ballot may win without them
            return self._back_off(round_, now_s)
        round_.resend_s = min(RESEND_S_MAX, 2.0 * round_.resend_s)
        round_.wake_s = now_s + round_.resend_s
        return [*round_.messages()]

    def _why_undecided(self, round_: Round) -> str:
        if self._has_no_ballot(round_.request.job_id):
            return f"a holder of {round_.request.job_id} reports a ballot counter near {COUNTER_MAX}, the last one"
        silent = ", ".join(dict.fromkeys(holder.node for holder in round_.silent)) or "none"
        return f"no majority within {self._update_timeout_s:g} s; silent: {silent}"

    def _has_no_ballot(self, job_id: JobId) -> bool:
        return self._counters.get(job_id, 0) >= COUNTER_MAX - 1

    def _send(self, round_: Round, now_s: float) -> Output:
        round_.forget_answers()
        round_.resend_s = RESEND_S
        round_.wake_s = now_s + RESEND_S
        return [*round_.messages()]

    def _remember(self, round_: Round, ballot: Ballot, current: JobRecord | None) -> None:
        self._prepared[round_.request.job_id] = PreparedBallot(ballot, round_.configuration, current)
        while len(self._prepared) > REMEMBERED_MAX:
            self.drop(next(iter(self._prepared)))

    def _await_others(self, proposal: AcceptRequest, silent: list[Holder]) -> None:
        members = proposal.value.configuration.members
        behind = {holder: None for holder in silent if holder in members and holder.node != self._me.node}
        self._behind.pop(proposal.job_id, None)
        if behind:
            self._behind[proposal.job_id] = (proposal, behind)
        while len(self._behind) > REMEMBERED_MAX:
            del self._behind[next(iter(self._behind))]

    def _caught_up(self, holder: Holder, answer: AcceptAnswer) -> None:
        """It has the record now, or has promised a higher ballot, whose proposer will see to it."""
        proposal, behind = self._behind.get(answer.job_id, (None, {}))
        if proposal is not None and proposal.ballot == answer.ballot:
            behind.pop(holder, None)
            if not behind:
                del self._behind[answer.job_id]

    def _make_way(self, job_id: JobId, now_s: float) -> Output:
        """An operator replaces the holders: whoever still asks the lost ones would ask in vain, and bar the way."""
        reason = "an operator replaces the job's holders"
        waiting = self._waiting.pop(job_id, deque())
        output: Output = [UpdateUncertain(request.update_id, reason) for request, _ in waiting]
        round_ = self._rounds.get(job_id)
        return output if round_ is None else [*output, *self._give_up(round_, reason, now_s)]

    def _give_up(self, round_: Round, reason: str, now_s: float) -> Output:
        return self._finish(round_, UpdateUncertain(round_.request.update_id, reason), now_s)

    def _finish(self, round_: Round, result: Result, now_s: float) -> Output:
        job_id = round_.request.job_id
        del self._rounds[job_id]
        output: Output = [result]
        if round_.is_forced:
            output += self._make_way(job_id, now_s)
        while job_id in self._waiting and job_id not in self._rounds:
            queue = self._waiting[job_id]
            request, deadline_s = queue.popleft()
            if not queue:
                del self._waiting[job_id]
            output += self._begin(request, deadline_s, now_s)
        return output


def _first_asked(request: Request) -> Configuration:
    """Whom a round asks that has heard of no record."""
    if isinstance(request, UpdateRequested) and request.is_forced:
        return request.value.configuration
    return request.configuration


def _may_replace(request: UpdateRequested, current: JobRecord | None) -> bool:
    if current is None:
        return request.expected is None
    return request.expected == current.stamp and may_follow(request.value.configuration, current.configuration)
