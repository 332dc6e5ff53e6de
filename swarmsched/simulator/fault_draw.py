"""Drawing a plan of faults from a seed, in the ranges of docs/explanation/simulator.md (Faults).

Whole classes are left out at random (swarm testing; Groce et al., 2012): a run in which everything goes wrong at once
rarely gets anywhere, and some bugs show only while other faults are absent.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from swarmsched.ids import NodeId
from swarmsched.simulator.fault import FAULT_CLASSES, Fault

ABSENT_RATIO = 0.6  # of the classes, in an average run
CALM_RATIO = 0.05  # of the runs see no fault at all
LOSS_MAX, DUPLICATE_MAX, REPLAY_MAX = 0.30, 0.50, 0.50
PARTITION_MIN_S = 1.0  # a partition is stable for at least so long
PAUSE_S = (0.1, 60.0)
DRIFT_MAX = 0.05
JUMP_MAX_S = 3600.0
FULL_DISK_MAX_S = 30.0
PLAN_MAX_S = 6.0  # longer than an answer counts
GPU_TROUBLES = ("lost", "unhealthy", "foreign", "stale")
START_FAILURES = ("internal", "sync", "environment", "unreachable")
FAILOVER_S = (11.0, 30.0)  # long enough for another shepherd and another attempt, and not for ever
FAILOVER_RATIO = 0.5
WHICH = 1_000  # of those that are there then, counted around
REPLACED_S = (11.0, 18.0)  # long enough for another holder in the place of a lost one

Parameters = dict[str, Any]
Draw = Callable[[random.Random, Sequence[NodeId], float], Parameters]
"""From a generator, the nodes and the time that is left to one fault's parameters."""


def draw_faults(
    rng: random.Random, nodes: Sequence[NodeId], begin_s: float, end_s: float, classes: Collection[str] | None
) -> list[Fault]:
    """Faults between two moments, in order of time; all have ended by `end_s`.

    `classes` None: each class takes part or not at random; otherwise exactly those named do.
    """
    if classes is None:
        if rng.random() < CALM_RATIO:
            return []
        classes = [kind for kind in FAULT_CLASSES if rng.random() >= ABSENT_RATIO]
    faults: list[Fault] = []
    for kind in FAULT_CLASSES:
        if kind in classes:
            for _ in range(_count(rng, kind, len(nodes))):
                at_s = _rounded(rng.uniform(begin_s, end_s))
                faults.append(Fault(at_s, kind, DRAWS[kind](rng, nodes, end_s - at_s)))
    return sorted(_survivable(faults, len(nodes)), key=lambda fault: fault.at_s)


