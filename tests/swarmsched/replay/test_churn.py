"""Nodes fail and return: their jobs start over from a checkpoint, and nobody is placed where nothing is."""

import re

import pytest

from swarmsched.errors import ConfigError
from swarmsched.ids import NodeId
from swarmsched.replay.churn import NodeEvent, churn
from swarmsched.replay.cluster import Fleet, read_cluster
from swarmsched.replay.knowledge import PerfectKnowledge
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.results import RunLog
from swarmsched.replay.setup import Replay, prepared
from swarmsched.view import PolicySetting
from tests.swarmsched.replay.testing import elastic, ends, made_up, replay, rigid

ONE, TWO = NodeId("n001"), NodeId("n002")
HEAD = "time_s,node,event"


def servers(*events: NodeEvent) -> Fleet:
    return Fleet({ONE: 2, TWO: 2}, events=events)


def test_a_job_loses_what_it_trained_since_its_checkpoint_and_starts_again_elsewhere() -> None:
    def run(*events: NodeEvent) -> RunLog:
        job = rigid(1, 0.0, 2, 100.0)
        job.checkpoint_s = 30.0
        return replay([job], "fifo", servers(*events))

    (share,) = run().finished[0].shares
    observer = run(NodeEvent(70.0, share.node, False))
    assert ends(observer) == {"job1": 70.0 + (100.0 - 60.0)}
    summary = observer.summary()
    assert (summary["node_failures"], summary["restarts"], summary["lost_gpu_s"]) == (1, 1, 2 * 10.0)
    assert summary["gpu_utilisation_ratio"] == round((140.0 + 80.0) / (4 * 70.0 + 2 * 40.0), 4)


def test_without_churn_checkpoints_change_nothing() -> None:
    job = rigid(1, 0.0, 2, 100.0)
    job.checkpoint_s = 7.0
    assert ends(replay([job], "fifo", servers())) == {"job1": 100.0}


def test_with_a_tick_hosts_are_lost_at_once_and_replaced_at_the_next_tick() -> None:
    both = [NodeEvent(70.0, ONE, False), NodeEvent(70.0, TWO, False), NodeEvent(75.0, TWO, True)]
    observer = replay([rigid(1, 0.0, 2, 100.0)], "fifo", servers(*both), Ticks(60.0, 0.0))
    assert ends(observer) == {"job1": 120.0 + 100.0}, "no checkpoint was taken"
    assert observer.lost_gpu_s == 2 * 70.0
    assert observer.idle_gpu_s_while_work_waits == pytest.approx(2 * 45.0)


def test_a_job_waits_for_the_node_that_it_needs_and_not_for_ever() -> None:
    down = [NodeEvent(0.0, ONE, False), NodeEvent(0.0, TWO, False)]
    assert ends(replay([rigid(1, 0.0, 2, 5.0)], "fifo", servers(*down, NodeEvent(40.0, ONE, True)))) == {"job1": 45.0}
    assert ends(replay([rigid(1, 0.0, 2, 5.0)], "fifo", servers(*down))) == {}


