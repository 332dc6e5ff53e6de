"""Replays through real nodes: the same jobs end, a little later, whatever becomes of messages and machines."""

from collections.abc import Sequence

import pytest

from swarmsched.errors import ConfigError
from swarmsched.estimate import Estimate, SpeedPoint
from swarmsched.ids import NodeId
from swarmsched.replay.churn import NodeEvent
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.gossip import PATIENCE_S, GossipReplay
from swarmsched.replay.job import ReplayJob, Terms
from swarmsched.replay.knowledge import Knowledge, PerfectKnowledge
from swarmsched.replay.learning import LearnedKnowledge
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.results import RunLog
from swarmsched.replay.setup import Replay, prepared
from swarmsched.simulator.network import NetworkFaults
from swarmsched.view import PolicySetting
from tests.swarmsched.replay.testing import elastic, ends, made_up, replay, rigid


def gossip(
    jobs: Sequence[ReplayJob],
    policy: str,
    cluster: Fleet | None = None,
    cost_s: float = 0.0,
    knowledge: Knowledge | None = None,
    faults: NetworkFaults | None = None,
    **parameters: float,
) -> RunLog:
    servers = cluster or Fleet({NodeId("one"): 2})
    known = knowledge or PerfectKnowledge(4, servers.total)
    setting = PolicySetting(policy, parameters)
    return GossipReplay(jobs, servers, setting, known, Ticks(0.0, cost_s), 1, faults).run()


@pytest.mark.parametrize("policy", ["fifo", "backfill"])
def test_rigid_jobs_end_a_moment_after_those_of_the_exact_view(policy: str) -> None:
    jobs = [(1, 0.0, 2, 20.0), (2, 5.0, 2, 60.0), (3, 10.0, 1, 80.0)]
    exact = ends(replay([rigid(*each) for each in jobs], policy))
    heard = ends(gossip([rigid(*each) for each in jobs], policy))
    assert heard == pytest.approx(exact, abs=5.0)
    assert heard != exact


def test_what_can_never_run_ends_the_replay_and_is_missing_among_the_finished() -> None:
    observer = gossip([rigid(1, 0.0, 3, 1.0), rigid(2, 0.0, 1, 1.0)], "backfill")
    assert ends(observer).keys() == {"job2"}


def test_elastic_jobs_grow_and_change_their_batches_by_what_their_cards_tell() -> None:
    jobs = [elastic(number, 20.0 * number, made_up(), most=8) for number in range(4)]
    known = LearnedKnowledge(1, declares=True)
    observer = gossip(jobs, "swarm", Fleet.even(2, 4), 0.5, known, pause_s=0.5)
    summary = observer.summary()
    assert (summary["finished"], summary["policy_errors"], summary["restarts"]) == (4, 0, 0)
    assert summary["rescales"] > 0
    assert max(job.batch for job in observer.finished) > 32
    assert summary["view_age_p50_s"] == 0.0
    assert observer.busy_gpu_s <= 8 * observer.elapsed_s


def test_the_same_seed_gives_the_same_replay() -> None:
    def run() -> dict[str, float]:
        jobs = [elastic(number, 7.0 * number, made_up(), most=8) for number in range(3)]
        return ends(gossip(jobs, "swarm", Fleet.even(2, 4), 5.0, LearnedKnowledge(1, declares=True)))

    assert run() == run()


def test_where_nobody_is_watched_nobody_may_fail() -> None:
    cluster = Fleet.even(3, 2)
    cluster.events = [NodeEvent(40.0, NodeId("n002"), False)]
    with pytest.raises(ConfigError, match="nobody would see"):
        prepared([], {}, Replay(PolicySetting("fifo"), cluster, view="gossip", membership="ideal"))


def test_nothing_is_lost_with_messages_and_machines() -> None:
    """A machine goes down with what it trains, and comes back; every twentieth message is lost."""
    cluster = Fleet.even(3, 2)
    down = [NodeEvent(at_s, NodeId("n002"), is_up) for at_s, is_up in ((40.0, False), (120.0, True))]
    cluster.events = down
    jobs = [rigid(number, float(number), 2, 60.0) for number in range(4)]
    for job in jobs:
        job.checkpoint_s = 10.0
    summary = gossip(jobs, "backfill", cluster, 1.0, faults=NetworkFaults(loss_ratio=0.05)).summary()
    assert (summary["finished"], summary["node_failures"], summary["restarts"]) == (4, 1, 1)
    assert 0.0 < summary["lost_gpu_s"] <= 20.0


def test_a_job_that_comes_while_all_servers_are_down_is_submitted_once_one_is_there() -> None:
    cluster = Fleet.even(2, 2)
    nodes = [NodeId("n001"), NodeId("n002")]
    cluster.events = [NodeEvent(at_s, node, at_s > 10.0) for at_s in (10.0, 60.0) for node in nodes]
    late = rigid(1, 20.0, 1, 10.0)
    late.terms = Terms(deadline_s=30.0)
    observer = gossip([late], "fifo", cluster)
    assert 70.0 < ends(observer)["job1"] < 60.0 + PATIENCE_S + 40.0
    assert observer.summary()["deadlines_met"] == 0


def test_a_job_is_submitted_anew_where_those_who_were_to_keep_it_went_down_at_that_moment() -> None:
    """Two servers keep a job together: without one of them nobody can accept it."""
    cluster = Fleet.even(2, 2)
    cluster.events = [NodeEvent(20.0, NodeId("n001"), False)]
    found = ends(gossip([rigid(number, 20.0, 1, 10.0) for number in range(8)], "fifo", cluster))
    assert len(found) == 8
    assert max(found.values()) > 20.0 + PATIENCE_S, "one of them had been lost"


def test_what_a_job_has_measured_itself_comes_before_its_kind_and_its_kind_before_the_last_one_of_its_name() -> None:
    """A card that begins with what another job measured says nothing of this one's length."""
    known, job = LearnedKnowledge(1, declares=True), elastic(1, 0.0, made_up())
    point = SpeedPoint(1, 1, 32, 0.05)
    measured = Estimate(points=(point,), remaining=7.0)
    assert known.believed(job, measured) == measured
    for told in (None, Estimate(done=1.0), Estimate(points=(point,), is_prior=True)):
        believed = known.believed(job, told)
        assert believed is not None
        assert believed.remaining == job.physics.total


def test_a_replay_that_spins_is_given_up_and_says_at_what() -> None:
    knowledge, pacing = PerfectKnowledge(4, 2), Ticks(0.0, 0.0)
    servers, setting = Fleet({NodeId("one"): 2}), PolicySetting("fifo", {})
    spinning = GossipReplay([rigid(1, 0.0, 1, 60.0)], servers, setting, knowledge, pacing)
    loop = spinning._loop
    loop._callbacks_most = 5_000

    def spin() -> None:
        loop.post_later(1e-4, spin)

    spin()
    assert "5,000 callbacks within a virtual second; the next is " in spinning.run().gave_up
