"""What every policy keeps to, whatever it sees: no GPU twice, no size that a job does not take, the same plan again."""

import random
from collections import Counter
from importlib import import_module
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import JobCard, decode_card, encode_card
from swarmsched.estimate import BatchRange, Estimate, GpuBatch, NoisePoint, Resizable, SpeedPoint, StepCost
from swarmsched.gossip.kinds import Kinds
from swarmsched.ids import NodeId
from swarmsched.models.batch import candidates
from swarmsched.models.goodput import GoodputBook, Question
from swarmsched.policies.backfill import Backfill
from swarmsched.policies.base import GIVING, PolicyKind, is_claim
from swarmsched.policies.checked import checked
from swarmsched.policies.registry import POLICIES, compute_plan, plan_anyway
from swarmsched.policies.resizing import REBATCH_GAIN, elastic_of
from swarmsched.resources import Demand, Share
from swarmsched.view import (
    Allocation,
    Change,
    ClusterView,
    Decision,
    Elasticity,
    EndedJob,
    JobView,
    Plan,
    Policy,
    PolicySetting,
)
from tests.swarmsched.building import make_node
from tests.swarmsched.policies.test_policies import NOW_S, job

PER_NODE = 4
BATCHES = BatchRange(32, 256, 8, 64)
POINTS = tuple(
    SpeedPoint(ranks, nodes, batch, 0.01 + 0.001 * batch + 0.01 * (ranks > 1), 0.01 * (ranks > 1))
    for nodes in (1, 2)
    for ranks in range(nodes, 4 * nodes + 1)
    for batch in (8, 64)
)
ESTIMATES = (
    None,
    Estimate(),
    Estimate(remaining=500.0),
    Estimate(points=POINTS, remaining=2_000.0),
    Estimate(points=POINTS[:2], noise=(NoisePoint(32, 1.0), NoisePoint(256, 9.0))),
    Estimate(speed=(0.01, 0.001, 0.01, 0.001, 0.05, 0.002, 1.5), noise=(NoisePoint(32, 3.0),), remaining=100.0),
    Estimate(work=StepCost(32, 24.6e9, 1e8, 1e8)),
)
ELASTICS = (
    None,
    Resizable(1, 8, BATCHES),
    Resizable(2, 3, BATCHES, 64),
    Resizable(1, 1),
    Resizable(3, 16),
    Resizable(2, 4, BATCHES, 64, is_live=True),
)


@st.composite
def views(draw: Any) -> ClusterView:
    """Up to four nodes of at most three models and eight jobs, some of which run; what they hold is not free."""
    available = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    free = [PER_NODE] * len(available)
    jobs = []
    for number in range(draw(st.integers(0, 8))):
        elastic, estimate = draw(st.sampled_from(ELASTICS)), draw(st.sampled_from(ESTIMATES))
        low, high = (elastic.ranks_least, elastic.ranks_most) if elastic else (1, 6)
        asked = draw(st.integers(low, min(high, 6)))
        held = draw(st.just(0) | (st.integers(low, high) if elastic else st.just(asked)))
        shares = _taken(free, held)
        state = JobState.RUNNING if shares else JobState.QUEUED
        more: dict[str, Any] = {"user": draw(st.sampled_from(["", "ada", "bob"])), "priority": draw(st.integers(-1, 1))}
        if draw(st.booleans()):  # not where it runs
            others = [
                f"n{at}" for at in range(len(available)) if NodeId(f"n{at}") not in {share.node for share in shares}
            ]
            more["exclude"] = tuple(NodeId(each) for each in others)
        if shares:
            more["running_s"] = draw(st.sampled_from([0.0, 900.0]))
        if shares or draw(st.booleans()):
            more |= {"attained_gpu_s": draw(st.sampled_from([1.0, 4_000.0, 9_000.0])), "first_started_utc_s": 1.0}
        more["mixed_gpus"] = draw(st.sampled_from([False, False, True]))
        demand = Demand(gpus=1)
        jobs.append(job(number, state, asked, demand, shares=shares, elastic=elastic, estimate=estimate, **more))
    models = draw(st.sampled_from([("A100",) * 4, ("A100", "T4") * 2, ("T4", "A100", "V100", "A100")]))
    nodes = [make_node(f"n{at}", free[at], model=models[at], is_available=is_up) for at, is_up in enumerate(available)]
    ended = [EndedJob(each.card, True, 1.0) for each in jobs[:3]]
    return ClusterView(1, tuple(nodes), tuple(jobs), tuple(ended))


