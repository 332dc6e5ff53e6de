"""Real nodes in virtual time: who makes room for whom, and that nobody is starved or stopped in vain."""

import random

import pytest

from swarmsched.api import EndReason, JobState
from swarmsched.commands import CancelJob, SetSwarmSetting, SettingStored
from swarmsched.effects import Persist, SendPeer
from swarmsched.events import PeerMessageReceived
from swarmsched.ids import NodeId, make_job_id
from swarmsched.ledger.message import PreemptAnswer, PreemptRequest
from swarmsched.policies.registry import policy_id
from swarmsched.simulator.tasks import RankPlan, read_command
from swarmsched.view import PolicySetting
from tests.swarmsched.simulator.testing import Watched

N0, N1, N2 = NodeId("n000"), NodeId("n001"), NodeId("n002")
LAS = {"threshold1_gpu_s": 100.0, "minimum_run_s": 30.0}


def las_swarm(behaviour=read_command, **parameters):
    watched = Watched(3, 2, 11, behaviour=behaviour)
    stored = watched.swarm.ask(N0, SetSwarmSetting(PolicySetting("las", {**LAS, **parameters})))
    assert isinstance(stored, SettingStored)
    watched.swarm.run_for(10.0)
    return watched


def strict_swarm(nodes):
    """Under backfill the first in line is not passed."""
    watched = Watched(nodes, 2, 12)
    assert isinstance(watched.swarm.ask(N0, SetSwarmSetting(PolicySetting("backfill"))), SettingStored)
    watched.swarm.run_for(10.0)
    return watched


@pytest.fixture
def watched():
    return las_swarm()


def run(watched, ranks, seconds="900", **spec):
    job = watched.submit(ranks, "sleep", seconds, **spec)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    return job


def events(watched, kind):
    return [event for host in watched.swarm.up for _, event in host.history if event.kind == kind]


def test_a_fresh_job_takes_the_place_of_one_that_has_had_its_share(watched):
    old = run(watched, 6, node=N0)
    watched.swarm.run_for(60.0)
    fresh = watched.submit(2, "sleep", "20", node=N1)
    assert watched.swarm.run_until(lambda: watched.state(fresh) is JobState.RUNNING, 40.0)
    assert watched.state(old) is JobState.QUEUED
    record = watched.swarm.record(old)
    assert (record.preemptions, record.stop_reason, record.leftovers) == (1, EndReason.NONE, ())
    assert record.attained_gpu_s > 100.0
    assert watched.swarm.run_until(lambda: watched.state(old) is JobState.RUNNING, 90.0)
    assert watched.swarm.record(old).attempt >= 2


def test_no_more_victims_are_taken_than_are_needed(watched):
    olds = [run(watched, 2, node=node) for node in (N0, N1, N2)]
    watched.swarm.run_for(60.0)
    fresh = watched.submit(2, "sleep", "300", node=N1)
    assert watched.swarm.run_until(lambda: watched.state(fresh) is JobState.RUNNING, 40.0)
    assert sum(watched.state(job) is JobState.QUEUED for job in olds) == 1


def test_nobody_is_stopped_within_its_protected_time():
    watched = las_swarm(minimum_run_s=1e6)
    old = run(watched, 6)
    watched.swarm.run_for(60.0)
    fresh = watched.submit(2, "sleep", "20")
    watched.swarm.run_for(60.0)
    assert watched.state(fresh) is JobState.QUEUED
    assert watched.swarm.record(old).preemptions == 0


def test_nobody_is_stopped_for_a_gang_that_would_not_fit_all_the_same(watched):
    protected = run(watched, 2, node=N0, priority=5)
    old = run(watched, 4, node=N1)
    watched.swarm.run_for(60.0)
    big = watched.submit(6, "sleep", "20", node=N2)
    watched.swarm.run_for(60.0)
    assert watched.state(big) is JobState.QUEUED
    assert [watched.swarm.record(job).preemptions for job in (protected, old)] == [0, 0]


@pytest.mark.parametrize(
    ("policy", "asked_by", "told"),
    [
        ("las", "las", "it has run for"),
        ("las", "backfill", "the policy here is las"),
        ("swarm", "swarm", "it has no checkpoint since it started"),
        ("swarm", "restartable", "no plan here gives its place to that job"),
    ],
)
def test_a_shepherd_that_is_asked_for_a_place_grants_it_by_its_own_policy_and_figures_alone(policy, asked_by, told):
    watched = las_swarm() if policy == "las" else Watched(3, 2, 12)
    spec, asked_by = ({"restartable": True}, policy) if asked_by == "restartable" else ({}, asked_by)
    old = run(watched, 2, node=N0, **spec)
    host = watched.swarm.hosts[watched.swarm.record(old).shepherd]
    taker, of_taker = (
        make_job_id(0.0, random.Random(1)),
        policy_id(PolicySetting(asked_by, LAS if asked_by == "las" else {})),
    )
    request = PreemptRequest(old, 1, taker, N1, of_taker, (0,) * 4, is_decided=True)
    effects = host.node.step(PeerMessageReceived(N1, request), host.clock.now_s)
    messages = [each.message for each in effects if isinstance(each, SendPeer)]
    (answer,) = [each for each in messages if isinstance(each, PreemptAnswer)]
    assert (answer.is_granted, told in answer.detail) == (False, True), answer.detail
    assert [each for each in effects if isinstance(each, Persist)] == []


