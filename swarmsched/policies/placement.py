"""Where a gang goes: fewest nodes first, best fit, ties by a rendezvous hash of (job, node).

The rule of Tiresias for jobs that profit from being together (Gu et al., NSDI 2019, section 3.4): whole nodes first,
the remainder on the node with the least left over.  The hash spreads equal choices of different shepherds, which
share no state, over different nodes; a generator, where one is handed in, does so for repeated tries of one job.
"""

import hashlib
import heapq
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache

from swarmsched.ids import JobId, NodeId
from swarmsched.policies.base import joined
from swarmsched.policies.hosting import suited, work_of
from swarmsched.policies.room import Room
from swarmsched.resources import Demand, Share, demand_of, needs_beside, of_others
from swarmsched.view import Allocation, Change, Decision, JobView

TieBreak = Callable[[Sequence[NodeId], int], list[NodeId]]
"""At most so many of nodes that are equal otherwise."""


def place_in(room: Room, job: JobView, rng: random.Random | None = None) -> tuple[Share, ...] | None:
    """Shares in rank order for a job in what is left of the room, or None; nothing is booked.

    With `rng`, equal nodes are chosen at random.  A job whose card hides where it may go fits nowhere.
    """
    if (room.ranks_alike(job.demand) < job.ranks and not job.card.mixed_gpus) or job.card.hides_constraints:
        return None
    return with_other_groups(room, job, lambda: _placed(room, job, rng), rng)


def _placed(room: Room, job: JobView, rng: random.Random | None) -> tuple[Share, ...] | None:
    """The first group's hosts, by its model where its card tells that."""
    fits = room.fits(job.demand)
    found = place_among(fits, room, job, rng)
    if not found or work_of(job) is None:
        return found
    allowed = permitted(fits, job.card.nodes, job.excluded)
    return suited(room, job, job.ranks, allowed, found, tie_break(job.job_id, rng))


def with_other_groups(
    room: Room, job: JobView, place: Callable[[], tuple[Share, ...] | None], rng: random.Random | None = None
) -> tuple[Share, ...] | None:
    """Shares that `place` finds for the first group, with those of all others, or None where not all have room.

    Other groups stay where they are.  Of one that waits either the first group is placed before them or after them:
    what it would take may be the only place that suits another.
    """
    if not needs_beside(job.demand):
        return place()
    there = of_others(job.shares)
    if there:
        if not is_there(room, there, job.demand):
            return None
        with room.lent(there, job.demand):
            first = place()
        return (*first, *there) if first else None
    first, others = place(), None
    if first:
        with room.lent(first, job.demand):
            others = _other_groups(room, job, [share.node for share in first], rng)
    if others is None:
        others = _other_groups(room, job, (), rng)
        with room.lent(others or (), job.demand):
            first = place() if others else None
    return (*first, *others) if first and others else None


def _other_groups(
    room: Room, job: JobView, home: Collection[NodeId], rng: random.Random | None
) -> tuple[Share, ...] | None:
    """Places for all groups but the first, the one with the least choice before the others; rather at `home`."""
    tie, found = tie_break(job.job_id, rng), list[Share]()
    needs = [
        (room.ranks(each.demand) / max(1, each.ranks), group, each) for group, each in enumerate(job.card.groups, 1)
    ]
    with ExitStack() as lent:
        for _, group, each in sorted(needs, key=lambda one: one[:2]):
            wishes = {"nodes": job.card.nodes, "exclude": job.excluded, "home": home}
            fits = room.fits(each.demand)
            shares = choose(fits, room, each.demand, each.ranks, tie, is_mixed=job.card.mixed_gpus, **wishes)
            if shares is None:
                return None
            placed = [Share(share.node, share.ranks, part=group, group=group) for share in shares]
            found += placed
            lent.enter_context(room.lent(placed, job.demand))
    return tuple(sorted(found, key=lambda share: share.group))


def place_among(
    fits: Mapping[NodeId, int], room: Room, job: JobView, rng: random.Random | None = None
) -> tuple[Share, ...] | None:
    """The same for the first group, where each node is to hold no more ranks than `fits` says."""
    tie = tie_break(job.job_id, rng)
    wishes = {"nodes": job.card.nodes, "exclude": job.excluded}
    return choose(fits, room, job.demand, job.ranks, tie, is_mixed=job.card.mixed_gpus, **wishes)