@pytest.mark.parametrize("policy", ["swarm", "optimus", "tiresias", "las", "srtf", "backfill"])
def test_no_policy_uses_a_node_that_is_down(policy: str) -> None:
    flaps = [NodeEvent(20.0 * at, (ONE, TWO)[at // 2 % 2], at % 2 == 1) for at in range(20)]
    jobs = [rigid(at, 9.0 * at, 1 + at % 2, 25.0) for at in range(8)] + [elastic(9, 0.0, made_up(), 4)]
    observer = replay(jobs, policy, servers(*flaps), Ticks(0.0, 1.0))
    assert len(observer.finished) == 9
    assert observer.refused_holds == observer.policy_errors == 0
    assert observer.node_failures > 3


def test_the_words_of_people_and_other_tools_are_understood_and_events_are_ordered() -> None:
    lines = [HEAD, "9,n002, Recovered", "3,n002,FAIL", "3,n001,down", "12,n001,back"]
    assert churn("churn.csv", lines, (ONE, TWO)) == [
        (3.0, TWO, False),
        (3.0, ONE, False),
        (9.0, TWO, True),
        (12.0, ONE, True),
    ]


@pytest.mark.parametrize(
    ("row", "column", "told"),
    [
        ("-1,n001,down", "time_s", "'-1' cannot be used"),
        ("soon,n001,down", "time_s", "'soon' cannot be used"),
        ("1,n003,down", "node", "there is no node 'n003'"),
        ("1,n001,upp", "event", "'upp' is not known; did you mean 'up'?"),
        ("1,n001,", "event", "'' is not known"),
    ],
)
def test_an_event_that_cannot_be_used_is_named(row: str, column: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"churn.csv, row 3, {column}: {told}")):
        churn("churn.csv", [HEAD, "0,n001,up", row], (ONE, TWO))


def test_servers_of_a_table_have_their_own_sizes_and_classes() -> None:
    cluster = read_cluster("servers.csv", ["node,gpus,gpu_model", "a,8,V100", "b,2,A100", "c,2,A100"])
    assert (cluster.total, cluster.largest, cluster.usual_class) == (12, 8, "V100")
    assert cluster.packings(9)[:2] == (("", (1,)), ("", (2,)))
    assert {shape for model, shape in cluster.packings(9) if model == "A100"} == {(1,), (2,), (2, 1), (2, 2)}
    assert ends(replay([rigid(1, 0.0, 12, 5.0)], "fifo", cluster)) == {"job1": 5.0}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["node,gpus", "a,4", "a,4"], "row 3, node: 'a' is there twice"),
        (["node,gpus", ",4"], "row 2, node: '' is no name"),
        (["node,gpus", "a,2.5"], "row 2, gpus: '2.5' is not whole"),
        (["node,gpus", "a,5000"], "row 2, gpus: '5000' cannot be used"),
        (["node,gpus", "a,0"], "has no node with a GPU"),
        (["node", "a"], "has no column 'gpus'"),
        (["node,gpus,gpu_model", "a,1,T4", "b,1,"], "node b, gpu_model: is empty"),
        (["node,gpus,cores", "a,1,8", "b,1,"], "node b, cores: is empty"),
        (["node,gpus,cores", "a,1,0"], "row 2, cores: '0' cannot be used"),
        (["node,gpus,network_mbit_s", "a,1,fast"], "row 2, network_mbit_s: 'fast' cannot be used"),
    ],
)
def test_servers_that_cannot_be_used_are_named(rows: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_cluster("servers.csv", rows)


def classes() -> Fleet:
    return Fleet({ONE: 2, TWO: 2}, {ONE: "old", TWO: "new"})


def test_a_job_trains_as_measured_on_the_class_that_it_has_and_waits_for_the_slowest() -> None:
    """`new` is twice as fast as `old`."""
    profile = made_up(speeds={"old": 1.0, "new": 2.0})
    old, new = profile.on(["old"]).step_time((2,), 32), profile.on(["new"]).step_time((2,), 32)
    assert old.step_s == pytest.approx(2 * new.step_s)
    assert profile.on(["old", "new"]).step_time((1, 1), 32) == profile.on(["old"]).step_time((1, 1), 32)
    times = {}
    for node in (ONE, TWO):
        cluster = Fleet({node: 2}, {node: classes().models[node]})
        known = PerfectKnowledge(2, 2, cluster.usual_class)
        observer = replay([elastic(1, 0.0, profile, 2)], "swarm", cluster, Ticks(1.0, 0.0), known)
        times[node] = ends(observer)["job1"]
        assert observer.summary()["avg_slowdown"] == pytest.approx(1.0, abs=0.02)
    assert times[ONE] == pytest.approx(2 * times[TWO], rel=0.01)


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({ONE: "T4"}, "cluster, node n001, gpu_model: 'T4' was not measured"),
        ({}, "has several classes for model 'toy'"),
    ],
)
def test_a_class_that_nobody_has_measured_is_named(models: dict[NodeId, str], told: str) -> None:
    settings = Replay(PolicySetting("swarm"), Fleet({ONE: 2}, models))
    with pytest.raises(ConfigError, match=re.escape(told)):
        prepared([], {"toy": made_up(speeds={"old": 1.0, "new": 2.0})}, settings)


def test_denser_packing_than_was_measured_trains_as_on_the_nearest_number_of_nodes() -> None:
    profile = made_up()
    assert profile.measured_time((8,), 32) is None
    assert profile.step_time((8,), 32) == profile.step_time((4, 4), 32)
    assert profile.knows((8,), 32)
