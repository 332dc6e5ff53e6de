"""What users do during a run, as data: submits, repeats of the same ticket, cancels, changes of the policy, recovery.

Like faults, each piece of work is complete in itself.  Jobs are numbered, since their ids are not known beforehand;
work on a job that does not exist (yet, or because its submit was left out) does nothing.

Most jobs are drawn one by one.  Paths that chance alone walks too rarely have scenes of their own: gangs that want
everything in the same milliseconds, a gang that waits until its place is kept for it, an order in which jobs make room.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from swarmsched.api import EndReason, Isolation, JobSpec, RankGroup
from swarmsched.estimate import BatchRange
from swarmsched.ids import NodeId
from swarmsched.resources import Demand
from swarmsched.simulator.tasks import FOR_EVER_S, RankPlan
from swarmsched.task import TaskFailure, TaskOrder

WORK_KINDS = ("submit", "repeat", "cancel", "scale", "migrate", "policy", "recover")
JOB_KINDS = (
    "train",
    "train",
    "train",
    "sleep",
    "sleep",
    "elastic",
    "elastic",
    "staged",
    "code",
    "once",
    "environment",
    "no-port",
    "stubborn",
    "endless",
    "unkillable",
    "no-shim",
)
LIMITED = ("stubborn", "endless", "unkillable")  # they run until they are stopped, by their time limit at the latest
SHAPES = ("gpu", "gpu", "gpu", "gpu", "gpu", "gpu", "gpus", "cores", "memory", "per-node", "pinned")
NAMES = ("", "", "", "Zoë", "数据/训练", 'tab\tnewline\r\nquote"', "🙂" * 8)
CORES_PER_RANK, MEMORY_GIB_PER_RANK = 4, 48  # of 8 cores and 64 GiB for each GPU of a machine
RANGES_EACH, RANGE_GIB = 4, 8  # 8, 16 or 24 GiB; machines give 16 or 2 for each GPU
BYTES_AN_ELEMENT = 16  # two learners
UNKILLABLE_S = 4.0
WORKER_SAVES_S = 1.5  # between checkpoints of an elastic job, whoever is its first rank
HEARS_LATE_S = 1.5  # of a worker whose thread waits for the interpreter, say
GIB = 2**30
RUSH_S = 0.05  # jobs that are submitted together want the same GPUs at the same time
QUIET_RATIO = 0.5  # of the jobs that come alone
POLICIES = ("fifo", "backfill", "las")
ELASTIC_POLICIES = ("swarm", "swarm", "elastic-tiresias", "optimus")
SCENES_NODES_MAX = 5  # in larger swarms so long gangs cost more events than they are worth
CONTEST_RATIO, CONTEST_S = 0.25, 0.008  # of the runs; between gangs that want everything: about as long as a hold takes
PREEMPTING_RATIO = 0.25
TRAINING_RATIO = 0.4  # of the runs with three nodes and none of the other scenes
ELASTIC_RATIO = 0.4
RECOVER_RATIO = 0.7
EXCLUDE_RATIO = 0.2
RESTARTABLE_EACH = 3
"""By its number, every third job may be stopped for others."""
GROUPS_EACH = 4
"""By its number, every fourth job has a second group, whose rank serves the first or ends before it."""
CROWD_S, CROWD_JOB_S = 15.0, 4.0  # for how long small jobs come, and each of them runs
BLOCKER_S = (62.0, 80.0)  # long enough for whoever waits behind it to starve


@dataclass(frozen=True, slots=True)
class Work:
    """One thing that a user does at `at_s`; the parameters are JSON values and depend on the kind."""

    at_s: float
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """An object of plain values."""
        return {"at_s": self.at_s, "work": self.kind, **self.parameters}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote; ValueError for a kind that does not exist."""
        parameters = dict(document)
        at_s, kind = float(parameters.pop("at_s")), str(parameters.pop("work"))
        if kind not in WORK_KINDS:
            raise ValueError(f"work {kind!r} is not one of {', '.join(WORK_KINDS)}")
        return cls(at_s, kind, parameters)