def choose(
    fits: Mapping[NodeId, int],
    room: Room,
    demand: Demand,
    ranks: int,
    tie: TieBreak,
    *,
    nodes: Collection[NodeId] = (),
    exclude: Collection[NodeId] = (),
    home: Collection[NodeId] = (),
    is_mixed: bool = False,
) -> tuple[Share, ...] | None:
    """Shares from the ranks that each node holds; the largest share comes first and so has rank 0.

    On GPUs of one class unless `is_mixed`: of that with which it needs the fewest nodes, and then where the last of
    these is the fullest.  Among equal nodes it stays at `home`.
    """
    allowed = permitted(fits, nodes, exclude) if nodes or exclude else fits
    groups = room.apart(allowed, demand) if allowed and not is_mixed else {"": allowed}
    found = {
        name: _packed(group, room, demand, ranks, tie, home)
        for name, group in groups.items()
        if sum(group.values()) >= ranks
    }
    if len(found) < 2:
        return next(iter(found.values()), None)
    return found[min(found, key=lambda name: (*tightness(room, found[name], home), name))]


def tightness(room: Room, shares: Sequence[Share], home: Collection[NodeId]) -> tuple[int, int, int, int]:
    """Of places on GPUs of several classes the one with the least is chosen."""
    left = [room.free(share.node) for share in shares[-1:]]
    there = sum([share.ranks for share in shares if share.node in home])
    return (len(shares), -there, sum([each.gpu_count for each in left]), sum([each.cpus for each in left]))


def _packed(
    allowed: Mapping[NodeId, int], room: Room, demand: Demand, ranks: int, tie: TieBreak, home: Collection[NodeId]
) -> tuple[Share, ...]:
    """Shares on the fewest nodes, which hold them."""
    shares: list[Share] = []
    left = ranks
    while left:
        most = max(allowed.values())
        if most >= left:
            best = _first(_best_fit(room, allowed, left, left * demand.gpus), 1, tie, home)
            return (*shares, Share(best[0], left))
        fullest = [node for node, held in allowed.items() if held == most]
        whole = _first(fullest, (left - 1) // most, tie, home)
        shares += [Share(node, most) for node in whole]
        left -= most * len(whole)
        allowed = {node: held for node, held in allowed.items() if node not in whole}
    return tuple(shares)


def _first(equal: Sequence[NodeId], count: int, tie: TieBreak, home: Collection[NodeId]) -> list[NodeId]:
    there = tie([node for node in equal if node in home], count) if home else []
    return there + tie([node for node in equal if node not in home], count - len(there))


def is_there(room: Room, shares: Sequence[Share], demand: Demand) -> bool:
    """True when the room has all of the shares: none on nodes that are not available."""
    if not any(share.group for share in shares):
        fits = room.fits(demand)
        return not any(share.ranks > fits.get(share.node, 0) for share in shares)
    with ExitStack() as lent:
        for share in shares:
            if share.ranks > room.fits(demand_of(demand, share.group)).get(share.node, 0):
                return False
            lent.enter_context(room.lent([share], demand))
    return True


def take_if_there(room: Room, shares: Sequence[Share], demand: Demand) -> bool:
    """Book the shares if the room has all of them; false, and nothing booked, otherwise."""
    if not is_there(room, shares, demand):
        return False
    room.take(shares, demand)
    return True


def start_or_claim(job: JobView, target: Allocation, now: Room, reason: str) -> Decision:
    """Start it on what is free now, or keep that place for it until those that give it up are gone."""
    if take_if_there(now, target.shares, job.demand):
        return Decision(job.job_id, Change.START, reason, target)
    return Decision(job.job_id, Change.WAIT, joined("others are to make room for it", reason), target)


def permitted(fits: Mapping[NodeId, int], nodes: Collection[NodeId], exclude: Collection[NodeId]) -> dict[NodeId, int]:
    """The entries that a job's own choice of nodes leaves."""
    allowed = {node: fits[node] for node in nodes if node in fits} if nodes else dict(fits)
    for node in exclude:
        allowed.pop(node, None)
    return allowed


def _best_fit(room: Room, allowed: Mapping[NodeId, int], ranks: int, gpus: int) -> Sequence[NodeId]:
    """Where the fewest GPUs, then cores, would stay free.  A job without GPUs so prefers nodes without them."""
    for nodes in room.by_what_is_free(gpus):
        enough = [node for node in nodes if allowed.get(node, 0) >= ranks]
        if enough:
            return enough
    raise AssertionError("the caller has seen a node with enough")


def tie_break(job_id: JobId, rng: random.Random | None = None) -> TieBreak:
    """At random with a generator, else by a hash that is the same on every machine for this job and node."""
    if rng is not None:
        return lambda nodes, count: rng.sample(nodes, min(count, len(nodes)))
    job = hashed(job_id)

    def first(nodes: Sequence[NodeId], count: int) -> list[NodeId]:
        scores = [(job ^ hashed(node)) * ODD & _MASK for node in nodes]
        return [node for _, node in heapq.nsmallest(count, zip(scores, nodes, strict=True))]

    return first


ODD = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@lru_cache(maxsize=32_768)
def hashed(name: str) -> int:
    """In 64 bits; Python's own differs between processes."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
