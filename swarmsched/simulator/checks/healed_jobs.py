"""Invariants 14 to 17 and the end of all jobs: after healing each has one shepherd, gets its place, and leaves nothing.

Jobs without a live majority of holders are left out, and those that continue in isolation on a machine that is down:
nobody may decide about them before an operator does.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from swarmsched.api import EndReason, JobState
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.booking import BookingState
from swarmsched.policies.registry import make_policy
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, suits
from swarmsched.simulator.checks.gangs import is_over
from swarmsched.simulator.checks.healing import Healed, Rule
from swarmsched.simulator.checks.ledger_view import Key, ledger_of
from swarmsched.view import JobView

ACTING_S = 20.0
"""One acting shepherd (protocol, invariant 14)."""

HOLD_SLACK_S = 1.0
STUCK_S = 660.0
"""No hold outlives its deadline + 1 s; nothing is draining or orphaned for over 11 min (protocol, invariant 15)."""

TOP_PLACED_S = 10.0
"""The top-ranked gang is placed, if capacity suffices (protocol, invariant 16)."""

QUEUE_EMPTY_S = 5.0
"""A queue that fits what is free is empty (protocol, invariant 17)."""

RESTART_DELAY_S_MAX = 60.0
"""A gang that was restarted again and again waits up to so long, and so long a node is avoided that failed it."""

REPORTS_S = 45.0
"""An owner whose report is not heard repeats it every 30 s at last."""


class OneShepherd(Rule):
    """Exactly one agent acts for each open job, and it is the one that the record names."""

    invariant = 14

    def __init__(self) -> None:
        super().__init__(ACTING_S)

    def missing(self, healed: Healed) -> str:
        """The first job with none, or with several."""
        for record in healed.open_records():
            acting = [host.node_id for host in healed.up if host.node and host.node.is_shepherd(record.job_id)]
            if acting != [record.shepherd]:
                return f"{', '.join(acting) or 'nobody'} acts for {record.job_id}; the record names {record.shepherd}"
        return ""


class NothingStuck(Rule):
    """Holds end at their deadline, and what belongs to nobody does not stay."""

    invariant = 15

    def __init__(self) -> None:
        super().__init__(math.inf)
        self._since_s: dict[tuple[NodeId, Key], float] = {}  # draining or orphaned bookings

    def broken(self, healed: Healed) -> str:
        """The first hold that is too old, or booking that is stuck."""
        stuck: dict[tuple[NodeId, Key], float] = {}
        for host in healed.up:
            for entry in ledger_of(host).entries:
                if entry.state is BookingState.HELD and host.now_s > entry.deadline_s + HOLD_SLACK_S:
                    return (
                        f"{host.node_id} still has a hold {host.now_s - entry.deadline_s:.1f} s after its end: {entry}"
                    )
                where = (host.node_id, (entry.job_id, entry.attempt))
                if entry.state is BookingState.DRAINING or self._is_orphaned(healed, entry.job_id, entry.attempt):
                    stuck[where] = self._since_s.get(where, healed.now_s)
                    if healed.now_s - stuck[where] > STUCK_S:
                        return f"{host.node_id} has had this for {STUCK_S:g} s, and nobody else: {entry}"
        self._since_s = stuck
        return ""

    def _is_orphaned(self, healed: Healed, job_id: JobId, attempt: int) -> bool:
        return job_id in healed.jobs and is_over(healed.record(job_id), attempt)


class _Waiting(Rule):
    """Jobs that ought to be placed and are not: each may wait for `patience_s` while nothing about it changes."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(math.inf)
        self._patience_s = patience_s
        self._since_s: dict[tuple[JobId, int], float] = {}  # (job, version of its record)

    def broken(self, healed: Healed) -> str:
        """The first job that waits for too long, once there was time to find a shepherd for each."""
        if healed.now_s - healed.since_s <= ACTING_S:
            return ""
        free = {host.node_id: ledger_of(host).free(host.now_s) for host in healed.up if host.resources.gpus}
        since_s: dict[tuple[JobId, int], float] = {}
        for record in self._ought_to_be_placed(free, queue_of(healed)):
            key = (record.job_id, record.version)
            since_s[key] = self._since_s.get(key, healed.now_s)
            if healed.now_s - since_s[key] > self._patience_s + _delay_s(record):
                offered = ", ".join(f"{len(each.gpus)} GPUs on {node}" for node, each in free.items())
                return f"{record.job_id} has waited for {healed.now_s - since_s[key]:.1f} s; free are {offered}"
        self._since_s = since_s
        return ""

    def _ought_to_be_placed(self, free: Mapping[NodeId, Free], queue: Sequence[JobRecord]) -> Sequence[JobRecord]:
        raise NotImplementedError


class TopIsPlaced(_Waiting):
    """The first of the queue does not wait while it fits."""

    invariant = 16

    def __init__(self) -> None:
        super().__init__(TOP_PLACED_S)

    def _ought_to_be_placed(self, free: Mapping[NodeId, Free], queue: Sequence[JobRecord]) -> Sequence[JobRecord]:
        return queue[:1] if queue and take(free, queue[0]) is not None else ()


