"""Invariants 12 to 17: what a healed swarm is reminded of, and what it is not."""

import random
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from swarmsched.api import EndReason, Isolation, JobState
from swarmsched.card import card_of
from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.gossip.record import NodeRecord, NodeStatus
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.booking import BookingState
from swarmsched.policies.registry import make_order
from swarmsched.record import Leftover, PlanState
from swarmsched.resources import Demand
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.durability import DurabilityChecker
from swarmsched.simulator.checks.healed_jobs import (
    ACTING_S,
    FORMER_S,
    STUCK_S,
    AllEnded,
    FormerHoldersKnow,
    NothingStuck,
    OneShepherd,
    QueueEmpties,
    TopIsPlaced,
    rank_of,
)
from swarmsched.simulator.checks.healed_placed import PlacedGoOn
from swarmsched.simulator.checks.healed_views import (
    MEMBERSHIP_S,
    DeadAreKnown,
    EqualMembership,
    EqualState,
    LiveStayKnown,
    rounds_to_all,
)
from swarmsched.simulator.checks.healing import Healing
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.tasks import RankPlan, RunningTask
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import JobView, PolicySetting
from tests.swarmsched.simulator.checks.testing import (
    GPUS,
    JOB,
    NODES,
    FakeNode,
    History,
    gang,
    order_of,
)

NO_TASKS = ()


class HealedNode(FakeNode):
    """One that sees all three alive, and acts for what a test says."""

    def __init__(self, node):
        super().__init__()
        self.acts_for = []
        self.setting = SwarmSetting()
        self.known_members = [member(name) for name in NODES]
        self.known_records = [NodeStatus(NodeRecord(name, 1, 5), 0.0) for name in NODES]

    def is_shepherd(self, job_id):
        return job_id in self.acts_for

    def tasks(self):
        return NO_TASKS


class HealedHost(SimpleNamespace):
    """A machine as healing sees it; its clock shows virtual time."""

    def __init__(self, node_id, node, loop, storage, resources):
        tasks = SimpleNamespace(running=[], bound_ports=0)
        super().__init__(node_id=node_id, node=node, loop=loop, storage=storage, resources=resources, tasks=tasks)
        self.is_up, self.is_paused = True, False

    @property
    def now_s(self):
        return self.loop.now_s


def member(name, status=MemberStatus.ALIVE, incarnation=1):
    return MemberView(name, ("10.0.0.1", 1), 1, incarnation, status, 0.0, b"", "", 1, 1)


class Swarm:
    """Three machines that nobody drives; time passes when a rule is asked again."""

    def __init__(self):
        decided = DecidedRecords()
        self.history = History(lambda: Suite([decided, BookingChecker(), DurabilityChecker(decided)]))
        self.loop = self.history.loop
        self.hosts = {name: self._host(name) for name in NODES}

    def _host(self, name):
        machine = self.history[name]
        machine.node = HealedNode(name)
        return HealedHost(name, machine.node, self.loop, machine.storage, machine.resources)

    @property
    def up(self):
        return tuple(host for host in self.hosts.values() if host.is_up)

    def run_for(self, duration_s):
        self.loop.run_for(duration_s)

    def accept(self, **changes):
        """A job that a client knows of, as decided."""
        record = self.history.decide(self.history.record(**changes))
        self.history.suite.get(DurabilityChecker).accepted[record.job_id] = record.stamp
        return record


@pytest.fixture
def swarm():
    return Swarm()


def watch(swarm, rule, seconds):
    return Healing(swarm, swarm.history.suite, [rule]).run(seconds, until=lambda: False)


def expect(swarm, rule, seconds, words, invariant):
    with pytest.raises(Violation, match=words) as caught:
        watch(swarm, rule, seconds)
    assert caught.value.invariant == invariant


# --- 12 and 13


def test_equal_views_are_found_equal(swarm):
    healing = Healing(swarm, swarm.history.suite, [EqualMembership(), EqualState(3), DeadAreKnown(3), LiveStayKnown()])
    assert healing.run(60.0)
    assert swarm.loop.now_s == 0.0


def test_a_member_that_somebody_takes_for_dead_is_found_after_its_time(swarm):
    swarm.hosts["a"].node.known_members[1] = member(NodeId("b"), MemberStatus.FAILED)
    expect(swarm, EqualMembership(), 60.0, "a knows b, which runs, as failed", "12")
    assert MEMBERSHIP_S < swarm.loop.now_s < MEMBERSHIP_S + 1.0


