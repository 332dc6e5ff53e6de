"""How a job that does not fit gets its place: a claim on what comes free, and, where the policy says so, victims.

A claim alone keeps the first in line from being starved.  With victims it is a preemption, planned for the whole gang:
first every owner keeps the GPUs for the taker, then every victim's shepherd is asked, and only when all have said yes
are they told to stop; nobody is stopped for a gang that cannot run afterwards.  Each victim is stopped by its own
shepherd, with its own grace (protocol notes, section 5).
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from swarmsched.effects import Announce, SendPeer
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import CLAIM_TTL_S, ClaimRequest, OwnerAnswer, PreemptAnswer, PreemptRequest, Refusal
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.inquiry import Commands
from swarmsched.record import JobRecord
from swarmsched.resources import Share

ANSWER_S = 3.0
ORDER_AGAIN_S = 2.0
RENEW_S = CLAIM_TTL_S / 3.0
PATIENCE_BEYOND_GRACE_S = 30.0
ClaimEffect = Announce | SendPeer


class ClaimPhase(Enum):
    """How far it has come."""

    CLAIMING = "claiming"
    ASKING = "asking"  # all owners keep the place; would the victims make room?
    ORDERED = "ordered"  # they were told to
    STANDING = "standing"  # a claim without victims, renewed while the job waits
    FAILED = "failed"


class Claiming:
    """One claim of one waiting job; volatile, since a claim lapses by itself."""

    def __init__(
        self,
        shares: tuple[Share, ...],
        victims: Mapping[JobId, NodeId],
        ranking: Ranking,
        starts_within_s: float,
        commands: Commands,
    ) -> None:
        self.shares = shares
        self.victims = victims  # with the shepherd of each
        self.phase = ClaimPhase.CLAIMING
        self.problem = ""
        self._ranking = ranking
        self._starts_within_s = starts_within_s
        self._commands = commands
        self._claims: dict[NodeId, ClaimRequest] = {}  # unanswered
        self._questions: dict[JobId, PreemptRequest] = {}  # unanswered
        self._again_s = self._give_up_s = float("inf")

    @property
    def next_deadline_s(self) -> float:
        """When to repeat, to renew or to give up."""
        return float("inf") if self.phase is ClaimPhase.FAILED else min(self._again_s, self._give_up_s)

    def begin(self, record: JobRecord, now_s: float) -> list[SendPeer]:
        """Ask every owner to keep the place."""
        self._give_up_s = now_s + ANSWER_S
        self._again_s = now_s + RENEW_S
        return self._claim(record)

    def owner_answered(self, answer: OwnerAnswer, record: JobRecord, now_s: float) -> list[SendPeer]:
        """An owner keeps it, or not."""
        claim = self._claims.get(answer.owner)
        if claim is None or claim.command_id != answer.command_id:
            return []
        del self._claims[answer.owner]
        if answer.refusal is not Refusal.NONE:
            self._fail(f"{answer.owner} keeps nothing: {answer.detail or answer.refusal.value}")
            return []
        if self._claims or self.phase is not ClaimPhase.CLAIMING:
            return []
        if not self.victims:
            self.phase, self._give_up_s = ClaimPhase.STANDING, float("inf")
            return []
        self.phase, self._give_up_s = ClaimPhase.ASKING, now_s + ANSWER_S
        return self._ask_victims(record, is_decided=False)

    def victim_answered(self, answer: PreemptAnswer, record: JobRecord, now_s: float) -> list[SendPeer]:
        """A victim's shepherd has spoken; when the last one says yes, all are told to make room."""
        question = self._questions.get(answer.job_id)
        if question is None or question.command_id != answer.command_id:
            return []
        del self._questions[answer.job_id]
        if self.phase is ClaimPhase.ORDERED:
            return []
        if not answer.is_granted:
            self._fail(f"{answer.job_id} does not make room: {answer.detail}")
            return []
        if self._questions:
            return []
        self.phase = ClaimPhase.ORDERED
        self._give_up_s = now_s + PATIENCE_BEYOND_GRACE_S + record.spec.grace_s
        self._again_s = now_s + ORDER_AGAIN_S
        return self._ask_victims(record, is_decided=True)

    def on_timer(self, record: JobRecord, now_s: float) -> list[SendPeer]:
        """Repeat orders, renew the claim, or give up."""
        if now_s >= self._give_up_s:
            self._fail("the place did not come free in time")
            return []
        if now_s < self._again_s:
            return []
        if self.phase is ClaimPhase.STANDING and self._claims:
            self._fail(f"{', '.join(self._claims)} has not said for {RENEW_S:g} s that it keeps its part")
            return []
        is_ordered = self.phase is ClaimPhase.ORDERED
        self._again_s = now_s + (ORDER_AGAIN_S if is_ordered else RENEW_S)
        repeated = [SendPeer(self.victims[job_id], question) for job_id, question in self._questions.items()]
        return [*(repeated if is_ordered else []), *self._claim(record)]

    def withdraw(self, record: JobRecord) -> list[SendPeer]:
        """The job has its place, or wants none any more."""
        self.phase = ClaimPhase.FAILED
        return [SendPeer(share.node, self._claim_request(record, 0)) for share in self.shares]

    def validate(self) -> None:
        """Re-derive what is asked of whom."""
        assert self._claims.keys() <= {share.node for share in self.shares}
        assert self._questions.keys() <= self.victims.keys()
        assert not self._questions or self.phase is not ClaimPhase.CLAIMING, "victims are asked once the place is kept"
        assert self.phase is not ClaimPhase.STANDING or not self.victims
        assert self.phase is not ClaimPhase.CLAIMING or self._claims, "somebody has yet to say that it keeps the place"

    def _claim(self, record: JobRecord) -> list[SendPeer]:
        self._claims = {share.node: self._claim_request(record, share.ranks) for share in self.shares}
        return [SendPeer(node, claim) for node, claim in self._claims.items()]

    def _claim_request(self, record: JobRecord, ranks: int) -> ClaimRequest:
        return ClaimRequest(
            job_id=record.job_id,
            epoch=record.epoch,
            attempt=record.attempt,
            command_id=next(self._commands.ids),
            shepherd=record.shepherd,
            ranks=ranks,
            demand=record.spec.demand,
            policy_id=self._ranking.policy_id,
            rank_key=self._ranking.rank_key,
            submitted_utc_s=record.submitted_utc_s,
            starts_within_s=self._starts_within_s,
        )

    def _ask_victims(self, record: JobRecord, *, is_decided: bool) -> list[SendPeer]:
        self._questions = {
            victim: PreemptRequest(
                victim,
                next(self._commands.ids),
                record.job_id,
                record.shepherd,
                self._ranking.policy_id,
                self._ranking.rank_key,
                is_decided,
            )
            for victim in self.victims
        }
        return [SendPeer(self.victims[victim], question) for victim, question in self._questions.items()]

    def _fail(self, problem: str) -> None:
        self.phase, self.problem = ClaimPhase.FAILED, problem


