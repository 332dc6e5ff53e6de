"""Placement by a job's model, in policies that place whole nodes first: better or as before, and never by a guess."""

import random
from itertools import product

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.card import STATES, card_of
from swarmsched.estimate import Estimate, SpeedPoint, StepCost, merged
from swarmsched.gossip.kinds import Kinds
from swarmsched.ids import NodeId
from swarmsched.models.hosts import DENSE_FLOPS, MBIT, PEAKS, Tasks, measured_work, model_alone, ring_time_s, throughput
from swarmsched.models.progress import Progress
from swarmsched.policies.explain import explain
from swarmsched.policies.hosting import WORTH, offer, predicted
from swarmsched.policies.placement import place_among, place_in
from swarmsched.policies.registry import compute_plan
from swarmsched.policies.room import Room
from swarmsched.policies.sites import Sites
from swarmsched.resources import Demand, Share, world_size
from swarmsched.view import Change, ClusterView, JobView, NodeView, PolicySetting
from tests.swarmsched.building import job_id, make_node, make_record
from tests.swarmsched.policies.test_policies import NOW_S, waiting

MOVES_MUCH = StepCost(4, 1e11, 5e9, 5e9)
DECODES = StepCost(32, 5e9, 1e6, 1e6, decode_core_s=0.02)
COMPUTES = StepCost(32, 2e12, 1e8, 1e8)
FAST, SLOW = "NVIDIA A100-SXM4-80GB", "Tesla T4"


def node(name: str, free: int, model: str, *, mbit_s: int = 10_000, cpus: int = 32) -> NodeView:
    view = make_node(name, free, 4, model, cpus)
    return replace(view, capacity=replace(view.capacity, network_mbit_s=mbit_s))


def asks(ranks: int, work: StepCost | None, number: int = 1) -> JobView:
    return waiting(number, ranks, Demand(gpus=1), estimate=work and Estimate(work=work))


def started(nodes: list[NodeView], job: JobView) -> set[str]:
    (decision,) = compute_plan(PolicySetting(), ClusterView(1, tuple(nodes), (job,)), NOW_S).decisions
    assert decision.change is Change.START
    return {share.node for share in decision.target.shares}


@pytest.mark.parametrize(
    ("work", "nodes", "chosen"),
    [
        (COMPUTES, [node("a", 2, SLOW), node("b", 3, FAST)], {"b"}),
        (DECODES, [node("a", 2, SLOW, cpus=3), node("b", 3, SLOW)], {"b"}),
        (DECODES, [node("a", 2, SLOW, cpus=5), node("b", 1, SLOW, cpus=9), node("c", 1, SLOW, cpus=9)], {"b", "c"}),
        (MOVES_MUCH, [node("a", 1, FAST), node("b", 1, FAST), node("c", 2, SLOW)], {"c"}),
    ],
)
def test_the_default_policy_places_a_job_where_its_model_trains_fastest(
    work: StepCost, nodes: list[NodeView], chosen: set[str]
) -> None:
    assert started(nodes, asks(2, work)) == chosen


def test_of_nodes_that_are_alike_those_with_the_fast_network_are_taken() -> None:
    nodes = [node(f"n{at}", 1, FAST, mbit_s=100_000 if at in (3, 4) else 1_000) for at in range(6)]
    assert started(nodes, asks(2, MOVES_MUCH)) == {"n3", "n4"}


def drawn(rng: random.Random) -> list[NodeView]:
    models, cores, speeds = [FAST, SLOW], [4, 8, 32], [1_000, 10_000, 0]
    return [
        node(f"n{at}", rng.randint(0, 4), rng.choice(models), mbit_s=rng.choice(speeds), cpus=rng.choice(cores))
        for at in range(rng.randint(2, 7))
    ]


def a_work(rng: random.Random) -> StepCost:
    moved = 10 ** rng.uniform(5, 9.5)
    return StepCost(rng.choice([1, 8, 64]), 10 ** rng.uniform(7, 12), moved, moved, decode_core_s=rng.choice([0, 0.01]))


def test_never_worse_than_on_the_fewest_nodes_nor_by_a_tenth_than_on_any_two() -> None:
    """Of drawn models and swarms, in the model's own terms; the arrays of planners choose as agents do."""
    rng, differs = random.Random(5), 0
    for number in range(150):
        room, ranks, work = Room(drawn(rng)), rng.randint(1, 4), a_work(rng)
        job = asks(ranks, work, number)
        plain = asks(ranks, None, number)
        before, found = place_in(room, plain), place_in(room, job)
        assert (before is None) == (found is None)
        if before is None or found is None:
            continue
        assert world_size(found) == ranks
        assert Sites(room).choose(job, ranks) == found
        assert predicted(room, job, found) * (1 + 1e-9) >= predicted(room, job, before)
        differs += found != before
        fits = room.fits(job.demand)
        hosts = [offer(room, NodeId(each), fits[each], job.demand) for each in fits]
        for one, two in product(hosts, hosts):
            is_mixed = one.flops_per_s != two.flops_per_s
            if one is two or is_mixed or one.workers + two.workers < ranks:
                continue
            for there in range(max(0, ranks - two.workers), min(one.workers, ranks) + 1):
                parts = [(one, Tasks(there, 0)), (two, Tasks(ranks - there, 0))]
                layout = [each for each in parts if each[1].workers]
                assert throughput(work, layout) <= predicted(room, job, found) * WORTH * 1.07
    assert differs > 10


