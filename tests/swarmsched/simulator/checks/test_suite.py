"""Real swarms walk through all checkers, and a step is shown only to whom it concerns."""

import pickle

import pytest

from swarmsched.api import EndReason
from swarmsched.effects import Announce, Persist, SendDatagram
from swarmsched.events import LoopLagged, TimerFired
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.durability import DurabilityChecker
from swarmsched.simulator.checks.gangs import GangChecker
from swarmsched.simulator.checks.healing import Healing
from swarmsched.simulator.checks.liveness import all_rules
from swarmsched.simulator.checks.suite import LOOK_INTERVAL, Suite
from swarmsched.simulator.checks.views import ViewChecker
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.network import NetworkFaults
from tests.swarmsched.simulator.checks.testing import History
from tests.swarmsched.simulator.testing import Watched

LAGGED = LoopLagged(1.0)


class Listener(Checker):
    """Writes down what it is shown."""

    EVENTS = (TimerFired,)
    EFFECTS = ("ledger",)
    PERFORMED = ("hold.expired",)

    def __init__(self):
        self.shown = []

    def stepped(self, host, event, effects):
        self.shown.append((event, *effects))

    def performed(self, host, effect):
        self.shown.append(effect)

    def looked(self, hosts):
        self.shown.append("looked")


class Deaf(Checker):
    """Is interested in nothing."""

    def stepped(self, host, event, effects):
        raise AssertionError("shown a step")

    def performed(self, host, effect):
        raise AssertionError("shown an effect")


def test_checkers_see_what_they_asked_for():
    history = History(lambda: Suite([Listener(), Deaf()]))
    write, packet = Persist("ledger", "x", b""), SendDatagram(("10.0.0.1", 1), b"")
    history.step("a", TimerFired())
    history.step("a", LAGGED, packet, write)
    history.step("a", LAGGED, packet)
    history.perform("a", Announce("hold.expired", ""))
    history.perform("a", Announce("job.ended", ""))
    expired = Announce("hold.expired", "")
    assert history.suite.get(Listener).shown == [(TimerFired(),), (LAGGED, packet, write), expired]


def test_everything_is_looked_at_now_and_then():
    history = History(lambda: Suite([Listener()]))
    for _ in range(LOOK_INTERVAL):
        history.step("a", LAGGED)
    assert history.suite.get(Listener).shown == ["looked"]


def test_a_violation_names_its_invariant_and_travels_between_processes():
    violation = pickle.loads(pickle.dumps(Violation(5, "b starts too early")))
    assert (violation.invariant, str(violation)) == ("5", "invariant 5: b starts too early")
    assert isinstance(violation, AssertionError)


@pytest.mark.parametrize(("nodes", "seed"), [(1, 1), (2, 2), (3, 3), (5, 4)])
def test_a_swarm_under_load_breaks_no_rule_and_comes_to_rest(nodes, seed):
    watched = Watched(nodes, 2, seed, NetworkFaults(loss_ratio=0.05, duplicate_ratio=0.1))
    jobs = [watched.submit(ranks, "sleep", "1") for ranks in (1, 2, 1)]
    watched.swarm.network.faults = NetworkFaults()
    ends = dict.fromkeys(jobs, (EndReason.COMPLETED,))
    healing = Healing(watched.swarm, watched.checks, all_rules(nodes, 60.0, lambda: ends))
    assert healing.run(120.0)
    watched.checks.finish()
    assert watched.checks.get(GangChecker).started_count >= 3
    assert watched.checks.get(BookingChecker).busiest_count >= 1
    assert watched.checks.get(ViewChecker).sample_count > 0
    assert set(watched.checks.get(DurabilityChecker).accepted) == set(jobs)
    assert set(watched.checks.get(DecidedRecords).jobs) == set(jobs)


def test_a_swarm_that_loses_machines_and_disks_breaks_no_rule():
    watched = Watched(5, 2, seed=6)
    swarm = watched.swarm
    for ranks in (2, 3, 4):
        watched.submit(ranks, "sleep", "20")
    swarm.run_for(3.0)
    victim, other = (swarm.hosts[name] for name in watched.nodes[1:3])
    victim.wipe()
    other.crash()
    swarm.run_for(15.0)
    victim.start()
    other.start()
    healing = Healing(swarm, watched.checks, all_rules(5, 300.0))
    assert healing.run(345.0)
    watched.checks.finish()
