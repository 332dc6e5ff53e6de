"""How a job that does not fit gets its place: a claim on what comes free, and, where the policy says so, victims.

A claim alone keeps the first in line from being starved.  With victims it is a preemption, planned for the whole gang:
first every owner keeps the GPUs for the taker, then every victim's shepherd is asked, and only when all have said yes
are they told to stop; nobody is stopped for a gang that cannot run afterwards.  Each victim is stopped by its own
shepherd, with its own grace (docs/explanation/protocol.md, plane D).
"""

from collections.abc import Collection, Mapping
from enum import Enum

from swarmsched.effects import Announce, SendPeer
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import CLAIM_TTL_S, ClaimRequest, OwnerAnswer, PreemptAnswer, PreemptRequest, Refusal
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.inquiry import Commands
from swarmsched.record import JobRecord
from swarmsched.resources import Share, ranks_by_node, together

ANSWER_S = 3.0
ORDER_AGAIN_S = 2.0
CLEARED_S = 10.0  # after they have left: what is not free by then others have
ORDER_TTL_S = 10.0  # with victims it is renewed as often as they are told: what nobody withdraws lapses soon
RENEW_S = CLAIM_TTL_S / 3.0
PATIENCE_BEYOND_GRACE_S = 30.0
NOWHERE = NodeId("")
ClaimEffect = Announce | SendPeer
Shares = tuple[Share, ...]
Victims = Mapping[JobId, NodeId]
"""Jobs that are to make room, with the shepherd of each."""


class ClaimPhase(Enum):
    """How far it has come."""

    NONE = "none"  # no place is wanted
    CLAIMING = "claiming"
    ASKING = "asking"  # all owners keep the place; would the victims make room?
    ORDERED = "ordered"  # they were told to
    STANDING = "standing"  # a claim without victims, renewed while the job waits


