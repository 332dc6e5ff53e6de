"""The Gittins index: its values for a known sample, and what it makes of a history."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.policies.gittins import Services
from swarmsched.policies.registry import compute_plan
from swarmsched.view import ClusterView, EndedJob, JobView, PolicySetting
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, ONE, actions, job, running, waiting

services_gpu_s = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("attained", "index"), [(0, 1 / 12), (2, 0.1), (4, 0.125), (6, 1 / 6), (8, 0.25), (10, 0.5), (12, 0.0)]
)
def test_the_index_of_a_small_sample(attained: float, index: float) -> None:
    assert Services([12.0, 4.0, 8.0]).index(attained, 4.0) == pytest.approx(index)


@pytest.mark.parametrize(("attained", "index"), [(0, 0.125), (2, 1 / 6), (4, 1 / 6), (8, 0.25)])
def test_the_largest_index_over_all_that_one_may_look_ahead(attained: float, index: float) -> None:
    sample = [4.0, 8.0, 12.0]
    services = Services(sample)
    ahead = [each - attained for each in sample if each > attained]
    assert max(services.index(attained, each) for each in ahead) == pytest.approx(index)


@given(sample=services_gpu_s, attained=st.floats(0.0, 1e6), ahead=st.floats(1.0, 1e6))
def test_the_index_is_the_ratio_of_its_definition(sample: list[float], attained: float, ahead: float) -> None:
    longer = [each for each in sample if each > attained]
    ending = [each for each in longer if each <= attained + ahead]
    expected_gpu_s = sum(min(each - attained, ahead) for each in longer)
    assert Services(sample).index(attained, ahead) == pytest.approx(len(ending) / expected_gpu_s if longer else 0.0)


def ended(*gpu_s: float) -> tuple[EndedJob, ...]:
    card = job(900, JobState.ENDED, 1, ONE).card
    return tuple(EndedJob(replace(card, attained_gpu_s=each), True, 1.0) for each in gpu_s)


def two_jobs(history: tuple[EndedJob, ...]) -> dict[str, str]:
    """One has run for 100 GPU-seconds, the other has just come; both need the only node, and are of one class."""
    old: JobView = running(1, [("n1", 4)], attained_gpu_s=100.0, first_started_utc_s=1.0)
    view = ClusterView(1, (make_node("n1", 0),), (old, waiting(2, 4)), history)
    return actions(compute_plan(PolicySetting("gittins", {"prior_jobs": 0.0}), view, NOW_S))


def test_an_index_beside_services_that_are_nearly_equal_is_not_divided_by_nothing() -> None:
    assert Services([3_600.0] * 70 + [3_600.0000000000005]).index(3_600.0, math.inf) > 0.0


def test_who_makes_room_follows_from_the_jobs_that_have_ended() -> None:
    assert two_jobs(ended(*[110.0] * 9)) == {job_id(1): "keep", job_id(2): "wait"}, "it is nearly done"
    assert two_jobs(ended(*[10.0] * 9, 9_000.0)) == {job_id(1): "stop", job_id(2): "wait"}, "it is the rare long one"
    assert two_jobs(()) == {job_id(1): "keep", job_id(2): "wait"}, "nobody knows: no reason to stop it"
