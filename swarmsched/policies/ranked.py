"""The pass that preemptive policies share: GPUs are dealt down a ranking, and who ranks too low makes room.

Whatever fits runs, smaller jobs past larger ones that do not; a job that runs and whose place nobody before it needs
keeps it.  As in the simulator of the Tiresias authors (NSDI 2019).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from swarmsched.api import JobState
from swarmsched.ids import JobId, handle
from swarmsched.policies.base import ahead_sentence, joined, keep, taker_of, wait
from swarmsched.policies.placement import place_in, start_or_claim, take_if_there
from swarmsched.policies.reason import shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.resources import Share
from swarmsched.view import Allocation, Change, ClusterView, Decision, JobView

Places = Mapping[JobId, tuple[Share, ...]]


def dealt(
    view: ClusterView,
    ranking: Iterable[tuple[JobView, str]],
    may_be_stopped: Callable[[JobView], bool] = lambda _: True,
) -> tuple[Decision, ...]:
    """Decisions for all jobs of a ranking, the first to run first, each with what its policy says of it."""
    ranked = list(ranking)
    places = _places(view, [job for job, _ in ranked], may_be_stopped)
    now, room = Room(view.nodes), Room(view.nodes)
    stopped = [job for job, _ in ranked if job.shares and job.job_id not in places]
    for job in stopped:
        room.release(job.shares, job.demand)
    begun: dict[JobId, Decision] = {}
    for job, why in ranked:
        if job.state is JobState.QUEUED and (shares := places.get(job.job_id)):
            reason = joined(start_reason(job, shares), why)
            begun[job.job_id] = start_or_claim(job, Allocation(shares), now, reason)
    taker = taker_of(begun.values())
    decisions: list[Decision] = []
    ahead: list[JobView] = []
    for job, why in ranked:
        if job.state is not JobState.QUEUED:
            decisions.append(keep(job, ()) if job.job_id in places else _stop(job, taker, why))
        elif job.job_id in begun:
            decisions.append(begun[job.job_id])
        else:
            decisions.append(wait(job, (), joined(shortage(job, room), why, ahead_sentence(ahead))))
            ahead.append(job)
    return tuple(decisions)


def _places(
    view: ClusterView, ranked: Sequence[JobView], may_be_stopped: Callable[[JobView], bool]
) -> dict[JobId, tuple[Share, ...]]:
    """Who runs from now on, and where: on what is free now if possible, else on what lower ones would leave."""
    now, then = Room(view.nodes), Room(view.nodes)
    places = {
        job.job_id: job.shares for job in ranked if not may_move(job, now) or (job.shares and not may_be_stopped(job))
    }
    for job in ranked:
        if job.job_id not in places:
            then.release(job.shares, job.demand)
    for job in ranked:
        if job.job_id in places:
            continue
        if job.shares:
            if take_if_there(then, job.shares, job.demand):
                places[job.job_id] = job.shares
            continue
        shares = place_in(now, job)
        if shares and take_if_there(then, shares, job.demand):
            now.take(shares, job.demand)
        elif shares := place_in(then, job):
            then.take(shares, job.demand)
        if shares:
            places[job.job_id] = shares
    return places


def may_move(job: JobView, room: Room) -> bool:
    """True where a plan may move a job. Starting and stopping ones are decided on elsewhere; of one whose card names
    only a part of what it holds, or that is on a node that is not available, nobody knows what it would leave."""
    is_known = not job.card.hidden_ranks and room.has(job.shares)
    return job.state is JobState.QUEUED or (job.state is JobState.RUNNING and is_known)


def _stop(job: JobView, taker: str, why: str) -> Decision:
    whom = f"makes room for {handle(JobId(taker))}" if taker else "makes room"
    return Decision(job.job_id, Change.STOP, joined(whom, why), taker=taker)
