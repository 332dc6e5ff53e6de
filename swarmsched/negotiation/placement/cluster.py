"""What the decision where jobs of ours may run needs to know of everybody else."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from swarmsched.api import JobSpec
from swarmsched.estimate import Estimate, Pool
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import Demand, Share
from swarmsched.view import EndedJob, JobView, KindView, NodeView


class Cluster(Protocol):
    """What the agent believes of everybody else (`node.cluster.Cluster`)."""

    @property
    def jobs(self) -> Mapping[JobId, JobView]:
        """Live jobs by their gossiped cards."""

    @property
    def history(self) -> tuple[EndedJob, ...]:
        """Jobs that have ended anywhere, the oldest first."""

    @property
    def pool(self) -> Pool:
        """How some kinds of jobs scale."""

    def prior(self, spec: JobSpec) -> Estimate | None:
        """What jobs like it have measured."""

    def gpu_class(self, shares: Iterable[Share], demand: Demand) -> str:
        """Names of the GPUs that ranks have there."""

    def kinds(self, jobs: Iterable[JobView], nodes: Iterable[NodeView]) -> tuple[KindView, ...]:
        """All that is known of the kinds of those that take several sizes."""

    def take_job_news(self) -> Sequence[JobId]:
        """Jobs whose entry in `jobs` has come, changed or gone since this was last asked."""

    def can_act(self, job: JobView, now_s: float) -> bool:
        """True while another live node shepherds it."""

    def nodes(self) -> list[NodeView]:
        """Every known node."""

    def could_take(self, spec: JobSpec, without: Collection[NodeId], *, once_well: bool) -> bool:
        """True when the others of them could hold a job, once whatever runs there has ended, or once they are well."""

    def drained(self) -> set[NodeId]:
        """Those of them that take no new work on somebody's wish."""