def test_a_job_of_which_nothing_is_told_is_placed_as_ever() -> None:
    rng = random.Random(6)
    for number in range(60):
        room, job = Room(drawn(rng)), asks(rng.randint(1, 4), None, number)
        fits = room.fits(job.demand)
        if room.ranks_alike(job.demand) >= job.ranks:
            assert place_in(room, job) == place_among(fits, room, job)
        unknown = Room([make_node("x", 2, model="Abacus 7"), make_node("y", 3, model="Abacus 7")])
        assert place_in(unknown, replace(job, card=asks(job.ranks, COMPUTES, number).card)) == place_in(unknown, job)


def test_measured_steps_take_the_place_of_what_operations_and_peaks_tell() -> None:
    """A model that nobody counted takes ten times as long as it was taken to: now the fast GPUs pay."""
    point = SpeedPoint(1, 1, 32, 10.0)
    told = Estimate(work=replace(COMPUTES, sample_flops=1e9), points=(point,), gpu=SLOW)
    assert 32 * measured_work(told, 1).sample_flops == pytest.approx(10.0 * 0.35 * PEAKS["T4"])
    waits = replace(told, data_wait=0.5)
    assert 32 * measured_work(waits, 1).sample_flops == pytest.approx(5.0 * 0.35 * PEAKS["T4"])


def test_operations_that_nobody_counted_or_measured_are_no_reason_to_go_elsewhere() -> None:
    """On a class of GPUs whose peak is not known nothing follows from the times of steps there."""
    guessed = replace(COMPUTES, sample_flops=DENSE_FLOPS * COMPUTES.parameter_bytes)
    told = Estimate(work=guessed, points=(SpeedPoint(1, 1, 32, 10.0),), gpu="Abacus 7")
    assert measured_work(told, 1) is None
    assert measured_work(replace(told, work=COMPUTES), 1) == COMPUTES
    nodes = [node("a", 2, SLOW), node("b", 3, FAST)]
    assert started(nodes, waiting(1, 2, Demand(gpus=1), estimate=told)) == started(nodes, asks(2, None))


def test_steps_on_several_nodes_tell_how_long_they_compute_where_the_network_is_known() -> None:
    network = 10_000 * MBIT
    work = replace(COMPUTES, sample_flops=1e9, moved_bytes=1e9)
    step_s = 5.0 + ring_time_s(work, 4, network)
    told = Estimate(work=work, points=(SpeedPoint(4, 2, 32, step_s),), gpu=SLOW, network_mbit_s=10_000)
    assert 32 * measured_work(told, 1).sample_flops == pytest.approx(5.0 * 0.35 * PEAKS["T4"])
    assert measured_work(replace(told, network_mbit_s=0), 1) == work


def test_a_job_that_grows_may_have_as_many_of_like_hosts_as_it_gets_ranks() -> None:
    nodes = [node(f"n{at}", 1, FAST, cpus=9) for at in range(4)] + [node("m", 4, FAST, cpus=5)]
    found = Sites(Room(nodes)).choose(asks(1, DECODES), 4)
    assert found is not None
    assert {share.node for share in found} == {"n0", "n1", "n2", "n3"}


def test_why_tells_that_its_model_was_looked_at_and_what_is_expected_there() -> None:
    spec = JobSpec(("true",), ranks=2, demand=Demand(gpus=1), work=COMPUTES)
    shares = (Share(NodeId("b"), 2),)
    record = make_record("a", job_id=job_id(5), spec=spec, state=JobState.RUNNING, shares=shares)
    view = ClusterView(1, (node("a", 2, SLOW), node("b", 1, FAST)), (JobView(card_of(record)),))
    (why, *_) = explain(record, view, PolicySetting("fifo"), NOW_S).sentences()
    assert "or on others that are clearly faster for its model: b (2); 107 samples/s there by its model" in why
    plain = replace(record, spec=replace(spec, work=None))
    view = replace(view, jobs=(JobView(card_of(plain)),))
    assert (
        "on the fewest nodes that had room: b (2)." in explain(plain, view, PolicySetting("fifo"), NOW_S).sentences()[0]
    )


def test_what_a_script_reports_of_its_model_is_its_work() -> None:
    progress = Progress()
    for step in range(9):
        figures = {"step": step, "samples": 64.0 * step, "global_batch": 64, "parameter_bytes": 4e8}
        progress.take(0, figures | {"decode_core_s": 0.01, "data_wait": 0.43}, 0.5 * step)
    found = progress.estimate(2, 1)
    assert found.work == StepCost(32, 6e8, 4e8, 4e8, decode_core_s=0.01)
    nearly = replace(found, work=replace(found.work, decode_core_s=0.0105))
    assert merged(found, nearly).work == found.work
    assert Progress().estimate(1, 1).work is None


def test_a_job_of_fixed_size_begins_with_the_model_of_its_kind_alone() -> None:
    """Its times and how far others have come are not its own, and decide more than hosts."""
    kinds = Kinds()
    point = SpeedPoint(1, 1, 32, 10.0)
    told = Estimate(work=replace(COMPUTES, sample_flops=1e9), points=(point,), gpu=SLOW, done=9.0, data_wait=0.5)
    kinds.note(replace(asks(1, None).card, estimate=told, name="a-model", state_index=STATES.index(JobState.RUNNING)))
    card = asks(1, None).card
    prior = model_alone(kinds.prior(card.user, "a-model"), 1)
    assert prior == Estimate(work=measured_work(told, 1), data_wait=0.5, is_prior=True)
    assert model_alone(kinds.prior(card.user, "another"), 1) is None
    assert model_alone(replace(told, work=None), 1) is None
