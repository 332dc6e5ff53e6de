"""The time of a step, as its driver tells it."""

from swarmsched.fields import Value


class Clock(Value):
    """Both times of one moment: monotonic for decisions, UTC for the record."""

    now_s: float
    utc_s: float
