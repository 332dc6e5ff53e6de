"""Workloads and profiles drawn from a seed, for replays where nobody has recorded jobs.

Nothing here is measured: the constants are round figures of the orders that they have on real servers, and each says
what it stands for.  The speeds do not follow the form that planners fit (`models/speed.py`), so that a policy whose
model is perfect here would be one that has seen the truth.

A step computes, and exchanges gradients around a ring of its GPUs: each link carries nearly twice the gradient, in as
many hops.  Part of the exchange hides behind the backward pass, all but the last bucket.  The gradient gets noisier as
training goes on, so large batches are worth more towards the end.  Lengths and sizes of jobs have heavy tails: each
class of lengths brings about as much work as the class below it, which has four times as many jobs.
"""

import csv
import io
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import pi, sin
from typing import Any, NamedTuple

from swarmsched.errors import ConfigError
from swarmsched.replay.measurements import MODELS, THROUGHPUT, VALIDATION
from swarmsched.replay.profiles import Shape, even

FLOPS = 20e12
"""Operations a second that training sustains on a GPU of the usual class: a fifth of what its fastest units promise."""
INSIDE_BYTES_S, BETWEEN_BYTES_S = 25e9, 10e9
"""Of one link within a server (PCIe, sixteen lanes of the fourth generation), and between servers (100 Gbit/s)."""
INSIDE_HOP_S, BETWEEN_HOP_S = 20e-6, 60e-6
"""Latency of one message within a server, and between servers."""
HIDDEN = 0.6
"""Part of a step's computation that an exchange can hide behind: its backward pass, but for the last layers."""
LAST_BUCKET = 0.1
"""Part of an exchange that nothing hides: the bucket that is filled last."""
CLASSES: Mapping[str, float] = {"middle": 1.0, "large": 2.0, "small": 0.5}
"""Classes of GPUs and how fast each computes, the usual one first: generations of GPUs double."""
LENGTHS = (1, 4, 16, 64)
"""Work of a model's jobs by class of length, in its shortest; a class has as many jobs as it is short."""
EPOCHS = 20
"""Epochs of each job: how often its gradient's noise changes."""
RIGID_S = (600.0, 43_200.0)
"""Run times of jobs of one size: from ten minutes to twelve hours, those of twice the time half as often."""
SHARED = 0.25
"""Part of the jobs on several GPUs that ask for a number that leaves some server to be shared with another job."""
EFFICIENCY_LEAST = 0.5
"""Nobody asks for so many GPUs that each does less than this part of what one alone does."""
GPUS_BY_LENGTH = 0.25
"""GPUs that a job asks for at least, by its length, where that is efficient: nobody waits a week for one."""
SWEEP = (4, 12)
"""Jobs that a user submits at once: one training with several settings, or seeds."""
SWEEP_GAP_S = 5.0
USERS = 12
"""People; the second submits half as much as the first, the third a third."""
DAY_S, MORNING_S, PEAK_S = 86_400.0, 8 * 3_600.0, 15 * 3_600.0
"""A workload begins at eight in the morning, and most jobs come at three in the afternoon."""
RANGE = (0.5, 4.0)
"""Sizes that a job with a model takes, from and to so many times what its user asks for."""
PRIORITY, LIMIT, RESTARTABLE, FAILURE = 0.05, 0.5, 0.5, 0.05
"""Of all jobs, those that go first and those that fail on the way; of those of one size, those that name a time limit
and those that may be begun again."""
LIMIT_OVER, LIMIT_STEP_S = (1.5, 5.0), 600.0
"""A time limit over the run time: people guess high, in steps of ten minutes."""
DEADLINE_OVER = (1.5, 5.0)
"""The time to a deadline over the run time."""
PACKED_MOST = 64
"""GPUs up to which each number was measured on the fewest servers, so that most steps need no interpolation."""
DIGITS_MOST = 64
"""Servers of a placement that is written out; on more, GPUs are even anyway."""
JOBS: tuple[str, ...] = ("job_id", "submit_time_s", "user", "model", "num_gpus", "batch_size", "duration_s")
JOBS += ("min_gpus", "max_gpus", "priority", "time_limit_s", "deadline_s", "restartable", "failure")
"""Columns of the table of jobs.  With profiles a job with a model goes by these; without any by its run time, where it
names no other sizes (`wishes` 0)."""


