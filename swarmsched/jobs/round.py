"""One request's way through the register: whom it asks, what it has heard, what it means when enough have spoken."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from swarmsched.effects import SendPeer
from swarmsched.holders import Configuration, Holder, Quorum
from swarmsched.ids import NodeId
from swarmsched.jobs.message import AcceptRequest, Ballot, PrepareAnswer, PrepareRequest
from swarmsched.jobs.succession import completes
from swarmsched.jobs.update import Request, Result, UpdateRequested
from swarmsched.record import JobRecord


class RoundPhase(Enum):
    """What a round is waiting for."""

    PREPARE = "prepare"
    ACCEPT = "accept"
    BACKOFF = "backoff"


@dataclass(slots=True)
class Round:
    """One request's attempts.  Answers count only for the present `ballot`, once per holder."""

    request: Request
    deadline_s: float
    configuration: Configuration  # of the newest record known to this round; the request's until one is known
    phase: RoundPhase = RoundPhase.PREPARE
    ballot: Ballot = field(default_factory=Ballot)
    wake_s: float = math.inf  # send again, or end of backoff
    resend_s: float = 0.0  # that was waited for answers to the last sending
    promises: dict[Holder, PrepareAnswer] = field(default_factory=dict)
    acceptances: dict[Holder, None] = field(default_factory=dict)
    refusals: dict[Holder, None] = field(default_factory=dict)
    leaseholder: NodeId | None = None  # whose lease made a holder refuse its vote for the present ballot
    proposal: AcceptRequest | None = None  # what ACCEPT sends, but for the store
    outcome: Result | None = None  # what enough acceptances mean; None: that the own value may follow
    is_own: bool = False  # `proposal` carries the request's value, not a repair of the current one
    was_maybe_written: bool = False  # an earlier ballot's accept of the own value may lie somewhere
    is_over: bool = False  # a holder has said that the job's end was decided and is past its retention there
    conflicts: int = 0
    moves: int = 0  # how often another configuration was found

    @property
    def electorate(self) -> tuple[Configuration, ...]:
        """Who is asked: the present holders, and for a value that changes them its own too."""
        if self.phase is RoundPhase.ACCEPT and self.proposal is not None:
            return tuple(dict.fromkeys((self.configuration, self.proposal.value.configuration)))
        return (self.configuration,)

    @property
    def deciding(self) -> tuple[Configuration, ...]:
        """Configurations of the electorate that must agree, each by quorum. Leaving holders, who may be gone for
        good, need not agree to the end of an exchange: the joint record before it is decided."""
        following = self.electorate[-1]
        return (following,) if completes(following, self.configuration) else self.electorate

    @property
    def is_exchange_over(self) -> bool:
        """True when a promise shows that the leaving holders were left: so the joint record must have been decided."""
        if self.is_forced or not self.promises:
            return False
        _, current = self.newest
        if current is None or current.configuration == self.configuration:
            return False
        return completes(current.configuration, self.configuration)

    @property
    def silent(self) -> list[Holder]:
        """Holders that have not answered the present ballot, in their order."""
        members = dict.fromkeys(member for each in self.electorate for member in each.members)
        return [member for member in members if not self._has_answered(member)]

    @property
    def newest(self) -> tuple[Ballot, JobRecord | None]:
        """The accepted record with the highest ballot that the promises tell of."""
        promise = max(self.promises.values(), key=lambda each: each.accepted_ballot)
        return promise.accepted_ballot, promise.accepted

    @property
    def is_forced(self) -> bool:
        """True for an operator's update, which asks the new holders alone."""
        return isinstance(self.request, UpdateRequested) and self.request.is_forced

    @property
    def takes_over(self) -> bool:
        """True for a change of shepherd, which needs votes."""
        return isinstance(self.request, UpdateRequested) and self.request.takes_over

    def is_promised(self, quorum: Quorum) -> bool:
        """True when enough have promised the present ballot."""
        return self.configuration.is_quorum(self.promises, quorum)

    def is_accepted(self, quorum: Quorum) -> bool:
        """True when enough have accepted the proposal."""
        return all(each.is_quorum(self.acceptances, quorum) for each in self.deciding)

    def is_lost(self, quorum: Quorum) -> bool:
        """True when too many refused for the ballot to win."""
        return any(each.is_lost(self.refusals, quorum) for each in self.deciding)

    def is_decided(self, ballot: Ballot, quorum: Quorum) -> bool:
        """True when the promises alone show a quorum that accepted one record under this ballot."""
        return self.configuration.is_quorum(
            [member for member, promise in self.promises.items() if promise.accepted_ballot == ballot], quorum
        )

    def has_leaseholder(self, shepherd: NodeId) -> None:
        """A holder that refuses has let that node act for the job for a while yet."""
        self.leaseholder = shepherd

    def forget_answers(self) -> None:
        """Another ballot or another phase begins."""
        self.promises, self.acceptances, self.refusals, self.leaseholder = {}, {}, {}, None

    def messages(self) -> Iterator[SendPeer]:
        """What those that have not answered must be sent."""
        for holder in self.silent:
            yield SendPeer(holder.node, self._message(holder))

    def _message(self, holder: Holder) -> PrepareRequest | AcceptRequest:
        if self.phase is RoundPhase.ACCEPT and self.proposal is not None:
            return replace(self.proposal, store=holder.store)
        return PrepareRequest(self.request.job_id, self.ballot, holder.store, self.takes_over)

    def _has_answered(self, holder: Holder) -> bool:
        return holder in self.promises or holder in self.acceptances or holder in self.refusals
