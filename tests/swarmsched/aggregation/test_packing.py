"""Packing: what goes together stays within what there is, and nobody loses more than was promised."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmsched.aggregation.packing import LOSS_MOST, Capacity, idle, pack, packs_in_cycle, problem, wait_s
from swarmsched.shards import ShardLoad

CORE = Capacity(1.0)
NARROW = Capacity(1.0, 1e8)


def burst(cpu_s: float, period_s: float, link_bytes: float = 0.0) -> ShardLoad:
    return ShardLoad(cpu_s, link_bytes, period_s)


periods = st.one_of(st.sampled_from((0.2, 0.3, 0.4, 0.6, 0.8)), st.floats(0.1, 2_000))
loads = st.builds(
    lambda period_s, busy, link: burst(busy * period_s, period_s, link * period_s),
    periods,
    st.floats(0.001, 1.0),
    st.floats(0, 1e8),
)
jobs = st.lists(st.tuples(st.sampled_from("abcdef"), loads), max_size=12)


@settings(max_examples=60, deadline=None)
@given(jobs)
def test_each_shard_has_one_place_no_aggregator_is_over_full_and_no_job_loses_more_than_its_limit(drawn):
    packed = pack(drawn, NARROW, packs_in_cycle)
    assert sorted(place for each in packed for place in each) == list(range(len(drawn)))
    for places in packed:
        together = [drawn[place][1] for place in places]
        cycle_s = max(each.period_s for each in together)
        rounds = [math.floor(cycle_s / each.period_s + 1e-9) for each in together]
        assert sum(n * each.cpu_s for n, each in zip(rounds, together, strict=True)) <= cycle_s * (1 + 1e-6)
        assert sum(n * each.link_bytes for n, each in zip(rounds, together, strict=True)) <= 1e8 * cycle_s * (1 + 1e-6)
        for n, each in zip(rounds, together, strict=True):
            assert cycle_s / (n * each.period_s) - 1 <= LOSS_MOST + 1e-6


@settings(max_examples=60, deadline=None)
@given(jobs)
def test_what_may_be_hosted_together_is_within_the_averages_and_hardly_waits(drawn):
    for places in pack(drawn, NARROW, lambda loads, capacity: not problem(loads, capacity)):
        together = [drawn[place][1] for place in places]
        assert sum(each.cores for each in together) <= 1 + 1e-6
        assert sum(each.link_bytes_per_s for each in together) <= 1e8 * (1 + 1e-6)
        for each in together:
            others = [other for other in together if other is not each]
            assert wait_s(others, NARROW) <= LOSS_MOST * each.period_s


@settings(max_examples=40, deadline=None)
@given(st.lists(loads, min_size=1, max_size=6))
def test_what_fits_also_fits_without_one_of_them(drawn):
    if packs_in_cycle(drawn, NARROW):
        assert all(packs_in_cycle([drawn[place]], NARROW) for place in range(len(drawn)))
    if not problem(drawn, NARROW):
        assert not problem(drawn[1:], NARROW)


def test_a_link_counts_as_cores_do():
    assert packs_in_cycle([burst(0.1, 1.0, 0.5e8)] * 2, NARROW)
    assert not packs_in_cycle([burst(0.1, 1.0, 0.5e8)] * 3, NARROW)
    assert "link" in problem([burst(0.001, 1.0, 0.5e8)] * 3, NARROW)


def test_periods_that_do_not_go_into_one_another_are_refused_by_cycles_and_not_by_waits():
    """30 s beside 50 s would train each 50 s; two bursts of a second wait for one another for a second at most."""
    together = [burst(1.0, 30.0), burst(1.0, 50.0)]
    assert not packs_in_cycle(together, CORE)
    assert packs_in_cycle([burst(1.0, 25.0), burst(1.0, 50.0)], CORE)
    assert problem(together, CORE) == ""
    assert "would wait" in problem([burst(1.0, 2.0), burst(0.9, 2.0)], CORE)


def test_the_fullest_that_suffices_is_chosen_and_the_one_that_serves_the_job_before_it():
    first, second, small = burst(0.6, 1.0), burst(0.5, 1.0), burst(0.1, 1.0)
    assert pack([("a", first), ("b", second), ("c", small)], CORE, packs_in_cycle) == [[0, 2], [1]]
    assert pack([("a", first), ("b", second), ("b", small)], CORE, packs_in_cycle) == [[0], [1, 2]]
    assert idle([first, small], CORE) == 300


def test_what_fits_nowhere_has_an_aggregator_to_itself():
    assert pack([("a", burst(3.0, 1.0)), ("b", burst(0.1, 1.0))], CORE, packs_in_cycle) == [[0], [1]]


@pytest.mark.parametrize("count", [1, 5, 50])
def test_waits_grow_with_what_else_there_is_and_end_where_it_never_ends(count):
    some, more = wait_s([burst(0.1, 10.0)] * count, CORE), wait_s([burst(0.1, 10.0)] * (count + 1), CORE)
    assert some <= more <= 0.1 * (count + 1)
    assert wait_s([burst(1.0, 1.0)] * count, CORE) == math.inf
