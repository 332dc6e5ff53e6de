"""Tiresias-G, discretised two-dimensional Gittins index (Gu et al., NSDI 2019, section 3.2).

Classes, promotion and preemption are those of `tiresias`.  Within a class the largest index goes first: how likely a
job ends within the next `D` GPU-seconds, for each GPU-second that it is expected to take of them,

    P(S - a <= D | S > a) / E[min(S - a, D) | S > a]

with `a` its service so far, `S` the service of a job as learned from those that have ended, and `D` the upper bound of
its class; the last has none, and looks ahead to the end.  Beyond all that was ever seen the index is 0.  Ties are those
of `tiresias`.  While few jobs have ended, quantiles of a log-normal distribution stand in for the missing ones.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import exp, inf
from statistics import NormalDist

from swarmsched.policies.tiresias import Tiresias
from swarmsched.view import EndedJob


class Services:
    """Services of ended jobs in GPU-seconds."""

    def __init__(self, gpu_s: Sequence[float]) -> None:
        self._gpu_s = sorted(gpu_s)
        self._sums = [0.0, *accumulate(self._gpu_s)]

    def index(self, attained_gpu_s: float, ahead_gpu_s: float) -> float:
        """Gittins index of a job that looks so far ahead; 0 for one that has had more than any other."""
        first = bisect_right(self._gpu_s, attained_gpu_s)
        if first == len(self._gpu_s):
            return 0.0
        end = bisect_right(self._gpu_s, attained_gpu_s + ahead_gpu_s)
        expected_gpu_s = self._sums[end] - self._sums[first] - attained_gpu_s * (end - first)
        if end < len(self._gpu_s):
            expected_gpu_s += ahead_gpu_s * (len(self._gpu_s) - end)
        return (end - first) / expected_gpu_s if expected_gpu_s > 0.0 else inf  # sums of nearly equal numbers cancel


class Gittins(Tiresias):
    """See above."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        super().__init__(parameters)
        self._prior_jobs = int(parameters["prior_jobs"])
        self._prior_median_gpu_s = parameters["prior_median_gpu_s"]
        self._prior_deviation = parameters["prior_deviation"]

    def _merit(self, history: Sequence[EndedJob]) -> Callable[[float], float]:
        ended = [job.card.attained_gpu_s for job in history if job.card.attained_gpu_s]
        services = Services([*ended, *self._prior(self._prior_jobs - len(ended))])
        return lambda counted_gpu_s: services.index(counted_gpu_s, self._bound_gpu_s(counted_gpu_s))

    def _prior(self, count: int) -> list[float]:
        """Quantiles in GPU-seconds; none for a count below 1."""
        spread = [NormalDist().inv_cdf((number + 0.5) / count) for number in range(count)]
        return [self._prior_median_gpu_s * exp(self._prior_deviation * each) for each in spread]
