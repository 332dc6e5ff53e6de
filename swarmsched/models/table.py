"""A job's speed by world size, for people: as measured where it ran, else as the planner's fit predicts it."""

from math import ceil, isfinite

from swarmsched.estimate import BatchRange, SpeedPoint, SpeedQuestion, SpeedRow, SpeedTable, batches_of
from swarmsched.models.batch import split
from swarmsched.models.fit import fit_speed
from swarmsched.models.goodput import StepTimes

ROWS_MOST = 10


def tabulate(question: SpeedQuestion) -> SpeedTable:
    """No rows where nothing was measured.  The global batch is the one that was measured first."""
    estimate = question.estimate
    if not estimate.points:
        return SpeedTable()
    fitted = fit_speed(estimate.points)
    times, batches = StepTimes(estimate.speed or fitted.model, estimate.points), batches_of(estimate)
    rows = [_row(question, times, batches, ranks) for ranks in _sizes(question)]
    error = estimate.speed_error if estimate.speed else fitted.error
    return SpeedTable(tuple([row for row in rows if row is not None]), batches.first, error)


def _sizes(question: SpeedQuestion) -> list[int]:
    """All of them if they are few, else the ends, powers of two, what was measured and what it has."""
    least, most = question.ranks_least, question.ranks_most
    if most - least < ROWS_MOST:
        return list(range(least, most + 1))
    known = {point.ranks for point in question.estimate.points} | {question.held}
    sizes = {least, most, *(2**power for power in range(16)), *known}
    return sorted(size for size in sizes if least <= size <= most)


def _row(question: SpeedQuestion, times: StepTimes, batches: BatchRange, ranks: int) -> SpeedRow | None:
    point = _measured(question, ranks)
    if point is not None:
        batch = point.ranks * point.local_batch
        return SpeedRow(ranks, point.nodes, point.step_s, batch / point.step_s, is_measured=True)
    nodes, dealt = ceil(ranks / question.ranks_per_node), split(batches.first, ranks, batches)
    step_s = times.step_s(ranks, nodes, *dealt) if dealt else 0.0
    if not step_s or not isfinite(step_s):
        return None
    return SpeedRow(ranks, nodes, step_s, batches.first / step_s, is_measured=False)


def _measured(question: SpeedQuestion, ranks: int) -> SpeedPoint | None:
    """Where it runs now if it is of that size, else on the fewest nodes."""
    points = [point for point in question.estimate.points if point.ranks == ranks and point.step_s]
    here = [point for point in points if (ranks, point.nodes) == (question.held, question.held_nodes)]
    return min(here or points, key=lambda point: point.nodes, default=None)