WorkPlan = Sequence[Work]


def draw_work(
    rng: random.Random,
    nodes: Sequence[NodeId],
    gpus: Sequence[int],
    begin_s: float,
    end_s: float,
    *,
    starves: bool,
    lasts_s: float = 0.0,
) -> list[Work]:
    """Some jobs, more on more nodes, and what is done to them; in order of time.  `starves`: one of them waits for
    longer than a minute.  `gpus`: of each node.  `lasts_s`: that long runs a job that is submitted first; 0: none."""
    draw = _Draw(rng, list(nodes), gpus, begin_s, end_s)
    if lasts_s:
        draw.lasting(lasts_s)
    if len(nodes) <= SCENES_NODES_MAX:
        draw.scenes(starves=starves)
    draw.jobs()
    if rng.random() < 0.3:
        draw.policy(rng.uniform(begin_s, end_s), rng.choice(POLICIES), {})
    if rng.random() < RECOVER_RATIO:
        draw.add(end_s + rng.uniform(0.5, 6.0), "recover", {})
    return sorted(draw.work, key=lambda each: each.at_s)


class _Draw:
    """Work in the making; jobs are numbered as they are drawn."""

    def __init__(
        self, rng: random.Random, nodes: list[NodeId], gpus: Sequence[int], begin_s: float, end_s: float
    ) -> None:
        self.work: list[Work] = []
        self._rng = rng
        self._nodes = nodes
        self._gpus = dict(zip(nodes, gpus, strict=True))
        self._total_gpus = sum(gpus)
        self._begin_s, self._end_s = begin_s, end_s
        self.number = 0

    def add(self, at_s: float, kind: str, parameters: Mapping[str, Any]) -> None:
        """One piece more."""
        self.work.append(Work(_rounded(at_s), kind, parameters))

    def policy(self, at_s: float, name: str, parameters: Mapping[str, float]) -> None:
        """Somebody changes the order of all jobs."""
        self.add(at_s, "policy", policy_work(self._rng.choice(self._nodes), name, parameters))

    def scenes(self, *, starves: bool) -> None:
        """What leads to rare paths."""
        rng = self._rng
        if rng.random() < ELASTIC_RATIO:
            self._elasticity()
        if starves:
            self._starvation()
        elif rng.random() < CONTEST_RATIO:
            for at_s in (self._begin_s, self._begin_s + 3.0, rng.uniform(self._begin_s, self._end_s)):
                self._contest(at_s + rng.random())
        elif rng.random() < PREEMPTING_RATIO:
            self._preemption()
        elif len(self._nodes) > 2 and rng.random() < TRAINING_RATIO:
            self._training()

    def lasting(self, duration_s: float) -> None:
        """One rank that outlives holders, contact memories and fences."""
        calm: dict[str, Any] = {"priority": 9, "exclude": [], "max_restarts": 5, "on_isolation": "pause"}
        self._submit(self._begin_s, ranks=1, does="sleep", duration_s=duration_s, **PLAIN, **calm)

    def jobs(self) -> None:
        """One by one, some of them together; most of them early."""
        rng, begin_s, end_s = self._rng, self._begin_s, self._end_s
        rushes_s = [begin_s + (end_s - begin_s) * rng.random() ** 3 for _ in range(rng.randint(1, 2))]
        for _ in range(3 + min(len(self._nodes), 8) // 2 + rng.randint(0, 5)):
            at_s = rng.choice(rushes_s) + RUSH_S * rng.random()
            if rng.random() < QUIET_RATIO:
                at_s = begin_s + (end_s - begin_s) * rng.random() ** 2
            number = self._submit(at_s)
            for kind, ratio in (("repeat", 0.3), ("cancel", 0.2)):
                if rng.random() < ratio:
                    later_s = at_s + rng.choice([0.05, 1.0, 30.0]) * rng.random()
                    grace = {} if kind == "repeat" else {"grace_s": rng.choice([0.0, 1.0])}
                    self.add(later_s, kind, {"job": number, **grace})
            self._changes(at_s, number)

    def _submit(self, at_s: float, **wanted: object) -> int:
        parameters = _submit(self._rng, self._gpus, self.number)
        self.add(at_s, "submit", {**parameters, **wanted})
        self.number += 1
        return self.number - 1

    def _changes(self, at_s: float, number: int) -> None:
        """People want some of those that train to have other sizes, or to be elsewhere."""
        rng, wanted = self._rng, self.work_of(number)
        if wanted["does"] not in ("elastic", "train"):
            return
        for _ in range(rng.choice([0, 1, 3]) if wanted["does"] == "elastic" else rng.choice([0, 0, 0, 1])):
            self._change(at_s + rng.uniform(1.0, 40.0), number)

    def _change(self, at_s: float, number: int) -> None:
        rng = self._rng
        ranks = rng.randint(1, 4)
        if rng.random() < 0.6:
            self.add(at_s, "scale", {"job": number, "ranks": ranks, "ranks_most": ranks + rng.choice([0, 0, 2])})
        else:
            self.add(at_s, "migrate", {"job": number, "avoid": [rng.choice(self._nodes)]})

    def work_of(self, number: int) -> Mapping[str, Any]:
        """With what a job is submitted."""
        return next(each.parameters for each in self.work if each.kind == "submit" and each.parameters["job"] == number)

    def _contest(self, at_s: float) -> None:
        """Gangs that want everything, each at another agent; whoever comes last may rank first."""
        rng = self._rng
        rivals = rng.sample(self._nodes, min(len(self._nodes), rng.randint(2, 3)))
        for priority, node in enumerate(rivals):
            self._submit(
                at_s + CONTEST_S * rng.random(),
                node=node,
                ranks=self._total_gpus,
                does="sleep",
                duration_s=_rounded(rng.uniform(0.2, 2.0)),
                priority=priority,
                exclude=[],
                **PLAIN,
            )

    def _starvation(self) -> None:
        """One that stays for long, and a gang behind it that needs its place too."""
        rng = self._rng
        if rng.random() < 0.5:
            self.policy(self._begin_s, "backfill", {})
        blocker_s, calm = _rounded(rng.uniform(*BLOCKER_S)), {"priority": 9, "exclude": [], **PLAIN}
        self._submit(self._begin_s, ranks=1, does="sleep", duration_s=blocker_s, **calm)
        self._submit(self._begin_s + 3.0 * rng.random(), ranks=self._total_gpus, does="sleep", duration_s=2.0, **calm)

    def crowd(self, total_gpus: int) -> None:
        """One that needs all GPUs for a moment, among small ones that come faster than they end."""
        rng, calm = self._rng, {"priority": 0, "exclude": [], "does": "sleep", **PLAIN}
        self.policy(self._begin_s, "swarm", {"pause_s": 0.1, "patience": 1.0})
        at_s, wide_s = self._begin_s, self._begin_s + 2.0
        self._submit(wide_s, ranks=total_gpus, duration_s=0.5, **{**calm, "time_limit_s": 1.0})
        while at_s < self._end_s:
            at_s += CROWD_JOB_S / (total_gpus + 1) * rng.uniform(0.5, 1.5)
            self._submit(at_s, ranks=1, duration_s=_rounded(CROWD_JOB_S * rng.uniform(0.5, 1.5)), **calm)

    def _preemption(self) -> None:
        """An order in which some make room for others, a gang that will have had its share, and a fresh one."""
        rng = self._rng
        limits = {"threshold1_gpu_s": rng.choice([1.0, 10.0, 50.0]), "minimum_run_s": rng.choice([0.0, 2.0, 10.0])}
        self.policy(self._begin_s, "las", {**limits, "preemptions_max": rng.choice([1.0, 3.0])})
        long = {"ranks": self._total_gpus, "does": "train", "duration_s": 60.0, "checkpoint_period_s": 3.0}
        self._submit(self._begin_s + rng.random(), **long, exclude=[], **PLAIN)
        self._submit(self._begin_s + rng.uniform(15.0, 30.0), does="sleep", duration_s=5.0, per_node=False)

    def _elasticity(self) -> None:
        """One whose gang is changed again and again while it trains, and mostly fits."""
        rng = self._rng
        begin_s = self._begin_s + 2.0 * rng.random()
        wanted = {"ranks": rng.randint(1, 2), "priority": 9, "exclude": [], "max_restarts": 5, "time_limit_s": 0.0}
        long = {"does": "elastic", "duration_s": 70.0, "on_isolation": "pause"}
        number = self._submit(begin_s, **{**PLAIN, **wanted, **long, "ranks_most": rng.choice([0, 4])})
        at_s = begin_s + 2.0
        while at_s < begin_s + 60.0:
            self._change(at_s, number)
            at_s += rng.uniform(0.5, 15.0)

    def _training(self) -> None:
        """One that commits often, runs on one node that does not shepherd it, and would find room on another."""
        rng = self._rng
        node = rng.choice(self._nodes)
        often = {"does": "train", "duration_s": 80.0, "checkpoint_period_s": 0.5, "max_restarts": 5}
        ranks = max(1, *(count for each, count in self._gpus.items() if each != node))
        placed = {"node": node, "exclude": [node], "ranks": ranks, "priority": 9, "on_isolation": "pause", **PLAIN}
        self._submit(self._begin_s + 3.0 * rng.random(), **often, **placed)


PLAIN: Mapping[str, Any] = {"gpus": 1, "cores": 0, "memory_gib": 0, "per_node": False, "nodes": [], "ranks_most": 0}
"""One GPU for each rank, wherever it is, and always so many."""


def policy_work(node: NodeId, name: str, parameters: Mapping[str, float], elasticity: str = "advise") -> dict[str, Any]:
    """What a change of the policy is asked for with."""
    return {"node": node, "policy": name, "parameters": parameters, "elasticity": elasticity}


def draw_policy(rng: random.Random, nodes: Sequence[NodeId], begin_s: float) -> Work:
    """The default of a new swarm, or what most others would choose."""
    node, name = rng.choice(nodes), rng.choice(["backfill", "swarm"])
    return Work(begin_s, "policy", policy_work(node, name, {"pause_s": 0.1} if name == "swarm" else {}, "on"))


def made_crowded(
    rng: random.Random, work: WorkPlan, nodes: Sequence[NodeId], total_gpus: int, begin_s: float
) -> list[Work]:
    """The same jobs, behind one that needs all GPUs under a short bound on waiting. Small ones come faster than they
    end, for several times as long."""
    draw = _Draw(rng, list(nodes), [total_gpus] * len(nodes), begin_s, begin_s + CROWD_S)
    draw.number = 1 + max([each.parameters["job"] for each in work if each.kind == "submit"], default=-1)
    draw.crowd(total_gpus)
    return [*draw.work, *[each for each in work if each.kind != "policy"]]


def made_elastic(rng: random.Random, work: WorkPlan, nodes: Sequence[NodeId], begin_s: float) -> list[Work]:
    """The same jobs, but those that train take more ranks than they ask for, and a policy that gives them some."""
    changed = [
        replace(each, parameters={**each.parameters, "ranks": ranks, "ranks_most": ranks + rng.randint(1, 8)})
        if each.kind == "submit" and each.parameters["does"] == "train"
        else each
        for each, ranks in ((each, min(each.parameters.get("ranks", 1), rng.randint(1, 3))) for each in work)
        if each.kind != "policy"
    ]
    name, elasticity = rng.choice(ELASTIC_POLICIES), rng.choice(["on", "on", "on", "advise", "off"])
    chosen = policy_work(rng.choice(nodes), name, {"pause_s": 1.0} if name == "swarm" else {}, elasticity)
    return [Work(begin_s, "policy", chosen), *changed]


def _submit(rng: random.Random, gpus: Mapping[NodeId, int], number: int) -> dict[str, Any]:
    does = rng.choice(JOB_KINDS)
    nodes, total_gpus = list(gpus), sum(gpus.values())
    duration_s = rng.choice([0.2, 5.0, 20.0, 60.0]) * rng.random()
    if does in ("train", "elastic"):  # long enough to be struck, with a checkpoint before and after
        duration_s = rng.choice([5.0, 40.0, 80.0]) * rng.uniform(0.5, 1.0)
    node = rng.choice(nodes)
    exclude = [node] if len(nodes) > 1 and rng.random() < EXCLUDE_RATIO else []
    total_gpus = max(1, total_gpus - sum(gpus[each] for each in exclude))
    wants = _wants(rng, does, nodes)
    if does == "elastic":
        wants["ranks_most"] = rng.choice([0, 4, 6])
    total_gpus = max(1, total_gpus // max(1, wants["gpus"]))
    return {
        **wants,
        "name": rng.choice(NAMES),
        "job": number,
        "node": node,
        "ranks": min(total_gpus, rng.choice([1, 1, 2, 3, 5, 8, max(1, total_gpus // 2), total_gpus]))
        if does != "elastic"
        else min(total_gpus, rng.choice([1, 2, 2, 3, 4])),
        "priority": rng.choice([0, 0, 0, 0, 1, 5]),
        "exclude": exclude,  # so that it is shepherded where none of it runs
        "does": does,
        "duration_s": _rounded(duration_s),
        "checkpoint_period_s": _rounded(rng.choice([0.5, 1.0, 3.0])) if does == "train" else 0.0,
        "time_limit_s": _rounded(rng.uniform(0.5, 20.0)) if does in LIMITED else 0.0,
        "grace_s": rng.choice([0.1, 1.0]),
        "max_restarts": rng.choice([0, 1, 5, 5, 5]),
        "on_isolation": rng.choice(["pause", "pause", "pause", "continue"]),
        "copies": rng.choice([0, 0, 0, 1, 2]),  # the same request to several holders at once
        "answers_lost": rng.choice([0, 0, 0, 1, 2]),  # before the client hears one
    }


def _wants(rng: random.Random, does: str, nodes: Sequence[NodeId]) -> dict[str, Any]:
    """What each rank asks for, and where."""
    shape, wants = rng.choice(SHAPES), dict(PLAIN)
    match shape:
        case "gpus":
            wants["gpus"] = 2
        case "cores":
            wants["gpus"], wants["cores"] = 0, CORES_PER_RANK
        case "memory":
            wants["memory_gib"] = MEMORY_GIB_PER_RANK
        case "per-node":  # of the other kinds, single ranks of a node do something
            wants["per_node"] = does in ("train", "sleep")
        case "pinned":
            wants["nodes"] = sorted(rng.sample(list(nodes), min(len(nodes), 2)))
    return wants


def _rounded(value: float) -> float:
    return round(value, 3)


BATCHES = BatchRange(64, 1_024, 1, 64)
"""Of jobs that take several sizes."""


def spec_of(parameters: Mapping[str, Any]) -> JobSpec:
    """The job that a submit asks for.  Its command tells `behave` what the ranks do."""
    does = parameters["does"]
    return JobSpec(
        command=(does, str(parameters["duration_s"]), str(parameters["checkpoint_period_s"])),
        ranks=parameters["ranks"],
        ranks_most=max(parameters["ranks_most"], parameters["ranks"]) if parameters["ranks_most"] else 0,
        elastic=does == "elastic",
        batches=BATCHES if parameters["ranks_most"] else BatchRange(),
        name=parameters["name"],
        user=parameters["name"],
        demand=Demand(parameters["gpus"], parameters["cores"], parameters["memory_gib"] * GIB),
        per_node=parameters["per_node"],
        nodes=tuple(parameters["nodes"]),
        time_limit_s=parameters["time_limit_s"],
        grace_s=parameters["grace_s"],
        priority=parameters["priority"],
        exclude=tuple(parameters["exclude"]),
        restartable=does != "elastic" and parameters["job"] % RESTARTABLE_EACH == 0,
        tree="0" * 64 if does in ("environment", "staged") else "",  # so that there is something to stage
        max_restarts=parameters["max_restarts"],
        on_isolation=Isolation(parameters["on_isolation"]),
        **_beside(does, parameters["job"]),
    )


def _beside(does: str, number: int) -> dict[str, Any]:
    """It asks for nothing, so that it fits wherever the first group does."""
    if number % GROUPS_EACH != GROUPS_EACH - 1:
        return {}
    lasts_s = FOR_EVER_S if number % (2 * GROUPS_EACH) < GROUPS_EACH or does in LIMITED else 0.5
    return {"group": "first", "groups": (RankGroup("helper", ("sleep", str(lasts_s), "0.0"), ranks=1 + number % 2),)}


def behave(order: TaskOrder, rank: int) -> RankPlan:
    """What the ranks of each kind of job do."""
    does, duration, period = order.spec.command
    duration_s, period_s = float(duration), float(period) or math.inf
    match does:
        case "train":
            return RankPlan(duration_s, checkpoint_period_s=period_s, elements=_elements(order))
        case "elastic":
            return _worker(
                duration_s,
                rank - order.first_number,
                is_first=order.attempt == 1,
                hangs=sum(order.job_id.encode()) % 2 == 1,
            )
        case "code":  # one rank fails, the others would go on for ever
            return (
                RankPlan(duration_s, 3) if rank == order.first_number + order.world_size - 1 else RankPlan(FOR_EVER_S)
            )
        case "once" if order.attempt == 1 and order.node_rank == 1:  # not its fault: tried again
            return RankPlan(duration_s, failure=TaskFailure.UNREACHABLE)
        case "no-port" if order.attempt == 1 and order.node_rank == 0:
            return RankPlan(duration_s, failure=TaskFailure.PORT_TAKEN)
        case "environment":
            return RankPlan(duration_s, failure=TaskFailure.ENVIRONMENT)
        case "stubborn":
            return RankPlan(FOR_EVER_S, obeys_sigterm=False)
        case "unkillable":
            return RankPlan(FOR_EVER_S, obeys_sigterm=False, outlives_kill_s=UNKILLABLE_S)
        case "no-shim" if order.attempt == 1 and order.node_rank == 0:
            return RankPlan(duration_s, failure=TaskFailure.INTERNAL)
        case "endless":
            return RankPlan(FOR_EVER_S)
        case _:
            return RankPlan(duration_s, elements=_elements(order))


def _elements(order: TaskOrder) -> int:
    """Of the range that each part of a gang has hosted, if its ranks train apart: from nothing to more than fits."""
    return sum(order.job_id.encode()) % RANGES_EACH * RANGE_GIB * GIB // BYTES_AN_ELEMENT


def _worker(duration_s: float, rank: int, *, is_first: bool, hangs: bool) -> RankPlan:
    """In the first attempt one of the first stands still for ever, or hangs.  Of those that come later, some die,
    refuse the world that names them, or never are ready for one; some are ready only when the others are done, hear
    late of worlds, or do not leave."""
    if rank == 1 and is_first:
        return RankPlan(duration_s, stands_still_s=0.5 * duration_s, hangs=hangs, checkpoint_period_s=WORKER_SAVES_S)
    match rank % 8:
        case 2:
            return RankPlan(duration_s, hears_s=HEARS_LATE_S, stays=True)
        case 3:
            return RankPlan(0.4 * duration_s, 9, checkpoint_period_s=WORKER_SAVES_S)
        case 5:
            return RankPlan(duration_s, refuses=True)
        case 6:
            return RankPlan(duration_s, ready_s=0.9 * duration_s)
        case 7:
            return RankPlan(0.8 * duration_s, 1, ready_s=FOR_EVER_S)
        case _:
            return RankPlan(duration_s, checkpoint_period_s=WORKER_SAVES_S)


def ends_of(parameters: Mapping[str, Any]) -> tuple[EndReason, ...]:
    """How a job may end that nobody cancels, whatever happens to its machines."""
    lost = (EndReason.FAILED, EndReason.NODE_LOST)
    if parameters["time_limit_s"]:
        return (EndReason.COMPLETED, EndReason.TIMEOUT, *lost)
    return lost if parameters["does"] in ("code", "environment") else (EndReason.COMPLETED, *lost)
