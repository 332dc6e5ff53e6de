"""What keeps a node from new work for a while: starts that fail there by its own fault, and a disk that is nearly full.

A node that fails each start within a moment is always free, and would be given one job after the other.  So it waits
after a fault, twice as long after the next one; a start that succeeds where the last had failed ends that at once.
"""

import math
from dataclasses import dataclass

from swarmsched.task import TaskFailure, TaskOrder

AVOIDED_S = 15.0  # after the first fault
AVOIDED_S_MAX = 1_800.0
FORGOTTEN_S = 600.0  # that have passed well since a wait ended


@dataclass(slots=True)
class _Fault:
    """Of one kind of a node's own."""

    detail: str
    count: int = 0
    until_s: float = -math.inf


class Trouble:
    """Of one node; volatile, for an agent that starts again tries anew."""

    def __init__(self) -> None:
        self.shortage = ""  # of its disk, in words for people
        self._faults: dict[TaskFailure, _Fault] = {}

    def ran_short(self, shortage: str) -> None:
        """The node's disk is nearly full, in words for people, or has room again: empty."""
        self.shortage = shortage

    def failed(self, kind: TaskFailure, detail: str, now_s: float) -> None:
        """A start came to nothing here.  Those that fail during a wait had begun before it: they count as one."""
        fault = self._faults.get(kind)
        if fault is None or now_s > fault.until_s + FORGOTTEN_S:
            fault = self._faults[kind] = _Fault(detail)
        if now_s >= fault.until_s:
            fault.until_s = now_s + min(AVOIDED_S_MAX, AVOIDED_S * 2.0 ** min(fault.count, 10))
            fault.count, fault.detail = fault.count + 1, detail

    def staged(self, order: TaskOrder) -> None:
        """Everything that an order names could be brought."""
        if order.spec.tree or order.checkpoint:
            self._faults.pop(TaskFailure.SYNC, None)
        if order.spec.requirements:
            self._faults.pop(TaskFailure.ENVIRONMENT, None)

    def started(self) -> None:
        """Ranks run."""
        self._faults.pop(TaskFailure.INTERNAL, None)

    def ends_s(self, now_s: float) -> float:
        """When the first of the waits under way is over."""
        return min([fault.until_s for fault in self._faults.values() if now_s < fault.until_s], default=math.inf)

    def reason(self, now_s: float) -> str:
        """Why nothing new is to be begun now; empty when something may."""
        if self.shortage:
            return self.shortage
        open_faults = [fault for fault in self._faults.values() if now_s < fault.until_s]
        last = max(open_faults, key=lambda fault: fault.until_s, default=None)
        return "" if last is None else f"starts fail: {last.detail}"