def _taken(free: list[int], ranks: int) -> tuple[Share, ...]:
    """From the first nodes that have any; nothing where they have too few."""
    shares = []
    for at, count in enumerate(free if sum(free) >= ranks else ()):
        part = min(count, ranks)
        if part:
            shares.append(Share(NodeId(f"n{at}"), part))
            free[at] -= part
            ranks -= part
    return tuple(shares)


def made(name: str) -> Policy:
    kind = POLICIES[name]
    module, _, found = kind.policy.partition(":")
    policy: Policy = getattr(import_module(module), found)({spec.name: spec.default for spec in kind.parameters})
    return policy


def check(view: ClusterView, plan: Plan) -> None:
    by_id = {each.job_id: each for each in view.jobs}
    free = {node.node: node.free.gpu_count for node in view.nodes if node.is_available}
    models = {node.node: node.capacity.gpus[0].model for node in view.nodes}
    after: Counter[str] = Counter()
    for decision in plan.decisions:
        one, target = by_id[decision.job_id], decision.target
        if target.shares:
            elastic = elastic_of(one)
            assert elastic.ranks_least <= target.ranks <= elastic.ranks_most
            assert all(share.node in free for share in target.shares)
            places = {share.node for share in target.shares}
            is_mixed = one.card.mixed_gpus or places <= {share.node for share in one.shares}
            assert is_mixed or len({models[place] for place in places}) == 1, "ranks wait for the slowest GPU"
        if decision.change in (Change.GROW, Change.SHRINK, Change.MOVE):
            assert target.shares != one.shares, "each of these costs a pause"
        if decision.change is Change.START:
            for share in target.shares:
                free[share.node] -= share.ranks
        begun = [each for each in plan.decisions if each.change in (Change.START, Change.GROW) or is_claim(each)]
        if decision.change in GIVING and begun:
            assert decision.taker, "nobody follows it otherwise"
        if decision.taker:
            taker = next(each for each in plan.decisions if each.job_id == decision.taker)
            assert taker.target.shares, "who gives something up does so for a job that gets a place"
            assert is_claim(taker) or decision.change is not Change.STOP, "only a job that waits asks others to stop"
        if decision.change is not Change.STOP:
            after.update({share.node: share.ranks for share in target.shares or one.shares})
        assert decision.reason
    assert all(count >= 0 for count in free.values()), "a start needs what is free now"
    assert max(after.values(), default=0) <= PER_NODE, "together they fit"
    assert sorted(by_id) == sorted(decision.job_id for decision in plan.decisions)
    assert not unreachable(view, plan), "shepherds who follow it one by one wait for one another for ever"


def unreachable(view: ClusterView, plan: Plan) -> list[Decision]:
    """What is left when each decision was followed as soon as its place was free; places that are kept until others
    have ended apart."""
    by_id = {each.job_id: each for each in view.jobs}
    free = Counter({node.node: node.free.gpu_count for node in view.nodes if node.is_available})
    left = [each for each in plan.decisions if each.change is Change.STOP or each.target.shares]
    while True:
        waiting = []
        for decision in left:
            now = free + Counter({share.node: share.ranks for share in by_id[decision.job_id].shares})
            wanted = Counter({share.node: share.ranks for share in decision.target.shares})
            if wanted <= now:
                free = now - wanted
            else:
                waiting.append(decision)
        if len(waiting) == len(left):
            return [each for each in waiting if each.change is not Change.WAIT]
        left = waiting


@settings(max_examples=300, deadline=None)
@given(view=views(), name=st.sampled_from(list(POLICIES)))
def test_plans_fit_and_give_no_job_a_size_that_it_does_not_take(view: ClusterView, name: str) -> None:
    check(view, compute_plan(PolicySetting(name), view, NOW_S))


