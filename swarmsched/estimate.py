"""What is believed of how a job trains: the throughput estimate that cards carry from agent to agent.

Progress counts in steps of the first batch size: a step of a larger batch is worth more of them, though less than its
size says (statistical efficiency: Qiao et al., Pollux, OSDI 2021, section 3.1).
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from swarmsched.fields import U8, U16, U32, Amount, Name, Value
from swarmsched.specification import GPU_BATCHES_MOST

POINTS_LIMIT = 16_384
ROWS_LIMIT = 64
BATCH_MOST = 2**32 - 1
"""What a card can carry of samples."""
INT8_PART = 0.25
"""Of the bytes of 32-bit parameters."""


class SpeedPoint(Value):
    """A measured configuration: seconds of one step without accumulation, and the part that synchronises gradients."""

    ranks: U16
    nodes: U16
    local_batch: U32
    step_s: Amount
    sync_s: Amount = 0.0


class NoisePoint(Value):
    """Variance over squared norm of the gradient of the first batch size, as measured with a global batch."""

    batch: U32
    noise: Amount


class GpuBatch(Value):
    """A limit of local batches on GPUs whose model has `gpu` in its name, in capitals or not."""

    gpu: Name
    most: U32


class BatchRange(Value):
    """Which batch sizes a job allows, in samples; `first` 0 stands for one that may not be changed."""

    first: U32 = 0  # global
    most: U32 = 0  # global
    local_least: U32 = 0
    local_most: U32 = 0
    by_gpu: Annotated[tuple[GpuBatch, ...], Meta(max_length=GPU_BATCHES_MOST)] = ()  # local ones, in place of the most

    def on(self, gpu: str) -> "BatchRange":
        """On GPUs of a class: of several models the least limit counts, and of a class that is not known that of all.

        A limit below the least counts for none: a job gets no GPUs of such a model.
        """
        if not self.by_gpu:
            return self
        every = [self.local_most, *[each.most for each in self.by_gpu]]
        limits = [self._most_on(model) for model in gpu.split("+")] if gpu else every
        possible = [each for each in limits if each >= self.local_least] or [self.local_most]
        return replace(self, local_most=min(possible), by_gpu=())

    def _most_on(self, model: str) -> int:
        """Of several names that a model has in it the least limit counts: nobody runs out of memory by another one."""
        return min([each.most for each in self.by_gpu if each.gpu.lower() in model.lower()], default=self.local_most)

    @property
    def refused_gpus(self) -> tuple[str, ...]:
        """Names of the models that do not hold the least local batch."""
        return tuple([each.gpu for each in self.by_gpu if each.most < self.local_least])


class Resizable(Value):
    """What a job allows to be changed while it lives, and the batch that it has now (0: not told)."""

    ranks_least: U16
    ranks_most: U16
    batches: BatchRange = BatchRange()
    global_batch: U32 = 0
    is_live: bool = False  # it is changed while it trains, for the price of a step


class StepCost(Value):
    """What a step of one rank computes and moves, by the model and its input alone: known before the job ever ran."""

    local_batch: U32  # samples of a rank in a step
    sample_flops: Amount  # forward and backward
    parameter_bytes: Amount
    moved_bytes: Amount  # of gradients in a step: all, but of embeddings the rows that a batch touches
    largest_bytes: Amount = 0.0  # the largest tensor's part of them, where servers hold tensors whole; 0: split evenly
    activation_bytes: Amount = 0.0  # of a sample
    optimizer_slots: U8 = 0  # copies of the parameters
    sample_bytes: Amount = 0.0
    decode_core_s: Amount = 0.0  # core-seconds that the input pipeline spends on a sample

    def apart(self, every: int, *, is_quantised: bool = True) -> "StepCost":
        """The same where ranks train apart: all parameters move to shards and back once in so many steps."""
        moved_bytes = self.parameter_bytes * (INT8_PART if is_quantised else 1.0) / every
        slots = max(1, self.optimizer_slots)  # a shard has outer weights, their momentum and a sum
        return replace(self, moved_bytes=moved_bytes, largest_bytes=0.0, optimizer_slots=slots)


class Estimate(Value):
    """A job's models by their parameters.  Empty where nothing was measured."""

    speed: Annotated[tuple[Amount, ...], Meta(max_length=7)] = ()  # `models.speed.SpeedModel`, in its order
    speed_error: Amount = 0.0  # relative, one standard deviation
    points: Annotated[tuple[SpeedPoint, ...], Meta(max_length=POINTS_LIMIT)] = ()  # measured: they win over the fit
    noise: Annotated[tuple[NoisePoint, ...], Meta(max_length=64)] = ()  # by batch, ascending
    remaining: Amount = 0.0  # steps of the first batch; 0: unknown
    remaining_error: Amount = 0.0  # relative, one standard deviation
    is_prior: bool = False  # taken from jobs of the same kind, not from its own reports
    done: Amount = 0.0  # steps of the first batch; 0: not reported
    work: StepCost | None = None
    is_partial: bool = False  # `points` are of the sizes that were run alone: others are predicted by a fit to them
    gpu: Name = ""  # class of the GPUs on which `points` were measured, of several their names; empty: not known
    warmup_s: Amount = 0.0  # from the start of its ranks until they told how they train; 0: not measured
    data_wait: Amount = 0.0  # the part of its time for which it waits for data, in tenths, 0 to 1
    network_mbit_s: U32 = 0  # of the slowest node of several on which it was measured; 0: not known


