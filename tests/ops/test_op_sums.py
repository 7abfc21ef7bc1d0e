"""Sums of sparse vectors, as PULSELoCo's exchange takes them: back ends agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import back_end, random_bits, random_positions, same_bits

from pulse_kernels.backends import reference


def test_by_hand():
    # At 7: 1 + 2^-24 is 1 (a tie, to even), and so is that + 2^-24. In the other order 2^-23 comes first: 1 + 2^-23.
    indices = [torch.tensor(row, dtype=torch.int32) for row in ([2, 7], [7, 9], [0, 7, 9])]
    tiny = 2.0**-24
    values = [torch.tensor(row) for row in ([-0.0, 1.0], [tiny, 5.0], [1e-45, tiny, -5.0])]
    found, sums = back_end().sum_entries(indices, values, 10)
    assert (found.tolist(), sums.tolist()) == ([0, 7], [1.401298464324817e-45, 1.0])
    assert found.dtype == torch.int32
    found, sums = back_end().sum_entries(indices[::-1], values[::-1], 10)
    assert (found.tolist(), sums[1].item()) == ([0, 7], 1 + 2.0**-23)


@given(
    numel=st.sampled_from([1, 7, 8, 9, 1000, 32767, 32768, 32769, 70000]),
    counts=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference(numel, counts, seed):
    indices = [random_positions(count, numel, seed + k, torch.int32) for k, count in enumerate(counts)]
    values = [random_bits(len(index), torch.float32, seed + 10 * k).nan_to_num() for k, index in enumerate(indices)]
    found, sums = back_end().sum_entries(indices, values, numel)
    expected = reference.sum_entries(indices, values, numel)
    assert found.tolist() == expected[0].tolist()
    assert same_bits(sums.nan_to_num(nan=0.5), expected[1].nan_to_num(nan=0.5))


def test_everything_fires_and_nothing_does():
    numel = 3 * 32768 + 5
    everywhere = torch.arange(numel, dtype=torch.int32)
    ones, nothing = torch.ones(numel), torch.empty(0)
    found, sums = back_end().sum_entries([everywhere, everywhere[:0], everywhere], [ones, nothing, ones], numel)
    assert torch.equal(found, everywhere)
    assert torch.equal(sums, 2 * ones)
    found, sums = back_end().sum_entries([everywhere, everywhere], [ones, -ones], numel)
    assert (found.numel(), sums.numel()) == (0, 0)
    found, sums = back_end().sum_entries([everywhere[:0]], [nothing], 0)
    assert (found.numel(), sums.numel()) == (0, 0)


def test_positions_out_of_range():
    if back_end() is reference:
        pytest.skip("an assertion of the compiled library")
    for position in (-1, 10):
        index = torch.tensor([position], dtype=torch.int32)
        with pytest.raises(RuntimeError, match="positions out of range"):
            back_end().sum_entries([index], [torch.ones(1)], 10)
