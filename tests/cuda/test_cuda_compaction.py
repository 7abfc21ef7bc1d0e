"""backends.cuda's two passes of compaction, their kernels' PTX executed on CPU tensors, against the reference."""

from __future__ import annotations

import pytest
import torch
from hard_values import NANS, NUMBERS, alone_in_every_lane, in_every_lane
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_helpers import (
    DIFF_DTYPES,
    GATE_DTYPES,
    all_same_bits,
    altered,
    densities,
    int_bits,
    random_bits,
    same_bits,
    seeds,
)

from pulse_kernels.backends import cuda, reference, two_pass

pytestmark = pytest.mark.ptx
few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
TILE = two_pass.TILE
EDGES = [0, 1, 31, 32, 33, 1023, 1024, 1025, TILE - 1, TILE, TILE + 1, 2 * TILE]


def assert_compacts(simulated, op, sources, targets, *, update=True, wide=False):
    """compact_many through the kernels gives what the reference gives, in targets too."""
    dtypes = [torch.int64 if wide else torch.int32] * len(targets)
    expected_targets = [target.clone() for target in targets]
    expected = reference.compact_many(op, sources, expected_targets, dtypes, update, True)
    simulated.allow(*sources, *targets)
    found = two_pass.TwoPass(cuda).compact_many(op, sources, targets, dtypes, update, True)
    for mine, theirs in zip(found, expected, strict=True):
        assert all_same_bits(mine, theirs)
    assert all_same_bits(targets, expected_targets)
    return found


