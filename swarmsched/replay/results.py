"""What a replay came to: completion times, use of the GPUs, and how restless the decisions were."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from swarmsched.ids import JobId, handle
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.job import ReplayJob

REVERSAL_S = 60.0
"""A job that is grown and shrunk again within this was decided wrongly once."""


SIZES = (1, 4, 16)
"""Jobs of at most so many GPUs are told apart over time, and those of more."""


class Slice(NamedTuple):
    """Seconds in which nothing changed: GPUs of nodes that were up, and those that jobs of each size held."""

    seconds: float
    usable: int
    held: tuple[int, ...]


@dataclass
class RunLog:
    """Told of all that happens; both kinds of replay write here."""

    cluster: Fleet
    jobs: int
    first_s: float = 0.0  # when the first of them comes: before that there is no use to be made of GPUs
    finished: list[ReplayJob] = field(default_factory=list)
    busy_gpu_s: float = 0.0
    idle_gpu_s_while_work_waits: float = 0.0
    capacity_gpu_s: float = 0.0
    refused_holds: int = 0
    reversed_decisions: int = 0
    elapsed_s: float = 0.0
    plan_s: list[float] = field(default_factory=list)
    view_ages_s: list[float] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    policy_errors: int = 0
    first_policy_error: str = ""
    node_failures: int = 0
    restarts: int = 0
    lost_gpu_s: float = 0.0
    guessed_shapes: int = 0  # times that a job was given GPUs of which nobody has measured as many
    left: Sequence[ReplayJob] = ()
    gave_up: str = ""
    _idle_while_waiting: int = 0
    _waited_for_s: float = 0.0  # job-seconds of all that had come and not ended
    _came: dict[JobId, tuple[float, float]] = field(default_factory=dict)  # these and the time, when a job came
    _rivals: dict[JobId, float] = field(default_factory=dict)  # jobs that were there on average while it was
    _grown: dict[JobId, tuple[float, int]] = field(default_factory=dict)
    _ranks: dict[JobId, int] = field(default_factory=dict)

    def passed(self, live: Sequence[ReplayJob], seconds: float) -> None:
        """Time went by with these allocations."""
        held = [0] * (len(SIZES) + 1)
        for job in live:
            self._came.setdefault(job.job_id, (self._waited_for_s, self.elapsed_s))
            held[bisect_left(SIZES, job.ranks)] += job.ranks
        self.slices.append(Slice(seconds, self.cluster.usable, tuple(held)))
        self.elapsed_s += seconds
        self._waited_for_s += seconds * len(live)
        self.busy_gpu_s += seconds * sum(held)
        self.capacity_gpu_s += min(seconds, max(0.0, self.elapsed_s - self.first_s)) * self.cluster.usable
        self.idle_gpu_s_while_work_waits += seconds * self._idle_while_waiting

    def planned(self, seconds: float) -> None:
        """A plan was made in so long."""
        self.plan_s.append(seconds)

    def seen(self, age_s: float) -> None:
        """A planner saw a job's GPUs as they were last so long ago; 0: as they are."""
        self.view_ages_s.append(age_s)

    def refused(self) -> None:
        """A decision could not be followed: its place was taken, or the job does not take the size."""
        self.refused_holds += 1

    def policy_failed(self, problem: str) -> None:
        """A plan could not be made or followed, and another one took its place."""
        self.policy_errors += 1
        self.first_policy_error = self.first_policy_error or problem

    def nodes_failed(self, nodes: int, lost_gpu_s: Sequence[float]) -> None:
        """So many nodes went down, and each job on them lost its hosts, and so much training."""
        self.node_failures += nodes
        for each_s in lost_gpu_s:
            self.lost_hosts(each_s)

    def lost_hosts(self, lost_gpu_s: float) -> None:
        """A job lost its hosts, and so much training."""
        self.restarts += 1
        self.lost_gpu_s += lost_gpu_s

    def guessed(self) -> None:
        """A job got a shape that its tables do not have."""
        self.guessed_shapes += 1

    def ended(self, job: ReplayJob) -> None:
        """A job is done."""
        self.finished.append(job)
        waited_for_s, came_s = self._came.pop(job.job_id, (self._waited_for_s, self.elapsed_s))
        lasted_s = self.elapsed_s - came_s
        self._rivals[job.job_id] = (self._waited_for_s - waited_for_s) / lasted_s if lasted_s else 1.0
        self._grown.pop(job.job_id, None)
        self._ranks.pop(job.job_id, None)

    def stopped(self, left: Sequence[ReplayJob], gave_up: str = "") -> None:
        """The replay is over, and these jobs have not ended; `gave_up` says why it did not go on, if it could have."""
        self.left, self.gave_up = left, gave_up

    def decided(self, live: Sequence[ReplayJob], now_s: float) -> None:
        """A plan was followed, or nodes have failed."""
        idle = self.cluster.usable - sum([job.ranks for job in live])
        self._idle_while_waiting = idle if any(not job.shares for job in live) else 0
        for job in live:
            before, after = self._ranks.get(job.job_id, 0), job.ranks
            if after > before > 0:
                self._grown[job.job_id] = (now_s, before)
            elif 0 < after < before and now_s - self._grown.get(job.job_id, (-REVERSAL_S, 0))[0] <= REVERSAL_S:
                self.reversed_decisions += 1
            self._ranks[job.job_id] = after

    def unfinished(self) -> list[dict[str, str]]:
        """The jobs that have not ended, each with the reason."""
        return [{"job_id": job.label, "reason": self._why_unfinished(job)} for job in self.left]

    def _why_unfinished(self, job: ReplayJob) -> str:
        least = job.least
        if least > self.cluster.total:
            return f"needs {least} GPUs, and there are {self.cluster.total}"
        if least > self.cluster.usable and not self.gave_up:
            return f"needs {least} GPUs, and nodes that are up have {self.cluster.usable}"
        if job.physics.alone_s(self.cluster) == inf:
            return "makes no progress on any GPUs that are there"
        if job.shares and job.ends_in_s() == inf:
            return f"makes no progress on the {job.ranks} GPUs that it has"
        return self.gave_up or f"the policy let it wait{f': {self._named(job.told)}' if job.told else ''}"

    def _named(self, told: str) -> str:
        """With the names that jobs have in the table, in place of their handles."""
        names = {handle(job.job_id): job.label for job in (*self.finished, *self.left)}
        return re.sub(r"\b[0-9a-z]{8}\b", lambda found: names.get(found[0], found[0]), told)

    @property
    def times_s(self) -> list[float]:
        """Completion times of the finished jobs."""
        return [(job.ended_s or 0.0) - job.submitted_s for job in self.finished]

    def summary(self) -> dict[str, Any]:
        """The figures; times in seconds, None where no job has finished."""
        times = self.times_s
        ends = [job.ended_s for job in self.finished if job.ended_s is not None]
        begin_s = min((job.submitted_s for job in self.finished), default=0.0)
        slowdowns, unfairness = self._slowdowns(), self._unfairness()
        due = [job for job in (*self.finished, *self.left) if job.terms.deadline_s]
        return {
            "jobs": self.jobs,
            "finished": len(self.finished),
            "failed": sum([job.has_failed for job in self.finished]),
            "avg_jct_s": _rounded(np.mean(times)) if times else None,
            "median_jct_s": _rounded(np.median(times)) if times else None,
            "p99_jct_s": _rounded(np.percentile(times, 99)) if times else None,
            "makespan_s": _rounded(max(ends) - begin_s) if ends else None,
            "avg_slowdown": _rounded(np.mean(slowdowns), 3) if times else None,
            "p99_slowdown": _rounded(np.percentile(slowdowns, 99), 3) if times else None,
            "rho_p50": _rounded(np.percentile(unfairness, 50), 3) if times else None,
            "rho_p99": _rounded(np.percentile(unfairness, 99), 3) if times else None,
            "rho_worst": _rounded(max(unfairness), 3) if times else None,
            "deadlines": len(due),
            "deadlines_met": sum([_is_in_time(job) for job in due]),
            "gpu_utilisation_ratio": round(self.busy_gpu_s / self.capacity_gpu_s, 4) if self.capacity_gpu_s else 0.0,
            "rescales": sum([job.rescales for job in self.finished]),
            "rescales_per_job": _rounded(np.mean([job.rescales for job in self.finished]), 2) if times else None,
            "rescales_most": max([job.rescales for job in self.finished], default=0),
            "migrations": sum([job.migrations for job in self.finished]),
            "preemptions": sum([job.preemptions for job in self.finished]),
            "node_failures": self.node_failures,
            "restarts": self.restarts,
            "lost_gpu_s": _rounded(self.lost_gpu_s),
            "policy_errors": self.policy_errors,
            "view_age_p50_s": _rounded(np.percentile(self.view_ages_s, 50), 3) if self.view_ages_s else 0.0,
            "view_age_p99_s": _rounded(np.percentile(self.view_ages_s, 99), 3) if self.view_ages_s else 0.0,
            "plan_ms_p50": _rounded(np.percentile(self.plan_s, 50) * 1e3, 3) if self.plan_s else None,
            "plan_ms_p99": _rounded(np.percentile(self.plan_s, 99) * 1e3, 3) if self.plan_s else None,
            "guessed_shapes": self.guessed_shapes,
            "refused_holds": self.refused_holds,
            "reversed_decisions": self.reversed_decisions,
            "idle_gpu_seconds_while_work_waits": _rounded(self.idle_gpu_s_while_work_waits),
            "unfinished": self.unfinished(),
        }

    def _slowdowns(self) -> list[float]:
        """Completion time over the best possible one, alone on the idle cluster, of each finished job."""
        best = [job.physics.alone_s(self.cluster) * (job.terms.failure or 1.0) for job in self.finished]
        return [time_s / best_s for time_s, best_s in zip(self.times_s, best, strict=True)]

    def _unfairness(self) -> list[float]:
        """Finish-time fairness of each finished job, rho (Mahajan et al., Themis, NSDI 2020): its completion time over
        that alone on an equal share of the GPUs, among as many jobs as were there on average while it was."""
        found = []
        for job in self.finished:
            share = self.cluster.total / max(1.0, self._rivals[job.job_id])
            found.append(((job.ended_s or 0.0) - job.submitted_s) / job.share_s(self.cluster, share))
        return found


def _is_in_time(job: ReplayJob) -> bool:
    return job.ended_s is not None and not job.has_failed and job.ended_s <= job.terms.deadline_s


def _rounded(value: "np.floating[object] | float", digits: int = 1) -> float:  # type: ignore[type-var]
    return round(float(value), digits)
