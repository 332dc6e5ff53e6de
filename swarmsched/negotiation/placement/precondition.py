"""Whether a plan's decision can still be followed, by what is known now: each action checks for itself."""

from collections.abc import Collection, Sequence

from swarmsched.policies.placement import permitted
from swarmsched.policies.room import Room
from swarmsched.resources import Share
from swarmsched.view import Change, Decision, JobView


def expected_start_s(place: Sequence[Share], running: Sequence[JobView], now_s: float) -> float:
    """When, by their time limits, all that runs on those nodes has ended, in seconds from now; 0: nobody can say."""
    nodes = {share.node for share in place}
    there = [view for view in running if nodes & {share.node for share in view.shares}]
    if any(not view.card.time_limit_s or view.card.hidden_ranks for view in there):
        return 0.0
    return max((max(0.0, view.card.time_limit_s - view.running_s(now_s)) for view in there), default=0.0)


def cannot_start(decision: Decision, job: JobView, room: Room) -> str:
    """Why a job cannot be started as planned: its own preconditions, checked against what is known now."""
    target = decision.target
    if target.ranks != job.ranks:
        return f"it takes {job.ranks} ranks, and the plan gives it {target.ranks}"
    if target.global_batch:
        return f"nothing can tell it to train with a global batch of {target.global_batch}"
    fits = permitted(room.fits(job.demand), job.card.nodes, job.excluded)
    taken = [share.node for share in target.shares if fits.get(share.node, 0) < share.ranks]
    return f"the plan's place on {', '.join(taken[:3])} is taken" if taken else ""


_UNCHANGEABLE: Collection[Change] = (Change.GROW, Change.SHRINK, Change.MOVE, Change.REBATCH)


def cannot_change(decision: Decision) -> str:
    """What a plan wants of a running job that nobody can do: none changes its size, hosts or batch while it runs."""
    if decision.change in _UNCHANGEABLE:
        return "it keeps its size, its hosts and its batch while it runs"
    if decision.change is Change.STOP and not decision.taker:
        return "jobs make room for a named job only"
    return ""
