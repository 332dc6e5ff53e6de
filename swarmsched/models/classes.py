"""How much faster jobs are on GPUs of one class than on those of another, learned from kinds measured on both.

The logarithm of the ratio of two classes is taken to be normal around what their peaks say (`hosts.PEAKS`; nothing
where one is not known); kinds differ from one another around their mean, and what a kind has measured counts most.
"""

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import median
from typing import Protocol

from swarmsched.estimate import Configuration
from swarmsched.models.hosts import peak_flops

PRIOR_DEVIATION = 0.5
"""Of the logarithm: peaks are of multiplications alone, and models wait for memory and input as well."""
KIND_DEVIATION = 0.3
"""By which kinds differ from one another."""
OWN_DEVIATION = 0.1
"""Of what a kind has measured on both."""

Kind = tuple[str, ...]


class ClassTimes(Protocol):
    """Times of steps on GPUs of one class."""

    gpu: str
    known: dict[Configuration, float]


class ClassSpeeds:
    """By what kinds have measured."""

    def __init__(self, measured: Sequence[tuple[Kind, ClassTimes]]) -> None:
        self._seen: dict[tuple[str, str], dict[Kind, float]] = {}
        by_kind: dict[Kind, dict[str, dict[Configuration, float]]] = {}
        for kind, speeds in measured:
            if speeds.gpu and "+" not in speeds.gpu:
                by_kind.setdefault(kind, {})[speeds.gpu] = speeds.known
        for kind, by_gpu in by_kind.items():
            for known, step_s in by_gpu.items():
                for gpu, other_s in by_gpu.items():
                    logs = [log(step_s[each] / other_s[each]) for each in step_s if other_s.get(each) and step_s[each]]
                    if gpu != known and logs:
                        self._seen.setdefault((known, gpu), {})[kind] = median(logs)
        self._ratios: dict[tuple[Kind | None, str, str], tuple[float, float]] = {}

    def ratio(self, kind: Kind, known: str, gpu: str) -> tuple[float, float]:
        """How many times as fast a job of the kind is on `gpu` as on `known`; and the least that is likely."""
        own = kind if kind in self._seen.get((known, gpu), {}) else None
        key = (own, known, gpu)
        if key not in self._ratios:
            self._ratios[key] = self._ratio(own, known, gpu)
        return self._ratios[key]

    def _ratio(self, own: Kind | None, known: str, gpu: str) -> tuple[float, float]:
        if known == gpu or not known:
            return (1.0, 1.0)
        seen = self._seen.get((known, gpu), {})
        peaks = (peak_flops(known), peak_flops(gpu))
        mean, weight = log(peaks[1] / peaks[0]) if all(peaks) else 0.0, PRIOR_DEVIATION**-2
        for value in seen.values():
            mean = (mean * weight + value * KIND_DEVIATION**-2) / (weight + KIND_DEVIATION**-2)
            weight += KIND_DEVIATION**-2
        deviation = sqrt(1.0 / weight + KIND_DEVIATION**2)
        if own is not None:
            weights = (deviation**-2, OWN_DEVIATION**-2)
            mean = (mean * weights[0] + seen[own] * weights[1]) / sum(weights)
            deviation = 1.0 / sqrt(sum(weights))
        return (exp(mean), exp(mean - deviation))
