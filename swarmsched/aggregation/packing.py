"""Which shards go together on one aggregator: bursts of CPU and of a link, each once in its shard's period.

AutoPS runs the tasks of an aggregator in cycles of the longest period: a job with a shorter one gets as many rounds as
fit, and what is left over of the cycle is its loss (Gu's thesis, the parameter service).  That refuses 30 s beside
50 s.  An aggregator of ours serves whoever comes, so only the time that bursts wait for one another is lost: `problem`
asks for that, and `packs_in_cycle` is the published test.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swarmsched.shards import ShardLoad

LOSS_MOST = 0.1  # of a period
RARE = 0.01  # waits that one round in a hundred exceeds are not promised
ROUNDING = 1e-9


class Capacity(NamedTuple):
    """What a set of shards may take of a node on average: cores, and bytes a second of its link."""

    cores: float
    link: float = math.inf


Test = Callable[[Sequence[ShardLoad], Capacity], bool]


def packs_in_cycle(loads: Sequence[ShardLoad], capacity: Capacity, loss_most: float = LOSS_MOST) -> bool:
    """The published test, in two dimensions: all bursts fit into a cycle, and no job loses more than that of it."""
    cycle_s = max((each.period_s for each in loads), default=0.0)
    counts = [math.floor(cycle_s / each.period_s + ROUNDING) for each in loads]
    pairs = list(zip(counts, loads, strict=True))
    is_over = sum(count * each.cpu_s for count, each in pairs) > capacity.cores * cycle_s + ROUNDING
    is_over |= sum(count * each.link_bytes for count, each in pairs) > capacity.link * cycle_s + ROUNDING
    return not is_over and all(cycle_s <= (1 + loss_most) * count * each.period_s + ROUNDING for count, each in pairs)


def pack(shards: Sequence[tuple[str, ShardLoad]], capacity: Capacity, fits: Test) -> list[list[int]]:
    """The shards of each aggregator, by their places in a list of (job, load), as AutoPS assigns them.

    Who has the longest burst comes first: where its job is served already, else where the least is left that suffices,
    else to one aggregator more, which then has what fits nowhere to itself.
    """
    aggregators: list[list[int]] = []

    def loads(of: Sequence[int]) -> list[ShardLoad]:
        return [shards[place][1] for place in of]

    def rank(of: Sequence[int]) -> tuple[bool, float]:
        return any(shards[each][0] == job for each in of), max(_busy(loads(of), capacity))

    for place in sorted(range(len(shards)), key=lambda place: -shards[place][1].cpu_s):
        job, load = shards[place]
        fitting = [each for each in aggregators if fits([*loads(each), load], capacity)]
        if not fitting:
            fitting = [[]]
            aggregators += fitting
        max(fitting, key=rank).append(place)
    return aggregators


def burst_s(load: ShardLoad, capacity: Capacity) -> float:
    """How long a round keeps an aggregator busy that does nothing else; one merges on one core."""
    return max(load.cpu_s, _over(load.link_bytes, capacity.link))


def wait_s(others: Sequence[ShardLoad], capacity: Capacity) -> float:
    """For how long 99 of 100 rounds wait at most for those of others, should these come at any time.

    As behind a queue with random arrivals (Pollaczek and Khinchine), and never longer than all others together.
    """
    bursts = [(burst_s(each, capacity), each.period_s) for each in others]
    busy = sum(burst / period for burst, period in bursts)
    if busy >= 1:
        return math.inf
    if busy <= RARE:
        return 0.0
    rest_s = sum(burst * burst / period for burst, period in bursts) / (2 * busy)
    return min(rest_s / (1 - busy) * math.log(busy / RARE), sum(burst for burst, _ in bursts))


def problem(loads: Sequence[ShardLoad], capacity: Capacity) -> str:
    """Why these do not go together, in words for people; empty where they do."""
    for what, ratio in zip(("cores", "link"), _busy(loads, capacity), strict=True):
        if ratio > 1 + ROUNDING:
            return f"the {what} given to aggregation would be taken {ratio:.2g} times"
    for place, each in enumerate(loads):
        waited_s = wait_s([*loads[:place], *loads[place + 1 :]], capacity)
        if waited_s > LOSS_MOST * each.period_s:
            return f"a round each {each.period_s:.3g} s would wait {waited_s:.3g} s for others"
    return ""


def idle(loads: Sequence[ShardLoad], capacity: Capacity) -> int:
    """Thousandths that are left of what is given, of the scarcer of cores and link."""
    return math.floor(1_000 * (1 - min(1.0, max(_busy(loads, capacity)))))


def _busy(loads: Sequence[ShardLoad], capacity: Capacity) -> tuple[float, float]:
    cores, link = sum(each.cores for each in loads), sum(each.link_bytes_per_s for each in loads)
    return _over(cores, capacity.cores), _over(link, capacity.link)


def _over(amount: float, room: float) -> float:
    return amount / room if room > 0 else math.inf if amount > 0 else 0.0
