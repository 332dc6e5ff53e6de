"""Wishes for jobs of ours, and the one that carries them out, whoever has them.

Five have wishes: a kept place (a job that was ended to go on there), the order (`head_of_line`), plans
(`plan_follower`), people (`asked`) and workers that had better leave (`relief`).  Each says what a job is to have; what
stands against that by now is checked here alone, and so is the room that it takes from the next wish of the same look.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from swarmsched.api import JobState
from swarmsched.clock import Clock
from swarmsched.commands import Refused
from swarmsched.estimate import Resizable
from swarmsched.fields import Value
from swarmsched.ids import JobId
from swarmsched.negotiation.placement.policy_in_force import PolicyInForce
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.regrouping import holds_off
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.told import BatchWished, ChangeWished, StartWished
from swarmsched.policies.placement import is_there, permitted
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import Share, of_first, of_others, ranks_by_node
from swarmsched.view import Allocation, JobView


class Wish(Value):
    """What a job of ours is to have: one that waits starts with it, one that runs goes on with it."""

    job_id: JobId
    target: Allocation
    why: str = ""
    leave: tuple[int, ...] = ()  # parts of its gang that go first of all
    spared_s: float = 0.0  # for so long newcomers are not called slow


class Obstacle(Enum):
    """What stands against a wish."""

    NONE = "none"
    TIME = "time"  # something else is under way, or it is too soon after a failure
    PLACE = "place"  # others have it
    JOB = "job"  # the job does not take that


class Outcome(NamedTuple):
    """What became of a wish, and why nothing did."""

    effects: Sequence[ShepherdEffect] = ()
    obstacle: Obstacle = Obstacle.NONE
    problem: str = ""


UNSTEADY = Refused("conflict", "another change of the job is under way", "ask again in a moment")


class Carrier:
    """Carries out wishes for the jobs of one agent."""

    def __init__(self, shepherds: Shepherds, policy: PolicyInForce) -> None:
        self._shepherds = shepherds
        self._policy = policy

    def carry_out(self, wish: Wish, room: Room, clock: Clock) -> Outcome:
        """Start or change the job, and take what it gets from the room; or say what stands against it."""
        job, target = self._shepherds.jobs[wish.job_id], wish.target
        view = self._shepherds.view_of(job, clock)
        obstacle, problem = self._obstacle(wish, job, view, room, clock.now_s)
        if obstacle is not Obstacle.NONE:
            return Outcome((), obstacle, problem)
        if view.shares and not _is_other(wish, view):
            return Outcome(job.step(BatchWished(target.global_batch, wish.why), clock))
        room.take(_more(wish, job, view), view.demand)
        ranking = self._policy.ranking(view, clock.now_s)
        if not view.shares:
            return Outcome(job.step(StartWished(target.shares, ranking, target.global_batch), clock))
        return Outcome(job.step(ChangeWished(target, wish.why, ranking, wish.leave, wish.spared_s), clock))

    def _obstacle(self, wish: Wish, job: JobShepherd, view: JobView, room: Room, now_s: float) -> tuple[Obstacle, str]:
        target, is_placed = wish.target, bool(view.shares)
        is_other = _is_other(wish, view)
        busy = cannot_change(job) if is_placed and is_other else None
        if busy is not None or not (is_placed or job.is_waiting) or job.is_writing:
            return Obstacle.TIME, busy.problem if busy is not None else f"it is {view.state.value}"
        if is_placed and holds_off(job, target, now_s, wish.leave):
            return Obstacle.TIME, "those that joined it last, or members of it, have just failed"
        problem = _cannot_have(target, view)
        if problem:
            return Obstacle.JOB, problem
        if is_placed and not is_other and target.global_batch == job.decided.global_batch:
            return Obstacle.JOB, "it has just that"
        fits = permitted(room.fits(view.demand), view.card.nodes, view.excluded)
        more = _more(wish, job, view)
        taken = [each.node for each in of_first(more) if fits.get(each.node, 0) < each.ranks]
        if not taken and not is_there(room, more, view.demand):
            taken = [each.node for each in of_others(more)]
        return (Obstacle.PLACE, f"the place on {', '.join(taken[:3])} is taken") if taken else (Obstacle.NONE, "")


def cannot_change(job: JobShepherd) -> Refused | None:
    """Why a job that has a place cannot be sent to another one, or have more or less of it, now."""
    return cannot_pause(job.record) or (None if job.is_steady else UNSTEADY)


def cannot_pause(record: JobRecord) -> Refused | None:
    """Why a job could not go on elsewhere."""
    if record.state is not JobState.RUNNING:
        return Refused("conflict", f"the job is {record.state.value}", "ask again once it runs")
    if not record.has_own_checkpoint and not record.spec.elastic:
        problem = "its present attempt has committed no checkpoint, so that it would begin anew elsewhere"
        return Refused("conflict", problem, "ask again after its next checkpoint, or cancel it and submit it again")
    return None


def _cannot_have(target: Allocation, job: JobView) -> str:
    """Why an allocation is not one that the job takes."""
    elastic = job.card.elastic or Resizable(job.ranks, job.ranks)
    least, most = elastic.ranks_least, elastic.ranks_most
    if not least <= target.ranks <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        return f"it takes {takes} ranks, and is to have {target.ranks}"
    batches = elastic.batches
    if target.global_batch and not batches.first <= target.global_batch <= batches.most:
        takes = (
            f"it takes global batches of {batches.first} to {batches.most}" if batches.first else "it names no batches"
        )
        return f"{takes}, and is to have one of {target.global_batch}"
    return ""


def _is_other(wish: Wish, job: JobView) -> bool:
    """Another place than it has: also where a part leaves and another one comes on the same host."""
    return bool(wish.leave) or wish.target.shares != job.shares


def _more(wish: Wish, job: JobShepherd, view: JobView) -> list[Share]:
    """What comes to it: what it gives up is there for others only once it has left."""
    staying = [share for share in job.decided.members if share.part not in wish.leave] if wish.leave else view.shares
    missing = ranks_by_node(of_first(wish.target.shares)) - ranks_by_node(of_first(staying))
    others = [] if view.shares else of_others(wish.target.shares)
    return [*[Share(node, ranks) for node, ranks in missing.items()], *others]
