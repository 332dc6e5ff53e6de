"""No task stays frozen while its owner and a majority of its job's holders run and reach one another ("frozen").

Asked while faults happen, too: whatever else is broken, a holder that is asked answers, and an owner that hears a
majority lets its ranks go on, or ends them if another attempt has taken their place.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from swarmsched.holders import Holder
from swarmsched.ids import NodeId, TaskKey
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_majority
from swarmsched.simulator.checks.gangs import is_over
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.simulator.tasks import RunningTask, TaskChange

INVARIANT = "frozen"
FROZEN_S = 10.0
"""Contacts are 2 s apart; a life that has just begun must first learn where the holders are."""
ACTING_S = 20.0
"""A holder that was away while it became one, or when a record was decided, has none or an old one, until the next
shepherd gives it one; and one that alone has accepted a record waits for him to decide it or not."""
LOOK_S = 0.5
DISK_S = 0.1  # an owner's or holder's commits take no longer, or it is not counted


@dataclass(slots=True)
class _Frozen:
    """A frozen task, and since when without a break a majority of its holders is reached, and agrees on it too."""

    host: Host
    task: RunningTask
    reached_s: float = math.inf
    informed_s: float = math.inf


class FreezeChecker(Checker):
    """Every frozen task, and since when it could have gone on."""

    def __init__(self, decided: DecidedRecords) -> None:
        self._decided = decided
        self._hosts: dict[NodeId, Host] = {}
        self._shared: set[NodeId] = set()
        self._frozen: dict[tuple[NodeId, TaskKey], _Frozen] = {}
        self._is_looking = False

    def agent_started(self, host: Host) -> None:
        """Note the machine."""
        self._hosts[host.node_id] = host

    def name_shared(self, node: NodeId) -> None:
        """Who answers under that name may be another machine."""
        self._shared.add(node)

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """Look again and again while any task is frozen."""
        key = (host.node_id, task.key)
        if change is not TaskChange.FROZEN:
            self._frozen.pop(key, None)
            return
        self._frozen[key] = _Frozen(host, task)
        if not self._is_looking:
            self._is_looking = True
            host.loop.post_later(LOOK_S, self._look, host)

    def _look(self, any_host: Host) -> None:
        now_s = any_host.loop.now_s
        for each in self._frozen.values():
            is_killed = each.task.kill_s <= now_s
            reached = [] if is_killed else self._reached(each.host)
            is_settled = any(self._is_majority(each.task, hosts) for hosts in self._by_verdict(each.task, reached))
            each.reached_s = min(each.reached_s, now_s) if self._is_majority(each.task, reached) else math.inf
            each.informed_s = min(each.informed_s, now_s) if is_settled else math.inf
            if now_s - each.informed_s > FROZEN_S or now_s - each.reached_s > ACTING_S + FROZEN_S:
                still_s = now_s - min(each.informed_s, each.reached_s)
                raise Violation(
                    INVARIANT,
                    f"{each.task.key} is frozen on {each.host.node_id} for {still_s:.1f} s in which its owner and a "
                    f"majority of its holders were up and connected",
                )
        self._is_looking = bool(self._frozen)
        if self._is_looking:
            any_host.loop.post_later(LOOK_S, self._look, any_host)

    def _by_verdict(self, task: RunningTask, hosts: Collection[Host]) -> Collection[Collection[Host]]:
        """Those whose record lets its ranks run on, and those whose record ends them.

        A record older than the decided one is as good as none.  A newer one that few have accepted says what only the
        next shepherd can decide.
        """
        last = self._decided.last(task.order.job_id)
        verdicts: dict[bool, list[Host]] = {False: [], True: []}
        for host in hosts:
            record = host.node and host.node.record(task.order.job_id)
            if record and (last is None or record.stamp >= last.stamp):
                verdicts[is_over(record, task.key.attempt)].append(host)
        return verdicts.values()

    def _is_majority(self, task: RunningTask, hosts: Collection[Host]) -> bool:
        record = self._decided.last(task.order.job_id)
        live = {Holder(host.node_id, host.storage.store_id): None for host in hosts}
        records = [] if record is None else [record, *self._decided.open(task.order.job_id, tuple(live))]
        return bool(records) and all(is_majority(each.configuration, live) for each in records)

    def _reached(self, owner: Host) -> Collection[Host]:
        if not self._answers(owner):
            return ()
        return [host for host in self._hosts.values() if self._answers(host) and owner.is_connected_to(host)]

    def _answers(self, host: Host) -> bool:
        """Neither stands still nor is a second machine of its name about, nor waits its disk for room."""
        is_slow = host.storage.fsync_median_s > DISK_S or host.storage.is_full(host.loop.now_s)
        return host.is_up and not host.is_paused and not is_slow and host.node_id not in self._shared
