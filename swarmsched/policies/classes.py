"""Which jobs get GPUs of which class, before the GPUs of each class are dealt by themselves.

Each class has a price for a GPU, and each job takes the class and size that are worth most to it after that price;
prices rise where more is taken than there is, and fall where some is left (the dual of the integer program that Sia,
SOSP 2023, solves).  So whoever gains more than others from the faster GPUs gets them.  Speeds are those that
`models.classes` knows; a job that runs and would change its class is taken to be as fast there as is likely at least.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from swarmsched.ids import NodeId
from swarmsched.models.goodput import Floats, Goodput, Question
from swarmsched.policies.placement import permitted
from swarmsched.policies.resizing import elastic_of, question
from swarmsched.policies.room import Room
from swarmsched.policies.sites import ANY_GPU
from swarmsched.view import JobView, NodeView

ROUNDS_LEAST, ROUNDS_MOST = 6, 30
"""In which prices are sought."""
WORK_MOST = 2e7
"""Numbers that are looked at for it; with thousands of jobs prices are rougher."""
STEP, SMALLER = 0.6, 0.9
LEAST_RATE = 1e-12


class Bidding(Protocol):
    """A job whose sizes are worth so much on GPUs of the class of which its estimate tells."""

    job: JobView
    value: Floats
    after_pause: float  # part of the worth of a size that is left after a change
    held: int
    per_rank: int
    stays: bool
    reserved: int
    ranks: int
    gpu: str
    changes_class: bool
    limited: Mapping[str, Floats]
    by_gpu: Mapping[str, Goodput | None]
    goodput: Goodput | None


B = TypeVar("B", bound=Bidding)


class ClassPool(NamedTuple):
    """The GPUs of one class that are dealt."""

    gpu: str
    nodes: frozenset[NodeId]
    gpus: int


def pools(room: Room) -> list[ClassPool]:
    """Of a room without those among whom its GPUs are dealt; by name."""
    nodes: dict[str, list[NodeId]] = {}
    for node, name in sorted(room.classes(ANY_GPU).items()):
        nodes.setdefault(name, []).append(node)
    return [
        ClassPool(name, frozenset(there), sum([room.free(node).gpu_count for node in there]))
        for name, there in sorted(nodes.items())
    ]


def parts(nodes: Iterable[NodeView]) -> Mapping[str, float]:
    """Which part of all GPUs is of each model."""
    counts: dict[str, int] = {}
    for node in nodes:
        for each in node.capacity.gpus:
            counts[each.model] = counts.get(each.model, 0) + each.count
    total = sum(counts.values())
    return {model: count / total for model, count in counts.items()} if total else {}


def mean_speed(job: JobView, of_all: Mapping[str, float], limited: Mapping[str, float]) -> float:
    """How many times as fast a job would be on an average GPU as on those of which its estimate tells."""
    known = {each.gpu: each.ratio for each in job.on_classes}
    if not known:
        return 1.0
    return sum([part * known.get(gpu, 1.0) * limited.get(gpu, 1.0) for gpu, part in of_all.items()])


def questions(job: JobView, most: int, per_node: int, names: Sequence[str]) -> dict[str, Question]:
    """What a book is asked of a job: once, or for each class where its local batches have a limit of their own on some.

    The class with the largest comes first: whatever can be dealt to so many ranks elsewhere can be there.
    """
    elastic, wanted = job.card.elastic, names[:1]
    if elastic is not None and elastic.batches.by_gpu:
        wanted = sorted(names, key=lambda name: -elastic.batches.on(name).local_most)
    return {gpu: each for gpu in wanted if (each := question(job, job.card.estimate, most, per_node, gpu))}


def limited_speeds(by_gpu: Mapping[str, Goodput | None]) -> dict[str, Floats]:
    """Speed of a job by its limit on a class over that by its limit on the first, by world size. None where there is
    but one."""
    first = next(iter(by_gpu.values()), None)
    if len(by_gpu) < 2 or first is None:
        return {}
    most = np.maximum(first.rate, LEAST_RATE)
    return {gpu: goodput.rate / most for gpu, goodput in by_gpu.items() if goodput}


def assign(bids: Sequence[Bidding], there: Sequence[ClassPool], room: Room) -> None:
    """Give each its class, and the values of its sizes there."""
    values = [[_values(bid, pool, room) for pool in there] for bid in bids]
    widest = max([len(bid.value) for bid in bids], default=0)
    table = np.full((len(bids), len(there), widest), -np.inf)
    for row, of_bid in enumerate(values):
        for column, value in enumerate(of_bid):
            table[row, column, : len(value)] = value
    chosen = _chosen(table, np.array([bid.per_rank for bid in bids]), np.array([pool.gpus for pool in there], float))
    for bid, of_bid, column in zip(bids, values, chosen, strict=True):
        bid.value = of_bid[column]
        _settle(bid, there[column].gpu)
        bid.changes_class = bool(bid.held) and not _is_in(bid.job, there[column])


def _settle(bid: Bidding, gpu: str) -> None:
    """With the batches that are best there."""
    bid.gpu, bid.goodput = gpu, bid.by_gpu.get(gpu, bid.goodput)


def _values(bid: Bidding, pool: ClassPool, room: Room) -> Floats:
    """Of its sizes on GPUs of that class, as far as there are any that it may have."""
    job, is_there = bid.job, _is_in(bid.job, pool)
    fits = room.fits(job.demand)
    if job.card.nodes or job.excluded:
        fits = permitted(fits, job.card.nodes, job.excluded)
    held = sum([count for node, count in fits.items() if node in pool.nodes])
    most = min(held, pool.gpus // bid.per_rank)
    most = max(most, bid.held) if is_there else most
    may_move = not bid.held or is_there or (job.card.elastic is not None and not bid.stays)
    if not may_move or most < elastic_of(job).ranks_least or (job.card.hides_constraints and not is_there):
        return np.zeros(1)
    value = bid.value[: most + 1] * _speed(job, pool.gpu, is_likely=bool(bid.held) and not is_there)
    if pool.gpu in bid.limited:
        value *= bid.limited[pool.gpu][: len(value)]
    if bid.held and not is_there and bid.held < len(value):
        value[bid.held] *= bid.after_pause
    return value


def _speed(job: JobView, gpu: str, *, is_likely: bool) -> float:
    """Of several models in one node the slowest counts."""
    known = {each.gpu: each.likely_least if is_likely else each.ratio for each in job.on_classes}
    return min([known.get(name, 1.0) for name in gpu.split("+")])


def _is_in(job: JobView, pool: ClassPool) -> bool:
    return bool(job.shares) and job.shares[0].node in pool.nodes


def _class_of(job: JobView, there: Sequence[ClassPool]) -> str:
    return next((pool.gpu for pool in there if _is_in(job, pool)), "")


def _chosen(table: Floats, per_rank: Floats, gpus: Floats) -> list[int]:
    """The class of each: of no more GPUs than there are where prices can bring that about."""
    jobs, classes, widest = table.shape
    cost = (per_rank[:, None] * np.arange(widest))[:, None, :]
    total = np.where(np.isfinite(table), table, 0.0).max(axis=(1, 2), initial=0.0).sum()
    price = np.full(classes, total / max(1.0, gpus.sum()))
    net = table - price[None, :, None] * cost
    rounds = int(min(ROUNDS_MOST, max(ROUNDS_LEAST, WORK_MOST / max(1, table.size))))
    for count in range(rounds):
        best = net.reshape(jobs, -1).argmax(axis=1)
        column, ranks = np.divmod(best, widest)
        taken = np.bincount(column, per_rank * ranks, minlength=classes)
        over = np.clip((taken - gpus) / np.maximum(gpus, 1.0), -1.0, 1.0)
        price *= np.exp(STEP * SMALLER**count * over)
        net = table - price[None, :, None] * cost
    return [int(each) for each in net[:, :, 1:].max(axis=2, initial=-np.inf).argmax(axis=1)]


def deal_each(bids: Sequence[B], there: Sequence[ClassPool], deal: Callable[[Sequence[B], int], None]) -> None:
    """Deal the GPUs of each class.  Who is to change its class keeps what is reserved for it until it has."""
    movers = [bid for bid in bids if bid.changes_class and bid.reserved]
    reserved = {bid.job.job_id: bid.reserved for bid in movers}
    for pool in there:
        kept = [reserved[bid.job.job_id] * bid.per_rank for bid in movers if _is_in(bid.job, pool)]
        left = pool.gpus - sum(kept)
        of_class = [bid for bid in bids if bid.gpu == pool.gpu]
        for bid in of_class:
            bid.reserved = 0 if bid.job.job_id in reserved else bid.reserved
        deal(of_class, left)
        for bid in of_class:
            bid.reserved = reserved.get(bid.job.job_id, bid.reserved)
            if bid.changes_class and bid.ranks < bid.reserved:
                bid.ranks, bid.changes_class = bid.reserved, False
                _settle(bid, _class_of(bid.job, there))
