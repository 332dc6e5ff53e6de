"""A job's speed by world size, for people: as measured where it ran, else as the planner's fit predicts it."""

from math import ceil, isfinite

from swarmsched.estimate import ROWS_LIMIT, SpeedPoint, SpeedQuestion, SpeedRow, SpeedTable, batches_of
from swarmsched.models.batch import Split, split
from swarmsched.models.fit import fit_speed
from swarmsched.models.goodput import StepTimes
from swarmsched.models.scaling import scaled
from swarmsched.models.speed import usable

ROWS_MOST = 10


def tabulate(question: SpeedQuestion) -> SpeedTable:
    """No rows where nothing was measured."""
    estimate = usable(question.estimate)
    if not estimate.points:
        return SpeedTable()
    fitted = fit_speed(estimate.points)
    (believed,) = scaled([estimate], question.pool)
    times = StepTimes(believed.speed or fitted.model, estimate.points)
    batches = question.batches if question.batches.first else batches_of(estimate)
    batch = question.global_batch or batches.first
    rows = [_row(question, times, batch, split(batch, ranks, batches), ranks) for ranks in _sizes(question)]
    error = estimate.speed_error if estimate.speed else fitted.error
    return SpeedTable(tuple([row for row in rows if row is not None]), batch, error)


def _sizes(question: SpeedQuestion) -> list[int]:
    """All of them if they are few, else the ends, powers of two, what was measured and what it has."""
    least, most = question.ranks_least, question.ranks_most
    if most - least < ROWS_MOST:
        return list(range(least, most + 1))
    measured = sorted({point.ranks for point in question.estimate.points})
    sizes = dict.fromkeys((least, most, question.held, *(2**power for power in range(16)), *measured))
    return sorted([size for size in sizes if least <= size <= most][:ROWS_LIMIT])


def _row(question: SpeedQuestion, times: StepTimes, batch: int, dealt: Split | None, ranks: int) -> SpeedRow | None:
    if dealt is None:
        return None
    point = _measured(question, ranks, dealt.local_batch)
    nodes = point.nodes if point is not None else ceil(ranks / question.ranks_per_node)
    is_measured = point is not None and dealt.micro_steps == 1
    step_s = point.step_s if point is not None and is_measured else times.step_s(ranks, nodes, *dealt)
    if not step_s or not isfinite(step_s):
        return None
    return SpeedRow(ranks, nodes, step_s, batch / step_s, is_measured)


def _measured(question: SpeedQuestion, ranks: int, local_batch: int) -> SpeedPoint | None:
    """Where it runs now if it is of that size, else on the fewest nodes; local batches are told in whole samples."""
    points = [
        point
        for point in question.estimate.points
        if point.ranks == ranks and abs(point.local_batch - local_batch) <= 1 and point.step_s
    ]
    here = [point for point in points if (ranks, point.nodes) == (question.held, question.held_nodes)]
    return min(here or points, key=lambda point: point.nodes, default=None)
