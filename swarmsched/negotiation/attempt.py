"""One change of a gang in two phases: from nothing to the whole of it, or from one that trains to one with more parts.

*Prepare*: every owner holds.  *Agree*: the record names the gang, PREPARED.  *Publish*: that is durable, and owners
commit and stage.  *Switch*: all launch.  Until then it may be withdrawn, and every owner *releases* it.

This is plane D, steps 2 to 5: all holds or none; nothing runs before every owner has committed and staged; the decision
falls within `HOLD_TTL_S - DECISION_MARGIN_S` of the first hold *sent*, by the shepherd's own clock, while the owner
counts the same time from *receipt*, so a commit can only come early enough or be refused.

The shepherd drives it and looks at `phase` after each event (`due`).
"""

from collections.abc import Callable, Iterator
from enum import Enum

from msgspec.structs import replace

from swarmsched.card import RankKey
from swarmsched.effects import Effect, SendPeer
from swarmsched.fields import Value
from swarmsched.ids import JobId, NodeId, Place
from swarmsched.ledger.message import (
    HOLD_TTL_S,
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    OwnerCommand,
    Refusal,
    ReleaseRequest,
)
from swarmsched.record import JobRecord
from swarmsched.resources import Share, ranks_by_node
from swarmsched.task import GroupPlace, Meeting, TaskOrder

DECISION_MARGIN_S = 1.0
RESEND_S = 1.0
RequestMaker = Callable[[Share], OwnerCommand]


class AttemptPhase(Enum):
    """How far the gang has come."""

    HOLDING = "holding"
    HELD = "held"  # all said yes: the shepherd writes PREPARED and calls `prepared`
    COMMITTING = "committing"
    STAGING = "staging"  # all committed, some still bring files
    LAUNCHING = "launching"
    LAUNCHED = "launched"  # every owner acknowledged the launch
    FAILED = "failed"  # `problem` says why; the shepherd calls `abandon`


class Ranking(Value):
    """The job's place in the order, as sent with every hold."""

    policy_id: str
    rank_key: RankKey


EXPECTED: dict[AttemptPhase, type] = {  # commands that may be unanswered
    AttemptPhase.HOLDING: HoldRequest,
    AttemptPhase.COMMITTING: CommitRequest,
    AttemptPhase.LAUNCHING: LaunchRequest,
}


