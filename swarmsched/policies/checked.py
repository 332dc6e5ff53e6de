"""What every plan is asked before anybody follows it: the same for agents, for replays and for both of their views."""

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.msgpack import encode

from swarmsched.errors import RemoteProtocolError
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import gpus_of
from swarmsched.view import Change, ClusterView, Decision, JobView, NodeView, Plan
from swarmsched.wire.codec import decode_value


class BadPlan(Exception):
    """A plan that nobody can follow: what is wrong with it."""


def checked(plan: object, view: ClusterView) -> Plan:
    """The plan as its reader has it; BadPlan where it is malformed, contradicts itself, or wants what is not there.

    Whether a job takes the size is left to whoever follows the plan: that may have changed since.
    """
    found = _as_read(plan)
    twice = next((job for job, count in Counter([each.job_id for each in found.decisions]).items() if count > 1), "")
    if twice:
        raise BadPlan(f"decided twice on job {twice}")
    jobs = {job.job_id: job for job in view.jobs}
    wanted = [each for each in found.decisions if each.job_id in jobs and is_wish(each)]
    _check_nodes(_added(wanted, jobs), {node.node: node for node in view.nodes})
    return found


def is_wish(decision: Decision) -> bool:
    """True where it changes or claims something."""
    return decision.change is Change.STOP or bool(decision.target.shares)


def _as_read(plan: object) -> Plan:
    """Values do not check themselves when they are made: their reader does."""
    try:
        return decode_value(Plan, encode(plan))
    except (RemoteProtocolError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadPlan(f"made no plan that can be read: {error}") from error


def _added(wanted: Iterable[Decision], jobs: Mapping[JobId, JobView]) -> Counter[NodeId]:
    """GPUs that jobs would have more on each node if all of this were done."""
    added: Counter[NodeId] = Counter()
    for decision in wanted:
        job = jobs[decision.job_id]
        target = () if decision.change is Change.STOP else decision.target.shares
        if empty := next((share.node for share in target if not share.ranks), ""):
            raise BadPlan(f"planned no ranks of job {job.job_id} on {empty}")
        if beyond := next((share.group for share in target if share.group > len(job.card.groups)), 0):
            raise BadPlan(
                f"planned group {beyond} of job {job.job_id}, which has {len(job.card.groups)} beside its first"
            )
        for share in target:
            added[share.node] += gpus_of([share], job.demand)
        for share in job.shares:
            added[share.node] -= gpus_of([share], job.demand)
    return added


def _check_nodes(added: Mapping[NodeId, int], nodes: Mapping[NodeId, NodeView]) -> None:
    """Measured by what a node says is free: cards that are older than that may book it twice, and no plan is to blame.

    Whoever gives up more than it takes somewhere may stay there, also where nothing can be had any more.
    """
    for name, gpus in added.items():
        node = nodes.get(name)
        if gpus > (node.free.gpu_count if node and node.is_available else 0):
            raise BadPlan(f"planned more GPUs on {name} than it has")
