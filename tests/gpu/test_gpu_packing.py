"""Packed indices on the device: the CPU's bytes, their way back, hostile blobs; and the CUDA library's compaction."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import DRY_RUN, GATE_DTYPES, all_same_bits, altered, random_bits, random_positions, same_bits

import pulse_kernels as pk
from pulse_kernels.backends import cuda, native, reference, two_pass

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("packing")]

# Around blocks of 256 and tiles of 8 blocks.
COUNTS = (
    [0, 1, 255, 256, 257, 2047, 2048, 2049] if DRY_RUN else [0, 1, 255, 256, 257, 2047, 2048, 2049, 100_000, 4_000_000]
)
LAST = (1 << 62) - 1


def positions_of(count, seed):
    return random_positions(count, 50 * count + 1, seed, (torch.int32, torch.int64)[seed % 2])


@pytest.mark.parametrize("count", COUNTS)
def test_the_bytes_are_those_of_the_cpu(device, count):
    numel = 50 * count + 1
    for seed in (0, 1):
        positions = positions_of(count, seed)
        blob = pk.pack_indices(positions.to(device), numel)
        assert same_bits(blob, pk.pack_indices(positions, numel))
        if count < 10_000:
            assert same_bits(blob, reference.pack_indices(positions, numel))
        assert torch.equal(pk.unpack_indices(blob).long().cpu(), positions.long())


@pytest.mark.parametrize("width", [0, 1, 7, 8, 31, 32, 33, 53])
def test_every_width(device, width):
    """Up to positions near 2^62, in which a running sum of 32 bits would wrap."""
    gaps = torch.full((400,), (1 << width) - 1) if width < 54 else torch.zeros(400, dtype=torch.int64)
    positions = (gaps + 1).cumsum(0) - 1
    assert int(positions[-1]) <= LAST
    blob = pk.pack_indices(positions.to(device), LAST + 1)
    assert same_bits(blob, reference.pack_indices(positions, LAST + 1))
    assert torch.equal(pk.unpack_indices(blob).cpu(), positions)


def test_many_at_once(device):
    lists = [positions_of(count, seed) for seed, count in enumerate(COUNTS[:8])]
    numels = [50 * count + 1 for count in COUNTS[:8]]
    blobs = pk.pack_indices_many([positions.to(device) for positions in lists], numels)
    assert all_same_bits(blobs, [reference.pack_indices(*row) for row in zip(lists, numels, strict=True)])
    for dtype in (torch.int32, torch.int64):
        back = pk.unpack_indices_many(blobs, index_dtype=dtype)
        assert all_same_bits(back, [positions.to(dtype) for positions in lists])


def test_a_misaligned_blob(device):
    positions = positions_of(3000, 1)
    blob = pk.pack_indices(positions, 150_001)
    buffer = torch.zeros(len(blob) + 3, dtype=torch.uint8, device=device)
    buffer[3:] = blob.to(device)
    assert torch.equal(pk.unpack_indices(buffer[3:]).long().cpu(), positions.long())


def outcome(blob):
    """The positions, or that it was refused."""
    try:
        return pk.unpack_indices(blob).tolist()
    except pk.PatchFormatError:
        return "refused"


def test_hostile_blobs(device):
    """A byte changed, cut off or appended: refused, or where the bits happen to be a blob, read as the oracle does."""
    blob = pk.pack_indices(positions_of(600, 1), 30_001)
    spoiled = []
    for at in range(0, len(blob), 29 if DRY_RUN else 3):
        for flip in (0x01, 0x80, 0xFF):
            bad = blob.clone()
            bad[at] ^= flip
            spoiled.append(bad)
    spoiled += [blob[:size] for size in (0, 31, 32, len(blob) - 1)]
    spoiled += [torch.cat([blob, blob[:1] * 0]), torch.full_like(blob, 0xFF), torch.zeros_like(blob)]
    refused = 0
    for bad in spoiled:
        try:
            expected = reference.unpack_indices(bad, torch.int64).tolist()
        except pk.PatchFormatError:
            expected, refused = "refused", refused + 1
        assert outcome(bad.to(device)) == expected
    assert refused > len(spoiled) // 2
    assert outcome(blob.to(device)) != "refused"


# ---- the CUDA library's own compaction and its patches ----


@pytest.fixture
def library(device):
    if device.type != "cuda":
        pytest.skip("csrc/cuda computes CUDA tensors only; without a GPU tests/cuda runs its PTX in a simulator")


@pytest.mark.parametrize("update", [False, True])
def test_compaction_through_cub_equals_tritons(device, library, update):
    assert native.cuda_library().loaded
    operators = two_pass.TwoPass(cuda)
    sizes = [0, 1, 8191, 8192, 8193, 3_000_017]
    sources = [random_bits(size, torch.float32, k) for k, size in enumerate(sizes)]
    targets = [
        altered(reference.round_bits(source, GATE_DTYPES[k % 2]).view(GATE_DTYPES[k % 2]), 0.03, k)
        for k, source in enumerate(sources)
    ]
    sources = [source.to(device) for source in sources]
    ours, theirs = ([target.to(device) for target in targets] for _ in range(2))
    found = operators.compact_many("gate_compact", sources, ours, [torch.int32] * len(sizes), update, True)
    expected = pk.gate_compact_many(sources, theirs, update=update, return_old=True)
    for column, other in zip(found, expected, strict=True):
        assert all_same_bits(column, other)
    assert all_same_bits(ours, theirs)
    assert update != same_bits(ours[-1], targets[-1])


def packed_patches(device):
    """(tensors before, after and overwritten values on the CPU; blobs and values on the device)"""
    sizes = (9000, torch.bfloat16), (0, torch.uint8), (700_000 if not DRY_RUN else 4000, torch.float32)
    before = [random_bits(n, dtype, n) for n, dtype in sizes]
    positions = [random_positions(len(tensor) // 20, len(tensor), k) for k, tensor in enumerate(before)]
    values = [random_bits(len(index), tensor.dtype, 9) for index, tensor in zip(positions, before, strict=True)]
    after = [tensor.clone() for tensor in before]
    old = [reference.exchange_patch_(*row) for row in zip(after, positions, values, strict=True)]
    blobs = [pk.pack_indices(index.to(device), len(tensor)) for index, tensor in zip(positions, before, strict=True)]
    return before, after, old, blobs, [value.to(device) for value in values]


def test_patches_from_packed_positions(device):
    before, after, old, blobs, values = packed_patches(device)
    weights = [tensor.to(device, copy=True) for tensor in before]
    assert all_same_bits(pk.exchange_packed_patch_many_(weights, blobs, values), old)
    assert all_same_bits(weights, after)
    for weight, blob, overwritten, tensor in zip(weights, blobs, old, before, strict=True):
        pk.apply_packed_patch_(weight, blob, overwritten.to(device))
        assert same_bits(weight, tensor)


def test_a_bad_blob_among_many_writes_nothing(device):
    before, _, _, blobs, values = packed_patches(device)
    weights = [tensor.to(device, copy=True) for tensor in before]
    for place in (5, 40, len(blobs[2]) - 1):
        bad = blobs[2].clone()
        bad[place] ^= 0x80
        with pytest.raises(pk.PatchFormatError):
            pk.exchange_packed_patch_many_(weights, [*blobs[:2], bad], values)
        assert all_same_bits(weights, before)


def test_the_kernel_that_unpacks_and_writes(device, library):
    before, after, old, blobs, values = packed_patches(device)
    weights = [tensor.to(device) for tensor in before]
    found = cuda.exchange_packed_many_(weights, blobs, values, True)
    assert all_same_bits(found, old)
    assert all_same_bits(weights, after)
