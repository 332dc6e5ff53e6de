"""What models predicted of the sizes that plans gave to jobs, held against what their ranks then report."""

from collections.abc import Set as AbstractSet

from swarmsched.effects import Announce
from swarmsched.estimate import Estimate
from swarmsched.ids import JobId
from swarmsched.policies.base import amount
from swarmsched.resources import nodes_of
from swarmsched.view import Decision


class Foretold:
    """The newest prediction of each job, until its first report from there."""

    def __init__(self) -> None:
        self._decisions: dict[JobId, Decision] = {}

    @property
    def jobs(self) -> AbstractSet[JobId]:
        """Of which there is a prediction."""
        return self._decisions.keys()

    def note(self, decision: Decision) -> None:
        """A plan's decision is followed."""
        self.forget(decision.job_id)
        if decision.step_s > 0.0:
            self._decisions[decision.job_id] = decision

    def forget(self, job_id: JobId) -> None:
        """The job is not shepherded here any more."""
        self._decisions.pop(job_id, None)

    def check(self, job_id: JobId, told: Estimate) -> list[Announce]:
        """An event with the relative error, where the report is of the size and the batch that was predicted."""
        decision = self._decisions.get(job_id)
        if decision is None or not told.points:
            return []
        target, point = decision.target, told.points[-1]
        batch_off = abs(point.ranks * point.local_batch - target.global_batch)
        if (point.ranks, point.nodes) != (target.ranks, nodes_of(target.shares)) or batch_off > point.ranks:
            return []
        self.forget(job_id)
        error = abs(point.step_s - decision.step_s) / decision.step_s
        size = amount(target.ranks, "rank")
        text = f"{decision.step_s:.3g} s a step were predicted for {size}, and {point.step_s:.3g} s measured"
        fields = {"predicted_s": decision.step_s, "measured_s": point.step_s, "error_ratio": round(error, 4)}
        return [Announce("model.checked", text, job_id, fields=fields)]