@settings(max_examples=200, deadline=None)
@given(view=views(), name=st.sampled_from(list(POLICIES)))
def test_agents_that_list_the_same_jobs_differently_make_the_same_plan(view: ClusterView, name: str) -> None:
    other = msgspec.structs.replace(view, jobs=view.jobs[::-1])
    plans = [compute_plan(PolicySetting(name), each, NOW_S) for each in (view, other)]
    assert {each.job_id: each for each in plans[0].decisions} == {each.job_id: each for each in plans[1].decisions}


@settings(max_examples=200, deadline=None)
@given(view=views())
def test_a_running_job_of_which_nobody_can_tell_where_it_may_go_is_not_stopped_for_another_size(
    view: ClusterView,
) -> None:
    cards = [msgspec.structs.replace(each.card, exclude=(), hides_constraints=True) for each in view.jobs[::2]]
    jobs = [JobView(card, NOW_S) for card in cards] + list(view.jobs[1::2])
    view = msgspec.structs.replace(view, jobs=tuple(jobs))
    plan = compute_plan(PolicySetting("elastic-batch"), view, NOW_S)
    check(view, plan)
    assert not [each for each in plan.decisions if each.change is Change.STOP]


@settings(max_examples=300, deadline=None)
@given(view=views())
def test_the_default_policy_stops_no_job_that_changes_while_it_trains(view: ClusterView) -> None:
    live = {each.job_id for each in view.jobs if each.shares and each.card.elastic and each.card.elastic.is_live}
    decisions = compute_plan(PolicySetting("swarm"), view, NOW_S).decisions
    assert not [each for each in decisions if each.job_id in live and each.change is Change.STOP]


@settings(max_examples=100, deadline=None)
@given(view=views(), other=views(), name=st.sampled_from(list(POLICIES)))
def test_the_same_view_gives_the_same_plan_whatever_was_planned_before(
    view: ClusterView, other: ClusterView, name: str
) -> None:
    fresh, used = made(name), made(name)
    used.plan(other, NOW_S)
    plan = fresh.plan(view, NOW_S)
    assert used.plan(view, NOW_S) == plan
    again = msgspec.structs.replace(view, memory=plan.memory)
    check(again, used.plan(again, NOW_S))


@settings(max_examples=50, deadline=None)
@given(view=views(), name=st.sampled_from(list(POLICIES)))
def test_cards_of_an_older_version_are_planned_for_at_the_size_that_they_asked_for(
    view: ClusterView, name: str
) -> None:
    """Agents that do not know of models write cards without the last two fields."""

    def older(card: JobCard) -> JobCard:
        _, body = encode_card(msgspec.structs.replace(card, elastic=None, estimate=None))
        fields = msgspec.msgpack.decode(body)
        return decode_card(msgspec.msgpack.encode(fields[: JobCard.__struct_fields__.index("elastic")]))

    jobs = tuple([JobView(older(each.card), NOW_S) for each in view.jobs])
    assert all(each.card.elastic is None and each.card.estimate is None for each in jobs)
    rigid = [each for each in jobs if not each.shares or sum(share.ranks for share in each.shares) == each.ranks]
    old = ClusterView(1, view.nodes, tuple(rigid))
    check(old, compute_plan(PolicySetting(name), old, NOW_S))


@pytest.mark.parametrize("name", [kind.name for kind in POLICIES.values() if kind.resizes])
def test_a_job_that_can_have_no_more_than_it_has_is_not_moved(name: str) -> None:
    """It would take more, and what is free is where it may not go."""
    shares, estimate = (Share(NodeId("n0"), 1),), Estimate(points=POINTS, remaining=2_000.0)
    more: dict[str, Any] = {"running_s": 900.0, "first_started_utc_s": 1.0, "exclude": (NodeId("n1"),)}
    elastic = Resizable(1, 9, BATCHES)
    running = job(0, JobState.RUNNING, 1, Demand(gpus=1), shares=shares, elastic=elastic, estimate=estimate, **more)
    view = ClusterView(1, (make_node("n0", 0, 1), make_node("n1", 1, 1)), (running,))
    (decision,) = compute_plan(PolicySetting(name), view, NOW_S).decisions
    assert decision.change in (Change.KEEP, Change.REBATCH)