class Claiming:
    """The claim of one waiting job under one epoch, while it has one; volatile, since a claim lapses by itself."""

    def __init__(self, me: NodeId, commands: Commands) -> None:
        self._me = me
        self._commands = commands
        self._phase = ClaimPhase.NONE
        self._shares: Shares = ()
        self._victims: Victims = {}
        self._ranking = Ranking("", ())
        self._starts_within_s = 0.0
        self._must_be_free = False
        self._claims: dict[NodeId, ClaimRequest] = {}  # unanswered
        self._questions: dict[JobId, PreemptRequest] = {}  # unanswered
        self._again_s = self._give_up_s = float("inf")

    @property
    def is_open(self) -> bool:
        """A place is being kept."""
        return self._phase is not ClaimPhase.NONE

    @property
    def place(self) -> Shares:
        """The place that is wanted; empty where none is."""
        return self._shares

    @property
    def victims(self) -> Collection[JobId]:
        """Who is to make room, if anybody."""
        return self._victims if self.is_open else ()

    @property
    def is_kept(self) -> bool:
        """Every owner has said that it keeps the place, which needs no victims."""
        return self._phase is ClaimPhase.STANDING

    @property
    def stands_in_line(self) -> bool:
        """The place is kept until all of it is free, for as long as the job waits."""
        return self.is_kept and not self._must_be_free

    @property
    def next_deadline_s(self) -> float:
        """When to repeat, to renew or to give up."""
        return min(self._again_s, self._give_up_s) if self.is_open else float("inf")

    def make(
        self,
        record: JobRecord,
        shares: Shares,
        victims: Victims,
        ranking: Ranking,
        starts_within_s: float,
        now_s: float,
    ) -> list[ClaimEffect]:
        """Have every owner keep these places; once all do, have the victims make room."""
        self._begin(shares, ranking, now_s)
        self._victims, self._starts_within_s = victims, starts_within_s
        where = ", ".join(f"{node} ({ranks})" for node, ranks in ranks_by_node(shares).items())
        text = f"claims {where}" + (f"; to make room: {', '.join(victims)}" if victims else "")
        claimed = Announce("claim.made", text, record.job_id, self._me, {"victims": len(victims)})
        return [claimed, *self._claim(record)]

    def keep(self, record: JobRecord, shares: Shares, ranking: Ranking, now_s: float) -> list[ClaimEffect]:
        """Have every owner keep these places if they are free now: a job that runs is to go on there."""
        self._begin(shares, ranking, now_s)
        self._must_be_free = True
        return self._claim(record)

    def _begin(self, shares: Shares, ranking: Ranking, now_s: float) -> None:
        self._phase, self._shares, self._victims = ClaimPhase.CLAIMING, shares, {}
        self._ranking, self._starts_within_s, self._must_be_free, self._questions = ranking, 0.0, False, {}
        self._give_up_s, self._again_s = now_s + ANSWER_S, now_s + RENEW_S

    def owner_answered(self, answer: OwnerAnswer, record: JobRecord, now_s: float) -> list[ClaimEffect]:
        """An owner keeps it, or not.  Empty for an answer that moves nothing here: it may be one to something else."""
        claim = self._claims.get(answer.owner)
        if claim is None or claim.command_id != answer.command_id:
            return []
        del self._claims[answer.owner]
        if answer.refusal is not Refusal.NONE:
            return self.give_up(record, f"{answer.owner} keeps nothing: {answer.detail or answer.refusal.value}")
        if self._claims or self._phase is not ClaimPhase.CLAIMING:
            return []
        if not self._victims:
            patience_s = PATIENCE_BEYOND_GRACE_S + record.spec.grace_s if self._must_be_free else float("inf")
            self._phase, self._give_up_s = ClaimPhase.STANDING, now_s + patience_s
            return []
        self._phase, self._give_up_s = ClaimPhase.ASKING, now_s + ANSWER_S
        return self._ask_victims(record, is_decided=False)

    def victim_answered(self, answer: PreemptAnswer, record: JobRecord, now_s: float) -> list[ClaimEffect]:
        """A victim's shepherd has spoken; when the last one says yes, all are told to make room."""
        question = self._questions.get(answer.job_id)
        if question is None or question.command_id != answer.command_id:
            return []
        del self._questions[answer.job_id]
        if self._phase is ClaimPhase.ORDERED:
            return []
        if not answer.is_granted:
            return self.give_up(record, f"{answer.job_id} does not make room: {answer.detail}")
        if self._questions:
            return []
        self._phase = ClaimPhase.ORDERED
        self._give_up_s = now_s + PATIENCE_BEYOND_GRACE_S + record.spec.grace_s
        self._again_s = now_s + ORDER_AGAIN_S
        return self._ask_victims(record, is_decided=True)

    def cleared(self, now_s: float) -> None:
        """All that were to make room have left."""
        self._give_up_s = min(self._give_up_s, now_s + CLEARED_S)

    def on_timer(self, record: JobRecord, now_s: float) -> list[ClaimEffect]:
        """Repeat orders, renew the claim, or give up, as far as it is due."""
        if now_s < self.next_deadline_s:
            return []
        if now_s >= self._give_up_s:
            return self.give_up(record, "the place did not come free in time")
        if self._phase is ClaimPhase.STANDING and self._claims:
            silent = ", ".join(self._claims)
            return self.give_up(record, f"{silent} has not said for {RENEW_S:g} s that it keeps its part")
        is_ordered = self._phase is ClaimPhase.ORDERED
        self._again_s = now_s + (ORDER_AGAIN_S if is_ordered else RENEW_S)
        repeated = [SendPeer(self._victims[job_id], question) for job_id, question in self._questions.items()]
        return [*(repeated if is_ordered else []), *self._claim(record)]

    def used(self, shares: Shares, record: JobRecord) -> list[ClaimEffect]:
        """The job has its place, perhaps the one that was kept for it; nothing more need be kept."""
        kept, taken = ranks_by_node(self._shares), ranks_by_node(shares)
        used = [node for node in taken if node in kept]
        text = f"took the place that was kept for it on {', '.join(used)}"
        return [*([Announce("claim.used", text, record.job_id, self._me)] if used else []), *self.withdraw(record)]

    def give_up(self, record: JobRecord, problem: str) -> list[ClaimEffect]:
        """No place can be had, or is wanted any more, and people hear why."""
        return [Announce("claim.failed", problem, record.job_id, self._me), *self.withdraw(record)]

    def withdraw(self, record: JobRecord) -> list[ClaimEffect]:
        """No place is wanted any more."""
        shares, self._shares, self._phase = self._shares, (), ClaimPhase.NONE
        self._claims, self._questions = {}, {}
        return [SendPeer(node, self._claim_request(record)) for node in ranks_by_node(shares)]

    def validate(self) -> None:
        """Re-derive what is asked of whom."""
        assert self.is_open == bool(self._shares), "a place is kept that nobody wants"
        assert self._claims.keys() <= ranks_by_node(self._shares).keys()
        assert self._questions.keys() <= self._victims.keys()
        assert not self._questions or self._phase is not ClaimPhase.CLAIMING, "victims are asked once the place is kept"
        assert self._phase is not ClaimPhase.STANDING or not self._victims
        assert self._phase is not ClaimPhase.CLAIMING or self._claims, "somebody has yet to say that it keeps the place"

    def _claim(self, record: JobRecord) -> list[ClaimEffect]:
        self._claims = {node: self._claim_request(record, node) for node in ranks_by_node(self._shares)}
        return [SendPeer(node, claim) for node, claim in self._claims.items()]

    def _claim_request(self, record: JobRecord, node: NodeId = NOWHERE) -> ClaimRequest:
        """For all that is to be kept on a node; on none, that nothing is any more."""
        numbers = (record.job_id, record.epoch, record.attempt, next(self._commands.ids))
        ranks, demand = together([share for share in self._shares if share.node == node], record.spec.needs)
        wanted = (ranks, demand, self._ranking.policy_id, self._ranking.rank_key)
        must_be_free = self._must_be_free and bool(ranks)
        times = (record.submitted_utc_s, self._starts_within_s, ORDER_TTL_S if self._victims else CLAIM_TTL_S)
        return ClaimRequest(*numbers, record.shepherd, *wanted, *times, must_be_free=must_be_free)

    def _ask_victims(self, record: JobRecord, *, is_decided: bool) -> list[ClaimEffect]:
        taker = (record.job_id, record.shepherd, self._ranking.policy_id, self._ranking.rank_key, is_decided)
        self._questions = {each: PreemptRequest(each, next(self._commands.ids), *taker) for each in self._victims}
        return [SendPeer(self._victims[victim], question) for victim, question in self._questions.items()]