STARVES = 0.2
"""Of its time: whoever waits for data for longer would be faster if others loaded it."""

POOL_MOST = 64
Pool = Annotated[tuple[Annotated[bytes, Meta(max_length=1_024)], ...], Meta(max_length=POOL_MOST)]
"""What each of some kinds of jobs has measured last, a packed `Estimate` of points alone: how jobs scale."""


class SpeedQuestion(Value):
    """Of which world sizes a job's speed is to be told, `ranks_per_node` of them on a node, with its present batch."""

    estimate: Estimate
    ranks_least: U16
    ranks_most: U16
    ranks_per_node: U16
    held: U16 = 0  # its ranks now
    held_nodes: U16 = 0
    batches: BatchRange = BatchRange()  # frozen; as declared: without it the batch that was measured first stays
    global_batch: U32 = 0  # 0: the first one
    pool: Pool = ()


class SpeedRow(Value):
    """Seconds of a step with so many ranks on so many nodes, and samples a second of all of them."""

    ranks: U16
    nodes: U16
    step_s: Amount
    samples_per_s: Amount
    is_measured: bool  # else predicted by the fit


class SpeedTable(Value):
    """The model of a job's speed, by world size, ascending."""

    rows: Annotated[tuple[SpeedRow, ...], Meta(max_length=ROWS_LIMIT)] = ()
    global_batch: U32 = 0
    error: Amount = 0.0  # of the fit around what was measured: relative, one standard deviation


MERGED_POINTS = 8
"""Configurations that are remembered of one job: as many as its card holds beside the rest."""


def merged(before: Estimate | None, now: Estimate) -> Estimate:
    """What is reported now, with the points that other configurations left behind, the oldest first.

    Those of other jobs of its kind are dropped once it tells its own, to which planners add them (`models.kinds`); and
    those of another class of GPUs once it has left them.  A time or a noise that is nearly the one that was told before
    is no news.
    """
    if before is None:
        return now
    if before.is_prior:
        before = replace(before, points=(), noise=())
    if before.gpu and now.gpu not in ("", before.gpu):
        before = replace(before, points=())
    networks = (before.network_mbit_s, now.network_mbit_s)
    if all(networks) and _are_apart(*networks, PRIOR_RATIO):
        before = replace(before, points=tuple([each for each in before.points if each.nodes < 2]))
    old = {configuration(each): each for each in before.points}
    new = [each if is_news(old.get(configuration(each)), each) else old[configuration(each)] for each in now.points]
    kept = [each for each in before.points if configuration(each) not in step_times(new)]
    known = {"noise": _noise(before, now), "work": _work(before.work, now.work), "gpu": now.gpu or before.gpu}
    known_there = {"warmup_s": now.warmup_s or before.warmup_s, "network_mbit_s": networks[1] or networks[0]}
    return replace(now, points=(*kept, *new)[-MERGED_POINTS:], **known, **known_there)


NEWS_RATIO = 1.02
"""Times by which the time of a step must have changed: each report moves its mean, and each change makes plans."""


def is_news(before: SpeedPoint | None, now: SpeedPoint) -> bool:
    """Whether the same configuration takes another time than was told."""
    return before is None or _are_apart(before.step_s, now.step_s, NEWS_RATIO)


NOISE_NEWS_RATIO = 1.1
"""The same of a noise: what a planner has computed of one serves until then."""


def is_other_noise(before: float, now: float) -> bool:
    """Whether it is another noise than was told."""
    return _are_apart(before, now, NOISE_NEWS_RATIO)


def _are_apart(one: float, other: float, ratio: float) -> bool:
    return max(one, other) > ratio * min(one, other)


def _noise(before: Estimate, now: Estimate) -> tuple[NoisePoint, ...]:
    are_alike = [each.batch for each in before.noise] == [each.batch for each in now.noise] and not any(
        is_other_noise(old.noise, new.noise) for old, new in zip(before.noise, now.noise, strict=True)
    )
    return before.noise if are_alike else now.noise or before.noise


