"""What jobs on several nodes that share one cost one another, learned from what they report of their steps.

Their gradients go through the same network interface.  How much that costs depends on the network, so it is taken to be
nothing until jobs have been seen alone and beside another, in the same configuration: then as the mean of what each
lost by it, over jobs of all kinds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta, field
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.estimate import Configuration, configuration
from swarmsched.fields import Amount, Value
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import nodes_of, of_first, world_size
from swarmsched.view import JobView

DOUBT = 0.5
"""Of the mean: as if so many jobs more had lost nothing."""
PART_LEAST, PART_MOST = 0.03, 0.5
"""Of speed: less is noise, and more is something else."""
JOBS_KEPT = 256


class PairTimes(Value):
    """Seconds of a step of one job in one configuration, alone and beside another job on several nodes."""

    configuration: Configuration
    is_beside: bool
    alone_s: Amount = 0.0  # 0: not seen so
    beside_s: Amount = 0.0
    is_settled: bool = False  # what it reports now was measured as it is now


class Interference(Value):
    """What was seen so far; the newest last."""

    witnesses: Annotated[dict[str, PairTimes], Meta(max_length=JOBS_KEPT)] = field(default_factory=dict)
    lost: Annotated[dict[str, float], Meta(max_length=JOBS_KEPT)] = field(
        default_factory=dict
    )  # parts of speed, by job

    @property
    def part(self) -> float:
        """The part of its speed that a job loses beside another; 0 where that is not known or too little."""
        part = sum(self.lost.values()) / (len(self.lost) + DOUBT)
        return min(part, PART_MOST) if part >= PART_LEAST else 0.0

    def seen(self, jobs: Iterable[JobView]) -> "Interference":
        """With what jobs tell now.  A time counts as one of its surroundings once they were so at the look before."""
        spread = {job.job_id: {each.node for each in of_first(job.shares)} for job in jobs if nodes_of(job.shares) > 1}
        counts = Counter([node for nodes in spread.values() for node in nodes])
        witnesses: dict[str, PairTimes] = {}
        lost = dict(self.lost)
        for job in jobs:
            if job.job_id in spread and (now := self._witness(job, spread, counts)):
                witnesses[job.job_id] = now
                if now.alone_s and now.beside_s:
                    lost.pop(job.job_id, None)
                    lost[job.job_id] = max(-PART_MOST, min(1.0 - now.alone_s / now.beside_s, PART_MOST))
        return Interference(dict(list(witnesses.items())[-JOBS_KEPT:]), dict(list(lost.items())[-JOBS_KEPT:]))

    def _witness(
        self, job: JobView, spread: Mapping[JobId, set[NodeId]], counts: Mapping[NodeId, int]
    ) -> PairTimes | None:
        told = job.own or job.card.estimate
        if told is None or told.is_prior or not told.points or job.state is not JobState.RUNNING:
            return None
        newest = told.points[-1]
        if (newest.ranks, newest.nodes) != (world_size(job.shares), len(spread[job.job_id])):
            return None
        is_beside = any(counts[node] > 1 for node in spread[job.job_id])
        before = self.witnesses.get(job.job_id)
        if before is None or before.configuration != configuration(newest):
            before = PairTimes(configuration(newest), is_beside)
        if before.is_beside != is_beside:
            return replace(before, is_beside=is_beside, is_settled=False)
        if not before.is_settled:
            return replace(before, is_settled=True)
        return replace(before, beside_s=newest.step_s) if is_beside else replace(before, alone_s=newest.step_s)
