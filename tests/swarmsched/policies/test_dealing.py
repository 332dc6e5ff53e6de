"""GPUs are dealt where they are worth most in sum: exactly where they are few, nearly so where they are many."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmsched.policies.dealing import EXACT_GPUS, Bidder, deal

WORTH = st.floats(0.0, 100.0)
BIDDERS = st.lists(
    st.builds(
        lambda values, gpus: Bidder(np.array([0.0, *values]), gpus), st.lists(WORTH, max_size=6), st.integers(1, 3)
    ),
    max_size=4,
)


def worth(bidders: list[Bidder], ranks: list[int]) -> float:
    return float(sum([bidder.value[count] for bidder, count in zip(bidders, ranks, strict=True)]))


def used(bidders: list[Bidder], ranks: list[int]) -> int:
    return sum([bidder.gpus_per_rank * count for bidder, count in zip(bidders, ranks, strict=True)])


@given(BIDDERS, st.integers(0, 10))
def test_few_gpus_are_dealt_as_well_as_by_trying_everything(bidders: list[Bidder], gpus: int) -> None:
    ranks = deal(bidders, gpus)
    assert used(bidders, ranks) <= gpus
    every = product(*[range(len(bidder.value)) for bidder in bidders])
    best = max(worth(bidders, list(each)) for each in every if used(bidders, list(each)) <= gpus)
    assert worth(bidders, ranks) == pytest.approx(best)


def test_a_model_that_is_slower_on_one_more_gpu_is_given_several_more_at_once() -> None:
    assert deal([Bidder(np.array([0.0, 1.0, 0.5, 0.6, 3.0]), 1)], 4) == [4]
    assert deal([Bidder(np.array([0.0, 1.0, 0.5, 0.6, 3.0]), 1)], 3) == [1]


def test_nobody_wants_any() -> None:
    assert deal([], 10) == []
    assert deal([Bidder(np.zeros(5), 1)], 10) == [0]
    assert deal([Bidder(np.arange(5.0), 8)], 7) == [0]


@given(st.integers(0, 2**32 - 1))
def test_many_gpus_are_all_dealt_and_nearly_as_well_as_can_be(seed: int) -> None:
    rng, gpus = np.random.default_rng(seed), 3 * EXACT_GPUS
    gains = np.sort(rng.random((40, 16)), axis=1)[:, ::-1]
    bidders = [Bidder(np.concatenate(([0.0], each.cumsum())), 1) for each in gains]
    ranks = deal(bidders, gpus)
    assert used(bidders, ranks) == gpus
    best = np.sort(gains.ravel())[::-1][:gpus].sum()  # with gains that fall, the largest ones
    assert worth(bidders, ranks) == pytest.approx(best)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_few_gpus_among_many_are_dealt_as_well_as_by_the_plain_program(seed: int, gpus: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, 40)
    bidders = [Bidder(np.concatenate(([0.0], rng.normal(1.0, 1.0, 6).cumsum())), int(size)) for size in sizes]
    best = [0.0] * (gpus + 1)
    for each in bidders:
        best = [
            max(best[left - ranks * each.gpus_per_rank] + each.value[ranks] for ranks in range(most + 1))
            for left in range(gpus + 1)
            for most in [min(len(each.value) - 1, left // each.gpus_per_rank)]
        ]
    ranks = deal(bidders, gpus)
    assert used(bidders, ranks) <= gpus
    assert worth(bidders, ranks) == pytest.approx(best[gpus])