def test_where_its_owner_names_no_range_a_running_job_keeps_its_batch() -> None:
    """It has 64, a third of which is told as 21 samples of each rank: by that it has 63."""
    shares, batches = (Share(NodeId("n0"), 3),), BatchRange(63, 63, 1, 63)
    told = Estimate(points=(SpeedPoint(3, 1, 21, 0.1),), remaining=1e4)
    sizes = Resizable(3, 3, batches, 64)
    view = job(0, JobState.RUNNING, 3, Demand(gpus=1), shares=shares, elastic=sizes, estimate=told, running_s=900.0)
    plan = compute_plan(PolicySetting("swarm"), ClusterView(1, (make_node("n0", 0, 3),), (view,)), NOW_S)
    assert [each.change for each in plan.decisions] == [Change.KEEP]


def test_a_batch_is_changed_for_what_it_brings_and_not_for_every_breath_of_the_noise() -> None:
    """The job has the whole machine, so nothing but its batch can change."""
    shares = (Share(NodeId("n0"), 4),)
    estimate = Estimate(points=POINTS, noise=(NoisePoint(32, 2.0), NoisePoint(256, 3.0)), remaining=2_000.0)
    goodput = GoodputBook().goodputs([Question(estimate, BATCHES, 4, 4)])[0]
    best = goodput.batch(4, 1)
    changes = []
    for batch in candidates(BATCHES, 24):
        elastic = Resizable(1, 4, BATCHES, batch)
        more: dict[str, Any] = {"running_s": 900.0, "first_started_utc_s": 1.0, "estimate": estimate}
        running = job(0, JobState.RUNNING, 4, Demand(gpus=1), shares=shares, elastic=elastic, **more)
        view = ClusterView(1, (make_node("n0", 0, 4),), (running,))
        (decision,) = compute_plan(PolicySetting("swarm"), view, NOW_S).decisions
        assert (decision.change is Change.REBATCH) == (goodput.gain(4, 1, batch) >= REBATCH_GAIN)
        assert decision.change is Change.KEEP or decision.target == Allocation(shares, best)
        changes.append((batch != best, decision.change))
    assert changes.count((True, Change.KEEP)) >= 1
    assert changes.count((True, Change.REBATCH)) >= 1
    assert goodput.gain(4, 1, 33) == inf  # of a batch that nobody looked at nothing is known


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_job_without_gpus_starts_where_it_fits(name: str) -> None:
    """Also where all GPUs are taken: no policy deals cores."""
    shares = (Share(NodeId("n0"), 1),)
    running = job(0, JobState.RUNNING, 1, Demand(gpus=1), shares=shares, running_s=900.0, first_started_utc_s=1.0)
    view = ClusterView(1, (make_node("n0", 0, 1, cpus=8),), (running, job(1, JobState.QUEUED, 2, Demand(cpus=4))))
    by_id = {each.job_id: each for each in compute_plan(PolicySetting(name), view, NOW_S).decisions}
    started = by_id[view.jobs[1].job_id]
    assert (started.change, started.target.shares) == (Change.START, (Share(NodeId("n0"), 2),))


@pytest.mark.parametrize("name", ["optimus", "elastic-batch", "elastic-tiresias", "swarm"])
def test_a_job_without_gpus_starts_on_cores_that_are_free_and_not_on_those_that_nobody_leaves(name: str) -> None:
    busy = make_node("n0", 0, 1, cpus=0)
    capacity = msgspec.structs.replace(busy.capacity, cpus=8)
    nodes = (msgspec.structs.replace(busy, capacity=capacity), make_node("n1", 0, 1, cpus=8))
    held = (Share(NodeId("n0"), 1),)
    running = job(0, JobState.RUNNING, 1, Demand(gpus=1, cpus=8), shares=held, elastic=Resizable(1, 2), running_s=900.0)
    for number in range(10, 18):
        light = job(number, JobState.QUEUED, 1, Demand(cpus=8))
        plan = compute_plan(PolicySetting(name), ClusterView(1, nodes, (running, light)), NOW_S)
        (started,) = [each for each in plan.decisions if each.job_id == light.job_id]
        assert (started.change, started.target.shares) == (Change.START, (Share(NodeId("n1"), 1),))


