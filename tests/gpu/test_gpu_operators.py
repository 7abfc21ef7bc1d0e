"""Every operator on the device against the oracle on the CPU: hard values, random bits, edges of tiles, all layouts."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import (
    DIFF_DTYPES,
    DRY_RUN,
    GATE_DTYPES,
    LAYOUTS,
    SIZES,
    all_same_bits,
    altered,
    int_bits,
    laid,
    random_bits,
    random_positions,
    same_bits,
)
from hard_values import NANS, NUMBERS, alone_in_every_lane, full_cycle, in_every_lane, patterns

import pulse_kernels as pk
from pulse_kernels import backends
from pulse_kernels.backends import reference

pytestmark = pytest.mark.gpu

KEY = 0x0123456789ABCDEF
SOME_DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]  # one a size
KINDS = ["gate-bfloat16", "gate-float16", *(f"diff-{str(dtype).removeprefix('torch.')}" for dtype in DIFF_DTYPES)]
# The interpreter is slow: there every layout with one kind, and every kind with one layout.
CASES = [
    (kind, size, layout)
    for kind in KINDS
    for size in SIZES
    for layout in LAYOUTS
    if not DRY_RUN
    or (kind == KINDS[0] and (size == 300 or layout == "whole"))
    or (size == 300 and layout == "misaligned")
]


def compaction(kind, size, seed=5):
    """(operator, source, target) on the CPU."""
    name, dtype = kind.split("-")
    dtype = getattr(torch, dtype)
    if name == "gate":
        source = random_bits(size, torch.float32, seed)
        return "gate_compact", source, altered(reference.round_bits(source, dtype).view(dtype), 0.03, seed)
    target = random_bits(size, dtype, seed)
    return "diff_compact", altered(target, 0.03, seed), target


def test_the_fused_kernels_compute(device):
    """Otherwise this folder would test the oracle against itself."""
    assert backends.for_device(device.type).names[0] == "triton"


# ---- gate and compaction ----


@pytest.mark.parametrize(("kind", "size", "layout"), CASES)
def test_compaction(device, kind, size, layout):
    op, source, target = compaction(kind, size)
    for update in (False, True):
        expected_target = target.clone()
        expected = reference.compact(op, source, expected_target, torch.int32, update)
        weight = laid(target, layout, device)
        found = getattr(pk, op)(laid(source, layout, device), weight, update=update, return_old=True)
        assert all_same_bits(found, expected)
        assert same_bits(weight, expected_target)
        assert expected[0].numel() or not size


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_any_density(device, density, index_dtype):
    target = random_bits(3000 if DRY_RUN else 100_001, torch.bfloat16, 1)
    source = altered(target, density, 2)
    expected = reference.compact("diff_compact", source, target, index_dtype, False)
    found = pk.diff_compact(source.to(device), target.to(device), return_old=True, index_dtype=index_dtype)
    assert all_same_bits(found, expected)


@pytest.mark.parametrize("dtype", GATE_DTYPES)
@pytest.mark.parametrize("laid_out", ["cycle", "alone"])
def test_hard_values(device, dtype, laid_out):
    """Each in every lane: nothing changes where the weight has the bits worked out by hand, all where it has others."""
    rows = [*NUMBERS, *NANS]
    if laid_out == "cycle":
        master, rounded = in_every_lane(rows, dtype, full_cycle(rows))
    else:
        master, rounded = alone_in_every_lane(rows[:1] if DRY_RUN else rows, dtype)
    others = (int_bits(rounded) ^ 1).view(dtype)
    assert pk.gate_compact(master.to(device), rounded.to(device))[0].numel() == 0
    assert not pk.visibility_mask(master.to(device), rounded.to(device)).any()
    weight = others.to(device)
    indices, values = pk.gate_compact(master.to(device), weight, update=True)
    assert torch.equal(indices.cpu(), torch.arange(len(master), dtype=torch.int32))
    assert same_bits(values, rounded)
    assert same_bits(weight, rounded)


def test_diff_compares_bits(device):
    old = patterns([0x0000, 0x8000, 0x7FC0, 0x7FC0, 0x7F80], torch.bfloat16).to(device)
    new = patterns([0x8000, 0x8000, 0x7FC0, 0x7FC1, 0x7F80], torch.bfloat16).to(device)
    assert pk.diff_compact(new, old)[0].tolist() == [0, 3]


@pytest.mark.parametrize("update", [False, True])
def test_many_of_mixed_kinds(device, update):
    """Empty, tiny, misaligned, strided and repeated sizes; both dtypes of the gate in one call."""
    sizes = [0, 1, 300, 8193, 64] if DRY_RUN else [*SIZES, 5, 5, 40_000]
    rows = [compaction(KINDS[k % 2], size, seed=k) for k, size in enumerate(sizes)]
    expected_targets = [target.clone() for _, _, target in rows]
    expected = [
        reference.compact("gate_compact", source, weight, torch.int32, update)
        for (_, source, _), weight in zip(rows, expected_targets, strict=True)
    ]
    masters = [laid(source, LAYOUTS[k % 3], device) for k, (_, source, _) in enumerate(rows)]
    weights = [laid(target, LAYOUTS[k // 2 % 2], device) for k, (_, _, target) in enumerate(rows)]
    found = pk.gate_compact_many(masters, weights, update=update, return_old=True)
    for k, row in enumerate(expected):
        assert all_same_bits([column[k] for column in found], row)
    assert all_same_bits(weights, expected_targets)
    masks = pk.visibility_mask_many(masters, [target.to(device) for _, _, target in rows])
    for mask, row in zip(masks, expected, strict=True):
        assert torch.equal(mask.nonzero().squeeze(1).int().cpu(), row[0])


def test_many_of_mixed_dtypes(device):
    rows = [compaction(kind, 300, seed=k) for k, kind in enumerate(KINDS[2:])]
    found = pk.diff_compact_many([row[1].to(device) for row in rows], [row[2].to(device) for row in rows])
    for k, (op, source, target) in enumerate(rows):
        expected = reference.compact(op, source, target, torch.int32, False)
        assert all_same_bits([column[k] for column in found], expected[:2])


def test_a_matrix_and_its_transpose(device):
    source = torch.arange(600.0).view(20, 30)
    weight = torch.zeros(30, 20, dtype=torch.bfloat16, device=device).t()
    indices, values = pk.gate_compact(source.to(device), weight, update=True)
    assert indices.tolist() == list(range(1, 600))
    assert same_bits(weight.contiguous(), source.bfloat16())
    assert same_bits(values, source.bfloat16().flatten()[1:])


# ---- the caller's buffers ----


def buffers(capacity, dtype, device, index_dtype=torch.int32):
    indices = torch.full((capacity,), -7, dtype=index_dtype, device=device)
    values = torch.zeros(capacity, dtype=dtype, device=device)
    return indices, values, torch.full((1,), -7, device=device), values.clone()


@pytest.mark.parametrize("kind", ["gate-bfloat16", "diff-float32"])
@pytest.mark.parametrize("layout", ["whole", "strided"])
@pytest.mark.parametrize("spare", [0, 100, -1])
def test_out_forms(device, kind, layout, spare):
    """Exactly full, with room to spare, and one too small: then the weight stays as it was, and count says what for."""
    op, source, target = compaction(kind, 3000 if DRY_RUN else 200_003)
    for update in (False, True):
        expected_target = target.clone()
        expected = reference.compact(op, source, expected_target, torch.int32, update)
        needed, weight = expected[0].numel(), laid(target, layout, device)
        indices, values, count, old_values = buffers(needed + spare, target.dtype, device)
        call = getattr(pk, f"{op}_out")
        call(source.to(device), weight, indices, values, count, update=update, old_values=old_values)
        assert count.tolist() == [needed]
        if spare < 0:
            assert same_bits(weight, target)
        else:
            assert all_same_bits([buffer[:needed] for buffer in (indices, values, old_values)], expected)
            assert same_bits(weight, expected_target)
            assert indices[needed:].tolist() == [-7] * spare


# ---- PULSELoCo's gate ----


@pytest.mark.parametrize("size", [300] if DRY_RUN else SIZES)
@pytest.mark.parametrize("layout", LAYOUTS[1:2] if DRY_RUN else LAYOUTS)
def test_residual(device, size, layout):
    """Any bits: the pending pseudo-gradient of NaNs and infinities too."""
    tensors = [random_bits(size, torch.float32, seed) for seed in (1, 2, 3)]
    tensors[1][::2], tensors[2][::2] = tensors[0][::2], 0  # half of them unmoved
    for view in GATE_DTYPES:
        expected = reference.gate_residual_many(*([t] for t in tensors), view, [torch.int32])
        moved = [laid(tensor, layout, device) for tensor in tensors]
        indices, values = pk.gate_residual(*moved, view=view)
        assert all_same_bits([indices, values], [expected[0][0], expected[1][0]])
    after = tensors[2].clone()
    reference.commit_residual_(*tensors[:2], after, indices.cpu())
    pk.commit_residual_(*moved, indices)
    assert same_bits(moved[2], after)


def test_residuals_of_many(device):
    sizes = [0, 5, 300] if DRY_RUN else SIZES[:-1]
    rows = [[random_bits(size, torch.float32, 10 * k + seed) for seed in range(3)] for k, size in enumerate(sizes)]
    columns = [[row[k].to(device) for row in rows] for k in range(3)]
    expected = reference.gate_residual_many(
        *([row[k] for row in rows] for k in range(3)), torch.bfloat16, [torch.int32] * len(sizes)
    )
    indices, values = pk.gate_residual_many(*columns)
    assert all_same_bits(indices, expected[0])
    assert all_same_bits(values, expected[1])
    for row, index in zip(rows, expected[0], strict=True):
        reference.commit_residual_(*row, index)
    pk.commit_residual_many_(*columns, indices)
    assert all_same_bits(columns[2], [row[2] for row in rows])


# ---- patches ----


@pytest.mark.parametrize("dtype", SOME_DTYPES[1:2] if DRY_RUN else SOME_DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_apply_and_exchange(device, dtype, index_dtype, layout):
    numel = 3000 if DRY_RUN else 500_009
    before, positions = random_bits(numel, dtype, 1), random_positions(numel // 20, numel, 2, index_dtype)
    values = random_bits(len(positions), dtype, 3)
    expected = before.clone()
    old = reference.exchange_patch_(expected, positions, values)
    weight = laid(before, layout, device)
    pk.apply_patch_(weight, positions.to(device), values.to(device))
    assert same_bits(weight, expected)
    weight = laid(before, layout, device)
    found = pk.exchange_patch_(weight, laid(positions, layout, device), laid(values, layout, device))
    assert same_bits(found, old)
    assert same_bits(weight, expected)
    pk.apply_patch_(weight, positions.to(device), found, check=False)
    assert same_bits(weight, before)


def test_patches_of_many(device):
    """Other dtypes, index dtypes and counts in one call; one of them empty."""
    rows = []
    for k, (dtype, count) in enumerate(zip(DIFF_DTYPES, [0, 1, 50, 1025, 300, 7, 1024], strict=True)):
        before = random_bits(5000, dtype, k)
        positions = random_positions(count, 5000, k, (torch.int32, torch.int64)[k % 2])
        rows.append((before, positions, random_bits(len(positions), dtype, k + 50)))
    weights, indices, values = ([row[k].to(device, copy=True) for row in rows] for k in range(3))
    old = pk.exchange_patch_many_(weights, indices, values)
    for (before, positions, new), weight, overwritten in zip(rows, weights, old, strict=True):
        expected = before.clone()
        assert same_bits(overwritten, reference.exchange_patch_(expected, positions, new))
        assert same_bits(weight, expected)
    pk.apply_patch_many_(weights, indices, old)
    assert all_same_bits(weights, [row[0] for row in rows])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0, 5, 5, 9], r"indices\[2\] is 5 after 5"),
        ([0, 9, 8, 7], r"indices\[2\] is 8 after 9"),
        ([-1, 3], r"indices\[0\] is -1"),
        ([1, 4000], r"indices\[1\] is 4000"),
        ([1, 2**31], r"indices\[1\] is 2147483648"),
        ([1, -(2**40)], r"indices\[1\] is -1099511627776"),
    ],
)
def test_bad_indices_change_nothing(device, bad, message):
    before = random_bits(4000, torch.bfloat16, 1)
    weight, indices = before.to(device), torch.tensor(bad, device=device)
    values = torch.zeros(len(bad), dtype=torch.bfloat16, device=device)
    for call in (pk.apply_patch_, pk.exchange_patch_):
        with pytest.raises(IndexError, match=message):
            call(weight, indices, values)
    assert same_bits(weight, before)


def test_the_first_bad_index_of_many_is_named(device):
    indices = torch.arange(20_000, device=device)
    indices[12_345], indices[17_000] = 3, 4
    weight = torch.zeros(20_000, dtype=torch.uint8, device=device)
    with pytest.raises(IndexError, match=r"indices\[12345\] is 3 after 12344"):
        pk.apply_patch_(weight, indices, torch.ones(20_000, dtype=torch.uint8, device=device))
    assert not weight.any()


# ---- state digest ----


@pytest.mark.parametrize("dtype", SOME_DTYPES[1:2] if DRY_RUN else SOME_DTYPES)
@pytest.mark.parametrize("size", [300] if DRY_RUN else SIZES)
def test_digest(device, dtype, size):
    tensor = random_bits(size, dtype, 9)
    for start, layout in ((0, "whole"), (1, "misaligned"), (255, "strided"), (2**40 + 77, "whole")):
        assert torch.equal(
            pk.digest(laid(tensor, layout, device), KEY, start).cpu(), reference.digest(tensor, KEY, start)
        )


def test_digests_of_many_and_their_updates(device):
    sizes = [0, 1, 300, 5000, 33]
    rows = [random_bits(size, dtype, size) for size, dtype in zip(sizes, DIFF_DTYPES[2:], strict=True)]
    keys = [KEY, -1, 0, 1, -(2**63)]
    digests = pk.digest_many([row.to(device) for row in rows], keys)
    for row, key, found in zip(rows, keys, digests, strict=True):
        assert torch.equal(found.cpu(), reference.digest(row, key, 0))
    after = [altered(row, 0.1, k) for k, row in enumerate(rows)]
    columns = [row.to(device) for row in after], [row.to(device) for row in rows]
    indices, values, old_values = pk.diff_compact_many(*columns, return_old=True)
    updated = pk.digest_update_many(digests, indices, old_values, values, keys)
    for row, key, found in zip(after, keys, updated, strict=True):
        assert torch.equal(found.cpu(), reference.digest(row, key, 0))
