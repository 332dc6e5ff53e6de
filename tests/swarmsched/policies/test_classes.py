"""Which jobs the default policy gives GPUs of which class, and what is known of how fast they are there."""

from typing import Any

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.estimate import BatchRange, Estimate, GpuBatch, NoisePoint, Resizable, SpeedPoint
from swarmsched.ids import JobId, NodeId
from swarmsched.models.classes import ClassSpeeds
from swarmsched.models.kinds import Speeds
from swarmsched.policies.registry import compute_plan
from swarmsched.policies.room import Room
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
    elastic = Resizable(least, most, BatchRange(64, 64, 1, 64), 64)
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


def limited(number: int, ratio: float, *limits: GpuBatch, **more: Any) -> JobView:
    """Its step takes as long for 8 samples a rank as for 64: the fewer fit into memory, the slower it is."""
    view = trains(number, ratio, **more)
    points = tuple([SpeedPoint(ranks, 1, batch, 0.1) for ranks in (1, 2, 4) for batch in (8, 16, 32, 64)])
    batches = BatchRange(256, 256, 8, 32, limits)
    estimate = replace(view.card.estimate or Estimate(), points=points)
    elastic = Resizable(view.card.ranks, 4, batches, 256)
    demand = Demand(gpus=1, refused_gpus=batches.refused_gpus)
    return replace(view, card=replace(view.card, elastic=elastic, estimate=estimate, demand=demand))


@pytest.mark.parametrize(
    ("ratio", "limits", "node"),
    [
        (1.5, (), FAST),
        (1.5, (GpuBatch("fast", 8),), SLOW),  # four times as many passes
        (1.5, (GpuBatch("slow", 64),), SLOW),  # half as many
        (0.7, (GpuBatch("fast", 64),), FAST),
        (3.0, (GpuBatch("slow", 64),), FAST),
        (9.0, (GpuBatch("fast", 4),), SLOW),  # its least does not fit
    ],
)
def test_a_class_is_chosen_by_what_a_job_gains_there_with_the_batches_that_fit(
    ratio: float, limits: tuple[GpuBatch, ...], node: NodeId
) -> None:
    assert decided(limited(1, ratio, *limits))[job_id(1)].target.shares == (Share(node, 4),)


def test_a_job_whose_least_batch_a_class_does_not_hold_waits_though_that_one_is_free() -> None:
    waits = limited(1, 9.0, GpuBatch("fast", 4))
    holds = trains(2, 1.0, Share(SLOW, 4), running_s=10.0)
    holds = replace(holds, card=replace(holds.card, elastic=None, ranks=4))
    decision = decided(holds, waits)[job_id(1)]
    assert (decision.change, decision.target.shares) == (Change.WAIT, ())
    for policy in ("elastic-batch", "optimus", "elastic-tiresias", "backfill", "fifo"):
        plan = compute_plan(PolicySetting(policy), ClusterView(1, NODES, (waits,)), NOW_S)
        assert plan.decisions[0].target.shares == (Share(SLOW, 4),), policy


def test_a_job_whose_batch_cannot_be_dealt_to_its_equal_share_on_any_class_gets_a_size_that_it_can_be_dealt_to() -> (
    None
):
    """256 samples on 4 ranks make passes of 32, and at least 40 are to be in one."""
    view = limited(1, 1.0, GpuBatch("slow", 62), GpuBatch("fast", 60), least=1)
    assert view.card.elastic
    elastic = replace(view.card.elastic, batches=replace(view.card.elastic.batches, local_least=40, local_most=64))
    view = replace(view, card=replace(view.card, elastic=elastic))
    (share,) = decided(view)[job_id(1)].target.shares
    assert share.ranks == 2, "three were never measured"


def test_a_class_that_one_job_refuses_is_there_for_others() -> None:
    room, refusing = Room(NODES), Demand(gpus=1, refused_gpus=("fast",))
    assert [room.classes(each) for each in (Demand(gpus=1), refusing)] == [
        {FAST: "Fast", SLOW: "Slow"},
        {SLOW: "Slow"},
    ]


def test_the_batch_of_a_job_is_the_best_one_on_the_gpus_that_it_gets() -> None:
    """With a step that takes as long for 8 samples as for 64, what fits at once is best."""

    def batch(ratio: float) -> int:
        view = limited(1, ratio, GpuBatch("slow", 8), GpuBatch("fast", 64))
        assert view.card.elastic
        assert view.card.estimate
        elastic = replace(view.card.elastic, batches=replace(view.card.elastic.batches, first=32, most=256))
        estimate = replace(view.card.estimate, noise=(NoisePoint(32, 20.0), NoisePoint(256, 20.0)))
        view = replace(view, card=replace(view.card, elastic=replace(elastic, global_batch=32), estimate=estimate))
        return decided(view)[job_id(1)].target.global_batch

    assert batch(4.0) > 128
    assert batch(0.05) <= 40
