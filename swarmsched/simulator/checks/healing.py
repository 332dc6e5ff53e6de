"""After the faults: what a healed swarm must come to, and by when (invariants 12 to 17).

A rule is asked again and again.  One that must come true has its bound from the moment of healing; one that must hold
throughout keeps its own times.  The bounds stand with the rules, each with its source.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from swarmsched.api import Isolation
from swarmsched.holders import Holder
from swarmsched.ids import JobId
from swarmsched.record import JobRecord
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.decided import DecidedRecords, is_majority
from swarmsched.simulator.checks.durability import DurabilityChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.simulator.swarm import SimulatedSwarm

LOOK_S = 0.25


class Healed:
    """The healed swarm as rules see it: what runs, what was decided, and which jobs can be decided about at all."""

    def __init__(self, swarm: SimulatedSwarm, suite: Suite) -> None:
        self.swarm = swarm
        self.since_s = swarm.loop.now_s
        self.books = suite.get(BookingChecker)
        self._decided = suite.get(DecidedRecords)
        self._durability = suite.get(DurabilityChecker)
        self._majorities: dict[JobId, bool] = {}  # as of `_looked_s`
        self._looked_s = math.nan

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.swarm.loop.now_s

    @property
    def up(self) -> tuple[Host, ...]:
        """The connected core: every machine whose agent runs."""
        return tuple(host for host in self.swarm.up if not host.is_paused)

    @property
    def accepted(self) -> tuple[JobId, ...]:
        """Every job that a client was told is accepted."""
        return tuple(self._durability.accepted)

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """Accepted jobs that have a live majority of holders."""
        return tuple(job_id for job_id in self.accepted if self.has_majority(job_id))

    def record(self, job_id: JobId) -> JobRecord:
        """The record decided last."""
        record = self._decided.last(job_id)
        assert record is not None, f"{job_id} was accepted"
        return record

    def open_records(self) -> list[JobRecord]:
        """Jobs of `jobs` that have not ended."""
        return [record for record in self.all_open_records() if self.has_majority(record.job_id)]

    def all_open_records(self) -> list[JobRecord]:
        """Of every accepted job that has not ended, also where nobody can decide about it any more."""
        records = [self.record(job_id) for job_id in self.accepted]
        return [record for record in records if not record.is_ended]

    def awaits_operator(self, record: JobRecord) -> bool:
        """True for a job whose ranks run on in isolation and may do so on a machine that is down: nobody can tell."""
        if record.spec.on_isolation is not Isolation.CONTINUE:
            return False
        up = {host.node_id for host in self.up}
        nodes = [share.node for share in record.shares] + [leftover.node for leftover in record.leftovers]
        return not up.issuperset(nodes)

    def has_majority(self, job_id: JobId) -> bool:
        """True when more than half of its holders, and of the leaving ones, run on the stores that are meant.

        So must those of a newer record that one of them has accepted: perhaps it was decided, so it must be completed.
        """
        if self._looked_s != self.now_s:
            self._looked_s, self._majorities = self.now_s, {}
        known = self._majorities.get(job_id)
        if known is None:
            known = self._majorities[job_id] = self._find_majority(job_id)
        return known

    def _find_majority(self, job_id: JobId) -> bool:
        if job_id not in self._durability.accepted:
            return False
        live = {Holder(host.node_id, host.storage.store_id): None for host in self.up}
        records = [self.record(job_id), *self._decided.open(job_id, live)]
        return all(is_majority(record.configuration, live) for record in records)


class Rule:
    """One thing that must come true within `bound_s` of healing (infinite: whenever), or hold throughout."""

    invariant: ClassVar[int | str]

    def __init__(self, bound_s: float) -> None:
        self.bound_s = bound_s

    def missing(self, healed: Healed) -> str:
        """What has not come true yet; empty when it has, once and for all."""
        return ""

    def broken(self, healed: Healed) -> str:
        """What does not hold now; empty while all is well."""
        return ""


class Healing:
    """Watches a healed swarm.  Make it when all faults are off; then `run`, or `look` from a loop of one's own."""

    def __init__(self, swarm: SimulatedSwarm, suite: Suite, rules: Sequence[Rule]) -> None:
        self.healed = Healed(swarm, suite)
        self._rules = list(rules)
        self._waiting = list(rules)

    @property
    def is_done(self) -> bool:
        """True when all that must come true has."""
        return not self._waiting

    def look(self) -> None:
        """Ask all rules.  Raises `Violation` for one that is broken, or has not come true in time."""
        age_s = self.healed.now_s - self.healed.since_s
        for rule in list(self._waiting):
            missing = rule.missing(self.healed)
            if not missing:
                self._waiting.remove(rule)
            elif age_s > rule.bound_s:
                raise Violation(rule.invariant, f"{age_s:.1f} s after healing: {missing}")
        for rule in self._rules:
            broken = rule.broken(self.healed)
            if broken:
                raise Violation(rule.invariant, f"{age_s:.1f} s after healing: {broken}")

    def run(self, limit_s: float, until: Callable[[], bool] = lambda: True) -> bool:
        """Let time pass until all has come true and `until` holds, at most `limit_s`; false when it does not by then.

        Raises `Violation` as `look` does.
        """
        end_s = self.healed.now_s + limit_s
        while True:
            self.look()
            if self.is_done and until():
                return True
            if self.healed.now_s >= end_s:
                return False
            self.healed.swarm.run_for(min(LOOK_S, end_s - self.healed.now_s))
