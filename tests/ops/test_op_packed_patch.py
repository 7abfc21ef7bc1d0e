"""apply_packed_patch_ and exchange_packed_patch_: unpacking and applying in one, all of it or nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import DIFF_DTYPES, all_same_bits, random_bits, random_positions, same_bits, seeds, sizes

import pulse_kernels as pk
from pulse_kernels import backends, ops
from pulse_kernels.backends import reference


def case(numel, changes, seed, dtype):
    """(weight, positions, their blob, values)."""
    positions = random_positions(changes, numel, seed)
    values = random_bits(positions.numel(), dtype, seed + 1)
    return random_bits(numel, dtype, seed), positions, pk.pack_indices(positions, numel), values


@given(numel=sizes, changes=st.integers(0, 700), seed=seeds, dtype=st.sampled_from(DIFF_DTYPES))
def test_it_is_unpacking_and_applying(numel, changes, seed, dtype):
    weight, positions, packed, values = case(numel, changes, seed, dtype)
    expected, applied, exchanged, by_reference = (weight.clone() for _ in range(4))
    old = pk.exchange_patch_(expected, positions, values)
    assert pk.apply_packed_patch_(applied, packed, values) is None
    assert same_bits(applied, expected)
    assert same_bits(pk.exchange_packed_patch_(exchanged, packed, values), old)
    assert same_bits(exchanged, expected)
    (found,) = reference.exchange_packed_many_([by_reference], [packed], [values], True)
    assert same_bits(found, old)
    assert same_bits(by_reference, expected)
    pk.apply_packed_patch_(exchanged, packed, old)  # the undo
    assert same_bits(exchanged, weight)


def test_a_worked_example():
    weight = torch.zeros(2, 3)
    packed = pk.pack_indices(torch.tensor([1, 5]), 6)
    assert pk.exchange_packed_patch_(weight, packed, torch.tensor([7.0, -0.0])).tolist() == [0, 0]
    assert weight.tolist() == [[0, 7, 0], [0, 0, 0]]
    assert str(weight[1, 2].item()) == "-0.0"


@pytest.mark.parametrize("layout", ["transposed", "sliced", "0-d"])
def test_layouts(layout):
    flat = random_bits(600, torch.bfloat16, 1)
    weight = {"transposed": flat.view(20, 30).t(), "sliced": flat[::2], "0-d": flat[7]}[layout]
    positions = random_positions(40, weight.numel(), 2)
    values, packed = random_bits(positions.numel(), torch.bfloat16, 3), pk.pack_indices(positions, weight.numel())
    expected = weight.clone().contiguous()
    old = pk.exchange_patch_(expected, positions, values)
    assert same_bits(pk.exchange_packed_patch_(weight, packed, values), old)
    assert torch.equal(weight.contiguous().view(torch.int16), expected.view(torch.int16))


def test_many_is_each_in_turn():
    cases = [case(n, n // 3 + 1, n, dtype) for n, dtype in zip([0, 1, 70000, 300], DIFF_DTYPES[:4], strict=True)]
    weights, positions, packed, values = (list(column) for column in zip(*cases, strict=True))
    expected = [weight.clone() for weight in weights]
    old = pk.exchange_patch_many_(expected, positions, values)
    applied, exchanged = ([weight.clone() for weight in weights] for _ in range(2))
    assert pk.apply_packed_patch_many_(applied, packed, values) is None
    assert all_same_bits(applied, expected)
    assert all_same_bits(pk.exchange_packed_patch_many_(exchanged, packed, values), old)
    assert all_same_bits(exchanged, expected)
    by_reference = [weight.clone() for weight in weights]
    kept = reference.exchange_packed_many_(by_reference, packed, values, False)
    assert [(item.numel(), item.dtype) for item in kept] == [(0, value.dtype) for value in values]
    assert all_same_bits(by_reference, expected)
    pk.apply_packed_patch_many_([], [], [])
    assert pk.exchange_packed_patch_many_([], [], []) == []


def damages():
    """(name, blob): each is refused for a weight of 3000 elements with as many values as ``case`` makes."""
    _, positions, packed, _ = case(3000, 500, 5, torch.float32)
    yield "empty", packed[:0]
    yield "cut", packed[:-1]
    yield "longer", torch.cat([packed, packed[:1]])
    yield "another numel", pk.pack_indices(positions, 3001)
    yield "fewer indices", pk.pack_indices(positions[:-1], 3000)
    for at in (0, 4, 8, 16, 24, 32, 40, packed.numel() // 2, packed.numel() - 1):
        broken = packed.clone()
        broken[at] ^= 0xFF
        yield f"byte {at}", broken


@pytest.mark.parametrize(("name", "blob"), list(damages()), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("implementation", ["operator", "reference"])
def test_a_hostile_blob_changes_nothing(name, blob, implementation):
    """Not the weight it is for, and not those before it in the list."""
    weights, _, packed, values = zip(*(case(3000, 500, seed, torch.float32) for seed in (4, 5)), strict=True)
    before = [weight.clone() for weight in weights]
    call = pk.exchange_packed_patch_many_
    if implementation == "reference":
        call = functools.partial(reference.exchange_packed_many_, keep_old=True)
    with pytest.raises(pk.PatchFormatError, match="packed indices"):
        call(list(weights), [packed[0], blob], list(values))
    if implementation == "operator":
        with pytest.raises(pk.PatchFormatError, match="packed indices"):
            pk.apply_packed_patch_(weights[1], blob, values[1])
    assert all_same_bits(weights, before)


def test_bad_arguments_change_nothing():
    weight, _, packed, values = case(300, 50, 1, torch.float32)
    other = weight.clone()
    wrong = [
        (TypeError, "packed is int32, expected uint8", (weight, packed.int(), values)),
        (ValueError, "packed has 2 dimensions", (weight, packed.view(1, -1), values)),
        (TypeError, "values is float16, expected float32", (weight, packed, values.half())),
        (ValueError, "values has 2 dimensions", (weight, packed, values.view(1, -1))),
        (pk.PatchFormatError, "values for a weight of 300 elements", (weight, packed, values[:-1])),
        (pk.PatchFormatError, "300 elements, but there are", (weight[:299], packed, values)),
        (ValueError, "share memory", (weight[:1].expand(300), packed, values)),
        (TypeError, "1, 2, 4 or 8 bytes", (weight.to(torch.complex128), packed, values.to(torch.complex128))),
        (ValueError, "move them to one device", (weight, packed.to("meta"), values)),
    ]
    for error, match, row in wrong:
        for call in (pk.apply_packed_patch_, pk.exchange_packed_patch_):
            with pytest.raises(error, match=match):
                call(*row)
        for call in (pk.apply_packed_patch_many_, pk.exchange_packed_patch_many_):
            with pytest.raises(error, match=match):
                call(*([good, bad] for good, bad in zip((weight, packed, values), row, strict=True)))
    with pytest.raises(ValueError, match="1 weights and 2 packed"):
        pk.apply_packed_patch_many_([weight], [packed] * 2, [values])
    assert same_bits(weight, other)


def test_overlapping_memory_is_worked_through_in_order():
    """Tied weights, and values that lie in a weight: each row reads what was there before it."""
    flat = random_bits(300, torch.float32, 1)
    rows = [case(300, 50, seed, torch.float32) for seed in (2, 3)]
    expected = flat.clone()
    old = [pk.exchange_patch_(expected, positions, values) for _, positions, _, values in rows]
    found = pk.exchange_packed_patch_many_([flat, flat], [row[2] for row in rows], [row[3] for row in rows])
    assert all_same_bits(found, old)
    assert same_bits(flat, expected)

    shift = torch.arange(1, 10)
    expected[1:10] = flat[:9].clone()
    pk.apply_packed_patch_(flat, pk.pack_indices(shift, 300), flat[:9])
    assert same_bits(flat, expected)


def test_a_fused_back_end_is_asked_once_and_only_for_what_it_can(monkeypatch):
    """Contiguous weights that nothing overlaps; the others are unpacked first. The stand-in is the oracle."""
    asked, real = [], backends.for_device("cpu")

    class Fused:
        names = ("cuda", "reference")

        def __getattr__(self, name):
            return getattr(real, name)

        def exchange_packed_many_(self, weights, packed, values, keep_old):
            asked.append((len(weights), keep_old))
            return reference.exchange_packed_many_(weights, packed, values, keep_old)

    monkeypatch.setattr(ops.backends, "for_device", lambda _: Fused())
    rows = [case(300, 50, seed, torch.float32) for seed in (2, 3)]
    weights, positions, packed, values = (list(column) for column in zip(*rows, strict=True))
    expected = [weight.clone() for weight in weights]
    old = pk.exchange_patch_many_(expected, positions, values)
    assert all_same_bits(pk.exchange_packed_patch_many_(weights, packed, values), old)
    assert all_same_bits(weights, expected)
    assert asked == [(2, True)]
    pk.apply_packed_patch_(weights[0], packed[1], values[1])
    assert asked == [(2, True), (1, False)]
    strided = torch.zeros(600)[::2]
    pk.apply_packed_patch_(strided, packed[0], values[0])
    pk.apply_packed_patch_many_([weights[0], weights[0]], packed, values)
    assert asked == [(2, True), (1, False)]
    assert same_bits(strided[positions[0]], values[0])
    assert same_bits(weights[0][positions[1]], values[1])


def test_autograd_is_told_of_the_write():
    weight, _, packed, values = case(300, 50, 1, torch.float32)
    version = weight._version
    pk.apply_packed_patch_(weight, packed, values)
    assert weight._version > version
