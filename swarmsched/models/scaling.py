"""How a job scales where it has not been measured: as the jobs of all kinds do.

Each kind's measurements give the parameters of the speed model as parts of the time that a gradient takes there: what
it costs to synchronise gradients on one node and across nodes, what each further rank adds, how much of it is hidden.
Their medians, and how far kinds are apart, are a prior for the fit of any job: it decides where nothing was measured,
and gives way to what was.  Where no job waits the better quartiles are: a size that looks good is tried, at nobody's
cost, and then known.  How fast a job is it tells nothing of: that is for the job's own first report.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from math import log
from statistics import median

from msgspec.structs import replace

from swarmsched.estimate import Estimate, SpeedPoint
from swarmsched.models.fit import Prior, fit_speeds, informed_by
from swarmsched.models.speed import SpeedModel, usable
from swarmsched.wire.codec import decode_value

KINDS_LEAST = 3
"""Kinds that must tell of a parameter: of fewer nobody knows how far they are apart."""
NOISE = 0.05
"""Relative standard deviation of what is reported."""
NORMAL = 1.4826
SPREAD_LEAST = 0.5
"""Of logarithms: kinds are not taken to be more alike, however alike the few are that were seen."""
LIKELY, HOPEFUL = 0.5, 0.25
"""Part of the kinds that scale better than a job is taken to."""
STEPS = 4.0
"""Into so many parts a logarithm is rounded: with each other prior all fits are made anew."""
PARTS = (-7.0, 3.0)
"""Logarithms of the parts that count: others are nonsense, or nothing."""
POINTS_MOST = 16
"""Of a job that has measured more its own fit tells best."""
KEPT = 8_192
NEW_MOST = 256
"""Fits that are made for one plan; the others' turn comes with the next."""

_Points = tuple[SpeedPoint, ...]
_Parts = tuple[float | None, ...]
_fitted: OrderedDict[tuple[_Points, Prior], SpeedModel] = OrderedDict()
_parts: OrderedDict[_Points, _Parts] = OrderedDict()


def scaled(estimates: Sequence[Estimate], pool: Sequence[bytes], part: float = LIKELY) -> list[Estimate]:
    """The estimates, with a fit to what each has measured that goes by all kinds beside; `pool` holds some points of
    each kind, packed.  `part`: of the kinds that are better than the prior."""
    prior = prior_of(pool, part)
    if prior is None:
        return list(estimates)
    asked = [usable(each).points if _is_fitted(each) else () for each in estimates]
    new = list(dict.fromkeys([each for each in asked if each and (each, prior) not in _fitted]))[:NEW_MOST]
    for points, fitted in zip(new, fit_speeds(new, prior), strict=True):
        _fitted[points, prior] = fitted.model
    _forget(_fitted)
    return [
        replace(each, speed=tuple(model)) if (model := _fitted.get((points, prior))) is not None else each
        for each, points in zip(estimates, asked, strict=True)
    ]


def prior_of(pool: Sequence[bytes], part: float = LIKELY) -> Prior | None:
    """What kinds have in common; None where nothing is known of how any scales."""
    tables = [points for body in pool if len(points := _unpacked(body)) > 1]
    new = list(dict.fromkeys([each for each in tables if each not in _parts]))
    for points, fitted in zip(new, fit_speeds(new), strict=True):
        _parts[points] = _parts_of(points, fitted.model)
    _forget(_parts)
    parts = [_parts[each] for each in tables]
    by_parameter = zip(*parts, strict=True) if parts else ()
    *costs, overlaps = [[each for each in values if each is not None] for values in by_parameter] or [[]]
    told = [*[_parted(each, part) for each in costs], _parted(overlaps, 1.0 - part)]
    weights = tuple([weight for _, weight in told])
    return Prior(tuple([mean for mean, _ in told]), weights) if any(weights) else None


def _is_fitted(estimate: Estimate) -> bool:
    return estimate.is_partial and not estimate.speed and 0 < len(estimate.points) <= POINTS_MOST


def _parted(values: Sequence[float], part: float) -> tuple[float, float]:
    """What a part of the values stays below, and how much it counts beside one measurement."""
    if len(values) < KINDS_LEAST:
        return 0.0, 0.0
    there, middle = sorted(values)[round(part * (len(values) - 1))], median(values)
    spread = max(SPREAD_LEAST, NORMAL * median([abs(each - middle) for each in values]))
    return round(there * STEPS) / STEPS, NOISE / round(spread * STEPS) * STEPS


def _parts_of(points: _Points, model: SpeedModel) -> _Parts:
    """Logarithms of the parameters that the points tell of, as parts of the time of a gradient; a sample's part is what
    is left of it."""
    grad_s = max(median([each.step_s - each.sync_s for each in points]), 1e-9)
    scales = (grad_s, 0.0, *[grad_s] * 4, 1.0)
    low, high = PARTS
    return tuple([
        min(max(low, log(max(value, 1e-12) / scale)), high) if is_told and scale else None
        for value, scale, is_told in zip(model, scales, informed_by(points), strict=True)
    ])  # fmt: skip


@lru_cache(maxsize=KEPT)
def _unpacked(body: bytes) -> _Points:
    return usable(decode_value(Estimate, body)).points


def _forget(kept: OrderedDict[_Points, _Parts] | OrderedDict[tuple[_Points, Prior], SpeedModel]) -> None:
    """Those that were made longest ago."""
    while len(kept) > KEPT:
        kept.popitem(last=False)
