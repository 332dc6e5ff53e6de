"""The policy `dike`: hosts by what a model needs, and the order and the hosts of `fifo` where nothing is known."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.card import CARD_BYTES_LIMIT, card_of, decode_card, encode_card
from swarmsched.estimate import BatchRange, Estimate, Resizable, StepCost
from swarmsched.ids import NodeId
from swarmsched.policies.registry import compute_plan
from swarmsched.resources import Demand, Share
from swarmsched.view import Change, ClusterView, Decision, JobView, NodeView, PolicySetting
from tests.swarmsched.building import make_node, make_record
from tests.swarmsched.policies.test_policies import NOW_S, waiting

IMAGES = StepCost(32, 24.6e9, 102e6, 102e6, 9.4e6, 90e6, 1, 110e3, 0.008)
"""ResNet-50."""
LARGE = StepCost(4, 5e12, 5e9, 5e9)


def decided(nodes: Sequence[NodeView], *jobs: JobView, **parameters: float) -> list[Decision]:
    setting = PolicySetting("dike", parameters)
    plan = compute_plan(setting, ClusterView(1, tuple(nodes), jobs), NOW_S)
    assert plan == compute_plan(setting, ClusterView(1, tuple(nodes), jobs), NOW_S)
    return list(plan.decisions)


def asks(number: int, ranks: int, work: StepCost | None, **more: object) -> JobView:
    return waiting(number, ranks, Demand(gpus=1), estimate=work and Estimate(work=work), **more)


def shares(*held: tuple[str, int]) -> tuple[Share, ...]:
    return tuple(Share(NodeId(node), ranks) for node, ranks in held)


def test_the_faster_class_is_taken_unless_its_cores_cannot_feed_it() -> None:
    slow, fast = make_node("slow", 2, model="Tesla T4"), make_node("fast", 2, model="NVIDIA A100-SXM4-80GB")
    (decision,) = decided([slow, fast], asks(1, 2, IMAGES))
    assert (decision.change, decision.target.shares) == (Change.START, shares(("fast", 2)))
    assert "samples/s by its model and the hosts" in decision.reason
    starved = make_node("fast", 2, model="NVIDIA A100-SXM4-80GB", cpus=3)
    assert decided([slow, starved], asks(1, 2, IMAGES))[0].target.shares == shares(("slow", 2))


def test_it_stays_on_one_host_where_the_network_is_slow_and_spreads_where_cores_are_scarce() -> None:
    nodes = [make_node(f"n{at}", 2, model="A100", cpus=5) for at in range(2)]
    slow = decided(nodes, asks(1, 2, LARGE), network_gbit_s=1.0)[0]
    assert len(slow.target.shares) == 1
    wide = decided(nodes, asks(1, 2, replace(IMAGES, parameter_bytes=1e6, moved_bytes=1e6, largest_bytes=0.0)))[0]
    assert {share.ranks for share in wide.target.shares} == {1}


def test_where_the_card_allows_it_no_more_workers_are_taken_than_make_it_faster() -> None:
    nodes = [make_node(f"n{at}", 2, model="A100") for at in range(2)]
    elastic = Resizable(1, 4, BatchRange())
    (slow,) = decided(nodes, asks(1, 4, LARGE, elastic=elastic), network_gbit_s=1.0)
    assert slow.target.ranks == 1
    (fast,) = decided(nodes, asks(1, 4, LARGE, elastic=elastic), network_gbit_s=400.0)
    assert fast.target.ranks == 4


@pytest.mark.parametrize(
    ("work", "model", "why"),
    [
        (None, "A100", "does not tell what its model needs"),
        (IMAGES, "Abacus 7", "no peak is known"),
        (replace(IMAGES, moved_bytes=0.0), "A100", "work.moved_bytes"),
        (replace(IMAGES, activation_bytes=1e12), "A100", "no free hosts hold its model"),
    ],
)
def test_what_is_not_known_well_enough_is_placed_as_by_fifo_and_says_why(
    work: StepCost | None, model: str, why: str
) -> None:
    nodes = [make_node("a", 1, model=model), make_node("b", 2, model=model)]
    (decision,) = decided(nodes, asks(1, 2, work))
    view = ClusterView(1, tuple(nodes), (asks(1, 2, work),))
    (as_fifo,) = compute_plan(PolicySetting("fifo"), view, NOW_S).decisions
    assert decision.target == as_fifo.target
    assert decision.reason.startswith(as_fifo.reason)
    assert "as fifo would: " in decision.reason
    assert why in decision.reason


def test_who_does_not_fit_blocks_all_behind_it_and_what_runs_stays() -> None:
    nodes = [make_node("a", 2, model="A100")]
    first, second = decided(nodes, asks(1, 3, IMAGES), asks(2, 1, IMAGES))
    assert (first.change, second.change) == (Change.WAIT, Change.WAIT)
    assert "1 job ahead" in second.reason


def test_only_nodes_that_the_job_allows_are_looked_at() -> None:
    nodes = [make_node("a", 2, model="A100"), make_node("b", 2, model="T4"), make_node("c", 2, model="T4")]
    job = asks(1, 2, IMAGES, nodes=(NodeId("b"), NodeId("c")), exclude=(NodeId("c"),))
    assert decided(nodes, job)[0].target.shares == shares(("b", 2))


def test_a_job_that_was_submitted_with_it_has_it_on_its_card_beside_what_it_reports() -> None:
    record = make_record("n1", spec=JobSpec(("true",), work=IMAGES))
    assert card_of(record).estimate == Estimate(work=IMAGES, is_prior=True)
    reported = Estimate(remaining=9.0)
    assert card_of(record, estimate=reported).estimate == replace(reported, work=IMAGES)


def test_ranks_that_train_apart_move_what_they_report_or_else_what_was_said_of_their_rounds() -> None:
    def moved(outer: str, estimate: Estimate | None = None) -> float:
        record = make_record("n1", spec=JobSpec(("true",), work=IMAGES, outer=outer))
        return card_of(record, estimate=estimate).estimate.work.moved_bytes

    assert moved("every=64") == 102e6 / 4 / 64
    assert moved("every=64,wire=float32") == 102e6 / 64
    assert moved("on") == moved("what=nobody,reads") == moved("") == 102e6
    reported = Estimate(work=replace(IMAGES, parameter_bytes=1e6, moved_bytes=5e5))
    assert moved("every=64", reported) == 5e5
    assert moved("", reported) == 102e6


def test_a_card_carries_it() -> None:
    card = asks(1, 2, IMAGES).card
    kept, body = encode_card(card)
    assert decode_card(body).estimate == kept.estimate == card.estimate
    assert len(body) < CARD_BYTES_LIMIT // 2