def _count(rng: random.Random, kind: str, node_count: int) -> int:
    if kind in ("loss", "duplicate", "replay", "delay", "lost-host", "lost-holders", "same-name"):
        return 1
    if kind in ("clock-drift", "clog"):
        return rng.randint(1, max(2, min(10, node_count // 2)))
    return rng.randint(1, 3 + node_count // 10)


def _survivable(faults: Sequence[Fault], node_count: int) -> list[Fault]:
    """A swarm of less than three has nobody who could do without a lost machine, one of three no other holder."""
    least = {"lost-host": 3, "lost-holders": 4}
    return [fault for fault in faults if node_count >= least.get(fault.kind, 0)]


def _rounded(value: float) -> float:
    return round(value, 3)


def _some(rng: random.Random, nodes: Sequence[NodeId]) -> list[NodeId]:
    """A part of the swarm that is neither empty nor all of it, if it has two nodes; often a single one."""
    limit = max(1, len(nodes) - 1)
    count = rng.choice([1, rng.randint(1, limit), max(1, len(nodes) // 2)])
    chosen = set(rng.sample(list(nodes), count))
    return [node for node in nodes if node in chosen]


def _node(rng: random.Random, nodes: Sequence[NodeId]) -> Parameters:
    return {"node": rng.choice(list(nodes))}


def _lasting(rng: random.Random, left_s: float, least_s: float, most_s: float) -> Parameters:
    """A duration that is as often short as long, or one in which the others go on without whoever is struck."""
    duration_s = least_s * (most_s / least_s) ** rng.random()
    if most_s > FAILOVER_S[0] and rng.random() < FAILOVER_RATIO:
        duration_s = rng.uniform(FAILOVER_S[0], min(most_s, FAILOVER_S[1]))
    return {"duration_s": _rounded(min(duration_s, max(0.001, left_s)))}


def _ratio(limit: float) -> Draw:
    def draw(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
        del nodes
        ratio = _rounded(limit * rng.choice([0.1, 0.5, 1.0]) * rng.random())
        return {"ratio": ratio, **_lasting(rng, left_s, 5.0, 200.0)}

    return draw


def _delay(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    del nodes
    median_s, sigma = rng.choice([0.001, 0.005, 0.02, 0.1]), rng.choice([0.3, 1.0, 1.5])
    return {"median_s": median_s, "sigma": sigma, **_lasting(rng, left_s, 5.0, 200.0)}


def _clog(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    source, destination = rng.choice(list(nodes)), rng.choice(list(nodes))
    return {"source": source, "destination": destination, **_lasting(rng, left_s, 0.1, 10.0)}


def _partition(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {"side": _some(rng, nodes), **_lasting(rng, left_s, PARTITION_MIN_S, 40.0)}


def _one_way(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {"deaf": _some(rng, nodes), **_lasting(rng, left_s, PARTITION_MIN_S, 40.0)}


def _down(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), **_lasting(rng, left_s, 0.01, 60.0)}


def _restart(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    del left_s
    return {**_node(rng, nodes), "times": rng.choice([1, 1, 2, 4])}


def _lost(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    del left_s
    return _node(rng, nodes)


def _lost_holders(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    del nodes
    return {"gap_s": _rounded(rng.uniform(*REPLACED_S)), "duration_s": _rounded(max(0.001, left_s))}


def _pause(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), **_lasting(rng, left_s, *PAUSE_S)}


def _slow_loop(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), "lag_s": _rounded(rng.uniform(0.05, 1.5)), **_lasting(rng, left_s, 1.0, 30.0)}


def _slow_disk(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), "fsync_median_s": rng.choice([0.02, 0.2, 1.0]), **_lasting(rng, left_s, 1.0, 40.0)}


def _full_disk(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), **_lasting(rng, left_s, 0.5, FULL_DISK_MAX_S)}


def _drift(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    rate = _rounded(1.0 + rng.choice([-DRIFT_MAX, DRIFT_MAX, rng.uniform(-DRIFT_MAX, DRIFT_MAX)]))
    return {**_node(rng, nodes), "rate": rate, **_lasting(rng, left_s, 10.0, 200.0)}


def _jump(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    """A wrong time server moves many clocks at once."""
    del left_s
    where = rng.choice([list(nodes), _some(rng, nodes)])
    return {"nodes": where, "by_s": _rounded(rng.uniform(-JUMP_MAX_S, JUMP_MAX_S))}


def _send_error(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    node = rng.choice(list(nodes))
    others = [other for other in nodes if other != node]  # what a node tells itself passes no kernel
    return {"node": node, "to": _some(rng, others) if others else [], **_lasting(rng, left_s, 0.5, 30.0)}


def _slow_planner(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    fails, plan_s = rng.random() < 0.5, _rounded(rng.uniform(0.1, PLAN_MAX_S))
    return {**_node(rng, nodes), "plan_s": plan_s, "fails": fails, **_lasting(rng, left_s, 1.0, 60.0)}


def _gpu_trouble(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), "health": rng.choice(GPU_TROUBLES), **_lasting(rng, left_s, 1.0, 60.0)}


def _same_name(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), **_lasting(rng, left_s, 1.0, 30.0)}


def _failing_starts(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    return {**_node(rng, nodes), "how": rng.choice(START_FAILURES), **_lasting(rng, left_s, 5.0, 200.0)}


def _lost_connection(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    del nodes, left_s
    return {"in_switch": rng.random() < 0.5, "which": rng.randrange(WHICH)}


def _killed_workers(rng: random.Random, nodes: Sequence[NodeId], left_s: float) -> Parameters:
    del nodes, left_s
    return {"which": rng.randrange(WHICH)}


DRAWS: Mapping[str, Draw] = {
    "loss": _ratio(LOSS_MAX),
    "duplicate": _ratio(DUPLICATE_MAX),
    "replay": _ratio(REPLAY_MAX),
    "delay": _delay,
    "clog": _clog,
    "partition": _partition,
    "one-way-partition": _one_way,
    "crash": _down,
    "restart": _restart,
    "power-cut": _down,
    "lost-host": _lost,
    "lost-holders": _lost_holders,
    "wipe": _down,
    "pause": _pause,
    "slow-loop": _slow_loop,
    "slow-disk": _slow_disk,
    "full-disk": _full_disk,
    "clock-drift": _drift,
    "clock-jump": _jump,
    "send-error": _send_error,
    "slow-planner": _slow_planner,
    "gpu-trouble": _gpu_trouble,
    "failing-starts": _failing_starts,
    "short-disk": _pause,
    "lost-files": _down,
    "lost-database": _down,
    "same-name": _same_name,
    "lost-connection": _lost_connection,
    "killed-workers": _killed_workers,
    "killed-shim": _killed_workers,
}