class ClaimDesk:
    """The claim of one waiting job under one epoch, while it has one, and what everybody hears of it."""

    def __init__(self, job_id: JobId, me: NodeId, commands: Commands) -> None:
        self._job_id, self._me, self._commands = job_id, me, commands
        self._claiming: Claiming | None = None

    @property
    def is_open(self) -> bool:
        """A place is being kept."""
        return self._claiming is not None

    @property
    def next_deadline_s(self) -> float:
        """When `on_timer` has something to do."""
        return self._claiming.next_deadline_s if self._claiming else float("inf")

    def make(
        self,
        record: JobRecord,
        shares: tuple[Share, ...],
        victims: Mapping[JobId, NodeId],
        ranking: Ranking,
        starts_within_s: float,
        now_s: float,
    ) -> list[ClaimEffect]:
        """Have these places kept, and have the victims make room."""
        self._claiming = Claiming(shares, victims, ranking, starts_within_s, self._commands)
        where = ", ".join(f"{share.node} ({share.ranks})" for share in shares)
        text = f"claims {where}" + (f"; to make room: {', '.join(victims)}" if victims else "")
        claimed = Announce("claim.made", text, self._job_id, self._me, {"victims": len(victims)})
        return [claimed, *self._claiming.begin(record, now_s)]

    def owner_answered(self, answer: OwnerAnswer, record: JobRecord, now_s: float) -> list[ClaimEffect]:
        """Empty for an answer that moves nothing here: it may be one to something else."""
        if self._claiming is None:
            return []
        return self._moved(self._claiming.owner_answered(answer, record, now_s), record)

    def victim_answered(self, answer: PreemptAnswer, record: JobRecord, now_s: float) -> list[ClaimEffect]:
        """The shepherd of a job that should make room."""
        if self._claiming is None:
            return []
        return self._moved(self._claiming.victim_answered(answer, record, now_s), record)

    def on_timer(self, record: JobRecord, now_s: float) -> list[ClaimEffect]:
        """Repeat, renew or give up what is due."""
        if self._claiming is None or now_s < self._claiming.next_deadline_s:
            return []
        return self._moved(self._claiming.on_timer(record, now_s), record)

    def used(self, shares: tuple[Share, ...], record: JobRecord) -> list[ClaimEffect]:
        """The job has its place, perhaps the one that was kept for it; nothing more need be kept."""
        kept = {share.node for share in self._claiming.shares} if self._claiming is not None else set()
        used = [share.node for share in shares if share.node in kept]
        text = f"took the place that was kept for it on {', '.join(used)}"
        return [*([Announce("claim.used", text, self._job_id, self._me)] if used else []), *self.withdraw(record)]

    def withdraw(self, record: JobRecord) -> list[ClaimEffect]:
        """No place is wanted any more."""
        claiming, self._claiming = self._claiming, None
        return [] if claiming is None else [*claiming.withdraw(record)]

    def validate(self) -> None:
        """A claim that has failed is given up in the same step."""
        if self._claiming is not None:
            assert self._claiming.phase is not ClaimPhase.FAILED, self._claiming.problem
            self._claiming.validate()

    def _moved(self, told: Sequence[SendPeer], record: JobRecord) -> list[ClaimEffect]:
        if self._claiming is None or self._claiming.phase is not ClaimPhase.FAILED:
            return [*told]
        lost = Announce("claim.failed", self._claiming.problem, self._job_id, self._me)
        return [*told, lost, *self.withdraw(record)]