class Attempt:
    """State of one attempt; volatile, since the register and the owners' ledgers hold what must survive."""

    def __init__(
        self, record: JobRecord, attempt: int, shares: tuple[Share, ...], ranking: Ranking, command_ids: Iterator[int]
    ) -> None:
        self.number = attempt
        self.shares = shares
        self.phase = AttemptPhase.HOLDING
        self.problem = ""
        self.refusing_node: NodeId | None = None
        self.refusal = Refusal.NONE
        self.may_have_run = False  # a launch was sent, by us or perhaps by an earlier shepherd
        self._meetings = dict(enumerate(record.meetings, 1))
        self._meetings[0] = Meeting(record.rendezvous_host, record.rendezvous_port)
        self._record = record
        self._ranking = ranking
        self._command_ids = command_ids
        self._pending: dict[Place, OwnerCommand] = {}
        self._unstaged: set[Place] = set()
        self._decide_before_s = float("inf")
        self._resend_s = float("inf")

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """Where the ranks of each group meet, by their numbers; the first of an elastic gang meets by itself."""
        return tuple([self._meetings.get(group, Meeting()) for group in range(len(self._record.spec.groups) + 1)])

    @property
    def unanswered_holds(self) -> tuple[Share, ...]:
        """Shares whose owner has not said yes or no: not yet visible in anybody's free counts."""
        if self.phase is not AttemptPhase.HOLDING:
            return ()
        return tuple(share for share in self.shares if share.place in self._pending)

    @property
    def next_deadline_s(self) -> float:
        """When to resend, or to give up holding."""
        if self.phase in (AttemptPhase.HOLDING, AttemptPhase.HELD):
            return min(self._decide_before_s, self._resend_s)
        return self._resend_s if self._pending else float("inf")

    def begin(self, now_s: float) -> list[Effect]:
        """Ask every owner for a hold, all at once."""
        self._decide_before_s = now_s + HOLD_TTL_S - DECISION_MARGIN_S
        return self._send_all(now_s, self._hold_request)

    def answered(self, answer: OwnerAnswer, now_s: float) -> list[Effect]:
        """One owner's answer.  Late and repeated ones do not match a pending command and are ignored."""
        pending = self._pending.get(answer.place)
        if pending is None or pending.command_id != answer.command_id:
            return []
        del self._pending[answer.place]
        if answer.refusal is not Refusal.NONE:
            self.refusal = answer.refusal
            return self.fail(answer.owner, f"{answer.owner} refused: {answer.detail or answer.refusal.value}")
        if isinstance(pending, HoldRequest):
            return self._hold_granted(answer, now_s)
        if isinstance(pending, CommitRequest):
            return self._commit_granted(answer, now_s)
        if not self._pending:
            self.phase = AttemptPhase.LAUNCHED
        return []

    def prepared(self, record: JobRecord, now_s: float) -> list[Effect]:
        """PREPARED is durable: commit everywhere.  Too late means the holds may be gone: fail instead."""
        self._record = record
        if now_s >= self._decide_before_s:
            return self.fail(None, "the decision came too late for the holds")
        self._decide_before_s = float("inf")
        self.phase = AttemptPhase.COMMITTING
        self._unstaged = {share.place for share in self.shares}
        return self._send_all(now_s, self._commit_request)

    def staged(self, place: Place, now_s: float) -> list[Effect]:
        """An owner has reported that its part is staged."""
        self._unstaged.discard(place)
        return self._launch_when_ready(now_s)

    def lost(self, place: Place) -> None:
        """An owner that had committed knows nothing of this attempt any more."""
        if self.phase in (AttemptPhase.STAGING, AttemptPhase.LAUNCHING) and place not in self._pending:
            self.fail(place.node, f"{place.node} has lost what it committed to")

    def awaits(self, node: NodeId) -> bool:
        """True while a command to this node is repeated until it is answered."""
        return any(place.node == node for place in self._pending)

    def has(self, place: Place) -> bool:
        """A part there is asked for by it."""
        return any(share.place == place for share in self.shares)

    def has_launched(self, place: Place) -> bool:
        """True when all committed and staged, and this one's owner has acknowledged the launch."""
        return self.phase in (AttemptPhase.LAUNCHING, AttemptPhase.LAUNCHED) and place not in self._pending

    def undeliverable(self, node: NodeId, command: OwnerCommand, error: str) -> list[Effect]:
        """A command did not reach its owner.  While holding, that is a no; later, time repeats it.

        News of an earlier command (a release, say, whose time-out comes late) says nothing about this attempt.
        """
        if self.phase is not AttemptPhase.HOLDING or self._pending.get(Place(node, command.part)) != command:
            return []
        return self.fail(node, f"{node} cannot be reached: {error}")

    def on_timer(self, now_s: float) -> list[Effect]:
        """Give up a slow decision, or repeat what was not answered (same command id, so harmless)."""
        if self.phase in (AttemptPhase.HOLDING, AttemptPhase.HELD) and now_s >= self._decide_before_s:
            nodes = list(dict.fromkeys(place.node for place in self._pending))
            silent = ", ".join(sorted(nodes)) or "the register"
            return self.fail(next(iter(nodes), None), f"no answer from {silent} in time")
        if now_s < self._resend_s:
            return []
        self._resend_s = now_s + RESEND_S
        return [SendPeer(place.node, command) for place, command in self._pending.items()]

    def abandon(self) -> list[Effect]:
        """Release everywhere; owners refuse this attempt from now on."""
        self.fail(self.refusing_node, self.problem)
        return [SendPeer(share.node, ReleaseRequest(*self._head(), part=share.part)) for share in self.shares]

    def _hold_granted(self, answer: OwnerAnswer, now_s: float) -> list[Effect]:
        self.shares = tuple(
            replace(share, origin=answer.origin) if share.place == answer.place else share for share in self.shares
        )
        share = next(share for share in self.shares if share.place == answer.place)
        if self._is_first_of_group(share):
            self._meetings[share.group] = Meeting(answer.rendezvous_host, answer.rendezvous_port)
        if self._pending:
            return []
        if now_s >= self._decide_before_s:
            return self.fail(None, "the last hold came too late")
        self.phase = AttemptPhase.HELD
        return []

    def _commit_granted(self, answer: OwnerAnswer, now_s: float) -> list[Effect]:
        if answer.is_staged:
            self._unstaged.discard(answer.place)
        return self._launch_when_ready(now_s)

    def _launch_when_ready(self, now_s: float) -> list[Effect]:
        if self.phase not in (AttemptPhase.COMMITTING, AttemptPhase.STAGING) or self._pending:
            return []
        if self._unstaged:
            self.phase = AttemptPhase.STAGING
            return []
        self.phase, self.may_have_run = AttemptPhase.LAUNCHING, True
        return self._send_all(now_s, self._launch_request)

    def fail(self, node: NodeId | None, problem: str) -> list[Effect]:
        """The attempt comes to nothing, because of that node if of any."""
        self.phase, self.problem, self.refusing_node = AttemptPhase.FAILED, problem, node
        self._pending.clear()
        return []

    def _send_all(self, now_s: float, make: RequestMaker) -> list[Effect]:
        self._resend_s = now_s + RESEND_S
        self._pending = {share.place: make(share) for share in self.shares}
        return [SendPeer(place.node, command) for place, command in self._pending.items()]

    def _hold_request(self, share: Share) -> HoldRequest:
        spec = self._record.spec.of_group(share.group)
        wanted = (share.ranks, spec.demand, self._ranking.policy_id, self._ranking.rank_key)
        meets = self._is_first_of_group(share) and not spec.elastic  # its workers meet at one of their own
        limit_s = spec.time_limit_s
        return HoldRequest(*self._head(), *wanted, wants_rendezvous=meets, lasts_s=limit_s, part=share.part)

    def _commit_request(self, share: Share) -> CommitRequest:
        """The order is that of a job which has this group alone, but for the numbers of ranks and where others are."""
        record, meetings = self._record, self.meetings
        by_group = [record.shares]  # which is long for workers that come and go, and read for each of them
        if record.spec.groups:
            by_group = [tuple([each for each in record.shares if each.group == n]) for n in range(len(meetings))]
        places = [
            GroupPlace(name, sum([each.ranks for each in shares]), tuple(ranks_by_node(shares)), meeting)
            for name, shares, meeting in zip(record.spec.group_names, by_group, meetings, strict=False)
        ]
        order = TaskOrder(
            record.job_id,
            record.epoch,
            self.number,
            share.node,
            record.spec.of_group(share.group),
            by_group[share.group],
            meetings[share.group].host,
            meetings[share.group].port,
            configuration=record.configuration,
            version=record.version,
            checkpoint=record.checkpoint,
            global_batch=0 if share.group else record.global_batch,
            part=share.part,
            first_number=record.spec.first_number(share.group),
            groups=tuple(places),
            secret=record.secret,
        )
        return CommitRequest(*self._head(), order, part=share.part)

    def _is_first_of_group(self, share: Share) -> bool:
        return share.place == next(each.place for each in self.shares if each.group == share.group)

    def _launch_request(self, share: Share) -> LaunchRequest:
        return LaunchRequest(*self._head(), part=share.part)

    def _head(self) -> tuple[JobId, int, int, int, NodeId]:
        """What every command begins with, under an id of its own."""
        record = self._record
        return (record.job_id, record.epoch, self.number, next(self._command_ids), record.shepherd)

    def validate(self) -> None:
        """Re-derive what is asked of whom; AssertionError if that cannot be."""
        places, asked = [share.place for share in self.shares], self._pending.items()
        assert len(set(places)) == len(places), "one share a place"
        assert self._pending.keys() | self._unstaged <= set(places), "nobody else is asked"
        assert all((each.job_id, each.attempt) == (self._record.job_id, self.number) for _, each in asked)
        expected = EXPECTED.get(self.phase)
        assert self.phase is AttemptPhase.FAILED or all(type(each) is expected for _, each in asked), self.phase
        is_begun = self.phase in (AttemptPhase.LAUNCHING, AttemptPhase.LAUNCHED)
        assert not is_begun or self.may_have_run, "launched before all owners had committed"
