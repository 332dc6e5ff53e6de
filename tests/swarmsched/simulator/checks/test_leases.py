"""What a node hosts is within a quarter of its memory, and soon gone with the attempt that it is for."""

import pytest

from swarmsched.effects import DropShard, HostShard
from swarmsched.shards import RangeKey, ShardOrder
from swarmsched.simulator.checks.leases import LEFT_OVER_S, LeaseChecker
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.tasks import RankPlan, RunningTask
from tests.swarmsched.simulator.checks.testing import JOB, History, gang, order_of

QUARTER = 2**34 // 16  # elements of 16 bytes


@pytest.fixture
def history():
    return History(lambda: Suite([LeaseChecker()]))


def hosting(start=0, size=QUARTER):
    return HostShard(ShardOrder(RangeKey(JOB, 1, start), size, "m", "s", 1.0, 0.0, True, (1, 1), ("0", "1"), 0))


def test_more_than_a_node_gives_is_found_and_the_same_range_again_is_not_more(history):
    history.perform("a", hosting())
    history.perform("a", hosting())
    with pytest.raises(Violation, match="of 17179869184 that it gives") as caught:
        history.perform("a", hosting(start=QUARTER, size=1))
    assert caught.value.invariant == "leases"


def test_what_was_dropped_or_has_gone_with_its_agent_takes_nothing(history):
    history.perform("a", hosting())
    history.perform("a", DropShard(hosting().order.key))
    history.perform("a", hosting(start=QUARTER))
    history.restart("a")
    history.perform("a", hosting())


def test_a_range_that_outlives_its_attempt_is_found_and_one_that_is_wanted_stays(history):
    record = history.record(attempt=1, shares=gang("b"))
    history.perform("a", hosting())
    history["b"].tasks.running = [RunningTask(order_of(record, "b"), (), {0: RankPlan(1.0)})]
    history.suite.look()
    history.wait(2 * LEFT_OVER_S)
    history.suite.look()
    history["b"].tasks.running = []
    history.suite.look()
    history.wait(LEFT_OVER_S + 1.0)
    with pytest.raises(Violation, match="31 s after its attempt"):
        history.suite.look()


def test_a_node_that_stands_still_cannot_drop_anything(history):
    history.perform("a", hosting())
    history.suite.look()
    history["a"].is_paused = True
    history.wait(2 * LEFT_OVER_S)
    history.suite.look()
    history["a"].is_paused = False
    history.suite.look()
