"""Deadlines: how pressing they are, the fewest ranks that meet them, and what is said of them."""

import pytest

from swarmsched.models.deadlines import Prospect, least_ranks, prospect, urgency
from swarmsched.view import Span


@pytest.mark.parametrize(
    ("within_s", "expected"),
    [(1_000.0, 0.0), (400.0, 0.0), (200.0, 1.0), (150.0, 1.5), (100.0, 2.0), (95.0, 2.0), (89.0, 0.0), (-5.0, 0.0)],
)
def test_a_deadline_presses_when_its_job_must_start_soon_and_not_once_it_cannot_be_met(
    within_s: float, expected: float
) -> None:
    assert urgency(within_s, 100.0, 100.0) == expected


def test_a_job_with_nothing_left_presses_nobody() -> None:
    assert urgency(0.0, 0.0, 0.0) == 0.0


@pytest.mark.parametrize(("within_s", "ranks"), [(100.0, 1), (60.0, 2), (34.0, 3), (33.0, 4), (24.0, 0), (0.0, 0)])
def test_the_fewest_ranks_are_enough_and_one_less_is_not(within_s: float, ranks: int) -> None:
    assert least_ranks(100.0, float, (1, 4), within_s) == ranks


def test_a_size_that_is_slower_than_a_smaller_one_is_passed_over() -> None:
    speed = {1: 1.0, 2: 0.5, 3: 2.0}
    assert least_ranks(100.0, lambda ranks: speed[ranks], (1, 3), 60.0) == 3


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (None, Prospect.UNKNOWN),
        (Span(90.0, 80.0, 100.0), Prospect.MET),
        (Span(90.0, 80.0, 101.0), Prospect.LIKELY),
        (Span(90.0, 80.0), Prospect.LIKELY),
        (Span(101.0, 80.0, 120.0), Prospect.LATE),
    ],
)
def test_what_is_said_of_a_deadline_in_a_hundred_seconds(end: Span | None, said: Prospect) -> None:
    assert prospect(end, 100.0) is said
