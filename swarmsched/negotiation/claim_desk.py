"""One job's claim, while it has one: made, answered, used or given up, and what everybody hears of that."""

from collections.abc import Mapping, Sequence

from swarmsched.effects import Announce, SendPeer
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import OwnerAnswer, PreemptAnswer
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.claiming import Claiming, ClaimPhase
from swarmsched.negotiation.inquiry import Commands
from swarmsched.record import JobRecord
from swarmsched.resources import Share

ClaimEffect = Announce | SendPeer


class ClaimDesk:
    """Acts for one waiting job under one epoch."""

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

    def _moved(self, told: Sequence[SendPeer], record: JobRecord) -> list[ClaimEffect]:
        if self._claiming is None or self._claiming.phase is not ClaimPhase.FAILED:
            return [*told]
        lost = Announce("claim.failed", self._claiming.problem, self._job_id, self._me)
        return [*told, lost, *self.withdraw(record)]
