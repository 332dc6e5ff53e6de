"""Why a job waits, or why it runs where it does: needs, what is free, what fails on which nodes, who is ahead.

The picture is the one that the policy plans on, so an explanation and the next decision agree.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from swarmsched.api import JobSpec, JobState
from swarmsched.errors import CapacityError
from swarmsched.estimate import STARVES, Estimate, SpeedQuestion, batches_of
from swarmsched.fields import Value
from swarmsched.ids import JobId, NodeId, handle
from swarmsched.models.kinds import believed
from swarmsched.policies.base import ahead_sentence, amount, in_rank_order, is_waiting, joined, need
from swarmsched.policies.hosting import predicted, work_of
from swarmsched.policies.placement import place_in
from swarmsched.policies.reason import MIXED_GPUS_FLAG, fits_now, shortage, start_reason
from swarmsched.policies.registry import kind_of, make_order, policy_id
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import (
    Demand,
    Free,
    Share,
    gpu_class,
    missing_labels,
    of_others,
    ranks_by_node,
    ranks_that_fit,
    suitable,
    suits,
    world_size,
)
from swarmsched.view import Change, ClusterView, Decision, Elasticity, JobView, KindView, NodeView, Order, PolicySetting

AHEAD_LIMIT = 20
AHEAD_PLACED_MAX = 200
INPUT = "input"
"""The group that loads data, unless a job calls it otherwise (`swarm_elastic.served`)."""
IDLE_NAMED = 3
NODES_LIMIT = 200
SENTENCE_NODES_LIMIT = 8


class NodeVerdict(Value):
    """What one node can do for the job: `ranks` fit there now; `reason` says what stands against more."""

    node: NodeId
    ranks: int
    reason: str


class JobAhead(Value):
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


class WhyReport(Value):
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

    @property
    def policy(self) -> str:
        """The policy's name, without its parameters."""
        return self.policy_id.partition(":")[0]

    def forecast(self) -> str:
        """What a job that nobody has submitted yet would meet."""
        ahead = (
            f"{amount(self.ahead_count, 'job')} would be ahead of it" if self.ahead_count else "no job is ahead of it"
        )
        return f"needs {self.needs}; free: {self.free}; {ahead}"

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
            lines.append(f"Ahead of it by {self.policy}: {named}{more}.")
        for verdict in self.nodes[:SENTENCE_NODES_LIMIT]:
            lines.append(f"  {verdict.node}: {verdict.reason}")
        if self.node_count > SENTENCE_NODES_LIMIT:
            lines.append(f"  and {amount(self.node_count - SENTENCE_NODES_LIMIT, 'more node')}")
        return (*lines, *_sentence(self.job_reason))


def explain(
    record: JobRecord,
    view: ClusterView,
    setting: PolicySetting,
    now_s: float,
    *,
    node_notes: Mapping[NodeId, str] | None = None,
    told: Mapping[JobId, Decision] | None = None,
) -> WhyReport:
    """Explain one job of the view, without planning: that is the planner's.

    `told` are the last plan's decisions, as far as they are known here.  `node_notes` says why a node is not available
    ('suspect', 'draining', 'failed').
    """
    spec = record.spec
    ahead: list[JobView] = []
    decision = (told or {}).get(record.job_id)
    job = next((each for each in view.jobs if each.job_id == record.job_id), None)
    samples_per_s = _predicted(view, job) if job is not None else 0.0
    reason = "it has ended" if record.is_ended else _placement_reason(record, setting, decision, samples_per_s)
    if job is not None and record.shares:
        reason = joined(reason, _starving(record, view, job))
    if record.state is JobState.QUEUED:
        ahead = _jobs_ahead(record.job_id, view, make_order(setting), now_s)
        reason = _waiting_reason(record.job_id, view, ahead, told or {})
    failed = {fault.node: f"; its start failed there ({fault.failure.value})" for fault in record.start_faults}
    verdicts = [
        _verdict(node, spec, (node_notes or {}).get(node.node, ""), failed.get(node.node, "")) for node in view.nodes
    ]
    verdicts.sort(key=lambda verdict: (-verdict.ranks, verdict.node))
    return WhyReport(
        job_id=record.job_id,
        state=record.state,
        policy_id=policy_id(setting),
        needs=need(spec.needs, spec.ranks)
        + (f", or up to {spec.ranks_most} ranks" if spec.ranks_most > spec.ranks else ""),
        free=_free_sentence(view.nodes, spec),
        reason=reason,
        position=len(ahead) + 1 if record.state is JobState.QUEUED else 0,
        ahead_count=len(ahead),
        ahead=tuple(_ahead(job, told or {}) for job in ahead[:AHEAD_LIMIT]),
        node_count=len(verdicts),
        nodes=tuple(verdicts[:NODES_LIMIT]),
        shares=record.shares,
        job_reason=record.reason or record.detail,
    )


