"""The fewest GPUs with which a job ends by its deadline: its minimum satisfactory share (ElasticFlow, ASPLOS 2023)."""

from collections.abc import Callable
from enum import Enum

from swarmsched.view import Span

Rate = Callable[[int], float]
"""Progress a second by world size."""


class Prospect(Enum):
    """Whether a job ends by its deadline."""

    MET = "met"  # also if all goes slowly
    LIKELY = "likely"  # as expected
    LATE = "late"
    UNKNOWN = "unknown"


def prospect(end: Span | None, within_s: float) -> Prospect:
    """Of a job that is expected to end so, and has so much time."""
    if end is None:
        return Prospect.UNKNOWN
    if end.expected_s > within_s:
        return Prospect.LATE
    return Prospect.MET if end.high_s is not None and end.high_s <= within_s else Prospect.LIKELY


def least_ranks(work: float, rate: Rate, sizes: tuple[int, int], within_s: float) -> int:
    """The smallest world size of a range, from the least to the most, with which so much work is done in time; 0: none
    is fast enough."""
    least, most = sizes
    enough = work / within_s if within_s > 0.0 else 0.0
    return next((ranks for ranks in range(least, most + 1) if enough and rate(ranks) >= enough), 0)
