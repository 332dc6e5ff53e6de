"""What people ask of jobs that are there: other numbers of GPUs, or other hosts.

A range of sizes is part of the job's record from then on.  A job that runs with a size outside of it is given one of
the range, the nearest, as soon as there is a place: its attempt ends, and the next one goes on from its checkpoint.
"""

from collections.abc import Collection

from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.commands import MigrateJob, Refused
from swarmsched.ids import NodeId
from swarmsched.negotiation.placement.wish import Wish, cannot_pause
from swarmsched.policies.base import amount
from swarmsched.policies.placement import choose, tie_break, with_other_groups
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import Share, of_first, world_size
from swarmsched.view import Allocation, JobView


def scaled(spec: JobSpec, ranks: int, ranks_most: int) -> JobSpec:
    """The specification with another range, checked as one that is submitted.  Raises `JobRejected`."""
    other = replace(spec, ranks=ranks, ranks_most=0 if ranks_most == ranks else ranks_most)
    return JobSpec.from_json(other.to_json())


def cannot_scale(record: JobRecord, spec: JobSpec) -> Refused | None:
    """Why a job cannot be given that range now."""
    if record.state in (JobState.STOPPING, JobState.ENDED):
        return Refused("conflict", f"the job is {record.state.value}", "submit it again with that many GPUs")
    return cannot_pause(record) if replace(record, spec=spec).is_misfit else None


def waits_for(record: JobRecord) -> str:
    """Why a job has not the size yet that it is to have."""
    if record.state is not JobState.RUNNING:
        why = f"it is {record.state.value}"
    else:
        is_ready = record.has_own_checkpoint or record.spec.elastic
        why = "waits for room on free GPUs" if is_ready else "waits for its next checkpoint"
    return f"is to have {record.spec.size_range}: {why}"


def no_place(record: JobRecord, wish: MigrateJob) -> str:
    """Why it cannot go there, in a sentence."""
    where = f"on {', '.join(wish.nodes)}" if wish.nodes else "elsewhere"
    apart = f" without {', '.join(wish.avoid)}" if wish.avoid else ""
    return f"there is no room {where}{apart} for its {amount(world_size(record.training), 'rank')} at this moment"


def place_elsewhere(
    room: Room, job: JobView, ranks: int, nodes: Collection[NodeId] = (), avoid: Collection[NodeId] = ()
) -> tuple[Share, ...] | None:
    """Shares for so many ranks of a job that runs, on what is free or its own; rather where it is now.

    `nodes`: only there, within the job's own choice; `avoid`: not there.
    """
    there, chosen = room.copy(), job.card.nodes
    there.release(job.shares, job.demand)
    allowed = [node for node in nodes if node in chosen] if nodes and chosen else nodes or chosen
    if nodes and not allowed:
        return None
    home = [share.node for share in of_first(job.shares)]
    tie, unwanted = tie_break(job.job_id), (*job.excluded, *avoid)
    wishes = {"nodes": allowed, "exclude": unwanted, "home": home}

    def place() -> tuple[Share, ...] | None:
        return choose(there.fits(job.demand), there, job.demand, ranks, tie, is_mixed=job.card.mixed_gpus, **wishes)

    found = with_other_groups(there, job, place)
    if found is not None or (job.card.elastic is not None and job.card.elastic.is_live):
        return found
    card = replace(job.card, shares=(), nodes=tuple(allowed), exclude=tuple(unwanted))  # all groups begin anew
    return with_other_groups(there, replace(job, card=card), place)


def fitting(record: JobRecord, view: JobView, room: Room) -> Wish | None:
    """For a job that is to have another size than it has, the nearest of its sizes, if there is a place for it."""
    place = place_elsewhere(room, view, record.nearest_size)
    why = f"asked for by hand: {record.spec.size_range} ranks"
    return Wish(record.job_id, Allocation(place, record.global_batch), why) if place else None
