"""Who holds a job: chosen at submit, exchanged when a holder is lost, and which job another should shepherd.

Holders are hints until the register has decided on them; a change goes through the register in two steps, the joint
configuration first (`swarmsched.holders`).
"""

import random
from collections.abc import Mapping, Sequence

from swarmsched.cluster import Candidate
from swarmsched.holders import HOLDERS_WANTED, Holder
from swarmsched.ids import NodeId
from swarmsched.record import JobRecord

REPLACE_AFTER_S = 30.0  # that a holder is not alive: a restart, or a cable, should not cost every job two updates
HAND_OVER_RATIO = 2.0
HAND_OVER_SLACK = 4  # jobs above the mean that are nobody's trouble


def choose_holders(
    kept: Sequence[Candidate],
    candidates: Sequence[Candidate],
    rng: random.Random,
    wanted: int = HOLDERS_WANTED,
    *,
    has_witness: bool = False,
) -> tuple[Holder, ...]:
    """Up to `wanted` holders besides those that are `kept`, as far as possible in other zones than theirs and one
    another's. Nodes without much to do come first, and those that drain only where there are no others. At most one
    is a witness, and none where `has_witness` says that there is one already: of a majority one at least must be able
    to act."""
    chosen = list(kept)
    apart = [each for each in candidates if each.holder not in [one.holder for one in kept]]
    others = _with_one_witness(apart, rng, has_witness=has_witness)
    others.sort(key=lambda each: (each.live_jobs // 64, rng.random()))
    while others and len(chosen) < len(kept) + wanted:
        used = {each.zone for each in chosen} - {""}
        best = min(others, key=lambda each: (each.is_draining, each.zone in used))
        others.remove(best)
        chosen.append(best)
    return tuple(each.holder for each in chosen[len(kept) :])


def next_holders(
    record: JobRecord,
    me: NodeId,
    candidates: Sequence[Candidate],
    gone: Mapping[NodeId, float],
    rng: random.Random,
    now_s: float,
    *,
    is_settled: bool = False,
) -> tuple[Holder, ...] | None:
    """The holders that the job should have, when those it has are fewer or worse; None when all is well.

    `gone` says since when a node is not alive; `is_settled` that the gang has run for a while.  A holder that is merely
    silent stays while nobody could replace it.
    """
    live, known = {each.holder.node: each.holder for each in candidates}, candidates
    stays = [holder for holder in record.holders if not _is_lost(holder, live, gone, now_s)]
    witnesses = {each.holder for each in candidates if each.is_witness}
    others = [each for each in candidates if each.holder not in stays]
    surplus = [holder for holder in stays if holder in witnesses][1:][: sum(not each.is_witness for each in others)]
    stays = [holder for holder in stays if holder not in surplus]
    candidates = _with_one_witness(others, rng, has_witness=not witnesses.isdisjoint(stays))
    gang = {share.node for share in record.shares}
    apart = [each for each in candidates if each.holder.node not in gang and each.holder not in stays]
    free = len(apart) - (HOLDERS_WANTED - len(stays))  # how many are left when each lost holder has a successor
    if is_settled and apart and free >= 0:  # a node that takes ranks with it when it dies should not take a vote too
        beside = [holder for holder in stays if holder.node in gang and holder.node != me][:free]
        stays = [holder for holder in stays if holder not in beside]
        candidates = [each for each in candidates if each.holder not in beside and each.holder.node not in gang]
    names = {holder.node for holder in stays}
    spare = [each for each in candidates if each.holder.node not in names]
    missing = HOLDERS_WANTED - len(stays)
    if me not in names or not spare or missing <= 0:
        return None
    return (*stays, *choose_holders([each for each in known if each.holder in stays], spare, rng, wanted=missing))


def _with_one_witness(candidates: Sequence[Candidate], rng: random.Random, *, has_witness: bool) -> list[Candidate]:
    witnesses = [each for each in candidates if each.is_witness]
    kept = None if has_witness or not witnesses else rng.choice(witnesses)
    return [each for each in candidates if not each.is_witness or each is kept]


def _is_lost(holder: Holder, live: Mapping[NodeId, Holder], gone: Mapping[NodeId, float], now_s: float) -> bool:
    """Not alive for long, or alive with another store: then it is not the holder that it was."""
    if holder.node in live:
        return live[holder.node].store != holder.store
    return now_s - gone.get(holder.node, now_s) >= REPLACE_AFTER_S


def excess_jobs(my_jobs: int, candidates: Sequence[Candidate], me: NodeId) -> int:
    """How many jobs this node should hand over: those above the mean, once it has more than twice that."""
    counts = [each.live_jobs for each in candidates if not each.is_witness and each.holder.node != me]
    if not counts:
        return 0
    mean = (sum(counts) + my_jobs) / (len(counts) + 1)
    return int(my_jobs - mean) if my_jobs > HAND_OVER_RATIO * mean + HAND_OVER_SLACK else 0


def successor(record: JobRecord, me: NodeId, candidates: Sequence[Candidate]) -> NodeId | None:
    """The holder that shepherds the fewest jobs and could take this one."""
    names = {holder.node for holder in record.holders} - {me}
    able = [each for each in candidates if each.holder.node in names and not each.is_witness]
    return min(able, key=lambda each: (each.live_jobs, each.holder.node)).holder.node if able else None
