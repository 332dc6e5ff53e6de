"""The job register (protocol, plane C): one CASPaxos register per job, held by k nodes and linearizable.

Each node runs one `Register` with both sides: an acceptor for the jobs that it holds and a proposer for the jobs that
it acts for.  Messages to the own acceptor take the same way as all others (`SendPeer` to oneself, after the durable
barrier), with two exceptions within the step: a job whose only holder is this node is updated at the cost of one write
and no message, and the first holder of a new job accepts its first record before it asks the others.

What the protocol leaves out on purpose: it knows no shepherds and no epochs, which are fields of the value.  Leases it
knows as votes only: safety never rests on them.  How the holders of a job change is told in `succession`.
"""

import random
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import assert_never

from swarmsched.effects import Persist, SendPeer
from swarmsched.errors import LocalProtocolError
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.holders import Holder, Quorum, majority
from swarmsched.ids import JobId, NodeId, is_job_id
from swarmsched.jobs.acceptor import Acceptor, MayChangeShepherd
from swarmsched.jobs.message import (
    AcceptAnswer,
    AcceptRequest,
    Ballot,
    EndDecided,
    PrepareAnswer,
    PrepareRequest,
    RegisterMessage,
)
from swarmsched.jobs.proposer import COUNTER_MAX, FIRST_COUNTER, Proposer
from swarmsched.jobs.succession import configuration_problem, may_follow
from swarmsched.jobs.tombstones import TOMBSTONES_MAX
from swarmsched.jobs.update import (
    EndConfirmed,
    JobOver,
    ReadDecided,
    ReadRequested,
    RecordAccepted,
    Request,
    Result,
    UpdateConflicted,
    UpdateDecided,
    UpdateRequested,
    UpdateUncertain,
)
from swarmsched.record import JobRecord
from swarmsched.wire.codec import encode_value

UPDATE_TIMEOUT_S = 10.0

RegisterEvent = PeerMessageReceived | TimerFired | UpdateRequested | ReadRequested
RegisterEffect = SendPeer | Persist | RecordAccepted | EndConfirmed | Result


def _always(_shepherd: NodeId, _generation: int, _now_s: float) -> bool:
    return True


