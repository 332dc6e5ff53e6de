"""What ranks report of their training through the task socket: checked, counted, and kept in memory alone.

A figure that cannot be is left out by name and the others are taken: a loss that became NaN must not hide how far the
job has come.  Of each task there is one `Progress`, whatever is sent and however often.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm_agent.task.tasksocket import PENALTY_S, PER_SECOND_MOST, Budget, Declined, Request, fitting, shown
from swarmsched.estimate import BATCH_MOST, Estimate, coarse
from swarmsched.fields import RANK_MOST
from swarmsched.ids import TaskKey
from swarmsched.models.progress import FIGURES, GOALS, Progress
from swarmsched.task import TaskOrder

FIGURE_MOST = 1e15
ROUNDS = ("rounds", "outer_version", "round_wait")
"""Of ranks that train apart: rounds that were merged, the version that is held, the part of the time that is waited."""
TRAINED = ("loss", "grad_noise")  # figures that become NaN when training goes wrong
LEARNERS_MOST = 512  # of one task
STAMP_AGE_MOST_S = 60.0
TELL_EVERY_S = 5.0
ODDITIES = ("backward", "bad_type", "clock", "contradiction", "frozen", "not_finite", "out_of_range", "too_many")
"""What is counted beside the reports that were taken."""


@dataclass(slots=True)
class Reported:
    """What a task has told so far.  `oddities` counts by the names of `ODDITIES`, `problem` is the newest in words."""

    progress: Progress = field(default_factory=Progress)
    reported_utc_s: float = 0.0
    oddities: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    told: Estimate | None = None  # to the job's shepherd, and when
    told_s: float = -math.inf
    world: tuple[int, int] | None = None  # ranks and nodes that train now, where that changes
    batch: int = 0  # with which it is to go on, if it was told
    learners: dict[int, list[float]] = field(default_factory=dict)  # figures of `ROUNDS` by rank
    limit: Budget = field(default_factory=lambda: Budget(PER_SECOND_MOST, PER_SECOND_MOST))


class TaskReports:
    """Answers requests of type `report`; forgets with the task."""

    def __init__(
        self,
        order_of: Callable[[TaskKey], TaskOrder | None],
        tell: Callable[[TaskKey, Estimate, int], None] = lambda key, estimate, batch: None,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` hears what planners should know of a job, from the task that has its rank 0, when that has changed."""
        self._order_of, self._tell, self._clock, self._now = order_of, tell, clock, now
        self._tasks: dict[TaskKey, Reported] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(("taken", *ODDITIES), 0))

    @property
    def tasks(self) -> Mapping[TaskKey, Reported]:
        """Of the tasks of this node that have reported."""
        return self._tasks

    def estimate(self, key: TaskKey) -> Estimate | None:
        """What a card may tell planners of the job, by what its ranks here have reported; None where they have not."""
        order, reported = self._order_of(key), self._tasks.get(key)
        if order is None or reported is None:
            return None
        return reported.progress.estimate(*(reported.world or (order.world_size, len(order.shares))))

    def has_entered_outer(self, key: TaskKey) -> bool:
        """Whether a rank of a task trains apart from the others, or has."""
        return key in self._tasks and bool(self._tasks[key].learners)

    def regroup(self, key: TaskKey, ranks: int, nodes: int) -> None:
        """The ranks of a task train in a world of so many, on so many nodes, from now on."""
        reported = self._of(key)
        if reported.world != (ranks, nodes):
            reported.world = (ranks, nodes)
            reported.progress.regroup()

    def set_batch(self, key: TaskKey, global_batch: int) -> None:
        """Answers tell the ranks from now on to train with that."""
        if key in self._tasks:
            self._tasks[key].batch = global_batch

    def forget(self, key: TaskKey) -> None:
        """The task is no more."""
        self._tasks.pop(key, None)

    async def handle(self, key: TaskKey, request: Request) -> dict[str, Any]:
        """One report; `ignored` of the answer names figures that were left out.  Raises `Refusal`."""
        if self._order_of(key) is None:
            raise Declined("conflict", "this task is over", "end this process")
        reported = self._of(key)
        if not reported.limit.take_one():
            self._note(reported, "too_many", f"more than {PER_SECOND_MOST} reports in a second")
            await asyncio.sleep(PENALTY_S)
            raise Declined("too_many", reported.problem, "report less often, once a second at most")
        rank = request.get("rank", 0)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= RANK_MOST:
            self._note(reported, "out_of_range", f"rank {shown(rank)} is not one of 0 to {RANK_MOST}")
            raise Declined("bad_report", reported.problem, "send the number of the rank, or leave it out")
        figures, ignored = self._sorted_out(reported, request)
        if figures:
            self._take(reported, rank, figures, request.get("time"))
            self._tell_news(key, reported)
        elif ignored:
            raise Declined("bad_report", "; ".join(each["problem"] for each in ignored), ignored[0]["remedy"])
        else:
            raise Declined("bad_report", "it has no figure", f"send some of {', '.join(FIGURES)}")
        return {"ok": True, "ignored": ignored} | ({"global_batch": reported.batch} if reported.batch else {})

    def _of(self, key: TaskKey) -> Reported:
        reported = self._tasks.get(key)
        if reported is None:
            reported = self._tasks[key] = Reported(limit=Budget(PER_SECOND_MOST, PER_SECOND_MOST, self._now))
        return reported

    def _sorted_out(self, reported: Reported, request: Request) -> tuple[dict[str, float], list[dict[str, str]]]:
        """Good figures, and what is wrong with the others; null stands for nothing."""
        figures: dict[str, float] = {}
        ignored = []
        for name in (*FIGURES, *ROUNDS):
            value = request.get(name)
            if value is None:
                continue
            kind, problem, remedy = _fault(name, value)
            if kind:
                self._note(reported, kind, f"{name} {problem}")
                ignored.append({"field": name, "problem": reported.problem, "remedy": remedy})
            else:
                figures[name] = value
        return figures, ignored

    def _take(self, reported: Reported, rank: int, figures: Mapping[str, float], stamp: object) -> None:
        self.counters["taken"] += 1
        reported.reported_utc_s = self._clock()
        if figures.keys() >= set(ROUNDS) and (rank in reported.learners or len(reported.learners) < LEARNERS_MOST):
            reported.learners[rank] = [figures[name] for name in ROUNDS]
        figures = {name: value for name, value in figures.items() if name not in ROUNDS}
        before, now_s, progress = dict(reported.progress.figures), self._now(), reported.progress
        for oddity in progress.take(rank, figures, self._moment(reported, stamp, now_s), now_s):
            grown = ", ".join(f"{name} {before.get(name, 0.0):g} -> {figures[name]:g}" for name in figures)
            told = {
                "contradiction": progress.contradiction,
                "clock": "that of the script runs apart from this node's, by which paces are told",
            }
            self._note(reported, oddity, f"{oddity}: {told.get(oddity, grown)}")

    def _tell_news(self, key: TaskKey, reported: Reported) -> None:
        order = self._order_of(key)
        if order is None or not order.is_of_first_group:
            return
        is_first = order.is_worker or order.node_rank == 0  # of elastic ones only it reports
        if not is_first or self._now() < reported.told_s + TELL_EVERY_S:
            return
        estimate, batch = coarse(self.estimate(key) or Estimate()), reported.progress.global_batch
        # The answer to a batch says with which one to go on, however little else is new.
        if batch or estimate not in (reported.told, Estimate()):
            fitting(Estimate, estimate, "bad_report")
            reported.told, reported.told_s = estimate, self._now()
            self._tell(key, estimate, batch)

    def _moment(self, reported: Reported, stamp: object, now_s: float) -> float:
        """When it was true, by CLOCK_MONOTONIC, which ranks and agent share; else the moment at which it came."""
        if isinstance(stamp, int | float) and now_s - STAMP_AGE_MOST_S <= stamp <= now_s:
            return stamp
        if stamp is not None:
            kept = "the moment at which a report comes counts in its place"
            self._note(
                reported, "clock", f"clock: time {shown(stamp)} is not of the last {STAMP_AGE_MOST_S:g} s; {kept}"
            )
        return now_s

    def _note(self, reported: Reported, kind: str, problem: str) -> None:
        self.counters[kind] += 1
        reported.oddities[kind] += 1
        if kind != "frozen":  # so does every report between two steps
            reported.problem = problem


def _fault(name: str, value: object) -> tuple[str, str, str]:
    """Kind, problem and remedy; empty for a good one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "bad_type", f"{shown(value)} is not a number", "send a plain number"
    if isinstance(value, float) and not math.isfinite(value):
        diverged = "look at the training: it may have diverged"
        return "not_finite", f"{value} is not finite", diverged if name in TRAINED else "send a plain number"
    if name in GOALS and not 0 < value <= FIGURE_MOST:
        return "out_of_range", f"{shown(value)} is not above 0", "leave it out where it is not known"
    if name == "global_batch" and (value != int(value) or not 0 < value <= BATCH_MOST):
        return "out_of_range", f"{shown(value)} is no batch", f"send a whole number from 1 to {BATCH_MOST}"
    if name in ("data_wait", "round_wait") and not 0 <= value <= 1:
        return "out_of_range", f"{shown(value)} is no part of its time", "send a number from 0 to 1"
    if not (-FIGURE_MOST if name == "loss" else 0) <= value <= FIGURE_MOST:
        remedy = f"send {'-' + format(FIGURE_MOST, 'g') if name == 'loss' else '0'} to {FIGURE_MOST:g}"
        return "out_of_range", f"{shown(value)} is out of range", remedy
    return "", "", ""
