"""Claims: what an owner keeps for jobs that are next, of what is free and of what comes free.

A claim books nothing.  It is a reason to refuse holds of jobs that rank lower, unless they surely end before the
claim's job is expected to start.  So the biggest gang is not starved by small ones that take each GPU as it comes
free, and what victims of a preemption leave goes to whom it was taken for (`negotiation.claiming`).
"""

import math
from collections.abc import Callable, Iterable

from swarmsched.fields import Value
from swarmsched.ids import JobId
from swarmsched.ledger.message import CLAIM_TTL_S, ClaimRequest, HoldRequest
from swarmsched.resources import Demand, Free, ranks_that_fit, without

CLAIMS_MAX = 64
NEWEST_MAX = 1_024
NEVER = ((0, 0), 0.0)


class Claim(Value):
    """One job's claim here.  Times are seconds on the owner's monotonic clock."""

    request: ClaimRequest
    deadline_s: float
    starts_s: float  # expected start; infinite when nobody knows


class Claims:
    """All claims of one owner, in memory: after a restart they are made again within their renewal."""

    def __init__(self) -> None:
        self._claims: dict[JobId, Claim] = {}
        # The newest command about each job's place, and until when older ones may come late, or once more.
        self._newest: dict[JobId, tuple[tuple[int, int], float]] = {}

    @property
    def next_deadline_s(self) -> float:
        """When the next one lapses; infinite without claims."""
        return min([claim.deadline_s for claim in self._claims.values()]) if self._claims else math.inf

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """Whose claims stand, in the order in which they were first made."""
        return tuple(self._claims)

    def put(self, request: ClaimRequest, now_s: float) -> bool:
        """Take over a claim, or drop the earlier one where it claims no ranks.  False when there is no room for it.

        Late ones and copies change nothing: what was withdrawn already nobody would withdraw again.
        """
        if not self._is_news(request, now_s):
            return True
        if not request.ranks:
            self._claims.pop(request.job_id, None)
            return True
        if request.job_id not in self._claims and len(self._claims) >= CLAIMS_MAX:
            return False
        starts_s = now_s + request.starts_within_s if request.starts_within_s else math.inf
        self._claims[request.job_id] = Claim(request, now_s + request.ttl_s, starts_s)
        return True

    def drop(self, request: HoldRequest, now_s: float) -> None:
        """The job has what it claimed: all that it had claimed before is over."""
        if self._is_news(request, now_s):
            self._claims.pop(request.job_id, None)

    def drop_if(self, is_over: Callable[[ClaimRequest], bool]) -> None:
        """Drop claims that nobody can use or withdraw any more."""
        self._claims = {job_id: claim for job_id, claim in self._claims.items() if not is_over(claim.request)}

    def expire(self, now_s: float) -> bool:
        """Drop what has lapsed; true when something had."""
        lapsed = [job_id for job_id, claim in self._claims.items() if claim.deadline_s <= now_s]
        for job_id in lapsed:
            del self._claims[job_id]
        return bool(lapsed)

    def _is_news(self, request: HoldRequest | ClaimRequest, now_s: float) -> bool:
        """Whether it was sent after all that has come of that job."""
        number = (request.epoch, request.command_id)
        if number <= self._newest.get(request.job_id, NEVER)[0]:
            return False
        self._newest.pop(request.job_id, None)
        self._newest[request.job_id] = (number, now_s + CLAIM_TTL_S)
        while len(self._newest) > NEWEST_MAX or next(iter(self._newest.values()))[1] <= now_s:
            del self._newest[next(iter(self._newest))]
        return True

    def left_for(self, request: HoldRequest | ClaimRequest, free: Free, now_s: float) -> Free:
        """What of the free resources is not kept from that hold or claim by others' claims."""
        for claim in self._standing_against(request, now_s):
            free = _without(free, claim.request.demand, claim.request.ranks)
        return free

    def _standing_against(self, request: HoldRequest | ClaimRequest, now_s: float) -> Iterable[Claim]:
        """Of two jobs that would both give up what they have for a place the first has it, whatever their ranks."""
        is_hold = isinstance(request, HoldRequest)
        lasts_s = request.lasts_s if isinstance(request, HoldRequest) else 0.0
        for job_id, claim in self._claims.items():
            is_over = claim.deadline_s <= now_s
            ends_before = lasts_s > 0.0 and now_s + lasts_s <= claim.starts_s < math.inf
            may_pass = is_hold and (ends_before or _outranks(request, claim.request))
            if job_id != request.job_id and not is_over and not may_pass:
                yield claim


def _outranks(request: HoldRequest | ClaimRequest, claim: ClaimRequest) -> bool:
    """Keys of different policies are not compared: then the claim stands."""
    if request.policy_id != claim.policy_id or not request.rank_key:
        return False
    return (request.rank_key, request.job_id) < (claim.rank_key, claim.job_id)


def _without(free: Free, demand: Demand, ranks: int) -> Free:
    """Less as many ranks as fit: what is claimed and not free yet will come."""
    return without(free, demand, min(ranks, ranks_that_fit(free, demand)))
