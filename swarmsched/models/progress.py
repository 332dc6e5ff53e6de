"""How far a job has come and when it will be done, by what its script reports of itself.

Reports tell counts since the beginning of training (steps, samples, epochs), so that one that is lost costs nothing.
Seconds per unit are those of the whole attempt, pauses for validation and checkpoints included.  No numpy here: agents
keep this beside the tasks that they run.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

from swarmsched.estimate import BATCH_MOST, Estimate, NoisePoint, SpeedPoint, StepCost
from swarmsched.models.convergence import DEVIATIONS, LossCurve, middle
from swarmsched.models.hosts import DENSE_FLOPS

COUNTS = ("step", "samples", "epoch")
TOTALS = {"total_steps": "step", "total_epochs": "epoch"}
"""What a script may declare, in the order in which it is believed, and the count that grows to it."""
GOALS = (*TOTALS, "target_loss")
MODEL = ("parameter_bytes", "moved_bytes", "largest_bytes", "sample_flops", "decode_core_s")
"""What the model computes and moves in a step, and its input pipeline: fields of `estimate.StepCost`."""
FIGURES = (*COUNTS, *GOALS, "loss", "grad_noise", "global_batch", "data_wait", *MODEL)

BLOCKS_LIMIT = 64
BLOCKS_FOR_INTERVAL = 4
RECENT = 16
BLOCK_S = 0.1
"""Shorter ones would measure how late reports come."""
LEAST = 1e-9
"""Of growth that counts: with less, nonsense could make rates infinite."""
STEPS_MOST = 1e15
"""More than anybody will train."""
ERROR_MOST = 1e6
"""Relative; one of what is nearly done could be of any size."""
CLOCK_S, LATE_S, CLOCK_ERROR = 10.0, 1.0, 0.1
"""Over at least so many seconds a job's clock is compared with that of its agent; between two looks it may come to be
late or early by so many, as reports are, and by so much of the time that went by."""
CONTRADICTS = 1.5
"""Times by which two figures that should agree may differ."""
ANEW = 2.0
"""Whoever has come so many times as far as it said that there was to go was wrong about its end."""


class End(NamedTuple):
    """Where training will end: the count that grows to it, at least and at most where that is not certain."""

    goal: str  # of `GOALS`
    grows: str
    at: float
    low: float
    high: float | None  # None: perhaps never


@dataclass(frozen=True, slots=True)
class Remaining:
    """Seconds that are left; the interval is None while too little was seen to tell one."""

    seconds: float
    low_s: float | None = None
    high_s: float | None = None


@dataclass(slots=True)
class Pace:
    """Seconds per unit of a count that grows, from at most `BLOCKS_LIMIT` blocks of time, merged in pairs when full."""

    _last: float | None = None
    _begin: tuple[float, float] = (0.0, 0.0)  # count and time at which the open block begins
    _blocks: list[tuple[float, float]] = field(default_factory=list)  # units and seconds
    _shortest_s: float = BLOCK_S
    _mark: tuple[float, float] = (0.0, 0.0)  # as `_begin`, of what is recent
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def observe(self, count: float, at_s: float) -> str:
        """`backward` when it fell, and all begins anew; `frozen` when it did not grow; else empty."""
        last, self._last = self._last, count
        if last is None or count < last:
            self._begin = self._mark = (count, at_s)
            self._shortest_s = BLOCK_S
            self._blocks.clear()
            self._recent.clear()
            return "" if last is None else "backward"
        if count - last < LEAST:
            return "frozen"
        if at_s - self._mark[1] >= BLOCK_S:
            self._recent.append((count - self._mark[0], at_s - self._mark[1]))
            self._mark = (count, at_s)
        if at_s - self._begin[1] >= self._shortest_s:
            self._blocks.append((count - self._begin[0], at_s - self._begin[1]))
            self._begin = (count, at_s)
            if len(self._blocks) >= BLOCKS_LIMIT:
                self._merge()
        return ""

    @property
    def recent_s(self) -> float | None:
        """Seconds per unit lately: a median, so that single pauses do not count."""
        return middle([seconds / units for units, seconds in self._recent]) if self._recent else None

    def remaining(self, units: float) -> Remaining | None:
        """Time for so many more; None before a block is complete.

        The blocks are taken for independent, with a variance in proportion to their units: the prediction's is that of
        the units to come, and that of the mean.
        """
        if not self._blocks:
            return None
        done, spent_s = sum(block[0] for block in self._blocks), sum(block[1] for block in self._blocks)
        unit_s, seconds = spent_s / done, units * spent_s / done
        if len(self._blocks) < BLOCKS_FOR_INTERVAL:
            return Remaining(seconds)
        squares = sum((block_s - unit_s * block) ** 2 / block for block, block_s in self._blocks)
        variance = squares / (len(self._blocks) - 1)
        reach_s = DEVIATIONS * sqrt(variance * units * (1.0 + units / done))
        return Remaining(seconds, max(0.0, seconds - reach_s), seconds + reach_s)

    def _merge(self) -> None:
        pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
        self._blocks = [(first[0] + second[0], first[1] + second[1]) for first, second in pairs]
        self._shortest_s *= 2.0


@dataclass(slots=True)
class ScriptClock:
    """A job's clock, beside that of whoever hears its reports. Once it has run apart from it twice, one look after
    the other and in one direction, it is wrong for good. A report that is late once is early afterwards."""

    is_wrong: bool = False
    _last: tuple[float, float] | None = None  # by both
    _late_s: float = 0.0  # if the last look saw them apart

    def time_s(self, told_s: float, heard_s: float) -> float:
        """When a report was true that tells the one and was heard at the other moment."""
        if self.is_wrong:
            return heard_s
        last_told_s, last_heard_s = self._last = self._last or (told_s, heard_s)
        passed_s = heard_s - last_heard_s
        if passed_s >= CLOCK_S:
            late_s = passed_s - (told_s - last_told_s)
            is_apart = abs(late_s) > LATE_S + CLOCK_ERROR * passed_s
            self.is_wrong = is_apart and late_s * self._late_s > 0.0
            self._late_s, self._last = late_s if is_apart else 0.0, (told_s, heard_s)
        return heard_s if self.is_wrong else told_s


class Progress:
    """What one task's ranks have reported.  Of each figure the lowest rank that tells it counts."""

    def __init__(self) -> None:
        self._figures: dict[str, float] = {}
        self._declared: dict[str, tuple[float, float]] = {}  # by total: it and its count when it was told first
        self._clock = ScriptClock()
        self._ranks: dict[str, int] = {}
        self._paces = {name: Pace() for name in COUNTS}
        self._curve = LossCurve()
        self._newest_s = 0.0

    @property
    def figures(self) -> Mapping[str, float]:
        """The newest of each that was told."""
        return self._figures

    @property
    def rank(self) -> int:
        """The lowest that reports."""
        return min(self._ranks.values(), default=0)

    def take(self, rank: int, figures: Mapping[str, float], at_s: float, heard_s: float | None = None) -> list[str]:
        """Take in names of `FIGURES` with good values; what is odd about them: `backward`, `frozen`, `clock`,
        `contradiction`.

        `at_s` is when they were true, as the rank has it, and `heard_s` (else the same) when the caller heard of them,
        by whose clock paces are told once the rank's is wrong.
        """
        if heard_s is not None and rank <= self.rank:
            at_s = self._time_s(at_s, heard_s)
        odd = ["clock"] * self._clock.is_wrong
        self._newest_s = at_s = max(self._newest_s, at_s)
        if figures.get("global_batch", self.global_batch) != self.global_batch:
            self.regroup()
        counting = {name: value for name, value in figures.items() if rank <= self._ranks.get(name, rank)}
        for name, value in counting.items():
            is_other = rank < self._ranks.get(name, rank)
            self._ranks[name], self._figures[name] = rank, value
            if name in COUNTS:
                # Two ranks are never at the same place.
                pace = self._paces[name] = Pace() if is_other else self._paces[name]
                odd.append(pace.observe(value, at_s))
            if name == "step" and (is_other or odd[-1] == "backward"):
                self._curve = LossCurve()
        if "loss" in counting and "step" in self._figures:
            self._curve.observe(self._figures["step"], counting["loss"])
        if "backward" in odd:
            self._declared.clear()
        for total, count in TOTALS.items():
            if {total, count} <= self._figures.keys():
                self._declared.setdefault(total, (self._figures[total], self._figures[count]))
        odd += ["contradiction"] * bool(self.contradiction)
        return sorted(set(filter(None, odd)))

    def _time_s(self, told_s: float, heard_s: float) -> float:
        """When a report was true; all paces begin anew where that is by another clock from now on."""
        was_wrong, at_s = self._clock.is_wrong, self._clock.time_s(told_s, heard_s)
        if self._clock.is_wrong and not was_wrong:
            self.regroup()
        return min(at_s, heard_s)

    def regroup(self) -> None:
        """Others train from now on: how fast they are is measured anew."""
        self._paces = {name: Pace() for name in COUNTS}

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, lately."""
        return self._paces["step"].recent_s

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second, lately."""
        seconds = self._paces["samples"].recent_s
        return 1.0 / seconds if seconds else None

    @property
    def global_batch(self) -> int:
        """With which it trains; 0 where it does not say."""
        return min(round(self._figures.get("global_batch", 0.0)), BATCH_MOST)

    @property
    def end(self) -> End | None:
        """By what was declared, or where the loss will come down to its target; None where neither tells."""
        for total, count in TOTALS.items():
            if {total, count} <= self._figures.keys() and not self._recedes(total):
                at = self._figures[total]
                return End(total, count, at, at, at)
        target = self._figures.get("target_loss")
        reach = self._curve.reach(target) if target else None
        return End("target_loss", "step", *reach) if reach else None

    @property
    def contradiction(self) -> str:
        """Which figures say something against one another, in words; empty where none do."""
        figures, parts = self._figures, {}
        for total, count in TOTALS.items():
            there, at = figures.get(count), figures.get(total)
            if there is None or not at:
                continue
            if there > at * 1.01:
                return f"{count} {there:g} is beyond {total} {at:g}"
            if self._recedes(total):
                before, began = self._declared[total]
                return f"{total} was {before:g} at {count} {began:g}, and is {at:g} at {count} {there:g}"
            parts[f"{count} {there:g} of {at:g}"] = there / at
        if len(parts) > 1 and max(parts.values()) > CONTRADICTS * min(parts.values()) > 0.0:
            return " and ".join(parts)
        step_s, samples_per_s, batch = self.step_s, self.samples_per_s, self.global_batch
        if step_s and samples_per_s and batch:
            seen = step_s * samples_per_s
            if max(seen, batch) > CONTRADICTS * min(seen, batch):
                return f"a step has {seen:.3g} samples, and global_batch is {batch}"
        return ""

    def _recedes(self, total: str) -> bool:
        """Whether an end that was declared has gone away from whoever went towards it."""
        before, began = self._declared.get(total, (inf, 0.0))
        at, there = self._figures[total], self._figures[TOTALS[total]]
        return at > before and there - began > ANEW * max(before - began, 1.0)

    @property
    def ratio(self) -> float | None:
        """Part of the way to the end that is done, at most 1."""
        end = self.end
        return min(1.0, self._figures[end.grows] / end.at) if end and end.at else None

    @property
    def remaining(self) -> Remaining | None:
        """Until the end, at the pace of this attempt."""
        end = self.end
        if end is None:
            return None
        pace, done = self._paces[end.grows], self._figures[end.grows]
        if end.at <= done:
            return Remaining(0.0, 0.0, 0.0)
        middle = pace.remaining(end.at - done)
        soonest = pace.remaining(max(0.0, end.low - done))
        latest = None if end.high is None else pace.remaining(end.high - done)
        if middle is None or soonest is None or soonest.low_s is None:
            return middle
        return Remaining(middle.seconds, soonest.low_s, latest.high_s if latest else None)

    def estimate(self, ranks: int, nodes: int) -> Estimate:
        """What a card may tell planners of it; `ranks` and `nodes` are those of the whole job.

        One measured point and no fit, which is the planner's (`models.fit`): a step is taken to have one
        micro-step, since nobody tells of more, and no part of it to synchronise.  What is left is known where it was
        declared; the batch is taken to be the first one.
        """
        step, step_s, samples_per_s = self._figures.get("step", 0.0), self.step_s, self.samples_per_s
        batch = self.global_batch or (round(step_s * samples_per_s) if step_s and samples_per_s else 0)
        local_batch, noise = round(batch / ranks), self._figures.get("grad_noise")
        is_known = step_s is not None and local_batch > 0 and batch <= BATCH_MOST
        points = (SpeedPoint(ranks, nodes, local_batch, step_s),) if step_s and is_known else ()
        return Estimate(
            points=points,
            noise=(NoisePoint(batch, noise),) if noise is not None and is_known else (),
            remaining=self._steps_left(step),
            remaining_error=self._error(step),
            done=step,
            is_partial=bool(points),
            work=self._work(local_batch) if is_known else None,
            data_wait=self._figures.get("data_wait", 0.0),
        )

    def _work(self, local_batch: int) -> StepCost | None:
        """What its model is, where it tells how large it is."""
        parameter_bytes, moved, largest, flops, decode_s = [self._figures.get(name, 0.0) for name in MODEL]
        if not parameter_bytes:
            return None
        moved, flops = moved or parameter_bytes, flops or DENSE_FLOPS * parameter_bytes
        return StepCost(local_batch, flops, parameter_bytes, moved, min(largest, moved), decode_core_s=decode_s)

    def _steps_left(self, step: float) -> float:
        """0: not known, or none."""
        end = self.end
        if end is None or not step:
            return 0.0
        count = self._figures[end.grows]
        steps_each = step / count if count else 0.0  # of a step itself 1
        steps = max(0.0, end.at - count) * steps_each
        return steps if steps <= STEPS_MOST else 0.0

    def _error(self, step: float) -> float:
        """Relative standard deviation of the steps that are left; 0 where they were declared."""
        end = self.end
        if end is None or end.at <= step or end.low == end.at:
            return 0.0
        return min(ERROR_MOST, (end.at - end.low) / DEVIATIONS / (end.at - step))
