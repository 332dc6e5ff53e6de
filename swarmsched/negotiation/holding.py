"""Who holds a job: chosen at submit, exchanged when a holder is lost, and which job another should shepherd.

Holders are hints until the register has decided on them; a change goes through the register in two steps, the joint
configuration first (`swarmsched.holders`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmsched.holders import HOLDERS_WANTED, Holder
from swarmsched.ids import NodeId
from swarmsched.record import JobRecord

REPLACE_AFTER_S = 30.0  # that a holder is not alive: a restart, or a cable, should not cost every job two updates
HAND_OVER_RATIO = 2.0
HAND_OVER_SLACK = 4  # jobs above the mean that are nobody's trouble


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live node that could hold or shepherd.  `zone` is its failure zone, if it told one."""

    holder: Holder
    zone: str = ""
    live_jobs: int = 0  # shepherded there
    total_gpus: int = 0
    is_witness: bool = False


def choose_holders(
    me: Holder | None, candidates: Sequence[Candidate], rng: random.Random, wanted: int = HOLDERS_WANTED
) -> tuple[Holder, ...]:
    """`me` first if given, then others, in different zones as far as there are enough; those without much to do
    first."""
    zones = {each.holder: each.zone for each in candidates}
    chosen = [me] if me is not None else []
    others = [each for each in candidates if each.holder != me]
    others.sort(key=lambda each: (each.live_jobs // 64, rng.random()))
    while others and len(chosen) < wanted:
        used = {zones.get(holder, "") for holder in chosen} - {""}
        best = next((each for each in others if each.zone not in used), others[0])
        others.remove(best)
        chosen.append(best.holder)
    return tuple(chosen)


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
    live = {each.holder.node: each.holder for each in candidates}
    stays = [holder for holder in record.holders if not _is_lost(holder, live, gone, now_s)]
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
    return (*stays, *choose_holders(None, spare, rng, wanted=missing))


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