class Register:
    """All registers of one node.  Drive it with `step`, and with `TimerFired` when `next_deadline_s` has come.

    `store_id` is the identity of the database behind it: another one after the disk was lost.  `may_change_shepherd`
    says whether the lease that this holder gave to a shepherd is over at a time.  `quorum` says how many of how many
    are enough.  `tombstones_max`: of how many dropped jobs it is kept that they are over.
    """

    def __init__(
        self,
        node_id: NodeId,
        generation: int,
        store_id: int,
        rng: random.Random,
        *,
        quorum: Quorum = majority,
        may_change_shepherd: MayChangeShepherd = _always,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
        tombstones_max: int = TOMBSTONES_MAX,
    ) -> None:
        self._me = Holder(node_id, store_id)
        self._acceptor = Acceptor(self._me, may_change_shepherd, tombstones_max)
        self._proposer = Proposer(self._me, generation, rng, quorum, update_timeout_s)
        self._dropped_messages: dict[str, int] = {}

    def restore(self, entries: Mapping[str, bytes], tombstones: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Read back the rooms `register` and `over`; raises `StorageError`, with nothing restored."""
        self._acceptor.restore(entries, tombstones)

    def step(self, event: RegisterEvent, now_s: float) -> list[RegisterEffect]:
        """Handle one event; late, repeated and reordered messages are harmless.

        Raises `LocalProtocolError` for a request that can never be served; nothing was changed.
        """
        match event:
            case PeerMessageReceived(sender=sender, message=message):
                return self._on_message(sender, message, now_s)
            case TimerFired():
                return [*self._proposer.fire(now_s)]
            case UpdateRequested() | ReadRequested():
                return self._on_request(event, now_s)
            case _:
                assert_never(event)

    @property
    def next_deadline_s(self) -> float:
        """When a `TimerFired` is due; infinite when nothing is under way."""
        return self._proposer.next_deadline_s

    @property
    def records(self) -> Mapping[JobId, JobRecord]:
        """The latest accepted record of each job held here.  A hint unless this node is the only holder."""
        return self._acceptor.records

    @property
    def open_records(self) -> Mapping[JobId, JobRecord]:
        """Records that have not ended and name this node and its store as a holder, present or leaving."""
        return self._acceptor.open_records

    @property
    def dropped_messages(self) -> Mapping[str, int]:
        """Messages without an answer, by reason: nonsense, no_room, wrong_store."""
        return MappingProxyType(self._dropped_messages)

    def is_holder(self, job_id: JobId) -> bool:
        """True if the latest record accepted here names this node and its store as a holder, present or leaving."""
        record = self._acceptor.records.get(job_id)
        return record is not None and self._me in record.configuration.members

    @property
    def over(self) -> Container[JobId]:
        """Those jobs of which `is_over` is true."""
        return self._acceptor.over

    def is_over(self, job_id: JobId) -> bool:
        """True for a job whose end was decided, and of which no more than that is kept here."""
        return job_id in self._acceptor.over

    def remind(self, is_there: Callable[[NodeId], bool]) -> list[SendPeer]:
        """What holders that missed a decided record of ours are sent again; some of it at a time."""
        return self._proposer.remind(is_there)

    def drop(self, job_id: JobId) -> list[Persist]:
        """Keep of a job no more than that it is over.  Call it only for jobs whose end is known to be decided."""
        self._proposer.drop(job_id)
        return self._acceptor.drop(job_id)

    def validate(self) -> None:
        """Raise AssertionError when the state contradicts itself.  For tests and the simulator."""
        self._acceptor.validate()
        self._proposer.validate()

    def _on_message(self, sender: NodeId, message: object, now_s: float) -> list[RegisterEffect]:
        problem = self._problem(sender, message)
        if problem:
            self._dropped_messages[problem] = self._dropped_messages.get(problem, 0) + 1
            return []
        match message:
            case PrepareRequest():
                promise, effects = self._acceptor.prepare(message, now_s)
                self._proposer.observe(message.job_id, message.ballot)
                return [*effects, SendPeer(sender, promise)]
            case AcceptRequest():
                acceptance, effects = self._acceptor.accept(message)
                self._proposer.observe(message.job_id, message.next_ballot)
                return [*effects, SendPeer(sender, acceptance)]
            case EndDecided():
                return [*self._acceptor.end_decided(message)]
            case PrepareAnswer() | AcceptAnswer():
                return [*self._proposer.receive(sender, message, now_s)]
            case _:
                return []

    def _problem(self, sender: NodeId, message: object) -> str:
        """Why a message gets no answer; empty if it may."""
        if not isinstance(message, RegisterMessage) or not (
            is_job_id(message.job_id) and _makes_sense(sender, message)
        ):
            return "nonsense"
        if isinstance(message, PrepareRequest | AcceptRequest | EndDecided):
            if message.store != self._me.store:
                return "wrong_store"
            if not self._acceptor.has_room(message.job_id):
                return "no_room"
        return ""

    def _on_request(self, request: Request, now_s: float) -> list[RegisterEffect]:
        _check_request(request)
        if self.is_over(request.job_id):
            return [JobOver(request.update_id, request.job_id)]
        if not self._proposer.is_busy(request.job_id):
            if self._is_alone(request):
                return self._serve_alone(request, now_s)
            if isinstance(request, UpdateRequested) and self._may_skip_prepare(request):
                return [*self._proposer.create(request, now_s)]
        if self._acceptor.has_slot(request.job_id):
            self._proposer.observe(request.job_id, self._acceptor.slot(request.job_id).promised)
        return [*self._proposer.request(request, now_s)]

    def _is_alone(self, request: Request) -> bool:
        """True if this node is the only holder, by the request, by what it holds and by the new value."""
        current = self._acceptor.slot(request.job_id).accepted
        asked = [request.configuration, *([] if current is None else [current.configuration])]
        if isinstance(request, UpdateRequested):
            asked.append(request.value.configuration)
            if request.is_forced:
                return False
        return all(configuration.members == (self._me,) for configuration in asked)

    def _serve_alone(self, request: Request, now_s: float) -> list[RegisterEffect]:
        """What the acceptor of the only holder accepted is what was decided."""
        slot = self._acceptor.slot(request.job_id)
        current = slot.accepted
        if isinstance(request, ReadRequested):
            return [ReadDecided(request.update_id, current)]
        if current == request.value:
            return [UpdateDecided(request.update_id, request.value)]
        if (None if current is None else current.stamp) != request.expected:
            return [UpdateConflicted(request.update_id, current)]
        if request.takes_over and not self._acceptor.may_promise(request.job_id, self._me.node, now_s):
            return [UpdateUncertain(request.update_id, f"{current.shepherd if current else ''} still has its lease")]
        if not self._acceptor.has_room(request.job_id):
            return [UpdateUncertain(request.update_id, "this node holds as many jobs as it can")]
        self._proposer.observe(request.job_id, slot.promised)
        ballot = self._proposer.next_ballot(request.job_id)
        _, effects = self._acceptor.accept(AcceptRequest(request.job_id, ballot, request.value, next_ballot=ballot))
        return [*effects, UpdateDecided(request.update_id, request.value)]

    def _may_skip_prepare(self, request: UpdateRequested) -> bool:
        """True for the first holder of a job that was issued here and of which it has never heard; see `proposer`."""
        is_first_record = request.expected is None and not request.takes_over and not request.is_forced
        is_ours = request.is_issued_here and request.value.holders[0] == self._me
        is_new = not self._acceptor.has_slot(request.job_id) and not self._proposer.has_met(request.job_id)
        return is_first_record and is_ours and is_new


def _check_request(request: Request) -> None:
    problem = configuration_problem(request.configuration)
    if isinstance(request, UpdateRequested):
        problem = problem or _value_problem(request)
    if problem:
        raise LocalProtocolError(problem)
    if isinstance(request, UpdateRequested):
        encode_value(JobRecord, request.value)  # or it would be under way for ever: no holder could store it


def _value_problem(request: UpdateRequested) -> str:
    value = request.value
    problem = configuration_problem(value.configuration)
    if problem:
        return problem
    if value.job_id != request.job_id:
        return f"the record of {value.job_id} cannot be that of {request.job_id}"
    if request.is_forced:
        return ""
    if request.expected is None:
        return "" if value.configuration == request.configuration else "a first record must name the holders asked"
    if value.stamp <= request.expected:
        return f"stamp {value.stamp} is not above {request.expected}"
    if not may_follow(value.configuration, request.configuration):
        return "holders may only change with the present ones leaving: set leaving_holders"
    return ""


def _makes_sense(sender: NodeId, message: RegisterMessage) -> bool:
    match message:
        case PrepareRequest(ballot=ballot):
            return _is_own_ballot(ballot, sender) and ballot.counter > FIRST_COUNTER
        case AcceptRequest(ballot=ballot, value=value):
            is_own = _is_own_ballot(ballot, sender) and _is_own_ballot(message.next_ballot, sender)
            is_first = not value.leaving_holders and value.configuration.nodes[:1] == (sender,)
            is_allowed = ballot.counter > FIRST_COUNTER or is_first
            return is_own and is_allowed and _is_record_of(message.job_id, value)
        case PrepareAnswer(accepted=record):
            is_whole = (record is None) == (message.accepted_ballot == Ballot())
            is_kept = not message.is_promised or message.promised == message.ballot
            is_possible = is_kept and message.accepted_ballot <= message.promised and _is_ballot(message.promised)
            if message.is_over and (message.is_promised or record is not None):
                return False
            return is_whole and is_possible and (record is None or _is_record_of(message.job_id, record))
        case AcceptAnswer():
            is_kept = not message.is_accepted or message.promised >= message.ballot
            return is_kept and _is_ballot(message.promised) and not (message.is_over and message.is_accepted)
        case EndDecided(ballot=ballot):
            return ballot.counter > 0 and _is_ballot(ballot)
        case _:
            assert_never(message)


def _is_own_ballot(ballot: Ballot, sender: NodeId) -> bool:
    return ballot.node == sender and ballot.counter > 0 and _is_ballot(ballot)


def _is_ballot(ballot: Ballot) -> bool:
    """False for what no holder can have promised, since all refuse to."""
    return ballot.counter <= COUNTER_MAX


def _is_record_of(job_id: JobId, record: JobRecord) -> bool:
    return record.job_id == job_id and not configuration_problem(record.configuration)
