"""Least attained service in two dimensions, GPUs x time (Tiresias, Gu et al., NSDI 2019, section 3.2).

Jobs sit in K classes by the GPU-seconds that they have had; lower classes run first, and within one those that ran
before precede those that never did, each by time.  A waiting job moves back to the first class once it has waited
`promote_knob` times as long as it ran (the paper's STARVELIMIT).  Since a policy has no memory the promotion lasts
while the job waits, and its counters are not reset as they are in the paper.

A waiting job may take the place of running ones of a higher class (or a lower priority), never of its own: within a
class the paper runs jobs to the end of their quantum too.  Beyond the paper a job is protected for a while after each
start, and from being stopped ever again; an operator's priority overrides the latter.  Both are parameters.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import RankKey
from swarmsched.ids import JobId, handle
from swarmsched.policies.attained_service import AttainedServiceOrder
from swarmsched.policies.base import ahead_sentence, in_rank_order, is_waiting, joined, keep, start, wait
from swarmsched.policies.placement import place_in
from swarmsched.policies.preemption import choose_victims
from swarmsched.policies.reason import shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.resources import demand_of
from swarmsched.view import Allocation, Change, ClusterView, Decision, JobView, Plan


class LeastAttainedService(AttainedServiceOrder):
    """Tiresias' order without knowledge of durations; jobs that do not fit are passed by smaller ones."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """One pass through the classes: whatever fits starts; the first that does not may take the place of others."""
        room = Room(view.nodes)
        ranked = in_rank_order(view.jobs, self, now_s)
        ahead: list[JobView] = []
        decisions: dict[JobId, Decision] = {}
        stops: list[Decision] = []
        for key, job in ranked:
            if not is_waiting(job):
                decisions[job.job_id] = keep(job, key)
                continue
            decision = self._decide(job, key, room, ahead, now_s)
            if decision.change is Change.WAIT and len(ahead) == 1:
                decision, stops = self._make_room(decision, job, room, [job for _, job in ranked], now_s)
            decisions[job.job_id] = decision
        decisions.update({stop.job_id: stop for stop in stops})
        return Plan(tuple(decisions.values()))

    def _make_room(
        self, decision: Decision, taker: JobView, room: Room, ranked: Sequence[JobView], now_s: float
    ) -> tuple[Decision, list[Decision]]:
        """For one job a plan: whoever waits behind it gets its turn when this one has its place.

        What a job would leave must be known in whole: else too many are stopped, or in vain.
        """
        candidates = [
            job
            for job in reversed(ranked)
            if job.state is JobState.RUNNING
            and not job.card.hidden_ranks
            and not self.refuses_to_make_room(job, decision.rank_key, now_s)
        ]
        found = choose_victims(taker, room, candidates) if candidates else None
        if found is None:
            return decision, []
        shares, victims = found
        for share in shares:  # nobody behind it starts there
            held = room.fits(demand_of(taker.demand, share.group)).get(share.node, 0)
            if taken := min(share.ranks, held):
                room.take([replace(share, ranks=taken)], taker.demand)
        names = ", ".join(handle(job.job_id) for job in victims)
        told = replace(decision, reason=joined(decision.reason, f"{names} will make room"), target=Allocation(shares))
        return told, [self._stop(job, taker, now_s) for job in victims]

    def _stop(self, job: JobView, taker: JobView, now_s: float) -> Decision:
        reason = f"makes room for {handle(taker.job_id)}"
        key = self.rank_key(job, now_s)
        return Decision(job.job_id, Change.STOP, reason, taker=taker.job_id, rank_key=key)

    def _decide(self, job: JobView, key: RankKey, room: Room, ahead: list[JobView], now_s: float) -> Decision:
        shares = place_in(room, job)
        attained_gpu_s = job.attained_gpu_s(now_s)
        service = f"class {key[1] + 1} of {len(self.thresholds) + 1} with {attained_gpu_s:.0f} GPU-seconds"
        if shares is None:
            reason = joined(shortage(job, room), service, ahead_sentence(ahead))
            ahead.append(job)
            return wait(job, key, reason)
        room.take(shares, job.demand)
        return start(job, key, shares, joined(start_reason(job, shares), service))