def test_views_under_two_incarnations_are_found(swarm):
    swarm.hosts["c"].node.known_members[1] = member(NodeId("b"), incarnation=2)
    expect(swarm, EqualMembership(), 60.0, "c knows b as", "12")


def test_a_record_that_does_not_arrive_is_found(swarm):
    swarm.hosts["a"].node.known_records[2] = NodeStatus(NodeRecord(NodeId("c"), 1, 4), 0.0)
    expect(swarm, EqualState(3), 100.0, "a has the record", "12")


def test_a_record_that_was_written_after_healing_may_be_on_its_way(swarm):
    rule = EqualState(3)
    healing = Healing(swarm, swarm.history.suite, [rule, EqualMembership()])
    swarm.hosts["a"].node.known_records[2] = NodeStatus(NodeRecord(NodeId("c"), 1, 4), 0.0)
    healing.look()
    swarm.hosts["c"].node.known_records[2] = NodeStatus(NodeRecord(NodeId("c"), 1, 9), 0.0)
    swarm.hosts["a"].node.known_records[2] = NodeStatus(NodeRecord(NodeId("c"), 1, 5), 0.0)
    healing.look()
    assert healing.is_done


def test_a_dead_machine_that_is_taken_for_live_is_found(swarm):
    swarm.hosts["c"].is_up = False
    expect(swarm, DeadAreKnown(3), 100.0, "c, which is down, as alive", "13")


def test_a_live_machine_that_is_called_failed_later_is_found(swarm):
    swarm.loop.call_at(40.0, lambda: swarm.hosts["a"].node.known_members.__setitem__(1, failed_b()))
    expect(swarm, LiveStayKnown(), 60.0, "a knows b, which runs, as failed", "13")
    assert swarm.loop.now_s >= 40.0


def failed_b():
    return member(NodeId("b"), MemberStatus.FAILED)


@pytest.mark.parametrize(("nodes", "rounds"), [(1, 2), (3, 2), (5, 7), (30, 7), (200, 10), (20_000, 13)])
def test_rounds_to_all_follow_the_table(nodes, rounds):
    assert rounds_to_all(nodes) == rounds


# --- 14


def test_one_shepherd_that_the_record_names_is_right(swarm):
    record = swarm.accept()
    swarm.hosts["a"].node.acts_for.append(record.job_id)
    assert Healing(swarm, swarm.history.suite, [OneShepherd()]).run(0.0)


@pytest.mark.parametrize(("acting", "words"), [("", "nobody acts"), ("ab", "a, b acts"), ("b", "the record names a")])
def test_none_two_or_another_shepherd_is_found(swarm, acting, words):
    record = swarm.accept()
    for name in acting:
        swarm.hosts[name].node.acts_for.append(record.job_id)
    expect(swarm, OneShepherd(), 60.0, words, "14")
    assert swarm.loop.now_s > ACTING_S


def test_a_job_without_a_majority_of_holders_needs_no_shepherd(swarm):
    swarm.accept()
    swarm.hosts["b"].is_up = swarm.hosts["c"].is_up = False
    assert Healing(swarm, swarm.history.suite, [OneShepherd()]).run(0.0)


def test_a_job_of_which_a_holder_has_a_newer_record_without_a_majority_needs_no_shepherd(swarm):
    record = swarm.accept()
    swarm.hosts["b"].is_up = False
    with pytest.raises(Violation, match="nobody acts"):
        watch(swarm, OneShepherd(), 60.0)
    pair = swarm.history.holders[:2]
    joint = record.updated(holders=pair, leaving_holders=record.holders)
    swarm.history.accept(joint, ["a"], swarm.history.ballot("a"))
    assert watch(swarm, OneShepherd(), 60.0) is False


# --- former


def test_a_node_that_takes_itself_for_a_holder_although_others_hold_the_job_is_found(swarm):
    before = swarm.accept()
    after = swarm.history.decide(before.updated(holders=swarm.history.holders[:2]))
    swarm.hosts["b"].node.held = before  # it will have the newer one
    assert Healing(swarm, swarm.history.suite, [FormerHoldersKnow()]).run(0.0)
    swarm.hosts["c"].node.held = after
    assert Healing(swarm, swarm.history.suite, [FormerHoldersKnow()]).run(0.0)
    swarm.hosts["c"].node.held = before
    expect(swarm, FormerHoldersKnow(), 200.0, "c knows", "former")
    assert swarm.loop.now_s > FORMER_S


