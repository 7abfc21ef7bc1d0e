"""digest and digest_update: the definition, and what follows from its being a sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import (
    DIFF_DTYPES,
    EDGE_SIZES,
    all_same_bits,
    altered,
    back_end,
    densities,
    int_bits,
    random_bits,
    same_bits,
    seeds,
    sizes,
)

import pulse_kernels as pk
from pulse_kernels.backends import reference

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
keys = st.integers(-(2**63), 2**63 - 1)


def mix(z):
    """The finaliser of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def weight_of(key, lane, position):
    """K(key, lane, i): an odd factor for the block of 256 times an odd factor of 32 bits for the place in it."""
    seed = mix(key + (lane + 1) * GOLDEN & MASK)
    block = mix(seed + (position // 256) * GOLDEN & MASK) | 1
    slot = mix((seed ^ MASK) + (position % 256) * GOLDEN & MASK) >> 32 | 1
    return block * slot & MASK


def defined(bits, key, start=0):
    """sum_i bits_i * K(key, start + i) mod 2^64 in Python's integers, as two signed lanes."""
    lanes = []
    for lane in (0, 1):
        total = sum(bit * weight_of(key, lane, start + i) for i, bit in enumerate(bits)) & MASK
        lanes.append(total - 2**64 if total >> 63 else total)
    return lanes


def unsigned_bits(tensor):
    return [bit % 2 ** (8 * tensor.element_size()) for bit in int_bits(tensor).tolist()]


def test_the_definition_by_hand():
    # One element with bits 1 at position 0 under key 0: the digest is K itself. Lane 0: seed = mix(golden), which is
    # SplitMix64's first output from state 0; the block factor is mix(seed) | 1.
    seed = 0xE220A8397B1DCDAF
    assert mix(GOLDEN) == seed
    expected = (mix(seed) | 1) * (mix(seed ^ MASK) >> 32 | 1) & MASK
    assert pk.digest(torch.tensor([1], dtype=torch.uint8), 0)[0].item() % 2**64 == expected


def test_a_literal_value():
    # BF16 0x3F80, 0xBF80, 0x0001, 0x7FC0 under key 1234567; the definition above gives these two lanes.
    tensor = torch.tensor([0x3F80, 0xBF80, 0x0001, 0x7FC0]).to(torch.uint16).view(torch.bfloat16)
    expected = [-2012309387669436259, 2701623041433591869]
    assert defined([0x3F80, 0xBF80, 0x0001, 0x7FC0], 1234567) == expected
    assert pk.digest(tensor, 1234567).tolist() == expected


@given(
    n=st.sampled_from([0, 1, 3, 255, 256, 257, 600]),
    seed=seeds,
    key=keys,
    start=st.sampled_from([0, 1, 255, 256, 2**31 - 5, 2**32 + 77, 2**61]),
    dtype=st.sampled_from(DIFF_DTYPES),
)
def test_it_is_what_it_is_defined_to_be(n, seed, key, start, dtype):
    tensor = random_bits(n, dtype, seed)
    assert pk.digest(tensor, key, start).tolist() == defined(unsigned_bits(tensor), key, start)


@given(n=sizes, seed=seeds, key=keys, start=st.integers(0, 1000), dtype=st.sampled_from(DIFF_DTYPES))
def test_it_agrees_with_the_reference(n, seed, key, start, dtype):
    tensor = random_bits(n, dtype, seed)
    assert torch.equal(pk.digest(tensor, key, start), reference.digest(tensor, key, start))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("fill", ["smallest", "largest", "ones"])
def test_the_largest_sums_there_are(dtype, fill):
    # Whatever partial sums a back end keeps, 256 elements of the largest magnitude must not overflow them.
    info = torch.iinfo(dtype)
    tensor = torch.full((512,), {"smallest": info.min, "largest": info.max, "ones": -1}[fill], dtype=dtype)
    for key in range(20):
        assert torch.equal(pk.digest(tensor, key), reference.digest(tensor, key, 0))


@given(n=sizes, cut=st.floats(0, 1), seed=seeds, key=keys, dtype=st.sampled_from(DIFF_DTYPES))
def test_slices_add_up(n, cut, seed, key, dtype):
    tensor = random_bits(n, dtype, seed)
    at = int(cut * n)
    parts = pk.digest(tensor[:at], key) + pk.digest(tensor[at:], key, at)
    assert torch.equal(parts, pk.digest(tensor, key))


@given(n=st.integers(1, 600), seed=seeds, key=keys)
def test_it_is_linear_in_the_bits(n, seed, key):
    a, b = random_bits(n, torch.int64, seed), random_bits(n, torch.int64, seed + 1)
    assert torch.equal(pk.digest(a + b, key), pk.digest(a, key) + pk.digest(b, key))
    assert torch.equal(pk.digest(a * 3, key), pk.digest(a, key) * 3)
    assert pk.digest(torch.zeros(n), key).tolist() == [0, 0]


@given(n=sizes, density=densities, seed=seeds, key=keys, dtype=st.sampled_from(DIFF_DTYPES))
def test_an_update_gives_what_a_new_digest_gives(n, density, seed, key, dtype):
    old = random_bits(n, dtype, seed)
    new = altered(old, density, seed)
    for index_dtype in (torch.int32, torch.int64):
        indices, values, old_values = pk.diff_compact(new, old, return_old=True, index_dtype=index_dtype)
        before = pk.digest(old, key)
        after = pk.digest_update(before, indices, old_values, values, key)
        assert torch.equal(after, pk.digest(new, key))
        assert torch.equal(before, pk.digest(old, key))  # a new tensor: the argument stays
        assert torch.equal(after, reference.digest_update(before, indices, old_values, values, key))


@given(seed=seeds, key=keys)
def test_the_order_of_updates_does_not_matter(seed, key):
    old = random_bits(1000, torch.bfloat16, seed)
    new = altered(old, 0.3, seed)
    indices, values, old_values = pk.diff_compact(new, old, return_old=True)
    digest = pk.digest(old, key)
    for pick in (slice(1, None, 2), slice(0, None, 2)):  # the odd entries first
        digest = pk.digest_update(digest, indices[pick], old_values[pick], values[pick], key)
    assert torch.equal(digest, pk.digest(new, key))


@given(n=st.integers(1, 1000), seed=seeds, key=keys, dtype=st.sampled_from(DIFF_DTYPES), data=st.data())
def test_one_changed_element_changes_both_lanes(n, seed, key, dtype, data):
    tensor = random_bits(n, dtype, seed)
    position = data.draw(st.integers(0, n - 1))
    bit = data.draw(st.integers(0, 0 if dtype is torch.bool else 8 * dtype.itemsize - 1))
    raw = int_bits(tensor)
    raw[position] ^= torch.tensor(1, dtype=raw.dtype) << bit
    changed = pk.digest(raw.view(dtype), key) != pk.digest(tensor, key)
    assert changed.tolist() == [True, True]


@given(seed=seeds, key=keys)
def test_swapped_elements_and_other_keys_show(seed, key):
    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert not torch.equal(pk.digest(tensor, key), pk.digest(tensor[[1, 0, 2]], key))
    assert not torch.equal(pk.digest(tensor, key), pk.digest(tensor, key ^ 1))


@pytest.mark.parametrize("n", [*EDGE_SIZES, 300000])
def test_every_number_of_threads_gives_the_same(n, threads):
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        tensor = random_bits(n, dtype, n)
        assert torch.equal(pk.digest(tensor, 5, 3), reference.digest(tensor, 5, 3))
        changed = altered(tensor, 0.5, n)
        indices, values, old = pk.diff_compact(changed, tensor, return_old=True)
        assert torch.equal(pk.digest_update(pk.digest(tensor, 5), indices, old, values, 5), pk.digest(changed, 5))


def test_many_is_the_digest_of_each():
    tensors = [random_bits(n, dtype, n) for n, dtype in zip([0, 1, 70000, 300], DIFF_DTYPES[:4], strict=True)]
    changed = [altered(tensor, 0.1, 2) for tensor in tensors]
    keys = [0, -1, 2**63 - 1, -(2**63)]
    digests = pk.digest_many(tensors, keys)
    assert all_same_bits(digests, [pk.digest(t, k) for t, k in zip(tensors, keys, strict=True)])
    indices, values, old = pk.diff_compact_many(changed, tensors, return_old=True)
    assert all_same_bits(pk.digest_update_many(digests, indices, old, values, keys), pk.digest_many(changed, keys))
    assert pk.digest_many([], []) == []
    assert pk.digest_update_many([], [], [], [], []) == []


@pytest.mark.parametrize("with_before", [True, False])
def test_a_diff_takes_the_digests_along(threads, with_before):
    sizes = [0, 9, 4096, 200_000, 300, 65, 64]
    old = [random_bits(n, dtype, n) for n, dtype in zip(sizes, DIFF_DTYPES, strict=True)]
    new = [altered(tensor, 0.2, 5) for tensor in old]
    keys = list(range(len(old)))
    index_dtypes = [torch.int32, torch.int64] * 3 + [torch.int32]
    columns = back_end().diff_digest_many(new, old, keys, index_dtypes, with_before)
    for a, b, key, index_dtype, *row in zip(new, old, keys, index_dtypes, *columns, strict=True):
        assert all_same_bits(row[:3], pk.diff_compact(a, b, return_old=True, index_dtype=index_dtype))
        before = pk.digest(b, key)
        assert same_bits(row[3][:2], before if with_before else torch.zeros(2, dtype=torch.int64))
        assert same_bits(row[3][2:], pk.digest(a, key) - before)