def test_a_victim_that_is_cancelled_while_it_makes_room_ends():
    watched = las_swarm(lambda _order, _rank: RankPlan(900.0, obeys_sigterm=False))
    old = run(watched, 6, node=N0)
    watched.swarm.run_for(60.0)
    watched.submit(2, "sleep", "20", node=N1)
    assert watched.swarm.run_until(lambda: watched.state(old) is JobState.STOPPING, 40.0)
    watched.swarm.begin(watched.swarm.record(old).shepherd, CancelJob(old, 0.0))
    assert watched.swarm.run_until(lambda: watched.state(old) is JobState.ENDED, 20.0)
    assert watched.swarm.record(old).end_reason is EndReason.CANCELLED


def test_the_first_in_line_has_its_place_kept_when_it_waits_for_long():
    """Under strict backfill nobody may delay it; the claim holds even against agents that have not seen it."""
    watched = strict_swarm(3)
    for node in (N0, N1, N2):
        run(watched, 1, seconds="100", node=node, nodes=(node,))
    big = watched.submit(6, "sleep", "10", node=N0)
    assert watched.swarm.run_until(lambda: bool(events(watched, "claim.made")), 90.0)
    claims = [host.node.ledger.claims for host in watched.swarm.up]
    assert claims == [(big,)] * 3
    watched.finish([big], 90.0)
    watched.swarm.run_for(5.0)
    assert [host.node.ledger.claims for host in watched.swarm.up] == [()] * 3
    assert [event.job_id for event in events(watched, "claim.used")] == [big]


def test_nothing_is_kept_for_a_job_that_was_cancelled_while_it_waited():
    watched = strict_swarm(3)
    for node in (N0, N1, N2):
        run(watched, 1, node=node, nodes=(node,))
    big = watched.submit(6, "sleep", "10", node=N0)
    assert watched.swarm.run_until(lambda: bool(events(watched, "claim.made")), 90.0)
    watched.swarm.begin(watched.swarm.record(big).shepherd, CancelJob(big, 0.0))
    assert watched.swarm.run_until(lambda: not any(host.node.ledger.claims for host in watched.swarm.up), 5.0)
    assert watched.state(big) is JobState.ENDED
    assert not events(watched, "claim.used")


def test_nothing_is_kept_by_a_claim_of_a_shepherd_that_was_succeeded():
    """Its successor knows nothing of it, and cannot withdraw it when the job ends."""
    watched = strict_swarm(5)
    for node in watched.nodes:
        run(watched, 1, seconds="900", node=node, nodes=(node,), max_restarts=0)
    big = watched.submit(9, "sleep", "10", node=N0)
    assert watched.swarm.run_until(lambda: bool(events(watched, "claim.made")), 90.0)
    first = watched.swarm.record(big).shepherd
    watched.swarm.hosts[first].cut_power()
    up = [host for host in watched.swarm.up if host.node_id != first]
    assert watched.swarm.run_until(lambda: not any(host.node.ledger.claims for host in up), 30.0)


def test_a_claim_on_a_node_that_dies_is_given_up_and_made_elsewhere():
    """It would keep the job from claiming again, and the other nodes' GPUs from everybody."""
    watched = strict_swarm(5)
    for node in watched.nodes:
        run(watched, 1, seconds="400", node=node, nodes=(node,), max_restarts=0)
    big = watched.submit(6, "sleep", "10", node=N0)
    assert watched.swarm.run_until(lambda: bool(events(watched, "claim.made")), 90.0)
    shepherd = watched.swarm.record(big).shepherd
    claimed = [host for host in watched.swarm.up if host.node.ledger.claims and host.node_id != shepherd]
    claimed[0].cut_power()
    assert watched.swarm.run_until(lambda: len(events(watched, "claim.made")) > 1, 90.0)
    watched.swarm.run_for(5.0)
    assert sum(host.node.ledger.claims == (big,) for host in watched.swarm.up) == 3


@pytest.mark.parametrize("may_begin_again", [False, True])
def test_under_the_default_policy_a_short_job_takes_the_place_of_one_that_may_begin_again_and_of_no_other(
    may_begin_again,
):
    """The long one began long ago, by which it is known to be long."""
    watched = Watched(3, 2, 12)
    old = run(watched, 6, seconds="90000", node=N0, restartable=may_begin_again)
    watched.swarm.run_for(1_000.0)
    fresh = watched.submit(2, "sleep", "20", node=N1, time_limit_s=60.0)
    assert watched.swarm.run_until(lambda: watched.state(fresh) is JobState.RUNNING, 60.0) is may_begin_again
    assert watched.swarm.record(old).preemptions == may_begin_again
    watched.finish([fresh] if may_begin_again else [], 60.0)
