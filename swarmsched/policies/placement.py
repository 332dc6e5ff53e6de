"""Where a gang goes: fewest nodes first, best fit, ties by a rendezvous hash of (job, node).

The rule of Tiresias for jobs that profit from being together (Gu et al., NSDI 2019, section 3.4): whole nodes first,
the remainder on the node with the least left over.  The hash spreads equal choices of different shepherds, which
share no state, over different nodes; a generator, where one is handed in, does so for repeated tries of one job.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping

from swarmsched.ids import JobId, NodeId
from swarmsched.policies.room import Room
from swarmsched.resources import Demand, Share
from swarmsched.view import JobView, NodeView

TieBreak = Callable[[NodeId], int | float]


def place(
    view_nodes: Iterable[NodeView],
    demand: Demand,
    ranks: int,
    job_id: JobId,
    nodes: Collection[NodeId] = (),
    exclude: Collection[NodeId] = (),
    rng: random.Random | None = None,
) -> tuple[Share, ...] | None:
    """Shares in rank order for a gang on these nodes, or None when it does not fit now.

    `nodes`, if any, are the only ones allowed.  With `rng`, equal nodes are chosen at random.
    """
    room = Room(view_nodes)
    return choose(room.fits(demand), room, demand, ranks, tie_break(job_id, rng), nodes=nodes, exclude=exclude)


def place_in(room: Room, job: JobView) -> tuple[Share, ...] | None:
    """Shares for a job in what is left of the room, or None; nothing is booked."""
    if room.ranks(job.demand) < job.ranks:
        return None
    fits = room.fits(job.demand)
    return choose(fits, room, job.demand, job.ranks, tie_break(job.job_id), nodes=job.nodes, exclude=job.exclude)


def choose(
    fits: Mapping[NodeId, int],
    room: Room,
    demand: Demand,
    ranks: int,
    tie: TieBreak,
    *,
    nodes: Collection[NodeId] = (),
    exclude: Collection[NodeId] = (),
) -> tuple[Share, ...] | None:
    """Shares from the ranks that each node holds; the largest share comes first and so has rank 0."""
    allowed = permitted(fits, nodes, exclude)
    if sum(allowed.values()) < ranks:
        return None
    shares = []
    left = ranks
    while left:
        enough = [node for node, held in allowed.items() if held >= left]
        if enough:
            last = min(enough, key=lambda node: (*_left_over(room, node, demand, left), tie(node)))
            shares.append(Share(last, left))
            break
        most = max(allowed.values())
        node = min((node for node, held in allowed.items() if held == most), key=tie)
        shares.append(Share(node, most))
        left -= allowed.pop(node)
    return tuple(shares)


def permitted(fits: Mapping[NodeId, int], nodes: Collection[NodeId], exclude: Collection[NodeId]) -> dict[NodeId, int]:
    """The entries that a job's own choice of nodes leaves."""
    return {node: held for node, held in fits.items() if held and (not nodes or node in nodes) and node not in exclude}


def tie_break(job_id: JobId, rng: random.Random | None = None) -> TieBreak:
    """A number per node: random with a generator, else the same on every machine for this job and node."""
    if rng is not None:
        return lambda node: rng.random()
    return lambda node: rendezvous_score(job_id, node)


def rendezvous_score(job_id: JobId, node: NodeId) -> int:
    """Stable pseudo-random number of (job, node); Python's own hash differs between processes."""
    return int.from_bytes(hashlib.blake2b(f"{job_id}|{node}".encode(), digest_size=8).digest())


def _left_over(room: Room, node: NodeId, demand: Demand, ranks: int) -> tuple[int, int]:
    """Best fit: GPUs, then cores, that would stay free.  A job without GPUs so prefers nodes without them."""
    free = room.free(node)
    return (len(free.gpus) - ranks * demand.gpus, free.cpus - ranks * demand.cpus)