# --- 15


def test_a_hold_that_outlives_its_deadline_is_found(swarm):
    swarm.history.note("b", JOB, 1, BookingState.HELD)
    expect(swarm, NothingStuck(), 60.0, "after its end", "15")
    assert 6.0 < swarm.loop.now_s < 7.0


def test_a_booking_that_drains_for_ever_is_found(swarm):
    swarm.history.note("b", JOB, 1, BookingState.DRAINING)
    expect(swarm, NothingStuck(), STUCK_S + 10.0, "and nobody else", "15")


def test_a_lease_of_an_attempt_that_is_over_is_orphaned(swarm):
    swarm.accept(attempt=2, plan_state=PlanState.LAUNCHED, state=JobState.RUNNING, shares=gang("c"))
    swarm.history.note("b", JOB, 1, BookingState.LEASED)
    expect(swarm, NothingStuck(), STUCK_S + 10.0, "and nobody else", "15")


def test_a_lease_of_the_present_attempt_may_stay(swarm):
    swarm.accept(attempt=1, plan_state=PlanState.LAUNCHED, state=JobState.RUNNING, shares=gang("b"))
    swarm.history.note("b", JOB, 1, BookingState.LEASED)
    watch(swarm, NothingStuck(), STUCK_S + 10.0)


# --- 16 and 17


@pytest.mark.parametrize(("rule", "invariant", "within_s"), [(TopIsPlaced, "16", 10.0), (QueueEmpties, "17", 5.0)])
def test_a_job_that_waits_while_it_fits_is_found(swarm, rule, invariant, within_s):
    swarm.accept()
    expect(swarm, rule(), 60.0, f"{JOB} has waited", invariant)
    assert ACTING_S + within_s < swarm.loop.now_s < ACTING_S + within_s + 1.0


@pytest.mark.parametrize("does_fit", [True, False])
def test_of_two_jobs_the_first_by_priority_is_looked_at(swarm, does_fit):
    spec, other = swarm.history.record().spec, JobId(f"{JOB[:-1]}z")
    ranks = {True: 1, False: 3 * GPUS + 1}
    swarm.accept(spec=replace(spec, ranks=ranks[not does_fit]))
    swarm.accept(job_id=other, spec=replace(spec, ranks=ranks[does_fit], priority=5))
    if does_fit:
        expect(swarm, TopIsPlaced(), 60.0, f"{other} has waited", "16")
    else:
        watch(swarm, TopIsPlaced(), 60.0)


@pytest.mark.parametrize("rule", [TopIsPlaced, QueueEmpties])
def test_a_job_that_does_not_fit_may_wait(swarm, rule):
    record = swarm.history.record()
    swarm.accept(spec=replace(record.spec, ranks=3 * GPUS + 1))
    watch(swarm, rule(), 60.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"leftovers": (Leftover(NodeId("b"), 1),)},
        {"stop_reason": EndReason.CANCELLED},
        {"state": JobState.RUNNING},
        {"restarts": 3},
    ],
    ids=["leftover", "cancelled", "running", "restart delay"],
)
def test_a_job_that_waits_for_something_else_may_wait(swarm, changes):
    swarm.accept(**changes)
    watch(swarm, TopIsPlaced(), 60.0)


def test_a_job_may_wait_for_nodes_that_take_nothing_for_a_while(swarm):
    swarm.accept()
    for host in swarm.hosts.values():
        host.node.ledger.avoided_reason = "starts fail"
    watch(swarm, TopIsPlaced(), 60.0)


def test_a_gang_that_fits_on_no_set_of_nodes_may_wait(swarm):
    record = swarm.history.record()
    swarm.accept(spec=replace(record.spec, ranks=4, demand=Demand(gpus=3)))
    watch(swarm, TopIsPlaced(), 60.0)


@pytest.mark.parametrize("parameters", [{}, {"threshold1_gpu_s": 10.0, "threshold3_gpu_s": 40.0}])
@pytest.mark.parametrize("policy", ["fifo", "backfill", "las"])
def test_the_checkers_order_the_queue_as_the_policy_does(swarm, policy, parameters):
    setting = PolicySetting(policy, parameters if policy == "las" else {})
    first, rng = swarm.history.record(), random.Random(1)
    records = [
        replace(
            first,
            spec=replace(first.spec, priority=rng.choice([0, 0, 5])),
            submitted_utc_s=rng.uniform(1.0, 100.0),
            first_started_utc_s=rng.choice([0.0, rng.uniform(1.0, 100.0)]),
            attained_gpu_s=rng.choice([0.0, 10.0, 20.0, 40.0, 3_250.0]),
        )
        for _ in range(200)
    ]
    order = make_order(setting)
    in_order = sorted(records, key=lambda record: order.rank_key(JobView(card_of(record)), 0.0))
    assert sorted(records, key=lambda record: rank_of(record, setting)) == in_order


