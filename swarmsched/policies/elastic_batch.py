"""Devices and batch sizes together (Saxena et al., IBM, "Effective Elastic Scaling of Deep Learning Workloads",
MASCOTS 2020).

A job's table tells what each number of GPUs is worth, each with its best batch, in units of its own pace on one GPU.
Jobs are admitted first come, first served, as long as each has the least GPUs with which it can train: nobody passes
one that has to wait, except where the empty swarm could not hold it either.  The sum of what the admitted have is
maximised by the paper's dynamic program (`exact`), or, in less time, in bundles.  As there, sizes are chosen anew when
jobs come, go or wait for their admission, and stay otherwise; the batch follows what is measured.

Where no noise was measured each batch that the owner allows is worth its size (`trusts_range`), as in the paper.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.msgpack import decode, encode
from msgspec.structs import replace

from swarmsched.estimate import Estimate, NoisePoint, Resizable
from swarmsched.fields import Job, Value
from swarmsched.models.goodput import Floats, Goodput, GoodputBook
from swarmsched.policies.base import SubmitOrder, in_rank_order
from swarmsched.policies.dealing import Bidder, auction, deal_exactly
from swarmsched.policies.reason import held_by
from swarmsched.policies.resizing import (
    Sized,
    dealt_to_one,
    elastic_of,
    gpu_of,
    measured,
    opened,
    placed,
    reviewed,
    unmeasured,
)
from swarmsched.policies.room import Room, may_resize
from swarmsched.view import ClusterView, JobView, Plan

ALL_NOISE = 1e18
"""Noise with which a batch is worth its size."""


class _Dealt(Value):
    """What is remembered: for whom, and how many GPUs, sizes were chosen, and those that jobs have yet to get: one plan
    alone does not change a running job."""

    digest: bytes = b""
    ranks: Mapping[Job, int] = {}


@dataclass
class SpeedUps(Sized):
    """What a job makes of each number of ranks."""

    value: Floats

    @property
    def why(self) -> str:
        """Of its size, or that it waits for its admission."""
        return f"worth {self.value[self.ranks]:.3g} GPUs of its own" if self.ranks else "first come, first served"


class ElasticBatch:
    """See above."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._deals_exactly = parameters["exact"] > 0
        self._rebatches = parameters["rebatches"] > 0
        self._gpus_max = int(parameters["gpus_max"])
        self._trusts_range = parameters["trusts_range"] > 0
        self._book = GoodputBook()

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Admission, sizes, hosts."""
        self._book.begin()
        jobs, kept, room, free = opened(view, may_resize)
        per_node = max((node.total_gpus for node in view.nodes), default=1) or 1
        order = [job for _, job in in_rank_order(jobs, SubmitOrder({}), now_s)]
        tables = [self._table(job, dealt_to_one(job, room, free), per_node, gpu_of(job, room)) for job in order]
        admitted = _admitted(tables, free, room)
        digest, before = _digest(admitted, free), decode(view.memory, type=_Dealt) if view.memory else _Dealt()
        if before.digest == digest and all(each.held for each in admitted):
            for each in admitted:
                each.ranks = min(before.ranks.get(each.job.job_id, each.held), len(each.value) - 1)
        else:
            self._size(admitted, free)
        wanted = {each.job.job_id: each.ranks for each in admitted if each.ranks != each.held}
        plan = Plan((*kept, *placed(tables, room, Room(view.nodes))), encode(_Dealt(digest, wanted)))
        return reviewed(plan, self._book)

    def _table(self, job: JobView, gpus: int, per_node: int, gpu: str) -> SpeedUps:
        elastic, per_rank = elastic_of(job), max(1, job.demand.gpus)
        limit = min(elastic.ranks_most, (self._gpus_max or gpus) // per_rank, gpus // per_rank)
        most = max(1, elastic.ranks_least, limit)
        job, estimate = replace(job, own=self._trusted(job.own)), self._trusted(job.card.estimate)
        goodput = measured(job, estimate, self._book, most, max(1, per_node // per_rank), gpu)
        value = self._rate(goodput, elastic) if goodput else unmeasured(job, most)
        value[: max(1, elastic.ranks_least)] = 0.0
        if not value.any():  # nothing that was measured lets it train
            goodput, value = None, unmeasured(job, most)
            value[: elastic.ranks_least] = 0.0
        least = int((value > 0.0).argmax())
        value *= least * per_rank / value[least]
        return SpeedUps(job, goodput if self._rebatches else None, least, value)

    def _rate(self, goodput: Goodput, elastic: Resizable) -> Floats:
        if self._rebatches:
            return goodput.rate.copy()
        return goodput.with_batch(elastic.global_batch or elastic.batches.first)

    def _trusted(self, estimate: Estimate | None) -> Estimate | None:
        if estimate is None or estimate.noise or not self._trusts_range:
            return estimate
        return replace(estimate, noise=(NoisePoint(1, ALL_NOISE),))

    def _size(self, admitted: Sequence[SpeedUps], free: int) -> None:
        ranks = [each.least for each in admitted]
        left = free - sum([each.least * each.per_rank for each in admitted])
        deal = deal_exactly if self._deals_exactly else auction
        deal([Bidder(each.value, each.per_rank) for each in admitted], ranks, left)
        for each, size in zip(admitted, ranks, strict=True):
            each.ranks = size


def _admitted(tables: Iterable[SpeedUps], free: int, room: Room) -> list[SpeedUps]:
    """Those that have GPUs, then the queue up to the first that does not fit beside them."""
    found, empty = [], room.emptied()
    for each in sorted(tables, key=lambda one: not one.held):  # stable: first come, first served within both
        needed = each.least * each.per_rank
        if needed <= free:
            found.append(each)
            free -= needed
        elif _may_ever_fit(each, empty):
            break
    return found


def _may_ever_fit(each: SpeedUps, empty: Room) -> bool:
    return held_by(empty, each.job) >= each.least


def _digest(admitted: Sequence[SpeedUps], free: int) -> bytes:
    """Of all that makes the sizes change: who is there, and how much for them."""
    text = ",".join([str(free), *sorted(each.job.job_id for each in admitted)])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
