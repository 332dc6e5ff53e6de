"""Which jobs the default policy gives GPUs of which class, and what is known of how fast they are there."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.estimate import BatchRange, Elastic, Estimate, SpeedPoint
from swarmsched.ids import JobId, NodeId
from swarmsched.models.classes import ClassSpeeds
from swarmsched.models.kinds import Speeds
from swarmsched.policies.registry import compute_plan
from swarmsched.resources import Demand, Share
from swarmsched.view import Change, ClassSpeed, ClusterView, Decision, JobView, NodeView, PolicySetting
from swarmsched.wire.codec import encode_value
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, job

FAST, SLOW = NodeId("fast"), NodeId("slow")
NODES = (make_node(FAST, 4, model="Fast"), make_node(SLOW, 4, model="Slow"))
POINTS = tuple(SpeedPoint(ranks, 1, 64 // ranks, 0.1 / ranks, 0.0) for ranks in (1, 2, 4))


def trains(number: int, ratio: float, *shares: Share, least: int = 4, most: int = 4, **more: object) -> JobView:
    """It is known on the slow GPUs, and so many times as fast on the others."""
    state = JobState.RUNNING if shares else JobState.QUEUED
    elastic = Elastic(least, most, BatchRange(64, 64, 1, 64), 64)
    estimate = Estimate(points=POINTS, remaining=50_000.0, gpu="Slow")
    view = job(number, state, least, Demand(gpus=1), shares=shares, elastic=elastic, estimate=estimate, **more)
    return replace(view, on_classes=(ClassSpeed("Fast", ratio, ratio), ClassSpeed("Slow", 1.0, 1.0)))


def decided(*jobs: JobView, nodes: tuple[NodeView, ...] = NODES) -> dict[JobId, Decision]:
    shares = [share for one in jobs for share in one.shares]
    taken = {node.node: sum(each.ranks for each in shares if each.node == node.node) for node in nodes}
    free = tuple(make_node(each.node, 4 - taken[each.node], model=each.capacity.gpus[0].model) for each in nodes)
    plan = compute_plan(PolicySetting("swarm"), ClusterView(1, free, jobs), NOW_S)
    return {each.job_id: each for each in plan.decisions}


@pytest.mark.parametrize("ratios", [(6.0, 1.5), (1.5, 6.0)])
def test_whoever_gains_more_than_others_from_the_faster_gpus_gets_them(ratios: tuple[float, float]) -> None:
    plan = decided(*[trains(number, ratio) for number, ratio in enumerate(ratios)])
    places = [plan[job_id(number)].target.shares[0].node for number in (0, 1)]
    assert places == [FAST if ratio == 6.0 else SLOW for ratio in ratios]


def test_a_job_alone_takes_the_gpus_on_which_it_is_faster_though_they_are_fewer() -> None:
    nodes = (*NODES, make_node("other", 4, model="Slow"))
    assert decided(trains(1, 4.0), nodes=nodes)[job_id(1)].target.shares == (Share(FAST, 4),)
    assert decided(trains(1, 0.5), nodes=nodes)[job_id(1)].target.shares[0].node != FAST


def test_a_running_job_moves_to_free_gpus_that_are_faster_by_more_than_its_pause_costs() -> None:
    for ratio, change in ((4.0, Change.MOVE), (1.05, Change.KEEP)):
        decision = decided(trains(1, ratio, Share(SLOW, 4), running_s=900.0))[job_id(1)]
        assert decision.change is change
    fixed = trains(1, 4.0, Share(SLOW, 4), running_s=900.0)
    fixed = replace(fixed, card=replace(fixed.card, elastic=None, ranks=4))
    assert decided(fixed, trains(2, 4.0, least=1))[job_id(1)].change is Change.KEEP, "it may not be moved"


def test_a_class_that_has_gone_leaves_its_jobs_to_the_others() -> None:
    waits = trains(1, 6.0)
    nodes = (replace(make_node(FAST, 4, model="Fast"), is_available=False), make_node(SLOW, 4, model="Slow"))
    plan = compute_plan(PolicySetting("swarm"), ClusterView(1, nodes, (waits,)), NOW_S)
    assert plan.decisions[0].target.shares == (Share(SLOW, 4),)


def measured(gpu: str, *times_s: float) -> Speeds:
    points = tuple(SpeedPoint(ranks, 1, 8, time_s) for ranks, time_s in enumerate(times_s, start=1))
    return Speeds(encode_value(Estimate, Estimate(points=points, gpu=gpu)))


def test_how_much_faster_a_class_is_follows_from_peaks_until_kinds_have_measured_it() -> None:
    one, other = ("u", "one", ""), ("u", "other", "")
    nobody = ClassSpeeds([])
    assert nobody.ratio(one, "Tesla T4", "NVIDIA A100") == (pytest.approx(312 / 65), pytest.approx(2.68, rel=0.01))
    assert nobody.ratio(one, "odd", "odder")[0] == 1.0
    assert nobody.ratio(one, "odd", "odd") == (1.0, 1.0)
    seen = ClassSpeeds([(one, measured("odd", 1.0, 0.6)), (one, measured("odder", 0.25, 0.15, 0.1))])
    own, least = seen.ratio(one, "odd", "odder")
    assert 3.0 < least < own < 4.0
    assert 1.5 < seen.ratio(other, "odd", "odder")[0] < own
    assert seen.ratio(one, "odder", "odd")[0] == pytest.approx(1.0 / own)
