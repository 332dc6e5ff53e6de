"""Why a job waits, or why it runs where it does: needs, what is free, what fails on which nodes, who is ahead.

The picture is the one that the policy plans on, so an explanation and the next decision agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmsched.api import JobSpec, JobState
from swarmsched.errors import CapacityError
from swarmsched.ids import JobId, NodeId, handle
from swarmsched.policies.base import amount, in_rank_order, is_waiting, joined, need
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, NodeResources, Share, ranks_that_fit, suits
from swarmsched.view import Action, ClusterView, NodeView, Plan, PlanEntry, Policy

AHEAD_LIMIT = 20
NODES_LIMIT = 200
SENTENCE_NODES_LIMIT = 8


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """What one node can do for the job: `ranks` fit there now; `reason` says what stands against more."""

    node: NodeId
    ranks: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for the API."""
        return {"node": self.node, "ranks": self.ranks, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class JobAhead:
    """A waiting job that the policy places before this one."""

    job_id: JobId
    ranks: int
    gpus: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for the API."""
        return {
            "id": self.job_id,
            "handle": handle(self.job_id),
            "ranks": self.ranks,
            "gpus": self.gpus,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class WhyReport:
    """Everything that `swarm why` shows.  `ahead` and `nodes` are cut to 20 and 200; the counts are of all."""

    job_id: JobId
    state: JobState
    policy_id: str
    needs: str
    free: str
    reason: str
    position: int  # 1 is next; 0 when it does not wait
    ahead_count: int
    ahead: tuple[JobAhead, ...]
    node_count: int
    nodes: tuple[NodeVerdict, ...]
    shares: tuple[Share, ...]
    job_reason: str  # what its shepherd says of the last attempt

    def to_json(self) -> dict[str, Any]:
        """Plain values for the API."""
        return {
            "id": self.job_id,
            "handle": handle(self.job_id),
            "state": self.state.value,
            "policy": self.policy_id,
            "needs": self.needs,
            "free": self.free,
            "reason": self.reason,
            "position": self.position,
            "ahead_count": self.ahead_count,
            "ahead": [job.to_json() for job in self.ahead],
            "node_count": self.node_count,
            "nodes": [verdict.to_json() for verdict in self.nodes],
            "shares": [{"node": share.node, "ranks": share.ranks} for share in self.shares],
            "job_reason": self.job_reason,
        }

    def sentences(self) -> tuple[str, ...]:
        """The report as lines for a terminal."""
        if self.state is JobState.ENDED:
            return (f"{handle(self.job_id)} has ended.", *_sentence(self.job_reason))
        lines = [f"{handle(self.job_id)} is {self.state.value}: {self.reason}."]
        if self.state is not JobState.QUEUED:
            return (*lines, *_sentence(self.job_reason))
        lines += [f"It needs {self.needs}.", f"Free: {self.free}."]
        if self.ahead_count:
            named = ", ".join(f"{handle(job.job_id)} ({amount(job.gpus, 'GPU')})" for job in self.ahead[:5])
            more = f" and {self.ahead_count - 5} more" if self.ahead_count > 5 else ""
            lines.append(f"Ahead of it by {self.policy_id}: {named}{more}.")
        for verdict in self.nodes[:SENTENCE_NODES_LIMIT]:
            lines.append(f"  {verdict.node}: {verdict.reason}")
        if self.node_count > SENTENCE_NODES_LIMIT:
            lines.append(f"  and {amount(self.node_count - SENTENCE_NODES_LIMIT, 'more node')}")
        return (*lines, *_sentence(self.job_reason))


def explain(
    record: JobRecord,
    view: ClusterView,
    policy: Policy,
    now_s: float,
    *,
    node_notes: Mapping[NodeId, str] | None = None,
    plan: Plan | None = None,
) -> WhyReport:
    """Explain one job of the view.  `node_notes` says why a node is not available ('suspect', 'draining', 'failed').

    `plan` spares a new plan where one of this view is at hand; planning takes milliseconds and is bounded by the view.
    """
    plan = plan or policy.plan(view, now_s)
    spec, demand = record.spec, record.spec.demand
    entry = next((entry for entry in plan.entries if entry.job_id == record.job_id), None)
    ahead = _jobs_ahead(record.job_id, view, policy, plan) if record.state is JobState.QUEUED else []
    verdicts = [_verdict(node, spec, (node_notes or {}).get(node.node, "")) for node in view.nodes]
    verdicts.sort(key=lambda verdict: (-verdict.ranks, verdict.node))
    return WhyReport(
        job_id=record.job_id,
        state=record.state,
        policy_id=plan.policy_id,
        needs=need(demand, spec.ranks),
        free=_free_sentence(view.nodes, demand),
        reason=_reason(record, entry),
        position=len(ahead) + 1 if record.state is JobState.QUEUED else 0,
        ahead_count=len(ahead),
        ahead=tuple(ahead[:AHEAD_LIMIT]),
        node_count=len(verdicts),
        nodes=tuple(verdicts[:NODES_LIMIT]),
        shares=record.shares,
        job_reason=record.reason or record.detail,
    )


def impossible(spec: JobSpec, capacities: Mapping[NodeId, NodeResources]) -> CapacityError | None:
    """The error for a job that even the empty swarm could not hold, or None.

    `capacities` are all that each node has, members that are down but known included.
    """
    allowed = {
        node: resources
        for node, resources in capacities.items()
        if (not spec.nodes or node in spec.nodes) and node not in spec.exclude
    }
    empty = {node: Free(has.gpus, has.cpu_count, has.memory_bytes) for node, has in allowed.items()}
    if sum(ranks_that_fit(free, spec.demand) for free in empty.values()) >= spec.ranks:
        return None
    return CapacityError(need(spec.demand, spec.ranks), _capacity_sentence(spec, allowed, empty))


def _capacity_sentence(spec: JobSpec, allowed: Mapping[NodeId, NodeResources], empty: Mapping[NodeId, Free]) -> str:
    """What there is of what was asked, down to the reason why it is not enough."""
    demand = spec.demand
    where = " that the job allows" if spec.nodes or spec.exclude else ""
    nodes = f"{amount(len(allowed), 'node')}{where}"
    if not allowed:
        return f"{nodes} (nodes {', '.join(spec.nodes) or 'all'}, exclude {', '.join(spec.exclude) or 'none'})"
    parts = []
    if demand.gpus:
        fitting = sum(suits(gpu, demand) for has in allowed.values() for gpu in has.gpus)
        most = max(sum(suits(gpu, demand) for gpu in has.gpus) for has in allowed.values())
        kind = " of that kind" if demand.gpu_type or demand.gpu_memory_bytes else ""
        parts.append(f"{amount(fitting, 'GPU')}{kind}, at most {most} on one node")
    if demand.cpus:
        parts.append(f"at most {amount(max(has.cpu_count for has in allowed.values()), 'CPU')} on one node")
    if demand.memory_bytes:
        most_gib = max(has.memory_bytes for has in allowed.values()) / 2**30
        parts.append(f"at most {most_gib:.4g} GiB of memory on one node")
    held = sum(ranks_that_fit(free, demand) for free in empty.values())
    return f"{', '.join(parts)} ({nodes}), room for {held} of {amount(spec.ranks, 'rank')}"


def _jobs_ahead(job_id: JobId, view: ClusterView, policy: Policy, plan: Plan) -> list[JobAhead]:
    reasons = {entry.job_id: entry.reason for entry in plan.entries}
    ahead: list[JobAhead] = []
    for _, job in in_rank_order(view.jobs, policy.rank_key):
        if job.job_id == job_id:
            break
        if is_waiting(job):
            ahead.append(JobAhead(job.job_id, job.ranks, job.ranks * job.demand.gpus, reasons.get(job.job_id, "")))
    return ahead


def _reason(record: JobRecord, entry: PlanEntry | None) -> str:
    if record.state is JobState.ENDED:
        return "it has ended"
    if record.state is not JobState.QUEUED:
        return _placement_reason(record)
    if entry is None:
        return "its card has not reached this node yet"
    if entry.action is Action.START:
        return f"may start now, {entry.reason}"
    return entry.reason


def _placement_reason(record: JobRecord) -> str:
    """Why a running job has what it has: it gets what it asked for, on as few nodes as could hold it."""
    if not record.shares:
        return "no node has taken it yet"
    asked = f"it asked for {need(record.spec.demand, record.spec.ranks)}"
    where = ", ".join(f"{share.node} ({share.ranks})" for share in record.shares[:SENTENCE_NODES_LIMIT])
    choice = "on the named nodes" if record.spec.nodes else "on the fewest nodes that had room"
    return joined(asked, f"placed {choice}: {where}")


def _verdict(node: NodeView, spec: JobSpec, note: str) -> NodeVerdict:
    barred = _barred(node, spec, note)
    if barred:
        return NodeVerdict(node.node, 0, barred)
    ranks = ranks_that_fit(node.free, spec.demand)
    if ranks >= spec.ranks:
        return NodeVerdict(node.node, ranks, "fits")
    shortages = joined(*_shortages(node, spec.demand))
    if ranks:
        room = f"room for {ranks} of {amount(spec.ranks, 'rank')}"
        return NodeVerdict(node.node, ranks, f"{room}; {shortages}" if shortages else room)
    return NodeVerdict(node.node, 0, shortages or "no room")


def _barred(node: NodeView, spec: JobSpec, note: str) -> str:
    if node.node in spec.exclude:
        return "excluded by the job"
    if spec.nodes and node.node not in spec.nodes:
        return "not among the nodes that the job allows"
    if not node.is_available:
        return note or "not available"
    return ""


def _shortages(node: NodeView, demand: Demand) -> list[str]:
    """What this node lacks for one more rank."""
    reasons = []
    free = node.free
    if demand.gpus:
        reasons.append(_gpu_shortage(node, demand))
    if demand.cpus and free.cpus < demand.cpus:
        reasons.append(f"{free.cpus} of {amount(demand.cpus, 'CPU')} free")
    if demand.memory_bytes and free.memory_bytes < demand.memory_bytes:
        reasons.append(f"{free.memory_bytes / 2**30:.4g} of {demand.memory_bytes / 2**30:.4g} GiB of memory free")
    return reasons


def _gpu_shortage(node: NodeView, demand: Demand) -> str:
    if not node.total_gpus:
        return "has no GPUs"
    devices = node.devices or node.free.gpus
    models = sorted({gpu.model for gpu in devices})
    if demand.gpu_type and models and not any(demand.gpu_type.lower() in model.lower() for model in models):
        return f"GPU type {', '.join(models)} does not match {demand.gpu_type!r}"
    if demand.gpu_memory_bytes and devices and not any(suits(gpu, demand) for gpu in devices):
        most = max(gpu.memory_bytes for gpu in devices) / 2**30
        return f"GPUs have {most:.4g} GiB, less than {demand.gpu_memory_bytes / 2**30:.4g} GiB"
    free = sum(suits(gpu, demand) for gpu in node.free.gpus)
    if node.total_gpus < demand.gpus:
        return f"has {amount(node.total_gpus, 'GPU')}, fewer than the {demand.gpus} of one rank"
    return f"{free} of {amount(node.total_gpus, 'GPU')} free"


def _free_sentence(nodes: Sequence[NodeView], demand: Demand) -> str:
    available = [node for node in nodes if node.is_available]
    where = f"on {len(available)} of {amount(len(nodes), 'node')} available"
    if not demand.gpus:
        cpus = sum(node.free.cpus for node in available)
        return f"{amount(cpus, 'CPU')} {where}"
    gpus = [gpu for node in available for gpu in node.free.gpus]
    fitting = sum(suits(gpu, demand) for gpu in gpus)
    kind = f" ({fitting} of the kind asked for)" if fitting != len(gpus) else ""
    return f"{amount(len(gpus), 'GPU')}{kind} {where}"


def _sentence(text: str) -> tuple[str, ...]:
    return (text if text.endswith(".") else f"{text}.",) if text else ()