def test_nobody_is_stopped_for_a_job_that_has_no_place_then() -> None:
    """What the lowest class would leave is where the waiting job may not go."""
    n0, n1 = NodeId("n0"), NodeId("n1")

    def running(number: int, node: NodeId, ranks: int, attained_gpu_s: float) -> JobView:
        more = {"running_s": 900.0, "first_started_utc_s": 1.0, "attained_gpu_s": attained_gpu_s}
        return job(number, JobState.RUNNING, ranks, Demand(gpus=1), shares=(Share(node, ranks),), **more)

    waiting = job(2, JobState.QUEUED, 2, Demand(gpus=1), exclude=(n1,))
    jobs = (running(0, n0, 1, 1.0), running(1, n1, 2, 9_000.0), waiting)
    view = ClusterView(1, (make_node("n0", 1, 2), make_node("n1", 0, 2)), jobs)
    decisions = {
        each.job_id: each.change for each in compute_plan(PolicySetting("elastic-tiresias"), view, NOW_S).decisions
    }
    assert [decisions[each.job_id] for each in jobs] == [Change.KEEP, Change.KEEP, Change.WAIT]


def test_jobs_that_shrink_do_not_change_hosts_with_one_another() -> None:
    """Neither would find its place free before the other has left it."""
    n0, n1, sizes = NodeId("n0"), NodeId("n1"), Resizable(1, 8, BATCHES)
    fast, demand = Estimate(points=POINTS, remaining=2_000.0), Demand(gpus=1)
    jobs = (
        job(0, JobState.RUNNING, 1, demand, shares=(Share(n0, 4),), elastic=sizes, estimate=fast, running_s=900.0),
        job(1, JobState.RUNNING, 1, demand, shares=(Share(n1, 2),), elastic=sizes, running_s=900.0),
        *[job(number, JobState.QUEUED, ranks, demand) for number, ranks in enumerate((1, 3, 2, 2), 2)],
    )
    view = ClusterView(1, (make_node("n0", 0), make_node("n1", 2), make_node("n2", 4)), jobs)
    check(view, compute_plan(PolicySetting("optimus"), view, NOW_S))


@pytest.mark.parametrize("name", ["swarm", "elastic-batch"])
def test_no_word_of_its_kind_chooses_a_batch(name: str) -> None:
    """Drawn from a seed: a stranger's job by the same name, then a new one, and one that has reported by itself."""
    rng = random.Random(8)
    allowed = BatchRange(64, 4_096, 8, 4_096)
    nodes = (make_node("n0", 2), make_node("n1", 4))
    setting = PolicySetting(name, {}, Elasticity.ON)
    own = Estimate(points=(SpeedPoint(2, 1, 32, 0.2),), noise=(NoisePoint(64, 1.0),), done=50.0, is_partial=True)
    known = {"user": "u1", "name": "train", "elastic": Resizable(2, 2, allowed, 64)}
    runs = job(2, JobState.RUNNING, 2, Demand(gpus=1), shares=(Share(NodeId("n0"), 2),), estimate=own, **known)
    runs = replace(runs, card=replace(runs.card, running_s=900.0, attempt=1))
    alone = {each.job_id: each for each in compute_plan(setting, ClusterView(1, nodes, (runs,)), NOW_S).decisions}
    for _ in range(60):
        kinds = Kinds()
        for _ in range(rng.randrange(1, 9)):
            point = SpeedPoint(rng.choice((1, 2, 4)), 1, rng.choice((16, 32, 64, 2_048)), 10.0 ** rng.uniform(-12, 12))
            lies = Estimate(points=(point,), noise=(NoisePoint(64, 1e15),), done=3e12, is_partial=True)
            liar = job(9, JobState.RUNNING, 1, Demand(gpus=1), estimate=lies, user="u1", name="train")
            kinds.note(liar.card)
        new = job(1, JobState.QUEUED, 2, Demand(gpus=1), estimate=kinds.prior("u1", "train"), **known)
        wide = job(3, JobState.QUEUED, 2, Demand(gpus=1), **(known | {"elastic": Resizable(1, 4, allowed)}))
        heard = kinds.view("u1", "train")
        assert heard is not None
        view = ClusterView(1, nodes, (new, runs, wide), kinds=(heard, replace(heard, gpu="A100")))
        plan = compute_plan(setting, view, NOW_S)
        made = {each.job_id: each for each in plan.decisions}
        assert not plan.fault
        assert {made[each.job_id].target.global_batch for each in (new, wide) if each.job_id in made} <= {0, 64}
        before, after = alone[runs.job_id], made[runs.job_id]
        assert (after.change, after.target.global_batch) == (before.change, before.target.global_batch)


