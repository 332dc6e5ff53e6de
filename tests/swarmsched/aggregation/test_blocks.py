"""Vectors on their way: what quantising may lose, and that ends and pieces are as good as the middle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmsched.aggregation.blocks import BLOCK, LARGEST, PIECE, Blocks, block_count, empty, pieces

SIZES = st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])


def drawn(size: int, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    return (chance.standard_normal(size) * 10.0 ** chance.integers(-6, 4)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 2**31))
def test_no_element_is_off_by_more_than_half_a_step_of_its_block(size, seed):
    vector = drawn(size, seed)
    blocks = Blocks.quantised(vector)
    assert blocks.scales is not None
    assert len(blocks.scales) == block_count(size)
    steps = np.repeat(blocks.scales, BLOCK)[:size]
    assert (np.abs(blocks.piece(0, size) - vector) <= steps * np.float32(0.5001)).all()
    assert np.abs(blocks.values).max() == LARGEST


def test_pieces_cover_a_vector_and_are_quantised_as_the_whole_is():
    size = 2 * PIECE + BLOCK + 5
    vector = drawn(size, 3)
    whole, by_pieces = Blocks.quantised(vector), empty(size, is_quantised=True)
    bounds = list(pieces(size))
    assert [start for start, _ in bounds] == [0, PIECE, 2 * PIECE]
    for start, stop in bounds:
        by_pieces.put(start, vector[start:stop])
        assert np.array_equal(by_pieces.piece(start, stop), whole.piece(start, stop))
    assert bounds[-1][1] == size


def test_zeros_stay_zeros_and_float32_loses_nothing():
    assert not Blocks.quantised(np.zeros(3_000, np.float32)).piece(0, 3_000).any()
    plain = empty(3_000, is_quantised=False)
    plain.put(0, drawn(3_000, 1))
    assert np.array_equal(plain.piece(0, 3_000), drawn(3_000, 1))


@pytest.mark.parametrize("is_quantised", [True, False])
def test_the_norm_is_that_of_the_vector(is_quantised):
    vector = drawn(PIECE + 77, 5)
    blocks = Blocks.quantised(vector) if is_quantised else Blocks(vector)
    assert blocks.norm() == pytest.approx(float(np.linalg.norm(vector.astype(np.float64))), rel=1e-2)