def shifted(tensor: torch.Tensor, places: int) -> torch.Tensor:
    """A copy that begins ``places`` elements behind an aligned address."""
    room = torch.empty(tensor.numel() + places + 256, dtype=tensor.dtype)
    room = room[-room.data_ptr() % 256 // tensor.element_size() :]
    copy = room[places : places + tensor.numel()]
    copy.copy_(tensor)
    return copy


@pytest.mark.parametrize("dtype", GATE_DTYPES)
@pytest.mark.parametrize("lay_out", [in_every_lane, alone_in_every_lane])
def test_gate_on_hard_values(simulated, dtype, lay_out):
    rows = [*NUMBERS, *NANS]
    masters, rounded = lay_out(rows, dtype, 3 * TILE) if lay_out is in_every_lane else lay_out(rows, dtype)
    masters = shifted(masters, 0)
    found = assert_compacts(simulated, "gate_compact", [masters], [shifted(rounded, 0)])
    assert found[0][0].numel() == 0  # what FP32 rounds to is worked out by hand there
    assert_compacts(simulated, "gate_compact", [masters], [shifted(rounded.flip(0), 0)])
    assert_compacts(simulated, "gate_compact", [masters], [shifted((int_bits(rounded) ^ 1).view(dtype), 0)])


@pytest.mark.parametrize("dtype", GATE_DTYPES)
def test_gate_of_many_tensors_in_one_launch_a_pass(simulated, dtype):
    masters = [random_bits(4 * n, torch.uint8, n).view(torch.float32) for n in EDGES]
    weights = [reference.round_bits(master, dtype).view(dtype) for master in masters]
    weights = [altered(weight, 0.05, 7) for weight in weights]
    assert_compacts(simulated, "gate_compact", masters, weights, wide=True)
    name = {torch.bfloat16: "gate_bf16", torch.float16: "gate_fp16"}[dtype]
    assert [kernel for kernel, _ in simulated.launches] == [f"pulse_mark_{name}", f"pulse_collect_{name}"]


@pytest.mark.parametrize("dtype", DIFF_DTYPES, ids=str)
@pytest.mark.parametrize("places", [0, 1, 3])
def test_diff_of_every_size_and_alignment(simulated, dtype, places):
    for n, density in [(2 * TILE + 100, 0.02), (TILE, 1.0), (5, 0.5)]:
        old = random_bits(n, dtype, n)
        new = shifted(altered(old, density, n), places)
        assert_compacts(simulated, "diff_compact", [new], [shifted(old, places)])
        assert_compacts(simulated, "diff_compact", [new], [shifted(old, 0)], update=False, wide=True)


@pytest.mark.parametrize("places", [0, 1, 2, 4])
def test_gate_of_misaligned_tensors(simulated, places):
    """Offsets of 1, 2 and 4 elements leave FP32 and BF16 differently aligned."""
    master = random_bits(4 * (TILE + 50), torch.uint8, 3).view(torch.float32)
    weight = altered(reference.round_bits(master, torch.bfloat16).view(torch.bfloat16), 0.1, 4)
    for p, q in [(places, 0), (0, places), (places, places)]:
        assert_compacts(simulated, "gate_compact", [shifted(master, p)], [shifted(weight, q)])


@few
@given(
    sizes=st.lists(st.one_of(st.integers(0, 300), st.sampled_from(EDGES)), min_size=1, max_size=4),
    density=densities,
    dtype=st.sampled_from(GATE_DTYPES),
    update=st.booleans(),
    wide=st.booleans(),
    seed=seeds,
)
def test_random_gates(simulated, sizes, density, dtype, update, wide, seed):
    masters = [random_bits(4 * n, torch.uint8, seed + k).view(torch.float32) for k, n in enumerate(sizes)]
    weights = [reference.round_bits(master, dtype).view(dtype) for master in masters]
    weights = [altered(weight, density, seed) for weight in weights]
    simulated.launches.append(("none", None))  # a run of empty tensors alone launches nothing
    assert_compacts(simulated, "gate_compact", masters, weights, update=update, wide=wide)


@pytest.mark.parametrize("view", GATE_DTYPES)
def test_residual_gate(simulated, view):
    hard = torch.tensor([row[0] for row in [*NUMBERS, *NANS]], dtype=torch.int64).to(torch.uint32).view(torch.float32)
    thetas, locals_, residuals = [], [], []
    for k, n in enumerate([2 * TILE + 31, TILE, 100, 0]):
        generator = torch.Generator().manual_seed(k)
        theta = torch.randn(n, generator=generator)
        local = theta - 2e-3 * torch.randn(n, generator=generator) * theta
        residual = 1e-3 * torch.randn(n, generator=generator) * theta
        for tensor in (theta, local, residual):
            where = torch.rand(n, generator=generator) < 0.3
            picked = hard[torch.randint(0, len(hard), (n,), generator=generator)]
            tensor.copy_(torch.where(where, picked, tensor))
        thetas.append(theta)
        locals_.append(local)
        residuals.append(residual)
    dtypes = [torch.int32] * 4
    expected = reference.gate_residual_many(thetas, locals_, residuals, view, dtypes)
    simulated.allow(*thetas, *locals_, *residuals)
    found = two_pass.TwoPass(cuda).gate_residual_many(thetas, locals_, residuals, view, dtypes)
    assert all_same_bits(found[0], expected[0])
    assert all_same_bits(found[1], expected[1])
    assert 0 < found[0][0].numel() < thetas[0].numel()


@pytest.mark.parametrize("spare", [-1, 0, 5])
def test_too_many_changes_for_the_buffers_change_nothing(simulated, spare):
    master = random_bits(4 * 20000, torch.uint8, 1).view(torch.float32)
    weight = altered(reference.round_bits(master, torch.bfloat16).view(torch.bfloat16), 0.02, 2)
    before = weight.clone()
    changes = reference.visibility_mask(master, weight).count_nonzero()
    capacity = int(changes) + spare
    indices, values = torch.full((capacity,), -1, dtype=torch.int32), torch.zeros(capacity, dtype=torch.bfloat16)
    old, count = values.clone(), torch.zeros(1, dtype=torch.int64)
    simulated.allow(master, weight)
    two_pass.TwoPass(cuda).compact_out("gate_compact", master, weight, indices, values, count, old, True)
    assert int(count) == changes
    expected = before.clone()
    if spare < 0:
        assert (indices == -1).all()
        assert not int_bits(values).any()
    else:
        wanted = reference.compact("gate_compact", master, expected, torch.int32, True)
        for mine, theirs in zip((indices, values, old), wanted, strict=True):
            assert same_bits(mine[: int(changes)], theirs)
        assert (indices[int(changes) :] == -1).all()
    assert same_bits(weight, expected)


def test_the_dense_pass_reads_each_byte_once_and_contiguously(simulated):
    """Counts of the simulator over 64 aligned tiles: no sector asked for twice, and no half-used ones."""
    n = 64 * TILE
    master = shifted(torch.randn(n), 0)
    weight = shifted(master.bfloat16(), 0)
    assert_compacts(simulated, "gate_compact", [master], [weight], update=False)
    (_, stats), *_ = simulated.launches
    assert stats.global_load_bytes == 6 * n
    assert stats.global_load_sectors * 32 == 6 * n
    assert stats.global_store_bytes == n // 8 + 4 * 64
    assert stats.bank_conflict_cycles == 0
