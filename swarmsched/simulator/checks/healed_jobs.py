"""Invariants 14 to 17 and the end of all jobs: after healing each has one shepherd, gets its place, and leaves nothing.

Jobs without a live majority of holders are left out, and those that continue in isolation on a machine that is down:
nobody may decide about them before an operator does.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from swarmsched.api import EndReason, JobState
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.ledger.booking import BookingState
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, suits
from swarmsched.simulator.checks.gangs import is_over
from swarmsched.simulator.checks.healing import Healed, Rule
from swarmsched.view import PolicySetting

Ends = Mapping[JobId, Collection[EndReason]]

ACTING_S = 20.0
"""One acting shepherd (docs/explanation/invariants.md, 14)."""

FORMER_S = 90.0
"""Where a job is held by now comes with the full exchange of every minute at the latest; then it is read."""

HOLD_SLACK_S = 1.0
STUCK_S = 660.0
"""No hold outlives its deadline + 1 s; nothing is draining or orphaned for over 11 min (invariant 15)."""

TOP_PLACED_S = 10.0
"""The top-ranked gang is placed, if capacity suffices (docs/explanation/invariants.md, 16)."""

QUEUE_EMPTY_S = 5.0
"""A queue that fits what is free is empty (docs/explanation/invariants.md, 17)."""

LAS_THRESHOLD_GPU_S = 3_250.0
"""Of the first class, where the setting says nothing."""

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


class FormerHoldersKnow(Rule):
    """Nobody goes on as a holder of an open job that others hold by now: it would stand for shepherd for ever."""

    invariant = "former"

    def __init__(self) -> None:
        super().__init__(FORMER_S)

    def missing(self, healed: Healed) -> str:
        """The first that has an older record, of a configuration with itself in it."""
        for record in healed.open_records():
            for host in healed.up:
                held = host.node.record(record.job_id) if host.node else None
                is_holder = Holder(host.node_id, host.storage.store_id) in record.configuration.members
                if held is not None and held.stamp < record.stamp and not is_holder:
                    return (
                        f"{host.node_id} knows {record.job_id} as of {held.stamp}, held by itself; it is {record.stamp}"
                    )
        return ""


class NothingStuck(Rule):
    """Holds end at their deadline, and what belongs to nobody does not stay."""

    invariant = 15

    def __init__(self) -> None:
        super().__init__(math.inf)
        self._since_s: dict[tuple[NodeId, TaskKey], float] = {}  # draining or orphaned bookings

    def broken(self, healed: Healed) -> str:
        """The first hold that is too old, or booking that is stuck."""
        stuck: dict[tuple[NodeId, TaskKey], float] = {}
        for host in healed.up:
            for entry in healed.books.entries(host):
                if entry.state is BookingState.HELD:
                    late_s = host.now_s - healed.books.deadline_s(host, entry)
                    if late_s > HOLD_SLACK_S:
                        return f"{host.node_id} still has a hold {late_s:.1f} s after its end: {entry}"
                where = (host.node_id, entry.key)
                if entry.state is BookingState.DRAINING or self._is_orphaned(healed, entry.job_id, entry.attempt):
                    stuck[where] = self._since_s.get(where, healed.now_s)
                    if healed.now_s - stuck[where] > STUCK_S:
                        return f"{host.node_id} has had this for {STUCK_S:g} s, and nobody else: {entry}"
        self._since_s = stuck
        return ""

    def _is_orphaned(self, healed: Healed, job_id: JobId, attempt: int) -> bool:
        return healed.has_majority(job_id) and is_over(healed.record(job_id), attempt)


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
        offering = [host for host in healed.up if host.node and not host.node.ledger.avoided_reason]
        free = {host.node_id: healed.books.free(host) for host in offering if host.resources.gpus}
        since_s: dict[tuple[JobId, int], float] = {}
        for record in self._ought_to_be_placed(free, queue_of(healed)):
            if not healed.has_majority(record.job_id):
                continue
            key = (record.job_id, record.version)
            since_s[key] = self._since_s.get(key, healed.now_s)
            if healed.now_s - since_s[key] > self._patience_s + _delay_s(record):
                offered = ", ".join(f"{each.gpu_count} GPUs on {node}" for node, each in free.items())
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
    """Jobs that wait for nothing but their place, in the order of the policy in force.

    Those about which nobody can decide any more stand in line as long as their cards are kept, and the next ones wait.
    """
    node = next((host.node for host in healed.up), None)
    if node is None:
        return []
    setting = node.setting.policy_setting
    waiting = [
        record
        for record in healed.all_open_records()
        if record.state is JobState.QUEUED and not record.leftovers and record.stop_reason is EndReason.NONE
    ]
    return sorted(waiting, key=lambda record: (*rank_of(record, setting), record.job_id))


def rank_of(record: JobRecord, setting: PolicySetting) -> tuple[float, ...]:
    """By priority and time; `las` puts classes of attained service, and those that have run, before time."""
    rank = (-record.spec.priority, int(record.submitted_utc_s * 1000))
    if setting.name != "las":
        return rank
    thresholds = {"threshold1_gpu_s": LAS_THRESHOLD_GPU_S, **setting.parameters}
    is_passed = [0 < thresholds.get(f"threshold{number}_gpu_s", 0) <= record.attained_gpu_s for number in (1, 2, 3)]
    first_ms = int(record.first_started_utc_s * 1000) or math.inf
    return (rank[0], sum(is_passed), first_ms, rank[1])


class AllEnded(Rule):
    """Every accepted job has ended, as it should, and nothing is left of any."""

    invariant = "ended"

    def __init__(self, bound_s: float, ends: Callable[[], Ends] = dict) -> None:
        """`bound_s`: the jobs' own time and what placing them one after the other takes; reports come on top.

        `ends`: how each job may end, as of now; any end will do for one that is not named.
        """
        super().__init__(bound_s + REPORTS_S)
        self._ends = ends

    def missing(self, healed: Healed) -> str:
        """An open job, or what is left of one that has ended.

        Where nobody can decide about some job, it may keep its place, or its place in the line, from those behind it.
        """
        records = healed.open_records()
        still_open = [record for record in records if not healed.awaits_operator(record)]
        if len(still_open) < len(healed.all_open_records()):
            still_open = [record for record in still_open if record.state is not JobState.QUEUED]
        if still_open:
            record = still_open[0]
            return f"{len(still_open)} jobs have not ended; {record.job_id} is {record.state.value}: {record.reason}"
        left = leftovers(healed)
        return f"left are {left[:3]}" if left else ""

    def broken(self, healed: Healed) -> str:
        """A job that ended otherwise."""
        jobs = dict.fromkeys(healed.jobs)
        for job_id, allowed in self._ends().items():
            record = healed.record(job_id) if job_id in jobs else None
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
        left += [f"{entry} on {host.node_id}" for entry in healed.books.entries(host) if entry.job_id in jobs]
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
    return bool(queue) and is_simple and wanted <= sum(offered.gpu_count for offered in free.values())


def _takes_single_gpus(record: JobRecord) -> bool:
    return record.spec.demand == Demand(gpus=1) and not record.spec.nodes and not record.spec.exclude


def ranks_that_fit(free: Free, record: JobRecord) -> int:
    """Ranks of a job that one node can take."""
    demand = record.spec.demand
    counts = [record.spec.ranks]
    if demand.gpus:
        counts.append(sum(each.count for each in free.gpus if suits(each, demand)) // demand.gpus)
    if demand.cpus:
        counts.append(free.cpus // demand.cpus)
    if demand.memory_bytes:
        counts.append(free.memory_bytes // demand.memory_bytes)
    return min(counts)


def _delay_s(record: JobRecord) -> float:
    return RESTART_DELAY_S_MAX if record.restarts or record.relaunches or record.preemptions else 0.0
