"""Placed jobs after healing: what the register calls running has processes that run, and what was placed starts.

A cancel ends nearly anything, so a job that stands still shows only while nobody cancels it.
"""

import math
from collections.abc import Mapping

from swarmsched.api import JobState
from swarmsched.ids import AttemptKey, JobId, NodeId, TaskKey
from swarmsched.record import JobRecord
from swarmsched.simulator.checks.healed_jobs import ACTING_S
from swarmsched.simulator.checks.healing import Healed, Rule
from swarmsched.simulator.host import Host
from swarmsched.task import TaskStage

RUNS_S = 15.0
"""A lost rank is told, or a frozen one goes on, within three contacts, one report and one decision."""

STARTS_S = 15.0
"""Staging of a simulated job takes 0.1 s at most; an attempt whose owner does not answer is given up after 4 s, and one
that was decided before once that machine is found lost."""

SETTLES_S = 60.0
"""A switch takes 0.1 s, repeats come each second; who joins with others may wait for those that are given up."""

STOPS_S = 45.0
"""Grace is 1 s at most; what an owner reports is repeated every 30 s at last."""


class PlacedGoOn(Rule):
    """Each job that has its place moves: it starts, it runs, or its end is on its way."""

    invariant = "placed"

    def __init__(self) -> None:
        super().__init__(math.inf)
        self._since_s: dict[tuple[JobId, tuple[int, int], str], float] = {}

    def broken(self, healed: Healed) -> str:
        """The first that stands still for too long, once there was time to find a shepherd for each."""
        up = {host.node_id: host for host in healed.up}
        standing: dict[tuple[JobId, tuple[int, int], str], float] = {}
        for record in healed.open_records():
            if healed.awaits_operator(record):
                continue
            problem, patience_s = _standstill(record, up)
            if not problem:
                continue
            key = (record.job_id, record.stamp, problem)
            standing[key] = self._since_s.get(key, healed.now_s)
            still_s = healed.now_s - max(standing[key], healed.since_s + ACTING_S - patience_s)
            if still_s > patience_s:
                return f"{record.job_id}/{record.attempt} is {record.state.value} for {still_s:.1f} s: {problem}"
        self._since_s = standing
        return ""


class WorldsSettle(Rule):
    """Each change of a gang that trains comes to its end."""

    invariant = "worlds"

    def __init__(self) -> None:
        super().__init__(math.inf)
        self._since_s: dict[tuple[JobId, int, int, str], float] = {}

    def broken(self, healed: Healed) -> str:
        """The first gang of which a part joins, leaves or has not heard of its world for too long."""
        up = {host.node_id: host for host in healed.up}
        waiting: dict[tuple[JobId, int, int, str], float] = {}
        for record in healed.open_records():
            problem = "" if healed.awaits_operator(record) else _unsettled(record, up)
            if not problem:
                continue
            key = (record.job_id, record.attempt, record.world.version, problem)
            waiting[key] = self._since_s.get(key, healed.now_s)
            if healed.now_s - max(waiting[key], healed.since_s + ACTING_S) > SETTLES_S:
                return f"{record.job_id}/{record.attempt}: {problem} for {healed.now_s - waiting[key]:.1f} s"
        self._since_s = waiting
        return ""


def _unsettled(record: JobRecord, up: Mapping[NodeId, Host]) -> str:
    """What a change of a gang waits for, but for a newcomer that is not ready: nobody can tell that from a slow one."""
    if record.state is not JobState.RUNNING or not record.world.version:
        return ""
    leaving = sorted(share.part for share in record.leaving if share.node in up)
    if leaving:
        return f"parts {leaving} leave"
    for share in (*record.members, *record.joining):
        host = up.get(share.node)
        key = TaskKey(record.job_id, record.attempt, share.part)
        task = next((task for task in host.tasks.running if task.key == key), None) if host else None
        if task is None or task.is_frozen or not task.worker.address:
            continue
        if share in record.joining:
            return f"part {share.part} is ready, and joins"
        if task.worker.heard < record.world.version:
            return f"part {share.part} has not heard of world {record.world.version}"
        if task.lost >= record.world.version:
            return f"part {share.part} has lost world {record.world.version}"
    return ""


def _standstill(record: JobRecord, up: Mapping[NodeId, Host]) -> tuple[str, float]:
    """What a placed job waits for, and how long it may; empty while its ranks run."""
    hosts = {share.node: up.get(share.node) for share in record.shares}
    detection_s = 0.0 if all(hosts.values()) else ACTING_S
    if record.state is JobState.STARTING:
        return "it has not started", STARTS_S + detection_s
    if record.state is JobState.STOPPING:
        return "it has not ended", STOPS_S
    if record.state is not JobState.RUNNING:
        return "", 0.0
    problems = (f"{node} is down" if host is None else _idles(host, record) for node, host in hosts.items())
    # One verdict is the whole gang's: what the others told of their ranks waits until a machine that is down is lost.
    return next(filter(None, problems), ""), RUNS_S + detection_s


def _idles(host: Host, record: JobRecord) -> str:
    """Why no rank of the present attempt runs on this machine; empty if one does, or its end is yet to be told."""
    key = AttemptKey(record.job_id, record.attempt)
    task = next((task for task in host.tasks.running if task.key.of_attempt == key), None)
    if task is not None:
        return f"its ranks on {host.node_id} are frozen" if task.is_frozen else ""
    assert host.node is not None
    status = next((each for each in host.node.tasks() if each.key.of_attempt == key), None)
    if status is not None and status.stage is TaskStage.EXITED:
        return ""
    return f"it has no processes on {host.node_id}, which knows of {status and status.stage.value}"
