"""gate_compact, diff_compact and visibility_mask on random bits: against the reference and against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import (
    DIFF_DTYPES,
    EDGE_SIZES,
    GATE_DTYPES,
    all_same_bits,
    altered,
    densities,
    int_bits,
    random_bits,
    same_bits,
    seeds,
    sizes,
)

import pulse_kernels as pk
from pulse_kernels.backends import reference


def rounded(master, dtype):
    return reference.round_bits(master, dtype).view(dtype)


def reference_compact(op, source, target, index_dtype=torch.int32):
    return reference.compact(op, source, target, index_dtype, update=False)


@given(n=sizes, density=densities, seed=seeds, dtype=st.sampled_from(GATE_DTYPES))
def test_gate_agrees_with_the_reference(n, density, seed, dtype):
    master = random_bits(n, torch.float32, seed)
    weight = altered(rounded(master, dtype), density, seed)
    expected = reference_compact("gate_compact", master, weight)
    assert all_same_bits(pk.gate_compact(master, weight, return_old=True), expected)
    assert torch.equal(pk.visibility_mask(master, weight), int_bits(rounded(master, dtype)) != int_bits(weight))
    updated = weight.clone()
    assert all_same_bits(pk.gate_compact(master, updated, update=True, return_old=True), expected)
    assert same_bits(updated, rounded(master, dtype))


@given(n=sizes, density=densities, seed=seeds, dtype=st.sampled_from(DIFF_DTYPES))
def test_diff_agrees_with_the_reference(n, density, seed, dtype):
    old = random_bits(n, dtype, seed)
    new = altered(old, density, seed)
    expected = reference_compact("diff_compact", new, old)
    assert all_same_bits(pk.diff_compact(new, old, return_old=True), expected)
    updated = old.clone()
    assert all_same_bits(pk.diff_compact(new, updated, update=True, return_old=True), expected)
    assert same_bits(updated, new)


@given(n=sizes, density=densities, seed=seeds, dtype=st.sampled_from(GATE_DTYPES))
def test_gate_agrees_with_eager_pytorch(n, density, seed, dtype):
    master = random_bits(n, torch.float32, seed)
    master[master.isnan() | (master.abs() < 2**-126)] = 0.75  # where PyTorch's own casts depend on the machine
    cast = master.to(dtype)
    weight = altered(cast, density, seed)
    positions = (cast.view(torch.int16) != weight.view(torch.int16)).nonzero().squeeze(1)
    assert all_same_bits(pk.gate_compact(master, weight), (positions.int(), cast[positions]))


@given(n=sizes, density=densities, seed=seeds)
def test_diff_agrees_with_eager_pytorch(n, density, seed):
    old = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    new = altered(old, density, seed)
    positions = (new.view(torch.int32) != old.view(torch.int32)).nonzero().squeeze(1)
    assert all_same_bits(pk.diff_compact(new, old), (positions.int(), new[positions]))


def test_a_worked_example():
    # BF16 holds 1, 1.0078125, 1.015625, ... near 1: 1.004 rounds to 1.0078125, 1.003 to 1.
    master = torch.tensor([1.0, 1.004, 1.003, -0.0, 2.0])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 3.0], dtype=torch.bfloat16)
    indices, values, old = pk.gate_compact(master, weight, update=True, return_old=True)
    assert indices.tolist() == [1, 3, 4]
    assert values.tolist() == [1.0078125, -0.0, 2.0]
    assert old.tolist() == [1.0, 0.0, 3.0]
    assert weight.tolist() == [1.0, 1.0078125, 1.0, -0.0, 2.0]


def test_diff_compares_bits():
    nan, negative_nan = float("nan"), -float("nan")
    old = torch.tensor([0.0, nan, nan, 5.0])
    new = torch.tensor([-0.0, nan, negative_nan, 5.0])
    assert pk.diff_compact(new, old)[0].tolist() == [0, 2]


@pytest.mark.parametrize("asked", [None, torch.int32, torch.int64])
def test_index_dtype_is_int32_unless_asked_otherwise(asked):
    master, weight = torch.ones(70), torch.zeros(70, dtype=torch.bfloat16)
    calls = [
        pk.gate_compact(master, weight, index_dtype=asked),
        pk.gate_compact(master, weight.clone(), index_dtype=asked, update=True),
        pk.diff_compact(master, torch.zeros(70), index_dtype=asked),
        [column[0] for column in pk.gate_compact_many([master], [weight], index_dtype=asked)],
        [column[0] for column in pk.diff_compact_many([master], [torch.zeros(70)], index_dtype=asked)],
        pk.gate_residual(master, torch.zeros(70), torch.zeros(70), index_dtype=asked),
    ]
    for indices, *_ in calls:
        assert indices.dtype is (asked or torch.int32)
        assert indices.tolist() == list(range(70))


@pytest.mark.parametrize("n", EDGE_SIZES)
def test_every_number_of_threads_gives_the_same(n, threads):
    master = random_bits(n, torch.float32, n)
    weight = altered(rounded(master, torch.bfloat16), 0.3, n)
    expected = reference_compact("gate_compact", master, weight)
    assert all_same_bits(pk.gate_compact(master, weight, return_old=True), expected)
    updated = weight.clone()
    assert all_same_bits(pk.gate_compact(master, updated, update=True), expected[:2])
    assert same_bits(updated, rounded(master, torch.bfloat16))


def mixed_model(seed):
    """Empty, small and large tensors, BF16 and FP16 among them, each with its master."""
    shapes = [(0,), (3,), (64, 64), (), (70000,), (2, 0, 5), (300, 257)]
    masters, weights = [], []
    for k, shape in enumerate(shapes):
        master = random_bits(torch.Size(shape).numel(), torch.float32, seed + k)
        dtype = GATE_DTYPES[k % 2]
        masters.append(master.view(shape))
        weights.append(altered(rounded(master, dtype), 0.05, seed + k).view(shape))
    return masters, weights


@pytest.mark.parametrize("dtypes", ["one dtype", "both dtypes"])
def test_gate_many_is_the_gate_of_each(dtypes, threads):
    masters, weights = mixed_model(seed=1)
    if dtypes == "one dtype":
        weights = [weight.view(torch.bfloat16) for weight in weights]
    expected = [pk.gate_compact(m, w, return_old=True) for m, w in zip(masters, weights, strict=True)]
    for update in (False, True):
        columns = pk.gate_compact_many(masters, weights, update=update, return_old=True)
        for row, *got in zip(expected, *columns, strict=True):
            assert all_same_bits(got, row)
    for master, weight in zip(masters, weights, strict=True):
        assert same_bits(weight, rounded(master, weight.dtype).view(weight.shape))


def test_diff_many_is_the_diff_of_each(threads):
    old = [random_bits(n, dtype, n) for n, dtype in zip([0, 9, 4096, 70000, 300, 65, 64], DIFF_DTYPES, strict=True)]
    new = [altered(tensor, 0.2, 5) for tensor in old]
    expected = [pk.diff_compact(a, b, return_old=True) for a, b in zip(new, old, strict=True)]
    for update in (False, True):
        columns = pk.diff_compact_many(new, old, update=update, return_old=True)
        for row, *got in zip(expected, *columns, strict=True):
            assert all_same_bits(got, row)
    assert all_same_bits(old, new)


def test_nothing_in_nothing_out():
    assert pk.gate_compact_many([], []) == ([], [])
    assert pk.gate_compact_many([], [], update=True, return_old=True) == ([], [], [])
    assert pk.diff_compact_many([], []) == ([], [])
    assert pk.diff_compact_many([], [], return_old=True) == ([], [], [])
    assert pk.visibility_mask_many([], []) == []
