"""Deadlines of many keys: the earliest and those that are due, as a plain dictionary would tell them."""

import math
import random

import pytest

from swarmsched.deadlines import SLACK, Deadlines


@pytest.mark.parametrize("seed", range(5))
def test_the_earliest_and_the_due_are_those_of_a_dictionary(seed):
    rng = random.Random(seed)
    deadlines, plain = Deadlines(), {}
    for _ in range(2_000):
        key = rng.randrange(40)
        if rng.random() < 0.15:
            deadlines.drop(key)
            plain.pop(key, None)
        else:
            plain[key] = rng.choice([math.inf, float(rng.randrange(100))])
            deadlines.put(key, plain[key])
        assert deadlines.next_s == min(plain.values(), default=math.inf)
        now_s = rng.uniform(-1.0, 101.0)
        assert deadlines.due(now_s) == [key for key, at_s in plain.items() if at_s <= now_s]


def test_what_is_due_stays_due_until_it_is_put_again():
    deadlines = Deadlines()
    deadlines.put("b", 2.0)
    deadlines.put("a", 1.0)
    assert (deadlines.due(2.0), deadlines.due(2.0)) == (["b", "a"], ["b", "a"])
    deadlines.put("b", 5.0)
    assert (deadlines.due(2.0), deadlines.next_s) == (["a"], 1.0)


def test_a_key_that_is_put_again_and_again_takes_no_more_room():
    deadlines = Deadlines()
    for step in range(10_000):
        deadlines.put("only", float(step))
    assert len(deadlines._heap) <= SLACK + 3
    assert deadlines.next_s == 9_999.0
