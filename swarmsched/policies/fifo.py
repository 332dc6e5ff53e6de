"""First in, first out: strict order of priority, submit time and job id; the head of the line blocks all behind it."""

from swarmsched.policies.base import ahead_sentence, in_rank_order, is_waiting, joined, keep, submit_rank_key
from swarmsched.policies.placement import place_in
from swarmsched.policies.reason import shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.view import Action, ClusterView, JobView, Plan, PlanEntry, RankKey


class Fifo:
    """No job starts before one that is ahead of it and waits, even where it would fit."""

    policy_id = "fifo"

    def rank_key(self, job: JobView) -> RankKey:
        """Priority, then submit time in milliseconds."""
        return submit_rank_key(job)

    def refuses_to_make_room(self, victim: JobView, taker_key: RankKey) -> str:
        """Running jobs are never stopped for others."""
        return "the policy fifo does not preempt"

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Start from the head of the line until one does not fit."""
        room = Room(view.nodes)
        ahead: list[JobView] = []
        entries = []
        for key, job in in_rank_order(view.jobs, self.rank_key):
            entries.append(self._entry(job, key, room, ahead) if is_waiting(job) else keep(job, key))
        return Plan(view.version, self.policy_id, tuple(entries))

    def _entry(self, job: JobView, key: RankKey, room: Room, ahead: list[JobView]) -> PlanEntry:
        shares = None if ahead else place_in(room, job)
        if shares is None:
            reason = joined(shortage(job, room), ahead_sentence(ahead))
            ahead.append(job)
            return PlanEntry(job.job_id, Action.WAIT, key, reason)
        reason = start_reason(job, shares)
        room.take(shares, job.demand)
        return PlanEntry(job.job_id, Action.START, key, reason, shares)