# --- placed jobs


def task_of(record, *, is_frozen=False):
    return RunningTask(order_of(record, record.shares[0].node), (), {0: RankPlan(1.0)}, is_frozen=is_frozen)


def running(swarm, **changes):
    placed = {"attempt": 1, "plan_state": PlanState.LAUNCHED, "state": JobState.RUNNING, "shares": gang("b")}
    return swarm.accept(**{**placed, **changes})


def test_a_running_job_without_processes_is_found(swarm):
    running(swarm)
    expect(swarm, PlacedGoOn(), 60.0, "it has no processes on b", "placed")
    assert ACTING_S < swarm.loop.now_s < ACTING_S + 1.0


def test_a_running_job_whose_ranks_stand_still_is_found(swarm):
    swarm.hosts["b"].tasks.running.append(task_of(running(swarm), is_frozen=True))
    expect(swarm, PlacedGoOn(), 60.0, "its ranks on b are frozen", "placed")


def test_a_running_job_on_a_machine_that_is_down_is_found(swarm):
    running(swarm)
    swarm.hosts["b"].is_up = False
    expect(swarm, PlacedGoOn(), 60.0, "b is down", "placed")


def test_the_verdict_on_a_gang_waits_until_its_machine_that_is_down_counts_as_lost(swarm):
    running(swarm, shares=(*gang("b"), *gang("c")))
    swarm.hosts["c"].is_up = False
    watch(swarm, PlacedGoOn(), ACTING_S + 14.0)
    expect(swarm, PlacedGoOn(), 60.0, "it has no processes on b", "placed")


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.STOPPING])
def test_a_placed_job_that_neither_starts_nor_ends_is_found(swarm, state):
    running(swarm, state=state)
    expect(swarm, PlacedGoOn(), 100.0, f"is {state.value} for", "placed")


def test_a_job_whose_ranks_run_goes_on(swarm):
    swarm.hosts["b"].tasks.running.append(task_of(running(swarm)))
    watch(swarm, PlacedGoOn(), 100.0)


def test_a_job_whose_end_is_yet_to_be_told_goes_on(swarm):
    running(swarm)
    swarm.hosts["b"].node.tasks = lambda: [TaskStatus(JOB, 1, 1, NodeId("b"), TaskStage.EXITED)]
    watch(swarm, PlacedGoOn(), 100.0)


# --- the end


def test_a_job_that_does_not_end_is_found(swarm):
    swarm.accept()
    expect(swarm, AllEnded(10.0), 100.0, "1 jobs have not ended", "ended")


def test_what_is_left_of_an_ended_job_is_found(swarm):
    swarm.accept(state=JobState.ENDED, end_reason=EndReason.COMPLETED)
    swarm.history.note("b", JOB, 1, BookingState.DRAINING)
    expect(swarm, AllEnded(10.0), 100.0, "left are", "ended")


def test_a_job_that_ends_otherwise_than_it_should_is_found(swarm):
    swarm.accept(state=JobState.ENDED, end_reason=EndReason.FAILED)
    expect(swarm, AllEnded(10.0, lambda: {JOB: (EndReason.COMPLETED,)}), 10.0, "ended as failed", "ended")


def test_a_job_that_may_run_on_a_machine_that_is_down_waits_for_an_operator(swarm):
    record = swarm.history.record()
    swarm.accept(
        spec=replace(record.spec, on_isolation=Isolation.CONTINUE),
        attempt=1,
        plan_state=PlanState.LAUNCHED,
        state=JobState.STOPPING,
        shares=gang("c"),
    )
    swarm.hosts["c"].is_up = False
    assert Healing(swarm, swarm.history.suite, [AllEnded(10.0)]).run(0.0)


def test_an_ended_job_that_left_nothing_is_the_end(swarm):
    swarm.accept(state=JobState.ENDED, end_reason=EndReason.COMPLETED)
    assert Healing(swarm, swarm.history.suite, [AllEnded(10.0, lambda: {JOB: (EndReason.COMPLETED,)})]).run(0.0)
