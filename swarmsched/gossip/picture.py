"""From gossiped entries to the planner's picture of the swarm."""

from collections.abc import Collection, Iterable

from swarmsched.api import JobState
from swarmsched.gossip.card import CardStatus, job_view
from swarmsched.gossip.record import NodeFlag, NodeRecord, NodeStatus, node_view
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.view import ClusterView, JobView, NodeView


def cluster_view(
    *,
    version: int,
    nodes: Iterable[NodeStatus],
    usable: Collection[NodeId],
    cards: Iterable[CardStatus],
    own_jobs: Iterable[JobView],
    own_node: NodeView | None = None,
) -> ClusterView:
    """Everything a policy needs, in name and job id order.

    `usable` are the members that are alive and not suspect.  `own_jobs` (shepherded here) stand above cards of the
    same jobs, `own_node` (from the ledger) above this node's own record.
    """
    views = {status.record.node_id: view_of_node(status.record, usable) for status in nodes}
    if own_node is not None:
        views[own_node.node] = own_node
    jobs: dict[JobId, JobView] = {status.card.job_id: job_view(status) for status in cards}
    jobs.update((job.job_id, job) for job in own_jobs)
    return ClusterView(
        version,
        tuple(views[node] for node in sorted(views)),
        tuple(jobs[job_id] for job_id in sorted(jobs) if jobs[job_id].state is not JobState.ENDED),
    )


def view_of_node(record: NodeRecord, usable: Collection[NodeId]) -> NodeView:
    """A node as the planner sees it: available if it is alive and says nothing against itself."""
    barred = NodeFlag.DRAINING | NodeFlag.CONFLICT | NodeFlag.WITNESS
    return node_view(record, is_available=record.node_id in usable and not record.flags & barred)


def view_of_job(record: JobRecord, *, queued_s: float, running_s: float) -> JobView:
    """A job shepherded here; `queued_s` and `running_s` since it last became so, 0 where it is not."""
    spec = record.spec
    running_gpu_s = running_s * spec.total_gpus if record.state is JobState.RUNNING else 0.0
    return JobView(
        job_id=record.job_id,
        state=record.state,
        ranks=spec.ranks,
        demand=spec.demand,
        submitted_utc_s=record.submitted_utc_s,
        priority=spec.priority,
        user=spec.user,
        queue=spec.queue,
        attained_gpu_s=record.attained_gpu_s + running_gpu_s,
        queued_s=queued_s,
        running_s=running_s,
        time_limit_s=spec.time_limit_s,
        shares=record.shares if record.state is not JobState.QUEUED else (),
        nodes=spec.nodes,
        exclude=spec.exclude,
        first_started_utc_s=record.first_started_utc_s,
    )
