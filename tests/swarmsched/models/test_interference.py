"""What jobs that share a node lose, learned from their own reports."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.estimate import Estimate, SpeedPoint
from swarmsched.ids import NodeId
from swarmsched.models.interference import Interference
from swarmsched.resources import Demand, Share
from swarmsched.view import JobView
from tests.swarmsched.policies.test_policies import job

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def spread(number: int, step_s: float, *nodes: NodeId, is_prior: bool = False) -> JobView:
    estimate = Estimate(points=(SpeedPoint(4, 2, 8, step_s),), is_prior=is_prior)
    shares = tuple(Share(node, 2) for node in nodes)
    return job(number, JobState.RUNNING, 4, Demand(gpus=1), shares=shares, estimate=estimate)


def looked(known: Interference, *jobs: JobView, times: int = 3) -> Interference:
    for _ in range(times):
        known = known.seen(jobs)
    return known


def test_a_job_that_was_alone_and_beside_another_tells_what_that_costs() -> None:
    alone = looked(Interference(), spread(1, 1.0, A, B))
    assert alone.part == 0.0
    beside = looked(alone, spread(1, 1.25, A, B), spread(2, 9.0, B, C))
    assert beside.lost == {spread(1, 1.0, A, B).job_id: pytest.approx(0.2)}
    assert 0.1 < beside.part < 0.2
    assert looked(beside, spread(1, 1.0, A, B)).part == beside.part, "it is remembered"


def test_what_was_measured_before_the_neighbour_came_or_went_says_nothing_of_it() -> None:
    alone = looked(Interference(), spread(1, 1.0, A, B))
    for time_s in (1.0, 1.4):
        assert not looked(alone, spread(1, time_s, A, B), spread(2, 1.0, B, C), times=1).lost


def test_neither_a_neighbour_on_one_node_nor_noise_nor_what_others_measured_counts() -> None:
    alone = looked(Interference(), spread(1, 1.0, A, B))
    one_node = replace(spread(2, 1.0, B, C).card, shares=(Share(B, 2),))
    assert not looked(alone, spread(1, 1.5, A, B), JobView(one_node)).lost
    assert looked(alone, spread(1, 1.01, A, B), spread(2, 1.0, B, C)).part == 0.0
    prior = looked(Interference(), spread(1, 1.0, A, B, is_prior=True))
    assert not looked(prior, spread(1, 1.5, A, B, is_prior=True), spread(2, 1.0, B, C)).lost
