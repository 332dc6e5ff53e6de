"""How many cores AutoPS' packing leaves reserved for aggregation: `make science SCIENCE_TABLES=autops`, in seconds.

Jobs are drawn from the distributions that are told beside the table, and packed; nothing is measured.
"""

import random
from collections.abc import Callable, Sequence
from statistics import mean

from swarmsched.aggregation.packing import Capacity, Test, pack, packs_in_cycle, problem
from swarmsched.shards import ShardLoad

COUNTS = (2, 5, 10, 20, 40)
SEEDS = 20
SERVERS = (1, 2, 2, 4)  # of a job, a core each
BUSY = (0.05, 0.45)  # of a server's time
PERIODS_S = (0.2, 0.3, 0.4, 0.6, 0.8)
OUTER_PERIODS_S = (30.0, 1_800.0)
PARAMETERS = (1e7, 1e9)
LEARNERS = (2, 4, 8)
CPU_S = 2e-9  # of an outer step, for each parameter and learner: kernels, and TLS both ways
CORE = Capacity(1.0)
Shards = Sequence[tuple[str, ShardLoad]]


def steps(rng: random.Random, count: int, *, is_alike: bool) -> Shards:
    """Parameter servers of jobs that aggregate at each step: as many shards as a job has servers."""
    shards = []
    for job in range(count):
        servers, busy = rng.choice(SERVERS), rng.uniform(*BUSY)
        period_s = rng.choice(PERIODS_S) if is_alike else rng.uniform(PERIODS_S[0], PERIODS_S[-1])
        shards += [(str(job), ShardLoad(busy * period_s, 0.0, period_s))] * servers
    return shards


def outer_steps(rng: random.Random, count: int) -> Shards:
    """One server of each job, which merges what its learners have changed now and then."""
    shards = []
    for job in range(count):
        (least_s, most_s), (few, many) = OUTER_PERIODS_S, PARAMETERS
        period_s = least_s * (most_s / least_s) ** rng.random()
        cpu_s = CPU_S * few * (many / few) ** rng.random() * rng.choice(LEARNERS)
        shards.append((str(job), ShardLoad(cpu_s, 0.0, period_s)))
    return shards


def _waits_little(loads: Sequence[ShardLoad], capacity: Capacity) -> bool:
    return not problem(loads, capacity)


ROWS: tuple[tuple[str, Callable[[random.Random, int], Shards], Test], ...] = (
    ("steps, five periods", lambda rng, count: steps(rng, count, is_alike=True), packs_in_cycle),
    ("steps, any period", lambda rng, count: steps(rng, count, is_alike=False), packs_in_cycle),
    ("outer steps", outer_steps, packs_in_cycle),
    ("outer steps, by waits", outer_steps, _waits_little),
)


def saved(make: Callable[[random.Random, int], Shards], fits: Test, count: int) -> list[float]:
    """By which part fewer cores are reserved than one for each server, seed by seed."""
    drawn = [make(random.Random(f"{seed} {count}"), count) for seed in range(SEEDS)]
    return [1 - len(pack(shards, CORE, fits)) / len(shards) for shards in drawn]


def table() -> str:
    """A row for each kind of job and test, a column for each number of jobs."""
    text = [f"| jobs | {' | '.join(map(str, COUNTS))} |", f"|{'---|' * (len(COUNTS) + 1)}"]
    for name, make, fits in ROWS:
        ratios = [saved(make, fits, count) for count in COUNTS]
        cells = [f"{mean(each):.0%} ({min(each):.0%} to {max(each):.0%})" for each in ratios]
        text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(text)
