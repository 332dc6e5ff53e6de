"""How long jobs still take, where only those that have ended can tell: an expectation, an interval and an index.

A length is counted in seconds on the GPUs that a job asked for, so that what was served on more or fewer of them counts
by its GPU-seconds.  Lengths of ended jobs make pools, from all of them to those of one number of GPUs (in powers of
two), user, program (script; with its words; from one folder: `program.levels`) and name.  A job's length is distributed
as in its narrowest pool and, by the weight of `PRIOR_JOBS` jobs, as in the next broader one that holds more jobs, and
so on.  Beside what was seen counts a smooth curve, a log-normal one that is drawn
through the pools in the same way from a prior on: between few lengths, and beyond them, nothing was seen.

The index is the smallest of E[min(S - a, d) | S > a] / P(S - a <= d | S > a) over all times d ahead, with a the time
that the job has had: the seconds that one end costs at best.  It is the inverse of the Gittins index, by which those
jobs go first that bring the most ends for their time (Gittins 1979; Tiresias, NSDI 2019), and of a job whose end is
known it is the time that is left: so both kinds stand in one order.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import erfc, exp, inf, isfinite, log, sqrt
from typing import NamedTuple

from swarmsched.card import JobCard
from swarmsched.program import levels
from swarmsched.view import EndedJob

PRIOR_JOBS = 4.0
"""A pool of so many jobs counts as much as the broader ones beside it."""
PRIOR_MEDIAN_S, PRIOR_DEVIATION = 1_800.0, 1.7
"""Before anything has ended: half an hour, and a factor of five and a half around it, as recorded clusters have it."""
LIMIT_USED = 0.3
"""Part of their time limit that jobs are taken to use before their user's other jobs tell: people ask for much more
than they need (Mu'alem and Feitelson 2001)."""
SEEN = 0.8
"""Weight of the lengths themselves, beside the curve through them."""
DEVIATION_LEAST, DEVIATION_MOST = 0.3, 3.0
LEAST_S, MOST_S = 1.0, 1e8
STEPS_AHEAD = tuple([2.0**power for power in range(-5, 9)])
STEP = 0.1
"""Times are rounded to so much of themselves: an order must not change with every second."""
RARE = 1e-3
"""Where fewer of all jobs live so long, nothing is known of them: then they have as many times as much left as they
have had as those just before."""

Parts = tuple[tuple["LengthPool | LogNormal", float], ...]


class TimeLeft(NamedTuple):
    """Seconds on the GPUs that a job asked for: as expected, within which interval (four of five), and its index."""

    expected_s: float
    low_s: float
    high_s: float
    index_s: float


class LogNormal(NamedTuple):
    """A log-normal distribution of lengths: the logarithm of its median, and the deviation of logarithms."""

    mean: float
    deviation: float

    def beyond(self, time_s: float) -> tuple[float, float]:
        """How likely a job takes longer, and the seconds that such jobs take, for each of all."""
        whole_s = exp(self.mean + self.deviation**2 / 2.0)
        if time_s <= 0.0 or time_s == inf:
            return (0.0, 0.0) if time_s else (1.0, whole_s)
        at = (log(time_s) - self.mean) / self.deviation
        return erfc(at / sqrt(2.0)) / 2.0, whole_s * erfc((at - self.deviation) / sqrt(2.0)) / 2.0


PRIOR = LogNormal(log(PRIOR_MEDIAN_S), PRIOR_DEVIATION)


class LengthPool:
    """Logarithms of the lengths of ended jobs."""

    def __init__(self, told: Sequence[tuple[str, float]]) -> None:
        """`told`: the user and the length of each.

        One user's jobs count no more than those of all others and `PRIOR_JOBS` together.
        """
        counts = Counter([user for user, _ in told])
        weight = {
            user: min(1.0, (len(told) - count + PRIOR_JOBS) / count) if len(counts) > 1 else 1.0
            for user, count in counts.items()
        }
        self.jobs = len(told)
        lengths = sorted([(length_s, weight[user]) for user, length_s in told])
        self._logs = [(log(length_s), each) for length_s, each in lengths]
        self.count = sum([each for _, each in lengths])
        self._lengths = [length_s for length_s, _ in lengths]
        self._weights = [0.0, *accumulate([each for _, each in lengths])]
        self._sums = [0.0, *accumulate([length_s * each for length_s, each in lengths])]

    def beyond(self, time_s: float) -> tuple[float, float]:
        """As of the prior."""
        first = bisect_right(self._lengths, time_s)
        return (self.count - self._weights[first]) / self.count, (self._sums[-1] - self._sums[first]) / self.count

    def drawn_to(self, broader: LogNormal) -> LogNormal:
        """The distribution of a kind, as if the broader one had told `PRIOR_JOBS` jobs of it."""
        whole = self.count + PRIOR_JOBS
        mean = (broader.mean * PRIOR_JOBS + sum([each * weight for each, weight in self._logs])) / whole
        spread = PRIOR_JOBS * (broader.deviation**2 + (broader.mean - mean) ** 2)
        spread += sum([weight * (each - mean) ** 2 for each, weight in self._logs])
        return LogNormal(mean, min(max(sqrt(spread / whole), DEVIATION_LEAST), DEVIATION_MOST))


class Lengths:
    """What ended jobs tell of the lengths of others."""

    def __init__(self, history: Iterable[EndedJob]) -> None:
        told: dict[tuple[object, ...], list[tuple[str, float]]] = defaultdict(list)
        for ended in history:
            card, gpus = ended.card, gpus_asked(ended.card)
            if gpus and card.attained_gpu_s > 0.0 and isfinite(card.attained_gpu_s):
                length_s = min(max(card.attained_gpu_s / gpus, LEAST_S), MOST_S)
                for key in _pools(card):
                    told[key].append((card.user, length_s))
        self._pools = {key: LengthPool(each) for key, each in told.items()}
        self._found: dict[tuple[object, ...], TimeLeft] = {}

    def left(self, card: JobCard, attained_gpu_s: float, running_s: float) -> TimeLeft:
        """What is left of a live job by now, on the GPUs that it asked for."""
        had_s, limit_s = attained_gpu_s / max(1, gpus_asked(card)), card.time_limit_s
        rest_s = max(LEAST_S, limit_s - running_s) if limit_s else 0.0
        return self._left(_pools(card)[-1], _rounded(had_s), _rounded(limit_s), _rounded(rest_s))

    def _left(self, pool: tuple[object, ...], had_s: float, limit_s: float, rest_s: float) -> TimeLeft:
        key = (pool, had_s, limit_s, rest_s)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _left(self._parts(pool, limit_s), had_s, rest_s or inf)
        return found

    def _parts(self, narrowest: tuple[object, ...], limit_s: float) -> Parts:
        """The distributions that a job's length is mixed of, each with its weight."""
        smooth, parts = PRIOR, list[tuple[LengthPool | LogNormal, float]]()
        chain = [self._pools.get(narrowest[:count]) for count in range(len(narrowest) + 1)]
        for count, (pool, narrower) in enumerate(pairwise([*chain, None])):
            if limit_s and count == 2:  # the user's own jobs tell more
                smooth, parts = LogNormal(log(limit_s * LIMIT_USED), smooth.deviation), []
            if pool is not None and (narrower is None or narrower.jobs < pool.jobs):  # the same jobs count once
                smooth = pool.drawn_to(smooth)
                part = pool.count / (pool.count + PRIOR_JOBS)
                parts = [*[(each, weight * (1.0 - part)) for each, weight in parts], (pool, SEEN * part)]
        return (*parts, (smooth, 1.0 - sum([weight for _, weight in parts])))


_kept: list[tuple[tuple[str, ...], Lengths]] = []


def lengths_of(history: Sequence[EndedJob]) -> Lengths:
    """The same as for the last plan, where nothing has ended since."""
    ended = tuple([each.card.job_id for each in history])
    if not _kept or _kept[0][0] != ended:
        _kept[:] = [(ended, Lengths(history))]
    return _kept[0][1]


def gpus_asked(card: JobCard) -> int:
    """GPUs of the world size that it asked for; 0 of a job without any."""
    return card.ranks * card.demand.gpus


def _pools(card: JobCard) -> tuple[tuple[object, ...], ...]:
    """From the broadest to the narrowest."""
    program = reversed(levels(card.program))
    narrowest: tuple[object, ...] = (gpus_asked(card).bit_length(), card.user, *program, *filter(None, [card.name]))
    return tuple([narrowest[:count] for count in range(len(narrowest) + 1)])


def _rounded(time_s: float) -> float:
    return exp(round(log(min(time_s, MOST_S)) / STEP) * STEP) if time_s >= LEAST_S else 0.0


def _beyond(parts: Parts, time_s: float) -> tuple[float, float]:
    alive = beyond = 0.0
    for each, weight in parts:
        one = each.beyond(time_s)
        alive, beyond = alive + weight * one[0], beyond + weight * one[1]
    return alive, beyond


def _left(parts: Parts, had_s: float, rest_s: float) -> TimeLeft:
    scale, at_s = 1.0, had_s
    while (found := _beyond(parts, at_s))[0] < RARE:
        at_s /= 1.5
    if at_s < had_s:
        scale, rest_s = had_s / at_s, rest_s * at_s / had_s
    alive, beyond = found
    best_s, expected_s = inf, inf
    unit_s = max(at_s, LEAST_S * 64.0)
    for ahead_s in (*[unit_s * step for step in STEPS_AHEAD], inf):
        is_end = ahead_s >= rest_s
        to_s = at_s + min(ahead_s, rest_s)
        left, left_beyond = _beyond(parts, to_s)
        ends = alive if is_end else alive - left
        waits_s = beyond - left_beyond - at_s * (alive - left) + (left * (to_s - at_s) if left else 0.0)
        expected_s = max(waits_s / alive, LEAST_S)
        if ends > 0.0:
            best_s = min(best_s, max(waits_s / ends, LEAST_S))
        if is_end:
            break
    low_s, high_s = (_quantile(parts, part * alive, at_s, rest_s) for part in (0.9, 0.1))
    return TimeLeft(*[each * scale for each in (expected_s, low_s, high_s, best_s)])


def _quantile(parts: Parts, part: float, had_s: float, rest_s: float) -> float:
    """Seconds after which no more than so large a part of all jobs still runs."""
    low, high = log(max(had_s, LEAST_S)), log(MOST_S)
    for _ in range(20):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _beyond(parts, exp(middle))[0] > part else (low, middle)
    return min(max(exp(low) - had_s, LEAST_S), rest_s)
