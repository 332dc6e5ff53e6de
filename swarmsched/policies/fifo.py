"""First in, first out: strict order of priority, submit time and job id; the head of the line blocks all behind it."""

from swarmsched.card import RankKey
from swarmsched.policies.base import SubmitOrder, ahead_sentence, in_rank_order, is_waiting, joined, keep, start, wait
from swarmsched.policies.placement import place_in
from swarmsched.policies.reason import shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.view import ClusterView, Decision, JobView, Plan


class Fifo(SubmitOrder):
    """No job starts before one that is ahead of it and waits, even where it would fit."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Start from the head of the line until one does not fit."""
        room = Room(view.nodes)
        ahead: list[JobView] = []
        decisions = []
        for key, job in in_rank_order(view.jobs, self, now_s):
            decisions.append(self._decide(job, key, room, ahead) if is_waiting(job) else keep(job, key))
        return Plan(tuple(decisions))

    def _decide(self, job: JobView, key: RankKey, room: Room, ahead: list[JobView]) -> Decision:
        shares = None if ahead else place_in(room, job)
        if shares is None:
            reason = joined(shortage(job, room), ahead_sentence(ahead))
            ahead.append(job)
            return wait(job, key, reason)
        room.take(shares, job.demand)
        return start(job, key, shares, start_reason(job, shares))
