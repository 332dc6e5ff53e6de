"""How many steps lie between rounds: the fewest that let a round take a twentieth of their time, found step by step."""

from random import Random

import pytest

from swarmsched.aggregation.tempo import EVERY_LEAST, EVERY_MOST, ROUNDS, SHARE, Tempo, next_every


@pytest.mark.parametrize(
    ("every", "cost", "following"),
    [
        (64, 3.3, 128),
        (64, 3.1, 64),
        (64, 1.7, 64),
        (64, 1.5, 32),
        (64, 1e9, 128),
        (512, 1e9, 512),
        (400, 1e9, 512),
        (8, 0.0, 8),
        (12, 0.0, 8),
        (1, 0.0, 1),
        (1_000, 0.0, 500),
        (1_000, 1e9, 1_000),
    ],
)
def test_it_is_doubled_or_halved_within_its_bounds(every, cost, following):
    assert next_every(every, [cost]) == following


def test_it_changes_after_ten_rounds_by_their_median_and_by_the_learner_that_waited_least():
    tempo = Tempo(64)
    for _ in range(ROUNDS - 1):
        tempo.merged([50.0, 4.0, -1.0])
    assert tempo.every == 64
    tempo.merged([0.0])
    assert tempo.every == 128
    for _ in range(ROUNDS):
        tempo.merged([])  # nobody tells: nothing is known
        tempo.merged([-1.0])
    assert tempo.every == 128


@pytest.mark.parametrize("seed", range(20))
def test_it_comes_to_rest_where_rounds_cost_what_they_may_and_half_the_steps_would_cost_more(seed):
    """Rounds cost the same at any tempo, and a learner that is slow makes all others wait in proportion to it."""
    chance = Random(seed)
    tempo, cost, slower = Tempo(chance.choice([8, 64, 512])), chance.expovariate(0.2), chance.uniform(0, 0.5)
    seen = []
    for _ in range(8 * ROUNDS):
        tempo.merged([cost, cost + slower * tempo.every])
        seen.append(tempo.every)
    assert len(set(seen[-2 * ROUNDS :])) == 1
    assert EVERY_LEAST <= tempo.every <= EVERY_MOST
    assert cost <= SHARE * tempo.every or tempo.every == EVERY_MOST
    assert cost > SHARE * tempo.every / 2 or tempo.every == EVERY_LEAST
