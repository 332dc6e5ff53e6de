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


MISSED = 0.1
"""By so much of what is left a job may be late, as expected, before its deadline is given up: lengths are no surer."""


def urgency(within_s: float, left_s: float, ahead_s: float) -> float:
    """How pressing a deadline is: 1 when a job that takes so long must start in `ahead_s`, 2 when it must start now.

    Less before that, and 0 once it cannot end in time any more: then others are not kept waiting for it.
    """
    slack_s = within_s - left_s
    if slack_s < -MISSED * left_s or left_s <= 0.0:
        return 0.0
    return max(0.0, 2.0 - max(0.0, slack_s) / max(ahead_s, 1.0))


def least_ranks(work: float, rate: Rate, sizes: tuple[int, int], within_s: float) -> int:
    """The smallest world size of a range, least to most, with which so much work is done in time; 0 where none is
    fast enough."""
    least, most = sizes
    enough = work / within_s if within_s > 0.0 else 0.0
    return next((ranks for ranks in range(least, most + 1) if enough and rate(ranks) >= enough), 0)
