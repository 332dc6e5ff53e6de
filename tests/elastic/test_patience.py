"""A learner's patience: no more than the manual says, whatever comes late or never."""

from random import Random

import pytest

from swarm_elastic._patience import LIMIT_S, STEPS, Patience

EVERY = 16


def patience(step_s: float, *answers_s: float) -> Patience:
    found = Patience()
    found.stepped(step_s)
    for each in answers_s:
        found.answered(each)
    return found


def test_it_is_one_and_a_half_steps_longer_than_rounds_usually_take():
    assert patience(0.1).limit_s(EVERY) == pytest.approx(STEPS * 0.1)
    assert patience(0.1, 0.2).limit_s(EVERY) == pytest.approx(0.2 + STEPS * 0.1)
    assert patience(0.1, 0.2, 0.2, 60.0).limit_s(EVERY) == pytest.approx(0.2 + STEPS * 0.1)


def test_it_is_never_longer_than_the_steps_of_a_round_or_half_a_minute():
    assert patience(0.1, 0.05).limit_s(1) == pytest.approx(0.1)
    assert patience(10.0, 60.0).limit_s(EVERY) == LIMIT_S
    assert Patience().limit_s(EVERY) == 0.0


def test_rounds_that_were_missed_make_it_no_longer():
    """Their answers came with the next round, most of a round later."""
    period_s = EVERY * 0.1
    assert patience(0.1, 0.02, period_s, period_s, period_s).limit_s(EVERY) == pytest.approx(0.02 + STEPS * 0.1)
    assert patience(0.1, period_s).limit_s(EVERY) == pytest.approx(STEPS * 0.1)


@pytest.mark.parametrize("seed", range(20))
def test_rounds_that_never_come_make_it_no_longer(seed):
    """Whatever answers came before, from some moment on none comes any more."""
    chance = Random(seed)
    found, every = Patience(), chance.choice([1, 4, 64])
    for _ in range(chance.randrange(40)):
        found.stepped(0.1)
        if chance.random() < 0.3:
            found.answered(chance.expovariate(1))
    found.stepped(0.1)
    limit_s = found.limit_s(every)
    assert limit_s <= every * 0.1 * 1.001
    for _ in range(50):  # of waiting that came to nothing it is told nothing
        found.stepped(0.1)
        assert found.limit_s(every) == pytest.approx(limit_s)
