"""apply_patch_ and exchange_patch_: what is written where, for every dtype and number of changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import DIFF_DTYPES, all_same_bits, random_bits, random_positions, same_bits, seeds, sizes

import pulse_kernels as pk


@given(
    numel=sizes,
    changes=st.one_of(st.integers(0, 300), st.sampled_from([16384, 16385, 70000])),
    seed=seeds,
    dtype=st.sampled_from(DIFF_DTYPES),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_a_patch_sets_its_positions_and_nothing_else(numel, changes, seed, dtype, index_dtype):
    weight = random_bits(numel, dtype, seed)
    indices = random_positions(changes, numel, seed, index_dtype)
    values = random_bits(indices.numel(), dtype, seed + 1)
    expected = weight.view(torch.uint8).clone().view(dtype)
    expected[indices.long()] = values
    old = weight[indices.long()]

    applied = weight.clone()
    pk.apply_patch_(applied, indices, values)
    assert same_bits(applied, expected)

    exchanged = weight.clone()
    assert same_bits(pk.exchange_patch_(exchanged, indices, values), old)
    assert same_bits(exchanged, expected)
    pk.apply_patch_(exchanged, indices, old, check=False)  # the undo
    assert same_bits(exchanged, weight)


def test_a_worked_example():
    weight = torch.zeros(2, 3)
    pk.apply_patch_(weight, torch.tensor([1, 5]), torch.tensor([7.0, -0.0]))
    assert weight.tolist() == [[0, 7, 0], [0, 0, 0]]
    assert str(weight[1, 2].item()) == "-0.0"
    old = pk.exchange_patch_(weight, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1.0, 2.0]))
    assert old.tolist() == [0, 7]
    assert weight.tolist() == [[1, 2, 0], [0, 0, 0]]


@given(seed=seeds)
def test_what_a_gate_finds_makes_the_receiver_equal(seed):
    master = random_bits(3000, torch.float32, seed)
    weight = random_bits(3000, torch.bfloat16, seed)
    receiver = weight.clone()
    indices, values = pk.gate_compact(master, weight, update=True)
    pk.apply_patch_(receiver, indices, values)
    assert same_bits(receiver, weight)


@pytest.mark.parametrize("check", [True, False])
def test_many_is_each_in_turn(check, threads):
    numels = [0, 1, 70000, 300]
    weights = [random_bits(n, dtype, n) for n, dtype in zip(numels, DIFF_DTYPES[:4], strict=True)]
    indices = [random_positions(n // 3 + 1, n, n, torch.int32) for n in numels]
    values = [random_bits(i.numel(), w.dtype, 9) for i, w in zip(indices, weights, strict=True)]
    expected = [weight.clone() for weight in weights]
    old = [pk.exchange_patch_(w, i, v) for w, i, v in zip(expected, indices, values, strict=True)]

    applied = [weight.clone() for weight in weights]
    pk.apply_patch_many_(applied, indices, values, check=check)
    assert all_same_bits(applied, expected)

    exchanged = [weight.clone() for weight in weights]
    assert all_same_bits(pk.exchange_patch_many_(exchanged, indices, values, check=check), old)
    assert all_same_bits(exchanged, expected)


def test_nothing_in_nothing_out():
    pk.apply_patch_many_([], [], [])
    assert pk.exchange_patch_many_([], [], []) == []
    empty = torch.zeros(0, dtype=torch.int64)
    assert pk.exchange_patch_(torch.zeros(0), empty, torch.zeros(0)).shape == (0,)
    weight = torch.ones(3)
    pk.apply_patch_(weight, empty, torch.zeros(0))
    assert weight.tolist() == [1, 1, 1]
