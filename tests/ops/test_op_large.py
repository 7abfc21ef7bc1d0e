"""More than 2^31 elements: a sparse file stands in for the memory, of which a patch touches a few pages."""

from __future__ import annotations

import resource

import pytest
import torch

import pulse_kernels as pk

EXTRA = 70000
NUMEL = 2**31 + EXTRA
POSITIONS = [0, 12345, 2**31 - 1, 2**31, 2**31 + 1, NUMEL - 1]


@pytest.fixture(params=[torch.uint8, torch.bfloat16], ids=["1 byte", "2 bytes"])
def weight(request, tmp_path):
    path = tmp_path / "weight"
    with path.open("wb") as file:
        try:
            file.truncate(NUMEL * request.param.itemsize)
        except OSError as error:
            pytest.skip(f"no sparse files here: {error}")
    yield torch.from_file(str(path), shared=True, size=NUMEL, dtype=request.param)
    path.unlink()


@pytest.fixture(autouse=True)
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024


def test_apply_and_exchange(weight, threads):
    indices = torch.tensor(POSITIONS)
    values = torch.arange(1, 7).to(weight.dtype)
    pk.apply_patch_(weight, indices, values)
    assert [weight[p].item() for p in POSITIONS] == [1, 2, 3, 4, 5, 6]
    assert weight[1].item() == weight[2**31 + 2].item() == 0
    old = pk.exchange_patch_(weight, indices[3:], values[:3])
    assert old.tolist() == [4, 5, 6]
    assert [weight[p].item() for p in POSITIONS] == [1, 2, 3, 1, 2, 3]


def test_int32_indices_reach_the_first_2_to_31(weight):
    indices = torch.tensor(POSITIONS[:3], dtype=torch.int32)
    old = pk.exchange_patch_(weight, indices, torch.ones(3, dtype=weight.dtype))
    assert old.tolist() == [0, 0, 0]
    assert weight[2**31 - 1].item() == 1


def test_strided(weight):
    # Position p of the transpose of [2, n/2] lies at element p // 2 + (p % 2) * n/2.
    transposed = weight.view(2, -1).t()
    pk.apply_patch_(transposed, torch.tensor([1, 2**31, NUMEL - 1]), torch.tensor([1, 2, 3]).to(weight.dtype))
    half = NUMEL // 2
    assert [weight[p].item() for p in (half, 2**30, half - 1 + half)] == [1, 2, 3]


def test_positions_beyond_the_end(weight):
    for wrong in (NUMEL, 2**32, -1):
        positions = sorted([0, wrong])
        bad = positions.index(wrong)
        with pytest.raises(IndexError, match=rf"indices\[{bad}\] is {wrong}, expected 0 <= index < {NUMEL}"):
            pk.apply_patch_(weight, torch.tensor(positions), torch.ones(2, dtype=weight.dtype))
    assert weight[0].item() == 0


def test_packing_needs_no_weight():
    indices = torch.tensor(POSITIONS)
    blob = pk.pack_indices(indices, NUMEL)
    assert torch.equal(pk.unpack_indices(blob), indices)  # int64, because NUMEL asks for it
    assert pk.unpack_indices(blob).dtype is torch.int64


def test_digests_of_far_slices():
    tensor = torch.arange(1000, dtype=torch.int16)
    whole = pk.digest(tensor, 3, NUMEL)
    assert torch.equal(whole, pk.digest(tensor[:300], 3, NUMEL) + pk.digest(tensor[300:], 3, NUMEL + 300))
    zero = torch.zeros(2, dtype=torch.int64)
    moved = pk.digest_update(zero, NUMEL + torch.arange(1000), torch.zeros_like(tensor), tensor, 3)
    assert torch.equal(whole, moved)