def speed_question(
    record: JobRecord, estimate: Estimate, nodes: Sequence[NodeView], kind: KindView | None
) -> SpeedQuestion:
    """What the model of a job's speed is to be asked: the sizes that it takes, as far as there are GPUs for them.

    `estimate` is what its card tells, and `kind` what is known of its kind beside.
    """
    spec, per_rank = record.spec, max(1, record.spec.demand.gpus)
    held = world_size(record.training)
    there = sum(node.capacity.gpu_count for node in nodes) // per_rank if spec.demand.gpus else spec.ranks_most
    batches = spec.batches.on(estimate.gpu) if spec.batches.first else batches_of(estimate)
    return SpeedQuestion(
        believed(estimate, kind) if kind is not None else estimate,
        ranks_least=spec.ranks,
        ranks_most=max(spec.ranks, held, min(spec.ranks_most, there)),
        ranks_per_node=max(1, max((node.total_gpus for node in nodes), default=1) // per_rank),
        held=held,
        held_nodes=len(ranks_by_node(record.training)),
        batches=batches,
        global_batch=record.global_batch,
    )


def impossible(spec: JobSpec, capacities: Mapping[NodeId, Free]) -> CapacityError | None:
    """The error for a job that even the empty swarm could not hold, or None.

    `capacities` are all that each node has, members that are down but known included.
    """
    allowed = {node: resources for node, resources in capacities.items() if allows(spec, node)}
    for number, name in enumerate(spec.group_names or ("",)):
        group = spec.of_group(number)
        if max(_held(group, allowed).values(), default=0) < group.ranks:
            what = f"{need(group.demand, group.ranks)}{f' in group {name}' if name else ''}"
            return CapacityError(what, _capacity_sentence(group, allowed))
    return _too_much_together(spec, allowed.values())


def _too_much_together(spec: JobSpec, allowed: Collection[Free]) -> CapacityError | None:
    """Groups each of which has room alone; where that is so of all together can be told by trying only."""
    needs = [(spec.ranks, spec.demand), *[(each.ranks, each.demand) for each in spec.groups]]
    found = (
        (sum([ranks * each.gpus for ranks, each in needs]), sum([free.gpu_count for free in allowed]), "GPU"),
        (sum([ranks * each.cpus for ranks, each in needs]), sum([free.cpus for free in allowed]), "CPU"),
    )
    for wanted, there, what in found if spec.groups else ():
        if wanted > there:
            asked = f"{amount(wanted, what)} in {amount(len(needs), 'group')} at once"
            return CapacityError(asked, f"{amount(there, what)} ({amount(len(allowed), 'node')})")
    return None


def _held(spec: JobSpec, allowed: Mapping[NodeId, Free]) -> Counter[str]:
    """Ranks of it by class of GPUs; all together where it mixes them or has none."""
    held: Counter[str] = Counter()
    for free in allowed.values():
        is_one = spec.mixed_gpus or not spec.demand.gpus
        held["" if is_one else gpu_class(free.gpus, spec.demand)] += ranks_that_fit(free, spec.demand)
    return held


def allows(spec: JobSpec, node: NodeId) -> bool:
    """True for a node that the job neither leaves out by naming others nor excludes."""
    return (not spec.nodes or node in spec.nodes) and node not in spec.exclude


def _capacity_sentence(spec: JobSpec, allowed: Mapping[NodeId, Free]) -> str:
    """What there is of what was asked, down to the reason why it is not enough."""
    demand = spec.demand
    where = " that the job allows" if spec.nodes or spec.exclude else ""
    nodes = f"{amount(len(allowed), 'node')}{where}"
    if not allowed:
        return f"{nodes} (nodes {', '.join(spec.nodes) or 'all'}, exclude {', '.join(spec.exclude) or 'none'})"
    parts = []
    if demand.labels:
        labelled = [has for has in allowed.values() if not missing_labels(has.labels, demand)]
        known = sorted({label for has in allowed.values() for label in has.labels})
        wanted = f"{', '.join(demand.labels)} (labels that are known: {', '.join(known) or 'none'})"
        parts.append(f"{amount(len(labelled), 'node')} with {wanted}")
    if demand.gpus:
        fitting = sum(suitable(has.gpus, demand) for has in allowed.values())
        most = max(suitable(has.gpus, demand) for has in allowed.values())
        kind = " of that kind" if any(demand.device) else ""
        if not fitting and (demand.gpu_type or demand.refused_gpus):
            models = sorted({gpu.model for has in allowed.values() for gpu in has.gpus})
            kind += f" (there are {', '.join(models) or 'none at all'})"
        parts.append(f"{amount(fitting, 'GPU')}{kind}, at most {most} on one node")
    if demand.cpus:
        parts.append(f"at most {amount(max(has.cpus for has in allowed.values()), 'CPU')} on one node")
    if demand.memory_bytes:
        most_gib = max(has.memory_bytes for has in allowed.values()) / 2**30
        parts.append(f"at most {most_gib:.4g} GiB of memory on one node")
    held = _held(spec, allowed)
    largest = max(held, key=lambda name: (held[name], name))
    room = f"room for {held[largest]} of {amount(spec.ranks, 'rank')}"
    if sum(held.values()) >= spec.ranks:
        room += f" on GPUs of one model, {largest}; {MIXED_GPUS_FLAG} lets it have GPUs of several at once"
    return f"{', '.join(parts)} ({nodes}), {room}"


def _jobs_ahead(job_id: JobId, view: ClusterView, order: Order | None, now_s: float) -> list[JobView]:
    """Waiting jobs that rank before this one; none where only a plan can tell."""
    ahead: list[JobView] = []
    for _, job in in_rank_order(view.jobs, order, now_s) if order is not None else ():
        if job.job_id == job_id:
            break
        if is_waiting(job):
            ahead.append(job)
    return ahead


def _ahead(job: JobView, told: Mapping[JobId, Decision]) -> JobAhead:
    reason = told[job.job_id].reason if job.job_id in told else ""
    return JobAhead(job.job_id, job.ranks, job.ranks * job.demand.gpus, reason)


def _waiting_reason(job_id: JobId, view: ClusterView, ahead: Sequence[JobView], told: Mapping[JobId, Decision]) -> str:
    """What a plan says, or else whether it would fit beside those ahead."""
    job = next((job for job in view.jobs if job.job_id == job_id), None)
    if job is None:
        return "its card has not reached this node yet"
    room = Room(view.nodes)
    decision = told.get(job_id)
    if decision is not None and decision.change is Change.WAIT and (ahead or not fits_now(job, room)):
        return decision.reason
    for other in ahead[:AHEAD_PLACED_MAX]:
        shares = place_in(room, other)
        if shares is not None:
            room.take(shares, other.demand)
    shares = place_in(room, job)
    if shares is not None:
        return f"may start now, {start_reason(job, shares)}"
    return decision.reason if decision is not None else joined(shortage(job, room), ahead_sentence(ahead))


def _predicted(view: ClusterView, job: JobView) -> float:
    """Samples a second of the job where it is, by its model and the hosts; 0 where they are not known."""
    room = Room(view.nodes)
    if not job.shares or work_of(job) is None or not room.has(job.shares):
        return 0.0
    room.release(job.shares, job.demand)
    return predicted(room, job, job.shares)


def _starving(record: JobRecord, view: ClusterView, job: JobView) -> str:
    """Where cores are idle that could load data for a job which waits for it; empty for one that does not."""
    waits = job.card.estimate.data_wait if job.card.estimate else 0.0
    if waits < STARVES:
        return ""
    idle = sorted([(-node.free.cpus, node.node) for node in view.nodes if node.is_available and node.free.cpus])
    cores = ", ".join(f"{node} ({-cpus})" for cpus, node in idle[:IDLE_NAMED])
    if not idle:
        return f"it waits for data {waits:.0%} of its time, and no node has idle cores to load it"
    has = "more ranks in its group input" if INPUT in record.spec.group_names else "a group of input ranks"
    return f"it waits for data {waits:.0%} of its time: {has} could load it, on idle cores of {cores}"


def _placement_reason(
    record: JobRecord, setting: PolicySetting, decision: Decision | None, samples_per_s: float
) -> str:
    """Why a running job has what it has: what it asked for, on the fewest nodes, or where its model is faster."""
    spec = record.spec
    if not record.shares:
        return "no node has taken it yet"
    nodes = list(ranks_by_node((*record.training, *of_others(record.shares))).items())
    where = ", ".join(f"{node} ({ranks})" for node, ranks in nodes[:SENTENCE_NODES_LIMIT])
    by_model = f"{samples_per_s:.3g} samples/s there by its model and the hosts" if samples_per_s else ""
    if spec.is_resizable:
        most, has = max(spec.ranks, spec.ranks_most), world_size(record.training)
        takes = (
            f"takes {spec.ranks} to {most} ranks and has {has}" if most > spec.ranks else f"has {amount(has, 'rank')}"
        )
        return joined(takes, size_reason(record, setting, decision), f"on {where}", by_model)
    asked = f"it asked for {need(spec.needs, spec.ranks)}"
    choice = "on the named nodes" if spec.nodes else "on the fewest nodes that had room"
    if by_model:
        choice += ", or on others that are clearly faster for its model"
    return joined(asked, f"placed {choice}: {where}", by_model)


def size_reason(record: JobRecord, setting: PolicySetting, decision: Decision | None) -> str:
    """Why a job that takes several sizes has this one."""
    if not kind_of(setting).resizes:
        return f"{setting.name} gives jobs the least that they take"
    if setting.elasticity is Elasticity.OFF:
        return "elasticity=off gives jobs the least that they take"
    if decision is None:
        return "the next plan tells why"
    if decision.change is Change.KEEP and not record.has_own_checkpoint and not record.spec.elastic:
        return "it stays so until this attempt has committed a checkpoint"
    if decision.change not in (Change.GROW, Change.SHRINK, Change.MOVE, Change.STOP):
        return decision.reason
    size = f" to {amount(decision.target.ranks, 'rank')}" if decision.target.ranks else ""
    is_advice = setting.elasticity is Elasticity.ADVISE
    wish, needed = ("would", " with elasticity=on") if is_advice else ("is to", "")
    return f"{wish} {decision.change.value}{size}{needed}: {decision.reason}"


def _verdict(node: NodeView, spec: JobSpec, note: str, failed: str) -> NodeVerdict:
    """`failed`: what is to be said of starts of the job there."""
    barred = _barred(node, spec, note)
    if barred:
        return NodeVerdict(node.node, 0, f"{barred}{failed}")
    ranks = ranks_that_fit(node.free, spec.demand)
    if ranks >= spec.ranks:
        return NodeVerdict(node.node, ranks, f"fits{failed}")
    shortages = joined(*_shortages(node, spec.demand))
    if ranks:
        room = f"room for {ranks} of {amount(spec.ranks, 'rank')}"
        return NodeVerdict(node.node, ranks, f"{room}; {shortages}{failed}" if shortages else f"{room}{failed}")
    return NodeVerdict(node.node, 0, f"{shortages or 'no room'}{failed}")


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
    reasons = [f"has no label {each}" for each in missing_labels(node.capacity.labels, demand)]
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
    devices = node.capacity.gpus
    models = sorted({gpu.model for gpu in devices})
    if demand.gpu_type and models and not any(demand.gpu_type.lower() in model.lower() for model in models):
        return f"GPU type {', '.join(models)} does not match {demand.gpu_type!r}"
    if demand.gpu_memory_bytes and devices and not any(suits(gpu, demand) for gpu in devices):
        most = max(gpu.memory_bytes for gpu in devices) / 2**30
        return f"GPUs have {most:.4g} GiB, less than {demand.gpu_memory_bytes / 2**30:.4g} GiB"
    if demand.refused_gpus and devices and not suitable(devices, demand):
        return f"GPU type {', '.join(models)} does not hold the least local batch that the job takes"
    free = suitable(node.free.gpus, demand)
    if node.total_gpus < demand.gpus:
        return f"has {amount(node.total_gpus, 'GPU')}, fewer than the {demand.gpus} of one rank"
    return f"{free} of {amount(node.total_gpus, 'GPU')} free"


def _free_sentence(nodes: Sequence[NodeView], spec: JobSpec) -> str:
    demand = spec.demand
    allowed = [node for node in nodes if allows(spec, node.node)]
    available = [node for node in allowed if node.is_available]
    kind_of_node = "allowed node" if spec.nodes or spec.exclude else "node"
    where = f"on {len(available)} of {amount(len(allowed), kind_of_node)} available"
    if not demand.gpus:
        cpus = sum(node.free.cpus for node in available)
        return f"{amount(cpus, 'CPU')} {where}"
    free = sum(node.free.gpu_count for node in available)
    fitting = sum(suitable(node.free.gpus, demand) for node in available)
    kind = f" ({fitting} of the kind asked for)" if fitting != free else ""
    return f"{amount(free, 'GPU')}{kind} {where}"


def _sentence(text: str) -> tuple[str, ...]:
    return (text if text.endswith(".") else f"{text}.",) if text else ()
