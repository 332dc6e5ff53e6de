"""What ended jobs tell of the lengths of others."""

import random
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import JobCard
from swarmsched.models.lengths import LIMIT_USED, Lengths, lengths_of
from swarmsched.resources import Demand
from swarmsched.view import EndedJob
from tests.swarmsched.policies.test_policies import job

ONE_GPU = Demand(gpus=1)


def card(number: int = 0, ranks: int = 1, **more: Any) -> JobCard:
    return job(number, JobState.QUEUED, ranks, ONE_GPU, **{"user": "ada", **more}).card


def ended(number: int, length_s: float, ranks: int = 1, **more: Any) -> EndedJob:
    return EndedJob(card(number, ranks, attained_gpu_s=length_s * ranks, **more), True, 0.0)


def lognormal(count: int, median_s: float, deviation: float, **more: Any) -> list[EndedJob]:
    rng = random.Random(count)
    return [ended(number, median_s * rng.lognormvariate(0.0, deviation), **more) for number in range(count)]


def test_of_jobs_that_all_take_the_same_that_is_left_and_is_the_index() -> None:
    left = Lengths([ended(number, 600.0) for number in range(400)]).left(card(), 0.0, 0.0)
    assert left.index_s == pytest.approx(600.0, rel=0.05)
    assert left.low_s - 1.0 <= 600.0 <= left.high_s + 1.0
    later = Lengths([ended(number, 600.0) for number in range(400)]).left(card(), 400.0, 400.0)
    assert later.index_s == pytest.approx(200.0, rel=0.2)


def test_where_lengths_spread_widely_who_has_had_much_has_much_left_and_stands_behind() -> None:
    lengths = Lengths(lognormal(300, 600.0, 2.0))
    index_s = [lengths.left(card(), had_s, had_s).index_s for had_s in (0.0, 600.0, 6_000.0, 60_000.0)]
    assert index_s[1:] == sorted(index_s[1:])
    assert index_s[3] > 10 * index_s[0]


def test_what_ones_own_user_program_and_size_tell_counts_before_what_all_do() -> None:
    others = [ended(number, 10_000.0, user="bob") for number in range(100)]
    own = [ended(number, 60.0, name="eval") for number in range(100, 140)]
    wide = [ended(number, 500.0, 8, user="bob") for number in range(140, 240)]
    lengths = Lengths([*others, *own, *wide])
    medians = [lengths.left(each, 0.0, 0.0).index_s for each in (card(name="eval"), card(ranks=8), card(user="bob"))]
    assert medians == sorted(medians)
    assert medians[0] < 150.0
    assert lengths.left(card(program="new.py"), 0.0, 0.0).index_s < lengths.left(card(user="eve"), 0.0, 0.0).index_s


def test_who_edits_a_script_or_names_each_job_anew_goes_on_with_what_the_program_has_told() -> None:
    others = [ended(number, 9_000.0, program="pretrain.py#11") for number in range(100)]
    own = [ended(number, 60.0, program=f"eval.py#22@{number:08x}", name=f"run-{number}") for number in range(100, 140)]
    lengths = Lengths([*others, *own])
    assert lengths.left(card(program="eval.py#22@ffffffff", name="run-999"), 0.0, 0.0).index_s < 150.0
    assert lengths.left(card(program="eval.py#33"), 0.0, 0.0).index_s < 150.0
    assert lengths.left(card(program="pretrain.py#11@ffffffff", name="run-100"), 0.0, 0.0).index_s > 3_000.0


def test_jobs_that_are_alike_in_all_count_no_more_than_those_of_which_less_is_known() -> None:
    named = [ended(number, 60.0, program="a.py#1@2") for number in range(4)]
    plain = [ended(number, 60.0) for number in range(4)]
    alike = Lengths(named).left(card(program="a.py#1@2"), 0.0, 0.0)
    assert alike == Lengths(plain).left(card(), 0.0, 0.0)


def test_one_users_many_jobs_count_no_more_than_those_of_all_others() -> None:
    flood = [ended(number, 5.0, user="eve") for number in range(400)]
    others = [ended(number, 20_000.0, user=f"user{number}") for number in range(400, 500)]
    left = Lengths([*flood, *others]).left(card(user="zoe"), 0.0, 0.0)
    assert left.expected_s > 7_000.0


def test_a_time_limit_is_a_bound_and_an_estimate_only_until_the_users_own_jobs_tell() -> None:
    nothing = Lengths(())
    assert nothing.left(card(time_limit_s=60.0), 0.0, 0.0).high_s <= 66.0
    short, long = (nothing.left(card(time_limit_s=limit_s), 0.0, 0.0).index_s for limit_s in (1_000.0, 100_000.0))
    assert short < 3 * LIMIT_USED * 1_000.0 < long
    told = Lengths([ended(number, 300.0) for number in range(200)])
    assert told.left(card(time_limit_s=100_000.0), 0.0, 0.0).index_s == pytest.approx(300.0, rel=0.2)
    assert told.left(card(time_limit_s=600.0), 550.0, 550.0).expected_s <= 55.0


@given(
    told=st.lists(st.sampled_from([0.0, 1e-9, 1.0, 500.0, 1e7, 1e300]), max_size=40),
    had_s=st.sampled_from([0.0, 1e-3, 1.0, 1e4, 1e8, 1e300]),
    limit_s=st.sampled_from([0.0, 1e-3, 60.0, 1e9]),
)
def test_whatever_is_told_there_is_something_left_and_it_ends(told: list[float], had_s: float, limit_s: float) -> None:
    """Lengths of nothing, and for ever."""
    history = [ended(number, length_s) for number, length_s in enumerate(told)]
    left = Lengths(history).left(replace(card(), time_limit_s=limit_s), had_s, had_s)
    assert all(0.0 < each < inf for each in left)
    assert left.low_s <= left.high_s


def test_lengths_are_made_anew_only_when_something_has_ended() -> None:
    history = [ended(number, 600.0) for number in range(3)]
    first = lengths_of(history)
    assert lengths_of(tuple(history)) is first
    assert lengths_of(history[1:]) is not first