@pytest.mark.parametrize("name", ["swarm", "elastic-batch"])
def test_one_liar_changes_no_size_that_others_have_measured_and_no_batch(name: str) -> None:
    """Drawn from a seed: of a job that has reported nothing.  Where nobody else has, it is of a size that its first
    batch can use."""
    rng = random.Random(17)
    allowed, setting = BatchRange(64, 4_096, 8, 4_096), PolicySetting(name, {}, Elasticity.ON)
    nodes = (make_node("n0", 8, 8), make_node("n1", 8, 8))
    known = {"user": "u1", "name": "train", "elastic": Resizable(1, 16, allowed)}
    beside = job(5, JobState.QUEUED, 1, Demand(gpus=1), elastic=Resizable(1, 16, BATCHES), estimate=ESTIMATES[0])
    times = [SpeedPoint(ranks, 1, 64 // ranks, 0.2 + 1.0 / ranks, 0.1) for ranks in range(1, 9)]

    def size(kinds: Kinds) -> int:
        new = job(1, JobState.QUEUED, 1, Demand(gpus=1), estimate=kinds.prior("u1", "train"), **known)
        heard = kinds.view("u1", "train")
        plan = compute_plan(setting, ClusterView(1, nodes, (new, beside), kinds=(heard,) if heard else ()), NOW_S)
        (made,) = [each.target for each in plan.decisions if each.job_id == new.job_id]
        assert not plan.fault
        assert made.global_batch in (0, 64)
        return made.ranks

    def tell(kinds: Kinds, number: int, *points: SpeedPoint, noise: float, done: float) -> None:
        told = Estimate(points=points, noise=(NoisePoint(64, noise),), done=done, is_partial=True)
        kinds.note(job(number, JobState.RUNNING, 1, Demand(gpus=1), estimate=told, user="u1", name="train").card)

    for is_measured in (True, False):
        sizes = set[int]()
        for count in (0, *[3] * 40):
            kinds = Kinds()
            for number in (7, 8) if is_measured else ():
                tell(kinds, number, *times, noise=4.0, done=100.0)
            for _ in range(count):
                place = (rng.randrange(1, 17), rng.randrange(1, 3), rng.choice((8, 16, 32, 64, 512, 4_096)))
                tell(
                    kinds,
                    9,
                    SpeedPoint(*place, 10.0 ** rng.uniform(-6, 6)),
                    noise=10.0 ** rng.uniform(-9, 15),
                    done=1e9,
                )
            sizes.add(size(kinds))
        assert len(sizes) == 1 or not is_measured
        assert sizes <= set(range(9))


SIZES = (0, 1, 2, 3, 240, 2**16 - 1)
SAMPLES = (0, 1, 7, 64, 4_096, 2**32 - 1)
MODELS = ("A100", "T4")
AMOUNTS = (0.0, 5e-324, 1e-300, 1e-9, 0.001, 1.0, 1e6, 1e15, 1e18)


def extreme(rng: random.Random, number: int) -> JobView:
    """A job with a card that the wire takes, at the ends of its ranges."""
    one = rng.choice
    points = [
        SpeedPoint(one(SIZES), one(SIZES), one(SAMPLES), one(AMOUNTS), one(AMOUNTS))
        for _ in range(rng.choice((0, 1, 2, 8)))
    ]
    estimate = Estimate(
        speed=tuple(one(AMOUNTS) for _ in range(one((0, 3, 7)))),
        points=tuple(points),
        noise=tuple(NoisePoint(one(SAMPLES), one(AMOUNTS)) for _ in range(one((0, 1, 3)))),
        remaining=one(AMOUNTS),
        remaining_error=one(AMOUNTS),
        is_prior=one((True, False)),
        done=one(AMOUNTS),
        work=StepCost(one(SAMPLES), one(AMOUNTS), one(AMOUNTS), one(AMOUNTS), decode_core_s=one(AMOUNTS)),
        is_partial=one((True, False)),
    )
    first, most, local_least, local_most = (one(SAMPLES) for _ in range(4))
    by_gpu = one(((), (GpuBatch(one(MODELS), one(SAMPLES)), GpuBatch("other", one(SAMPLES)))))
    batches = BatchRange(first, most, local_least, local_most, by_gpu)
    elastic = Resizable(one(SIZES), one(SIZES), batches, one(SAMPLES), one((True, False)))
    shares = one(((), (Share(NodeId("n1"), one((1, 2))),)))
    state = JobState.RUNNING if shares else JobState.QUEUED
    known = {"user": "u", "name": "t", "running_s": one((0.0, 1e6)), "pause_s": one((0.0, 1e10))}
    demand = Demand(gpus=one((0, 1, 2)))
    return job(number, state, 2, demand, shares=shares, elastic=elastic, estimate=estimate, **known)


@pytest.mark.parametrize("name", ["swarm", "elastic-batch", "optimus", "elastic-tiresias", "dike", "srtf"])
@pytest.mark.filterwarnings("error")
def test_no_card_that_the_wire_takes_makes_a_policy_raise_or_compute_nonsense(name: str) -> None:
    """Drawn from a seed: nothing is raised, and nothing that is no number comes out of a model."""
    rng = random.Random(9)
    for count in range(24):
        models = (*MODELS, "H200") if count % 2 else ("A100",) * 3
        nodes = tuple(make_node(f"n{at}", free, 8, models[at]) for at, free in enumerate((8, 4, 0)))
        jobs = [extreme(rng, number) for number in range(rng.choice((1, 3)))]
        jobs = [replace(each, card=decode_card(encode_card(each.card)[1])) for each in jobs]
        heard = Kinds()
        for each in jobs[1:]:
            heard.note(each.card)
        kinds = tuple([kind for kind in (heard.view("u", "t"),) if kind])
        view = ClusterView(1, nodes, tuple(jobs), kinds=kinds)
        checked(compute_plan(PolicySetting(name, {}, Elasticity.ON), view, NOW_S), view)


class Picky(Backfill):
    """Raises at some jobs' cards."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        if any(each.card.estimate and each.card.name == "odd" for each in view.jobs):
            raise ZeroDivisionError("odd")
        return super().plan(view, now_s)


def test_a_card_at_which_a_policy_raises_costs_that_job_its_card_and_no_other_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = PolicyKind("picky", "x", POLICIES["backfill"].parameters, f"{__name__}:Picky")
    monkeypatch.setitem(POLICIES, "picky", kind)
    jobs = [
        job(at, JobState.QUEUED, 1, Demand(gpus=1), name="odd" if at in (3, 17) else "", estimate=ESTIMATES[3])
        for at in range(40)
    ]
    view = ClusterView(7, (make_node("n1", 8),), tuple(jobs))
    plan = plan_anyway(PolicySetting("picky"), view, NOW_S)
    assert (plan.fault, plan.policy_id, plan.version) == ("", "picky", 7)
    assert "picky raised ZeroDivisionError: odd, for the card of" in plan.oddity
    assert {each.job_id for each in jobs if each.job_id in plan.oddity} == {jobs[3].job_id, jobs[17].job_id}
    everywhere = [replace(each, card=replace(each.card, name="odd")) for each in jobs]
    worse = plan_anyway(PolicySetting("picky"), replace(view, jobs=tuple(everywhere)), NOW_S)
    assert worse.fault == "picky raised ZeroDivisionError: odd"


@pytest.mark.parametrize(
    "estimate",
    [
        Estimate(points=(SpeedPoint(0, 1, 32, 0.1),)),
        Estimate(points=(SpeedPoint(1, 0, 32, 0.1),)),
        Estimate(points=(SpeedPoint(1, 1, 32, 0.1), SpeedPoint(1, 1, 0, 0.1))),
        Estimate(noise=(NoisePoint(0, 1.0),)),
    ],
)
def test_an_estimate_of_nothing_is_left_out_of_the_card_that_brings_it(estimate: Estimate) -> None:
    card = job(1, JobState.QUEUED, 1, Demand(gpus=1), estimate=estimate).card
    assert decode_card(encode_card(card)[1]) == replace(card, estimate=None)