class Family(NamedTuple):
    """Models that train alike.  `shortest_s`: what its shortest job takes on one GPU with the first batch.

    `noise`: variance of the gradient over its squared norm at the first batch, at the beginning and at the end.
    `gains`: how far it profits of a faster class: its speed to this power; 1 where only arithmetic counts, less where
    memory does.
    """

    name: str
    sample_flops: float  # forward and backward
    parameters: float
    step_s: float  # kernels' launches, input, optimizer: what a step costs however small it is
    batch: tuple[int, int]  # first and largest
    local_batch: tuple[int, int]
    noise: tuple[float, float]
    gains: float
    shortest_s: float
    restart_s: float  # from the end of one attempt until the next one trains: imports, input, checkpoint

    def step(self, gpus: int, nodes: int, local_batch: int, speed: float = 1.0) -> tuple[float, float]:
        """Seconds of one step without accumulation, and the part of them in which it exchanges gradients."""
        compute_s = self.step_s + local_batch * self.sample_flops / FLOPS / speed**self.gains
        if gpus < 2:
            return compute_s, 0.0
        bytes_s, hop_s = (INSIDE_BYTES_S, INSIDE_HOP_S) if nodes < 2 else (BETWEEN_BYTES_S, BETWEEN_HOP_S)
        ring_s = 2 * (gpus - 1) * (4.0 * self.parameters / gpus / bytes_s + hop_s)
        exposed_s = max(LAST_BUCKET * ring_s, ring_s - HIDDEN * compute_s)
        return compute_s + exposed_s, exposed_s

    @property
    def most(self) -> int:
        """GPUs that its largest batch can be dealt to."""
        return self.batch[1] // self.local_batch[0]

    def asked_batch(self, gpus: int) -> int:
        """What its users take: the first batch for each GPU, up to the largest (the linear scaling rule)."""
        return min(self.batch[0] * gpus, self.batch[1])

    def epochs(self, length: int) -> list[tuple[float, float]]:
        """Progress at the end of each epoch, in steps of the first batch, and the noise within it."""
        steps = length * self.shortest_s / self.step(1, 1, self.batch[0])[0] / EPOCHS
        first, last = self.noise
        return [(steps * (epoch + 1), first * (last / first) ** (epoch / (EPOCHS - 1))) for epoch in range(EPOCHS)]

    def run_s(self, length: int, gpus: int, gpus_per_node: int) -> float:
        """Seconds that a job takes alone on so many GPUs of the usual class, on the fewest servers."""
        local_batch = -(-self.asked_batch(gpus) // gpus)
        batch = local_batch * gpus
        step_s, _ = self.step(gpus, -(-gpus // gpus_per_node), local_batch)
        total_s, before, scale = 0.0, 0.0, batch / self.batch[0]
        for progress, noise in self.epochs(length):
            total_s += (progress - before) * step_s * (noise / scale + 1.0) / (noise + 1.0)
            before = progress
        return total_s


FAMILIES = (
    # Small convolutions on images: cheap samples, a gradient of 100 MB.
    Family("vision", 12e9, 25e6, 0.010, (64, 4_096), (16, 256), (4.0, 80.0), 0.9, 1_800.0, 60.0),
    # Encoders of text, 384 tokens a sample and six operations a token and parameter: the network is the bottleneck.
    Family("language", 250e9, 110e6, 0.020, (16, 512), (4, 16), (8.0, 60.0), 1.0, 3_600.0, 90.0),
    # Recurrent layers over long sequences: many small kernels one after another.
    Family("speech", 60e9, 40e6, 0.150, (16, 640), (8, 64), (2.0, 30.0), 0.6, 3_600.0, 45.0),
    # Large images: few samples fit into memory.
    Family("detection", 200e9, 60e6, 0.030, (8, 256), (2, 16), (4.0, 60.0), 0.9, 7_200.0, 150.0),
    # Tables of embeddings: hardly any arithmetic, so that exchanging gradients is most of it.
    Family("ranking", 50e6, 15e6, 0.004, (512, 32_768), (128, 8_192), (1.0, 20.0), 0.4, 600.0, 20.0),
)

MODELS_DRAWN = tuple([(f"{family.name}-{length}", family, length) for family in FAMILIES for length in LENGTHS])
"""Every model by its name."""


@dataclass(frozen=True)
class Wanted:
    """What is to be drawn.

    `load`: GPU-seconds that the jobs take alone, at the size that they ask for, over what the cluster has while they
    come; it sets how fast they come.  `rigid`: part of the jobs that have no model, only a run time.  `sweeps`: part of
    the jobs that come as one of many alike.  `swing`: how far the rate of arrivals goes up by day and down by night.
    `deadlines`: part of the jobs that have one.  `wishes`: how often users say more than they must (sizes, priority,
    time limit, that a job may be begun again) and jobs fail; 1: as usual, 0: never.
    """

    seed: int = 0
    count: int = 160
    load: float = 1.0
    nodes: int = 16
    gpus_per_node: int = 4
    classes: int = 1
    rigid: float = 0.3
    sweeps: float = 0.3
    swing: float = 0.6
    deadlines: float = 0.1
    wishes: float = 1.0

    @property
    def models(self) -> list[str]:
        """The class of each node's GPUs; empty where there is one class alone."""
        names = [*CLASSES][: self.classes]
        return [names[node % len(names)] if len(names) > 1 else "" for node in range(self.nodes)]

    @property
    def capacity(self) -> float:
        """GPUs of the cluster, in those of the usual class."""
        return self.gpus_per_node * sum(CLASSES.get(model, 1.0) for model in self.models)

    @property
    def gpus_most(self) -> int:
        """GPUs that a job asks for at most: half of those of the smallest class."""
        return max(1, self.nodes // self.classes * self.gpus_per_node // 2)


BOUNDS: Mapping[str, tuple[float, float]] = {
    "seed": (0, 2**63),
    "count": (1, 100_000),
    "load": (0.01, 100.0),
    "nodes": (1, 10_000),
    "gpus_per_node": (1, 64),
    "classes": (1, len(CLASSES)),
    "rigid": (0.0, 1.0),
    "sweeps": (0.0, 1.0),
    "swing": (0.0, 1.0),
    "deadlines": (0.0, 1.0),
    "wishes": (0.0, 1.0),
}
"""Of each field of `Wanted`."""


class Drawn(NamedTuple):
    """One job as its user submits it; without a model it has one size and a run time."""

    user: int
    model: str
    gpus: int
    batch: int
    run_s: float
    most: int  # GPUs that it can use
    begins_on: int  # most GPUs to which its model's first batch can be dealt: no job asks for more at least


def check(wanted: Wanted) -> None:
    """ConfigError names the field that is out of bounds."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(wanted, name)
        if not least <= value <= most:
            raise ConfigError(name.replace("_", "-"), f"{value:g} cannot be used", f"from {least:,g} to {most:,g}")
    if wanted.classes > wanted.nodes:
        problem = f"{wanted.classes} need more than {wanted.nodes} nodes"
        raise ConfigError("classes", problem, f"as many nodes at least, or classes from 1 to {wanted.nodes}")


def files(wanted: Wanted) -> dict[str, str]:
    """The tables that `swarm simulate replay` reads, by name: jobs, their cluster, their profiles."""
    models = wanted.models
    nodes = [(f"n{node + 1:03d}", wanted.gpus_per_node, model) for node, model in enumerate(models)]
    return {
        "jobs.csv": table(JOBS, jobs(wanted)),
        "cluster.csv": table(("node", "gpus", "gpu_model"), nodes),
        "restart_costs.csv": table(
            ("model", "seconds"), [(name, family.restart_s) for name, family, _ in MODELS_DRAWN]
        ),
        **{f"profiles/{name}": text for name, text in profile_tables(wanted).items()},
    }


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV text with a header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


# --- jobs


def jobs(wanted: Wanted) -> list[tuple[Any, ...]]:
    """A row a job, by time of submission; ConfigError as `check`."""
    check(wanted)
    rng = random.Random(wanted.seed)
    submissions = _submissions(rng, wanted)
    work_s = sum(job.gpus * job.run_s for group in submissions for job in group)
    span_s = work_s / (wanted.load * wanted.capacity)
    arrivals = _arrivals(rng, len(submissions), span_s, wanted.swing)
    rows = [
        (arrival_s + SWEEP_GAP_S * place, job)
        for arrival_s, group in zip(arrivals, submissions, strict=True)
        for place, job in enumerate(group)
    ]
    rows.sort(key=lambda row: row[0])
    others = random.Random(f"{wanted.seed} wishes")  # so that jobs are the same whatever else their users say
    return [
        (
            f"job{number}",
            round(time_s, 1),
            f"user{job.user}",
            job.model,
            job.gpus,
            job.batch or "",
            round(job.run_s, 1),
            *_wishes(others, wanted, time_s, job),
        )
        for number, (time_s, job) in enumerate(rows)
    ]


def _wishes(rng: random.Random, wanted: Wanted, time_s: float, job: Drawn) -> tuple[Any, ...]:
    """The columns behind the run time."""
    first, limited, restartable, fails = (
        rng.random() < wanted.wishes * part for part in (PRIORITY, LIMIT, RESTARTABLE, FAILURE)
    )
    limit_s = -(-rng.uniform(*LIMIT_OVER) * job.run_s // LIMIT_STEP_S) * LIMIT_STEP_S
    has_deadline, over, part = rng.random() < wanted.deadlines, rng.uniform(*DEADLINE_OVER), 1.0 - rng.random()
    least, most = (max(1, int(job.gpus * factor)) for factor in RANGE)
    has_range = job.model and wanted.wishes
    return (
        min(least, job.begins_on) if has_range else "",
        min(most, max(job.gpus, job.most), max(job.gpus, wanted.nodes * wanted.gpus_per_node)) if has_range else "",
        1 if first else "",
        limit_s if limited and not job.model else "",  # on fewer GPUs than asked for others would not make it
        round(time_s + over * job.run_s, 1) if has_deadline else "",
        1 if restartable and not job.model else "",
        round(part, 3) or "" if fails else "",
    )


def _submissions(rng: random.Random, wanted: Wanted) -> list[list[Drawn]]:
    """What users submit, one job or several alike at a time."""
    usual = sum(SWEEP) / 2
    is_sweep = wanted.sweeps / (
        wanted.sweeps + (1.0 - wanted.sweeps) * usual
    )  # so that this part of all jobs is in one
    left, found = wanted.count, []
    while left:
        many = rng.randint(*SWEEP) if rng.random() < is_sweep else 1
        group = [_job(rng, wanted)] * min(many, left)
        left -= len(group)
        found.append(group)
    return found


def _job(rng: random.Random, wanted: Wanted) -> Drawn:
    user = _falling(rng, range(1, USERS + 1))
    if rng.random() < wanted.rigid:
        least_s, most_s = RIGID_S
        run_s = least_s / (1.0 - rng.random() * (1.0 - least_s / most_s))
        gpus = _size(rng, wanted, wanted.gpus_most)
        return Drawn(user, "", gpus, 0, run_s, gpus, gpus)
    family, length = rng.choice(FAMILIES), _falling(rng, LENGTHS)
    most = min(wanted.gpus_most, _useful(family, wanted.gpus_per_node))
    gpus = max(_size(rng, wanted, most), min(most, int(length * GPUS_BY_LENGTH)))
    run_s = family.run_s(length, gpus, wanted.gpus_per_node)
    begins_on = family.batch[0] // family.local_batch[0]
    return Drawn(user, f"{family.name}-{length}", gpus, family.asked_batch(gpus), run_s, family.most, begins_on)


def _falling(rng: random.Random, values: Sequence[int]) -> int:
    """One of them, each as often as it is small."""
    return rng.choices(values, [1.0 / value for value in values])[0]


def _size(rng: random.Random, wanted: Wanted, most: int) -> int:
    """GPUs: powers of two as often as they are small, and numbers that fill no server."""
    powers = [1 << power for power in range(most.bit_length())]
    gpus = _falling(rng, powers)
    others = [each for each in range(3, most + 1) if each & (each - 1) and each % wanted.gpus_per_node]
    if gpus > 1 and others and rng.random() < SHARED:
        at = bisect_left(others, gpus)
        return others[min(at, len(others) - 1)]
    return gpus


@cache
def _useful(family: Family, gpus_per_node: int) -> int:
    """The most GPUs that it is efficient on, each power of two before it as well."""
    alone_s, gpus = family.run_s(1, 1, gpus_per_node), 1
    while 2 * gpus <= family.most:
        if alone_s < EFFICIENCY_LEAST * 2 * gpus * family.run_s(1, 2 * gpus, gpus_per_node):
            break
        gpus *= 2
    return gpus


def _arrivals(rng: random.Random, count: int, span_s: float, swing: float) -> list[float]:
    """Times from 0 on within the span, the first at 0; by day they come closer than by night."""
    period = DAY_S / (2.0 * pi)

    def expected(time_s: float) -> float:
        """The integral of `1 + swing * cos(...)`, which is largest at the peak."""
        return time_s + swing * period * sin((time_s + MORNING_S - PEAK_S) / period)

    first, last = expected(0.0), expected(span_s)
    times = sorted(_inverse(expected, first + rng.random() * (last - first), span_s) for _ in range(count))
    return [time_s - times[0] for time_s in times]


def _inverse(rising: Callable[[float], float], value: float, most: float) -> float:
    """Where a function that rises from 0 to `most` has this value."""
    least = 0.0
    for _ in range(48):
        middle = (least + most) / 2.0
        least, most = (middle, most) if rising(middle) < value else (least, middle)
    return least


# --- profiles


def profile_tables(wanted: Wanted) -> dict[str, str]:
    """The three tables of a folder of profiles, as if each model had been measured on each class of GPUs."""
    check(wanted)
    measured = {family: _measured(family, wanted) for family in FAMILIES}
    return {
        "throughput.csv": table(
            (*THROUGHPUT, "gpu"), [(name, *row) for name, one, _ in MODELS_DRAWN for row in measured[one]]
        ),
        "validation.csv": table(
            VALIDATION, [(name, *row) for name, family, length in MODELS_DRAWN for row in _statistics(family, length)]
        ),
        "models.csv": table(
            MODELS, [(name, *family.batch, *family.local_batch, EPOCHS) for name, family, _ in MODELS_DRAWN]
        ),
    }


def _measured(family: Family, wanted: Wanted) -> list[tuple[Any, ...]]:
    """Rows of times: all numbers of GPUs on one server and on two, on more those that fill them evenly."""
    least, most = family.local_batch
    batches = sorted({round(least * (most / least) ** (part / 4)) for part in range(5)} | {family.batch[0]})
    found: list[tuple[Any, ...]] = []
    for gpu in dict.fromkeys(wanted.models):
        # Two servers of two GPUs at least: on fewer, nothing could be interpolated.
        for shape in _shapes(family.most, max(2, wanted.nodes), max(2, wanted.gpus_per_node)):
            digits = "".join(map(str, shape)) if max(shape) < 10 and len(shape) <= DIGITS_MOST else ""
            for batch in [each for each in batches if least <= each <= most]:
                step_s, sync_s = family.step(sum(shape), len(shape), batch, CLASSES.get(gpu, 1.0))
                found.append((digits, len(shape), sum(shape), batch, f"{step_s:.7g}", f"{sync_s:.7g}", gpu))
    return found


def _shapes(most: int, nodes: int, gpus_per_node: int) -> list[Shape]:
    """So that what lies between them is all that a job of at most so many GPUs can have on so many servers."""
    nodes = min(nodes, most)
    steps = {factor << power for factor in (1, 3) for power in range(nodes.bit_length())}
    found = []
    for count in sorted({nodes} | {each for each in steps if each <= nodes}):
        whole = range(count, count * gpus_per_node + 1, 1 if count <= 2 else count)
        largest = min(most, count * gpus_per_node)
        found += [even(gpus, count) for gpus in sorted({largest} | {each for each in whole if each <= most})]
    packed = [_packed(gpus, gpus_per_node) for gpus in range(1, min(most, nodes * gpus_per_node, PACKED_MOST) + 1)]
    return list(dict.fromkeys([*found, *packed]))


def _packed(gpus: int, gpus_per_node: int) -> Shape:
    """On the fewest servers: what most jobs get."""
    whole, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * whole + (rest,) * bool(rest)


def _statistics(family: Family, length: int) -> list[tuple[Any, ...]]:
    first, last = family.batch
    batches = [first << power for power in range((last // first).bit_length())]
    return [
        (batch, number, f"{progress:.9g}", 1.0, f"{noise:.6g}")
        for batch in dict.fromkeys([*batches, last])
        for number, (progress, noise) in enumerate(family.epochs(length), start=1)
    ]
