"""The job register (protocol, plane C): one CASPaxos register per job, held by k nodes and linearizable.

Each node runs one `Register` with both sides: an acceptor for the jobs that it holds and a proposer for the jobs that
it acts for.  Messages to the own acceptor take the same way as all others (`SendPeer` to oneself, after the durable
barrier), with one exception: a job whose only holder is this node is updated within the step, so that it costs one
write and no message.

What the protocol leaves out on purpose: it knows no leases, no shepherds and no epochs.  They are fields of the value.
"""

import random
from collections.abc import Mapping
from typing import assert_never

from swarmsched.effects import Persist, SendPeer
from swarmsched.errors import LocalProtocolError
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.acceptor import Acceptor
from swarmsched.jobs.message import (
    AcceptAnswer,
    AcceptRequest,
    PrepareAnswer,
    PrepareRequest,
    RegisterMessage,
)
from swarmsched.jobs.proposer import COUNTER_MAX, Proposer, Quorum, majority
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

__all__ = [
    "UPDATE_TIMEOUT_S",
    "ReadDecided",
    "ReadRequested",
    "Register",
    "RegisterEffect",
    "RegisterEvent",
    "RegisterMessage",
    "Result",
    "UpdateConflicted",
    "UpdateDecided",
    "UpdateRequested",
    "UpdateUncertain",
]

UPDATE_TIMEOUT_S = 10.0
HOLDERS_MAX = 5

RegisterEvent = PeerMessageReceived | TimerFired | UpdateRequested | ReadRequested
RegisterEffect = SendPeer | Persist | Result


class Register:
    """Both sides of all registers of one node.

    `majority` maps the number of holders to the quorum; any two quorums must share a holder.  Results of this node's
    requests come as effects, after the writes they rest on.
    """

    def __init__(
        self,
        node_id: NodeId,
        generation: int,
        rng: random.Random,
        *,
        majority: Quorum = majority,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> None:
        self._node_id = node_id
        self._acceptor = Acceptor()
        self._proposer = Proposer(node_id, generation, rng, majority, update_timeout_s)
        self._dropped_message_count = 0

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Read back the room `register`; raises `StorageError`, with nothing restored."""
        self._acceptor.restore(entries)

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
    def dropped_message_count(self) -> int:
        """Messages that broke the protocol or found no room."""
        return self._dropped_message_count

    def drop(self, job_id: JobId) -> list[Persist]:
        """Delete a job that is past its retention.  Call it only for jobs that nobody updates any more."""
        self._proposer.drop(job_id)
        return self._acceptor.drop(job_id)

    def validate(self) -> None:
        """Raise AssertionError when the state contradicts itself.  For tests and the simulator."""
        self._acceptor.validate()
        self._proposer.validate()

    def _on_message(self, sender: NodeId, message: object, now_s: float) -> list[RegisterEffect]:
        match message:
            case PrepareRequest() if self._is_acceptable(sender, message):
                promise, writes = self._acceptor.prepare(message)
                self._proposer.observe(message.job_id, message.ballot)
                return [*writes, SendPeer(sender, promise)]
            case AcceptRequest() if self._is_acceptable(sender, message):
                acceptance, writes = self._acceptor.accept(message)
                self._proposer.observe(message.job_id, message.next_ballot)
                return [*writes, SendPeer(sender, acceptance)]
            case PrepareAnswer() | AcceptAnswer() if _is_about_one_job(message):
                return [*self._proposer.receive(sender, message, now_s)]
            case _:
                self._dropped_message_count += 1
                return []

    def _is_acceptable(self, sender: NodeId, request: PrepareRequest | AcceptRequest) -> bool:
        """A ballot belongs to the node that it names; a value to the job that it is sent for."""
        ballots = [request.ballot, request.next_ballot] if isinstance(request, AcceptRequest) else [request.ballot]
        is_own_ballot = all(each.node == sender and 0 < each.counter <= COUNTER_MAX for each in ballots)
        return is_own_ballot and _is_about_one_job(request) and self._acceptor.has_room(request.job_id)

    def _on_request(self, request: Request, now_s: float) -> list[RegisterEffect]:
        self._check_request(request)
        if request.holders == (self._node_id,) and not self._proposer.is_busy(request.job_id):
            return self._serve_alone(request)
        if self._node_id in request.holders:
            self._proposer.observe(request.job_id, self._acceptor.slot(request.job_id).promised)
        return [*self._proposer.request(request, now_s)]

    def _check_request(self, request: Request) -> None:
        if not 1 <= len(request.holders) <= HOLDERS_MAX or len(set(request.holders)) != len(request.holders):
            raise LocalProtocolError(f"holders must be 1 to {HOLDERS_MAX} different nodes, not {request.holders}")
        if isinstance(request, UpdateRequested):
            if request.value.job_id != request.job_id:
                raise LocalProtocolError(f"the record of {request.value.job_id} cannot be that of {request.job_id}")
            if request.expected is not None and request.value.stamp <= request.expected:
                raise LocalProtocolError(f"stamp {request.value.stamp} is not above {request.expected}")

    def _serve_alone(self, request: Request) -> list[RegisterEffect]:
        """The only holder is this node: what its acceptor accepted is what was decided."""
        slot = self._acceptor.slot(request.job_id)
        current = slot.accepted
        if isinstance(request, ReadRequested):
            return [ReadDecided(request.update_id, current)]
        if current == request.value:
            return [UpdateDecided(request.update_id, request.value)]
        if (None if current is None else current.stamp) != request.expected:
            return [UpdateConflicted(request.update_id, current)]
        if not self._acceptor.has_room(request.job_id):
            return [UpdateUncertain(request.update_id, "this node holds as many jobs as it can")]
        self._proposer.observe(request.job_id, slot.promised)
        ballot = self._proposer.next_ballot(request.job_id)
        accept = AcceptRequest(request.job_id, ballot, request.value, next_ballot=ballot)
        _, writes = self._acceptor.accept(accept)
        return [*writes, UpdateDecided(request.update_id, request.value)]


def _is_about_one_job(message: RegisterMessage) -> bool:
    value: JobRecord | None = None
    if isinstance(message, AcceptRequest):
        value = message.value
    elif isinstance(message, PrepareAnswer):
        value = message.accepted
    return value is None or value.job_id == message.job_id
