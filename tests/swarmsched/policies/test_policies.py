"""The policies: order, what may start, what never may, and how long a plan takes."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.card import STATES, JobCard, RankKey, card_of, decode_card, encode_card
from swarmsched.errors import ConfigError
from swarmsched.ids import JobId, NodeId, handle
from swarmsched.policies.placement import place_in, tie_break
from swarmsched.policies.registry import POLICIES, check_setting, compute_plan, make_order, plan_anyway, policy_id
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, GpuCount, Share, fits, ranks_that_fit, world_size
from swarmsched.view import Change, ClusterView, JobView, NodeView, Plan, PolicySetting
from tests.swarmsched.building import job_id, make_node

FIFO = PolicySetting("fifo")
BACKFILL = PolicySetting("backfill")
LAS = PolicySetting("las")
NOW_S = 5.0
ONE = Demand(gpus=1)


def gpus(count: int, model: str = "A100", memory: int = 2**34) -> tuple[GpuCount, ...]:
    return (GpuCount(model, memory, count),) if count else ()


def waiting(number: int, ranks: int, demand: Demand = ONE, **changes: object) -> JobView:
    return job(number, JobState.QUEUED, ranks, demand, **changes)


def job(number: int, state: JobState, ranks: int, demand: Demand, **changes: object) -> JobView:
    shepherd, utc_s = NodeId("boss"), 1_700_000_000.0 + number
    card = JobCard(job_id(number), 1, 1, shepherd, STATES.index(state), 0, ranks, demand, utc_s)
    return JobView(replace(card, **changes), NOW_S)


def rank_key(setting: PolicySetting, view: JobView) -> RankKey:
    order = make_order(setting)
    assert order is not None
    return order.rank_key(view, NOW_S)


def place(
    there: Sequence[NodeView],
    demand: Demand,
    ranks: int,
    number: int,
    rng: random.Random | None = None,
    **changes: object,
) -> tuple[Share, ...] | None:
    return place_in(Room(there), waiting(number, ranks, demand, **changes), rng)


def running(number: int, shares: Sequence[tuple[str, int]], **changes: object) -> JobView:
    held = tuple(Share(NodeId(name), ranks) for name, ranks in shares)
    return job(number, JobState.RUNNING, world_size(held), ONE, shares=held, **changes)


def plan_of(setting: PolicySetting, nodes: Sequence[NodeView], jobs: Sequence[JobView]) -> Plan:
    return compute_plan(setting, ClusterView(7, tuple(nodes), tuple(jobs)), NOW_S)


def actions(plan: Plan) -> dict[str, str]:
    return {decision.job_id: decision.change.value for decision in plan.decisions}


def started(plan: Plan) -> list[JobId]:
    return [decision.job_id for decision in plan.decisions if decision.change is Change.START]


def test_fifo_starts_in_order_of_priority_then_submit_time() -> None:
    jobs = [waiting(3, 1), waiting(1, 1), waiting(2, 1, priority=5)]
    plan = plan_of(FIFO, [make_node("n1", 4)], jobs)
    assert [entry.job_id for entry in plan.decisions] == [job_id(2), job_id(1), job_id(3)]
    assert len(started(plan)) == 3
    assert plan.version == 7


def test_fifo_lets_no_smaller_job_pass_a_blocked_head() -> None:
    plan = plan_of(FIFO, [make_node("n1", 2)], [waiting(1, 4), waiting(2, 1)])
    assert set(actions(plan).values()) == {"wait"}
    assert plan.decisions[0].reason == "needs 4 GPUs, 2 free"
    assert plan.decisions[1].reason == f"needs 1 GPU; fits now and waits its turn; 1 job ahead ({handle(job_id(1))})"


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_that_rests_is_in_nobodys_way_under_any_policy(name: str) -> None:
    nodes = [make_node("n1", 4)]
    rests, other = waiting(1, 4, priority=5, rests_s=10, restartable=True), waiting(2, 4)
    assert started(plan_of(PolicySetting(name), nodes, [rests, other])) == [other.job_id]
    rested = replace(rests, written_s=NOW_S - 10.0)
    assert len(started(plan_of(PolicySetting(name), nodes, [rested, other]))) == 1
    assert started(plan_of(PolicySetting(name), nodes, [rested])) == [rested.job_id]


def test_running_jobs_are_kept_and_ended_ones_left_out() -> None:
    ended = job(9, JobState.ENDED, 1, ONE)
    plan = plan_of(FIFO, [make_node("n1", 0)], [running(1, [("n1", 4)]), ended])
    assert actions(plan) == {job_id(1): "keep"}


def test_a_gang_goes_to_the_fewest_nodes_and_fits_best() -> None:
    nodes = [make_node("a", 4), make_node("b", 2), make_node("c", 3), make_node("d", 1)]
    assert place(nodes, ONE, 2, 1) == (Share(NodeId("b"), 2),)
    assert place(nodes, ONE, 7, 1) == (Share(NodeId("a"), 4), Share(NodeId("c"), 3))
    assert place(nodes, ONE, 6, 1) == (Share(NodeId("a"), 4), Share(NodeId("b"), 2))
    assert place(nodes, ONE, 11, 1) is None


def test_a_gang_respects_its_own_choice_of_nodes_and_their_availability() -> None:
    nodes = [make_node("a", 4), make_node("b", 4), make_node("c", 4, is_available=False)]
    assert place(nodes, ONE, 2, 1, nodes=(NodeId("b"),)) == (Share(NodeId("b"), 2),)
    assert place(nodes, ONE, 2, 1, exclude=(NodeId("a"),)) == (Share(NodeId("b"), 2),)
    assert place(nodes, ONE, 2, 1, nodes=(NodeId("c"),)) is None


def test_ranks_with_several_gpus_are_never_split_between_nodes() -> None:
    first, second = tie_break(job_id(1))([NodeId("a"), NodeId("b")], 2)
    assert place([make_node("a", 3), make_node("b", 3)], Demand(gpus=2), 2, 1) == (Share(first, 1), Share(second, 1))
    assert place([make_node("a", 3), make_node("b", 3)], Demand(gpus=2), 3, 1) is None


def test_a_job_without_gpus_prefers_nodes_without_free_ones() -> None:
    nodes = [make_node("a", 4), make_node("cpu", 0, total=0), make_node("b", 4)]
    assert place(nodes, Demand(cpus=2), 3, 1) == (Share(NodeId("cpu"), 3),)


def test_equal_nodes_are_chosen_alike_everywhere_but_differently_by_job() -> None:
    nodes = [make_node(f"n{index}", 4) for index in range(8)]
    chosen = [place(nodes, ONE, 4, number) for number in range(100)]
    assert chosen == [place(nodes[::-1], ONE, 4, number) for number in range(100)]
    assert len(set(chosen)) == 8
    assert tie_break(JobId("j"))([NodeId(name) for name in "abcdefgh"], 3) == ["e", "h", "a"]


def test_a_generator_spreads_repeated_tries_of_one_job() -> None:
    nodes = [make_node(f"n{index}", 4) for index in range(8)]
    rng = random.Random(1)
    assert len({place(nodes, ONE, 4, 1, rng=rng) for _ in range(100)}) == 8


def test_backfill_starts_a_short_job_that_ends_before_the_shadow_time() -> None:
    nodes = [make_node("n1", 2)]
    jobs = [
        running(1, [("n1", 2)], time_limit_s=100.0, running_s=40.0),
        waiting(2, 4),
        waiting(3, 2, time_limit_s=61.0),
        waiting(4, 2, time_limit_s=60.0),
    ]
    plan = plan_of(BACKFILL, nodes, jobs)
    assert started(plan) == [job_id(4)]
    assert "next in line, expected within 60 s" in plan.decisions[1].reason
    assert "would delay the head of the line" in plan.decisions[2].reason


def test_backfill_starts_a_long_job_beyond_the_reservation() -> None:
    nodes = [make_node("n1", 2), make_node("n2", 1)]
    jobs = [running(1, [("n1", 2)], time_limit_s=100.0), waiting(2, 4), waiting(3, 1), waiting(4, 1)]
    plan = plan_of(BACKFILL, nodes, jobs)
    assert started(plan) == [job_id(3)]
    assert plan.decisions[2].target.shares == (Share(NodeId("n2"), 1),)


def test_backfill_gives_nothing_of_the_reservation_away_while_the_shadow_time_is_unknown() -> None:
    jobs = [running(1, [("n1", 2)]), waiting(2, 4), waiting(3, 1, time_limit_s=1.0)]
    plan = plan_of(BACKFILL, [make_node("n1", 2)], jobs)
    assert started(plan) == []
    assert "when the running jobs end" in plan.decisions[1].reason


def test_backfill_assumes_a_limit_where_it_is_told_to() -> None:
    policy = PolicySetting("backfill", {"assumed_limit_s": 600.0})
    jobs = [running(1, [("n1", 2)]), waiting(2, 4), waiting(3, 1), waiting(4, 1, time_limit_s=700.0)]
    assert started(plan_of(policy, [make_node("n1", 2)], jobs)) == [job_id(3)]


def test_backfill_reserves_nothing_for_a_job_that_cannot_run_at_all() -> None:
    plan = plan_of(BACKFILL, [make_node("n1", 2)], [waiting(1, 40), waiting(2, 2)])
    assert started(plan) == [job_id(2)]
    assert "has to wait for nodes or GPUs that are not available now" in plan.decisions[0].reason


def five_nodes(names: Sequence[str], demand: Demand) -> ClusterView:
    """Five nodes of four GPUs: sixteen ranks on four of them end in 990 s, the head needs all, a third job needs four.

    The running job's card comes over the wire.
    """
    spec = JobSpec(("train",), name="resnet50-imagenet", user="ada", ranks=16, demand=demand, time_limit_s=1_000.0)
    shares = tuple(Share(NodeId(name), 4) for name in names[:4])
    record = JobRecord(job_id(1), spec, 1.0, 1, 5, NodeId(names[0]), 1, (), JobState.RUNNING, shares=shares)
    _, body = encode_card(card_of(record, running_s=10.0, rank_key=(1_000, 1_700_000_000_000), policy_id="backfill"))
    gang = JobView(decode_card(body), NOW_S)
    nodes = [make_node(name, 0 if index < 4 else 4) for index, name in enumerate(names)]
    return ClusterView(1, tuple(nodes), (gang, waiting(2, 20), waiting(3, 4)))


@pytest.mark.parametrize("length", [5, 20, 63])
def test_backfill_does_not_let_a_job_pass_where_a_gangs_card_may_not_name_all_its_nodes(length: int) -> None:
    view = five_nodes([f"{index}{'n' * (length - 1)}" for index in range(5)], ONE)
    plan = compute_plan(BACKFILL, view, NOW_S)
    assert started(plan) == []
    assert "next in line" in plan.decisions[1].reason
    assert "would delay the head of the line" in plan.decisions[2].reason


def test_backfill_keeps_what_nobody_accounts_for_until_further_notice() -> None:
    """Somebody holds n1, and no card says who: it will come free, so a head that needs it is not out of the race."""
    jobs = [waiting(1, 6, Demand(gpus=1, cpus=2)), waiting(2, 4)]
    plan = plan_of(BACKFILL, [make_node("n1", 0), make_node("n2", 4)], jobs)
    assert started(plan) == []
    assert "next in line, when the running jobs end" in plan.decisions[0].reason


def test_las_stops_no_job_of_which_it_does_not_know_all_that_it_holds() -> None:
    known = running(1, [("n1", 4)], attained_gpu_s=9_000.0, running_s=900.0)
    for hidden, expected in ((0, (job_id(1),)), (12, ())):
        plan = plan_of(
            LAS, [make_node("n1", 0)], [JobView(replace(known.card, hidden_ranks=hidden), NOW_S), waiting(2, 4)]
        )
        assert tuple(entry.job_id for entry in plan.decisions if entry.taker == job_id(2)) == expected


@pytest.mark.parametrize("name", ["srtf", "tiresias"])
def test_a_place_that_somebody_may_have_is_no_place(name: str) -> None:
    """The first job runs on n2 as well, which its card was too small to name."""
    first = running(1, [("n1", 4)], hidden_nodes=1, hidden_ranks=4, time_limit_s=100.0, attained_gpu_s=10.0)
    old = running(2, [("n3", 4)], attained_gpu_s=90_000.0, running_s=9_000.0, time_limit_s=1e6)
    nodes = [make_node(each, 0) for each in ("n1", "n2", "n3")]
    plan = plan_of(PolicySetting(name), nodes, [first, old, waiting(3, 4, time_limit_s=50.0)])
    assert actions(plan) == {job_id(1): "keep", job_id(2): "stop", job_id(3): "wait"}
    assert [each.taker for each in plan.decisions if each.change is Change.STOP] == [job_id(3)]


def test_who_starts_on_what_is_free_is_not_whom_others_make_room_for() -> None:
    old = running(1, [("n2", 4)], time_limit_s=1e6)
    jobs = [old, waiting(2, 4, time_limit_s=100.0), waiting(3, 1, time_limit_s=50.0)]
    plan = plan_of(PolicySetting("srtf"), [make_node("n1", 1, 1), make_node("n2", 0)], jobs)
    assert actions(plan) == {job_id(1): "stop", job_id(2): "wait", job_id(3): "start"}
    assert [each.taker for each in plan.decisions if each.change is Change.STOP] == [job_id(2)]


def test_a_node_that_offers_less_than_is_booked_there_takes_nothing_from_the_others() -> None:
    room = Room([make_node("n1", 4, cpus=4), make_node("n2", 2, cpus=8)])
    demand = Demand(gpus=1, cpus=2)
    room.take([Share(NodeId("n1"), 4)], demand)
    assert room.free(NodeId("n1")).cpus == 0
    assert room.fits(demand) == {NodeId("n2"): 2}
    assert room.ranks(demand) == 2


@pytest.mark.parametrize("policy", [FIFO, PolicySetting("backfill"), LAS, PolicySetting("swarm")])
def test_a_submit_time_that_no_clock_tells_comes_last_and_fails_no_plan(policy: PolicySetting) -> None:
    """A card may carry it; a rank key holds whole milliseconds below 2^53."""
    jobs = (waiting(1, 2, submitted_utc_s=1e18), waiting(2, 1))
    plan = plan_anyway(policy, ClusterView(7, (make_node("n1", 2),), jobs), NOW_S)
    assert not plan.fault
    assert started(plan) == [job_id(2)]


def test_las_starts_nobody_where_another_is_to_run_once_room_is_made() -> None:
    old = running(1, [("n1", 2)], attained_gpu_s=9_000.0, running_s=900.0)
    plan = plan_of(LAS, [make_node("n1", 2)], [old, waiting(2, 4), waiting(3, 1)])
    assert actions(plan) == {job_id(1): "stop", job_id(2): "wait", job_id(3): "wait"}


def test_las_orders_by_attained_class_and_within_it_by_first_start() -> None:
    jobs = [
        waiting(1, 1, attained_gpu_s=4_000.0, first_started_utc_s=50.0),
        waiting(2, 1),
        waiting(3, 1, attained_gpu_s=100.0, first_started_utc_s=90.0),
        waiting(4, 1, attained_gpu_s=200.0, first_started_utc_s=80.0),
        waiting(5, 1, attained_gpu_s=9_000.0, first_started_utc_s=10.0, priority=1),
    ]
    plan = plan_of(LAS, [make_node("n1", 0)], jobs)
    assert [entry.job_id for entry in plan.decisions] == [job_id(n) for n in (5, 4, 3, 2, 1)]


@pytest.mark.parametrize(
    ("attained", "service_class"), [(0.0, 0), (3_249.9, 0), (3_250.0, 1), (7_199.0, 1), (7_200.0, 2), (1e9, 2)]
)
def test_las_demotes_a_job_that_reaches_a_threshold(attained: float, service_class: int) -> None:
    policy = PolicySetting("las", {"threshold2_gpu_s": 7_200.0, "promote_knob": 0.0})
    assert rank_key(policy, waiting(1, 1, attained_gpu_s=attained))[1] == service_class


def test_las_promotes_a_job_that_waited_eight_times_as_long_as_it_ran() -> None:
    ran: dict[str, Any] = {"attained_gpu_s": 8_000.0, "first_started_utc_s": 1.0}
    assert rank_key(LAS, waiting(1, 2, queued_s=31_999.0, **ran))[1] == 1
    assert rank_key(LAS, waiting(1, 2, queued_s=32_000.0, **ran))[1] == 0
    never = PolicySetting("las", {"promote_knob": 0.0})
    assert rank_key(never, waiting(1, 2, queued_s=1e9, **ran))[1] == 1


def test_las_lets_smaller_jobs_pass_what_does_not_fit_and_stops_nothing() -> None:
    jobs = [running(9, [("n1", 2)], attained_gpu_s=1e6), waiting(1, 4), waiting(2, 2)]
    plan = plan_of(LAS, [make_node("n1", 2)], jobs)
    assert started(plan) == [job_id(2)]
    assert actions(plan)[job_id(9)] == "keep"


def test_las_runs_the_published_example_in_its_order_as_far_as_nothing_is_stopped() -> None:
    """Two GPUs, jobs of (2 GPUs, 2 s), (1, 8), (2, 6) at time 0: without preemption each runs to its end, and the
    finish times are those of 2D-LAS cut to whole runs: 2, 10 and 16."""
    lengths = {1: 2, 2: 8, 3: 6}
    sizes = {1: 2, 2: 1, 3: 2}
    left = dict(lengths)
    finished: dict[int, int] = {}
    going: list[int] = []
    for now in range(30):
        finished |= {number: now for number in going if left[number] == 0}
        going = [number for number in going if left[number]]
        free = 2 - sum(sizes[number] for number in going)
        jobs = [waiting(number, sizes[number]) for number in left if left[number] and number not in going]
        jobs += [running(number, [("n1", sizes[number])], attained_gpu_s=1.0) for number in going]
        plan = plan_of(LAS, [make_node("n1", free, total=2)], jobs)
        going += [number for number in lengths if job_id(number) in started(plan)]
        for number in going:
            left[number] -= 1
    assert finished == {1: 2, 2: 10, 3: 16}


@pytest.mark.parametrize("name", [kind.name for kind in POLICIES.values() if kind.order])
def test_rank_keys_have_at_most_four_small_non_negative_integers(name: str) -> None:
    for view in (waiting(1, 1, priority=-1_000), waiting(2, 64, priority=1_000, attained_gpu_s=1e15), running(3, [])):
        key = rank_key(PolicySetting(name), view)
        assert len(key) <= 4
        assert all(isinstance(part, int) and 0 <= part <= 2**53 for part in key)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (PolicySetting("backfil"), "policy: there is no policy 'backfil'; did you mean 'backfill'?"),
        (
            PolicySetting("las", {"promote_nob": 1.0}),
            "parameters.promote_nob: las has no parameter 'promote_nob'; did you mean 'promote_knob'?",
        ),
        (PolicySetting("fifo", {"x": 1.0}), "parameters.x: fifo has no parameter 'x'"),
        (PolicySetting("las", {"promote_knob": -1.0}), "parameters.promote_knob: -1.0 is out of range"),
        (PolicySetting("las", {"threshold1_gpu_s": math.nan}), "parameters.threshold1_gpu_s: nan is out of range"),
    ],
)
def test_a_bad_setting_names_field_value_and_the_nearest_match(setting: PolicySetting, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_setting(setting)
    assert str(caught.value).startswith(message)
    assert caught.value.remedy


def test_policy_ids_differ_with_parameters() -> None:
    names = [kind.name for kind in POLICIES.values()]
    assert [policy_id(PolicySetting(name)) for name in names] == names
    assert policy_id(PolicySetting("las", {"threshold1_gpu_s": 100.0})) == "las:100"
    assert policy_id(PolicySetting("las", {"minimum_run_s": 60.0})) == "las:3250:0:0:8:1:60"
    assert policy_id(PolicySetting("las", {"threshold1_gpu_s": 3_250.0})) == "las"
    long = {spec.name: 123_456.7 if spec.high > 1e6 else spec.high for spec in POLICIES["las"].parameters}
    assert len(policy_id(PolicySetting("las", long))) <= 63


node_views = st.lists(
    st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from(["A100", "T4"]), st.integers(0, 8)),
    min_size=1,
    max_size=5,
)
job_views = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.sampled_from(
            [Demand(gpus=1), Demand(gpus=2), Demand(gpus=1, gpu_type="t4"), Demand(cpus=3), Demand(gpus=1, cpus=2)]
        ),
        st.sampled_from([0.0, 50.0, 500.0]),
        st.integers(-1, 1),
    ),
    max_size=8,
)
held_jobs = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.sampled_from([0.0, 60.0, 300.0])), max_size=4)


def build(
    nodes: list[tuple[int, bool, str, int]],
    jobs: list[tuple[int, Demand, float, int]],
    held: list[tuple[int, int, float]],
) -> ClusterView:
    """A consistent view: what running jobs hold is not free."""
    free = [4] * len(nodes)
    live = []
    for number, (index, ranks, limit_s) in enumerate(held):
        index %= len(nodes)
        ranks = min(ranks, free[index])
        if ranks:
            free[index] -= ranks
            live.append(running(1_000 + number, [(f"n{index}", ranks)], time_limit_s=limit_s))
    live += [
        waiting(number, ranks, demand, time_limit_s=limit_s, priority=priority)
        for number, (ranks, demand, limit_s, priority) in enumerate(jobs)
    ]
    views = []
    for index, (_, is_available, model, cpus) in enumerate(nodes):
        now, most = Free(gpus(free[index], model), cpus, 2**38), Free(gpus(4, model), cpus, 2**38)
        views.append(NodeView(NodeId(f"n{index}"), now, most, 4, is_available))
    return ClusterView(1, tuple(views), tuple(live))


@settings(max_examples=150, deadline=None)
@given(nodes=node_views, jobs=job_views, held=held_jobs, name=st.sampled_from(list(POLICIES)))
def test_no_plan_starts_more_than_fits(
    nodes: list[tuple[int, bool, str, int]],
    jobs: list[tuple[int, Demand, float, int]],
    held: list[tuple[int, int, float]],
    name: str,
) -> None:
    view = build(nodes, jobs, held)
    plan = compute_plan(PolicySetting(name), view, NOW_S)
    by_id = {job.job_id: job for job in view.jobs}
    free = {each.node: each.free for each in view.nodes if each.is_available}
    for entry in plan.decisions:
        job = by_id[entry.job_id]
        if entry.change is not Change.START:
            continue
        assert world_size(entry.target.shares) == job.ranks
        for share in entry.target.shares:
            left = free[share.node]
            assert fits(left, job.demand, share.ranks)
            count = left.gpu_count - share.ranks * job.demand.gpus
            unused = gpus(count, left.gpus[0].model) if count else ()
            free[share.node] = Free(unused, left.cpus - share.ranks * job.demand.cpus, left.memory_bytes)
    assert sorted(by_id) == sorted(entry.job_id for entry in plan.decisions)
    assert all(entry.reason for entry in plan.decisions)


@settings(max_examples=100, deadline=None)
@given(nodes=node_views, jobs=job_views, held=held_jobs)
def test_fifo_never_passes_the_head(
    nodes: list[tuple[int, bool, str, int]],
    jobs: list[tuple[int, Demand, float, int]],
    held: list[tuple[int, int, float]],
) -> None:
    plan = compute_plan(FIFO, build(nodes, jobs, held), NOW_S)
    queue = [entry.change for entry in plan.decisions if entry.change is not Change.KEEP]
    assert queue == sorted(queue, key=lambda action: action is Change.WAIT)


@settings(max_examples=200, deadline=None)
@given(nodes=node_views, jobs=job_views, held=held_jobs)
def test_backfill_never_delays_the_heads_reservation(
    nodes: list[tuple[int, bool, str, int]],
    jobs: list[tuple[int, Demand, float, int]],
    held: list[tuple[int, int, float]],
) -> None:
    """The first job that waits can start no later with the backfilled jobs running than without them."""
    view = build(nodes, jobs, held)
    plan = compute_plan(BACKFILL, view, NOW_S)
    waits = [index for index, entry in enumerate(plan.decisions) if entry.change is Change.WAIT]
    if not waits:
        return
    by_id = {job.job_id: job for job in view.jobs}
    head = by_id[plan.decisions[waits[0]].job_id]
    before = [entry for entry in plan.decisions[: waits[0]] if entry.change is Change.START]
    after = [entry for entry in plan.decisions if entry.change is Change.START]
    assert earliest_start(view, head, [(by_id[e.job_id], e.target.shares) for e in after]) <= earliest_start(
        view, head, [(by_id[e.job_id], e.target.shares) for e in before]
    )


def earliest_start(view: ClusterView, head: JobView, begun: list[tuple[JobView, tuple[Share, ...]]]) -> float:
    """Brute force, in GPUs and cores per node (each node has one model)."""
    free = {each.node: [each.free.gpu_count, each.free.cpus] for each in view.nodes if each.is_available}
    models = {each.node: each.capacity.gpus[0].model for each in view.nodes}
    ends = [(job.card.time_limit_s or math.inf, job, job.shares) for job in view.jobs if job.shares]
    for job, shares in begun:
        ends.append((job.card.time_limit_s or math.inf, job, shares))
        for share in shares:
            free[share.node][0] -= share.ranks * job.demand.gpus
            free[share.node][1] -= share.ranks * job.demand.cpus

    def can_start() -> bool:
        held: Counter[str] = Counter()
        for name, left in free.items():
            there = Free(gpus(left[0], models[name]), left[1], 2**38)
            held[models[name] if head.demand.gpus else ""] += ranks_that_fit(there, head.demand)
        return head.ranks <= max(held.values(), default=0)

    if can_start():
        return 0.0
    for end_s, job, shares in sorted(ends, key=lambda item: item[0]):
        for share in shares:
            if share.node in free:
                free[share.node][0] += share.ranks * job.demand.gpus
                free[share.node][1] += share.ranks * job.demand.cpus
        if can_start() and end_s < math.inf:
            return end_s
    return math.inf