class QueueEmpties(_Waiting):
    """No job waits while all fit together, in whatever order and wherever they are placed."""

    invariant = 17

    def __init__(self) -> None:
        super().__init__(QUEUE_EMPTY_S)

    def _ought_to_be_placed(self, free: Mapping[NodeId, Free], queue: Sequence[JobRecord]) -> Sequence[JobRecord]:
        return queue if all_fit(free, queue) else ()


def queue_of(healed: Healed) -> list[JobRecord]:
    """Jobs that wait for nothing but their place, in the order of the policy in force."""
    node = next((host.node for host in healed.up), None)
    if node is None:
        return []
    policy = make_policy(node.setting.policy_setting)
    waiting = [
        record
        for record in healed.open_records()
        if record.state is JobState.QUEUED and not record.leftovers and record.stop_reason is EndReason.NONE
    ]
    return sorted(waiting, key=lambda record: (policy.rank_key(_job_view(record)), record.job_id))


class AllEnded(Rule):
    """Every accepted job has ended, as it should, and nothing is left of any."""

    invariant = "ended"

    def __init__(self, bound_s: float, ends: Mapping[JobId, Collection[EndReason]] | None = None) -> None:
        """`bound_s`: the jobs' own time and what placing them one after the other takes; reports come on top.

        `ends`: how each job may end; any end will do for one that is not named.
        """
        super().__init__(bound_s + REPORTS_S)
        self._ends = ends or {}

    def missing(self, healed: Healed) -> str:
        """An open job, or what is left of one that has ended."""
        still_open = [record for record in healed.open_records() if not healed.awaits_operator(record)]
        if still_open:
            record = still_open[0]
            return f"{len(still_open)} jobs have not ended; {record.job_id} is {record.state.value}: {record.reason}"
        left = leftovers(healed)
        return f"left are {left[:3]}" if left else ""

    def broken(self, healed: Healed) -> str:
        """A job that ended otherwise."""
        for job_id, allowed in self._ends.items():
            record = healed.record(job_id) if job_id in healed.jobs else None
            if record is not None and record.is_ended and record.end_reason not in allowed:
                return f"{job_id} ended as {record.end_reason.value}: {record.detail}"
        return ""


def leftovers(healed: Healed) -> list[str]:
    """Bookings, tasks, processes and ports of running machines, but for jobs that nobody can decide about."""
    jobs = dict.fromkeys(job for job in healed.jobs if not healed.awaits_operator(healed.record(job)))
    has_all = len(jobs) == len(healed.accepted)  # a port does not tell whose it is
    left = []
    for host in healed.up:
        assert host.node is not None
        left += [f"{entry} on {host.node_id}" for entry in ledger_of(host).entries if entry.job_id in jobs]
        left += [f"{task} on {host.node_id}" for task in host.node.tasks() if task.job_id in jobs]
        left += [f"processes of {task.key} on {host.node_id}" for task in host.tasks.running if task.key[0] in jobs]
        left += [f"a port on {host.node_id}"] * (host.tasks.bound_ports if has_all else 0)
    return left


def take(free: Mapping[NodeId, Free], record: JobRecord) -> dict[NodeId, int] | None:
    """How many ranks each node could take; None if the gang does not fit."""
    left, taken = record.spec.ranks, {}
    for node, offered in free.items():
        if (record.spec.nodes and node not in record.spec.nodes) or node in record.spec.exclude:
            continue
        count = min(left, ranks_that_fit(offered, record))
        if count:
            taken[node] = count
            left -= count
    return None if left else taken


def all_fit(free: Mapping[NodeId, Free], queue: Sequence[JobRecord]) -> bool:
    """True when the whole queue fits, however it is dealt out; false when that may depend on who gets what."""
    if len(queue) == 1:
        return take(free, queue[0]) is not None
    is_simple = all(_takes_single_gpus(record) for record in queue)
    wanted = sum(record.spec.ranks for record in queue)
    return bool(queue) and is_simple and wanted <= sum(len(offered.gpus) for offered in free.values())


def _takes_single_gpus(record: JobRecord) -> bool:
    return record.spec.demand == Demand(gpus=1) and not record.spec.nodes and not record.spec.exclude


def ranks_that_fit(free: Free, record: JobRecord) -> int:
    """Ranks of a job that one node can take."""
    demand = record.spec.demand
    counts = [record.spec.ranks]
    if demand.gpus:
        counts.append(sum(suits(gpu, demand) for gpu in free.gpus) // demand.gpus)
    if demand.cpus:
        counts.append(free.cpus // demand.cpus)
    if demand.memory_bytes:
        counts.append(free.memory_bytes // demand.memory_bytes)
    return min(counts)


def _delay_s(record: JobRecord) -> float:
    return RESTART_DELAY_S_MAX if record.restarts or record.relaunches or record.preemptions else 0.0


def _job_view(record: JobRecord) -> JobView:
    spec = record.spec
    return JobView(
        job_id=record.job_id,
        state=record.state,
        ranks=spec.ranks,
        demand=spec.demand,
        submitted_utc_s=record.submitted_utc_s,
        priority=spec.priority,
        user=spec.user,
        queue=spec.queue,
        attained_gpu_s=record.attained_gpu_s,
        time_limit_s=spec.time_limit_s,
        nodes=spec.nodes,
        exclude=spec.exclude,
        first_started_utc_s=record.first_started_utc_s,
    )
