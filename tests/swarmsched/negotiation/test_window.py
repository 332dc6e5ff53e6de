"""How much may be under way: less after late answers, more after timely ones, and never held up by what is lost."""

import pytest

from swarmsched.negotiation.window import GIVEN_UP_S, LATE_S, LIMIT_MAX, LIMIT_MIN, LIMIT_START, Window


def fill(window, now_s, prefix="k"):
    count = 0
    while not window.is_full(now_s):
        window.begun(f"{prefix}{count}", now_s)
        count += 1
    return [f"{prefix}{number}" for number in range(count)]


@pytest.fixture
def window():
    return Window()


def test_as_much_is_begun_as_the_limit_says(window):
    assert len(fill(window, 0.0)) == LIMIT_START
    window.ended("k0", 0.1)
    assert not window.is_full(0.1)


def test_a_round_of_late_answers_halves_it_once(window):
    for key in fill(window, 0.0):
        window.ended(key, LATE_S + 0.1)
    assert window.limit == LIMIT_START / 2


def test_what_is_silent_for_long_counts_as_late_before_it_is_answered(window):
    fill(window, 0.0)
    assert window.is_full(LATE_S + 0.1)
    assert window.limit == LIMIT_START / 2


def test_each_round_of_late_answers_halves_it_down_to_a_minimum(window):
    now_s = 0.0
    for _ in range(10):
        keys = fill(window, now_s)
        now_s += LATE_S + 0.1
        for key in keys:
            window.ended(key, now_s)
        now_s += 0.1
    assert window.limit == LIMIT_MIN


def test_a_full_round_of_timely_answers_adds_one(window):
    for key in fill(window, 0.0):
        window.ended(key, 0.1)
        window.begun(f"{key} again", 0.1)
    assert window.limit == pytest.approx(LIMIT_START + 1, abs=0.1)


def test_it_grows_to_a_limit_and_only_while_it_is_used(window):
    for number in range(1_000):
        window.begun(number, 0.0)
        window.ended(number, 0.1)
    assert window.limit == LIMIT_START
    for number in range(100_000):
        fill(window, 0.0, f"{number} ")
        window.begun(number, 0.0)
        window.ended(number, 0.1)
    assert window.limit == LIMIT_MAX


def test_what_is_lost_holds_nothing_up_for_ever(window):
    fill(window, 0.0)
    assert window.opens_s == GIVEN_UP_S
    assert not window.is_full(GIVEN_UP_S)
    window.ended("k0", GIVEN_UP_S)
    assert window.limit == LIMIT_START / 2


def test_what_is_forgotten_says_nothing(window):
    window.begun("k", 0.0)
    window.forget("k")
    window.ended("k", LATE_S + 0.1)
    assert window.limit == LIMIT_START
    assert window.opens_s == float("inf")
