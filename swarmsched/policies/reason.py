"""Sentences about one job and the room that is left for it."""

from swarmsched.policies.base import NAMED_JOBS_LIMIT, amount, need
from swarmsched.policies.placement import permitted, place_in
from swarmsched.policies.room import Room
from swarmsched.resources import Share, needs_beside
from swarmsched.view import JobView

MIXED_GPUS_FLAG = "--mixed-gpus"


def fits_now(job: JobView, room: Room) -> bool:
    """True when the room holds the whole gang on the nodes that the job allows."""
    return held_by(room, job) >= job.ranks and _fits_beside(job, room)


def _fits_beside(job: JobView, room: Room) -> bool:
    """Of a job whose first group fits."""
    return not needs_beside(job.demand) or place_in(room, job) is not None


def held_by(room: Room, job: JobView) -> int:
    """The most ranks of its first group that the room holds together on the nodes that the job allows."""
    if not job.card.nodes and not job.excluded:
        return room.ranks(job.demand) if job.card.mixed_gpus else room.ranks_alike(job.demand)
    allowed = permitted(room.fits(job.demand), job.card.nodes, job.excluded)
    groups = [allowed] if job.card.mixed_gpus else room.apart(allowed, job.demand).values()
    return max([sum(group.values()) for group in groups], default=0)


def shortage(job: JobView, room: Room) -> str:
    """What the job needs and what there is: `needs 4 GPUs, 2 free`; it may also merely have to wait its turn."""
    asked = f"needs {need(job.demand, job.ranks)}"
    held = held_by(room, job)
    if held >= job.ranks and _fits_beside(job, room):
        return f"{asked}; fits now and waits its turn"
    if held >= job.ranks:
        return f"{asked}; there is no room for all of its groups at once"
    if not room.has_nodes:
        return f"{asked}, but no node is available"
    where = " on the nodes that the job allows" if job.card.nodes or job.excluded else ""
    if not job.demand.gpus:
        return f"{asked}, enough for {held} of {amount(job.ranks, 'rank')}{where}"
    free = room.free_gpus(job.demand)
    if free < job.ranks * job.demand.gpus:
        return f"{asked}, {free} free"
    is_apart = not job.card.mixed_gpus and not room.is_of_one_class(job.demand)
    alike = f" on GPUs of one model ({MIXED_GPUS_FLAG} lets it have several)" if is_apart else ""
    return f"{asked}, {free} free but room for only {held} of {amount(job.ranks, 'rank')}{where}{alike}"


def start_reason(job: JobView, shares: tuple[Share, ...]) -> str:
    """Where the job may start: `fits on n1 (2), n2 (2)`."""
    named = ", ".join(f"{share.node} ({share.ranks})" for share in shares[:NAMED_JOBS_LIMIT])
    more = f" and {len(shares) - NAMED_JOBS_LIMIT} more" if len(shares) > NAMED_JOBS_LIMIT else ""
    return f"fits on {named}{more}"
