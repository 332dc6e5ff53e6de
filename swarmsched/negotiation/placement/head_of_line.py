"""What a job's place in the queue alone decides, without a plan, under a policy that declares an order."""

import random
from collections.abc import Iterator, Mapping, Sequence

from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.ids import JobId
from swarmsched.negotiation.pacing import BACKOFF_S_MAX
from swarmsched.negotiation.placement.policy_in_force import PolicyInForce
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.placement.wish import Wish
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.told import ClaimUnwanted, ClaimWished
from swarmsched.policies.placement import place_in
from swarmsched.policies.reason import fits_now
from swarmsched.policies.registry import kind_of
from swarmsched.policies.room import Room
from swarmsched.resources import Share
from swarmsched.view import Allocation, Elasticity, JobView, NodeView

WALK_MAX = 400
"""Jobs that one look places or reserves for; those behind them have their turn when these are gone."""
CONTENDERS_MIN = 16
"""So many of the first that fit may hope to be started by a plan, and as many more as devices are free."""


class HeadOfLine:
    """The jobs of one agent that are first in line, or near enough."""

    def __init__(self, cluster: Cluster, shepherds: Shepherds, policy: PolicyInForce, rng: random.Random) -> None:
        self._cluster = cluster
        self._shepherds = shepherds
        self._policy = policy
        self._rng = rng

    def starts(
        self, room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock, *, is_invited: bool
    ) -> Iterator[Wish]:
        """Starts of ours from the head of the queue as long as all ahead fit too; who is invited passes others' jobs.

        Between two of them the room is to be without what the first one took."""
        left, walked = len(mine), 0
        setting = self._policy.setting
        sizes_are_chosen = kind_of(setting).resizes and setting.elasticity is not Elasticity.OFF
        for job in self._policy.queue if self._policy.order is not None else ():
            shepherd = mine.get(job.job_id)
            if shepherd is None and not self._policy.stands(job, clock.now_s):
                continue
            walked += 1
            if sizes_are_chosen and job.card.elastic is not None:
                # With which size it starts, and what that leaves to those behind it, a plan says: unless its place has
                # been kept from all others until it is free.
                if (
                    shepherd is not None
                    and shepherd.claim.stands_in_line
                    and shepherd.pacing.may_try_after_s <= clock.now_s
                ):
                    yield Wish(job.job_id, Allocation(shepherd.claim.place))
                break
            if not left or walked > WALK_MAX or self._shepherds.window.is_full(clock.now_s):
                break
            if shepherd is not None:
                left, job = left - 1, self._shepherds.view_of(shepherd, clock)  # it may avoid other nodes by now
            shares = place_in(room, job, self._rng if shepherd is not None else None)
            pause_s = shepherd.pacing.may_try_after_s - clock.now_s if shepherd is not None else 0.0
            if shares is None and pause_s <= 0.0:
                break
            if shares is None or pause_s > BACKOFF_S_MAX or (shepherd is None and is_invited):
                continue  # it has had its chance, or has none for long
            if shepherd is not None and pause_s <= 0.0:
                yield Wish(job.job_id, Allocation(shares))
            else:
                room.take(shares, job.demand)

    def claim_place(
        self, mine: Mapping[JobId, JobShepherd], nodes: Sequence[NodeView], clock: Clock
    ) -> list[ShepherdEffect]:
        """Have a place kept for a job of ours that is the first in line and has waited for long.

        Without an order nobody is first but in plans: a place kept from the job that they start would keep both out.
        Neither is one kept for a job that takes several sizes where running jobs make room for it: it starts when by a
        plan it makes more of its place than others do, and until then nobody would use that.
        """
        policy, now_s = self._policy, clock.now_s
        is_dealt = kind_of(policy.setting).resizes and policy.setting.elasticity is Elasticity.ON
        others = {job_id: job for job_id, job in mine.items() if not (is_dealt and job_id in self._shepherds.elastic)}
        dealt = [job for job_id, job in mine.items() if job_id not in others and job.claim.stands_in_line]
        effects: list[ShepherdEffect] = [each for job in dealt for each in job.step(ClaimUnwanted(), clock)]
        if policy.order is None or not any(job.is_starving(now_s) and not job.claim.is_open for job in others.values()):
            return effects
        first = next((job for job in policy.queue if job.job_id in mine or policy.stands(job, now_s)), None)
        if kind_of(policy.setting).spares_rigid:  # whose turn it is, and what that may cost others, its plan says
            first = next((job for job in policy.queue if policy.is_drained_for(job.job_id)), None)
        job = others.get(first.job_id) if first is not None else None
        if first is None or job is None or not job.is_starving(now_s) or job.claim.is_open:
            return effects
        place = place_in(Room(nodes).emptied(), first)
        if place is None:
            return effects
        starts_s = expected_start_s(place, [view for view in policy.views(clock) if view.shares], now_s)
        return [*effects, *job.step(ClaimWished(place, {}, policy.ranking(first, now_s), starts_s), clock)]

    def may_be_moved(self, room: Room, waiting: Mapping[JobId, JobShepherd], now_s: float) -> bool:
        """True where a plan could start a job of ours, or stop others for it. That is where one is first, or fits and
        is near, or others may be stopped."""
        if self._policy.order is None:
            return True
        contenders, is_first = 0, True
        limit = CONTENDERS_MIN + 2 * sum(node.free.gpu_count for node in self._cluster.nodes() if node.is_available)
        for job in self._policy.queue:
            shepherd = waiting.get(job.job_id)
            if shepherd is None and not self._policy.stands(job, now_s):
                continue
            does_fit = fits_now(job, room)
            if shepherd is not None and (is_first or (does_fit and shepherd.pacing.may_try_after_s <= now_s)):
                return True
            is_first = False
            contenders += does_fit
            if contenders > limit:
                break
        return bool(waiting) and kind_of(self._policy.setting).spares_rigid and self._policy.has_stoppable


def expected_start_s(place: Sequence[Share], running: Sequence[JobView], now_s: float) -> float:
    """When, by their time limits, all that runs on those nodes has ended, in seconds from now; 0: nobody can say."""
    nodes = {share.node for share in place}
    there = [view for view in running if nodes & {share.node for share in view.shares}]
    if any(not view.card.time_limit_s or view.card.hidden_ranks for view in there):
        return 0.0
    return max((max(0.0, view.card.time_limit_s - view.running_s(now_s)) for view in there), default=0.0)