def _work(before: StepCost | None, now: StepCost | None) -> StepCost | None:
    """What is told now, where it is not nearly what was told before: some of it is measured anew with each report."""
    if before is None or now is None:
        return now or before
    figures = [(getattr(before, name), getattr(now, name)) for name in StepCost.__struct_fields__]
    return now if any(_are_apart(*pair, NOISE_NEWS_RATIO) for pair in figures) else before


def tells_more(before: Estimate | None, now: Estimate | None) -> bool:
    """Whether more has become of it than that the job goes on: what plans rest on."""
    return _basis(before or Estimate()) != _basis(now or Estimate())


def _basis(estimate: Estimate) -> tuple[object, ...]:
    is_known = (bool(estimate.remaining), bool(estimate.work))
    return (estimate.points, estimate.noise, estimate.speed, estimate.is_prior, *is_known)


PRIOR_RATIO = 1.5
"""Times by which a step may differ from that of another job of the same kind."""

FAR_RATIO = 32.0
"""The same for steps of other sizes, beside what their samples explain: a slow network between nodes."""


Configuration = tuple[int, int, int]
"""World size, nodes, local batch."""


def configuration(point: SpeedPoint) -> Configuration:
    """Of what it is a measurement."""
    return (point.ranks, point.nodes, point.local_batch)


LEAST_WORK = 1e-3
"""Operations and bytes: less is none, and no speed follows from it."""


def is_computable(estimate: Estimate) -> bool:
    """Whether all that it tells is of some ranks and samples; agents tell nothing else, but the wire takes it."""
    work = estimate.work
    is_some = work is None or (
        work.local_batch and work.sample_flops > LEAST_WORK and work.parameter_bytes > LEAST_WORK
    )
    are_some = all(all(configuration(each)) for each in estimate.points)
    return bool(is_some and are_some and all(each.batch for each in estimate.noise))


def step_times(points: Sequence[SpeedPoint]) -> dict[Configuration, float]:
    """Seconds of a step by configuration."""
    return {configuration(each): each.step_s for each in points}


def contradicts(known: Mapping[Configuration, float], point: SpeedPoint) -> bool:
    """Whether the same step takes another time: then it is not the same training."""
    there = known.get(configuration(point), point.step_s)
    return _are_apart(there, point.step_s, PRIOR_RATIO)


def are_at_odds(one: SpeedPoint, other: SpeedPoint) -> bool:
    """The same of any two points: more samples of more ranks in less time, or a time far from what samples explain."""
    if configuration(one) == configuration(other):
        return _are_apart(one.step_s, other.step_s, PRIOR_RATIO)
    pairs = list(zip(configuration(one), configuration(other), strict=True))
    is_more, is_less = all(a >= b for a, b in pairs), all(a <= b for a, b in pairs)
    slower, work = one.step_s / other.step_s if other.step_s else inf, one.local_batch / max(1, other.local_batch)
    low = 1.0 / PRIOR_RATIO if is_more else min(1.0, work) / FAR_RATIO
    high = PRIOR_RATIO if is_less else max(1.0, work) * FAR_RATIO
    return not low <= slower <= high


def coarse(estimate: Estimate) -> Estimate:
    """To two digits, so that only what matters makes news; to three what models are fitted to."""
    points = [_coarse_point(each) for each in estimate.points]
    noise = [replace(each, noise=_coarse(each.noise)) for each in estimate.noise]
    left = {"remaining": _coarse(estimate.remaining), "done": _coarse(estimate.done)}
    left |= {"data_wait": round(estimate.data_wait, 1)}
    return replace(estimate, points=tuple(points), noise=tuple(noise), warmup_s=_coarse(estimate.warmup_s), **left)


def _coarse_point(point: SpeedPoint) -> SpeedPoint:
    """Of the two parts of a step that which computes may be the small one: it must not vanish beside the other."""
    step_s, grad_s = _coarse(point.step_s, 3), _coarse(point.step_s - point.sync_s, 3)
    return replace(point, step_s=step_s, sync_s=max(0.0, step_s - grad_s))


def _coarse(value: float, digits: int = 2) -> float:
    return float(f"{value:.{digits}g}")


def batches_of(estimate: Estimate | None) -> BatchRange:
    """The global batch that was measured first: a script that says nothing else keeps it when its size changes.

    Local batches are rounded, so of points that may be of one batch that of the fewest ranks tells it best.
    """
    if estimate is None or not estimate.points:
        return BatchRange()
    first = estimate.points[0]
    alike = [each for each in estimate.points if abs(_batch(each) - _batch(first)) <= (each.ranks + first.ranks) / 2]
    batch = min(_batch(min(alike, key=lambda each: each.ranks)), BATCH_MOST)
    return BatchRange(batch, batch, 1, batch)


def _batch(point: SpeedPoint) -> int:
    return point.ranks * point.local_batch
