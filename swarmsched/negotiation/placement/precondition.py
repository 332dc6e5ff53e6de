"""Whether a plan's decision can still be followed, by what is known now: each action checks for itself."""

from collections.abc import Sequence

from swarmsched.api import JobState
from swarmsched.estimate import Elastic
from swarmsched.policies.placement import permitted
from swarmsched.policies.room import Room
from swarmsched.resources import Share
from swarmsched.view import Allocation, Change, Decision, JobView


def expected_start_s(place: Sequence[Share], running: Sequence[JobView], now_s: float) -> float:
    """When, by their time limits, all that runs on those nodes has ended, in seconds from now; 0: nobody can say."""
    nodes = {share.node for share in place}
    there = [view for view in running if nodes & {share.node for share in view.shares}]
    if any(not view.card.time_limit_s or view.card.hidden_ranks for view in there):
        return 0.0
    return max((max(0.0, view.card.time_limit_s - view.running_s(now_s)) for view in there), default=0.0)


def cannot_start(decision: Decision, job: JobView, room: Room) -> str:
    """Why a job cannot be started as planned: its own preconditions, checked against what is known now."""
    return cannot_have(decision.target, job) or _taken(decision.target, job, room)


def cannot_have(target: Allocation, job: JobView) -> str:
    """Why an allocation is not one that the job takes."""
    elastic = job.card.elastic or Elastic(job.ranks, job.ranks)
    least, most = elastic.ranks_least, elastic.ranks_most
    if not least <= target.ranks <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        return f"it takes {takes} ranks, and the plan gives it {target.ranks}"
    batches = elastic.batches
    if target.global_batch and not batches.first <= target.global_batch <= batches.most:
        takes = (
            f"it takes global batches of {batches.first} to {batches.most}" if batches.first else "it names no batches"
        )
        return f"{takes}, and the plan gives it one of {target.global_batch}"
    return ""


def cannot_rescale(decision: Decision, job: JobView, room: Room | None, *, is_taker_there: bool) -> str:
    """Why a running job cannot be given other hosts, or more or fewer of them, as planned; without a room, whoever has
    its place."""
    if job.state is not JobState.RUNNING:
        return f"it is {job.state.value}"
    if job.card.elastic is None:
        return "it has not said which sizes it takes, or its present attempt has no checkpoint"
    if decision.change is Change.REBATCH:
        return cannot_have(decision.target, job) or _moved(decision.target, job)
    if decision.target.shares == job.shares:
        return "it has just that"
    if decision.change is not Change.GROW and not is_taker_there:
        return "GPUs are given up to a named job only"
    problem = cannot_have(decision.target, job)
    if problem or room is None:
        return problem
    there = room.copy()
    there.release(job.shares, job.demand)
    return _taken(decision.target, job, there)


def _moved(target: Allocation, job: JobView) -> str:
    return "" if target.shares == job.shares else "its hosts are other ones than in the plan"


def _taken(target: Allocation, job: JobView, room: Room) -> str:
    fits = permitted(room.fits(job.demand), job.card.nodes, job.excluded)
    taken = [share.node for share in target.shares if fits.get(share.node, 0) < share.ranks]
    return f"the plan's place on {', '.join(taken[:3])} is taken" if taken else ""


RESCALES = (Change.GROW, Change.SHRINK, Change.MOVE)


def cannot_change(decision: Decision) -> str:
    """What a plan wants of a running job that nobody can do."""
    if decision.change is Change.STOP and not decision.taker:
        return "jobs make room for a named job only"
    return ""
