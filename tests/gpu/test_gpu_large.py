"""More than 2^31 elements, and the memory for them: skipped where there is not enough."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import DRY_RUN, needs_memory

import pulse_kernels as pk
from pulse_kernels.backends import reference

pytestmark = pytest.mark.gpu

EDGE = 8192 if DRY_RUN else 2**31
NUMEL = EDGE + 1000
POSITIONS = [0, 5, EDGE // 2, EDGE - 1, EDGE, EDGE + 1, NUMEL - 1]
KEY = 7


@pytest.fixture
def positions(device):
    return torch.tensor(POSITIONS, device=device)


@pytest.fixture
def values(device):
    return torch.arange(1, len(POSITIONS) + 1, device=device).bfloat16()


@pytest.fixture
def weight(device):
    needs_memory(3 * 2 * NUMEL, device)
    return torch.zeros(NUMEL, dtype=torch.bfloat16, device=device)


INDEX_DTYPE = torch.int32 if DRY_RUN else torch.int64


def test_gate(device, weight, positions, values):
    needs_memory(5 * NUMEL, device)
    master = torch.zeros(NUMEL, device=device)
    master[positions] = values.float()
    assert int(pk.visibility_mask(master, weight)[positions].sum()) == len(POSITIONS)
    indices, new = pk.gate_compact(master, weight, update=True)
    assert indices.dtype is INDEX_DTYPE
    assert indices.tolist() == POSITIONS
    assert torch.equal(new, values)
    assert torch.equal(weight[positions], values)
    assert pk.gate_compact(master, weight)[0].numel() == 0


def test_diff_and_many(device, weight, positions, values):
    new = weight.clone()
    pk.apply_patch_(new, positions, values)
    assert torch.equal(new[positions], values)
    small = torch.zeros(3, dtype=torch.bfloat16, device=device)
    indices, found = pk.diff_compact_many([small, new], [small + 1, weight])
    assert indices[0].tolist() == [0, 1, 2]
    assert indices[0].dtype is torch.int32
    assert indices[1].dtype is INDEX_DTYPE
    assert indices[1].tolist() == POSITIONS
    assert torch.equal(found[1], values)


def test_exchange_and_digest(device, weight, positions, values):
    """Of zeros the digest is zero: what was written decides it."""
    assert pk.digest(weight, KEY).tolist() == [0, 0]
    assert pk.exchange_patch_(weight, positions, values).tolist() == [0] * len(POSITIONS)
    change = positions.cpu(), torch.zeros(len(POSITIONS), dtype=torch.bfloat16), values.cpu()
    expected = reference.digest_update(torch.zeros(2, dtype=torch.int64), *change, KEY)
    assert torch.equal(pk.digest(weight, KEY).cpu(), expected)
    assert pk.exchange_patch_(weight, positions, torch.zeros_like(values)).tolist() == values.tolist()
    assert not weight[positions].any()


def test_positions_behind_the_end_are_refused(weight, values):
    bad = torch.tensor([*POSITIONS[:-1], NUMEL], device=weight.device)
    with pytest.raises(IndexError, match=f"is {NUMEL}"):
        pk.apply_patch_(weight, bad, values)
    assert not weight[bad[:-1]].any()


def test_residual(device, positions, values):
    needs_memory(4 * 4 * NUMEL, device)
    theta, local, residual = (torch.zeros(NUMEL, device=device) for _ in range(3))
    local[positions] = -values.float()
    indices, s = pk.gate_residual(theta, local, residual)
    assert indices.tolist() == POSITIONS
    assert torch.equal(s, values.float())
    local[POSITIONS[1] + 1] = 1.0  # fires, but was not sent: stays pending
    pk.commit_residual_(theta, local, residual, indices)
    assert not residual[positions].any()
    assert float(residual[POSITIONS[1] + 1]) == -1.0


def test_packed(device, packing, positions):
    blob = pk.pack_indices(positions, NUMEL)
    assert torch.equal(blob.cpu(), pk.pack_indices(positions.cpu(), NUMEL))
    assert pk.unpack_indices(blob).tolist() == POSITIONS
